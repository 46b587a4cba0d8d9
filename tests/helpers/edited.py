"""Random edits of live caches, mixed with prompts and steps; and what the unpatched model makes of each row's text.

The oracle is the unpatched model in one pass over a row alone: tokens stand in the order in which they were read, at their
positions, and a mask of each head's own says what each query sees: what the cache held before it, and its own pass.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable

import torch

import kvpatch
from kvpatch.errors import KVPatchError
from kvpatch.evaluation.masked import predict_masked
from kvpatch.hooks.target import Target
from tests.helpers.comparing import entries, same
from tests.helpers.tiny import prompt

LONGEST = 70  # tokens of a text, after which another one is begun
DEEDS = ("decode", "decode", "turn", "turn", "forget", "forget", "replace", "replace", "fill", "rows", "copy", "join")


class Text:
    """One row: tokens in the order of reading, and by layer what each one sees.

    column: of each position its newest token's; left: positions that no edit has taken out; marked: those of tokens that the
    policy protects, read in a prompt or an edit.
    """

    def __init__(self, layers):
        self.ids, self.places, self.seen = [], [], [[] for _ in range(layers)]
        self.column, self.left, self.marked, self.logits = {}, set(), set(), []

    def add(self, ids_Q, places, held, protected=()):
        """Add tokens that see `held`, of each layer and head the positions, and those of their own pass before them."""
        first = len(self.ids)
        for q, (token, place) in enumerate(zip(ids_Q.tolist(), places, strict=True)):
            for rows, heads in zip(self.seen, held, strict=True):
                seen = torch.zeros(len(heads), 4 * LONGEST, dtype=torch.bool)
                for head, positions in enumerate(heads):
                    seen[head, [self.column[p] for p in positions]] = True
                seen[:, first : first + q + 1] = True
                rows.append(seen)
            self.ids.append(token)
            self.places.append(place)
        self.column |= {place: first + q for q, place in enumerate(places)}
        self.left |= set(places)
        self.marked -= set(places)
        self.marked |= {place for token, place in zip(ids_Q.tolist(), places, strict=True) if token in protected}

    def find_ids(self, places):
        """The ids that stand at these positions now."""
        return [self.ids[self.column[place]] for place in places]

    def predict(self, model, target, groups, placed):
        """Logits of all its tokens by the unpatched model."""
        T = len(self.ids)
        seen = [
            torch.stack(rows, 1)[None, :, :, :T].repeat_interleave(group, 1)
            for rows, group in zip(self.seen, groups, strict=True)
        ]
        ids, places = torch.tensor([self.ids]), {"position_ids": torch.tensor([self.places])} if placed else {}
        return predict_masked(model, target, ids, 1, seen, places, torch.ones_like(ids))[0]


class Editing:
    """Rows of a cache, edited at random.

    Args:
        edits: how many to make, refused ones left out.
        settings: policy, k and options.
        by_columns: the unpatched model counts columns, so that it cannot read a token at the place of another.
    """

    def __init__(self, model, edits, settings, draw, by_columns):
        self.model, self.draw, self.edits, self.settings = model, draw, edits, settings
        self.target, self.done, self.refused, self.seed = Target.find(model), 0, 0, 0
        self.placed = "position_ids" in inspect.signature(type(model).forward).parameters
        self.told = self.placed and self.target.why_positions_fixed() is None and not by_columns
        self.protected = settings[2].get("protect", ())
        self.tolerance = 1e-5 if model.dtype == torch.float64 else 2e-4
        self.texts, self.groups = [], []

    def run(self):
        """Make the edits, and compare every text with the unpatched model's."""
        policy, k, options = self.settings
        with torch.no_grad(), kvpatch.patched(self.model, policy, k, **options) as patch:
            self.patch, self.whole = patch, policy == "full" or k == 1.0
            finished = []
            while self.done < self.edits:
                self.begin(patch)
                while self.done < self.edits and len(self.texts[0].ids) < LONGEST:
                    self.do(self.draw.choice(DEEDS))
                self.feed(1)
                finished += self.texts
        if options.get("bits", 16) == 16:
            self.compare(finished)
        return self

    def begin(self, patch):
        """Read a first prompt, of rows that are padded or not."""
        B, n = self.draw.randrange(1, 4), self.draw.randrange(18, 26)
        pads = self.told and "quota" not in self.settings[2]
        self.cache, self.lengths = patch.new_cache(), [n - self.draw.randrange(0, 6) if pads and b else n for b in range(B)]
        self.columns = n
        self.texts, self.joined = [Text(0) for _ in range(B)], False
        self.feed(n, first=True)

    @property
    def heads(self):
        """Of each row, layer and head the positions that it holds."""
        layers = [self.cache.positions(layer).tolist() for layer in range(len(self.cache.layers))]
        return [[[{p for p in head if p >= 0} for head in layer[b]] for layer in layers] for b in range(len(self.texts))]

    def feed(self, n, first=False):
        """Read n tokens: a prompt, or one generated token."""
        self.seed += 1
        B = len(self.texts)
        ids, held = prompt(B, n, seed=self.seed), None if first else self.heads
        ends = self.lengths if first else [length + n for length in self.lengths]
        columns = n if first else self.columns + n
        given = {}
        if len({*ends, columns}) > 1 and not self.joined:  # rows with padding may have gone
            mask = torch.arange(columns)[None] >= columns - torch.tensor(ends)[:, None]
            places = (torch.arange(columns - n, columns) - (columns - torch.tensor(ends))[:, None]).clamp(min=0)
            given = {"attention_mask": mask.long(), "position_ids": places}
        before = None if first else self.spans_held()
        out = self.model(ids, past_key_values=self.cache, use_cache=True, **given).logits
        self.cache.check_invariants()
        if first:
            self.texts = [Text(len(self.cache.layers)) for _ in range(B)]
            self.groups = [self.cache.steps.calls[layer].group for layer in range(len(self.cache.layers))]
        for b, (text, end) in enumerate(zip(self.texts, ends, strict=True)):
            own = min(n, end)
            nothing = [[set() for _ in range(layer.positions.shape[1])] for layer in self.cache.layers]
            text.add(ids[b, n - own :], range(end - own, end), nothing if first else held[b], self.protected if n > 1 else ())
            text.logits.append((len(text.ids) - 1, out[b, -1]))
        self.lengths, self.columns = ends, columns
        if not first and n == 1:
            self.check_kept(before)
        self.check_held()

    # ---- edits ----

    def do(self, deed):
        """Do what a name says."""
        B = len(self.texts)
        if deed == "decode":
            for _ in range(self.draw.randrange(1, 4)):
                self.feed(1)
        elif deed == "turn":
            self.feed(1 if self.joined else self.draw.randrange(2, 6))
        elif deed == "forget" or (deed in ("replace", "fill") and not self.told):
            self.forget()
        elif deed == "replace":
            start = self.draw.randrange(0, min(self.lengths))
            stop = self.draw.randrange(start, min(self.lengths)) + 1
            self.replace(start, stop, self.draw.choice((0, 0, 1, 3)))
        elif deed == "fill":
            free = [p for p in range(min(self.lengths)) if not any(p in text.left for text in self.texts)]
            if free:
                self.replace(free[0], max(p for p in free if {*range(free[0], p)} <= {*free}) + 1, 0)
        elif deed == "rows":
            self.take_rows([self.draw.randrange(B) for _ in range(self.draw.randrange(1, 4))])
        elif deed == "copy":
            self.cache = self.cache.clone()
        elif deed == "join" and self.told and not self.draw.randrange(3):
            self.join_rows()

    def take_rows(self, rows):
        """Beams that are reordered, repeated and dropped."""
        self.cache.batch_select_indices(torch.tensor(rows))
        self.texts = [copy.deepcopy(self.texts[row]) for row in rows]
        self.lengths = [self.lengths[row] for row in rows]
        self.check_held()

    def join_rows(self):
        """Rows of an engine's batch: each was a cache of its own, and no prompt is read into them any more."""
        rows = [self.cache.select_rows(row) for row in range(len(self.texts))]
        self.cache = kvpatch.EvictingCache.concatenate(rows)
        self.columns, self.joined = max(self.lengths), True
        self.check_held()

    def forget(self):
        """Take one or two spans out of a row, or out of all."""
        row = self.draw.choice((None, self.draw.randrange(len(self.texts))))
        rows = range(len(self.texts)) if row is None else [row]
        most = min(self.lengths[b] for b in rows)
        cuts = sorted(self.draw.sample(range(most + 1), 4))
        spans = [(cuts[0], cuts[1]), (cuts[2], cuts[3])][: self.draw.randrange(1, 3)]
        before = [entries(self.cache, layer) for layer in range(len(self.cache.layers))]
        self.cache.forget(spans, row)
        self.cache.check_invariants()
        gone = {p for start, stop in spans for p in range(start, stop)}
        for layer, were in enumerate(before):
            left = {at: one for at, one in were.items() if at[0] not in rows or at[2] not in gone}
            assert same(entries(self.cache, layer), left), "others than the spans went, or are not what they were"
        for b in rows:
            self.texts[b].left -= gone
        self.done += 1
        self.check_held()

    def replace(self, start, stop, reread):
        """Read other tokens in place of a span, and some behind it again."""
        self.seed += 1
        reread = min(reread, min(self.lengths) - stop)
        new = prompt(len(self.texts), self.draw.randrange(1, stop - start + 1), seed=self.seed)
        before, spans = self.heads, self.spans_held(range(start, stop + reread))
        try:
            self.patch.replace(self.cache, (start, stop), new, reread=reread)
        except KVPatchError as error:
            if not str(error).startswith("replace()"):
                raise
            self.refused += 1
            return
        self.cache.check_invariants()
        places = [*range(start, start + new.shape[1]), *range(stop, stop + reread)]
        for b, text in enumerate(self.texts):
            again = torch.tensor(text.find_ids(range(stop, stop + reread)), dtype=torch.long)
            text.left -= set(range(start, stop + reread))
            text.add(
                torch.cat([new[b], again]), places, [[{p for p in head if p < start} for head in one] for one in before[b]]
            )
            for layer, now in zip(before[b], self.heads[b], strict=True):
                for head, its in zip(layer, now, strict=True):
                    assert {p for p in head if p >= stop + reread} == {p for p in its if p >= stop + reread}
                    assert its <= {p for p in head if not start <= p < stop + reread} | set(places)
        self.done += 1
        self.check_kept(spans)
        self.check_held()

    # ---- laws ----

    def check_held(self):
        """Nothing is held that an edit took out; all else is, where nothing is evicted and no window moves on.

        What the policy protects stays until an edit takes it out.
        """
        bounds = [layer.sliding for layer in self.cache.layers]
        for text, layers in zip(self.texts, self.heads, strict=True):
            for heads, bound in zip(layers, bounds, strict=True):
                for head in heads:
                    assert head <= text.left and (bound is not None or text.marked & text.left <= head)
                    assert not self.whole or bound is not None or head == text.left

    @property
    def sharing(self):
        """Layers in which spans have shares that no window takes from them."""
        return [one for one in self.cache.layers if "span" in one.state and one.sliding is None]

    def spans_held(self, but: Iterable[int] = ()):
        """Of each layer, row and head how many tokens of each span of a quota it holds, those at some positions left out."""
        if "quota" not in self.settings[2]:
            return None
        gone, found = torch.tensor([*but], dtype=torch.long), []
        for slots in self.sharing:
            numbers = torch.where((slots.positions >= 0) & ~torch.isin(slots.positions, gone), slots.state["span"] >> 32, 0)
            found.append(torch.nn.functional.one_hot(numbers, 4).sum(2)[..., 1:])
        return found

    def check_kept(self, before):
        """No step takes a span below its share, but where an edit did."""
        if before is None:
            return
        for slots, count in zip(self.sharing, before, strict=True):
            span, real = slots.state["span"] >> 32, slots.positions >= 0
            for number in range(1, 4):
                own = (span == number) & real
                share = slots.state["quota"].masked_fill(~own, 0).amax(-1)
                assert bool((own.sum(-1) >= torch.minimum(share, count[..., number - 1])).all())

    def compare(self, texts):
        """Compare the last logits of each pass with the unpatched model's."""
        for text in texts:
            expected = text.predict(self.model, self.target, self.groups, self.placed)
            columns, logits = zip(*text.logits, strict=True)
            torch.testing.assert_close(torch.stack(logits), expected[[*columns]], atol=self.tolerance, rtol=1e-5)
