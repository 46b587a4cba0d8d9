"""Memory that stays constant: over decode steps, over blocks, and with nothing left on the model that knows a Patch."""

import gc
import os
import weakref

import pytest
import torch
from torch import nn

import kvpatch
from kvpatch import EvictingCache
from tests.helpers.tiny import force, make, prompt
from tools.reliability import memory

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def only_new():
    """Leave out what is alive already, and collect nothing but by reference counts."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.mark.parametrize("name", [name for name in memory.SERIES if name != "full"])
def test_decode_steps_keep_no_tensor(name, only_new):
    """Without a garbage collection: a cycle would show."""
    samples = list(memory.decode(make("llama_gqa"), name, 120, 30))[1:]
    assert len({one.tensors for one in samples}) == 1, samples
    assert len({one.nbytes for one in samples}) == 1, samples


def test_a_cache_that_keeps_everything_is_seen_to_grow(only_new):
    first, *_, last = memory.decode(make("llama_gqa"), "full", 200, 50)
    assert last.nbytes > first.nbytes + 100 * memory.ROWS * 2 * 8 * 4 * 2


def test_steps_of_a_batch_take_no_more_resident_memory(only_new):
    """Twice 200 steps: the second half takes no more than allocators do by chance; a token's keys and values would show."""
    (*_,) = memory.decode(make("llama_gqa"), "h2o", 100, 50)
    first, last = memory.decode(make("llama_gqa"), "h2o", 400, 200)
    assert last.rss - first.rss < 2 * 2**20


def test_a_thousand_blocks_keep_nothing(only_new):
    model = make("llama_gqa")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    counts = []
    for n in range(1000):
        with kvpatch.patched(model, ("h2o", "window", "keyformer")[n % 3], 0.5) as handle:
            watch = weakref.ref(handle)
        del handle
        assert watch() is None, "a Patch outlives its block"
        if n % 250 == 249:
            alive = gc.get_objects()
            counts.append((sum(type(one) in (torch.Tensor, nn.Parameter) for one in alive), len(alive)))
            del alive
    assert len({tensors for tensors, _ in counts}) == 1, counts
    assert counts[-1][1] - counts[1][1] < 100, counts
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_blocks_with_text_keep_nothing(only_new):
    samples = list(memory.enter_and_leave(make("llama_gqa"), "h2o", 60, 20))
    assert len({(one.tensors, one.nbytes) for one in samples}) == 1, samples


@pytest.mark.parametrize("ends", ["well", "by an error", "with a cache held", "by remove()"])
def test_a_patch_and_its_cache_die_at_once(ends, only_new):
    """No reference from the model to the Patch, nor a cycle through it: reference counts alone free both."""
    model, ids = make("llama_gqa"), prompt(1, 12)
    held = None

    def block():
        nonlocal held
        with kvpatch.patched(model, "h2o", 0.5) as handle:
            out = model(ids)
            held = out.past_key_values if ends == "with a cache held" else None
            watches = weakref.ref(handle), weakref.ref(handle._state), weakref.ref(out.past_key_values)
            if ends == "by an error":
                raise Watched(watches)
        return watches

    class Watched(Exception):
        pass

    if ends == "by remove()":
        handle = kvpatch.patch(model, "h2o", 0.5)
        out = model(ids)
        watches = weakref.ref(handle), weakref.ref(handle._state), weakref.ref(out.past_key_values)
        handle.remove()
        del handle, out
    elif ends == "by an error":
        try:
            block()
        except Watched as error:
            (watches,) = error.args
    else:
        watches = block()
    patch, settings, cache = (watch() for watch in watches)
    assert patch is None and settings is None
    assert (cache is None) == (held is None)


@pytest.mark.parametrize(("policy", "k"), [("full", 1.0), ("h2o", 0.5), ("h2o", 60), ("tova", 0.5), ("snapkv", 0.5)])
def test_a_cache_that_was_decoded_with_frees_its_buffers_at_once(policy, k, only_new):
    """Bound steps of layers between the first and the last made a circle, so that memory waited for a collection."""
    model, held = make("llama_gqa", layers=4), []
    with kvpatch.patched(model, policy, k) as patch:
        for end in (lambda cache: None, EvictingCache.reset, lambda cache: EvictingCache.concatenate([cache], consume=True)):
            _, cache = force(model, prompt(2, 30), prompt(2, 5, seed=2), cache=patch.new_cache())
            held = [weakref.ref(layer.kv) for layer in cache.layers]
            end(cache)
            del cache
            assert not any(one() for one in held)


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.forget([(0, 30)]),
    ],
    ids=["reorder", "select", "repeat", "forget"],
)
@pytest.mark.parametrize(("policy", "k"), [("full", 1.0), ("h2o", 0.5), ("h2o", 60)])
def test_buffers_that_were_replaced_are_freed_at_once(policy, k, change, only_new):
    """Bound steps kept them until the next step: rows of a large batch were held twice in most layers."""
    model = make("llama_gqa", layers=4)
    with kvpatch.patched(model, policy, k):
        _, cache = force(model, prompt(2, 30), prompt(2, 5, seed=2))
        before = [weakref.ref(layer.kv) for layer in cache.layers]
        change(cache)
        assert not any(one() is not None and one() is not layer.kv for one, layer in zip(before, cache.layers, strict=True))


def test_layers_that_grow_in_one_step_are_held_twice_one_by_one(only_new):
    model = make("llama_gqa", layers=4)
    with kvpatch.patched(model, "h2o", 60):
        _, cache = force(model, prompt(2, 30), prompt(2, 5, seed=2))
        for layer in cache.layers:
            before = weakref.ref(layer.kv)
            layer.reserve(2 * layer.columns_used)
            assert before() is None


def test_inside_the_block_the_model_does_not_hold_the_patch(only_new):
    model = make("llama_gqa")
    handle = kvpatch.patch(model, "h2o", 0.5)
    model(prompt(1, 12))
    watch = weakref.ref(handle)
    del handle
    assert watch() is None
    kvpatch.unpatch(model)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc")
def test_the_page_is_made_by_the_command(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    one = memory.Series("h2o", "step", [memory.Sample(at, 2**20 * at, 7, 1024 * at) for at in (1, 2, 3)], 1.0)
    assert one.slope("rss") == pytest.approx(1000 * 2**20) and one.slope("tensors") == 0
    text = memory.page([one], "the command")
    assert text.startswith("## Memory\n") and "| h2o | 3 steps | 1.0, 3.0 | +1024000.0 | 7, 7 | +0.00 |" in text
    memory.plot([one], tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 1000
