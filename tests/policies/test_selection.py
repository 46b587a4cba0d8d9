"""Selection: the order of tokens, tiers, the top of each head, victims and the second stage."""

import itertools
import math

import pytest
import torch

import kvpatch
from kvpatch.errors import KVPatchError
from kvpatch.policies import selection
from tests.helpers.contexts import orders, small_context

HIGH = 1 << 62
FLOATS = [0.0, 1e-45, 1e-38, 0.1, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 65504.0, 3e38, math.inf]


def test_an_order_is_score_then_position():
    positions = [0, 1, 5, 1000, selection.MAX_POSITION]
    pairs = list(itertools.product(FLOATS, positions))
    score, position = torch.tensor([s for s, _ in pairs]), torch.tensor([p for _, p in pairs])
    ranked = selection.score_keys(score, position, signed=False)
    assert ranked.tolist() == sorted(set(ranked.tolist()))
    assert (ranked & selection.MAX_POSITION).tolist() == position.tolist()
    assert 0 <= int(ranked.min()) <= int(ranked.max()) < HIGH
    assert selection.MAX_POSITION == 2**30 - 1
    assert int(selection.score_keys(torch.tensor(1.0), torch.tensor(5), signed=False)) == (0x3F800000 << 30) + 5
    pairs = [(-s, p) for s, p in pairs if s > 0][::-1] + pairs
    pairs = sorted(pairs)
    ranked = selection.score_keys(torch.tensor([s for s, _ in pairs]), torch.tensor([p for _, p in pairs]), signed=True)
    assert ranked.tolist() == sorted(set(ranked.tolist()))
    assert 0 <= int(ranked.min()) <= int(ranked.max()) < HIGH
    assert int(selection.score_keys(torch.tensor(0.0), torch.tensor(3), signed=True)) == (1 << 61) + 3
    assert int(selection.score_keys(torch.tensor(-math.inf), torch.tensor(0), signed=True)) == 0x007FFFFF << 30


def test_tiers():
    order = torch.tensor([5, 6, 7, HIGH - 1, 0])
    flags = torch.tensor([True, False, False, False, False])
    assert selection.eviction_keys(order, protected=None, dead=None, empty=None) is order
    dead = selection.eviction_keys(order, protected=None, dead=flags.roll(3), empty=None)
    assert dead.tolist() == [5, 6, 7, -1, 0]  # below every live one, and above an empty slot
    assert selection.eviction_keys(order, protected=flags, dead=None, empty=None).tolist() == [2**63 - 1, 6, 7, HIGH - 1, 0]
    all_of = selection.eviction_keys(order, protected=flags | flags.roll(1), dead=flags, empty=flags.roll(1))
    assert all_of.tolist() == [2**63 - 1, -(2**63), 7, HIGH - 1, 0]
    lowest = selection.eviction_keys(torch.tensor([0, 9]), protected=None, dead=torch.tensor([True, False]), empty=None)
    assert lowest.tolist() == [-HIGH, 9]


@pytest.mark.parametrize("counts", [[4] * 6, [1, 2, 3, 9, 8, 4], [9] * 6, [1] * 6, [0, 2, 2, 2, 2, 2]])
def test_the_top_of_each_head(counts):
    order, count_BH = orders(), torch.tensor(counts).view(2, 3)
    index, kept = selection.select_top(order, count_BH, counts)
    assert index.shape == (2, 3, max(counts))
    assert (kept is None) == (min(counts) == max(counts))
    for b, h in itertools.product(range(2), range(3)):
        row, n = order[b, h].tolist(), int(count_BH[b, h])
        want = sorted(sorted(range(9), key=lambda i: row[i])[9 - n :])
        mine = index[b, h].tolist() if kept is None else index[b, h][kept[b, h]].tolist()
        assert mine == want
        assert kept is None or kept[b, h].tolist() == [True] * n + [False] * (max(counts) - n)
        assert all(0 <= i < 9 for i in index[b, h].tolist())


def test_a_victim_is_the_lowest_that_is_there():
    order = orders()
    assert torch.equal(selection.find_victims(order, None, 1)[..., 0], order.argmin(-1))
    empty = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order.argmin(-1, keepdim=True), True)
    second = order.sort(-1).indices[..., 1]
    assert torch.equal(selection.find_victims(order, empty, 1)[..., 0], second)


@pytest.mark.parametrize("T", [8, 9])
@pytest.mark.parametrize("count", [0, 1, 3, 9, 12])
def test_in_top(count, T):
    order = orders(T=T)
    want = torch.zeros_like(order, dtype=torch.bool)
    if count:
        want = want.scatter(-1, order.topk(min(count, T), -1).indices, True)
    each = torch.full((2, 1, 1), count)
    assert torch.equal(selection.mask_top(order, each, count), want)
    assert torch.equal(selection.mask_top(order, each, None), want)
    mixed = torch.tensor([0, count]).view(2, 1, 1)
    assert torch.equal(selection.mask_top(order, mixed, None), want & (torch.arange(2).view(2, 1, 1) == 1))


@pytest.mark.parametrize("protected", [None, 1])
def test_the_second_stage_bounds_what_is_lost(protected):
    """(share + eps) * norm, of what the first stage left."""
    score, norms = torch.tensor([[[3.0, 2.0, 6.0, 4.0, 5.0]]]), torch.tensor([[[2.3, 9.0, 1.0, 2.0, 1.55]]])
    context, asked = small_context(1, None), []
    context.positions_BHT, context.keep_BH1 = torch.arange(5)[None, None], torch.tensor([[[3]]])
    context.norms = lambda known, out: asked.append(known) or norms
    mask = None if protected is None else torch.arange(5)[None, None] == protected
    first = selection.score_keys(score, context.positions_BHT, signed=False)
    got = selection.TwoStage(alpha=0.5, eps=0.1).eviction_keys(context, score, first, mask, None)[0, 0]
    critical = torch.arange(5)[None, None] == 2
    assert torch.equal(asked[0], critical)
    share = score.masked_fill(mask if mask is not None else critical & False, 0.0)
    want = (share / share.sum() + 0.1) * norms
    above = critical if mask is None else critical | mask
    assert torch.equal(got == 2**63 - 1, above[0, 0])
    rest = [i for i in range(5) if not above[0, 0, i]]
    assert sorted(rest, key=lambda i: got[i]) == sorted(rest, key=lambda i: want[0, 0, i])


def test_one_number_for_all():
    assert selection._one_for_all(torch.tensor([[3], [3]])) == 3
    assert selection._one_for_all(torch.tensor([[0]])) == 0
    assert selection._one_for_all(torch.tensor([[3], [4]])) is None
    assert selection._one_for_all(torch.empty(2, 1, dtype=torch.long, device="meta")) is None


def test_a_policy_has_one_selection():
    for combine, base, has in ((kvpatch.critical, "chunk_kv", "Chunked"), (kvpatch.chunked, "critical_adakv", "TwoStage")):
        with pytest.raises(KVPatchError, match=rf"{base}' selects by {has} already"):
            combine(base)
    assert kvpatch.critical("critical_snapkv").selection == kvpatch.get_policy("critical_snapkv").selection


def test_chunks_are_of_a_prompt():
    policy = kvpatch.get_policy("Chunked(h2o)")
    assert (policy.name, policy.schedule, policy.options()["size"]) == ("chunked_h2o", "prompt", 20)
    with pytest.raises(KVPatchError, match=r"keeps whole chunks of a prompt.*use schedule='prompt'"):
        policy.with_options(schedule="both")
    for wrong in ({"size": 0}, {"size": 2.0}, {"size": True}, {"together": 1}):
        with pytest.raises(KVPatchError, match=next(iter(wrong))):
            kvpatch.chunked("h2o", **wrong)
    assert not policy.weighs_values
    assert kvpatch.get_policy("critical_snapkv").weighs_values
