"""An interrupt in the middle of anything: no cache is half-written without saying so."""

import functools

import pytest
import torch

import kvpatch
from kvpatch import EvictingCache, KVPatchError
from kvpatch.cache import from_dynamic
from tests.helpers.faults import SCENES, N, contents, differences, interrupt, lines, refusal, spread, whole_or_refused
from tests.helpers.tiny import make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")

MOST = 14  # lines at which each operation is interrupted


# what is done, and to what: a scene and a cache in, a cache or None (the one that was given) out
OPERATIONS = {
    "prompt": (lambda s: s.handle.new_cache(), lambda s, c: s.model(s.ids, past_key_values=c)),
    "turn": (lambda s: s.read(1), lambda s, c: s.model(s.ids[:, :7], past_key_values=c)),
    "first step": (lambda s: s.read(), lambda s, c: s.step(c, 0)),
    "step": (lambda s: s.read(2), lambda s, c: s.step(c, 2)),
    "next step": (lambda s: s.read(2), lambda s, c: s.step(c, 2)),  # of the cache itself: a clone makes a new stack
    "chunk": (lambda s: s.read(1, record=True), lambda s, c: s.step(c, 1, 3)),
    "crop": (lambda s: s.read(3, record=True), lambda s, c: c.crop(-2)),
    "reorder": (lambda s: s.read(2), lambda s, c: c.reorder_cache(torch.tensor([1, 1]))),
    "select": (lambda s: s.read(2), lambda s, c: c.batch_select_indices(torch.tensor([1, 0]))),
    "repeat": (lambda s: s.read(2), lambda s, c: c.batch_repeat_interleave(2)),
    "reset": (lambda s: s.read(2), lambda s, c: c.reset()),
}  # fmt: skip
FEW = {"adakv": 6, "filling": 4, "shared": 4, "blocks": 4, "full": 4}


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
        from_dynamic.absorb(new, cache)
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
            assert not [one for one in differences(loaded, want) if not one.startswith(".counters.tensors_or_none")], where


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


def test_an_interrupt_while_a_cache_is_taken_over():
    model = make("llama_gqa")
    past = model(prompt(2, N)).past_key_values
    with kvpatch.patched(model, "window", 0.5) as handle:
        after = handle.new_cache()
        from_dynamic.absorb(after, past)
        for n in range(lines(functools.partial(from_dynamic.absorb, handle.new_cache(), past))):
            cache = handle.new_cache()
            where, _ = interrupt(functools.partial(from_dynamic.absorb, cache, past), n)
            if cache.unfinished:
                assert "did not finish" in refusal(lambda: model(prompt(2, 3), past_key_values=cache)), where  # noqa: B023
            else:
                wanted = (contents(handle.new_cache()), contents(after))
                assert not all(differences(contents(cache), one) for one in wanted), where
        past.layers[1].keys = past.layers[1].keys[:, :, 2:]
        cache = handle.new_cache()
        with pytest.raises(KVPatchError, match="Layer 1 of the DynamicCache no longer holds"):
            from_dynamic.absorb(cache, past)
        assert not differences(contents(cache), contents(handle.new_cache())), "layer 0 was taken over already"


def test_an_interrupt_while_the_counters_catch_up_with_compiled_steps(scenes):
    """What steps under torch.compile leave behind: the clock has moved, and no counter knows."""
    s = scenes("h2o")

    def compiled():
        cache = s.read(1)
        cache.counters.tensors_or_none.columns.add_(3)
        cache.counters.has_uncounted_steps = True
        return cache

    after = compiled()
    after.catch_up()
    assert after.get_seq_length() == N + 4
    for n in range(lines(compiled().catch_up)):
        cache = compiled()
        where, came = interrupt(cache.catch_up, n)
        assert came, where
        if cache.unfinished:
            words = refusal(functools.partial(s.step, cache, 0))
            assert "step under torch.compile of this cache did not finish" in words, where
            cache.get_seq_length()
            cache.reset()
            assert not cache.unfinished
        else:
            cache.catch_up()
            assert not differences(contents(cache), contents(after)), where
