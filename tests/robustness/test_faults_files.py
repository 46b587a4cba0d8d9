"""A cache that is saved, a prompt for which memory runs out, a copy: what is left behind is whole, or nothing."""

import copy
import functools
import gc

import pytest
import safetensors.torch
import torch

import kvpatch
from kvpatch import EvictingCache, KVPatchError
from tests.helpers.faults import N, contents, differences, interrupt, lines, refusal, spread
from tests.helpers.tiny import make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")


def test_a_file_appears_whole_or_not_at_all(scenes, tmp_path, monkeypatch):
    s, path = scenes("adakv"), tmp_path / "cache"
    first, second = s.read(), s.read(2)
    s.handle.save_cache(first, path)
    kept = path.read_bytes()
    real = safetensors.torch.save_file

    failure = None

    def half(tensors, file, metadata):
        real(tensors, file, metadata=metadata)
        with open(file, "r+b") as written:
            written.truncate(len(kept) // 2)
        raise failure

    monkeypatch.setattr(safetensors.torch, "save_file", half)
    for error, raised in ((KeyboardInterrupt(), KeyboardInterrupt), (MemoryError(), MemoryError),
                          (OSError(28, "No space left on device"), KVPatchError)):  # fmt: skip
        failure = error
        with pytest.raises(raised, match="No space left on device" if raised is KVPatchError else None):
            s.handle.save_cache(second, path)
        assert path.read_bytes() == kept and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    s.handle.save_cache(second, path)
    assert s.handle.load_cache(path).get_seq_length() == N + 2
    s.handle.save_cache(second, str(path))  # over one that is there


@pytest.mark.parametrize(("where", "words"), [("no/such/folder", "No such file"), ("file/below", "Not a directory")])
def test_a_place_where_nothing_can_be_written(scenes, tmp_path, where, words):
    s = scenes("h2o")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(KVPatchError, match=f"was not saved to .*{words}.*Give the name of a file"):
        s.handle.save_cache(s.read(), tmp_path / where)
    assert [file.name for file in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"


# ---- memory that runs out ----


@pytest.mark.parametrize("scene", ["h2o", "adakv", "blocks"])
def test_out_of_memory_in_a_prompt_frees_what_was_taken(scenes, scene):
    """A cache of the pass itself goes with the exception; one that the caller holds is refused, and reset() frees it."""
    s = scenes(scene)
    s.model(s.ids)  # what is worked out once is there: every later pass runs the same lines
    gc.collect()
    gc.freeze()  # what is alive already need not be looked at
    gc.disable()
    try:
        for n in spread(lines(lambda: s.model(s.ids)), 16):
            before = tensors()
            where, came = interrupt(lambda: s.model(s.ids), n, torch.OutOfMemoryError)
            assert came and tensors() == before, where
            held = s.handle.new_cache()
            interrupt(functools.partial(s.model, s.ids, past_key_values=held), n, torch.OutOfMemoryError)
            if held.unfinished:
                assert "did not finish" in refusal(functools.partial(s.step, held, 0))
            held.reset()
            assert tensors() == before, where
            del held
    finally:
        gc.enable()
        gc.unfreeze()


def tensors():
    """Count the tensors of any size that have come and are alive."""
    return sum(type(thing) is torch.Tensor and thing.numel() > 0 for thing in gc.get_objects())


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


def test_a_loaded_cache_is_not_its_file(scenes, tmp_path):
    s, path = scenes("h2o"), tmp_path / "cache"
    s.handle.save_cache(s.read(2), path)
    cache = s.handle.load_cache(path)
    before = contents(cache)
    with path.open("r+b") as file:  # in place, where other programs put a new file
        file.write(bytes(path.stat().st_size))
    assert not differences(contents(cache), before)
