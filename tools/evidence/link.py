"""What a token takes when the full cache lies behind a link: an estimate from bytes alone.

A step reads the weights and its cache from the device's memory; a cache on the host crosses the link beside that. Nothing else
is counted: no launch, no product, no imperfect overlap. So it is a bound for all ways alike, and says which of them a link
decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from .page import markdown


@dataclass(frozen=True)
class Machine:
    """A device: its memory in bytes, and bytes a second of that memory and of the link to the host."""

    memory: float = 24e9
    device: float = 936e9
    link: float = 25e9


@dataclass(frozen=True)
class Load:
    """A model and a text: bytes of the weights, bytes of a token's keys and values, tokens."""

    weights: float = 16.1e9
    token: float = 131072
    tokens: int = 32768

    @property
    def cache(self) -> float:
        """Bytes of the full cache."""
        return self.token * self.tokens


def list_ways(machine: Machine, load: Load, k: float, drafted: float, per_pass: float) -> list[tuple[str, float, float, str]]:
    """Return (way, bytes on the device, seconds a token, what is lost).

    drafted, per_pass: tokens drafted for a pass over the full cache, and those that the pass yields.
    """
    step, short = (load.weights + load.cache) / machine.device, (load.weights + k * load.cache) / machine.device
    stream = max(load.weights / machine.device, load.cache / machine.link)
    held = load.weights + k * load.cache + load.cache / 16  # and two of 32 layers
    return [
        ("full cache on the device", load.weights + load.cache, step, "nothing"),
        ("transformers' offloaded cache", load.weights + load.cache / 16, stream, "nothing"),
        ("lossless=True", held, (drafted * short + stream) / per_pass, "nothing"),
        ("the budget alone", load.weights + k * load.cache, short, "as the policy's page says"),
    ]


def write_estimate(k: float, drafted: float, per_pass: float, machine: Machine = Machine()) -> str:
    """A table of the ways for texts of 32,768 and 131,072 tokens."""
    loads = [Load(tokens=32768), Load(tokens=131072)]
    ways = [list_ways(machine, load, k, drafted, per_pass) for load in loads]
    rows = []
    for found in zip(*ways, strict=True):
        cells = []
        for _, held, seconds, _ in found:
            fits = "" if held <= machine.memory else ", does not fit"
            cells += [f"{held / 1e9:.1f} GB{fits}", f"{seconds * 1e3:.0f} ms"]
        rows.append([found[0][0], *cells, found[0][3]])
    header = ["way"]
    for load in loads:
        header += [f"on the device, {load.tokens // 1024}k", f"a token, {load.tokens // 1024}k"]
    return markdown([*header, "lost"], rows)
