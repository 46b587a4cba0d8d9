"""An interrupt in the middle of anything: the model can be restored, and no cache is half-written without saying so."""

import functools

import pytest
import torch
from faults import contents, differences, interrupt, lines, refusal, spread
from tiny import make, prompt, snapshot
from transformers import DynamicCache

import kvpatch
from kvpatch import EvictingCache, KVPatchError

N, MOST = 24, 14  # tokens of a prompt; lines at which each operation is interrupted


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


class Scene:
    """A patched model, and caches in the states that operations begin with."""

    def __init__(self, policy, k, options):
        self.model = make("llama_gqa")
        self.before = snapshot(self.model)
        self.handle = kvpatch.patch(self.model, policy, k, **options)
        self.ids, self.more = prompt(2, N), prompt(2, 6, seed=3)

    def step(self, cache, t, width=1):
        return self.model(self.more[:, t : t + width], past_key_values=cache).logits

    def read(self, steps=0, record=False):
        cache = self.handle.new_cache()
        if record:
            cache.activate_past_recording()
        self.model(self.ids, past_key_values=cache)
        for t in range(steps):
            self.step(cache, t)
        return cache

    def other(self):
        cache = self.handle.new_cache()
        self.model(self.ids[:, 3:], past_key_values=cache)
        return cache


# what is done, and to what: a scene and a cache in, a cache or None (the one that was given) out
OPERATIONS = {
    "prompt": (lambda s: s.handle.new_cache(), lambda s, c: s.model(s.ids, past_key_values=c)),
    "turn": (lambda s: s.read(1), lambda s, c: s.model(s.ids[:, :7], past_key_values=c)),
    "first step": (lambda s: s.read(), lambda s, c: s.step(c, 0)),
    "step": (lambda s: s.read(2), lambda s, c: s.step(c, 2)),
    "next step": (lambda s: s.read(2), lambda s, c: s.step(c, 2)),  # of the cache itself: a clone makes a new deck
    "chunk": (lambda s: s.read(1, record=True), lambda s, c: s.step(c, 1, 3)),
    "crop": (lambda s: s.read(3, record=True), lambda s, c: c.crop(-2)),
    "reorder": (lambda s: s.read(2), lambda s, c: c.reorder_cache(torch.tensor([1, 1]))),
    "select": (lambda s: s.read(2), lambda s, c: c.batch_select_indices(torch.tensor([1, 0]))),
    "repeat": (lambda s: s.read(2), lambda s, c: c.batch_repeat_interleave(2)),
    "reset": (lambda s: s.read(2), lambda s, c: c.reset()),
}  # fmt: skip
SCENES = {
    "h2o": ("h2o", 0.5, {}),  # layers side by side in a deck
    "adakv": ("adakv", 0.4, {"window": 5}),  # ragged
    "filling": ("tova", N + 2, {}),
    "shared": ("keyformer", 0.4, {"shared": True}),
    "blocks": ("roco", 0.4, {"block": 6}),
    "full": ("full", 1.0, {}),
}
FEW = {"adakv": 6, "filling": 4, "shared": 4, "blocks": 4, "full": 4}


@pytest.fixture(scope="module")
def scenes():
    made = {}

    def scene(name):
        if name not in made:
            made[name] = Scene(*SCENES[name])
        return made[name]

    yield scene
    for one in made.values():
        one.handle.remove()
        assert snapshot(one.model) == one.before


def uses(s, cache):
    """Everything that can be done with a cache of two rows, but to reset() it."""
    return {
        "forward": lambda: s.step(cache, 0),
        "crop": lambda: cache.crop(-1),
        "reorder": lambda: cache.reorder_cache(torch.tensor([0, 1])),
        "select": lambda: cache.batch_select_indices(torch.tensor([0, 1])),
        "repeat": lambda: cache.batch_repeat_interleave(1),
        "clone": cache.clone,
        "save": lambda: s.handle.save_cache(cache, "/nowhere/at/all"),
        "concatenate": lambda: EvictingCache.concatenate([cache, s.other()]),
        "absorb": lambda: cache.absorb(DynamicCache()),
    }


def whole_or_refused(s, cache, before, after, where):
    """The cache is as it was, or as it should be, and goes on so; or every use is refused, and reset() heals it."""
    broken = cache.unfinished
    if not broken:
        now = contents(cache)
        twins = [twin for state, twin in (before, after) if not differences(now, state)]
        assert twins, f"{where}: {differences(now, before[0])} are not as before, {differences(now, after[0])} not as after"
        if cache.seen_B is not None and len(cache.seen_B) == 2:
            for t in (4, 5):
                assert torch.equal(s.step(cache, t), s.step(twins[0], t)), f"{where}: goes on otherwise"
        return
    for name, use in uses(s, cache).items():
        words = refusal(use)
        assert words is not None, f"{where}: {name} is not refused"
        assert "did not finish" in words and "reset()" in words, f"{where}: {name} says {words}"
    cache.get_seq_length(), cache.nbytes
    cache.reset()
    assert cache.nbytes == 0, where
    fresh = s.read()
    s.model(s.ids, past_key_values=cache)
    if not any(layer.record_past for layer in cache.layers):
        assert not differences(contents(cache), contents(fresh)), f"{where}: reset() did not heal"
    assert torch.equal(s.step(cache, 4), s.step(fresh, 4)), where


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupted_operation(scenes, scene, name):
    s, (begin, run) = scenes(scene), OPERATIONS[name]
    start = begin(s)
    after = start.clone()
    run(s, after)
    cache = begin(s) if name == "next step" else start.clone()
    count = lines(lambda: run(s, cache))
    for n in spread(count, FEW.get(scene, MOST)):
        cache, error = begin(s) if name == "next step" else start.clone(), (KeyboardInterrupt, RuntimeError)[n % 2]
        before, done = start.clone(), after.clone()
        where, came = interrupt(functools.partial(run, s, cache), n, error)
        assert came, where
        whole_or_refused(s, cache, (contents(before), before), (contents(done), done), f"{name} at {where}")
