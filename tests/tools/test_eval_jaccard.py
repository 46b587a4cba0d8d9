"""Jaccard consistency: sets, scores and texts against numbers worked out by hand and loops over plain Python numbers."""

import math
import random

import pytest
import torch

from kvpatch import get_policy
from kvpatch.errors import KVPatchError
from kvpatch.policies import noise
from tests.helpers.tiny import FIVE, make, prompt
from tools.evaluation import jaccard, rows, runs
from tools.evaluation.jaccard import Jaccard
from tools.evaluation.observe import watch
from tools.evaluation.task import Request, Sample, Setting, Subject
from tools.training import tasks

NAMES = Jaccard.policies


def marks(*sets, T):
    return torch.tensor([[i in one for i in range(T)] for one in sets])


def subject_of(name: str) -> Subject:
    return Subject(name, make(name), None, name, False)


def samples_of(ids: torch.Tensor, n: int) -> list[Sample]:
    return [Sample(f"{i}", n, (row,), {}, f"{i}") for i, row in enumerate(ids)]


def means(task, subject, setting, samples, request=Request(), seed=0):  # noqa: B008
    found = list(task.run(subject, setting, samples, request, seed))
    assert len(found) == len(samples)
    return found


def test_the_overlap_of_known_sets():
    a = marks({0, 1, 2}, {0, 1}, {0, 1}, set(), T=5)
    b = marks({1, 2, 3}, {2, 3, 4}, {0, 1}, set(), T=5)
    assert jaccard.jaccard(a, b).tolist() == [0.5, 0.0, 1.0, 1.0]


def test_the_full_caches_choice_is_as_large_as_the_kept_set_and_ties_go_to_the_later_token():
    # of the last two of six rows; the row before last sees no token 5, however high its score
    last_two = torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.0, 9.0], [1.0, 5.0, 1.0, 1.0, 4.0, 0.5]])
    scores = torch.cat([torch.zeros(4, 6), last_two])[None, None].double()
    count = torch.tensor([2, 3]).view(1, 1, 2, 1)
    assert torch.equal(jaccard.top_sets(scores, 6, count)[0, 0], marks({0, 3}, {1, 4, 3}, T=6))
    # a window of three: behind row 4, token 2 is out of sight of row 5, and so on; these come after all others
    count = torch.tensor([3, 4]).view(1, 1, 2, 1)
    assert torch.equal(jaccard.top_sets(scores, 3, count)[0, 0], marks({3, 4, 0}, {4, 5, 1, 3}, T=6))


def test_older_leaves_out_what_is_younger_than_half_the_budget():
    scores = torch.zeros(1, 1, 6, 6).double()
    scores[..., -1, :] = torch.tensor([1.0, 5.0, 0.0, 4.0, 3.0, 2.0])  # the best three: 1, 3, 4
    found = jaccard.consistency(marks({0, 3, 5}, T=6)[None, None], scores, 6)
    # all: {3} of {0, 1, 3, 4, 5}; but the newest, token 5: {3} of {0, 1, 3, 4}
    assert found["jaccard"].tolist() == [[[1 / 5]]]
    assert found["older"].tolist() == [[[1 / 4]]]


# ---- a full cache's scores, by plain loops ----

H, G, T, N = 2, 2, 6, 4


def naive(name: str, x: list, h: int, t: int, i: int, seed: int) -> float:
    """s[t, i] of KV head h; x[head][t][i] are logits of query heads."""
    group = [h * G + g for g in range(G)]

    def softmax(row: list) -> list:
        total = sum(math.exp(value) for value in row)
        return [math.exp(value) / total for value in row]

    a = {(q, r): softmax(x[q][r][: r + 1]) for q in range(H * G) for r in range(t + 1)}
    rows_of_i = range(i, t + 1)
    if name in ("h2o", "roco"):
        total = sum(a[q, r][i] for q in group for r in rows_of_i) / G
        return total if name == "h2o" else total / len(rows_of_i)
    if name == "scissorhands":
        return sum(a[q, r][i] > 1 / (r + 1) for q in group for r in rows_of_i) / G
    if name == "tova":
        return sum(a[q, t][i] for q in group) / G
    tau = {N: 1 + 1 / 256, N + 1: 1 + 2 / 256}  # from 1 to 2 in 256 steps, prompt rows 1
    total = 0.0
    for q in group:
        u = [noise.uniform(seed, 1, torch.tensor(q), -1, torch.tensor(j)).item() for j in range(t + 1)]
        zeta = [-math.log(-math.log(value)) for value in u]
        for r in rows_of_i:
            row = [(x[q][r][j] + zeta[j]) / tau.get(r, 1.0) for j in range(r + 1)]
            total += softmax(row)[i] / G
    return total


@pytest.mark.parametrize("name", [name for name in NAMES if name != "random"])
def test_scores_are_what_the_formulas_say(name):
    x = torch.randn(1, H, G, T, T, generator=torch.Generator().manual_seed(3)).double() * 2
    x = x.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    policy = get_policy(name).with_options(**jaccard.bare(name))
    found = jaccard.FORMULAS[type(policy.score)](policy.score, x, N, 1, 7)
    plain = x[0].flatten(0, 1).tolist()
    for h in range(H):
        for t in range(T):
            want = [naive(name, plain, h, t, i, 7) for i in range(t + 1)]
            assert found[0, h, t, : t + 1].tolist() == pytest.approx(want, rel=1e-5)


def test_last_over_the_heads_of_a_layer():
    x = torch.randn(1, H, G, T, T, generator=torch.Generator().manual_seed(3)).double()
    found = jaccard._last(get_policy("tova").score, x, N, 0, 0)
    torch.testing.assert_close(found[0, 1, -1], x[0, :, :, -1].softmax(-1).mean((0, 1)))


@pytest.mark.parametrize("arch", FIVE)
def test_until_something_is_missing_the_policy_chooses_as_the_full_cache_does(arch):
    """Also at the first eviction, which has seen everything; so scores are the library's own, temperatures included."""
    subject, n, T = subject_of(arch), 20, 33
    ids, task = prompt(3, T, 5), Jaccard()
    for name in NAMES[1:]:
        setting = Setting(name, T - 1, jaccard.bare(name))  # the last token is the first to bring an eviction
        held = watch(subject.model, setting, ids, n, 2).held
        assert all((one[:, :, -1].sum(-1) == T - 1).all() and (one[:, :, -2].sum(-1) == T - 1).all() for one in held)
        assert means(task, subject, setting, samples_of(ids, n), seed=2) == [{"jaccard": 1.0, "older": 1.0}] * 3
    found = means(task, subject, Setting("h2o", 8, jaccard.bare("h2o")), samples_of(ids, n))
    assert all(0.3 < one["jaccard"] < 1.0 and 0.3 < one["older"] < 1.0 for one in found)


def test_a_budget_of_all_agrees_whatever_the_policy_and_batches_change_nothing():
    subject, task = subject_of("mistral"), Jaccard()
    samples = samples_of(prompt(3, 24), 16)
    for name in NAMES:
        full = means(task, subject, Setting(name, 1.0, jaccard.bare(name)), samples)
        assert full == [{"jaccard": 1.0, "older": 1.0}] * 3
        half = Setting(name, 0.5, jaccard.bare(name))
        together, one_by_one = (means(task, subject, half, samples, Request(batch=b)) for b in (3, 1))
        for one, other in zip(together, one_by_one, strict=True):
            assert one == pytest.approx(other, abs=1e-9)


def test_random_is_near_chance():
    subject, task, n, T = subject_of("llama_mqa"), Jaccard(), 40, 160
    task._span = n, T
    found = means(task, subject, Setting("random", 0.5, {}), samples_of(prompt(4, T), n), seed=3)
    mean = sum(one["jaccard"] for one in found) / 4
    assert mean == pytest.approx(task.chance(0.5, {}), abs=0.015)
    # the first eviction: were the draws the same on both sides, the same token would go
    found = means(task, subject, Setting("random", 14, {}), samples_of(prompt(1, 15), 14), seed=3)
    assert found[0]["jaccard"] < 1.0


def test_chance_of_two_independent_sets():
    task = Jaccard()
    task._span = 2, 4  # steps with three and four tokens, of which one is held
    assert task.chance(1, {}) == pytest.approx(((1 / 3) / (2 - 1 / 3) + (1 / 4) / (2 - 1 / 4)) / 2)
    assert task.chance(9, {}) == 1.0
    assert task.chance("1GiB", {}) is None
    subject = runs.load("llama-0", Request())
    task.samples(subject, Request(count=1, options={"length": 64, "steps": 2}), 0)
    f = [31 / 63, 31 / 64]
    assert task.chance(0.5, {}) == pytest.approx(sum(one / (2 - one) for one in f) / 2)


def test_nothing_is_protected_and_heads_choose_for_themselves():
    settings = Jaccard().settings(Request(budgets=(0.3,)), subject_of("llama"))
    assert {setting.policy: setting.options for setting in settings} == {
        "random": {}, "h2o": {"recent": 0}, "scissorhands": {"recent": 0}, "tova": {"heads": "each"},
        "roco": {"recent": 0, "protected": 0}, "keyformer": {"recent": 0},
    }  # fmt: skip
    assert [setting.k for setting in Jaccard().settings(Request(), subject_of("llama"))[::6]] == [0.3, 0.4, 0.5, 0.6]


def test_a_policy_without_such_a_score_says_so():
    for name in ("snapkv", "window", "critical_snapkv", "critical(h2o)"):
        with pytest.raises(KVPatchError, match=r"no score that a full cache would go on with: try random, h2o"):
            next(Jaccard().run(subject_of("llama"), Setting(name, 0.5), samples_of(prompt(1, 9), 6), Request(), 0))


# ---- texts ----


def test_synthetic_texts_are_recall_and_its_answers():
    subject, task = runs.load("llama-0", Request()), Jaccard()
    found = task.samples(subject, Request(count=2), 5)
    want = tasks.recall(random.Random(5), 2)
    assert [(sample.n, len(sample.data[0])) for sample in found] == [(208, 256)] * 2
    assert torch.equal(torch.stack([sample.data[0] for sample in found]), want.tokens_BT)
    assert [s.digest for s in task.samples(subject, Request(count=1), 5)] == [found[0].digest]


def test_real_texts_are_windows_behind_bos(tmp_path, monkeypatch):
    subject, text = runs.load("llama-0", Request()), "the quick brown fox " * 8
    (tmp_path / "a.txt").write_text(text)
    ids = subject.tokenizer(text).input_ids
    request = Request(data=str(tmp_path / "a.txt"), count=3, options={"length": 40, "steps": 8})
    for sample in Jaccard().samples(subject, request, 1):
        row = sample.data[0].tolist()
        assert (sample.n, len(row), row[0]) == (32, 40, tasks.BOS)
        assert any(ids[i : i + 39] == row[1:] for i in range(len(ids)))
    python = runs.load("llama-python", Request())
    monkeypatch.setattr(rows.train, "python_sources", lambda held_out: ["import this\n" * 99] if held_out else [])
    found, same = (rows.rows_of(python, Request(), 0, 2, 48) for _ in range(2))
    assert found.shape == (2, 48) and torch.equal(found, same) and not torch.equal(found[0], found[1])
    assert (found[:, 0] == python.tokenizer.bos_token_id).all()
    assert "import this\nimport this" in python.tokenizer.decode(found[0])


def test_batches_are_of_one_length_one_prompt_and_one_group():
    def sample(name, n, length, group):
        return Sample(name, n, (torch.zeros(length),), {"scenario": group}, name)

    some = [sample("a", 2, 5, "x"), sample("b", 2, 5, "x"), sample("c", 2, 5, "x"), sample("d", 3, 5, "x")]
    some += [sample("e", 3, 6, "x"), sample("f", 3, 6, "y")]
    assert ["".join(s.name for s in chunk) for chunk in rows.alike(some, 2)] == ["ab", "c", "d", "e", "f"]


def test_texts_that_cannot_be_say_what_to_type(tmp_path):
    subject, own = runs.load("llama-0", Request()), subject_of("llama")
    (tmp_path / "a.txt").write_text("too short")
    short = Request(data=str(tmp_path / "a.txt"))
    task = Jaccard()
    with pytest.raises(KVPatchError, match=r"has 9 tokens, too few for windows of 256: give -o length=10 or less"):
        task.samples(subject, short, 0)
    with pytest.raises(KVPatchError, match=r"--data nowhere\.txt is no file"):
        task.samples(subject, Request(data="nowhere.txt"), 0)
    with pytest.raises(KVPatchError, match="llama has no tokenizer"):
        task.samples(own, short, 0)
    own.tokenizer = subject.tokenizer
    with pytest.raises(KVPatchError, match=r"llama does not know the synthetic words: give a text with --data FILE\.txt"):
        task.samples(own, Request(), 0)
    with pytest.raises(KVPatchError, match=r"length=600: llama-0 has 512 positions; give -o length=512 or less"):
        task.samples(subject, Request(options={"length": 600}), 0)
    for steps in (0, 256, 0.5):
        with pytest.raises(KVPatchError, match=rf"steps={steps} must be 1 or more and less than length=256"):
            task.samples(subject, Request(options={"steps": steps}), 0)
