"""Families without a row: the automatic row that serves them, or the sentence that says why nothing does."""

import logging
import re

import pytest
import torch
from packaging.version import Version
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

import kvpatch
from kvpatch.arch import automatic
from kvpatch.arch.twin import make_twin
from kvpatch.hooks.target import Target
from tests.helpers.marks import INSTALLED, slow_but
from tests.helpers.tiny import force, left_pad, prompt, snapshot, spread_weights
from tests.helpers.tiny_families import EXPERTS, GQA
from tools.architectures import GIVEN


@pytest.fixture(autouse=True)
def _nothing_judged(monkeypatch):
    monkeypatch.setattr(automatic, "_VERDICTS", {})


def sketch(kind, **given):
    """A model of its family's default configuration without numbers: only its tiny twin is run."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **given)).eval()


def glm4_moe():
    torch.manual_seed(0)
    experts = {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    config = Glm4MoeConfig(**{**GQA, **experts}, head_dim=8)
    return spread_weights(Glm4MoeForCausalLM(config).eval())


def test_a_family_is_judged_once(monkeypatch):
    built, real = [], automatic.make_twin
    monkeypatch.setattr(automatic, "make_twin", lambda *given: built.append(given) or real(*given))
    for model in (glm4_moe(), glm4_moe()):
        assert Target.find(model).attentions
    assert len(built) == 1


def test_a_family_without_a_row_is_served(caplog):
    model, ids, fed = glm4_moe(), prompt(2, 20), prompt(2, 4, seed=2)
    mask, before, random = left_pad(ids, [20, 13]), snapshot(model), torch.get_rng_state()
    want, _ = force(model, ids, fed, mask)
    with caplog.at_level(logging.INFO, "kvpatch"), kvpatch.patched(model, "h2o", 1.0):
        got, cache = force(model, ids, fed, mask)
    torch.testing.assert_close(got, want, atol=3e-5, rtol=0)
    lines = [record.getMessage() for record in caplog.records if "automatic row" in record.getMessage()]
    assert len(lines) == 1 and lines[0].startswith("[kvpatch] Glm4MoeForCausalLM has no row;")
    with kvpatch.patched(model, "h2o", 5):
        assert force(model, ids, fed)[1].held(1).eq(5).all()
        assert len([record for record in caplog.records if "automatic row" in record.getMessage()]) == 1, "judged once"
    assert snapshot(model) == before and torch.equal(torch.get_rng_state(), random)
    assert "glm4_moe" not in kvpatch.list_architectures()


def test_without_automatic_rows_it_is_refused_with_its_row():
    with pytest.raises(kvpatch.KVPatchError, match=r"register a row.*InterfaceAdapter\('glm4_moe', 'transformers\.models"):
        Target.find(glm4_moe(), auto=False)


def test_two_stage_selection_needs_a_row_that_names_the_projection():
    with pytest.raises(kvpatch.KVPatchError, match=r"automatic row of glm4_moe does not name: register a row"):
        kvpatch.patch(glm4_moe(), "critical_snapkv", 0.5)


# family: what its default configuration lacks to be built
SERVED = {
    "afmoe": {}, "aria_text": {}, "beam": {}, "biogpt": {}, "cohere2_moe": {}, "ctrl": {}, "cwm": {}, "ernie4_5_moe": {},
    "exaone_moe": {}, "flex_olmo": {}, "glm4_moe": {}, "granitemoeshared": {}, "hunyuan_v1_moe": {"head_dim": 64},
    "hyperclovax": {}, "jais2": {}, "laguna": {}, "mellum": {}, "minimax_m2": {}, "ministral3": {},
    "modernbert-decoder": {}, "moshi": {}, "nanochat": {}, "phimoe": {}, "solar_open": {}, "vaultgemma": {},
    "emu3": {}, "flint": {}, "gemma4": {}, "gemma4_text": {}, "glm4_moe_lite": {}, "granite_swa": {}, "granitemoe_swa": {},
    "hy_v3": {}, "kolibri1": {}, "minimax_m3_vl_text": {}, "axk1": {}, "jetmoe": {}, "mimo_v2_flash": {},
    **{kind: {} for kind in ("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart", "whisper")},
    "cohere_compass_text": GIVEN["cohere_compass_text"], "dbrx": GIVEN["dbrx"], "lfm2_moe": GIVEN["lfm2_moe"],
    "xmod": GIVEN["xmod"], "bert": {"is_decoder": True},
    "gemma3n_text": {}, "falcon_h1": {}, "kimi_linear": {}, "nemotron_h": {}, "zamba": {}, "lfm3": {},
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", slow_but(("cwm", "vaultgemma", "whisper", "dbrx"), SERVED))
def test_served_by_an_automatic_row(kind):
    if kind == "dbrx" and INSTALLED < Version("5.16"):
        pytest.skip("its configuration class does not read what it writes")
    target = Target.find(sketch(kind, **SERVED[kind]))
    assert all(isinstance(adapter, automatic.AutomaticAdapter) for _, adapter in target.attentions)
    stack = target.layer_numbers
    layers = getattr(target.decoder.config, "decoder_layers", target.decoder.config.num_hidden_layers)
    assert len(target.attentions) == (len(stack.attention) if stack else layers)


@pytest.mark.parametrize("heads", [[4, 8], [8, 4]])
def test_layers_of_several_numbers_of_query_heads(heads, tmp_path):
    """Laguna's sliding layers have more query heads than its full ones, of as many KV heads."""
    experts = {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}
    kinds = {"num_attention_heads_per_layer": heads, "layer_types": ["full_attention"] * 2, "head_dim": 8}
    torch.manual_seed(0)
    config = AutoConfig.for_model("laguna", **{**GQA, **experts, **kinds, "num_attention_heads": heads[0]})
    model, ids, fed = spread_weights(AutoModelForCausalLM.from_config(config).eval()), prompt(2, 20), prompt(2, 3, seed=2)
    want, _ = force(model, ids, fed)
    with kvpatch.patched(model, "h2o", 1.0):
        torch.testing.assert_close(force(model, ids, fed)[0], want, atol=3e-5, rtol=0)
    assert [(one.heads, one.group) for one in Target.find(model).shapes()] == [(2, heads[0] // 2), (2, heads[1] // 2)]
    with kvpatch.patched(model, "keyformer", 9) as patch:
        cache = force(model, ids, fed)[1]
        patch.save_cache(cache, tmp_path / "cache.safetensors")
        loaded = patch.load_cache(tmp_path / "cache.safetensors")
        for t in range(2):
            both = [model(fed[:, t : t + 1], past_key_values=one).logits for one in (loaded, cache)]
            assert torch.equal(*both)
    assert kvpatch.check_model(model, "keyformer", 0.3).passed


RECURRENT = r"keeps a recurrent state, not keys and values: there is nothing to evict\."
ENCODER = r"attends in both directions \(is_\w+=False of .*: an encoder reads its text at once"
CROSSED = r"attends to what an encoder read, too \(.*is cross-attention\): kvpatch serves decoders that attend to their own"
OTHER_LAYERS = r"has layers of type [\w, ]+, whose state is no cache of all keys and values"
REFUSED = {
    "mamba": RECURRENT, "mamba2": RECURRENT, "falcon_mamba": RECURRENT, "rwkv": RECURRENT, "xlstm": RECURRENT,
    "bert": ENCODER, "roberta": ENCODER, "electra": ENCODER, "roformer": ENCODER, "rembert": ENCODER,
    "mllama": CROSSED, "blt": CROSSED,
    "openai-gpt": r"keeps no cache of keys and values: every step of generate\(\) reads the whole text anew",
    "minimax": "keeps the state of its linear layers in a cache of its own, MiniMaxCache, and takes no other",
    "deepseek_v4": OTHER_LAYERS, "glm_moe_dsa": OTHER_LAYERS,
    "diffllama": r"DiffLlamaAttention attends more than once in a forward, as differential attention does",
    "hrm_text": r"passes through its layers more than once per token",
    "doge": r"an automatic row did not pass the checks \(k=1\.0 gives the unpatched model's logits: off by",
}  # fmt: skip
FAST = ("mamba", "rwkv", "bert", "roformer", "mllama", "openai-gpt", "minimax", "deepseek_v4", "diffllama", "doge")


@pytest.mark.parametrize("kind", slow_but(FAST, REFUSED))
def test_refused_with_what_it_is(kind):
    model = sketch(kind)
    with pytest.raises(kvpatch.KVPatchError, match="(?s)" + REFUSED[kind]) as caught:
        Target.find(model)
    assert type(model).__name__[:4] in str(caught.value)
    if kind != "doge":  # a row or an adapter might serve it
        assert not re.search(r"register_arch|subclass|write an adapter", str(caught.value))


class Pair(nn.Module):
    """A model that is no PreTrainedModel around attention that calls the interface: no twin can be built of its class."""

    def __init__(self, inner, config):
        super().__init__()
        self.layers, self.config = inner.model.layers, config


def test_a_large_model_without_a_twin_is_refused_with_what_to_type():
    with torch.device("meta"):
        model = Pair(sketch("cwm", num_hidden_layers=2), AutoConfig.for_model("cwm"))
    with pytest.raises(kvpatch.KVPatchError, match=r"no tiny twin of Pair could be built.*Register the row, kvpatch\.register"):
        Target.find(model)


def test_a_small_model_without_a_twin_is_judged_once_it_has_its_numbers():
    config = AutoConfig.for_model(
        "cwm", vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    with torch.device("meta"):
        empty = Pair(AutoModelForCausalLM.from_config(config), config)
    with pytest.raises(automatic.NeedsWeights, match="no tiny twin of Pair could be built"):
        Target.find(empty)
    assert not automatic._VERDICTS


def test_a_twin_is_judged_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        Target.find(glm4_moe())


def test_a_twin_keeps_what_shapes_attention():
    sketched = sketch("vaultgemma")
    attentions = [module for module in sketched.modules() if type(module).__name__ == "VaultGemmaAttention"]
    twin = make_twin(sketched.model, attentions)
    big, small = sketched.config, twin.config
    for name in ("head_dim", "attn_logit_softcapping", "query_pre_attn_scalar"):
        assert getattr(big, name) == getattr(small, name)
    assert set(small.layer_types) == set(big.layer_types) and small.sliding_window == 8
    assert sum(parameter.numel() for parameter in twin.parameters()) < 2_000_000


def test_a_twin_draws_from_the_host_s_random_numbers_alone(monkeypatch):
    """torch.manual_seed would also seed every GPU, whose state nobody puts back."""
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("reseeds all devices"))
    sketched, before = sketch("vaultgemma"), torch.get_rng_state()
    attentions = [module for module in sketched.modules() if type(module).__name__ == "VaultGemmaAttention"]
    first, second = (make_twin(sketched.model, attentions) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
