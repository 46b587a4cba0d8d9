"""The door: what patched(), patch() and unpatch() take, when they check it, and what they leave."""

import copy
import dataclasses
import gc
import inspect
import warnings

import pytest
import torch

import kvpatch
from kvpatch import KVPatchError
from kvpatch.policies import POLICIES
from kvpatch.policies.allocation import Adaptive, Pyramid
from kvpatch.policies.options import PolicyOptions
from kvpatch.policies.scopes import DeviationScope, Scope
from kvpatch.policies.selection import TwoStage
from tests.helpers.tiny import MODELS, MORE, force, make, prompt, snapshot

pytestmark = pytest.mark.usefixtures("no_gradients")


# ---- the policy has no default ----


@pytest.mark.parametrize("door", [kvpatch.patched, kvpatch.patch])
def test_the_policy_must_be_named_and_four_are_listed_by_use(door):
    model = make("llama_gqa")
    before = snapshot(model)
    with pytest.raises(KVPatchError, match="needs a policy") as told:
        door(model)
    lines = [line.strip() for line in str(told.value).splitlines() if line.strip().startswith("patched(model")]
    assert len(lines) == 4 and snapshot(model) == before
    for line in lines:
        with eval(line, {"patched": kvpatch.patched, "model": model}) as patch:  # as it stands there
            assert repr(patch.settings.policy.name)[1:-1] in line


def test_a_missing_policy_does_not_hide_a_slip():
    with pytest.raises(KVPatchError, match=r"no option 'polic'\. Did you mean 'policy'"):
        kvpatch.patched(make("llama_gqa"), polic="h2o")


# ---- one signature ----


def test_the_types_know_every_option_of_the_policies():
    parts = {type(part) for policy in POLICIES.values() for part in policy._parts()}
    parts |= {Scope, DeviationScope, TwoStage, Adaptive, Pyramid}
    fields = {field.name for part in parts for field in dataclasses.fields(part)}
    assert set(PolicyOptions.__annotations__) == fields
    for name in fields:
        assert f"        {name}: " in PolicyOptions.__doc__


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
