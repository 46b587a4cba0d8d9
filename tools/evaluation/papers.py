"""What the three papers claim, as data: claims.py turns a claim into a verdict."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from .ablate import label
from .claims import Claim

SINKLESS = "answers hardly need the first token; reading does where models have sinks, see Models with sinks"
_LATER = {"scenario": "after"}


def _abl(family: str, a: str, b: str, says: str, source: str, sign: int = 1, caveat: str = "", **where: Any) -> Claim:
    """One variant of an ablation against another."""
    names = label(family, a), label(family, b)
    return Claim(source, says, "ablate", "right", *names, sign=sign, where=where or _LATER, caveat=caveat)


def _ladder(source: str, says: str, task: str, metric: str, names: tuple[str, ...], **more: Any) -> list[Claim]:
    """Each above the next."""
    return [Claim(source, says, task, metric, a, b, **more) for a, b in pairwise(names)]


CLAIMS: dict[str, list[Claim]] = {
    "Keyformer": [
        Claim("Figure 3b", "90% of the attention is on 40% of the tokens or fewer", "sparsity", "tokens_for_90", "full",
              level=0.4, sign=-1),
        *_ladder("Figure 7", "keyformer > h2o > window", "recall", "right", ("keyformer", "h2o", "window"), where=_LATER),
        _abl("positions", "keyformer, original", "keyformer, renumbered", "original positions are better", "Table 3"),
        _abl("shared", "per layer", "shared", "a score per layer is better", "Table 3"),
        _abl("noise", "gumbel", "none", "Gumbel noise is better than none", "Table 4"),
        _abl("noise", "none", "gaussian", "Gaussian noise is worse than none", "Table 4"),
        _abl("noise", "none", "constant", "a constant is worse than none", "Table 4",
             caveat="a constant cannot change a softmax"),
        _abl("tau", "1 to 2", "1 to 1", "a rising temperature is better than a constant one", "A.8"),
        _abl("tau", "1 to 2", "2 to 2", "a rising temperature is better than a constant one", "A.8"),
        _abl("recent", "0.3", "0.1", "20 to 30% recent tokens are best", "A.4"),
        _abl("recent", "0.3", "0.7", "20 to 30% recent tokens are best", "A.4"),
        Claim("Figure 5", "damping does not bring back the full cache's quality", "ablate", "right", label("damping", "0.9"),
              "full", sign=-1, where=_LATER),
    ],
    "RoCo": [
        *_ladder("Figure 2", "mean (roco) > last (tova) > accumulated (h2o) > quantized (scissorhands)", "jaccard", "jaccard",
                 ("roco", "tova", "h2o", "scissorhands")),
        Claim("Figure 3", "most tokens' deviation peaks within 50 queries", "robustness", "share_early", "full", level=0.5),
        _abl("scope", "deviation 0.5", "window 0.5", "the deviation scope is better than a window", "Figure 4"),
        _abl("scope", "deviation 0.9", "window 0.9", "the deviation scope is better than a window", "Figure 4"),
        *_ladder("5.2", "roco > h2o > streaming_llm", "recall", "right", ("roco", "h2o", "streaming_llm"),
                 where={"scenario": "stream"}),
        _abl("block", "64", "1", "blocks of many tokens cost little", "Table 6", sign=-1),
        Claim("StreamingLLM", "sinks and a window beat a window", "recall", "right", "streaming_llm", "window",
              where={"scenario": "stream"}, caveat=SINKLESS),
    ],
    "CriticalKV": [
        *(Claim(f"Figure {figure}", f"two-stage selection is better, {scenario}, {kind}", "needle", "right", f"critical_{base}",
                base, where={"scenario": scenario, "kind": kind})
          for figure, base in ((1, "snapkv"), (2, "adakv"))
          for scenario in ("regular", "context") for kind in ("single", "multi")),
        Claim("Figure 1", "snapkv is far above chance, question in the prompt", "needle", "right", "snapkv", "random",
              where={"scenario": "regular"}),
        Claim("4.4", "snapkv loses where the question comes later", "recall", "right", "snapkv", "window", sign=-1,
              where=_LATER),
        Claim("Figure 3", "snapkv is better than streaming_llm", "needle", "right", "snapkv", "streaming_llm",
              where={"scenario": "regular"}),
        Claim("Figure 3", "snapkv is better than streaming_llm", "needle", "right", "snapkv", "streaming_llm",
              where={"scenario": "context"}),
        *(Claim("Figures 5 to 7", "two-stage selection lowers the perturbation", "perturbation", "l1", f"critical_{base}", base,
                sign=-1) for base in ("snapkv", "adakv")),
        *(Claim("Figure 5", "in 92% of heads", "perturbation", "heads_lower", f"critical_{base}", level=0.5)
          for base in ("snapkv", "adakv")),
        _abl("alpha", "0.5", "1", "half the budget for stage two is better than none", "4.3", scenario="in"),
        _abl("alpha", "0.5", "0", "stage one is needed", "3.4", scenario="in"),
        _abl("pooling", "max, 5", "none", "pooling keeps what stands together", "SnapKV", scenario="in"),
    ],
}  # fmt: skip
