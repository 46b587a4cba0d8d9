"""Protocol of backends: the tasks that they perform and the records that they receive.

There are five tasks. A backend is a module that performs some of them; for the others, and for cases that it cannot take,
`reason` returns why not.

    prompt      all three backends: attend() -> output and, if the kernel returns it, the log-sum-exp of every row; triton also
                that of the noisy logits
    statistics  triton: statistics() -> sums of the probabilities per key; torch: observe() passes the probabilities block by
                block to an observer, for any sum that a policy defines; both: window_sums() of a few rows
    replay      all rows of a text whose keys die, with gradients. triton: attend() and gradients(); torch: attend()
    decode      one token over dense slots. triton: step() writes, attends, observes and evicts; torch: step() attends
    ragged      one token over heads that hold different numbers of tokens: as decode, and flash: ragged_step() attends
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..policies.context import Limits
from ..policies.windows import Chunk
from .entries import EXACT, FULL, Codecs
from .head_offsets import HeadOffsets

Task = Literal["prompt", "statistics", "replay", "decode", "ragged"]
Special = Literal["softcap", "sinks", "coarse", "chunk"]
SPECIAL: dict[Special, str] = {  # variants of attention that few kernels compute
    "softcap": "capped logits",
    "sinks": "attention sinks",
    "coarse": "ALiBi rounded to bfloat16",
    "chunk": "attention in chunks",
}
TASKS: tuple[Task, ...] = ("prompt", "statistics", "replay", "decode", "ragged")


@dataclass
class Keys:
    """Keys and values that queries may attend to.

    Attributes:
        k_BHTD: keys; flat entries [F,D] with `head_offsets`.
        v_BHTD: values, likewise.
        positions_BHT: int64, -1 in an empty slot. The last Q columns of a prompt are its own tokens.
        may_have_empty: False if a token is in every slot.
        columns_before: number of columns before the prompt's own.
        ordered: whether those columns are in text order.
        head_offsets: offsets of the heads if they hold different numbers of tokens.
        grown: slots that every head has taken since the offsets were made; None if heads fill up unevenly.
        codecs: what the entries of keys and values mean: numbers, or bytes to be unpacked.
        deaths_BHT: int32, position of the first query that no longer sees a key, in a replay; None: each sees all.
    """

    k_BHTD: Tensor
    v_BHTD: Tensor
    positions_BHT: Tensor
    may_have_empty: bool
    columns_before: int
    ordered: bool
    head_offsets: HeadOffsets | None = None
    grown: int | None = None
    codecs: Codecs = EXACT
    deaths_BHT: Tensor | None = None

    @property
    def exact(self) -> bool:
        """Tell whether keys and values are numbers, not rounded entries."""
        return all(codec.exact for codec in self.codecs)

    def columns(self, start: int, stop: int) -> Keys:
        """Return views of the keys and values in columns [start, stop), for attention that is computed part by part.

        `_attend_cpu`, `_Part.of` and `_by_torch` call it. In the result all columns count as `columns_before`.
        """
        columns = slice(start, stop)
        k, v, positions = (t[:, :, columns] for t in (self.k_BHTD, self.v_BHTD, self.positions_BHT))
        return replace(self, k_BHTD=k, v_BHTD=v, positions_BHT=positions, columns_before=stop - start)


@dataclass
class Noise:
    """Noise of the logits in a prompt's statistic "gumbel": softmax((logits + noise) / tau).

    Attributes:
        weights_BHTG: exp(noise), float32.
        tau: temperature.
    """

    weights_BHTG: Tensor
    tau: float


@dataclass
class Attended:
    """Results of a prompt's attention.

    Attributes:
        out: output [B,H,G,Q,D].
        lse: log-sum-exp [B,H,G,Q] of the rows, attention sinks included, if the kernel returns it for the same logits.
        noisy: log-sum-exp of the noisy logits, without sinks, if it was asked for and the kernel returns it.
    """

    out: Tensor
    lse: Tensor | None = None
    noisy: Tensor | None = None


@dataclass
class Geometry:
    """Variant of attention that a layer computes.

    Attributes:
        scale: factor of the logits.
        slopes_HG: ALiBi slopes; key i's logit for the query at t gets slope * (i - t) added. None without ALiBi.
        sliding: window in tokens, a Chunk if it begins anew instead of sliding (policies/windows.py); None without one.
        softcap: logits x become softcap * tanh(x / softcap) before masking [Gemma 2]; None for no cap.
        sinks_HG: a logit per query head in the softmax that belongs to no key [gpt-oss]; None without.
        coarse: if not None, ALiBi of key i is coarse * (slope / coarse * i), with slope, position and product rounded to
            bfloat16 [Falcon's code].
    """

    scale: float
    slopes_HG: Tensor | None
    sliding: int | None
    softcap: float | None = None
    sinks_HG: Tensor | None = None
    coarse: float | None = None

    @property
    def chunk(self) -> Chunk | None:
        """Return the window if it is cut in chunks (Llama 4), else None."""
        return self.sliding if isinstance(self.sliding, Chunk) else None

    @property
    def plain(self) -> bool:
        """Tell whether the probabilities are a softmax over scaled products, biases and masks alone."""
        return self.softcap is None and self.sinks_HG is None

    @property
    def special(self) -> tuple[Special, ...]:
        """Return the layer's features that only some kernels compute: a cap of logits, sinks, coarse ALiBi, chunks."""
        values = (self.softcap, self.sinks_HG, self.coarse, self.chunk)
        return tuple(name for name, value in zip(SPECIAL, values, strict=True) if value is not None)


@dataclass(frozen=True)
class Case:
    """Properties of a call that decide which backends can perform it.

    Attributes:
        device: type of the device, "cpu" or "cuda".
        dtype: of queries, keys and values.
        head_dim: D, of queries and keys.
        group: G, query heads per KV head.
        alibi: positions act on the logits, as ALiBi's biases.
        window: there is a window shorter than the text.
        padding: some keys are empty.
        past: there are keys before this piece of the prompt.
        gradients: the output must be differentiable.
        scores: probabilities are needed, of a step or of all rows of a prompt.
        statistics: names of the sums over probabilities, each with the kernels' name of the same computation, or None if only
            torch computes it.
        fresh: the policy's statistic draws new noise for every pair of query and key.
        renumbered: positions are ranks among the held tokens, new at every step.
        special: names of Geometry's variants: the cap of logits, attention sinks, coarse ALiBi, chunks shorter than the text.
        bits: of the entries of keys and values: 16, or rounded to 8 or 4.
        value_dim: size of a value; None if it is D.
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
    special: tuple[Special, ...] = ()
    bits: int = FULL
    value_dim: int | None = None


class Memory(NamedTuple):
    """Keys and values where they lie, for a kernel that reads and writes them there.

    keys, values: slots [B,H,C,D], or entries [F,D]. begin_N: first entry of each head, or of each head's pages [B*H,M], of
    `page` slots each. capacity_N: slots of each head; None: C of each.
    """

    keys: Tensor
    values: Tensor
    begin_N: Tensor | None = None
    capacity_N: Tensor | None = None
    page: int | None = None


class KeyValues(Protocol):
    """Keys and values in slots, as entries of `codecs`."""

    codecs: Codecs

    def locate_entries(self) -> Memory:
        """Return where the keys and values lie, for a kernel of a decode step."""
        ...


class FreeSlots(Protocol):
    """Mode of a layer in which each head has a free slot, `free_BH`, that the next token goes to."""

    free_BH: Tensor


class StepSlots(Protocol):
    """A layer as a kernel takes it that writes, attends, observes and evicts at once (cache/layer.py describes the fields)."""

    positions: Tensor
    state: dict[str, Tensor]
    keep_BH1: Tensor | None
    limits: Limits | None
    may_have_empty: bool

    @property
    def kv(self) -> KeyValues:
        """Keys and values, as the layer stores them."""
        ...

    @property
    def mode(self) -> FreeSlots:
        """Mode of the layer, which names the slot of each head that the next token goes to."""
        ...
