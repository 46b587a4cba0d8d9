"""Runs of the tests on machines with a GPU."""

import pytest
import torch

from tests.helpers.devices import ASKED, asks_for_gpus, choose, pretend


@pytest.mark.parametrize(
    ("arguments", "asks"),
    [
        (["pytest"], False),
        (["pytest", "-m", "gpu"], True),
        (["pytest", "-mgpu", "tests"], True),
        (["pytest", "-q", "-m", "gpu or not slow", "tests/backends"], True),
        (["pytest", "-m", "not slow and not gpu"], False),
        (["pytest", "-m", "slow and (not gpu)"], False),
        (["pytest", "-m", "slow or (gpu)"], True),
        (["python", "-m", "pytest"], False),
        (["pytest", "-k", "gpu"], False),
    ],
)
def test_gpus_are_seen_by_runs_that_ask_for_them(arguments, asks):
    assert asks_for_gpus(arguments) == asks
    environment = {"CUDA_VISIBLE_DEVICES": "3"}
    choose(arguments, environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == ("3" if asks else "")
    workers = {**environment, "CUDA_VISIBLE_DEVICES": "3"}
    choose(["-c"], workers)
    assert workers["CUDA_VISIBLE_DEVICES"] == ("3" if asks else ""), "a process that pytest starts differs from it"
    assert (ASKED in environment) == asks and environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize("arguments", [["pytest"], ["pytest", "-m", "gpu"]])
def test_the_stub_says_what_a_machine_with_cuda_would(arguments, monkeypatch):
    for name in ("device_count", "is_available"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))  # put back after the test
    environment = {}
    pretend(environment)
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    choose(arguments, environment)
    assert torch.cuda.is_available() == (len(arguments) > 1)
