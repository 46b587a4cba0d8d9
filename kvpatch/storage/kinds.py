"""The kinds of files that kvpatch writes: each is declared once, below, and written and read by its declaration.

A file is in the safetensors format with a description in JSON and a checksum, or it is that description alone. None is
trusted: description and header are checked before memory is allocated for tensors. The checksum detects accidents and is no
signature: who alters a file on purpose can compute it anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidError, KVPatchError
from ..policies.measures import MEASURES
from .file import check_path, checksum, explain_errors, verify_checksum, write_whole
from .header import Entry, are_counts, is_count, parse_json, read_entries, read_tensor

Description = dict[str, Any]
"""Values as JSON has them, by name."""


@dataclass(frozen=True)
class Field:
    """An entry of a file's description (its JSON part), or of a table in it.

    Attributes:
        name: of the entry.
        is_valid: is_valid(value) tells if a value is allowed; None leaves it to other checks.
        fault: what an error says of a value that is not allowed, with {value} in place of the value.
        optional: whether it may be missing, as in files that were written before the field existed.
    """

    name: str
    is_valid: Callable[[object], bool] | None = None
    fault: str = ""
    optional: bool = False

    @classmethod
    def of_count(cls, name: str, optional: bool = False) -> Field:
        """Return a field that holds a number from 0."""
        return cls(name, is_count, name + " is {value:.40}", optional)

    @classmethod
    def of_flag(cls, name: str) -> Field:
        """Return a field that holds a truth value."""
        return cls(name, lambda value: isinstance(value, bool), name + " is {value:.40}")

    @classmethod
    def of_table(cls, name: str, fault: str = "its {name} is no table") -> Field:
        """Return a field that holds a table."""
        return cls(name, lambda value: isinstance(value, dict), fault.replace("{name}", name))


def check_fields(what: str, value: object, fields: tuple[Field, ...], where: str = "") -> Description:
    """Return `value`, a file's description or a part of it, if it is a dict with exactly these fields, all valid.

    Args:
        what: name of `value` in an error about missing or unknown fields.
        value: the whole for `FileKind.parse_description`, a part for `check_header` and `_Layer.check` of a cache's file.
        fields: the fields that it must have.
        where: begins an error about a field's value.

    Raises:
        InvalidError: `value` is no such dict.
    """
    given = value if isinstance(value, dict) else {}
    present = [entry for entry in fields if not entry.optional or entry.name in given]
    table = check_names(what, value, tuple(entry.name for entry in present))
    for entry in present:
        if entry.is_valid is not None and not entry.is_valid(table[entry.name]):
            raise InvalidError(where + entry.fault.format(value=repr(table[entry.name])))
    return table


def check_names(what: str, value: object, names: tuple[str, ...]) -> Description:
    """Return `value` for `check_fields` if it is a dict with exactly these names, else raise InvalidError, naming `what`."""
    if not isinstance(value, dict) or set(value) != set(names):
        found = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise InvalidError(f"{what} has {found!r:.80} where {list(names)} belong")
    return value


class Document(NamedTuple):
    """All that a file holds, and its checksum."""

    about: Description
    tensors: dict[str, Tensor]
    checksum: str


@dataclass(frozen=True)
class FileKind:
    """A kind of file.

    Attributes:
        name: as the first entry of its description, "format", has it, and errors about writing it unless `subject` is given.
        version: of the format; a file of another version is refused.
        label: its name in errors about reading it.
        writer: the call or command that writes such files, as errors name it.
        again: the sentence that tells how to make the file anew.
        fields: the entries of the description after "format", in the order of the file.
        tensors: by name, type and axes of those that have the same axes under every policy: a letter stands for a size that
            tensors share, a digit for itself. Tensors of layer 0 are called "0.NAME".
        subject: its name in errors about writing it.
        refusal: the sentence for a file of another format, with {path} and {format}; by default one that names the format.
    """

    name: str
    version: int
    label: str
    writer: str
    again: str
    fields: tuple[Field, ...]
    tensors: Mapping[str, tuple[torch.dtype, str]] = field(default_factory=dict)
    subject: str = ""
    refusal: str = ""

    @property
    def format(self) -> str:
        """Text that says kind and version in the file."""
        return f"kvpatch {self.name} {self.version}"

    def make_description(self, **values: object) -> Description:
        """Return the description of a file: its format, then the values of the fields in their order."""
        return {"format": self.format, **{one.name: values[one.name] for one in self.fields}}

    def compute_checksum(self, about: Description, tensors: dict[str, Tensor]) -> str:
        """Return the checksum of a file with this description and these tensors."""
        return checksum(json.dumps(about), tensors)

    def write_file(self, path: str | PathLike[str], about: Description, tensors: dict[str, Tensor]) -> None:
        """Write a file. Raises KVPatchError if it cannot be written."""
        from safetensors.torch import save_file

        metadata = {"kvpatch": json.dumps(about), "checksum": self.compute_checksum(about, tensors)}
        write_whole(path, lambda part: save_file(tensors, part, metadata=metadata), self.subject or self.name)

    def write_text(self, path: str | PathLike[str], about: Description) -> None:
        """Write a description alone, to be read by people too. Raises KVPatchError if it cannot be written."""
        text = json.dumps(about, indent=2, ensure_ascii=False) + "\n"
        write_whole(path, lambda part: part.write_text(text, encoding="utf-8"), self.subject or self.name)

    def reading(self, path: object) -> AbstractContextManager[None]:
        """Return a context in which errors of reading `path` become KVPatchErrors; every function that loads a file enters it.

        Raises:
            KVPatchError: `path` is no path.
        """
        checked = check_path(path, f"give the file that {self.writer} wrote")
        return explain_errors(checked, self.label, self.writer, self.again)

    def read_file(self, path: str | PathLike[str], check_header: Callable[[Description, dict[str, Entry]], None]) -> Document:
        """Read a file that a user loads: for `load`, `load_lossless`, `load_record` and `load_calibration`.

        check_header: raises for a description or header (dtypes and shapes) that does not fit, before tensors are read.

        Raises:
            InvalidError: the file is not of this kind, or was altered.
        """
        from safetensors import safe_open

        with safe_open(Path(path), "pt") as file:
            texts = file.metadata() or {}
            about, found = self.parse_description(texts.get("kvpatch", ""), path), read_entries(file)
            self.check_shapes(found)
            check_header(about, found)
            tensors = {name: read_tensor(file, name) for name in found}
        verify_checksum(texts.get("checksum"), texts["kvpatch"], tensors)
        return Document(about, tensors, texts["checksum"])

    def parse_description(self, text: str, path: object, what: str = "its description") -> Description:
        """Parse `text`, the JSON description of a file that is read, and check its fields; return it as a dict.

        `read_file` calls it, and `Settings.parse`, whose files have no tensors. path, what: name the file and the description
        in errors.

        Raises:
            KVPatchError: the file is of another format, and this kind has a `refusal`.
            InvalidError: the file is of another format, or a field is wrong.
        """
        about = parse_json(text) if text else {}
        if not isinstance(about, dict) or about.get("format") != self.format:
            if self.refusal:
                raise KVPatchError(self.refusal.format(path=path, format=self.format))
            raise InvalidError(f"it is not of this version of kvpatch ({self.format!r})")
        return check_fields(what, about, (Field("format"), *self.fields))

    def check_shapes(self, found: Mapping[str, Entry]) -> None:
        """Raise InvalidError, for `read_file`, if the header gives a tensor another dtype or shape than `tensors` does.

        found: the header's entries; one that `tensors` does not name is left to other checks. A letter of a shape is any size,
        but the same for all tensors of a layer.
        """
        order = list(self.tensors)
        sizes: dict[str, dict[str, int]] = {"": {}}  # by layer; "" is the file as a whole, whose tensors come first
        split_names = [(*name.rpartition(".")[::2], name) for name in found]  # ("3", "pairs", "3.pairs") of layer 3
        declared = sorted((parts for parts in split_names if parts[1] in order), key=lambda key: (key[0], order.index(key[1])))
        for layer, short, name in declared:
            _check_shape(name, *self.tensors[short], found[name], sizes.setdefault(layer, dict(sizes[""])))


def _check_shape(name: str, dtype: torch.dtype, axes: str, entry: Entry, sizes: dict[str, int]) -> None:
    """Raise InvalidError if the header's entry for a tensor has another dtype, or other axes, for `check_shapes`.

    axes: digits, which are sizes, and letters. sizes: of the letters, as earlier tensors of the layer have them; this tensor's
    new letters are added in place.
    """
    wanted = [axis if axis.isdigit() else str(sizes.get(axis, axis)) for axis in axes]
    if len(entry.shape) == len(axes):
        sizes |= {axis: size for axis, size in zip(wanted, entry.shape, strict=True) if not axis.isdigit()}
    right = [str(sizes.get(axis, axis)) for axis in wanted]
    if entry.dtype != dtype or [str(size) for size in entry.shape] != right:
        raise InvalidError(f"{name} is {entry.dtype} {list(entry.shape)} where {dtype} [{', '.join(wanted)}] belongs")


def _are_layers(value: object) -> bool:
    """Tell whether a calibration's `layers` are a list of different layer numbers, one at least."""
    return are_counts(value) and bool(value) and len(set(value)) == len(value)  # type: ignore[call-overload, arg-type]


# policies and the model say which tensors a cache has: schema.py checks them
CACHE = FileKind(
    "cache",
    5,
    "saved cache",
    "save_cache()",
    "Save it anew with patch.save_cache().",
    (Field.of_table("model"), Field.of_table("settings"), Field("cache"), Field("layers")),
    refusal="{path} is no cache saved by this version of kvpatch ({format!r}): read its text again.",
)
LOSSLESS = FileKind(
    "lossless cache",
    1,
    "saved lossless cache",
    "save_cache()",
    "Save it anew with patch.save_cache().",
    (Field.of_table("model"), Field.of_count("edited")),
    {"ids": (torch.int64, "T"), "places": (torch.int64, "N")},  # lossless.py checks the layers' rows, of the model's sizes
    refusal="{path} is no cache that this version of kvpatch saved under lossless=True ({format!r}): load it by a patch "
    "without lossless, or read its text again.",
)
_NO_RECORD = "its description names no model, or no layers"
RECORD = FileKind(
    "record",
    1,
    "record",
    "`kvpatch.save_record()`",
    "Record the rollout anew.",
    (Field.of_table("model", _NO_RECORD), Field("layers", lambda value: is_count(value, least=1), _NO_RECORD)),
    {"ids": (torch.int64, "NT"), "deaths": (torch.int32, "NHT")},
)
_NO_CALIBRATION = "its description names no model, or no tokens"
CALIBRATION = FileKind(
    "calibration",
    1,
    "calibration",
    "`kvpatch calibrate`",
    "Make it anew with `kvpatch calibrate`.",
    (
        Field.of_table("model", _NO_CALIBRATION),
        Field("tokens", lambda value: is_count(value, least=1), _NO_CALIBRATION),
        Field("layers", _are_layers, "its layers are {value:.60}"),
    ),
    {name: (one.dtype, one.shape) for name, one in MEASURES.items()},
)
SETTINGS = FileKind(
    "settings",
    1,
    "settings file",
    "Settings.save",
    "Write it anew with Settings.save or `kvpatch compare`.",
    (Field("kvpatch"), Field("policy"), Field("k"), Field("options")),
    subject="settings file",
)
KINDS = {one.name: one for one in (CACHE, LOSSLESS, RECORD, CALIBRATION, SETTINGS)}
