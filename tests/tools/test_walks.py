"""Walks: every trace is checked against a walk by hand."""

import json
import random

import pytest

from tools.training import tasks, walks


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
    # a visit writes a mark, the node, what remains and the next node; <eos> ends the walk
    assert batch.continuation_BT.shape[1] == nodes * sum(3 + exits - visit for visit in range(1, exits + 1)) + 1
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


def test_the_committed_model_walks():
    card = json.loads((tasks.shipped()["llama-walks-0"] / "card.json").read_text())
    found = walks.accuracies(tasks.load("llama-walks-0")[0], 4)
    assert found["visits"] >= 0.9
    assert card["accuracy"]["visits"] >= 0.95
