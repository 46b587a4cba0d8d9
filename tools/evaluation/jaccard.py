"""How well do scores of what is left agree with scores of everything [RoCo 4.3, Figure 2]?

At each decode step a head's kept set is compared with as many tokens of the highest score by a full cache that has read the
same text. Nothing is protected on either side, and both choose from all tokens so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor

from kvpatch import get_policy
from kvpatch.errors import KVPatchError
from kvpatch.policies import noise
from kvpatch.policies.budgets import share
from kvpatch.policies.context import NewTokens
from kvpatch.policies.scores import Accumulated, AccumulatedQuantized, GumbelSoftmax, Last, Mean, Random, Score

from .observe import LENGTH, STEPS, Memory, Observing, watch
from .rows import alike
from .task import Request, Sample, Setting, Subject

# A full cache's scores s[b,h,t,i] of key i when row t has been read, from the logits x [B,H,G,T,T] of its layer.
Scores = Callable[[Any, Tensor, int, int, int], Tensor]


def _accumulated(score: Score, x_BHGTT: Tensor, n: int, layer: int, seed: int) -> Tensor:
    """AAS."""
    return x_BHGTT.softmax(-1).mean(2).cumsum(2)


def _quantized(score: Score, x_BHGTT: Tensor, n: int, layer: int, seed: int) -> Tensor:
    """AQAS."""
    keys = x_BHGTT.isfinite().sum(-1, keepdim=True)
    return (x_BHGTT.softmax(-1) * keys > 1.0).double().mean(2).cumsum(2)


def _mean(score: Score, x_BHGTT: Tensor, n: int, layer: int, seed: int) -> Tensor:
    """MAS."""
    rows = x_BHGTT[:, :, 0].isfinite().cumsum(2)
    return _accumulated(score, x_BHGTT, n, layer, seed) / rows.clamp_min(1)


def _last(score: Last, x_BHGTT: Tensor, n: int, layer: int, seed: int) -> Tensor:
    """LTAS."""
    a = x_BHGTT.softmax(-1).mean(2)
    return a if score.heads == "each" else a.mean(1, keepdim=True).expand_as(a)


def _gumbel(score: GumbelSoftmax, x_BHGTT: Tensor, n: int, layer: int, seed: int) -> Tensor:
    """Keyformer's, with the policy's own noise and temperatures: n prompt rows, then one step a row."""
    _, H, G, T, _ = x_BHGTT.shape
    at_1T = torch.arange(T, device=x_BHGTT.device)[None]
    like_1HTD = at_1T.new_zeros(1, H, T, 1)
    noisy = score.needs[0]
    weight_BHTG = noisy.entry(NewTokens(like_1HTD, like_1HTD, at_1T, G, layer, seed)).get("noise")
    if weight_BHTG is not None:
        x_BHGTT = x_BHGTT + rearrange(weight_BHTG.log(), "b h t g -> b h g 1 t")
    tau_T = x_BHGTT.new_tensor([float(noisy.temperature(max(0, t - n + 1), None)) for t in range(T)])
    return (x_BHGTT / tau_T[:, None]).softmax(-1).mean(2).cumsum(2)


def _random(score: Score, x_BHGTT: Tensor, n: int, layer: int, seed: int) -> Tensor:
    """Fresh numbers of a seed that the policy has not: two independent choices."""
    B, H, _, T, _ = x_BHGTT.shape
    at, head = torch.arange(T, device=x_BHGTT.device), torch.arange(H, device=x_BHGTT.device)
    return noise.uniform(seed + 1, layer, head[None, :, None, None], at[:, None], at).expand(B, H, T, T)


FORMULAS: dict[type[Score], Scores] = {
    Accumulated: _accumulated,
    AccumulatedQuantized: _quantized,
    Mean: _mean,
    Last: _last,
    GumbelSoftmax: _gumbel,
    Random: _random,
}


def top_sets(score_BHTT: Tensor, width: int, count_BHS1: Tensor) -> Tensor:
    """The full cache's choice at the last S rows, bool [B,H,S,T]: as many tokens as `count` says, ties to the later token.

    width: keys that a row sees at most. A token that no later row will see goes before all others.
    """
    S, T = count_BHS1.shape[2], score_BHTT.shape[-1]
    at = torch.arange(T, device=score_BHTT.device)
    age_ST = at[T - S :, None] - at
    scores = score_BHTT[:, :, T - S :]
    if width < T:  # below zero, in their own order
        scores = torch.where(age_ST + 1 >= width, -1 / (1 + scores), scores)
    scores = scores.masked_fill(age_ST < 0, -torch.inf)
    # a stable sort over the reversed text: of equals the later comes first
    order = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(-1, order, at.expand_as(order)).flip(-1)
    return rank < count_BHS1


def jaccard(a: Tensor, b: Tensor) -> Tensor:
    """|A and B| / |A or B| over the last dimension; two empty sets are equal."""
    union = (a | b).sum(-1)
    return torch.where(union == 0, 1.0, (a & b).sum(-1).double() / union.clamp_min(1))


def consistency(held_BHST: Tensor, score_BHTT: Tensor, width: int) -> dict[str, Tensor]:
    """jaccard, and older: of tokens that are at least half a budget old; each [B,H,S]."""
    S, T = held_BHST.shape[2:]
    count = held_BHST.sum(-1, keepdim=True)
    best = top_sets(score_BHTT, width, count)
    at = torch.arange(T, device=held_BHST.device)
    old = at[T - S :, None] - at >= count // 2
    return {"jaccard": jaccard(held_BHST, best), "older": jaccard(held_BHST & old, best & old)}


class Jaccard(Observing):
    name = "jaccard"
    about = "Do scores of the tokens that are left choose what the same scores of a full cache would? Nothing is protected."
    source = "[RoCo 4.3, Figure 2]"
    metric = "jaccard"
    metrics: ClassVar[dict[str, str]] = {
        "jaccard": "overlap |A and B| / |A or B| of the kept set with the full cache's choice, nothing protected",
        "older": "the same among tokens that are at least half a budget old",
    }
    policies = ("random", "h2o", "scissorhands", "tova", "roco", "keyformer")
    budgets = (0.3, 0.4, 0.5, 0.6)
    count = 16

    def __init__(self) -> None:
        super().__init__()
        self.looks = Memory(2)  # of all rows of a text: large
        self._span = LENGTH - STEPS, LENGTH

    def settings(self, request: Request, subject: Subject) -> list[Setting]:
        """Without `full`, which agrees with itself; every policy as `bare` leaves it."""
        chosen = [name for name in request.policies or self.policies if name != "full"]
        return [Setting(name, k, bare(name)) for k in request.budgets or self.budgets for name in chosen]

    def samples(self, subject: Subject, request: Request, seed: int) -> list[Sample]:
        found = super().samples(subject, request, seed)
        self._span = found[0].n, len(found[0].data[0])
        return found

    def chance(self, k: Any, group: dict[str, Any]) -> float | None:
        """Two independent sets with the share f of the text: f / (2 - f), over the steps of the last samples."""
        n, T = self._span
        if not isinstance(k, int | float):
            return None
        shares = [min(1.0, max(1, share(k, n)) / seen) for seen in range(n + 1, T + 1)]
        return sum(f / (2 - f) for f in shares) / len(shares)

    def run(
        self, subject: Subject, setting: Setting, samples: list[Sample], request: Request, seed: int
    ) -> Iterator[dict[str, Any]]:
        policy = get_policy(setting.policy)
        if type(policy.score) not in FORMULAS or policy.selection is not None:
            known = ", ".join(self.policies)
            raise KVPatchError(f"{setting.policy!r} has no score that a full cache would go on with: try {known}.")
        for chunk in alike(samples, request.batch):
            tokens, n = self.tokens(subject, chunk), chunk[0].n
            score = policy.with_options(**setting.told(tokens.shape[1] - n).options).score
            layers, _ = self.look(subject, chunk, 0)
            watched = watch(subject.model, setting, tokens, n, seed)
            found: dict[str, list[Tensor]] = {}
            for at, (layer, held) in enumerate(zip(layers, watched.held, strict=True)):
                x = rearrange(layer.x_BNRT, "b (h g) r t -> b h g r t", h=held.shape[1])
                width = int(x[0, 0, 0, -1].isfinite().sum())
                scores = FORMULAS[type(score)](score, x, n, at, seed)
                for name, value in consistency(held[:, :, 1:], scores, width).items():
                    found.setdefault(name, []).append(value.mean((1, 2)))
            means = {name: torch.stack(parts).mean(0) for name, parts in found.items()}
            yield from ({name: mean[b].item() for name, mean in means.items()} for b in range(len(chunk)))


def bare(name: str) -> dict[str, Any]:
    """Options under which a policy protects nothing (r = 0) and every head chooses for itself."""
    options = get_policy(name).options()
    each = {"heads": "each"} if "heads" in options else {}
    return {part: 0 for part in ("sinks", "recent", "protected") if options.get(part)} | each
