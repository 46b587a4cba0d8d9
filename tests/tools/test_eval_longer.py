"""Contexts of a thousand tokens: what is asked in each scenario, what is refused, and the page's sections on them."""

import pytest
import torch

import kvpatch
from tools.evaluation import models, results, runs
from tools.evaluation.longer import FAMILIES, TAIL, Longer
from tools.evaluation.task import FULL, Request, Setting


@pytest.fixture(scope="module")
def subject():
    return runs.load("llama-1k-0", Request())


def test_the_question_stands_in_the_prompt_or_behind_it_in_the_same_context(subject):
    request = Request(count=2, options={"context": 300})
    samples = {(one.group["scenario"], one.name.rpartition("/")[2]): one for one in Longer().samples(subject, request, 0)}
    assert len(samples) == 4 * len(FAMILIES)
    for family in FAMILIES:
        for index in "01":
            within, after = (samples[f"{family} {when}", index].data.rows for when in ("in", "after"))
            assert torch.equal(within.tokens_BT, after.tokens_BT)
            assert (within.prompt_length, after.prompt_length) == (302, 300)
            assert len(after.answers_AW) == 1
            assert after.answers_AW[0, 0] == 302, "behind <q> and what is asked for"
            assert within.tokens_BT.shape[1] <= 300 + TAIL


def test_a_window_forgets_what_the_full_cache_answers(subject):
    request = Request(count=4, options={"scenarios": "hops in,tracking in", "context": 300})
    task = Longer()
    samples = task.samples(subject, request, 0)
    right = {
        name: sum(line["right"] for line in task.run(subject, setting, samples, request, 0)) / len(samples)
        for name, setting in {"full": FULL, "window": Setting("window", 0.1, {})}.items()
    }
    assert right["full"] > 0.8
    assert right["window"] < 0.3


def test_a_context_that_has_no_positions_is_refused(subject):
    with pytest.raises(kvpatch.KVPatchError, match=r"context=1009: llama-1k-0 has 1024 positions; give -o context=1008"):
        Longer().samples(subject, Request(options={"context": 1009}), 0)
    for wrong, words in (("long", r"-o context=long must be a number of tokens"), (40, r"=40 is too short .*=200 or more")):
        with pytest.raises(kvpatch.KVPatchError, match=words):
            Longer().samples(subject, Request(count=1, options={"context": wrong}), 0)
    with pytest.raises(kvpatch.KVPatchError, match=r"give --models llama-1k-0"):
        Longer().samples(runs.load("llama-python", Request()), Request(options={"context": 100}), 0)
    with pytest.raises(kvpatch.KVPatchError, match=r"scenarios=hops: they are recall in, recall after"):
        Longer().samples(subject, Request(options={"scenarios": "hops"}), 0)


def test_the_sections_are_those_of_the_long_models(tmp_path, monkeypatch):
    assert [(name, request.models) for name, request in results.wanted(tmp_path, "longer")] == [
        ("longer", (model,)) for model in models.LONG
    ]
    size = {"models": ("llama-1k-0",), "count": 1, "budgets": (0.1,), "policies": ("window",), "options": {"context": 200}}
    monkeypatch.setitem(results.SIZES, "longer", size)
    ((name, request),) = results.wanted(tmp_path, "longer")
    results.measure(name, request)
    (section,) = results.sections(tmp_path, tmp_path, "longer").items()
    assert section[0] == "A thousand tokens"
    assert all(f"### {scenario[0].upper()}{scenario[1:]}" in section[1] for scenario in Longer.scenarios)
