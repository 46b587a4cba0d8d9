"""A task with a long answer: walk through a graph and leave every node by each of its exits once, the last one first.

The prompt lists each node's exits. The trace keeps the book: a visit writes how often the node was visited, the node, which
exits remain, and the one that is taken, which is the next visit's node:

    <bos> v07 v12 v33 v05  v05 v12 v07 v33 ... <q> v07   m1 v07 v12 v33 v05   m1 v05 v12 v07 v33   m1 ...
          node, its exits                       start    first visit of v07   first visit of v05

The next visit of v07, any number of tokens later, takes up from there, writes `m2 v07 v12 v33` and goes to v33. What a visit
needs is its node's newest record: the mark alone says where the book stands, and what remains is in it and in all that the
node has written before. A record is needed once more, at a distance that the graph decides, and never again. Every edge is
taken once and the walk ends where it began (an Euler circuit), so that there is one right trace, and a visit that takes up
from an older record walks in circles. Words and tokenizer are those of tasks.py. Dimension key: B rows, T tokens.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tools.training.tasks import BOS, EOS, HARD, MARKS, PAD, QUESTION, VALUES, Batch

NODES, EXITS = 32, 4
"""Of the walks that models are measured with: a prompt of 163 tokens, a trace of 577."""

Stages = Sequence[tuple[int, int, int]]
"""Nodes, exits and tokens per step of every stage of a curriculum."""

Graph = dict[int, list[int]]
"""The exits of each node; the walk takes the last one first."""


def prompt_tokens(nodes: int, exits: int) -> int:
    """<bos>, the records, <q> and the node where the walk starts."""
    return 3 + nodes * (1 + exits)


def _draw(rng: random.Random, nodes: Sequence[int], exits: int) -> Graph:
    """`exits` different exits of every node, none to itself; as many lead to a node as away from it."""
    graph: Graph = {node: [] for node in nodes}
    while len(graph[nodes[0]]) < exits:
        targets = list(nodes)
        for _ in range(200):
            rng.shuffle(targets)
            clash = [i for i, node in enumerate(nodes) if targets[i] == node or targets[i] in graph[node]]
            for i in clash:  # a swap mends most of them
                j = rng.randrange(len(nodes))
                targets[i], targets[j] = targets[j], targets[i]
            if not any(target == node or target in graph[node] for node, target in zip(nodes, targets, strict=True)):
                break
        else:
            return _draw(rng, nodes, exits)
        for node, target in zip(nodes, targets, strict=True):
            graph[node].append(target)
    return graph


def _circuit(graph: Graph, start: int) -> list[int]:
    """The nodes of a closed walk over every edge that can be reached from `start` [Hierholzer]."""
    left = {node: list(exits) for node, exits in graph.items()}
    path, circuit = [start], []
    while path:
        if left[path[-1]]:
            path.append(left[path[-1]].pop())
        else:
            circuit.append(path.pop())
    return circuit[::-1]


def draw(rng: random.Random, nodes: int, exits: int) -> tuple[Graph, int]:
    """A graph whose exits stand in an order that takes every edge once, and the node to start from.

    Raises:
        ValueError: there are not so many nodes, or too few for the exits, or not so many marks.
    """
    if not exits < nodes <= len(VALUES):
        raise ValueError(f"nodes={nodes}: a graph with exits={exits} has {exits + 1} to {len(VALUES)} nodes")
    if not 0 < exits <= len(MARKS):
        raise ValueError(f"exits={exits}: 1 to {len(MARKS)}, for every visit has a mark of its own")
    while True:
        named = rng.sample(VALUES, nodes)
        edges, start = _draw(rng, named, exits), rng.choice(named)
        walk = _circuit(edges, start)
        if len(walk) == nodes * exits + 1:  # else the graph falls apart into several
            break
    graph: Graph = {node: [] for node in named}
    for node, target in itertools.pairwise(walk):
        graph[node].insert(0, target)
    return graph, start


def prompt(graph: Graph, start: int) -> list[int]:
    records = [token for node, exits in graph.items() for token in (node, *exits)]
    return [BOS, *records, QUESTION, start]


def trace(graph: Graph, start: int) -> list[int]:
    """What is to be written behind the prompt."""
    left, node, written = {node: list(exits) for node, exits in graph.items()}, start, []
    while left[node]:
        *rest, to = left[node]
        written += [MARKS[len(graph[node]) - len(left[node])], node, *rest, to]
        left[node], node = rest, to
    return [*written, EOS]


def walk(rng: random.Random, n_sequences: int, *, nodes: int = NODES, exits: int = EXITS) -> Batch:
    """Rows of prompt and trace. The one answer of a row is its whole trace."""
    drawn = [draw(rng, nodes, exits) for _ in range(n_sequences)]
    tokens_BT = torch.tensor([prompt(*one) + trace(*one) for one in drawn])
    n = prompt_tokens(nodes, exits)
    return Batch(tokens_BT, n, torch.arange(n, tokens_BT.shape[1])[None])


def visits(trace: Sequence[int]) -> list[int]:
    """After how many tokens of a trace each visit is written whole; <eos> is no visit."""
    starts = [i for i, token in enumerate(trace) if token in MARKS]
    return [*starts[1:], len(trace) - (trace[-1] == EOS)] if starts else []


@torch.no_grad()
def accuracies(model: PreTrainedModel, n_sequences: int, seed: int = 1234) -> dict[str, float]:
    """Share of visits, and of whole traces, that the model gives right with its full cache when the true trace is fed."""
    batch, right = walk(random.Random(seed), n_sequences), []
    for chunk_BT in batch.tokens_BT.split(16):
        logits_BTV = model(chunk_BT[:, :-1].to(model.device), use_cache=False).logits
        right.append(logits_BTV[:, batch.prompt_length - 1 :].argmax(-1).cpu() == chunk_BT[:, batch.prompt_length :])
    right_BT, found = torch.cat(right), []
    for row, own in zip(right_BT, batch.continuation_BT.tolist(), strict=True):
        found += [row[start:stop].all().item() for start, stop in itertools.pairwise([0, *visits(own)])]
    return {"visits": sum(found) / len(found), "traces": right_BT.all(-1).float().mean().item()}


def training_batch(rng: random.Random, nodes: int, exits: int, n_tokens: int) -> tuple[Tensor, Tensor]:
    """Tokens and loss weights [B, T] of walks, some n_tokens in all; every token of a trace must be looked up.

    Seven in ten walks have as many nodes and exits as named, the others fewer.
    """
    rows: list[tuple[list[int], int]] = []
    longest = 0
    while not rows or (len(rows) + 1) * longest <= n_tokens:
        few = rng.random() > 0.7
        out = rng.randint(1, exits) if few else exits
        size = rng.randint(max(out + 2, nodes // 2), nodes) if few else nodes
        asked = prompt(*(drawn := draw(rng, size, out)))
        rows.append((asked + trace(*drawn), len(asked)))
        longest = max(longest, len(rows[-1][0]))
    tokens_BT = torch.full((len(rows), longest), PAD)
    weights_BT = torch.zeros(len(rows), longest)
    for i, (row, n) in enumerate(rows):
        tokens_BT[i, : len(row)] = torch.tensor(row)
        weights_BT[i, n : len(row)] = HARD
    return tokens_BT, weights_BT
