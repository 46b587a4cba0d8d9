"""Launches and waits of a decode step: exact counts, which a change of the step must change here too."""

import itertools

import pytest
import torch

from tools.bench.counting import counting, launching, unlaunched
from tools.bench.launches import UNPATCHED, cells, counted, launch_lines
from tools.bench.lines import LAUNCH_POLICIES

pytest.importorskip("triton")

N = 32
# launches per layer and once per step, on the torch path and on Triton's
STEP = {
    UNPATCHED: ((36, 17), (36, 17)),
    "full": ((37, 24), (35, 25)),
    "window": ((36, 37), (35, 27)),
    "h2o": ((39, 42), (35, 27)),
    "roco": ((39, 65), (35, 53)),
    "keyformer": ((39, 50), (35, 28)),
    "snapkv": ((37, 24), (35, 25)),
    "adakv": ((61, 25), (36, 25)),
    "scissorhands": ((39, 47), (35, 27)),
    "tova": ((39, 40), (35, 36)),
    "critical(h2o)": ((42, 73), (38, 67)),
}


@pytest.mark.parametrize("policy", [UNPATCHED, *LAUNCH_POLICIES])
@pytest.mark.parametrize("path", ["torch", "triton"])
def test_a_step_launches_so_much_and_waits_for_nothing(policy, path):
    figures = counted(policy, path, N)
    launches = figures["launches"]
    assert (launches.per_layer, launches.once) == STEP[policy][path == "triton"]
    assert (figures["waits"].per_layer, figures["waits"].once) == (0, 0)


# of a prompt, in the same order
PROMPT = {
    UNPATCHED: ((38, 17), (38, 17)),
    "full": ((41, 35), (41, 56)),
    "window": ((52, 38), (52, 59)),
    "h2o": ((72, 39), (65, 60)),
    "roco": ((100, 39), (86, 60)),
    "keyformer": ((126, 38), (117, 59)),
    "snapkv": ((83, 44), (77, 86)),
    "adakv": ((150, 45), (144, 87)),
    "scissorhands": ((74, 38), (77, 59)),
    "tova": ((79, 44), (75, 86)),
    "critical(h2o)": ((107, 39), (100, 60)),
}


@pytest.mark.parametrize("policy", [UNPATCHED, *LAUNCH_POLICIES])
@pytest.mark.parametrize("path", ["torch", "triton"])
def test_a_prompt_launches_so_much(policy, path):
    launches = counted(policy, path, N)["prompt_launches"]
    assert (launches.per_layer, launches.once) == PROMPT[policy][path == "triton"]


# with every=m, a step that evicts nothing and one that evicts m tokens: what appending costs, and what chooses
RHYTHM = {
    "h2o": ((39, 31), (36, 26)),
    "roco": ((39, 38), (37, 26)),
    "window": ((36, 26), (35, 26)),
    "r_kv": ((40, 24), None),
}
EVICTS = {"h2o": ((49, 50), (46, 45)), "roco": ((49, 76), (47, 64)), "window": ((46, 42), (45, 42))}
EVICTS["r_kv"] = ((139, 25), None)  # what the last queries look at is computed where tokens go


@pytest.mark.parametrize(
    ("policy", "path"), [*itertools.product(("h2o", "roco", "window"), ("torch", "triton")), ("r_kv", "torch")]
)
def test_a_step_that_waits_costs_what_appending_does(policy, path):
    for every, table in ((16, RHYTHM), (5, EVICTS)):
        figures = counted(policy, path, N, every=every)
        launches = figures["launches"]
        assert (launches.per_layer, launches.once) == table[policy][path == "triton"]
        assert (figures["waits"].per_layer, figures["waits"].once) == (0, 0)


@pytest.mark.parametrize("policy", ["h2o", "critical(h2o)"])
@pytest.mark.parametrize("path", ["torch", "triton"])
def test_a_batch_is_stepped_together(policy, path):
    """As many launches for four rows of every head as for two: norms of values are one product."""
    assert counted(policy, path, N, batch=4)["launches"] == counted(policy, path, N, batch=2)["launches"]


def test_what_starts_work_is_counted():
    x = torch.arange(6.0)
    with counting() as found:
        (x.view(2, 3).T[1:] * 2).add_(1)
        torch.empty(3)
    assert found.launches == {"mul": 1, "add_": 1} and not found.waits
    with counting() as found:
        torch.tensor([1, 2])
    assert found.launches.total() == 1  # a copy to the device


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: x.tolist(), lambda x: x[x > 2], lambda x: x.nonzero(),
        lambda x: torch.tensor([1, 2], device=x.device),
    ],
)  # fmt: skip
def test_what_the_host_waits_for_is_counted(read):
    with counting() as found:
        read(torch.arange(6.0))
    assert found.waits.total() == 1


def test_kernels_are_counted_and_what_they_do_is_not():
    from kvpatch.backends.triton import decode

    figures, real = counted("h2o", "triton", N), decode.split_kernel
    assert figures["kernels"].per_layer == 2 and figures["kernels"].once == 0
    with launching(unlaunched):
        assert decode.split_kernel[1, 1](None) is None
    assert decode.split_kernel is real


def test_lines_have_both_paths():
    with torch.no_grad():
        lines = list(launch_lines(["window"], N, 1, tiny=True, steps=2))
    assert [line["path"] for line in lines] == ["torch", "triton"]
    for line in lines:
        row = cells(line)
        assert row[:2] == ("window", line["path"]) and row[4] == "36"
        assert float(row[-1]) == pytest.approx(line["ratio"], abs=0.01)
