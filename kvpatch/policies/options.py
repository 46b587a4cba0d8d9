"""The options of the policies as types, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from torch import Tensor


class PolicyOptions(TypedDict, total=False):
    """Options of the named policies, as keyword arguments of `patched`; `Policy.options()` lists those of one policy.

    A policy of your own may have others: set them with `Policy.with_options(...)` or where you build it.

    Attributes:
        sinks: first tokens that stay.
        recent: newest tokens that stay, a number (int) or a share of the budget (float).
        protect: tokens of the prompt that stay: a boolean mask [n] or [B,n], token ids, or "image" or "text".
        every: tokens that decode steps evict at once (policies that evict while decoding).
        turns: what the budget of a later prompt covers under schedule "prompt": "all", "each" or "first".
        protected: tokens protected by deviation (roco), a number or a share of the budget.
        dilation: tokens skipped between two of the pattern (dilated_window).
        heads: "layer" or "each" (tova).
        scores: "all", or "sampled" for sums from a sample of a long prompt's rows (h2o, scissorhands, roco, keyformer).
        window: query rows of the observation window (snapkv, pyramidkv, adakv, chunk_kv, dropkv, r_kv, vase), or tokens whose
            norms are compared (cur).
        kernel: odd number of neighbouring tokens that are pooled (those with an observation window).
        pooling: "max", "avg" or None (those with an observation window).
        combine: "product", "mean", "key" or "value" (cur).
        lag: tokens of a partition (lag_kv).
        sketch: columns of the random matrix that keys are multiplied with (leverage, compactor).
        instruction: token ids before a repeated prompt, such as repeat_instruction(tokenizer) gives (kvzip, kvzip_plus).
        chunk: tokens that are repeated at a time (kvzip, kvzip_plus), or that look at each other (compactor).
        blend: weight of the keys' leverage (compactor).
        future: coming positions whose rotations are averaged (expected_attention).
        covariance: False takes the mean query alone (expected_attention).
        noise: "gumbel", "gaussian", "constant" or "none" (keyformer).
        resample: draw noise anew for every query (keyformer).
        tau: temperatures at the prompt and at the last new token (keyformer).
        generation_length: new tokens to assume without generate() (keyformer).
        shared: one sum for all layers (keyformer).
        damping: factor of the sum before each addition (keyformer).
        size: tokens of a chunk (chunk_kv, chunked).
        together: whether the heads of a layer keep the same chunks (chunk_kv, chunked).
        threshold: least cosine of keys whose values are merged (merged).
        beta: ratio of the mean budget to the last layer's (pyramid).
        floor: share of the budget that every head receives (adaptive, global_topk).
        alpha: share of the budget that the first stage keeps (critical), or attention above which a step uses a token (raas,
            lazy).
        weight: share of the attention in the score (r_kv).
        alike: cosine above which a key repeats another; None counts all (r_kv).
        calibration: what load_calibration() returns (q_filter, tri_attention, duo, learned).
        reach: the farthest offset of a probe, in positions (tri_attention).
        ranges: tokens protected by the range of their values, a number or a share of the budget (vase).
        eps: weight of the norm for tokens without attention (critical, expected_attention).
        norm: 1 or 2, norm of the projected values (critical).
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
