"""The oracle's scores of keys, values and queries themselves: s[i] of the tokens that one KV head holds, by position."""

import cmath
import itertools
import math

import torch
from torch import Tensor


def unlike_the_mean(keys: dict[int, Tensor]) -> dict[int, float]:
    """KeyDiff: s[i] = -cos(k_i, the mean of k_j / ||k_j|| over the held j)."""
    unit = {i: key / key.norm() for i, key in keys.items()}
    mean = sum(unit.values()) / len(unit)
    assert isinstance(mean, Tensor)
    return {i: -float(unit[i] @ mean / mean.norm()) for i in keys}


def learned_features(key: Tensor, value: Tensor, i: int) -> Tensor:
    """The value of a token, the norms of key and value, the logarithm of its position counted from 1, and 1."""
    return torch.tensor([*value.tolist(), float(key.norm()), float(value.norm()), math.log(1 + i), 1.0], dtype=torch.float64)


def learned_weights(rows: list[Tensor], scores: list[float]) -> Tensor:
    """What comes nearest to log(s + 0.0001), each weight held back by a thousandth of its feature's sum of squares: least
    squares of the rows with one more for each feature, whose target is 0."""
    x = torch.stack(rows)
    held_back = torch.diag((0.001 * x.square().sum(0)).sqrt())
    y = torch.tensor([math.log(s + 0.0001) for s in scores], dtype=torch.float64)
    return torch.linalg.lstsq(torch.cat([x, held_back]), torch.cat([y, y.new_zeros(x.shape[1])])[:, None]).solution[:, 0]


def relative_norms(noted: dict[int, tuple[Tensor, Tensor]], local: int, combine: str) -> dict[int, float]:
    """CurDKV: squared norms of keys and of values, each over its sum in a window of `local` held tokens, combined."""
    held, s = sorted(noted), {}
    keys, values = ({i: both[side] for i, both in noted.items()} for side in (0, 1))
    for begin in range(0, len(held), local):
        window = held[begin : begin + local]
        total_k, total_v = (sum(float(of[j] @ of[j]) for j in window) for of in (keys, values))
        for i in window:
            K, V = float(keys[i] @ keys[i]) / total_k, float(values[i] @ values[i]) / total_v
            s[i] = {"product": K * V, "mean": (K + V) / 2, "key": K, "value": V}[combine]
    return s


def lagged(keys: dict[int, Tensor], values: dict[int, Tensor], before: int, lag: int) -> tuple[dict[int, float], float]:
    """LagKV: -> s[i] and the smallest gap between two tokens of a partition. `before`: held tokens before the first one."""
    held = sorted(keys)
    parts = [held[b : b + lag] for b in range(before, len(held) - lag + 1, lag)]
    if len(parts) < 2:
        return {i: float(i) for i in held}, math.inf
    s, margin = dict.fromkeys(held, 1.0), math.inf
    for part, following in itertools.pairwise(parts):
        e = torch.zeros(lag, dtype=torch.float64)
        for of in (keys, values):
            reference = torch.stack([of[j] for j in following])
            low, high = reference.min(0).values, reference.max(0).values
            ranges = [(float(a), float(b - a)) for a, b in zip(low, high, strict=True)]
            scaled = [[(float(x) - a) / r if r else 0.0 for x, (a, r) in zip(of[i], ranges, strict=True)] for i in part]
            d = torch.tensor(scaled, dtype=torch.float64).std(1)
            e += torch.softmax(d, 0) / 2
        order = sorted(range(lag), key=lambda j: float(e[j]))
        for rank, j in enumerate(order):
            s[part[j]] = rank / lag
        margin = min([margin, *(float(e[b] - e[a]) for a, b in itertools.pairwise(order))])
    return s, margin


def expected_attention(
    keys: dict[int, Tensor],
    values: dict[int, Tensor],
    queries: list[list[Tensor]],
    rotation: Tensor,
    slopes: list[float],
    begin: int,
    eps: float,
    covariance: bool,
) -> dict[int, float]:
    """Expected Attention: s[i] = (E[a_i] + eps) ||v_i||.

    queries: of each query head of the group, scaled like logits and without their rotation. rotation: the mean rotation of the
    coming positions, its row d being what it makes of the d-th unit vector. begin: the softmax is over tokens from there on.
    """
    held = [i for i in sorted(keys) if i >= begin]
    s = dict.fromkeys(keys, 0.0)
    for rows, slope in zip(queries, slopes, strict=True):
        D = len(rotation)
        mean, spread = torch.zeros(D, dtype=torch.float64), torch.zeros(D, D, dtype=torch.float64)
        for q in rows:
            mean = mean + q / len(rows)
        for q in rows:
            spread = spread + torch.outer(q - mean, q - mean) / len(rows)
        mean, spread = mean @ rotation, rotation.T @ spread @ rotation
        x = [float(keys[i] @ mean) + (float(keys[i] @ spread @ keys[i]) / 2 if covariance else 0.0) + slope * i for i in held]
        for i, a in zip(held, torch.softmax(torch.tensor(x, dtype=torch.float64), 0).tolist(), strict=True):
            s[i] += a / len(queries)
    return {i: (s[i] + eps) * float(values[i].norm()) for i in keys}


def probed(
    key: Tensor, i: int, mean: Tensor, norms: list[float], pairs: list[tuple[int, int]], turn: list[float], now: int, reach: int
) -> float:
    """TriAttention: x of token i, whose key has no rotation, by the phases of a mean query and of the key in each pair.

    norms: mean lengths of the queries' pairs. A channel without a pair has a product alone.
    """
    offsets = [2**power for power in range(64) if 2**power <= reach]
    apart = set(range(len(key))) - {channel for pair in pairs for channel in pair}
    x = sum(float(mean[d] * key[d]) for d in apart)
    for (a, b), norm, omega in zip(pairs, norms, turn, strict=True):
        query, own = complex(mean[a], mean[b]), complex(key[a], key[b])
        phase = cmath.phase(query) - cmath.phase(own)
        for offset in offsets:
            x += abs(query) * abs(own) * math.cos(omega * (now + offset - i) + phase) / len(offsets)
        x += (norm - abs(query)) * abs(own)
    return x


def standardized(x: dict[int, float], among: list[int]) -> dict[int, float]:
    """x less the mean, over the standard deviation, of those among."""
    mean = sum(x[i] for i in among) / max(1, len(among))
    spread = math.sqrt(sum((x[i] - mean) ** 2 for i in among) / max(1, len(among)))
    return {i: (value - mean) / max(spread, 1e-6) for i, value in x.items()}


def local_attention(positions: list[int], queries: list[Tensor], keys: Tensor, begin: int, size: int) -> dict[int, float]:
    """c[i]: what the tokens of i's chunk give i, each a softmax of q . k over the whole chunk, averaged over the query heads.
    Chunks have `size` places, the first one at `begin`. queries: [T, D] of each query head of the group."""
    c: dict[int, float] = {}
    for number in {(t - begin) // size for t in positions if t >= begin}:
        rows = [row for row, t in enumerate(positions) if t >= begin and (t - begin) // size == number]
        for row in rows:
            c[positions[row]] = 0.0
        for q in queries:
            for row in rows:
                a = torch.softmax(torch.stack([q[row] @ keys[other] for other in rows]), 0).tolist()
                for other, share in zip(rows, a, strict=True):
                    c[positions[other]] += share / len(queries)
    return c


def compactor(
    attended: list[dict[int, float]], values: list[dict[int, Tensor]], outliers: list[dict[int, float]], blend: float
) -> list[dict[int, float]]:
    """Compactor: of each head of a layer, standardized pooled attention times ||v|| plus `blend` times standardized leverage.
    outliers: leverage of the candidates of each head."""
    pooled = []
    for g, own in enumerate(outliers):
        held = sorted(own)
        w = [attended[g].get(i, 0.0) * float(values[g][i].norm()) for i in held]
        pooled.append({i: sum(w[max(0, at - 1) : at + 2]) / 3 for at, i in enumerate(held)})
    parts = []
    for scores in (pooled, outliers):
        numbers = [x for head in scores for x in head.values()]
        mean = sum(numbers) / max(1, len(numbers))
        spread = math.sqrt(sum((x - mean) ** 2 for x in numbers) / max(1, len(numbers) - 1))
        parts.append([{i: (x - mean) / max(spread, 1e-6) for i, x in head.items()} for head in scores])
    return [{i: A[i] + blend * L[i] for i in A} for A, L in zip(*parts, strict=True)]


def leverage(keys: dict[int, Tensor], sketch: Tensor) -> dict[int, float]:
    """Leverage of unrotated keys: s[i] = x_i (X^T X + 0.01 I)^-1 x_i, X the centred keys times the sketch [D, columns]."""
    mean = sum(keys.values(), torch.zeros(len(sketch), dtype=torch.float64)) / len(keys)
    x = {i: (key - mean) @ sketch for i, key in keys.items()}
    gram = 0.01 * torch.eye(sketch.shape[1], dtype=torch.float64)
    for one in x.values():
        gram = gram + torch.outer(one, one)
    inverse = torch.linalg.inv(gram)
    return {i: float(x[i] @ inverse @ x[i]) for i in keys}
