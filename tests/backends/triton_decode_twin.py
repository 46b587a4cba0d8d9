"""A decode step over slots, naively: one head, then one query head, then one slot at a time, in float64."""

import math

import torch


def softmax(x):
    top = max(x)
    if top == -math.inf:
        return [0.0] * len(x)
    e = [math.exp(value - top) for value in x]
    return [value / sum(e) for value in e]


def rounded(x, bits, size, centre):
    """x[D] in groups of `size` differences from `centre`, each rounded to 2^bits steps between their least and greatest."""
    result, top = [], 2**bits - 1
    for start in range(0, len(x), size):
        middle = centre[start : start + size].float()
        group = x[start : start + size].float() - middle
        zero, scale = group.min().to(x.dtype).float(), ((group.max() - group.min()) / top).to(x.dtype).float()
        for number, of in zip(group, middle, strict=True):
            code = min(max(round(float((number - zero) / scale)), 0), top) if scale else 0
            result.append((scale * code + zero + of).to(x.dtype))
    return torch.stack(result)


def step(
    q, k, v, slots, rule, *, scale, slopes=None, softcap=None, sinks=None, sliding=None, keep=None, first=None, recent=None,
    tau=1.0, bits=16, sizes=None, centre=None,
):  # fmt: skip
    """Change `slots` (see `Slots`) in place and return what the kernels must have found.

    bits, sizes: what new keys and values are rounded to, in groups of these sizes; slots hold numbers all the same. centre:
    [B,H,D], which keys are rounded around.

    Returns out [B,H,G,D], doubt [B,H,C] (query heads whose p * n is 1 but for rounding) and gap: for every head that evicted
    by a measured score, how far its two lowest candidates were apart, relative to the lower; inf where there is one candidate.
    """
    (B, H, G, D), C = q.shape, slots.positions.shape[2]
    out, doubt, gaps = torch.zeros(B, H, G, D, dtype=torch.float64), torch.zeros(B, H, C), torch.full((B, H), math.inf)
    for b in range(B):
        newest = int(slots.newest[b])
        for h in range(H):
            capacity, slot = slots.capacity(b, h), int(slots.slot[b, h])
            keys, values = slots.head(slots.keys, b, h), slots.head(slots.values, b, h)
            state = {name: tensor[b, h] for name, tensor in slots.state.items()}
            new = k[b, h], v[b, h]
            if bits != 16:
                new = map(rounded, new, (bits, bits), sizes, (centre[b, h], torch.zeros(D)))
            keys[slot], values[slot] = new
            slots.positions[b, h, slot] = newest
            for name in set(rule.statistics) - {"observed"}:
                state[name][slot] = 0.0
            position = slots.positions[b, h, :capacity].tolist()
            seen = [c for c in range(capacity) if position[c] >= 0 and (sliding is None or newest - position[c] < sliding)]
            p, y = [], []
            for g in range(G):
                x = [-math.inf] * capacity
                for c in seen:
                    bias = 0.0 if slopes is None else float(slopes[h, g]) * (position[c] - newest)
                    x[c] = scale * float(q[b, h, g].double() @ keys[c].double())
                    x[c] = (x[c] if softcap is None else softcap * math.tanh(x[c] / softcap)) + bias
                p.append(softmax(x if sinks is None else [*x, float(sinks[h, g])])[:capacity])
                out[b, h, g] = sum(p[g][c] * values[c].double() for c in seen) if seen else 0.0
                noise = [0.0] * capacity
                for c in seen if "noise" in state else ():
                    noise[c] = math.log(float(state["noise"][c, g]))
                y.append(softmax([(x[c] + noise[c]) / tau for c in range(capacity)]))
            for c in range(capacity):
                mean, n = sum(p[g][c] for g in range(G)) / G, len(seen)
                found = {
                    "sum": mean * G,
                    "squares": mean**2,
                    "count": sum(p[g][c] * n > 1.0 for g in range(G)),
                    "gumbel": sum(y[g][c] for g in range(G)),
                }
                doubt[b, h, c] = sum(abs(p[g][c] * n - 1.0) < 1e-5 for g in range(G))
                for name in rule.statistics:
                    old = 0.0 if name == "observed" else float(state[name][c]) * (rule.decay if name in rule.decayed else 1.0)
                    state[name][c] = mean if name == "observed" else old + found[name]
            if rule.evicts and rule.value is not None:
                held = [c for c in range(capacity) if position[c] >= 0]
                kept = 0 if first is None else int(first[b]), 0 if recent is None else int(recent[b])
                gaps[b, h] = _evict(slots, b, h, held, newest, rule, G, sliding, keep, *kept)
    return out, doubt, gaps


def _evict(slots, b, h, held, newest, rule, G, sliding, keep, first, recent):
    position = slots.positions[b, h].tolist()
    ranked = []
    for c in held:
        if position[c] < first or position[c] > newest - recent:
            continue
        rows = newest + 1 - position[c]
        gone = sliding is not None and rows >= sliding
        name = {"mean": "sum"}.get(rule.value, rule.value)
        value = float(position[c]) if name == "recency" else float(slots.state[name][b, h, c])
        if rule.value == "mean":
            value /= rows if sliding is None else min(rows, sliding)
        if rule.value in ("mean", "count"):
            value /= G
        ranked.append((0 if gone else 1, value, position[c], c))
    ranked.sort()
    gap = math.inf
    if len(ranked) > 1 and ranked[0][0] == ranked[1][0] and rule.value not in ("recency", "count"):
        gap = (ranked[1][1] - ranked[0][1]) / max(abs(ranked[0][1]), 1e-30)
    victim = ranked[0][3]
    if keep is None:
        slots.positions[b, h, victim], slots.slot[b, h] = -1, victim
        return gap
    over = len(held) > int(keep[b, h])
    if over:
        slots.positions[b, h, victim] = -1
    slots.slot[b, h] = min(c for c in range(slots.capacity(b, h)) if slots.positions[b, h, c] < 0)
    return gap if over else math.inf


class Slots:
    """A layer's slots: dense [B,H,C,D], or rows in which head n has `capacities[n]` from `begins[n]` on.

    page: rows in which head n has `page` from each of `begins[n]` on; keys and values are then of one pool.
    """

    def __init__(self, keys, values, positions, slot, newest, state, begins=None, capacities=None, page=None):
        self.keys, self.values, self.positions, self.slot, self.newest = keys, values, positions, slot, newest
        self.state, self.begins, self.capacities, self.page = state, begins, capacities, page

    def capacity(self, b, h):
        return self.positions.shape[2] if self.capacities is None else self.capacities[b * self.slot.shape[1] + h]

    def head(self, buffer, b, h):
        """The head's slots, to be read and written."""
        if self.begins is None:
            return buffer[b, h]
        begin = self.begins[b * self.slot.shape[1] + h]
        if self.page is not None:
            return Paged(buffer, [begin[c // self.page] + c % self.page for c in range(self.capacity(b, h))])
        return buffer[begin : begin + self.capacity(b, h)]

    def copy(self):
        tensors = [t.clone() for t in (self.keys, self.values, self.positions, self.slot, self.newest)]
        # sums in float64, so that the twin does not round with the kernels
        state = {name: tensor.double() for name, tensor in self.state.items()}
        return Slots(*self.together(tensors), state, self.begins, self.capacities, self.page)

    def to(self, device):
        tensors = [t.to(device) for t in (self.keys, self.values, self.positions, self.slot, self.newest)]
        state = {name: tensor.to(device) for name, tensor in self.state.items()}
        return Slots(*self.together(tensors), state, self.begins, self.capacities, self.page)

    def together(self, tensors):
        """Copies of keys and values as parts of one pool, if they are such."""
        if self.page is not None:
            tensors[1] = tensors[0][len(tensors[0]) - len(tensors[1]) :]
        return tensors


class Paged:
    """Rows of a buffer: slot c is row `rows[c]`."""

    def __init__(self, buffer, rows):
        self.buffer, self.rows = buffer, rows

    def __getitem__(self, c):
        return self.buffer[self.rows[c]]

    def __setitem__(self, c, new):
        self.buffer[self.rows[c]] = new
