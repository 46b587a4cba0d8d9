"""An interrupt in the middle of anything: the model can be restored, and no cache is half-written without saying so."""

import copy
import functools
import gc

import pytest
import safetensors.torch
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


def made(name, s, cache, other, path):
    """A cache that an operation makes of others."""
    if name == "clone":
        return cache.clone()
    if name == "save and load":
        s.handle.save_cache(cache, path)
        return s.handle.load_cache(path)
    if name == "absorb":
        new = s.handle.new_cache()
        new.absorb(cache)
        return new
    return EvictingCache.concatenate([cache, other], consume=name == "consume")


@pytest.mark.parametrize("scene", ["h2o", "adakv"])
@pytest.mark.parametrize("name", ["clone", "save and load", "concatenate", "consume"])
def test_an_interrupt_while_a_cache_is_made_of_others(scenes, scene, name, tmp_path):
    s, path = scenes(scene), tmp_path / "cache"
    start, beside = s.read(2), s.other()
    first, second = start.clone(), beside.clone()
    count = lines(lambda: made(name, s, first, second, path))
    for n in spread(count, MOST):
        path.unlink(missing_ok=True)
        cache, other = (s.read(2), s.other()) if n % 2 else (start.clone(), beside.clone())
        where, _ = interrupt(functools.partial(made, name, s, cache, other, path), n, KeyboardInterrupt)
        for one, like in ((cache, start), (other, beside)):
            before, empty = like.clone(), like.clone()
            empty.reset()
            whole_or_refused(s, one, (contents(before), before), (contents(empty), empty), f"{name} at {where}")
        assert [file for file in tmp_path.iterdir() if file != path] == [], where
        if path.exists():
            loaded, want = contents(s.handle.load_cache(path)), contents(start.clone())
            assert not [one for one in differences(loaded, want) if not one.startswith(".clock")], where


def test_an_interrupt_while_a_cache_is_taken_over():
    model = make("llama_gqa")
    past = model(prompt(2, N)).past_key_values
    with kvpatch.patched(model, "window", 0.5) as handle:
        after = handle.new_cache()
        after.absorb(past)
        cache = handle.new_cache()
        for n in range(lines(lambda: cache.absorb(past))):
            cache = handle.new_cache()
            where, _ = interrupt(functools.partial(cache.absorb, past), n)
            if cache.unfinished:
                assert "did not finish" in refusal(lambda: model(prompt(2, 3), past_key_values=cache)), where  # noqa: B023
            else:
                wanted = (contents(handle.new_cache()), contents(after))
                assert not all(differences(contents(cache), one) for one in wanted), where
        past.layers[1].keys = past.layers[1].keys[:, :, 2:]
        cache = handle.new_cache()
        with pytest.raises(KVPatchError, match="Layer 1 of the DynamicCache no longer holds"):
            cache.absorb(past)
        assert not differences(contents(cache), contents(handle.new_cache())), "layer 0 was taken over already"


def test_a_wrong_argument_leaves_a_cache_as_it_was(scenes):
    s = scenes("h2o")
    cache = s.read(2)
    twin = cache.clone()
    wrong = (
        lambda: cache.reorder_cache(torch.tensor([0, 7])),
        lambda: cache.batch_select_indices(torch.tensor([5])),
        lambda: cache.batch_repeat_interleave(-1),
        lambda: cache.crop(-3),
        lambda: s.model(s.ids[:1], past_key_values=cache),
        lambda: s.step(cache, 2, 1) if s.model(s.more[:, :1], attention_mask=torch.ones(2, 3), past_key_values=cache) else 0,
        lambda: s.model(s.more[:, :1], attention_mask=torch.zeros(2, N + 3), past_key_values=cache),
        lambda: EvictingCache.concatenate([cache, s.handle.new_cache()], consume=True),
        lambda: s.handle.save_cache(cache, "/nowhere/at/all"),
    )
    for index, use in enumerate(wrong):
        with pytest.raises((KVPatchError, IndexError, RuntimeError)):
            use()
        assert not cache.unfinished, index
        assert not differences(contents(cache), contents(twin)), index
    assert torch.equal(s.step(cache, 2), s.step(twin, 2))


# ---- files ----


def test_a_file_appears_whole_or_not_at_all(scenes, tmp_path, monkeypatch):
    s, path = scenes("adakv"), tmp_path / "cache"
    first, second = s.read(), s.read(2)
    s.handle.save_cache(first, path)
    kept = path.read_bytes()
    real = safetensors.torch.save_file

    def half(tensors, file, metadata):
        real(tensors, file, metadata=metadata)
        with open(file, "r+b") as written:
            written.truncate(len(kept) // 2)
        raise failure

    monkeypatch.setattr(safetensors.torch, "save_file", half)
    for failure, raised in ((KeyboardInterrupt(), KeyboardInterrupt), (MemoryError(), MemoryError),
                            (OSError(28, "No space left on device"), KVPatchError)):  # fmt: skip
        with pytest.raises(raised, match="No space left on device" if raised is KVPatchError else None):
            s.handle.save_cache(second, path)
        assert path.read_bytes() == kept and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    s.handle.save_cache(second, path)
    assert s.handle.load_cache(path).get_seq_length() == N + 2
    s.handle.save_cache(second, str(path))  # over one that is there


@pytest.mark.parametrize(("where", "words"), [("", "Is a directory"), ("no/such/folder", "No such file"),
                                              ("file/below", "Not a directory")])  # fmt: skip
def test_a_place_where_nothing_can_be_written(scenes, tmp_path, where, words):
    s = scenes("h2o")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(KVPatchError, match=f"was not saved to .*{words}.*Give the name of a file"):
        s.handle.save_cache(s.read(), tmp_path / where)
    assert [file.name for file in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"


# ---- memory that runs out ----


@pytest.mark.parametrize("scene", ["h2o", "adakv", "blocks"])
def test_out_of_memory_in_a_prompt_frees_what_was_taken(scenes, scene):
    """A cache of the pass itself goes with the exception, at once; one that the caller holds is refused, and reset() frees it."""
    s = scenes(scene)
    gc.collect()
    gc.freeze()  # what is alive already need not be looked at
    gc.disable()
    try:
        for n in spread(lines(lambda: s.model(s.ids)), 16):
            before = tensors()
            where, came = interrupt(lambda: s.model(s.ids), n, torch.OutOfMemoryError)
            assert came and tensors() == before, where
            cache = s.handle.new_cache()
            interrupt(functools.partial(s.model, s.ids, past_key_values=cache), n, torch.OutOfMemoryError)
            if cache.unfinished:
                assert "did not finish" in refusal(lambda: s.step(cache, 0))  # noqa: B023
            cache.reset()
            assert tensors() <= before + len(cache.layers), where  # empty ones
            del cache
    finally:
        gc.enable()
        gc.unfreeze()


def tensors():
    """Tensors that have come and are alive."""
    return sum(type(thing) is torch.Tensor for thing in gc.get_objects())


@pytest.mark.parametrize("copied", [EvictingCache.clone, copy.deepcopy])
def test_a_copy_of_a_cache_does_not_copy_the_model(copied):
    model, ids, more = make("llama_gqa"), prompt(1, 20), prompt(1, 1, seed=2)
    modules = lambda: sum(isinstance(thing, torch.nn.Module) for thing in gc.get_objects())  # noqa: E731
    with kvpatch.patched(model, "h2o", 0.5, positions="renumbered") as handle:
        cache = handle.new_cache()
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
        before = modules()
        twin = copied(cache)
        assert modules() == before
        assert torch.equal(*(model(more, past_key_values=one).logits for one in (twin, cache)))
