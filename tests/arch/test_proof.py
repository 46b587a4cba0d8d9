"""A version above the newest tested is served by proof: a tiny twin of the model's class goes through the checks first."""

import logging

import pytest
import torch
import transformers
from torch import nn

import kvpatch
from kvpatch import patching
from kvpatch.arch import proof
from kvpatch.hooks import versions
from kvpatch.hooks.target import Target
from tests.helpers import tiny, tiny_families
from tests.helpers.tiny import prompt, snapshot

FAMILIES = (*tiny.MODELS, *tiny.MORE, *tiny_families.FAMILIES, *tiny_families.OWN)
NEXT = versions._find_next_release(versions.TESTED["transformers"])


def make(name):
    return tiny.make(name) if name in {**tiny.MODELS, **tiny.MORE} else tiny_families.make(name)


@pytest.fixture
def newer(monkeypatch):
    """An installed transformers that is one minor release above the newest tested, in which nothing is proved yet."""
    monkeypatch.setattr(proof, "_PROVED", {})
    monkeypatch.setattr(patching.transformers, "__version__", f"{NEXT}.1")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(2)
def test_the_twin_of_every_family_passes(name):
    target = Target.find(make(name))
    assert proof._find_failure(target.decoder, [module for module, _ in target.attentions]) == ""


def test_it_is_checked_once_and_said_once(newer, monkeypatch, caplog):
    twins = []
    monkeypatch.setattr(proof, "check_twin", lambda twin, run=proof.check_twin: twins.append(type(twin).__name__) or run(twin))
    with caplog.at_level(logging.WARNING, "kvpatch"):
        for name in ("llama_gqa", "llama_gqa", "gpt2"):
            model = make(name)
            with kvpatch.patched(model, "h2o", 8):
                model(prompt(1, 20))
    assert twins == ["LlamaModel", "GPT2Model"]
    said = [record.message for record in caplog.records if "untested" in record.message]
    assert len(said) == 2
    assert f"transformers {NEXT}.1 is newer than {versions.TESTED['transformers']}, the newest tested" in said[0]
    assert "passed the checks, and LlamaModel is served" in said[0]


def test_a_class_that_fails_is_refused_before_the_model_is_touched(newer, monkeypatch):
    model = make("llama_gqa")
    before, logits = snapshot(model), model(prompt(1, 8)).logits
    adapter = Target.find(model).attentions[0][1]
    monkeypatch.setattr(type(adapter), "scale", lambda self, attn: 0.1)
    for _ in range(2):  # the verdict is remembered
        with pytest.raises(kvpatch.KVPatchError) as error:
            kvpatch.patch(model, "h2o", 8)
        words = str(error.value)
        assert words.startswith(f"This is untested: transformers {NEXT}.1 is newer than")
        assert "LlamaModel is not served under it, since its tiny twin fails a check (k=1.0 gives" in words
        assert words.endswith(f"pip install 'transformers<{NEXT}'")
    assert snapshot(model) == before and torch.equal(model(prompt(1, 8)).logits, logits)


def test_an_error_of_a_moved_name_is_the_version_s_before_any_other_guess(newer, monkeypatch):
    model = make("mpt")

    def moved(twin):
        raise AttributeError("'MptAttention' object has no attribute 'Wqkv'")

    monkeypatch.setattr(proof, "check_twin", moved)
    with pytest.raises(kvpatch.KVPatchError, match=r"untested.*its tiny twin does not run \(Attrib.*: pip install"):
        kvpatch.patch(model, "h2o", 8)


def test_a_family_that_is_not_found_names_the_version_first(newer, monkeypatch):
    monkeypatch.setattr("kvpatch.hooks.target.adapter_of", lambda module: None)
    words = rf"^This is untested: transformers {NEXT}.*<{NEXT}' if this worked before\. No"
    with pytest.raises(kvpatch.KVPatchError, match=words):
        kvpatch.patch(make("bloom"), "h2o", 8)


def test_a_patched_model_is_named_as_ever(newer):
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 8), pytest.raises(kvpatch.KVPatchError, match="^This model is already patched"):
        kvpatch.patch(model, "h2o", 8)


def test_without_a_twin_a_large_model_is_refused_and_a_small_one_checked_itself(newer, monkeypatch):
    def no_twin(*_):
        raise ValueError("no such width")

    monkeypatch.setattr(proof, "make_twin", no_twin)
    kvpatch.patch(make("llama_gqa"), "h2o", 8).remove()
    monkeypatch.setattr(proof, "PARAMETERS", 10)
    with pytest.raises(kvpatch.KVPatchError, match=r"no tiny twin of it could be built to check \(ValueError: no such width\)"):
        kvpatch.patch(make("llama_mqa"), "h2o", 8)


def test_torch_is_named_too():
    above = versions._find_next_release(versions.TESTED["torch"])
    said, remedy = versions.find_untested(f"{NEXT}.0", f"{above}.0+cpu")
    assert f"torch {above}.0+cpu is newer than {versions.TESTED['torch']}, the newest tested" in said
    assert remedy == f"pip install 'transformers<{NEXT}' 'torch<{above}'"
    assert versions.find_untested(transformers.__version__, "2.10.0") == ("", "")


def test_nothing_is_checked_under_a_tested_version(monkeypatch):
    monkeypatch.setattr(proof, "check_twin", lambda twin: pytest.fail("a check"))
    kvpatch.patch(make("llama_gqa"), "h2o", 8).remove()


def test_a_decoder_that_is_not_transformers_own_does_not_depend_on_it(monkeypatch):
    monkeypatch.setattr(proof, "check_twin", lambda twin: pytest.fail("a check"))
    proof.prove_class(nn.Linear(2, 2), [], "This is untested", "pip install")
