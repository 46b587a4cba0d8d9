"""The forward kernel against float64 attention over whole matrices; under Triton's interpreter where there is no GPU."""

import pytest
import torch

from tests.backends.on_triton import DEVICE, HALF, make, tail  # isort: skip
from kvpatch.backends.triton import forward
from kvpatch.backends.triton.forward import attend
from tests.backends import triton_twins as twins
from tests.helpers.marks import slow_but

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter's infinities
OUT = {torch.float32: 1e-5, HALF: 2e-3, torch.bfloat16: 2e-2}
LSE = 1e-5

CASES = {
    **{f"causal {Q} {D}": lambda Q=Q, D=D: make(Q, D, H=1) for Q, D in ((1, 64), (63, 128), (129, 64), (150, 80))},
    **{f"causal half {D}": lambda D=D: make(150, D, dtype=HALF, H=1, G=2) for D in (64, 96, 256)},
    "group 3": lambda: make(63, H=2, G=3),
    "left padding": lambda: make(200, B=3, H=1, padding=[(0, 198), (0, 70), (0, 0)]),
    "left padding half": lambda: make(300, B=2, H=1, dtype=HALF, padding=[(0, 100), (0, 0)], noise=True),
    "right padding": lambda: make(150, B=2, H=1, G=2, padding=[(100, 150), (1, 150)]),
    "padding in between": lambda: make(200, B=2, H=1, padding=[(70, 110), (0, 5)]),
    "padding that counts": lambda: make(200, H=1, padding=[(70, 110)], counting=False, sliding=50, alibi=True),
    "nothing but padding": lambda: make(40, B=2, H=1, padding=[(0, 40), (0, 0)], sinks=True),
    "past": lambda: make(63, G=2, past=150),
    "past without gaps": lambda: make(130, past=70, gaps=False, noise=True),
    "past ALiBi without gaps": lambda: make(70, past=70, gaps=False, alibi=True),
    "past half": lambda: make(63, 128, H=1, G=2, past=150, dtype=HALF, noise=True),
    "past and padding": lambda: make(150, B=2, H=1, past=70, padding=[(0, 130), (0, 0)]),
    "past ALiBi window": lambda: make(150, H=1, G=2, past=150, alibi=True, sliding=200),
    "window": lambda: make(300, H=1, sliding=77),
    "window of one": lambda: make(63, sliding=1),
    "window half noise": lambda: make(400, H=1, dtype=HALF, sliding=200, noise=True),
    "window left padding": lambda: make(250, B=2, H=1, sliding=60, padding=[(0, 130), (0, 3)]),
    "window padding in between": lambda: make(250, H=1, sliding=60, padding=[(100, 150)]),
    "ALiBi": lambda: make(150, H=4, alibi=True),
    "ALiBi far away": lambda: make(150, H=1, G=2, alibi=True, offset=10**9),
    "ALiBi half left padding": lambda: make(300, B=2, H=1, G=2, alibi=True, dtype=HALF, padding=[(0, 190), (0, 0)]),
    "ALiBi noise": lambda: make(150, B=2, H=1, alibi=True, noise=True, padding=[(0, 40), (0, 0)]),
    "noise": lambda: make(129, B=2, H=1, G=2, noise=True),
    "noise tau": lambda: make(129, B=2, H=1, G=2, noise=True, tau=1.7, padding=[(0, 50), (0, 0)]),
    "noise small tau": lambda: make(129, H=1, G=2, noise=True, tau=0.03),
    "noise tau ALiBi window past": lambda: make(129, H=1, G=2, past=60, noise=True, tau=0.6, alibi=True, sliding=100),
    "cap": lambda: make(129, G=2, softcap=3.0),
    "cap window": lambda: make(200, H=1, G=2, softcap=20.0, sliding=70, dtype=HALF),
    "cap ALiBi": lambda: make(129, G=2, softcap=2.0, alibi=True, noise=True),
    "sinks": lambda: make(129, G=3, sinks=True),
    "sinks window padding": lambda: make(200, B=2, H=1, G=2, sinks=True, sliding=50, padding=[(0, 60), (0, 0)], noise=True),
    "everything": lambda: make(150, B=2, H=1, G=2, past=60, padding=[(0, 60), (0, 0)], sinks=True, softcap=5.0, alibi=True,
                               sliding=100, noise=True, tau=1.3),
    "tail": lambda: tail(5, 150, B=2, G=2),
    "tail window ALiBi": lambda: tail(5, 200, B=2, H=1, sliding=90, alibi=True),
    "tail cap sinks": lambda: tail(5, 150, B=2, G=2, softcap=3.0, sinks=True, noise=True),
}  # fmt: skip
if DEVICE == "cuda":  # the interpreter multiplies bfloat16 wrongly
    CASES |= {f"bfloat16 {D}": lambda D=D: make(1000, D, G=4, dtype=torch.bfloat16) for D in (64, 80, 128, 256)}


@pytest.fixture(params=slow_but(("past and padding", "cap ALiBi", "tail cap sinks"), CASES), scope="module")
def prompt(request):
    return CASES[request.param]()


def run(prompt, values=True, **options):
    q, k, *places = prompt.tensors
    return attend(q, k, prompt.v_BHTD if values else None, *places, **{"holes": prompt.holes, **prompt.options, **options})


def assert_normalises(got, want, tolerance=LSE):
    assert got.dtype == torch.float32
    assert torch.equal(got == torch.inf, want == torch.inf)
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=1e-6)


def assert_attends(prompt, found):
    assert_normalises(found.lse, twins.normalisers(prompt, False))
    assert (found.noisy is None) != twins.is_noisy(prompt)
    if found.noisy is not None:
        assert_normalises(found.noisy, twins.normalisers(prompt, True), LSE * max(1.0, 1.0 / prompt.options.get("tau", 1.0)))


@pytest.mark.sampled(2)
def test_output_and_normalizers_in_one_pass(prompt):
    found, want = run(prompt), twins.outputs(prompt)
    assert_attends(prompt, found)
    dtype = prompt.q_BHGQD.dtype
    assert found.out.dtype == dtype and found.out.shape == want.shape
    torch.testing.assert_close(found.out.double(), want, rtol=0, atol=OUT[dtype] * float(want.abs().max()))
    padding = (prompt.rows_BQ < 0)[:, None, None, :, None].expand_as(want)
    assert (found.out[padding] == 0).all()


def test_normalizers_alone(prompt):
    found = run(prompt, values=False)
    assert not found.out.numel()
    assert_attends(prompt, found)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if "noise" in name or name in ("everything", "tail cap sinks")])
def test_noisy_normalizers_from_attentions_own(name):
    """What a kernel leaves for padding, whatever it is, is not read."""
    prompt = CASES[name]()
    lse = twins.normalisers(prompt, False).float()
    for empty in (torch.inf, torch.nan):
        unread = (prompt.rows_BQ < 0)[:, None, None]
        known = lse.masked_fill(unread, empty)
        found = run(prompt, values=False, lse_BHGQ=known)
        assert not found.out.numel() and found.lse is known
        tolerance = LSE * max(1.0, 1.0 / prompt.options.get("tau", 1.0))
        assert_normalises(found.noisy, twins.normalisers(prompt, True), tolerance)


@pytest.mark.slow
def test_random_shapes():
    """Rows, heads, sizes, masks and biases drawn together."""
    draw = torch.Generator().manual_seed(0)

    def pick(*values):
        return values[int(torch.randint(len(values), (), generator=draw))]

    for _ in range(12):
        Q, B, past = pick(1, 17, 70, 131), pick(1, 2), pick(0, 0, 40)
        dtype = pick(torch.float32, HALF)
        shape = {"D": pick(16, 40, 64), "B": B, "H": pick(1, 2), "G": pick(1, 3), "past": past, "dtype": dtype}
        shape |= {"alibi": pick(True, False), "noise": pick(True, False), "sinks": pick(True, False), "gaps": pick(True, False)}
        shape |= {"padding": [(0, pick(0, Q // 2)) for _ in range(B)], "sliding": pick(None, 9, 64), "softcap": pick(None, 4.0)}
        prompt = make(Q, **shape, **({"tau": pick(1.0, 1.5)} if shape["noise"] else {}))
        found, want = run(prompt), twins.outputs(prompt)
        assert_attends(prompt, found)
        close = OUT[dtype] * float(want.abs().max())
        torch.testing.assert_close(found.out.double(), want, rtol=0, atol=close, msg=str(shape))


def test_holes_that_are_none_change_nothing():
    for prompt in (make(200, H=1, G=2, noise=True), make(200, H=1, sliding=60), make(70, H=1, past=70, gaps=False)):
        one, other = run(prompt, holes=False), run(prompt, holes=True)
        torch.testing.assert_close(one.out, other.out, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(one.lse, other.lse, rtol=1e-6, atol=1e-6)


def test_the_same_bits_again():
    prompt = make(130, H=1, G=2, past=40, noise=True, tau=1.3, alibi=True)
    once, again = run(prompt), run(prompt)
    assert all(torch.equal(getattr(once, name), getattr(again, name)) for name in ("out", "lse", "noisy"))


@pytest.mark.parametrize("layout", ["heads first", "last axis strided"])
def test_other_layouts(layout):
    prompt = make(70, G=2)
    want = run(prompt)
    for name in ("q_BHGQD", "k_BHTD", "v_BHTD"):
        tensor = getattr(prompt, name)
        strided = tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
        setattr(prompt, name, tensor.contiguous() if layout == "heads first" else strided)
    found = run(prompt)
    assert torch.equal(found.out, want.out) and torch.equal(found.lse, want.lse)


def test_the_output_lies_as_a_model_takes_it():
    """Heads of a token beside each other, so that joining them copies nothing."""
    out = run(make(20, H=2, G=3)).out
    assert out.permute(0, 3, 1, 2, 4).is_contiguous()


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="counts the interpreter's tiles")
@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        ({}, 36 + 36),  # 32 keys by 64 rows: half of 16 x 8 and the diagonal
        ({"past": 64}, 36 + 36 + 16),
        ({"padding": [(0, 384)]}, 4 + 2),
        ({"padding": [(128, 512)]}, 4 + 2),
        ({"sliding": 64}, 8 * 4 - 2),
    ],
)
def test_tiles_that_nothing_is_seen_in_are_skipped(monkeypatch, shape, tiles):
    from triton.runtime.interpreter import interpreter_builder

    counted, dot = [], interpreter_builder.create_dot
    monkeypatch.setattr(interpreter_builder, "create_dot", lambda *a, **k: counted.append(1) or dot(*a, **k))
    monkeypatch.setattr(forward, "_choose_tile", lambda *given: (32, 64, 4, 2))
    prompt = make(512, H=1, **shape)
    run(prompt, values=False)
    assert len(counted) <= tiles


@pytest.mark.skipif(DEVICE == "cuda", reason="counts the interpreter's programs")
def test_programs_that_see_most_rows_start_first(monkeypatch):
    grids, kind = [], type(forward._forward_kernel)
    launch = kind.__getitem__
    monkeypatch.setattr(kind, "__getitem__", lambda kernel, grid: grids.append(grid) or launch(kernel, grid))
    monkeypatch.setattr(forward, "_choose_tile", lambda *given: (32, 64, 4, 2))
    run(make(256, B=2, H=3, G=2))
    assert grids == [(12, 4)]


def test_what_the_kernel_cannot_take():
    prompt = make(5)
    q, k, *places = prompt.tensors
    for wrong, said in (
        ((q.double(), k.double(), None), "torch backend"),
        ((q.half(), k, None), "cast one"),
        ((q, k, prompt.v_BHTD[..., :32]), "values like the keys"),
        ((q, k, prompt.v_BHTD.half()), "values like the keys"),
    ):
        with pytest.raises(ValueError, match=said):
            attend(*wrong, *places, **prompt.options)
    with pytest.raises(ValueError, match=r"\[B,H,T,G\]"):
        attend(q, k, None, *places, noise_BHTG=torch.ones(1, 2, 5, 3, device=DEVICE), **prompt.options)
