"""Families with attention code of their own, and decoders that may attend to an encoder: unpatched at k=1.0, masked else."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import kvpatch
from kvpatch.arch import automatic
from kvpatch.evaluation.check import Checks
from kvpatch.hooks.target import Target
from tests.helpers.comparing import SMALL, agrees
from tests.helpers.marks import batches, since, slow_but
from tests.helpers.tiny import force, left_pad, prompt, snapshot
from tests.helpers.tiny_families import OWN, make
from tests.oracle import reference

COLUMNS = ("mvp", "trocr", "roformer_values")  # positions count the padding, in the family's own code
FAST = ("codegen", "gpt_neo", "mvp", "roformer_values", "longcat_flash")


def certain(name, policy, k, **options):
    """Some weights for which the comparison with the oracle is decided."""
    options = {"n": 22, "steps": 4, "pads": (0, 7), **SMALL.get(policy, {}), **options}
    models = (make(name, seed=weights, dtype=torch.float64) for weights in range(6))
    found = (agrees(name, policy, k, weights=weights, model=model, **options) for weights, model in enumerate(models))
    assert any(found), "every draw was too close to call"


@pytest.mark.parametrize("name", ["codegen", "gpt_neo"])
def test_the_oracle_is_the_unpatched_model(name):
    model, ids = make(name, dtype=torch.float64), prompt(1, 20)[0]
    with torch.no_grad():
        want = model(ids[None]).logits[0]
    got = reference.run(model, ids[:14].tolist(), ids[14:].tolist(), policy="full", k=1.0).logits
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)  # the models' logits of attention are float32


@pytest.mark.parametrize("policy", ["h2o", "keyformer", "snapkv", "tova"])
@pytest.mark.parametrize("name", ["codegen", "gpt_neo"])
def test_evictions_are_the_oracles(name, policy):
    certain(name, policy, 0.4)


@since("5.16", "this model turns no part of a head, unpatched too")
def test_some_channels_are_renumbered():
    """GPT-NeoX Japanese turns the first channels of a head; where nothing is evicted, ranks are positions."""
    model, ids, fed = make("gpt_neox_japanese"), prompt(1, 24), prompt(1, 5, seed=2)
    found = []
    for positions in ("original", "renumbered"):
        with kvpatch.patched(model, "window", 40, positions=positions):
            found.append(force(model, ids, fed)[0])
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)


def test_renumbered_and_turned_back():
    certain("codegen", "roco", 9, pads=(0, 0), positions="renumbered")
    certain("gpt_neo", "critical_snapkv", 0.4)
    assert kvpatch.check_model(make("gpt_neox_japanese"), "expected_attention", 0.4).passed  # its modules have no config


@pytest.mark.parametrize("name", slow_but(FAST, OWN))
def test_one_changes_nothing(name):
    model, ids, fed = make(name), prompt(2, 20), prompt(2, 4, seed=2)
    mask, before = left_pad(ids, [20, 13]), snapshot(model)
    want = [force(model, ids, fed, mask)[0], model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)]
    with kvpatch.patched(model, "h2o", 1.0):
        got = [force(model, ids, fed, mask)[0], model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)]
    torch.testing.assert_close(got[0], want[0], atol=3e-5, rtol=0)
    assert torch.equal(got[1], want[1])
    with kvpatch.patched(model, "h2o", 5):
        cache = force(model, ids, fed)[1]
    windows = [adapter.sliding(module) for module, adapter in Target.find(model).attentions]
    assert all(bool(cache.held(layer).eq(5).all()) for layer, window in enumerate(windows) if window is None)
    assert snapshot(model) == before and torch.equal(force(model, ids, fed, mask)[0], want[0])


@pytest.mark.parametrize("name", slow_but(FAST, OWN))
def test_kvpatch_check(name):
    dtype = torch.float32 if name == "xglm" else torch.float64  # in which transformers' XGLM does not run
    results = Checks(make(name, dtype=dtype), "h2o", 0.5).run()
    assert [result for result in results if not result.passed] == []
    padded = next(result for result in results if "padded" in result.name)
    assert ("count padding" in padded.detail) == (name in COLUMNS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(COLUMNS))
def test_kvpatch_check_of_positions_that_count_padding_in_half_precision(name, dtype):
    """What padding shifts is far below a thousand times what these dtypes round."""
    padded = next(result for result in Checks(make(name, dtype=dtype), "h2o", 0.5).run() if "padded" in result.name)
    assert padded.passed and "count padding" in padded.detail, padded


@pytest.mark.parametrize(("name", "most"), [("gpt_neo", 512), ("trocr", 512), ("xglm", None)])
def test_positions_end_where_a_table_does(name, most):
    model, ids = make(name), prompt(1, 513)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 6):
        if most is None:
            assert model(ids).logits.shape[1] == 513
        else:
            with pytest.raises(kvpatch.KVPatchError, match="needs 513 positions, but this model has 512"):
                model(ids)


@pytest.mark.parametrize("kind", ["rembert", "megatron-bert", "roformer"])
def test_an_encoder_is_refused(kind):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, num_hidden_layers=1))
    with pytest.raises(kvpatch.KVPatchError, match=r"attends in both directions \(is_decoder=False of its configuration\)"):
        kvpatch.patch(model, "h2o")


def test_what_stands_beside_the_cache_is_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mvp", decoder_layers=1, use_prompt=True))
    model.model.decoder.use_prompt = True
    with pytest.raises(kvpatch.KVPatchError, match="use_prompt=True: its prompts are keys and values outside the cache"):
        kvpatch.patch(model, "h2o")


def test_two_stage_selection_needs_the_output_projection():
    with pytest.raises(kvpatch.KVPatchError, match="in rembert more than that stands between attention and its output"):
        kvpatch.patch(make("rembert"), "critical_snapkv", 0.5)


def bart():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("bart", **OWN["mvp"][1])).eval()


def test_a_decoder_that_reads_alone(monkeypatch):
    """Its configuration names the encoder's layers and heads first, of which there are fewer."""
    monkeypatch.setattr(automatic, "_VERDICTS", {})
    model, ids = bart(), prompt(2, 20)
    with kvpatch.patched(model, "h2o", 6) as patch:
        _, cache = force(model, ids, prompt(2, 3, seed=2))
        report = patch.report()
    assert len(cache.layers) == 3 and cache.held(2).eq(6).all() and cache.held(0).shape[1] == 4
    assert len(report.positions) == 3


def test_what_an_encoder_read_is_refused():
    model, ids, states = make("trocr"), prompt(1, 12), torch.randn(1, 5, 32)
    want = model(ids, encoder_hidden_states=states, use_cache=False).logits
    with kvpatch.patched(model, "h2o", 6) as patch:
        with pytest.raises(kvpatch.KVPatchError, match="encoder_hidden_states: under a budget this model is a decoder"):
            model(ids, encoder_hidden_states=states)
        cache = patch.new_cache()
        model(ids, past_key_values=cache)
        with pytest.raises(kvpatch.KVPatchError, match="encoder_hidden_states: under a budget"):
            model(ids[:, :1], past_key_values=cache, encoder_hidden_states=states)
        assert torch.equal(model(ids, encoder_hidden_states=states, use_cache=False).logits, want), "its own code"


@batches
@pytest.mark.parametrize("name", ["trocr", "roformer", "llama4_tuned"])
def test_what_needs_positions_of_our_own_is_refused(name):
    """These decoders take no position_ids, and count columns; the last one does so in layers without rotary positions."""
    why = "its attention counts columns" if name == "llama4_tuned" else "it takes no position_ids"
    model, ids = make(name), prompt(1, 12)
    with kvpatch.patched(model, "h2o", 6, record=True) as patch:
        model.generate(ids, max_new_tokens=3, do_sample=False)
        record = patch.record()
        with pytest.raises(kvpatch.KVPatchError, match=rf"for its decoder counts positions on the host \({why}"):
            patch.graph(model)
        with patch.replay(record), pytest.raises(kvpatch.KVPatchError, match="A replay gives each token the position that"):
            model(ids)
    with kvpatch.patched(model, "h2o", 6) as patch:
        with pytest.raises(kvpatch.KVPatchError, match="packs requests that are at different places of their texts"):
            model.generate_batch([ids[0].tolist()])
        caches = [patch.new_cache() for _ in range(2)]
        for cache, text in zip(caches, (ids, ids[:, :9]), strict=True):
            model(text, past_key_values=cache)
        with pytest.raises(kvpatch.KVPatchError, match=f"cannot be told, for {why}"):
            model(prompt(2, 1), past_key_values=kvpatch.EvictingCache.concatenate(caches))
