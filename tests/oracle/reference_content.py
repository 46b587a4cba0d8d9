"""The oracle's scores of keys and values alone: s[i] of the tokens that one KV head holds, by position."""

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
            d = torch.stack([((of[i] - low) / (high - low)).std() for i in part])
            e += torch.softmax(d, 0) / 2
        order = sorted(range(lag), key=lambda j: float(e[j]))
        for rank, j in enumerate(order):
            s[part[j]] = rank / lag
        margin = min([margin, *(float(e[b] - e[a]) for a, b in itertools.pairwise(order))])
    return s, margin
