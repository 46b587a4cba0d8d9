"""What a decode step costs before any arithmetic: launches, the host's time, its waits; per layer, on the CPU, for any policy.

Launches and waits of two models of different depth are counted: their difference is what each layer adds, the rest is there
once. The host's time is CPU time of a narrow model's step; on the Triton path kernels are not launched, so that what Triton's
own launcher takes is not in it.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TypeVar

import torch
from transformers import PreTrainedModel

import kvpatch

from .counting import Counting, counting, launching, unlaunched
from .decode import alternate
from .lines import HOST_ARCH, K, Line, latest, number, record, rows
from .models import build, build_narrow, forward, tokens, twin

UNPATCHED = "unpatched"
PATHS = ("torch", "triton")
SHALLOW, DEEP = 2, 3  # layers
SETTLED = 4  # steps before the one that is counted
WINDOWED = ("snapkv", "pyramidkv", "adakv")  # by the last name in "critical(adakv)"
WINDOW = 8  # of observation, below the budget of a short prompt
Counts = TypeVar("Counts")


@dataclass
class Figure:
    """A count `once` for the whole forward, and `per_layer`."""

    per_layer: float
    once: float

    def __str__(self) -> str:
        return f"{self.per_layer:g} + {self.once:g} once" if self.once else f"{self.per_layer:g}"

    @classmethod
    def of(cls, shallow: int, deep: int) -> "Figure":
        per_layer = (deep - shallow) / (DEEP - SHALLOW)
        return cls(per_layer, shallow - SHALLOW * per_layer)


def over_depths(count: Callable[[int], Counts]) -> tuple[Counts, Counts]:
    """What is counted with so many layers, of both depths."""
    return count(SHALLOW), count(DEEP)


def counted(policy: str, path: str, n: int = 64, batch: int = 1, masked: bool = False, **own: int) -> dict[str, Figure]:
    """Launches and waits of a decode step and of the prompt of `n` tokens, and kernels of the step; own: options of the policy.

    masked: the prompt has an attention mask, under which the first row begins with padding.
    """
    shallow, deep = over_depths(lambda layers: _counts(policy, path, layers, n, batch, masked, options(policy) | own))
    figures = {}
    for name, part, kind in (
        ("launches", 1, "launches"), ("kernels", 1, "kernels"), ("waits", 1, "waits"), ("prompt_waits", 0, "waits"),
        ("prompt_launches", 0, "launches"),
    ):  # fmt: skip
        totals = (sum(getattr(counts[part], kind).values()) for counts in (shallow, deep))
        figures[name] = Figure.of(*totals)
    return figures


@torch.no_grad()
def _counts(
    policy: str, path: str, layers: int, n: int, batch: int, masked: bool, own: dict[str, int]
) -> tuple[Counting, Counting]:
    """What the prompt and one later decode step of a narrow Llama ask of a device."""
    model = build_narrow(n + SETTLED + 1, layers)
    ids = tokens(model, n + SETTLED + 1, batch)
    mask = torch.ones_like(ids[:, :n]) if masked else None
    if mask is not None:
        mask[0, : n // 4] = 0
    if policy == UNPATCHED:
        return _prompt_and_step(model, ids, n, mask)
    # launches do not depend on what a kernel computes, but for heads that share a budget by their scores
    ragged = kvpatch.get_policy(policy).over_heads is not None
    patched = kvpatch.patched(model, policy, k=K, backend=path, **own)  # type: ignore[arg-type]
    with patched, nullcontext() if ragged else launching(unlaunched):
        return _prompt_and_step(model, ids, n, mask)


def _prompt_and_step(model: PreTrainedModel, ids: torch.Tensor, n: int, mask: torch.Tensor | None) -> tuple[Counting, Counting]:
    with counting() as prompt:
        past = forward(model, ids[:, :n], attention_mask=mask)[0]
    for t in range(n, n + SETTLED):
        forward(model, ids[:, t : t + 1], past)
    with counting() as step:
        forward(model, ids[:, -1:], past)
    return prompt, step


def options(policy: str) -> dict[str, int]:
    """Options that make a policy's budget differ from its window on a short prompt."""
    return {"window": WINDOW} if policy.rstrip(")").endswith(WINDOWED) else {}


def launch_lines(policies: Iterable[str], n: int, repeats: int, tiny: bool, steps: int = 20) -> Iterable[Line]:
    """One line per policy and path: what a step launches and waits for, and the host's microseconds per layer."""
    model = build(HOST_ARCH, n, tiny, steps=steps)
    ids = tokens(model, n + steps)
    full, layers = forward(model, ids[:, :n])[0], model.config.num_hidden_layers
    for policy in policies:
        for path in PATHS if find_spec("triton") else PATHS[:1]:
            other = twin(model)
            figures = {"path": path, "layers": layers}
            figures |= {name: vars(figure) for name, figure in counted(policy, path).items()}
            figures["launches_unpatched"] = vars(counted(UNPATCHED, path)["launches"])
            with kvpatch.patched(other, policy, k=K, backend=path, **options(policy)):
                evicting = forward(other, ids[:, :n])[0]
                with launching(unlaunched):
                    times = alternate([(model, full), (other, evicting)], ids, steps, repeats)
            figures |= {name: times[name] for name in ("ms", "ms_unpatched", "ratio")}
            yield record("launches", HOST_ARCH, policy, n, repeats, model, figures)


COLUMNS = ("policy", "path", "launches per layer", "Triton's", "unpatched", "once", "waits of a step", "of a prompt")
COLUMNS += ("host us per layer", "unpatched", "ratio")


def cells(line: Line) -> tuple[str, ...]:
    """One table row."""
    layers = line["layers"]
    launches, unpatched = (Figure(**line[name]) for name in ("launches", "launches_unpatched"))
    waits, prompt_waits = (Figure(**line[name]) for name in ("waits", "prompt_waits"))
    return (
        line["policy"],
        line["path"],
        f"{launches.per_layer:g}",
        f"{Figure(**line['kernels']).per_layer:g}",
        f"{unpatched.per_layer:g}",
        f"{launches.once:g} ({unpatched.once:g})",
        str(waits),
        str(prompt_waits),
        *(number(1000 * line[name] / layers, 0) for name in ("ms", "ms_unpatched")),
        number(line["ratio"], 2),
    )


def markdown(lines: list[Line]) -> str:
    """The table of docs/benchmarks.md."""
    return rows(COLUMNS, [cells(line) for line in latest(lines)], left=2)
