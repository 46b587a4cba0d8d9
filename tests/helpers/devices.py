"""Which devices a run of the tests sees.

Most tests are of the CPU, where Triton's kernels run in its interpreter, which a process that has a GPU does not use. So a run
sees GPUs only if its marks ask for them (`-m gpu`, `make test-gpu`): then tests of kernels, and those marked `gpu`, run there.

`KVPATCH_CUDA_STUB=1 pytest` (`make test-stub`) runs as a machine with CUDA would: torch says that there is a device unless
CUDA_VISIBLE_DEVICES hides it. So it says, and has none: whatever was to run there fails.
"""

import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence

import torch

STUB = "KVPATCH_CUDA_STUB"
ASKED = "KVPATCH_TESTS_ON_GPU"  # tells the processes that pytest starts


def choose(arguments: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Hide GPUs unless pytest's arguments ask for them; there, make matrix products repeatable, as tests are deterministic."""
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if asks_for_gpus(arguments):
        environment[ASKED] = "1"
    if ASKED not in environment:
        environment["CUDA_VISIBLE_DEVICES"] = ""


def asks_for_gpus(arguments: Sequence[str]) -> bool:
    """Tell whether a mark expression selects tests marked `gpu`."""
    given = [after for option, after in zip(arguments, [*arguments[1:], ""], strict=True) if option == "-m"]
    given += [one.removeprefix("-m").removeprefix("=") for one in arguments if one.startswith("-m") and one != "-m"]
    words = [word.strip("()") for expression in given for word in expression.replace("(", " ( ").split()]
    return any(word == "gpu" and before != "not" for before, word in zip(["", *words], words, strict=False))


def pretend(environment: Mapping[str, str]) -> None:
    """Let torch say that there is a CUDA device, as long as the environment does not hide it."""

    def count() -> int:
        return int(environment.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1"))

    torch.cuda.device_count, torch.cuda.is_available = count, lambda: count() > 0


if os.environ.get(STUB) == "1":
    pretend(os.environ)
choose(sys.argv, os.environ)
