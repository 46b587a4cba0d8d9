"""Law 3: between steps a head holds its budget at most, of unique and real positions, protected tokens among them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpatch
from kvpatch.cache.layer import SlotLayer
from tests.helpers.comparing import EVICTING, ONCE, WINDOWED, combined
from tests.helpers.running import SEVERAL, kept, logits_of, run
from tests.helpers.tiny import FIVE, left_pad, make, prompt


@pytest.mark.parametrize("policy", EVICTING)
def test_budget_positions_and_protection_after_every_step(policy):
    model, ids, fed = make("llama_gqa"), prompt(2, 40), prompt(2, 10, seed=2)
    lengths = [40, 26]
    mask = left_pad(ids, lengths)
    options = {"window": 6} if policy in WINDOWED else {}
    generated_stay = policy in ONCE
    with kvpatch.patched(model, policy, 0.3, sinks=2, **options), torch.no_grad():
        past = None
        for t in range(10):
            new = ids if t == 0 else fed[:, t - 1 : t]
            out = model(new, attention_mask=mask, past_key_values=past, use_cache=True)
            past = out.past_key_values
            mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
            for layer in range(2):
                for row, n in enumerate(lengths):
                    uniform = kvpatch.get_policy(policy).over_heads is None and "pyramid" not in policy
                    for head in kept(past)[layer][row]:
                        assert not uniform or len(head) == int(0.3 * n) + (t if generated_stay else 0)
                        assert len(set(head)) == len(head)
                        assert 0 <= min(head)
                        assert max(head) < n + t
                        assert {0, 1} <= set(head)
            for row, n in enumerate(lengths):
                assert sum(past.held(layer)[row].sum() for layer in range(2)) == 4 * (
                    int(0.3 * n) + (t if generated_stay else 0)
                )
            assert past.get_seq_length() == 40 + t


@settings(max_examples=40)
@given(
    n=st.integers(1, 40),
    steps=st.integers(0, 6),
    k=st.one_of(st.floats(0.01, 0.99), st.integers(1, 60)),
    policy=st.sampled_from(("full", *EVICTING)),
    name=st.sampled_from(FIVE),
    sinks=st.integers(0, 8),
    pad=st.integers(0, 12),
)
def test_any_shape_and_budget_holds_what_it_should(n, steps, k, policy, name, sinks, pad):
    model = make(name)
    ids, fed = prompt(2, n + pad), prompt(2, steps, seed=2)
    lengths = [n + pad, n]
    logits, cache = run(model, ids, fed, policy, k, left_pad(ids, lengths), sinks=sinks)
    assert torch.isfinite(logits).all()
    for row, length in enumerate(lengths):
        budget = max(1, int(k * length + 1e-6)) if isinstance(k, float) else k
        want = min(budget, length) + (steps if policy in ONCE else min(steps, max(budget - length, 0)))
        if policy == "full":
            want = length + steps
        held = torch.stack([cache.held(layer)[row] for layer in range(2)])
        assert held.sum() == held.numel() * want
        if policy in kvpatch.list_policies() and kvpatch.get_policy(policy).over_heads is None and "pyramid" not in policy:
            assert held.unique().tolist() == [want]


@pytest.mark.parametrize("schedule", ["prompt", "decode", "both"])
@pytest.mark.parametrize("policy", SEVERAL)
def test_schedules(policy, schedule):
    model, ids, fed = make("llama_gqa"), prompt(2, 30), prompt(2, 20, seed=2)
    _, cache = run(model, ids, fed, policy, 0.4, schedule=schedule)
    want = {"prompt": 12 + 20, "decode": 30 + 12, "both": 12}[schedule]
    assert cache.held(0).tolist() == [[want] * 2] * 2
    for head in kept(cache)[0][0]:
        if schedule == "decode":
            assert set(range(30)) <= set(head)
        if schedule == "prompt":
            assert set(range(30, 50)) <= set(head)


def test_budgets_of_every_kind():
    model, ids, fed = make("llama_gqa"), prompt(1, 100), prompt(1, 3, seed=2)
    per_token = 2 * 2 * 8 * 4  # keys and values, two heads of eight float32
    cases = [
        (0.29, [29, 29]),
        (17, [17, 17]),
        (1, [1, 1]),
        (0.001, [1, 1]),
        ([0.5, 10], [50, 10]),
        (f"{per_token * 2 * 25 + 1}B", [25, 25]),
        ([f"{per_token * 7}B", 1.0], [7, 103]),
        (1.0, [103, 103]),
    ]
    for k, want in cases:
        _, cache = run(model, ids, fed, "h2o", k)
        assert [cache.held(layer).unique().tolist() for layer in range(2)] == [[n] for n in want], k


def test_protected_tokens_stay():
    model, ids, fed = make("llama_gqa"), prompt(2, 30), prompt(2, 12, seed=2)
    marked = torch.zeros(2, 30, dtype=torch.bool)
    marked[0, [3, 9]] = marked[1, [5]] = True
    _, cache = run(model, ids, fed, "window", 8, protect=marked)
    assert all({3, 9} <= set(head) for head in kept(cache)[1][0])
    assert all({5} <= set(head) and len(head) == 8 for head in kept(cache)[1][1])
    token = int(ids[0, 4])
    where = {i for i in range(30) if int(ids[0, i]) == token}
    _, cache = run(model, ids[:1], fed[:1], "h2o", 12, protect=[token])
    assert all(where <= set(head) for head in kept(cache)[0][0])
    with pytest.raises(kvpatch.KVPatchError, match="protect= marks 20 tokens"):
        run(model, ids[:1], fed[:1], "h2o", 12, protect=torch.arange(30) < 20)


def test_a_row_below_its_budget_fills_up_before_it_evicts():
    model, ids, fed = make("llama_gqa"), prompt(2, 20), prompt(2, 16, seed=2)
    lengths = [20, 8]
    _, cache = run(model, ids, fed, "h2o", 15, left_pad(ids, lengths))
    assert cache.held(0).tolist() == [[15, 15], [15, 15]]
    for steps in (3, 7, 8):
        logits, cache = run(model, ids, fed[:, :steps], "h2o", 15, left_pad(ids, lengths))
        alone, one = run(model, ids[1:, 12:], fed[1:, :steps], "h2o", 15)
        torch.testing.assert_close(logits[1:], alone, atol=3e-5, rtol=0)
        assert cache.held(0)[1].tolist() == [min(8 + steps, 15)] * 2
        assert kept(cache)[0][1] == kept(one)[0][0]


@pytest.mark.parametrize("wrap", [(), ("adaptive",), ("critical",), ("pyramid",)], ids=str)
@pytest.mark.parametrize("pads", [(0, 0), (0, 13)], ids=str)
def test_a_head_never_holds_more_than_budget_and_block(wrap, pads, monkeypatch):
    model, ids = make("llama_gqa"), prompt(2, 64)
    held = []

    def append(layer, *args, whole=SlotLayer.append):
        whole(layer, *args)
        held.append((layer.positions[:, :, : layer.columns_used] >= 0).sum(-1))

    monkeypatch.setattr(SlotLayer, "append", append)
    with torch.no_grad(), kvpatch.patched(model, combined("h2o", wrap), 10, block=6) as patch:
        cache = patch.new_cache()
        logits_of(model, ids, left_pad(ids, [64 - pad for pad in pads]), past_key_values=cache)
    entries = torch.stack(held)
    assert len(entries) == 2 * 11
    assert entries.sum(-1).max() <= 2 * (19 if "pyramid" in wrap else 10) + 2 * 6
    if not wrap:
        assert entries.max() == 16
        assert cache.held(0).eq(10).all()
    assert sum(cache.held(layer).sum() for layer in range(2)) == 2 * 2 * 2 * 10
