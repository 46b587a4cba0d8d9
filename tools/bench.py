"""Speed and memory of kvpatch on one CPU thread, against the same model unpatched in the same process.

    python -m tools.bench                                   every case, with the limits beside the figures
    python -m tools.bench --case decode --policies h2o,roco --lengths 4096 --json bench.jsonl
    python -m tools.bench --case decode --policies h2o --lengths 4096 --profile
    python -m tools.bench --markdown bench.jsonl            the README's table from a file of JSON lines

The models have random weights and are about 100M parameters large: a Llama of 12 layers, 12 query and 4 KV heads, head
size 64, width 768, MLP 2048 and 32000 tied embeddings, and an MPT and a GPT-J of the same width and depth. float32.

How it is measured. Two model objects share one set of weights; one stays patched, the other never is. Times are CPU
time of the process, which other programs disturb less than wall time; with one thread both count the same work.
prompt, arch: one forward over the prompt, unpatched and patched in turns; the ratio is the median of the pairs' ratios.
decode: both caches are prefilled once, then single-token forwards alternate between copies of them; a repeat's ratio is
that of the median times per token, and the median over the repeats counts. `mean_ratio` is the same with means.
`min_ratio` compares the fastest of both: where it is far from `ratio`, the machine was busy and the figures are weak.
ragged: as decode, but against snapkv, which holds as much in dense slots; bytes are against a full cache's at the same step.
block: as prompt, with BLOCK tokens read at a time under a budget of tokens; also how many entries a head ever held.
"floor" is no policy: the unpatched model's own code over a dense buffer of the budget's size that is written in place,
which is what bounds the others. Memory is the growth of the process's peak resident size over one prompt, in a fresh
process for each case.
"""

import copy
import ctypes
import gc
import json
import multiprocessing
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timezone
from functools import cache, partial
from itertools import chain
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    GPTJConfig,
    LlamaConfig,
    MptConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer

import kvpatch
from kvpatch.policies.policy import POLICIES
from kvpatch.slots import SlotLayer

K = 0.5
STEPS = 64
FLOOR = "floor"
CASES = ("prompt", "decode", "arch", "ragged", "block")
PROMPT_POLICIES = ("window", "streaming_llm", "snapkv", "tova", "h2o", "roco", "scissorhands", "keyformer", "critical_snapkv")
DECODE_POLICIES = tuple(name for name, p in POLICIES.items() if p.schedule == "both" and p.score is not None)
ARCH_POLICIES = ("window", "h2o", "keyformer")
PROMPT_LIMITS = dict.fromkeys(PROMPT_POLICIES[:4], 1.05) | dict.fromkeys(PROMPT_POLICIES[4:8], 1.30)
PROMPT_LIMITS["critical_snapkv"] = 1.08
DECODE_LIMITS = {2048: 0.84, 4096: 0.66, 8192: 0.52}
FULL_LIMITS = {4096: 0.85}
BYTES_LIMIT, MEMORY_LIMIT = 0.51, 1.10
ARCH_LIMITS = {"ratio": 0.8, "memory_ratio": 0.5}
RAGGED_POLICIES, RAGGED_BASE = ("adakv", "critical_adakv"), "snapkv"
RAGGED_LIMITS = {"ratio": 1.10, "bytes_ratio": 0.53}
BLOCK_POLICIES, BUDGET, BLOCK = ("h2o", "snapkv"), 512, 256
BLOCK_LIMITS = {"ratio": 0.8, "memory_ratio": 0.65, "entries": BUDGET + BLOCK}
Line = dict[str, Any]
app = typer.Typer(add_completion=False)


def limits(case: str, policy: str, n: int) -> dict[str, float]:
    """What a line's figures may be at most, by the name of the figure; empty where nothing is promised."""
    if case == "ragged":
        return RAGGED_LIMITS if n == 2048 else {}
    if case == "block":
        return BLOCK_LIMITS if n == 16384 else {"entries": BLOCK_LIMITS["entries"]}
    if case == "arch":
        return ARCH_LIMITS if n == 2048 else {}
    if case == "prompt":
        speed = {"ratio": PROMPT_LIMITS[policy]} if n == 2048 and policy in PROMPT_LIMITS else {}
        return speed | {"memory_ratio": MEMORY_LIMIT}
    if policy in ("full", FLOOR):
        return {"ratio": FULL_LIMITS[n]} if policy == "full" and n in FULL_LIMITS else {}
    return ({"ratio": DECODE_LIMITS[n]} if n in DECODE_LIMITS else {}) | {"bytes_ratio": BYTES_LIMIT}


# ---- models ----


def config(arch: str, positions: int, tiny: bool) -> transformers.PreTrainedConfig:
    """About 100M parameters with heads of size 64, or 2 layers and a small vocabulary if `tiny`."""
    layers, width, vocab = (2, 128, 256) if tiny else (12, 768, 32000)
    heads = width // 64
    if arch == "mpt":
        return MptConfig(d_model=width, n_heads=heads, n_layers=layers, vocab_size=vocab, max_seq_len=positions)
    if arch == "gptj":
        sizes = {"n_embd": width, "n_head": heads, "n_layer": layers, "vocab_size": vocab, "n_positions": positions}
        return GPTJConfig(**sizes, bos_token_id=1, eos_token_id=2)
    if arch == "llama":
        return LlamaConfig(
            hidden_size=width,
            intermediate_size=width * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=max(heads // 3, 1),
            vocab_size=vocab,
            max_position_embeddings=positions,
            tie_word_embeddings=True,
        )
    raise typer.BadParameter(f"no model of architecture {arch!r} here: llama, mpt or gptj")


def build(arch: str, n: int, tiny: bool) -> PreTrainedModel:
    """A model with random weights for prompts of `n` tokens; MPT and GPT-J have eager attention only."""
    torch.manual_seed(0)
    attention = "sdpa" if arch == "llama" else "eager"
    model = transformers.AutoModelForCausalLM.from_config(config(arch, n + STEPS, tiny), attn_implementation=attention)
    return model.float().eval()


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Another model object over the same weights."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})


def tokens(model: PreTrainedModel, n: int) -> Tensor:
    """Random token ids [1,n]."""
    return torch.randint(model.config.vocab_size, (1, n), generator=torch.Generator().manual_seed(n))


def forward(model: PreTrainedModel, ids: Tensor, past: Cache | None = None) -> tuple[Cache, float]:
    """One forward; the cache and the CPU time in ms."""
    start = time.process_time()
    out = model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
    return out.past_key_values, 1000 * (time.process_time() - start)


# ---- prompt ----


def settings(case: str) -> Line:
    """How a case patches."""
    return {"k": BUDGET, "block": BLOCK} if case == "block" else {"k": K}


def prompt_ratio(model: PreTrainedModel, policy: str, n: int, repeats: int, case: str = "prompt") -> Line:
    """A prompt of `n` tokens, unpatched and patched in turns, after a pair that does not count."""
    ids, other, pairs = tokens(model, n), twin(model), []
    with kvpatch.patched(other, policy, **settings(case)):
        for _ in range(repeats + 1):
            gc.collect()
            pairs.append((forward(model, ids)[1], forward(other, ids)[1]))
    return summary(pairs[1:])


def summary(pairs: list[tuple[float, float]]) -> Line:
    """The median of the ratios of pairs (unpatched ms, patched ms), and the medians of both."""
    unpatched, patched = zip(*pairs, strict=True)
    ratios = [b / a for a, b in pairs]
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
        held.append(int((layer.positions[:, :, : layer.used] >= 0).sum(-1).max()))

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
    torch.set_grad_enabled(False)
    return_freed_memory()
    model = build(arch, n, tiny)
    ids = tokens(model, n)
    handle = None if policy is None else kvpatch.patch(model, policy, **settings(case))
    forward(model, ids[:, :16])
    gc.collect()
    before = reset_peak()
    forward(model, ids)
    growth = peak() - before
    if handle is not None:
        handle.remove()
    return growth


def return_freed_memory() -> None:
    """Make glibc map tensors of 128 KiB and more one by one: freed ones leave the resident size at once.

    Otherwise the peak depends on how the heap happens to be fragmented, by a third from run to run.
    """
    mallopt, mmap_threshold = getattr(ctypes.CDLL(None), "mallopt", None), -3
    if mallopt is not None:
        mallopt(mmap_threshold, 128 * 1024)


def reset_peak() -> int:
    """Give freed memory back and start the peak anew, where the system can; the peak so far in bytes."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (AttributeError, OSError):
        pass  # the peak before may then lie above what is in use, and the growth comes out smaller
    return peak()


def peak() -> int:
    """The largest resident size of this process since `reset_peak`, in bytes."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    unit = 1 if platform.system() == "Darwin" else 1024
    return 1024 * int(found[1]) if found else unit * getrusage(RUSAGE_SELF).ru_maxrss


@cache
def peak_apart(arch: str, policy: str | None, n: int, tiny: bool, case: str = "prompt") -> int:
    """`peak_growth` in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(peak_growth, arch, policy, n, tiny, case).result()


def prompt_line(case: str, arch: str, policy: str, n: int, repeats: int, tiny: bool, memory: bool = True) -> Line:
    """Time of a prompt, and peak memory where `memory` is wanted."""
    model = build(arch, n, tiny)
    figures = prompt_ratio(model, policy, n, repeats, case)
    if case == "block":
        figures |= most_entries(model, policy, n)
    if memory:
        unpatched, patched = peak_apart(arch, None, n, tiny), peak_apart(arch, policy, n, tiny, case)
        figures |= {"bytes_unpatched": unpatched, "bytes": patched, "memory_ratio": patched / max(unpatched, 1)}
    return record(case, arch, policy, n, repeats, model, figures)


# ---- decode ----


class FloorLayer(DynamicLayer):
    """A dense buffer of `columns` tokens, written in place one after another: what no policy can beat."""

    def __init__(self, full: DynamicLayer, columns: int) -> None:
        super().__init__()
        self.lazy_initialization(full.keys, full.values)
        self.keys, self.values = full.keys[:, :, :columns].clone(), full.values[:, :, :columns].clone()
        self.seen = full.get_seq_length()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        at = self.seen % self.keys.shape[2]
        self.keys[:, :, at : at + 1], self.values[:, :, at : at + 1] = key_states, value_states
        self.seen += 1
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0


def cache_bytes(past: Cache) -> int:
    """Bytes of a cache's keys and values."""
    if isinstance(past, kvpatch.EvictingCache):
        return past.nbytes
    return sum(t.numel() * t.element_size() for layer in past.layers for t in (layer.keys, layer.values))


def decode_ratio(model: PreTrainedModel, policy: str, n: int, repeats: int, steps: int, full: Cache) -> Line:
    """`steps` tokens after a prompt whose unpatched cache is `full`; unpatched and patched steps alternate."""
    ids, other = tokens(model, n + steps), twin(model)
    if policy == FLOOR:
        evicting: Cache = Cache(layers=[FloorLayer(layer, int(K * n) + 1) for layer in full.layers])
        return alternate((model, full), (model, evicting), ids, steps, repeats)
    with kvpatch.patched(other, policy, k=K):
        evicting = forward(other, ids[:, :n])[0]
        figures = alternate((model, full), (other, evicting), ids, steps, repeats)
    if policy != "full" and len(set(figures["bytes_seen"])) > 1:
        raise RuntimeError(f"{policy} at {n}: the cache's bytes changed while decoding: {figures['bytes_seen']}")
    return figures


def alternate(
    plain: tuple[PreTrainedModel, Cache], ours: tuple[PreTrainedModel, Cache], ids: Tensor, steps: int, repeats: int
) -> Line:
    """Single-token forwards of both in turns, from copies of their caches; one short run first that does not count."""
    pairs, means, sizes, fastest = [], [], [], []
    for repeat in range(repeats + 1):
        gc.collect()
        pasts, times = (copy.deepcopy(plain[1]), copy.deepcopy(ours[1])), []
        for t in range(ids.shape[1] - steps, ids.shape[1] if repeat else ids.shape[1] - steps + min(steps, 8)):
            one = ids[:, t : t + 1]
            times.append((forward(plain[0], one, pasts[0])[1], forward(ours[0], one, pasts[1])[1]))
            sizes.append((t + 1 - ids.shape[1] + steps, cache_bytes(pasts[1])))
        if repeat:
            pairs.append(tuple(statistics.median(column) for column in zip(*times, strict=True)))
            means.append(sum(b for _, b in times) / sum(a for a, _ in times))
            fastest.append(tuple(min(column) for column in zip(*times, strict=True)))
    seen = {size for _, size in sizes}
    bytes_full, bytes_ours = cache_bytes(plain[1]), max(seen)
    return summary(pairs) | {
        "min_ratio": min(b for _, b in fastest) / min(a for a, _ in fastest),
        "mean_ratio": statistics.median(means),
        "bytes_unpatched": bytes_full,
        "bytes": bytes_ours,
        "bytes_ratio": bytes_ours / bytes_full,
        "bytes_seen": sorted(seen),
        "sizes": sizes,
    }


def decode_lines(policies: Iterable[str], n: int, repeats: int, tiny: bool, steps: int = STEPS) -> Iterable[Line]:
    """One line per policy; the unpatched prompt is run once for all of them."""
    model = build("llama", n, tiny)
    full = forward(model, tokens(model, n + steps)[:, :n])[0]
    assert isinstance(full, DynamicCache)
    for policy in policies:
        figures = decode_ratio(model, policy, n, repeats, steps, full)
        del figures["sizes"]
        yield record("decode", "llama", policy, n, repeats, model, figures | {"steps": steps})


def ragged_lines(policies: Iterable[str], n: int, repeats: int, tiny: bool, steps: int = STEPS) -> Iterable[Line]:
    """One line per policy: decode steps beside those of the base policy, which is patched too."""
    model = build("llama", n, tiny)
    ids = tokens(model, n + steps)
    per_token = cache_bytes(forward(model, ids[:, :64])[0]) / 64
    base = twin(model)
    with kvpatch.patched(base, RAGGED_BASE, k=K):
        dense = forward(base, ids[:, :n])[0]
        for policy in policies:
            other = twin(model)
            with kvpatch.patched(other, policy, k=K):
                flat = forward(other, ids[:, :n])[0]
                figures = alternate((base, dense), (other, flat), ids, steps, repeats)
            shares = [size / (per_token * (n + t)) for t, size in figures.pop("sizes")]
            figures |= {"bytes_unpatched": int(per_token * n), "bytes_ratio": max(shares), "base": RAGGED_BASE, "steps": steps}
            yield record("ragged", "llama", policy, n, repeats, model, figures)


# ---- lines and tables ----


def cpu_model() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def record(case: str, arch: str, policy: str, n: int, repeats: int, model: PreTrainedModel, figures: Line) -> Line:
    """A whole JSON line: where and what, the figures, their limits, and whether they hold."""
    bounds = limits(case, policy, n)
    held = [figures[name] <= bound for name, bound in bounds.items() if name in figures]
    versions = {"kvpatch": kvpatch.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions | {"python": platform.python_version()},
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "malloc": {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")},
        "parameters": model.num_parameters(),
        "case": case,
        "arch": arch,
        "policy": policy,
        **settings(case),
        "n": n,
        "repeats": repeats,
        **figures,
        "limits": bounds,
        "holds": all(held) if held else None,
    }


COLUMNS = ("case", "model", "policy", "n", "unpatched ms", "patched ms", "ratio", "limit", "bytes", "limit", "holds")


def cells(line: Line) -> tuple[str, ...]:
    """One table row: times, their ratio, and the ratio of peak memory (prompts) or of cache bytes (decode)."""
    bounds = line["limits"]
    size = "bytes_ratio" if line["case"] in ("decode", "ragged") else "memory_ratio"

    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    return (
        line["case"],
        line["arch"],
        line["policy"],
        str(line["n"]),
        number(line["ms_unpatched"], 1),
        number(line["ms"], 1),
        number(line["ratio"], 3),
        number(bounds.get("ratio"), 2),
        number(line.get(size), 3),
        number(bounds.get(size), 2),
        {True: "yes", False: "NO", None: ""}[line["holds"]],
    )


def show(lines: list[Line]) -> None:
    """A table on the terminal."""
    table = Table(title="ratios to the unpatched model, and their limits")
    for i, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if i < 3 else "right", no_wrap=True)
    for line in lines:
        table.add_row(*cells(line), style="red" if line["holds"] is False else None)
    Console(width=120).print(table)


def markdown(lines: list[Line]) -> str:
    """The README's table: of lines about the same case the last one counts."""
    last = {tuple(line[name] for name in ("case", "arch", "policy", "n")): line for line in lines}
    rows = [COLUMNS, ["---"] * 3 + ["---:"] * (len(COLUMNS) - 3), *map(cells, last.values())]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


# ---- profile ----


def profile(title: str, run: Callable[[], object]) -> None:
    """The 15 operations of `run` that take most CPU time themselves."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    print(title)
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=60))


def feed(model: PreTrainedModel, ids: Tensor, past: Cache) -> None:
    """One forward per token."""
    for one in ids.split(1, dim=1):
        forward(model, one, past)


def profile_case(case: str, arch: str, policy: str, n: int, tiny: bool, steps: int = 16) -> None:
    """Where the time of one prompt or of `steps` decode steps goes, unpatched and patched."""
    model = build(arch, n, tiny)
    ids, other = tokens(model, n + steps), twin(model)
    with kvpatch.patched(other, policy, k=K):
        for name, one in (("unpatched", model), (policy, other)):
            past = forward(one, ids[:, :n])[0]
            if case != "decode":
                profile(f"{case} {arch} {n}: {name}", partial(forward, one, ids[:, :n]))
                continue
            forward(one, ids[:, n : n + 1], past)
            profile(f"decode {n}, {steps - 1} steps: {name}", partial(feed, one, ids[:, n + 1 : n + steps], past))


# ---- command line ----


def chosen(given: str, default: Iterable[str], allowed: Iterable[str]) -> list[str]:
    """A comma-separated option, checked, or the default."""
    names = [name.strip() for name in given.split(",")] if given else list(default)
    for name in names:
        if name not in allowed:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(allowed)}")
    return names


def plan(case: str, policies: str, lengths: list[int]) -> Iterable[tuple[str, str, list[str], int]]:
    """(case, architecture, policies, prompt length) of everything that is to be measured."""
    for one in CASES if case == "all" else chosen(case, CASES, CASES):
        if one == "decode":
            names = chosen(policies, (FLOOR, "full", *DECODE_POLICIES), (FLOOR, *POLICIES))
            yield from (("decode", "llama", names, n) for n in lengths or DECODE_LIMITS)
        elif one in ("ragged", "block"):
            names = chosen(policies, RAGGED_POLICIES if one == "ragged" else BLOCK_POLICIES, tuple(POLICIES))
            yield from ((one, "llama", names, n) for n in lengths or (2048 if one == "ragged" else 16384,))
        else:
            names = chosen(policies, PROMPT_POLICIES if one == "prompt" else ARCH_POLICIES, tuple(POLICIES))
            archs = ("llama",) if one == "prompt" else ("mpt", "gptj")
            yield from ((one, arch, names, n) for arch in archs for n in lengths or (2048,))


def measure(case: str, arch: str, names: list[str], n: int, repeats: int, tiny: bool) -> Iterable[Line]:
    """The lines of one row of the plan."""
    if case == "decode":
        yield from decode_lines(names, n, repeats, tiny)
        return
    if case == "ragged":
        yield from ragged_lines(names, n, repeats, tiny)
        return
    for name in names:
        yield prompt_line(case, arch, name, n, repeats, tiny)


@app.command()
def main(
    case: Annotated[str, typer.Option(help="prompt, decode, arch (MPT and GPT-J prompts), ragged, block or all")] = "all",
    policies: Annotated[str, typer.Option(help="names, comma-separated; 'floor' bounds decode")] = "",
    lengths: Annotated[str, typer.Option(help="prompt lengths, comma-separated")] = "",
    repeats: Annotated[int, typer.Option(help="pairs, or runs of 64 tokens, whose median counts")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="append a JSON line per case to this file")] = None,
    tiny: Annotated[bool, typer.Option(help="a model of two layers, to try the tool")] = False,
    profiled: Annotated[bool, typer.Option("--profile", help="print where the time goes, measure nothing")] = False,
    table: Annotated[Path | None, typer.Option("--markdown", help="print this JSON-lines file as a table")] = None,
) -> None:
    """Measure speed and memory of kvpatch against the unpatched model."""
    if table is not None:
        print(markdown([json.loads(line) for line in table.read_text().splitlines() if line.strip()]))
        return
    torch.set_num_threads(1)
    lines = []
    with torch.no_grad():
        for one, arch, names, n in plan(case, policies, [int(n) for n in lengths.split(",") if n]):
            if profiled:
                for name in names:
                    profile_case(one, arch, name, n, tiny)
                continue
            for line in measure(one, arch, names, n, repeats, tiny):
                lines.append(line)
                print(" ".join(cell for cell in cells(line) if cell), flush=True)
                if json_file is not None:
                    with json_file.open("a") as file:
                        file.write(json.dumps(line) + "\n")
    if lines:
        show(lines)


if __name__ == "__main__":
    app()
