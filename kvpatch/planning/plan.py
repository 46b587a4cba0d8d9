"""The plan of a budget: bytes of weights and cache, and what fits into a memory, from config.json alone."""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any

from ..backends.entry_sizes import BITS, count_centre_bytes, count_entry_bytes
from ..errors import KVPatchError, match_name, suggest
from ..policies.budgets import MAX_POSITION, Budget, Rule, Size, check_count, parse_bytes
from ..policies.naming import SCHEDULES, Division, find_division, split_combination
from ..policies.slopes import Pyramid
from .configuration import ITEMSIZES, Shape
from .counting import Counter, count_full, find_most, make_counter
from .files import find_configuration, find_weights
from .refused import refuse_kind
from .remarks import list_remarks
from .repetition import Repetition, find_longest, find_repetition
from .result import Fit, Plan
from .weights import count_weights

MOST = 32768  # tokens of a prompt where nothing is said


def plan(  # noqa: PLR0913 - the options of one command
    model: str | PathLike[str],
    policy: str = "snapkv",
    k: object = 0.5,
    *,
    tokens: int | None = None,
    new: int = 0,
    batch: int = 1,
    bits: int = 16,
    schedule: str | None = None,
    memory: int | str | None = None,
    dtype: str = "auto",
    revision: str | None = None,
    **options: Any,
) -> Plan:
    """Count the bytes of a model's weights and cache under a budget, from its config.json, without loading it.

    Bytes of weights are those of its safetensors' index or header, without torch. Where there is none, or dtype is another,
    transformers builds the model without numbers.

    Args:
        model: a folder, or a name on the Hugging Face hub.
        policy: a name of `kvpatch.list_policies()`, or a combination such as "critical(adaptive(roco))".
        k: tokens, a share of the prompt, a size such as "2GiB", or a list with one of these for each layer.
        tokens: of a request's prompt; None: 32,768, or the longest that the model's positions allow under the policy.
        new: tokens generated after it.
        batch: requests at a time.
        bits: 16, 8 or 4, as `patched` takes it.
        schedule: in place of the policy's own.
        memory: of the device, in bytes or as a text such as "24GiB"; None: nothing is said of what fits.
        dtype: of weights and cache; "auto" is the checkpoint's own.
        revision: branch, tag or commit on the hub.
        **options: of the policy; `every`, `beta` and `window` change what is held.

    Raises:
        KVPatchError: the model has no readable config.json or is refused, or an argument is out of range.

    Example:
        >>> print(kvpatch.plan("Qwen/Qwen2.5-7B-Instruct", "snapkv", 0.3, tokens=32768, batch=8, memory="24GiB"))
    """
    name, available = fspath(model), _parse_memory(memory)
    division = _check_arguments(
        policy, schedule, options, {"tokens": MOST if tokens is None else tokens, "batch": batch}, new, bits
    )
    # the model and the budget
    config = find_configuration(name, revision)
    refuse_kind(config)
    shape = config.read_shape()
    dtype = _find_dtype(dtype, shape)
    budget = _parse_budget(k, shape, division, bits, dtype)
    counter = make_counter(shape, division, budget, bits, ITEMSIZES[dtype])
    # the length of the prompt; repetition: a second reading of it, which takes positions too
    evicts = any(rule.evicts and bound is None for rule, bound in zip(budget.rules, shape.bounds, strict=True))
    repetition = find_repetition(policy, options) if evicts and division.schedule else None
    longest = find_longest(shape, new, repetition)
    tokens = _choose_tokens(shape, tokens, new, name, longest, repetition)
    # bytes of weights, and what fits beside them
    stored_weights = find_weights(name, revision) if dtype == shape.dtype else None
    weights = count_weights(config, dtype) if stored_weights is None else stored_weights
    budgeted, full = counter.count(tokens, new), count_full(shape, ITEMSIZES[dtype], tokens + new)
    room = None if available is None or weights.nbytes is None else max(available - weights.nbytes, 0)
    fits = (None, None) if room is None else _find_fits(counter, shape, room, (tokens, new, batch), longest)
    return Plan(
        name, shape.kind, policy, k, bits, tokens, new, batch, dtype, *weights, full, *budgeted,
        kept=tuple(sum(held.heads) // len(held.heads) for held in counter.hold(tokens, new)),
        positions=shape.positions, longest=longest, memory=available, fit_full=fits[0], fit=fits[1],
        remarks=tuple(list_remarks(shape, division, counter, config.values, repetition)),
    )  # fmt: skip


def _check_arguments(
    policy: object, schedule: str | None, options: dict[str, Any], counts: dict[str, int], new: int, bits: int
) -> Division:
    """Check the arguments of `plan`, and return a Division: when the policy evicts, and how layers and heads share its budget.

    counts: `plan`'s arguments `tokens` and `batch`, by name; the others are `plan`'s arguments of the same names.
    """
    for name, value in counts.items():
        check_count(name, value, "tokens" if name == "tokens" else "requests")
    check_count("new", new, "tokens", least=0)
    if bits not in BITS:
        raise KVPatchError(f"bits={bits!r} must be 16, 8 or 4.")
    if schedule is not None and schedule not in SCHEDULES:
        raise KVPatchError(f"schedule={schedule!r} must be one of {', '.join(SCHEDULES)}.{suggest(schedule, SCHEDULES)}")
    if not isinstance(policy, str):
        raise KVPatchError(f"policy={policy!r} must be a policy's name, such as 'snapkv': kvpatch.list_policies() has all.")
    division = find_division(policy, schedule, options)
    # split_combination(): the combinations, and the policy inside
    if match_name(split_combination(policy)[1], ("duo",)) is not None:
        raise KVPatchError("What duo holds depends on its calibration: plan another policy, such as 'snapkv'.")
    check_count("every", division.every, "tokens")
    if division.every > 1 and division.schedule == "prompt":
        raise KVPatchError(f"every={division.every} is for policies that evict while decoding: use schedule='both'.")
    check_count("window", division.protects, "tokens", least=0)
    if division.beta is not None:
        Pyramid(division.beta).check()
    return division


def _parse_memory(memory: object) -> int | None:
    """Convert the argument `memory` of `plan` to bytes; None stays None. KVPatchError if it is no size, such as "24GiB"."""
    nbytes = parse_bytes(memory) if isinstance(memory, str) else memory
    if memory is None or (isinstance(nbytes, int) and not isinstance(nbytes, bool) and nbytes > 0):
        return None if memory is None else nbytes  # type: ignore[return-value]
    raise KVPatchError(f"memory={memory!r} is no size: give a number and a unit such as 24GiB or 80GB.")


def _choose_tokens(
    shape: Shape, tokens: int | None, new: int, name: str, longest: int | None, repetition: Repetition | None
) -> int:
    """Return the length of the prompt to plan for: `tokens`, or by default MOST or `longest` (None: no limit), if less.

    `plan` calls it. repetition: the policy's second reading of a prompt, which takes positions too; None if it has none.
    KVPatchError if `tokens` is more than `longest`, or if `longest` leaves no token.
    """
    limit = MAX_POSITION if longest is None else longest
    if limit < 1:  # not even a prompt of one token: because of the second reading, or of the new tokens
        if repetition and new < (shape.positions or 0):
            raise KVPatchError(f"{name} has {shape.positions:,} positions, too few for an instruction: give a shorter one.")
        raise KVPatchError(f"{name} has {shape.positions:,} positions: give fewer than {shape.positions} new tokens.")
    if tokens is not None and tokens > limit:
        addition = f" and {new:,} new ones" if new else ""
        if repetition and tokens + new <= (shape.positions or 0):
            addition = f" and {repetition.count_tokens(tokens):,} that the policy reads a second time"
        raise KVPatchError(
            f"A prompt of {tokens:,} tokens{addition} is more than the {shape.positions:,} positions of {name}: give at "
            f"most {limit} tokens (--tokens {limit})."
        )
    return min(MOST, limit) if tokens is None else tokens


def _find_dtype(dtype: str, shape: Shape) -> str:
    """Return the dtype of weights and cache that `plan` counts. Raises KVPatchError if it is unknown."""
    if dtype == "auto":
        return shape.dtype
    if dtype not in ITEMSIZES:
        raise KVPatchError(f"dtype={dtype!r} must be one of auto, {', '.join(ITEMSIZES)}.{suggest(dtype, ITEMSIZES)}")
    return dtype


def _parse_budget(k: object, shape: Shape, division: Division, bits: int, dtype: str) -> Budget:
    """Convert the `k` of `plan` to a Budget. KVPatchError if `k` is out of range, or a budget that depends on the text.

    division: when the policy evicts, and how layers and heads share a budget. bits, dtype: of the numbers held.
    """
    if isinstance(k, Rule) or (isinstance(k, str) and ":" in k):
        raise KVPatchError(
            f"k={k} follows the text, which a plan does not know: give a share such as 0.5 or tokens such as 1024."
        )
    size, n = ITEMSIZES[dtype], len(shape.layers)
    entries = sum(each.heads * count_entry_bytes(bits, each.key, each.value, size, each.latent) for each in shape.layers)
    # what keys of 8 or 4 bits are rounded around, once a head
    centres = sum(each.heads * count_centre_bytes(bits, each.key, size) for each in shape.layers)
    # for a budget in bytes; extra: tokens above it between evictions; fixed: bytes of a layer that no token adds to
    budget = Budget.parse(
        k, n_layers=n, bytes_per_token=-(-entries // n), bounds=shape.bounds, extra=division.every - 1, fixed=-(-centres // n)
    )
    sizes = [
        size for each in budget.per_layer for size in (each if isinstance(each, tuple) else (each,)) if isinstance(size, int)
    ]
    if sizes and min(sizes) < division.every:
        raise KVPatchError(f"every={division.every} evicts more tokens at once than the budget of {min(sizes)} keeps: raise k.")
    for index, rule in enumerate(budget.rules):
        rule.check(None, shape.layers[index].heads)
        if division.beta is not None and not isinstance(rule, Size):
            raise KVPatchError("A pyramid divides one budget: give k as one number, such as 0.3.")
    return budget


def _find_fits(counter: Counter, shape: Shape, room: int, asked: tuple[int, int, int], longest: int | None) -> tuple[Fit, Fit]:
    """Return the requests and tokens that fit into `room` bytes, in full and under the budget, all prompts read at once.

    `plan` calls it. counter: counts bytes under the budget. room: bytes that the weights leave. asked: tokens of a prompt, new
    tokens, requests at a time. longest: tokens of the longest prompt under the policy, None for no limit.
    """
    (tokens, new, batch), size = asked, counter.itemsize

    def find(count: Any, positions: int | None) -> Fit:
        # requests of the planned length, and the longest prompt of which `batch` fit. count: bytes of a prompt of n tokens;
        # positions: the longest prompt that the model's positions allow, None for no limit
        limit = MAX_POSITION - new if positions is None else positions
        longest_prompt = find_most(lambda n: batch * count(n) <= room, limit)
        return Fit(room // max(count(tokens), 1), None if longest_prompt >= MAX_POSITION - new else longest_prompt)

    full = find(lambda n: count_full(shape, size, n + new), find_longest(shape, new, None))
    return full, find(lambda n: counter.count(n, new).reading, longest)  # reading: the most while prompts are read
