"""Who computes what: the choice and its reasons, errors for what cannot run, and whole models on the Triton kernels."""

import pytest
import torch

import kvpatch
from kvpatch.backends import Case
from kvpatch.backends import dispatch as choice
from kvpatch.backends.dispatch import Choice, backend
from kvpatch.backends.protocol import TASKS, Geometry, Keys
from kvpatch.backends.triton import triton_backend
from tests.helpers.comparing import certain, same_tokens
from tests.helpers.tiny import force, make, prompt

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
PLAIN = Case("cpu", torch.float32, 64)
MODELS = ("llama_gqa", "mistral_sliding", "mpt", "gptj", "gpt2")
POLICIES = (
    "full", "window", "streaming_llm", "random", "key_attention", "h2o", "scissorhands", "tova", "roco", "keyformer", "snapkv",
    "key_norm", "critical_adakv", "critical(adaptive(roco))", "adaptive(keyformer)",
)  # fmt: skip


def run(model, policy, backend, ids, fed, mask=None, **options):
    """Logits of a prompt and of forced tokens, kept positions and report."""
    settings = {"k": 0.4, "backend": backend} | options
    with kvpatch.patched(model, policy, **settings) as patch:
        logits, cache = force(model, ids, fed, mask=mask)
        held = [cache.positions(layer).sort(-1).values.cpu() for layer in range(len(cache.layers))]
        return logits.cpu(), held, patch.report()


def alike(name, policy, padded=False, steps=8, **options):
    model = make(name).to(DEVICE)
    ids, fed = prompt(2, 37).to(DEVICE), prompt(2, steps, seed=4).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, : 9 if padded else 0] = 0
    want = run(model, policy, "torch", ids, fed, mask, **options)
    got = run(model, policy, "triton", ids, fed, mask, **options)
    torch.testing.assert_close(got[0], want[0], atol=2e-5, rtol=0)
    assert same_tokens(got[1], want[1])
    return got[2]


# ---- the kernels, whole ----


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_on_the_kernels(policy):
    report = alike("llama_gqa", policy)
    if policy not in ("full", "window", "streaming_llm", "random", "key_norm"):
        assert report.backends["statistics"][0] == "triton"
    if report.schedule == "both" and policy != "full":  # the others append
        assert {name for task, (name, _) in report.backends.items() if task in ("decode", "ragged")} == {"triton"}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("policy", ["roco", "keyformer"])
@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_on_the_kernels(name, policy, padded):
    alike(name, policy, padded, steps=6)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("scissorhands", {"k": 30}),  # fills up while it decodes
        ("keyformer", {"tau": (1.0, 3.0), "damping": 0.9}),
        ("keyformer", {"noise": "none"}),
        ("keyformer", {"noise": "gaussian", "schedule": "decode", "k": 4}),
        ("roco", {"schedule": "decode", "k": 5}),
        ("h2o", {"sinks": 3, "recent": 4}),
        ("h2o", {"protect": [5, 7]}),
        ("scissorhands", {"block": 16}),
        ("snapkv", {"block": 16, "window": 4}),
        ("tova", {"heads": "each"}),
        ("h2o", {"positions": "renumbered"}),
    ],
    ids=str,
)
def test_options_on_the_kernels(policy, options):
    for name in ("mpt", "mistral_sliding") if "positions" in options else ("mistral_sliding",):
        alike(name, policy, padded=True, **options)


@pytest.mark.skipif(CUDA, reason="the oracle's models stay on the CPU")
@pytest.mark.parametrize(("name", "policy"), [*zip(MODELS, ("keyformer", "roco", "h2o", "scissorhands", "roco"), strict=True)])
def test_the_kernels_and_the_oracle(name, policy):
    certain(name, policy, 0.4, dtype=torch.float32, steps=5, backend="triton")


def test_turns_and_roll_back_on_the_kernels():
    model, ids, more = make("llama_gqa").to(DEVICE), prompt(2, 30).to(DEVICE), prompt(2, 12, seed=3).to(DEVICE)

    def turns(name):
        with torch.no_grad(), kvpatch.patched(model, "scissorhands", 0.4, backend=name) as patch:
            cache, outs = patch.new_cache(), []
            model(ids, past_key_values=cache)
            for t in range(3):
                outs.append(model(more[:, t : t + 1], past_key_values=cache).logits[:, -1])
            cache.activate_past_recording()
            for t in range(3, 6):
                model(more[:, t : t + 1], past_key_values=cache)
            cache.crop(-3)
            for t in range(3, 5):
                outs.append(model(more[:, t : t + 1], past_key_values=cache).logits[:, -1])
            outs.append(model(more[:, 5:10], past_key_values=cache).logits[:, -1])
            for t in range(10, 12):
                outs.append(model(more[:, t : t + 1], past_key_values=cache).logits[:, -1])
            return torch.stack(outs), [cache.positions(layer).sort(-1).values for layer in range(2)]

    want, got = turns("torch"), turns("triton")
    torch.testing.assert_close(got[0], want[0], atol=2e-5, rtol=0)
    assert same_tokens(got[1], want[1])


@pytest.mark.parametrize("policy", ["keyformer", "roco", "critical(adaptive(roco))"])
def test_compiled_steps_on_the_kernels(policy):
    """torch.compile sees the kernels as one operator."""
    model, ids, more = make("llama_gqa", layers=1).to(DEVICE), prompt(2, 30).to(DEVICE), prompt(2, 6, seed=3).to(DEVICE)
    torch._dynamo.reset()

    def steps(name, compiled):
        with torch.no_grad(), kvpatch.patched(model, policy, 0.4, backend=name) as patch:
            cache, outs = patch.new_cache(room=6), []
            model(ids, past_key_values=cache)
            step = torch.compile(model.forward, fullgraph=True, backend="aot_eager") if compiled else model
            for t in range(6):
                outs.append(step(more[:, t : t + 1], past_key_values=cache).logits[:, -1])
            return torch.stack(outs), [cache.positions(0).sort(-1).values]

    want = steps("torch", False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = steps("triton", True)
    torch.testing.assert_close(got[0], want[0], atol=2e-5, rtol=0)
    assert same_tokens(got[1], want[1])


def test_the_operator_is_as_it_says():
    """torch's own checks of an operator: its schema, what it writes to, its shapes without data."""
    B, H, C, D = 1, 2, 5, 16
    tensors = [torch.randn(B, H, n, D).squeeze(2) if n == 1 else torch.randn(B, H, n, D) for n in (2, 1, 1, C, C)]
    positions, slot = torch.tensor([0, 1, 2, 3, -1]).expand(B, H, C).contiguous(), torch.full((B, H), 4)
    state = [torch.rand(B, H, C)]
    arguments = (
        *tensors, positions, slot, torch.tensor([9]), state, "sum", "sum", "", 1.0, "sum", 0.25, None, None, None, None, None,
        None, None, None, 1.0,
    )  # fmt: skip
    arguments = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(DEVICE), arguments)
    torch.library.opcheck(triton_backend.compiled_step, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("sliding", [None, 6])
def test_keys_that_a_row_attends_to(sliding):
    """Counted from the mask itself."""
    held = torch.tensor([[[-1, 0, 3, 4, 7, -1], [2, 5, -1, 6, 0, 1]], [[-1, -1, 1, 2, 0, -1], [0, -1, -1, -1, -1, -1]]])
    rows = torch.tensor([[8, 9, 10], [-1, 3, 4]])
    positions = torch.cat([held, rows[:, None].expand(2, 2, 3)], -1)
    keys = Keys(torch.empty(2, 2, 9, 4), torch.empty(2, 2, 9, 4), positions, True, past=6, ordered=False)
    got = triton_backend.attended(keys, rows, Geometry(1.0, None, sliding))
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


# ---- the choice ----


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
    assert "decode" in str(report) and "run on a GPU" in str(report)
    assert report.to_dict()["backends"]["decode"]["name"] == "torch"


@pytest.mark.parametrize("task", TASKS)
def test_a_gpu_gets_the_fastest_that_can(task, monkeypatch):
    cuda = Case("cuda", torch.bfloat16, 128)
    monkeypatch.setattr(backend("flash"), "reason", lambda task, case: None if task in ("prompt", "ragged") else "no")
    assert Choice().of(task, cuda) == {"prompt": "flash"}.get(task, "triton")
    monkeypatch.setattr(backend("triton"), "reason", lambda task, case: "it is broken")
    chosen = Choice()
    assert chosen.of(task, cuda) == {"prompt": "flash", "ragged": "flash"}.get(task, "torch")
    assert task == "prompt" or chosen.ran[task][1].startswith("triton: it is broken")


@pytest.mark.parametrize("task", TASKS)
def test_who_is_asked_for_is_taken_or_said_once(task, caplog, monkeypatch):
    monkeypatch.setattr(choice, "_said", set())
    double = Case("cuda", torch.float64, 128)
    assert Choice("torch").of(task, double) == "torch" and not caplog.text
    for _ in range(2):
        assert Choice("triton").of(task, double) == "torch"
    assert caplog.text.count("backend='triton'") == (task != "prompt")


def test_only_what_can_run_may_be_asked_for(monkeypatch):
    model = make("llama_gqa")
    with pytest.raises(kvpatch.KVPatchError, match=r"backend='flash' cannot run here: flash kernels run on CUDA.*'auto'"):
        kvpatch.patch(model, backend="flash")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(kvpatch.KVPatchError, match="backend='triton' cannot run here: .*a GPU"):
        kvpatch.patch(model, backend="triton")
    for wrong, said in (("tritn", r"Unknown backend 'tritn'.*'triton'"), (None, "backend None"), (["flash"], "Unknown")):
        with pytest.raises(kvpatch.KVPatchError, match=said):
            kvpatch.patch(model, backend=wrong)
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
        (Case("mps", torch.float32, 64), "mps"),
    ],
)
def test_what_the_kernels_refuse(case, words):
    assert words in triton_backend.reason("decode", case)


def test_every_backend_answers_for_every_task():
    for name in choice.BACKENDS:
        module = backend(name)
        assert module.NAME == name
        for task in TASKS:
            answer = module.reason(task, PLAIN)
            assert answer is None or isinstance(answer, str)
