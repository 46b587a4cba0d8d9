"""What the authors' own code of R-KV, VaSE and TriAttention keeps of random queries, keys and values: numbers for the tests.

    python -m tests.policies.author_scores R-KV/rkv VaSE/eval/reasoning_tasks/modified/transformers/cache_utils.py \
        triattention/triattention

R-KV is github.com/Zefan-Cai/R-KV, VaSE github.com/terarachang/VaSE, TriAttention github.com/WeianMao/triattention (its folder
of that name, which must be importable); a fourth argument names the only case to run, whose row of the table is replaced.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TABLE = Path(__file__).with_name("author_scores.json")
SHAPE = {"heads": 2, "group": 3, "tokens": 60, "size": 16}
# policy: what the tests give it and what the authors' code is given
CASES: dict[str, dict[str, Any]] = {
    "r_kv": {"window": 8, "kernel": 7, "weight": 0.1, "budget": 24},
    "r_kv, narrow": {"window": 4, "kernel": 3, "weight": 0.7, "budget": 30},
    "vase": {"window": 8, "kernel": 5, "ranges": 9, "budget": 28},
    "tri_attention": {"prompt": 0, "reach": 65536, "budget": 24},
    "tri_attention, a prompt": {"prompt": 12, "reach": 64, "budget": 20},
}


def random_text(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [1,H*G,W,D] of the last tokens, and keys and values [1,H,T,D], some of which are alike."""
    H, G, T, D = SHAPE.values()
    numbers = torch.Generator().manual_seed(seed)
    said = torch.randn(1, H, 9, D, generator=numbers)[:, :, torch.randint(9, (T,), generator=numbers)]
    keys = said + 0.3 * torch.randn(1, H, T, D, generator=numbers)
    q, values = torch.randn(1, H * G, T, D, generator=numbers), torch.randn(1, H, T, D, generator=numbers)
    return q, keys, values


def _places(kept: Tensor, keys: Tensor) -> list[list[int]]:
    """Find which of the keys [H,T,D] were kept [H,K,D]."""
    same = (kept[:, :, None] == keys[:, None]).all(-1)
    return [sorted(row.int().argmax(-1).tolist()) for row in same]


def r_kv(folder: Path, case: dict[str, Any], text: tuple[Tensor, Tensor, Tensor]) -> list[list[int]]:
    """Run R-KV's own code."""
    package = types.ModuleType("rkv")
    package.__path__ = [str(folder)]
    sys.modules["rkv"] = package
    utils = importlib.import_module("rkv.utils")
    compression = types.ModuleType("rkv.compression")
    compression.__path__ = [str(folder / "compression")]
    vars(compression).update(cal_similarity=utils.cal_similarity, compute_attention_scores=utils.compute_attention_scores)
    sys.modules["rkv.compression"] = compression
    one = importlib.import_module("rkv.compression.r1_kv").R1KV(
        budget=case["budget"], window_size=case["window"], kernel_size=case["kernel"], mix_lambda=case["weight"]
    )
    q, keys, values = text
    kept, _ = one.update_kv(keys.clone(), q[:, :, -case["window"] :], values)
    return _places(kept[0], keys[0])


def vase(file: Path, case: dict[str, Any], text: tuple[Tensor, Tensor, Tensor]) -> list[list[int]]:
    """Run VaSE's own code, without the sample: the tokens of the most attention stay."""
    spec = importlib.util.spec_from_file_location("vase_cache", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    q, keys, values = text
    layer = module.EvictLayer(0, case["budget"], case["window"], "range_attn", 0.5, True, False, n_large=case["ranges"])
    layer.device, layer.queries = q.device, q[:, :, -case["window"] :]
    layer.k_cache, layer.v_cache = (t.transpose(1, 2).clone() for t in (keys, values))
    layer.cache_seqlens = torch.zeros(1, dtype=torch.int32)
    layer._run_eviction(keys.shape[2])
    return _places(layer.k_cache[0, : case["budget"]].transpose(0, 1), keys[0])


def turns() -> Tensor:
    """Return radians per position of each pair of channels."""
    half = SHAPE["size"] // 2
    return 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)


def queries_of(text: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean [H*G,D] of a text's queries, as if they had no rotation, and the mean lengths [H*G,P] of their pairs."""
    q = text[0][0] + 0.5  # their mean is not nothing
    a, b = q.chunk(2, -1)
    return q.mean(1), torch.hypot(a, b).mean(1)


def tri_attention(folder: Path, case: dict[str, Any], text: tuple[Tensor, Tensor, Tensor]) -> list[list[int]]:
    """Run TriAttention's own code, which takes the keys for rotated ones, with scores normalized in each query head."""
    sys.path.insert(0, str(folder.parent))
    authors = importlib.import_module(f"{folder.name}.methods.triattention")
    one = authors.TriAttention.__new__(authors.TriAttention)
    (H, G, T, D), omega, (mean, norm) = SHAPE.values(), turns(), queries_of(text)

    def rotary(like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = (positions[..., None] * omega).repeat(1, 1, 2)
        return angle.cos().to(like.dtype), angle.sin().to(like.dtype)

    config = types.SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, layer_perhead_aggregation="max")
    statistics = importlib.import_module(f"{folder.name}.methods.pruning_utils")
    heads = [(0, head) for head in range(H * G)]
    vars(one).update(
        config=config, rotary=rotary, attention_scale=1.0, rope_style="half", disable_mlr=False, disable_trig=False,
        omega=omega, freq_scale_sq=torch.ones(D // 2), offsets=statistics.build_geometric_offsets(case["reach"], config.device),
        score_aggregation="mean", normalize_scores=True, generator=None, head_dim=D, num_attention_heads=H * G,
        num_key_value_heads=H, num_key_value_groups=G, absolute_position=T, cache_positions_per_layer_perhead=None,
        sampled_heads=heads,
        head_stats={
            (0, head): statistics.HeadFrequencyStats(torch.complex(*mean[head].chunk(2)), norm[head]) for _, head in heads
        },
    )  # fmt: skip
    prompt = case["prompt"]
    kept = one._select_per_layer_perhead_independent(
        ((text[1], text[2]),), case["budget"] - prompt, prompt, torch.arange(prompt, T)
    )
    return [sorted(row.tolist()) for row in kept[0]]


def main(rkv: str, vase_file: str, tri_folder: str, only: str = "") -> None:
    """Write the table."""
    table = json.loads(TABLE.read_text()) if only else {}
    code = {"r_kv": (r_kv, rkv), "vase": (vase, vase_file), "tri_attention": (tri_attention, tri_folder)}
    for name, case in CASES.items():
        run, path = code[name.partition(",")[0]]
        if name.startswith(only):
            table[name] = [run(Path(path), case, random_text(seed)) for seed in range(4)]
    TABLE.write_text(json.dumps(table) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
