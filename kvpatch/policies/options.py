"""The options of the policies as types, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from torch import Tensor


class PolicyOptions(TypedDict, total=False):
    """Options of the named policies, as keyword arguments of `patched`.

    `Policy.options()` lists those of one policy, `kvpatch policies` those of each. A policy of your own may have others: set
    them with `Policy.with_options(...)` or where you build it.
    """

    sinks: int  # first tokens that stay
    recent: int | float  # newest tokens that stay, a number or a share of the budget
    protect: Tensor | Sequence[int] | Sequence[bool] | str | None  # tokens that stay: a mask, ids, "image", "text" or "system"
    quota: Tensor | Sequence[Sequence[int]] | Sequence[int] | str | None  # spans that keep their share, or "messages"
    every: int  # tokens that decode steps evict at once
    turns: Literal["all", "each", "first"]  # what a later prompt's budget covers under schedule "prompt"
    protected: int | float  # tokens protected by deviation, a number or a share of the budget
    dilation: int  # tokens skipped between two of the pattern
    heads: Literal["layer", "each"]  # one choice for all heads of a layer, or one for each
    scores: Literal["all", "sampled"]  # sums over all rows of a long prompt, or over a sample
    window: int  # query rows of the observation window; with cur, tokens whose norms are compared
    kernel: int  # odd number of neighbouring tokens that are pooled
    pooling: Literal["max", "avg"] | None  # of attention over neighbouring tokens
    combine: Literal["product", "mean", "key", "value"]  # norms that make the score
    lag: int  # tokens of a partition
    sketch: int  # columns of the random matrix that keys are multiplied with
    instruction: Sequence[int] | Sequence[Sequence[int]]  # token ids, as repeat_instruction(tokenizer) gives them
    chunk: int  # tokens that are repeated at a time; with compactor, tokens that look at each other
    blend: int | float  # weight of the keys' leverage
    future: int  # coming positions whose rotations are averaged
    covariance: bool  # False takes the mean query alone
    noise: Literal["gumbel", "gaussian", "constant", "none"]  # added to the logits
    resample: bool  # draw noise anew for every query
    tau: tuple[float, float]  # temperatures at the prompt and at the last new token
    generation_length: int  # new tokens to assume without generate()
    shared: bool  # one sum for all layers
    damping: float  # factor of the sum before each addition
    size: int  # tokens of a chunk of the text
    together: bool  # whether the heads of a layer keep the same chunks
    ridge: float  # how strongly refitted values are pulled towards what they were
    queries: int  # tokens of a second reading whose queries refit values
    threshold: float  # least cosine of keys whose values are merged
    beta: int | float  # ratio of the mean budget to the last layer's
    floor: int | float  # share of the budget that every head receives
    alpha: int | float  # share of the budget for stage one; with raas and lazy, attention that counts as a use
    weight: float  # share of the attention in the score
    alike: float | None  # cosine above which a key repeats another; None counts all
    calibration: Any  # what load_calibration() returns
    reach: int  # the farthest offset of a probe, in positions
    ranges: int | float  # tokens protected by the range of their values, a number or a share of the budget
    eps: float  # weight of the norm for tokens without attention
    norm: Literal[1, 2]  # order of the norm of the projected values
