"""What the benchmark promises, its JSON lines, and the tables made of them."""

import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers
import typer
from transformers import PreTrainedModel

import kvpatch
from kvpatch.policies import POLICIES
from kvpatch.policies.needs import Calibrated

Line = dict[str, Any]
K = 0.5
FLOOR = "floor"
PROMPT_POLICIES = ("window", "streaming_llm", "snapkv", "tova", "h2o", "roco", "scissorhands", "keyformer", "critical_snapkv")
DECODE_POLICIES = tuple(
    name for name, p in POLICIES.items() if p.schedule == "both" and p.evicts and not p.needs.find(Calibrated)
)
ARCH_POLICIES = ("window", "h2o", "keyformer")
RAGGED_POLICIES, RAGGED_BASE = ("adakv", "critical_adakv"), "snapkv"
BLOCK_POLICIES, BUDGET, BLOCK = ("h2o", "snapkv"), 512, 256
HOST_POLICIES = ("full", "window", "h2o", "roco", "keyformer", "snapkv", "adakv", "scissorhands", "tova", "critical_snapkv")
LAUNCH_POLICIES = (*HOST_POLICIES[:-1], "critical(h2o)")
COUNT_POLICIES = ("window", "h2o", "roco", "keyformer", "snapkv", "adakv", "tova", "critical(h2o)")
HOST_ARCH, HOST_LENGTH = "llama-narrow", 256
BATCH_POLICIES = ("h2o", "roco", "keyformer", "snapkv", "adakv", "critical_adakv")
BATCH_ARCH, BATCH, BATCH_LENGTH = "llama-even", 8, 1024
REPLAY_ARCH, REPLAY_POLICIES, REPLAYED = "llama", ("h2o",), {"k": 256, "block": 16}
DECODE_LENGTHS = (2048, 4096, 8192)
# the cases of the CPU: architectures, policies and prompt lengths where nothing else is asked for
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]] = {
    "prompt": (("llama",), PROMPT_POLICIES, (2048,)),
    "decode": (("llama",), (FLOOR, "full", *DECODE_POLICIES), DECODE_LENGTHS),
    "arch": (("mpt", "gptj"), ARCH_POLICIES, (2048,)),
    "ragged": (("llama",), RAGGED_POLICIES, (2048,)),
    "block": (("llama",), BLOCK_POLICIES, (16384,)),
    "host": ((HOST_ARCH,), HOST_POLICIES, (HOST_LENGTH,)),
    "batch": ((BATCH_ARCH,), BATCH_POLICIES, (BATCH_LENGTH,)),
    "launches": ((HOST_ARCH,), LAUNCH_POLICIES, (HOST_LENGTH,)),
    "replay": ((REPLAY_ARCH,), REPLAY_POLICIES, (2048,)),
    "counts": ((HOST_ARCH,), COUNT_POLICIES, (64,)),
}
ACCUMULATING = ("h2o", "roco", "keyformer")
BYTES_LIMIT, MEMORY_LIMIT = 0.51, 1.10
# what figures may be at most, by case and prompt length: of policies the ratio, and what all of them share
SPEED_LIMITS = {
    ("prompt", 2048): dict.fromkeys(("window", "streaming_llm", "tova", "critical_snapkv"), 1.05)
    | dict.fromkeys(("snapkv", "pyramidkv"), 1.02)
    | dict.fromkeys(ACCUMULATING, 1.22)
    | {"scissorhands": 1.30},
    ("prompt", 4096): dict.fromkeys(ACCUMULATING, 1.27),
    ("prompt", 8192): {"h2o": 1.20, "roco": 1.25, "keyformer": 1.30},
    ("decode", 4096): {"full": 0.85},
    ("host", HOST_LENGTH): dict.fromkeys(POLICIES, 1.15) | {"full": 1.05},
    ("batch", BATCH_LENGTH): dict.fromkeys(BATCH_POLICIES[:4], 0.56) | dict.fromkeys(BATCH_POLICIES[4:], 0.62),
}
SHARED_LIMITS: dict[tuple[str, int], dict[str, float]] = {
    ("arch", 2048): {"ratio": 0.8, "memory_ratio": 0.5},
    ("ragged", 2048): {"ratio": 1.10, "bytes_ratio": 0.53},
    ("replay", 2048): {"ratio": 1.6, "memory_ratio": MEMORY_LIMIT},
    ("block", 16384): {"ratio": 0.8, "memory_ratio": 0.65},
    **{("decode", n): {"over_floor": 1.05} for n in DECODE_LENGTHS},
}
ALWAYS = {
    "prompt": {"memory_ratio": MEMORY_LIMIT},
    "block": {"entries": BUDGET + BLOCK},
    "decode": {"bytes_ratio": BYTES_LIMIT},
}


def limits(case: str, policy: str, n: int) -> dict[str, float]:
    """What a line's figures may be at most, by the name of the figure; empty where nothing is promised."""
    speed = SPEED_LIMITS.get((case, n), {}).get(policy)
    found = {} if speed is None else {"ratio": speed}
    if case == "decode" and policy in ("full", FLOOR):  # which evict nothing
        return found
    return found | SHARED_LIMITS.get((case, n), {}) | ALWAYS.get(case, {})


def settings(case: str) -> Line:
    """How a case patches."""
    return {"block": {"k": BUDGET, "block": BLOCK}, "replay": REPLAYED}.get(case, {"k": K})


# ---- lines ----


def cpu_model() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def where(device: str = "cpu") -> Line:
    """When and on what a line was measured, and by which versions."""
    versions = {"kvpatch": kvpatch.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions | {"python": platform.python_version()},
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "malloc": {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")},
    } | ({} if device == "cpu" else {"device": torch.cuda.get_device_name()})


def record(case: str, arch: str, policy: str, n: int, repeats: int, model: PreTrainedModel, figures: Line) -> Line:
    """A whole JSON line: where and what, the figures, their limits, and whether they hold."""
    bounds = limits(case, policy, n)
    held = [figures[name] <= bound for name, bound in bounds.items() if name in figures]
    return {
        **where(model.device.type),
        "parameters": model.num_parameters(),
        "case": case,
        "arch": Path(arch).name,
        "policy": policy,
        **settings(case),
        "n": n,
        "repeats": repeats,
        **figures,
        "limits": bounds,
        "holds": all(held) if held else None,
    }


def keep(lines: Iterable[Line], path: Path | None, tell: Callable[[Line], str]) -> list[Line]:
    """All lines, each appended to the file, and told, when it comes."""
    kept = []
    for line in lines:
        kept.append(line)
        print(tell(line), flush=True)
        if path is not None:
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return kept


def read(path: Path) -> list[Line]:
    """A file of JSON lines."""
    if not path.exists():
        raise typer.BadParameter(f"there is no {path}: give a file of JSON lines")
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


# ---- tables ----

COLUMNS = ("case", "model", "policy", "n", "threads", "unpatched ms", "patched ms", "ratio", "goal")
COLUMNS += ("to the floor", "goal", "bytes", "goal", "bound ms", "to the bound", "goals met")


def number(value: float | None, digits: int) -> str:
    """A figure, or nothing where there is none."""
    return "" if value is None else f"{value:.{digits}f}"


def milliseconds(value: float | None) -> str:
    """Three digits, or one behind the point."""
    return "" if value is None else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def cells(line: Line) -> tuple[str, ...]:
    """One table row: times, their ratio, the ratio to the floor, that of peak memory (prompts) or cache bytes, the bound."""
    bounds = line["limits"]
    size = "bytes_ratio" if "bytes_ratio" in line else "memory_ratio"
    return (
        line["case"],
        line["arch"],
        line["policy"],
        str(line["n"]),
        str(line["threads"]),
        milliseconds(line["ms_unpatched"]),
        milliseconds(line["ms"]),
        number(line["ratio"], 3),
        number(bounds.get("ratio"), 2),
        number(line.get("over_floor"), 3),
        number(bounds.get("over_floor"), 2),
        number(line.get(size), 3),
        number(bounds.get(size), 2),
        milliseconds(line.get("roof_ms")),
        number(line.get("roof_ratio"), 2),
        {True: "yes", False: "no", None: ""}[line["holds"]],
    )


def rows(columns: Sequence[str], body: Iterable[Sequence[str]], left: int | None = None) -> str:
    """A Markdown table whose first `left` columns are words; None: all."""
    words = len(columns) if left is None else left
    every = [columns, ["---"] * words + ["---:"] * (len(columns) - words), *body]
    return "\n".join("| " + " | ".join(row) + " |" for row in every)


def latest(lines: list[Line]) -> list[Line]:
    """Of lines about the same case the last one."""
    names = ("case", "arch", "policy", "n", "threads", "batch", "path")
    return list({tuple(line.get(name) for name in names): line for line in lines}.values())


def markdown(lines: list[Line]) -> str:
    """The table of docs/benchmarks.md: of lines about the same case the last one counts."""
    return rows(COLUMNS, [cells(line) for line in latest(lines)], left=3)
