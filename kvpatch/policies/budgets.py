"""Budgets `k` and protected sizes, checked once and converted to numbers of tokens.

Shares are rounded down as `floor(share * n + 1e-6)`, so that 0.29 of 100 is 29. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

from ..errors import KVPatchError

if TYPE_CHECKING:
    from torch import Tensor

    from .context import EvictionContext

MAX_POSITION = (1 << 30) - 1

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BYTES = {unit.upper(): size for unit, size in _UNITS.items()}
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d+)?)\s*([KMGT]?i?B)\s*", re.IGNORECASE)
_WANTED = (
    "Give a share of the prompt such as k=0.5, a number of tokens such as k=1024, a size such as k='2GiB', or a list "
    "with one of these per layer."
)
ONE_TOKEN = "[kvpatch] k=1 keeps one token per KV head. If all are meant, k=1.0 keeps everything."


def share(value: int | float, of: int) -> int:
    """Return a budget or a protected size in tokens: an int unchanged, a float as a share of `of` tokens, rounded down.

    Example:
        >>> share(0.29, 100), share(16, 100)
        (29, 16)
    """
    return value if isinstance(value, int) else math.floor(value * of + 1e-6)  # 0.29 * 100 is 28.999999999999996


def parse_bytes(text: str) -> int | None:
    """Return the bytes of a size that a user gives as k= or memory=, such as "512MB" or "2GiB"; None if `text` is no size."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2].upper() not in _BYTES:
        return None
    return int(float(match[1]) * _BYTES[match[2].upper()])


def is_number(value: object) -> TypeGuard[int | float]:
    """Tell whether an option is a number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_count(name: str, value: object, unit: str, least: int = 1) -> None:
    """Raise KVPatchError unless an option is an int between `least` and MAX_POSITION; `unit` names what it counts.

    The methods `check` of scores, and functions that a user calls such as `Patch.new_cache`, begin with it.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_POSITION:
        most = f", at most {MAX_POSITION}" if isinstance(value, int) and value > MAX_POSITION else ""
        raise KVPatchError(f"{name}={value!r} must be a number of {unit}, at least {least}{most}.")


def check_k(k: object, shown: str) -> None:
    """Raise KVPatchError unless `k`, as a user gives it, is one budget: tokens, a share or a size.

    `parse_k` and `Mass.__post_init__` call it. shown: the option and its value as the error shows them, such as "k[3]=0".
    """
    if isinstance(k, bool) or not isinstance(k, int | float | str):
        raise KVPatchError(f"{shown} is not a budget. {_WANTED}")
    if isinstance(k, str):
        if not parse_bytes(k):
            raise KVPatchError(f"{shown} is not a size (a number and one of {', '.join(_UNITS)}). {_WANTED}")
    elif isinstance(k, int):
        if k < 1:
            raise KVPatchError(f"{shown} tokens keeps nothing: it must be at least 1. {_WANTED}")
        if k > MAX_POSITION:
            raise KVPatchError(f"{shown} tokens is more than any text has ({MAX_POSITION}): use k=1.0 to keep everything.")
    elif not 0.0 < k <= 1.0:  # NaN fails this too
        raise KVPatchError(f"{shown} is not a share in (0, 1]. {_WANTED}")


def as_python(k: object) -> object:
    """Convert a user's number or array of numpy or torch, such as k=, to Python's numbers; return other values unchanged.

    `parse_k` and `Budget.parse` begin with it. A tensor on the meta device has no values, and stays.
    """
    if not hasattr(k, "tolist") or getattr(k, "is_meta", False):
        return k
    return k.tolist()


def is_list(k: object) -> TypeGuard[Sequence[object]]:
    """Tell whether `k` is a sequence, such as a list with one budget per layer; a text, such as "2GiB", is none."""
    return isinstance(k, Sequence) and not isinstance(k, str | bytes | bytearray)


def parse_k(k: object, where: str = "k") -> int | float | str:
    """Check one budget that a user gives: return it as tokens (int), a share of the prompt (float) or a size as "2GiB" (str).

    Args:
        k: a number of Python, numpy or torch; or a text: digits are tokens, "0.5", "1e-1" and "50%" shares.
        where: name of the budget in the error message.

    Raises:
        KVPatchError: `k` is no budget.

    Example:
        >>> parse_k("50%"), parse_k("1024"), parse_k("2GiB")
        (0.5, 1024, '2GiB')
    """
    value = as_python(k)
    if isinstance(value, str):
        value = read_number(value)
    check_k(value, f"{where}={(value if isinstance(k, str) else k)!r}")
    return value  # type: ignore[return-value]


def says_one_token(k: object) -> bool:
    """Tell whether a valid `k`, or its entry for some layer, is the int 1: `patched` then warns, since 1.0 may be meant."""
    k = as_python(k)
    if isinstance(k, Rule):
        return False
    return any(map(says_one_token, k)) if is_list(k) else type(one := parse_k(k)) is int and one == 1


def read_number(text: str) -> int | float | str:
    """Convert a budget given as text, such as `--k 50%`, to tokens or a share, for `parse_k`, which then checks it.

    Other texts, such as sizes ("2GiB"), come back as they are.
    """
    digits, percent = text.strip().removesuffix("%").strip(), text.strip().endswith("%")
    if digits.isdecimal() and not percent and len(digits) < 20:  # a longer number becomes a float, which `check_k` refuses
        return int(digits)
    try:
        return float(digits) / (100 if percent else 1)
    except ValueError:
        return text


@dataclass(frozen=True)
class Rule:
    """Base class of a layer's budget: how many tokens each KV head keeps where a prompt or block ends, and while decoding.

    Attributes:
        aligned: whether all heads of the layer hold equally many tokens at all times.
        moves: whether decode steps may evict any number of tokens of a head, so that its size follows the text.
        weighs: whether scores are added up or compared with a number, so that they must be weights.
    """

    aligned: ClassVar[bool] = True
    moves: ClassVar[bool] = False
    weighs: ClassVar[bool] = False

    @property
    def evicts(self) -> bool:
        """Tell whether any token is ever evicted, however long the text."""
        return True

    def tokens(self, n: int) -> int:
        """Return the budget of a head in tokens after a prompt of `n`: protected sizes must fit in it, or are shares of it."""
        raise NotImplementedError

    def least(self, n: int) -> int:
        """Return the fewest tokens that may be left of a prompt of `n`."""
        return self.tokens(n)

    def most(self, n: int, new: int | None = 0) -> int:
        """Return the most tokens that a head may hold after a prompt of `n` tokens and `new` generated ones.

        new=None asks for the most at any time, however many are generated.
        """
        return self.tokens(n)

    def heads(self, n: int, H: int, new: int | None = 0) -> list[int]:
        """Return the most tokens that each of H heads may hold; see `most`."""
        return [self.most(n, new)] * H

    def highest(self, n: int, H: int, new: int | None = 0) -> list[int]:
        """Return the most tokens that each of H heads may hold after any prompt of at most `n`; see `most`."""
        return self.heads(n, H, new)

    def bound(self, most: int) -> int:
        """Return the most tokens that a head may hold while decoding, given the most that it might hold at the prompt's end."""
        return most

    def check(self, policy: Any, heads: int) -> None:
        """Raise KVPatchError unless the policy and a layer of so many KV heads can work with this budget."""

    def kept(self, score: Any, context: EvictionContext, keys_BHT: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return how many tokens [B,H,1] each head keeps at an eviction, and the sum of the scores of all it has evicted.

        The sum is None where later evictions do not need it. For budgets that depend on scores or on the text so far (`moves`):
        `PromptEnd.count_by_scores` calls it as a prompt or block ends, `_evict_over_budget` at decode steps.

        score: the policy's Score. keys_BHT: eviction keys (the lowest goes first): LAST for protected tokens, FIRST for empty
        slots.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Size(Rule):
    """The same number of tokens in every head: tokens (int) or a share of the row's prompt (float).

    Attributes:
        k: the float 1.0 never evicts, however long the text.
    """

    k: int | float

    @property
    def evicts(self) -> bool:
        return not (isinstance(self.k, float) and self.k == 1.0)

    def tokens(self, n: int) -> int:
        return max(1, share(self.k, n))


@dataclass(frozen=True)
class HeadSizes(Rule):
    """A number of tokens for each KV head of a layer: a row of a table `k[layer][head]`.

    Protected sizes follow from the smallest budget.

    Attributes:
        sizes: of each head, tokens (int) or a share of the row's prompt (float).
    """

    sizes: tuple[int | float, ...]
    aligned: ClassVar[bool] = False

    def __str__(self) -> str:
        return str(list(self.sizes))

    @cached_property
    def _as_sizes(self) -> tuple[Size, ...]:
        return tuple(map(Size, self.sizes))

    @property
    def evicts(self) -> bool:
        return any(size.evicts for size in self._as_sizes)

    def tokens(self, n: int) -> int:
        return min(size.tokens(n) for size in self._as_sizes)

    def most(self, n: int, new: int | None = 0) -> int:
        return max(self.heads(n, len(self.sizes)))

    def heads(self, n: int, H: int, new: int | None = 0) -> list[int]:
        return [size.tokens(n) if size.evicts else MAX_POSITION for size in self._as_sizes]  # MAX_POSITION: no bound

    def check(self, policy: Any, heads: int) -> None:
        """Raise KVPatchError, before `patched` acts, for a list whose length is not the layer's number of KV heads."""
        if len(self.sizes) != heads:
            raise KVPatchError(
                f"k={self}: a list of length {len(self.sizes)} for a layer that has {heads} KV heads: give k[layer][head], one "
                "number for each, or one number for the whole layer."
            )


@dataclass(frozen=True)
class Budget:
    """The budget `k` that the user asked for, per layer; `parse` builds it, `Rule.tokens` resolves it for one batch row.

    Attributes:
        per_layer: of each layer, tokens (int), a share of the row's prompt (float), one of these for each head (tuple), or a
            Rule.
        sizes: of each layer, the size in bytes that its tokens were counted from, "" for none; () if no layer has one.
        of_all_layers: the size was given for all of them together.
    """

    per_layer: tuple[int | float | tuple[int | float, ...] | Rule, ...]
    sizes: tuple[str, ...] = ()
    of_all_layers: bool = False

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The Rule of each layer: how many tokens its KV heads keep; made once, of a Rule, a number, or one per head."""
        return tuple(
            one if isinstance(one, Rule) else HeadSizes(one) if isinstance(one, tuple) else Size(one) for one in self.per_layer
        )

    @classmethod
    def parse(
        cls,
        k: object,
        *,
        n_layers: int,
        bytes_per_token: int,
        bounds: Sequence[int | None] = (),
        extra: int = 0,
        fixed: int = 0,
    ) -> Budget:
        """Check `k`, as the user gives it, and convert sizes in bytes to tokens, for `patched` and `plan`.

        Args:
            k: what `parse_k` takes, or a Rule such as `Mass`, or a sequence of these, one per layer; or a table k[layer][head].
            n_layers: decoder layers of the model.
            bytes_per_token: bytes of the keys and values of one token in one layer, all KV heads together.
            bounds: the sliding window of each layer in tokens, None for layers without one. A size in bytes is the total of
                all layers, so what the sliding layers hold is subtracted from it.
            extra: tokens that a head may hold between steps over its budget (every - 1), which a size in bytes counts.
            fixed: bytes of a layer that do not grow with its tokens, which a size in bytes counts.

        Raises:
            KVPatchError: `k` is no budget, has another number of layers, or holds no token.

        Example:
            >>> Budget.parse([0.5, 128], n_layers=2, bytes_per_token=4096).rules[0].tokens(1000)
            500
        """
        k = as_python(k)
        if is_list(k):
            if len(k) != n_layers:
                raise KVPatchError(f"k has {len(k)} entries, but the model has {n_layers} layers: give one for each.")
            layers = ((as_python(entry), f"k[{i}]") for i, entry in enumerate(k))
            per_layer = tuple([_parse_layer(entry, where, bytes_per_token, fixed, extra) for entry, where in layers])
            sizes = tuple(_find_byte_size(as_python(entry)) for entry in k)
            return cls(per_layer, sizes if any(sizes) else ())
        if isinstance(k, Rule):
            return cls((k,) * n_layers)
        one_k = parse_k(k)
        windows = [bound for bound in bounds if bound is not None]
        # a size in bytes is for all layers together: those without a window share the bytes that those with one leave
        n_free, reserved = n_layers - len(windows), sum(windows) * bytes_per_token
        tokens = _count_tokens(one_k, bytes_per_token * n_free, reserved, n_layers * fixed, extra)
        return cls(
            (tokens,) * n_layers,
            (_find_byte_size(one_k),) * n_layers if isinstance(one_k, str) else (),
            of_all_layers=isinstance(one_k, str),
        )

    def described(self) -> list[Any]:
        """Return each layer's budget as JSON has it, for files and reports: a size in bytes as given, a Rule as text."""
        values = [str(one) if isinstance(one, Rule) else list(one) if isinstance(one, tuple) else one for one in self.per_layer]
        return [size or one for size, one in zip(self.sizes, values, strict=True)] if self.sizes else values

    def shortened(self) -> Any:
        """Return the budget as errors show it: one layer's if all layers have the same, else the list of `described()`."""
        described = self.described()
        return described[0] if described and all(one == described[0] for one in described) else described

    def first_layers(self, count: int) -> Budget:
        """Return the budget of the first `count` layers alone, for a cache that has no others."""
        return replace(self, per_layer=self.per_layer[:count], sizes=self.sizes[:count])


def _find_byte_size(k: object) -> str:
    """Return a budget's text if it is a size in bytes, such as "2GiB"; "" for other budgets."""
    one = "" if is_list(k) or isinstance(k, Rule) else parse_k(k)
    return one.strip() if isinstance(one, str) else ""


def _parse_layer(
    k: object, where: str, bytes_per_token: int, fixed: int, extra: int
) -> int | float | tuple[int | float, ...] | Rule:
    """Check one layer's entry of a list `k` for `Budget.parse`: return its budget in tokens, or a tuple of one per head.

    where: names the entry in errors, as "k[3]". bytes_per_token, fixed, extra: as in Budget.parse, for an entry in bytes.
    """
    if isinstance(k, Rule):
        return k
    if not is_list(k):
        return _count_tokens(parse_k(k, where), bytes_per_token, 0, fixed, extra)
    sizes = [parse_k(one, f"{where}[{head}]") for head, one in enumerate(k)]
    for head, one in enumerate(sizes):
        if isinstance(one, str):
            raise KVPatchError(
                f"{where}[{head}]={one!r} is a size in bytes, which a head has no budget in: give tokens such as 1024 or a "
                "share such as 0.5."
            )
    if not sizes:
        raise KVPatchError(f"{where} is empty: give k[layer][head], a number for each KV head, or one number for the layer.")
    return tuple(one for one in sizes if not isinstance(one, str))


def _count_tokens(k: int | float | str, bytes_per_token: int, reserved: int, fixed: int, extra: int) -> int | float:
    """Convert a budget in bytes to tokens, for `Budget.parse`; other budgets stay. KVPatchError if the bytes hold no token.

    reserved: bytes of sliding-window layers. fixed: bytes that do not grow with the tokens. extra: tokens that a head may hold
    over its budget between evictions.
    """
    if not isinstance(k, str):
        return k
    tokens = ((parse_bytes(k) or 0) - reserved - fixed) // bytes_per_token - extra
    if tokens < 1:
        more = f", beside {reserved} for its sliding-window layers" if reserved else ""
        more += f", beside {fixed} for the centres of its rounded keys" if fixed else ""
        more += f", and {extra} more wait to be evicted with it (every={extra + 1})" if extra else ""
        takes = f"one token of this model takes {bytes_per_token} bytes{more}"
        raise KVPatchError(f"k={k!r} holds no token: {takes}: give more.")
    return min(tokens, MAX_POSITION)
