"""The end of an edit in one layer: tokens were read into the middle of its text, and heads keep the budgets that they have.

The new queries do not see the tokens after the edit. So these are hidden from them, keep their scores, and are not evicted for
the new tokens: the new ones and those before them share the rest of the budget by the policy's rule, as at a prompt's end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.forward_context import Edit
from ..cache.layer import SlotLayer
from ..policies.parallel import Parallel
from ..policies.selection import LAST
from .compress import PromptEnd, find_newest, finish_group
from .layer_call import Call


class Hidden:
    """Tokens of a layer that follow an edit, hidden from its queries, and their state. Their slots seem empty until `show`."""

    def __init__(self, slots: SlotLayer, edit: Edit) -> None:
        """Hide the tokens that follow an edit in the text from the edit's queries, for `read_prompt` before it attends.

        An edit reads new tokens into the middle of a text. Positions and state are copied, and the hidden tokens' slots are
        marked as empty (position -1) in the layer, until `show`.
        """
        self.slots, self.may_have_empty = slots, slots.may_have_empty
        self.positions = slots.positions.clone()
        self.hidden = self.positions >= edit.stop
        self.state = {name: tensor.clone() for name, tensor in slots.state.items()}
        slots.positions.masked_fill_(self.hidden, -1)
        slots.may_have_empty, slots.in_text_order = True, False

    def show(self) -> None:
        """Put the hidden tokens' positions and state back into the layer; `read_prompt` calls it after the edit's attention.

        crop() can then remove none of the columns. State that came up meanwhile is 0 for the hidden tokens.
        """
        slots, hidden = self.slots, self.hidden
        slots.positions = self.positions
        for name, tensor in slots.state.items():
            old = self.state.get(name)
            mask = hidden.view(*hidden.shape, *[1] * (tensor.ndim - 3))
            slots.state[name] = tensor.masked_fill(mask, 0) if old is None else torch.where(mask, old, tensor)
        slots.may_have_empty, slots.first_croppable = self.may_have_empty, slots.columns_used


class EditEnd(PromptEnd):
    """The end of an edit in one layer, which has read tokens into the middle of its text: each head keeps its old budget.

    It takes the place of a prompt's end in `finish_group`.
    """

    @property
    def share(self) -> None:
        """None: each head keeps the budget that it has."""
        return None

    @property
    def weighs(self) -> bool:
        """True if heads keep as many tokens as a budget that follows the text now allows, as they do after a decode step."""
        return self.call.rule.moves and not self.call.now.keeps_all

    @property
    def above(self) -> int:
        """Tokens above its budget that a head may hold between decode steps."""
        return self.call.policy.every - 1

    def count(self, everyone: Parallel) -> None:
        """Set `held` (tokens of each head), `fixed` (zeros: all count) and `keep` (its old budget), for `_compress_group`."""
        self.held = (self.call.positions_BHT >= 0).sum(-1).tolist()
        self.fixed = [[0] * len(row) for row in self.held]
        self.keep = self.call.slots.own_budget_BH1[..., 0].tolist()

    def make_context(self) -> None:
        """Set `context`, for `_compress_group`. Recent tokens that the policy protects count from the edit's last token."""
        super().make_context()
        self.context.recent_B11 = find_newest(self.call) - self.call.slots.own_limits.newest

    def key_by_score(self) -> Tensor:
        """Set and return `keys`, sort keys [B,H,T] by score, lowest evicted first, by which `count_by_scores` counts."""
        self.keys = self._protect_after_edit(super().key_by_score())
        return self.keys

    def key_for_eviction(self, count: list[list[int]], everyone: Parallel) -> Tensor:
        """Return the tokens' sort keys [B,H,T], lowest evicted first; `_compress_group` has found how many each head keeps."""
        return self._protect_after_edit(super().key_for_eviction(count, everyone))

    def _protect_after_edit(self, keys: Tensor) -> Tensor:
        """Return sort keys (lowest evicted first), raised for sinks, `protect=` and tokens after the edit. These tokens stay.

        `key_by_score` and `key_for_eviction` apply it to the keys of a prompt's end. Each head held these before the edit, so
        its budget has room for them. It may have none for the other tokens that the policy protects: they get lower keys, the
        lowest those farthest from the edit.
        """
        edit, context = self.call.now.edit, self.context
        assert edit is not None
        positions = context.positions_BHT
        kept = positions < context.limits.first
        kept = kept | context.state["protect"] if "protect" in context.state else kept
        kept = (kept & (positions >= 0) & (positions < edit.start)) | (positions >= edit.stop)
        # LAST: the key of all tokens that the policy protects
        keys = torch.where((keys == LAST) & ~kept, LAST - (edit.stop - positions), keys)
        return keys.masked_fill(kept, LAST)


def end_edit(call: Call, past: int, new: int) -> None:
    """End an edit (tokens read into the middle of a text) in a layer: evict down to each head's old budget, in new buffers.

    `read_prompt` calls it. past: slots in use before the edit's `new` tokens. `needs.sums`: sums of attention that scores read.
    """
    if call.evicts and call.policy.needs.sums:
        _count_unseen(call, past, new)
    finish_group([EditEnd(call, past, [])])


def _count_unseen(call: Call, past: int, new: int) -> None:
    """Correct the state "unseen" in place after an edit (`new` tokens read into the middle of a text), for `end_edit`.

    A score that is a mean divides a token's attention by the number of queries that saw it, taken to be the positions after it,
    less "unseen". Queries after the edit were computed before its tokens, and never saw them: "unseen" of these tokens grows.
    Tokens before the edit were seen by its queries, but the text grew by `opened` positions alone: there it falls by the
    difference.
    """
    edit, positions, unseen = call.now.edit, call.slots.positions, call.slots.statistic("unseen")
    assert edit is not None
    before, columns = (positions[:, :, :past] >= 0) & (positions[:, :, :past] < edit.start), slice(past, past + new)
    unseen[:, :, :past] -= before * (new - edit.opened)
    end_B11 = call.now.copy(call.now.n_B, positions.device)[:, None, None]
    later_Q = torch.arange(new, 0, -1, device=positions.device)  # the edit's rows from each of its tokens on
    unseen[:, :, columns] = (end_B11 - positions[:, :, columns] - later_Q).to(unseen.dtype)
