"""The oracle's scores of long generations: what decode steps use, and what the last queries look at."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def uses(rows: Sequence[tuple[int, dict[int, float]]], i: int, alpha: float) -> tuple[list[int], float]:
    """The token's own step, then every later t with a[t, i] > alpha, of rows (t, a[t]); and the smallest |a[t, i] - alpha|."""
    seen = [(t, a[i]) for t, a in rows if i in a]
    closest = min((abs(a - alpha) for _, a in seen), default=math.inf)
    return [i, *(t for t, a in seen if t > i and a > alpha)], closest


def recurrence(steps: Sequence[int], now: int) -> float:
    """LazyEviction: the steps since the last use, in the most steps that lay between two uses; at least one step did."""
    longest = max([1, *(later - earlier for earlier, later in itertools.pairwise(steps))])
    return (steps[-1] - now) / longest


def pooled(numbers: list[float], kernel: int, pooling: str | None) -> list[float]:
    """The greatest, or the mean, of each number and its neighbours; the zeros beyond either end count in a mean."""
    half = kernel // 2
    near = [numbers[max(0, j - half) : j + half + 1] for j in range(len(numbers))]
    if pooling is None:
        return numbers
    return [max(values) if pooling == "max" else sum(values) / kernel for values in near]


def redundancy(keys: dict[int, Tensor], alike: float | None) -> tuple[dict[int, float], float]:
    """R-KV: the softmax over i of the mean over j of cos(k_j, k_i), where j itself counts 0 and so does, of those that are more
    than `alike` to j, the last. -> that, and the smallest distance of a cosine from `alike`."""
    unit = {i: key / (key.norm() + 1e-8) for i, key in keys.items()}
    column, margin = dict.fromkeys(keys, 0.0), math.inf
    for j in keys:
        cosine = {i: float(unit[j] @ unit[i]) if i != j else 0.0 for i in keys}
        if alike is not None:
            margin = min([margin, *(abs(cosine[i] - alike) for i in keys if i != j)])
            like = [i for i in keys if i != j and cosine[i] > alike]
            if like:
                cosine[max(like)] = 0.0
        for i in keys:
            column[i] += cosine[i] / len(keys)
    shares = torch.softmax(torch.tensor(list(column.values()), dtype=torch.float64), 0).tolist()
    return dict(zip(column, shares, strict=True)), margin


def looked_at(x: list[list[dict[int, float]]], older: list[int], most: bool) -> list[float]:
    """The attention that the last queries give to each older token: x[query][query head of the group][token], a softmax over
    the tokens, averaged over the queries and over the heads of the group, or of the greatest x of the group. A token that a
    query cannot see has none."""
    total = [0.0] * len(older)
    for row in x:
        heads = [{i: max(head[i] for head in row) for i in row[0]}] if most else row
        for head in heads:
            top = max(head.values(), default=0.0)
            whole = sum(math.exp(value - top) for value in head.values())
            for at, i in enumerate(older):
                total[at] += math.exp(head[i] - top) / whole / len(heads) / len(x) if i in head else 0.0
    return total
