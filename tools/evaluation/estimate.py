"""What a table of the papers would run, about how long, and what it would download: nothing is loaded for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.evaluation.published import HARNESS, MODELS, Job, Published
from tools.evaluation.summary import markdown
from tools.evaluation.task import Setting

FLOPS, BYTES = 2e14, 1.5e12
"""Of the estimate: what a GPU of the A100's class does per second with prompts, and reads of weights while it writes."""


@dataclass(frozen=True)
class Way:
    """How jobs are run. places: where the papers' models lie; samples: None is each job's own number."""

    out: Path
    places: Mapping[str, str]
    samples: int | None = None
    batch: int = 8
    dtype: str = "auto"
    device: str = "auto"


def seconds_of(job: Job, setting: Setting, way: Way) -> float:
    """About how long a GPU computes: prompts by their products or by their passes, then a step a token."""
    parameters = MODELS[job.model][1]
    read = 2 * parameters / BYTES / way.batch  # a row's share of one pass over 16-bit weights
    passes = -(-job.prompt // setting.options["block"]) if setting.options.get("block") else 1
    return (way.samples or job.samples) * (max(2 * parameters * job.prompt / FLOPS, passes * read) + job.new * read)


def dry(one: Published, wanted: Mapping[Job, list[Setting]], way: Way) -> str:
    """What would run, how long, and what must be downloaded."""
    groups: dict[tuple[str, ...], list[tuple[str, float]]] = {}
    for job, settings in wanted.items():
        seconds = sum(seconds_of(job, setting, way) for setting in settings)
        names = ", ".join(f"{name} {k:g}" for name, k in dict.fromkeys((one.name, one.k) for one in settings))
        said = " ".join(str(value) for _, value in job.options)
        parts = groups.setdefault((job.model, job.task, names, str(way.samples or job.samples)), [])
        parts.append((f"{job.data} {said}".strip(), seconds))
    total = sum(seconds for parts in groups.values() for _, seconds in parts) / 3600
    rows = [
        [model, task, ", ".join(data for data, _ in parts), names, samples, f"{sum(seconds for _, seconds in parts) / 60:.0f}"]
        for (model, task, names, samples), parts in groups.items()
    ]
    models = {job.model: MODELS[job.model] for job in wanted}
    fetched = [f"{name}: {way.places.get(name, hub)}, about {2 * size / 1e9:.0f} GB" for name, (hub, size) in models.items()]
    hub = dict.fromkeys(job.data if job.task != "longbench" else "THUDM/LongBench" for job in wanted if job.task != HARNESS)
    theirs = dict.fromkeys(job.data for job in wanted if job.task == HARNESS)
    lines = [f"# {one.title}", "", markdown(("model", "task", "data", "settings", "samples of each", "minutes"), rows), ""]
    lines += [f"About {total:.1f} hours on one GPU of the A100's class ({way.batch} rows at a time), without loading.", ""]
    lines += ["To be downloaded, weights in 16 bits:", "", *(f"- {line}" for line in fetched)]
    lines += [f"- the first rows of {name}, streamed from the hub" for name in hub]
    lines += [f"- what lm-evaluation-harness' task {name} reads" for name in theirs]
    return "\n".join([*lines, "", *(f"- {note}" for note in one.notes)]) + "\n"
