"""The flash backend: every kernel's arguments and conventions by emulations of its functions, its results on a GPU."""

import dataclasses
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import types

import pytest
import torch

import kvpatch
from kvpatch.backends import refusals, torch_backend
from kvpatch.backends.flash import flash_backend, kernels
from kvpatch.backends.head_offsets import HeadOffsets
from kvpatch.backends.protocol import Case, Geometry, Keys
from tests.backends import flash_emulations as emulations
from tests.backends.flash_emulations import module
from tests.helpers.tiny import force, make, prompt

SLOPES = torch.tensor([[0.5, 0.25], [0.125, 0.0625]])
REAL = torch.ops.aten._flash_attention_forward
CASE = Case("cuda", torch.bfloat16, 64)


def which(case):
    """Return the name of the kernel that a prompt would run on, or "none"."""
    taking = (kernel.name for kernel in kernels.kernels() if flash_backend._why_refuses(kernel, case) is None)
    return next(taking, "none") if flash_backend.reason("prompt", case) is None else "none"


@pytest.fixture
def install(monkeypatch):
    """Calls with names ("flash_attn", "cute", "three", "vllm", "operator", "cudnn", "torch") make these the only kernels."""
    version = importlib.metadata.version
    libraries = []

    def put(*names, hub=None, **modules):
        monkeypatch.setattr(kernels, "_kernels", None)
        monkeypatch.setattr(refusals, "known", {})
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: "torch" in names)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900 if "cudnn" in names else None)
        monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda params: params.query.shape[2] > 1)
        monkeypatch.setattr(importlib.metadata, "version", lambda of: "4.0.0b36" if of == "flash-attn-4" else version(of))
        made = {"flash_attn": emulations.flash_attn_2, "flash_attn.cute": emulations.cute, "three": emulations.three}
        for name, make_module in made.items():
            known = make_module() if name.removeprefix("flash_attn.") in names else modules.get(name)
            monkeypatch.setitem(sys.modules, "flash_attn_interface" if name == "three" else name, known)  # None: not installed
        if "cute" in names and "flash_attn" not in names:  # the namespace package that it lies in
            monkeypatch.setitem(sys.modules, "flash_attn", module("flash_attn", __path__=[]))
        hub = {"kernels-community/vllm-flash-attn3": emulations.three(None)} if "vllm" in names else hub
        monkeypatch.setitem(sys.modules, "kernels", emulations.hub(hub) if hub else None)
        forget()
        if "operator" in names:
            libraries.append(torch.library.Library("flash_attn_3", "DEF"))
            libraries[0].define(emulations.FWD)
            libraries[0].impl("fwd", emulations.fwd, "CPU")
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", REAL)
        found = kernels.kernels()
        if "torch" in names:
            monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", emulations.operator)
        if "cudnn" in names:
            monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", emulations.cudnn)
        return [kernel.name for kernel in found]

    def forget():
        while libraries:
            libraries.pop()._destroy()
            vars(torch.ops.flash_attn_3).pop("fwd", None)

    yield put
    forget()


# ---- what is compared ----


def case(
    pads=(0, 0, 0), right=False, Q=13, past=0, H=2, G=2, D=16, sliding=None, alibi=False, dtype=torch.float16, device="cpu"
):  # fmt: skip
    """Queries, keys, rows and geometry; row b has pads[b] columns of padding, at the left or the right."""
    generator = torch.Generator().manual_seed(0)
    B, T = len(pads), past + Q
    q, k, v = (torch.randn(B, S, N, D, generator=generator) for S, N in ((Q, H * G), (T, H), (T, H)))
    q = q.to(device, dtype).view(B, Q, H, G, D).permute(0, 2, 3, 1, 4)  # strides as a model's projection leaves them
    k, v = (t.to(device, dtype).transpose(1, 2) for t in (k, v))
    column = torch.arange(Q)
    real = torch.stack([(column < Q - pad) if right else (column >= pad) for pad in pads])
    rows = (torch.cumsum(real, 1) - 1 + past).masked_fill(~real, -1)
    positions = torch.cat([torch.arange(past).expand(B, -1), rows], 1)[:, None].expand(B, H, T).contiguous()
    keys = Keys(k, v, positions.to(device), any(pads), past, ordered=not any(pads))
    slopes = SLOPES[:H, :G].to(device) if alibi else None
    return q, keys, rows.to(device), Geometry(0.3, slopes, sliding)


def twin(q_BHGQD, keys, rows_BQ, geometry):
    """Attention and log-sum-exp in float64, from positions; a row of padding has 0 and +inf."""
    q, k, v = (t.double() for t in (q_BHGQD, keys.k_BHTD, keys.v_BHTD))
    x = torch.einsum("bhgqd,bhtd->bhgqt", q, k) * geometry.scale
    rows, positions = rows_BQ[:, None, None, :, None], keys.positions_BHT[:, :, None, None]
    if geometry.slopes_HG is not None:
        x = x + geometry.slopes_HG.double()[None, :, :, None, None] * (positions - rows)
    hidden = (positions < 0) | (positions > rows)
    if geometry.sliding is not None:
        hidden = hidden | (rows - positions >= geometry.sliding)
    x = x.masked_fill(hidden, -torch.inf)
    lse = x.logsumexp(-1)
    return torch.einsum("bhgqt,bhtd->bhgqd", x.softmax(-1).nan_to_num(), v), lse.masked_fill(lse == -torch.inf, torch.inf)


PLAIN = {
    "causal": {},
    "multi-query": {"H": 1, "G": 4},
    "no groups": {"H": 4, "G": 1},
    "past": {"past": 9},
    "one token after a past": {"past": 9, "Q": 1},
    "left padding": {"pads": (0, 5, 2)},
    "right padding": {"pads": (3, 0, 7), "right": True},
    "nearly all padding": {"pads": (0, 12, 3)},
    "a row of padding": {"pads": (0, 13, 3)},
    "one token or none": {"pads": (12, 13, 12)},
    "nothing but padding": {"pads": (13, 13, 13)},
    "bfloat16": {"dtype": torch.bfloat16},
}
WINDOWS = {
    "window": {"sliding": 4},
    "window of one": {"sliding": 1},
    "window of all but one": {"sliding": 12},
    "window of all": {"sliding": 13},
    "window, past": {"sliding": 6, "past": 9},
    "window, past, one token": {"sliding": 6, "past": 9, "Q": 1},
    "window, padding": {"sliding": 4, "pads": (0, 5, 2)},
    "window longer than a padded row": {"sliding": 8, "pads": (1, 9, 7), "right": True},
    "window longer than every row": {"sliding": 12, "pads": (5, 7, 9)},
}
SHAPES = {**PLAIN, **WINDOWS}
WHOLE = ("causal", "multi-query", "no groups", "bfloat16", "window of all", "nothing but padding")  # square causal, or nothing
BIASED = {f"ALiBi, {name}": {**how, "alibi": True} for name, how in SHAPES.items() if name not in ("multi-query", "no groups")}


def compare(how, device="cpu", atol=1e-5):
    q, keys, rows, geometry = case(**how, device=device)
    out, lse, _ = flash_backend.attend(q, keys, rows, geometry)
    out, lse, rows = out.cpu(), lse.cpu(), rows.cpu()
    want, want_lse = twin(*case(**how))
    assert out.dtype == q.dtype and lse.dtype == torch.float32 and not lse.requires_grad
    assert bool((out.permute(0, 3, 1, 2, 4)[rows < 0] == 0).all())
    torch.testing.assert_close(lse.double(), want_lse, atol=atol, rtol=0)
    tolerance = 2e-2 if q.dtype == torch.bfloat16 else 2e-3  # the output's own rounding
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=0)


# ---- prompts ----


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kernel", ["flash_attn", "cute", "three", "vllm", "operator", "cudnn", "torch"])
def test_attention_and_log_sum_exp(install, kernel, name):
    assert len(install(kernel)) == 1
    if kernel == "cudnn" and name not in WHOLE:
        with pytest.raises(flash_backend.Refused, match=r"cuDNN 9\.19\.0 takes no (sliding window|padding|keys before)"):
            compare(SHAPES[name])
    else:
        compare(SHAPES[name])
    assert refusals.known == {}


@pytest.mark.parametrize("name", BIASED)
def test_alibi_has_the_log_sum_exp_of_our_logits(install, name):
    install("flash_attn")
    compare(BIASED[name])


@pytest.mark.parametrize("name", [*SHAPES, *BIASED])
def test_the_twin_is_what_the_torch_backend_computes(name):
    how = {**SHAPES, **BIASED}[name]
    q, keys, rows, geometry = case(**{**how, "dtype": torch.float64})
    got, got_lse = torch_backend.attend(q, keys, rows, geometry)
    want, want_lse = twin(q, keys, rows, geometry)
    real = rows >= 0
    torch.testing.assert_close(got.permute(0, 3, 1, 2, 4)[real], want.permute(0, 3, 1, 2, 4)[real], atol=1e-6, rtol=0)
    if got_lse is not None:
        got_lse, want_lse = (lse.permute(0, 3, 1, 2)[real].double() for lse in (got_lse, want_lse))
        torch.testing.assert_close(got_lse, want_lse, atol=1e-5, rtol=0)


def test_holes_anywhere(install):
    """Padding between tokens is taken out like padding at the ends."""
    install("torch")
    q, keys, _, geometry = case()
    real = torch.rand(3, 13, generator=torch.Generator().manual_seed(1)) > 0.4
    rows = (real.cumsum(1) - 1).masked_fill(~real, -1)
    keys.may_have_empty, keys.positions_BHT = True, rows[:, None].expand(3, 2, 13)
    out, lse, _ = flash_backend.attend(q, keys, rows, geometry)
    want, want_lse = twin(q, keys, rows, geometry)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=0)
    torch.testing.assert_close(out.double(), want, atol=2e-3, rtol=0)


def test_a_past_without_order_is_attended_where_distance_does_not_count(install):
    install("torch")
    q, keys, rows, geometry = case(past=9)
    shuffled = torch.cat([torch.randperm(9, generator=torch.Generator().manual_seed(2)), torch.arange(9, 22)])
    keys.k_BHTD, keys.v_BHTD, keys.positions_BHT = (t[:, :, shuffled] for t in (keys.k_BHTD, keys.v_BHTD, keys.positions_BHT))
    keys.ordered = False
    out, lse, _ = flash_backend.attend(q, keys, rows, geometry)
    want, want_lse = twin(q, keys, rows, geometry)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=0)
    torch.testing.assert_close(out.double(), want, atol=2e-3, rtol=0)
    for other in (Geometry(0.3, None, 4), Geometry(0.3, SLOPES, None)):
        assert flash_backend.find_misfit(keys, other).startswith("keys before this piece are out of order")
    keys.may_have_empty = True
    assert flash_backend.find_misfit(keys, geometry) == "keys before this piece lie in slots of their own per head"


@pytest.mark.parametrize("how", [{}, {"pads": (0, 5, 2)}, {"past": 9, "sliding": 6}])
@pytest.mark.parametrize("kernel", ["flash_attn", "cute", "three", "vllm", "cudnn", "torch"])
def test_gradients_of_the_output(install, kernel, how):
    if kernel == "cudnn" and how:
        pytest.skip("takes whole prompts without padding")
    install(kernel)
    grads = []
    for function in (flash_backend.attend, twin):
        q, keys, rows, geometry = case(**how)
        leaves = [t.detach().requires_grad_() for t in (q, keys.k_BHTD, keys.v_BHTD)]
        keys.k_BHTD, keys.v_BHTD = leaves[1:]
        out, lse, *_ = function(leaves[0], keys, rows, geometry)
        assert function is twin or not lse.requires_grad
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        (out.double() * weight)[(rows >= 0)[:, None, None].expand(out.shape[:-1])].sum().backward()
        grads.append([t.grad for t in leaves])
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got.double(), want.double(), atol=1e-2, rtol=0)


def test_keys_whose_last_dimension_is_strided(install):
    install("torch")
    q, keys, rows, geometry = case()
    keys.k_BHTD, keys.v_BHTD = (t.transpose(2, 3).contiguous().transpose(2, 3) for t in (keys.k_BHTD, keys.v_BHTD))
    lse = flash_backend.attend(q, keys, rows, geometry)[1]
    torch.testing.assert_close(lse.double(), twin(q, keys, rows, geometry)[1], atol=1e-5, rtol=0)


# ---- which kernel ----


def test_the_first_kernel_that_takes_a_case(install):
    two, four = "flash_attn 2.8.3", "flash_attn.cute 4.0.0b36"
    own = f"torch's flash kernel (torch {torch.__version__.split('+')[0]})"
    alibi = Case("cuda", torch.float16, 64, alibi=True)
    assert install("flash_attn", "cute", "torch") == [four, two, own]
    assert (which(CASE), which(alibi)) == (four, two)
    assert install("cute", "torch") == [four, own]
    assert (which(CASE), which(alibi)) == (four, "none")
    assert install("torch") == [own]
    assert which(CASE) == own
    assert install() == []
    assert which(CASE) == "none"


def test_the_best_kernel_first(install):
    own, vllm = f"torch's flash kernel (torch {torch.__version__.split('+')[0]})", "kernels-community/vllm-flash-attn3"
    names = [
        "flash_attn_interface", vllm, "flash_attn_3's operator", "flash_attn.cute 4.0.0b36", "cuDNN 9.19.0", "flash_attn 2.8.3",
        own,
    ]  # fmt: skip
    assert install("flash_attn", "cute", "three", "vllm", "operator", "cudnn", "torch") == names
    assert which(CASE) == "flash_attn_interface"
    install("flash_attn", "cudnn", "torch")
    served = {"cuDNN 9.19.0": [{}, {"gradients": True}, {"group": 8}, {"head_dim": 128}]}
    served["flash_attn 2.8.3"] = [{"padding": True}, {"past": True}, {"window": True}, {"head_dim": 136}, {"alibi": True}]
    for name, cases in served.items():
        assert [which(dataclasses.replace(CASE, **case)) for case in cases] == [name] * len(cases)


def test_the_operator_of_flash_attn_3_has_no_gradients(install):
    """It serves packages whose functions return no log-sum-exp; one that does is taken before it."""
    early = module("flash_attn_interface")
    early.flash_attn_func = early.flash_attn_varlen_func = lambda q, k, v, softmax_scale, causal, window_size, deterministic: q
    assert install("operator", three=early) == ["flash_attn_3's operator"]
    assert "takes no gradients" in flash_backend.reason("prompt", dataclasses.replace(CASE, gradients=True))


def test_cudnn_where_torch_prefers_it(install, monkeypatch):
    assert install("cudnn", "torch")[0] == "cuDNN 9.19.0"
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert len(install("cudnn", "torch")) == 1
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED")
    for version in (None, 91500):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        monkeypatch.setattr(kernels, "_kernels", None)
        assert len(kernels.kernels()) == 1


def test_cudnn_is_asked_of_at_each_call(install, monkeypatch):
    """torch's answer hangs on the lengths, and on settings that change: deterministic algorithms, enable_cudnn_sdp."""
    install("cudnn", "torch")
    compare({"Q": 1})  # it takes no single key: torch's flash kernel serves
    asked = []
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda params: asked.append(params) or len(asked) > 1)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", None)
    with pytest.raises(flash_backend.Refused):
        compare({})
    refusals.known.clear()
    compare({})  # and now it may
    params = asked[0]
    assert (params.query.shape, params.key.shape, params.is_causal) == ((3, 4, 13, 16), (3, 2, 13, 16), True)
    assert params.attn_mask is None and params.dropout == 0.0


def test_kernels_of_the_hub_are_taken_once_loaded(install):
    """By their functions, under the repository's name, and only those that something else has loaded."""
    two, other = emulations.flash_attn_2(), types.ModuleType("activation")
    assert install("torch", hub={"kernels-community/activation": other})[0].startswith("torch's")
    sys.modules["kernels"] = emulations.hub({"kernels-community/activation": other, "kernels-community/flash-attn2": two})
    assert which(dataclasses.replace(CASE, alibi=True)) == "kernels-community/flash-attn2"
    compare(BIASED["ALiBi, causal"])


def test_packages_are_known_by_their_functions(install, caplog):
    def early(q, k, v, softmax_scale=None, causal=False, window_size=(None, None), deterministic=False):
        raise AssertionError

    empty, placeholder = module("flash_attn", __path__=[]), module("flash_attn.cute")
    assert install(**{"flash_attn": empty, "flash_attn.cute": placeholder}) == []
    placeholder.flash_attn_func = placeholder.flash_attn_varlen_func = early  # no return_lse
    assert install(**{"flash_attn": empty, "flash_attn.cute": placeholder}) == []
    before_alibi = module("flash_attn")
    before_alibi.flash_attn_func = before_alibi.flash_attn_varlen_func = early
    assert install(flash_attn=before_alibi) == []
    assert caplog.text == ""


def test_a_package_that_does_not_load_is_said(install, monkeypatch, caplog):
    real = importlib.import_module

    def broken(name, *rest):
        if name == "flash_attn":
            raise ImportError("undefined symbol: _ZN3c10")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", broken)
    assert len(install("flash_attn", "torch")) == 1
    assert "flash_attn is installed but cannot be imported (undefined symbol" in caplog.text


def test_importing_the_backend_imports_no_package(monkeypatch):
    def refuse(name, *rest):
        raise AssertionError(f"{name} was imported")

    monkeypatch.setitem(sys.modules, "flash_attn", None)  # an import statement fails
    for source in (kernels, flash_backend):
        spec = importlib.util.spec_from_file_location(f"{source.__name__}_again", source.__file__)
        again = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, again)  # for its dataclasses
        with monkeypatch.context() as patch:
            patch.setattr(importlib, "import_module", refuse)
            spec.loader.exec_module(again)
    assert again.reason("prompt", Case("cpu", torch.float16, 64)) is not None


REASONS = [
    ("statistics", {}, "no score statistics: triton or torch"),
    ("decode", {}, "no score statistics: triton or torch"),
    ("prompt", {"device": "cpu"}, "CUDA devices, not on cpu"),
    ("prompt", {"device": "mps"}, "CUDA devices, not on mps"),
    ("prompt", {"dtype": torch.float32}, "float16 and bfloat16, not float32"),
    ("prompt", {"head_dim": 260}, "up to 256, not 260"),
    ("prompt", {"head_dim": 264}, "up to 256, not 264"),
    ("prompt", {"head_dim": 20}, "multiples of 8"),
    ("prompt", {"alibi": True}, r"torch's flash kernel \(torch .*\) takes no ALiBi; flash-attn 2 takes ALiBi"),
    ("prompt", {"past": True, "padding": True}, "slots of their own per head"),
    ("prompt", {"head_dim": 256, "gradients": True}, "no head size 256 with gradients"),
    ("ragged", {"device": "cpu"}, "CUDA devices"),
    ("ragged", {"dtype": torch.float64}, "not float64"),
    ("ragged", {"head_dim": 36}, "not 36"),
    ("ragged", {"alibi": True}, "takes no ALiBi"),
    ("ragged", {"window": True}, "takes no sliding window"),
    ("ragged", {"gradients": True}, "takes no gradients"),
    ("ragged", {"padding": True}, "takes no empty slots"),
    ("ragged", {"scores": True}, "returns no probabilities"),
]


@pytest.mark.parametrize(("task", "asked", "said"), REASONS)
def test_reasons(install, task, asked, said):
    install("torch")
    asked = {"device": "cuda", "dtype": torch.float16, "head_dim": 64, **asked}
    assert re.search(said, flash_backend.reason(task, Case(**asked)))
    assert task != "prompt" or which(Case(**asked)) == "none"


def test_what_is_taken(install):
    half = {"device": "cuda", "dtype": torch.float16, "head_dim": 256}
    served = [{}, {"window": True}, {"padding": True}, {"past": True}, {"past": True, "window": True}, {"group": 8}]
    install("torch")
    assert [flash_backend.reason("prompt", Case(**half, **more)) for more in served] == [None] * 6
    assert flash_backend.reason("prompt", Case("cuda", torch.float16, 128, gradients=True)) is None
    assert flash_backend.reason("ragged", Case(**half, past=True)) is None
    install("flash_attn")
    assert flash_backend.reason("prompt", Case(**half, alibi=True, window=True, padding=True, gradients=True)) is None
    assert "used lengths" in flash_backend.reason("ragged", Case(**half))
    install()
    assert "no flash-attn is installed" in flash_backend.reason("prompt", Case(**half))


@pytest.mark.parametrize(
    ("device", "kernel", "head", "said"),
    [
        ((7, 5), "torch", 64, r"torch .*needs a GPU of compute capability 8\.0"),
        ((8, 0), "cute", 64, r"cute .*needs a GPU of compute capability 9\.0"),
        ((9, 0), "cute", 192, None),
        ((8, 6), "cudnn", 64, r"cuDNN .*needs a GPU of compute capability 9\.0 to 10\.x"),
        ((10, 3), "cudnn", 64, None),
        ((12, 0), "cudnn", 64, r"cuDNN .*needs a GPU of compute capability 9\.0 to 10\.x"),
        ((9, 0), "cudnn", 136, "cuDNN .*has no head size 136"),
        ((9, 0), "three", 256, None),
        ((10, 0), "three", 64, r"flash_attn_interface needs a GPU of compute capability 9\.0 to 9\.x"),
        ((10, 0), "cute", 192, "cute .*has no head size 192"),
        ((10, 0), "cute", 256, None),
        ((12, 0), "cute", 256, "cute .*has no head size 256"),
        ((12, 0), "cute", 128, None),
    ],
)
def test_what_depends_on_the_gpu(install, monkeypatch, device, kernel, head, said):
    install(kernel)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: device)
    assert re.search(said or "^None$", str(flash_backend.reason("prompt", Case("cuda", torch.float16, head))))
    ragged = flash_backend.reason("ragged", Case("cuda", torch.float16, head))
    assert (ragged is not None) == (device < (8, 0) or kernel == "cudnn")


# ---- refusals ----


def test_a_refusal_falls_to_the_next_kernel_and_is_remembered(install, monkeypatch, caplog):
    install("flash_attn", "torch")

    def refuse(*args, **kwargs):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_func", refuse)
    compare({})
    compare({})
    assert caplog.text.count("flash_attn 2.8.3 refused (no kernel image is available)") == 1
    compare({"pads": (0, 5, 2)})
    assert caplog.text.count("refused") == 1  # the packed function still serves
    asked = Case("cuda", torch.float16, 16, group=2)
    assert which(asked).startswith("torch's")
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", refuse)
    with pytest.raises(RuntimeError, match=r"no kernel image.*use the torch backend"):
        compare({})
    for one in (asked, dataclasses.replace(asked, value_dim=16, fresh=True, renumbered=True)):  # as `Call.case` makes it
        assert "refused (no kernel image" in flash_backend.reason("prompt", one)


def test_a_log_sum_exp_of_another_shape_is_refused(install, monkeypatch):
    """Older packages return [B,N,longest] for packed sequences."""
    install("torch")

    def padded(*args, **kwargs):
        out, _, *rest = emulations.operator(*args, **kwargs)
        return out, torch.zeros(3, 4, 13), *rest

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", padded)
    with pytest.raises(RuntimeError, match=r"log-sum-exp is torch.float32 \(3, 4, 13\), not float32 \(4, 32\)"):
        compare({"pads": (0, 5, 2)})


def test_memory_that_runs_out_is_no_refusal(install, monkeypatch):
    install("torch")

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        compare({})
    q, keys = ragged()
    with pytest.raises(torch.OutOfMemoryError):
        flash_backend.ragged_step(q, keys, Geometry(0.3, None, None))
    assert refusals.known == {}


# ---- torch's operator as it is ----


def test_the_operator_has_the_arguments_that_are_passed():
    """In this order, and those after the star by these names."""
    schema = REAL.default._schema
    emulated = inspect.signature(emulations.operator).parameters.values()
    assert [(a.name, a.kwarg_only) for a in schema.arguments] == [(p.name, p.kind is p.KEYWORD_ONLY) for p in emulated]


@pytest.fixture
def own(install, monkeypatch):
    """torch's kernel with the operator itself, whose shape function needs no GPU."""
    install("torch")
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", REAL)
    return kernels.kernels()[0]


@pytest.mark.parametrize("how", [{}, {"past": 9}, {"sliding": 4}])
def test_the_call_fits_the_operator(own, how):
    q, keys, rows, geometry = case(**how, device="meta")
    q.requires_grad_()
    out, lse, _ = flash_backend.attend(q, keys, rows, geometry)
    assert (out.shape, lse.shape, lse.dtype) == ((3, 2, 2, 13, 16), (3, 2, 2, 13), torch.float32)
    out.sum().backward()
    assert q.grad is not None


def test_packed_and_ragged_calls_fit_the_operator(own):
    q, k = (torch.empty(30, N, 16, dtype=torch.float16, device="meta") for N in (4, 2))
    starts = torch.empty(4, dtype=torch.int32, device="meta")
    out, lse = own.attend(q, k, k, kernels.Mask(0.3, 4, None), kernels.Packing(starts, 13))
    assert (out.shape, lse.shape) == ((30, 4, 16), (4, 30))
    used = torch.empty(3, dtype=torch.int32, device="meta")
    assert own.ragged(q[:3], k[:, :1], k[:, :1], starts, starts, used, 13, 0.3).shape == (3, 4, 16)


# ---- ragged heads ----

SIZES = [7, 30, 12, 12, 19, 3]


def ragged(dtype=torch.float16, device="cpu"):
    """Queries and keys of 2 rows, 3 KV heads and groups of 2; a slot is grown, and two behind each head's own are junk."""
    generator = torch.Generator().manual_seed(0)
    head_offsets = HeadOffsets([n + 3 for n in SIZES], SIZES, torch.device(device))
    k, v = (torch.randn(head_offsets.rows, 16, generator=generator).to(device, dtype) for _ in range(2))
    q = torch.randn(2, 3, 2, 16, generator=generator).to(device, dtype)
    positions = torch.full((2, 3, head_offsets.width), -1)
    for n, size in enumerate(SIZES):
        positions.view(6, -1)[n, : size + 1] = torch.arange(size + 1)
    return q, Keys(k, v, positions.to(device), True, 0, False, head_offsets, grown=1)


def ragged_twin(q_BHGD, keys, scale):
    """Head by head in float64."""
    out = torch.empty(q_BHGD.shape, dtype=torch.float64, device=q_BHGD.device).flatten(0, 1)
    for n, size in enumerate(SIZES):
        own = slice(int(keys.head_offsets.begin_N[n]), int(keys.head_offsets.begin_N[n]) + size + 1)
        p = (q_BHGD.flatten(0, 1)[n].double() @ keys.k_BHTD[own].double().T * scale).softmax(-1)
        out[n] = p @ keys.v_BHTD[own].double()
    return out.view(q_BHGD.shape)


@pytest.mark.parametrize("kernel", ["cute", "three", "vllm", "torch"])
def test_every_head_is_a_sequence(install, kernel):
    install("flash_attn", kernel)  # flash_attn 2's public function takes no used lengths
    q, keys = ragged()
    got = flash_backend.ragged_step(q, keys, Geometry(0.3, None, None))
    assert got.dtype == q.dtype
    torch.testing.assert_close(got.double(), ragged_twin(q, keys, 0.3), atol=2e-3, rtol=0)


def test_torch_takes_ragged_heads_before_cute(install, monkeypatch):
    install("cute", "torch")
    monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_varlen_func", None)
    assert flash_backend.ragged_step(*ragged(), Geometry(0.3, None, None)) is not None


@pytest.mark.parametrize("what", ["uneven", "slopes", "window", "gradients", "dense", "no kernel"])
def test_ragged_heads_that_are_not_taken(install, what, caplog):
    install(*(["torch"] if what != "no kernel" else ["flash_attn"]))
    q, keys = ragged()
    keys.grown = None if what == "uneven" else 1
    keys.head_offsets = None if what == "dense" else keys.head_offsets
    q.requires_grad_(what == "gradients")
    slopes = torch.ones(3, 2) if what == "slopes" else None
    assert flash_backend.ragged_step(q, keys, Geometry(0.3, slopes, 9 if what == "window" else None)) is None
    assert caplog.text == "" and refusals.known == {}


def test_a_refusal_of_ragged_heads_is_said_once(own, caplog):
    q, keys = ragged()
    for _ in range(2):  # the operator itself refuses CPU tensors
        assert flash_backend.ragged_step(q, keys, Geometry(0.3, None, None)) is None
    assert caplog.text.count("goes head by head") == 1
    assert "refused" in flash_backend.reason("ragged", CASE)
    assert flash_backend.reason("prompt", CASE) is None


# ---- whole models ----

KERNELS = {
    "flash_attn": "flash_attn 2", "cute": "flash_attn.cute", "three": "flash_attn_interface", "cudnn": "cuDNN",
    "torch": "torch's",
}  # fmt: skip


@pytest.mark.parametrize("kernel", ["cute", "torch"])
def test_steps_whose_scores_count_are_not_flash_s(install, monkeypatch, kernel):
    """A kernel gives no probabilities: taken for such a step, it would leave the scores as they were, without a word."""
    install(kernel)
    answer = flash_backend.reason
    monkeypatch.setattr(flash_backend, "reason", lambda task, case: answer(task, dataclasses.replace(case, device="cuda")))
    model, ids, fed = make("llama_gqa", dtype=torch.float16), prompt(2, 44), prompt(2, 5, seed=2)
    with kvpatch.patched(model, "adaptive(h2o)", 0.4) as patch:
        _, cache = force(model, ids, fed)
        assert patch.report().backends["ragged"][0] == "torch"
        ragged = [layer for layer in cache.layers if not layer.kv.appends]
        newest = cache.get_seq_length() - 1
        for layer in ragged:  # the newest token has been attended to by itself
            assert bool((layer.state["sum"][layer.positions == newest] > 0).all())
        assert ragged


@pytest.mark.parametrize(
    ("kernel", "name", "policy"),
    [
        ("flash_attn", "mpt", "h2o"),
        ("flash_attn", "mistral_sliding", "roco"),
        ("cute", "llama_gqa", "keyformer"),
        ("cute", "mistral_sliding", "adakv"),
        ("torch", "llama_gqa", "adakv"),
        ("torch", "gptj", "h2o"),
        ("three", "mistral_sliding", "h2o"),
        ("cudnn", "llama_gqa", "roco"),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_a_model_through_the_emulations(install, monkeypatch, kernel, name, policy, padded):
    install(kernel, "torch")
    answer = flash_backend.reason
    monkeypatch.setattr(flash_backend, "reason", lambda task, case: answer(task, dataclasses.replace(case, device="cuda")))
    model, ids, fed = make(name, dtype=torch.float16), prompt(2, 44), prompt(2, 5, seed=2)
    mask = torch.ones_like(ids)
    mask[0, : 9 if padded else 0] = 0
    options = {"window": 5} if policy == "adakv" else {}

    def run(backend):
        with kvpatch.patched(model, policy, 0.5, backend=backend, **options) as patch:
            logits, cache = force(model, ids, fed, mask)
            return logits.float(), cache.held(1), patch.report()

    want, got = run("torch"), run("auto")
    assert got[2].backends["prompt"][0] == "flash" and refusals.known == {}
    served = "torch" if kernel == "cudnn" and padded else kernel
    assert got[2].backends["prompt"][1].startswith(KERNELS[served])
    if policy == "adakv" and name == "llama_gqa" and not padded:
        assert got[2].backends["ragged"][0] == "flash"
    torch.testing.assert_close(got[0], want[0], atol=0.02, rtol=0)
    assert policy == "adakv" or torch.equal(got[1], want[1])


@pytest.mark.parametrize("how", [{}, {"positions": "renumbered"}, {"policy": "keyformer", "resample": True}])
def test_a_kernel_that_refused_is_not_chosen_for_the_next_cache(install, monkeypatch, how):
    """Its refusal is noted by the Case that flash makes of a call, and found by the one that its backend is chosen by."""
    install("torch")
    answer = flash_backend.reason
    monkeypatch.setattr(flash_backend, "reason", lambda task, case: answer(task, dataclasses.replace(case, device="cuda")))
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", lambda *args, **kwargs: 1 / 0)
    model, why = make("llama_gqa", dtype=torch.float16), []
    with torch.no_grad(), kvpatch.patched(model, **{"policy": "h2o", "k": 0.5, **how}) as patch:
        for _ in range(2):
            model(prompt(2, 44), use_cache=True)
            why.append(patch.report().backends["prompt"])
    assert [name for name, _ in why] == ["torch", "torch"]
    assert why[0][1].startswith("flash: No flash kernel took") and why[1][1].startswith("flash: torch's flash kernel")


@pytest.mark.parametrize(("kernel", "name"), [("flash_attn", "mpt"), ("flash_attn", "mistral_sliding"), ("cute", "llama_gqa")])
def test_padding_behind_tokens_is_torch_s_where_nothing_is_evicted(install, monkeypatch, kernel, name):
    """Packed rows have no padding, whose columns count there and whose queries attend."""
    install(kernel)
    answer = flash_backend.reason
    monkeypatch.setattr(flash_backend, "reason", lambda task, case: answer(task, dataclasses.replace(case, device="cuda")))
    model, ids = make(name, dtype=torch.float16), prompt(2, 44)
    mask = torch.ones_like(ids)
    mask[0, 20:25] = mask[1, 39:] = 0
    with torch.no_grad():
        want = model(ids, attention_mask=mask).logits.float()
        with kvpatch.patched(model, "h2o", 1.0) as patch:
            out = model(ids, attention_mask=mask, use_cache=True)
            assert patch.report().backends["prompt"] == ("torch", "flash: padding after tokens")
    torch.testing.assert_close(out.logits.float(), want, atol=0.02, rtol=0)


# ---- on a GPU ----


@pytest.fixture
def only(monkeypatch):
    """Calls with a kernel make it the only one; they skip the test where it is not installed."""

    def keep(start):
        monkeypatch.setattr(kernels, "_kernels", None)
        monkeypatch.setattr(refusals, "known", {})
        found = tuple(kernel for kernel in kernels.kernels() if kernel.name.startswith(start))
        if not found:
            pytest.skip(f"{start} is not installed")
        monkeypatch.setattr(kernels, "_kernels", found)
        torch.use_deterministic_algorithms(start != "cuDNN")  # which it refuses

    return keep


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SHAPES, *BIASED])
@pytest.mark.parametrize("kernel", KERNELS)
def test_on_a_gpu(only, kernel, name):
    only(KERNELS[kernel])
    how = {**SHAPES, **BIASED}[name]
    if (how.get("alibi") and kernel != "flash_attn") or (kernel == "cudnn" and name not in WHOLE):
        pytest.skip("does not take it")
    compare({**how, "D": 64}, "cuda", atol=1e-3)
    assert refusals.known == {}


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{}, {"sliding": 700}, {"pads": (0, 1500, 64)}, {"past": 1000}, {"alibi": True}])
@pytest.mark.parametrize("kernel", KERNELS)
def test_long_prompts_on_a_gpu(only, kernel, how):
    only(KERNELS[kernel])
    if (how.get("alibi") and kernel != "flash_attn") or (kernel == "cudnn" and how):
        pytest.skip("does not take it")
    compare({**how, "Q": 2049, "D": 128, "dtype": torch.bfloat16}, "cuda", atol=1e-3)
    assert refusals.known == {}


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["cute", "torch"])
def test_ragged_heads_on_a_gpu(only, kernel):
    only(KERNELS[kernel])
    q, keys = ragged(torch.bfloat16, "cuda")
    got = flash_backend.ragged_step(q, keys, Geometry(0.3, None, None))
    assert got is not None, refusals.known
    want = ragged_twin(*ragged(torch.bfloat16), 0.3)
    torch.testing.assert_close(got.cpu().double(), want, atol=2e-2, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "emulation"),
    [
        ("flash_attn", emulations.flash_attn_2),
        ("flash_attn.cute", emulations.cute),
        ("flash_attn_interface", emulations.three),
    ],
)
def test_emulations_have_the_real_signatures(kernel, emulation):
    real, copy = pytest.importorskip(kernel), emulation()
    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        if not hasattr(real, name):
            pytest.skip(f"{kernel} has no {name}")
        theirs, ours = (set(inspect.signature(getattr(m, name)).parameters) for m in (real, copy))
        assert ours <= theirs, "releases add arguments, and may not take away those that are passed"


@pytest.mark.gpu
def test_a_model_on_a_gpu():
    model, ids = make("llama_gqa", dtype=torch.bfloat16).cuda(), prompt(1, 60).cuda()
    with kvpatch.patched(model, "adakv", 0.4, window=5):
        logits, _ = force(model, ids, prompt(1, 5, seed=2).cuda())
    assert torch.isfinite(logits).all()
