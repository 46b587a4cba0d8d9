"""The options of the policies as types, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from torch import Tensor


class PolicyOptions(TypedDict, total=False):
    """Options of the named policies, as keyword arguments of `patched`.

    `Policy.options()` lists those of one policy, `kvpatch policies` those of each. A policy of your own may have others: set
    them with `Policy.with_options(...)` or where you build it.

    Attributes:
        sinks: first tokens that stay.
        recent: newest tokens that stay, a number (int) or a share of the budget (float).
        protect: tokens of the prompt that stay: a boolean mask [n] or [B,n], token ids, or "image" or "text".
        every: tokens that decode steps evict at once (policies that evict while decoding).
        turns: what the budget of a later prompt covers under schedule "prompt": "all", "each" or "first".
        protected: tokens protected by deviation, a number or a share of the budget.
        dilation: tokens skipped between two of the pattern.
        heads: "layer" or "each".
        scores: "all", or "sampled" for sums from a sample of a long prompt's rows.
        window: query rows of the observation window; with cur, tokens whose norms are compared.
        kernel: odd number of neighbouring tokens that are pooled.
        pooling: "max", "avg" or None.
        combine: "product", "mean", "key" or "value".
        lag: tokens of a partition.
        sketch: columns of the random matrix that keys are multiplied with.
        instruction: token ids before a repeated prompt, such as repeat_instruction(tokenizer) gives.
        chunk: tokens that are repeated at a time; with compactor, tokens that look at each other.
        blend: weight of the keys' leverage.
        future: coming positions whose rotations are averaged.
        covariance: False takes the mean query alone.
        noise: "gumbel", "gaussian", "constant" or "none".
        resample: draw noise anew for every query.
        tau: temperatures at the prompt and at the last new token.
        generation_length: new tokens to assume without generate().
        shared: one sum for all layers.
        damping: factor of the sum before each addition.
        size: tokens of a chunk of the text.
        together: whether the heads of a layer keep the same chunks.
        threshold: least cosine of keys whose values are merged.
        beta: ratio of the mean budget to the last layer's.
        floor: share of the budget that every head receives.
        alpha: share of the budget that the first stage keeps; with raas and lazy, attention above which a step uses a token.
        weight: share of the attention in the score.
        alike: cosine above which a key repeats another; None counts all.
        calibration: what load_calibration() returns.
        reach: the farthest offset of a probe, in positions.
        ranges: tokens protected by the range of their values, a number or a share of the budget.
        eps: weight of the norm for tokens without attention.
        norm: 1 or 2, norm of the projected values.
    """

    sinks: int
    recent: int | float
    protect: Tensor | Sequence[int] | Sequence[bool] | str | None
    every: int
    turns: Literal["all", "each", "first"]
    protected: int | float
    dilation: int
    heads: Literal["layer", "each"]
    scores: Literal["all", "sampled"]
    window: int
    kernel: int
    pooling: Literal["max", "avg"] | None
    combine: Literal["product", "mean", "key", "value"]
    lag: int
    sketch: int
    instruction: Sequence[int] | Sequence[Sequence[int]]
    chunk: int
    blend: int | float
    future: int
    covariance: bool
    noise: Literal["gumbel", "gaussian", "constant", "none"]
    resample: bool
    tau: tuple[float, float]
    generation_length: int
    shared: bool
    damping: float
    size: int
    together: bool
    threshold: float
    beta: int | float
    floor: int | float
    alpha: int | float
    weight: float
    alike: float | None
    calibration: Any
    reach: int
    ranges: int | float
    eps: float
    norm: Literal[1, 2]
