"""Rounded entries in kernels: read into registers as numbers, and made of a new token's numbers.

backends/entries.py defines their bytes. A tile of entries has one or two pieces: all channels of 8 bits; of 4 bits those whose
codes are the low halves of the bytes, the first half of the channels, and those of the high halves. In a piece each STEP
neighbours share a scale and lie in SPAN columns. No more than the tile at hand is ever unpacked.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..entries import FULL, Codec, Rounded

TO_EVEN: tl.constexpr = tl.constexpr(1.5 * 2**23)  # added to a float32 and taken away, it rounds half to even


class Columns(NamedTuple):
    """Columns of a tile of one piece.

    Attributes:
        group: channels that share a scale.
        head: bytes of an entry before its codes.
        step: neighbours that share a scale and a piece: as many of a group as divide both.
        span: columns of a step, a power of two.
        columns: columns in all.
    """

    group: int
    head: int
    step: int
    span: int
    columns: int


def columns(codec: Codec, D: int) -> Columns:
    """Return how `decode.step`'s kernel lays out a tile of keys or values of D numbers: as they are, or as bytes to unpack."""
    if not isinstance(codec, Rounded):
        return Columns(D, 0, D, _round_width(D), _round_width(D))
    return _make_columns(codec.bits, D // codec.groups, codec.header_bytes, D)


@lru_cache(maxsize=64)
def _make_columns(bits: int, group: int, head: int, D: int) -> Columns:
    """Return how a decode step's tile lays out rounded entries, for `columns`. group: channels of a scale.

    head: bytes before codes. A tile holds channels in steps of `step` neighbours, each padded to `span` columns, so that a step
    has one scale.
    """
    piece = (D + 1) // 2 if bits == 4 else D  # channels in the low (or high) halves of the bytes
    step = math.gcd(group, piece)  # neighbours that share a scale and a piece
    n_steps = _round_width(piece // step, 1)
    span = max(_round_width(step, 1), 16 // n_steps)
    return Columns(group, head, step, span, n_steps * span)


def _round_width(number: int, least: int = 16) -> int:
    """Return the least power of two that is not below `number`, nor below `least`."""
    return max(least, 1 << (number - 1).bit_length())


def reason(bits: int, head_dim: int, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot read keys and values rounded to so many bits, or None. `decode.reason` asks."""
    if bits == FULL or not (head_dim * bits) % (8 * dtype.itemsize):
        return None
    return f"its kernels read scales of whole rows, which {head_dim} numbers of {bits} bits do not leave aligned"


@triton.jit
def channels(
    PIECE: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr, SPAN: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Return which channel each column of a piece holds, and a mask of the columns that hold one.

    `split_kernel` calls it to address a head's keys and values. A piece (number PIECE) is HALF channels, of 4-bit codes those
    in the low or high halves of the bytes; each STEP of them take SPAN columns, a power of two, of which the rest is empty.
    """
    c = tl.arange(0, COLUMNS)
    if (SPAN == COLUMNS) | (SPAN == STEP):
        d, real = c, c < HALF
    else:
        d = c // SPAN * STEP + c % SPAN
        real = (c % SPAN < STEP) & (d < HALF)
    return d + PIECE * HALF, real & (d + PIECE * HALF < D)


@triton.jit
def _find_groups(PIECE: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr):
    """Return for each step (STEP neighbours) of a piece the number of its group, the channels that share a scale."""
    j = tl.arange(0, STEPS)
    if STEP == GROUP:  # said apart so that the compiler sees neighbours
        return PIECE * (HALF // GROUP) + j
    return (PIECE * HALF + j * STEP) // GROUP


@triton.jit
def codes(
    ENTRIES, row, seen, HALF: tl.constexpr, HEAD: tl.constexpr, STEP: tl.constexpr, SPAN: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Load the bytes of codes [M,steps,SPAN] of the entries numbered `row` [M]; zeros where `seen` is False.

    `split_kernel` calls it for each tile of rounded keys or values. An entry has HEAD bytes of scales and zeros, and then HALF
    bytes of codes; `channels` explains the other constants.
    """
    d = (tl.arange(0, COLUMNS // SPAN) * STEP)[:, None] + tl.arange(0, SPAN)[None, :]
    real = (tl.arange(0, SPAN) < STEP)[None, :] & (d < HALF)
    at = row[:, None, None] * (HEAD + HALF) + HEAD + d[None, :, :]
    return tl.load(ENTRIES + at, mask=seen[:, None, None] & real[None, :, :], other=0)


@triton.jit
def load_centre(
    CENTRE, PIECE: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr, SPAN: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the centre [steps,SPAN] of a piece of a head's keys, zeros if CENTRE is None."""
    centre = tl.zeros([COLUMNS // SPAN, SPAN], tl.float32)
    if CENTRE is not None:
        d = (tl.arange(0, COLUMNS // SPAN) * STEP)[:, None] + tl.arange(0, SPAN)[None, :]
        real = (tl.arange(0, SPAN) < STEP)[None, :] & (d < HALF) & (d + PIECE * HALF < D)
        centre = tl.load(CENTRE + d + PIECE * HALF, mask=real, other=0.0).to(tl.float32)
    return centre


@triton.jit
def decode_codes(
    codes, ENTRIES, row, seen, centre, dtype: tl.constexpr, PIECE: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    GROUP: tl.constexpr, HEAD: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return the numbers [M,columns] of one piece's codes [M,steps,SPAN]: code * scale + zero, plus the centre if there is one.

    `split_kernel` calls it for tiles of rounded keys and values. ENTRIES: a storage of rows, each with GROUPS scales, then as
    many zeros (HEAD bytes in all), then its codes (HALF bytes). row: the row of each of the M codes. seen: rows to be read.
    """
    GROUPS: tl.constexpr = D // GROUP
    SCALES = ENTRIES.to(tl.pointer_type(dtype), bitcast=True)
    group = _find_groups(PIECE, HALF, GROUP, STEP, codes.shape[1])
    at = row[:, None] * ((HEAD + HALF) * 2 * GROUPS // HEAD) + group[None, :]
    there = seen[:, None] & (group < GROUPS)[None, :]
    scale = tl.load(SCALES + at, mask=there, other=0.0).to(tl.float32)
    zero = tl.load(SCALES + at + GROUPS, mask=there, other=0.0).to(tl.float32)
    x = codes.to(tl.float32) * scale[:, :, None] + zero[:, :, None]
    if centre is not None:
        x += centre[None, :, :]
    return tl.reshape(x.to(dtype), [codes.shape[0], codes.shape[1] * codes.shape[2]])


@triton.jit
def _round_piece(
    X, CENTRE, centre, dtype: tl.constexpr, PIECE: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    TOP: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, SPAN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Round one piece of the D numbers at X: return codes [steps,SPAN], and the scale, zero and group of each step.

    `split_kernel` writes a new token's key and value by `write`, if they are rounded, and that calls this for piece 0 and, at 4
    bits, for piece 1 (PIECE). A number is code * scale + zero + centre; TO_EVEN makes codes integers, from 0 to TOP. A group of
    GROUP channels has the scale that its least and greatest number need, a piece has HALF channels. WIDTH: a power of two not
    below D. STEP, SPAN, COLUMNS: as in `channels`. CENTRE: where the head's centre lies, or None; centre: that of the piece.
    """
    group = _find_groups(PIECE, HALF, GROUP, STEP, COLUMNS // SPAN)
    every = tl.arange(0, WIDTH)
    mine = ((every // GROUP)[None, :] == group[:, None]) & (every < D)[None, :]
    x = tl.load(X + every[None, :] + group[:, None] * 0, mask=mine, other=0.0).to(tl.float32)
    if CENTRE is not None:
        x -= tl.load(CENTRE + every[None, :] + group[:, None] * 0, mask=mine, other=0.0).to(tl.float32)
    there = group < D // GROUP
    low = tl.where(there, tl.min(tl.where(mine, x, float("inf")), 1), 0.0)
    high = tl.where(there, tl.max(tl.where(mine, x, float("-inf")), 1), 0.0)
    wrong = tl.sum(x * 0.0, 1)  # NaN for a group with a NaN or an infinity, else 0
    scale = (tl.div_rn(high - low, tl.full(low.shape, TOP, tl.float32)) + wrong).to(dtype)
    zero = (low + wrong).to(dtype)
    step = tl.where(scale.to(tl.float32) == 0.0, 1.0, scale.to(tl.float32))
    d = (tl.arange(0, COLUMNS // SPAN) * STEP)[:, None] + tl.arange(0, SPAN)[None, :]
    real = (tl.arange(0, SPAN) < STEP)[None, :] & (d < HALF) & (d + PIECE * HALF < D)
    x = tl.load(X + d + PIECE * HALF, mask=real, other=0.0).to(tl.float32) - centre - zero.to(tl.float32)[:, None]
    code = tl.div_rn(x, tl.broadcast_to(step[:, None], x.shape))
    code = tl.minimum(tl.maximum(code, 0.0), TOP) + TO_EVEN - TO_EVEN
    return tl.where(real, code, 0.0), scale, zero, group


@triton.jit
def write(
    ENTRIES, row, own, X, CENTRE, dtype: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, STEP: tl.constexpr, SPAN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Round the new token's D numbers at X, and store them as the entry numbered `row` if `own`, that is in one program alone.

    `split_kernel` calls it, and attends to what it returns: both pieces of the rounded numbers [COLUMNS]; with 8 bits, which
    have one piece, that piece twice. CENTRE: where the head's centre lies, or None. `_round_piece` explains the constants.
    """
    GROUPS: tl.constexpr = D // GROUP
    TOP: tl.constexpr = 2.0**BITS - 1.0
    STEPS: tl.constexpr = COLUMNS // SPAN
    centre = load_centre(CENTRE, 0, D, HALF, STEP, SPAN, COLUMNS)
    low, scale, zero, group = _round_piece(X, CENTRE, centre, dtype, 0, D, HALF, WIDTH, TOP, GROUP, STEP, SPAN, COLUMNS)
    first = tl.reshape((low * scale.to(tl.float32)[:, None] + zero.to(tl.float32)[:, None] + centre).to(dtype), [COLUMNS])
    SCALES = ENTRIES.to(tl.pointer_type(dtype), bitcast=True) + row * ((HEAD + HALF) * 2 * GROUPS // HEAD)
    mine = group < tl.where(own, GROUPS, 0)
    tl.store(SCALES + group, scale, mask=mine)
    tl.store(SCALES + GROUPS + group, zero, mask=mine)
    byte, second = low.to(tl.uint8), first
    if BITS == 4:
        centre = load_centre(CENTRE, 1, D, HALF, STEP, SPAN, COLUMNS)
        high, scale, zero, group = _round_piece(X, CENTRE, centre, dtype, 1, D, HALF, WIDTH, TOP, GROUP, STEP, SPAN, COLUMNS)
        second = tl.reshape((high * scale.to(tl.float32)[:, None] + zero.to(tl.float32)[:, None] + centre).to(dtype), [COLUMNS])
        mine = group < tl.where(own, GROUPS, 0)
        tl.store(SCALES + group, scale, mask=mine)
        tl.store(SCALES + GROUPS + group, zero, mask=mine)
        byte = byte | (high.to(tl.uint8) << 4)
    d = (tl.arange(0, STEPS) * STEP)[:, None] + tl.arange(0, SPAN)[None, :]
    here = (tl.arange(0, SPAN) < STEP)[None, :] & (d < tl.where(own, HALF, 0))
    tl.store(ENTRIES + row * (HEAD + HALF) + HEAD + d, byte, mask=here)
    return first, second
