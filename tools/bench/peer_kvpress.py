"""NVIDIA kvpress' side of a comparison; runs in the environment that `make peer-env` makes, which has no kvpatch."""

import platform
from contextlib import AbstractContextManager
from importlib.metadata import version

import kvpress
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from tools.bench.peer_worker import Side, serve

RATIO = 0.5  # the share that is removed
PRESSES = {
    "snapkv": lambda: kvpress.SnapKVPress(RATIO),
    "pyramidkv": lambda: kvpress.PyramidKVPress(RATIO),
    "adakv": lambda: kvpress.AdaKVPress(kvpress.SnapKVPress(RATIO)),
    "critical_snapkv": lambda: kvpress.CriticalKVPress(kvpress.SnapKVPress(RATIO)),
    "critical_adakv": lambda: kvpress.CriticalAdaKVPress(kvpress.SnapKVPress(RATIO)),
    "streaming_llm": lambda: kvpress.StreamingLLMPress(RATIO),
    "tova": lambda: kvpress.TOVAPress(RATIO),
    "key_norm": lambda: kvpress.KnormPress(RATIO),
    "random": lambda: kvpress.RandomPress(RATIO, seed=0),
    "h2o": lambda: kvpress.ObservedAttentionPress(RATIO),
    "block_key_norm": lambda: kvpress.BlockPress(kvpress.KnormPress(RATIO), block_size=256),
}


def compress(model: PreTrainedModel, case: str) -> AbstractContextManager[object]:
    return PRESSES[case]()(model)


def kept(model: PreTrainedModel, full: Cache, past: Cache) -> list[list[list[int]]]:
    """A press does not say what it kept: found by the keys themselves, or by what it masks."""
    found = []
    for index, (whole, layer) in enumerate(zip(full.layers, past.layers, strict=True)):
        masked = getattr(model.model.layers[index].self_attn, "masked_key_indices", None)
        if masked is None:
            found.append([_places(a, b) for a, b in zip(whole.keys[0], layer.keys[0], strict=True)])
            continue
        alive = torch.ones(whole.keys.shape[1:3], dtype=torch.bool)
        alive[masked[1], masked[2]] = False
        found.append([head.nonzero().flatten().tolist() for head in alive])
    return found


def _places(whole_TD: Tensor, kept_ND: Tensor) -> list[int]:
    """Where the kept keys stand among all, both told by a sum with random weights."""
    mix = torch.randn(whole_TD.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole_T, kept_N = ((keys.double() * mix).sum(-1) for keys in (whole_TD, kept_ND))
    ranked = whole_T.sort()  # eager attention rounds differently, so the nearest one
    after = torch.searchsorted(ranked.values, kept_N).clamp(1, len(whole_T) - 1)
    below = kept_N - ranked.values[after - 1] < ranked.values[after] - kept_N
    return sorted(ranked.indices[after - below.long()].tolist())


def side() -> Side:
    packages = {name: version(name) for name in ("kvpress", "torch", "transformers")}
    versions = packages | {"python": platform.python_version()}
    return Side(versions, tuple(PRESSES), compress, stays=False, kept=kept, eager=("h2o",))


if __name__ == "__main__":
    serve(side())
