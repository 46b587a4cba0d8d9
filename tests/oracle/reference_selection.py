"""The oracle's arithmetic on budgets and its choices among scored tokens: plain functions of plain numbers.

Every choice returns with it a margin: the gap that a rounding error would have to bridge to make another choice.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

EPSILON = 1e-6  # a share of 0.29 of 100 tokens is 29, though 0.29 * 100 is 28.999...

Dead = Callable[[int], bool]


def tokens(size: float, b: int) -> int:
    """A size in tokens: an int is tokens, a float a share of b."""
    return math.floor(size * b + EPSILON) if isinstance(size, float) else size


def budget(k: float, n: int) -> int | None:
    """What k means for a prompt of n tokens; None: never evict."""
    if isinstance(k, float):
        if not 0.0 < k <= 1.0:
            raise ValueError(f"k={k}: a float lies in (0, 1]")
        return None if k == 1.0 else max(1, math.floor(k * n + EPSILON))
    if k < 1:
        raise ValueError(f"k={k}: an int is at least 1")
    return k


def whole_heads(k: float, areas: Sequence[list[float] | None], few: int) -> float | list[float | list[float]]:
    """DuoAttention: the share k of the heads of all layers, those of the largest area, keeps everything, at least one head; the
    others keep `few` tokens. Of equal areas the lower layer's goes first, then the lower head's. None: a layer that bounds
    itself."""
    if k == 1.0:
        return k
    order = sorted((-area, l, g) for l, heads in enumerate(areas) for g, area in enumerate(heads or []))
    whole = {(l, g) for _, l, g in order[: max(1, math.floor(k * len(order) + EPSILON))]}
    return [
        1.0 if heads is None else [1.0 if (l, g) in whole else few for g in range(len(heads))] for l, heads in enumerate(areas)
    ]


def pyramid(b: int, layers: int, beta: float, w: int, n: int | None) -> list[int]:
    """PyramidKV: budgets that fall linearly from the first to the last layer, layers * b tokens in all.

    last = max(b / beta, min(w + 1, b), 2 b - n), at most b; first = 2 b - last; layer l: first + (last - first) l / (L - 1)
    in exact fractions, rounded down; the missing tokens go one each to the largest fractional parts, of equal ones to the
    lower layer. n is None with schedule "decode", where the prompt does not limit what a layer can keep.
    """
    if layers == 1:
        return [b]
    last = max(Fraction(b) / Fraction(beta), Fraction(min(w + 1, b)))
    if n is not None:
        last = max(last, Fraction(2 * b - n))
    last = min(last, Fraction(b))
    first = 2 * b - last
    real = [first + (last - first) * l / (layers - 1) for l in range(layers)]
    whole = [math.floor(value) for value in real]
    by_fraction = sorted(range(layers), key=lambda l: (-(real[l] - whole[l]), l))
    for l in by_fraction[: layers * b - sum(whole)]:
        whole[l] += 1
    return whole


def worst(s: dict[Any, float], count: int, dead: Callable[[Any], bool] = lambda i: False) -> tuple[set[Any], float]:
    """The `count` tokens to evict of the candidates in s, and the margin of that choice.

    Dead tokens go first; then the lowest score; of equal scores, the lower position. The margin is the gap between the
    last one to go and the first to stay. Where these two are exactly equal the rule on ties decides, and what a small
    error could change is their order with the nearest different score. Between dead and live there is no gap to close.
    """
    order = sorted(s, key=lambda i: (not dead(i), s[i], i))
    if not 0 < count < len(order):
        return set(order[: max(count, 0)]), math.inf
    gone, stays = order[count - 1], order[count]
    if dead(gone) != dead(stays):
        return set(order[:count]), math.inf
    if s[gone] != s[stays]:
        return set(order[:count]), s[stays] - s[gone]
    gaps = [abs(s[i] - s[gone]) for i in order if dead(i) == dead(gone) and s[i] != s[gone]]
    return set(order[:count]), min(gaps, default=math.inf)


def mass(
    s: dict[int, float], free: Sequence[int], share: float, lost: float, least: int, most: float, dead: Dead = lambda i: False
) -> tuple[set[int], float, float]:
    """A budget by mass: the tokens to evict of those that are free, the margin, and what has been lost after that.

    s has every token that counts, protected ones too; lost is what earlier evictions took. The protected tokens stay, and so do
    the highest scores until `share` of everything is reached, at least `least` and at most `most` tokens. Dead tokens count
    as nothing, and go unless they are protected.
    """
    live = [i for i in s if not dead(i)]
    whole = sum(s[i] for i in live) + lost
    order = sorted((i for i in live if i in free), key=lambda i: (s[i], i), reverse=True)
    stays = [i for i in s if i not in free]
    reached, number, margin = sum(s[i] for i in stays if not dead(i)), 0, math.inf
    while reached < share * whole and number < len(order):
        margin = (share * whole - reached) / whole
        reached, number = reached + s[order[number]], number + 1
    margin = min(margin, abs(reached - share * whole) / whole) if number else margin
    bounded = min(max(number, least - len(stays), 1 - len(stays)), max(most - len(stays), 0), len(order))
    margin = margin if bounded == number else math.inf
    bounded = int(bounded)
    if 0 < bounded < len(order):
        margin = min(margin, s[order[bounded - 1]] - s[order[bounded]] or math.inf)
    gone = order[bounded:]
    return {*gone, *(i for i in free if dead(i))}, margin, lost + sum(s[i] for i in gone)


def threshold(s: dict[int, float], free: Sequence[int], x: float, dead: Dead = lambda i: False) -> tuple[set[int], float]:
    """The free tokens that score below x, and the margin; the last one stays. s has the free ones."""
    gone = {i for i in free if dead(i) or s[i] < x}
    margin = min((abs(s[i] - x) for i in free), default=math.inf)
    return gone, margin


def adaptive(
    protected: Sequence[int], s: Sequence[dict[int, float]], guaranteed: Sequence[int], total: int, dead: Dead = lambda i: False
) -> tuple[list[int], float]:
    """AdaKV: how many tokens each head keeps, `total` in all, and the margin.

    Head g holds protected[g] tokens that must stay and the candidates in s[g]. It first keeps guaranteed[g] tokens, the
    protected ones and its own best; what is left of the total goes to the best of all heads' other tokens together.
    """
    counts, margin = [], math.inf
    others: dict[tuple[int, int], float] = {}
    for g, own in enumerate(s):
        rest, gap = worst(own, len(own) - (guaranteed[g] - protected[g]), dead)
        margin = min(margin, gap)
        counts.append(protected[g] + len(own) - len(rest))
        others |= {(i, -g): own[i] for i in rest}  # of equal scores the higher position stays, then the lower head
    gone, gap = worst(others, len(others) - (total - sum(counts)), lambda token: dead(token[0]))
    for _, minus_g in set(others) - gone:
        counts[-minus_g] += 1
    return counts, min(margin, gap)


def chunked(s: Sequence[dict[int, float]], size: int, together: bool, live: Callable[[int], bool]) -> list[dict[int, float]]:
    """ChunkKV: in place of each head's s[i], the mean of s over the live candidates of i's chunk, those of all heads if they
    choose together."""
    result: list[dict[int, float]] = []
    for own in s:
        heads = s if together else [own]
        of: dict[int, list[float]] = {}
        for head in heads:
            for i, value in head.items():
                if live(i):
                    of.setdefault(i // size, []).append(value)
        means = {chunk: math.fsum(values) / len(values) for chunk, values in of.items()}
        result.append({i: means.get(i // size, 0.0) for i in own})
    return result


def merged(
    keys: dict[int, Tensor], values: dict[int, Tensor], gone: set[int], threshold: float
) -> tuple[dict[int, Tensor], float]:
    """The values of what stays once those of `gone` are folded into them, and the smallest gap between two cosines."""
    stays, margin = sorted(set(keys) - gone), math.inf
    if not stays:
        return {}, margin
    total, weight = {t: values[t] for t in stays}, dict.fromkeys(stays, 1.0)
    for e in sorted(gone):
        cosines = {t: float(keys[e] @ keys[t] / (keys[e].norm() * keys[t].norm())) for t in stays}
        best = max(stays, key=lambda t: (cosines[t], t))
        margin = min([margin, *(cosines[best] - c for t, c in cosines.items() if t != best and c != cosines[best])])
        margin = min(margin, abs(cosines[best] - threshold))
        if cosines[best] >= threshold:
            size, its = float(values[e].norm()), float(values[best].norm())
            w = max(cosines[best], 0.0) * size / (size + its + 1e-6)
            total[best], weight[best] = total[best] + w * values[e], weight[best] + w
    return {t: total[t] / weight[t] for t in stays}, margin


def softmax(x: dict[int, float], sink: float | None = None) -> dict[int, float]:
    """sink: a logit that belongs to no key."""
    top = max(x.values(), default=0.0)
    e = {i: math.exp(value - top) for i, value in x.items()}
    whole = math.fsum(e.values()) + (0.0 if sink is None else math.exp(sink - top))
    return {i: value / whole for i, value in e.items()}


def refit(
    stays: list[int], values: dict[int, Tensor], asks: list[tuple[dict[int, float], dict[int, float]]], ridge: float
) -> dict[int, Tensor]:
    """The values V' of what stays: of all, those with the least ||X V' - Y||^2 + l ||V' - V||^2.

    asks: of each query, its attention to all tokens and to those that stay. X are the latter, Y the outputs of the former,
    and l is `ridge` times the mean over the tokens that stay of the squares that X has in their column.
    """
    X = torch.tensor([[x.get(j, 0.0) for j in stays] for _, x in asks], dtype=torch.float64)
    nothing = torch.zeros_like(values[stays[0]], dtype=torch.float64)
    Y = torch.stack([sum((p * values[i].double() for i, p in a.items()), nothing) for a, _ in asks])
    V = torch.stack([values[j].double() for j in stays])
    l = ridge * float(X.square().sum()) / len(stays)
    if l == 0.0:
        return {}
    rows = torch.cat([X, math.sqrt(l) * torch.eye(len(stays), dtype=torch.float64)])
    wanted = torch.cat([Y, math.sqrt(l) * V])
    found = torch.linalg.lstsq(rows, wanted, driver="gelsd").solution
    return {j: found[at].to(values[j].dtype) for at, j in enumerate(stays)}


def two_stage(
    s: dict[int, float], norms: dict[int, float], c: int, alpha: float, eps: float, dead: Dead = lambda i: False
) -> tuple[set[int], float]:
    """CriticalKV, Algorithm 1: the tokens to evict of the candidates in s so that c of them stay, and the margin.

    A[i] = s[i] / sum of s. The top alpha * c by s stay; of the rest the top by (A[i] + eps) * norms[i], up to c in all.
    The second gap is divided by the largest of these products: they may be of any size, and their rounding errors are
    relative to it. So both gaps are in units in which the largest number compared is about one or below.
    """
    whole = sum(s.values())
    A = {i: s[i] / whole if whole else 0.0 for i in s}
    first = tokens(float(alpha), c)
    rest, margin = worst(s, len(s) - first, dead)
    product = {i: (A[i] + eps) * norms[i] for i in rest}
    gone, gap = worst(product, len(rest) - (c - first), dead)
    largest = max(product.values(), default=0.0)
    return gone, min(margin, gap / largest if largest > 0.0 else math.inf)
