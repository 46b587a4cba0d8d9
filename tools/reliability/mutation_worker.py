"""A process that has imported what tests import, and forks a child for each run of pytest in a folder of its own.

It reads lines of JSON {"folder", "log", "tests", "cover", "slow", "limit"} and answers each with the exit status of a run,
or minus the signal that ended it: one of TIME for a run that took too long. Only the child imports kvpatch, from its folder.
cover: a file for the seconds of a processor that each test takes and the lines of kvpatch/ that it runs, {test: {"seconds": s,
"lines": {file: [line, ...]}}}. slow: cover slow tests too. limit: seconds of a processor, where they are not LIMIT.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

LIMIT = 60  # seconds of a processor for the tests of one mutant
WAITING = 5  # times as many by the clock, for one that waits
TIME = (-signal.SIGKILL, -signal.SIGXCPU)
COVER_LIMIT = 3600
MEMORY = 24 << 30
PLUGINS = ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:anyio"]


class Cover:
    """A plugin of pytest that notes lines and seconds of every test that passes."""

    def __init__(self, root: Path) -> None:
        self.root, self.found, self.lines = str(root / "kvpatch") + os.sep, {}, {}  # type: ignore[var-annotated]
        self.begun: dict[str, float] = {}

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(self.root):
            return None
        own = self.lines.setdefault(name[len(self.root) :], set())
        own.add(frame.f_lineno)

        def line(inner: FrameType, event: str, arg: object) -> Any:
            own.add(inner.f_lineno)
            return line

        return line

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        self.lines.clear()
        self.begun[nodeid] = time.process_time()
        sys.settrace(self._call)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            lines = {file: sorted(own) for file, own in self.lines.items()}
            self.found[report.nodeid] = {"seconds": round(time.process_time() - self.begun[report.nodeid], 3), "lines": lines}

    def pytest_runtest_logfinish(self, nodeid: str, location: object) -> None:
        sys.settrace(None)


def child(job: dict[str, Any]) -> int:
    os.setpgid(0, 0)
    os.chdir(job["folder"])
    sys.path.insert(0, job["folder"])
    sys.dont_write_bytecode = True
    with open(job["log"], "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    options = [*PLUGINS, "-q", "--tb=no", "-rfE", "--assert=plain"]  # rewriting assertions takes longer than most tests
    if not job.get("cover"):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))  # a sabotage may ask for any size
        limit = job.get("limit", LIMIT)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        return int(pytest.main(["-x", *options, *job["tests"]]))
    plugin = Cover(Path(job["folder"]).resolve())
    marks = "not gpu" if job.get("slow") else "not slow and not gpu"
    status = int(pytest.main([*options, "-m", marks, *job["tests"]], plugins=[plugin]))
    Path(job["cover"]).write_text(json.dumps(plugin.found))
    return status


def wait(pid: int, limit: float) -> int:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -9


if __name__ == "__main__":
    import resource

    os.environ.setdefault("TRITON_INTERPRET", "1")
    import einops  # noqa: F401
    import hypothesis  # noqa: F401
    import pytest
    import torch
    from transformers import (  # noqa: F401
        BloomForCausalLM,
        DynamicCache,
        FalconForCausalLM,
        GPT2LMHeadModel,
        GPTJForCausalLM,
        LlamaForCausalLM,
        MistralForCausalLM,
        MptForCausalLM,
    )

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as nothing, contextlib.redirect_stdout(sys.stderr):
        pytest.main([*PLUGINS, "-q", "--collect-only", "--rootdir", nothing, nothing])  # imports pytest's own parts
    for text in sys.stdin:
        order = json.loads(text)
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            try:
                code = child(order)
            except BaseException:
                code = 70
            os._exit(code)
        print(wait(process, COVER_LIMIT if order.get("cover") else WAITING * order.get("limit", LIMIT)), flush=True)
