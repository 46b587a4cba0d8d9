"""Lines of JSON, one for a sample under a setting: written as they come, and not measured again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .measure import Bench, Judged
from .samples import Sample
from .settings import FULL, UNREAD, Cells, Setting
from .tasks import TASKS


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of lines; a last line that a stopped run left unfinished is dropped."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1] if line]


def cut_unfinished_line(path: Path) -> None:
    """Remove what a stopped run left behind the last whole line."""
    if path.exists() and not (text := path.read_bytes()).endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])


def _means(judged: list[Judged]) -> dict[str, dict[str, float]]:
    """Mean judgement of each kind of probe; for several of a kind, the nats of the worst too."""
    found: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(one.kind for one in judged):
        own = [one for one in judged if one.kind == kind]
        found[kind] = {
            name: round(sum(getattr(one, name) for one in own) / len(own), 5) for name in ("nats", "right", "kl", "agree")
        }
        if len(own) > 1:
            found[kind]["worst"] = round(max(one.nats for one in own), 5)
    return found


def _line(sample: Sample, label: str, k: float, share: float, judged: list[Judged]) -> dict[str, Any]:
    tokens = sum(map(len, sample.turns))
    return {
        "sample": sample.name, "digest": sample.digest, "tokens": tokens,
        "label": label, "k": k, "bytes": round(share, 4), "kinds": _means(judged),
    }  # fmt: skip


def measure(model: Any, samples: Iterable[Sample], cells: Iterable[Cells], path: Path) -> Iterator[dict[str, Any]]:
    """Measure what the file lacks, sample by sample, and append it."""
    known = {(line["digest"], line["label"], line["k"]) for line in read_lines(path)}
    wanted: dict[tuple[str, float], tuple[Setting, int]] = {}
    for one in sorted(cells, key=lambda one: one.samples):  # of two that name a row at one budget, the larger
        wanted |= {(row.label, one.k): (Setting(row, one.k), one.samples) for row in one.rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_unfinished_line(path)
    with path.open("a", encoding="utf-8") as file:
        for i, sample in enumerate(samples):
            own = [setting for setting, count in wanted.values() if i < count]
            missing = [one for one in own if (sample.digest, one.row.label, one.k) not in known]
            whole = (sample.digest, FULL, 1.0) not in known
            if not own or not (missing or whole):
                continue
            bench = Bench(model, sample)
            new = [_line(sample, FULL, 1.0, 1.0, bench.judged), _line(sample, UNREAD, 0.0, 0.0, bench.unread)] if whole else []
            for setting in missing:
                judged, share = bench.measure(setting)
                new.append(_line(sample, setting.row.label, setting.k, share, judged))
            for line in new:
                file.write(json.dumps(line) + "\n")
                yield line
            file.flush()


def run_task(model: Any, tokenizer: Any, name: str, cells: Sequence[Cells], folder: Path) -> int:
    """Measure cells of a task, or its own where none are given; return how many lines are new."""
    task = TASKS[name]
    wanted = cells or task.cells
    samples = task.make(tokenizer, max(one.samples for one in wanted))
    return sum(1 for _ in measure(model, samples, wanted, folder / f"{name}.jsonl"))
