"""The door: what patched(), patch() and unpatch() take, when they check it, and what they leave."""

import copy
import gc
import inspect
import rlcompleter
import warnings

import numpy as np
import pytest
import torch

import kvpatch
from kvpatch import KVPatchError
from kvpatch.policies.uses import USES
from tests.helpers.tiny import MODELS, MORE, force, make, prompt, snapshot

pytestmark = pytest.mark.usefixtures("no_gradients")


# ---- the policy has no default ----


@pytest.mark.parametrize("door", [kvpatch.patched, kvpatch.patch])
def test_the_policy_must_be_named_and_one_is_listed_for_each_use(door):
    model = make("llama_gqa")
    before = snapshot(model)
    with pytest.raises(KVPatchError, match="needs a policy") as told:
        door(model)
    lines = [line.strip() for line in str(told.value).splitlines() if line.strip().startswith("patched(model")]
    calls = list(dict.fromkeys(use.write_call() for use in USES))
    assert [line.split("  #")[0].rstrip() for line in lines] == calls and snapshot(model) == before
    for line, call in zip(lines, calls, strict=True):
        assert line.endswith(f"# {'; '.join(use.name for use in USES if use.write_call() == call)}")
        with eval(line, {"patched": kvpatch.patched, "model": model}) as patch:  # as it stands there
            assert repr(patch.settings.policy.name)[1:-1] in line


def test_a_missing_policy_does_not_hide_a_slip():
    with pytest.raises(KVPatchError, match=r"no option 'polic'\. Did you mean 'policy'"):
        kvpatch.patched(make("llama_gqa"), polic="h2o")


# ---- the names of the package ----


def test_dir_and_completion_show_the_public_names_alone():
    import kvpatch.storage.save_load  # an inner module, which importing makes an attribute

    for module in (kvpatch, kvpatch.policies):
        shown = dir(module)
        assert set(shown) - {"__version__"} == set(module.__all__) and len(shown) == len(set(shown))
        assert all(getattr(module, name) is not None for name in shown)
    completer = rlcompleter.Completer({"kvpatch": kvpatch})
    typed = {name.removeprefix("kvpatch.").rstrip("()") for name in completer.attr_matches("kvpatch.")}
    assert typed == set(kvpatch.__all__)
    assert [name.rstrip("(") for name in completer.attr_matches("kvpatch.unp")] == ["kvpatch.unpatch"]


def test_an_inner_module_is_found_by_its_name_and_a_slip_is_answered():
    assert kvpatch.policies.statistics.STATISTICS and kvpatch.policies.uses.USES
    with pytest.raises(AttributeError, match=r"has no attribute 'critcal'; public names: POLICIES"):
        kvpatch.policies.critcal  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute '__wrapped__'"):
        kvpatch.policies.__wrapped__  # noqa: B018


# ---- one signature ----


def test_patch_describes_no_argument_again():
    assert inspect.signature(kvpatch.patch).parameters.keys() == inspect.signature(kvpatch.patched).parameters.keys()
    assert "Args:" not in kvpatch.patch.__doc__ and "`patched`" in kvpatch.patch.__doc__


# ---- checked at the call, entered or not ----


@pytest.mark.parametrize(
    ("arguments", "words"), [(("nonsense",), "Unknown policy"), (("h2o", -3), "k=-3"), (("h2o", 0.5), "already patched")]
)
def test_patched_checks_at_the_call(arguments, words):
    model = make("llama_gqa")
    handle = kvpatch.patch(model, "tova") if "already" in words else None
    with pytest.raises(KVPatchError, match=words):
        kvpatch.patched(model, *arguments)
    if handle is not None:
        handle.remove()


def test_a_block_that_is_not_entered_says_what_to_type():
    model = make("llama_gqa")
    before = snapshot(model)
    block = kvpatch.patched(model, "h2o", 0.5)
    assert snapshot(model) == before
    for name in ("report", "new_cache", "remove", "settings"):
        with pytest.raises(KVPatchError, match=rf"with kvpatch\.patched\(model, \.\.\.\) as patch:`, then patch\.{name}"):
            getattr(block, name)
    assert not hasattr(block, "nonsense") and not hasattr(block, "_ipython_display_")
    with pytest.warns(UserWarning, match=r"^\[kvpatch\] patched\(\.\.\.\) was called but its block was never entered"):
        del block


def test_no_warning_of_a_block_that_was_entered_or_refused():
    model = make("llama_gqa")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with kvpatch.patched(model, "h2o", 0.5) as patch:
            pass
        del patch
        with pytest.raises(KVPatchError):
            kvpatch.patched(model, "h2o", -1)
        kvpatch.patch(model, "h2o").remove()
        gc.collect()


def test_a_block_is_entered_once():
    block = kvpatch.patched(make("llama_gqa"), "h2o", 0.5)
    with block, pytest.raises(KVPatchError, match=r"entered before: call kvpatch\.patched"), block:
        pass
    with pytest.raises(KVPatchError, match="entered before"), block:
        pass


# ---- unpatch ----


def own_attributes(model):
    """Names of every module's attributes, and of its hooks."""
    return {
        name: {key: len(value) if "_hooks" in key else type(value) for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }


def inside(thing, seen):
    """Every object that can be reached from the attributes of a model's modules."""
    if id(thing) in seen:
        return
    seen[id(thing)] = thing
    if isinstance(thing, dict):
        for value in thing.values():
            inside(value, seen)
    elif isinstance(thing, list | tuple):
        for value in thing:
            inside(value, seen)
    elif isinstance(thing, torch.nn.Module):
        inside(vars(thing), seen)
    elif hasattr(thing, "__self__"):
        inside(thing.__self__, seen)


@pytest.mark.parametrize("name", [*MODELS, *MORE])
def test_a_copy_made_inside_a_block_is_freed(name):
    model, ids, fed = make(name), prompt(1, 20), prompt(1, 4, seed=2)
    unpatched = own_attributes(copy.deepcopy(model))
    want, _ = force(model, ids, fed)
    with kvpatch.patched(model, "h2o", 0.5):
        model(ids)
        twin = copy.deepcopy(model)
        patched = snapshot(model)
        kvpatch.unpatch(twin)
        assert snapshot(model) == patched, "the original stays patched"
        kvpatch.unpatch(twin)
        assert own_attributes(twin) == unpatched
        assert torch.equal(force(twin, ids, fed)[0], want)
    found = {}
    inside(twin, found)
    assert not [one for one in found.values() if isinstance(one, torch.nn.Module) and one in set(model.modules())]
    with kvpatch.patched(twin, "tova", 0.5) as patch:
        assert twin(ids).past_key_values.settings is patch.settings


def test_a_copy_of_a_model_with_methods_of_its_own_is_freed():
    """accelerate's hook and the user's own generate() belong to the copy afterwards."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model, ids = make("llama_gqa"), prompt(1, 20)
    for layer in model.model.layers:
        add_hook_to_module(layer.self_attn, AlignDevicesHook(execution_device=torch.device("cpu")))
    want = model(ids).logits
    with kvpatch.patched(model, "h2o", 0.5):
        twin = copy.deepcopy(model)
    kvpatch.unpatch(twin)
    attention = twin.model.layers[0].self_attn
    assert attention._old_forward.__self__ is attention and attention._old_forward.__func__ is type(attention).forward
    assert torch.equal(twin(ids).logits, want)


def test_a_model_whose_patch_was_lost_is_freed():
    model = make("llama_gqa")
    before = snapshot(model)
    kvpatch.patch(model, "h2o", 0.5)
    with pytest.raises(KVPatchError, match=r"Patch once, at start.*another thread may hold.*unpatch\(model\) frees"):
        kvpatch.patched(model, "h2o", 0.5)
    kvpatch.unpatch(model)
    assert snapshot(model) == before
    kvpatch.unpatch(model)
    with pytest.raises(KVPatchError, match="takes a model .* not str"):
        kvpatch.unpatch("gpt2")


def test_the_patch_of_a_freed_model_leaves_the_next_one_alone():
    model = make("llama_gqa")
    before = snapshot(model)
    with kvpatch.patched(model, "h2o", 0.5):
        kvpatch.unpatch(model)
        assert snapshot(model) == before
        other = kvpatch.patch(model, "tova", 0.5)
        between = snapshot(model)
    assert snapshot(model) == between
    other.remove()
    assert snapshot(model) == before


# ---- names and budgets as people write them ----


@pytest.mark.parametrize(("written", "meant"), [
    ({"compression_ratio": 0.7}, r"write k=0\.3 for compression_ratio=0\.7, which is the share that is dropped"),
    ({"budget": 0.5}, r"write k=0\.5 for budget=0\.5"),
    ({"ratio": 0.25}, r"write k=0\.25 for ratio=0\.25"),
    ({"max_capacity_prompt": 1024}, r"write k=1024 for max_capacity_prompt=1024"),
    ({"cache_size": None}, r"such as k=0\.5 or k=1024\.$"),
    ({"compression_ratio": 1.7}, r"such as k=0\.5 or k=1024\.$"),
])  # fmt: skip
def test_the_budget_by_the_names_of_other_libraries(written, meant):
    for policy in ({"policy": "h2o"}, {}):
        with pytest.raises(KVPatchError, match=meant):
            kvpatch.patched(make("llama_gqa"), **policy, **written)


@pytest.mark.parametrize("given", ["h2o", "H2O", 0.5])
def test_the_wrong_order_is_answered_in_one_short_sentence(given):
    model = make("llama_gqa")
    with pytest.raises(KVPatchError) as told:
        kvpatch.patched(given, model)
    assert f"patched(model, {given if given != 0.5 else 'policy'!r}, k=0.5)".replace("'policy'", "policy") in str(told.value)
    assert len(str(told.value)) < 120
    with pytest.raises(KVPatchError, match=r"^Unknown policy of type LlamaForCausalLM.*Known: full") as told:
        kvpatch.patched(model, model)
    assert len(str(told.value)) < 500


@pytest.mark.parametrize(("written", "name"), [
    ("SnapKV", "snapkv"), ("H2O", "h2o"), ("StreamingLLM", "streaming_llm"), ("Streaming-LLM", "streaming_llm"),
    ("Ada-KV", "adakv"), ("PyramidKV", "pyramidkv"), ("Keyformer", "keyformer"), ("RoCo", "roco"), ("TOVA", "tova"),
    ("Critical-AdaKV", "critical_adakv"), ("Dilated Window", "dilated_window"),
    ("Critical(Adaptive(RoCo))", "critical_adaptive_roco"),
])  # fmt: skip
def test_policies_by_the_names_of_their_papers(written, name):
    assert kvpatch.get_policy(written).name == name
    with kvpatch.patched(make("llama_gqa"), written) as patch:
        assert patch.settings.policy.name == name


@pytest.mark.parametrize(
    ("written", "meant"), [("Snap-KW", "snapkv"), ("H20", "h2o"), ("RoCko", "roco"), ("STREAMING", "streaming_llm")]
)
def test_a_name_that_is_near_one_is_answered_with_it(written, meant):
    with pytest.raises(KVPatchError, match=rf"Unknown policy '{written}'\. Did you mean '{meant}'\?"):
        kvpatch.get_policy(written)


def test_other_names_in_any_case():
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", positions="Renumbered", schedule="Prompt", backend="Torch") as patch:
        settings = patch.settings
    assert settings.renumbered and settings.policy.schedule == "prompt" and settings.backend == "torch"
    for wrong, meant in (({"positions": "renumberd"}, "renumbered"), ({"schedule": "promt"}, "prompt")):
        with pytest.raises(KVPatchError, match=rf"Did you mean '{meant}'\?"):
            kvpatch.patched(model, "h2o", **wrong)


@pytest.mark.parametrize(("k", "same"), [
    (np.int64(16), 16), (np.float32(0.5), 0.5), (np.array(16), 16), (torch.tensor(16), 16), (torch.tensor(0.5), 0.5),
    ("50%", 0.5), (" 12.5 % ", 0.125), ("100%", 1.0), ("1e-1", 0.1), ("0.5", 0.5), (".5", 0.5), ("16", 16), ("1.0", 1.0),
    (np.array([0.5, 0.25]), [0.5, 0.25]), (torch.tensor([8, 16]), [8, 16]), (["50%", np.int64(3)], [0.5, 3]),
    ((0.5, "7"), [0.5, 7]),
])  # fmt: skip
def test_budgets_as_people_write_them(k, same):
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", k) as patch, kvpatch.patched(make("llama_gqa"), "h2o", same) as other:
        assert patch.settings.budget == other.settings.budget
        assert list(map(type, patch.settings.budget.per_layer)) == list(map(type, other.settings.budget.per_layer))


@pytest.mark.parametrize("k", [
    "150%", "-5%", "%", "0", "0.0", "nan", "inf", "1e3", "9" * 5000, "²", np.bool_(True), torch.tensor(True),
    torch.tensor(1, device="meta"), np.array([[1]]), np.array([0.5]),
])  # fmt: skip
def test_what_is_no_budget_either(k):
    with pytest.raises(KVPatchError, match=r"^k"):
        kvpatch.patched(make("llama_gqa"), "h2o", k)


@pytest.mark.parametrize("k", [1, "1", np.int64(1), [1, 0.5], torch.tensor(1)])
def test_one_token_is_said_to_be_one(k):
    model = make("llama_gqa")
    with pytest.warns(UserWarning, match=r"^\[kvpatch\] k=1 keeps one token per KV head.*k=1\.0 keeps everything") as told:
        kvpatch.patch(model, "window", k).remove()
    assert len(told) == 1


@pytest.mark.parametrize("k", [1.0, "1.0", "100%", 2, 0.01, "256B"])
def test_everything_and_little_are_not(k):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvpatch.patch(make("llama_gqa"), "window", k).remove()
