"""The kernels of a replay, forward and backward, against autograd in float64 over whole matrices.

Under Triton's interpreter where there is no GPU.
"""

from dataclasses import replace

import pytest
import torch

from tests.backends.on_triton import DEVICE, HALF, make  # isort: skip
from triton.runtime.errors import OutOfResources

import kvpatch
from kvpatch.backends import refusals, torch_backend
from kvpatch.backends.protocol import Case, Geometry, Keys
from kvpatch.backends.triton import backward, forward, triton_backend
from tests.attention.test_replay import Largest
from tests.backends import triton_twins as twins
from tests.backends.test_launch_failures import failing
from tests.helpers import tiny
from tests.helpers.marks import slow_but
from tests.helpers.training import gradients

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter's infinities
OUT = {torch.float32: 1e-5, HALF: 2e-3, torch.bfloat16: 2e-2}
GRADIENT = {torch.float32: 1e-5, HALF: 4e-3, torch.bfloat16: 3e-2}  # of the largest

CASES = {
    "some die": lambda: make(150, H=2, deaths="some"),
    "all die": lambda: make(150, H=2, deaths="all"),
    "group 3": lambda: make(70, 40, B=2, H=2, G=3, deaths="some"),
    "left padding": lambda: make(130, B=3, H=1, G=2, padding=[(0, 128), (0, 70), (0, 0)], deaths="some"),
    "right padding": lambda: make(90, B=2, H=1, padding=[(50, 90), (1, 90)], deaths="some"),
    "padding in between": lambda: make(150, B=2, H=1, padding=[(70, 110), (0, 5)], deaths="all"),
    "nothing but padding": lambda: make(40, B=2, H=1, padding=[(0, 40), (0, 0)], deaths="some"),
    "window": lambda: make(200, H=1, G=2, sliding=57, deaths="some"),
    "window padding": lambda: make(150, B=2, H=1, sliding=40, padding=[(0, 60), (70, 90)], deaths="some"),
    "ALiBi": lambda: make(100, 16, H=2, G=2, alibi=True, deaths="some"),
    "ALiBi window padding": lambda: make(100, B=2, H=1, alibi=True, sliding=60, padding=[(0, 31), (0, 0)], deaths="some"),
    "far away": lambda: make(70, H=1, deaths="all", offset=10**9),
    "scale": lambda: make(70, H=1, deaths="some", scale=0.3),
    "one row": lambda: make(1, H=2, G=2, deaths="some"),
    **{f"half {D}": lambda D=D: make(150, D, dtype=HALF, H=1, G=2, deaths="some") for D in (64, 128, 256)},
    "half window padding": lambda: make(150, B=2, H=1, dtype=HALF, sliding=60, padding=[(0, 40), (0, 0)], deaths="all"),
}
if DEVICE == "cuda":  # the interpreter multiplies bfloat16 wrongly
    CASES |= {f"bfloat16 {D}": lambda D=D: make(1000, D, G=4, dtype=torch.bfloat16, deaths="some") for D in (64, 128, 256)}


@pytest.fixture(params=slow_but(("some die", "group 3", "window padding", "half 64"), CASES), scope="module")
def prompt(request):
    return CASES[request.param]()


def run(prompt):
    q, k, *places = prompt.tensors
    return forward.attend(q, k, prompt.v_BHTD, *places, **{"holes": prompt.holes, **prompt.options})


def upstream(prompt):
    """A gradient of the output, with whatever stands in padding."""
    grad = torch.randn(prompt.q_BHGQD.shape, generator=torch.Generator().manual_seed(5)).to(DEVICE, prompt.q_BHGQD.dtype)
    return grad.masked_fill((prompt.rows_BQ < 0)[:, None, None, :, None], float("nan"))


def back(prompt, found, grad):
    q, k, *places = prompt.tensors
    options = {name: prompt.options[name] for name in ("scale", "slopes_HG", "sliding") if name in prompt.options}
    given = (prompt.options["deaths_BHT"], found.out, found.lse, grad)
    return backward.gradients(q, k, prompt.v_BHTD, *places, *given, holes=prompt.holes, **options)


def close(got, want, tolerance):
    torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance * max(float(want.abs().max()), 0.1))


def test_output_and_log_sum_exp(prompt):
    found, want = run(prompt), twins.outputs(prompt)
    close(found.out, want, OUT[prompt.q_BHGQD.dtype])
    lse = twins.normalisers(prompt, False)
    assert torch.equal(found.lse == torch.inf, lse == torch.inf)
    torch.testing.assert_close(found.lse.double(), lse, atol=1e-5, rtol=1e-6)


def test_gradients(prompt):
    """Of queries, keys and values: 0 for padding and for keys that nobody sees, whatever is in them."""
    grad = upstream(prompt)
    for got, want in zip(back(prompt, run(prompt), grad), twins.gradients(prompt, grad), strict=True):
        assert got.dtype == prompt.q_BHGQD.dtype and got.shape == want.shape
        close(got, want, GRADIENT[got.dtype])


def test_the_same_bits_again():
    prompt = CASES["group 3"]()
    found, grad = run(prompt), upstream(prompt)
    assert all(torch.equal(one, other) for one, other in zip(back(prompt, found, grad), back(prompt, found, grad), strict=True))


@pytest.mark.parametrize("name", ["some die", "window padding", "ALiBi"])
def test_the_torch_path_agrees(name):
    """torch's masks of a block of rows, the twin's whole matrix, and both gradients of a replay's Keys."""
    prompt = CASES[name]()
    leaves = [t.double().nan_to_num(0.0).requires_grad_() for t in (prompt.q_BHGQD, prompt.k_BHTD, prompt.v_BHTD)]
    keys = Keys(*leaves[1:], prompt.positions_BHT, prompt.holes, 0, False, deaths_BHT=prompt.options["deaths_BHT"])
    shape = Geometry(prompt.options["scale"], prompt.options.get("slopes_HG"), prompt.options.get("sliding"))
    out, _ = torch_backend.attend(leaves[0], keys, prompt.rows_BQ, shape)
    grad = upstream(prompt).double().nan_to_num(0.0)
    real = (prompt.rows_BQ >= 0)[:, None, None, :, None]
    close(out.detach() * real, twins.outputs(prompt), 1e-12)
    for got, want in zip(torch.autograd.grad(out, leaves, grad), twins.gradients(prompt, grad), strict=True):
        close(got, want, 1e-12)


def test_no_tensor_grows_with_the_square_of_the_text():
    prompt, seen = make(300, 16, H=1, G=2, deaths="some"), Largest()
    grad = upstream(prompt)
    with seen:
        back(prompt, run(prompt), grad)
    assert seen.numel <= 4 * prompt.q_BHGQD.numel() < 300 * 300, "the interpreter copies bytes"


# ---- through a model ----


@pytest.fixture
def counted(monkeypatch):
    """The backend's calls: of its forward and of its gradients, in a process that remembers no refusal."""
    calls = {"attend": 0, "gradients": 0}
    monkeypatch.setattr(refusals, "known", {})
    monkeypatch.setattr(refusals, "_ran", set())

    def note(name, whole):
        def call(*args):
            calls[name] += 1
            return whole(*args)

        return call

    for name in calls:
        monkeypatch.setattr(triton_backend, name, note(name, getattr(triton_backend, name)))
    return calls


def replayed(name, served, checkpointing=False, policy="h2o"):
    """Loss, logits and gradients of a padded batch in a replay of what torch recorded, by the backend `served`."""
    model, ids, fed = tiny.make(name).to(DEVICE), tiny.prompt(2, 22), tiny.prompt(2, 8, seed=5)
    mask = tiny.left_pad(ids, [22, 15])
    with kvpatch.patched(model, policy, 8, record=True, backend="torch") as patch:
        _, cache = tiny.force(model, ids, fed, mask)
        record = patch.record(cache)
    text, whole = torch.cat([ids, fed], 1), torch.cat([mask, torch.ones_like(fed)], 1)
    if checkpointing:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    with kvpatch.patched(model, "full", k=1.0, backend=served) as patch, patch.replay(record):
        logits = model(text.to(DEVICE), attention_mask=whole.to(DEVICE)).logits[:, 7:]
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 8:].flatten().to(DEVICE))
        return logits.detach(), gradients(model, loss)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["llama_gqa", "mpt", "mistral_sliding"])
def test_a_model_s_replay(name, checkpointing, counted):
    (got, mine), (want, theirs) = replayed(name, "triton", checkpointing), replayed(name, "torch")
    assert counted["gradients"] == 2 and counted["attend"] == 2 + 2 * checkpointing, "one of each for each layer"
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
    for key, gradient in theirs.items():
        torch.testing.assert_close(mine[key], gradient, atol=1e-5, rtol=0, msg=lambda m, key=key: f"{key}: {m}")


def test_what_is_left_to_torch(counted):
    case = Case("cpu", torch.float32, 64, gradients=True)
    assert triton_backend.reason("replay", case) is None
    assert "no capped logits" in triton_backend.reason("replay", replace(case, special=("softcap",)))
    assert "not float64" in triton_backend.reason("replay", replace(case, dtype=torch.float64))
    assert "no gradients" in triton_backend.reason("prompt", case)
    replayed("llama_gqa", "auto")  # on a CPU
    assert not any(counted.values())


@pytest.mark.parametrize("fails", ["_forward_kernel", "_queries_kernel"])
def test_a_first_launch_that_fails(fails, counted, monkeypatch, caplog):
    """torch computes what the kernel was to, and what follows."""
    want = replayed("llama_gqa", "torch")
    module = forward if fails == "_forward_kernel" else backward
    failing(monkeypatch, module, fails, OutOfResources(98304, 65536, "shared memory"))
    for again in range(2):
        got = replayed("llama_gqa", "triton")
        torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
        assert counted["gradients"] == (0 if fails == "_forward_kernel" else 2), again
    assert caplog.text.count("too little shared memory") == (1 if fails == "_forward_kernel" else 2)
