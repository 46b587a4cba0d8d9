"""One decode step over slots in two or three launches: write the new token, attend, observe, and choose a victim.

`split_kernel` has one program per KV head and segment of its slots: an online softmax over the segment, for all query heads
of the group at once, so that each key and value is read once. In `combine_kernel` every program merges the softmax of a head's
segments. Some then compute a part of the head's output; each of the others adds to the statistics of a chunk of its slots
and finds there the lowest eviction key of policies/selection.py. Where a head has several chunks, `evict_kernel` compares
their keys. Logits pass between the kernels through a scratch buffer and are in base 2 throughout. Nothing waits for the host,
no size depends on data and there are no atomics: a step can be captured in a CUDA graph and gives the same bits whenever it
runs. Nothing that changes with the length of the text is a constant of a kernel, so a new length compiles nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...errors import KVPatchError
from ...policies import selection

STATISTICS = ("sum", "squares", "count", "gumbel", "observed")
VALUES = ("sum", "mean", "count", "gumbel", "observed", "recency")
MAX_HEAD, MAX_GROUP = 256, 64
WAVES = 4  # programs per multiprocessor, of which two or three run at a time; more of them balance better than they cost
CPU_MULTIPROCESSORS = 132  # an H100's or H200's: for the interpreter, and for compiling without a GPU
SHORTEST = 128  # slots of a segment: with fewer, merging costs more than it saves
TILE = 1 << 14  # bytes of one tile of keys or values in shared memory
CELLS = 1 << 11  # probabilities that a combining program holds at a time
BLOCKS = 4  # a chunk has at least so many blocks of slots: with fewer, a launch to compare chunks costs more than it saves
MOST_CHUNKS = 256

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LAST: tl.constexpr = tl.constexpr(selection.LAST)
TIER: tl.constexpr = tl.constexpr(1 << 62)
NOWHERE: tl.constexpr = tl.constexpr((1 << 31) - 1)
PARTS: tl.constexpr = tl.constexpr(16)  # segments that are merged at a time
OUTPUTS: tl.constexpr = tl.constexpr(128)  # entries of a head's output [G,D] that one program computes


@dataclass(frozen=True)
class Rule:
    """Statistics that a step updates, and the rule of its eviction.

    statistics: of STATISTICS; "observed" is overwritten with the group's mean probability, the others are sums. Those in
    `decayed` are multiplied by `decay` before the addition. value: of VALUES, the token with the lowest is evicted; None: the
    kernel evicts none. evicts: False if every token stays and the caller names the next slot.
    """

    statistics: tuple[str, ...] = ()
    decay: float = 1.0
    decayed: tuple[str, ...] = ()
    value: str | None = None
    evicts: bool = True

    def __post_init__(self) -> None:
        if unknown := set(self.statistics) - set(STATISTICS):
            raise KVPatchError(f"statistics={self.statistics!r} has {sorted(unknown)}: use some of {STATISTICS}.")
        if wrong := set(self.decayed) - (set(self.statistics) - {"observed"}):
            raise KVPatchError(f"decayed={self.decayed!r} has {sorted(wrong)}: only sums among `statistics` can decay.")
        if self.value not in (None, *VALUES):
            raise KVPatchError(f"value={self.value!r} must be None or one of {VALUES}.")

    @cached_property
    def ranked(self) -> str | None:
        """Value by which the victim is chosen; None if the kernel chooses none."""
        return self.value if self.evicts else None

    @cached_property
    def read(self) -> str | None:
        """Statistic that is ranked as it is, because the step does not update it."""
        name = "sum" if self.ranked == "mean" else self.ranked
        return None if name in ("recency", *self.statistics) else name

    @cached_property
    def constants(self) -> tuple[str | bool | None, ...]:
        """Last constants of `combine_kernel`."""
        return self.ranked, *(name in self.decayed for name in STATISTICS[:4])


known_rule = lru_cache(maxsize=256)(Rule)
"""Rule(...), the same object for the same arguments: it works out its constants once, not at every step."""


def reason(dtype: torch.dtype, head_dim: int, group: int, value_dim: int | None = None) -> str | None:
    """Return the reason that the kernels do not support such queries, or None.

    value_dim: head size of the values; None if it is the keys'.
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"its kernels take float32, float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > MAX_HEAD:
        return f"its kernels take head sizes up to {MAX_HEAD}, not {head_dim}"
    if value_dim not in (None, head_dim):
        return f"its kernels take values of the keys' head size, {head_dim}, not {value_dim}"
    if group > MAX_GROUP:
        return f"its kernels take up to {MAX_GROUP} query heads per key-value head, not {group}"
    return None


@dataclass(frozen=True)
class Plan:
    """Sizes of a step's launches.

    Attributes:
        span: slots of a segment, in whole blocks.
        parts: segments of a head.
        chunk: slots whose statistics one program updates.
        chunks: programs that do so for a head.
        outputs: programs that compute a head's output.
        group: query heads rounded up to a power of two; `lanes` to one that a matrix product takes.
        width: the head size, likewise.
        block: slots that a program of `split_kernel` reads at a time; `cells`: one of `combine_kernel`.
        warps: of both; stages: of `split_kernel`.
    """

    span: int
    parts: int
    chunk: int
    chunks: int
    outputs: int
    group: int
    lanes: int
    width: int
    block: int
    cells: int
    warps: int
    stages: int


@lru_cache(maxsize=1024)
def plan(C: int, heads: int, G: int, D: int, itemsize: int, multiprocessors: int, splits: int | None = None) -> Plan:
    """Return the sizes for `heads` KV heads of C slots; splits: segments and chunks of a head, None for the best number."""
    width, group = max(16, _power(D)), _power(G)
    lanes, warps = max(16, group), 4 if group <= 16 else 8
    tile = TILE if lanes * width < 1 << 14 else TILE // 2  # the largest queries leave less shared memory
    block, cells = max(16, min(128 if group <= 16 else 64, tile // (width * itemsize))), max(32, min(512, CELLS // group))
    programs = -(-WAVES * multiprocessors // heads)
    span = _share(C, splits or min(-(-C // SHORTEST), programs), block)
    chunks = splits or min(max(C // (BLOCKS * cells), 1), programs)
    chunk = _share(C, min(chunks, MOST_CHUNKS), 16)
    # a block of fewer slots than threads has its positions copied asynchronously too, which the keys' copies then wait for: it
    # takes a pipeline of five stages to keep the next block's keys and values in flight, else three
    stages = 3 if block >= 32 * warps else 5
    outputs = -(-G * D // OUTPUTS.value)
    return Plan(span, -(-C // span), chunk, -(-C // chunk), outputs, group, lanes, width, block, cells, warps, stages)


def _power(number: int) -> int:
    """Return the least power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


def _share(C: int, splits: int, multiple: int) -> int:
    """Return the slots of each of `splits` shares of C slots, rounded up to a multiple."""
    return -(-C // (splits * multiple)) * multiple


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors."""
    return CPU_MULTIPROCESSORS if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def step(
    q_BHGD: Tensor,
    k_BHD: Tensor,
    v_BHD: Tensor,
    keys: Tensor,
    values: Tensor,
    positions_BHC: Tensor,
    slot_BH: Tensor,
    newest_B: Tensor,
    state: dict[str, Tensor],
    rule: Rule,
    *,
    scale: float,
    slopes_HG: Tensor | None = None,
    sliding: int | None = None,
    begin_N: Tensor | None = None,
    capacity_N: Tensor | None = None,
    keep_BH: Tensor | None = None,
    first_B: Tensor | None = None,
    recent_B: Tensor | None = None,
    tau: float | Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Write one token per head into its slot, attend, observe and evict, all in place; return the output [B,H,G,D].

    Args:
        q_BHGD: the new token's queries; any strides, but the last dimension is contiguous.
        k_BHD: its keys, likewise.
        v_BHD: its values, likewise.
        keys: slots [B,H,C,D], or entries [F,D] of which head n has capacity_N[n] from begin_N[n] on.
        values: like keys.
        positions_BHC: int64, -1 for an empty slot.
        slot_BH: int64, the token's slot; overwritten with the next token's.
        newest_B: int64, the token's position.
        state: float32 [B,H,C] by name, and "noise" [B,H,C,G], exp(noise), which already holds the new token's.
        rule: statistics to update and the victim's rule.
        scale: factor of the logits.
        sliding: the attention window in tokens.
        slopes_HG: slopes of ALiBi.
        begin_N: first entry of each head, of ragged slots.
        capacity_N: entries of each head, of ragged slots.
        keep_BH: int64, tokens that each head may hold, fewer than it has slots; None if no slot is empty after the write.
        first_B: int64; positions below it are never evicted.
        recent_B: int64; so many newest positions are never evicted.
        tau: temperature of "gumbel", a number or a float32 tensor with one element.
        splits: programs that share a head's slots; None: chosen by the number of multiprocessors.

    Raises:
        KVPatchError: a tensor that is written or indexed flat is not contiguous, or the noise has another shape.
    """
    (B, H, G, D), C = q_BHGD.shape, positions_BHC.shape[-1]
    flat = keys, values, positions_BHC, slot_BH, newest_B, begin_N, capacity_N, keep_BH, first_B, recent_B, slopes_HG
    if not all(tensor is None or tensor.is_contiguous() for tensor in (*flat, *state.values())):
        raise KVPatchError("A decode step works in place on flat memory: hand it contiguous tensors (q, k, v may be views).")
    noise = state.get("noise") if "gumbel" in rule.statistics else None
    if noise is not None and noise.shape != (B, H, C, G):
        raise KVPatchError(f"noise has shape {tuple(noise.shape)}, but [B,H,C,G] is {(B, H, C, G)}: one for each query head.")
    device, heads, observes = q_BHGD.device, B * H, bool(rule.statistics)
    sizes = plan(C, heads, G, D, q_BHGD.element_size(), multiprocessors(device), splits)
    parts, chunks = sizes.parts, sizes.chunks if observes or rule.ranked else 0
    # logits if any statistic needs them, then p V and the softmax of every segment
    floats = heads * G * parts * ((sizes.span if observes else 0) + D + 5)
    scratch = torch.empty(floats, dtype=torch.float32, device=device)
    out = torch.empty((B, H, G, D), dtype=q_BHGD.dtype, device=device)
    compared = rule.ranked is not None and chunks > 1
    lowest = torch.empty((heads, chunks, 4), dtype=torch.int64, device=device) if compared else slot_BH
    heat, heat_at = (1.0, tau) if isinstance(tau, Tensor) else (1.0 if tau is None else float(tau), None)
    with torch.cuda.device_of(q_BHGD):  # a kernel starts on the current device, which may be another layer's
        split_kernel[heads, parts](
            *(q_BHGD, k_BHD, v_BHD, keys, values, positions_BHC, slot_BH, newest_B, begin_N, capacity_N, slopes_HG, noise),
            *(heat_at, heat, scratch, scale, sliding, *q_BHGD.stride()[:3], *k_BHD.stride()[:2], *v_BHD.stride()[:2]),
            *(H, C, sizes.span, G, sizes.lanes, D, sizes.width, sizes.block, observes, "gumbel" in rule.statistics),
            num_warps=sizes.warps,
            num_stages=sizes.stages,
        )
        combine_kernel[heads, chunks + sizes.outputs](
            *(positions_BHC, slot_BH, newest_B, capacity_N, noise, heat_at, heat, scratch, lowest, out),
            *(state[name] if name in rule.statistics else None for name in STATISTICS),
            *(None if rule.read is None else state[rule.read], keep_BH, first_B, recent_B, sliding, rule.decay),
            *(H, C, sizes.span, sizes.chunk, G, sizes.group, D, sizes.cells, observes, *rule.constants),
            num_warps=sizes.warps,
        )
        if compared:
            evict_kernel[heads,](positions_BHC, slot_BH, keep_BH, lowest, C, chunks, MOST_CHUNKS, num_warps=4)
    return out


@triton.jit
def _rest(maximum):
    """Return the maximum of an online softmax, or 0 before its first logit, so that -inf - maximum is no NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _places(SCRATCH, parts, SPAN, G: tl.constexpr, D: tl.constexpr, OBSERVE: tl.constexpr):
    """Find the logits [B*H,G,parts*SPAN], p V [B*H,parts,G,D] and softmaxes [B*H,parts,5,G] in the scratch buffer."""
    segments = tl.num_programs(0).to(tl.int64) * parts
    partial = SCRATCH
    if OBSERVE:
        partial += segments * SPAN * G
    return SCRATCH, partial, partial + segments * G * D


# The number of slots changes with every prompt, and so does the alignment of views into a tensor with C columns.
@triton.jit(
    do_not_specialize=["C"],
    do_not_specialize_on_alignment=["POSITIONS", "SLOT", "NEWEST", "BEGIN", "CAPACITY", "NOISE", "TAU"],
)
def split_kernel(
    Q, K, V, KEYS, VALUES, POSITIONS, SLOT, NEWEST, BEGIN, CAPACITY, SLOPES, NOISE, TAU, tau, SCRATCH,
    scale, sliding, q_b, q_h, q_g, k_b, k_h, v_b, v_h, H, C, SPAN,
    G: tl.constexpr, LANES: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OBSERVE: tl.constexpr,
    GUMBEL: tl.constexpr,
):  # fmt: skip
    """Attend to slots [lo, hi) of head n.

    Writes the new key, value and position if their slot lies there, then logits, p V, and the maximum and normalizer of the
    segment's own softmax.
    """
    n, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = n // H, n % H
    if BEGIN is None:
        begin, capacity = n * C, C
    else:
        begin, capacity = tl.load(BEGIN + n), tl.load(CAPACITY + n).to(tl.int32)
    lo = part * SPAN
    if lo >= capacity:
        return
    hi = tl.minimum(lo + SPAN, capacity)
    LOGITS, PARTIAL, SOFTMAX = _places(SCRATCH, tl.num_programs(1), SPAN, G, D, OBSERVE)
    room = tl.num_programs(1).to(tl.int64) * SPAN
    slot, newest = tl.load(SLOT + n).to(tl.int32), tl.load(NEWEST + b)
    g, d = tl.arange(0, LANES), tl.arange(0, WIDTH)
    real_g, real_d = g < G, d < D
    q = tl.load(Q + b * q_b + h * q_h + g[:, None] * q_g + d[None, :], mask=real_g[:, None] & real_d[None, :], other=0.0)
    k_new = tl.load(K + b * k_b + h * k_h + d, mask=real_d, other=0.0)
    v_new = tl.load(V + b * v_b + h * v_h + d, mask=real_d, other=0.0)
    scale *= LOG2_E
    # the new token starts the softmax of its segment; the previous contents of its slot are never read
    own = (slot >= lo) & (slot < hi)
    mine = own & (newest >= 0)
    # compared block by block: Triton 3.9's interpreter fails on a mask broadcast from a scalar condition
    own_g, own_d = g < tl.where(own, G, 0), d < tl.where(own, D, 0)
    at = n * C + slot
    tl.store(KEYS + (begin + slot) * D + d, k_new, mask=own_d)
    tl.store(VALUES + (begin + slot) * D + d, v_new, mask=own_d)
    tl.store(POSITIONS + at, newest, mask=own)
    x_new = tl.where(mine, tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale, float("-inf"))
    maximum, total = x_new, tl.where(x_new > float("-inf"), 1.0, 0.0)
    acc = total[:, None] * v_new.to(tl.float32)[None, :]
    seen = tl.where(mine, 1, 0)
    if OBSERVE:
        tl.store(LOGITS + (n * G + g) * room + slot, x_new, mask=own_g)
    if SLOPES is not None:
        slope = tl.load(SLOPES + h * G + g, mask=real_g, other=0.0).to(tl.float32) * LOG2_E
    if GUMBEL:
        if TAU is not None:
            tau = tl.load(TAU)
        cooling = 1.0 / tau
        if NOISE is not None:
            x_new += tl.log2(tl.load(NOISE + at * G + g, mask=own_g, other=1.0))
        maximum_y, total_y = x_new * cooling, total
    for start in range(lo, hi, BLOCK):
        c = start + tl.arange(0, BLOCK)
        old = (c < hi) & (c != slot)
        position = tl.load(POSITIONS + n * C + c, mask=old, other=-1)
        visible = position >= 0
        if sliding is not None:
            visible = visible & (newest - position < sliding)
        row = (begin + c)[:, None] * D + d[None, :]
        k = tl.load(KEYS + row, mask=visible[:, None] & real_d[None, :], other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SLOPES is not None:
            x += slope[:, None] * (position - newest).to(tl.float32)[None, :]
        x = tl.where(visible[None, :], x, float("-inf"))
        if OBSERVE:
            tl.store(LOGITS + (n * G + g[:, None]) * room + c[None, :], x, mask=real_g[:, None] & old[None, :])
        higher = tl.maximum(maximum, tl.max(x, 1))
        p, fade = tl.exp2(x - _rest(higher)[:, None]), tl.exp2(maximum - _rest(higher))
        v = tl.load(VALUES + row, mask=visible[:, None] & real_d[None, :], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        maximum, total = higher, total * fade + tl.sum(p, 1)
        seen += tl.sum(visible.to(tl.int32), 0)
        if GUMBEL:
            if NOISE is not None:
                noise = NOISE + (n * C + c[None, :]) * G + g[:, None]
                x += tl.log2(tl.load(noise, mask=real_g[:, None] & visible[None, :], other=1.0))
            higher = tl.maximum(maximum_y, tl.max(x * cooling, 1))
            p, fade = tl.exp2(x * cooling - _rest(higher)[:, None]), tl.exp2(maximum_y - _rest(higher))
            maximum_y, total_y = higher, total_y * fade + tl.sum(p, 1)
    segment = n * tl.num_programs(1) + part
    tl.store(PARTIAL + (segment * G + g[:, None]) * D + d[None, :], acc, mask=real_g[:, None] & real_d[None, :])
    found = SOFTMAX + segment * 5 * G + g
    tl.store(found, maximum, mask=real_g)
    tl.store(found + G, total, mask=real_g)
    tl.store(found + 2 * G, tl.full([LANES], 0.0, tl.float32) + seen.to(tl.float32), mask=real_g)
    if GUMBEL:
        tl.store(found + 3 * G, maximum_y, mask=real_g)
        tl.store(found + 4 * G, total_y, mask=real_g)


@triton.jit
def _merged(found, parts, g, G: tl.constexpr, LANES: tl.constexpr):
    """Merge a head's segments into one softmax: its maximum and 1 / normalizer, [LANES]."""
    maximum, total = tl.full([LANES], float("-inf"), tl.float32), tl.zeros([LANES], tl.float32)
    for start in range(0, parts, PARTS):
        s = start + tl.arange(0, PARTS)
        at = found + s[:, None] * 5 * G + g[None, :]
        there = (s < parts)[:, None] & (g < G)[None, :]
        own = tl.load(at, mask=there, other=float("-inf"))
        higher = tl.maximum(maximum, tl.max(own, 0))
        more = tl.load(at + G, mask=there, other=0.0) * tl.exp2(own - _rest(higher)[None, :])
        maximum, total = higher, total * tl.exp2(maximum - _rest(higher)) + tl.sum(more, 0)
    return _rest(maximum), _inverse(total)


@triton.jit
def _inverse(total):
    """Return 1 / total, or 1 where no key is seen.

    IEEE division, so that n equal keys get 1/n; a NaN logit makes the row NaN, as in a softmax.
    """
    return tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.where(total == 0.0, 1.0, total))


@triton.jit
def _output(PARTIAL, found, OUT, n, segment, parts, e, G: tl.constexpr, D: tl.constexpr):
    """Compute entries `e` of head n's output [G,D] from its segments."""
    g, real = e // D, e < G * D
    maximum, total = tl.full([OUTPUTS], float("-inf"), tl.float32), tl.zeros([OUTPUTS], tl.float32)
    acc = tl.zeros([OUTPUTS], tl.float32)
    for start in range(0, parts, PARTS):
        s = start + tl.arange(0, PARTS)
        at = found + s[:, None] * 5 * G + g[None, :]
        there = (s < parts)[:, None] & real[None, :]
        own = tl.load(at, mask=there, other=float("-inf"))
        higher = tl.maximum(maximum, tl.max(own, 0))
        fade, weight = tl.exp2(maximum - _rest(higher)), tl.exp2(own - _rest(higher)[None, :])
        o = tl.load(PARTIAL + (segment + s[:, None]) * G * D + e[None, :], mask=there, other=0.0)
        acc = acc * fade + tl.sum(o * weight, 0)
        total = total * fade + tl.sum(tl.load(at + G, mask=there, other=0.0) * weight, 0)
        maximum = higher
    tl.store(OUT + n * G * D + e, (acc * _inverse(total)).to(OUT.dtype.element_ty), mask=real)


@triton.jit
def _added(STATE, at, inside, fresh, more, decay, DECAYED: tl.constexpr):
    """Return the state plus `more`; for a fresh token the previous contents of its slot are ignored."""
    old = tl.load(STATE + at, mask=inside & (fresh == 0), other=0.0)
    if DECAYED:
        old *= decay
    tl.store(STATE + at, old + more, mask=inside)
    return old + more


@triton.jit
def _vacate(POSITIONS, SLOT, KEEP, n, C, victim, held, gap):
    """Empty the victim's slot in head n, if the head holds too many tokens, and name the slot of its next token.

    held: tokens of the head; gap: its first empty slot, or NOWHERE.
    """
    if KEEP is None:
        tl.store(POSITIONS + n * C + victim, -1)
        tl.store(SLOT + n, victim.to(tl.int64))
    else:
        over = held > tl.load(KEEP + n)
        tl.store(POSITIONS + n * C + victim, -1, mask=over)
        free = tl.minimum(gap, tl.where(over, victim, NOWHERE)).to(tl.int64)
        tl.store(SLOT + n, free, mask=free != NOWHERE)


@triton.jit(
    do_not_specialize=["C", "CHUNK"],
    do_not_specialize_on_alignment=[
        *("POSITIONS", "SLOT", "NEWEST", "CAPACITY", "NOISE", "TAU", "LOWEST"),
        *("SUM", "SQUARES", "COUNT", "GUMBEL", "OBSERVED", "OTHER", "KEEP", "FIRST", "RECENT"),
    ],
)
def combine_kernel(
    POSITIONS, SLOT, NEWEST, CAPACITY, NOISE, TAU, tau, SCRATCH, LOWEST, OUT,
    SUM, SQUARES, COUNT, GUMBEL, OBSERVED, OTHER, KEEP, FIRST, RECENT, sliding, decay, H, C, SPAN, CHUNK,
    G: tl.constexpr, LANES: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, OBSERVE: tl.constexpr,
    VALUE: tl.constexpr, DECAY_SUM: tl.constexpr, DECAY_SQUARES: tl.constexpr, DECAY_COUNT: tl.constexpr,
    DECAY_GUMBEL: tl.constexpr,
):  # fmt: skip
    """Update the statistics of a chunk of head n's slots and find its lowest key, or compute a part of the output.

    With one chunk the victim is chosen here, else by `evict_kernel`.
    """
    n, job = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1) - tl.cdiv(G * D, OUTPUTS)
    capacity = C
    if CAPACITY is not None:
        capacity = tl.load(CAPACITY + n).to(tl.int32)
    parts, most = tl.cdiv(capacity, SPAN), tl.cdiv(C, SPAN)
    LOGITS, PARTIAL, SOFTMAX = _places(SCRATCH, most, SPAN, G, D, OBSERVE)
    found = SOFTMAX + n * most * 5 * G
    if job >= chunks:
        e = (job - chunks) * OUTPUTS + tl.arange(0, OUTPUTS)
        _output(PARTIAL, found, OUT, n, n * most, parts, e, G, D)
    elif OBSERVE or VALUE is not None:
        b, g = n // H, tl.arange(0, LANES)
        real_g, room = g < G, most.to(tl.int64) * SPAN
        newest, slot = tl.load(NEWEST + b), tl.load(SLOT + n).to(tl.int32)
        if OBSERVE:
            maximum, inverse = _merged(found, parts, g, G, LANES)
        if COUNT is not None:
            seen = 0.0
            for part in range(parts):
                seen += tl.load(found + (part * 5 + 2) * G)
        if GUMBEL is not None:
            maximum_y, inverse_y = _merged(found + 3 * G, parts, g, G, LANES)
            if TAU is not None:
                tau = tl.load(TAU)
            cooling = 1.0 / tau
        if FIRST is not None:
            first = tl.load(FIRST + b)
        if RECENT is not None:
            recent = tl.load(RECENT + b)
        lo, hi = job * CHUNK, tl.minimum((job + 1) * CHUNK, capacity)
        lowest, lowest_at = tl.full([BLOCK], LAST, tl.int64), tl.full([BLOCK], 0, tl.int32) + lo
        held, gap = tl.zeros([BLOCK], tl.int32), tl.full([BLOCK], NOWHERE, tl.int32)
        for start in range(lo, hi, BLOCK):
            c = start + tl.arange(0, BLOCK)
            inside, fresh = c < hi, c == slot
            at = n * C + c
            position = tl.load(POSITIONS + at, mask=inside, other=-1)
            value = position.to(tl.float32)
            if OTHER is not None:
                value = tl.load(OTHER + at, mask=inside, other=0.0)
            if OBSERVE:
                cell = real_g[:, None] & inside[None, :]
                x = tl.load(LOGITS + (n * G + g[:, None]) * room + c[None, :], mask=cell, other=float("-inf"))
                p = tl.exp2(x - maximum[:, None]) * inverse[:, None]
                if SUM is not None:
                    new = _added(SUM, at, inside, fresh, tl.sum(p, 0), decay, DECAY_SUM)
                    if (VALUE == "sum") | (VALUE == "mean"):
                        value = new
                if SQUARES is not None:
                    mean = tl.sum(p, 0) / G
                    _added(SQUARES, at, inside, fresh, mean * mean, decay, DECAY_SQUARES)
                if COUNT is not None:
                    above = tl.sum((p * seen > 1.0).to(tl.float32), 0)
                    new = _added(COUNT, at, inside, fresh, above, decay, DECAY_COUNT)
                    if VALUE == "count":
                        value = new
                if OBSERVED is not None:
                    new = tl.sum(p, 0) / G
                    tl.store(OBSERVED + at, new, mask=inside)
                    if VALUE == "observed":
                        value = new
                if GUMBEL is not None:
                    if NOISE is not None:
                        noise = tl.load(NOISE + at[None, :] * G + g[:, None], mask=cell & (x > float("-inf")), other=1.0)
                        x += tl.log2(noise)
                    p = tl.exp2(x * cooling - maximum_y[:, None]) * inverse_y[:, None]
                    new = _added(GUMBEL, at, inside, fresh, tl.sum(p, 0), decay, DECAY_GUMBEL)
                    if VALUE == "gumbel":
                        value = new
            if VALUE is not None:
                if VALUE == "mean":
                    rows = newest + 1 - position
                    if sliding is not None:
                        rows = tl.minimum(rows, sliding)
                    value = tl.div_rn(value, rows.to(tl.float32))
                if ((VALUE == "mean") | (VALUE == "count")) & (G > 1):
                    value = tl.div_rn(value, tl.full([BLOCK], G, tl.float32))
                value = tl.where(value == value, value, 0.0)
                # eviction keys of policies/selection.py: the value, then the position; tokens outside the window are lowest
                key = (value.to(tl.int32, bitcast=True).to(tl.int64) << 30) | position
                if sliding is not None:
                    key = tl.where(newest + 1 - position >= sliding, key - TIER, key)
                if FIRST is not None:
                    key = tl.where(position < first, LAST, key)
                if RECENT is not None:
                    key = tl.where(position > newest - recent, LAST, key)
                key = tl.where(position < 0, LAST, key)
                lowest_at = tl.where(key < lowest, c, lowest_at)
                lowest = tl.minimum(lowest, key)
                held += (position >= 0).to(tl.int32)
                gap = tl.minimum(gap, tl.where(inside & (position < 0), c, NOWHERE))
        if VALUE is not None:
            key = tl.min(lowest, 0)
            victim = tl.min(tl.where(lowest == key, lowest_at, NOWHERE), 0)
            if chunks == 1:
                _vacate(POSITIONS, SLOT, KEEP, n, C, victim, tl.sum(held, 0), tl.min(gap, 0))
            else:
                here = LOWEST + (n * chunks + job) * 4
                tl.store(here, key)
                tl.store(here + 1, victim.to(tl.int64))
                tl.store(here + 2, tl.sum(held, 0).to(tl.int64))
                tl.store(here + 3, tl.min(gap, 0).to(tl.int64))


@triton.jit(do_not_specialize=["C", "chunks"], do_not_specialize_on_alignment=["POSITIONS", "SLOT", "KEEP"])
def evict_kernel(POSITIONS, SLOT, KEEP, LOWEST, C, chunks, CHUNKS: tl.constexpr):
    """Choose head n's victim among those of its chunks."""
    n, s = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    here, there = LOWEST + (n * chunks + s) * 4, s < chunks
    key = tl.load(here, mask=there, other=LAST)
    at = tl.load(here + 1, mask=there, other=NOWHERE)
    victim = tl.min(tl.where(key == tl.min(key, 0), at, NOWHERE), 0)
    held = tl.sum(tl.load(here + 2, mask=there, other=0), 0)
    gap = tl.min(tl.load(here + 3, mask=there, other=NOWHERE), 0)
    _vacate(POSITIONS, SLOT, KEEP, n, C, victim, held, gap)
