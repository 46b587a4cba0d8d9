"""Falcon and BLOOM, tested like the five: nothing changes at k=1.0, evictions equal the oracle's, nothing stays behind."""

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, FalconConfig, FalconForCausalLM

import kvpatch
from kvpatch.evaluation.check import Checks
from tests.helpers.comparing import EVICTING, SMALL, certain
from tests.helpers.tiny import MORE, VOCAB, force, left_pad, make, prompt
from tests.oracle import reference

ALIBI = ("falcon_alibi", "bloom")
WIDE = {"vocab_size": VOCAB, "initializer_range": 0.3, "hidden_size": 48}
GROUPED = {"num_attention_heads": 4, "num_hidden_layers": 2, "new_decoder_architecture": True, "num_kv_heads": 2}
ORACLES = {
    "bloom": lambda: BloomForCausalLM(BloomConfig(n_head=4, n_layer=2, **WIDE)),
    "bloom-odd-heads": lambda: BloomForCausalLM(BloomConfig(n_head=6, n_layer=2, **WIDE)),
    "bloom-normed-residual": lambda: BloomForCausalLM(
        BloomConfig(n_head=4, n_layer=2, apply_residual_connection_post_layernorm=True, **WIDE)
    ),
    "falcon-one-norm": lambda: FalconForCausalLM(FalconConfig(**GROUPED, num_ln_in_parallel_attn=1, **WIDE)),
    **{name: lambda name=name: make(name) for name in MORE},
}


@pytest.mark.parametrize("name", ORACLES)
def test_the_oracle_is_the_unpatched_model(name):
    torch.manual_seed(0)
    model, ids = ORACLES[name]().double().eval(), prompt(1, 20)[0]
    with torch.no_grad():
        want = model(ids[None]).logits[0]
    got = reference.run(model, ids[:14].tolist(), ids[14:].tolist(), policy="full", k=1.0).logits
    torch.testing.assert_close(got, want, atol=2e-5 if "bloom" in name else 1e-9, rtol=0)  # BLOOM's softmax is float32


@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.parametrize("name", MORE)
def test_every_policy(name, policy):
    certain(name, policy, 0.4, **SMALL.get(policy, {}))


@pytest.mark.parametrize("k", [9, [0.3, 7]])
@pytest.mark.parametrize("name", MORE)
def test_positions_budgets_and_blocks(name, k):
    certain(name, "roco", k, pads=(0, 0), positions="renumbered")
    certain(name, "h2o", k, block=8)


@pytest.mark.parametrize("name", ALIBI)
def test_what_is_put_aside_is_the_models_own_again(name):
    model, ids = make(name), prompt(1, 12)
    want = model(ids, use_cache=False).logits
    with pytest.raises(ZeroDivisionError), kvpatch.patched(model, "h2o", 4):
        model(ids)
        assert {"build_alibi_tensor", "use_alibi"} & {*vars(model.transformer)}
        assert torch.equal(model(ids, use_cache=False).logits, want)
        model(ids)
        raise ZeroDivisionError
    assert "build_alibi_tensor" not in vars(model.transformer)
    assert torch.equal(model(ids, use_cache=False).logits, want)


@pytest.mark.parametrize("name", ["falcon_alibi", "bloom"])
def test_attention_dropout_is_refused_while_training(name):
    model = make(name).train()
    for layer in model.transformer.h:
        layer.self_attention.attention_dropout.p = 0.2
    with kvpatch.patched(model, "h2o", 5, block=4), pytest.raises(kvpatch.KVPatchError, match=r"attention dropout of 0\.2"):
        model(prompt(1, 20))


@pytest.mark.parametrize("heads", [4, 6, 32])
def test_falcons_alibi_is_rounded_as_the_model_rounds_it(heads):
    """transformers multiplies slopes and positions in bfloat16, which holds no position above 256: the bias of far tokens comes
    out in steps, by which logits here differ by far more than the tolerance."""
    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=VOCAB, hidden_size=8 * heads, num_attention_heads=heads, num_hidden_layers=2, alibi=True, multi_query=False,
        parallel_attn=False, initializer_range=1.4 / (8 * heads) ** 0.5, max_position_embeddings=512,
    )  # fmt: skip
    model, ids, fed = FalconForCausalLM(config).eval(), prompt(2, 400), prompt(2, 3, seed=2)
    mask = left_pad(ids, [400, 350])
    for policy in ("h2o", "tova", "window"):
        own, _ = force(model, ids, fed, mask)
        with kvpatch.patched(model, policy, 1.0, block=64 if policy == "tova" else None):
            got, _ = force(model, ids, fed, mask)
        torch.testing.assert_close(got, own, atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", ["falcon", "falcon_alibi", "bloom"])
def test_kvpatch_check(name):
    results = Checks(make(name)).run()
    assert [result for result in results if not result.passed] == []


def test_bloom_without_the_bias_that_its_exact_output_leaves_out():
    torch.manual_seed(0)
    model, ids = (
        BloomForCausalLM(BloomConfig(n_head=4, n_layer=2, pretraining_tp=2, slow_but_exact=True, **WIDE)).eval(),
        prompt(1, 20),
    )
    for layer in model.transformer.h:
        layer.self_attention.dense.bias.data.normal_()
    want = model(ids).logits
    with kvpatch.patched(model, "h2o", 1.0):
        torch.testing.assert_close(model(ids, use_cache=True).logits, want, atol=1e-4, rtol=0)
