"""Faults put into the library: an exception at the n-th line that it runs, and all that a cache holds, to be compared.

A line of the library is where Python may deliver a signal, or where a tensor may fail to be allocated; what lies between two
lines is one step for these tests. What a cache only computes from the rest, to have it at hand, is left out of the comparison:
a continuation shows whether it is right.
"""

import dataclasses
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache

import kvpatch
from kvpatch import EvictingCache, KVPatchError
from kvpatch.cache import from_dynamic
from tests.helpers.tiny import make, prompt, snapshot

N = 24  # tokens of a prompt
HERE = str(Path(kvpatch.__file__).parent)
AT_HAND = {
    "now", "backend_choice", "rotary", "make_rotary_table", "shared_limits", "steps", "stack_due", "precomputed_state",
    "known_free_slots", "known_head_starts",
    "geometry", "output_rows", "in_progress", "n_changes", "_places", "_blocks", "_sequences", "settings", "plans",
    "temperature_steps", "traced", "records_undo", "pass_record", "meter", "layer_parts", "was_read", "ids", "start",
}  # fmt: skip


def _trace(each, names):
    """A trace function that calls `each` with the frame at every line of the library, or of the functions of these names."""

    def local(frame, event, arg):
        if event == "line":
            each(frame)
        return local

    def call(frame, event, arg):
        code = frame.f_code
        if not code.co_filename.startswith(HERE) or (names is not None and code.co_name not in names):
            return None
        return None if in_destructor(frame) else local

    return call


def in_destructor(frame):
    """Tell if `__del__` runs this frame: Python prints an exception there and goes on."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def lines(run, names=None):
    """Count the lines of the library that `run` runs."""
    count = 0

    def each(frame):
        nonlocal count
        count += 1

    before = sys.gettrace()
    sys.settrace(_trace(each, names))
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def interrupt(run, n, error=KeyboardInterrupt, names=None):
    """Run with `error` raised before the n-th line (from 0); where that was, and whether it came out. Others come out."""
    count, where = 0, None

    def each(frame):
        nonlocal count, where
        count += 1
        if count == n + 1:
            where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
            raise error("put here by a test")

    before = sys.gettrace()
    sys.settrace(_trace(each, names))
    try:
        run()
    except error:
        return where, True
    finally:
        sys.settrace(before)
    return where, False


def spread(total, most):
    """At most so many of the numbers below `total`, the ends among them."""
    if total <= most:
        return list(range(total))
    return sorted({round(i * (total - 1) / (most - 1)) for i in range(most)})


# ---- all that a cache holds ----


def contents(thing, path=""):
    """Flat names and values (tensors cloned) of all state of a cache or of a part of it."""
    if isinstance(thing, Tensor):
        return {path: thing.detach().clone()}
    if isinstance(thing, dict):
        items = thing.items()
    elif isinstance(thing, list | tuple) or type(thing).__name__ == "deque":
        items = [("len", len(thing)), *enumerate(thing)]
    elif dataclasses.is_dataclass(thing) or type(thing).__module__.startswith("kvpatch"):
        items = vars(thing).items()
    else:
        return {path: thing}
    return {name: value for key, part in items if key not in AT_HAND for name, value in contents(part, f"{path}.{key}").items()}


def differences(one, other):
    """Names whose values are not bit for bit the same."""
    names = [*one, *(name for name in other if name not in one)]
    return [name for name in names if name not in one or name not in other or not _same(one[name], other[name])]


def _same(a, b):
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
    return type(a) is type(b) and a == b


def refusal(use):
    """The words with which `use` is refused, or None."""
    try:
        use()
    except KVPatchError as error:
        return str(error)
    return None


# ---- patched models, and caches in the states that operations begin with ----

SCENES = {
    "h2o": ("h2o", 0.5, {}),  # stacked layers
    "adakv": ("adakv", 0.4, {"window": 5}),  # ragged
    "filling": ("tova", N + 2, {}),
    "shared": ("keyformer", 0.4, {"shared": True}),
    "blocks": ("roco", 0.4, {"block": 6}),
    "full": ("full", 1.0, {}),
}


class Scene:
    """A patched model."""

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


class Scenes:
    """One scene of each name for a file of tests; in the end no model may have kept anything."""

    def __init__(self):
        self.made = {}

    def of(self, name):
        if name not in self.made:
            self.made[name] = Scene(*SCENES[name])
        return self.made[name]

    def close(self):
        for one in self.made.values():
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
        "absorb": lambda: from_dynamic.absorb(cache, DynamicCache()),
    }


def whole_or_refused(s, cache, before, after, where):
    """The cache is as it was, or as it should be, and goes on so; or every use is refused, and reset() heals it."""
    broken = cache.unfinished
    if not broken:
        now = contents(cache)
        # which model is about to read an empty cache is noted before it does, and anew at the next try
        passing = ".model_stamp" if cache.seen_B is None else "\0"
        twins = [twin for state, twin in (before, after) if all(one.startswith(passing) for one in differences(now, state))]
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
