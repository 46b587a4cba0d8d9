"""Budgets by mass beside fixed ones: each pair holds as many tokens, and the section of the page shows both."""

import pytest
import torch

import kvpatch
from tools.evaluation import mass, runs
from tools.evaluation.lines import Book, read
from tools.evaluation.pictures import title
from tools.evaluation.table import Table
from tools.evaluation.task import Request, Setting


@pytest.fixture(scope="module")
def subject():
    return runs.load("llama-0", Request())


@torch.no_grad()
def found(subject, task, setting, scenario="in", count=4):
    request = Request(count=count)
    samples = [one for one in task.samples(subject, request, 0) if one.group.get("scenario", scenario) == scenario]
    return samples, list(task.run(subject, setting, samples, request, 0))


def test_every_mass_has_a_fixed_budget_beside_it():
    settings = mass.Mass().settings(Request(policies=("h2o",), budgets=(0.7,)), None)
    assert [one.name for one in settings] == ["full", "h2o, mass", "h2o, as many"]
    assert len({one.key for one in mass.Mass().settings(Request(), None)}) == 1 + 2 * 2 * 3


@pytest.mark.parametrize("policy", ["snapkv", "h2o"])
def test_a_fixed_budget_holds_the_mean(subject, policy):
    task = mass.Mass()
    samples, own = found(subject, task, Setting(policy, 0.7, mass.OPTIONS[policy], f"{policy}, mass"))
    _, fixed = found(subject, task, Setting(policy, 0.7, mass.OPTIONS[policy], f"{policy}, as many"))
    ids_T, n = task.text(samples[0])
    most = n if policy == "snapkv" else len(ids_T)  # what follows the prompt stays under snapkv
    mean = sum(one["held"] for one in own) / len(own) * most
    assert {one["held"] * most for one in fixed} == {round(mean)}
    assert 0.02 < mean / most < 0.9


def test_what_nothing_evicts_does_not_count(subject):
    task = mass.Mass()
    samples = task.samples(subject, Request(count=2), 0)[:2]
    for policy, schedule in (("snapkv", "prompt"), ("h2o", "both")):
        assert kvpatch.get_policy(policy).schedule == schedule
        assert task._held(subject, Setting(policy, 40, {}, policy), samples, 8, 0) == [40.0, 40.0]


def test_the_section_shows_what_was_measured(subject, tmp_path):
    book = Book(tmp_path / "mass.jsonl")
    runs.run(mass.Mass(), Request(models=("llama-0",), policies=("snapkv",), budgets=(0.9,), count=2), book)
    book.close()
    text = mass.section({"mass": Table(read(tmp_path / "mass.jsonl"))}, title)
    assert text.startswith("## Budgets by mass\n") and "### The question is in the prompt: mass" in text
    assert "| `snapkv` | 0.9 |" in text and " of 1 |" in text
    assert not mass.section({}, title)
