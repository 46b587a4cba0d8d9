"""The end of an edit in one layer: tokens were read into the middle of its text, and heads keep the budgets that they have.

The new queries have not seen what stands behind the edit. So it is hidden from them, its scores stay, and none of it is evicted
for the new tokens: these and the tokens before them share the rest of the budget by the policy's rule, as at a prompt's end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.forward_context import Edit
from ..cache.layer import SlotLayer
from ..policies.parallel import Parallel
from ..policies.selection import LAST
from .compress import Ended, finish_group, newest
from .layer_call import Call


class Hidden:
    """Tokens of a layer that the queries of an edit do not see, and their state. Their columns are empty until `show`."""

    def __init__(self, slots: SlotLayer, edit: Edit) -> None:
        self.slots, self.holes = slots, slots.holes
        self.positions = slots.positions.clone()
        self.behind = self.positions >= edit.stop
        self.state = {name: tensor.clone() for name, tensor in slots.state.items()}
        slots.positions.masked_fill_(self.behind, -1)
        slots.holes, slots.contiguous = True, False

    def show(self) -> None:
        """Put the tokens back as they were."""
        slots, behind = self.slots, self.behind
        slots.positions = self.positions
        for name, tensor in slots.state.items():
            old = self.state.get(name)
            mask = behind.view(*behind.shape, *[1] * (tensor.ndim - 3))
            slots.state[name] = tensor.masked_fill(mask, 0) if old is None else torch.where(mask, old, tensor)
        slots.holes, slots.floor = self.holes, slots.used


class EditEnded(Ended):
    """A layer that has read an edit, tokens in the middle of its text, and is about to evict: each head keeps its old budget.

    It takes the place of `Ended`, a layer at a prompt's end, in `finish_group`.
    """

    @property
    def share(self) -> None:
        """None: each head keeps the budget that it has."""
        return None

    @property
    def weighs(self) -> bool:
        """True if heads keep what a budget says that follows the text, as after each decode step."""
        return self.call.rule.moves and not self.call.now.keeps_all

    @property
    def above(self) -> int:
        """Tokens above its budget that a head may hold between decode steps."""
        return self.call.policy.every - 1

    def count(self, everyone: Parallel) -> None:
        """Set `held`, `fixed` and `keep`: tokens that heads hold, none beside the budget, and each head's old budget."""
        slots = self.call.slots
        self.held = (slots.positions[:, :, : slots.used] >= 0).sum(-1).tolist()
        self.fixed = [[0] * len(row) for row in self.held]
        self.keep = slots.own_budget_BH1[..., 0].tolist()

    def begin(self) -> None:
        """Make the eviction context: ages are counted from the newest token of the text, recent ones to the edit's last."""
        now, slots = self.call.now, self.call.slots
        newest_B11 = now.copy([n - 1 for n in now.n_B], slots.positions.device)[:, None, None]
        self.context = self.call.eviction_context(newest_B11, -1)
        self.context.recent_B11 = newest(self.call) - slots.own_limits.newest

    def rank(self) -> Tensor:
        """Return the eviction keys [B,H,T] by score alone, for heads whose number of tokens follows from it."""
        self.keys = self._protect_after_edit(super().rank())
        return self.keys

    def order(self, count: list[list[int]], everyone: Parallel) -> Tensor:
        """Return the eviction keys [B,H,T] once it is known how many tokens (`count`) each head keeps."""
        return self._protect_after_edit(super().order(count, everyone))

    def _protect_after_edit(self, keys: Tensor) -> Tensor:
        """Give the tokens after the edit, the sinks and the `protect=` tokens the highest key, so that none of them goes.

        Each head held them before the edit, so they fit. What else the policy protects may not: it ranks below them, the
        nearest to the edit first.
        """
        edit, context = self.call.now.edit, self.context
        assert edit is not None
        positions = context.positions_BHT
        kept = positions < context.limits.first
        kept = kept | context.state["protect"] if "protect" in context.state else kept
        kept = (kept & (positions >= 0) & (positions < edit.start)) | (positions >= edit.stop)
        keys = torch.where((keys == LAST) & ~kept, LAST - (edit.stop - positions), keys)
        return keys.masked_fill(kept, LAST)


def end_edit(call: Call, past: int, q_BHGQD: Tensor) -> None:
    """Keep each head's budget after an edit, in buffers with room for the tokens that follow."""
    if call.evicts and call.policy.needs.sums:
        _count_unseen(call, past, q_BHGQD.shape[3])
    finish_group([EditEnded(call, past, [], q_BHGQD[:, :, :, 0].new_empty(q_BHGQD[:, :, :, 0].shape))])


def _count_unseen(call: Call, past: int, new: int) -> None:
    """Note by how many rows `context.rows_seen`, which goes by positions, would be too many; fewer than 0 where too few.

    The rows behind an edit have not seen its tokens. Those in front are seen by its rows, of which positions count the opened.
    """
    edit, positions, unseen = call.now.edit, call.slots.positions, call.slots.statistic("unseen")
    assert edit is not None
    before, own = (positions[:, :, :past] >= 0) & (positions[:, :, :past] < edit.start), slice(past, past + new)
    unseen[:, :, :past] -= before * (new - edit.opened)
    end_B11 = call.now.copy(call.now.n_B, positions.device)[:, None, None]
    unseen[:, :, own] = (end_B11 - positions[:, :, own] - torch.arange(new, 0, -1, device=positions.device)).to(unseen.dtype)
