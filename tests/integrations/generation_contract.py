"""What any model that generates does, written without a word about kvpatch: run as it is, and by
tools/reliability/upstream_tests.py with every model patched at k=1.0. test_generation_contract.py runs it both ways."""

import copy
import inspect

import pytest
import torch
from transformers import Cache, DynamicCache, GenerationConfig, GenerationMixin, StaticCache
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from tests.helpers.tiny import FIVE, left_pad, make, prompt

RETURN = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "max_new_tokens": 4,
    "min_new_tokens": 4,
    "pad_token_id": 0,
}
MODES = {
    "greedy": ({}, GenerateDecoderOnlyOutput),
    "sample": ({"do_sample": True}, GenerateDecoderOnlyOutput),
    "beam": ({"num_beams": 3}, GenerateBeamDecoderOnlyOutput),
    "beam_sample": ({"num_beams": 3, "do_sample": True}, GenerateBeamDecoderOnlyOutput),
    "lookup": ({"prompt_lookup_num_tokens": 2}, GenerateDecoderOnlyOutput),
}


@pytest.fixture(params=FIVE)
def model(request):
    return make(request.param)


@pytest.mark.parametrize("mode", MODES)
def test_dict_outputs(model, mode):
    options, kind = MODES[mode]
    ids = prompt(1, 14)
    out = model.generate(ids, **{"do_sample": False, **options}, **RETURN)
    assert type(out) is kind
    assert out.sequences.shape == (1, 18)
    assert len(out.scores) == len(out.logits) == len(out.hidden_states) == 4
    rows = options.get("num_beams", 1)
    assert {tuple(score.shape) for score in (*out.scores, *out.logits)} == {(rows, 97)}
    assert all(len(step) == 3 for step in out.hidden_states)
    assert [step[0].shape[1] for step in out.hidden_states] == [14, 1, 1, 1]
    assert isinstance(out.past_key_values, Cache)
    assert out.past_key_values.get_seq_length() == 17
    assert len(out.past_key_values.layers) == 2
    if mode == "greedy" and getattr(model.config, "sliding_window", None) is None:
        assert all(layer.keys.shape[2] == layer.values.shape[2] == 17 for layer in out.past_key_values.layers)


def test_signatures_are_the_class_s(model):
    model(prompt(1, 3))
    for name in ("forward", "generate", "prepare_inputs_for_generation", "_sample", "generate_batch"):
        bound, plain = inspect.signature(getattr(model, name)), inspect.signature(getattr(type(model), name))
        assert list(bound.parameters) == list(plain.parameters)[1:], name
    assert model.generate.__name__ == "generate"
    assert model.generate.__doc__ == GenerationMixin.generate.__doc__


def test_unused_arguments_are_named(model):
    with pytest.raises(ValueError, match=r"not used by the model: \['attention_maks'\]"):
        model.generate(prompt(1, 5), attention_maks=torch.ones(1, 5), max_new_tokens=2)


def test_configurations_are_left_alone(model):
    config = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0, output_scores=True)
    before, own = copy.deepcopy(config), copy.deepcopy(model.generation_config)
    for _ in range(2):
        model.generate(prompt(2, 9), config)
        model.generate(prompt(2, 9), generation_config=config)
    assert config == before
    assert vars(config) == vars(before)
    assert model.generation_config == own


def test_without_a_cache(model):
    ids, options = prompt(2, 12), {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    out = model.generate(ids, use_cache=False, return_dict_in_generate=True, **options)
    assert out.past_key_values is None
    assert torch.equal(out.sequences, model.generate(ids, **options))
    config = GenerationConfig(use_cache=False, return_dict_in_generate=True, **options)
    assert model.generate(ids, config).past_key_values is None


def test_left_padding(model):
    ids = prompt(1, 12)
    want = model(ids).logits[:, -1]
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1)
    mask = left_pad(padded, [12])
    extra = {} if model.config.model_type == "mpt" else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    torch.testing.assert_close(model(padded, attention_mask=mask, **extra).logits[:, -1], want, atol=1e-4, rtol=0)


def test_from_embeddings(model):
    ids = prompt(2, 12)
    options = {"max_new_tokens": 4, "do_sample": False, **RETURN}
    embeds = model.get_input_embeddings()(ids)
    want = model.generate(ids, **options)
    both, only = model.generate(ids, inputs_embeds=embeds, **options), model.generate(inputs_embeds=embeds, **options)
    assert torch.equal(both.sequences, want.sequences)
    assert torch.equal(only.sequences, want.sequences[:, 12:])
    for one, other in zip(want.scores, only.scores, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    noise = torch.rand_like(embeds)
    assert not torch.equal(model.generate(ids, inputs_embeds=noise, **options).scores[0], want.scores[0])


def test_a_caller_s_own_caches(model):
    """An empty cache is filled; what was generated goes on from what was returned."""
    ids, options = prompt(1, 12), {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    want = model.generate(ids, max_new_tokens=6, **options)
    past = DynamicCache(config=model.config)
    out = model.generate(ids, max_new_tokens=6, past_key_values=past, **options)
    assert torch.equal(out.sequences, want.sequences)
    assert out.past_key_values is past
    assert past.get_seq_length() == 17
    first = model.generate(ids, max_new_tokens=3, **options)
    rest = model.generate(first.sequences, max_new_tokens=3, past_key_values=first.past_key_values, **options)
    assert torch.equal(rest.sequences, want.sequences)
    with pytest.raises((ValueError, TypeError, AttributeError, RuntimeError)):
        model.generate(ids, max_new_tokens=3, past_key_values=((torch.ones(1), torch.ones(1)),))


def test_a_static_cache(model):
    if not model._can_compile_fullgraph:
        pytest.skip("no static cache for it")
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    out = model.generate(prompt(2, 10), cache_implementation="static", **options)
    assert isinstance(out.past_key_values, StaticCache)
    assert torch.equal(out.sequences, model.generate(prompt(2, 10), **options).sequences)
    dynamic = model.generate(prompt(2, 10), cache_implementation="dynamic", **options)
    assert torch.equal(out.sequences, dynamic.sequences)


def test_attentions(model):
    model.set_attn_implementation("eager")
    out = model.generate(prompt(1, 10), output_attentions=True, **{**RETURN, "output_hidden_states": False})
    assert len(out.attentions) == 4
    assert out.attentions[0][0].shape[:3] == (1, 4, 10)
    assert model(prompt(1, 10), output_attentions=True).attentions[1].shape == (1, 4, 10, 10)


def test_inputs_prepared_by_a_third_party(model):
    ids = prompt(1, 10)
    past = model(ids[:, :9], use_cache=True).past_key_values
    inputs = model.prepare_inputs_for_generation(
        ids, past_key_values=past, attention_mask=torch.ones_like(ids), next_sequence_length=1, use_cache=True
    )
    assert inputs["input_ids"].shape == (1, 1)
    torch.testing.assert_close(model(**inputs).logits[:, -1], model(ids).logits[:, -1], atol=1e-4, rtol=0)


def test_under_inference_mode(model):
    ids, options = prompt(1, 10), {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        out = model.generate(ids, **options)
    assert torch.equal(out, model.generate(ids, **options))
