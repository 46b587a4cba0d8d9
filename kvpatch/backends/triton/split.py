"""The first kernel of a decode step: writes the new token, and attends to a segment of each head's slots."""

from __future__ import annotations

import triton
import triton.language as tl

from .rounded import channels, codes, decode_codes, load_centre, write

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def finite_maximum(maximum):
    """Return the maximum of an online softmax, or 0 before its first logit, so that -inf - maximum is no NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def find_scratch(SCRATCH, parts, SPAN, G: tl.constexpr, D: tl.constexpr, OBSERVE: tl.constexpr):
    """Return pointers into a step's scratch buffer: logits [B*H,G,parts*SPAN], p V [B*H,parts,G,D], softmaxes [B*H,parts,5,G].

    `split_kernel` writes them, and `combine_kernel` reads them. parts: segments of a head, of SPAN slots each.
    """
    segments = tl.num_programs(0).to(tl.int64) * parts
    partial = SCRATCH
    if OBSERVE:
        partial += segments * SPAN * G
    return SCRATCH, partial, partial + segments * G * D


@triton.jit
def cap_products(x, inner):
    """Return tanh of the scaled products x of queries and keys, for a layer that caps its logits; `inner` None: x as it is.

    inner: the factor that `logit_units` gives for the layer's cap.
    """
    if inner is not None:
        x = 1.0 - 2.0 / (1.0 + tl.exp2(x * inner))
    return x


@triton.jit
def entries(BEGIN, begin, c, there, n, C, PAGE):
    """Return the numbers of the entries that head n's slots c lie in: from `begin` on, or in the pages that BEGIN names.

    `split_kernel` calls it. PAGE: slots of a page; None without pages. C: slots of a head. there: slots to look up.
    """
    entry = begin + c
    if PAGE is not None:
        entry = tl.load(BEGIN + n * tl.cdiv(C, PAGE) + c // PAGE, mask=there, other=0) + c % PAGE
    return entry


# The number of slots changes with every prompt, and so does the alignment of views into a tensor with C columns.
@triton.jit(
    do_not_specialize=["C"],
    do_not_specialize_on_alignment=["POSITIONS", "SLOT", "NEWEST", "BEGIN", "CAPACITY", "CENTRES", "NOISE", "TAU"],
)
def split_kernel(
    Q, K, V, KEYS, VALUES, POSITIONS, SLOT, NEWEST, BEGIN, CAPACITY, CENTRES, SLOPES, SINKS, NOISE, TAU, tau, SCRATCH,
    unit, inner, sliding, q_b, q_h, q_g, k_b, k_h, v_b, v_h, H, C, PAGE, SPAN,
    G: tl.constexpr, LANES: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OBSERVE: tl.constexpr,
    GUMBEL: tl.constexpr, BITS: tl.constexpr,
    K_GROUP: tl.constexpr, K_HEAD: tl.constexpr, K_STEP: tl.constexpr, K_SPAN: tl.constexpr, K_COLUMNS: tl.constexpr,
    V_GROUP: tl.constexpr, V_HEAD: tl.constexpr, V_STEP: tl.constexpr, V_SPAN: tl.constexpr, V_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Attend in a decode step to a segment of head n, slots [lo, hi); `decode.step` launches a program for each segment.

    Writes the new key, value and position if their slot lies there; then, to SCRATCH, for `combine_kernel`, the logits, p V,
    and the maximum and normalizer of the segment's own softmax.

    Entries: K_* and V_* say which channel each column of a tile holds (rounded.Columns). At BITS = 16 columns are the channels
    in their order, for keys and values alike; at 4 bits there is a second piece of channels, `upper` below. CENTRES is None or
    what the keys are rounded around. A head's slots lie in one piece, or, PAGE of them in each, in those that begin at BEGIN.
    Logits: unit * cap_products(q k, inner), in base 2, so that exp2 serves as exp (arguments.logit_units). The sink of a query
    head is one more logit in the new token's segment.
    GUMBEL: a second softmax, of (logit + log2 NOISE) / tau and without sinks, is kept next to the first, for Keyformer's score.
    """
    n, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = n // H, n % H
    begin = n * C
    if BEGIN is not None and PAGE is None:
        begin = tl.load(BEGIN + n)
    capacity = C
    if CAPACITY is not None:
        capacity = tl.load(CAPACITY + n).to(tl.int32)
    lo = part * SPAN
    if lo >= capacity:
        return
    hi = tl.minimum(lo + SPAN, capacity)
    LOGITS, PARTIAL, SOFTMAX = find_scratch(SCRATCH, tl.num_programs(1), SPAN, G, D, OBSERVE)
    room = tl.num_programs(1).to(tl.int64) * SPAN
    slot, newest = tl.load(SLOT + n).to(tl.int32), tl.load(NEWEST + b)
    HALF: tl.constexpr = (D + 1) // 2 if BITS == 4 else D
    dtype: tl.constexpr = Q.dtype.element_ty
    g = tl.arange(0, LANES)
    real_g = g < G
    k_d, real_k = channels(0, D, HALF, K_STEP, K_SPAN, K_COLUMNS)
    v_d, real_v = channels(0, D, HALF, V_STEP, V_SPAN, V_COLUMNS)
    q_tile = Q + b * q_b + h * q_h + g[:, None] * q_g
    q = tl.load(q_tile + k_d[None, :], mask=real_g[:, None] & real_k[None, :], other=0.0)
    # the new token starts the softmax of its segment; the previous contents of its slot are never read
    own = (slot >= lo) & (slot < hi)
    mine = own & (newest >= 0)
    # compared block by block: Triton 3.9's interpreter fails on a mask broadcast from a scalar condition
    own_g = g < tl.where(own, G, 0)
    at, entry = n * C + slot, entries(BEGIN, begin, slot, own, n, C, PAGE)
    tl.store(POSITIONS + at, newest, mask=own)
    if BITS == 16:
        own_d = k_d < tl.where(own, D, 0)
        k_new = tl.load(K + b * k_b + h * k_h + k_d, mask=real_k, other=0.0)
        v_new = tl.load(V + b * v_b + h * v_h + v_d, mask=real_v, other=0.0)
        tl.store(KEYS + entry * D + k_d, k_new, mask=own_d)
        tl.store(VALUES + entry * D + v_d, v_new, mask=own_d)
    else:
        CENTRE, k_centre, k_centre_upper = CENTRES, None, None
        if CENTRES is not None:
            CENTRE = CENTRES + n * D
            k_centre = load_centre(CENTRE, 0, D, HALF, K_STEP, K_SPAN, K_COLUMNS)
            k_centre_upper = load_centre(CENTRE, 1, D, HALF, K_STEP, K_SPAN, K_COLUMNS)
        k_new, k_upper = write(
            KEYS, entry, own, K + b * k_b + h * k_h, CENTRE, dtype, BITS, D, HALF, WIDTH,
            K_GROUP, K_HEAD, K_STEP, K_SPAN, K_COLUMNS,
        )  # fmt: skip
        v_new, v_upper = write(
            VALUES, entry, own, V + b * v_b + h * v_h, None, dtype, BITS, D, HALF, WIDTH,
            V_GROUP, V_HEAD, V_STEP, V_SPAN, V_COLUMNS,
        )  # fmt: skip
    product = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1)
    if BITS == 4:
        k_d, real_k = channels(1, D, HALF, K_STEP, K_SPAN, K_COLUMNS)
        q_upper = tl.load(q_tile + k_d[None, :], mask=real_g[:, None] & real_k[None, :], other=0.0)
        product += tl.sum(q_upper.to(tl.float32) * k_upper.to(tl.float32)[None, :], 1)
    # the new token's logit; -inf if its slot is in another segment or its row is padding
    x_new = tl.where(mine, cap_products(product, inner) * unit, float("-inf"))
    alone = tl.where(x_new > float("-inf"), 1.0, 0.0)
    maximum, p_new, total = x_new, alone, alone
    if SINKS is not None:
        sink = tl.load(SINKS + h * G + g, mask=own_g, other=float("-inf")).to(tl.float32) * LOG2_E
        maximum = tl.maximum(x_new, sink)
        p_new = tl.exp2(x_new - finite_maximum(maximum))
        total = p_new + tl.exp2(sink - finite_maximum(maximum))
    acc = p_new[:, None] * v_new.to(tl.float32)[None, :]
    if BITS == 4:
        acc_upper = p_new[:, None] * v_upper.to(tl.float32)[None, :]
    seen = tl.where(mine, 1, 0)
    if OBSERVE:
        tl.store(LOGITS + (n * G + g) * room + slot, x_new, mask=own_g)
    if SLOPES is not None:
        slope = tl.load(SLOPES + h * G + g, mask=real_g, other=0.0).to(tl.float32) * LOG2_E
    if GUMBEL:
        if TAU is not None:
            tau = tl.load(TAU)
        cooling = 1.0 / tau
        if NOISE is not None:
            x_new += tl.log2(tl.load(NOISE + at * G + g, mask=own_g, other=1.0))
        maximum_y, total_y = x_new * cooling, alone
    # the segment's other tokens, a block of slots at a time: `fade` shrinks what was summed when a larger logit is found
    for start in range(lo, hi, BLOCK):
        c = start + tl.arange(0, BLOCK)
        old = (c < hi) & (c != slot)
        position = tl.load(POSITIONS + n * C + c, mask=old, other=-1)
        visible = position >= 0
        if sliding is not None:
            visible = visible & (newest - position < sliding)
        row = entries(BEGIN, begin, c, old, n, C, PAGE)
        if BITS == 16:
            row = row[:, None] * D + k_d[None, :]
            k = tl.load(KEYS + row, mask=visible[:, None] & real_k[None, :], other=0.0)
            x = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            code = codes(KEYS, row, visible, HALF, K_HEAD, K_STEP, K_SPAN, K_COLUMNS)
            if BITS == 4:
                k = decode_codes(code >> 4, KEYS, row, visible, k_centre_upper, dtype, 1, D, HALF, K_GROUP, K_HEAD, K_STEP)
                x = tl.dot(q_upper, tl.trans(k), input_precision="ieee")
                k = decode_codes(code & 15, KEYS, row, visible, k_centre, dtype, 0, D, HALF, K_GROUP, K_HEAD, K_STEP)
                x = tl.dot(q, tl.trans(k), x, input_precision="ieee")
            else:
                k = decode_codes(code, KEYS, row, visible, k_centre, dtype, 0, D, HALF, K_GROUP, K_HEAD, K_STEP)
                x = tl.dot(q, tl.trans(k), input_precision="ieee")
        x = cap_products(x, inner) * unit
        if SLOPES is not None:
            x += slope[:, None] * (position - newest).to(tl.float32)[None, :]
        x = tl.where(visible[None, :], x, float("-inf"))
        if OBSERVE:
            tl.store(LOGITS + (n * G + g[:, None]) * room + c[None, :], x, mask=real_g[:, None] & old[None, :])
        higher = tl.maximum(maximum, tl.max(x, 1))
        p, fade = tl.exp2(x - finite_maximum(higher)[:, None]), tl.exp2(maximum - finite_maximum(higher))
        if BITS == 16:
            v = tl.load(VALUES + row, mask=visible[:, None] & real_k[None, :], other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        else:
            code = codes(VALUES, row, visible, HALF, V_HEAD, V_STEP, V_SPAN, V_COLUMNS)
            if BITS == 4:
                v = decode_codes(code >> 4, VALUES, row, visible, None, dtype, 1, D, HALF, V_GROUP, V_HEAD, V_STEP)
                acc_upper = tl.dot(p.to(dtype), v, acc_upper * fade[:, None], input_precision="ieee")
                code &= 15
            v = decode_codes(code, VALUES, row, visible, None, dtype, 0, D, HALF, V_GROUP, V_HEAD, V_STEP)
            acc = tl.dot(p.to(dtype), v, acc * fade[:, None], input_precision="ieee")
        maximum, total = higher, total * fade + tl.sum(p, 1)
        seen += tl.sum(visible.to(tl.int32), 0)
        if GUMBEL:
            if NOISE is not None:
                noise = NOISE + (n * C + c[None, :]) * G + g[:, None]
                x += tl.log2(tl.load(noise, mask=real_g[:, None] & visible[None, :], other=1.0))
            higher = tl.maximum(maximum_y, tl.max(x * cooling, 1))
            p, fade = tl.exp2(x * cooling - finite_maximum(higher)[:, None]), tl.exp2(maximum_y - finite_maximum(higher))
            maximum_y, total_y = higher, total_y * fade + tl.sum(p, 1)
    segment = n * tl.num_programs(1) + part
    part_tile = PARTIAL + (segment * G + g[:, None]) * D
    tl.store(part_tile + v_d[None, :], acc, mask=real_g[:, None] & real_v[None, :])
    if BITS == 4:
        v_d, real_v = channels(1, D, HALF, V_STEP, V_SPAN, V_COLUMNS)
        tl.store(part_tile + v_d[None, :], acc_upper, mask=real_g[:, None] & real_v[None, :])
    found = SOFTMAX + segment * 5 * G + g
    tl.store(found, maximum, mask=real_g)
    tl.store(found + G, total, mask=real_g)
    tl.store(found + 2 * G, tl.full([LANES], 0.0, tl.float32) + seen.to(tl.float32), mask=real_g)
    if GUMBEL:
        tl.store(found + 3 * G, maximum_y, mask=real_g)
        tl.store(found + 4 * G, total_y, mask=real_g)
