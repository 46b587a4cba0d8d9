"""Prompts: one forward over a prompt, unpatched and patched in turns, and the memory that it takes."""

import gc
import statistics
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

import kvpatch
from kvpatch.cache.layer import SlotLayer

from .lines import BLOCK, BUDGET, Line, record, settings
from .memory import apart, measure_growth, return_freed_memory
from .models import build, forward, timed, tokens, twin
from .roofline import beside, ceilings, prompt_ms


def prompt_ratio(model: PreTrainedModel, policy: str, n: int, repeats: int, case: str = "prompt") -> Line:
    """A prompt of `n` tokens, unpatched and patched in turns, after a pair that does not count."""
    ids, other, pairs, passes = tokens(model, n), twin(model), [], []
    with kvpatch.patched(other, policy, **settings(case)):
        for _ in range(repeats + 1):
            gc.collect()
            pairs.append((forward(model, ids)[1], forward(other, ids)[1]))
            if case == "prompt":
                passes.append(flash_pass(model, n))
    figures = summary(pairs[1:])
    if passes:
        flash = statistics.median(passes[1:])
        figures |= {"flash_ms": flash, "extra_flash": (figures["ms"] - figures["ms_unpatched"]) / flash}
    return figures


def flash_pass(model: PreTrainedModel, n: int) -> float:
    """Time in ms of the attention of all layers alone, by the flash kernel that the unpatched model runs."""
    one = model.config
    size = one.hidden_size // one.num_attention_heads
    q = torch.randn(1, one.num_attention_heads, n, size)
    k, v = torch.randn(2, 1, one.num_key_value_heads, n, size)

    def attend() -> None:
        for _ in range(one.num_hidden_layers):
            scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return 1000 * timed(attend)[1]


def summary(pairs: list[tuple[float, ...]]) -> Line:
    """The median of the ratios of pairs (unpatched ms, ..., patched ms), and the medians of both."""
    unpatched, patched = [pair[0] for pair in pairs], [pair[-1] for pair in pairs]
    ratios = [b / a for a, b in zip(unpatched, patched, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "min_ratio": min(patched) / min(unpatched),
        "ratios": ratios,
        "ms_unpatched": statistics.median(unpatched),
        "ms": statistics.median(patched),
    }


def most_entries(model: PreTrainedModel, policy: str, n: int) -> Line:
    """The most tokens that any head held at any time while a prompt of `n` tokens was read in blocks."""
    held = [0]

    def append(layer: SlotLayer, *args: Any) -> None:
        whole(layer, *args)
        held.append(int((layer.positions[:, :, : layer.columns_used] >= 0).sum(-1).max()))

    whole, other = SlotLayer.append, twin(model)
    SlotLayer.append = append  # type: ignore[method-assign]
    try:
        with kvpatch.patched(other, policy, **settings("block")):
            forward(other, tokens(model, n))
    finally:
        SlotLayer.append = whole  # type: ignore[method-assign]
    return {"entries": max(held)}


def peak_growth(arch: str, policy: str | None, n: int, tiny: bool = False, case: str = "prompt") -> int:
    """Bytes by which a prompt raises the peak resident size; policy None: unpatched. Call it in a new process."""
    torch.set_num_threads(1)
    return_freed_memory()
    model = build(arch, n, tiny)
    ids = tokens(model, n)
    with torch.no_grad(), nullcontext() if policy is None else kvpatch.patched(model, policy, **settings(case)):
        forward(model, ids[:, :16])
        return measure_growth(lambda: forward(model, ids))


def prompt_line(case: str, arch: str, policy: str, n: int, repeats: int, tiny: bool, memory: bool = True) -> Line:
    """Time of a prompt beside its lower bound, and peak memory where `memory` is wanted."""
    model = build(arch, n, tiny)
    figures = prompt_ratio(model, policy, n, repeats, case)
    reading = {"budget": BUDGET, "block": BLOCK} if case == "block" else {}
    best = ceilings(small=tiny)
    figures |= beside(figures["ms"], prompt_ms(model, n, best, **reading), best)
    if case == "block":
        figures |= most_entries(model, policy, n)
    if memory:
        unpatched, patched = apart(peak_growth, arch, None, n, tiny), apart(peak_growth, arch, policy, n, tiny, case)
        figures |= {"bytes_unpatched": unpatched, "bytes": patched, "memory_ratio": patched / max(unpatched, 1)}
    return record(case, arch, policy, n, repeats, model, figures)
