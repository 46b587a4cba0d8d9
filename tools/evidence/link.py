"""What a token takes when the full cache lies behind a link: an estimate from bytes alone.

A step reads the weights and its cache from the device's memory; a cache on the host crosses the link beside that. Nothing else
is counted: no launch, no product, no imperfect overlap. So it is a bound for all ways alike, and says which of them a link
decides.
"""

from __future__ import annotations

from .tables import markdown

MEMORY, DEVICE, LINK = 24e9, 936e9, 25e9
"""Of the device: bytes of memory, bytes a second of it and of the link to the host."""
WEIGHTS, TOKEN, TOKENS = 16.1e9, 131072, (32768, 131072)
"""Bytes of the model's weights and of a token's keys and values; tokens of the texts."""


def list_ways(tokens: int, k: float, drafted: float, per_pass: float) -> list[tuple[str, float, float, str]]:
    """Return (way, bytes on the device, seconds a token, what is lost).

    drafted, per_pass: tokens drafted for a pass over the full cache, and those that the pass yields.
    """
    cache = TOKEN * tokens
    whole, short = WEIGHTS + cache, WEIGHTS + k * cache
    stream = max(WEIGHTS / DEVICE, cache / LINK)
    layers = cache / 16  # two of 32
    return [
        ("full cache on the device", whole, whole / DEVICE, "nothing"),
        ("transformers' offloaded cache", WEIGHTS + layers, stream, "nothing"),
        ("lossless=True", short + layers, (drafted * short / DEVICE + stream) / per_pass, "nothing"),
        ("the budget alone", short, short / DEVICE, "as the policy's page says"),
    ]


def write_estimate(k: float, drafted: float, per_pass: float) -> str:
    """A table of the ways for texts of each length."""
    rows = []
    for found in zip(*(list_ways(tokens, k, drafted, per_pass) for tokens in TOKENS), strict=True):
        cells = []
        for _, held, seconds, _ in found:
            fits = "" if held <= MEMORY else ", does not fit"
            cells += [f"{held / 1e9:.1f} GB{fits}", f"{seconds * 1e3:.0f} ms"]
        rows.append([found[0][0], *cells, found[0][3]])
    sizes = [f"{what}, {tokens // 1024}k" for tokens in TOKENS for what in ("on the device", "a token")]
    return markdown(["way", *sizes, "lost"], rows)
