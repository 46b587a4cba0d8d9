"""The library beside the oracle: one left-padded batch against each row alone, unpadded, in float64."""

import copy
import functools

import torch

import kvpatch
from kvpatch.evaluation.calibrate import calibrate
from kvpatch.policies import noise
from kvpatch.policies.needs import Calibrated, SecondReading
from tests.helpers.tiny import VOCAB, force, left_pad, make, prompt
from tests.oracle import reference

MARGIN = {torch.float64: 1e-6, torch.float32: 3e-5}
TOLERANCE = {torch.float64: 1e-5, torch.float32: 5e-5}  # float64: rotary tables are float32 in transformers
# look at what decode steps do: a prompt is the first of their tokens at most, and they have tests of their own
LATER = tuple(name for name in kvpatch.list_policies() if "prompt" not in kvpatch.get_policy(name).score.schedules)
CALIBRATED = tuple(name for name in kvpatch.list_policies() if kvpatch.get_policy(name).needs.find(Calibrated))
DECODING = tuple(name for name in LATER if name not in CALIBRATED)
EVICTING = tuple(name for name in kvpatch.list_policies() if name not in ("full", *DECODING, *CALIBRATED))
# no layer evicts before all have read the prompt: no blocks, and no generated token in the prompt's pass
WAITING = tuple(name for name in kvpatch.list_policies() if kvpatch.get_policy(name).over_model)
WINDOWED = tuple(name for name in EVICTING if kvpatch.get_policy(name).needs.protects)
ANY_SCHEDULE = tuple(name for name in EVICTING if len(kvpatch.get_policy(name).score.schedules) == 3)
ONCE = tuple(name for name in EVICTING if name not in ANY_SCHEDULE)  # evict where a prompt ends: generated tokens stay
# undo rotations, so they want original positions
PLACED = tuple(name for name in EVICTING if kvpatch.get_policy(name).needs.lookahead is not None)
PLACED += tuple(name for name in EVICTING if kvpatch.get_policy(name).needs.find(SecondReading))  # read behind the prompt
# look at keys without their positions, so one token at two positions is a tie but for rounding
UNPLACED = ("key_norm", "leverage", "compactor")
# look at keys alone, which may have no positions
CONTENT = (*UNPLACED, "key_diff", "cur", "q_filter")
# options that suit texts of some thirty tokens
SMALL = {name: {"window": 5, "kernel": 3} for name in WINDOWED} | {
    "chunk_kv": {"window": 5, "kernel": 3, "size": 4},
    "cur": {"window": 4},
    "lag_kv": {"lag": 5},
    "expected_attention": {"future": 9},
    "leverage": {"sketch": 5},
    "compactor": {"sketch": 5, "chunk": 7, "sinks": 3, "recent": 2},
    "kvzip": {"chunk": 11, "instruction": (3, 1)},
    "kvzip_plus": {"chunk": 11, "instruction": (3, 1)},
    "duo": {"sinks": 2, "recent": 5},
    "tri_attention": {"reach": 64},
}
# and such as make texts of that length evict several times while they are generated
SMALL_STEPS = {
    "raas": {"alpha": 0.05},
    "lazy": {"alpha": 0.05, "recent": 1, "every": 3},
    "r_kv": {"window": 3, "kernel": 3, "every": 3},
    "vase": {"window": 3, "kernel": 3, "every": 3, "sinks": 1},
    "tri_attention": {"every": 3},
}


def calibration(policy, model, pieces):
    """What the policy needs to know of a model, from pieces of text."""
    taught = kvpatch.get_policy(policy).needs.find(Calibrated).names == ("weight",)
    teacher = kvpatch.get_policy("kvzip_plus").with_options(**SMALL["kvzip_plus"])
    return calibrate(model, pieces, teacher=teacher if taught else None)


@functools.cache
def calibration_of(policy, name, dtype=torch.float64):
    """A calibration of a tiny model, made once."""
    with torch.no_grad():
        return calibration(policy, make(name, dtype=dtype), [prompt(1, 30, seed=3)])


def calibrated(policy, name, dtype=torch.float64):
    """The calibration as an option, if the policy needs one; None if the model has not what it measures."""
    if policy not in CALIBRATED:
        return {}
    found = calibration_of(policy, name, dtype)
    names = kvpatch.get_policy(policy).needs.find(Calibrated).names
    return {"calibration": found} if set(names) <= set(found.layers[0]) else None


WRAPS = {
    "pyramid": kvpatch.policies.pyramid,
    "adaptive": kvpatch.policies.adaptive,
    "global_topk": kvpatch.policies.global_topk,
    "critical": kvpatch.policies.critical,
    "chunked": kvpatch.policies.chunked,
    "merged": kvpatch.policies.merged,
    "refit": kvpatch.policies.refit,
}


@functools.cache
def table(seed, kind, layer, head):
    """The library's numbers by (t + 1, i); test_noise.py looks at their distribution."""
    u = noise.uniform(seed, layer, torch.tensor(head), torch.arange(-1, 120)[:, None], torch.arange(120))
    return u.tolist() if kind == "uniform" else getattr(noise, kind)(u).tolist()


def draw(seed, kind, layer, head, t, i):
    return table(seed, kind, layer, head)[t + 1][i]


def plain(k):
    """A budget as the oracle takes it."""
    match k:
        case kvpatch.Share():
            return {"share": k.part}
        case kvpatch.Mass():
            return {"mass": k.share, "floor": k.floor, "ceiling": k.ceiling}
        case kvpatch.Threshold():
            return {"threshold": k.x}
    return list(map(plain, k)) if isinstance(k, list) else k


def combined(policy, wrap):
    """The policy with what `wrap` names put around it."""
    for name in wrap:
        policy = WRAPS[name](policy)
    return policy


def sorted_positions(held):
    """Heads of slots with -1 for empty ones -> heads of sorted positions."""
    return [[sorted(p for p in head if p >= 0) for head in layer] for layer in held]


def same_tokens(mine, theirs):
    """Ordered positions [B,H,C] of every layer are the same; one of the caches may have more empty slots."""
    return all(
        torch.equal(a[b, h][a[b, h] >= 0], c[b, h][c[b, h] >= 0])
        for a, c in zip(mine, theirs, strict=True)
        for b in range(a.shape[0])
        for h in range(a.shape[1])
    )


def distinct(rows, n, steps, seed=0):
    """Prompts and generated tokens in which no token comes twice."""
    order = torch.rand(rows, VOCAB - 1, generator=torch.Generator().manual_seed(seed)).argsort(1) + 1
    return order[:, :n], order[:, n : n + steps]


def agrees(
    name, policy, k, *, n=30, steps=8, pads=(0, 9), dtype=torch.float64, seed=0, weights=0, wrap=(), model=None, backend="auto",
    **options,
):  # fmt: skip
    """Run library and oracle and compare; returns False where a decision was too close to call.

    options of the policy, and block and positions. A calibration is made of a text of its own.
    """
    model = make(name, dtype=dtype, seed=weights) if model is None else model
    ids, fed = prompt(len(pads), n, seed=weights + 1), prompt(len(pads), steps, seed=weights + 2)
    if policy in CONTENT:
        ids, fed = distinct(len(pads), n, steps, weights)
    mask = left_pad(ids, [n - pad for pad in pads])
    if policy in CALIBRATED and "calibration" not in options:
        with torch.no_grad():
            options["calibration"] = calibration(policy, copy.deepcopy(model), [prompt(1, 30, seed=weights + 3)])
    length = options.get("generation_length")
    pristine = copy.deepcopy(model)  # dynamic rope scalings remember how long a text they have seen
    with kvpatch.patched(model, combined(policy, wrap), k, seed=seed, backend=backend, **options):
        logits, cache = force(model, ids, fed, mask)
        held = [cache.positions(layer).tolist() for layer in range(len(cache.layers))]
    for row, pad in enumerate(pads):
        given_options = {key: value for key, value in options.items() if key != "generation_length"}
        if "quota" in options:
            given_options["quota"] = options["quota"][pad:]
        want = reference.run(
            pristine, ids[row, pad:].tolist(), fed[row].tolist(), policy=policy, k=plain(k),
            generation_length=length, draw=functools.partial(draw, seed), wrap=wrap, **given_options,
        )  # fmt: skip
        if want.margin < MARGIN[dtype]:
            return False
        assert sorted_positions([layer[row] for layer in held]) == want.kept[-1], f"row {row}: kept positions differ"
        torch.testing.assert_close(logits[row].double(), want.logits[-steps - 1 :], atol=TOLERANCE[dtype], rtol=0)
    return True


def certain(*args, **kwargs):
    """Some weights for which the comparison is decided."""
    assert any(agrees(*args, weights=weights, **kwargs) for weights in range(6)), "every draw was too close to call"


def entries(cache, layer):
    """Of each row and head: key, value and score state by position, but for what edits count (`unseen`)."""
    one = cache.layers[layer]
    keys, values = one.kv.numbers(one.columns_used)
    if one.kv.head_offsets is not None:
        keys, values = (one.kv.offsets.unpack_entries(t, *one.positions.shape[:2]) for t in (keys, values))
    found = {}
    for (b, h, slot), position in zip(
        torch.cartesian_prod(*(torch.arange(n) for n in one.positions[:, :, : one.columns_used].shape)).tolist(),
        one.positions[:, :, : one.columns_used].flatten().tolist(),
        strict=True,
    ):
        if position >= 0:
            state = [one.state[name][b, h, slot].clone() for name in sorted(one.state) if name != "unseen"]
            found[b, h, position] = [keys[b, h, slot].clone(), values[b, h, slot].clone(), *state]
    return found


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(x, y) for key in a for x, y in zip(a[key], b[key], strict=True))
