"""Small laws of the policies' parts, each written down because a change of the code passed without it (mutation testing)."""

import itertools
import math

import pytest
import torch

from kvpatch import KVPatchError
from kvpatch.policies import budgets, noise, scores, selection
from kvpatch.policies.allocation import Adaptive, Pyramid
from kvpatch.policies.budgets import Budget
from kvpatch.policies.context import Block, Limits, Moment, accumulator
from kvpatch.policies.scopes import DeviationScope
from kvpatch.policies.statistics import STATISTICS
from tests.oracle import reference_selection

WORD = 0xFFFFFFFF
HIGH = 1 << 62


# ---- noise.py ----


def _mixed(h):
    """MurmurHash3's finaliser, in Python's own integers."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B & WORD
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & WORD
    return h ^ (h >> 16)


def drawn(seed, layer, head, query, key):
    h = _mixed((head * 0x27D4EB2F + ((seed * 0x9E3779B1 + 0x165667B1 & WORD) + layer * 0x7FEB352D & WORD)) & WORD)
    h = _mixed(h ^ (query * 0x2C1B3C6D + 0x297A2D39 & WORD))
    h = _mixed((key * 0x1B873593 + 0x52DCE729 ^ h) & WORD)
    return ((h >> 9) + 0.5) * 2.0**-23


@pytest.mark.parametrize(("seed", "layer", "query"), [(0, 0, -1), (12345, 3, 17), (-7, 31, 99_999), (2**40 + 1, 1, 0)])
def test_a_draw_is_the_hash_that_it_was(seed, layer, query):
    """Saved caches and yesterday's runs go on with these numbers: the same seed gives the same text, in every version."""
    keys, heads = [0, 1, 7, 511, 100_000, 2**29], [0, 1, 5, 63]
    got = noise.uniform(seed, layer, torch.tensor(heads)[:, None], query, torch.tensor(keys))
    want = torch.tensor([[drawn(seed, layer, head, query, key) for key in keys] for head in heads], dtype=torch.float64)
    assert torch.equal(got, want.float())
    layers = torch.full((4, 1), layer)
    assert torch.equal(noise.uniform(seed, layers, torch.tensor(heads)[:, None], query, torch.tensor(keys)), got)


def test_distributions_are_their_inverse_functions():
    u = torch.tensor([0.5 * 2.0**-23, 0.01, 0.3, 0.5, 0.9, 1 - 2.0**-23], dtype=torch.float64)
    torch.testing.assert_close(torch.exp(-torch.exp(-noise.gumbel(u))), u)
    deviation = (noise.gaussian(u) - 0.5772) / 1.2825
    torch.testing.assert_close(0.5 * (1 + torch.erf(deviation / math.sqrt(2.0))), u, atol=1e-9, rtol=0)
    assert noise.GUMBEL_MEAN == 0.5772
    assert noise.GUMBEL_STD == 1.2825


# ---- selection.py ----

FLOATS = [0.0, 1e-45, 1e-38, 0.1, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 65504.0, 3e38, math.inf]


def test_an_order_is_score_then_position():
    positions = [0, 1, 5, 1000, selection.MAX_POSITION]
    pairs = list(itertools.product(FLOATS, positions))
    score, position = torch.tensor([s for s, _ in pairs]), torch.tensor([p for _, p in pairs])
    ranked = selection.order(score, position, signed=False)
    assert ranked.tolist() == sorted(set(ranked.tolist()))
    assert (ranked & selection.MAX_POSITION).tolist() == position.tolist()
    assert 0 <= int(ranked.min()) <= int(ranked.max()) < HIGH
    assert selection.MAX_POSITION == 2**30 - 1
    assert int(selection.order(torch.tensor(1.0), torch.tensor(5), signed=False)) == (0x3F800000 << 30) + 5
    pairs = [(-s, p) for s, p in pairs if s > 0][::-1] + pairs
    pairs = sorted(pairs)
    ranked = selection.order(torch.tensor([s for s, _ in pairs]), torch.tensor([p for _, p in pairs]), signed=True)
    assert ranked.tolist() == sorted(set(ranked.tolist()))
    assert 0 <= int(ranked.min()) <= int(ranked.max()) < HIGH
    assert int(selection.order(torch.tensor(0.0), torch.tensor(3), signed=True)) == (1 << 61) + 3
    assert int(selection.order(torch.tensor(-math.inf), torch.tensor(0), signed=True)) == 0x007FFFFF << 30


def test_tiers():
    order = torch.tensor([5, 6, 7, HIGH - 1, 0])
    flags = torch.tensor([True, False, False, False, False])
    assert selection.tiers(order, protected=None, dead=None, empty=None) is order
    dead = selection.tiers(order, protected=None, dead=flags.roll(3), empty=None)
    assert dead.tolist() == [5, 6, 7, -1, 0]  # below every live one, and above an empty slot
    assert selection.tiers(order, protected=flags, dead=None, empty=None).tolist() == [2**63 - 1, 6, 7, HIGH - 1, 0]
    all_of = selection.tiers(order, protected=flags | flags.roll(1), dead=flags, empty=flags.roll(1))
    assert all_of.tolist() == [2**63 - 1, -(2**63), 7, HIGH - 1, 0]
    lowest = selection.tiers(torch.tensor([0, 9]), protected=None, dead=torch.tensor([True, False]), empty=None)
    assert lowest.tolist() == [-HIGH, 9]


def _orders(B=2, H=3, T=9):
    return torch.randperm(B * H * T, generator=torch.Generator().manual_seed(B * H + T)).view(B, H, T)


@pytest.mark.parametrize("counts", [[4] * 6, [1, 2, 3, 9, 8, 4], [9] * 6, [1] * 6, [0, 2, 2, 2, 2, 2]])
def test_the_top_of_each_head(counts):
    order, count_BH = _orders(), torch.tensor(counts).view(2, 3)
    index, kept = selection.top(order, count_BH, counts)
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
    order = _orders()
    assert torch.equal(selection.victim(order, None), order.argmin(-1))
    empty = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order.argmin(-1, keepdim=True), True)
    second = order.sort(-1).indices[..., 1]
    assert torch.equal(selection.victim(order, empty), second)


@pytest.mark.parametrize("T", [8, 9])
@pytest.mark.parametrize("count", [0, 1, 3, 9, 12])
def test_in_top(count, T):
    order = _orders(T=T)
    want = torch.zeros_like(order, dtype=torch.bool)
    if count:
        want = want.scatter(-1, order.topk(min(count, T), -1).indices, True)
    each = torch.full((2, 1, 1), count)
    assert torch.equal(selection.in_top(order, each, count), want)
    assert torch.equal(selection.in_top(order, each, None), want)
    mixed = torch.tensor([0, count]).view(2, 1, 1)
    assert torch.equal(selection.in_top(order, mixed, None), want & (torch.arange(2).view(2, 1, 1) == 1))


@pytest.mark.parametrize("protected", [None, 1])
def test_the_second_stage_bounds_what_is_lost(protected):
    """(share + eps) * norm, of what the first stage left."""
    score, norms = torch.tensor([[[3.0, 2.0, 6.0, 4.0, 5.0]]]), torch.tensor([[[2.3, 9.0, 1.0, 2.0, 1.55]]])
    moment, asked = small_moment(1, None), []
    moment.positions_BHS, moment.keep_BH1 = torch.arange(5)[None, None], torch.tensor([[[3]]])
    moment.norms = lambda known, out: asked.append(known) or norms
    mask = None if protected is None else torch.arange(5)[None, None] == protected
    first = selection.order(score, moment.positions_BHS, signed=False)
    got = selection.TwoStage(alpha=0.5, eps=0.1).order(moment, score, first, mask, None)[0, 0]
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


# ---- allocation.py ----


@pytest.mark.parametrize("n_layers", [1, 2, 3, 7, 32])
@pytest.mark.parametrize("budget", [1, 2, 5, 40, 1001])
@pytest.mark.parametrize("beta", [1, 2.5, 20])
def test_pyramids(n_layers, budget, beta):
    for least, most in itertools.product([1, 2, 33], [None, budget, budget + 1, budget + budget // 2 + 1, 10 * budget]):
        got = Pyramid(beta).split(budget, n_layers, least, most)
        assert list(got) == reference_selection.pyramid(budget, n_layers, beta, least - 1, most), (least, most)
        assert sum(got) == budget * n_layers


@pytest.mark.parametrize("floor", [0, 0.2, 0.5, 1, 1.0])
@pytest.mark.parametrize("budgets_B", [[3, 5], [1, 8], [4, 4]])
def test_adaptive_counts(floor, budgets_B):
    order, fixed = _orders(), torch.tensor([[0, 0, 0], [1, 0, 2]])
    empty = torch.zeros_like(order, dtype=torch.bool)
    empty[0, 1, [2, 5]] = True
    order = order.masked_fill(empty, selection.FIRST)
    for nominal, holes in itertools.product([[0, 0], [2, 1]], [None, empty]):
        got = Adaptive(floor).counts(order, holes, fixed, budgets_B, nominal)
        for b in range(2):
            least = [max(budgets.share(float(floor), budgets_B[b]), nominal[b]) + f for f in fixed[b].tolist()]
            held = [[v for v in order[b, h].tolist() if v > selection.FIRST] for h in range(3)]
            own = [sorted(held[h], reverse=True)[: least[h]] for h in range(3)]
            rest = sorted((v for h in range(3) for v in held[h] if v not in own[h]), reverse=True)
            total = int(fixed[b].sum()) + 3 * budgets_B[b]
            more = rest[: max(total - sum(map(len, own)), 0)]
            if sum(map(len, own)) <= total:
                assert got[b].tolist() == [len(own[h]) + sum(v in held[h] for v in more) for h in range(3)]


def test_equal_entries_go_to_the_lower_head():
    order = torch.tensor([[[3, 9], [3, 9], [3, 9]]])
    got = Adaptive(0).counts(order, None, torch.zeros(1, 3, dtype=torch.long), [1], [0])
    assert got.tolist() == [[1, 1, 1]]
    order = torch.tensor([[[3, 5], [3, 5], [3, 5]]])
    assert Adaptive(0).counts(order, None, torch.tensor([[1, 0, 0]]), [1], [0]).tolist() == [[2, 1, 1]]


# ---- budgets.py ----


def test_sizes():
    units = {"B": 1, "KB": 1000, "MB": 10**6, "GB": 10**9, "KiB": 1024, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    for unit, size in units.items():
        assert budgets.parse_bytes(f"2{unit}") == 2 * size
        assert budgets.parse_bytes(f" 1.5 {unit.lower()} ") == int(1.5 * size)
    for text in ("2", "GB", "2 XB", "-2GB", "2GB2", "TB"):
        assert budgets.parse_bytes(text) is None
    with pytest.raises(KVPatchError, match="is not a size"):
        budgets.check_k("0GB")
    assert budgets.share(0.29, 100) == 29
    assert budgets.share(0.5, 7) == 3
    assert budgets.share(7, 3) == 7
    assert budgets.share(1.0, 7) == 7


@pytest.mark.parametrize("k", [0, -1, 0.0, -0.5, 1.0000001, math.nan, True, None, "2", [[1]], b"1"])
def test_what_is_no_budget(k):
    with pytest.raises(KVPatchError, match=r"^k"):
        budgets.check_k(k)


def test_budgets():
    for k in (1, 0.001, 1.0, "1B", 10**9):
        budgets.check_k(k)
    plain = Budget.parse(0.5, n_layers=3, bytes_per_token=64)
    assert [plain.tokens(layer, n) for layer, n in [(0, 9), (1, 1), (2, 100)]] == [4, 1, 50]
    assert plain.evicts(0)
    assert Budget.parse(1.0, n_layers=1, bytes_per_token=1).evicts(0) is False
    assert Budget.parse(1, n_layers=1, bytes_per_token=1).evicts(0) is True
    assert Budget.parse([1.0, 2], n_layers=2, bytes_per_token=1).per_layer == (1.0, 2)
    assert Budget.parse("1000B", n_layers=3, bytes_per_token=64).per_layer == (5, 5, 5)
    assert Budget.parse("192B", n_layers=3, bytes_per_token=64).per_layer == (1, 1, 1)
    assert Budget.parse(["64B", "640B"], n_layers=2, bytes_per_token=64).per_layer == (1, 10)
    # of three layers one bounds itself at four tokens: they are paid first
    bounded = Budget.parse("1000B", n_layers=3, bytes_per_token=64, bounds=[None, 4, None])
    assert bounded.per_layer == ((1000 - 4 * 64) // 128,) * 3
    assert Budget.parse("384B", n_layers=3, bytes_per_token=64, bounds=[None, 4, None]).per_layer == (1, 1, 1)
    with pytest.raises(KVPatchError, match="128 bytes, beside 256 for its sliding-window layers"):
        Budget.parse("383B", n_layers=3, bytes_per_token=64, bounds=[None, 4, None])
    with pytest.raises(KVPatchError, match="holds no token: one token of this model takes 192 bytes"):
        Budget.parse("191B", n_layers=3, bytes_per_token=64)


# ---- moment.py ----


def test_limits():
    rows = [(1, 2, 0, 4, 0, 6), (0, 0, 0, 4, 1, 2)]
    one = Limits.of(rows, torch.device("cpu"))
    names = ("first", "newest", "prompt", "deviation", "tail", "nominal")
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        assert getattr(one, name).shape == (2, 1, 1)
        assert getattr(one, name).flatten().tolist() == list(column)
    assert (one.any_first, one.any_newest, one.any_prompt, one.deviation_count) == (True, True, False, 4)
    other = Limits.of([(0, 0, 7, 5, 0, 0)], torch.device("cpu"))
    both = Limits.cat([one, other])
    assert (both.any_first, both.any_newest, both.any_prompt, both.deviation_count) == (True, True, True, None)
    assert both.prompt.flatten().tolist() == [0, 0, 7]
    assert Limits.cat([one, one]).deviation_count == 4
    assert Limits.of([rows[0], (0, 0, 0, 3, 0, 0)], torch.device("cpu")).deviation_count is None
    swapped = one.map_rows(lambda tensor: tensor.flip(0))
    assert swapped.first.flatten().tolist() == [0, 1]
    assert (swapped.any_first, swapped.deviation_count) == (True, 4)


def small_moment(group, sliding):
    positions = torch.tensor([[[0, 3, 5, 9]]])
    return Moment(
        layer=0, seed=0, positions_BHS=positions, newest_B11=torch.tensor([[[9]]]), recent_B11=torch.tensor([[[9]]]),
        state={"sum": torch.tensor([[[6.0, 3.0, 2.0, 1.0]]]), "squares": torch.tensor([[[8.0, 2.0, 1.5, 1.0]]])},
        limits=Limits.of([(0, 0, 0, 2, 0, 0)], torch.device("cpu")), group=group, sliding=sliding, empty=False,
    )  # fmt: skip


def test_a_size_counts_what_bounded_layers_hold():
    one = Budget.parse("4KiB", n_layers=3, bytes_per_token=64, bounds=(None, 10, None))
    assert one.per_layer == ((4096 - 10 * 64) // (2 * 64),) * 3


def test_rows_and_means():
    assert small_moment(1, None).aligned
    assert accumulator(torch.float16) == accumulator(torch.bfloat16) == accumulator(torch.float32) == torch.float32
    assert accumulator(torch.float64) == torch.float64
    moment = small_moment(1, None)
    assert moment.rows_seen.flatten().tolist() == [10.0, 7.0, 5.0, 1.0]
    torch.testing.assert_close(moment.mean.flatten(), torch.tensor([0.6, 3 / 7, 0.4, 1.0]))
    assert moment.rows_seen is moment.rows_seen
    assert moment.mean is moment.mean
    grouped = small_moment(2, 6)
    assert grouped.rows_seen.flatten().tolist() == [6.0, 6.0, 5.0, 1.0]
    torch.testing.assert_close(grouped.mean.flatten(), torch.tensor([0.5, 0.25, 0.2, 0.5]))
    # variances .8 - .36, 2/7 - (3/7)^2, .3 - .16 and 0
    assert DeviationScope(recent=0).mask(moment).flatten().tolist() == [True, False, True, False]
    moment.positions_BHS, moment.empty = torch.tensor([[[-1, 3, 5, 9]]]), True  # what stands in an empty slot does not count
    assert DeviationScope(recent=0).mask(moment).flatten().tolist() == [False, True, True, False]
    moment = small_moment(1, None)  # nor do tokens that are kept outside the budget
    moment.limits = Limits.of([(0, 0, 3, 2, 0, 0)], torch.device("cpu"))
    assert DeviationScope(recent=0).mask(moment).flatten().tolist() == [False, True, True, False]


# ---- statistics.py ----


def _block(p, tau=1.0, noise_NMG=None):
    keys = (p[:, 0] > 0).sum(-1)
    return Block(p, keys, noise_NMG, lambda: None, tau, 0, 0)


@pytest.mark.parametrize("tau", [1.0, 1.7, 2.0, 0.5, torch.tensor(1.7), torch.tensor([1.7, 0.6])[:, None, None, None]])
@pytest.mark.parametrize("noisy", [False, True])
def test_statistics_are_their_definitions(tau, noisy):
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    p = x.softmax(-1)
    zeta = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    block = _block(p.clone(), tau, zeta.exp() if noisy else None)
    score = scores.GumbelSoftmax()
    torch.testing.assert_close(STATISTICS["sum"](block, score), p.sum(1).sum(1))
    torch.testing.assert_close(STATISTICS["squares"](block, score), (p.sum(1) / 3).square().sum(1))
    assert torch.equal(STATISTICS["count"](block, score), (p > 1 / 5).double().sum((1, 2)))
    shifted = (x + zeta.permute(0, 2, 1)[:, :, None]) if noisy else x
    want = (shifted / tau).softmax(-1).sum((1, 2))
    torch.testing.assert_close(STATISTICS["gumbel"](_block(p.clone(), tau, block.noise_NMG), score), want)
