"""Memory of freed tensors goes back to the system, and a server sees to it."""

import asyncio
import ctypes
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from kvpatch.cli.free_memory import give_back_memory
from tests.helpers.marks import batches

GLIBC = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")


def measure_memory():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not GLIBC, reason="not glibc")
def test_holes_between_tensors_are_given_back():
    """Each tensor is too small for a mapping of its own; one that stays keeps the heap below it from shrinking."""
    tensors = [torch.ones(8 << 10) for _ in range(4000)]  # 125 MiB
    last = tensors[-1]
    full = measure_memory()
    del tensors
    held = measure_memory()
    give_back_memory()
    given = held - measure_memory()
    assert full - held < 16 << 20 < 100 << 20 < given
    assert last.sum() == 8 << 10


@batches
@pytest.mark.parametrize("wrong", [None, "unknown"])
def test_a_server_gives_back_after_so_many_requests(monkeypatch, wrong):
    """Requests that were refused before they were asked for anything do not count."""
    pytest.importorskip("fastapi")
    pytest.importorskip("openai")
    from kvpatch.cli import answering
    from kvpatch.cli.request_fields import AcceptedRequest

    calls = []
    monkeypatch.setattr(answering, "give_back_memory", lambda: calls.append(1))

    async def close(count):
        answers = answering.Answers(SimpleNamespace(conversations=None), None, None)
        for number in range(count):
            answers.requests[str(number)] = AcceptedRequest({})
            answers.close(wrong or str(number))
        await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(close(3 * answering.EVERY - 1))
    assert len(calls) == (2 if wrong is None else 0)
