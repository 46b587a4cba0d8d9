"""Law 8: every backend computes what the torch backend computes."""

import itertools

import pytest
import torch

import kvpatch
from kvpatch.backends.dispatch import Choice
from tests.helpers import tiny_families
from tests.helpers.comparing import SMALL, certain, same_tokens
from tests.helpers.joined import Loop, same_kept
from tests.helpers.marks import slow_but
from tests.helpers.running import steps
from tests.helpers.tiny import force, make, prompt

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
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


def alike(name, policy, padded=False, steps=4, **options):
    model = (tiny_families.make(name) if name in tiny_families.FAMILIES else make(name, layers=1)).to(DEVICE)
    ids, fed = prompt(2, 37).to(DEVICE), prompt(2, steps, seed=4).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, : 9 if padded else 0] = 0
    want = run(model, policy, "torch", ids, fed, mask, **options)
    got = run(model, policy, "triton", ids, fed, mask, **options)
    torch.testing.assert_close(got[0], want[0], atol=2e-5, rtol=0)
    assert same_tokens(got[1], want[1])
    return got[2]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", slow_but((), POLICIES))
def test_every_policy_on_the_kernels(policy):
    report = alike("llama_gqa", policy)
    if policy not in ("full", "window", "streaming_llm", "random", "key_norm"):
        assert report.backends["statistics"][0] == "triton"
    if report.schedule == "both" and policy != "full":  # the others append
        assert {name for task, (name, _) in report.backends.items() if task in ("decode", "ragged")} == {"triton"}


CASES = [*itertools.product(MODELS, ("roco", "keyformer"), (False, True))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "policy", "padded"), slow_but((), CASES))
def test_every_architecture_on_the_kernels(name, policy, padded):
    alike(name, policy, padded)


FOLLOWING = [(kvpatch.Share(0.5), {}), (kvpatch.Mass(0.9), {"recent": 3}), ([[5, 20]], {})]


@pytest.mark.parametrize(("k", "options"), FOLLOWING, ids=[str(k) for k, _ in FOLLOWING])
def test_heads_that_follow_the_text_on_the_kernels(k, options):
    """Kernels attend and observe; which tokens go is torch's, but for a table."""
    report = alike("llama_gqa", "h2o", padded=True, steps=3, k=k, **options)
    name, why = next(report.backends[task] for task in ("decode", "ragged") if task in report.backends)
    assert name == "triton"
    assert ("heads evict as many tokens as their budget says" in why) == (not isinstance(k, list))


SPECIAL = [("gpt_oss", "keyformer", True), ("gemma2", "snapkv", False), ("gemma2", "roco", True), ("gpt_oss", "h2o", False)]


@pytest.mark.parametrize(("name", "policy", "padded"), slow_but(SPECIAL[:2], SPECIAL))
def test_capped_logits_and_sinks_on_the_kernels(name, policy, padded):
    report = alike(name, policy, padded, steps=3)
    assert {"prompt", "statistics", "decode"} <= set(report.backends)
    assert {made for made, _ in report.backends.values()} == {"triton"}


OPTIONS = [
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
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("policy", "options"), slow_but((), OPTIONS), ids=str)
def test_options_on_the_kernels(policy, options):
    for name in ("mpt", "mistral_sliding") if "positions" in options else ("mistral_sliding",):
        alike(name, policy, padded=True, steps=7, **options)  # schedule='decode' evicts from the fifth or sixth on


ROUNDED = [
    ("llama_gqa", "h2o", {"bits": 4}),
    ("llama_gqa", "roco", {"bits": 8}),
    ("mpt", "keyformer", {"bits": 8, "padded": True}),
    ("mistral_sliding", "scissorhands", {"bits": 4, "k": 30}),
    ("gpt2", "critical_adakv", {"bits": 4}),
    ("llama_gqa", "adaptive(keyformer)", {"bits": 8, "padded": True}),
    ("gptj", "snapkv", {"bits": 4}),
    ("llama_gqa", "full", {"bits": 8}),
    ("llama_gqa", "h2o", {"bits": 8, "block": 16}),
    ("gpt_oss", "h2o", {"bits": 8}),
    ("gemma2", "roco", {"bits": 4}),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "policy", "options"), slow_but((), ROUNDED), ids=str)
def test_rounded_slots_on_the_kernels(name, policy, options):
    report = alike(name, policy, **options)
    assert {made for task, (made, _) in report.backends.items() if task in ("decode", "ragged")} == {"triton"}


BESIDE = [*zip(MODELS, ("keyformer", "roco", "h2o", "scissorhands", "roco"), strict=True)]
BESIDE_ROUNDED = [(*one, bits) for one, bits in zip(BESIDE, (8, 4, 8, 4, 8), strict=True)]


@pytest.mark.skipif(CUDA, reason="the oracle's models stay on the CPU")
@pytest.mark.parametrize(("name", "policy"), slow_but(BESIDE[:1], BESIDE))
def test_the_kernels_and_the_oracle(name, policy):
    certain(name, policy, 0.4, dtype=torch.float32, steps=3, backend="triton")


@pytest.mark.sampled(2)
@pytest.mark.skipif(CUDA, reason="the oracle's models stay on the CPU")
@pytest.mark.parametrize(("name", "policy", "bits"), slow_but((), BESIDE_ROUNDED))
def test_the_kernels_of_rounded_slots_and_the_oracle(name, policy, bits):
    certain(name, policy, 0.4, dtype=torch.float32, steps=3, backend="triton", bits=bits)


@pytest.mark.slow
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


def test_tokens_of_one_pass_have_temperatures_of_their_own_on_the_kernels():
    """Each is a step further from the prompt."""
    model, ids, fed = make("llama_gqa", layers=1).to(DEVICE), prompt(1, 16).to(DEVICE), prompt(1, 4, seed=3).to(DEVICE)

    def sums(name):
        with (
            torch.no_grad(),
            kvpatch.patched(model, "keyformer", 0.5, backend=name, tau=(1.0, 9.0), generation_length=8) as patch,
        ):
            cache = patch.new_cache()
            cache.plans.prompt_len = 16
            logits = [model(one, past_key_values=cache).logits[:, -1] for one in (ids, fed)]
            order = cache.positions(0).argsort(-1)
            return torch.stack(logits), cache.layers[0].state["gumbel"].gather(-1, order), patch.report().backends

    want, got = sums("torch"), sums("triton")
    assert (want[2]["decode"][0], got[2]["decode"][0]) == ("torch", "triton")
    torch.testing.assert_close(got[:2], want[:2], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("policy", slow_but(("roco",), ("keyformer", "roco", "critical(adaptive(roco))")))
def test_compiled_steps_on_the_kernels(policy):
    """torch.compile sees the kernels as one operator."""
    model, ids, more = make("llama_gqa", layers=1).to(DEVICE), prompt(2, 30).to(DEVICE), prompt(2, 6, seed=3).to(DEVICE)
    torch._dynamo.reset()

    want = steps(model, policy, ids, more, backend="torch")
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = steps(model, policy, ids, more, backend="triton", compiled=True)
    torch.testing.assert_close(got[0], want[0], atol=2e-5, rtol=0)
    assert same_tokens(got[1], want[1])


@pytest.mark.parametrize("policy", slow_but(("keyformer",), ("h2o", "keyformer", "adakv")))
def test_the_triton_backend_takes_joined_rows(policy):
    """Keyformer's rows have temperatures of their own, which its kernel does not; torch takes these steps."""
    pytest.importorskip("triton")
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, policy, 0.4, **SMALL.get(policy, {})) as patch:
        loop = Loop(model, patch)
        loop.add((20, 0), (9, 3))
        loop.cache.backend_choice = Choice("triton")
        fed = prompt(2, 2)
        for t in range(2):
            got = model(fed[:, t : t + 1], past_key_values=loop.cache).logits
            want = [model(fed[r : r + 1, t : t + 1], past_key_values=one).logits for r, one in enumerate(loop.alone)]
            torch.testing.assert_close(got, torch.cat(want), atol=2e-5, rtol=0)
            for row, one in enumerate(loop.alone):
                same_kept(loop.cache, row, one)
        ran = {task: by for task, (by, _) in loop.cache.backend_choice.ran_last.items()}
        assert set(ran.values()) == {"torch" if policy == "keyformer" else "triton"}
