"""One call of one layer: names that prefill and decode steps share, and the score state that they add to."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..arch.bound import BoundAdapter
from ..backends import torch_backend
from ..backends.entries import EXACT
from ..backends.protocol import Case, Geometry, Keys, Task
from ..backends.torch_backend import ProbabilityRows, window_logits
from ..backends.value_norms import head_norms, projected_norms
from ..cache.forward_context import Forward
from ..cache.layer import SlotLayer
from ..cache.state import TextState
from ..policies import own_code
from ..policies.context import Block, EvictionContext, Limits, NewTokens, accumulator
from ..policies.needs import LayerRead
from ..policies.selection import TwoStage
from ..policies.served import FeatureSet, why_not
from ..policies.statistics import STATISTICS
from ..policies.windows import find_oldest, keep_in_window

AHEAD = 64  # decode steps


class Call(LayerRead):
    """A forward pass (`now`) through one layer of a cache. evicts: False if the layer keeps every token."""

    def __init__(
        self, cache: TextState, now: Forward, layer: int, bound_adapter: BoundAdapter, group: int, device: torch.device
    ) -> None:
        """Bind a layer of `cache` to its attention module for the pass `now`; later decode steps reuse the Call by `begin`.

        `_bind_call` makes it, and `read_in_blocks` one per block. The first Call of a layer also sets `slots.geometry`. group:
        query heads per KV head. `policy`, `rule`: the layer's eviction policy and budget. `shares_keys`: later layers attend to
        this layer's keys, too. `readers`, `steppers`: needs (what the policy gathers) that read prompts, and decode steps.
        """
        # the cache owns its calls, which must not keep it alive; a traced pass makes calls of its own
        self._find_cache: Callable[[], TextState | None] = (lambda: cache) if now.traced else weakref.ref(cache)
        self.bound_adapter, self.group, self.device = bound_adapter, group, device
        self.layer = layer
        self.layer_B: int | Tensor = layer  # for stacked layers one number per row
        self.settings = cache.settings
        self.slots: SlotLayer = cache.layers[layer]
        if self.slots.geometry is None:
            self.slots.geometry = bound_adapter.geometry(device)
        self.geometry: Geometry = self.slots.geometry
        self.policy, self.rule = self.settings.policies[layer], self.settings.rules[layer]
        self.score, self.evicts = self.policy.score, self.settings.evicts[layer]
        self.parallel = self.settings.parallel.size > 1
        self.shares_keys = layer in self.settings.read
        self.needs = self.policy.needs if self.evicts else ()
        self.readers = own_code.bind_passes(self.needs, "read", self.policy.name)
        self.steppers = own_code.bind_passes(self.needs, "step", self.policy.name)
        self.no_kernels = why_not("kernels", FeatureSet(self.policy)) if self.evicts else None
        self.launched = False  # a kernel has run a decode step of this layer
        self.begin(now)

    def begin(self, now: Forward) -> None:
        """Set `now`, `positions_BQ` and `rows_BQ` to another pass, as `_bind_call` or a bound step begins it in the layer.

        A layer with a sliding window of the model's (`bounds`) evicts by that alone: it ignores options such as `protect=`.
        rows_BQ: positions of the queries; they differ from positions_BQ where padding attends, as in the unpatched model.
        """
        options = now.kept_below_B, now.protect_BQ, now.quota_span_BQ
        has_options = now.keeps_all or any(option is not None for option in options)
        if has_options and self.settings.bounds[self.layer] is not None:
            now = replace(now, keeps_all=False, kept_below_B=None, protect_BQ=None, quota_span_BQ=None)
        self.now = now
        self.positions_BQ = now.positions_on(self.device)
        self.rows_BQ = self.positions_BQ if now.rows_BQ is None else now.rows_BQ.to(self.device)

    @property
    def cache(self) -> TextState:
        """The cache that the layer belongs to."""
        cache = self._find_cache()
        assert cache is not None, "whoever runs a pass holds its cache"
        return cache

    def copy_for_stack(self, slots: SlotLayer, layer_B: Tensor) -> Call:
        """Return a copy of this Call for a LayerStack: `slots` joins all layers along the batch. layer_B: each row's layer."""
        other = copy.copy(self)
        other.slots, other.layer_B = slots, layer_B
        return other

    @property
    def evicting(self) -> bool:
        """True if decode steps evict now: not while all heads are below budget, unless other processes hold heads too."""
        slots = self.slots
        return self.evicts and slots.mode.evicts and not (slots.mode.all_heads_short and not self.parallel)

    @property
    def observes(self) -> bool:
        """True if a decode step's attention probabilities are needed, to score tokens for this or a later eviction.

        `needs.rows`: the attention that the policy reads. `remembers`: sums go on for evictions at the prompt of a later turn.
        """
        if not self.evicts:
            return False
        return (self.slots.mode.evicts and self.policy.needs.rows != "none") or self.policy.remembers

    def entry(self, k_BHQD: Tensor, v_BHQD: Tensor, positions_BQ: Tensor) -> dict[str, Tensor]:
        """Return by name the state to be written with a prompt's tokens, for score, selection, `protect=` and `quota=`.

        `_write_columns` and `_borrow` call it. In a layer that never evicts: none. quota_span_BQ: parts of the text, by token.
        """
        if not self.evicts:
            return {}
        entry = self.slots.make_blanks(k_BHQD.shape[2])  # zeros, where the slot may hold an evicted token's marks
        entry |= {**self.score_entry(k_BHQD, v_BHQD, positions_BQ), **self.selection_entry(v_BHQD)}
        for name, given_BQ in (("protect", self.now.protect_BQ), ("span", self.now.quota_span_BQ)):
            if given_BQ is not None:
                marks = given_BQ[:, None, : positions_BQ.shape[1]].to(k_BHQD.device)
                entry[name] = marks.expand(k_BHQD.shape[:3]).contiguous()
        return entry

    def score_entry(self, k_BHQD: Tensor, v_BHQD: Tensor, positions_BQ: Tensor) -> dict[str, Tensor]:
        """Return by name what the score and its needs store with new tokens: for `entry`, `step_entry` and `LayerStack.begin`.

        `cached`: keys and values as the cache rounds them.
        """
        key_codec, value_codec = self.slots.kv.codecs
        return self.policy.entry(self._describe_tokens(key_codec.cached(k_BHQD), value_codec.cached(v_BHQD), positions_BQ))

    def _describe_tokens(self, k_BHQD: Tensor, v_BHQD: Tensor, positions_BQ: Tensor) -> NewTokens:
        """Return new tokens as `policy.entry` takes them. first: the number, in the whole model, of the first head here."""
        first = self.settings.parallel.first(k_BHQD.shape[1])
        return NewTokens(k_BHQD, v_BHQD, positions_BQ, self.group, self.layer_B, self.settings.seed, first)

    def selection_entry(self, v_BHQD: Tensor) -> dict[str, Tensor]:
        """Return the state "norm" of new tokens: the norms of their values after the output projection; or no state at all.

        `entry` and `step_entry` call it. Policies have this state (`keeps_norms`) if they choose by norms in decode steps, or
        after the last layer (layers that share a budget), when accelerate may have offloaded this layer's weights. Others
        compute norms as a prompt ends, for the tokens in question alone. `cached`: the values as the cache rounds them.
        """
        if not self.policy.keeps_norms:
            return {}
        return {"norm": self._project_norms(self.slots.kv.codecs[1].cached(v_BHQD), None)}

    def write_norms(self, v_BH1D: Tensor, out_NB: Tensor) -> None:
        """Write the norms ||v W_O|| of a decoded token's value to out_NB [H*G,B], by query head; the policy selects by them.

        `Fused.count` and `LayerStack.begin` call it in each layer of a stack (layers that evict together) as its decode step
        begins. head_values: the values by head, as W_O takes them.
        """
        assert isinstance(self.policy.selection, TwoStage)
        v_BN1D = self.bound_adapter.head_values(self.slots.kv.codecs[1].cached(v_BH1D))
        rows = self._output_rows(v_BN1D, len(out_NB) // v_BN1D.shape[1])
        head_norms(v_BN1D[:, :, 0].transpose(0, 1), rows, self.policy.selection.norm, out_NB)

    def _project_norms(self, v_BHQD: Tensor, wanted: Tensor | None) -> Tensor:
        """Return the norms of values after the output projection, ||v W_O|| [B,H,Q], the mean over a group of query heads.

        `selection_entry` and `_stored_norms` call it, for a TwoStage selection. wanted: True for the values whose norms are
        needed, the others get any number; None: all. head_values: the values by head as W_O takes them, more than H for some
        models.
        """
        assert isinstance(self.policy.selection, TwoStage)
        norm, H = self.policy.selection.norm, v_BHQD.shape[1]
        v_BNQD = self.bound_adapter.head_values(v_BHQD.detach())
        per_head = v_BNQD.shape[1] // H
        if wanted is not None and per_head > 1:
            wanted = wanted.repeat_interleave(per_head, 1)
        norms = projected_norms(v_BNQD, self._output_rows(v_BNQD, self.group // per_head), norm, wanted)
        return norms if per_head == 1 else norms.unflatten(1, (H, per_head)).mean(2)

    def head_norms(self, v_BHTD: Tensor) -> Tensor:
        """Return ||v W_O|| of each query head [B,H,G,T]; `reread_chunk` scores tokens by their share of outputs (`by_outputs`).

        head_values: the values by head as W_O takes them, more than H for some models.
        """
        v_BNTD = self.bound_adapter.head_values(v_BHTD)
        group = self.group * v_BHTD.shape[1] // v_BNTD.shape[1]
        rows = self._output_rows(v_BNTD, group).flatten(0, 1)[:, None]
        return projected_norms(v_BNTD.repeat_interleave(group, 1), rows, 2).unflatten(1, (-1, self.group))

    def _output_rows(self, like_BNTD: Tensor, group: int) -> Tensor:
        """Return the output projection W_O by query head, for the norms of values (`write_norms`, `_project_norms`).

        If it is no plain weight (LoRA, quantized, offloaded), the adapter applies it to unit vectors (`worked_out`), and
        `slots.output_rows` keeps the result. Else it is a view of the weight [N,G,D,E].
        """
        rows = self.slots.output_rows
        if rows is None:
            rows, worked_out = self.bound_adapter.output_rows(like_BNTD, group, self.settings.parallel)
            self.slots.output_rows = rows if worked_out else None
        return rows

    def step_entry(self, k_BH1D: Tensor, v_BH1D: Tensor, positions_B1: Tensor) -> dict[str, Tensor]:
        """Return by name the state that is written with one decoded token, for score and selection; `_begin_step` calls it."""
        if not self.evicts:
            return {}
        entry = {**self.selection_entry(v_BH1D), **self.slots.make_blanks()}  # blanks: zeros for state that few tokens have
        if not self.policy.entry_by_position or self.now.traced:  # the state depends on the key, or cannot be kept for later
            return {**self.score_entry(k_BH1D, v_BH1D, positions_B1), **entry}
        return {**self.entry_ahead(k_BH1D, positions_B1), **entry}

    def entry_ahead(self, like_BH1D: Tensor, positions_B1: Tensor) -> dict[str, Tensor]:
        """Return the state of a decoded token that follows from its position alone, for `step_entry` and stacked layers.

        It is computed for AHEAD steps at once, to save time. `precomputed_state` keeps `columns_read` at the first of them, and
        their state; `_write_columns` drops it at the next prompt.
        """
        slots = self.slots
        if slots.precomputed_state is None or not 0 <= slots.columns_read - slots.precomputed_state[0] < AHEAD:
            coming = positions_B1 + torch.arange(AHEAD, device=positions_B1.device)
            like_BHND = like_BH1D.expand(-1, -1, AHEAD, -1)
            state = self.policy.entry(self._describe_tokens(like_BHND, like_BHND, coming))
            slots.precomputed_state = slots.columns_read, state
        offset = slots.columns_read - slots.precomputed_state[0]
        return {name: tensor[:, :, offset : offset + 1] for name, tensor in slots.precomputed_state[1].items()}

    def keys(self, past: int, contents: bool = True) -> Keys:
        """Return the keys and values of the used slots, in the form that backends attend to, for `read_prompt` and `run_step`.

        Changes nothing; the tensors are views, or unpacked copies of rounded storage. past: number of slots that were used
        before the prompt's columns. contents: False if only shapes are asked for, to choose a backend: storage that is not in
        place is then not copied. grown: slots that each head has taken since its buffers were made; None if heads differ, or in
        a traced step.
        """
        slots, kv = self.slots, self.slots.kv
        keys, values, positions = slots.view() if contents or kv.in_place else slots.outline_view()
        grown = None if self.now.traced else slots.mode.count_new_slots()  # a traced step knows it from the positions only
        may_have_empty, ordered = slots.may_have_empty, slots.in_text_order
        return Keys(keys, values, positions, may_have_empty, past, ordered, kv.head_offsets, grown, kv.codecs)

    def case(self, task: Task, q_BHGQD: Tensor, keys: Keys, scores: bool = False) -> Case:
        """Return a Case, the properties of an attention task in this layer by which a backend is chosen. Changes nothing.

        `attend_to`, `_attend_and_sum` and `_score_by_window` ask for it in a prompt, `_describe_case` in a decode step. scores:
        the policy's sums of attention are needed too. Fields of the Case, if not plain: `past`: earlier tokens are held;
        `fresh`: the policy draws noise for each pair of query and key; `special`: variants such as capped logits or "chunk",
        attention inside chunks of the text.
        """
        T = keys.positions_BHT.shape[-1]
        sliding, special = self.geometry.sliding, self.geometry.special
        if sliding is not None and sliding >= T and not keys.columns_before and task in ("prompt", "statistics"):
            special = tuple(name for name in special if name != "chunk")  # the text is one chunk
        return Case(
            device=q_BHGQD.device.type,
            dtype=q_BHGQD.dtype,
            head_dim=q_BHGQD.shape[-1],
            group=self.group,
            alibi=self.geometry.slopes_HG is not None,
            window=sliding is not None and (task != "prompt" or sliding < T),
            padding=keys.may_have_empty and (task == "prompt" or keys.grown is None),
            past=keys.columns_before > 0 and task in ("prompt", "statistics"),
            # gradient checkpointing runs a pass once without gradients and once with them: both by the same backend
            gradients=(torch.is_grad_enabled() and q_BHGQD.requires_grad) or self.now.repeatable,
            scores=scores,
            statistics=self.policy.needs.kernels if scores else (),
            fresh=self.evicts and self.policy.needs.fresh,
            renumbered=self.settings.renumbered,
            special=special,
            bits=keys.codecs[0].bits,
            value_dim=keys.codecs[1].size(keys.v_BHTD),
        )

    def renumber(self, q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor, later_BQ: Tensor | None = None) -> tuple[Tensor, Keys]:
        """Return queries and keys with the positions that attention uses; as they are unless positions="renumbered".

        Then a token's position is its rank among the tokens that its head holds: keys are cached without positions and get them
        here, as do the queries, before each attention (`read_prompt`, `_run_torch`, `logits`). The cache does not change.
        later_BQ: tokens after each query, all of them held; None if the queries are those of the new tokens.
        """
        if not self.settings.renumbered:
            return q_BHGQD, keys
        positions, Q = keys.positions_BHT, q_BHGQD.shape[3]
        ranks = _rank_positions(positions) if keys.may_have_empty or not keys.ordered else positions
        # the new tokens were written last, or are a decode step's newest
        if later_BQ is not None:
            q_ranks = (ranks.amax(-1, keepdim=True) - later_BQ[:, None]).clamp(min=0)
        elif Q == 1:
            q_ranks = ranks.gather(-1, (positions == rows_BQ[:, None]).long().argmax(-1, keepdim=True))
        else:
            q_ranks = ranks[..., -Q:]
        if self.geometry.slopes_HG is not None:
            # ALiBi: keys stay, and their positions become distances in ranks, counted back from the newest token's position
            distance = ranks.amax(-1, keepdim=True) - ranks
            places = rows_BQ.amax(-1)[:, None, None] - distance
            return q_BHGQD, replace(keys, positions_BHT=places.masked_fill(positions < 0, -1))
        table = self.now.rotary_table
        q = self.bound_adapter.rotate(q_BHGQD.flatten(1, 2), q_ranks.repeat_interleave(self.group, 1), table)
        codec, codecs = keys.codecs[0], (EXACT[0], keys.codecs[1])  # the new keys are not rounded
        if keys.head_offsets is None:
            k = self.bound_adapter.rotate(codec.decode(keys.k_BHTD), ranks, table)
        else:  # keys of all heads lie end to end [F,D]
            head, column = keys.head_offsets.places()  # of each entry: its head, of B*H, and its place in that
            k = codec.of(head).decode(keys.k_BHTD[:, None])[:, 0]
            k = self.bound_adapter.rotate(k[None, None], ranks.flatten(0, 1)[head, column][None, None], table)[0, 0]
        return q.reshape(q_BHGQD.shape), replace(keys, k_BHTD=k, codecs=codecs)

    def share_keys(self, keys: Keys, copied: bool = False) -> None:
        """Append to `now.shared_keys` the keys that these queries see: later layers without keys attend to them (reading.py).

        `read_prompt` calls it once, `run_step` at each step, before this layer evicts. Positions are copied, since this layer's
        eviction changes them. copied: keys and values are copied too, since this pass overwrites them; else they stay until the
        next token takes their slot.
        """
        if copied:
            keys = replace(keys, k_BHTD=keys.k_BHTD.clone(), v_BHTD=keys.v_BHTD.clone())
        keys = replace(keys, positions_BHT=keys.positions_BHT.clone())
        self.now.shared_keys.setdefault(self.layer, []).append(keys)

    def eviction_context(self, newest_B11: Tensor, t: int) -> EvictionContext:
        """Return all that the policy's score and scope (protected tokens) read at an eviction.

        `PromptEnd.make_context` and `_evict_over_budget` call it. Its tensors are views of the layer's, except sums that layers
        share. t: column of the token in a decode step, -1 where a prompt ends. recent_B11: tokens after this position are
        protected.
        """
        slots, limits = self.slots, self.slots.own_limits
        positions, state = self.positions_BHT, slots.state_view()
        for total in self.policy.needs.sums:
            if total.across_layers:  # a sum that layers share, stored by position + 1
                state = {**state, total.key: self._find_shared_score(positions).gather(-1, positions + 1)}
        make = functools.partial(torch.sub, newest_B11, limits.newest)  # `once`: the first layer computes it for all
        recent_B11 = make() if self.now.traced else self.now.once(("recent", id(limits), t), self.device, make)
        return EvictionContext(
            layer=self.layer_B if isinstance(self.layer_B, int) else self.layer_B[:, None, None],
            seed=self.settings.seed,
            positions_BHT=positions,
            newest_B11=newest_B11,
            recent_B11=recent_B11,
            state=state,
            limits=limits,
            group=self.group,
            sliding=self.geometry.sliding,
            empty=slots.may_have_empty,
            aligned=self.policy.aligned and self.rule.aligned,
            parallel=self.settings.parallel,
            keep_BH1=slots.keep_BH1,
            lost_BH1=slots.lost_BH1,
            norms=self._stored_norms,  # called by a TwoStage selection
            needs=self.needs,
            layer_read=self,  # what the views of needs read
        )

    def once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that is the same in this pass for all layers of this device, made by the first of them."""
        return self.now.once(name, self.device, make)

    def note_evictions(self, newest_B11: Tensor) -> None:
        """Note in `cache.lifetimes` from which position on evicted tokens are unseen, if there is a record for replays."""
        lifetimes = self.cache.lifetimes
        if lifetimes is not None:
            lifetimes.note_evictions(self.layer, self.positions_BHT, newest_B11 + 1)

    def rotated_back(self, x_BHTD: Tensor, positions_BHT: Tensor) -> Tensor:
        """Return queries or keys with their rotation undone, in the dtype of scores, for scores that leave positions out.

        `plain_keys` and `QueryMoments.read` call it. `rotary_table`: None if nothing was rotated.
        """
        x_BHTD = x_BHTD.to(accumulator(x_BHTD.dtype))
        if self.now.rotary_table is None:  # no rotary positions
            return x_BHTD
        return self.bound_adapter.rotate_back(x_BHTD, positions_BHT.clamp(min=0), self.now.rotary_table)

    # ---- what needs ask of a layer (policies/needs/base.py) ----

    @property
    def notes(self) -> dict[str, Any]:
        return self.slots.need_notes

    @property
    def limits(self) -> Limits:
        return self.slots.own_limits

    @property
    def scale(self) -> float:
        return self.geometry.scale

    @property
    def slopes_HG(self) -> Tensor | None:
        return self.geometry.slopes_HG

    def statistic(self, name: str) -> Tensor:
        """Return the state tensor `name` [B,H,T] of the used slots, for a policy's need to read or to add to; zeros at first.

        It is a view: the need's `read` or `step` changes the layer's state through it. Raises KVPatchError (by check_state) if
        no part of the policy keeps such a state.
        """
        slots = self.slots
        if name not in slots.state:
            self.policy.needs.check_state(name, slots.state)
        tensor = slots.statistic(name)
        return tensor if slots.columns_used == tensor.shape[2] else tensor[:, :, : slots.columns_used]

    def plain_keys(self) -> Tensor:
        """Return the keys [B,H,T,D] of the used slots with their rotation undone, in the dtype of scores."""
        return self.rotated_back(self.held()[0], self.positions_BHT)

    def mean_rotation(self, future: int, like: Tensor) -> Tensor | None:
        """Return the mean rotary matrix [B,1,1,D,D] of each row's next `future` positions; None without rotary positions.

        `QueryMoments.view` calls it, for scores by the attention that keys can expect from later queries. The first layer
        computes it for all. n_B: tokens of each row so far.
        """
        now = self.now
        if now.rotary_table is None:
            return None
        coming = now.copy(now.n_B, like.device)[:, None] + torch.arange(future, device=like.device)
        mean = functools.partial(self.bound_adapter.mean_rotation, coming, like, now.rotary_table)
        return now.once("mean rotation", like.device, mean)[:, None]

    def logits(self, q_BHGWD: Tensor, positions_BW: Tensor, first_B1: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [B,H,G,W,T] of stored queries, and the candidates: the tokens before `first_B1`, bool [B,H,T].

        `LastQueries.view` calls it at an eviction: W queries of the tokens at `positions_BW`, which the layer has stored, score
        the others by their attention. Where a query does not see a candidate, the logit is the lowest number of its dtype.
        """
        slots, geometry = self.slots, self.geometry
        (k, v), positions = self.held(), self.positions_BHT
        candidate = (positions >= 0) & (positions < first_B1[:, None])
        if self.settings.renumbered:
            keys = Keys(k, v, positions, may_have_empty=slots.may_have_empty, columns_before=slots.columns_used, ordered=False)
            later_BW = positions_BW.amax(1, keepdim=True) - positions_BW
            q_BHGWD, keys = self.renumber(q_BHGWD, keys, positions_BW, later_BQ=later_BW)
            k, positions = keys.k_BHTD, keys.positions_BHT
        x = window_logits(q_BHGWD, k, positions, positions_BW, geometry)  # without a mask
        key_positions, rows = self.positions_BHT[:, :, None, None], positions_BW[:, None, None, :, None]
        seen = keep_in_window(candidate[:, :, None, None], geometry.sliding, key_positions, rows)
        # the dtype's lowest number rather than -inf, since a softmax over -inf alone would be NaN
        return x.masked_fill(~seen, torch.finfo(x.dtype).min), candidate

    def attend_to_slots(
        self, q_BHGWD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, positions_BW: Tensor, index_BHK: Tensor, real_BHK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the attention of W queries, whose positions follow those of all used slots, over these slots.

        `_RefitAttention.of` calls it as a prompt ends, to fit new values of the tokens to be kept. Returns the outputs
        [B,H,G,W,D] over all slots that a query sees, and the log-sum-exp [B,H,G,W] over the kept slots alone, `index_BHK`; any
        number for a query that sees none of these. real_BHK: False for entries of `index_BHK` that stand for no slot. Changes
        nothing.
        """
        x, seen = self._find_logits(q_BHGWD, k_BHTD, positions_BW, self.positions_BHT)
        sees_any = seen.any(-1, keepdim=True)
        x.masked_fill_(~seen & sees_any, -torch.inf)  # the softmax over -inf alone would be NaN
        p = torch_backend.weigh_logits(x, self.geometry)
        out = (p.flatten(2, 3) @ v_BHTD).unflatten(2, p.shape[2:4]).masked_fill(~sees_any, 0.0)
        x_kept = x.take_along_dim(index_BHK[:, :, None, None], -1).masked_fill_(~real_BHK[:, :, None, None], -torch.inf)
        return out, torch_backend.sum_logits(x_kept, self.geometry)

    def weigh_slots(self, q_BHGWD: Tensor, k_BHMD: Tensor, positions_BW: Tensor, index_BHM: Tensor, lse_BHGW: Tensor) -> Tensor:
        """Return the attention [B,H,G,W,M] that queries pay to M kept slots, those at `index_BHM`.

        `_RefitAttention.iterate_blocks` calls it for each block of kept slots as a prompt ends, to fit new values that make up
        for evicted tokens. k_BHMD: the slots' keys. lse_BHGW: log-sum-exp of each query over all kept slots, from
        `attend_to_slots`. Changes nothing.
        """
        x, seen = self._find_logits(q_BHGWD, k_BHMD, positions_BW, self.positions_BHT.gather(2, index_BHM))
        return x.sub_(lse_BHGW[..., None]).masked_fill_(~seen, -torch.inf).exp_()

    def _find_logits(self, q_BHGWD: Tensor, k: Tensor, positions: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [B,H,G,W,M] of W queries with M keys, and which keys each query sees (bool).

        `attend_to_slots` and `weigh_slots` call it, to refit values. positions [B,W] are those of the queries, at [B,H,M] those
        of the keys; -1 for a query or key that does not count.
        """
        key_positions, rows = at[:, :, None, None], positions[:, None, None, :, None]
        seen = keep_in_window((key_positions >= 0) & (rows >= 0), self.geometry.sliding, key_positions, rows)
        return window_logits(q_BHGWD, k, at, positions, self.geometry), seen

    def held(self) -> tuple[Tensor, Tensor]:
        """Return keys and values [B,H,T,D] of the used slots; a ragged layer copies them, and rounded ones are unpacked."""
        slots = self.slots
        return slots.kv.make_dense(*slots.positions.shape[:2]).numbers(slots.columns_used)

    def mask_visible(self, newest_B11: Tensor) -> Tensor:
        """Return which used slots later queries can see, bool [B,H,T]: those with a token that a sliding window still reaches.

        `_find_values` calls it as a prompt ends: new values of kept tokens make up for those evicted tokens alone.
        """
        positions, sliding = self.positions_BHT, self.geometry.sliding
        live = positions >= 0
        return live if sliding is None else live & (positions >= find_oldest(sliding, newest_B11 + 1))

    @property
    def positions_BHT(self) -> Tensor:
        """Positions of the used slots [B,H,T]."""
        positions, used = self.slots.positions, self.slots.columns_used
        return positions if used == positions.shape[2] else positions[:, :, :used]

    def _stored_norms(self, known: Tensor, out: Tensor | None) -> Tensor:
        """Return norms of projected values [B,H,T]: those stored with the tokens, or computed now, which costs a product.

        A TwoStage selection calls it at an eviction, as `context.norms`. Norms may be any numbers for tokens that are kept in
        any case: those chosen already, by score (`known`), and protected ones; and for empty slots (`out` marks protected and
        empty slots).
        """
        if "norm" in self.slots.state:
            return self.slots.state_view()["norm"]
        unwanted = known if out is None else known | out
        return self._project_norms(self.slots.view()[1], ~unwanted)

    def sums(self, rows: ProbabilityRows, rows_BQ: Tensor, tau: float | Tensor) -> dict[str, Tensor]:
        """Return by name what the attention probabilities of a block of query rows add to the policy's sums per key [N,M].

        `_make_observer` calls it for each block of a prompt, `_add_statistics` for a decode step. Changes nothing; `add` stores
        the result. N of the B*H heads, M key columns. rows_BQ: positions of all query rows. tau: temperature of
        Keyformer's softmax with noise. Block: all that a statistic of policies/statistics.py may read.
        """
        slots, heads, columns = self.slots, slice(rows.first_head, rows.stop_head), slice(rows.first_column, rows.stop_column)
        if isinstance(tau, Tensor) and tau.ndim:  # one temperature per batch row, where rows are at different steps
            B, H, _ = slots.positions.shape
            tau = tau.to(rows_BQ.device).repeat(B // len(tau)).repeat_interleave(H)[heads, None, None, None]
        layer = self.layer_B
        if isinstance(layer, Tensor):
            layer = layer.repeat_interleave(slots.positions.shape[1])[heads, None, None, None]
        noise = slots.state.get("noise")

        def place() -> tuple[Tensor, Tensor, Tensor]:
            """Return the block's query heads by number [N,G], and positions of its rows [N,R] and keys [N,M], as `Block.place`.

            `_sum_area` and `draw_for_rows` call it. heads, columns: the block's part of the flattened B*H KV heads, of which
            number n is head n % H of this process, and of the key columns.
            """
            H = slots.positions.shape[1]
            n = torch.arange(rows.first_head, rows.stop_head, device=rows_BQ.device)
            head_N = self.settings.parallel.first(H) + n % H
            head_NG = head_N[:, None] * self.group + torch.arange(self.group, device=rows_BQ.device)
            row_NR = rows_BQ[:, None, rows.first_row : rows.stop_row].expand(-1, H, -1).flatten(0, 1)[heads]
            return head_NG, row_NR, slots.positions.flatten(0, 1)[heads, columns]

        block = Block(
            rows.p_NGRM,
            keys_NR=rows.keys_NR,
            noise_NMG=None if noise is None else noise.flatten(0, 1)[heads, columns],
            place=place,
            tau=tau,
            layer=layer,
            seed=self.settings.seed,
            grouped="squares" in self.policy.needs.statistics,
        )
        return {total.key: STATISTICS[total.key](block, total) for total in self.policy.needs.sums}  # one function each

    def add(self, sums: dict[str, Tensor]) -> None:
        """Add what a forward pass sums up of attention probabilities per key, `sums` [B,H,T] by name, to the layer's totals.

        `_attend_and_sum` and `_add_statistics` call it. The policy computes its scores from these totals, tensors of
        `slots.state`, which change in place. Each is first multiplied by its decay. A sum that layers share (`across_layers`)
        goes to `cache.shared_score` instead.
        """
        slots = self.slots
        for attention_sum in self.policy.needs.sums:
            increment = sums[attention_sum.key]
            if attention_sum.across_layers:
                self._add_shared(increment, self.positions_BHT, attention_sum.decay)
                continue
            total = slots.statistic(attention_sum.key)  # [B,H,C], zeros at first
            if total.shape[2] != increment.shape[2]:  # buffers have columns for coming tokens
                total = total[:, :, : increment.shape[2]]
            if attention_sum.decay != 1.0:
                total.mul_(self._find_decay(total, attention_sum.decay))
            total.add_(increment)

    def _find_decay(self, total: Tensor, decay: float) -> float | Tensor:
        """Return by what `add` multiplies a total before it adds: `decay`, but 1 for batch rows without tokens in this block.

        rows_B: tokens of each row in the prompt (or block); empty in a decode step.
        """
        if min(self.now.rows_B, default=1) > 0:
            return decay
        has_token = self.now.copy(self.now.rows_B, total.device)[:, None, None] > 0
        return torch.where(has_token, decay, 1.0).to(total.dtype)

    def _add_shared(self, increment: Tensor, positions: Tensor, decay: float) -> None:
        """Add `increment` [B,H,T] to `shared_score`, the sum that all layers share; `add` calls it once a layer and pass.

        Its columns are original positions + 1, since layers hold different tokens. It changes in place, or is replaced by a
        longer tensor as the text grows.
        """
        cache = self.cache
        B, H, _ = positions.shape
        needed = self.slots.columns_read + 1
        shared = self._find_shared_score(positions)
        if shared.shape[-1] < needed:
            new_columns = increment.new_zeros(B, H, needed + needed // 4 + 64 - shared.shape[-1])
            cache.shared_score = shared = torch.cat([shared, new_columns], -1)
        index = positions + 1  # column 0 belongs to empty slots
        old = shared.gather(-1, index)
        # a NaN in one layer adds nothing to the shared sum
        total = old * self._find_decay(old, decay) + increment.nan_to_num(0.0)
        shared.scatter_(-1, index, total)

    def _find_shared_score(self, like: Tensor) -> Tensor:
        """Return `shared_score`, a sum per original position that all layers share. Sets it: zeros at first, on this device."""
        cache = self.cache
        if cache.shared_score is None:
            size = (*like.shape[:2], self.slots.columns_read + 1)
            cache.shared_score = torch.zeros(size, dtype=accumulator(self.slots.dtype), device=like.device)
        if cache.shared_score.device != like.device:
            cache.shared_score = cache.shared_score.to(like.device)
        return cache.shared_score


def _rank_positions(positions_BHT: Tensor) -> Tensor:
    """Return each token's rank among its head's tokens, by which `Call.renumber` rotates its key. Empty slots get 0."""
    order = positions_BHT.argsort(-1)
    count = torch.arange(positions_BHT.shape[-1], device=positions_BHT.device).expand_as(order)
    ranks = torch.empty_like(order).scatter_(-1, order, count)
    return (ranks - (positions_BHT < 0).sum(-1, keepdim=True)).clamp(min=0)
