"""Kernels that fail at their first launch: remembered, said once with what to do; torch serves, and nothing is half-written."""

import re
import subprocess
from itertools import product

import pytest
import torch
from triton.runtime.errors import InterpreterError, OutOfResources, PTXASError

import kvpatch
from kvpatch.backends import refusals
from kvpatch.backends.dispatch import Choice, backend
from kvpatch.backends.protocol import Case
from kvpatch.backends.triton import columns, decode, triton_backend
from tests.helpers.marks import slow_but
from tests.helpers.tiny import force, make, prompt
from tests.invariants.test_backends_agree import DEVICE

CUDA = Case("cuda", torch.bfloat16, 128)
FAILURES = {
    "no compiler": (RuntimeError("Failed to find C compiler. Please specify via CC environment variable."), "install gcc"),
    "a compiler that fails": (subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"]), "install gcc"),
    "a read-only cache": (PermissionError(13, "Permission denied", "/root/.triton/cache"), "TRITON_CACHE_DIR"),
    "shared memory": (OutOfResources(98304, 65536, "shared memory"), "too little shared memory"),
    "an unknown GPU": (PTXASError("Internal Triton PTX codegen error\n`ptxas`: sm_130 is not defined"), "install -U triton"),
    "something else": (RuntimeError("Triton Error [CUDA]: device driver mismatch"), "more slowly.\n"),
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(refusals, "known", {})
    monkeypatch.setattr(refusals, "_ran", set())
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def failing(monkeypatch, module, name, error):
    """Make a kernel's launch fail."""

    class Stub:
        def __getitem__(self, grid):
            return self

        def __call__(self, *args, **kwargs):
            raise error

    monkeypatch.setattr(module, name, Stub())


def run(policy, backend, name="llama_gqa", **options):
    model, ids, fed = make(name), prompt(2, 30).to(DEVICE), prompt(2, 6, seed=2).to(DEVICE)
    with kvpatch.patched(model.to(DEVICE), policy, 0.5, backend=backend, **options) as patch:
        logits, cache = force(model, ids, fed)
        cache.check_invariants()
        return logits, cache, patch.report().backends


def alike(got, want):
    torch.testing.assert_close(got[0], want[0], atol=2e-5, rtol=0)
    for own, other in zip(got[1].layers, want[1].layers, strict=True):
        assert torch.equal(own.positions, other.positions)
        for statistic in own.state:
            torch.testing.assert_close(own.state[statistic], other.state[statistic], atol=1e-5, rtol=1e-4, msg=statistic)


@pytest.mark.parametrize("kind", slow_but([min(FAILURES)], FAILURES))
def test_what_to_do_is_said_once(kind, monkeypatch, caplog):
    error, told = FAILURES[kind]
    kernels = [name for name in vars(decode) if name.endswith("_kernel")]
    failing(monkeypatch, decode, kernels[0], error)
    for _ in range(2):
        got = run("h2o", "triton")
    assert caplog.text.count("triton decode refused") == 1 and told in caplog.text
    assert got[2]["decode"][0] == "torch" and "refused" not in got[2]["statistics"][1]
    assert " ".join(str(error).split()) in got[2]["decode"][1]
    alike(got, run("h2o", "torch"))


LAUNCHES = {name: module for module in (columns, decode) for name in vars(module) if name.endswith("_kernel")}
FAILING = [*product(LAUNCHES, ("h2o", "keyformer", "snapkv", "adaptive(h2o)"))]


@pytest.mark.parametrize(("name", "policy"), slow_but([(min(LAUNCHES), "h2o")], FAILING))
def test_whichever_launch_fails_the_tokens_are_torch_s(name, policy, monkeypatch):
    failing(monkeypatch, LAUNCHES[name], name, RuntimeError("no kernel image is available for execution on the device"))
    alike(run(policy, "triton"), run(policy, "torch"))


def test_what_a_failed_launch_has_written_is_as_before():
    """Kernels before the failing one write in place."""
    state, slot = torch.zeros(3), torch.tensor([4])

    def half():
        state.add_(1)
        slot.fill_(-1)
        raise OutOfResources(2, 1, "shared memory")

    assert refusals.attempt("triton decode", CUDA, half, triton_backend.advice, (state, slot)) is None
    assert state.tolist() == [0, 0, 0] and slot.tolist() == [4]


def test_a_kernel_that_has_run_is_not_copied_for_and_raises():
    """Its later errors are no failures of a launch: what it wrote could not be undone."""
    answers = iter([1])

    def run():
        for answer in answers:
            return answer
        raise RuntimeError("an error")

    assert refusals.attempt("triton decode", CUDA, run, triton_backend.advice) == 1
    with pytest.raises(RuntimeError, match="an error"):
        refusals.attempt("triton decode", CUDA, run, triton_backend.advice)
    assert refusals.known == {}


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("full"), ValueError("a wrong shape"), InterpreterError("IndexError"), AssertionError()]
)
def test_other_errors_are_raised(error, monkeypatch):
    def raising():
        raise error

    with pytest.raises(type(error)):
        refusals.attempt("triton decode", CUDA, raising, triton_backend.advice)
    assert refusals.known == {}


def test_another_case_is_tried(monkeypatch):
    monkeypatch.setattr(triton_backend, "reason", lambda task, case: None)
    refusals.remember("triton statistics", CUDA, OutOfResources(2, 1, "shared memory"), "")
    small = Case("cuda", torch.bfloat16, 64)
    assert [Choice().of("statistics", case) for case in (CUDA, small)] == ["torch", "triton"]
    assert Choice().of("decode", CUDA) == "triton"


@pytest.mark.parametrize(("device", "said"), [((7, 5), r"compute capability 8\.0"), ((8, 0), None), ((9, 0), None)])
def test_an_old_gpu_is_refused_before_anything_is_compiled(device, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: device)
    monkeypatch.setattr(triton_backend, "driver_problem", lambda: None)
    for task in ("statistics", "decode", "ragged"):
        assert re.search(said or "^None$", str(triton_backend.reason(task, CUDA)))


@pytest.mark.parametrize("kind", ["no compiler", "a read-only cache"])
def test_a_driver_that_does_not_load_is_refused_with_what_to_do(kind, monkeypatch):
    import triton

    error, told = FAILURES[kind]

    class Driver:
        @property
        def active(self):
            raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(triton.runtime, "driver", Driver())
    triton_backend.driver_problem.cache_clear()
    reason = triton_backend.reason("decode", CUDA)
    triton_backend.driver_problem.cache_clear()
    assert told in reason and str(error) in reason


def test_a_backend_chosen_instead_that_fails_is_not_said_to_have_run(monkeypatch):
    """Flash cannot take one call, Triton fails at it: torch serves that call, and flash the next ones."""
    monkeypatch.setattr(backend("flash"), "reason", lambda task, case: None)
    chosen, (error, _) = Choice(), FAILURES["shared memory"]

    def fail():
        raise error

    assert chosen.of("prompt", CUDA) == "flash" and chosen.instead("prompt", CUDA, "flash", "keys are out of order") == "triton"
    assert chosen.attempt("prompt", CUDA, fail, name="triton") is None
    served, why = chosen.ran_last["prompt"]
    assert served == "torch" and why.startswith("flash: keys are out of order; triton: ") and "shared memory" in why
    assert chosen.of("prompt", CUDA) == "flash"
