"""Scopes: which tokens are protected."""

import pytest
import torch

import kvpatch
from kvpatch import KVPatchError
from kvpatch.policies import scores
from kvpatch.policies.needs import Needs
from kvpatch.policies.scopes import DeviationScope, Scope, protect_tensor
from tests.helpers import tiny


def test_protected_tokens_as_a_tensor():
    assert protect_tensor([True, False]).dtype == torch.bool
    assert protect_tensor([[True], [False]]).shape == (2, 1)
    assert protect_tensor([0, 3]).tolist() == [0, 3]
    for nothing in ([], torch.tensor([], dtype=torch.long), torch.zeros(1, 0, dtype=torch.bool)):
        with pytest.raises(KVPatchError, match="marks nothing: give token ids"):
            protect_tensor(nothing)
    ids = protect_tensor(torch.tensor(5, dtype=torch.int32))
    assert (ids.dtype, ids.tolist()) == (torch.int64, [5])


def _limits(scope, score=scores.Recency(), budget=10, n=30, own=(), fixed=0, rows=30):  # noqa: B008
    return scope.limits(budget, n, own, Needs.of([score]), fixed, rows)


def test_limits_of_a_scope():
    """first, newest, prompt, deviation, observed, nominal; clamped inside the budget in that order."""
    window = scores.ObservationWindow(window=4)
    assert _limits(Scope()) == (0, 0, 0, 0, 0, 0)
    assert _limits(Scope(sinks=4, recent=3)) == (4, 3, 0, 0, 0, 7)
    assert _limits(Scope(sinks=4, recent=0.5)) == (4, 5, 0, 0, 0, 9)
    assert _limits(Scope(sinks=40, recent=5)) == (10, 0, 0, 0, 0, 10)
    assert _limits(Scope(sinks=4, recent=50)) == (4, 6, 0, 0, 0, 10)
    assert _limits(Scope(sinks=4), own=[2, 9, 20]) == (4, 0, 0, 0, 0, 6)
    assert _limits(Scope(sinks=9), own=[2, 9, 20]) == (8, 0, 0, 0, 0, 10)
    assert _limits(Scope(sinks=10), own=[20, 21]) == (8, 0, 0, 0, 0, 10)
    assert _limits(Scope(recent=3), window) == (0, 4, 0, 0, 4, 4)
    assert _limits(Scope(recent=6), window) == (0, 6, 0, 0, 4, 6)
    # a window that would take all takes half, rounded up, of what sinks and protect leave
    assert [_limits(Scope(), window, budget=budget)[4] for budget in range(1, 8)] == [1, 1, 2, 2, 4, 4, 4]
    assert _limits(Scope(sinks=1), window, budget=4) == (1, 2, 0, 0, 2, 3)
    assert _limits(Scope(recent=3), window, budget=4) == (0, 3, 0, 0, 2, 3)
    assert _limits(Scope(), window, rows=2) == (0, 2, 0, 0, 2, 2)
    assert _limits(Scope(sinks=2), scores.Last(), rows=9) == (2, 0, 0, 0, 1, 2)
    # kept outside the budget: what lies below `fixed`
    assert _limits(Scope(sinks=4, recent=3), fixed=12) == (12, 3, 12, 0, 0, 3)
    assert _limits(Scope(sinks=20, recent=9), fixed=12) == (20, 2, 12, 0, 0, 10)
    assert _limits(Scope(sinks=40), fixed=30) == (30, 0, 30, 0, 0, 0)
    assert _limits(Scope(), own=[2, 9, 20], fixed=9) == (9, 0, 9, 0, 0, 2)
    roco = DeviationScope(recent=3, protected=0.5)
    assert _limits(roco) == (0, 3, 0, 5, 0, 8)
    assert _limits(DeviationScope(recent=8, protected=0.5)) == (0, 8, 0, 2, 0, 10)
    _limits(Scope(), own=list(range(10)))
    with pytest.raises(KVPatchError, match="marks 11 tokens of a prompt of 30, but the budget is 10: raise k to at least 11"):
        _limits(Scope(), own=list(range(11)))


@pytest.mark.parametrize("policy", ["snapkv", "adakv", "critical_snapkv", "defensive_snapkv", "dropkv", "chunk_kv"])
@pytest.mark.parametrize("n", [6, 40])
def test_a_short_prompt_keeps_tokens_by_score(policy, n):
    """Half of a budget below the window is chosen by score, in a row of a padded batch too; the first token can stay."""
    model, chosen = tiny.make("llama_gqa"), kvpatch.get_policy(policy)
    with torch.no_grad(), kvpatch.patched(model, chosen, 0.5) as patch:
        cache = patch.new_cache()
        ids = tiny.prompt(2, n)
        model(ids, attention_mask=tiny.left_pad(ids, [n, n - 2]), past_key_values=cache)
    for layer, slots in enumerate(cache.layers):
        budget = cache.settings.tokens(layer, n)
        assert slots.limits.observed[0].item() == (budget + 1) // 2 == slots.limits.newest[0].item()
        held = cache.positions(layer)[0]
        assert (held < n - budget).any(), "the newest tokens alone"
