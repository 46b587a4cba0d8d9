"""The decode kernels beside a naive float64 twin: output, statistics, victims, and what must stay as it was.

Without a GPU they run in Triton's interpreter, whose bfloat16 products are wrong, so that dtype waits for a GPU.
"""

from dataclasses import replace

import pytest
import torch

from tests.backends.on_triton import DEVICE, GPU  # isort: skip
from kvpatch.backends.entries import EXACT, Rounded, centre_codecs, codecs
from kvpatch.backends.triton import decode as kernels
from kvpatch.backends.triton.decode import STATISTICS, Rule
from kvpatch.errors import KVPatchError
from kvpatch.policies import selection
from tests.backends import triton_decode_twin as twin
from tests.helpers.marks import slow_but

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
OUT, STATE = {F32: 1e-5, F16: 2e-3, BF16: 1e-2}, 1e-5  # relative to the largest entry
ALL = ("sum", "squares", "count", "gumbel", "observed")
SENTINEL = 7.5  # behind a head's own slots


def filled(B, H, G, D, C, dtype, rng, used=None, capacities=None, page=None):
    """Slots of which `used` of each head hold a token; one that is empty is NaN, and one of those takes the next token.

    page: they lie in an engine's pool, in pages of so many slots, which are not in order; no other page may be touched.
    """
    capacities_N = [C] * (B * H) if capacities is None else capacities
    used_N = [capacity - 1 for capacity in capacities_N] if used is None else used
    newest = torch.tensor([max(used_N) + 3 + 2 * b for b in range(B)])
    positions = torch.full((B, H, C), -1)
    slot = torch.zeros(B, H, dtype=torch.long)
    state = {name: torch.full((B, H, C), SENTINEL) for name in STATISTICS}
    state["noise"] = torch.full((B, H, C, G), SENTINEL)
    for n, (capacity, held) in enumerate(zip(capacities_N, used_N, strict=True)):
        b, h = divmod(n, H)
        at = torch.randperm(capacity, generator=rng)
        positions[b, h, at[:held]] = torch.randperm(int(newest[b]), generator=rng)[:held]
        slot[b, h] = at[held:].min()
        for name in STATISTICS:
            state[name][b, h, at[:held]] = torch.rand(held, generator=rng) * (3 if name != "observed" else 0.1)
            state[name][b, h, at[held:]] = torch.nan
        state["count"][b, h, at[:held]] = state["count"][b, h, at[:held]].floor()
        state["noise"][b, h, at] = torch.randn(capacity, G, generator=rng).exp()
    begins = None
    if capacities is not None:  # longest first, with rows between that belong to nobody
        begins, row = [0] * len(capacities), 2
        for n in sorted(range(len(capacities)), key=lambda n: -capacities[n]):
            begins[n], row = row, row + capacities[n] + 1
    if page is not None:
        begins, keys, values = pool(B, H, C, D, page, dtype, rng)
    else:
        shape = (B, H, C, D) if capacities is None else (row, D)
        keys, values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    slots = twin.Slots(keys, values, positions, slot, newest, state, begins, capacities, page)
    for n in range(B * H):
        b, h = divmod(n, H)
        there = (positions[b, h, : capacities_N[n]] >= 0)[:, None]
        for buffer in (keys, values):
            mine = slots.head(buffer, b, h)
            mine[:] = torch.where(there, torch.randn(*there.shape[:1], D, generator=rng).to(dtype), torch.nan)
    return slots


def pool(B, H, C, D, page, dtype, rng):
    """An engine's pool [N,2,H,P,D] as entries: where each head's pages begin [B*H,M]; keys; values, H * P entries behind."""
    M = -(-C // page)
    table = 1 + torch.randperm(B * M + 3, generator=rng)[: B * M].view(B, 1, M)
    begins = ((table * 2 * H + torch.arange(H).view(1, H, 1)) * page).view(B * H, M)
    flat = torch.full(((B * M + 4) * 2 * H * page, D), SENTINEL, dtype=dtype)
    return begins.tolist(), flat, flat[H * page :]


def token(B, H, G, D, dtype, rng):
    """A new token's q [B,H,G,D], k and v [B,H,D]: strided views, of which only the last dimension is dense."""
    row = torch.randn(B, H * (G + 2), D + 16, generator=rng).to(dtype)[..., :D]
    q, k, v = row.split([H * G, H, H], 1)
    return q.mul_(2).unflatten(1, (H, G)), k, v


def launch(new, slots, rule, *, keep=None, slopes=None, sinks=None, first=None, recent=None, **options):
    """Run the kernels on `slots` and return the output on the CPU; what is on the CPU changes in place."""
    there = slots.to(DEVICE) if GPU else slots
    tensors = {"keep_BH": keep, "slopes_HG": slopes, "sinks_HG": sinks, "first_B": first, "recent_B": recent}
    if slots.begins is not None:
        begins = torch.tensor(slots.begins)
        tensors["begin_N"] = begins[:, 0] if slots.page == slots.positions.shape[2] else begins  # one page of each row
        tensors["capacity_N"] = None if slots.capacities is None else torch.tensor(slots.capacities)
        options["page"] = slots.page if slots.page != slots.positions.shape[2] else None
    tensors = {name: None if tensor is None else tensor.to(DEVICE) for name, tensor in tensors.items()}
    q, k, v = (tensor.to(DEVICE) for tensor in new)
    out = kernels.step(
        *(q, k, v, there.keys, there.values, there.positions, there.slot, there.newest, there.state, rule),
        **tensors,
        **options,
    )
    if GPU:
        for name in ("keys", "values", "positions", "slot"):
            getattr(slots, name).copy_(getattr(there, name))
        for name, tensor in slots.state.items():
            tensor.copy_(there.state[name])
    return out.cpu()


def by_head(slots, name, codec, change):
    """Keys or values after `change`, "encode" or "decode", of each head by its own codec."""
    buffer, (B, H) = getattr(slots, name), slots.slot.shape
    if not isinstance(codec, Rounded):
        return buffer
    changed = getattr(replace(codec, centre=None), change)(buffer)  # rows of nobody
    for n in range(B * H):
        own = getattr(codec.of(torch.tensor([n])), change)
        slots.head(changed, *divmod(n, H))[:] = own(slots.head(buffer, *divmod(n, H))[None])[0]
    return changed


def close(actual, expected, tolerance, what):
    error = (actual.double() - expected.double()).abs().max()
    assert error <= tolerance * expected.double().abs().max().clamp_min(1e-30), f"{what}: off by {float(error):.2e}"


def same(actual, expected, what):
    assert torch.equal(actual.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0)), what


def compare(slots, other, doubt, gap, rule, codecs=EXACT):
    """Positions, slots, keys, values and state after a step; returns victims that were too close to call.

    codecs: of the keys and values of `slots`; `other` holds their numbers.
    """
    close_calls = (slots.slot != other.slot) & (gap < 1e-6)
    assert torch.equal(slots.slot[~close_calls], other.slot[~close_calls]), "the next slots differ"
    assert torch.equal(slots.positions[~close_calls], other.positions[~close_calls]), "positions differ"
    other.slot, other.positions = slots.slot.clone(), slots.positions.clone()
    for name, codec in zip(("keys", "values"), codecs, strict=True):
        same(by_head(slots, name, codec, "decode"), getattr(other, name), f"{name} differ")
    there = slots.positions >= 0
    for name in STATISTICS:
        mine, expected = slots.state[name], other.state[name]
        if name not in rule.statistics:
            same(mine, expected.float(), f"{name} was touched")
        elif name == "count":
            assert ((mine - expected).abs() <= doubt + 1e-5)[there].all(), "count differs"
            other.state[name] = mine.double()
        else:
            close(mine[there], expected[there], STATE, name)
    if slots.capacities is not None:
        behind = torch.arange(there.shape[2]) >= torch.tensor(slots.capacities).view(*slots.slot.shape, 1)
        for name in STATISTICS:
            assert (slots.state[name][behind] == SENTINEL).all(), f"{name} behind a head's slots was touched"
        assert (slots.positions[behind] == -1).all()
    return int(close_calls.sum())


def follow(
    rule, *, B=1, H=2, G=2, D=64, C=20, dtype=F32, steps=3, splits=None, noise=True, tensor_tau=False, bits=16, **options
):
    """Several steps beside the twin; returns victims that were too close to call.

    tensor_tau: tau reaches the kernel so. bits: of keys and values; the twin holds the numbers that they stand for.
    """
    rng = torch.Generator().manual_seed(C + D + G)
    slots = filled(B, H, G, D, C, dtype, rng, *(options.pop(name, None) for name in ("used", "capacities", "page")))
    centre_BH1D = torch.randn(B, H, 1, D, generator=torch.Generator().manual_seed(1)).to(dtype) * 3
    of_slots, both = centre_codecs(codecs(bits, D, D, dtype), centre_BH1D), ("keys", "values")
    slots.keys, slots.values = entries = [by_head(slots, *pair, "encode") for pair in zip(both, of_slots, strict=True)]
    slots.keys, slots.values = (by_head(slots, *pair, "decode") for pair in zip(both, of_slots, strict=True))
    if not noise:
        del slots.state["noise"]
    other = slots.copy()
    slots.keys, slots.values = entries
    theirs = dict(options, scale=D**-0.5)
    mine = dict(theirs, splits=splits, codecs=of_slots)
    if bits != 16:
        theirs["sizes"] = tuple(D // codec.groups for codec in of_slots)
        theirs["bits"], theirs["centre"] = bits, centre_BH1D[:, :, 0]
    if tensor_tau:
        mine["tau"] = torch.tensor(options["tau"], device=DEVICE)
    close_calls = 0
    for _ in range(steps):
        new = token(B, H, G, D, dtype, rng)
        expected, doubt, gap = twin.step(*new, other, rule, **theirs)
        out = launch(new, slots, rule, **mine)
        assert out.shape == (B, H, G, D) and out.dtype == dtype
        close(out, expected, OUT[dtype], "output")
        close_calls += compare(slots, other, doubt, gap, rule, of_slots)
        if not rule.evicts:
            slots.slot += 1
            other.slot += 1
        noise_BHG = torch.randn(B, H, G, generator=rng).exp()
        for side in (slots, other):
            empty(side, noise_BHG)
            side.newest += 1
    return close_calls


def empty(slots, noise_BHG):
    """Poison the slots that take the next tokens, and note the coming tokens' noise there."""
    for b in range(slots.slot.shape[0]):
        for h in range(slots.slot.shape[1]):
            c = int(slots.slot[b, h])
            for buffer in (slots.keys, slots.values):
                slots.head(buffer, b, h)[c] = 255 if buffer.dtype == torch.uint8 else torch.nan  # a scale of NaN
            for name, tensor in slots.state.items():
                tensor[b, h, c] = noise_BHG[b, h] if name == "noise" else torch.nan


def slopes(H, G):
    return 2.0 ** -torch.arange(1, H * G + 1, dtype=torch.float32).view(H, G)


def sinks(H, G):
    return torch.linspace(-2.0, 3.0, H * G).view(H, G)


def rule(value, statistics=ALL, **options):
    return Rule(statistics, value=value, **options)


RAGGED = [3, 70, 16, 17, 40, 5]
SIX_HEADS = {"B": 2, "H": 3, "C": 70, "capacities": RAGGED, "keep": torch.tensor(RAGGED).view(2, 3) - 1}
THREE_HEADS = {"H": 3, "C": 41, "capacities": [6, 41, 12], "used": [4, 20, 9]}
CASES = {
    "one block": (rule("sum"), {"C": 63, "G": 4}),
    "two blocks of head size 80": (rule("mean"), {"C": 129, "D": 80, "G": 2, "splits": 2, "dtype": F16}),
    "group of three": (rule("mean", ("sum",)), {"C": 40, "G": 3, "B": 2}),
    "head size 256": (rule("count"), {"C": 63, "D": 256, "G": 1, "splits": 3, "dtype": F16, "steps": 2}),
    "head size 256, float32": (rule("observed"), {"C": 40, "D": 256, "G": 2, "splits": 2, "steps": 2}),
    "long": (
        rule("sum", ("sum", "squares", "count", "observed")),
        {"C": 1000, "D": 128, "H": 1, "G": 4, "splits": 3, "steps": 2},
    ),
    "long, half": (rule("gumbel"), {"C": 1000, "D": 64, "G": 1, "dtype": F16, "steps": 2, "tau": 1.3}),
    "decay": (rule("sum", decay=0.7, decayed=("sum", "count")), {"B": 2, "C": 20}),
    "decayed squares and gumbel": (rule("gumbel", decay=0.7, decayed=("squares", "gumbel")), {"tau": 1.0}),
    "tau as a tensor": (rule("gumbel", ("gumbel",)), {"C": 129, "splits": 2, "tau": 1.7, "tensor_tau": True}),
    "no noise": (rule("gumbel", ("gumbel",)), {"C": 40, "tau": 0.6, "noise": False}),
    "window": (rule("mean"), {"C": 63, "sliding": 20, "splits": 3, "dtype": F16, "D": 128}),
    "window of one": (rule("sum"), {"C": 20, "sliding": 1}),
    "alibi": (rule("mean", ("sum",)), {"C": 129, "H": 2, "G": 4, "slopes": slopes(2, 4), "splits": 2}),
    "alibi, window, gumbel": (rule("gumbel"), {"C": 40, "slopes": slopes(2, 2), "sliding": 30, "tau": 1.5}),
    "cap": (rule("mean"), {"C": 63, "G": 4, "softcap": 3.0, "splits": 2, "sliding": 40, "dtype": F16, "D": 128}),
    "cap, alibi, noise": (
        rule("gumbel"),
        {"C": 40, "softcap": 2.0, "slopes": slopes(2, 2), "tau": 1.5, "used": [39, 9], "splits": 2},
    ),
    "sinks": (rule("sum"), {"C": 63, "G": 4, "sinks": sinks(2, 4), "splits": 3, "sliding": 20, "dtype": F16}),
    "sinks, noise, ragged": (rule("gumbel"), dict(SIX_HEADS, sinks=sinks(3, 2), splits=3, tau=1.2)),
    "cap and sinks": (
        rule("mean"),
        {"B": 2, "C": 90, "D": 80, "softcap": 5.0, "sinks": sinks(2, 2), "used": [89, 12, 3, 77]}
        | {"keep": torch.tensor([[88, 12], [6, 78]]), "splits": 4},
    ),
    "cap and sinks in pages": (
        rule("count"),
        {"B": 2, "C": 70, "page": 16, "splits": 3, "softcap": 4.0, "sinks": sinks(2, 2), "steps": 2},
    ),
    "appending, cap and sinks": (
        Rule(("sum",), evicts=False, value="sum"),
        THREE_HEADS | {"softcap": 4.0, "sinks": sinks(3, 2), "steps": 2},
    ),
    "protected": (
        rule("sum"),
        {"B": 2, "C": 40, "G": 1, "steps": 5, "first": torch.tensor([5, 0]), "recent": torch.tensor([4, 12])},
    ),
    "protected from the window": (
        rule("mean", ("sum",)),
        {"C": 40, "sliding": 12, "steps": 4, "first": torch.tensor([9]), "recent": torch.tensor([3])},
    ),
    "recency": (rule("recency", ()), {"C": 33, "steps": 4, "first": torch.tensor([3])}),
    "holes": (
        rule("sum"),
        {"B": 2, "C": 20, "used": [19, 12, 3, 17], "keep": torch.tensor([[19, 12], [6, 18]]), "steps": 5},
    ),
    "nothing held yet": (rule("mean", ("sum",)), {"C": 9, "used": [0, 0], "keep": torch.tensor([[2, 3]]), "steps": 5}),
    "ragged": (
        rule("mean"),
        dict(SIX_HEADS, splits=3, D=128),
    ),
    "ragged, half, window": (
        rule("gumbel"),
        dict(SIX_HEADS, dtype=F16, sliding=25, tau=1.2, slopes=slopes(3, 2), steps=2),
    ),
    "ragged, filling": (
        rule("sum", ("sum",)),
        dict(THREE_HEADS, keep=torch.tensor([[5, 22, 9]]), steps=4, D=80),
    ),
    "one head for all queries": (
        rule("gumbel"),
        {"H": 1, "G": 8, "C": 150, "splits": 5, "tau": 1.2, "steps": 2},
    ),
    "a group of five in many segments": (
        rule("mean", ("sum", "count")),
        {"H": 1, "G": 5, "C": 400, "D": 256, "splits": 25, "steps": 2, "slopes": slopes(1, 5), "sliding": 300},
    ),
    "holes over chunks": (
        rule("sum"),
        {"B": 2, "C": 90, "used": [89, 12, 3, 77], "keep": torch.tensor([[88, 12], [6, 78]]), "steps": 4, "splits": 4},
    ),
    "all but one protected, over chunks": (
        rule("sum", ("sum",)),
        {"C": 90, "steps": 3, "splits": 5, "first": torch.tensor([85]), "recent": torch.tensor([4])},
    ),
    "recency over chunks": (rule("recency", ()), {"C": 90, "steps": 4, "splits": 3, "first": torch.tensor([3])}),
    "appending": (Rule(ALL, evicts=False, value="sum"), THREE_HEADS | {"steps": 2}),
    "appending, nothing seen": (Rule(evicts=False), {"C": 40, "used": [4, 30], "splits": 2}),
    "one page of each row": (rule("sum"), {"B": 2, "C": 33, "page": 33, "splits": 2, "dtype": F16}),
    "pages": (rule("mean"), {"B": 2, "C": 70, "page": 16, "splits": 3, "D": 80}),
    "odd pages, half, window, noise": (
        rule("gumbel"),
        {"B": 3, "C": 100, "page": 7, "sliding": 40, "tau": 1.2, "slopes": slopes(2, 2), "dtype": F16, "steps": 2},
    ),
    "pages with holes": (
        rule("sum"),
        {"B": 2, "C": 40, "page": 16, "used": [39, 12, 3, 37], "keep": torch.tensor([[38, 12], [6, 38]]), "steps": 5},
    ),
    "appending to pages": (
        Rule(("sum",), evicts=False),
        {"C": 40, "page": 12, "used": [11, 30], "splits": 2, "keep": torch.tensor([[40, 40]])},
    ),
    "no victim asked for": (Rule(("sum",)), {"C": 20, "steps": 1}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", slow_but(("group of three", "alibi, window, gumbel", "ragged, filling", "holes"), CASES))
def test_follows_the_twin(name):
    asked, options = CASES[name]
    assert follow(asked, **options) == 0, "these seeds leave no victim too close to call"


@pytest.mark.gpu  # the interpreter multiplies the bits of bfloat16 as integers
@pytest.mark.parametrize("D", [64, 80, 128, 256])
def test_bfloat16_follows_the_twin(D):
    assert follow(rule("mean"), C=300, D=D, G=4, dtype=BF16, splits=3) == 0


@pytest.mark.parametrize("splits", [1, 3, None])
def test_one_slot(splits):
    """A head that holds nothing but the new token: all its attention, and no more than an even share of it."""
    rng = torch.Generator().manual_seed(0)
    slots, new = filled(2, 2, 4, 64, 1, F32, rng), token(2, 2, 4, 64, F32, rng)
    out = launch(new, slots, rule("sum"), scale=0.125, splits=splits, tau=1.5)
    close(out, new[2][:, :, None].expand_as(out), 1e-6, "output")
    wanted = {"sum": 4.0, "squares": 1.0, "count": 0.0, "gumbel": 4.0, "observed": 1.0}
    for name, value in wanted.items():
        assert torch.allclose(slots.state[name], torch.full((2, 2, 1), value), rtol=1e-6), name
    assert (slots.positions == -1).all() and (slots.slot == 0).all()


def test_a_row_of_padding_sees_nothing():
    """A token at position -1 in an empty head: no output, no statistics, no NaN."""
    for variant in ({}, {"softcap": 3.0, "sinks": sinks(2, 2)}, {"sinks": torch.full((2, 2), -torch.inf)}):
        rng = torch.Generator().manual_seed(0)
        slots, new = filled(1, 2, 2, 64, 40, F32, rng, used=[0, 0]), token(1, 2, 2, 64, F32, rng)
        slots.newest.fill_(-1)
        for name in STATISTICS:
            slots.state[name].zero_()
        out = launch(new, slots, rule(None), scale=0.125, splits=2, **variant)
        assert (out == 0).all() and all((slots.state[name] == 0).all() for name in STATISTICS)
        assert (slots.positions == -1).all()


@pytest.mark.slow
def test_a_sink_of_no_weight_and_a_cap_of_no_effect():
    """A sink far below all logits, and a cap far above them, change nothing."""
    rng = torch.Generator().manual_seed(0)
    start, new = filled(1, 2, 2, 64, 40, F32, rng), token(1, 2, 2, 64, F32, rng)
    seen = []
    for variant in ({}, {"sinks": torch.full((2, 2), -1e4)}, {"sinks": torch.full((2, 2), -torch.inf)}, {"softcap": 1e3}):
        slots = clone(start)
        seen.append((launch(new, slots, rule("sum"), scale=0.125, splits=2, tau=1.4, **variant), slots))
    for out, slots in seen[1:]:
        close(out, seen[0][0], 1e-4, "output")
        close(slots.state["sum"][slots.positions >= 0], seen[0][1].state["sum"][slots.positions >= 0], 1e-4, "sum")


@pytest.mark.slow
def test_each_statistic_alone():
    rng = torch.Generator().manual_seed(0)
    start, new = filled(1, 2, 2, 64, 40, F32, rng), token(1, 2, 2, 64, F32, rng)
    together = clone(start)
    launch(new, together, rule("sum"), scale=0.125, tau=1.4)
    for name in ALL:
        alone = clone(start)
        launch(new, alone, rule(None, (name,)), scale=0.125, tau=1.4)
        there = alone.positions >= 0
        close(alone.state[name][there], together.state[name][there], 1e-6, name)
        for other in set(ALL) - {name}:
            same(alone.state[other], start.state[other], f"{other} was touched")


def clone(slots):
    new = slots.copy()
    new.state = {name: tensor.clone() for name, tensor in slots.state.items()}
    return new


@pytest.mark.slow
def test_splits_and_repetition():
    """The same bits twice; with other splits the same but for rounding."""
    rng = torch.Generator().manual_seed(0)
    start, new = filled(1, 2, 2, 80, 300, F32, rng), token(1, 2, 2, 80, F32, rng)
    seen = []
    for splits in (1, 2, 2, 3, None):
        slots = clone(start)
        out = launch(new, slots, rule("mean"), scale=0.1, tau=1.4, splits=splits)
        seen.append((out, slots))
    (out, slots), others = seen[0], seen[1:]
    for other_out, other in others:
        close(other_out, out, 1e-6, "output")
        assert torch.equal(other.slot, slots.slot)
        for name in ALL:
            close(other.state[name][slots.positions >= 0], slots.state[name][slots.positions >= 0], 1e-6, name)
    (out, slots), (other_out, other) = seen[1:3]
    assert torch.equal(out, other_out)
    for name in ALL:
        same(slots.state[name], other.state[name], name)


@pytest.mark.parametrize("chips", [108, 132, 142])
def test_programs_for_a_gpu(chips):
    """Segments of whole blocks and chunks cover all slots; there are as many as keep the device's multiprocessors busy."""
    for C in (1, 63, 64, 65, 1000, 8192, 100_000):
        for heads in (1, 8, 136, 300, 4096):
            for splits in (None, 1, 2, 3, 50, 5000):
                sizes = kernels.plan(C, heads, 4, 128, 2, chips, splits)
                assert sizes.span % sizes.block == 0
                for share, count in ((sizes.span, sizes.parts), (sizes.chunk, sizes.chunks)):
                    assert (count - 1) * share < C <= count * share
                    assert count <= (splits or -(-4 * chips // heads))
                assert sizes.chunks <= kernels.MOST_CHUNKS, "evict_kernel compares no more"
    busy = kernels.plan(8192, 8, 4, 128, 2, chips)
    assert 8 * busy.parts > 3 * chips and busy.chunks == 4
    assert kernels.plan(8192, 8192, 4, 128, 2, chips).parts == 1
    # at least four programs for each multiprocessor: in no round do many wait for a few
    assert 136 * kernels.plan(8192, 136, 4, 128, 2, chips).parts >= 3.5 * chips
    # a short cache is not worth a third launch
    assert kernels.plan(2049, 8, 4, 128, 2, chips).chunks == 1


def test_a_gpu_is_asked_for_its_multiprocessors_once(monkeypatch):
    """Each device for its own."""
    asked = []

    def properties(device):
        asked.append(device.index)
        return type("Properties", (), {"multi_processor_count": 100 + device.index})

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    kernels.multiprocessors.cache_clear()
    try:
        counts = [kernels.multiprocessors(torch.device("cuda", index)) for index in (0, 1, 0, 1)]
    finally:
        kernels.multiprocessors.cache_clear()
    assert counts == [100, 101, 100, 101] and asked == [0, 1]


@pytest.mark.parametrize(
    ("C", "splits", "options", "names"),
    [
        (100, 1, {}, ["split", "combine"]),
        (100, 2, {}, ["split", "combine", "evict"]),
        (100, 2, {"value": None}, ["split", "combine"]),
        (4097, None, {}, ["split", "combine", "evict"]),
    ],
)
def test_launches_of_a_step(monkeypatch, C, splits, options, names):
    """Two; a third where the victim is sought by several programs."""
    seen = []

    class Noted:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *args, **kwargs: seen.append(self.name)

    for name in ("split", "combine", "evict"):
        monkeypatch.setattr(kernels, f"{name}_kernel", Noted(name))
    rng = torch.Generator().manual_seed(0)
    slots, new = filled(1, 2, 4, 64, C, F32, rng), token(1, 2, 4, 64, F32, rng)
    kernels.step(
        *new, slots.keys, slots.values, slots.positions, slots.slot, slots.newest, slots.state,
        Rule(("sum",), **{"value": "sum"} | options), scale=0.1, splits=splits,
    )  # fmt: skip
    assert seen == names


# ---- victims, bit for bit ----


def torch_victim(slots, value, G, sliding, first, recent):
    """The slot [B,H] that the library's own selection empties."""
    position, newest = slots.positions, slots.newest[:, None, None]
    rows = (newest + 1 - position).float()
    rows = rows if sliding is None else rows.clamp(max=sliding)
    name = {"mean": "sum"}.get(value, value)
    score = position.float() if value == "recency" else slots.state[name].clone()
    score = score / rows if value == "mean" else score
    score = score / G if value in ("mean", "count") else score
    protected = position < first[:, None, None] if first is not None else torch.zeros_like(position, dtype=torch.bool)
    if recent is not None:
        protected = protected | (position > newest - recent[:, None, None])
    dead = None if sliding is None else newest + 1 - position >= sliding
    order = selection.score_keys(score, position.clamp(min=0), signed=False)
    keys = selection.eviction_keys(order, protected=protected, dead=dead, empty=None)
    return selection.find_victims(keys, position < 0, 1)[..., 0]


@pytest.mark.slow
@pytest.mark.parametrize("value", kernels.VALUES)
@pytest.mark.parametrize("G", [1, 3])
def test_victims_are_those_of_selection(value, G):
    """Over given scores: zeros, denormals, infinities, ties, and neighbours that become equal when divided by three."""
    rng = torch.Generator().manual_seed(G)
    protections = ((None, None), (torch.tensor([3, 11]), None), (None, torch.tensor([6, 0])), (torch.tensor([2, 4]),) * 2)
    ulps = torch.arange(2, 6) * 2.0**-23
    assert (1.75 + ulps[0]) / 3 == (1.75 + ulps[1]) / 3
    pools = (torch.tensor([0.0, 1e-40, 1.0]), 0.25 + ulps / 8, 1.75 + ulps, torch.tensor([3.0, torch.inf]))
    for pool, (first, recent) in zip(pools, protections, strict=True):
        for sliding in (None, 30):
            slots, new = filled(2, 3, G, 64, 50, F32, rng), token(2, 3, G, 64, F32, rng)
            scores = pool[torch.randint(len(pool), (2, 3, 50), generator=rng)]
            for name in STATISTICS:
                slots.state[name] = scores.clone()
            other = clone(slots)
            for b, h in ((b, h) for b in range(2) for h in range(3)):
                other.positions[b, h, other.slot[b, h]] = other.newest[b]
            expected = torch_victim(other, value, G, sliding, first, recent)
            launch(new, slots, Rule(value=value), scale=0.1, sliding=sliding, first=first, recent=recent)
            assert torch.equal(slots.slot, expected), (first, recent, sliding)
            assert torch.equal(slots.positions, other.positions.scatter(2, expected[..., None], -1))


def test_ties_go_to_the_smaller_position():
    rng = torch.Generator().manual_seed(0)
    slots, new = filled(1, 1, 1, 64, 300, F32, rng), token(1, 1, 1, 64, F32, rng)
    slots.state["sum"].fill_(1.0)
    oldest = int(slots.positions.masked_fill(slots.positions < 0, 10**6).argmin())
    launch(new, slots, Rule(value="sum"), scale=0.1)
    assert int(slots.slot) == oldest


@pytest.mark.parametrize(("sliding", "leaves"), [(12, True), (13, False)])
def test_what_the_next_token_cannot_see_goes_first(sliding, leaves):
    """Twelve slots of consecutive positions: the oldest goes, whatever its score, once the next token does not see it."""
    rng = torch.Generator().manual_seed(0)
    slots, new = filled(1, 1, 1, 64, 12, F32, rng), token(1, 1, 1, 64, F32, rng)
    at = (slots.positions[0, 0] >= 0).nonzero()[:, 0]
    slots.positions[0, 0, at] = torch.arange(11)
    slots.newest.fill_(11)
    slots.state["sum"].fill_(1.0)
    slots.state["sum"][0, 0, at[0]] = 9.0
    launch(new, slots, Rule(value="sum"), scale=0.1, sliding=sliding)
    assert int(slots.slot) == int(at[0] if leaves else at[1])


def test_a_head_with_room_evicts_nothing():
    """Whatever the scores say, and the next token takes its first empty slot."""
    rng = torch.Generator().manual_seed(0)
    slots, new = filled(1, 2, 1, 64, 12, F32, rng, used=[5, 5]), token(1, 2, 1, 64, F32, rng)
    before = clone(slots)
    launch(new, slots, rule("sum"), keep=torch.tensor([[6, 5]]), scale=0.1, tau=1.0)
    held = (slots.positions >= 0).sum(-1).flatten().tolist()
    assert held == [6, 5]
    assert torch.equal(slots.slot, (slots.positions < 0).int().argmax(-1))
    assert int(slots.positions[0, 0, before.slot[0, 0]]) == int(slots.newest)


def test_a_head_that_may_keep_all_its_slots_writes_none_of_its_neighbours():
    """keep_BH as large as the head: no slot is empty, and the kernel leaves the slot of the last token to be named."""
    rng = torch.Generator().manual_seed(0)
    slots, new = filled(1, 2, 1, 64, 12, F32, rng, capacities=[5, 12]), token(1, 2, 1, 64, F32, rng)
    before = clone(slots)
    launch(new, slots, Rule(value="sum"), keep=torch.tensor([[5, 11]]), scale=0.1)
    assert int(slots.slot[0, 0]) == int(before.slot[0, 0])
    assert (slots.positions[0, 0, :5] >= 0).all() and (slots.positions[0, 1] >= 0).sum() == 11


# ---- what is refused ----


def test_reason():
    assert kernels.reason(F32, 64, 1) is None and kernels.reason(BF16, 256, 8) is None and kernels.reason(F16, 80, 64) is None
    assert "float64" in kernels.reason(torch.float64, 64, 1)
    assert "512" in kernels.reason(F16, 512, 1)
    assert "71" in kernels.reason(F16, 64, 71)
    assert kernels.reason(F16, 256, 64) is kernels.reason(F32, 128, 64) is kernels.reason(F32, 256, 32) is None
    assert "no room for 64 float32 queries of 256" in kernels.reason(F32, 256, 64), "some GPUs have 99 KiB for them"
    assert kernels.reason(F16, 128, 1, 128) is None
    assert "128, not 64" in kernels.reason(F16, 128, 1, 64), "values are read with the queries' head size"


@pytest.mark.parametrize(
    "wrong",
    [
        {"statistics": ("sums",)},
        {"statistics": ("sum",), "decayed": ("count",)},
        {"statistics": ("observed",), "decayed": ("observed",)},
        {"value": "squares"},
    ],
)
def test_rule_refuses(wrong):
    with pytest.raises(KVPatchError):
        Rule(**wrong)


@pytest.mark.parametrize("name", ["keys", "values", "positions", "slot", "state", "slopes"])
def test_refuses_what_is_not_contiguous(name):
    rng = torch.Generator().manual_seed(0)
    slots, new = filled(2, 2, 2, 64, 20, F32, rng), token(2, 2, 2, 64, F32, rng)
    bias = slopes(2, 2).T if name == "slopes" else None
    if name == "state":
        slots.state["sum"] = slots.state["sum"].transpose(0, 1).contiguous().transpose(0, 1)
    elif name != "slopes":
        tensor = getattr(slots, name)
        setattr(slots, name, tensor.transpose(0, 1).contiguous().transpose(0, 1))
    with pytest.raises(KVPatchError, match="contiguous"):
        launch(new, slots, rule("sum"), scale=0.1, slopes=bias)


@pytest.mark.gpu  # a step is captured in a CUDA graph
def test_a_captured_step_is_the_same():
    rng = torch.Generator().manual_seed(0)
    start, new = filled(1, 4, 4, 128, 500, BF16, rng).to("cuda"), token(1, 4, 4, 128, BF16, rng)
    new, tau = [tensor.cuda() for tensor in new], torch.tensor(1.5, device="cuda")
    graphed, plain = clone(start), clone(start)

    def step(slots):
        tensors = slots.keys, slots.values, slots.positions, slots.slot, slots.newest, slots.state
        return kernels.step(*new, *tensors, rule("gumbel"), scale=0.1, tau=tau)

    for _ in range(2):
        step(clone(start))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(graphed)
    for _ in range(4):
        graph.replay()
        expected = step(plain)
        for slots in (graphed, plain):
            slots.newest += 1
        assert torch.equal(out, expected) and torch.equal(graphed.slot, plain.slot)
        for name in ALL:
            same(graphed.state[name], plain.state[name], name)


class Elsewhere(torch.Tensor):
    """A number on another device, which kernels cannot read."""

    @classmethod
    def of(cls, value):
        far = torch.empty(1, device="meta").as_subclass(cls)
        far.value = value
        return far

    def to(self, device):
        return torch.tensor([self.value], device=device)


def test_a_temperature_of_another_device_is_brought():
    new, found = token(1, 2, 2, 64, F32, torch.Generator().manual_seed(1)), []
    for tau in (1.7, Elsewhere.of(1.7)):
        slots = filled(1, 2, 2, 64, 20, F32, torch.Generator().manual_seed(0))
        found.append((launch(new, slots, rule("gumbel", ("gumbel",)), scale=0.1, tau=tau), slots.state["gumbel"]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
