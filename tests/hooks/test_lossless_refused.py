"""What does not go with lossless=True is refused in words before anything runs; what needs no cache runs as ever."""

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, SynthIDTextWatermarkingConfig

import kvpatch
from kvpatch.arch.upstream import HYBRIDS, cache_of
from tests.cache import test_hybrid, test_shared_keys
from tests.cache.test_shared_keys import SOURCES
from tests.helpers.tiny import make, prompt

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def generate(model, ids, **options):
    if "generation_config" not in options:
        options = OPTIONS | options
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


BEAMS = GenerationConfig(num_beams=2, **OPTIONS)
LOOKUP = GenerationConfig(prompt_lookup_num_tokens=2, **OPTIONS)
REFUSED = {
    "beams": (lambda model, ids, patch: generate(model, ids, num_beams=2), "leave beams and other searches out"),
    "beams of a configuration": (lambda model, ids, patch: generate(model, ids, generation_config=BEAMS), "leave beams"),
    "contrastive search": (lambda model, ids, patch: generate(model, ids, penalty_alpha=0.6, top_k=4), "leave beams"),
    "layers that are compared": (lambda model, ids, patch: generate(model, ids, dola_layers="low"), "leave beams"),
    "assistant": (
        lambda model, ids, patch: generate(model, ids, assistant_model=make("llama_gqa")),
        "leave assistant_model out",
    ),
    "lookup": (
        lambda model, ids, patch: generate(model, ids, prompt_lookup_num_tokens=3),
        "leave prompt_lookup_num_tokens out",
    ),
    "lookup of a configuration": (lambda model, ids, patch: generate(model, ids, generation_config=LOOKUP), "leave beams"),
    "compiled steps": (lambda model, ids, patch: generate(model, ids, compile_config=object()), "leave compile_config out"),
    "several samples": (
        lambda model, ids, patch: generate(model, ids, do_sample=True, num_return_sequences=2),
        "leave num_return_sequences out",
    ),
    "guidance": (lambda model, ids, patch: generate(model, ids, guidance_scale=1.5), "leave guidance_scale and"),
    "a watermark of all tokens": (
        lambda model, ids, patch: generate(model, ids, watermarking_config=SynthIDTextWatermarkingConfig(3, [3, 5, 7])),
        "SynthIDTextWatermarkLogitsProcessor goes on from one token to the next",
    ),
    "generate() of the class": (
        lambda model, ids, patch: type(model).generate(model, ids, **OPTIONS),
        r"call model.generate\(...\), not its class's",
    ),
    "several texts": (lambda model, ids, patch: generate(model, ids.repeat(2, 1)), "one text a call"),
    "embeddings": (
        lambda model, ids, patch: model.generate(inputs_embeds=model.get_input_embeddings()(ids), **OPTIONS),
        "give input_ids",
    ),
    "offloaded cache": (
        lambda model, ids, patch: generate(model, ids, cache_implementation="offloaded"),
        "kvpatch brings its own",
    ),
    "attention matrices": (lambda model, ids, patch: model(ids, output_attentions=True), "no full attention matrix"),
    "engine": (
        lambda model, ids, patch: model.generate_batch([ids[0].tolist()], generation_config=GenerationConfig(**OPTIONS)),
        "use generate",
    ),
    "graph": (lambda model, ids, patch: patch.graph(model), "leave lossless out to capture"),
    "room": (lambda model, ids, patch: patch.new_cache(room=8), "room= is for steps that are compiled"),
    "rows": (lambda model, ids, patch: cache_of(model(ids)).select_rows(0), "one text at a time.*cache.clone"),
    "joined": (lambda model, ids, patch: cache_of(model(ids)).concatenate([]), "one text at a time"),
    "unread": (lambda model, ids, patch: patch.new_cache().positions(0), "The cache is empty"),
    "no layer": (lambda model, ids, patch: cache_of(model(ids)).held(2), "layer=2: the cache has the layers 0 to 1"),
    "nothing to round": (
        lambda model, ids, patch: kvpatch.patched(make("llama_gqa"), "full", 1.0, bits=8, lossless=True),
        "evicts nothing",
    ),
    "prefix": (lambda model, ids, patch: patch.prefix(ids), "keeps each text's own cache"),
    "compress": (lambda model, ids, patch: patch.compress(DynamicCache()), "give generate.. the prompt itself"),
    "record": (lambda model, ids, patch: patch.record(), "Nothing was recorded"),
    "replace": (lambda model, ids, patch: patch.replace(cache_of(model(ids)), (0, 3), [1]), r"write cache\.crop\(start\)"),
    "pickle": (lambda model, ids, patch: pickle.dumps(cache_of(model(ids))), "This LosslessCache cannot be pickled"),
}


@pytest.mark.every
@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_served_is_refused_and_leaves_the_model_usable(what):
    model, ids = make("llama_gqa"), prompt(1, 20)
    call, said = REFUSED[what]
    want = generate(model, ids)
    with kvpatch.patched(model, "h2o", 0.3, lossless=True) as patch:
        with pytest.raises(kvpatch.KVPatchError, match=said):
            call(model, ids, patch)
        assert torch.equal(generate(model, ids), want)


@pytest.mark.parametrize("kind", [*SOURCES, "hybrid"])
def test_layers_without_a_budget_are_refused(kind):
    if kind == "hybrid" and not HYBRIDS:
        pytest.skip("models of this transformers take states from the cache's layers")
    model = test_hybrid.make() if kind == "hybrid" else test_shared_keys.make(kind)
    with pytest.raises(kvpatch.KVPatchError, match="some layers of this model keep a state, or use the keys of others"):
        kvpatch.patched(model, "h2o", 0.3, lossless=True)


@pytest.mark.parametrize("training", [False, True])
def test_training_is_the_unpatched_model_s(training, caplog):
    """A pass for training makes no cache; one with gradients and a cache has the same loss and the same gradients."""
    model, ids = make("llama_gqa", dtype=torch.float64).train(training), prompt(1, 30)

    def learn():
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        return loss.item(), [one.grad.clone() for one in model.parameters() if one.grad is not None]

    want = learn()
    with kvpatch.patched(model, "h2o", 0.3, lossless=True):
        found = learn()
        free = model(ids, use_cache=False).logits
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(free, model(ids).logits)
    assert not [one for one in caplog.records if "does not act" in one.message], "nothing needs to act"


@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy])
def test_a_copy_is_a_clone(make_copy):
    model, ids, more = make("llama_gqa", dtype=torch.float64), prompt(1, 30), prompt(1, 5, 3)
    with kvpatch.patched(model, "h2o", 0.3, lossless=True):
        cache = cache_of(model(ids))
        twin = make_copy(cache)
        want = model(more, past_key_values=cache).logits
        assert len(twin.ids) == 30 and len(cache.ids) == 35
        torch.testing.assert_close(model(more, past_key_values=twin).logits, want)


def test_nothing_cannot_be_saved(tmp_path):
    with (
        kvpatch.patched(make("llama_gqa"), "h2o", 0.3, lossless=True) as patch,
        pytest.raises(kvpatch.KVPatchError, match="is a NoneType"),
    ):
        patch.save_cache(None, tmp_path / "cache")
