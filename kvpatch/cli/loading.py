"""Models, tokenizers and prompts for the command line, with errors of one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..errors import KVPatchError, suggest
from ..evaluation.teacher_forcing import positions_of

DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")
MODELS = Path(__file__).parent / "models"  # the two small models of the demo


def parse_k(text: str) -> int | float | str:
    """Parse `-k`: digits are tokens, a number with a dot is a share of the prompt, anything else a size such as "2GiB"."""
    if text.isdigit():
        return int(text)
    try:
        return float(text) if "." in text else text
    except ValueError:
        return text


def load_model(name: str, dtype: str = "auto", device: str = "auto") -> Any:
    """Load a causal language model from a folder or the hub, in evaluation mode.

    Raises:
        KVPatchError: it cannot be loaded, or the dtype or device is invalid.
    """
    if dtype not in DTYPES:
        raise KVPatchError(f"--dtype {dtype} is unknown.{suggest(dtype, DTYPES)} Known: {', '.join(DTYPES)}.")
    place = _device(device)
    _refuse_missing_folder(name)
    if not Path(name).is_dir():
        print(f"loading {name} from the hub ...", file=sys.stderr)
    try:
        wanted = dtype if dtype == "auto" else getattr(torch, dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=wanted)
        return model.to(place).eval()
    except Exception as error:  # transformers, the hub and safetensors have an error type each
        raise KVPatchError(f"--model {name} cannot be loaded: {_first_line(error)}") from error


def _device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        raise KVPatchError(f"--device {device} cannot be used: {_first_line(error)}. Give auto, cpu or cuda.") from error
    return place


def load_tokenizer(name: str) -> Any:
    """Load a model's tokenizer. Raises KVPatchError if there is none or it knows no token."""
    _refuse_missing_folder(name)
    missing = f"--model {name} comes without a tokenizer, which text needs."
    if Path(name).is_dir() and not any(any(Path(name).glob(pattern)) for pattern in ("*token*", "vocab*", "*.model")):
        raise KVPatchError(missing)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # as above
        raise KVPatchError(f"--model {name} has no tokenizer that can be loaded: {_first_line(error)}") from error
    if not tokenizer("text").input_ids or not tokenizer.decode(tokenizer("text").input_ids, skip_special_tokens=True):
        raise KVPatchError(missing)
    return tokenizer


def _refuse_missing_folder(name: str) -> None:
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not Path(name).is_dir():
        raise KVPatchError(f"--model {name}: there is no such folder.")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def read_prompt(name: str, option: str = "--prompt-file") -> str:
    """Read a text from a file, or from standard input for "-". Raises KVPatchError if there is none."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise KVPatchError(f"{option} {name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KVPatchError(f"{option} {name} is no UTF-8 text (byte {error.start}).") from error
    if not text.strip():
        raise KVPatchError(f"{option} {name} is empty: there is nothing to go on from.")
    return text


def encode(model: Any, tokenizer: Any, text: str, new: int) -> tuple[Tensor, str]:
    """Encode a prompt: token ids [1,n] that leave room for `new` tokens, and a sentence about omitted tokens, or "".

    Raises:
        KVPatchError: the whole prompt would be omitted, or the tokenizer belongs to another model.
    """
    ids = tokenizer(text, return_tensors="pt").input_ids.long()
    known = model.get_input_embeddings().num_embeddings
    if ids.numel() and int(ids.max()) >= known:
        raise KVPatchError(
            f"The tokenizer gives token {int(ids.max())}, but the model knows {known}: they do not belong together."
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
