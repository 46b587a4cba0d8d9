"""Kinds of files: one declaration is enough for a new one, the page lists all, and files keep their bytes."""

import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import kvpatch
from kvpatch import KVPatchError
from kvpatch.errors import InvalidError
from kvpatch.storage.calibration import make_calibration, save_calibration
from kvpatch.storage.kinds import KINDS, Field, FileKind, check_fields

NOTE = FileKind(
    "note",
    3,
    "note",
    "save_note()",
    "Write it anew.",
    (Field.of_count("pages"), Field.of_flag("done"), Field.of_table("of")),
    {"ids": (torch.int64, "NT"), "weight": (torch.float32, "N2")},
)


def take(path):
    with NOTE.reading(path):
        return NOTE.read_file(path, lambda about, found: None)


@pytest.fixture
def path(tmp_path):
    tensors = {"ids": torch.arange(6).view(2, 3), "0.weight": torch.ones(2, 2)}
    NOTE.write_file(tmp_path / "note", NOTE.make_description(of={}, done=True, pages=4), tensors)
    return tmp_path / "note"


def test_a_declaration_is_written_and_read(path):
    about, tensors, digest = take(path)
    assert list(about.items()) == [("format", "kvpatch note 3"), ("pages", 4), ("done", True), ("of", {})]
    assert torch.equal(tensors["ids"], torch.arange(6).view(2, 3)) and set(tensors) == {"ids", "0.weight"}
    assert digest == NOTE.compute_checksum(about, tensors)


@pytest.mark.parametrize(
    ("about", "tensors", "says"),
    [
        ({"pages": -1}, {}, "pages is -1"),
        ({"done": 1}, {}, "done is 1"),
        ({"of": []}, {}, "its of is no table"),
        ({"more": 1}, {}, r"its description has \['done', .*where \['format', 'pages', 'done', 'of'\] belong"),
        ({"format": "kvpatch note 2"}, {}, r"it is not of this version of kvpatch \('kvpatch note 3'\)"),
        ({}, {"ids": torch.ones(2, 3)}, r"ids is torch.float32 \[2, 3\] where torch.int64 \[N, T\] belongs"),
        ({}, {"0.weight": torch.ones(3, 2)}, r"0.weight is torch.float32 \[3, 2\] where torch.float32 \[2, 2\] belongs"),
        ({}, {"1.weight": torch.ones(2, 2, 1)}, r"1.weight is .* where torch.float32 \[2, 2\] belongs"),
    ],
    ids=str,
)
def test_what_does_not_fit_it(path, about, tensors, says):
    own, held, _ = take(path)
    NOTE.write_file(path, own | about, held | tensors)
    with pytest.raises(KVPatchError, match=f"is no valid note: {says}. Write it anew"):
        take(path)


def test_another_file_and_none(path, tmp_path):
    save_file({"ids": torch.zeros(1)}, path)
    with pytest.raises(KVPatchError, match="not of this version"):
        take(path)
    with pytest.raises(KVPatchError, match=r"There is no file .*none: give one that save_note\(\) wrote"):
        take(tmp_path / "none")
    with pytest.raises(KVPatchError, match=r"path=7 is no path: give the file that save_note\(\) wrote"):
        take(7)
    with pytest.raises(KVPatchError, match=r"cannot be read: (?!None).* Give a file that save_note\(\) wrote"):
        take(tmp_path)


def test_paths_that_name_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given in (None, 7, "", "a\0b"):
        with pytest.raises(KVPatchError, match="is no path: give the file that the note goes to"):
            NOTE.write_file(given, {}, {})
    for folder in (".", "/"):
        with pytest.raises(KVPatchError, match=f"The note was not saved to {folder}: Is a directory"):
            NOTE.write_text(folder, {})
    assert not list(tmp_path.iterdir())


def test_other_names_than_those_of_a_table():
    with pytest.raises(InvalidError, match="page 1: pages is 'x'"):
        check_fields("its page", {"pages": "x"}, (Field.of_count("pages"),), where="page 1: ")


def test_the_page_lists_every_kind():
    text = (Path(__file__).parents[2] / "docs/reference/cache-file.md").read_text(encoding="utf-8")
    rows = re.findall(r'^\| `"(kvpatch [\w ]+)"` \| .*? \| (.*?) \|', text, re.M)
    assert rows == [(one.format, ", ".join(f"`{field.name}`" for field in one.fields)) for one in KINDS.values()]


def said(path):
    """Description and checksum; safetensors writes these two in any order."""
    with safe_open(path, "pt") as file:
        texts = file.metadata()
    return texts["kvpatch"], texts["checksum"][:16]


def test_what_stands_in_a_file(tmp_path):
    """As earlier versions of these formats wrote it: whoever changes a letter gives the format another version."""
    ids, deaths = torch.arange(6).view(2, 3), torch.full((2, 1, 3), 3, dtype=torch.int32)
    kvpatch.save_record(kvpatch.Record(ids, (deaths, deaths.clone()), {"class": "A", "layers": 2}), tmp_path / "record")
    about = '{"format": "kvpatch record 1", "model": {"class": "A", "layers": 2}, "layers": 2}'
    assert said(tmp_path / "record") == (about, "ab62e8ca93f3f8de")
    layers = {1: {"weight": torch.ones(2, 3)}, 0: {"weight": torch.zeros(2, 3)}}
    save_calibration(made := make_calibration({"class": "A"}, layers, 5), tmp_path / "calibration")
    about = '{"format": "kvpatch calibration 1", "model": {"class": "A"}, "tokens": 5, "layers": [0, 1]}'
    assert said(tmp_path / "calibration") == (about, made.digest[:16]) == (about, "5e5958f89f2ce796")
    kvpatch.Settings("h2o", [0.5, kvpatch.Share(0.5)], {"recent": 4}).save(tmp_path / "settings.json")
    text = (tmp_path / "settings.json").read_text().replace(kvpatch.__version__, "VERSION")
    assert " ".join(text.split()) == (
        '{ "format": "kvpatch settings 1", "kvpatch": "VERSION", "policy": "h2o", "k": [ 0.5, { "Share": { "part": 0.5, '
        '"of": "seen" } } ], "options": { "recent": 4 } }'
    )
