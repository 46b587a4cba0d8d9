"""The papers' own tables: their numbers, what fills each cell, and the whole way on shipped models."""

from dataclasses import replace

import pytest
import torch

from kvpatch.errors import KVPatchError
from tests.helpers.marks import slow_but
from tools.evaluation import estimate, published, runs, tables
from tools.evaluation.by_token import ByToken
from tools.evaluation.perturb import Perturbation
from tools.evaluation.published import HARNESS, MODELS, PUBLISHED, Cell, Job
from tools.evaluation.table import Table
from tools.evaluation.task import FULL, Request, Setting
from tools.evaluation.tasks import TASKS

SUMS = {
    "keyformer-2": 3061.3, "keyformer-3": 512.9642, "keyformer-4": 163.51, "keyformer-figure-7": 0.0, "roco-2": 4406.3,
    "roco-3": 1087.7, "roco-4": 3009.3, "roco-6": 464.6, "criticalkv-1": 6041.04, "criticalkv-2": 5838.24,
    "criticalkv-figures-1-2": 765.0, "criticalkv-figure-5": 279.0,
}  # fmt: skip
"""Of all numbers of each of the papers' tables."""

JOB = Job("MPT-7B", "summarize", "xsum", 10, 100, 10)


@pytest.mark.parametrize("name", PUBLISHED)
def test_numbers_are_the_papers(name):
    numbers = [number for *_, number, _ in PUBLISHED[name].cells() if number is not None]
    assert sum(numbers) == pytest.approx(SUMS[name])


def test_averages_of_the_paper_are_those_of_its_domains():
    """LongBench's domains have 3, 3, 3, 3, 2 and 2 sets: which columns and rows stand where shows in the averages."""
    for name in ("criticalkv-1", "criticalkv-2"):
        rows = dict(PUBLISHED[name].rows)
        for scenario in ("Regular", "Context-only"):
            parts = [numbers for (where, domain), numbers in rows.items() if where == scenario and domain != "Ave."]
            for column, average in enumerate(rows[scenario, "Ave."]):
                mean = sum(size * part[column] for size, part in zip((3, 3, 3, 3, 2, 2), parts, strict=True)) / 16
                assert average == pytest.approx(mean, abs=0.06)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_cell_has_a_job_that_can_be_run(name):
    for *_, cell in PUBLISHED[name].cells():
        for job in cell.jobs:
            assert job.model in MODELS
            assert job.task in (HARNESS, ByToken.name, *TASKS)
            task = ByToken if job.task == ByToken.name else TASKS.get(job.task)
            metrics = {"value"} if task is None else {*task.metrics}
            assert cell.metric in metrics | {"prompt_seconds"}
        assert len({one.key for one in cell.settings}) == len(cell.settings) or cell.setting == cell.over


def test_settings_of_one_job_have_names_of_their_own():
    """A table finds a setting by its name and budget."""
    for one in PUBLISHED.values():
        for settings in tables.settings_of(cell for *_, cell in one.cells()).values():
            assert len({(setting.name, setting.k) for setting in settings}) == len(settings), one.name


def lines(**values: float) -> Table:
    """By the name of the setting, at half the cache."""
    head = {"recipe": "a", "model": "a", "seed": 0, "sample": "0", "group": {}}
    budgets = {name: 1.0 if name == "full" else 0.5 for name in values}
    return Table([head | {"name": name, "k": budgets[name], "metrics": {"x": value}} for name, value in values.items()])


def test_a_cell_is_a_mean_over_jobs_scaled_or_a_ratio():
    other = Job("MPT-7B", "summarize", "cnn_dailymail", 10, 100, 10)
    found = {JOB: lines(full=0.5, h2o=0.2), other: lines(full=0.7, h2o=0.4)}
    assert tables.value(Cell((JOB, other), Setting("h2o", 0.5), "x"), found) == pytest.approx(30)
    assert tables.value(Cell((JOB,), FULL, "x", scale=99.0), found) == pytest.approx(49.5)
    assert tables.value(Cell((JOB,), Setting("h2o", 0.5), "x", scale=1.0, over=FULL), found) == pytest.approx(2.5)
    assert tables.value(Cell((JOB,), Setting("roco", 0.5), "x"), found) is None
    assert tables.value(Cell((JOB,), Setting("h2o", 0.5), "x", over=Setting("roco", 0.5)), found) is None


def test_a_dry_run_loads_nothing_and_says_what_would_be_fetched(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(runs, "load", lambda *_: pytest.fail("a model was loaded"))
    tables.main("keyformer-2", dry_run=True, model=["MPT-7B=/data/mpt"], out=tmp_path, samples=None)
    said = capsys.readouterr().out
    assert "MPT-7B: /data/mpt, about 13 GB" in said and "Cerebras" not in said
    assert "copa 0, copa 5, openbookqa 0" in said and "full 1, h2o 0.5, keyformer 0.5" in said
    assert "what lm-evaluation-harness' task piqa reads" in said
    assert not list(tmp_path.iterdir())


def test_the_estimate_counts_passes_where_prompts_are_read_in_blocks():
    way = tables.Way(None, {}, batch=1)  # type: ignore[arg-type]
    whole, blocks = (estimate.seconds_of(JOB, Setting("roco", 0.5, options), way) for options in ({}, {"block": 10}))
    step = 2 * MODELS["MPT-7B"][1] / estimate.BYTES
    assert blocks == pytest.approx(10 * (10 + 10) * step)
    assert whole == pytest.approx(10 * (1 + 10) * step)


def test_what_is_unknown_is_refused_in_words():
    with pytest.raises(KVPatchError, match=r"Unknown table 'keyformer-5'.*keyformer-2"):
        published.get("keyformer-5")
    with pytest.raises(KVPatchError, match=r"--model MPT is in none of the tables.*MPT-7B"):
        tables.places_of(["MPT=/x"])
    with pytest.raises(KVPatchError, match=r"roco-2 has no row of MPT-7B"):
        tables.make(published.get("roco-2"), tables.Way(None, {"MPT-7B": "x"}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", slow_but(["keyformer-4"], list(PUBLISHED)))
def test_a_table_is_made_whole_on_shipped_models(name, tmp_path, monkeypatch):
    one = published.get(name)
    models = dict.fromkeys(list(dict.fromkeys(job.model for *_, cell in one.cells() for job in cell.jobs))[:1], "")
    way = tables.Way(tmp_path, models, samples=1)
    page = tables.make(one, way, on_shipped=True)
    rows = [row.strip("|").split("|") for row in page.splitlines() if row.startswith("|")][2:]
    wanted = [(labels, column) for labels, column, _, cell in one.cells() if cell.jobs[0].model in models]
    assert len(rows) == len(dict.fromkeys(labels for labels, _ in wanted))
    filled = sum(bool(cell.strip()) for row in rows for cell in row[len(one.labels) :: 2])
    unsure = sum("Meteor" in column for _, column in wanted)  # needs WordNet
    if name == "criticalkv-figure-5":  # one sample, whose sets may be equal in every head
        unsure = len(wanted)
    assert len(wanted) - unsure <= filled <= len(wanted)
    monkeypatch.setattr(runs.Task, "run", lambda *_: pytest.fail("measured again"))
    assert tables.make(one, way, on_shipped=True) == page, "a second call measures nothing"


def test_token_one_is_the_first_query_behind_the_prompt():
    """With one token behind the prompt the mean over queries, which perturb.py takes, is that token's."""
    request, subject = Request(count=2), runs.load("llama-0", Request())
    setting = Setting("critical_snapkv", 0.2, {"window": 8, "kernel": 5})
    task, plain = ByToken(), Perturbation()
    samples = task.samples(subject, request, 0)
    assert len(samples) == 2
    found = [line["heads_lower_1"] for line in task.run(subject, setting, samples, request, 0)]
    cut = {one.name: (one.data[0][: one.n + 1], one.data[1][: one.n + 2], None) for one in samples}
    short = [replace(one, data=cut[one.name], digest=one.name) for one in samples]
    expected = [line["heads_lower"] for line in plain.run(subject, setting, short, request, 0)]
    assert found == pytest.approx(expected)
    assert torch.tensor(found).isfinite().all()
