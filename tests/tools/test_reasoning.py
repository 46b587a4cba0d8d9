"""Walks: every trace is checked against a walk by hand, and what is counted of a text that goes wrong."""

import json
import random

import pytest
import torch
import typer
from typer.testing import CliRunner

from kvpatch import KVPatchError
from tools.evaluation import __main__ as evaluate
from tools.evaluation import page, runs
from tools.evaluation.reasoning import KEPT, RHYTHMS, Reasoning, held, loops, score, share_right
from tools.evaluation.table import Table
from tools.evaluation.task import FULL, Request, Setting
from tools.training import tasks, train, walks

# ---- the task ----


def book(words: list[str]) -> tuple[dict[str, list[str]], str]:
    """The exits of a prompt's nodes and its start, read without the generator."""
    assert words[0] == "<bos>" and words[-2] == "<q>"
    records, nodes = words[1:-2], len(set(words[1:-2]))
    size = len(records) // nodes
    return {records[i]: records[i + 1 : i + size] for i in range(0, len(records), size)}, words[-1]


def walked(exits: dict[str, list[str]], start: str) -> list[str]:
    """The trace of a walk that counts with indices instead of lists that shrink."""
    taken, here, out = dict.fromkeys(exits, 0), start, []
    while taken[here] < len(exits[here]):
        taken[here] += 1
        out += [f"m{taken[here]}", here, *exits[here][: len(exits[here]) - taken[here]]]
        here = exits[here][-taken[here]]
        out.append(here)
    return [*out, "<eos>"]


@pytest.mark.parametrize(("nodes", "exits"), [(4, 2), (5, 4), (12, 3), (32, 4)])
def test_a_trace_is_what_a_walk_by_hand_writes_and_takes_every_edge_once(nodes, exits):
    batch = walks.walk(random.Random(0), 5, nodes=nodes, exits=exits)
    assert batch.prompt_length == walks.prompt_tokens(nodes, exits)
    assert batch.continuation_BT.shape[1] == walks.trace_tokens(nodes, exits)
    for prompt, trace in zip(batch.prompt_BT.tolist(), batch.continuation_BT.tolist(), strict=True):
        graph, start = book([tasks.WORDS[token] for token in prompt])
        assert len(graph) == nodes
        for node, out in graph.items():
            assert len(set(out)) == exits and node not in out
        trace = [tasks.WORDS[token] for token in trace]
        assert trace == walked(graph, start)
        visits = " ".join(trace[:-1]).replace("m", "|m").split("|")[1:]
        edges = {(visit.split()[1], visit.split()[-1]) for visit in visits}
        assert len(visits) == len(edges) == nodes * exits
        assert trace[-2] == start, "an Euler circuit ends where it began"


def test_a_visit_needs_tokens_at_many_distances():
    """A window has no size that would do: some records are needed at once, others after most of the trace."""
    trace = walks.walk(random.Random(0), 1).continuation_BT[0].tolist()
    last, distances = {}, []
    for i, token in enumerate(trace):
        if token in tasks.MARKS:
            node = trace[i + 1]
            distances += [i - last[node]] if node in last else []
            last[node] = i
    assert min(distances) < 20 < 250 < max(distances)


@pytest.mark.parametrize(("nodes", "exits"), [(4, 4), (65, 2), (20, 9), (8, 0)])
def test_graphs_that_cannot_be_are_refused_in_words(nodes, exits):
    with pytest.raises(ValueError, match=r"nodes=\d+: a graph|exits=\d+: 1 to 8"):
        walks.walk(random.Random(0), 1, nodes=nodes, exits=exits)


def test_training_rows_weigh_the_trace_alone():
    tokens_BT, weights_BT = walks.training_batch(random.Random(1), 12, 3, 2048)
    assert tokens_BT.numel() <= 2048
    for row, weights in zip(tokens_BT.tolist(), weights_BT.tolist(), strict=True):
        asked, end = row.index(tasks.QUESTION) + 2, row.index(tasks.EOS) + 1
        assert weights == [0.0] * asked + [tasks.HARD] * (end - asked) + [0.0] * (len(row) - end)
        graph, start = book([tasks.WORDS[token] for token in row[:asked]])
        assert [tasks.WORDS[token] for token in row[asked:end]] == walked(graph, start)


def test_training_goes_on_where_it_stopped_to_the_same_weights(tmp_path, monkeypatch):
    recipe = train.Recipe(
        "llama", train.RECIPES["llama-walks"].config | {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16},
        stages=((4, 2, 88), (5, 2, 88)), walks=True, passes=-1.0, max_steps=6,
    )  # fmt: skip
    whole, steps, _ = train.train_synthetic(recipe, 3)
    assert steps == 6
    saved = tmp_path / "new" / "checkpoint.safetensors"
    train.train_synthetic(train.replace(recipe, max_steps=4), 3, checkpoint=saved, every=2)
    assert saved.is_file()
    assert train.Checkpoint.cpu_seconds(saved) > 0
    assert train.Checkpoint.cpu_seconds(tmp_path / "none") == 0
    again, steps, _ = train.train_synthetic(recipe, 3, checkpoint=saved)
    assert steps == 6
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


# ---- what is counted ----


@pytest.mark.parametrize(
    ("text", "does"),
    [
        ([7, 7, 9, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4], True),
        ([1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 5], False),
        ([1, 2, 3, 4] * 2, False),
        ([1, 2, 3] * 3, False),  # nine tokens are too few
        ([5] * 12, True),
        ([5] * 11, False),
        ([1, 2] * 6, True),
        ([*range(5)] * 3 + [9], False),  # it got out of the loop
        ([*range(100)] * 3, True),
        ([], False),
    ],
)
def test_a_loop_is_the_same_words_three_times_at_the_end(text, does):
    assert loops(text) is does


def test_right_traces_do_not_loop():
    assert not any(loops(row) for row in walks.walk(random.Random(2), 8).continuation_BT.tolist())


def test_visits_are_counted_to_the_first_mistake_and_one_by_one():
    trace = walks.walk(random.Random(0), 1, nodes=4, exits=2).continuation_BT[0].tolist()
    ends = walks.visits(trace)
    assert len(ends) == 8 and ends[-1] == len(trace) - 1 and trace[-1] == tasks.EOS
    assert score(trace, trace) == {"reached": 1.0, "traces": True, "loops": False}
    for i in range(8):
        wrong = list(trace)
        wrong[ends[i] - 1] = tasks.PAD
        assert score(wrong, trace) == {"reached": i / 8, "traces": False, "loops": False}
        assert share_right(wrong, trace) == 7 / 8, "later visits are right"
    assert score(trace[: ends[2]], trace)["reached"] == 3 / 8, "a text that stops early"
    assert score([], trace)["reached"] == 0.0


# ---- budgets ----


@pytest.mark.parametrize(("way", "k"), [("every token", 259), (KEPT, 96), ("every 32", 228), ("every 128", 132)])
def test_a_head_never_holds_more_than_the_budget(way, k):
    setting = next(one for one in Reasoning().settings(Request(policies=("h2o",), budgets=(0.35,)), None) if way in one.name)
    own = held(setting, 163, 577)
    assert own.k == k
    kept = 163 if way == KEPT else 0
    assert own.k + kept + RHYTHMS[way] - 1 == int(0.35 * 740)


def test_policies_run_in_the_ways_that_they_have():
    names = [one.name for one in Reasoning().settings(Request(policies=("h2o", "raas")), None)]
    raas = [f"raas, {way}" for way in (KEPT, "every 32", "every 128")]
    assert names[:8] == ["full", *(f"h2o, {way}" for way in RHYTHMS), *raas]
    ways = {one.name: one.options["schedule"] for one in Reasoning().settings(Request(policies=("h2o", "raas")), None)[1:]}
    assert {name for name, schedule in ways.items() if schedule == "decode"} == {f"h2o, {KEPT}"} | {
        name for name in ways if name.startswith("raas")
    }


def test_policies_with_a_rhythm_run_with_one():
    names = [one.name for one in Reasoning().settings(Request(policies=("r_kv", "lazy"), budgets=(0.5,)), None)]
    assert names == ["full", *(f"{policy}, {way}" for policy in ("r_kv", "lazy") for way in ("every 32", "every 128"))]


def test_a_budget_that_leaves_nothing_is_refused_in_words():
    with pytest.raises(KVPatchError, match="a budget of 37 tokens leaves -126, too few"):
        held(Setting("h2o", 0.05, {"schedule": "decode", "every": 1}), 163, 577)
    assert held(FULL, 163, 577) is FULL


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ways": "every 7"}, "they are every token"),
        ({"nodes": 4}, "-o nodes=4: a graph with exits=4"),
        ({"nodes": 64}, "a walk has 1476 tokens, and llama-walks-0 has 1024 positions"),
    ],
)
def test_walks_that_cannot_be_are_refused(options, said):
    subject = runs.load("llama-walks-0", Request())
    request = Request(options=options, count=1)
    with pytest.raises(KVPatchError, match=said):
        Reasoning().settings(request, subject), Reasoning().samples(subject, request, 0)


def test_other_models_have_not_learned_to_walk():
    with pytest.raises(KVPatchError, match="llama-0 has not learned .*give --models llama-walks-0"):
        Reasoning().samples(runs.load("llama-0", Request()), Request(), 0)
    with pytest.raises(KVPatchError, match=r"learned|know"):
        evaluate.get_task("recall").samples(runs.load("llama-walks-0", Request()), Request(), 0)


# ---- the model and the command ----


def test_the_committed_model_walks():
    card = train.card_of("llama-walks-0")
    found = walks.accuracies(tasks.load("llama-walks-0")[0], 4)
    assert found["visits"] >= 0.9
    assert card["accuracy"]["visits"] >= 0.95


def test_the_command_measures_and_the_page_shows_it(tmp_path):
    app = typer.Typer()
    app.command()(evaluate.main)
    words = ["reasoning", "--policies", "window,h2o", "--budgets", "0.5", "--samples", "2", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*words, "-o", "nodes=8", "-o", "ways=every token,prompt kept"])
    assert done.exit_code == 0, done.output
    lines = [json.loads(row) for row in (tmp_path / "reasoning.jsonl").read_text().splitlines()]
    ways = [f"{policy}, {way}" for policy in ("window", "h2o") for way in ("every token", KEPT)]
    assert [line["name"] for line in lines[::2]] == ["full", *ways]
    assert all(set(line["metrics"]) == set(Reasoning.metrics) for line in lines)
    right = {name: sum(line["metrics"]["visits"] for line in lines if line["name"] == name) for name in ("full", ways[0])}
    assert right["full"] > right[ways[0]], "half of the text is not enough for a window"
    text = page._reasoning(Table(lines))
    assert "### Visits, k = 0.5" in text and "| `h2o` |" in text
    assert "### Above a window, k = 0.5" in text
