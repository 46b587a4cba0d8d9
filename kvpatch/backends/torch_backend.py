"""The torch backend: attention and statistics on any device and dtype, without an n x n tensor.

A prompt has Q query columns and attends to `past` earlier columns and to its own: row r sees columns 0 .. past + r, except
empty ones and those outside the sliding window.

Statistics need the probabilities a[t,i], which are recomputed for one block of rows at a time: from the log-sum-exp that the
attention kernel returned (a = exp(x - lse)), or by a softmax over the block's rows. In full precision on the CPU, one pass
over such blocks is cheaper than a flash kernel followed by a second Q K^T (measured up to 16,384 keys), so that pass also
computes the output.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..policies.context import Observed, accumulator
from ..policies.windows import find_oldest
from .entries import dot, mix
from .protocol import Case, Geometry, Keys, Task

CPU_BLOCK = 1 << 22  # probabilities of one block on the CPU: 16 MiB; smaller blocks spend more on calls than caches save
DEVICE_BLOCK = 1 << 26  # on other devices: 256 MiB
MASK_BLOCK = 1 << 22  # entries of an explicit mask on the CPU
EVEN = 16  # a block's rows are a multiple of it, for threads to share
FLOOR = 1e-30  # below it a probability counts as 0 where some are: float32's subnormals begin at 1.2e-38, products sooner
LOGITS = 4  # tensors of a block's size that `_attend_special` holds at once
FLOAT16 = torch.finfo(torch.float16).max
UNCOUNTED = torch.empty(0, device="cpu")  # in place of the keys that each row attends to, where nobody asks


@dataclass
class ProbabilityRows:
    """A block of a prompt's attention probabilities, which `observe` hands to its observer.

    The block has some heads of the flattened B*H, some query rows and some key columns; a `stop` is one past the last. keys_NR:
    the number of keys that each row attends to; empty unless `observe` counts them.
    """

    first_head: int
    stop_head: int
    first_row: int
    stop_row: int
    first_column: int
    stop_column: int
    p_NGRM: Tensor
    keys_NR: Tensor


Observer = Callable[[ProbabilityRows], None]


def reason(task: Task, case: Case) -> str | None:
    """Return None: torch performs every task."""
    return None


def fuses(q_BHGQD: Tensor) -> bool:
    """Tell whether `observe`, which sums a prompt's attention for a policy, should compute the output too.

    `_attend_and_sum` asks for each prompt and layer. Then the logits are computed once, not twice.
    """
    full_precision = q_BHGQD.dtype in (torch.float32, torch.float64)
    on_cpu, keeps_graph = q_BHGQD.device.type == "cpu", torch.is_grad_enabled() and q_BHGQD.requires_grad
    return on_cpu and full_precision and not keeps_graph


# ---- attention ----


def attend(q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor | None]:
    """Compute a layer's exact attention of a prompt or a replay. `attend_to` calls it where no faster backend was chosen.

    Args:
        q_BHGQD: queries.
        keys: keys and values; the last Q columns are the prompt's own.
        rows_BQ: positions of the queries, int64; -1 for padding.
        geometry: variant of attention.

    Returns:
        The output [B,H,G,Q,D], and the log-sum-exp [B,H,G,Q] if the kernel returns it for the same logits, else None.
    """
    if not geometry.plain:  # it has capped logits or attention sinks
        return _attend_special(q_BHGQD, keys, rows_BQ, geometry), None
    differentiable = torch.is_grad_enabled() and q_BHGQD.requires_grad
    B, H, G, Q, _ = q_BHGQD.shape
    # square: no keys but the prompt's own, all of which a row sees up to itself (a plain causal mask)
    square = keys.columns_before == 0 and keys.deaths_BHT is None and (geometry.sliding is None or geometry.sliding >= Q)
    q = rearrange(q_BHGQD, "b h g q d -> b (h g) q d")
    if q.device.type == "cpu" and not differentiable and (square or _all_see_the_past(keys, geometry)):
        out, lse = _attend_cpu(q, keys, geometry)
        lse = rearrange(lse, "b (h g) q -> b h g q", g=G)
        # with ALiBi the log-sum-exp is relative to one far token: too coarse for exp(x - lse)
        return rearrange(out, "b (h g) q d -> b h g q d", g=G), lse if geometry.slopes_HG is None else None
    if square and not keys.may_have_empty and geometry.slopes_HG is None:
        k, v = _per_head(q, keys.k_BHTD, keys.v_BHTD, None)
        grouped = k.shape[1] != q.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=geometry.scale, enable_gqa=grouped)
        return rearrange(out, "b (h g) q d -> b h g q d", g=G), None
    return _attend_masked(q_BHGQD, keys, rows_BQ, geometry), None


def _all_see_the_past(keys: Keys, geometry: Geometry) -> bool:
    """Tell whether there are keys before the prompt's own, and every row sees all of them with the same bias."""
    return keys.columns_before > 0 and keys.deaths_BHT is None and geometry.sliding is None and geometry.slopes_HG is None


def _attend_cpu(q_BNQD: Tensor, keys: Keys, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Attend from a prompt by the CPU's flash kernel, for `attend`; return output [B,N,Q,D] and log-sum-exp [B,N,Q].

    If the cache had keys before the prompt, they and the prompt's own keys are attended to apart, and the results joined.
    """
    past, T = keys.columns_before, keys.k_BHTD.shape[2]
    if not past:
        return _call_flash(q_BNQD, keys, geometry, causal=True)
    new, old = keys.columns(past, T), keys.columns(0, past)
    out, lse = _call_flash(q_BNQD, new, geometry, causal=True)
    # empty slots or padding
    if keys.may_have_empty:  # the kernel gives 0 for a row that sees no key
        unseen = ((new.positions_BHT >= 0).cumsum(-1) == 0).repeat_interleave(q_BNQD.shape[1] // new.k_BHTD.shape[1], 1)
        lse = lse.masked_fill(unseen, -torch.inf)
    return join_parts((out, lse), _call_flash(q_BNQD, old, geometry, causal=False))


def attends_before(q_BHGQD: Tensor, keys: Keys, geometry: Geometry) -> bool:
    """Tell whether `attend_before` has a kernel for these queries and keys; `reread_chunk` asks."""
    return q_BHGQD.device.type == "cpu" and geometry.plain and _all_see_the_past(keys, geometry)


def attend_before(q_BHGQD: Tensor, keys: Keys, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Attend in a second reading of a prompt to `keys`, all of which every row sees: return output [B,H,G,Q,D], log-sum-exp.

    `reread_chunk` calls it, and joins both with the results over the other keys, by `join_parts`.
    """
    out, lse = _call_flash(rearrange(q_BHGQD, "b h g q d -> b (h g) q d"), keys, geometry, causal=False)
    H = q_BHGQD.shape[1]
    return rearrange(out, "b (h g) q d -> b h g q d", h=H), rearrange(lse, "b (h g) q -> b h g q", h=H)


def join_parts(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return attention of the same rows over two sets of keys, computed apart: output [...,D] and log-sum-exp [...] over all.

    `_attend_cpu` and `reread_chunk` call it. one, other: (output, log-sum-exp) over each set; neither is changed.
    """
    (out, lse), (other_out, other_lse) = one, other
    total = torch.logaddexp(lse, other_lse)
    base = total.masked_fill(total == -torch.inf, 0.0)  # a row that sees no key
    share, other_share = ((part - base).exp_()[..., None] for part in (lse, other_lse))
    return (out * share).addcmul_(other_out.to(share.dtype), other_share).to(out.dtype), total


def _call_flash(q_BNQD: Tensor, keys: Keys, geometry: Geometry, causal: bool) -> tuple[Tensor, Tensor]:
    """Call the CPU's flash kernel: return a prompt's output [B,N,Q,D], and the log-sum-exp [B,N,Q] that `join_parts` needs.

    `_attend_cpu` and `attend_before` call it. causal: row i sees the keys up to column i. Else all rows see all keys; if all
    slots are empty, the log-sum-exp is -inf.
    """
    bias = _key_bias(keys, geometry, q_BNQD.dtype, causal)
    if bias is not None and bias.shape[1] != 1:
        bias = bias.repeat_interleave(q_BNQD.shape[1] // bias.shape[1], 1)
    q, k, v = _of_one_size(q_BNQD, keys.k_BHTD, keys.v_BHTD)  # keys and values padded to one size
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attend(q, k, v, 0.0, causal, attn_mask=bias, scale=geometry.scale)
    if keys.may_have_empty and not causal:
        none = (keys.positions_BHT < 0).all(-1).repeat_interleave(q_BNQD.shape[1] // keys.k_BHTD.shape[1], 1)
        lse = lse.masked_fill(none[..., None], -torch.inf)  # with `causal`, `_attend_cpu` does so before it joins parts
    return out[..., : keys.v_BHTD.shape[-1]], lse


def _of_one_size(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Fill up queries, keys and values with zeros to the size of the largest, for a kernel that takes heads of one size."""
    D = max(tensor.shape[-1] for tensor in tensors)
    return tuple(tensor if tensor.shape[-1] == D else F.pad(tensor, (0, D - tensor.shape[-1])) for tensor in tensors)


def _key_bias(keys: Keys, geometry: Geometry, dtype: torch.dtype, shared: bool) -> Tensor | None:
    """Return what `_call_flash` adds to each key's logits: ALiBi, and -inf for empty slots; None if neither is there.

    The bias is the same for all queries: [B|1,H*G|1,1,T] if all heads hold the same positions (`shared`), else [B,H,1,T].
    """
    if not keys.may_have_empty and geometry.slopes_HG is None:
        return None
    positions = keys.positions_BHT[:, :1] if shared else keys.positions_BHT
    bias = torch.zeros(positions.shape, dtype=accumulator(dtype), device=positions.device)[:, :, None]
    if geometry.slopes_HG is not None:
        slopes, newest = geometry.slopes_HG.reshape(1, -1, 1, 1).to(bias.dtype), positions.amax(-1, keepdim=True)
        bias = _find_alibi(slopes, positions[:, :, None], newest[:, :, None], geometry)  # relative to the newest key
    return bias.masked_fill(positions[:, :, None] < 0, -torch.inf) if keys.may_have_empty else bias


def _attend_masked(q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor, geometry: Geometry) -> Tensor:
    """Attend from a prompt by torch's kernel where a causal mask is not enough: block by block, each with a mask.

    `attend` calls it with windows, with keys before the prompt, and in a replay (a text read in one pass, for training, in
    which each key is masked from the position at which a cache would have evicted it).
    """
    B, H, G, Q, _ = q_BHGQD.shape
    k_BHTD, v_BHTD, dtype = keys.k_BHTD, keys.v_BHTD, q_BHGQD.dtype
    if geometry.slopes_HG is not None:  # ALiBi's bias exceeds half precision
        q_BHGQD, k_BHTD, v_BHTD = (t.to(accumulator(dtype)) for t in (q_BHGQD, k_BHTD, v_BHTD))
    alike = keys.columns_before == 0 and keys.deaths_BHT is None  # one mask serves all heads
    heads = H * G if geometry.slopes_HG is not None else (1 if alike else H)

    def attend_rows(q_BHGQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, start: int, stop: int) -> Tensor:
        """Return the output of rows [start, stop), a block of the prompt; `_attend_in_blocks` calls it for each."""
        lo, hi = _find_columns(keys, geometry, start, stop)
        visible = _find_visible(keys, rows_BQ, geometry, start, stop, lo, hi)
        q = rearrange(q_BHGQD[:, :, :, start:stop], "b h g r d -> b (h g) r d")
        if geometry.slopes_HG is None:
            mask = visible if visible.shape[1] == 1 else visible.repeat_interleave(G, 1)
        else:
            slopes, places = geometry.slopes_HG[None, :, :, None, None].to(q.dtype), keys.positions_BHT[:, :, None, None, lo:hi]
            bias = _find_alibi(slopes, places, rows_BQ[:, None, None, start:stop, None], geometry)
            mask = rearrange(bias.masked_fill(~visible[:, :, None], -torch.inf), "b h g r m -> b (h g) r m")
        k, v = _per_head(q, k_BHTD[:, :, lo:hi], v_BHTD[:, :, lo:hi], mask)
        grouped = k.shape[1] != q.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=geometry.scale, enable_gqa=grouped)
        return rearrange(out, "b (h g) r d -> b h g r d", g=G)

    blocks = mask_blocks(q_BHGQD.device.type, B * heads, Q, keys, geometry)
    return _attend_in_blocks(attend_rows, blocks, keys, q_BHGQD, k_BHTD, v_BHTD).to(dtype)


def _attend_in_blocks(
    attend_rows: Callable[..., Tensor], blocks: Iterator[tuple[int, int]], keys: Keys, *inputs: Tensor
) -> Tensor:
    """Return the outputs of attend_rows(*inputs, start, stop) for all blocks of rows, joined.

    `_attend_masked` and `_attend_special` call it. Only one block's masks or logits exist at a time. In a replay with
    gradients, where masks differ by head, the backward pass computes each block again.
    """
    if keys.deaths_BHT is not None and torch.is_grad_enabled():
        attend_rows = functools.partial(checkpoint, attend_rows, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([attend_rows(*inputs, start, stop) for start, stop in blocks], 3)


def mask_blocks(device: str, heads: int, Q: int, keys: Keys, geometry: Geometry) -> Iterator[tuple[int, int]]:
    """Yield blocks [start, stop) of a prompt's rows, so short that their masks, one for each of `heads` heads, are bounded.

    `_attend_masked` and `_attend_special` attend to the prompt block by block.
    """
    most, start = (MASK_BLOCK if device == "cpu" else DEVICE_BLOCK) // heads, 0
    while start < Q:
        lo, hi = _find_columns(keys, geometry, start, start)  # columns before the first row, which sees one more; R rows see R
        # the greatest R with R * (hi - lo + R) <= most
        size = (math.isqrt((hi - lo) ** 2 + 4 * most) - (hi - lo)) // 2
        stop = min(start + max(size, 1), Q)
        yield start, stop
        start = stop


def _per_head(q_BNQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return keys and values for torch's attention, repeated for each query head where no fused kernel takes grouped heads.

    `attend` and `_attend_masked` call it. On a GPU that is so in float32, with a mask, or if the GPU is old; without a copy
    torch would compute all logits at once.
    """
    G = q_BNQD.shape[1] // k_BHTD.shape[1]
    if G == 1 or q_BNQD.device.type == "cpu":
        return k_BHTD, v_BHTD
    cuda = torch.backends.cuda
    inputs: list[Any] = [q_BNQD, k_BHTD, v_BHTD]
    # torch's own description of a call
    params = cuda.SDPAParams(*inputs, mask, 0.0, mask is None, True)  # type: ignore[call-arg]
    fused = (cuda.can_use_flash_attention, cuda.can_use_cudnn_attention, cuda.can_use_efficient_attention)
    if any(can_use(params) for can_use in fused):
        return k_BHTD, v_BHTD
    return k_BHTD.repeat_interleave(G, 1), v_BHTD.repeat_interleave(G, 1)


def _attend_special(q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor, geometry: Geometry) -> Tensor:
    """Attend from a prompt with capped logits or attention sinks, which no fused kernel of torch has; for `attend`.

    Works in blocks of rows. Padding stays in: its rows see themselves, and nobody reads them.
    """
    assert geometry.slopes_HG is None, "no architecture has both"
    B, H, G, Q, _ = q_BHGQD.shape
    dtype = accumulator(q_BHGQD.dtype)  # of sums: float32 for 16 bits
    k, v = (t.to(dtype)[:, :, None] for t in (keys.k_BHTD, keys.v_BHTD))

    def attend_rows(q_BHGQD: Tensor, k: Tensor, v: Tensor, start: int, stop: int) -> Tensor:
        """Return the output of rows [start, stop), a block of the prompt; `_attend_in_blocks` calls it for each."""
        lo, hi = _find_columns(keys, geometry, start, stop)
        x = q_BHGQD[:, :, :, start:stop].to(dtype) * geometry.scale @ k[:, :, :, lo:hi].transpose(-1, -2)
        visible = _find_visible(keys, rows_BQ, geometry, start, stop, lo, hi)[:, :, None]
        p = weigh_logits(_cap_logits(x, geometry).masked_fill(~visible, -torch.inf), geometry)
        return p @ v[:, :, :, lo:hi]

    # logits exist in several copies (LOGITS) and for each head: so many masks' worth of memory
    blocks = mask_blocks(q_BHGQD.device.type, LOGITS * B * H * G, Q, keys, geometry)
    return _attend_in_blocks(attend_rows, blocks, keys, q_BHGQD, k, v).to(q_BHGQD.dtype)


def _find_alibi(slopes: Tensor, positions: Tensor, origin: Tensor, geometry: Geometry) -> Tensor:
    """Return the ALiBi bias of keys at `positions` less that of a key at `origin`, which leaves the softmax as it is.

    `_key_bias`, `_step_bias` and masks of blocks use it. `coarse`: a factor, if the model rounds slopes and positions to
    bfloat16 (Falcon).
    """
    if geometry.coarse is None:
        return slopes * (positions - origin)
    rounded = (slopes / geometry.coarse).bfloat16()  # as Falcon's own code computes it
    of_keys, of_origin = ((rounded * place.bfloat16()).to(slopes.dtype) for place in (positions, origin))
    return (of_keys - of_origin) * geometry.coarse


def _cap_logits(x: Tensor, geometry: Geometry) -> Tensor:
    """Return scaled logits, capped if the layer has a softcap (as Gemma 2's layers have)."""
    return x if geometry.softcap is None else geometry.softcap * torch.tanh(x / geometry.softcap)


def weigh_logits(x: Tensor, geometry: Geometry, sinks: Tensor | None = None) -> Tensor:
    """Return the softmax of logits over their last axis [B,H,G,...,M], with attention sinks in the denominator.

    `step`, `observe` and others call it for probabilities. An attention sink is a logit of no key, so that a row may add up to
    less than 1. sinks: these logits, broadcast to `x[..., :1]`; None: those of `geometry`. If the model has no sinks, they are
    ignored. M: keys.
    """
    if geometry.sinks_HG is None:
        return x.softmax(-1)
    if sinks is None:
        sinks = geometry.sinks_HG.view(*geometry.sinks_HG.shape, *(1,) * (x.ndim - 3))
    return torch.cat([x, sinks.to(x.dtype).expand(*x.shape[:-1], 1)], -1).softmax(-1)[..., :-1]


def sum_logits(x: Tensor, geometry: Geometry) -> Tensor:
    """Return the log-sum-exp [B,H,G,R] of logits [B,H,G,R,M] over the M keys of each of R rows, attention sinks included."""
    lse = x.logsumexp(-1)
    return lse if geometry.sinks_HG is None else torch.logaddexp(lse, geometry.sinks_HG[..., None].to(x.dtype))


def _find_columns(keys: Keys, geometry: Geometry, start: int, stop: int) -> tuple[int, int]:
    """Return the range [lo, hi) of key columns that rows [start, stop) of a prompt can see, for `observe` and `mask_blocks`."""
    lo = 0
    if geometry.sliding is not None and keys.ordered:  # no window reaches further back, and a chunk's may reach less far
        lo = max(keys.columns_before + start - geometry.sliding + 1, 0)
    return lo, keys.columns_before + stop


def _find_visible(keys: Keys, rows_BQ: Tensor, geometry: Geometry, start: int, stop: int, lo: int, hi: int) -> Tensor:
    """Return the mask [B,1|H,R,M] of keys that a block of a prompt's rows sees. A row of padding sees itself (else NaN).

    `_attend_masked` and `_attend_special` call it for each block: rows [start, stop), key columns [lo, hi). In a replay
    `deaths_BHT` has the position at which each key was evicted.
    """
    positions = keys.positions_BHT[:, :1] if keys.columns_before == 0 else keys.positions_BHT
    positions, rows = positions[:, :, None, lo:hi], rows_BQ[:, None, start:stop, None]
    column = torch.arange(lo, hi, device=rows.device)
    row = keys.columns_before + torch.arange(start, stop, device=rows.device)[:, None]
    visible = (column <= row) & (positions >= 0)
    if geometry.sliding is not None:
        visible = visible & (positions >= find_oldest(geometry.sliding, rows))  # first position in a row's window or chunk
    if keys.deaths_BHT is not None:
        visible = visible & (rows < keys.deaths_BHT[:, :, None, lo:hi])
    return visible | ((column == row) & ~visible.any(-1, keepdim=True)) if keys.may_have_empty else visible


# ---- statistics ----


@torch.no_grad()
def observe(
    q_BHGQD: Tensor,
    keys: Keys,
    rows_BQ: Tensor,
    geometry: Geometry,
    lse: Tensor | None,
    observer: Observer,
    count: bool = False,
    out: Tensor | None = None,
    ends: Sequence[int] | None = None,
) -> None:
    """Compute the probabilities of all rows block by block, and call an observer with each block.

    `_attend_and_sum` calls it for each layer while a prompt is read, for sums that a policy scores by; `window_sums` and others
    for a prompt's last rows. Fills `out` in place, and nothing else.

    Args:
        q_BHGQD: queries.
        keys: keys and values.
        rows_BQ: positions of the queries, -1 for padding.
        geometry: variant of attention.
        lse: log-sum-exp [B,H,G,Q] of the rows, if a kernel returned it.
        observer: called with each block, whose probabilities are overwritten afterwards.
        count: whether to set `ProbabilityRows.keys_NR`.
        out: attention output [B,H,G,Q,D] to fill; None if it is not needed.
        ends: for each row the number of key columns up to its own, where `q_BHGQD` has only some of the prompt's rows: the
            causal mask then compares positions. None: row i's own column is `columns_before + i`.
    """
    B, H, G, Q, _ = q_BHGQD.shape
    dtype = accumulator(q_BHGQD.dtype)  # of sums: float32 for 16 bits
    on_cpu = q_BHGQD.device.type == "cpu"
    budget, threads = (CPU_BLOCK, torch.get_num_threads()) if on_cpu else (DEVICE_BLOCK, 1)
    q_NGQD, k_NTD, v_NTD = (t.flatten(0, 1) for t in (q_BHGQD, keys.k_BHTD, keys.v_BHTD))
    # with a known log-sum-exp, probabilities are exp(x - lse). Not with ALiBi, which is added block by block from another
    # origin than a kernel's, and not with capped logits
    usable = geometry.slopes_HG is None and geometry.softcap is None
    lse_NGQ = lse.flatten(0, 1) if lse is not None and usable else None
    out_NGQD = None if out is None else out.view(B * H, G, Q, -1)
    mask = _Mask(keys, rows_BQ, geometry, ends)
    ends = range(keys.columns_before + 1, keys.columns_before + Q + 1) if ends is None else ends
    sinks_NG11 = None if geometry.sinks_HG is None else geometry.sinks_HG.repeat(B, 1)[:, :, None, None]
    blocks = [  # rows [start, stop), which see keys in columns [lo, hi)
        (start, stop, _find_columns(keys, geometry, start, stop)[0], ends[stop - 1])
        for start, stop in _row_blocks(ends, budget // (2 * G), G)
    ]
    most = max(((stop - start) * (hi - lo) for start, stop, lo, hi in blocks), default=1)
    heads = min(round(budget / (G * most)), B * H)  # two, if a head's largest block is half the budget, as it is meant to be
    heads = heads // threads * threads or 1
    # one buffer for the logits of all blocks: each new one would be mapped and cleared first, which costs as much as a product
    buffer = torch.empty(heads * G * most, dtype=dtype, device=q_BHGQD.device)
    for n0 in range(0, B * H, heads):
        n1 = min(n0 + heads, B * H)
        q, kt, v = q_NGQD[n0:n1].to(dtype), k_NTD[n0:n1].to(dtype).transpose(1, 2), v_NTD[n0:n1]
        for start, stop, lo, hi in blocks:
            # logits x of the block: R rows of each of G query heads of heads n0 to n1, times M keys
            rows = rearrange(q[:, :, start:stop], "n g r d -> n (g r) d")
            x = buffer[: rows.shape[0] * rows.shape[1] * (hi - lo)].view(*rows.shape[:2], hi - lo)
            parts = threads if n1 - n0 == 1 and rows.shape[1] % threads == 0 else 1
            if lse_NGQ is None:
                x = _cap_logits(_multiply_rows(rows, kt[:, :, lo:hi], parts, x, geometry.scale), geometry)
            else:
                x.copy_(rearrange(lse_NGQ[n0:n1, :, start:stop], "n g r -> n (g r) 1"))
                x = _multiply_rows(rows, kt[:, :, lo:hi], parts, x, geometry.scale, minus=True)
            x = rearrange(x, "n (g r) m -> n g r m", g=G)
            mask.apply(x, n0, n1, start, stop, lo, hi)
            seen_NR = mask.count(x, start, stop) if count else UNCOUNTED  # UNCOUNTED: an empty tensor
            if count and lse_NGQ is not None:
                # a row's only key has probability 1; exp(x - lse) may round above 1, which would count as more than its share
                seen_NR = seen_NR.masked_fill(seen_NR == 1, 0)
            # probabilities, in place
            if lse_NGQ is None and on_cpu and geometry.sinks_HG is None:
                p = torch.softmax(x, -1, out=x)  # in place: a second block would not fit into the core's cache
            elif lse_NGQ is None:
                p = weigh_logits(x, geometry, None if sinks_NG11 is None else sinks_NG11[n0:n1])
            else:
                p = x.exp_()
            if on_cpu and dtype == torch.float32:
                _clear_smallest(p)
            mask.zero_padding(p, n0, n1, start, stop)
            # the output of the block's rows, if it is wanted
            if out_NGQD is not None:
                block = out_NGQD.new_empty(*rows.shape[:2], v.shape[2])
                _multiply_rows(rearrange(p, "n g r m -> n (g r) m"), v[:, lo:hi], parts, block)
                out_NGQD[n0:n1, :, start:stop] = rearrange(block, "n (g r) d -> n g r d", g=G)
            observer(ProbabilityRows(n0, n1, start, stop, lo, hi, p, seen_NR))


def _clear_smallest(p_NGRM: Tensor) -> None:
    """Set probabilities below FLOOR to 0 in place, in heads whose last row has some: a CPU is slow with subnormal numbers.

    `observe` calls it for each block. Each head is judged alone: which heads share a block depends on the number of threads,
    and results must not.
    """
    last_NGM = p_NGRM[:, :, -1]
    for n in ((last_NGM > 0) & (last_NGM < FLOOR)).any(-1).any(-1).nonzero().flatten().tolist():
        torch.threshold_(p_NGRM[n], FLOOR, 0.0)


def _multiply_rows(
    a_NLK: Tensor, b_NKM: Tensor, parts: int, out_NLM: Tensor, scale: float = 1.0, minus: bool = False
) -> Tensor:
    """Write scale * a @ b to `out_NLM` and return it, for a block of `observe`: its logits, or its part of the output.

    minus: subtract what `out_NLM` held before, the rows' log-sum-exp, so that exp() gives probabilities. parts: a single
    matrix (N = 1) is cut into so many blocks of rows, a batch: the CPU's library gives each matrix of a batch to a thread of
    its own, and shares out a single one less well.
    """
    out = out_NLM
    if parts > 1:
        a_NLK, b_NKM = a_NLK.view(parts, -1, a_NLK.shape[2]), b_NKM.expand(parts, -1, -1)
        out = out.view(parts, -1, out.shape[2])
    torch.baddbmm(out, a_NLK, b_NKM, beta=-1 if minus else 0, alpha=scale, out=out)
    return out_NLM


def _row_blocks(ends: Sequence[int], entries: int, G: int) -> Iterator[tuple[int, int]]:
    """Yield the rows [start, stop) of `observe`'s blocks, of about `entries` probabilities of one query head at most.

    A block reads all keys and values that it sees, so it has 128 queries of the group or more (but for the last block); it also
    computes logits of keys that its first rows do not see, so where keys are many its rows are about an eighth of them, or
    fewer. Blocks do not depend on the number of threads, so neither do the sums over them.
    """
    # EVEN: a block's rows are a multiple of it; ends[i]: keys that row i sees
    start, least = 0, -(-128 // (G * EVEN)) * EVEN
    while start < len(ends):
        size = max(least, min(256, entries // (ends[start] + 127), (ends[start] + 1023) // 8))
        stop = min(len(ends), start + size // EVEN * EVEN)
        yield start, stop
        start = stop


class _Mask:
    """Masks of one call of `observe`: adds ALiBi to its blocks of logits, and sets invisible keys to -inf."""

    def __init__(self, keys: Keys, rows_BQ: Tensor, geometry: Geometry, ends: Sequence[int] | None = None) -> None:
        """Store what the masks of all blocks share. Each call of `observe` makes one _Mask, and explains the arguments."""
        self.keys, self.geometry, self.ends = keys, geometry, ends
        self.future: Tensor | None = None  # of the tallest block so far
        B, H, _ = keys.positions_BHT.shape
        self.padded = keys.may_have_empty
        self.positions_NT = keys.positions_BHT.flatten(0, 1)
        self.rows_NQ = rows_BQ[:, None].expand(B, H, -1).flatten(0, 1)
        if geometry.slopes_HG is not None:
            self.slopes_NG = geometry.slopes_HG.repeat(B, 1)

    def apply(self, x_NGRM: Tensor, n0: int, n1: int, start: int, stop: int, lo: int, hi: int) -> None:
        """Add ALiBi and masks to a block of `observe` in place: heads [n0, n1), rows [start, stop), key columns [lo, hi)."""
        R = stop - start
        positions = self.positions_NT[n0:n1, None, None, lo:hi]
        if self.geometry.slopes_HG is not None:
            # relative to the block's last row, so that large distances do not cancel
            slopes, last = self.slopes_NG[n0:n1, :, None, None], self.rows_NQ[n0:n1, None, None, stop - 1 : stop]
            x_NGRM += _find_alibi(slopes.to(x_NGRM.dtype), positions, last, self.geometry)
        if self.ends is None:
            if self.future is None or len(self.future) < R:  # future: True above the diagonal
                self.future = torch.ones(R, R, dtype=torch.bool, device=x_NGRM.device).triu(1)
            x_NGRM[..., -R:].masked_fill_(self.future[:R, :R], -torch.inf)
        else:  # only some rows of the prompt: their own columns are not the last ones, so positions are compared
            # all rows of the block see the keys before the first one's own column, if that is known (_find_ends)
            first = 0 if self.padded or self.ends[start] == self.keys.k_BHTD.shape[2] else self.ends[start] - lo
            unseen = positions[..., first:] > self.rows_NQ[n0:n1, None, start:stop, None]
            x_NGRM[..., first:].masked_fill_(unseen, -torch.inf)
        if self.padded:
            x_NGRM.masked_fill_(positions < 0, -torch.inf)
        if self.geometry.sliding is not None:
            # before the row's window or chunk
            gone = positions < find_oldest(self.geometry.sliding, self.rows_NQ[n0:n1, None, start:stop, None])
            x_NGRM.masked_fill_(gone, -torch.inf)

    def count(self, x_NGRM: Tensor, start: int, stop: int) -> Tensor:
        """Return the number of keys [N,R] that each row of a masked block attends to.

        `observe` asks for the statistic "count", which compares a probability with an even share, 1 / that number.
        """
        if self.ends is None and not self.padded and self.geometry.sliding is None:
            row_R = torch.arange(start, stop, device=x_NGRM.device)
            return (self.keys.columns_before + 1 + row_R).expand(len(x_NGRM), -1)
        return (x_NGRM[:, 0] > -torch.inf).sum(-1)

    def zero_padding(self, p_NGRM: Tensor, n0: int, n1: int, start: int, stop: int) -> None:
        """Set the probabilities of padding rows to zero in place; they are NaN in a row that sees no key."""
        if self.padded or self.ends is not None:
            p_NGRM.masked_fill_(self.rows_NQ[n0:n1, None, start:stop, None] < 0, 0.0)


@torch.no_grad()
def find_greatest(
    q_BHGQD: Tensor,
    keys: Keys,
    rows_BQ: Tensor,
    geometry: Geometry,
    lse_BHGQ: Tensor | None,
    factor_BQ: Tensor | None = None,
) -> Tensor:
    """Return the greatest probability that a row of each query head gives each earlier key of a prompt, [B,H,G,past].

    `reread_chunk` calls it for KVzip's score: the rows are a second reading of a chunk of the prompt. Each sees all earlier
    keys; if the rows' log-sum-exp is known, the logits of the rows' own keys are not computed. Changes nothing.

    Args:
        q_BHGQD: queries.
        keys: keys and values; the last Q columns are the rows' own.
        rows_BQ: positions of the queries, -1 for padding.
        geometry: variant of attention.
        lse_BHGQ: log-sum-exp of the rows, if a kernel returned it.
        factor_BQ: positive factor of each row's probabilities; None for 1.
    """
    (B, H, G, Q, _), past, dtype = q_BHGQD.shape, keys.columns_before, accumulator(q_BHGQD.dtype)
    # rows see unequal keys, or logits are needed
    if lse_BHGQ is None or not _all_see_the_past(keys, geometry) or geometry.softcap is not None:
        return _greatest_of_all(q_BHGQD, keys, rows_BQ, geometry, factor_BQ)
    # the greatest of factor * exp(x - lse) over the rows is exp of the greatest x - (lse - log factor): one exp for each key.
    # The shift of padding is +inf, so that its rows give 0
    shift_BHGQ = lse_BHGQ.to(dtype)
    if factor_BQ is not None:
        shift_BHGQ = shift_BHGQ - factor_BQ.to(dtype).log()[:, None, None]
    minus_N1Q = -shift_BHGQ.masked_fill(rows_BQ[:, None, None] < 0, torch.inf).flatten(0, 2)[:, None]
    q_NQD, k_NTD = q_BHGQD.flatten(0, 2), keys.k_BHTD[:, :, :past].flatten(0, 1)
    most_NT = torch.full((B * H * G, past), -torch.inf, dtype=dtype, device=q_NQD.device)
    heads, rows = _size_blocks(B * H, past, q_NQD.device.type == "cpu")
    for n0 in range(0, B * H, heads):
        k = k_NTD[n0 : n0 + heads].to(dtype) * geometry.scale
        for g in range(G):
            query_heads = slice(n0 * G + g, (n0 + heads) * G, G)  # number g of each group: keys are not repeated for a group
            for r0 in range(0, Q, rows):
                block = slice(r0, r0 + rows)
                x_NTR = torch.baddbmm(minus_N1Q[query_heads, :, block], k, q_NQD[query_heads, block].to(dtype).transpose(1, 2))
                most_NT[query_heads] = torch.maximum(most_NT[query_heads], x_NTR.amax(-1))
    most_BHGT = most_NT.view(B, H, G, past)
    if keys.may_have_empty:
        most_BHGT.masked_fill_(keys.positions_BHT[:, :, None, :past] < 0, -torch.inf)
    return most_BHGT.exp_()


def _greatest_of_all(q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor, geometry: Geometry, factor_BQ: Tensor | None) -> Tensor:
    """Return what `find_greatest` returns, which calls it for a window, ALiBi, capped logits, or without a log-sum-exp.

    The probabilities of all rows are computed block by block, by `observe`, also over the rows' own keys.
    """
    (B, H, G, Q, _), past = q_BHGQD.shape, keys.columns_before
    most_NGT = torch.zeros(B * H, G, past, dtype=accumulator(q_BHGQD.dtype), device=q_BHGQD.device)
    factor_NQ = None
    if factor_BQ is not None:
        factor_NQ = factor_BQ.masked_fill(rows_BQ < 0, 0.0).to(most_NGT.dtype).repeat_interleave(H, 0)  # 0 for padding

    def keep_highest(rows: ProbabilityRows) -> None:
        """Raise `most_NGT` in place to the probabilities of a block; `observe` calls it for each."""
        block = most_NGT[rows.first_head : rows.stop_head, :, rows.first_column : rows.stop_column]
        p = rows.p_NGRM[..., : block.shape[2]]
        if factor_NQ is not None:
            p = p * factor_NQ[rows.first_head : rows.stop_head, None, rows.first_row : rows.stop_row, None]
        torch.maximum(block, p.amax(2), out=block)

    observe(q_BHGQD, keys, rows_BQ, geometry, None, keep_highest, ends=range(past + 1, past + Q + 1))
    return most_NGT.view(B, H, G, past)


def _size_blocks(N: int, keys: int, on_cpu: bool) -> tuple[int, int]:
    """Return how many of N heads and how many rows make one block of logits over `keys` keys, for `find_greatest`.

    On the CPU a block has one head and 32 to 256 rows; on other devices it has 64 rows or more, and the heads that then fit.
    """
    if on_cpu:
        return 1, max(32, min(256, CPU_BLOCK // keys))
    heads = max(1, min(N, DEVICE_BLOCK // (64 * keys)))
    return heads, max(64, DEVICE_BLOCK // (heads * keys))


def window_sums(
    q_BHGWD: Tensor, keys: Keys, rows_BW: Tensor, geometry: Geometry, lse_BHGW: Tensor | None = None, last: bool = False
) -> Tensor:
    """Return the attention [B,H,T] that some rows of a prompt (a window) pay each key, for scores such as SnapKV's.

    `_score_by_window` calls it when a prompt has been read. It is summed over rows, and averaged over the group of query heads.

    Args:
        q_BHGWD: queries of the window.
        keys: keys and values.
        rows_BW: positions of the queries; -1 for rows that do not count.
        geometry: variant of attention.
        lse_BHGW: log-sum-exp of the rows, if a kernel returned it.
        last: whether these are the prompt's last rows, in their order.
    """
    B, H, G, W, _ = q_BHGWD.shape
    T = keys.k_BHTD.shape[2]
    total_NT = torch.zeros(B * H, T, dtype=accumulator(q_BHGWD.dtype), device=q_BHGWD.device)

    def add(rows: ProbabilityRows) -> None:
        """Add a block's probabilities, summed over its rows and query heads, to `total_NT` in place; `observe` calls it."""
        total_NT[rows.first_head : rows.stop_head, rows.first_column : rows.stop_column] += rows.p_NGRM.sum((1, 2))

    observe(q_BHGWD, keys, rows_BW, geometry, lse_BHGW, add, ends=_find_ends(keys, W, last))
    return total_NT.view(B, H, T) / G


def window_folds(
    q_BHGWD: Tensor,
    keys: Keys,
    rows_BW: Tensor,
    geometry: Geometry,
    lse_BHGW: Tensor | None,
    candidate_BHT: Tensor,
    fold: Callable[[Observed], Tensor],
    join: Callable[[Tensor, Tensor], Tensor],
    last: bool = False,
) -> Tensor:
    """Return a number for each key [B,H,T]: what `fold` computes from the attention of some rows (an observation window).

    `_score_by_window` calls it when a prompt has been read, for policies whose score is another function of that attention than
    its sum (`fold`). candidate_BHT: bool, keys before the window. fold: takes an Observed (probabilities and values, keys in
    text order), and returns a number for each key. join: joins two such results, of two blocks of rows. `window_sums` explains
    the others.
    """
    B, H, _, W, _ = q_BHGWD.shape
    T = keys.k_BHTD.shape[2]
    order_NT = keys.positions_BHT.flatten(0, 1).argsort(-1)  # text order, empty slots first
    candidate_NT = candidate_BHT.flatten(0, 1).gather(-1, order_NT)
    found_NT = torch.zeros(B * H, T, dtype=accumulator(q_BHGWD.dtype), device=q_BHGWD.device)
    v_NTD = keys.v_BHTD.flatten(0, 1)

    def fold_rows(rows: ProbabilityRows) -> None:
        """Join to `found_NT` in place, by `join`, the number for each key that `fold` makes of a block; `observe` calls it.

        A block has some heads (N) and some rows. candidate_NT: keys before the window, in text order.
        """
        heads = slice(rows.first_head, rows.stop_head)
        p = F.pad(rows.p_NGRM, (rows.first_column, T - rows.stop_column))
        p = p.gather(-1, order_NT[heads, None, None].expand_as(p))  # columns in text order

        def values() -> Tensor:
            """Return the values of the block's heads in text order; `fold` asks if it needs them."""
            return v_NTD[heads].gather(1, order_NT[heads, :, None].expand(-1, -1, v_NTD.shape[-1]))

        found_NT[heads] = join(found_NT[heads], fold(Observed(p, candidate_NT[heads], values)))

    observe(q_BHGWD, keys, rows_BW, geometry, lse_BHGW, fold_rows, ends=_find_ends(keys, W, last))
    return torch.empty_like(found_NT).scatter_(-1, order_NT, found_NT).view(B, H, T)


def _find_ends(keys: Keys, W: int, last: bool) -> Sequence[int]:
    """Return up to which column each of W rows may see keys, for `observe`: its own if it is known, else all columns.

    It is known of the last rows of a prompt without padding. Else the mask compares positions. `window_sums` and
    `window_folds` call it.
    """
    T = keys.k_BHTD.shape[2]
    return range(T - W + 1, T + 1) if last and not keys.may_have_empty else [T] * W


def window_logits(q_BHGWD: Tensor, k_BHTD: Tensor, positions_BHT: Tensor, rows_BW: Tensor, geometry: Geometry) -> Tensor:
    """Return the unmasked logits [B,H,G,W,T] of a layer's stored last queries, at positions `rows_BW`. Changes nothing.

    `Call.logits` calls it for scores that compare the last queries with all keys.
    """
    dtype = accumulator(q_BHGWD.dtype)  # of sums: float32 for 16 bits
    q = q_BHGWD.to(dtype) * geometry.scale
    x = (q.flatten(2, 3) @ k_BHTD.to(dtype).mT).unflatten(2, q.shape[2:4])  # keys are not copied for each query head
    if geometry.slopes_HG is not None:
        slopes = geometry.slopes_HG[None, :, :, None, None].to(dtype)
        x = x + _find_alibi(slopes, positions_BHT[:, :, None, None], rows_BW[:, None, None, :, None], geometry)
    return _cap_logits(x, geometry)


# ---- decode ----


def step(
    q_BHGD: Tensor,
    keys: Keys,
    newest_B11: Tensor,
    geometry: Geometry,
    probabilities: bool,
    buffer: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend from one query per batch row and head: a decode step of a layer. Only `buffer` is changed.

    `_run_torch` calls it where no kernel takes the step. Empty slots and tokens beyond a window are masked here.

    Args:
        q_BHGD: queries.
        keys: keys and values; with `head_offsets` they are flat [F,D], whatever their names say.
        newest_B11: position of the query's token.
        geometry: variant of attention.
        probabilities: whether to return probabilities.
        buffer: tensor [B,H,G,T] to write the probabilities to, or None.

    Returns:
        The output [B,H,G,D], and the probabilities [B,H,G,T] or None.
    """
    offsets, bias = keys.head_offsets, _step_bias(keys, newest_B11, geometry, q_BHGD.dtype)
    half = q_BHGD.dtype != accumulator(q_BHGD.dtype)  # 16-bit numbers: sums are in float32
    out = None
    # torch's kernel takes dense unrounded keys and no special logits; ALiBi's bias is too coarse in half precision
    fused = offsets is None and geometry.plain and keys.exact and not (half and geometry.slopes_HG is not None)
    if fused and (half or not probabilities):  # in full precision, probabilities that are wanted serve for the output too
        out = F.scaled_dot_product_attention(q_BHGD, keys.k_BHTD, keys.v_BHTD, attn_mask=bias, scale=geometry.scale)
        if not probabilities:
            return out, None
    # the logits [B,H,G,T]: of dense keys, or of heads of different lengths
    if offsets is None:
        x = _clamp_logits(dot(q_BHGD * geometry.scale, keys.k_BHTD, keys.codecs[0])).to(accumulator(q_BHGD.dtype))
    else:
        q_NGD = q_BHGD.to(accumulator(q_BHGD.dtype)).flatten(0, 1) * geometry.scale
        x = offsets.multiply_keys(q_NGD, keys.k_BHTD, keys.codecs[0]).unflatten(0, q_BHGD.shape[:2])
    x = _cap_logits(x, geometry)
    x = x if bias is None else x.add_(bias)
    # the probabilities, in the buffer if there is one
    if buffer is None or x.requires_grad or not geometry.plain:
        p = weigh_logits(x, geometry)
        if buffer is not None:
            buffer.copy_(p.detach())
    else:
        p = torch.softmax(x, -1, out=buffer)
    # the output, unless torch's kernel has computed it
    if offsets is not None:
        out = offsets.mix_values(p.flatten(0, 1), keys.v_BHTD, keys.codecs[1]).unflatten(0, q_BHGD.shape[:2]).to(q_BHGD.dtype)
    elif out is None:
        out = mix(p, keys.v_BHTD, keys.codecs[1], q_BHGD.dtype)
    return out, p if probabilities else None


def _clamp_logits(x: Tensor) -> Tensor:
    """Clamp float16 logits to finite numbers, since an infinite logit would make its whole row NaN."""
    return x.clamp(-FLOAT16, FLOAT16) if x.dtype == torch.float16 else x


def _step_bias(keys: Keys, newest_B11: Tensor, geometry: Geometry, dtype: torch.dtype) -> Tensor | None:
    """Return the bias of `step`'s logits [B,H,1|G,T]: ALiBi, and -inf for masked keys; None if there is no bias."""
    if not keys.may_have_empty and geometry.slopes_HG is None and geometry.sliding is None:
        return None
    positions = keys.positions_BHT
    if geometry.slopes_HG is None:
        bias = torch.zeros(positions.shape, dtype=dtype, device=positions.device)[:, :, None]
    else:
        slopes = geometry.slopes_HG[None, :, :, None].to(accumulator(dtype))
        bias = _find_alibi(slopes, positions[:, :, None], newest_B11[:, :, None], geometry)
    if keys.may_have_empty:
        bias = bias.masked_fill((positions < 0)[:, :, None], -torch.inf)
    if geometry.sliding is not None:
        # before the window or chunk
        bias = bias.masked_fill((positions < find_oldest(geometry.sliding, newest_B11))[:, :, None], -torch.inf)
    return bias
