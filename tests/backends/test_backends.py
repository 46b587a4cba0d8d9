"""Who computes what: the choice and its reasons, errors for what cannot run, and whole models on the Triton kernels."""

import pytest
import torch

import kvpatch
from kvpatch.backends import dispatch
from kvpatch.backends.dispatch import Choice, backend
from kvpatch.backends.protocol import TASKS, Case, Geometry, Keys
from kvpatch.backends.triton import triton_backend
from tests.helpers.tiny import force, make, prompt

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
PLAIN = Case("cpu", torch.float32, 64)
HALF = torch.float16


def test_the_operator_is_as_it_says():
    """torch's own checks of an operator: its schema, what it writes to, its shapes without data."""
    B, H, C, D = 1, 2, 5, 16
    tensors = [torch.randn(B, H, n, D).squeeze(2) if n == 1 else torch.randn(B, H, n, D) for n in (2, 1, 1, C, C)]
    positions, slot = torch.tensor([0, 1, 2, 3, -1]).expand(B, H, C).contiguous(), torch.full((B, H), 4)
    state = [torch.rand(B, H, C)]
    arguments = (
        *tensors, positions, slot, torch.tensor([9]), state, "sum", "sum", "", 1.0, "sum", 0.25, None, None, 3.0,
        torch.zeros(H, 2), None, None, None, None, None, None, 1.0, 16, None,
    )  # fmt: skip
    arguments = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(DEVICE), arguments)
    torch.library.opcheck(triton_backend.compiled_step, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("sliding", [None, 6])
def test_keys_that_a_row_attends_to(sliding):
    """Counted from the mask itself."""
    held = torch.tensor([[[-1, 0, 3, 4, 7, -1], [2, 5, -1, 6, 0, 1]], [[-1, -1, 1, 2, 0, -1], [0, -1, -1, -1, -1, -1]]])
    rows = torch.tensor([[8, 9, 10], [-1, 3, 4]])
    positions = torch.cat([held, rows[:, None].expand(2, 2, 3)], -1)
    keys = Keys(torch.empty(2, 2, 9, 4), torch.empty(2, 2, 9, 4), positions, True, columns_before=6, ordered=False)
    got = triton_backend.visible_keys(keys, rows, Geometry(1.0, None, sliding))
    for b in range(2):
        for h in range(2):
            for r in range(3):
                row = int(rows[b, r])
                if row < 0:
                    continue
                visible = [
                    p >= 0 and c <= 6 + r and (sliding is None or row - p < sliding)
                    for c, p in enumerate(positions[b, h].tolist())
                ]
                assert int(got[b, h, r]) == sum(visible)


def test_a_cpu_gets_torch_and_the_report_says_why():
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 0.4) as patch:
        _, cache = force(model, prompt(1, 20), prompt(1, 3, seed=1))
        report = patch.report()
    assert report.backend == "torch" and cache.get_seq_length() == 23
    assert {task: name for task, (name, _) in report.backends.items()} == {
        "prompt": "torch", "statistics": "torch", "decode": "torch",
    }  # fmt: skip
    assert "flash kernels run on CUDA devices" in report.backends["prompt"][1]
    assert "run on a GPU" in report.backends["decode"][1]
    assert str(report).endswith("attention by          torch"), "reasons that are true of every CPU say nothing"
    assert report.to_dict()["backends"]["decode"]["name"] == "torch"


@pytest.mark.parametrize("task", TASKS)
def test_a_gpu_gets_the_fastest_that_can(task, monkeypatch):
    cuda = Case("cuda", torch.bfloat16, 128)
    monkeypatch.setattr(backend("flash"), "reason", lambda task, case: None if task in ("prompt", "ragged") else "no")
    assert Choice().of(task, cuda) == {"prompt": "flash"}.get(task, "triton")
    monkeypatch.setattr(backend("triton"), "reason", lambda task, case: "it is broken")
    chosen = Choice()
    assert chosen.of(task, cuda) == {"prompt": "flash", "ragged": "flash"}.get(task, "torch")
    assert task == "prompt" or chosen.ran_last[task][1].startswith("triton: it is broken")


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case("cuda", torch.bfloat16, 128, alibi=True), "triton"),
        (Case("cuda", torch.bfloat16, 256, special=("softcap",), window=True, padding=True), "triton"),
        (Case("cuda", torch.bfloat16, 64, special=("sinks",), past=True), "triton"),
        (Case("cuda", torch.float32, 64), "triton"),
        (Case("cuda", torch.bfloat16, 64, special=("coarse",)), "torch"),
        (Case("cuda", torch.bfloat16, 64, alibi=True, gradients=True), "torch"),
        (Case("cuda", torch.bfloat16, 64, alibi=True, value_dim=32), "torch"),
    ],
    ids=str,
)
def test_a_prompt_that_no_flash_kernel_takes(case, name, monkeypatch):
    monkeypatch.setattr(backend("flash"), "reason", lambda task, case: "none takes it")
    chosen = Choice()
    assert chosen.of("prompt", case) == name
    assert chosen.ran_last["prompt"][1].startswith("flash: none takes it")


def test_a_call_that_the_chosen_backend_cannot_take_goes_to_the_next(monkeypatch):
    monkeypatch.setattr(backend("flash"), "reason", lambda task, case: None)
    cuda, chosen = Case("cuda", torch.bfloat16, 128), Choice()
    assert chosen.of("prompt", cuda) == "flash"
    assert chosen.instead("prompt", cuda, "flash", "keys are out of order") == "triton"
    assert chosen.ran_last["prompt"] == ("triton", "flash: keys are out of order")
    assert chosen.of("prompt", cuda) == "flash", "of that call alone"


def test_a_requested_backend_comes_before_a_faster_one(monkeypatch):
    monkeypatch.setattr(backend("flash"), "reason", lambda task, case: None)
    monkeypatch.setattr(backend("triton"), "reason", lambda task, case: None)
    cuda = Case("cuda", torch.bfloat16, 128)
    assert [Choice(name).of("prompt", cuda) for name in ("auto", "flash", "triton")] == ["flash", "flash", "triton"]
    assert [Choice(name).of("ragged", cuda) for name in ("auto", "flash", "triton")] == ["triton", "flash", "triton"]


@pytest.mark.parametrize("task", TASKS)
def test_a_requested_backend_is_taken_or_its_refusal_logged_once(task, caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_said", set())
    double = Case("cuda", torch.float64, 128)
    assert Choice("torch").of(task, double) == "torch" and not caplog.text
    for _ in range(2):
        assert Choice("triton").of(task, double) == "torch"
    assert caplog.text.count("backend='triton'") == 1


def test_a_backend_that_cannot_run_is_refused(monkeypatch):
    model = make("llama_gqa")
    with pytest.raises(kvpatch.KVPatchError, match=r"backend='flash' cannot run here: flash kernels run on CUDA.*'auto'"):
        kvpatch.patch(model, "h2o", backend="flash")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(kvpatch.KVPatchError, match="backend='triton' cannot run here: .*a GPU"):
        kvpatch.patch(model, "h2o", backend="triton")
    for wrong, said in (("tritn", r"Unknown backend 'tritn'.*'triton'"), (None, "backend None"), (["flash"], "Unknown")):
        with pytest.raises(kvpatch.KVPatchError, match=said):
            kvpatch.patch(model, "h2o", backend=wrong)
    assert not [name for name in vars(model) if "kvpatch" in name]


def test_missing_triton_is_a_reason(monkeypatch):
    monkeypatch.setattr(triton_backend, "find_spec", lambda name: None)
    assert "pip install triton" in triton_backend.reason("decode", Case("cuda", torch.bfloat16, 64))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case("cuda", torch.float64, 64), "float64"),
        (Case("cuda", torch.float32, 320), "head sizes up to 256"),
        (Case("cuda", torch.float32, 64, fresh=True), "noise"),
        (Case("cuda", torch.float32, 64, gradients=True), "gradients"),
        (Case("cuda", torch.float32, 64, renumbered=True), "renumbered"),
        (Case("cuda", torch.float32, 64, group=128), "query heads"),
        (Case("cuda", torch.float32, 64, special=("coarse",)), "its decode kernels have no ALiBi rounded to bfloat16"),
        (Case("cuda", torch.float16, 128, value_dim=64), "values"),
        (Case("mps", torch.float32, 64), "mps"),
    ],
)
def test_what_the_kernels_refuse(case, words):
    assert words in triton_backend.reason("decode", case)


@pytest.mark.parametrize("task", ["prompt", "statistics"])
def test_what_the_kernels_of_a_prompt_refuse(task):
    def why(**case):
        return triton_backend.reason(task, Case(**{"device": "cuda", "dtype": HALF, "head_dim": 64} | case))

    assert "float64" in why(dtype=torch.float64)
    assert "up to 256" in why(head_dim=264)
    assert "values of the keys' size 64, not 96" in why(value_dim=96)
    assert "precision" in why(bits=8)
    assert "rounded to bfloat16" in why(special=("softcap", "coarse"))
    assert why(special=("softcap", "sinks"), alibi=True, window=True, padding=True, past=True) is None


def test_every_backend_answers_for_every_task():
    for name in dispatch.BACKENDS:
        module = backend(name)
        for task in TASKS:
            answer = module.reason(task, PLAIN)
            assert answer is None or isinstance(answer, str)


@pytest.mark.parametrize("rows", [1, 2])
def test_several_decode_tokens_in_one_pass(rows):
    """What follows an announced prompt's end in the same pass is decoded token by token."""
    model, ids = make("llama_gqa").to(DEVICE), prompt(rows, 26).to(DEVICE)
    found = {}
    for name in ("torch", "triton"):
        with torch.no_grad(), kvpatch.patched(model, "h2o", 0.5, backend=name) as patch:
            cache = patch.new_cache()
            cache.plans.prompt_len = 20
            found[name] = model(ids, past_key_values=cache).logits
            assert patch.report().backends["decode"][0] == name
    torch.testing.assert_close(found["triton"], found["torch"], atol=2e-5, rtol=0)
