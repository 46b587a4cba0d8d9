"""What a GPU is measured on beside paper.py: the pass that sums columns, prompts and decode steps of an 8B Llama.

    gpu_side      column sums of the probabilities beside flash attention's forward, H = 32 heads of size 128, bfloat16
    gpu_prompt    a prompt of 32768 tokens, unpatched and patched in turns
    gpu_decode    a token for 16 rows that hold 2048 tokens each: unpatched, floor and policy in turns

Weights are random. Times are of the wall until the device is done; `device_ms` adds up what kernels took, without the gaps
in which the host launches them. All of them take `tiny` sizes, which run on a CPU too, except gpu_side's kernel.
"""

import copy
import functools
import gc
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Cache, PreTrainedModel

import kvpatch

from . import paper
from .decode import floor
from .lines import Line, latest, number, rows, where
from .memory import measure_growth
from .models import build, cache_bytes, forward, tokens, twin
from .prompt import summary
from .roofline import Ceilings, beside, ceilings, decode_ms, fastest, prompt_ms

CASES = ("gpu_side", "gpu_prompt", "gpu_decode")
POLICIES = ("full", "h2o", "roco", "keyformer", "snapkv")
DECODE_POLICIES = ("h2o", "roco", "keyformer", "window")
LENGTHS = {"gpu_side": (8192, 32768), "gpu_prompt": (32768,), "gpu_decode": (2048,)}
ROWS = 16  # of gpu_decode
TINY = 64


def lines(
    case: str,
    device: str,
    tiny: bool,
    policies: Sequence[str] = (),
    lengths: Sequence[int] = (),
    batches: Sequence[int] = (),
    repeats: int = 5,
) -> Iterable[Line]:
    """The lines of one case. lengths: of the prompt, or in gpu_decode the budget.

    Raises:
        typer.BadParameter: full size without a GPU.
    """
    paper.need_device(device, tiny)
    lengths = lengths or ((TINY,) if tiny else LENGTHS[case])
    batches = batches or ((1, 2) if tiny else (ROWS,))
    measure = {"gpu_side": side_pass, "gpu_prompt": prompts, "gpu_decode": steps}[case]
    for figures in measure(device, tiny, policies, lengths, batches, repeats):
        yield {**where(device), "case": case, "repeats": repeats, "limits": {}, "holds": None, **figures}


def dtype_of(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


# ---- column sums beside flash attention ----


def side_pass(device: str, tiny: bool, _: Sequence[str], lengths: Sequence[int], __: Any, repeats: int) -> Iterable[Line]:
    """Own forward, normalizers of the rows, sums of the columns, as ratios to one causal flash forward of the same queries."""
    from kvpatch.backends.triton.columns import column_statistics
    from kvpatch.backends.triton.forward import attend

    heads, D, dtype = (2, 64, torch.float32) if tiny else (32, 128, dtype_of(device))
    best = ceilings(device, dtype, small=tiny)
    for n in lengths:
        q_BHGQD = torch.randn(1, heads, 1, n, D, device=device, dtype=dtype)
        k_BHTD, v_BHTD = (torch.randn(1, heads, n, D, device=device, dtype=dtype) for _ in range(2))
        rows_BQ = torch.arange(n, device=device)[None]
        given: Any = (q_BHGQD, k_BHTD, rows_BQ[:, None].expand(1, heads, n).contiguous(), rows_BQ)
        noise_BHTG = torch.rand(1, heads, n, 1, device=device)
        whole = {"scale": D**-0.5, "holes": False}
        lse = attend(*given[:2], None, *given[2:], **whole).lse

        def flash(q: Tensor = q_BHGQD, k: Tensor = k_BHTD, v: Tensor = v_BHTD) -> Tensor:
            with nullcontext() if device == "cpu" else sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(q[:, :, 0], k, v, is_causal=True)

        def forward(v: Tensor | None, given: Any = given, whole: Any = whole, **more: Any) -> Any:
            return attend(*given[:2], v, *given[2:], **whole, **more)

        def columns(names: tuple[str, ...], given: Any = given, lse: Tensor = lse) -> Any:
            return column_statistics(*given, lse, names, scale=D**-0.5)

        works: dict[str, Callable[[], Any]] = {
            "own forward": functools.partial(forward, v_BHTD),
            "own forward, noisy": functools.partial(forward, v_BHTD, noise_BHTG=noise_BHTG),
            "row normalizers": functools.partial(forward, None),
            "noisy row normalizers": functools.partial(forward, None, noise_BHTG=noise_BHTG, lse_BHGQ=lse),
            "column sums": lambda: columns(("sum",)),
            "column sums and squares": lambda: columns(("sum", "squares")),
        }
        product = 1000 * 2 * heads * D * n * (n + 1) / 2 / best.flops_per_s  # the half of one matrix product that is seen
        for name, work in works.items():
            pairs = [tuple(1000 * fastest(one, device) for one in (flash, work)) for _ in range(repeats)]
            figures = summary(pairs)
            yield {"arch": f"{heads}x{D}", "policy": name, "n": n, **figures} | beside(figures["ms"], product, best)


# ---- prompts ----


def prompts(
    device: str, tiny: bool, policies: Sequence[str], lengths: Sequence[int], _: Sequence[int], repeats: int
) -> Iterable[Line]:
    """Unpatched and patched prompts in turns; the peak of memory that a patched one takes against the unpatched one's."""
    model = build("llama-8b", max(lengths), tiny, device, dtype_of(device))
    best = ceilings(device, dtype_of(device), small=tiny)
    for n in lengths:
        ids = tokens(model, n)
        for policy in policies or POLICIES:
            other, pairs = twin(model), []
            with kvpatch.patched(other, policy, k=0.5) as patch:
                for _ in range(repeats + 1):
                    pairs.append(tuple(forward(one, ids)[1] for one in (model, other)))
                unpatched, patched = (extra_memory(one, ids) for one in (model, other))
                past = forward(other, ids[:, :TINY])[0]  # a report is of caches that are there
                backend = patch.report().backend if past.get_seq_length() else ""
            figures = summary(pairs[1:]) | {"backend": backend, "bytes_unpatched": unpatched, "bytes": patched}
            figures |= {"memory_ratio": patched / max(unpatched, 1)} | beside(figures["ms"], prompt_ms(model, n, best), best)
            yield {"arch": "llama-8b", "parameters": model.num_parameters(), "policy": policy, "n": n, **figures}


def extra_memory(model: PreTrainedModel, ids: Tensor) -> int:
    """Bytes that a prompt takes at most beside what is there already."""
    if ids.device.type == "cpu":
        return measure_growth(lambda: forward(model, ids))
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward(model, ids)
    return torch.cuda.max_memory_allocated() - before


# ---- decode steps ----


def steps(
    device: str, tiny: bool, policies: Sequence[str], lengths: Sequence[int], batches: Sequence[int], repeats: int
) -> Iterable[Line]:
    """Steps of rows that keep `n` tokens of prompts of twice as many: unpatched with all of them, the floor with n, the policy.

    kv_GBps: bytes of keys and values over the kernel time that a step takes beyond one with an empty cache. policy_share:
    what of the kernel time the floor does not need.
    """
    longest, dtype = max(lengths), dtype_of(device)
    model = build("llama-8b", 2 * longest, tiny, device, dtype)
    best = ceilings(device, dtype, small=tiny)
    for n in lengths:
        for batch in batches:
            ids = tokens(model, 2 * n + 1, batch)
            prompt, one = ids[:, :-1], ids[:, -1:]
            full = forward(model, prompt)[0]
            least = floor(full, n + 1)
            empty = forward(model, ids[:, :1])[0]
            base = device_ms(model, one, empty)
            bound = device_ms(model, one, least)
            for policy in policies or DECODE_POLICIES:
                other = twin(model)
                with kvpatch.patched(other, policy, k=n) as patch:
                    past = forward(other, prompt)[0]
                    backend = patch.report().backend
                    pairs = turns([(model, full), (model, least), (other, past)], one, repeats)
                    own = device_ms(other, one, past)
                figures = summary(pairs) | speeds(model, cache_bytes(past), own, bound, base, best)
                figures |= {"ms_floor": statistics.median(pair[1] for pair in pairs), "backend": backend}
                figures |= {"bytes_unpatched": cache_bytes(full), "bytes_ratio": figures["bytes"] / cache_bytes(full)}
                figures["over_floor"] = statistics.median(pair[2] / pair[1] for pair in pairs)
                where_it_is = {"arch": "llama-8b", "parameters": model.num_parameters(), "batch": batch}
                yield where_it_is | {"policy": policy, "n": n, **figures}


def turns(runs: Sequence[tuple[PreTrainedModel, Cache]], one: Tensor, repeats: int) -> list[tuple[float, ...]]:
    """Medians of 16 steps of each run in turns, `repeats` times, after one that does not count."""
    medians = []
    for _ in range(repeats + 1):
        pasts = [copy.deepcopy(past) for _, past in runs]
        times = [tuple(forward(run[0], one, past)[1] for run, past in zip(runs, pasts, strict=True)) for _ in range(16)]
        medians.append(tuple(statistics.median(column) for column in zip(*times, strict=True)))
    return medians[1:]


def speeds(model: PreTrainedModel, held: int, own: float, bound: float, base: float, best: Ceilings) -> Line:
    """What the kernel times of a step tell: own, of the floor, and with an empty cache, in ms."""
    found = {"bytes": held, "device_ms": own, "device_ms_floor": bound, "device_ms_empty": base}
    found["kv_GBps"] = held / 1e6 / max(own - base, 1e-6)
    found["policy_share"] = (own - bound) / own
    return found | beside(own, decode_ms(model, held, best), best)


def device_ms(model: PreTrainedModel, one: Tensor, past: Cache, count: int = 8) -> float:
    """Kernel time of a step in ms, by the profiler; on a CPU the time of the process."""
    past = copy.deepcopy(past)
    times = [forward(model, one, past)[1] for _ in range(count)]
    if one.device.type == "cpu":
        return statistics.median(times[count // 2 :])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            forward(model, one, past)
    kernels = [event for event in profiler.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.self_device_time_total for event in kernels) / 1000 / count


# ---- table ----

COLUMNS = ("policy", "tokens", "rows", "unpatched ms", "patched ms", "ratio", "over floor", "kernels ms")
COLUMNS += ("x roof", "KV GB/s", "policy's share", "backend")


def markdown(lines: list[Line]) -> str:
    """The table of gpu_decode; the other cases are shown as prompts."""
    return rows(COLUMNS, [cells(line) for line in latest(lines)], left=1)


def cells(line: Line) -> tuple[str, ...]:
    """One table row."""
    return (
        line["policy"],
        str(line["n"]),
        str(line["batch"]),
        number(line["ms_unpatched"], 2),
        number(line["ms"], 2),
        number(line["ratio"], 3),
        number(line["over_floor"], 3),
        number(line["device_ms"], 2),
        number(line["roof_ratio"], 2),
        number(line["kv_GBps"], 0),
        number(line["policy_share"], 3),
        line["backend"],
    )
