"""Lines of JSON, one for a sample under a setting: written as they come, and not measured again."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import transformers

from .measure import Bench, Judged
from .samples import Sample
from .settings import FULL, UNREAD, Cells, Setting
from .tasks import TASKS

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """Read a file of lines; a last line that a stopped run left unfinished is dropped."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1] if line]


def append(path: Path, groups: Iterable[list[Line]]) -> Iterator[Line]:
    """Append lines, a whole group at once, and yield them; what a stopped run left after the last whole line is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not (text := path.read_bytes()).endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])
    with path.open("a", encoding="utf-8") as file:
        for group in groups:
            file.writelines(json.dumps(line) + "\n" for line in group)
            file.flush()
            yield from group


def use_one_thread() -> None:
    """Compute the same digits on any number of cores, and say nothing of what is loaded."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def load_model(model: str) -> tuple[Any, Any]:
    """Return the tokenizer and the model, in float32."""
    use_one_thread()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def run_apart(work: Callable[..., str], calls: Iterable[tuple[Any, ...]], jobs: int) -> None:
    """Print what `work` returns for each call: in processes of one thread, `jobs` at a time."""
    # spawned: a forked torch may hang on locks of threads that are not there
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), use_one_thread) as pool:
        for one in as_completed([pool.submit(work, *call) for call in calls]):
            print(one.result(), flush=True)


def _means(judged: Sequence[Judged]) -> dict[str, dict[str, float]]:
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


def _line(sample: Sample, label: str, k: float, share: float, judged: Sequence[Judged]) -> Line:
    tokens = sum(map(len, sample.turns))
    return {
        "sample": sample.name, "digest": sample.digest, "tokens": tokens,
        "label": label, "k": k, "bytes": round(share, 4), "kinds": _means(judged),
    }  # fmt: skip


def measure(model: Any, samples: Iterable[Sample], cells: Iterable[Cells], path: Path) -> Iterator[Line]:
    """Measure what the file lacks, and append the lines of a sample at once."""
    known = {(line["digest"], line["label"], line["k"]) for line in read_lines(path)}
    wanted: dict[tuple[str, float], tuple[Setting, int]] = {}
    for one in sorted(cells, key=lambda one: one.samples):  # of two that name a row at one budget, the larger
        wanted |= {(row.label, one.k): (Setting(row, one.k), one.samples) for row in one.rows}

    def measure_sample(i: int, sample: Sample) -> list[Line]:
        own = [setting for setting, count in wanted.values() if i < count]
        missing = [one for one in own if (sample.digest, one.row.label, one.k) not in known]
        whole = (sample.digest, FULL, 1.0) not in known
        if not own or not (missing or whole):
            return []
        bench = Bench(model, sample)
        new = [_line(sample, FULL, 1.0, 1.0, bench.judged), _line(sample, UNREAD, 0.0, 0.0, bench.unread)] if whole else []
        for setting in missing:
            judged, share = bench.measure(setting)
            new.append(_line(sample, setting.row.label, setting.k, share, judged))
        return new

    return append(path, itertools.starmap(measure_sample, enumerate(samples)))


def run_task(model: str, name: str, cells: Sequence[Cells], folder: Path) -> str:
    """Measure cells of a task, or its own where none are given; return a sentence. (No process imports __main__.)"""
    start = time.monotonic()
    tokenizer, loaded = load_model(model)
    wanted = cells or TASKS[name].cells
    samples = TASKS[name].make(tokenizer, max(one.samples for one in wanted))
    new = sum(1 for _ in measure(loaded, samples, wanted, folder / f"{name}.jsonl"))
    return f"{name}: {new} new lines in {time.monotonic() - start:.0f} s"
