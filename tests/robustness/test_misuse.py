"""Every misuse of misuse.py and misuse_arguments.py: the class and the words of its error, a way out in each, the model bit for
bit as before, and a misused cache that goes on as its untouched clone does."""

import re

import pytest
import torch

import kvpatch
from kvpatch import KVPatchError
from kvpatch.arch.adapter import REGISTRY
from kvpatch.hooks.run_log import RunLog
from kvpatch.policies import POLICIES
from tests.helpers.misuse_world import Misuse, enter
from tests.helpers.tiny import force, make, prompt, snapshot
from tests.robustness.misuse import CACHES, PASSES, PATCHES
from tests.robustness.misuse_arguments import ARGUMENTS
from tests.robustness.test_errors import ARGUMENTS as OF_PATCHED

ROWS = CACHES + PATCHES + PASSES + ARGUMENTS
WAY_OUT = re.compile(
    r"\b(give|use|set|call|run|make|must be|must look|leave|did you mean|drop|pad|choose|takes an?|build|read|let the cache go|"
    r"needs|write \d)\b|(known|have|has): |there is no|cannot be read|is not a share in|does not exist|"
    r"the batch has the rows",
    re.IGNORECASE,
)


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa")


@pytest.fixture(scope="module")
def before(model):
    return snapshot(model), _logits(model), dict(POLICIES), dict(REGISTRY)


def _logits(model):
    with torch.no_grad():
        return model(prompt(2, 12)).logits


def test_misuses_are_many_and_their_names_unique():
    assert len(ROWS) >= 250  # docs/errors.md says so
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_misuse_raises_its_error_and_changes_nothing(row: Misuse, model, before, tmp_path):
    world, stack = enter(model, tmp_path, row.on)
    with stack:
        inside, clone = snapshot(model), world.cache and world.cache.clone()
        with pytest.raises(row.kind) as told:
            row.do(world)
        words = str(told.value)
        assert type(told.value) is row.kind, words
        assert re.search(row.words, words), words
        if row.kind is KVPatchError:
            assert WAY_OUT.search(words), f"says no way out: {words}"
            assert len(words) < 700, "an error is read"
        if clone is not None and row.name != "a pass after remove()":
            assert snapshot(model) == inside
            _goes_on_alike(model, world.cache, clone)
    snapped, logits, policies, adapters = before
    assert snapshot(model) == snapped
    assert torch.equal(_logits(model), logits)
    assert policies == POLICIES
    assert adapters == REGISTRY


def _goes_on_alike(model, cache, clone):
    """Bit for bit: the same logits, tokens kept, and scores."""
    assert cache.get_seq_length() == clone.get_seq_length()
    mine, theirs = (force(model, prompt(2, 1, seed=5), prompt(2, 2, seed=6), cache=one)[0] for one in (cache, clone))
    assert torch.equal(mine, theirs)
    for one, other in zip(cache.layers, clone.layers, strict=True):
        assert torch.equal(one.positions, other.positions)
        assert all(torch.equal(one.state[name], other.state[name]) for name in one.state)


@pytest.mark.parametrize(("arguments", "_words"), OF_PATCHED, ids=[str(a) for a, _ in OF_PATCHED])
def test_arguments_of_patched_say_a_way_out(arguments, _words, model):
    with pytest.raises(KVPatchError) as told:
        kvpatch.patch(model, **{"policy": "keyformer", **arguments})
    assert WAY_OUT.search(str(told.value)), told.value


def test_a_report_that_fails_leaves_no_patch(model, before, monkeypatch):
    """The bug: remove() reported before it undid anything, so an error in it left the model patched."""
    patch = kvpatch.patch(model, "h2o", 0.5)
    _, cache = force(model, prompt(1, 20), prompt(1, 1))
    monkeypatch.setattr(RunLog, "close", lambda log: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        patch.remove()
    assert snapshot(model) == before[0]
    del cache


def test_a_cache_goes_on_under_a_new_patch_of_the_same_settings(model):
    """What belonging.py compares is settings and shapes: leaving the block and coming back is no misuse."""
    fed = prompt(2, 4, seed=2)
    with kvpatch.patched(model, "h2o", 0.5):
        _, cache = force(model, prompt(2, 20), fed[:, :2])
        want, _ = force(model, fed[:, 2:3], fed[:, 3:], cache=cache.clone())
    with kvpatch.patched(model, "h2o", 0.5):
        got, _ = force(model, fed[:, 2:3], fed[:, 3:], cache=cache)
    assert torch.equal(want, got)


def test_a_mask_of_one_row_serves_all(model):
    ids, mask = prompt(2, 20), torch.tensor([[0] * 3 + [1] * 17])
    with kvpatch.patched(model, "h2o", 0.5), torch.no_grad():
        one, all_rows = (model(ids, attention_mask=m).logits for m in (mask, mask.expand(2, -1)))
    assert torch.equal(one, all_rows)
