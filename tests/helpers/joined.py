"""Batches whose rows come and go between steps, beside each row's text through a cache of its own."""

import torch

from kvpatch import EvictingCache
from tests.helpers.tiny import force, prompt, sound


def same_kept(cache, row, alone):
    """The same tokens, exactly, and the same scores beside them."""
    for layer in range(len(cache.layers)):
        one, other = cache.layers[layer], alone.layers[layer]
        assert torch.equal(cache.held(layer)[row], alone.held(layer)[0]), (layer, row)
        K = int(alone.held(layer).max())
        (mine, at), (own, own_at) = (cache.positions(layer)[row].sort(-1), alone.positions(layer)[0].sort(-1))
        assert torch.equal(mine[:, -K:], own[:, -K:]), (layer, row)
        for name in set(one.state) & set(other.state):
            got, want = (t if t.ndim == 2 else t.mean(-1) for t in (one.state[name][row], other.state[name][0]))
            got, want = got.gather(1, at)[:, -K:], want.gather(1, own_at)[:, -K:]
            close = 1e-6 if one.dtype == torch.float64 else 1e-4
            torch.testing.assert_close(got[own[:, -K:] >= 0].double(), want[own[:, -K:] >= 0].double(), atol=close, rtol=0)


class Loop:
    """A cache whose rows come and go, and beside each row a cache that its text has to itself."""

    def __init__(self, model, patch):
        self.model, self.patch, self.cache, self.alone, self.seed = model, patch, None, [], 0

    def read(self, n, ahead=0):
        """A text of n tokens and `ahead` generated ones, by itself."""
        self.seed += 1
        ids, fed = prompt(1, n, seed=self.seed), prompt(1, ahead, seed=self.seed + 500)
        return force(self.model, ids, fed, cache=self.patch.new_cache())[1]

    def add(self, *texts, consume=False):
        new = [self.read(*text) for text in texts]
        self.alone += [one.clone() for one in new]
        self.cache = EvictingCache.concatenate(([] if self.cache is None else [self.cache]) + new, consume=consume)
        sound(self.cache)

    def drop(self, row):
        going = [r for r in range(len(self.alone)) if r != row]
        self.cache.batch_select_indices(torch.tensor(going))
        sound(self.cache)
        self.alone = [self.alone[r] for r in going]

    def step(self, count=1, Q=1, **kwargs):
        for _ in range(count):
            self.seed += 1
            ids = prompt(len(self.alone), Q, seed=self.seed)
            got = self.model(ids, past_key_values=self.cache, use_cache=True, **kwargs).logits
            want = [self.model(ids[r : r + 1], past_key_values=one).logits for r, one in enumerate(self.alone)]
            torch.testing.assert_close(got, torch.cat(want), atol=1e-6, rtol=0)
            sound(self.cache)
            for row, one in enumerate(self.alone):
                same_kept(self.cache, row, one)


def scenario(loop):
    loop.add((30, 0), (7, 3))
    loop.step(2)
    loop.add((19, 7), consume=True)
    loop.step()
    loop.drop(0)
    loop.step(2)
    loop.drop(1)
    loop.step()


def do(loop, deed, number, path):
    rows = len(loop.alone)
    if deed == "step":
        loop.step(number)
    elif deed == "add" and rows < 5:
        loop.add((3 * number, number % 3), consume=number % 2 == 0)
    elif deed == "drop" and rows > 1:
        loop.drop(number % rows)
    elif deed == "turn":
        loop.step(Q=number + 1)
    elif deed == "clone":
        loop.cache = loop.cache.clone()
    elif deed == "reorder":
        order = [(row * number + 1) % rows for row in range(rows)]
        loop.cache.reorder_cache(torch.tensor(order))
        loop.alone = [loop.alone[row].clone() for row in order]
    elif deed == "repeat" and rows < 4:
        loop.cache.batch_repeat_interleave(2)
        loop.alone = [one.clone() for one in loop.alone for _ in range(2)]
    elif deed == "save":
        loop.patch.save_cache(loop.cache, path)
        loop.cache = loop.patch.load_cache(path)
    elif deed == "crop":
        loop.cache.activate_past_recording()
        for t in range(number):
            loop.model(prompt(rows, 1, seed=t), past_key_values=loop.cache)
        loop.cache.crop(-number)
