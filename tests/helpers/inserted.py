"""Random edits under renumbered positions, beside a cache in which the places of new tokens were free from the beginning."""

from __future__ import annotations

import torch

from tests.helpers.tiny import prompt


class Inserting:
    """A cache, and one in which the places of what it will be given in the middle were free from the beginning.

    places: of each position of the former the one of the latter. free: of each place that is free, where it begins in the
    latter, and its tokens.
    """

    def __init__(self, model, patch, draw):
        self.model, self.patch, self.draw, self.seed, self.done = model, patch, draw, 0, 0
        self.tight, self.wide = patch.new_cache(), patch.new_cache()
        self.places, self.free = [], []
        for last in (False, False, False, True):
            new, spare = self.ids(draw.randrange(3, 7)), self.ids(0 if last else draw.randrange(1, 6))
            start = len(self.places) + sum(size for _, size in self.free)
            model(new, past_key_values=self.tight)
            model(torch.cat([new, spare], 1), past_key_values=self.wide)
            self.places += range(start, start + new.shape[1])
            if not last:
                self.free.append((start + new.shape[1], spare.shape[1]))
                self.wide.forget([(start + new.shape[1], start + new.shape[1] + spare.shape[1])])

    def ids(self, n):
        """New tokens of two rows."""
        self.seed += 1
        return prompt(2, n, seed=self.seed)

    def insert(self):
        """Fill a free place, or some of it, and perhaps what stands before it too."""
        begin, size = self.free.pop(self.draw.randrange(len(self.free)))
        at = next(i for i, place in enumerate(self.places) if place > begin)
        back = self.draw.randrange(0, 3)
        if [*range(begin - back, begin)] != self.places[at - back : at]:
            back = 0
        new = self.ids(back + self.draw.randrange(1, size + 1))
        self.patch.replace(self.tight, (at - back, at), new)
        self.patch.replace(self.wide, (begin - back, begin + size), new)
        self.places[at - back : at] = range(begin - back, begin - back + new.shape[1])
        self.done += 1

    def forget(self):
        """Take a span out."""
        start = self.draw.randrange(len(self.places))
        stop = min(len(self.places), start + self.draw.randrange(1, 4))
        self.tight.forget([(start, stop)])
        self.wide.forget([(place, place + 1) for place in self.places[start:stop]])
        self.done += 1

    def step(self):
        """Read a token, or a short prompt, and compare all that both hold and say."""
        new = self.ids(self.draw.choice((1, 1, 3)))
        self.places += range(self.wide.get_seq_length(), self.wide.get_seq_length() + new.shape[1])
        logits = [self.model(new, past_key_values=cache).logits for cache in (self.tight, self.wide)]
        torch.testing.assert_close(*logits, atol=1e-9, rtol=0)
        for layer in range(len(self.tight.layers)):
            tight, wide = (cache.positions(layer).tolist() for cache in (self.tight, self.wide))
            for one, other in zip(tight, wide, strict=True):
                for head, its in zip(one, other, strict=True):
                    assert {self.places[p] for p in head if p >= 0} == {p for p in its if p >= 0}
        self.tight.check_invariants()
