"""What the authors' own code of Attention Matching keeps and solves on a small model: numbers for the tests.

    python -m tests.policies.matching_scores compaction

compaction is the folder of github.com/adamzweiger/compaction. Its keys of highest attention are asked by the queries that a
policy's score looks at, its values are solved without biases.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from .peer_scores import TOKENS, small_model, text

TABLE = Path(__file__).with_name("matching_scores.json")
KEPT = 56
# what kvpatch's policy is given, and whose attention counts how
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "the prompt's last queries": ("snapkv", {"window": 16, "kernel": 1, "pooling": None}, "mean"),
    "a second reading's queries": ("kvzip", {"floor": 1.0, "sinks": 0}, "max"),
}
# ridge, and every how many tokens of the second reading ask
SOLVED = {"ridge": (0.1, 1), "strong ridge, few queries": (2.0, 7)}


def read_twice() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return queries [H*G,2T,D], keys and values [H,2T,D] of each layer, of a text that is repeated once."""
    asked, own = list[Tensor](), F.scaled_dot_product_attention

    def attend(query: Tensor, *others: Any, **more: Any) -> Tensor:
        asked.append(query[0])
        return own(query, *others, **more)

    with torch.no_grad(), mock.patch.object(F, "scaled_dot_product_attention", attend):
        cache = small_model()(torch.cat([text(), text()], 1)).past_key_values
    return [(q, layer.keys[0], layer.values[0]) for q, layer in zip(asked, cache.layers, strict=True)]


def _select(authors: Any, how: str, q: Tensor, k: Tensor, first: int, candidates: int) -> list[int]:
    """Return which candidates the rows of q, the last of the keys, give most attention to, the authors' way."""
    Q, T = q.shape[-2], len(k)
    later = torch.arange(T) > torch.arange(T - Q, T)[:, None]
    bias = torch.zeros(Q, T).masked_fill(later, -torch.inf).repeat(q.shape[0], 1)
    order = authors(score_method=how, beta_method="zero")._select_keys_highest_attention(k, q.flatten(0, 1), T, bias)[2]
    return sorted([i for i in order if i < candidates][:first])


def main(folder: str) -> None:
    """Write the table."""
    sys.path.insert(0, str(Path(folder).resolve().parent))
    from compaction.algorithms import HighestAttentionKeysCompaction as Authors  # type: ignore[import-not-found]

    found: dict[str, Any] = {name: [] for name in (*CASES, *SOLVED)}
    window = CASES["the prompt's last queries"][1]["window"]
    for q, k, v in read_twice():
        G, T = len(q) // len(k), TOKENS
        heads = list(zip(q.split(G), k, v, strict=True))
        last = [_select(Authors, "mean", q[:, T - window : T], k[:T], KEPT - window, T - window) for q, k, _ in heads]
        found["the prompt's last queries"].append([[*one, *range(T - window, T)] for one in last])
        again = [_select(Authors, "max", q[:, T:], k, KEPT, T) for q, k, _ in heads]
        found["a second reading's queries"].append(again)
        for name, (ridge, every) in SOLVED.items():
            given = {"ridge_lambda": ridge, "solver": "cholesky", "ridge_scale": "frobenius"}
            sizes = []
            for (q, k, v), kept in zip(heads, again, strict=True):
                asks, zero, own = q[:, T::every].flatten(0, 1), torch.zeros(KEPT), (k[kept], v[kept])
                solve = Authors()._compute_C2
                # theirs pulls values towards nothing, ours towards their own: so what the own ones lack is solved
                change = solve(own[0], zero, k[:T], v[:T], asks, **given) - solve(own[0], zero, *own, asks, **given)
                sizes.append([float(f"{size:.6g}") for size in (own[1] + change).norm(dim=-1).tolist()])
            found[name].append(sizes)
    TABLE.write_text("{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items()) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1])
