"""Keyformer's Table 1: tokens per second of generate() on the shape of MPT-7B, beside the paper's own figures.

As in the paper: random prompts, as many generated tokens as the prompt has, 4 beams, a full cache, H2O with 90% and Keyformer
with 50% of the prompt. Weights are random and in bfloat16. The paper ran on an A100 of 80 GB; its largest full cache did not
fit there at batch 2, so the last column compares with the full cache at batch 1, as the paper does.
"""

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import typer
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

import kvpatch

from .lines import Line, latest, number, rows, where
from .memory import peak, reset_peak
from .models import build, cache_bytes, timed, tokens
from .roofline import Ceilings, ceilings, decode_ms, prompt_ms

ARCH, BEAMS = "mpt-7b", 4
BUDGETS = {"full": 1.0, "h2o": 0.9, "keyformer": 0.5}
LENGTHS, BATCHES = (1024, 2048, 4096), (1, 2)
TABLE = {  # tokens/s by (prompt and generated length, batch); None: out of memory
    (1024, 1): {"full": 24.9, "h2o": 27.8, "keyformer": 32.0},
    (2048, 1): {"full": 15.0, "h2o": 20.5, "keyformer": 24.3},
    (4096, 1): {"full": 8.3, "h2o": 14.1, "keyformer": 17.0},
    (4096, 2): {"full": None, "h2o": None, "keyformer": 19.85},
}


def need_device(device: str, tiny: bool) -> None:
    """Refuse a full-size run where there is no GPU for it.

    Raises:
        typer.BadParameter: what to run where instead.
    """
    if device == "cpu" and not tiny:
        raise typer.BadParameter(
            "the 7B shapes need a GPU: run the same command with --device cuda on a machine with one (40 GB and more), or "
            "add --tiny to try the code here"
        )
    if device != "cpu" and not torch.cuda.is_available():
        raise typer.BadParameter(f"--device {device}: torch finds no GPU on this machine; leave it out and add --tiny")


def lines(
    device: str, tiny: bool, policies: Sequence[str] = (), lengths: Sequence[int] = (), batches: Sequence[int] = ()
) -> Iterable[Line]:
    """A line per length, batch and policy."""
    need_device(device, tiny)
    lengths = lengths or ((64,) if tiny else LENGTHS)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = build(ARCH, max(lengths), tiny, device, dtype, steps=max(lengths))
    best = ceilings(device, dtype, small=tiny)
    names = [name for name in BUDGETS if name in (policies or BUDGETS)]
    for n in lengths:
        for batch in batches or BATCHES:
            for policy in names:
                figures = throughput(model, policy, n, batch)
                if "tokens_per_s" in figures:
                    figures |= beside(model, policy, n, batch, figures["tokens_per_s"], best)
                yield {
                    **where(model.device.type),
                    "case": "paper",
                    "paper": "keyformer",
                    "arch": ARCH + (" tiny" if tiny else ""),
                    "parameters": model.num_parameters(),
                    "policy": policy,
                    "k": BUDGETS[policy],
                    "n": n,
                    "batch": batch,
                    "beams": BEAMS,
                    **figures,
                    "paper_tokens_per_s": TABLE.get((n, batch), {}).get(policy),
                }


def throughput(model: PreTrainedModel, policy: str, n: int, batch: int) -> Line:
    """`n` tokens generated after a prompt of `n`, after a short run that does not count.

    Returns tokens/s of whole runs and of all but the prompt and the first token, bytes of the cache at the end and of peak
    memory; {"out_of_memory": True} where they do not fit.
    """
    ids = tokens(model, n, batch)
    try:
        if policy == "full":
            return _figures(model, None, ids)
        with kvpatch.patched(model, policy, k=BUDGETS[policy]) as patch:
            return _figures(model, patch, ids)
    except torch.cuda.OutOfMemoryError:
        return {"out_of_memory": True}
    finally:
        gc.collect()
        if ids.device.type != "cpu":
            torch.cuda.empty_cache()


def _figures(model: PreTrainedModel, patch: kvpatch.Patch | None, ids_Bn: Tensor) -> Line:
    fresh = DynamicCache if patch is None else patch.new_cache
    generate(model, ids_Bn, 4, fresh())
    first, _ = generate(model, ids_Bn, 1, fresh())
    on_cpu = ids_Bn.device.type == "cpu"
    before = reset_peak() if on_cpu else torch.cuda.reset_peak_memory_stats()
    batch, n = ids_Bn.shape
    cache = fresh()
    seconds, length = generate(model, ids_Bn, n, cache)
    assert length == 2 * n
    return {
        "seconds": seconds,
        "seconds_first": first,
        "tokens_per_s": batch * n / seconds,
        "decode_tokens_per_s": batch * (n - 1) / max(seconds - first, 1e-9),
        "cache_bytes": cache_bytes(cache),
        "peak_bytes": peak() - int(before or 0) if on_cpu else torch.cuda.max_memory_allocated(),
        "backend": "none" if patch is None else patch.report().backend,
    }


def generate(model: PreTrainedModel, ids_Bn: Tensor, new: int, cache: Cache) -> tuple[float, int]:
    """Exactly `new` tokens for each row; the seconds that took, and how long the rows are then."""
    exactly: dict[str, Any] = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "eos_token_id": None}
    exactly |= {"num_beams": BEAMS, "pad_token_id": 0, "past_key_values": cache, "use_cache": True}  # MPT's config says no
    mask = torch.ones_like(ids_Bn)
    out, seconds = timed(lambda: model.generate(input_ids=ids_Bn, attention_mask=mask, **exactly), ids_Bn.device.type)
    return seconds, out.shape[1]


def beside(model: PreTrainedModel, policy: str, n: int, batch: int, measured: float, best: Ceilings) -> Line:
    """The most tokens per second that the ceilings allow: each row's prompt once, then every step the kept tokens."""
    config = model.config
    per_token = 2 * config.hidden_size * config.num_hidden_layers * model.dtype.itemsize * batch * BEAMS
    held = n + n / 2 if policy == "full" else BUDGETS[policy] * n
    ms = prompt_ms(model, n, best, batch) + n * decode_ms(model, per_token * held, best)
    bound = 1000 * batch * n / ms
    return {"roof_tokens_per_s": bound, "roof_ratio": bound / measured, "ceilings": best.line()}


# ---- table ----

COLUMNS = ("policy", "n + n", "batch", "tokens/s", "after the prompt", "to full", "to full, batch 1")
COLUMNS += ("roof tokens/s", "cache MB", "peak MB", "paper tokens/s", "paper to full")


def cells(line: Line) -> tuple[str, ...]:
    """One table row."""
    n, batch, policy = line["n"], line["batch"], line["policy"]
    paper, full = (TABLE.get((n, batch), {}).get(name) for name in (policy, "full"))
    full = full or TABLE.get((n, 1), {}).get("full")

    def mega(name: str) -> str:
        return number(line[name] / 1e6, 0) if name in line else ""

    return (
        f"{policy} {line['k']:.0%}",
        str(n),
        str(batch),
        "OOM" if line.get("out_of_memory") else number(line["tokens_per_s"], 1),
        number(line.get("decode_tokens_per_s"), 1),
        number(line.get("speedup"), 2),
        number(line.get("speedup_batch_1"), 2),
        number(line.get("roof_tokens_per_s"), 1),
        mega("cache_bytes"),
        mega("peak_bytes"),
        "OOM" if (n, batch) in TABLE and paper is None else number(paper, 2),
        "" if paper is None or full is None else number(paper / full, 2),
    )


def markdown(lines: list[Line]) -> str:
    """Our figures beside the paper's; `to full`: at the same batch, for the paper's last row at batch 1."""
    return rows(COLUMNS, [cells(line) for line in compared(latest(lines))], left=1)


def compared(lines: list[Line]) -> list[Line]:
    """The lines with their ratios to a full cache, which another call may have measured."""
    full = {(x["n"], x["batch"]): x["tokens_per_s"] for x in lines if x["policy"] == "full" and "tokens_per_s" in x}
    found = []
    for line in lines:
        bases = {name: full.get((line["n"], batch)) for name, batch in (("speedup", line["batch"]), ("speedup_batch_1", 1))}
        known = {name: line["tokens_per_s"] / base for name, base in bases.items() if base and "tokens_per_s" in line}
        found.append(line | known)
    return found
