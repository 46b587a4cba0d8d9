"""Statistics, scores and parts of them that a user writes: computed as written on every backend, never by a kernel's own."""

import dataclasses
import functools
import itertools
import logging
import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import kvpatch
from kvpatch.backends import dispatch, refusals
from kvpatch.backends.flash import flash_backend
from kvpatch.policies import DeviationScope, Policy, Scope, Score, adaptive, critical, scores
from kvpatch.policies.needs import Need, NoisySums, Sums, WindowAttention
from kvpatch.policies.statistics import STATISTICS, Statistic, kernel_of
from kvpatch.policies.statistics import _sum_rows as plain_sum
from tests.backends.test_flash import install  # noqa: F401
from tests.helpers.comparing import same_tokens
from tests.helpers.marks import slow_but
from tests.helpers.running import steps
from tests.helpers.tiny import force, make, prompt
from tests.invariants.test_backends_agree import DEVICE, alike


def cubes(block, score):
    return block.p_NGRM.pow(3).sum((1, 2))


def late(block, score):
    """Not a sum of the probabilities at all: what the sum of no two heads or rows gives."""
    return (block.p_NGRM.amax(1) * torch.arange(1, block.p_NGRM.shape[2] + 1, device=block.p_NGRM.device)[:, None]).sum(1)


@dataclass(frozen=True)
class Cubes(Score):
    """A statistic and a score that nobody else has."""

    needs = (Sums("cubes"),)
    is_weight: ClassVar = True

    def value(self, context):
        return context.state["cubes"]


@dataclass(frozen=True)
class Both(Cubes):
    """One statistic that kernels know, and one that they do not."""

    needs = (Sums("sum"), Sums("cubes"))

    def value(self, context):
        return context.state["sum"] - 2 * context.state["cubes"]


@dataclass(frozen=True)
class Tail(Cubes):
    """The newest row beside it."""

    needs = (Sums("cubes"), WindowAttention(1))

    def value(self, context):
        return context.state["cubes"] + context.state["observed"]


@dataclass(frozen=True)
class Fading(scores.Accumulated):
    """All that is inherited, damped."""

    needs = (Sums("sum", decay=0.5),)


@dataclass(frozen=True)
class FadingBoth(Cubes):
    """Two sums, damped by one factor or by two."""

    other: float = 0.5

    @property
    def needs(self):
        return Sums("sum", decay=0.5), Sums("squares", decay=self.other)

    def value(self, context):
        return context.state["squares"] - context.state["sum"] / 9


@dataclass(frozen=True)
class More(scores.Accumulated):
    """Another statistic beside the one that the inherited value() reads."""

    needs = (Sums("cubes"), Sums("sum"))


@dataclass(frozen=True)
class LouderSums(NoisySums):
    """An entry() of its own: every third token weighs more, some nothing."""

    def entry(self, new):
        weight = (new.positions_BQ % 3)[:, None, :, None].float()
        return {"noise": weight.expand(*new.k_BHQD.shape[:3], new.group).contiguous()}


@dataclass(frozen=True)
class Louder(scores.GumbelSoftmax):
    """A need of its own."""

    @property
    def needs(self):
        return (LouderSums(tau=self.tau),)


@dataclass(frozen=True)
class Naming(Scope):
    """A scope that names a statistic and protects by it."""

    needs = (Sums("cubes"),)

    def mask(self, context):
        mask, cubed = super().mask(context), context.state["cubes"]
        own = cubed >= cubed.amax(-1, keepdim=True)
        return own if mask is None else mask | own


@dataclass(frozen=True)
class Backwards(Policy):
    """An order of its own: by age."""

    def eviction_keys(self, context, empty):
        turned = (context.newest_B11 + 1 - context.positions_BHT).clamp(min=0)
        ranked = torch.where(context.positions_BHT > context.newest_B11 - 2, turned + 1000, turned)
        return ranked if empty is None else ranked.masked_fill(empty, -1)


def reversed_value(kind):
    """A subclass of a named score that changes nothing but value()."""

    class Reversed(kind):
        signed = True

        def value(self, context):
            return -super().value(context)

    return Reversed


def wrapped_value(kind):
    """The same by a decorator that copies the attributes of what it wraps."""

    class Wrapped(kind):
        signed = True

        @functools.wraps(kind.value)
        def value(self, context):
            return -kind.value(self, context)

    return Wrapped


def distances(block, need):
    """The same as Drift, as a statistic."""
    _, rows_NR, keys_NM = block.place()
    return (block.p_NGRM.sum(1) * (rows_NR[:, :, None] - keys_NM[:, None])).sum(1)


@dataclass(frozen=True)
class Drift(Need):
    """Probability times distance in tokens, summed by the need itself: of the newest turn's rows, and of decode steps."""

    rows: ClassVar = "window"

    def entry(self, new):
        return {"drift": torch.zeros(new.k_BHQD.shape[:3], device=new.k_BHQD.device)}

    def read(self, prompt):
        layer, (keys, _) = prompt.layer, prompt.layer.held()
        at, rows = layer.positions_BHT[:, :, None, None], prompt.rows_BQ[:, None, None, :, None]
        seen = (at >= 0) & (at <= rows)
        logits = (prompt.q_BHGQD @ keys[:, :, None].mT * layer.scale).masked_fill(~seen, -math.inf)
        layer.statistic("drift").add_((logits.softmax(-1) * (rows - at)).masked_fill(~seen, 0.0).sum((2, 3)))

    def step(self, step):
        layer = step.layer
        layer.statistic("drift").add_(step.p_BHGT.sum(2) * (step.positions_B1[:, None] - layer.positions_BHT))


@dataclass(frozen=True)
class Drifting(Score):
    """What is looked at from afar stays."""

    needs = (Drift(),)

    def value(self, context):
        return context.state["drift"]


NAMED = {
    "sum": scores.Accumulated(), "count": scores.AccumulatedQuantized(), "mean": scores.Mean(),
    "gumbel": scores.GumbelSoftmax(), "observed": scores.Last(heads="each"), "recency": scores.Recency(),
}  # fmt: skip
OWN = {
    "a statistic": lambda: Policy("own", Cubes()),
    "a statistic of a prompt alone": lambda: Policy("own", Cubes(), schedule="prompt"),
    "a statistic beside a known one": lambda: Policy("own", Both(), Scope(recent=3)),
    "a statistic and the last row": lambda: Policy("own", Tail()),
    "a statistic that heads share budgets by": lambda: adaptive(Policy("own", Cubes())),
    "a statistic in two stages": lambda: critical(Policy("own", Cubes())),
    "a statistic under another scope": lambda: Policy("own", Cubes(), DeviationScope(recent=2)),
    "another statistic than value() reads": lambda: Policy("own", More()),
    "a decay": lambda: Policy("own", Fading()),
    "a decay of two sums": lambda: Policy("own", FadingBoth()),
    "two decays": lambda: Policy("own", FadingBoth(other=0.25)),
    "an entry": lambda: Policy("own", Louder(tau=(1.0, 3.0))),
    "an entry at one temperature": lambda: adaptive(Policy("own", Louder(tau=(1.0, 1.0)))),
    "a scope": lambda: Policy("own", scores.Accumulated(), Naming(recent=2)),
    "an order": lambda: Backwards("own", scores.Accumulated()),
}


@pytest.fixture(autouse=True)
def _cubes(monkeypatch):
    """A statistic is one more row, and a row is a function."""
    monkeypatch.setitem(STATISTICS, "cubes", cubes)


def reversing(name, make_value=reversed_value):
    named = NAMED[name]
    kind = make_value(type(named))
    return Policy("own", kind(**dataclasses.asdict(named)), Scope(recent=3))


# ---- Triton's kernels ----


WRITTEN = [(own, *how) for own in OWN for how in (("llama_gqa", False), ("mpt", True))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("own", "model", "padded"), slow_but([("a statistic", "llama_gqa", False), ("an entry", "mpt", True)], WRITTEN)
)
def test_what_a_user_adds_is_computed_as_written(own, model, padded):
    policy = OWN[own]()
    report = alike(model, policy, padded, steps=4)
    unknown = next((name for name, kernel in policy.needs.kernels if kernel is None), None)
    assert (unknown is not None) == ("cubes" in policy.needs.statistics or own == "two decays")
    if unknown:
        for task, (name, why) in report.backends.items():
            assert name == ("triton" if task == "prompt" else "torch")
            known = task == "prompt" or (task == "decode" and policy.schedule == "prompt")  # appended
            assert known or f"triton: its kernels do not know the function that computes {unknown!r}" in why
    else:
        assert {name for name, _ in report.backends.values()} == {"triton"}


@pytest.mark.parametrize("padded", [False, True])
def test_a_need_that_reads_the_probabilities_of_steps_gets_them(padded):
    report = alike("llama_gqa", Policy("own", Drifting(), Scope(recent=2)), padded, steps=4)
    name, why = report.backends["ragged" if padded else "decode"]
    assert name == "torch" and report.backends["prompt"][0] == "triton"
    assert "triton: its kernels do not know the function that computes 'Drift'" in why


def test_a_need_tells_empty_slots_by_their_positions(monkeypatch):
    """In a second turn it sums what a statistic sums, though gone tokens' keys still lie in slots."""
    monkeypatch.setitem(STATISTICS, "distances", distances)
    seen = []

    class Compared(Drifting):
        needs = (Drift(), Sums("distances"))

        def value(self, context):
            real, both = context.positions_BHT >= 0, (context.state["drift"], context.state["distances"])
            seen.append([real.all(), *(one.masked_fill(~real, 0.0) for one in both)])
            return both[0]

    model = make("llama_gqa", layers=2)
    with torch.no_grad(), kvpatch.patched(model, Policy("own", Compared(), Scope(recent=2)), 0.5) as patch:
        cache = patch.new_cache()
        for ids in (prompt(2, 20), *prompt(2, 5, seed=1).split(1, 1), prompt(2, 9, seed=2), *prompt(2, 3, seed=3).split(1, 1)):
            model(ids, past_key_values=cache)
    assert len(seen) > 12 and not all(full for full, *_ in seen)
    for _, drift, summed in seen:
        torch.testing.assert_close(drift, summed, atol=1e-4, rtol=1e-4)


VALUES = [*itertools.product(NAMED, (reversed_value, wrapped_value))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "make_value"), slow_but([("gumbel", wrapped_value)], VALUES))
def test_a_value_of_a_subclass_is_computed(name, make_value):
    policy = reversing(name, make_value)
    report = alike("llama_gqa", policy, steps=4)
    assert NAMED[name].kernel_source == name and policy.score.kernel_source is None
    kernel, why = report.backends["decode"]
    assert kernel == "triton" and why == "torch names who goes: no kernel knows the score's value()"
    if make_value is reversed_value:
        alike("llama_gqa", adaptive(policy), padded=True, steps=4)


@pytest.mark.parametrize("name", slow_but(("sum",), ("sum", "squares", "count", "gumbel")))
def test_a_replaced_statistic_is_the_one_that_is_computed(name, monkeypatch):
    monkeypatch.setitem(STATISTICS, name, late)
    named = Policy("own", NAMED[name]) if name in NAMED else Policy("own", scores.Mean(), DeviationScope(recent=2))
    report = alike("llama_gqa", named, steps=5)
    assert {report.backends[task][0] for task in ("decode", "statistics")} == {"torch"}
    assert repr(name) in report.backends["decode"][1] and repr(name) in report.backends["statistics"][1]


@pytest.mark.slow
def test_a_replaced_value_is_the_one_that_is_computed(monkeypatch):
    value = scores.Accumulated.value
    monkeypatch.setattr(scores.Accumulated, "value", lambda self, context: 1.0 / (1e-3 + value(self, context)))
    alike("llama_gqa", "h2o", steps=6)


@pytest.mark.slow
def test_other_names_and_records(monkeypatch):
    """A record belongs to its function; under another name, or with a name that no kernel has, torch computes it."""
    monkeypatch.setitem(STATISTICS, "cubes", STATISTICS["sum"])
    assert alike("llama_gqa", Policy("own", Cubes()), steps=4).backends["decode"][0] == "torch"
    monkeypatch.setitem(STATISTICS, "cubes", Statistic(cubes, kernel="cubes"))
    assert alike("llama_gqa", Policy("own", Cubes()), steps=4).backends["decode"][0] == "torch"
    wrapped = functools.wraps(STATISTICS["sum"])(cubes)
    monkeypatch.setitem(STATISTICS, "sum", wrapped)
    assert kernel_of("sum") is None
    assert alike("llama_gqa", "h2o", steps=4).backends["decode"][0] == "torch"
    monkeypatch.setitem(STATISTICS, "sum", Statistic(lambda block, score: plain_sum(block, score), kernel="sum"))
    assert alike("llama_gqa", "h2o", steps=4).backends["decode"][0] == "triton"


def test_every_record_names_a_sum_that_kernels_know():
    from kvpatch.backends.triton import decode, triton_backend

    assert {kernel_of(name) for name in STATISTICS if name not in ("cubes", "area")} == set(triton_backend.KNOWN)
    assert set(triton_backend.KNOWN) | {"observed"} == set(decode.STATISTICS)


def test_a_requested_backend_that_is_not_taken_is_logged(caplog):
    dispatch._said.clear()
    with caplog.at_level(logging.WARNING, "kvpatch"):
        alike("llama_gqa", Policy("own", Cubes()), steps=2)
    assert "backend='triton' leaves statistics to another: its kernels do not know the function" in caplog.text


COMPILED = ["a statistic", "another statistic than value() reads", "a scope", "sum", "gumbel", "an entry", "an order"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("own", slow_but((), COMPILED))
def test_compiled_steps_compute_it_too(own):
    policy = OWN[own]() if own in OWN else reversing(own)
    model, ids, more = make("llama_gqa", layers=1).to(DEVICE), prompt(2, 30).to(DEVICE), prompt(2, 5, seed=3).to(DEVICE)
    torch._dynamo.reset()

    want = steps(model, policy, ids, more, backend="torch")
    got = steps(model, policy, ids, more, backend="triton", compiled=True)
    torch.testing.assert_close(got[0], want[0], atol=2e-5, rtol=0)
    assert same_tokens(got[1], want[1])


@pytest.mark.parametrize("shape", ["too few", "none"])
def test_noise_of_another_shape_is_no_number_beyond_the_memory(shape):
    class Flat(scores.GumbelSoftmax):
        def entry(self, new):
            noise = torch.ones(*new.k_BHQD.shape[:3], 1)
            return {"noise": noise if shape == "too few" else noise[..., 0]}

    model, ids, fed = make("llama_gqa").to(DEVICE), prompt(1, 20).to(DEVICE), prompt(1, 2, seed=1).to(DEVICE)
    for schedule in ("both", "decode"):
        policy = Policy("own", Flat(), schedule=schedule)
        with kvpatch.patched(model, policy, 5, backend="triton"), pytest.raises((ValueError, RuntimeError), match=r"noise|G"):
            force(model, ids, fed)


# ---- flash kernels, and torch by itself ----


@pytest.mark.parametrize("own", ["a statistic", "a statistic beside a known one", "an entry", "sum", "mean", "observed"])
def test_beside_a_flash_kernel(install, monkeypatch, own):  # noqa: F811
    """By an emulation: what attention leaves behind is the log-sum-exp, and torch sums what the user wrote."""
    install("cute")
    answer = flash_backend.reason
    monkeypatch.setattr(flash_backend, "reason", lambda task, case: answer(task, dataclasses.replace(case, device="cuda")))
    model, ids, fed = make("llama_gqa", dtype=torch.float16), prompt(2, 44), prompt(2, 5, seed=2)
    policy = OWN[own]() if own in OWN else reversing(own)

    def run(backend):
        with kvpatch.patched(model, policy, 0.5, backend=backend) as patch:
            logits, cache = force(model, ids, fed)
            return logits.float(), [cache.positions(0).sort(-1).values], patch.report()

    want, got = run("torch"), run("auto")
    assert got[2].backends["prompt"][0] == "flash" and refusals.known == {}
    torch.testing.assert_close(got[0], want[0], atol=0.02, rtol=0)
    assert same_tokens(got[1], want[1])


@pytest.mark.parametrize("own", [*OWN, *NAMED])
def test_stacked_steps_and_steps_layer_by_layer(own, monkeypatch):
    model, ids, fed = make("llama_gqa"), prompt(2, 30), prompt(2, 6, seed=2)
    policy = OWN[own]() if own in OWN else reversing(own)

    def run():
        with kvpatch.patched(model, policy, 0.4, backend="torch"):
            logits, cache = force(model, ids, fed)
            return logits, [cache.positions(layer).sort(-1).values for layer in range(2)]

    want = run()
    monkeypatch.setattr(kvpatch.attention.attend, "_find_stack", lambda *_: None)
    got = run()
    torch.testing.assert_close(got[0], want[0], atol=1e-6, rtol=0)
    assert same_tokens(got[1], want[1])


# ---- what cannot be computed ----


def test_a_name_without_a_function_says_what_to_type(monkeypatch):
    class Misspelt(Cubes):
        needs = (Sums("cubs"),)

    said = r"Policy 'own' sums the statistic 'cubs', .*STATISTICS\. Did you mean 'cubes'\? .*STATISTICS\['cubs'\] = my_function"
    with pytest.raises(kvpatch.KVPatchError, match=said):
        Policy("own", Misspelt())
    monkeypatch.setitem(STATISTICS, "cubes", "sum")
    with pytest.raises(kvpatch.KVPatchError, match=r"STATISTICS\['cubes'\] = my_function, of \(block, need\)"):
        Policy("own", Cubes())
