"""A process that has imported what every test imports, and forks a child for each run of pytest: importing takes seconds.

It reads lines of folder, log file and tests, separated by tabs, and answers each with the run's exit status. The library
itself is not imported here: each child takes the copy in its own folder.
"""

import os
import sys
import time

LIMIT = 300  # seconds


def run(folder: str, log: str, tests: str) -> int:
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    with open(log, "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests.split("\t")]))


def wait(pid: int) -> int:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -9


if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import hypothesis  # noqa: F401
    import pytest
    import torch
    from transformers import (  # noqa: F401
        GPT2LMHeadModel,
        GPTJForCausalLM,
        LlamaForCausalLM,
        MistralForCausalLM,
        MptForCausalLM,
    )

    torch.set_num_threads(1)
    for line in sys.stdin:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os._exit(run(*line.rstrip("\n").split("\t", 2)))
        print(wait(child), flush=True)
