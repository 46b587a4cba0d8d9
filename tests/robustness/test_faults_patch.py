"""A patch that is interrupted while it goes on or off, that threads and processes share, and that is copied."""

import functools
import io
import os
import pickle
import threading
from contextlib import contextmanager

import pytest
import torch
from transformers import CompileConfig

import kvpatch
from kvpatch import KVPatchError
from tests.helpers.faults import interrupt, lines, refusal, spread
from tests.helpers.tiny import force, make, prompt, snapshot

pytestmark = pytest.mark.usefixtures("no_gradients")
MODELS = ("llama_gqa", "mpt", "gpt2")
PATIENCE = 600  # seconds: against waiting for ever, and far beyond what a busy machine takes


def block(model, body=lambda: None):
    with kvpatch.patched(model, "h2o", 0.5):
        body()


def generate(model, ids, **options):
    return model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, **options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_block_interrupted_while_it_is_entered_or_left(name, error):
    model, ids = make(name), prompt(1, 12)
    before, want = snapshot(model), model(ids).logits
    names = {"__init__", "__enter__", "__exit__", "install", "_change_model", "_install_generate", "_set_attribute"}
    names |= {"_mark_module", "put_attribute"}
    names |= {"replace_forward", "put_hook", "remove", "restore", "unmark_module", "__call__"}
    count = lines(lambda: block(model), names)
    for n in range(count):
        where, _ = interrupt(functools.partial(block, model), n, error, names)
        assert snapshot(model) == before, f"interrupted at {where}"
    assert torch.equal(model(ids).logits, want)


def test_a_patch_interrupted_while_it_is_removed_goes_on_when_asked_again():
    model, ids = make("llama_gqa"), prompt(1, 12)
    before = snapshot(model)

    def patch():
        handle = kvpatch.patch(model, "h2o", 0.5)
        cache = handle.new_cache()
        model(ids, past_key_values=cache)
        return handle, cache  # held, so that leaving makes a report of it

    count = lines(patch()[0].remove)
    for n in range(count):
        handle, _held = patch()
        where, came = interrupt(handle.remove, n)
        assert came, where
        assert "report.py" not in where or snapshot(model) == before, "the report came before the model"
        handle.remove()
        assert snapshot(model) == before, f"interrupted at {where}"
        assert handle.report().seen == 12, where


def test_two_interrupts():
    """The first in the block, the second while it is left."""
    model = make("llama_gqa")
    before = snapshot(model)

    def body():
        raise KeyboardInterrupt

    names = {"__exit__", "remove", "restore", "unmark_module", "__call__", "put_attribute"}
    count = lines(lambda: block(model), names)
    for n in range(count):
        where, came = interrupt(lambda: block(model, body), n, KeyboardInterrupt, names)
        assert came
        assert snapshot(model) == before, f"interrupted at {where}"


def test_an_undo_that_fails_does_not_keep_the_others_from_running():
    model = make("llama_gqa")
    before = snapshot(model)
    handle = kvpatch.patch(model, "h2o", 0.5)
    installation = handle._installation
    for _, mark in installation.marked:
        mark.undo.insert(len(mark.undo) // 2, lambda module: 1 / 0)
    for value in ("first", "second"):  # and the newest change is undone first
        installation._set_attribute(model, installation._mark_module(model), "put_twice", value)
    with pytest.raises(ZeroDivisionError):
        handle.remove()
    assert snapshot(model) == before
    handle.remove()


def test_a_block_that_is_dropped():
    model = make("llama_gqa")
    before = snapshot(model)
    block = kvpatch.patched(model, "h2o", 0.5)
    block.__enter__()
    assert snapshot(model) != before
    del block
    assert snapshot(model) == before


def test_an_interrupted_generate_leaves_the_callers_cache_as_after_some_step_or_refused():
    model, ids = make("llama_gqa"), prompt(1, 20)
    with kvpatch.patched(model, "h2o", 0.5) as handle:
        want = generate(model, ids)
        run = lambda cache: generate(model, ids, past_key_values=cache)  # noqa: E731
        refused = 0
        for n in spread(lines(lambda: run(handle.new_cache())), 20):
            cache = handle.new_cache()
            where, _ = interrupt(functools.partial(run, cache), n)
            assert cache.plans.prompt_len is None and cache.plans.new_tokens is None, where
            seen = cache.get_seq_length()
            if cache.unfinished:
                assert "did not finish" in refusal(lambda: generate(model, ids, past_key_values=cache)), where  # noqa: B023
                refused += 1
                cache.reset()
                assert torch.equal(run(cache), want), where
            elif seen < want.shape[1]:
                twin = handle.new_cache()
                if seen:
                    force(model, ids, want[:, 20:seen], cache=twin)
                assert torch.equal(model(want[:, seen:], past_key_values=cache).logits,
                                   model(want[:, seen:], past_key_values=twin).logits), where  # fmt: skip
        assert refused > 10


def test_an_exception_out_of_a_compiled_generate_leaves_the_cache_refused():
    """A graph that was left in its middle may have written anything; before the first pass nothing has happened yet."""
    model, ids, steps = make("llama_gqa"), prompt(1, 20), []

    def stop(ids, scores, **kwargs):
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return torch.zeros(len(ids), dtype=torch.bool)

    with kvpatch.patched(model, "h2o", 0.5) as handle:
        cache, options = handle.new_cache(), {"compile_config": CompileConfig(backend="eager")}
        with pytest.raises(ValueError, match="max_new_tokens"):
            model.generate(ids, past_key_values=cache, max_new_tokens=-1, **options)
        assert not cache.unfinished
        with pytest.raises(KeyboardInterrupt):
            generate(model, ids, past_key_values=cache, stopping_criteria=[stop], **options)
        assert "generate() under torch.compile of this cache did not finish" in refusal(cache.clone)
        cache.reset()
        steps.extend(range(9))
        assert torch.equal(generate(model, ids, past_key_values=cache, **options), generate(model, ids))


# ---- threads and processes ----


def in_threads(*runs):
    """What each of them returned or raised, run side by side."""
    results = [None] * len(runs)

    def call(index):
        torch.set_grad_enabled(False)  # of each thread its own
        try:
            results[index] = runs[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_two_threads_on_one_cache():
    """The second comes while the first is in the middle of its pass."""
    model, ids, more = make("llama_gqa"), prompt(1, 20), prompt(1, 4, seed=2)
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert go_on.wait(PATIENCE)

    with kvpatch.patched(model, "h2o", 0.5) as handle:
        cache = handle.new_cache()
        model(ids, past_key_values=cache)
        twin = cache.clone()
        hook = model.model.layers[0].mlp.register_forward_pre_hook(wait)
        got = []
        first = threading.Thread(target=lambda: got.append(model(more[:, :1], past_key_values=cache).logits))
        first.start()
        assert inside.wait(PATIENCE)
        for use in (lambda: model(more[:, :1], past_key_values=cache), lambda: cache.crop(-1), cache.clone,
                    lambda: cache.reorder_cache(torch.tensor([0])), lambda: generate(model, ids, past_key_values=cache),
                    lambda: handle.save_cache(cache, "/nowhere")):  # fmt: skip
            assert "another thread" in refusal(use)
        go_on.set()
        first.join()
        hook.remove()
        assert torch.equal(got[0].detach(), model(more[:, :1], past_key_values=twin).logits)
        assert torch.equal(*(model(more[:, 1:2], past_key_values=one).logits for one in (cache, twin)))


def test_of_two_threads_that_begin_at_once_one_is_refused():
    """The one that comes first is held inside its pass until the other was refused, or is inside as well."""
    model, ids = make("llama_gqa"), prompt(1, 20)
    both, inside, tried = threading.Barrier(2), [], threading.Event()

    def hold(*_):
        inside.append(threading.get_ident())
        if len(set(inside)) == 2:
            tried.set()
        assert tried.wait(PATIENCE)

    with kvpatch.patched(model, "h2o", 0.5) as handle:
        cache = handle.new_cache()
        check = cache.refuse_unfinished

        def meet():
            check()  # both have looked, and neither has begun
            both.wait(PATIENCE)

        def run():
            try:
                return model(ids, past_key_values=cache).logits
            finally:
                tried.set()

        cache.refuse_unfinished = meet
        hook = model.model.layers[0].mlp.register_forward_pre_hook(hold)
        results = in_threads(run, run)
        hook.remove()
        refused = [one for one in results if isinstance(one, KVPatchError)]
        assert len(refused) == 1 and "another thread" in str(refused[0]), results
        (logits,) = (one for one in results if not isinstance(one, Exception))
        assert torch.equal(logits, model(ids, past_key_values=handle.new_cache()).logits)


def test_a_clone_during_a_change_by_another_thread_is_refused():
    model, ids, more = make("llama_gqa"), prompt(1, 20), prompt(1, 1, seed=2)
    with kvpatch.patched(model, "h2o", 0.5) as handle:
        cache = handle.new_cache()
        model(ids, past_key_values=cache)
        layer = cache.layers[1]
        type(layer).__deepcopy__ = lambda self, memo: model(more, past_key_values=cache) and None
        try:
            with pytest.raises(KVPatchError, match="Another thread changed this cache during clone"):
                cache.clone()
        finally:
            del type(layer).__deepcopy__


@contextmanager
def generating_elsewhere(model, ids):
    """Another thread generates, and waits in its fifth pass until the function that is yielded is called for the result."""
    inside, go_on, steps, results = threading.Event(), threading.Event(), [], []

    def wait(*_):
        steps.append(1)
        if len(steps) == 5:
            inside.set()
            assert go_on.wait(PATIENCE)

    def finish():
        go_on.set()
        thread.join()
        return results[0]

    hook = model.model.layers[0].mlp.register_forward_pre_hook(wait)
    thread = threading.Thread(target=lambda: results.extend(in_threads(lambda: generate(model, ids))))
    thread.start()
    assert inside.wait(PATIENCE)
    try:
        yield finish
    finally:
        go_on.set()
        hook.remove()


def test_a_block_is_left_while_another_thread_generates():
    """That thread gets an error, or what it would have got; its cache is never filled by the model's own attention."""
    model, ids = make("llama_gqa"), prompt(1, 20)
    before = snapshot(model)
    handle = kvpatch.patch(model, "h2o", 0.5)
    with generating_elsewhere(model, ids) as finish:
        handle.remove()
        got = finish()
    assert isinstance(got, KVPatchError) and "not patched" in str(got)
    assert snapshot(model) == before


def test_a_block_is_entered_while_another_thread_generates():
    model, ids = make("llama_gqa"), prompt(1, 20)
    want = generate(model, ids)
    with generating_elsewhere(model, ids) as finish, kvpatch.patched(model, "h2o", 0.5):
        got = finish()
    assert isinstance(got, KVPatchError) and "filled outside the block" in str(got)
    assert torch.equal(generate(model, ids), want)


def test_of_two_threads_that_patch_at_once_one_is_refused(monkeypatch):
    model, both = make("llama_gqa"), threading.Barrier(2)
    before, find = snapshot(model), kvpatch.hooks.target.Target.find

    def meet(model, **how):
        found = find(model, **how)  # both have looked, and neither has changed anything
        both.wait(PATIENCE)
        return found

    monkeypatch.setattr(kvpatch.patching.Target, "find", meet)
    results = in_threads(lambda: kvpatch.patch(model, "h2o", 0.5), lambda: kvpatch.patch(model, "tova", 0.5))
    refused = [one for one in results if isinstance(one, KVPatchError)]
    assert len(refused) == 1 and "already patched" in str(refused[0]), results
    next(one for one in results if not isinstance(one, Exception)).remove()
    assert snapshot(model) == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_generates_the_same_and_leaves_the_block():
    model, ids = make("llama_gqa"), prompt(1, 20)
    before, plain = snapshot(model), generate(model, ids)
    handle = kvpatch.patch(model, "keyformer", 0.4)
    cache = handle.new_cache()
    model(ids, past_key_values=cache)
    want, step = generate(model, ids), model(ids[:, :1], past_key_values=cache.clone()).logits
    child = os.fork()
    if child == 0:
        try:
            same = torch.equal(generate(model, ids), want)
            same &= torch.equal(model(ids[:, :1], past_key_values=cache).logits, step)
            handle.remove()
            same &= snapshot(model) == before and torch.equal(generate(model, ids), plain)
            os._exit(0 if same else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(generate(model, ids), want)
    handle.remove()


# ---- copies ----


@pytest.mark.parametrize("name", MODELS)
def test_pickling_a_patched_model_is_refused_in_words(name, tmp_path):
    model, ids = make(name), prompt(1, 12)
    want = model(ids).logits
    with kvpatch.patched(model, "h2o", 0.5):
        for save in (pickle.dumps, lambda it: torch.save(it, io.BytesIO()), lambda it: torch.save(it, tmp_path / "model.pt")):
            with pytest.raises(KVPatchError, match=r"Patch\.remove\(\).*state_dict"):
                save(model)
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        model.save_pretrained(tmp_path / "saved")
    other = type(model)(model.config)
    other.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert torch.equal(other.eval()(ids).logits, want)
    assert torch.equal(type(model).from_pretrained(tmp_path / "saved").eval()(ids).logits, want)
    assert torch.equal(pickle.loads(pickle.dumps(model))(ids).logits, want)
