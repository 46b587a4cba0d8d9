"""The cache that forgets: the state of one text (or batch of texts) under a policy and a budget."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from transformers import Cache

from . import compiled, validating
from .backends.choice import Choice
from .converting import take_over
from .errors import KVPatchError
from .forward import Forward, cut, places
from .parallel import WHOLE, Parallel
from .policies import Policy, get_policy
from .policies.budgets import Budget, whole
from .policies.moment import Limits
from .policies.scopes import protect_tensor
from .slots import SlotLayer
from .whole import Whole

if TYPE_CHECKING:
    from .deck import Deck

SLIDING = get_policy("window")

_Method = TypeVar("_Method", bound=Callable[..., Any])


def writable(method: _Method) -> _Method:
    """What it makes stays writable where inference mode is off, as it is in attention.attend."""
    return torch.inference_mode(False)(torch.no_grad()(method))


class EvictingCache(Whole, Cache):
    """A transformers cache that keeps `budget` tokens per KV head. Made by the patched model, or by `Patch.new_cache()`.

    Holds all state of a text, so that one patched model can serve several threads and several caches.
    """

    layers: list[SlotLayer]  # type: ignore[assignment]

    def __init__(
        self,
        policy: Policy,
        budget: Budget,
        *,
        seed: int = 0,
        block: int | None = None,
        renumbered: bool = False,
        backend: str = "auto",
        bounds: tuple[int | None, ...] = (),
        parallel: Parallel = WHOLE,
    ) -> None:
        validating.made_of(policy, budget)
        n_layers = len(budget.per_layer)
        # a layer that bounds itself by its sliding window, beside others that do not, holds that window whatever the policy
        self.bounds = bounds or (None,) * n_layers
        self.policies = [policy if bound is None else SLIDING for bound in self.bounds]
        self.free = [layer for layer, bound in enumerate(self.bounds) if bound is None]
        evicts = {layer: policy.score is not None and budget.evicts(layer) for layer in self.free}
        acting = [evicts.get(layer, True) for layer in range(n_layers)]
        own = zip(self.policies, acting, strict=True)
        super().__init__(layers=[SlotLayer(one.statistics if on else ()) for one, on in own])
        self.policy, self.budget, self.seed = policy, budget, seed
        self.block, self.renumbered, self.choice = block, renumbered, Choice(backend)
        self.parallel = parallel
        self.origin = ""  # of which patch; copies keep it
        # a scratch cache serves one pass of a model that keeps none: each layer's part is dropped when it has run
        self.scratch = False
        self.transparent = False  # nothing is ever evicted, and all is to be as in a DynamicCache
        # padding behind a token counts in positions, for attention's distances are between columns; gaps_B: such columns so far
        self.columns = False
        self.gaps_B: Tensor | None = None
        self.strict: tuple[str, ...] = ()  # names of the layers, where numbers are looked at (strict.py)
        self.table: tuple[int, Any] | None = None
        self.make_table: Callable[[int], Any] | None = None
        self.turns, self.turn_from_B = 0, [0]
        self.turn_open = False
        self.acting = acting
        self.prompt_len: int | None = None
        self.new_tokens: int | None = None
        self.now: Forward | None = None
        self.seen_B: Tensor | None = None
        self.shared: Tensor | None = None
        self.steps = 0
        self.marks, self.changes = {}, 0
        self.drafts = False  # of an assistant: what cannot be rolled back is read again, for drafts are only tried
        self.deck: Deck | None = None
        self.deck_due = False
        self.clock: compiled.Clock | None = None
        self.joined = False  # rows are at different places of their texts
        self.lag_B: Tensor | None = None  # decode steps of each row less than `steps`, where a temperature asks
        self.padded = self.by_columns = False  # some prompt was; and its positions counted the padding
        self.behind = False  # steps were taken under torch.compile that the counters here do not know of
        self.room: int | None = None  # tokens to decode in buffers of their final size
        self.limits_of: dict[tuple[object, ...], Limits] = {}

    # ---- the public contract ----

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens SEEN (columns, padding included): positions go on as if nothing were missing. A tensor under torch.compile."""
        if torch.compiler.is_compiling() and self.clock is not None:
            return self.clock.columns  # type: ignore[return-value]
        self.catch_up()
        validating.layer_of("layer_idx", layer_idx, len(self.layers))
        return self.layers[layer_idx].seen

    @property
    def chooses(self) -> bool:
        """Whether the policy acts on any layer."""
        return any(self.acting[layer] for layer in self.free)

    @property
    def is_compileable(self) -> bool:
        """Whether generate() may compile the decode step by itself."""
        return self.room is not None

    def catch_up(self) -> None:
        """Let the counters know of steps that were taken under torch.compile."""
        if self.behind and not self.marks.get("behind"):
            compiled.catch_up(self)

    def positions(self, layer: int) -> Tensor:
        """Original positions held, int64 [B, Hkv, T], in no order; -1 where a slot is empty."""
        validating.layer_of("layer", layer, len(self.layers))
        one = self.layers[layer]
        validating.filled(one.is_initialized)
        return one.positions[:, :, : one.used].clone()

    def held(self, layer: int) -> Tensor:
        """How many tokens each KV head holds, int64 [B, Hkv]."""
        return (self.positions(layer) >= 0).sum(-1)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values really allocated, all layers and rows."""
        whole = [layer.untrimmed() for layer in self.layers]
        buffers = [t for layer in whole for t in (layer.keys, layer.values) if t is not None]
        return sum(t.numel() * t.element_size() for t in buffers)

    @writable
    def clone(self) -> EvictingCache:
        """An independent copy, for several questions after one context."""
        self.catch_up()
        with self.reading("clone()"):
            return copy.deepcopy(self)

    @writable
    def __deepcopy__(self, memo: dict[int, Any]) -> EvictingCache:
        new = memo[id(self)] = copy.copy(self)
        memo[id(self.make_table)] = self.make_table  # which knows the model
        own = {**vars(self), "deck": None, "deck_due": self.deck is not None or self.deck_due}
        vars(new).update(copy.deepcopy(own, memo))
        return new

    @staticmethod
    @writable
    def concatenate(caches: Sequence[EvictingCache], consume: bool = False) -> EvictingCache:
        """One cache with the rows of several, in their order, for texts that are continued together from here on.

        Their texts may have any lengths: get_seq_length() of the result is the longest's, and nothing is padded. A forward
        takes one token per row, no attention_mask (or one of the new columns alone), and position_ids only if they are
        `next_positions()`: where they are left out they are filled in. Drop rows with batch_select_indices().

        Args:
            caches: made under one patch, each at the end of a prompt or behind generated tokens.
            consume: empty each of them layer by layer, so that no more than one layer is held twice.

        Raises:
            KVPatchError: other settings or another model's shapes, a cache that is empty or in the middle of a prompt, that
                was made with room=, or that read padding without position_ids.
        """
        from .joining import join

        return join(caches, consume)

    def next_positions(self, Q: int = 1) -> Tensor:
        """Positions of each row's next Q tokens, int64 [B,Q]: the position_ids of a forward over rows of different texts.

        Raises:
            KVPatchError: the cache is empty, or Q is no number of tokens.
        """
        validating.filled(self.seen_B is not None)
        whole("Q", Q, "tokens")
        assert self.seen_B is not None
        read_B = self.seen_B if self.gaps_B is None else self.seen_B - self.gaps_B
        return read_B[:, None] + torch.arange(Q, device=self.seen_B.device)

    def tokens(self, layer: int, n: int) -> int:
        """Tokens that a KV head of `layer` may keep where a share `k` counts `n` tokens (of heads that share: the mean)."""
        bound = self.bounds[layer]
        if bound is not None:
            return bound
        budget, policy = self.budget.tokens(layer, n), self.policy
        if policy.over_layers is None or policy.score is None:
            return budget
        least = policy.score.tail + 1 if policy.score.protects_tail else 1
        most = None if policy.schedule == "decode" else n
        return policy.over_layers.split(budget, len(self.free), least, most)[self.free.index(layer)]

    def temperature(self, ahead: int) -> float | Tensor:
        """A score's temperature at a decode step, `ahead` of what this pass began with; [B] where rows differ."""
        score, lag_B = self.policy.score, self.lag_B
        assert score is not None and self.now is not None
        if self.now.traced and self.clock is not None:
            steps = self.clock.steps + ahead
            return score.temperature(steps if lag_B is None else steps - lag_B, self.clock.span)
        if lag_B is None:
            return score.temperature(self.now.first_step + ahead, self.new_tokens)
        return score.temperature(self.now.first_step + ahead - lag_B, lag_B.new_tensor(self._span()))

    def _span(self) -> int:
        """Decode steps over which a score's temperature moves."""
        return self.new_tokens or int(getattr(self.policy.score, "generation_length", 1))

    # ---- one forward pass ----

    def begin(
        self,
        B: int,
        Q: int,
        mask_BT: Tensor | None,
        input_ids: Tensor | None,
        device: torch.device,
        table: Callable[[int], Any] | None = None,
        repeatable: bool = False,
    ) -> None:
        """Called before the decoder runs: positions of the new tokens, and which of them are prompt.

        table: makes the rotary table for so many positions, where keys are cached without them. repeatable: see Forward.

        Raises:
            KVPatchError: a mask of the wrong length, a row of nothing but padding, padding among generated tokens, an
                earlier pass that did not finish, another batch size.
        """
        self.claim("forward pass")
        self.catch_up()
        if self.transparent:
            for layer in self.layers:
                layer.untrim()
        try:
            now, before, after = self._read(B, Q, mask_BT, input_ids, device, repeatable)
        except BaseException:
            self.release()
            raise
        # all is well: from here on the cache changes, until _finish()
        seen, prompt, ends = self.get_seq_length(), now.prompt, now.ends_prompt
        self.now, self.seen_B, self.padded = now, after, self.padded or now.padded
        if self.columns and now.behind:
            self._count_gaps(now)
        if prompt:
            self.deck = None
            if not self.turn_open:
                self.turn_from_B, self.turn_open = before.tolist(), True
        if ends:
            self.steps, self.lag_B, self.deck_due = 0, None, self.room is None
            self.limits_of.clear()
        if prompt or not any(layer.record_past for layer in self.layers):
            for layer in self.layers:  # what was recorded before a prompt does not lead back over it
                layer.journal.clear()
        if now.n_B:
            self._budget(now, [n + max((self.prompt_len or 0) - seen - prompt, 0) for n in now.n_B])
        if table is not None:
            self.make_table = table
            now.table = self._rotary_table(Q, prompt > 0)
        if prompt and self.block is not None:
            now.blocks = cut(now, self.block, before.tolist(), now.n_B, final=ends)
        if ends:
            self.turns, self.turn_open = self.turns + 1, False
        self.steps += Q - prompt

    def _read(
        self, B: int, Q: int, mask_BT: Tensor | None, input_ids: Tensor | None, device: torch.device, repeatable: bool
    ) -> tuple[Forward, Tensor, Tensor]:
        """What a pass brings, and the tokens of each row before and after it, [B]. Nothing is changed yet."""
        self._check(B, Q, mask_BT)
        seen = self.get_seq_length()
        before = torch.zeros(B, dtype=torch.long, device=device) if self.seen_B is None else self.seen_B.to(device)
        prompt = self._prompt_columns(seen, Q)
        if Q - prompt > 1 and self.chooses and self.policy.score is not None and self.policy.score.across_layers:
            raise KVPatchError(
                f"{Q - prompt} generated tokens in one pass (assisted decoding, prompt lookup): with shared=True a layer's "
                "choice needs the scores that later layers gave the tokens before. Use shared=False, or feed them one by one."
            )
        real = None if mask_BT is None else mask_BT[:, -Q:].to(device).bool()
        # reading the mask waits for the device: only while there is a prompt
        padded = real is not None and prompt > 0 and not bool(real[:, :prompt].all())
        if real is not None and prompt < Q:
            self._refuse_padding(real[:, prompt:])
        rows = None
        if real is not None and padded:
            rows = places(real, before, self.columns)
            positions = rows.masked_fill(~real, -1)
            after, whole = rows[:, -1] + 1, rows[:, prompt - 1] + 1
        else:
            positions = before[:, None] + torch.arange(Q, device=device)
            after, whole = before + Q, before + prompt
        ends = prompt > 0 and seen + prompt >= (self.prompt_len or 0)
        n_B = whole.tolist() if ends or (prompt and self.block) else []
        if ends and padded and real is not None:
            self._check_rows(n_B, real[:, prompt - 1])
        protect = self._protect(positions, input_ids, seen) if prompt else None
        recording = Q - prompt > 1 or any(layer.record_past for layer in self.layers)
        first = 0 if ends else self.steps
        now = Forward(positions, prompt, ends, n_B, padded, protect, recording, first, repeatable=repeatable)
        now.rows_BQ = rows if self.transparent else None
        return now, before, after

    def _count_gaps(self, now: Forward) -> None:
        """Padding behind tokens stands in positions: rows can no longer be told positions that leave it out."""
        assert now.rows_BQ is not None
        gaps_B = ((now.rows_BQ >= 0) & (now.positions_BQ < 0)).sum(-1)
        self.gaps_B = gaps_B if self.gaps_B is None else self.gaps_B.to(gaps_B.device) + gaps_B
        self.by_columns = True

    def _budget(self, now: Forward, n_B: list[int]) -> None:
        """What the end of a prompt counts; n_B: tokens of each row when its prompt is whole."""
        later, turns = self.turns > 0, self.policy.scope.turns
        now.keeps_all = later and turns == "first"
        now.fixed_B = self.turn_from_B if later and turns == "each" else None
        now.rows_B = [n - start for n, start in zip(n_B, self.turn_from_B, strict=True)]
        now.budget_n_B = n_B if now.fixed_B is None else now.rows_B

    def _rotary_table(self, Q: int, prompt: bool) -> Any:
        """A table for the ranks of a pass of Q columns: the same at every decode step of a full cache."""
        assert self.make_table is not None
        places = self._ranks(Q, prompt)
        if self.table is None or self.table[0] != places:
            self.table = (places, self.make_table(places))
        return self.table[1]

    def _ranks(self, Q: int, prompt: bool) -> int:
        """The most tokens that a head holds in a pass of Q columns, or somewhat more."""
        most = 1
        for index, layer in enumerate(self.layers):
            assert self.now is not None
            replaced = layer.free_BH is not None and layer.evicting and not prompt
            held = layer.taken if replaced else layer.taken + Q
            first = self.turns == 0 and not self.policy.over_heads  # later ones begin with what was generated meanwhile
            if self.block and self.now.budget_n_B and self.acting[index] and first:
                held = min(held, max(self.tokens(index, n) for n in self.now.budget_n_B) + self.block)
            most = max(most, held)
        return most

    def _check_rows(self, n_B: list[int], last_B: Tensor) -> None:
        if min(n_B) == 0:
            raise KVPatchError(
                f"Row {n_B.index(0)} of the batch is all padding (its attention_mask is zero): drop it from the batch."
            )
        if self.prompt_len is not None and not self.transparent and not bool(last_B.all()):
            raise KVPatchError(
                f"Row {int((~last_B).nonzero()[0])} is padded on the right: generate() continues behind the last column, "
                "so pad on the left (tokenizer.padding_side = 'left')."
            )

    def _check(self, B: int, Q: int, mask_BT: Tensor | None) -> None:
        if self.seen_B is not None and len(self.seen_B) != B:
            raise KVPatchError(
                f"The cache holds {len(self.seen_B)} rows, but the input has {B}: give as many, or make them so with "
                "batch_select_indices() or batch_repeat_interleave()."
            )
        if mask_BT is not None and mask_BT.shape[-1] not in (self.get_seq_length() + Q, Q):
            raise KVPatchError(
                f"attention_mask has {mask_BT.shape[-1]} columns, but {self.get_seq_length()} tokens were seen and {Q} "
                f"are new: it needs {self.get_seq_length() + Q}."
            )

    def _prompt_columns(self, seen: int, Q: int) -> int:
        """Columns of this pass that belong to a prompt (policies.md, Budgets: prompts fed in pieces)."""
        if self.prompt_len is not None:
            return min(max(self.prompt_len - seen, 0), Q)
        # what was taken over from an unpatched prompt ends with the first tokens that follow, be it one
        return Q if seen == 0 or Q > 1 or not self.turns else 0

    @staticmethod
    def _refuse_padding(real_BQ: Tensor) -> None:
        message = (
            "attention_mask marks a generated token as padding; pad prompts on the left, before their first token."
        )
        if real_BQ.device.type == "cpu":
            if not bool(real_BQ.all()):
                raise KVPatchError(message)
        else:  # asserted on the device, without waiting for it
            torch._assert_async(real_BQ.all(), message)

    def _protect(self, positions_BQ: Tensor, input_ids: Tensor | None, seen: int) -> Tensor | None:
        """bool [B,Q]: columns that the user's `protect=` marks."""
        if self.policy.scope.protect is None or not self.chooses:
            return None
        wanted = protect_tensor(self.policy.scope.protect).to(positions_BQ.device)
        B, Q = positions_BQ.shape
        if wanted.dtype != torch.bool:
            if input_ids is None:
                raise KVPatchError("protect= by token ids needs input_ids; with inputs_embeds give a boolean mask.")
            return torch.isin(input_ids.to(wanted.device), wanted) & (positions_BQ >= 0)
        wanted = wanted.expand(B, -1) if wanted.ndim == 1 else wanted.repeat_interleave(max(B // len(wanted), 1), 0)
        total = self.prompt_len or Q
        if seen == 0 and wanted.shape != (B, total):
            raise KVPatchError(
                f"protect= is a mask of shape {list(wanted.shape)}, but the prompt is [{B}, {total}]: give one of its shape, "
                "or token ids."
            )
        chunk = wanted[:, seen : seen + Q]
        pad = chunk.new_zeros(B, Q - chunk.shape[1])
        return torch.cat([chunk, pad], 1) & (positions_BQ >= 0)

    def trim(self) -> None:
        """Show no spare columns in `layers[i].keys` and `.values`, as a DynamicCache shows none."""
        for layer in self.layers:
            layer.trim()

    def end(self, layer: int) -> None:
        """A layer has run; after the last one the pass is whole."""
        if self.scratch:
            self.layers[layer].reset()
        if layer == len(self.layers) - 1:
            self._finish()

    def _finish(self) -> None:
        """The pass is whole."""
        now = self.now
        assert now is not None and self.seen_B is not None
        if now.traced:
            compiled.end(self)
            return
        Q = now.positions_BQ.shape[1]
        begun = self.clock is None or now.ends_prompt
        if self.clock is None:
            self.clock = compiled.Clock(self.seen_B.device)
            self.clock.advance(self.layers[0].seen, self.steps, False)
        else:
            self.clock.advance(Q, Q - now.prompt, now.ends_prompt)
        if begun or self.room is not None:
            growing = (layer.seen + layer.slack - layer.grown for layer in self.layers if not layer.evicting)
            self.clock.limit.fill_(min(growing, default=0))
        if begun:
            self.clock.span.fill_(self._span())
            if self.make_table is not None:
                self._rotary_table(1, prompt=False)  # for a step that is compiled
            if self.room is not None:
                compiled.mark(self)
        if self.transparent and self.prompt_len is None:  # generate() trims when it ends
            self.trim()
        self.release()

    @writable
    def absorb(self, past: Cache, mask_BT: Tensor | None = None) -> None:
        """Take over the keys and values of an unpatched prompt; the next prompt end evicts.

        Raises:
            KVPatchError: the policy scores by attention that `past` does not hold, or `past` has dropped tokens.
        """
        self.check_whole()
        take_over(self, past, mask_BT)

    # ---- batch and roll-back ----

    def _map_rows(self, what: str, change: Callable[[Tensor], Tensor]) -> None:
        """`change` applied to every tensor whose first axis is the batch."""
        with self.changing(what):
            self.catch_up()
            try:
                seen_B = None if self.seen_B is None else change(self.seen_B)
            except BaseException:  # what cannot be done to one tensor was done to none
                self.release()
                raise
            self.deck, self.deck_due = None, False
            for layer in self.layers:
                layer.map_rows(change)
            self.seen_B = seen_B
            self.shared = None if self.shared is None else change(self.shared)
            self.lag_B = None if self.lag_B is None else change(self.lag_B)
            self.gaps_B = None if self.gaps_B is None else change(self.gaps_B)
            if self.turn_open:  # what the rest of the prompt will ask
                self.turn_from_B = change(torch.tensor(self.turn_from_B)).tolist()
            if self.joined and self.seen_B is not None:  # no mask counts its columns: they are the longest row's
                self.clock, columns = None, int(self.seen_B.max())
                for layer in self.layers:
                    layer.seen = columns

    @writable
    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.check_whole()
        validating.beams(beam_idx, self.seen_B)
        self._map_rows("reorder_cache()", lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    @writable
    def batch_select_indices(self, indices: Tensor) -> None:
        self.check_whole()
        validating.rows(indices, self.seen_B)
        self._map_rows("batch_select_indices()", lambda tensor: tensor[indices, ...])

    @writable
    def batch_repeat_interleave(self, repeats: int) -> None:
        self.check_whole()
        whole("repeats", repeats, "copies of each row")
        self._map_rows("batch_repeat_interleave()", lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def reset(self) -> None:
        """Empty the cache, whatever state it is in."""
        self.marks = {"change": ["reset()"]}
        self.changes += 1
        super().reset()
        self.seen_B = self.gaps_B = self.shared = self.now = self.prompt_len = self.new_tokens = None
        self.steps = 0
        self.turns, self.turn_open = 0, False
        self.joined = self.padded = self.by_columns = False
        self.lag_B = None
        self.deck, self.deck_due = None, False
        self.clock, self.behind = None, False
        self.table, self.limits_of = None, {}
        self.choice = Choice(self.choice.wanted)
        self.release()

    @writable
    def crop(self, tokens_to_remove: int) -> None:
        """Roll back the last tokens exactly: keys, values, positions, scores and free slots.

        Args:
            tokens_to_remove: minus the number of tokens, as transformers has it; a positive number is the length to
                crop to, as it was before 5.15.

        Raises:
            KVPatchError: the steps were not recorded (call `activate_past_recording()` before them).
        """
        self.check_whole()
        self.catch_up()
        count = validating.removal(tokens_to_remove, self.get_seq_length())
        if count == 0:
            return
        remembers = [on and policy.remembers for on, policy in zip(self.acting, self.policies, strict=True)]
        if not all(layer.can_crop(count, on) for layer, on in zip(self.layers, remembers, strict=True)):
            if self.drafts:
                self.reset()
                return
            raise KVPatchError(
                f"Cannot roll back {count} tokens: what they evicted was not recorded. Call "
                "cache.activate_past_recording() before generating them, or cache.clone() before and use the copy."
            )
        with self.changing("crop()"):
            self.deck, self.deck_due = None, False
            shared = [layer.crop(count) for layer in self.layers]
            self.shared = self.shared if shared[0] is None else shared[0]
            assert self.seen_B is not None
            self.seen_B = self.seen_B - count
            self.steps = max(self.steps - count, 0)
            self.clock = None  # made anew by the next pass
