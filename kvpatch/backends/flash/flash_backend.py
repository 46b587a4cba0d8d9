"""The flash backend: attention of a prompt, with the log-sum-exp of every row, and of one token over ragged heads.

The first kernel of kernels.py that takes a case is used. A kernel sees columns, not positions: a row attends to all columns up
to its own. Padding is removed first, so that each batch row is a sequence of its own length.

Here N counts query heads, and T the tokens of all sequences laid end to end.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from einops import rearrange
from torch import Tensor

from ...policies.numbers import on_device
from .. import refusals
from ..device import find_capability
from ..entries import FULL
from ..protocol import SPECIAL, Case, Geometry, Keys, Task
from .kernels import ANY, Kernel, Mask, Packing, kernels

HALVES = (torch.float16, torch.bfloat16)
LARGEST = 256  # head size


class Refused(RuntimeError):
    """Raised if every kernel that should take a prompt refused it when it was called."""


# ---- what is taken ----


def reason(task: Task, case: Case) -> str | None:
    """Return why no flash kernel can perform the task, or None if one can. `Choice` asks when it chooses a backend."""
    if case.special:  # capped logits or attention sinks
        return f"it has no {' and no '.join(SPECIAL[name] for name in case.special)}"
    if case.bits != FULL:
        return "its kernels read keys and values in the model's own precision, not entries rounded to bits="
    if task in ("statistics", "decode"):
        return "flash-attn returns no score statistics: triton or torch gather them"
    if case.device != "cuda":
        return f"flash kernels run on CUDA devices, not on {case.device}"
    if case.dtype not in HALVES:
        return f"flash kernels take float16 and bfloat16, not {str(case.dtype).removeprefix('torch.')}"
    if case.head_dim % 8 or case.head_dim > LARGEST:
        return f"flash kernels take head sizes that are multiples of 8 up to {LARGEST}, not {case.head_dim}"
    if case.value_dim not in (None, case.head_dim):
        return f"its kernels take values of the keys' size {case.head_dim}, not {case.value_dim}"
    if task == "ragged":
        return _ragged_reason(case)
    if case.past and case.padding:  # earlier keys lie in other columns in each head, with empty slots between them
        return "keys before this piece lie in slots of their own per head"
    seen = replace(case, fresh=False, renumbered=False, value_dim=None)  # what `attend` sees, by which refusals are known
    why = [f"{kernel.name} {no}" for kernel in kernels() if (no := _why_refuses(kernel, seen)) is not None]
    if not kernels():
        return "this torch was built without a flash kernel, and no flash-attn is installed"
    return None if len(why) < len(kernels()) else "; ".join(why) + ("; flash-attn 2 takes ALiBi" if case.alibi else "")


def _why_refuses(kernel: Kernel, case: Case) -> str | None:
    """Return why a kernel cannot attend to a prompt of this case, or None. `reason` and `_call_kernel` ask, for each kernel."""
    for needed, given, word in (
        (case.alibi, kernel.alibi, "ALiBi"),
        (case.window, kernel.window, "sliding window"),
        (case.padding, kernel.padding, "padding"),
        (case.past, kernel.past, "keys before the piece"),
        (case.gradients, kernel.gradients, "gradients"),
    ):
        if needed and not given:
            return f"takes no {word}"
    if (find_capability() or kernel.majors[0]) not in kernel.majors:  # without a GPU: as if a fitting one were there
        newest = f" to {kernel.majors[-1]}.x" if kernel.majors.stop < ANY.stop else ""
        return f"needs a GPU of compute capability {kernel.majors[0]}.0{newest}"
    if not kernel.head(case):
        return f"has no head size {case.head_dim}" + (" with gradients" if case.gradients else "")
    refusal = refusals.known.get((kernel.name, case))
    return None if refusal is None else f"refused ({refusal})"


def _ragged_reason(case: Case) -> str | None:
    """Return why flash kernels cannot run decode steps over heads of different lengths, or None; for `reason`."""
    if case.scores:
        return "a flash kernel returns no probabilities, and the scores of this step need them"
    for needed, word in (
        (case.alibi, "ALiBi"), (case.window, "sliding window"), (case.gradients, "gradients"), (case.padding, "empty slots"),
    ):  # fmt: skip
        if needed:
            return f"over heads of different lengths a flash kernel takes no {word}"
    if (find_capability() or 8) < 8:  # without a GPU: as if a fitting one were there
        return "flash kernels need a GPU of compute capability 8.0"
    if _ragged_kernel() is not None:
        return None
    # refusals of decode steps are remembered without a case
    refused = [f"{name} refused ({why})" for (name, case_or_none), why in refusals.known.items() if case_or_none is None]
    return "; ".join(refused) or "no flash kernel here takes used lengths and start offsets"


def find_misfit(keys: Keys, geometry: Geometry) -> str | None:
    """Return why no flash kernel can attend to these keys, though flash was chosen for such prompts; None if one can.

    `attend_to` asks for each prompt (or piece of one) and layer. The Case (kind of call) by which flash was chosen does not
    tell how the keys before the piece lie: heads may have empty slots in different columns, or keys out of order.
    """
    if keys.columns_before and keys.may_have_empty:
        return "keys before this piece lie in slots of their own per head"
    if keys.columns_before and not keys.ordered and (geometry.sliding is not None or geometry.slopes_HG is not None):
        return "keys before this piece are out of order, and a flash kernel measures distances in columns"
    return None


# ---- a prompt ----


def attend(
    q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor, geometry: Geometry, real_B: list[int] | None = None
) -> tuple[Tensor, Tensor, str]:
    """Compute a layer's attention of a prompt, or a piece of one. `attend_to` calls it where flash was chosen. Changes nothing.

    Args:
        q_BHGQD: queries.
        keys: keys and values, which `find_misfit` has nothing against; the last Q columns are the prompt's own.
        rows_BQ: positions of the queries; -1 for padding.
        geometry: variant of attention.
        real_B: queries of each row that are no padding; None: the host waits for the device to count them.

    Returns:
        The output [B,H,G,Q,D], which is differentiable; the log-sum-exp [B,H,G,Q], float32, natural logarithm, which is not;
        and the name of the kernel. Rows of padding have output 0 and log-sum-exp +inf.

    Raises:
        Refused: every kernel refuses.
    """
    B, H, G, Q, D = q_BHGQD.shape
    q_BQND = rearrange(q_BHGQD, "b h g q d -> b q (h g) d")
    k_BTHD, v_BTHD = keys.k_BHTD.transpose(1, 2), keys.v_BHTD.transpose(1, 2)
    tensors = tuple(t if t.stride(-1) == 1 else t.contiguous() for t in (q_BQND, k_BTHD, v_BTHD))
    T, slopes = k_BTHD.shape[1], geometry.slopes_HG
    # left: columns that a row sees before its own, under a window shorter than the text
    left = None if geometry.sliding is None or geometry.sliding >= T else geometry.sliding - 1
    mask = Mask(geometry.scale, left, None if slopes is None else slopes.reshape(-1).float().contiguous())
    gradients = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    padded, past = keys.may_have_empty, keys.columns_before > 0  # keys before the piece have no empty slots (find_misfit)
    case = Case("cuda", q_BHGQD.dtype, D, G, slopes is not None, left is not None, padded, past, gradients)
    out_BQND, lse_BNQ, name = (
        _attend_padded(tensors, rows_BQ, mask, case, real_B) if padded else _call_kernel(tensors, mask, None, case)
    )
    return rearrange(out_BQND, "b q (h g) d -> b h g q d", g=G), lse_BNQ.view(B, H, G, Q), name


def _attend_padded(
    tensors: tuple[Tensor, ...], rows_BQ: Tensor, mask: Mask, case: Case, real_B: list[int] | None
) -> tuple[Tensor, Tensor, str]:
    """Attend from a padded prompt, for `attend`: remove the padding, call a kernel, and put its results back into place.

    Returns output [B,Q,N,D], 0 for padding, log-sum-exp [B,N,Q], +inf for padding, and the kernel's name ("none" if all is
    padding).
    """
    B, Q, N, _ = tensors[0].shape
    real_BQ = rows_BQ >= 0
    real_B = real_BQ.sum(1).tolist() if real_B is None else real_B
    lengths = [n for n in real_B if n > 0]  # a kernel refuses empty sequences if all others have one token
    out_BQND = tensors[0].new_zeros(tensors[0].shape)
    lse_BNQ = torch.full((B, N, Q), torch.inf, device=rows_BQ.device)
    if not lengths:
        return out_BQND, lse_BNQ, "none"
    row, column = _find_real(real_BQ, real_B)
    starts = on_device([0, *itertools.accumulate(lengths)], rows_BQ.device).int()
    packed = tuple(t[row, column] for t in tensors)
    out_TND, lse_NT, name = _call_kernel(packed, mask, Packing(starts, max(lengths)), case)
    lse_BNQ.transpose(1, 2)[row, column] = lse_NT.t()
    return out_BQND.index_put((row, column), out_TND), lse_BNQ, name


def _find_real(real_BQ: Tensor, real_B: list[int]) -> tuple[Tensor, Tensor]:
    """Return row and column of every query but padding, for `_attend_padded`: nonzero() without a wait for the device."""
    device, total = real_BQ.device, sum(real_B)
    counts, begins = (on_device(list(numbers), device) for numbers in (real_B, itertools.accumulate([0, *real_B[:-1]])))
    row = torch.arange(len(real_B), device=device).repeat_interleave(counts, output_size=total)
    order_BQ = (~real_BQ).long().argsort(dim=1, stable=True)  # each row's real queries first
    return row, order_BQ[row, torch.arange(total, device=device) - begins[row]]


def _call_kernel(tensors: tuple[Tensor, ...], mask: Mask, packing: Packing | None, case: Case) -> tuple[Tensor, Tensor, str]:
    """Attend to a prompt by the first kernel that takes the case and raises no error; errors are logged and remembered.

    `attend` and `_attend_padded` call it. packing: starts of the sequences if these lie end to end, else None. Returns output,
    log-sum-exp, name of the kernel. Raises Refused if no kernel is left.
    """
    q, k, v = tensors
    # shape: of the log-sum-exp; a kernel that returns another is refused
    shape = (q.shape[1], q.shape[0]) if packing is not None else (q.shape[0], q.shape[2], q.shape[1])
    for kernel in kernels():
        if _why_refuses(kernel, case) is not None or not kernel.fits(q, k, v):
            continue
        try:
            out, lse = kernel.attend(q, k, v, mask, packing)
            if lse.shape != shape or lse.dtype != torch.float32:
                raise RuntimeError(f"its log-sum-exp is {lse.dtype} {tuple(lse.shape)}, not float32 {shape}")
        except refusals.FATAL:
            raise
        except Exception as error:
            refusals.remember(kernel.name, case, error, "attention goes another way.")
            continue
        return out, lse.detach(), kernel.name
    raise Refused(f"No flash kernel took this prompt ({reason('prompt', case)}): use the torch backend.")


# ---- ragged heads ----


def ragged_step(q_BHGD: Tensor, keys: Keys, geometry: Geometry) -> Tensor | None:
    """Attend in a decode step over heads of different lengths, or return None if no kernel can.

    `_run_torch` calls it where flash was chosen for such steps. For the kernel, every KV head is a sequence, and the queries of
    its group are the heads of one token. The kernel takes the used length of every sequence, so free slots need no mask. There
    is no result if slots must be masked (ALiBi, a window, heads that fill up unevenly), if gradients are needed, or, with one
    warning in the log, if the kernel refuses.

    Returns:
        The output [B,H,G,D], or None.
    """
    kernel = _ragged_kernel()
    if kernel is None or kernel.ragged is None or keys.head_offsets is None or keys.grown is None:  # grown: None if uneven
        return None
    if geometry.slopes_HG is not None or geometry.sliding is not None or q_BHGD.requires_grad:
        return None
    B, H, G, D = q_BHGD.shape
    order, starts, filled = keys.head_offsets.view_sequences()
    query_starts = torch.arange(B * H + 1, dtype=torch.int32, device=q_BHGD.device)  # of sequences of one query each
    longest = max(keys.head_offsets.filled) + keys.grown  # grown: slots that each head has taken since `filled` was counted
    q_NGD, k_F1D, v_F1D = q_BHGD.flatten(0, 1)[order], keys.k_BHTD[:, None], keys.v_BHTD[:, None]
    try:
        out_NGD = kernel.ragged(q_NGD, k_F1D, v_F1D, query_starts, starts, filled + keys.grown, longest, geometry.scale)
    except refusals.FATAL:
        raise
    except Exception as error:
        refusals.remember(kernel.name, None, error, "attention over heads of different lengths goes head by head.")
        return None
    out = torch.empty_like(out_NGD)
    out[order] = out_NGD
    return out.view(B, H, G, D)


def _ragged_kernel() -> Kernel | None:
    """Return the kernel for ragged heads: torch's before flash_attn.cute's, since it splits a long head's keys."""
    able = (kernel for kernel in reversed(kernels()) if kernel.ragged and (kernel.name, None) not in refusals.known)
    return next(able, None)
