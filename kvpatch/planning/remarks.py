"""Remarks of a plan: limits of a budget on this model, and memory that is not counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..policies.naming import Division
from .configuration import Shape
from .counting import Counter
from .known_models import ARCHITECTURES
from .repetition import Repetition


def list_remarks(
    shape: Shape, division: Division, counter: Counter, values: Mapping[str, Any], repetition: Repetition | None
) -> Iterator[str]:
    """Yield the remarks of a `plan`, each a sentence: what the budget does not change in this model, and what is not counted.

    division: when the policy evicts. counter: tells if layers share one budget. values: of config.json. repetition: the
    policy's second reading of a prompt, or None.
    """
    yield from _list_layers(shape)
    if not division.schedule:
        yield "The policy full evicts nothing."
    elif division.schedule == "prompt":
        yield "The policy evicts where the prompt ends: every generated token is kept beside the budget."
    elif division.schedule == "decode":
        yield "The policy keeps the prompt whole: k bounds the generated tokens alone."
    if counter.shares_budget:
        yield "Layers share one budget: all of them hold the whole prompt until the last one has read it."
    if repetition is not None and shape.positions is not None:
        yield (
            f"The policy reads each prompt a second time, {repetition.chunk:,} tokens at a time: the prompt and one such "
            "piece, with its instruction, must fit the model's positions together."
        )
    if values.get("quantization_config"):
        yield "The weights are quantized: bytes counted from the configuration alone are too many."
    if shape.kind.removesuffix("_text") not in ARCHITECTURES:
        yield f"kvpatch has no row for models of type {shape.kind}: kvpatch check MODEL tells if it serves this one."
    yield "Activations, logits and what the device needs for itself are not counted."


def _list_layers(shape: Shape) -> Iterator[str]:
    """Yield remarks, for `list_remarks`, on layers that slide, keep a fixed state or one latent a token, or borrow keys."""
    n, windows = len(shape.layers), sorted({one.window for one in shape.layers if one.window is not None})
    named = " or ".join(f"{one:,}" for one in windows)
    if shape.slides_everywhere:
        yield (
            f"All {n} layers slide: the full cache holds the last {named} tokens too, and a budget above that saves nothing."
        )
    elif windows:
        count = sum(one.window is not None for one in shape.layers)
        others = f"k acts on the other {n - count}"
        yield f"{count} of {n} layers slide: they hold the last {named} tokens under any policy, and {others}."
    if shape.states:
        yield f"{shape.states} layers keep a state of fixed size: it stays as it is, and its bytes are not counted here."
    if shape.borrowed:
        yield f"{shape.borrowed} layers use the keys and values of others and hold none."
    if any(one.latent for one in shape.layers):
        yield "Latent attention: a layer holds one latent for each token, not keys and values of each head."
