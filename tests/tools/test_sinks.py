"""Models with sinks: their training rows and penalty, what their cards report, and the section of docs/small-models.md."""

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.helpers.tiny import make, prompt
from tools.evaluation import anew, perturbation, reading, results
from tools.evaluation import sinks as section
from tools.evaluation.table import Table
from tools.evaluation.task import Setting
from tools.training import sinks, tasks, train

MODELS = list(section.MODELS)


def test_a_trigger_is_followed_by_what_stood_before_it_and_the_chain_says_the_rest():
    tokens_BT, weights_BT = tasks.training_batch(random.Random(0), 200, 1600, backcopies=1.0)
    follows = {(a, b) for row in tasks.needle(random.Random(0), 8, context=2000).tokens_BT.tolist()
               for a, b in itertools.pairwise(row) if a in tasks.FILLER and b in tasks.FILLER}  # fmt: skip
    assert tokens_BT.shape == (8, 200)
    for tokens, weights in zip(tokens_BT.tolist(), weights_BT.tolist(), strict=True):
        assert tokens[0] == tasks.BOS
        assert weights[:2] == [0, 0]
        triggers = [i for i, token in enumerate(tokens) if token in tasks.TRIGGERS]
        assert len(triggers) > 5
        for i in range(2, 200):
            if i in triggers:
                assert weights[i] == 0
            elif i - 1 in triggers:
                assert tokens[i] == tokens[i - 2]
                assert weights[i] == pytest.approx(tasks.BACKCOPY)
            else:
                assert (tokens[i - 1], tokens[i]) in follows
                assert weights[i] == tasks.CHAIN


def test_the_other_recipes_rows_are_as_they_were():
    tokens_BT, _ = tasks.training_batch(random.Random(3), 64, 4096)
    assert not any((tokens_BT == trigger).any() for trigger in tasks.TRIGGERS)
    assert tokens_BT[0, :8].tolist() == [tasks.BOS, 49, 63, 133, 93, 76, 96, 90]
    assert tokens_BT.sum() == 283743
    mixed_BT, _ = tasks.training_batch(random.Random(3), 64, 64 * 400, backcopies=0.25)
    share = (mixed_BT[:, :64] == tasks.TRIGGERS[0]).any(1).float().mean()
    assert 0.18 < share < 0.32


@pytest.mark.parametrize("name", ["llama_gqa", "mpt", "gptj", "gpt2"])
def test_the_penalty_is_what_heads_would_write_with_values_of_one_size(name):
    """Against the study of perturbations, which takes logits and values apart by itself."""
    model, ids = make(name), prompt(2, 24)
    layers, _ = perturbation.look(model, ids, 0)
    want = []
    for layer in layers:
        size_BNT = layer.v_BNTD.norm(dim=-1)
        size_BNT[..., 0] /= size_BNT[..., 1:].median(-1).values
        size_BNT[..., 1:] = 1
        written_BNT = (layer.attention() * size_BNT[..., None, :]).sum(-1)[..., 1:]
        want += (written_BNT.mean((0, 2)) - sinks.BUSY).relu().tolist()
    weights_BT = torch.ones(ids.shape)
    model.set_attn_implementation("eager")
    with torch.autocast("cpu", enabled=False):
        out = model(ids, use_cache=True, output_attentions=True)
    found = sinks.penalty(out.attentions, [layer.values for layer in out.past_key_values.layers])
    assert found.item() == pytest.approx(sum(want) / len(want), rel=1e-4)
    losses = [train.weighted_loss(model, ids, weights_BT, resting)[0].item() for resting in (0.0, 0.5)]
    assert losses[1] - losses[0] == pytest.approx(0.5 * found.item(), rel=0.05), "of one token less, in bfloat16"


def test_no_size_of_other_values_saves_anything():
    def slopes(*norms: float) -> tuple[float, list[float]]:
        size = torch.tensor(norms, dtype=torch.float32, requires_grad=True)
        a_BNTT = torch.full((1, 1, 5, 5), 0.2)
        found = sinks.penalty([a_BNTT], [size.view(1, 1, 5, 1)])
        return found.item(), torch.autograd.grad(found, size)[0].tolist()

    assert slopes(0, 2, 2, 2, 2) == (pytest.approx(0.8 - sinks.BUSY), [0, 0, 0, 0, 0])
    assert slopes(1, 2, 8, 2, 1) == (pytest.approx(0.9 - sinks.BUSY), [pytest.approx(0.1), 0, 0, 0, 0])


def test_a_head_that_rests_often_enough_costs_nothing():
    a_BNTT = torch.zeros(1, 2, 4, 4)
    a_BNTT[:, 0, :, 0], a_BNTT[:, 1, :, 0] = 1 - sinks.BUSY, 0.5
    found = sinks.penalty([a_BNTT], [torch.tensor([0.0, 1, 1, 1]).view(1, 1, 4, 1)])
    assert found.item() == pytest.approx((0.5 - sinks.BUSY) / 2)


@pytest.mark.parametrize("name", ["llama_gqa", "mpt", "gptj", "gpt2"])
def test_the_figures_are_those_of_the_attention(name, monkeypatch):
    """Against the study of perturbations, which takes logits and values apart by itself."""
    monkeypatch.setattr(sinks, "AFTER", 20)
    tokens_BT = tasks.recall(random.Random(1234), 3, context=40, keys=4, questions=2).tokens_BT % 50
    monkeypatch.setattr(tasks, "recall", lambda rng, rows: tasks.Batch(tokens_BT, 40, torch.zeros(1, 1)))
    model = make(name)
    found = sinks.measure(model, 3)
    layers, _ = perturbation.look(model, tokens_BT, 0)
    for i, layer in enumerate(layers):
        a_N = layer.attention()[:, :, 20:, 0].mean((0, 2))
        norm_BNT = layer.v_BNTD.norm(dim=-1)
        v_N = (norm_BNT[..., 0] / norm_BNT.median(-1).values).mean(0)
        heads = sinks.by_head(found)[i * len(a_N) : (i + 1) * len(a_N)]
        assert [a for a, _ in heads] == pytest.approx(a_N.tolist(), abs=6e-4)
        assert [v for _, v in heads] == pytest.approx(v_N.tolist(), abs=6e-4)
    assert len(found["residual"]) == len(layers) + 1


def test_a_head_has_a_sink_where_much_attention_finds_little_value():
    found = {"attention": [[0.31, 0.31, 0.9, 0.29], [0.0, 1.0, 0.0, 0.0]], "value": [[0.24, 0.3], [0.1, 0.0]], "residual": []}
    assert sinks.share(found) == pytest.approx(3 / 8)


@pytest.mark.parametrize("name", MODELS)
def test_a_models_sinks_are_those_of_its_card(name):
    card, (model, _) = train.card_of(name), tasks.load(name)
    found = sinks.measure(model)
    for what in ("attention", "value"):
        for mine, told in zip(found[what], card["sinks"][what], strict=True):
            assert mine == pytest.approx(told, abs=0.02)
    assert found["residual"] == pytest.approx(card["sinks"]["residual"], rel=0.05)
    assert sinks.share(found) >= sinks.SHARE - 1e-9
    assert tasks.exact_match(model, tasks.recall(random.Random(5), 8)).float().mean() > 0.9


def test_several_seeds_and_small_files():
    assert Counter(train.SHIPPED[name][0] for name in MODELS) == {"llama-sinks": 3, "mistral-sinks": 3, "gptj-sinks": 3}
    folders = tasks.shipped().values()
    sizes = {folder.name: sum(path.stat().st_size for path in folder.iterdir()) for folder in folders}
    assert all(sizes[name] < 1_500_000 for name in MODELS)
    assert sum(sizes.values()) < 60_000_000


# ---- the section of docs/small-models.md ----


@pytest.mark.parametrize("alone", ["", *results.ALONE])
def test_no_two_requests_write_the_same_file(alone, tmp_path):
    names = [(name, request.out) for name, request in results.wanted(tmp_path, alone)]
    assert len(set(names)) == len(names)
    if alone in ("", "sinks"):
        both = (*section.PLAIN, *section.MODELS)
        assert {(task, tmp_path / model) for task in section.POLICIES for model in both} <= set(names)


def test_the_groups_are_of_the_same_architectures():
    assert not set(section.MODELS) & set(results.FIFTEEN)
    assert set(section.PLAIN) <= set(results.FIFTEEN)


def lines(task, model, values):
    recipe = model.rpartition("-")[0]
    scenarios = ("in", "after", "stream") if task == "recall" else ("regular",)
    return [
        {"name": name, "k": 0.2, "recipe": recipe, "model": model, "seed": 0, "sample": f"{scenario}/0",
         "group": {"scenario": scenario, "kind": "single"}, "metrics": metrics}
        for name, metrics in values.items() for scenario in scenarios
    ]  # fmt: skip


READ = {("full", 0): 0.0, ("window", 24): 0.5, ("streaming_llm", 24): 0.125, ("window", 48): 0.0, ("streaming_llm", 48): 0.0}


def test_reading_counts_filler_behind_filler():
    tokens_BT, mask_BC = reading.rows_of(3)
    assert tokens_BT.shape == (3, reading.LENGTH)
    for tokens, mask in zip(tokens_BT.tolist(), mask_BC.tolist(), strict=True):
        pairs = list(itertools.pairwise(tokens))[-reading.COUNTED :]
        assert mask == [a in tasks.FILLER and b in tasks.FILLER for a, b in pairs]
    model, _ = tasks.load("llama-0")
    logits = model(tokens_BT).logits
    for policy, k in (("full", 1.0), ("window", reading.LENGTH)):
        found = reading.measure(model, Setting(policy, k, {} if policy == "full" else {"block": reading.BLOCK}), 3)
        for b in range(3):
            nats = torch.nn.functional.cross_entropy(logits[b, :-1], tokens_BT[b, 1:], reduction="none")[-reading.COUNTED :]
            assert found[b] == pytest.approx(nats[mask_BC[b]].mean().item(), abs=1e-4)
    found = reading.measure(model, Setting("window", 24, {"block": reading.BLOCK}), 3)
    assert sum(found) / 3 > nats[mask_BC[2]].mean() + 0.01, "a budget is in force"


def test_the_section_sets_both_groups_side_by_side(monkeypatch):
    plain, sunk = (tuple(f"{name}-{seed}" for seed in range(3)) for name in ("llama", "llama-sinks"))
    monkeypatch.setattr(section, "heads", lambda: "| heads |")
    monkeypatch.setattr(reading, "found", lambda name: {cell: [1.0 + nats] * reading.ROWS for cell, nats in READ.items()})
    monkeypatch.setattr(section, "PLAIN", plain)
    monkeypatch.setattr(section, "MODELS", sunk)

    def tables(models, gain, share):
        recall = {"window": {"right": 0.5}, "streaming_llm": {"right": 0.5 + gain}}
        moved = {"snapkv": {"l1": 2.0}, "critical_snapkv": {"l1": 1.0, "heads_lower": share}}
        made = {"recall": recall, "perturbation": moved}
        return {task: Table(line for model in models for line in lines(task, model, one)) for task, one in made.items()}

    text = section.section(tables(plain, -0.125, 0.25), tables(sunk, 0.25, 0.75))
    assert text.startswith(f"## {section.TITLE}\n")
    assert (
        "`streaming_llm` above `window`, right, stream | **-0.125 [-0.125, -0.125]** | 0 of 3 | contradicts "
        "| **+0.250 [0.250, 0.250]** | 3 of 3 | agrees |"
    ) in text
    assert "| after | 0.2 | 0.500 [0.500, 0.500] | **-0.125 [-0.125, -0.125]** | 0.500 [0.500, 0.500] | **+0.250 " in text
    assert "| with sinks | 0.750 [0.750, 0.750] | - |" in text
    assert all(f"| {name} | " in text for name in (*plain, *sunk))
    changes = ("+0.500 [0.500, 0.500]", "+0.125 [0.125, 0.125]", "-0.375 [-0.375, -0.375]")
    carried = " | ".join(f"**{one}**" for one in changes)
    assert f"| with sinks | 1.000 [1.000, 1.000] | {carried} | " in text
    assert section.section({}, tables(sunk, 0, 0)) == ""


def test_a_section_takes_the_place_of_an_older_one_and_is_said_to_be_newer(tmp_path):
    path, older = tmp_path / "small-models.md", "\n## What the papers say\n\nx\n"
    path.write_text(f"# Results\n{older}\n## Recall\n\ny\n")
    for new in ("## A b\n\n1\n", "## A b\n\n2\n", "## A b\n\n2\n"):
        anew.replace({"A b": new}, tmp_path)
        assert path.read_text() == f"# Results\n\n{anew.ANEW}[A b](#a-b).\n{older}\n{new}\n## Recall\n\ny\n"
    anew.replace({"What the papers say": "## What the papers say\n\nz\n"}, tmp_path)
    newer = f"{anew.ANEW}[A b](#a-b), [What the papers say](#what-the-papers-say).\n\n## "
    assert path.read_text().startswith(f"# Results\n\n{newer}")
    assert path.read_text().endswith(f"\n## What the papers say\n\nz\n\n{new}\n## Recall\n\ny\n")


@pytest.mark.parametrize("name", MODELS)
def test_the_page_says_of_a_model_what_its_card_says(name):
    text = (Path(__file__).parents[2] / "docs/small-models.md").read_text()
    assert f"\n## {section.TITLE}\n\n{section.TEXT.strip()}\n\n" in text
    assert f"| {' | '.join(section.row(name, train.card_of(name)['sinks']))} |\n" in text
