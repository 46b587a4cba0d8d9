"""The primary comparisons: which models and policies they take, and what a verdict may say."""

from collections import Counter

import pytest

from tools.evaluation import lines, models, primary, results, sinks
from tools.evaluation.claims import Claim
from tools.evaluation.table import Table
from tools.evaluation.tasks import get_task
from tools.training.train import SHIPPED


def test_fifteen_are_the_first_three_seeds_of_each_architecture():
    counts = Counter(SHIPPED[name][0] for name in models.FIFTEEN)
    assert counts == dict.fromkeys(("llama", "mistral", "mpt", "gptj", "gpt2"), models.EACH)
    assert models.FIFTEEN[:3] == ("llama-0", "llama-1", "llama-2")
    assert set(models.PLAIN) == {*models.FIFTEEN, *models.MORE}
    everything = (*models.PLAIN, *models.CODE, *models.WALKERS, *models.SUNK)
    assert sorted(everything) == sorted(SHIPPED)


def test_the_family_asks_for_what_runs():
    for group, claim in primary.FAMILY:
        task, size = get_task(claim.task), results.SIZES[claim.task]
        assert claim.metric in task.metrics
        assert {claim.a, claim.b} - {""} <= set(task.policies) <= {"full", *size.get("policies", task.policies)}
        assert group in primary.MODELS
    assert len({repr(one) for one in primary.FAMILY}) == len(primary.FAMILY)
    assert primary.policies(primary.WITHOUT)["needle"] == ("critical_snapkv", "snapkv")
    for task, names in primary.policies(primary.WITH).items():
        assert set(names) <= set(sinks.POLICIES[task]), "the section on sinks has measured it"


def table(gains, groups=("in",)):
    """Lines in which `a` is above `b` by a gain of each model."""
    return Table(
        {"name": name, "k": 0.2, "recipe": model.rpartition("-")[0], "model": model, "seed": 0, "sample": f"{group}/{i}",
         "group": {"scenario": group}, "metrics": {"right": 0.5 + gain * (name == "a")}}
        for model, gain in gains.items() for name in ("a", "b") for group in groups for i in range(2)
    )  # fmt: skip


ASKED = Claim("", "a is better", "recall", "right", "a", "b")
EIGHT = {f"{recipe}-{seed}": 0.25 for recipe in ("llama", "mpt") for seed in range(4)}


@pytest.mark.parametrize(
    ("gains", "sign", "said"),
    [
        (EIGHT, 1, "| +0.250 [0.250, 0.250] | llama +0.250 (4); mpt +0.250 (4) | 0.0078 | 0.0156 | agrees in every arch"),
        (EIGHT, -1, "| contradicts in every architecture |"),
        ({name: -gain for name, gain in EIGHT.items()}, 1, "| contradicts in every architecture |"),
        (EIGHT | {"mpt-0": -1.0}, 1, "| not separated |"),
        (EIGHT | {"gptj-0": -0.01}, 1, "| agrees on average, not in gptj |"),
        ({"llama-0": 0.5, "mpt-0": 0.5}, 1, "| 0.5000 | 1.0000 | not separated |"),
    ],
)  # fmt: skip
def test_verdicts_need_a_corrected_p_and_all_architectures(gains, sign, said, monkeypatch):
    claim = Claim("", "a is better", "recall", "right", "a", "b", sign=sign)
    other = Claim("", "not seen", "needle", "right", "a", "b")
    monkeypatch.setattr(primary, "FAMILY", ((primary.WITHOUT, claim), (primary.WITH, other)))
    text = primary.section({primary.WITHOUT: {"recall": table(gains)}, primary.WITH: {}})
    assert said in text
    assert text.startswith(f"## {primary.TITLE}\n\nThese 2 comparisons are")
    assert "| not seen | with sinks | `a` above `b`, needle, right | - | - | - | - | not measured |" in text
    assert primary.section({primary.WITHOUT: {}, primary.WITH: {}}) == ""


def test_the_sections_are_made_from_the_lines_of_their_models(tmp_path, monkeypatch):
    monkeypatch.setattr(primary, "FAMILY", ((primary.WITHOUT, ASKED),))
    monkeypatch.setattr(primary, "MODELS", {primary.WITHOUT: tuple(EIGHT), primary.WITH: ()})
    for name, gain in EIGHT.items():
        (tmp_path / name).mkdir()
        lines.rewrite(tmp_path / name / "recall.jsonl", table({name: gain}).lines)
    (found,) = results.sections(tmp_path, tmp_path, "primary").items()
    assert found[0] == primary.TITLE
    assert "llama +0.250 (4); mpt +0.250 (4)" in found[1]
