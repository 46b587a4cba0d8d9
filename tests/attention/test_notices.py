"""What is said once per patch: protected sizes above the budget, and scores that are NaN."""

import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch

import kvpatch
from kvpatch import Policy, Score
from kvpatch.cache.notices import Notices, Watched
from tests.helpers.tiny import force, left_pad, make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "kvpatch.cache.notices"]


CLAMPED = [
    ("snapkv", 24, {}, 60, r"\[kvpatch\] window=32 is cut to 12: the budget is 24 tokens per head (k=24, a prompt of 60). "
                           r"Give window=12 or less, or k=33 or more."),
    ("snapkv", 0.4, {"sinks": 4}, 60, r"window=32 is cut to 10: the budget is 24 tokens per head (k=0.4, a prompt of 60). "
                                      r"Give window=10 or less, or k=37 or more."),
    ("h2o", 16, {"recent": 64}, 60, "recent=64 is cut to 16: the budget is 16"),
    ("h2o", 16, {"sinks": 64}, 60, "sinks=64 is cut to 16: the budget is 16"),
    ("h2o", 16, {"sinks": 10, "recent": 7}, 60, "recent=7 is cut to 6: the budget is 16"),
    ("roco", 16, {"protected": 9}, 60, "protected=9 is cut to 6: the budget is 16"),
    ("h2o", 16, {"recent": 64}, 10, "recent=64 is cut to 16"),  # generated tokens are evicted later
]  # fmt: skip


@pytest.mark.parametrize(("policy", "k", "options", "n", "words"), CLAMPED)
def test_a_size_above_the_budget_is_said_once_with_the_one_that_fits(policy, k, options, n, words, caplog):
    model, ids = make("llama_gqa"), prompt(2, n)
    for _ in range(2):
        caplog.clear()
        with kvpatch.patched(model, policy, k, **options):
            model(ids)
            force(model, ids, prompt(2, 2, seed=3))
        (line,) = said(caplog)
        assert line.startswith("[kvpatch] ") and words.removeprefix(r"\[kvpatch\] ") in line


FITTING = [
    ("snapkv", 24, {"window": 23}, 60), ("snapkv", 24, {"window": 12}, 60), ("snapkv", 32, {}, 20),
    ("snapkv", 1.0, {}, 20), ("h2o", 16, {"recent": 1.0}, 60),
    ("h2o", 16, {"sinks": 10, "recent": 6}, 60), ("roco", 12, {}, 60), ("window", 3, {}, 60), ("full", 1, {}, 60),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "k", "options", "n"), FITTING)
def test_what_fits_is_not_spoken_of(policy, k, options, n, caplog):
    model = make("llama_gqa")
    with kvpatch.patched(model, policy, k, **options):
        force(model, prompt(1, n), prompt(1, 2, seed=3))
    assert said(caplog) == []


def test_the_shortest_row_is_named(caplog):
    model, ids = make("llama_gqa"), prompt(2, 100)
    with kvpatch.patched(model, "snapkv", 0.5):
        force(model, ids, prompt(2, 1, seed=3), left_pad(ids, [100, 40]))
    assert said(caplog) == [
        "[kvpatch] window=32 is cut to 10: the budget is 20 tokens per head (k=0.5, a prompt of 40). Give window=10 or less, "
        "or k=33 or more."
    ]


@dataclass(frozen=True)
class Nan(Score):
    where: int = 5

    def value(self, context):
        return torch.where(context.positions_BHT == self.where, torch.nan, 1.0)


def test_nan_scores_are_said_once(caplog):
    model, ids = make("llama_gqa"), prompt(1, 20)
    for _ in range(2):
        caplog.clear()
        with kvpatch.patched(model, Policy("mine", Nan()), 0.5):
            model(ids)
            force(model, ids, prompt(1, 3, seed=2))
        (line,) = said(caplog)
        assert line.startswith("[kvpatch] ") and "policy 'mine' gave NaN scores" in line and "strict=True" in line


def test_numbers_are_not_spoken_of(caplog):
    model, ids = make("llama_gqa"), prompt(2, 40)
    for policy in (Policy("mine", Nan(-1)), Policy("mine", Nan(99)), "h2o", "keyformer", "roco"):
        with kvpatch.patched(model, policy, 12):
            force(model, ids, prompt(2, 3, seed=2), left_pad(ids, [40, 30]))
    assert said(caplog) == []


def test_a_decode_step_does_not_wait_for_the_check(monkeypatch):
    """NaN is looked for at a prompt's end alone, where the device is waited for anyway."""
    model, ids = make("llama_gqa"), prompt(1, 20)
    with kvpatch.patched(model, "h2o", 0.5):
        cache = model(ids).past_key_values
        monkeypatch.setattr(torch.Tensor, "isnan", lambda self: 1 / 0)
        model(ids[:, :1], past_key_values=cache)
        with pytest.raises(ZeroDivisionError):
            model(ids)


@pytest.mark.parametrize("where", [3, 21])
def test_strict_raises_where_value_is_nan(where):
    """At a prompt's end, and in a decode step (a token that was generated)."""
    model, ids = make("llama_gqa"), prompt(1, 20)
    with kvpatch.patched(model, kvpatch.Policy("mine", Nan(where)), 10, strict=True) as patch:
        cache = patch.new_cache()
        words = rf"strict=True: the scores \(of value\(\)\) of layer 0.*position {where}"
        with pytest.raises(kvpatch.KVPatchError, match=words):
            model(ids, past_key_values=cache)
            for step in range(4):
                model(ids[:, step : step + 1], past_key_values=cache)


@pytest.mark.parametrize("strict", [False, True])
def test_nan_scores_where_an_edit_ends(caplog, monkeypatch, strict):
    model, ids = make("llama_gqa"), prompt(1, 20)
    refused = pytest.raises(kvpatch.KVPatchError, match=r"the scores \(of value\(\)\) of layer 0")
    with kvpatch.patched(model, Policy("mine", Nan(99)), 12, strict=strict) as patch:
        cache = model(ids).past_key_values
        monkeypatch.setattr(Nan, "value", lambda self, context: torch.full(context.positions_BHT.shape, torch.nan))
        with refused if strict else nullcontext():
            patch.replace(cache, (4, 16), prompt(1, 12, seed=3))
    assert strict or "policy 'mine' gave NaN scores" in said(caplog)[0]


class SlowArrival:
    """An event of a number that has reached the host; asking for it lets other threads run."""

    def query(self):
        time.sleep(0.002)
        return True


def test_threads_that_look_at_once_log_each_warning():
    """Each pass looks, and a patch serves several threads."""
    notices, failed = Notices(), []
    names = [str(number) for number in range(60)]
    notices.watched = [Watched(name, name, torch.tensor(True), SlowArrival()) for name in names]

    def look():
        try:
            notices.look()
        except IndexError as error:
            failed.append(error)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [] and notices.said == set(names)
