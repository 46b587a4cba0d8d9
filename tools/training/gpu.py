"""Train every model that is made for a GPU, side by side, within a few minutes of wall clock; pack what came of it.

    python -m tools.training.gpu --minutes 8 --out DIR     on a machine with a GPU
    tar -xf DIR/models-0.tar -C tools/models            for every archive, to commit them

DIR then holds archives of at most 16 MB each and report.json: what was trained, how well, what became of the rest.
Steps of small models keep a GPU waiting for the host, so a process per model runs beside others and beside llama-code,
which fills the time until shortly before the end. Seed 0 of every architecture comes first: if time runs out, seeds are
missing and no architecture.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tools.training.cards import usable
from tools.training.train import RECIPES, pick

ARCHITECTURES = ("gpt2", "gptj", "mpt", "mistral", "llama")
"""The slowest learner first: the last to start should be the first to end."""

RESERVE = 60.0
"""Seconds at the end in which nothing is trained: models are saved and measured."""

WEIGHTS, ARCHIVE, TOTAL = 14_000_000, 16_000_000, 40_000_000
"""Bytes: of one weights file, of one archive, of all archives together."""


@dataclass(frozen=True)
class Job:
    """One model to train."""

    recipe: str
    seed: int

    @property
    def name(self) -> str:
        return self.recipe if RECIPES[self.recipe].language and self.seed == 0 else f"{self.recipe}-{self.seed}"

    def command(self, models: Path, device: str, seconds: float, sequences: int, compiled: bool) -> list[str]:
        """`seconds`: of training."""
        options = ["--compile"] if compiled and RECIPES[self.recipe].seconds else []
        options += ["--device", device, "--seconds", f"{seconds:.0f}", "--sequences", str(sequences)]
        return [
            *(sys.executable, "-m", "tools.training", self.recipe, "--seed", str(self.seed), "--out", str(models)),
            *options,
        ]


def plan(seeds: int = 3) -> list[Job]:
    """llama-code first, since it trains until the end, then recall at longer contexts."""
    return [Job("llama-code", 0), *(Job(f"{name}-1k", seed) for seed in range(seeds) for name in ARCHITECTURES)]


@dataclass
class Run:
    """A job that has been started, in a process group of its own with the process that makes its rows."""

    process: subprocess.Popen[bytes]
    log: Path
    began: float

    @classmethod
    def start(cls, command: list[str], log: Path) -> "Run":
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        return cls(process, log, time.monotonic())

    def end(self) -> dict[str, Any]:
        """What became of it; killed if it still runs."""
        code = self.process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        state = {None: "killed", 0: "done"}.get(code, "failed")
        fate = {"state": state, "seconds": round(time.monotonic() - self.began)}
        return fate if state == "done" else fate | {"log": self.log.read_text(errors="replace").splitlines()[-5:]}


def run(
    jobs: Sequence[Job],
    command: Callable[[Job, float], list[str]],
    logs: Path,
    limit: float,
    parallel: int,
    reserve: float = RESERVE,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, dict[str, Any]]:
    """Run `command(job, seconds of training left)` for every job, `parallel` at a time; what became of each.

    None starts in the last `reserve` seconds, and what still runs when `limit` seconds have passed is killed.
    """
    logs.mkdir(parents=True, exist_ok=True)
    waiting, running, fates, ends = list(jobs), {}, {}, clock() + limit
    try:
        while waiting or running:
            left = ends - clock()
            if left <= reserve:
                fates |= {job.name: {"state": "not started"} for job in waiting}
                waiting = []
            while waiting and len(running) < parallel:
                job = waiting.pop(0)
                running[job] = Run.start(command(job, left - reserve), logs / f"{job.name}.log")
            for job in [job for job in running if left <= 0 or running[job].process.poll() is not None]:
                fates[job.name] = running.pop(job).end()
                typer.echo(f"{limit - left:5.0f} s  {job.name:14} {fates[job.name]['state']}")
            time.sleep(0.05)
    finally:
        for job in running:
            running[job].end()
    return fates


def folder_bytes(folder: Path) -> int:
    """What the folder takes in an archive: it and every file have a header, files are filled up to 512 bytes."""
    return 512 + sum(512 + -(-path.stat().st_size // 512) * 512 for path in folder.iterdir())


def check_weights(folder: Path, limit: int = WEIGHTS) -> None:
    """Raises: ValueError, when the weights are too large to commit."""
    size = (folder / "model.safetensors").stat().st_size
    if size > limit:
        raise ValueError(f"{folder.name}: model.safetensors has {size:,} bytes, more than {limit:,}")


def pack(folders: Sequence[Path], out: Path, limit: int = ARCHIVE) -> list[Path]:
    """The folders in archives of at most `limit` bytes each, in the order given.

    Raises:
        ValueError: one folder is too large for an archive of its own.
    """
    padding = 1024 + tarfile.RECORDSIZE  # an archive ends with two empty blocks and is filled up to a whole record
    groups: list[list[Path]] = []
    room = 0
    for folder in folders:
        size = folder_bytes(folder)
        if size + padding > limit:
            raise ValueError(f"{folder.name}: {size + padding:,} bytes, more than the {limit:,} of one archive")
        if size > room:
            groups.append([])
            room = limit - padding
        groups[-1].append(folder)
        room -= size
    out.mkdir(parents=True, exist_ok=True)
    archives = [out / f"models-{i}.tar" for i in range(len(groups))]
    for archive, group in zip(archives, groups, strict=True):
        with tarfile.open(archive, "w", format=tarfile.USTAR_FORMAT) as tar:
            for folder in group:
                tar.add(folder, folder.name)
    return archives


def summarize(fate: dict[str, Any], card: dict[str, Any]) -> dict[str, Any]:
    """The line of one model in report.json."""
    facts = {key: card[key] for key in ("parameters", "steps", "longest_row", "accuracy", "checks") if key in card}
    facts |= {key: card["held_out"][key] for key in ("nats_per_token", "nats_by_position") if "held_out" in card}
    return fate | facts | {"usable": usable(card)}


def main(
    minutes: Annotated[float, typer.Option(help="of wall clock, for everything")] = 8.0,
    out: Annotated[Path, typer.Option(help="where the archives and report.json are written")] = Path("out/gpu"),
    models: Annotated[Path, typer.Option(help="where the models' folders are written")] = Path("out/models"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    parallel: Annotated[int, typer.Option(help="processes at once; 0: two for three processors")] = 0,
    sequences: Annotated[int, typer.Option(help="how many to measure with: rows per task, windows")] = 512,
    only: Annotated[list[str] | None, typer.Option(help="train this one only; may be repeated")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile, for llama-code")] = False,
) -> None:
    """Train, pack, report."""
    device, jobs = pick(device), plan()
    unknown = set(only or ()) - {job.name for job in jobs}
    if unknown:
        raise typer.BadParameter(f"{sorted(unknown)}: none of {', '.join(job.name for job in jobs)}")
    jobs = [job for job in jobs if not only or job.name in only]
    fates = run(
        jobs,
        lambda job, seconds: job.command(models, device, seconds, sequences, compiled),
        models / "logs",
        60 * minutes,
        parallel or max(2, (os.cpu_count() or 2) * 2 // 3),
    )
    report, folders = dict(fates), []
    for job in jobs:
        if fates[job.name]["state"] == "done":
            check_weights(models / job.name)
            folders.append(models / job.name)
            report[job.name] = summarize(fates[job.name], json.loads((folders[-1] / "card.json").read_text()))
    archives = pack(folders, out)
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    total = sum(archive.stat().st_size for archive in archives)
    typer.echo(json.dumps(report, indent=1))
    typer.echo(f"{len(folders)} of {len(jobs)} models, {total:,} bytes in {len(archives)} archives in {out}")
    if total > TOTAL:
        typer.echo(f"more than {TOTAL:,} bytes: too much to commit")
    raise typer.Exit(int(total > TOTAL or len(folders) < len(jobs)))


if __name__ == "__main__":
    typer.run(main)
