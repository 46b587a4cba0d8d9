"""The column kernels against float64 sums over whole matrices; under Triton's interpreter where there is no GPU."""

import pytest
import torch

from tests.backends.on_triton import DEVICE, HALF, make, tail  # isort: skip
from kvpatch.backends import torch_backend
from kvpatch.backends.protocol import Geometry, Keys
from kvpatch.backends.torch_backend import ProbabilityRows
from kvpatch.backends.triton import columns
from kvpatch.backends.triton.arguments import reason
from kvpatch.backends.triton.columns import NAMES, column_statistics
from kvpatch.backends.triton.forward import attend
from kvpatch.policies.context import Block
from kvpatch.policies.statistics import STATISTICS
from tests.backends import triton_twins as twins
from tests.helpers.marks import slow_but

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter's infinities
CLOSE = {"sum": 1e-5, "squares": 5e-5}  # relative to the largest entry
LSE = 1e-5

CASES = {
    **{f"causal {Q} {D}": lambda Q=Q, D=D: make(Q, D) for Q in (1, 63, 129) for D in (64, 128)},
    **{f"causal half {D}": lambda D=D: make(129, D, dtype=HALF, G=2) for D in (64, 80, 128, 256)},
    "causal 80": lambda: make(129, 80),
    "causal 96": lambda: make(63, 96),
    "causal 256": lambda: make(129, 256, H=1),
    "causal 1000": lambda: make(1000, H=1),
    "half 1000": lambda: make(1000, H=1, dtype=HALF),
    "group 4": lambda: make(129, H=1, G=4),
    "group 3": lambda: make(63, H=2, G=3),
    "left padding": lambda: make(200, B=3, H=1, G=2, padding=[(0, 198), (0, 70), (0, 0)]),
    "right padding": lambda: make(200, B=2, G=2, padding=[(150, 200), (1, 200)]),
    "padding in between": lambda: make(300, B=2, H=1, padding=[(130, 170), (0, 5)]),
    "padding that counts": lambda: make(300, H=1, padding=[(130, 170)], counting=False),
    "nothing but padding": lambda: make(40, B=2, padding=[(0, 40), (0, 0)]),
    "past": lambda: make(63, G=2, past=150),
    "past and more rows": lambda: make(300, B=2, H=1, past=70, padding=[(0, 130), (0, 0)]),
    "past half": lambda: make(63, 128, H=1, G=2, past=150, dtype=HALF),
    "past ALiBi window": lambda: make(150, G=2, past=150, alibi=True, sliding=200),
    "one row behind a past": lambda: make(1, G=2, past=200),
    "window": lambda: make(400, sliding=37),
    "window of one": lambda: make(63, sliding=1),
    "window left padding": lambda: make(300, B=2, sliding=60, padding=[(0, 130), (0, 3)]),
    "window padding in between": lambda: make(300, sliding=60, padding=[(100, 180)]),
    "ALiBi": lambda: make(200, H=4, alibi=True),
    "ALiBi far away": lambda: make(200, G=2, alibi=True, offset=10**9),
    "ALiBi left padding": lambda: make(200, B=2, G=2, alibi=True, padding=[(0, 190), (0, 0)]),
    "ALiBi spread past": lambda: make(40, H=1, past=3000, alibi=True),
    "noise": lambda: make(129, B=2, G=2, noise=True),
    "noise tau": lambda: make(129, B=2, G=2, noise=True, tau=1.7, padding=[(0, 50), (0, 0)]),
    "noise tau ALiBi window past": lambda: make(129, G=2, past=60, noise=True, tau=0.6, alibi=True, sliding=100),
    "cap": lambda: make(129, G=2, softcap=3.0),
    "cap half window past": lambda: make(100, 128, G=2, past=70, dtype=HALF, softcap=20.0, sliding=90),
    "cap ALiBi noise tau": lambda: make(129, G=2, softcap=2.0, alibi=True, noise=True, tau=1.4),
    "sinks": lambda: make(129, B=2, G=2, sinks=True, sliding=50, padding=[(0, 60), (0, 0)]),
    "tail cap sinks": lambda: tail(5, 150, B=2, G=2, softcap=3.0, sinks=True),
    "tail": lambda: tail(5, 150, B=2, G=2),
    "tail window ALiBi": lambda: tail(5, 300, B=2, sliding=90, alibi=True),
    "tail half noise": lambda: tail(5, 150, G=4, dtype=HALF, noise=True, tau=1.3),
}
if DEVICE == "cuda":  # the interpreter multiplies bfloat16 wrongly
    CASES |= {f"bfloat16 {D}": lambda D=D: make(1000, D, G=4, dtype=torch.bfloat16) for D in (64, 80, 128, 256)}


@pytest.fixture(params=slow_but(("group 3", "padding in between", "past ALiBi window", "noise tau"), CASES), scope="module")
def prompt(request):
    return CASES[request.param]()


def run(prompt, names=NAMES, lse=None):
    """column_statistics with the twin's normalizers."""
    lse = twins.normalisers(prompt).float() if lse is None else lse
    options = {name: value for name, value in prompt.options.items() if name != "sinks_HG"}
    return column_statistics(*prompt.tensors, lse, names, keys_BHQ=twins.keys(prompt), **options)


def normalisers(prompt):
    """The kernel's, of the logits that the statistics are of."""
    found = attend(*prompt.tensors[:2], None, *prompt.tensors[2:], holes=prompt.holes, **prompt.options)
    return found.lse if found.noisy is None else found.noisy


def assert_close(got, want, tolerance):
    assert got.shape == want.shape and got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance * float(want.abs().max()) + 1e-30)


def test_column_statistics(prompt):
    got, want = run(prompt), twins.statistics(prompt)
    for name, tolerance in CLOSE.items():
        assert_close(got[name], want[name], tolerance)
    few, many = (twins.statistics(prompt, slack)["count"] for slack in (1e-5, -1e-5))
    assert ((few <= got["count"]) & (got["count"] <= many)).all()
    assert (few == many).double().mean() > 0.9  # the count is pinned down nearly everywhere


def test_the_probabilities_of_every_row_sum_to_one():
    prompt = make(300, B=2, H=1, G=4, padding=[(0, 77), (290, 300)], dtype=HALF)
    got = run(prompt, ["sum"])["sum"].sum(-1)
    want = 4.0 * (prompt.rows_BQ >= 0).sum(1, keepdim=True).expand_as(got)
    torch.testing.assert_close(got, want.to(got.dtype), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_each_alone_is_what_it_is_among_others(name):
    prompt = make(150, H=1, G=2, past=40)
    assert list(run(prompt, [name])) == [name]
    assert torch.equal(run(prompt, [name])[name], run(prompt)[name])


def test_the_same_bits_again():
    prompt = make(130, H=1, G=2, past=40, noise=True, tau=1.3, alibi=True)
    first, second = (normalisers(prompt) for _ in range(2))
    assert torch.equal(first, second)
    once, again = (run(prompt, lse=first) for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("programs", [1, 6, 40, 1024])
@pytest.mark.parametrize(
    "shape", [{"padding": [(0, 37), (0, 0)]}, {"past": 60}, {"sliding": 70}, {"sliding": 33, "padding": [(0, 5), (150, 290)]}]
)
def test_rows_split_over_programs(shape, programs, monkeypatch):
    """Every split sums the rows of its own; no row is left out or counted twice."""
    monkeypatch.setattr(columns, "PROGRAMS", programs)
    monkeypatch.setattr(columns, "LEAST_TILES", 1)
    prompt = make(290, B=2, H=1, G=2, **shape)
    got, want = run(prompt), twins.statistics(prompt)
    for name, tolerance in CLOSE.items():
        assert_close(got[name], want[name], tolerance)
    exact = twins.statistics(prompt, 1e-5)["count"], twins.statistics(prompt, -1e-5)["count"]
    assert ((exact[0] <= got["count"]) & (got["count"] <= exact[1])).all()


@pytest.mark.skipif(DEVICE == "cuda", reason="counts the interpreter's programs")
def test_programs_that_see_most_rows_start_first(monkeypatch):
    """The first keys of all heads, then the next: the last programs to start are the shortest."""
    grids = []
    launch = type(columns._columns_kernel).__getitem__
    monkeypatch.setattr(
        type(columns._columns_kernel), "__getitem__", lambda kernel, grid: grids.append(grid) or launch(kernel, grid)
    )
    run(make(256, B=2, H=3, G=2), ["sum"])
    assert grids == [(6, 4)]


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="takes 4 GB")
def test_heads_far_apart():
    """Query heads 2^30 elements apart: offsets do not fit 32 bits."""
    prompt = make(5, H=1, G=3, dtype=HALF)
    apart = torch.empty(2**31 + 5 * 64, dtype=HALF).as_strided((1, 1, 3, 5, 64), (0, 0, 2**30, 64, 1))  # most is never touched
    apart.copy_(prompt.q_BHGQD)
    want, prompt.q_BHGQD = run(prompt), apart
    got = run(prompt)
    assert all(torch.equal(got[name], want[name]) for name in NAMES)


@pytest.mark.parametrize("empty", [torch.inf, -torch.inf, torch.nan, 0.0])
def test_normalisers_of_padding_are_not_read(empty):
    prompt = make(150, B=2, H=1, G=2, padding=[(0, 130), (60, 80)])
    lse = twins.normalisers(prompt).float()
    want = run(prompt, lse=lse)
    got = run(prompt, lse=lse.masked_fill((prompt.rows_BQ < 0)[:, None, None], empty))
    assert all(torch.equal(got[name], want[name]) for name in NAMES)


@pytest.mark.parametrize("empty", [torch.inf, -torch.inf, torch.nan, 0.0])
def test_rows_that_see_nothing_count_for_nothing(empty):
    prompt = tail(5, 150, G=2)
    prompt.positions_BHT[prompt.positions_BHT >= 0] += 147  # only rows 146 .. 147 are left to see one key or none
    lse = twins.normalisers(prompt).float()
    assert (lse == torch.inf).any() and lse.isfinite().any()
    got, want = run(prompt, lse=lse.masked_fill(lse == torch.inf, empty)), twins.statistics(prompt)
    for name, tolerance in CLOSE.items():
        assert_close(got[name], want[name], tolerance)
    assert torch.equal(normalisers(prompt) == torch.inf, lse == torch.inf)


@pytest.mark.parametrize("empty", [torch.inf, -torch.inf])
def test_an_infinite_normaliser_takes_a_row_out(empty):
    prompt = make(150, G=2)
    lse = twins.normalisers(prompt).float()
    lse[:, 0, 1, 20:90] = lse[:, 1, :, 149] = empty
    got, want = run(prompt, lse=lse), twins.statistics(prompt, counted=lse.isfinite())
    for name, tolerance in CLOSE.items():
        assert_close(got[name], want[name], tolerance)


def test_columns_without_a_visible_query_are_zero():
    prompt = make(150, B=2, past=60, padding=[(0, 100), (0, 0)])
    got, unseen = run(prompt), ~twins.visible(prompt).any(2)
    assert unseen.any()
    assert all((got[name][unseen] == 0).all() for name in NAMES)


def test_only_keys_of_a_row_are_not_above_their_share():
    """Probability one of one key, however the normaliser was rounded."""
    prompt = make(63, sliding=1)
    lse = twins.normalisers(prompt).float()
    assert (run(prompt, ["count"], lse=lse - 1e-6)["count"] == 0).all()


@pytest.mark.parametrize("layout", ["heads first", "last axis strided"])
def test_other_layouts(layout):
    prompt = make(70, G=2)
    assert prompt.q_BHGQD.stride() == (70 * 256, 128, 64, 256, 1)
    want = run(prompt)["sum"]
    assert_close(want, twins.statistics(prompt)["sum"], 1e-5)
    lse = normalisers(prompt)
    for name in ("q_BHGQD", "k_BHTD"):
        tensor = getattr(prompt, name)
        strided = tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
        setattr(prompt, name, tensor.contiguous() if layout == "heads first" else strided)
    assert torch.equal(run(prompt)["sum"], want)
    assert torch.equal(normalisers(prompt), lse)


def blocks_of(prompt, names, tau):
    """The policies' own functions over the probabilities that the torch backend hands out."""
    B, H, G, Q, _ = prompt.q_BHGQD.shape
    q, k = (tensor.nan_to_num() for tensor in (prompt.q_BHGQD, prompt.k_BHTD))  # its masks add to what is there
    holes = bool((prompt.positions_BHT < 0).any())
    held = Keys(k, k, prompt.positions_BHT, holes, prompt.options["past"], ordered=False)
    noise = prompt.options.get("noise_BHTG")
    sums = {name: torch.zeros(B * H, k.shape[2], device=DEVICE) for name in names}

    class Score:
        fresh = False

    def observe(rows: ProbabilityRows) -> None:
        entry = (
            None
            if noise is None
            else noise.flatten(0, 1)[rows.first_head : rows.stop_head, rows.first_column : rows.stop_column]
        )
        block = Block(rows.p_NGRM, rows.keys_NR, entry, lambda: None, tau, 0, 0)
        for name in names:
            sums[name][rows.first_head : rows.stop_head, rows.first_column : rows.stop_column] += STATISTICS[name](block, Score)

    geometry = Geometry(prompt.options["scale"], prompt.options.get("slopes_HG"), prompt.options.get("sliding"))
    torch_backend.observe(q, held, prompt.rows_BQ, geometry, None, observe, True)
    return {name: total.view(B, H, -1) for name, total in sums.items()}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{}, {"past": 50}, {"alibi": True, "sliding": 70}])
def test_agrees_with_the_policies_statistics(shape):
    prompt = make(150, B=2, G=2, padding=[(0, 60), (0, 0)], **shape)
    got, want = run(prompt), blocks_of(prompt, NAMES, 1.0)
    for name, tolerance in CLOSE.items():
        assert_close(got[name], want[name].double(), tolerance)
    assert torch.equal(got["count"], want["count"])


@pytest.mark.slow
@pytest.mark.parametrize("tau", [1.0, 1.6])
def test_two_passes_agree_with_keyformer(tau):
    prompt = make(150, B=2, G=2, padding=[(0, 60), (0, 0)], noise=True, tau=tau)
    lse = normalisers(prompt)
    prompt.options["tau"] = 1.0  # the policy's function makes the noisy probabilities from the plain ones
    want = blocks_of(prompt, ["gumbel"], tau)["gumbel"]
    prompt.options["tau"] = tau
    assert_close(run(prompt, ["sum"], lse=lse)["sum"], want.double(), 1e-5)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="counts the interpreter's tiles")
@pytest.mark.parametrize(
    ("shape", "columns", "rows"),
    [
        ({}, 36 + 36, 36 + 36),  # 64 keys by 32 rows, 32 keys by 64 rows: half of 8 x 16 and the diagonal
        ({"past": 64}, 36 + 36 + 16, 36 + 36 + 16),
        ({"padding": [(0, 384)]}, 4 + 2, 4 + 2),
        ({"padding": [(128, 512)]}, 4 + 2, 4 + 2),
        ({"sliding": 64}, 8 * 4 - 2, 8 * 4 - 2),
    ],
)
def test_tiles_that_nothing_is_seen_in_are_skipped(monkeypatch, shape, columns, rows):
    from triton.runtime.interpreter import interpreter_builder

    tiles, dot = [], interpreter_builder.create_dot
    monkeypatch.setattr(interpreter_builder, "create_dot", lambda *a, **k: tiles.append(1) or dot(*a, **k))
    prompt = make(512, H=1, **shape)
    lse = normalisers(prompt)
    assert len(tiles) <= rows
    tiles.clear()
    run(prompt, lse=lse)
    assert len(tiles) <= columns


def test_what_the_kernels_cannot_take():
    assert all(reason(dtype, 256) is None for dtype in (torch.float32, torch.float16, torch.bfloat16))
    assert "float64" in reason(torch.float64, 64)
    assert "257" in reason(torch.float32, 257)
    prompt = make(5)
    lse = torch.zeros(prompt.q_BHGQD.shape[:-1], device=DEVICE)
    with pytest.raises(ValueError, match="keys_BHQ"):
        column_statistics(*prompt.tensors, lse, ["count"], **prompt.options)
    with pytest.raises(ValueError, match="no such statistic: mean"):
        column_statistics(*prompt.tensors, lse, ["mean"], **prompt.options)
    with pytest.raises(ValueError, match="cast one"):
        column_statistics(prompt.q_BHGQD.half(), *prompt.tensors[1:], lse, ["sum"], **prompt.options)
    with pytest.raises(ValueError, match="torch backend"):
        column_statistics(*(t.double() for t in prompt.tensors[:2]), *prompt.tensors[2:], lse, ["sum"], **prompt.options)
