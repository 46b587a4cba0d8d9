"""Files that no patch wrote: load_cache refuses them in words, or gives a sound cache that decodes."""

import json
import os
import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpatch import KVPatchError
from tests.robustness.fuzz_states import STATES, attempt, seed
from tests.robustness.fuzzing import FORMAT, KINDS, Parts, headed


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeds")
    return [seed(name, folder) for name in STATES]


def _try(one, file, folder):
    (folder / "x").write_bytes(file)
    return attempt(one, folder / "x")


def test_every_state_is_loaded_and_taking_it_apart_changes_nothing(seeds, tmp_path):
    for one in seeds:
        assert _try(one, one.file, tmp_path) is None, one.name
        assert _try(one, Parts.of(one.file).file(), tmp_path) is None, one.name


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_done_to_a_file(kind, seeds, tmp_path_factory):
    folder = tmp_path_factory.mktemp(kind)

    @settings(max_examples=25, database=None)
    @given(st.integers(0, len(seeds) - 1), st.integers(0, 2**32))
    def run(which, number):
        words = _try(seeds[which], KINDS[kind](seeds[which].file, random.Random(number)), folder)
        assert words is None or re.search(r"Save it anew|under another|read its text again|while decoding", words), words

    run()


def _lied(name, change, seeds, tmp_path):
    """The refusal of a file in which `change` lies about the state `name`, with a checksum that fits."""
    one = next(one for one in seeds if one.name == name)
    parts = Parts.of(one.file)
    change(parts)
    return _try(one, parts.file(), tmp_path)


def _layer(**values):
    return lambda parts: parts.about["layers"][1].update(values)


def _numbers(name, change):
    def apply(parts):
        dtype, shape, data = parts.tensors[name]
        tensor = torch.frombuffer(bytearray(data), dtype={"I64": torch.int64, "F32": torch.float32}[dtype]).view(shape)
        change(tensor)
        parts.tensors[name] = (dtype, shape, tensor.view(-1).view(torch.uint8).numpy().tobytes())

    return apply


def _both(tensor, value):
    tensor[...] = value


LIES = [
    ("h2o", _layer(filling=9), r"layer 1: slots are empty that should not be"),
    ("h2o", _layer(slack=5), r"layer 1: slack where tokens are evicted"),
    ("h2o", _layer(contiguous=True), r"layer 1: positions are not consecutive"),
    ("h2o", _layer(mode="growing"), r"layer 1: mode is 'growing'"),
    ("h2o", _layer(used=10**9), r"layer 1: 1000000000 of \d+ slots are used"),
    ("h2o", _layer(used=2**70), r"layer 1: used is 1180591620717411303424"),
    ("h2o", _layer(seen=True), r"layer 1: seen is True"),
    ("h2o", _layer(seen=26), r"layers have seen different numbers"),
    ("h2o", _layer(sliding=3), r"layer 1: sliding is 3"),
    ("h2o", _layer(limits=[[0] * 6]), r"layer 1: limits are"),
    ("h2o", _layer(head_offsets=[[5] * 4, [5] * 4]), r"layer 1: head_offsets are"),
    ("h2o", lambda parts: parts.about["cache"].update(steps=99), r"99 steps of 27 tokens"),
    ("h2o", lambda parts: parts.about.update(layers=[]), r"has not 2 layers"),
    ("h2o", lambda parts: parts.about.update(model=[]), r"its model is no table"),
    ("h2o", lambda parts: parts.tensors.pop("0.state.sum"), r"holds no 0\.state\.sum"),
    ("h2o", lambda parts: parts.tensors.update({"0.state.evil": parts.tensors["0.state.sum"]}), r"0\.state\.evil, which"),
    ("h2o", _numbers("1.positions", lambda t: _both(t[0, 0, :2], 3)), r"layer 1: a head holds a token twice"),
    ("h2o", _numbers("1.positions", lambda t: _both(t[0, 0, :1], 27)), r"positions name tokens that were not seen"),
    ("h2o", _numbers("1.positions", lambda t: _both(t, -1)), r"layer 1: a head holds fewer than"),
    ("h2o", _numbers("1.free_BH", lambda t: _both(t, 99)), r"layer 1: free_BH names no slot"),
    ("h2o", _numbers("1.free_BH", lambda t: t.sub_(1).abs_()), r"layer 1: a free slot is taken"),
    ("h2o", _numbers("1.keep_BH1", lambda t: _both(t, 2**40)), r"layer 1: keep_BH1 is over the budget"),
    ("h2o", _numbers("1.keys", lambda t: _both(t, torch.nan)), r"layer 1: keys are not finite"),
    ("h2o", _numbers("1.state.sum", lambda t: t.neg_()), r"layer 1: sum holds a number that is not finite or is negative"),
    ("h2o", _numbers("seen_B", lambda t: _both(t, 2**40)), r"27 columns were seen"),
    ("snapkv", _layer(floor=0), r"layer 1: what was appended is not the newest"),
    ("snapkv", _layer(grown=1), r"layer 1 has .*'grown'"),
    ("adakv", _layer(grown=0), r"layer 1: "),
    ("full, with room", _layer(grown=9), r"layer 1: "),
    ("roco, padded", _layer(filling=99), r"layer 1: filling is not the steps to go"),
    ("roco, padded", _layer(holes=False), r"layer 1: "),
    ("filling", _layer(filling=3), r"layer 1: filling does not lead to the budget"),
    ("keyformer, shared", lambda parts: parts.tensors.update(shared=("F32", [2, 2, 3], bytes(48))), r"shared has room for 3"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), LIES, ids=[f"{n}: {w[:40]}" for n, _, w in LIES])
def test_a_false_statement_under_a_right_checksum_is_found(name, change, words, seeds, tmp_path):
    said = _lied(name, change, seeds, tmp_path)
    assert said is not None
    assert re.search(words, said), said


def test_nothing_is_allocated_for_what_does_not_fit(seeds, tmp_path, monkeypatch):
    """A header that promises more than the model's shapes, or than the file holds, is refused before a tensor is read."""
    one = seeds[0]
    monkeypatch.setattr("kvpatch.storage.kinds.read_tensor", lambda *_: pytest.fail("a tensor was read"))
    parts = Parts.of(one.file)
    dtype, shape, data = parts.tensors["0.keys"]
    huge = [2**20, *shape[1:]]
    wide = [*shape[:-1], shape[-1] // 2]
    for change in (
        lambda header: header["0.keys"].update(shape=huge),
        lambda header: header["0.keys"].update(data_offsets=[0, 2**60]),
        lambda header: header["0.values"].update(data_offsets=header["0.keys"]["data_offsets"]),
        lambda header: header.update({"9.keys": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
    ):
        assert "cannot be read as a saved cache" in _try(one, parts.file(change=change), tmp_path)
    parts.tensors["0.keys"] = (dtype, wide, data[: len(data) // 2])
    assert "0.keys is torch.float32" in _try(one, parts.file(), tmp_path)
    length = 2**63
    assert "header too large" in _try(one, length.to_bytes(8, "little") + one.file[8:], tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 200_000, r"nested too deep"),
        ('{"format": 1, "format": 2}', r"stands twice"),
        ('{"format": NaN}', r"holds NaN"),
        ('{"format": 1e999}', r"holds 1e999"),
        ("{", r"is no JSON"),
        ('{"format": "kvpatch cache 0"}', r"is no cache saved by this version"),
        (f'{{"format": "{FORMAT}"}}', r"its description has"),
    ],
)
def test_descriptions_that_are_none(text, words, seeds, tmp_path):
    said = _try(seeds[0], Parts.of(seeds[0].file).file(text), tmp_path)
    assert re.search(words, said), said


def test_bytes_that_are_no_text(seeds, tmp_path):
    said = _try(seeds[0], seeds[0].file.replace(FORMAT.encode(), b"kvpatch cache \xff"), tmp_path)
    assert "cannot be read as a saved cache" in said


def test_places_that_are_no_file(seeds, tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    cases = {tmp_path: "is a folder", tmp_path / "empty": "cannot be read as", tmp_path / "pipe": "or a pipe", "\0": "no path"}
    for path, words in cases.items():
        with pytest.raises(KVPatchError, match=words):
            seeds[0].patch.load_cache(path)


def test_every_kind_of_damage_changes_the_file(seeds):
    for kind in KINDS.values():
        assert any(kind(seeds[0].file, random.Random(n)) != seeds[0].file for n in range(5))
    assert headed(seeds[0].file, random.Random(1)) != seeds[0].file
    assert json.loads(json.dumps(Parts.of(seeds[0].file).about))["format"] == FORMAT
