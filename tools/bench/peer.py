"""kvpatch beside another library on the same weights: two processes that take turns, each with an environment of its own.

Every figure is a ratio to the unpatched model of the same process, so that versions of transformers and the moment at which
something ran do not enter. Both run the policy with the peer's default options, evict half of the prompt once, and then
keep what is generated. `kept alike` is the share of kept entries that both kept.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import typer
from safetensors.torch import load_file
from transformers.utils import logging

from .lines import Line, latest, number, rows, where
from .models import STEPS, build
from .roofline import Ceilings, ceilings, decode_ms, prompt_ms

ROOT = Path(__file__).parents[2]
OURS = "tools.bench.peer_kvpatch"
PEERS = {"kvpress": ("tools.bench.peer_kvpress", ROOT / ".venv-kvpress" / "bin" / "python")}
_CRITICAL = "kvpress counts the observation window in the first stage and does not normalise the scores"
_MASKED = "kvpress masks what it evicts and frees nothing"
NOTES = {
    "h2o": "kvpress' ObservedAttentionPress ranks by the mean and protects nothing, so kvpatch runs that score; it needs eager "
    "attention",
    "adakv": _MASKED,
    "critical_snapkv": _CRITICAL,
    "critical_adakv": f"{_MASKED}; {_CRITICAL}",
    "block_key_norm": "kvpress reads the whole prompt, then evicts block by block; kvpatch reads it in blocks",
    "pyramidkv": "the budgets of the layers differ by rounding and by the observation window",
    "random": "the draws differ",
}
CHECKED = 128  # tokens of the prompt whose logits must agree
TOLERANCE = 1e-4  # of their largest difference to the largest logit: float32 by other kernels of the same torch


class Side:
    """A worker process; use it as a context. Raises RuntimeError, with what it printed last, where it dies."""

    def __init__(self, python: Path | str, module: str, weights: str) -> None:
        self.name, self._errors = module, tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(python), "-m", module],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._weights = weights

    def __enter__(self) -> "Side":
        try:
            self.about = self.ask("hello")
            self.about |= self.ask("load", path=self._weights)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def ask(self, do: str, **order: Any) -> Line:
        """Give an order and wait for its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().strip().splitlines()[-5:]
            raise RuntimeError(f"{self.name} ended while it was asked for {do!r}:\n" + "\n".join(said))
        return json.loads(answer)


def python_of(peer: str) -> Path:
    """The interpreter of the peer's environment.

    Raises:
        typer.BadParameter: an unknown peer, or its environment has not been made.
    """
    if peer not in PEERS:
        raise typer.BadParameter(f"no peer {peer!r} here: {', '.join(PEERS)}")
    python = PEERS[peer][1]
    if not python.exists():
        raise typer.BadParameter(f"{peer} needs an environment of its own, {python.parents[1].name}: run `make peer-env` first")
    return python


def compare(
    sides: Sequence[tuple[Path | str, str]],
    cases: Sequence[str],
    lengths: Sequence[int],
    repeats: int,
    tiny: bool,
    steps: int = STEPS,
    memory: bool = True,
) -> Iterable[Line]:
    """A line per length and case that both sides support; `sides`: ours and theirs, as interpreter and module.

    Raises:
        RuntimeError: the unpatched models disagree, or a side fails.
        typer.BadParameter: a case that one of them does not support.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = build("llama", max(lengths), tiny, steps=steps)
        logging.disable_progress_bar()
        model.save_pretrained(folder)
        with Side(*sides[0], folder) as ours, Side(*sides[1], folder) as theirs:
            both = [case for case in ours.about["cases"] if case in theirs.about["cases"]]
            if unknown := [case for case in cases if case not in both]:
                raise typer.BadParameter(f"{', '.join(unknown)}: both sides support {', '.join(both)}")
            difference = disagreement(ours, theirs, min(CHECKED, *lengths), folder)
            for n in lengths:
                unpatched = [growth(side, folder, None, n) for side in sides] if memory else []
                for case in cases or both:
                    units = measure((ours, theirs), case, n, steps, repeats)
                    figures = [figure(unit, case in s.about["eager"]) for unit, s in zip(units, (ours, theirs), strict=True)]
                    for one, side, before in zip(figures, sides, unpatched, strict=False):
                        after = growth(side, folder, case, n)
                        one |= {"peak": after, "peak_unpatched": before, "memory_ratio": after / max(before, 1)}
                    best = ceilings(small=tiny)
                    for one, side in zip(figures, (ours, theirs), strict=True):
                        one |= roofs(model, n, one, best) | {"versions": side.about["versions"]}
                    yield {
                        **where(),
                        "case": "peer",
                        "arch": "llama",
                        "policy": case,
                        "n": n,
                        "repeats": repeats,
                        "steps": steps,
                        "parameters": ours.about["parameters"],
                        "logits_difference": difference,
                        "alike": alike(*(unit[0]["kept"] for unit in units)),
                        "ours": figures[0],
                        "theirs": figures[1],
                        "ceilings": best.line(),
                        "note": NOTES.get(case, ""),
                    }


def measure(sides: Sequence[Side], case: str, n: int, steps: int, repeats: int) -> list[list[Line]]:
    """Units of both sides in turns; the first of each also tells what was kept, and its times do not count."""
    units: list[list[Line]] = [[] for _ in sides]
    for repeat in range(repeats + 1):
        for side, own in zip(sides, units, strict=True):
            own.append(side.ask("unit", case=case, n=n, steps=steps, kept=repeat == 0))
    return units


def figure(units: list[Line], eager: bool) -> Line:
    """The medians over one side's units of the ratios to its unpatched model."""
    found: Line = {"attention": "eager" if eager else "sdpa"}
    for what in ("prompt", "decode"):
        pairs = [unit[what] for unit in units[1:]]
        found[f"{what}_ratios"] = [b / a for a, b in pairs]
        found[f"{what}_ratio"] = statistics.median(found[f"{what}_ratios"])
        found[f"{what}_ms_unpatched"], found[f"{what}_ms"] = (statistics.median(column) for column in zip(*pairs, strict=True))
    if eager:
        found["prompt_ratio_eager"] = statistics.median(unit["prompt"][1] / unit["eager"] for unit in units[1:])
    found["bytes_unpatched"], found["bytes"] = units[0]["bytes"]
    return found | {"bytes_ratio": found["bytes"] / found["bytes_unpatched"]}


def roofs(model: Any, n: int, figures: Line, best: Ceilings) -> Line:
    """Lower bounds of both times; a step must read the bytes that the cache holds."""
    bounds = {"prompt": prompt_ms(model, n, best), "decode": decode_ms(model, figures["bytes"], best)}
    ratios = {f"{what}_roof_ratio": figures[f"{what}_ms"] / bound for what, bound in bounds.items()}
    return {f"{what}_roof_ms": bound for what, bound in bounds.items()} | ratios


def growth(side: tuple[Path | str, str], weights: str, case: str | None, n: int) -> int:
    """Extra peak memory of a prompt, in a new process."""
    with Side(*side, weights) as fresh:
        return int(fresh.ask("growth", case=case, n=n)["growth"])


def disagreement(ours: Side, theirs: Side, n: int, folder: str) -> float:
    """The largest difference of the unpatched models' logits, as a share of the largest logit; refuses a large one."""
    paths = [f"{folder}/logits-{i}" for i in range(2)]
    for side, path in zip((ours, theirs), paths, strict=True):
        side.ask("logits", n=n, path=path)
    a, b = (load_file(path)["logits"] for path in paths)
    difference = float((a - b).abs().max() / a.abs().max()) if a.shape == b.shape else torch.inf
    if not difference <= TOLERANCE:
        raise RuntimeError(f"the unpatched models' logits differ by {difference:.1e}: these are not the same weights")
    return difference


def alike(ours: list[Any], theirs: list[Any]) -> float:
    """The share of kept entries that both kept, over all layers and heads."""
    heads = [(set(a), set(b)) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(len(a & b) for a, b in heads) / max(1, sum(max(len(a), len(b)) for a, b in heads))


# ---- table ----

FIGURES = ("prompt_ratio", "decode_ratio", "bytes_ratio", "memory_ratio")
COLUMNS = ("policy", "n", "prompt ours", "theirs", "bound", "token ours", "theirs", "bound")
COLUMNS += ("KV bytes ours", "theirs", "extra peak ours", "theirs", "kept alike")


def cells(line: Line) -> tuple[str, ...]:
    """One table row; `roof` is the lower bound of ours as a ratio to our unpatched model."""
    ours = line["ours"]
    row = [line["policy"], str(line["n"])]
    for name in FIGURES:
        row += [number(line[side].get(name), 3) for side in ("ours", "theirs")]
        what = name.removesuffix("_ratio")
        if f"{what}_roof_ms" in ours:
            row.append(number(ours[f"{what}_roof_ms"] / ours[f"{what}_ms_unpatched"], 2))
    return (*row, number(line["alike"], 3))


def markdown(lines: list[Line]) -> str:
    """A row per case, and below it what must be known about some."""
    lines = latest(lines)
    notes = [f"- `{line['policy']}`: {line['note']}" for line in lines if line["note"]]
    eager = {line["policy"]: line["theirs"].get("prompt_ratio_eager") for line in lines}
    notes += [f"- `{name}`: theirs to unpatched eager {ratio:.3f}" for name, ratio in eager.items() if ratio is not None]
    return "\n".join([rows(COLUMNS, [cells(line) for line in lines], left=1), "", *dict.fromkeys(notes)])


def lines(peer: str, cases: Sequence[str], lengths: Sequence[int], repeats: int, tiny: bool) -> Iterable[Line]:
    """kvpatch beside `peer`."""
    sides = [(sys.executable, OURS), (python_of(peer), PEERS[peer][0])]
    for line in compare(sides, cases, lengths or (160 if tiny else 2048,), repeats, tiny):
        yield line | {"peer": peer}
