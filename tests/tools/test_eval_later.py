"""Questions after compression: what `learned` learns from, and that it tells."""

from statistics import mean

import torch

import kvpatch
from tools.evaluation import later, runs
from tools.evaluation.later import WAYS, Later, taught
from tools.evaluation.task import FULL, Request, Setting


def test_learned_answers_what_others_lose(monkeypatch):
    monkeypatch.setattr(later, "TEXTS", 12)
    subject, task, request = runs.load("llama-0", Request()), Later(), Request(count=4)
    samples = task.samples(subject, request, 0)
    with torch.no_grad():
        own = taught(subject)
        assert own == taught(subject) and own.tokens == 12 * samples[0].n
        settings = [Setting(policy, 0.2, {}) for policy in ("learned", "roco")]
        rights = {one.policy: mean(line["right"] for line in task.run(subject, one, samples, request, 0)) for one in settings}
    assert rights["learned"] > 0.8 > 0.6 > rights["roco"]
    assert "calibration" not in settings[0].options, "a setting's key is text"


def test_every_way_is_run_once():
    found = Later().settings(Request(), None)
    assert found[0] == FULL and len({one.key for one in found}) == len(found) == 1 + 2 * len(WAYS)
    assert {one.policy for one in found[1:]} <= {*kvpatch.list_policies()}
