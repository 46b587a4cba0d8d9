"""Mechanisms on small models: intervals over models, resumed runs, what each task measures, and the page."""

import random
import statistics
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvpatch
from tools.evidence import __main__ as evidence
from tools.evidence import runs as all_runs
from tools.evidence.samples import digest
from tools.evidence.small import later, page, runs
from tools.evidence.small.later import WAYS, Later, teach
from tools.evidence.small.mass import FIXED, MASS, OPTIONS, Mass, count_held
from tools.evidence.small.reasoning import KEPT, RHYTHMS, Reasoning, limit_tokens, share_right
from tools.evidence.small.table import WHOLE, Table
from tools.evidence.small.task import FIFTEEN, UNPATCHED, Sample, Task, set_policy
from tools.evidence.statistics import Bootstrap, Estimate
from tools.training import tasks, walks

PAGE = (Path(__file__).parents[2] / "docs/small-models.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def model():
    return tasks.load("llama-0")[0]


# ---- intervals ----


def test_recipes_weigh_the_same_and_models_within_them_and_samples_within_these():
    layout = [("a", "a0")] * 3 + [("a", "a1")] + [("b", "b0")] * 2
    found = Bootstrap(layout).estimate([1.0, 2.0, 3.0, 10.0, 4.0, 8.0])
    assert found.mean == pytest.approx(((2.0 + 10.0) / 2 + 6.0) / 2)
    assert (found.models, found.signs) == (3, (3, 0))


def test_models_are_drawn_too_and_each_with_its_own_samples():
    """Of three models without spread within, each of 27 draws is as likely: one in 27 has the lowest three times."""
    numbers = [i for i in range(3) for _ in range(5)]
    found = Bootstrap([("a", f"a{i}") for i in numbers]).estimate(numbers)
    wider = (3 / 2) ** 0.5
    assert (found.low, found.high) == (pytest.approx(1 - wider), pytest.approx(1 + wider))
    weights = Bootstrap([("a", f"a{i}") for i in range(3)], draws=40_000).weights_DS
    assert (weights @ [0, 1, 2]).std() == pytest.approx(statistics.stdev([0, 1, 2]) / 3**0.5, rel=0.02)
    assert np.allclose(weights.sum(1), 1)


def test_intervals_are_right_about_as_often_as_they_say():
    """Of 500 made-up studies in which all is luck. Without the factor for few models 0.84 of the intervals hold."""
    bootstrap = Bootstrap([(f"r{r}", f"r{r}-{m}") for r in range(5) for m in range(3) for _ in range(8)])
    draw = np.random.default_rng(0).normal
    studies = [[model for _ in range(15) for model in draw() + 0.2 * draw(size=8)] for _ in range(500)]
    assert statistics.mean(one.low <= 0 <= one.high for one in map(bootstrap.estimate, studies)) > 0.89


@pytest.mark.parametrize(
    ("low", "high", "models", "signs", "carried"),
    [
        (-0.3, -0.1, 15, (1, 14), -1),
        (0.1, 0.3, 2, (2, 0), 0),  # two models carry nothing
        (-0.1, 0.3, 3, (3, 0), 0),
        (0.1, 0.3, 15, (13, 2), 0),
    ],
)
def test_what_is_carried(low, high, models, signs, carried):
    assert Estimate((low + high) / 2, low, high, 100, signs, models).carried == carried


# ---- the loop and its tables ----


class Toy(Task):
    """Sample i scores i/10, less 0.1 under window, and cannot run under tova; `asked` is what was measured."""

    name, metric, metrics = "toy", "score", {"score": "made up"}

    def __init__(self):
        self.asked = []

    def settings(self, policies=()):
        return [UNPATCHED, *(set_policy(name, 0.5) for name in policies or ("window", "tova", "random"))]

    def samples(self, count):
        return [Sample(str(i), i, digest(i)) for i in range(count)]

    def run(self, model, setting, samples):
        for sample in samples:
            if setting.row.policy == "tova":
                raise kvpatch.KVPatchError("it cannot")
            self.asked.append((setting.row.label, sample.name))
            yield {"score": sample.data / 10 - 0.1 * (setting.row.policy == "window")}


def test_a_run_goes_on_where_it_stopped(tmp_path):
    toy, path = Toy(), tmp_path / "llama-0/toy.jsonl"
    first = list(runs.measure(toy, "llama-0", None, path, 4))
    whole, asked = path.read_text(), list(toy.asked)
    assert len(first) == 3 * 4 + 1 and len(asked) == 3 * 4
    assert not list(runs.measure(toy, "llama-0", None, path, 4)) and toy.asked == asked
    rows = whole.splitlines(keepends=True)
    path.write_text("".join(rows[:6]) + rows[6][:30])
    assert len(list(runs.measure(toy, "llama-0", None, path, 4))) == 13 - 6 and path.read_text() == whole
    assert toy.asked[12:] == asked[6:]
    more = list(runs.measure(toy, "llama-0", None, path, 5))
    assert [line.get("error") for line in more] == [None, None, "it cannot", None], "with other samples it may run"


def test_means_differences_and_errors(tmp_path):
    lines = [line for name in ("llama-0", "llama-1", "gpt2-0") for line in runs.measure(Toy(), name, None, tmp_path / name, 4)]
    table = Table(lines)
    assert (table.labels, table.budgets) == (["window", "tova", "random"], [0.5])
    assert (table.mean(WHOLE, "score").mean, table.count_samples()) == (pytest.approx(0.15), 12)
    assert table.difference(("window", 0.5), WHOLE, "score").mean == pytest.approx(-0.1)
    assert table.mean(("tova", 0.5), "score") is None
    assert table.list_errors() == ["- `tova` does not run on llama-0, llama-1, gpt2-0: it cannot (k = 0.5)"]


# ---- tasks ----


def test_every_way_is_run_once_and_the_page_has_it():
    found = Later().settings()
    assert found[0] == UNPATCHED and len({one.key for one in found}) == len(found) == 1 + 2 * len(WAYS)
    assert {one.row.policy for one in found[1:]} <= {*kvpatch.list_policies()}
    for task in runs.TASKS.values():
        labels = {one.row.label.partition(",")[0] for one in task.settings()[1:]}
        section = PAGE.split(page.SECTIONS[task.name](Table([])).splitlines()[0])[1].split("\n## ")[0]
        assert all(label in section for label in labels), task.name
        assert f"`python -m tools.evidence small {task.name}`. " in section


def test_learned_answers_what_others_lose(model, monkeypatch):
    monkeypatch.setattr(later, "TEXTS", 12)
    task = Later()
    samples = task.samples(4)
    with torch.no_grad():
        own = teach(model)
        assert own == teach(model) and own.tokens == 12 * samples[0].data.rows.prompt_length
        rights = {
            name: statistics.mean(line["right"] for line in task.run(model, set_policy(name, 0.2), samples))
            for name in ("learned", "roco")
        }
    assert rights["learned"] > 0.8 > 0.6 > rights["roco"]


@pytest.mark.parametrize("policy", ["snapkv", "h2o"])
@torch.no_grad()
def test_a_fixed_budget_holds_the_mean_of_the_mass(model, policy):
    task = Mass()
    samples = task.samples(4)
    own, fixed = (
        list(task.run(model, set_policy(policy, 0.7, OPTIONS[policy], f"{policy}, {way}"), samples)) for way in (MASS, FIXED)
    )
    rows = samples[0].data.rows
    most = rows.prompt_length if policy == "snapkv" else rows.tokens_BT.shape[1] - 1  # what follows the prompt stays
    mean = sum(one["held"] for one in own) / len(own) * most
    assert {one["held"] * most for one in fixed} == {round(mean)} and 0.02 < mean / most < 0.9
    assert count_held(model, set_policy(policy, 40), samples[:2]) == [40.0, 40.0], "what nothing evicts does not count"


def test_visits_are_counted_one_by_one():
    trace = walks.walk(random.Random(0), 1, nodes=4, exits=2).continuation_BT[0].tolist()
    ends = walks.visits(trace)
    assert len(ends) == 8 and share_right(trace, trace) == 1
    for i in range(8):
        wrong = list(trace)
        wrong[ends[i] - 1] = tasks.PAD
        assert share_right(wrong, trace) == 7 / 8, "later visits are right"


@pytest.mark.parametrize(("way", "k"), [("every token", 222), (KEPT, 59), ("every 32", 191)])
def test_a_head_never_holds_more_than_the_budget(way, k):
    setting = next(one for one in Reasoning().settings(("h2o",)) if way in one.row.label)
    assert limit_tokens(setting, 163, 577).k == k
    assert k + (163 if way == KEPT else 0) + RHYTHMS[way] - 1 == int(0.3 * 740)


def test_policies_run_in_the_ways_that_they_have():
    found = [one for one in Reasoning().settings(("h2o", "raas", "r_kv")) if one.k == 0.5]
    ways = {one.row.label: one.row.options["schedule"] for one in found}
    raas = [f"raas, {way}" for way in (KEPT, "every 32", "every 128")]
    assert [*ways] == [*(f"h2o, {way}" for way in RHYTHMS), *raas, "r_kv, every 32", "r_kv, every 128"]
    assert {name for name, schedule in ways.items() if schedule == "decode"} == {f"h2o, {KEPT}", *raas}
    with pytest.raises(kvpatch.KVPatchError, match="a budget of 37 tokens leaves -126, too few"):
        limit_tokens(set_policy("h2o", 0.05, {"schedule": "decode", "every": 1}), 163, 577)


# ---- the command and the page ----


def test_the_command_measures_and_the_page_has_what_it_says(tmp_path, monkeypatch, capsys):
    docs = tmp_path / "docs"
    docs.mkdir()
    monkeypatch.chdir(tmp_path)
    # in this process: another one would import all of it anew
    pool = SimpleNamespace(submit=lambda work, *words: SimpleNamespace(result=lambda: work(*words)))
    monkeypatch.setattr(all_runs, "ProcessPoolExecutor", lambda *words: nullcontext(pool))
    monkeypatch.setattr(all_runs, "as_completed", list)
    evidence.small(["mass"], "llama-0", "", 1, tmp_path / "lines", 1, True)
    text = (docs / "small-models.md").read_text()
    assert "mass llama-0: 13 new lines" in capsys.readouterr().out
    assert "## Budgets by mass" in text and "| `snapkv` | 0.9 |" in text and " of 1 |" in text
    assert "## Long reasoning" not in text
    for block in text.split("\n\n"):  # what is no figure stands on the committed page
        if not block.startswith(("|", "`", "Versions", "A mass is")):
            assert block.strip() in PAGE, block


def test_the_models_of_the_page_are_three_seeds_of_each_architecture():
    assert len(FIFTEEN) == 15 and set(FIFTEEN) <= set(tasks.shipped())
    assert {len([name for name in FIFTEEN if name.startswith(recipe)]) for recipe in ("llama-", "mpt-", "gpt2-")} == {3}
