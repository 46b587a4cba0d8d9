"""Assisted decoding behind a filled cache: transformers gives its first pass the whole text, whatever the cache has read."""

import copy

import pytest
import torch

import kvpatch
from kvpatch.arch.upstream import cache_of
from tests.helpers.marks import since
from tests.helpers.running import kept
from tests.helpers.tiny import make, prompt
from tests.helpers.tiny_families import make as family

pytestmark = pytest.mark.usefixtures("no_gradients")
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
DOCUMENT = prompt(1, 40)
WHOLE = torch.cat([DOCUMENT, DOCUMENT[:, 5:14]], 1)


def helped(how, model):
    if how == "lookup":
        return {"prompt_lookup_num_tokens": 3}
    if how == "early exit":
        return {"assistant_early_exit": 1}
    return {"assistant_model": copy.deepcopy(model)}


def filled(patch, model, start):
    if start == "prefix":
        return patch.prefix(DOCUMENT)
    cache = patch.new_cache()
    if start == "second turn":
        model.generate(DOCUMENT, past_key_values=cache, **OPTIONS | {"max_new_tokens": 1})
    else:
        model(DOCUMENT, past_key_values=cache)
    return cache.clone() if start == "clone" else cache


@pytest.mark.parametrize("start", ["prefix", "cache", "clone", "second turn"])
@pytest.mark.parametrize("how", ["lookup", "assistant", "early exit"])
def test_it_reads_what_is_new_and_answers_as_without(how, start):
    """The same tokens, kept positions and columns as one token at a time from the same cache."""
    model = make("llama_gqa")
    given = helped(how, model)
    with kvpatch.patched(model, "h2o", 24) as patch:
        found = []
        for options in ({}, given):
            out = model.generate(
                WHOLE, past_key_values=filled(patch, model, start), return_dict_in_generate=True, **OPTIONS | options
            )
            cache = cache_of(out)
            found.append((out.sequences, cache))
        (plain, want), (sequences, cache) = found
        assert torch.equal(plain, sequences)
        assert cache.get_seq_length() == want.get_seq_length() == 56
        assert torch.equal(cache.ids.ids_BT, sequences[:, :-1])
        for layer in range(2):
            assert torch.equal(cache.positions(layer).sort(-1).values, want.positions(layer).sort(-1).values)
        cache.check_invariants()


@pytest.mark.parametrize("policy", ["snapkv", "keyformer", "tova", "streaming_llm", "window"])
def test_policies(policy):
    model = make("llama_gqa")
    options = {"window": 4} if policy == "snapkv" else {}
    with kvpatch.patched(model, policy, 0.5, **options) as patch:
        prefix = patch.prefix(DOCUMENT)
        plain = model.generate(WHOLE, past_key_values=prefix, **OPTIONS)
        assert torch.equal(plain, model.generate(WHOLE, past_key_values=prefix, prompt_lookup_num_tokens=3, **OPTIONS))


@pytest.mark.parametrize("how", ["lookup", "assistant", "early exit"])
def test_plain_steps_afterwards_are_not_recorded(how):
    """A log of what they overwrite takes memory that nbytes does not count, and turns the fast paths of steps off."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 24) as patch:
        cache, asked = filled(patch, model, "cache"), filled(patch, model, "cache")
        asked.activate_past_recording()
        for one in (cache, asked):
            text = model.generate(WHOLE, past_key_values=one, **OPTIONS | helped(how, model))
            seen = one.get_seq_length()
            one.crop(-2)
            assert one.get_seq_length() == seen - 2
            model.generate(torch.cat([text, WHOLE], 1), past_key_values=one, **OPTIONS)
        assert [len(layer.undo_log) for layer in cache.layers] == [0, 0]
        assert [len(layer.undo_log) for layer in asked.layers] == [7, 7], "the caller asked for it"


@pytest.mark.parametrize("start", ["prefix", "cache"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prompt_lookup_num_tokens": 3},
        pytest.param({"prefill_chunk_size": 4}, marks=since("5.24", "pieces get a mask over the given tokens alone")),
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", ["snapkv", "h2o"])
def test_generate_of_the_class_reads_what_is_new_as_the_model_s(policy, options, start):
    model = make("llama_gqa")
    with kvpatch.patched(model, policy, 0.5, **({"window": 4} if policy == "snapkv" else {})) as patch:
        plain = model.generate(WHOLE, past_key_values=filled(patch, model, start), **OPTIONS)
        found = type(model).generate(model, WHOLE, past_key_values=filled(patch, model, start), **OPTIONS | options)
        assert torch.equal(plain, found)


@since("5.16", "assisted decoding makes a mask over the given tokens alone, which is refused")
def test_new_tokens_alone():
    model, new = make("llama_gqa"), WHOLE[:, 40:]
    mask = torch.ones_like(WHOLE)
    with kvpatch.patched(model, "h2o", 24) as patch:
        prefix = patch.prefix(DOCUMENT)
        plain = model.generate(new, attention_mask=mask, past_key_values=prefix, **OPTIONS)
        found = model.generate(new, attention_mask=mask, past_key_values=prefix, prompt_lookup_num_tokens=3, **OPTIONS)
        assert torch.equal(plain, found)


def test_what_it_cannot_cut_is_refused():
    from kvpatch.hooks import inputs

    call = {"input_ids": WHOLE, "position_ids": torch.arange(49).expand(3, 1, 49), "attention_mask": torch.ones_like(WHOLE)}
    assert inputs.drop_read(call, 40, 49).shape == (1, 9)
    assert call["position_ids"][2, 0].tolist() == list(range(40, 49)) and call["attention_mask"].shape == (1, 49)
    call = {"input_ids": WHOLE, "visual_pos_masks": torch.ones(1, 49)}
    with pytest.raises(kvpatch.KVPatchError, match="visual_pos_masks of this model cannot be cut .*prompt_lookup_num_tokens"):
        inputs.drop_read(call, 40, 49)


@since("5.24", "the library drafts by no multi-token prediction")
@pytest.mark.parametrize("policy", ["h2o", "snapkv"])
def test_multi_token_prediction_drafts_from_the_whole_text(policy, monkeypatch):
    from transformers.modeling_layers import MtpModel

    model = family("deepseek_v3", dtype=torch.float64)
    drafts = MtpModel(model, model.config.num_mtp_layers).double().eval()
    monkeypatch.setattr(MtpModel, "from_pretrained", lambda *args, **kwargs: drafts)
    with kvpatch.patched(model, policy, 0.5) as patch:
        plain, drafted = (model.generate(WHOLE, use_mtp=by, return_dict_in_generate=True, **OPTIONS) for by in (False, True))
        assert torch.equal(plain.sequences, drafted.sequences) and kept(cache_of(plain)) == kept(cache_of(drafted))
        cache = patch.prefix(DOCUMENT).copy()
        with pytest.raises(kvpatch.KVPatchError, match="hidden states of the whole text, of which the cache has read 40"):
            model.generate(WHOLE, past_key_values=cache, use_mtp=True, **OPTIONS)
        got = model.generate(WHOLE, past_key_values=cache, **OPTIONS)
        assert torch.equal(got, model.generate(WHOLE, past_key_values=patch.prefix(DOCUMENT), **OPTIONS))
