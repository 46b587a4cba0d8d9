"""The names of transformers that kvpatch leans on, none of which is promised. A failure here names the one that has moved:
mend kvpatch/arch/upstream.py, or the file that the test names."""

import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import (
    AttentionInterface,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LlamaConfig,
    PreTrainedModel,
)

import kvpatch
from kvpatch.arch import upstream
from kvpatch.arch.adapter import REGISTRY
from tests.helpers.tiny import FIVE, make, prompt

NEW = Version(transformers.__version__) >= Version("5.24")


def test_the_cache_has_the_name_of_the_version():
    assert upstream.CACHE == ("cache" if NEW else "past_key_values")


@pytest.mark.parametrize("name", FIVE)
def test_every_forward_on_the_way_takes_the_cache_by_that_name(name):
    model = make(name)
    with kvpatch.patched(model, "h2o", 8) as patch:
        decoder, attention = patch._target.decoder, patch._target.attentions[0][0]
    for module in (model, decoder, attention):
        takes = inspect.signature(type(module).forward).parameters
        own = "layer_past" if "layer_past" in takes else upstream.CACHE
        assert own in takes, f"{type(module).__name__}.forward takes no {own}"


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (GenerationMixin, (upstream.PREPARE_CACHE, "prepare_inputs_for_generation", "_get_candidate_generator")),
        (PreTrainedModel, ("get_input_embeddings", "get_decoder")),
        (AttentionInterface, ("register", "get_interface")),
        (LlamaConfig(), ("_attn_implementation", "_attn_implementation_internal", "get_text_config", "to_json_string")),
        (DynamicCache(config=LlamaConfig()), ("layers", "get_seq_length", "activate_past_recording", "crop")),
        (
            upstream.LinearAttentionLayer(number_of_states=1),
            ("conv_states", "recurrent_states", "conv_kernel_size", "update_conv_state", "update_recurrent_state"),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__) if not isinstance(value, tuple) else "",
)
def test_what_is_used_is_there(owner, names):
    missing = [name for name in names if not hasattr(owner, name)]
    assert not missing, f"{owner!r:.80} has no {', '.join(missing)}"


def test_masks_are_made_from_what_they_were_made_from():
    takes = inspect.signature(upstream.create_masks_for_generate).parameters
    assert {"config", "inputs_embeds", "attention_mask", upstream.CACHE} <= takes.keys()


def test_a_mask_of_ones_that_generate_leaves_out_is_counted():
    config = GenerationConfig()
    config._mask_length = 7
    assert upstream.mask_columns(config) == 7 and upstream.mask_columns(GenerationConfig()) is None
    assert "_mask_length" in inspect.getsource(transformers.generation.utils) or not NEW


def test_generate_takes_its_steps_from_the_model_s_attribute():
    """hooks/generate_steps.py puts a function there; the prompt is a call of the model."""
    steps = inspect.getsource(GenerationMixin._sample)
    assert f"self.{upstream.STEP_CALL}" in steps and "model_forward(**model_inputs" in steps
    assert "self(**model_inputs" in inspect.getsource(GenerationMixin._prefill)


def is_there(qualified):
    """Whether the installed version has a class of a row, found in its source without importing it."""
    home, _, name = qualified.rpartition(".")
    path = Path(transformers.__file__).parent.joinpath(*home.split(".")[1:]).with_suffix(".py")
    return path.is_file() and re.search(rf"^class {name}\b", path.read_text(), re.MULTILINE) is not None


def test_classes_with_a_row_are_there():
    """Of the classes that a row names the installed version has one, unless its whole model is newer than that."""
    models, lost = Path(transformers.__file__).parent / "models", []
    for adapter in {id(one): one for one in REGISTRY.values()}.values():
        own = [one for one in adapter.classes if isinstance(one, str) and one.startswith("transformers.models.")]
        known = [one for one in own if (models / one.split(".")[2]).is_dir()]
        lost += [adapter.name] if known and not any(map(is_there, known)) else []
    assert not lost, f"transformers {transformers.__version__} has no attention class of {', '.join(lost)}"


@pytest.mark.parametrize("name", ["llama_gqa", "gptj", "gpt2"])
@pytest.mark.parametrize("spelling", ["cache", "past_key_values"])
def test_callers_may_use_either_name(name, spelling):
    """Inside the block on every version; the kept tokens and logits are the same."""
    model, ids = make(name), prompt(2, 30)
    with kvpatch.patched(model, "h2o", 12) as patch, torch.no_grad():
        wanted = model.generate(ids, max_new_tokens=4, do_sample=False)
        cache = patch.new_cache()
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, **{spelling: cache}), wanted)
        assert cache.held(1).eq(12).all()
        if spelling == "cache" and not NEW:
            return  # some models' own forwards drop a name that they do not know before the decoder is called
        own = patch.new_cache()
        logits = model(ids, **{spelling: own}).logits
        assert own.held(0).eq(12).all() and torch.equal(logits, model(ids, **{upstream.CACHE: patch.new_cache()}).logits)
        with pytest.raises(kvpatch.KVPatchError, match="It is a DynamicCache|An empty DynamicCache|is a DynamicCache that"):
            model.generate(ids, max_new_tokens=2, **{spelling: DynamicCache(config=model.config)})


@pytest.mark.parametrize("name", FIVE)
def test_a_user_who_wrote_nothing_old_is_warned_of_nothing(name):
    """generate() of several kinds, forwards, a prefix, a block in training: no FutureWarning and no line of transformers'."""
    model, ids = make(name), prompt(2, 30)
    said = {"past_key_values", "cache_params"}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with kvpatch.patched(model, "h2o", 12) as patch:
            model.generate(ids, max_new_tokens=4, do_sample=False)
            model.generate(ids, max_new_tokens=4, do_sample=False, num_beams=2)
            model.generate(ids[:1], max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=2)
            out = model.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
            assert upstream.cache_of(out).held(0).eq(12).all()
            patch.prefix(ids[0, :20])
            with torch.no_grad():
                cache = upstream.cache_of(model(ids))
                model(ids[:, :1], **{upstream.CACHE: cache})
        if name in ("llama_gqa", "mpt"):
            with kvpatch.patched(model.train(), "h2o", 12, block=8):
                model(ids, labels=ids).loss.backward()
    old = [str(one.message) for one in seen if any(word in str(one.message) for word in said)]
    assert not old, old
