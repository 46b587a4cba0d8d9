"""Memory over many decode steps and many blocks: a section of docs/reliability.md, and its picture.

    python -m tools.reliability.memory [--steps 10000] [--cycles 1000]

Every series runs in a process of its own, forked from one that has made the model: what it takes beside is its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import multiprocessing
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import kvpatch
from tools.bench.memory import find_slope, measure_resident
from tools.reliability.page import FOLDER, put

ROWS, PROMPT, HELD, VOCAB = 2, 256, 128, 97
SERIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "h2o": ("h2o", HELD, {}),
    "keyformer": ("keyformer", HELD, {"tau": (1.0, 2.0), "generation_length": 1000}),
    "tova, renumbered": ("tova", HELD, {"positions": "renumbered"}),
    "adaptive(roco), ragged": (kvpatch.policies.adaptive("roco"), HELD, {}),
    "streaming_llm, 4-token blocks": ("streaming_llm", HELD, {"block": 4}),
    "full": ("full", 1.0, {}),
}


@dataclass(frozen=True)
class Sample:
    """After so many steps or cycles: resident memory, and tensors made since the series began, which are still alive."""

    at: int
    rss: int
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class Series:
    """kind: "step" or "cycle". wall: seconds."""

    name: str
    kind: str
    samples: list[Sample]
    wall: float

    def slope(self, name: str) -> float:
        """Least squares per 1,000 steps or cycles, over all but the first tenth."""
        return 1000 * find_slope([(one.at, getattr(one, name)) for one in self.samples], 0.1)


def tiny(positions: int = 16384) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": positions}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=None, pad_token_id=0)).eval()
    with torch.no_grad():  # weights so large that attention is far from uniform
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.25)
    return model


def look(at: int) -> Sample:
    """gc.freeze() was called before: what was there then is not counted."""
    alive = [thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in alive}
    return Sample(at, measure_resident(), len(alive), sum(storages.values()))


def decode(model: Any, name: str, steps: int, every: int) -> Iterator[Sample]:
    """One text of `steps` greedy tokens per row, in a loop over the model itself; without the ids of its tokens."""
    policy, k, options = SERIES[name]
    ids = torch.randint(1, VOCAB, (ROWS, PROMPT), generator=torch.Generator().manual_seed(1))
    with kvpatch.patched(model, policy, k, **options) as patch:
        cache = patch.new_cache()
        out = model(ids, past_key_values=cache)
        for step in range(1, steps + 1):
            out = model(out.logits[:, -1:].argmax(-1), past_key_values=cache)
            if step % every == 0:
                sample = look(step)  # ids grow with the text, 8 bytes a token, as they should
                yield dataclasses.replace(sample, nbytes=sample.nbytes - cache.ids.nbytes)


def enter_and_leave(model: Any, name: str, cycles: int, every: int) -> Iterator[Sample]:
    """Blocks around a generate() of two tokens."""
    policy, k, options = SERIES[name]
    ids = torch.randint(1, VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))
    for cycle in range(1, cycles + 1):
        with kvpatch.patched(model, policy, k, **options):
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False, pad_token_id=0)
        if cycle % every == 0:
            yield look(cycle)


def measure(job: tuple[Any, str, str, int, int]) -> Series:
    model, name, kind, count, every = job
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    start = time.perf_counter()
    with torch.no_grad():
        samples = list((decode if kind == "step" else enter_and_leave)(model, name, count, every))
    gc.unfreeze()
    return Series(name, kind, samples, time.perf_counter() - start)


# ---- the page ----


def table(all_series: list[Series]) -> str:
    """Markdown: first, last and slope of each measure."""
    lines = [
        "| series | what | resident, MiB: first, last | KiB per 1,000 | tensors: first, last | per 1,000 | "
        "their bytes, KiB: first, last | KiB per 1,000 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for series in all_series:
        first, last = series.samples[0], series.samples[-1]
        lines.append(
            f"| {series.name} | {last.at:,} {series.kind}s | {first.rss / 2**20:.1f}, {last.rss / 2**20:.1f} | "
            f"{series.slope('rss') / 1024:+.1f} | {first.tensors}, {last.tensors} | {series.slope('tensors'):+.2f} | "
            f"{first.nbytes / 1024:.1f}, {last.nbytes / 1024:.1f} | {series.slope('nbytes') / 1024:+.2f} |"
        )
    return "\n".join(lines)


def page(all_series: list[Series], command: str) -> str:
    every, python = all_series[0].samples[0].at, platform.python_version()
    return f"""## Memory

Made by `{command}` (kvpatch {kvpatch.__version__}, torch {torch.__version__.split("+")[0]}, transformers
{transformers.__version__}, Python {python}). A Llama of two layers, {ROWS} rows, a prompt of {PROMPT} tokens, {HELD} tokens
per KV head, one thread; every {every} steps the process' resident memory, and all tensors that were made since the series began
and are alive. A cycle enters a block, generates two tokens and leaves it. Slopes are least squares over all but the first
tenth. `full` keeps everything and is there to show what growth looks like.

{table(all_series)}

![Resident memory and bytes of tensors over the steps](reliability/memory.png)
"""


def plot(all_series: list[Series], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for series in (one for one in all_series if one.kind == "step"):
        x = [one.at for one in series.samples]
        style = {"label": series.name, "linestyle": "--" if series.name == "full" else "-"}
        left.plot(x, [(one.rss - series.samples[0].rss) / 2**20 for one in series.samples], **style)
        right.plot(x, [one.nbytes / 1024 for one in series.samples], **style)
    left.set(xlabel="decode steps", ylabel="resident memory above the first sample, MiB")
    right.set(xlabel="decode steps", ylabel="bytes of living tensors, KiB", yscale="log")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--cycles", type=int, default=1_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = tiny()
    jobs = [(name, "step", args.steps, max(args.steps // 100, 1)) for name in SERIES]
    jobs += [(name, "cycle", args.cycles, max(args.cycles // 100, 1)) for name in ("h2o", "adaptive(roco), ragged")]
    done = []
    for job in jobs:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            done.append(pool.apply(measure, ((model, *job),)))
        print(f"{job[0]}: {job[2]} {job[1]}s in {done[-1].wall:.0f} s", flush=True)
    command = f"python -m tools.reliability.memory --steps {args.steps} --cycles {args.cycles}"
    put(page(done, command))
    FOLDER.mkdir(exist_ok=True)
    plot(done, FOLDER / "memory.png")
    print(table(done))


if __name__ == "__main__":
    main()
