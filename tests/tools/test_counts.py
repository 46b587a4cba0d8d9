"""Counts of docs/benchmarks.md that need no device: what is committed is counted again."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("triton")

from kvpatch.hooks import graph
from kvpatch.hooks.capacity import round_capacity
from tests.helpers.marks import batches
from tools.bench import counts as bench_counts
from tools.bench.__main__ import app
from tools.bench.counts import LONGEST, SHORTEST, STEPS, WAITS, cells, compiled_graphs, engine_waits, kept_by_graphs
from tools.bench.launches import Figure, counted
from tools.bench.lines import COUNT_POLICIES, latest

FILE = Path(__file__).parents[2] / "benchmarks/counts.jsonl"
LINES = {line["policy"]: line for line in latest([json.loads(line) for line in FILE.read_text().splitlines()])}
OWN = (*(f"waits_{name}" for name in WAITS), "graphs", "compiled")
SHARING = ("adakv",)  # heads share a budget by score, which the host must know


def test_every_policy_has_a_line():
    assert tuple(LINES) == COUNT_POLICIES and all(len(cells(line)) == 10 for line in LINES.values())


@batches
@pytest.mark.parametrize("policy", COUNT_POLICIES)
def test_waits(policy):
    plain, masked = counted(policy, "torch"), counted(policy, "torch", masked=True)
    found = {"prompt": plain["prompt_waits"], "mask": masked["prompt_waits"], "step": plain["waits"], **engine_waits(policy)}
    assert {name: vars(figure) for name, figure in found.items()} == {name: LINES[policy][f"waits_{name}"] for name in WAITS}
    assert found["step"] == Figure(0, 0), "no step waits"
    assert policy in SHARING or (found["prompt"] == Figure(0, 0) and found["mask"] == Figure(0, 1)), "a mask is read once"
    assert found["engine_decode"] == Figure(0, 0), "requests that go on wait for nothing"


@pytest.mark.parametrize("policy", COUNT_POLICIES)
def test_many_steps_compile_once(policy):
    assert compiled_graphs(policy, 60) == LINES[policy]["compiled"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", COUNT_POLICIES)
def test_a_thousand_steps_compile_once(policy):
    assert compiled_graphs(policy) == 1 and STEPS == 1000


@pytest.mark.slow
@pytest.mark.parametrize("policy", COUNT_POLICIES)
def test_bytes_that_a_hundred_prompts_leave(policy):
    assert kept_by_graphs(policy) == LINES[policy]["graphs"]


def test_captures_are_bounded_by_classes_and_memory_by_the_graphs_that_are_kept(monkeypatch):
    """Each class is captured once, as all are kept; of fewer that are kept, more captures and less memory."""
    every = kept_by_graphs("h2o", prompts=30)
    classes = {round_capacity(n // 2 + 1) for n in range(SHORTEST, LONGEST + 1)}
    monkeypatch.setattr(graph, "KINDS", 4)
    few = kept_by_graphs("h2o", prompts=30)
    assert every["captures"] <= len(classes) < few["captures"]
    beside = 1 + 12 / 128  # positions and scores: 12 bytes for each key and value of 128
    assert few["caches"] <= 4 * beside * (1 + 1 / 16) < every["caches"], "a sixteenth of the slots may be empty"


def test_a_hundred_lengths_are_few_captures():
    """But where heads differ: there each text has shapes of its own."""
    captures = {policy: LINES[policy]["graphs"]["captures"] for policy in COUNT_POLICIES}
    assert all(captures[policy] <= graph.KINDS for policy in COUNT_POLICIES if policy not in SHARING), captures


def test_prompts_of_one_class_in_turn_are_captured_once(monkeypatch):
    monkeypatch.setattr("tools.bench.counts.SHORTEST", 242)  # half of 242 to 256 tokens, and one, are 122 to 129 slots
    assert kept_by_graphs("h2o", prompts=14)["captures"] == 2
    assert kept_by_graphs("h2o", k=32, prompts=14)["captures"] == 1


def test_the_command_prints_the_table_and_keeps_the_line(monkeypatch, tmp_path):
    """A line without times is in no table of times."""
    monkeypatch.setattr(bench_counts, "counts", lambda policy: {name: LINES[policy][name] for name in OWN})
    done = CliRunner().invoke(app, ["--case", "counts", "--policies", "h2o", "--json", str(tmp_path / "lines.jsonl")])
    assert done.exit_code == 0, done.output
    assert " | ".join(cells(LINES["h2o"])) in done.output and "requests join" in done.output
    (line,) = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert cells(line) == cells(LINES["h2o"])
