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
from torch import Tensor

from ...errors import KVPatchError
from ..entries import EXACT, FULL, Codecs, centre_of
from . import rounded
from .arguments import logit_units
from .combine import combine_kernel, evict_kernel
from .plan import MOST_CHUNKS, count_query_bytes, multiprocessors, plan
from .split import split_kernel

STATISTICS = ("sum", "squares", "count", "gumbel", "observed")
VALUES = ("sum", "mean", "count", "gumbel", "observed", "recency")
MAX_HEAD, MAX_GROUP = 256, 64
MAX_QUERIES = 1 << 15  # bytes of a KV head's queries in shared memory, of which GPUs of compute capability 8.6 have 99 KiB


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
        """Raise KVPatchError if the kernels of a decode step do not know a name, or a statistic that is no sum is to decay.

        `rule` of triton_backend makes a Rule.
        """
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
        """Statistic by which the victim is chosen though this step does not update it; None if there is none such."""
        name = "sum" if self.ranked == "mean" else self.ranked
        return None if name in ("recency", *self.statistics) else name

    @cached_property
    def constants(self) -> tuple[str | bool | None, ...]:
        """Last constants of `combine_kernel`: VALUE, and for each sum whether it decays (DECAY_SUM and so on)."""
        return self.ranked, *(name in self.decayed for name in STATISTICS[:4])


known_rule = lru_cache(maxsize=256)(Rule)
"""Rule(...), the same object for the same arguments: it works out its constants once, not at every step."""


def reason(dtype: torch.dtype, head_dim: int, group: int, value_dim: int | None = None, bits: int = FULL) -> str | None:
    """Return why the decode kernels cannot take such heads and numbers, or None. triton_backend's `reason` asks.

    value_dim: head size of the values; None if it is the keys'. bits: of keys and values.
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"its kernels take float32, float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > MAX_HEAD:
        return f"its kernels take head sizes up to {MAX_HEAD}, not {head_dim}"
    if value_dim not in (None, head_dim):
        return f"its kernels take values of the keys' head size, {head_dim}, not {value_dim}"
    if group > MAX_GROUP:
        return f"its kernels take up to {MAX_GROUP} query heads per key-value head, not {group}"
    if count_query_bytes(group, head_dim, dtype.itemsize) > MAX_QUERIES:
        return f"its kernels have no room for {group} float32 queries of {head_dim} numbers per key-value head"
    return rounded.reason(bits, head_dim, dtype)


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
    softcap: float | None = None,
    sinks_HG: Tensor | None = None,
    sliding: int | None = None,
    begin_N: Tensor | None = None,
    capacity_N: Tensor | None = None,
    page: int | None = None,
    keep_BH: Tensor | None = None,
    first_B: Tensor | None = None,
    recent_B: Tensor | None = None,
    tau: float | Tensor | None = None,
    codecs: Codecs = EXACT,
    splits: int | None = None,
) -> Tensor:
    """Run a layer's decode step: write a token per head, attend, observe and evict in place; return the output [B,H,G,D].

    `step` of triton_backend calls it. Keys, values, positions, the free slot and `state` are changed.

    Args:
        q_BHGD: the new token's queries; any strides, but the last dimension is contiguous.
        k_BHD: its keys, likewise.
        v_BHD: its values, likewise.
        keys: slots [B,H,C,D], or entries [F,D] (D bytes of rounded ones) of which head n has capacity_N[n] from begin_N[n] on.
        values: like keys; they may be other entries of the same memory.
        positions_BHC: int64, -1 for an empty slot.
        slot_BH: int64, the token's slot; overwritten with the next token's.
        newest_B: int64, the token's position.
        state: float32 [B,H,C] by name, and "noise" [B,H,C,G], exp(noise), which already holds the new token's.
        rule: statistics to update and the victim's rule.
        scale: factor of the logits.
        sliding: the attention window in tokens.
        slopes_HG: slopes of ALiBi.
        softcap: cap of the logits, which ALiBi's are added to.
        sinks_HG: attention sinks: a logit of each query head's softmax, but not of its noisy one, that belongs to no key.
        begin_N: first entry of each head, of ragged slots; with `page`, of each of its pages [B*H,M], M pages for C slots.
        capacity_N: entries of each head, of ragged slots; None: C.
        page: slots of a page; None: each head's slots lie one after the other.
        keep_BH: int64, tokens that each head may hold, fewer than it has slots; None if no slot is empty after the write.
        first_B: int64; positions below it are never evicted.
        recent_B: int64; so many newest positions are never evicted.
        tau: temperature of "gumbel", a number or a float32 tensor with one element.
        codecs: keys and values are entries of these: numbers, or bytes.
        splits: programs that share a head's slots; None: chosen by the number of multiprocessors.

    Raises:
        KVPatchError: a tensor that is written or indexed flat is not contiguous, or the noise or the pages have another shape.
    """
    (B, H, G, D), C = q_BHGD.shape, positions_BHC.shape[-1]
    centre_BH1D = centre_of(codecs)
    flat = keys, values, positions_BHC, slot_BH, newest_B, begin_N, capacity_N, centre_BH1D, keep_BH, first_B, recent_B
    if not all(tensor is None or tensor.is_contiguous() for tensor in (*flat, slopes_HG, sinks_HG, *state.values())):
        raise KVPatchError("A decode step works in place on flat memory: hand it contiguous tensors (q, k, v may be views).")
    if page is not None and (begin_N is None or begin_N.shape != (B * H, -(-C // page))):
        shape = None if begin_N is None else tuple(begin_N.shape)
        raise KVPatchError(f"begin_N has shape {shape}, but [B*H,M] is {(B * H, -(-C // page))}: one for each page.")
    noise = state.get("noise") if "gumbel" in rule.statistics else None
    if noise is not None and noise.shape != (B, H, C, G):
        raise KVPatchError(f"noise has shape {tuple(noise.shape)}, but [B,H,C,G] is {(B, H, C, G)}: one for each query head.")
    device, heads, observes = q_BHGD.device, B * H, bool(rule.statistics)
    sizes = plan(C, heads, G, D, q_BHGD.element_size(), multiprocessors(device), splits, codecs[0].bits, page is not None)
    parts, chunks = sizes.parts, sizes.chunks if observes or rule.ranked else 0  # ranked: it evicts by value
    # logits if any statistic needs them, then p V and the softmax of every segment
    floats = heads * G * parts * ((sizes.span if observes else 0) + D + 5)  # 5: terms of the softmax
    scratch = torch.empty(floats, dtype=torch.float32, device=device)
    out = torch.empty((B, H, G, D), dtype=q_BHGD.dtype, device=device)
    # with several chunks each finds its lowest token, and a third kernel compares these
    compares = rule.ranked is not None and chunks > 1
    lowest = torch.empty((heads, chunks, 4), dtype=torch.int64, device=device) if compares else slot_BH
    unit, inner = logit_units(scale, softcap)
    # a temperature that is counted on the first layer's device is read on this one's
    heat, heat_at = (1.0, tau.to(device)) if isinstance(tau, Tensor) else (1.0 if tau is None else float(tau), None)
    with torch.cuda.device_of(q_BHGD):  # a kernel starts on the current device, which may be another layer's
        # write the token, and attend in segments; then join them to the output, update statistics and find the victim
        split_kernel[heads, parts](
            *(q_BHGD, k_BHD, v_BHD, keys, values, positions_BHC, slot_BH, newest_B, begin_N, capacity_N),
            *(centre_BH1D, slopes_HG, sinks_HG),
            *(noise, heat_at, heat, scratch, unit, inner if softcap is not None else None, sliding),
            *(*q_BHGD.stride()[:3], *k_BHD.stride()[:2], *v_BHD.stride()[:2], H, C, page),
            *(sizes.span, G, sizes.lanes, D, sizes.width, sizes.block, observes, "gumbel" in rule.statistics),
            *(codecs[0].bits, *rounded.columns(codecs[0], D), *rounded.columns(codecs[1], D)),
            num_warps=sizes.warps,
            num_stages=sizes.stages,
        )
        combine_kernel[heads, chunks + sizes.outputs](
            *(positions_BHC, slot_BH, newest_B, capacity_N, noise, heat_at, heat, scratch, lowest, out),
            *(state[name] if name in rule.statistics else None for name in STATISTICS),
            # rule.read: the statistic to choose the victim by, where this step does not update it
            *(None if rule.read is None else state[rule.read], keep_BH, first_B, recent_B, sliding, rule.decay),
            *(H, C, sizes.span, sizes.chunk, G, sizes.group, D, sizes.cells, observes, *rule.constants),
            num_warps=sizes.warps,
        )
        if compares:
            evict_kernel[heads,](positions_BHC, slot_BH, keep_BH, lowest, C, chunks, MOST_CHUNKS, num_warps=4)
    return out
