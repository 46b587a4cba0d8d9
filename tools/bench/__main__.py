"""Speed and memory of kvpatch against the same model unpatched: on one CPU thread, on a GPU, beside another library.

    python -m tools.bench                                   every case of the CPU, with the limits beside the figures
    python -m tools.bench --case decode --policies h2o,roco --lengths 4096 --json bench.jsonl
    python -m tools.bench --threads 1,all --model FOLDER    a real model, on one thread and on all
    python -m tools.bench --peer kvpress                    kvpatch and NVIDIA kvpress on the same weights (`make peer-env`)
    python -m tools.bench --paper keyformer --device cuda   Keyformer's Table 1
    python -m tools.bench --case gpu --device cuda          what a GPU is measured on (gpu.py)
    python -m tools.bench --markdown bench.jsonl            the tables of docs/benchmarks.md from JSON lines

The models have random weights and on the CPU are about 100M parameters large: a Llama of 12 layers, 12 query and 4 KV heads,
head size 64, width 768, MLP 2048 and 32000 tied embeddings, and an MPT and a GPT-J of the same width and depth. float32.

How it is measured. Two model objects share one set of weights; one stays patched, the other never is. Times are CPU
time of the process on one thread, which other programs disturb less, and wall time on several, which users wait for. Memory is
measured on one thread, and so are the cases host, launches and replay.
prompt, arch: one forward over the prompt, unpatched and patched in turns; the ratio is the median of the pairs' ratios.
Prompts of more than 8192 tokens are read by the Llama's first two layers ("llama-cut"): twelve take minutes a forward.
decode: the caches are prefilled once, then single-token forwards alternate between copies of them; a repeat's ratio is
that of the median times per token, and the median over the repeats counts. `mean_ratio` is the same with means.
`min_ratio` compares the fastest of both: where it is far from `ratio`, the machine was busy and the figures are weak.
"floor" is no policy: the unpatched model's own code over a dense buffer of the budget's size that is written in place,
which is what bounds the others. It takes its turn beside every evicting policy; `over_floor` is the ratio to it.
ragged: as decode, but against snapkv, which holds as much in dense slots; bytes are against a full cache's at the same step.
batch: as decode, eight texts at once, on a Llama of 8 layers of width 512 with a KV head per query head; without a floor.
host: as decode, on a Llama of 32 layers of width 64, so that a step costs what its Python costs; without a floor.
launches: what a step starts on a device, what the host waits for, and the host's time, on the torch path and on Triton's.
counts: waits of prompts, steps and engine passes, recompilations, and what captured steps keep; no time is measured.
block: as prompt, with BLOCK tokens read at a time under a budget of tokens; also how many entries a head ever held.
replay: a loss and its gradients in a replay, and with full attention, in turns. The record is of a text read in blocks of 16
tokens under a budget of 256, so that evictions begin there. Memory, of such a pass, is in processes of their own too.
Memory is the growth of the process's peak resident size over one prompt, in a fresh process for each case. `roof_ms` is what
the machine's memory and multipliers, measured first, would need at least (roofline.py), `roof_ratio` how often that fits.
"""

from . import counting as counting  # first: it sets what Triton reads when it is imported

# isort: split
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from tools.frames import roomy

from . import counts as bench_counts
from . import gpu as bench_gpu
from . import paper, peer
from .decode import decode_lines, plain_lines, ragged_lines
from .launches import launch_lines
from .launches import markdown as launches_markdown
from .lines import CASES, DECODE_POLICIES, FLOOR, HOST_POLICIES, POLICIES, Line, cells, keep, markdown, read
from .models import CUT, WHOLE_TO
from .prompt import prompt_line
from .replay import replay_lines

app = typer.Typer(add_completion=False)


def chosen(given: str, default: Iterable[str], allowed: Iterable[str]) -> list[str]:
    """A comma-separated option, checked, or the default."""
    names = [name.strip() for name in given.split(",")] if given else list(default)
    for name in names:
        if name not in allowed:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(allowed)}")
    return names


def numbers(given: str, option: str) -> list[int]:
    """A comma-separated option of whole numbers above 0."""
    parts = [part.strip() for part in given.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"{option} takes whole numbers above 0, separated by commas, not {given!r}")
    return [int(part) for part in parts]


def plan(case: str, policies: str, lengths: list[int], folder: str | None = None) -> Iterable[tuple[str, str, list[str], int]]:
    """(case, architecture, policies, prompt length) of everything that is to be measured on the CPU.

    folder: of a model that takes the architecture's place in cases that know any.
    """
    known = CASES if folder is None else {name: CASES[name] for name in ("prompt", "decode", "block")}
    every = CASES if folder is None else ("prompt", "decode")
    for one in every if case == "all" else chosen(case, (), known):
        archs, defaults, own_lengths = known[one]
        if folder is not None:
            archs, defaults, own_lengths = (folder,), (FLOOR, *HOST_POLICIES) if one == "decode" else defaults, (2048,)
        names = chosen(policies, defaults, (*POLICIES, *defaults))
        for n in lengths or own_lengths:
            for arch in archs:  # two layers tell what twelve do where layers are nearly all of the time
                yield one, CUT if one == "prompt" and arch == "llama" and n > WHOLE_TO else arch, names, n


# cases that measure all policies on one model
SEVERAL_LINES = {
    "ragged": ragged_lines,
    "host": partial(plain_lines, "host"),
    "batch": partial(plain_lines, "batch"),
    "launches": launch_lines,
    "counts": bench_counts.count_lines,
    "replay": replay_lines,
}


def threads_of(given: str) -> list[int]:
    """Numbers of threads; "all" is what torch takes by itself."""
    return [torch.get_num_threads() if part.strip() == "all" else numbers(part, "--threads")[0] for part in given.split(",")]


def measure(case: str, arch: str, names: list[str], n: int, repeats: int, tiny: bool) -> Iterable[Line]:
    """The lines of one row of the plan."""
    if case == "decode":
        yield from decode_lines(names, n, repeats, tiny, arch=arch)
    elif case in SEVERAL_LINES:
        yield from SEVERAL_LINES[case](names, n, repeats, tiny)
    else:
        for name in names:
            yield prompt_line(case, arch, name, n, repeats, tiny)


def on_gpu(
    case: str, device: str, tiny: bool, policies: str, lengths: list[int], batches: list[int], repeats: int
) -> Iterable[Line]:
    """The lines of one case of the GPU suite or of all."""
    names = chosen(policies, (), (*bench_gpu.POLICIES, *DECODE_POLICIES))
    for one in bench_gpu.CASES if case == "gpu" else chosen(case, (), bench_gpu.CASES):
        yield from bench_gpu.lines(one, device, tiny, names, lengths, batches, repeats)


# ---- files ----

TABLES = (
    ({*CASES, "gpu_side", "gpu_prompt"} - {"launches", "counts"}, markdown),
    (("launches",), launches_markdown),
    (("counts",), bench_counts.markdown),
    (("gpu_decode",), bench_gpu.markdown),
    (("paper",), paper.markdown),
    (("peer",), peer.markdown),
)


def tables(lines: list[Line]) -> str:
    """Markdown: a table for each kind of case that is there."""
    parts = [(table, [line for line in lines if line["case"] in cases]) for cases, table in TABLES]
    return "\n\n".join(table(own) for table, own in parts if own)


def tell(line: Line) -> str:
    """A line for the terminal when it is measured."""
    said = cells(line) if line["case"] in TABLES[0][0] else (line["case"], line["policy"], str(line["n"]))
    return " ".join(cell for cell in said if cell)


def on_cpu(counts: list[int], rows: list[tuple[str, str, list[str], int]], repeats: int, tiny: bool) -> Iterable[Line]:
    """The lines of the plan, with each number of threads."""
    for count in counts:
        torch.set_num_threads(count)
        for row in rows:
            yield from measure(*row, repeats, tiny)


# ---- command line ----


@app.command()
def main(
    case: Annotated[
        str, typer.Option(help=f"{', '.join(CASES)} (arch: MPT and GPT-J prompts), all; gpu or one of its")
    ] = "all",
    policies: Annotated[str, typer.Option(help="names, comma-separated; 'floor' bounds decode")] = "",
    lengths: Annotated[str, typer.Option(help="prompt lengths, comma-separated")] = "",
    repeats: Annotated[int, typer.Option(help="pairs, or runs of 64 tokens, whose median counts", min=1)] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="append a JSON line per case to this file")] = None,
    tiny: Annotated[bool, typer.Option(help="a model of two layers, to try the tool")] = False,
    table: Annotated[Path | None, typer.Option("--markdown", help="print this JSON-lines file as tables")] = None,
    other: Annotated[str, typer.Option("--peer", help="measure beside this library: kvpress")] = "",
    from_paper: Annotated[str, typer.Option("--paper", help="measure this paper's table: keyformer")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda; --paper and the gpu cases need cuda, or --tiny")] = "cpu",
    threads: Annotated[str, typer.Option(help="numbers of threads, comma-separated; all is the machine's")] = "1",
    folder: Annotated[Path | None, typer.Option("--model", help="folder of a model, for prompt, decode and block")] = None,
    batches: Annotated[str, typer.Option(help="batch sizes of --paper and of the gpu cases, comma-separated")] = "",
) -> None:
    """Measure speed and memory of kvpatch against the unpatched model."""
    if table is not None:
        print(tables(read(table)))
        return
    if folder is not None and not (folder / "config.json").exists():
        raise typer.BadParameter(f"--model takes the folder of a model, and {folder} has no config.json")
    counts, path = threads_of(threads), None if folder is None else str(folder.resolve())
    torch.set_num_threads(counts[0])
    sizes, rows = numbers(lengths, "--lengths"), numbers(batches, "--batches")
    lines: Iterable[Line]
    if other:
        lines = peer.lines(other, [name for name in policies.split(",") if name], sizes, repeats, tiny)
    elif from_paper:
        chosen(from_paper, (), ("keyformer",))
        lines = paper.lines(device, tiny, chosen(policies, (), tuple(paper.BUDGETS)), sizes, rows)
    elif case.startswith("gpu"):
        lines = on_gpu(case, device, tiny, policies, sizes, rows, repeats)
    else:
        lines = on_cpu(counts, list(plan(case, policies, sizes, path)), repeats, tiny)
    with torch.no_grad():
        print(tables(keep(lines, json_file, tell)))


if __name__ == "__main__":
    roomy(app)()
