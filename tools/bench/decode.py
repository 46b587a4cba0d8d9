"""Generated tokens: single-token forwards of the unpatched model, of the floor and of a policy in turns."""

import copy
import gc
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

import kvpatch

from .lines import BATCH, BATCH_ARCH, FLOOR, HOST_ARCH, RAGGED_BASE, K, Line, record
from .models import STEPS, build, cache_bytes, forward, tokens, twin
from .prompt import summary
from .roofline import beside, ceilings, decode_ms

Run = tuple[PreTrainedModel, Cache]


class FloorLayer(DynamicLayer):
    """A dense buffer of `columns` tokens, written in place one after another: what no policy can beat."""

    def __init__(self, full: DynamicLayer, columns: int) -> None:
        super().__init__()
        self.lazy_initialization(full.keys, full.values)
        self.keys, self.values = full.keys[:, :, :columns].clone(), full.values[:, :, :columns].clone()
        self.seen = full.get_seq_length()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        at = self.seen % self.keys.shape[2]
        self.keys[:, :, at : at + 1], self.values[:, :, at : at + 1] = key_states, value_states
        self.seen += 1
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0


def floor(full: Cache, columns: int) -> Cache:
    """A cache of that many tokens that evicts without choosing."""
    return Cache(layers=[FloorLayer(layer, columns) for layer in full.layers])


def decode_ratio(model: PreTrainedModel, policy: str, n: int, repeats: int, steps: int, full: Cache) -> Line:
    """`steps` tokens after a prompt whose unpatched cache is `full`; beside an evicting policy the floor runs too."""
    ids, other = tokens(model, n + steps), twin(model)
    least = (model, floor(full, int(K * n) + 1))
    if policy == FLOOR:
        return alternate([(model, full), least], ids, steps, repeats)
    between = [] if policy == "full" else [least]
    with kvpatch.patched(other, policy, k=K):
        evicting = forward(other, ids[:, :n])[0]
        figures = alternate([(model, full), *between, (other, evicting)], ids, steps, repeats)
    if policy != "full" and len(set(figures["bytes_seen"])) > 1:
        raise RuntimeError(f"{policy} at {n}: the cache's bytes changed while decoding: {figures['bytes_seen']}")
    return figures


def alternate(runs: Sequence[Run], ids: Tensor, steps: int, repeats: int) -> Line:
    """Single-token forwards of all runs in turns, from copies of their caches; one short round first that does not count.

    Ratios are those of the last run to the first; `over_floor` that to the second of three.
    """
    medians, means, sizes, fastest = [], [], [], []
    for repeat in range(repeats + 1):
        gc.collect()
        pasts, times = [copy.deepcopy(past) for _, past in runs], []
        for t in range(ids.shape[1] - steps, ids.shape[1] if repeat else ids.shape[1] - steps + min(steps, 8)):
            one = ids[:, t : t + 1]
            times.append(tuple(forward(run[0], one, past)[1] for run, past in zip(runs, pasts, strict=True)))
            sizes.append((t + 1 - ids.shape[1] + steps, cache_bytes(pasts[-1])))
        if repeat:
            columns = list(zip(*times, strict=True))
            medians.append(tuple(statistics.median(column) for column in columns))
            means.append(sum(columns[-1]) / sum(columns[0]))
            fastest.append((min(columns[0]), min(columns[-1])))
    seen, bytes_full = {size for _, size in sizes}, cache_bytes(runs[0][1])
    figures = summary(medians) | {
        "min_ratio": min(b for _, b in fastest) / min(a for a, _ in fastest),
        "mean_ratio": statistics.median(means),
        "bytes_unpatched": bytes_full,
        "bytes": max(seen),
        "bytes_ratio": max(seen) / bytes_full,
        "bytes_seen": sorted(seen),
        "sizes": sizes,
    }
    if len(runs) == 3:
        figures["ms_floor"] = statistics.median(row[1] for row in medians)
        figures["over_floor"] = statistics.median(row[2] / row[1] for row in medians)
    return figures


def bounded(model: PreTrainedModel, figures: Line, tiny: bool) -> Line:
    """The figures with their lower bound: the least that the cache held must be read."""
    best = ceilings(small=tiny)
    return figures | beside(figures["ms"], decode_ms(model, min(figures["bytes_seen"]), best), best)


def decode_lines(
    policies: Iterable[str], n: int, repeats: int, tiny: bool, steps: int = STEPS, arch: str = "llama"
) -> Iterable[Line]:
    """One line per policy; the unpatched prompt is run once for all of them."""
    model = build(arch, n, tiny)
    full = forward(model, tokens(model, n + steps)[:, :n])[0]
    assert isinstance(full, DynamicCache)
    for policy in policies:
        figures = bounded(model, decode_ratio(model, policy, n, repeats, steps, full), tiny)
        del figures["sizes"]
        yield record("decode", arch, policy, n, repeats, model, figures | {"steps": steps})


def ragged_lines(policies: Iterable[str], n: int, repeats: int, tiny: bool, steps: int = STEPS) -> Iterable[Line]:
    """One line per policy: decode steps beside those of the base policy, which is patched too."""
    model = build("llama", n, tiny)
    ids = tokens(model, n + steps)
    per_token = cache_bytes(forward(model, ids[:, :64])[0]) / 64
    base = twin(model)
    with kvpatch.patched(base, RAGGED_BASE, k=K):
        dense = forward(base, ids[:, :n])[0]
        for policy in policies:
            other = twin(model)
            with kvpatch.patched(other, policy, k=K):
                flat = forward(other, ids[:, :n])[0]
                figures = bounded(model, alternate([(base, dense), (other, flat)], ids, steps, repeats), tiny)
            shares = [size / (per_token * (n + t)) for t, size in figures.pop("sizes")]
            figures |= {"bytes_unpatched": int(per_token * n), "bytes_ratio": max(shares), "base": RAGGED_BASE, "steps": steps}
            yield record("ragged", "llama", policy, n, repeats, model, figures)


def plain_lines(case: str, policies: Iterable[str], n: int, repeats: int, tiny: bool, steps: int = STEPS) -> Iterable[Line]:
    """One line per policy: steps patched and unpatched in turns, of BATCH texts, or for `host` of one in many narrow layers.

    There is no lower bound beside them: of a narrow layer's step, memory and multipliers need a small part.
    """
    arch, batch = (BATCH_ARCH, BATCH) if case == "batch" else (HOST_ARCH, 1)
    model = build(arch, n, tiny)
    ids = tokens(model, n + steps, batch)
    full = forward(model, ids[:, :n])[0]
    more = {"steps": steps, **({"batch": BATCH} if case == "batch" else {"layers": model.config.num_hidden_layers})}
    for policy in policies:
        other = twin(model)
        with kvpatch.patched(other, policy, k=K):
            figures = alternate([(model, full), (other, forward(other, ids[:, :n])[0])], ids, steps, repeats)
        figures.pop("sizes")
        yield record(case, arch, policy, n, repeats, model, figures | more)
