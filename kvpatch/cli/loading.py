"""Models, tokenizers and prompts for the command line, with errors of one line; torch and transformers are imported late."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import KVPatchError, suggest
from .model_class import find_auto_class
from .output import print_note, print_waiting

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")
_SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
_DEVICES = ("auto", "cpu", "cuda", "cuda:1", "mps", "xpu")
_DEVICE = re.compile(r"(auto|cpu|mps|(cuda|xpu)(:\d+)?)")
_RULE = re.compile(r"\s*(mass|share|threshold)\s*:\s*(\d*\.?\d+(?:e-?\d+)?)\s*", re.IGNORECASE)
MODELS = Path(__file__).parent / "models"  # the two small models of the demo


def check_budget(text: str) -> None:
    """Raise KVPatchError, before torch loads, unless a text (or each part between commas) is a budget. Commands call it."""
    from ..policies import budgets

    for part in filter(str.strip, text.split(",")):
        number = budgets.read_number(part)
        size_or_rule = budgets.parse_bytes(part) is not None or _RULE.fullmatch(part)
        if not size_or_rule and (isinstance(number, str) or number < 0):
            raise KVPatchError(
                f"-k {part.strip()} is no budget: give a share of the prompt such as 0.5 or 50%, tokens such as 1024, a size "
                "such as 2GiB, or a budget that follows the text: mass:0.95, share:0.5, threshold:0.01."
            )


def parse_k(text: str) -> Any:
    """Parse `-k` into an argument of `patched`: tokens, a share, bytes, a budget such as Mass(0.95), or a list, one per layer.

    Raises:
        KVPatchError: the text is no budget.
    """
    check_budget(text)
    if "," in text:
        return [_parse_budget(part, f"k[{i}]") for i, part in enumerate(part for part in text.split(",") if part.strip())]
    return _parse_budget(text, "k")


def _parse_budget(text: str, where: str) -> Any:
    """Parse the budget of one layer, or all, for `parse_k`: "mass:0.95" gives Mass(0.95).

    where: its name in errors, as "k[3]".
    """
    from .. import policies
    from ..policies import budgets

    rule = _RULE.fullmatch(text)
    return budgets.parse_k(text, where) if rule is None else getattr(policies, rule[1].capitalize())(float(rule[2]))


def check_dtype(dtype: str) -> str:
    """Return the full name of --dtype, or raise KVPatchError if it is unknown. `load_model` and `plan` call it."""
    name = _SHORT.get(dtype.casefold(), dtype.casefold())
    if name not in DTYPES:
        near = suggest(dtype, (*DTYPES, *_SHORT))
        raise KVPatchError(f"--dtype {dtype} is unknown.{near} Known: {', '.join(DTYPES)}; fp32, bf16 and fp16 for short.")
    return name


def check_device(device: str) -> None:
    """Raise KVPatchError, without importing torch, unless --device has a known form, such as "cuda:1"."""
    if not _DEVICE.fullmatch(device):
        raise KVPatchError(f"--device {device} cannot be used: give {', '.join(_DEVICES[:-1])} or {_DEVICES[-1]}.")


@dataclass(frozen=True)
class Source:
    """A model as the command line names it; the attributes are the arguments of `load_model`."""

    name: str
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def check(self) -> None:
        """Raise KVPatchError for a wrong dtype, device or folder, without importing torch; commands call this first."""
        check_dtype(self.dtype)
        check_device(self.device)
        check_folder(self.name)

    def config(self) -> Any:
        """Load the model's configuration, in which `_find_limit` finds the number of positions before weights are loaded.

        Raises KVPatchError if it cannot be loaded.
        """
        import transformers

        try:
            return transformers.AutoConfig.from_pretrained(
                self.name, revision=self.revision or "main", trust_remote_code=self.trust_remote_code
            )
        except Exception as error:  # as in load_model
            raise KVPatchError(f"The model {self.name} cannot be loaded: {_format_reason(error)}") from error

    def model(self) -> Any:
        """Load the model, as `load_model`."""
        return load_model(**vars(self))

    def tokenizer(self) -> Any:
        """Load the tokenizer, as `load_tokenizer`."""
        return load_tokenizer(self.name, revision=self.revision, trust_remote_code=self.trust_remote_code)


def load_model(
    name: str,
    dtype: str = "auto",
    device: str = "auto",
    *,
    device_map: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Load a causal language model, or one that reads images too, from a folder or the hub, in evaluation mode.

    `Source.model` and `_load_shipped` call it. Prints what it loads, and turns transformers' advice and bars off.

    Args:
        name: a folder, or a name on the hub.
        dtype: one of DTYPES or a short form; "auto" is the checkpoint's own.
        device: as torch takes it, or "auto": the first GPU, else the CPU.
        device_map: as transformers takes it; `device` is not used then.
        revision: branch, tag or commit on the hub.
        trust_remote_code: run Python code that comes with the model.

    Raises:
        KVPatchError: the model cannot be loaded or served, or the dtype or device is invalid.
    """
    dtype = check_dtype(dtype)
    check_device(device)
    check_folder(name)
    if Path(name).is_dir():
        print_waiting(f"loading {name} ...")
    else:
        print_note(f"loading {name} from the hub ...")
    import torch

    place: Any = device_map if device_map is not None else _find_device(device)
    try:
        import transformers

        silence_loading()
        mapped = {"device_map": place} if device_map is not None else {}
        # the configuration first: it tells the model's class, and whether kvpatch would refuse it, before weights are read
        config = transformers.AutoConfig.from_pretrained(name, revision=revision or "main", trust_remote_code=trust_remote_code)
        model: Any = find_auto_class(name, config, trust_remote_code).from_pretrained(
            name,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            revision=revision or "main",
            trust_remote_code=trust_remote_code,
            **mapped,
        )
        return (model if mapped else model.to(place)).eval()
    except KVPatchError:
        raise
    except Exception as error:  # transformers, the hub and safetensors have an error type each
        raise KVPatchError(f"The model {name} cannot be loaded: {_format_reason(error)}") from error


def silence_loading() -> None:
    """Turn off transformers' advice and bars for the process; the hub's bars of downloads stay on.

    `load_model` and `load_tokenizer` call it.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    unwanted = are_progress_bars_disabled()  # the user has turned them off
    logging.set_verbosity_error()
    getLogger("huggingface_hub").setLevel("ERROR")
    logging.disable_progress_bar()
    if not unwanted:
        enable_progress_bars()


def _find_device(device: str) -> torch.device:
    """Return the device that --device names, for `load_model`; "auto": a GPU, else the CPU.

    Raises KVPatchError if a tensor cannot be allocated there.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        raise KVPatchError(f"--device {device} cannot be used: {_first_line(error)}. Give auto or cpu.") from error
    return place


def load_tokenizer(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load a model's tokenizer for `Source` or the demo; raise KVPatchError if there is none or it knows no token."""
    check_folder(name)
    missing = f"The model {name} comes without a tokenizer, which text needs."
    if Path(name).is_dir() and not any(any(Path(name).glob(pattern)) for pattern in ("*token*", "vocab*", "*.model")):
        raise KVPatchError(missing)
    try:
        import transformers

        silence_loading()
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            name, revision=revision or "main", trust_remote_code=trust_remote_code
        )
    except Exception as error:  # a tokenizer's files may raise anything
        raise KVPatchError(f"The model {name} has no tokenizer that can be loaded: {_format_reason(error)}") from error
    # of a folder without a vocabulary transformers may make a tokenizer that turns every text into nothing
    if not tokenizer("text").input_ids or not tokenizer.decode(tokenizer("text").input_ids, skip_special_tokens=True):
        raise KVPatchError(missing)
    return tokenizer


def check_folder(name: str) -> None:
    """Raise KVPatchError if a model's name looks like a folder and there is none, for `Source.check`."""
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not Path(name).is_dir():
        raise KVPatchError(f"The model {name} cannot be loaded: there is no such folder.")


def _format_reason(error: BaseException) -> str:
    """Return the first line of transformers' error, for `load_model` and its like, and the option that would help, if any."""
    line = _first_line(error)
    if "remote_code" in str(error):
        return f"{line} Read that code, then give --trust-remote-code."
    return line


def _first_line(error: BaseException) -> str:
    """Return the first line with text of an error's message, or the name of its type if there is none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def read_prompt(name: str, given: str = "FILE") -> str:
    """Read the text of a command's prompt from a file, or from standard input for "-". `TextFile.read_text` calls it.

    given: name of the argument or option that names the file, for errors. Raises KVPatchError if the text cannot be read, is no
    UTF-8, or is empty.
    """
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise KVPatchError(f"{given} {name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KVPatchError(f"{given} {name} is no UTF-8 text (byte {error.start}).") from error
    if not text.strip():
        raise KVPatchError(f"{given} {name} is empty: there is nothing to go on from.")
    return text


def fit_prompt(model: Any, ids: Tensor, new: int) -> tuple[Tensor, str]:
    """Shorten a prompt's ids [1,n] from the left to leave room for `new` tokens; return them on the model's device, and a note.

    `encode_message`, `_cut_text` and `read_story` call it. note: a sentence about omitted tokens, or "".

    Raises:
        KVPatchError: the whole prompt would be omitted, or the tokenizer belongs to another model.
    """
    from ..evaluation.teacher_forcing import positions_of

    n_tokens = model.get_input_embeddings().num_embeddings
    if ids.numel() and int(ids.max()) >= n_tokens:
        raise KVPatchError(
            f"The tokenizer gives token {int(ids.max())}, but the model knows {n_tokens}: they do not belong together."
        )
    limit, note, n = positions_of(model), "", ids.shape[1]
    if limit is not None and new >= limit:
        raise KVPatchError(f"--max-new-tokens {new}: the model has {limit} positions, so no room is left for a prompt.")
    if limit is not None and n > limit - new:
        ids = ids[:, new - limit :]
        note = (
            f"The prompt has {n:,} tokens; the model has {limit:,} positions, of which {new:,} are for new tokens: "
            f"only the prompt's last {ids.shape[1]:,} tokens are read."
        )
    return ids.to(model.device), note
