"""What a backend is: who computes attention and the statistics of its probabilities, and what is handed to it.

There are four tasks. A backend is a module that does some of them, and says of the others and of what it cannot take why not:

    prompt      torch, flash: attend() -> output and, where the kernel gives it, the log-sum-exp of every row
    statistics  triton: statistics() -> sums of the probabilities beside each key; torch: observe() hands the probabilities
                over block by block instead, for what only a policy can sum; both: window_sums(), of a few rows
    decode      one token over dense slots. triton: step() writes, attends, observes and evicts; torch: step() attends
    ragged      one token over heads that hold different numbers of tokens: the same, and flash: ragged_step() attends
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from .head_offsets import HeadOffsets

Task = Literal["prompt", "statistics", "decode", "ragged"]
TASKS: tuple[Task, ...] = ("prompt", "statistics", "decode", "ragged")


@dataclass
class Keys:
    """What a query may attend to. positions_BHT: -1 where a slot is empty (only if `holes`). The last Q columns of a
    prompt are its own tokens; `past` columns come before them, in text order if `ordered`. With `head_offsets` heads hold
    different numbers of tokens, and keys and values are entries [F,D] (ragged.py); each has taken `grown` more slots since
    the head_offsets were made, or None where they fill up unevenly."""

    k_BHTD: Tensor
    v_BHTD: Tensor
    positions_BHT: Tensor
    holes: bool
    past: int
    ordered: bool
    head_offsets: HeadOffsets | None = None
    grown: int | None = None


@dataclass
class Geometry:
    """How a layer attends: scale of the logits, ALiBi slopes [H,G] (added as slope * (i - t)), window in tokens.

    softcap: logits x become softcap * tanh(x / softcap) before any mask [Gemma 2]. sinks_HG: a logit of each query head that
    takes its share of the softmax and belongs to no key [gpt-oss]. coarse: where it is not None, ALiBi is coarse * (slope /
    coarse * i) for key i, slope, position and product in bfloat16 [Falcon's code].
    """

    scale: float
    slopes_HG: Tensor | None
    sliding: int | None
    softcap: float | None = None
    sinks_HG: Tensor | None = None
    coarse: float | None = None

    @property
    def plain(self) -> bool:
        """Whether the probabilities are a softmax over scaled products, biases and masks alone."""
        return self.softcap is None and self.sinks_HG is None

    @property
    def special(self) -> bool:
        """Whether kernels cannot take it."""
        return not self.plain or self.coarse is not None


@dataclass(frozen=True)
class Case:
    """What is asked of a backend, as far as it decides who can do it.

    device: its type. window: a sliding window that is shorter than what is read. padding: some keys are empty. past: keys that
    came before this piece of a prompt. gradients: the output must be differentiable. scores: probabilities are wanted, of a
    step or of all rows of a prompt. statistics: the sums made of them, by name, each with the kernels' name for the same
    computation (None: torch alone knows it). fresh: noise is drawn for every query and key. renumbered: positions are ranks,
    new at every step. special: logits are capped, a sink takes part in the softmax, or ALiBi is coarse.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    group: int = 1
    alibi: bool = False
    window: bool = False
    padding: bool = False
    past: bool = False
    gradients: bool = False
    scores: bool = False
    statistics: tuple[tuple[str, str | None], ...] = ()
    fresh: bool = False
    renumbered: bool = False
    special: bool = False


class Backend(Protocol):
    """`reason` is what every backend has; the functions of its tasks are named at the top of this file."""

    NAME: str

    def reason(self, task: Task, case: Case) -> str | None:
        """Why this backend cannot do it, in words for the user; None if it can."""
        ...
