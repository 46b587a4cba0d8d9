"""Sizes of a decode step's launches: how many programs share a head, and what each reads at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ..entries import FULL

WAVES = 4  # programs per multiprocessor, of which two or three run at a time; more of them balance better than they cost
CPU_MULTIPROCESSORS = 132  # an H100's or H200's: for the interpreter, and for compiling without a GPU
SHORTEST = 128  # slots of a segment: with fewer, merging costs more than it saves
TILE = 1 << 14  # bytes of one tile of keys or values in shared memory
CELLS = 1 << 10  # probabilities that a combining program holds at a time; with more, compute capability 12.0 spills a register
BLOCKS = 8  # a chunk has at least so many blocks of slots: with fewer, a launch to compare chunks costs more than it saves
MOST_CHUNKS = 256
OUTPUTS = 128  # entries of a head's output [G,D] that one program computes


@dataclass(frozen=True)
class LaunchPlan:
    """Sizes of a step's launches.

    Attributes:
        span: slots of a segment, in whole blocks.
        parts: segments of a head.
        chunk: slots whose statistics one program updates.
        chunks: programs that do so for a head.
        outputs: programs that compute a head's output.
        group: query heads rounded up to a power of two; `lanes` to one that a matrix product takes.
        width: the head size, likewise.
        block: slots that a program of `split_kernel` reads at a time; `cells`: one of `combine_kernel`.
        warps: of both; stages: of `split_kernel`.
    """

    span: int
    parts: int
    chunk: int
    chunks: int
    outputs: int
    group: int
    lanes: int
    width: int
    block: int
    cells: int
    warps: int
    stages: int


@lru_cache(maxsize=1024)
def plan(
    C: int,
    heads: int,
    G: int,
    D: int,
    itemsize: int,
    multiprocessors: int,
    splits: int | None = None,
    bits: int = FULL,
    pages: bool = False,
) -> LaunchPlan:
    """Return the sizes of a decode step's launches over `heads` KV heads of C slots each, on a GPU of so many multiprocessors.

    `decode.step` calls it for each step; results are cached. One launch reads a head's keys in segments (`span` slots), the
    next updates statistics in chunks (`chunk` slots) and computes outputs; LaunchPlan explains all sizes. splits: segments and
    chunks of a head; None: the best number. bits: of keys and values. pages: the slots of a head lie in several pages.
    """
    # lanes: rows of a matrix product, 16 at least; block: slots that the first launch reads at a time, cells: the second
    width, group = max(16, _round_to_power(D)), _round_to_power(G)
    lanes, warps = max(16, group), 8 if group > 16 or width > 128 else 4  # with fewer threads, registers spill
    tile = TILE >> max(0, count_query_bytes(G, D, itemsize).bit_length() - 15)  # 32 KiB and more leave less for keys
    tile = tile // 2 if bits == 8 else tile  # a tile of codes becomes one of numbers in registers; one of 4 bits in two pieces
    block, cells = max(16, min(128 if group <= 16 else 64, tile // (width * itemsize))), max(32, min(256, CELLS // group))
    programs = -(-WAVES * multiprocessors // heads)
    span = _divide_slots(C, splits or min(-(-C // SHORTEST), programs), block)
    chunks = splits or min(max(C // (BLOCKS * cells), 1), programs)
    chunk = _divide_slots(C, min(chunks, MOST_CHUNKS), 16)
    # a block of fewer slots than threads has its positions copied asynchronously too, which the keys' copies then wait for: it
    # takes a pipeline of five stages to keep the next block's keys and values in flight, else three; so too where they wait for
    # the places of its pages
    stages = 3 if block >= 32 * warps and not pages else 5
    outputs = -(-G * D // OUTPUTS)
    return LaunchPlan(span, -(-C // span), chunk, -(-C // chunk), outputs, group, lanes, width, block, cells, warps, stages)


def count_query_bytes(group: int, head_dim: int, itemsize: int) -> int:
    """Return the bytes that the queries of a KV head take in shared memory."""
    return max(16, _round_to_power(group)) * max(16, _round_to_power(head_dim)) * itemsize


def _round_to_power(number: int) -> int:
    """Return the least power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


def _divide_slots(C: int, splits: int, multiple: int) -> int:
    """Return the slots of each of `splits` shares of C slots, rounded up to a multiple."""
    return -(-C // (splits * multiple)) * multiple


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors."""
    return CPU_MULTIPROCESSORS if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
