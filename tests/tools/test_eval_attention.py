"""Sparsity, robustness and perturbation of attention: hand-made matrices, plain loops, and tools/evaluation/perturbation.py."""

import statistics

import pytest
import torch

import kvpatch
from kvpatch.errors import KVPatchError
from tests.helpers.tiny import make, prompt
from tools.evaluation import perturb, perturbation, robustness, runs, sparsity
from tools.evaluation.observe import Memory, by_model, by_setting, look, watch
from tools.evaluation.perturb import Moved, Perturbation
from tools.evaluation.robustness import Robustness
from tools.evaluation.sparsity import Sparsity
from tools.evaluation.table import Table
from tools.evaluation.task import FULL, Request, Sample, Setting, Subject
from tools.training import tasks

GQA = "llama_gqa"  # four query heads, two KV heads


def subject_of(name: str) -> Subject:
    return Subject(name, make(name), None, name, False)


def samples_of(ids: torch.Tensor, n: int) -> list[Sample]:
    return [Sample(f"{i}", n, (row,), {}, f"{i}") for i, row in enumerate(ids)]


def fed_but_last(ids: torch.Tensor, n: int) -> list[Sample]:
    """As the perturbation task has them: nothing asked, every next token counts."""
    return [Sample(f"{i}", n, (row[:-1], row, None), {}, f"{i}") for i, row in enumerate(ids)]


def run(task, subject, setting, samples, **request):
    return list(task.run(subject, setting, samples, Request(**request), 0))


def probabilities(model, ids: torch.Tensor) -> torch.Tensor:
    """[L,B,N,T,T] by the model's own eager attention."""
    model.set_attn_implementation("eager")
    found = torch.stack(model(ids, output_attentions=True).attentions).detach()
    model.set_attn_implementation("sdpa")
    return found


def logits(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.double).log()[None, None]


# ---- sparsity ----

ROWS = logits([0.7, 0.2955, 0.0045, 0.0], [0.4, 0.3, 0.298, 0.002])  # the first row does not see the last key


def test_keys_below_a_share_of_the_maximum():
    assert sparsity.below(ROWS, 0.01).tolist() == [[[1 / 3, 1 / 4]]]  # .0045 < .007, .002 < .004
    assert sparsity.below(ROWS, 0.006).tolist() == [[[0.0, 1 / 4]]]  # .0045 > .0042
    assert sparsity.below(ROWS, 0.5).tolist() == [[[2 / 3, 1 / 4]]]


def test_attention_of_the_top_tokens_and_tokens_for_an_attention():
    assert sparsity.held_by_top(ROWS, 50)[0, 0].tolist() == pytest.approx([0.7, 0.7])  # one of three keys, two of four
    assert sparsity.held_by_top(ROWS, 67)[0, 0].tolist() == pytest.approx([0.9955, 0.7])
    assert sparsity.held_by_top(ROWS, 1)[0, 0].tolist() == pytest.approx([0.7, 0.4])
    assert sparsity.needed(ROWS, 0.9)[0, 0].tolist() == [2 / 3, 3 / 4]
    assert sparsity.needed(ROWS, 0.7)[0, 0].tolist() == [1 / 3, 2 / 4]  # exactly .7 is enough


def test_sparsity_of_a_model_is_that_of_the_queries_behind_the_prompt():
    subject, ids, n = subject_of(GQA), prompt(2, 20), 14
    a = probabilities(subject.model, ids)
    found = run(Sparsity(), subject, FULL, samples_of(ids, n), options={"thresholds": (0.05,)})
    for b in range(2):
        few = {0.01: [], 0.05: []}
        enough, top = [], []
        for layer in range(2):
            for head in range(4):
                for t in range(n, 20):
                    row = sorted(a[layer, b, head, t, : t + 1].tolist(), reverse=True)
                    for threshold, shares in few.items():
                        shares.append(sum(value < threshold * row[0] for value in row) / (t + 1))
                    enough.append(next(i for i in range(1, t + 2) if sum(row[:i]) >= 0.9) / (t + 1))
                    top.append(sum(row[: int(0.3 * (t + 1) + 1e-6)]))
        want = {"sparsity": few[0.01], "sparsity_0.05": few[0.05], "tokens_for_90": enough, "top_30": top}
        want["layer_0_sparsity"], want["layer_1_sparsity"] = few[0.01][: 4 * 6], few[0.01][4 * 6 :]
        assert 0 < statistics.mean(few[0.01]) < statistics.mean(few[0.05])
        for name, values in want.items():
            assert found[b][name] == pytest.approx(statistics.mean(values), abs=1e-6)
        assert "mass" not in found[b]


def test_mass_is_the_full_caches_attention_on_what_the_query_finds():
    subject, ids, n = subject_of(GQA), prompt(2, 20), 12
    a = probabilities(subject.model, ids)
    found = run(Sparsity(), subject, Setting("window", 0.5), samples_of(ids, n))
    for b in range(2):
        # six tokens are held when a query comes, and it sees itself
        mass = [a[:, b, :, t, t - 6 : t + 1].sum(-1).mean() for t in range(n, 20)]
        held = sum(7 / (t + 1) for t in range(n, 20)) / 8
        assert found[b] == pytest.approx({"mass": sum(mass).item() / 8, "held": held}, abs=1e-6)
    whole = run(Sparsity(), subject, Setting("window", 1.0), samples_of(ids, n))
    assert whole[0] == pytest.approx({"mass": 1.0, "held": 1.0})


def test_mass_of_heads_that_share_keys_and_hold_different_ones():
    subject, ids, n = subject_of(GQA), prompt(2, 20), 12
    a = probabilities(subject.model, ids)
    mass, found = [], run(Sparsity(), subject, Setting("h2o", 0.5), samples_of(ids, n))
    with kvpatch.patched(subject.model, "h2o", 0.5), torch.no_grad():
        cache = subject.model(ids[:1, :n], use_cache=True).past_key_values
        for t in range(n, 20):
            for layer in range(2):
                for head in range(4):
                    held = cache.positions(layer)[0, head // 2].tolist()
                    mass.append(sum(a[layer, 0, head, t, i].item() for i in [*held, t] if i >= 0))
            subject.model(ids[:1, t : t + 1], past_key_values=cache, use_cache=True)
    assert found[0]["mass"] == pytest.approx(statistics.mean(mass), abs=1e-6)


def test_thresholds_are_named_in_the_summary():
    task, subject = Sparsity(), runs.load("llama-0", Request())
    task.samples(subject, Request(count=1, options={"thresholds": 0.2}), 0)
    assert task.metrics["sparsity_0.2"] == "share of keys that get less than 0.2 of their row's maximum"
    assert "sparsity_0.2" not in Sparsity.metrics
    for bad in ("few", 2.0, (0.1, 0)):
        with pytest.raises(KVPatchError, match="must be shares of a row's maximum, as in -o thresholds=0.001,0.05"):
            task.samples(subject, Request(options={"thresholds": bad}), 0)
    assert [setting.policy for setting in task.settings(Request(), subject)[:3]] == ["full", "random", "window"]


# ---- robustness ----


def test_deviations_of_a_hand_made_attention():
    a = torch.zeros(1, 1, 5, 5).double()
    a[0, 0, 1:4, 0] = torch.tensor([0.6, 0.2, 0.1])
    a[0, 0, 2:5, 1] = torch.tensor([0.3, 0.5, 0.3])
    a[0, 0].diagonal().fill_(9.0)  # a token's own row is left out
    found = robustness.deviations(a, 3)
    assert found.shape == (1, 1, 2, 3)
    rows = ([0.6, 0.2, 0.1], [0.3, 0.5, 0.3])
    want = [[statistics.pstdev(row[:m]) for m in (1, 2, 3)] for row in rows]
    torch.testing.assert_close(found[0, 0], torch.tensor(want).double())


def test_phases_of_hand_made_curves():
    std = torch.tensor([[0, 3, 2, 1, 1.0], [0, 1, 2, 3, 4.0], [0, 1, 4, 4, 3.6], [0, 1, 4, 3, 3.7], [0, 0, 0, 0, 0.0]])
    found = {name: one[0, 0].tolist() for name, one in robustness.phases(std.double()[None, None], 3).items()}
    assert found == {
        "peak_step": [2, 5, 3, 3, 1],
        "share_early": [1, 0, 1, 1, 1],
        "share_fifth": [0, 0, 0, 0, 1],
        "declines": [1, 0, 1, 0, 0],
    }


def test_robustness_of_a_model_by_plain_loops():
    subject, ids = subject_of(GQA), prompt(2, 20)
    a = probabilities(subject.model, ids).double().unflatten(2, (2, 2)).mean(3)  # of each KV head
    found = run(Robustness(), subject, FULL, samples_of(ids, 12), options={"early": 4})
    for b in range(2):
        curves = []
        for layer in range(2):
            for head in range(2):
                for i in range(10):
                    got = a[layer, b, head, i + 1 : i + 11, i].tolist()
                    curves.append([statistics.pstdev(got[:m]) for m in range(1, 11)])
        peaks = [curve.index(max(curve)) + 1 for curve in curves]
        mean = [statistics.mean(column) for column in zip(*curves, strict=True)]
        want = {f"std_{m}": mean[m - 1] for m in (2, 4, 8)}
        want["peak_step"], want["curve_peak"] = statistics.mean(peaks), mean.index(max(mean)) + 1
        want["share_early"] = statistics.mean(peak <= 4 for peak in peaks)
        want["share_fifth"] = statistics.mean(peak <= 2 for peak in peaks)
        want["declines"] = statistics.mean(curve[-1] <= 0.9 * max(curve) for curve in curves)
        shuffled = {name: found[b].pop(name) for name in ("shuffled_early", "shuffled_declines")}
        assert found[b] == pytest.approx(want, abs=1e-6)
        assert all(0 < value < 1 for value in shuffled.values())


def test_what_comes_late_peaks_late_unless_shuffled():
    a = torch.zeros(1, 1, 20, 20).double()
    for i in range(10):
        a[0, 0, i + 10, i] = 1.0  # the tenth query alone
    found = Robustness()._of(a, 10, Request(options={"early": 5}), 0)
    assert (found["share_early"], found["peak_step"], found["declines"]) == (0, 10, 0)
    assert 0.2 < found["shuffled_early"] < 0.8
    again = Robustness()._of(a, 10, Request(options={"early": 5}), 0)
    assert again["shuffled_early"] == found["shuffled_early"]


def test_a_sliding_window_is_followed_no_further_than_it_reaches():
    subject, ids = subject_of("mistral_sliding"), prompt(1, 40)  # a window of twelve
    found = run(Robustness(), subject, FULL, samples_of(ids, 30))[0]
    assert [name for name in found if name.startswith("std_")] == ["std_2", "std_4", "std_8"]
    assert Robustness().settings(Request(policies=("h2o",)), subject) == [FULL]
    with pytest.raises(KVPatchError, match=r"early=0\.5 must be a number of queries, 1 or more"):
        Robustness().samples(subject, Request(options={"early": 0.5}), 0)


# ---- perturbation ----


def moved(l1, held) -> Moved:
    l1 = torch.tensor(l1)
    return Moved(l1, l1.sum(-1), l1, [torch.tensor(one)[:, :, None].bool() for one in held], torch.zeros(2, 1))


def test_heads_lower_by_hand():
    # one layer, two rows, two KV heads with two query heads each; held [B,H,T]
    base = moved([[[1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 1.0, 1.0]]], [[[[1, 0], [1, 0]], [[1, 0], [1, 0]]]])
    other = moved([[[0.5, 2.5, 2.0, 3.0], [0.1, 0.1, 0.1, 0.1]]], [[[[0, 1], [1, 0]], [[1, 0], [1, 0]]]])
    # of row 0 the first KV head holds something else: of its two query heads one improves; row 1 holds the same
    assert perturb.heads_lower(base, other) == [0.5, None]


def test_the_base_of_two_stage_selection():
    base = perturb.base_of(Setting("critical_adakv", 0.2, {"window": 8, "alpha": 0.25, "norm": 2}))
    assert base == Setting("adakv", 0.2, {"window": 8})
    assert perturb.base_of(Setting("critical(adaptive(roco))", 0.2)) == Setting("adaptive(roco)", 0.2)
    for name in ("snapkv", "h2o", "adaptive(critical(roco))"):
        assert perturb.base_of(Setting(name, 0.2)) is None


@pytest.mark.parametrize("name", ["mistral-0", "gpt2-0"])
def test_figures_are_those_of_the_study(name):
    subject, task, k = runs.load(name, Request()), Perturbation(), 0.2
    samples = task.samples(subject, Request(count=2), 0)
    assert [sample.group["scenario"] for sample in samples[::2]] == ["recall in", "recall after", "needle in", "needle after"]
    scenario = samples[2:4]
    text = perturbation.texts(name, subject.tokenizer, 2)["recall after"]
    assert torch.equal(torch.stack([sample.data[1] for sample in scenario]), text.tokens_BT)
    tokens, n = text.tokens_BT[:, :-1], text.n
    layers, full = perturbation.look(subject.model, tokens, n)
    pair = [perturbation.kept_sets(subject.model, tokens, n, one, k, window=8) for one in ("snapkv", "critical_snapkv")]
    norms = [layer.values().abs().sum(-1) for layer in layers]
    want = perturbation.compare(layers, (pair[0][0], pair[1][0]), norms)
    settings = {setting.policy: setting for setting in task.settings(Request(budgets=(k,)), subject)}
    for i, policy in enumerate(("snapkv", "critical_snapkv")):
        found = run(task, subject, settings[policy], scenario)
        mean = {metric: sum(line[metric] for line in found) / 2 for metric in found[0] if metric != "heads_lower"}
        for metric in ("l1", "layer_l1", "mass"):
            assert mean[metric] == pytest.approx(want[metric][i], abs=6e-5)
        assert mean["right"] == text.right(pair[i][1])
        assert sum(mean[f"layer_{at}_l1"] for at in range(3)) / 3 == pytest.approx(mean["layer_l1"])
    for b, line in enumerate(found):  # of the last, critical_snapkv
        one = [perturbation.Layer(x.x_BNRT[b : b + 1], x.v_BNTD[b : b + 1], x.w_NDE, x.y_BRE[b : b + 1]) for x in layers]
        sets = tuple([kept[b : b + 1] for kept in held] for held, _ in pair)
        alone = perturbation.compare(one, sets, [norm[b : b + 1] for norm in norms])
        assert line["heads_lower"] == pytest.approx(alone["lower_row_heads"], abs=1e-4)
    assert [line["right"] for line in run(task, subject, FULL, scenario)] == pytest.approx(
        tasks.exact_match(subject.model, text.batch).double().mean(-1).tolist()
    )
    assert text.right(full[:, n - 1 :]) > text.right(pair[0][1])


def test_a_policy_that_evicts_at_each_step_is_asked_with_what_it_holds_then():
    subject, ids, n = subject_of(GQA), prompt(2, 20), 12
    found = run(Perturbation(), subject, Setting("window", 0.5), fed_but_last(ids, n))
    layers, _ = perturbation.look(subject.model, ids[:, :-1], n)
    for b in range(2):
        l1, by_layer = [], []
        for layer in layers:
            for t in range(n, 19):
                total = torch.zeros(32).double()
                for head in range(4):
                    x, u = layer.x_BNRT[b, head, t - n, : t + 1], layer.values()[b, head, : t + 1]
                    few = x[t - 6 :].softmax(-1) @ u[t - 6 :]
                    total += x.softmax(-1) @ u - few
                    l1.append((x.softmax(-1) @ u - few).abs().sum().item())
                by_layer.append(total.abs().sum().item())
        assert found[b]["l1"] == pytest.approx(statistics.mean(l1))
        assert found[b]["layer_l1"] == pytest.approx(statistics.mean(by_layer))
        assert "heads_lower" not in found[b]


def test_resumed_runs_give_the_same_figures_and_the_base_is_run_once(monkeypatch):
    subject, ids = subject_of("mistral"), prompt(3, 24)
    samples, options, calls = fed_but_last(ids, 16), {"window": 2}, []
    monkeypatch.setattr(perturb, "watch", lambda *args: calls.append(args[1].policy) or watch(*args))
    task = Perturbation()
    for policy in ("snapkv", "critical_snapkv"):
        whole = run(task, subject, Setting(policy, 0.5, options), samples)
    assert calls == ["snapkv", "critical_snapkv"]
    rest = run(Perturbation(), subject, Setting("critical_snapkv", 0.5, options), samples[1:], batch=1)
    for one, other in zip(whole[1:], rest, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


def test_other_models_need_a_text_and_seeds_bring_other_rows(tmp_path):
    subject, task = runs.load("llama-0", Request()), Perturbation()
    first, second = ([s.digest for s in task.samples(subject, Request(count=2), seed)] for seed in (0, 1))
    assert not set(first) & set(second) and len(second) == 8
    (tmp_path / "a.txt").write_text("k01 v02 " * 99)
    request = Request(count=2, data=str(tmp_path / "a.txt"), options={"length": 40, "steps": 8})
    samples = task.samples(subject, request, 0)
    assert [(s.n, len(s.data[0]), s.data[2], s.group) for s in samples] == [(32, 39, None, {"scenario": "text"})] * 2
    found = run(task, subject, FULL, samples)
    logits_BTV = subject.model(torch.stack([s.data[1] for s in samples])).logits
    for b, sample in enumerate(samples):
        guesses = logits_BTV[b, 31:-1].argmax(-1) == sample.data[1][32:]
        assert found[b] == {"right": guesses.double().mean().item()}
    own = subject_of("llama")
    with pytest.raises(KVPatchError, match="llama has no tokenizer"):
        task.samples(own, Request(), 0)
    assert [setting.options for setting in task.settings(Request(budgets=(0.2,)), own)] == [{}] * 5


# ---- what they share ----


def test_a_model_without_an_adapter_says_so():
    with pytest.raises(KVPatchError, match=r"No adapter for Linear\. Known architectures: "):
        look(torch.nn.Linear(2, 2), torch.zeros(1, 2).long(), 0)


def test_what_is_remembered_is_bounded():
    made, memory = [], Memory(2)
    for model, key in (("a", 1), ("a", 2), ("a", 1), ("a", 3), ("a", 1), ("b", 1), ("b", 1)):
        assert memory.get(model, key, lambda key=key: made.append(key) or key * 10) == key * 10
    assert made == [1, 2, 3, 1, 1]
    assert len(memory.found) == 1


def test_a_full_cache_holds_all_it_has_seen():
    model, ids = make(GQA), prompt(2, 9)
    watched = watch(model, FULL, ids, 6)
    assert watched.held[0].shape == (2, 2, 4, 9)
    assert watched.held[1].sum(-1)[1].tolist() == [[6, 7, 8, 9]] * 2
    torch.testing.assert_close(watched.logits_BSV, model(ids).logits[:, 5:])
    asked = watched.asked(0, 6, 4)
    assert asked.shape == (2, 4, 3, 9) and asked[0, 3].sum(-1).tolist() == [7, 8, 9]


def test_lines_of_a_picture():
    def line(model, setting, k, **metrics):
        return {"recipe": model, "model": model, "seed": 0, "sample": "0", "name": setting, "k": k, "metrics": metrics}

    lines = [line("a", "full", 1.0, std_4=2.0, std_2=1.0), line("b", "full", 1.0, std_2=3.0)]
    table = Table([*lines, line("a", "h2o", 0.2, std_2=5.0), line("a", "h2o", 0.4, std_2=6.0)])
    places = {"std_4": 4, "std_2": 2, "std_8": 8}
    assert by_model(table, places) == {"a": [(2, 1.0), (4, 2.0)], "b": [(2, 3.0)]}
    assert by_setting(table, 0.4, places) == {"h2o": [(2, 6.0)]}


@pytest.mark.parametrize("kind", [Robustness, Sparsity, Perturbation])
def test_pictures_are_drawn(kind, tmp_path):
    task, subject = kind(), subject_of(GQA)
    setting = Setting("window", 0.5) if kind is Perturbation else FULL
    metrics = run(task, subject, setting, fed_but_last(prompt(1, 20), 12))[0]
    head = {"recipe": "llama", "model": GQA, "seed": 0, "sample": "0", "name": setting.policy, "k": setting.k}
    task.pictures(Table([head | {"metrics": metrics}]), tmp_path)
    (picture,) = tmp_path.iterdir()
    assert picture.stat().st_size > 10_000
