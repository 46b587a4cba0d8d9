"""Every family that goes through the generic adapter, tested like the five: a row of families.py is a promise.

Each gives the unpatched model's logits at k=1.0 and the oracle's under a budget; three of them, which have all that a family
can have (capped logits, sinks, norms, layers that bound themselves), go through everything.
"""

import functools
from types import MethodType

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvpatch
from kvpatch.arch import refusals
from kvpatch.arch.families import FAMILIES as ROWS
from kvpatch.cache.cache import EvictingCache
from kvpatch.evaluation.check import Checks
from tests.helpers import sequences, tiny_families
from tests.helpers.comparing import EVICTING, PLACED, SMALL, agrees
from tests.helpers.comparing import certain as calibrated
from tests.helpers.running import logits_of
from tests.helpers.tiny import force, left_pad, prompt, snapshot
from tests.helpers.tiny import make as make_tiny
from tests.helpers.tiny_families import BY_COLUMNS, FAMILIES, ONE_WINDOW
from tests.helpers.training import agrees_with_naive_autograd, gradients
from tests.oracle import reference_families

THREE = ("gemma2", "gpt_oss", "qwen3")
BOUNDED = tuple(name for name, (_, given) in FAMILIES.items() if "layer_types" in given)
TURNS = ("tova", "snapkv", "adakv", "critical_snapkv", "roco", "pyramidkv", "streaming_llm", "scissorhands", "key_norm")
SHORT = {"n": 22, "steps": 4, "pads": (0, 7)}


def make(name, **kwargs):
    model = tiny_families.make(name, **kwargs)
    reference_families.learn(type(model))
    return model


def certain(name, policy, k, **options):
    """Some weights for which the comparison with the oracle is decided."""
    options = {**SHORT, **SMALL.get(policy, {}), **({"pads": (0, 0)} if name in BY_COLUMNS else {}), **options}
    models = (make(name, seed=weights, dtype=torch.float64) for weights in range(6))
    found = (agrees(name, policy, k, weights=weights, model=model, **options) for weights, model in enumerate(models))
    assert any(found), "every draw was too close to call"


def test_every_row_has_a_model():
    texts = {"gemma3": "gemma3_text", "llama4": "llama4_text"}
    assert {texts.get(row.name, row.name) for row in ROWS} == {kind for kind, _ in FAMILIES.values()}


TURNED = tuple(name for name, (kind, _) in FAMILIES.items() if {row.name: row.turns_back for row in ROWS}.get(kind))
ROTARY = tuple(name for name, (kind, _) in FAMILIES.items() if {row.name: row.renumbers for row in ROWS}.get(kind))
BY_LENGTH = {
    "dynamic": {"factor": 2.0},
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "factor": 2.0, "original_max_position_embeddings": 16},
}


@pytest.mark.parametrize("policy", PLACED)
@pytest.mark.parametrize("name", TURNED)
def test_rotations_are_undone(name, policy):
    if (name, policy) == ("bitnet", "kvzip_plus"):
        with pytest.raises(kvpatch.KVPatchError, match="in bitnet more than that stands between.*use 'kvzip'"):
            kvpatch.patch(make(name), policy, 0.3)
    else:
        certain(name, policy, 0.3)


@pytest.mark.parametrize("name", ROTARY)
def test_renumbered(name):
    """Tokens are evicted while decoding, one row is padded, heads hold alike numbers or not."""
    policy = TURNS[ROTARY.index(name) % len(TURNS)]
    policy = "roco" if name == "bitnet" and "critical" in policy else policy
    certain(name, policy, 0.4, positions="renumbered")
    certain(name, "adakv", 8, positions="renumbered", pads=(0, 0))


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_neox", "mixtral", "olmo", "stablelm"])
def test_renumbered_in_blocks_and_schedules(name):
    certain(name, "h2o", 9, positions="renumbered", block=5)
    certain(name, "h2o", 9, positions="renumbered", schedule="prompt", steps=9)
    certain(name, "roco", 20, positions="renumbered", schedule="decode", steps=9)  # the cache fills up first, then evicts
    certain(name, "window", 9, positions="renumbered", bits=8)


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_rotations_that_follow_the_length_are_not_undone(kind):
    model = scaled("qwen3", kind, BY_LENGTH[kind], 0)
    words = f"'expected_attention' reads queries or keys without their rotation, but in qwen3 rope_type='{kind}' rotates"
    with pytest.raises(kvpatch.KVPatchError, match=words):
        kvpatch.patch(model, "expected_attention", 0.5)


def scaled(name, kind, rope, weights):
    """The family's model of 16 positions, with a scaling of its rotations."""
    torch.manual_seed(weights)
    own = make(name, seed=weights, dtype=torch.float64)
    given = {**own.config.to_dict(), "rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **rope}}
    model = type(own)(type(own.config)(**{**given, "max_position_embeddings": 16})).eval().double()
    model.load_state_dict(own.state_dict())
    return model


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_neox"])
def test_a_renumbered_cache_is_saved_and_goes_on(name, tmp_path):
    model, ids, fed = make(name, dtype=torch.float64), prompt(2, 24), prompt(2, 6, seed=2)
    mask = left_pad(ids, [24, 17])
    with kvpatch.patched(model, "h2o", 9, positions="renumbered") as patch:
        want, _ = force(model, ids, fed, mask)
        _, cache = force(model, ids, fed[:, :3], mask)
        patch.save_cache(cache, tmp_path / "cache.safetensors")
        got, _ = force(model, fed[:, 3:4], fed[:, 4:], cache=patch.load_cache(tmp_path / "cache.safetensors"))
    torch.testing.assert_close(got, want[:, 4:], atol=1e-9, rtol=0)
    with kvpatch.patched(model, "h2o", 9):
        assert (force(model, ids, fed, mask)[0] - want).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["qwen3", "phi"])
def test_a_calibration_of_rotations(name):
    """As the oracle has it; certain() fails where every draw is too close to call."""
    calibrated(name, "tri_attention", 5, steps=14, model=make(name, dtype=torch.float64), every=3, reach=64)


@pytest.mark.parametrize("policy", ["refit(kvzip)", "refit(h2o)"])
@pytest.mark.parametrize("name", THREE)
def test_values_are_refitted(name, policy):
    """With capped logits, attention sinks and layers that bound themselves."""
    certain(name, policy[6:-1], 0.4, wrap=("refit",), queries=9)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_changes_nothing(name):
    model, ids, fed = make(name), prompt(2, 20), prompt(2, 4, seed=2)
    mask, before = left_pad(ids, [20, 13]), snapshot(model)

    def everything():
        logits, cache = force(model, ids, fed, mask)
        asked = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        asked |= {"return_dict_in_generate": True, "output_logits": True}
        runs = [model.generate(ids, **asked), model.generate(ids, num_beams=3, **asked)]
        return [logits, *(torch.stack(run.logits) for run in runs)], [run.sequences for run in runs], cache

    want, sequences, _ = everything()
    with kvpatch.patched(model, "h2o", 1.0):
        got, same, cache = everything()
    assert isinstance(cache, EvictingCache)
    assert cache.get_seq_length() == 24
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, atol=3e-5, rtol=0)
    assert all(map(torch.equal, sequences, same))
    assert snapshot(model) == before
    assert torch.equal(force(model, ids, fed, mask)[0], want[0])


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("name", FAMILIES)
def test_evictions_are_the_oracles(name, turn):
    policy = ("h2o", "keyformer", TURNS[list(FAMILIES).index(name) % len(TURNS)])[turn]
    if name == "bitnet" and "critical" in policy:
        policy = "roco"
    certain(name, policy, (0.4, 8, 0.5)[turn])


@pytest.mark.parametrize("policy", [policy for policy in EVICTING if policy not in ("h2o", "keyformer", *PLACED)])
@pytest.mark.parametrize("name", [*THREE, "deepseek_v3", "llama4_chunks"])
def test_every_policy(name, policy):
    certain(name, policy, 0.4)


@pytest.mark.parametrize("name", FAMILIES)
def test_training_steps_inside_are_those_outside(name):
    model, ids = make(name).train(), prompt(2, 12)
    mask = left_pad(ids, [12, 8])
    want = gradients(model, model(ids, attention_mask=mask, labels=ids).loss)
    with kvpatch.patched(model, "h2o", 0.5):
        got = gradients(model, model(ids, attention_mask=mask, labels=ids).loss)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[key], got[key]) for key in want)


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}], ids=str)
@pytest.mark.parametrize("policy", ["roco", "critical_adakv"])
@pytest.mark.parametrize("name", [*THREE, "llama4_chunks"])
def test_gradients_agree_with_naive_autograd(name, policy, checkpointing):
    agrees_with_naive_autograd(functools.partial(make, name), policy, checkpointing)


@pytest.mark.parametrize("name", [*THREE, "starcoder2", "exaone4", "opt", "gpt_bigcode", "llama4", "llama4_chunks"])
def test_prompts_in_blocks(name):
    certain(name, "h2o", 9, block=5)
    certain(name, "snapkv", 9, block=8)
    model, ids = make(name, dtype=torch.float64), prompt(2, 26)
    with torch.no_grad(), kvpatch.patched(model, "roco", 8, block=6) as patch:
        logits, cache = logits_of(model, ids, past_key_values=patch.new_cache()), patch.new_cache()
        without = logits_of(model, ids, use_cache=False)
        parts = [logits_of(model, ids[:, at : at + 6], past_key_values=cache) for at in range(0, 26, 6)]
    atol = 2e-5 if name.startswith("llama4") else 1e-9  # it rotates in float32
    torch.testing.assert_close(logits, torch.cat(parts, 1), atol=atol, rtol=0)
    torch.testing.assert_close(logits, without, atol=atol, rtol=0)


@pytest.mark.parametrize("name", BOUNDED)
def test_layers_that_bound_themselves_hold_their_window_and_are_named(name):
    model, ids = make(name), prompt(2, 30)
    windows = [None if kind == "full_attention" else 7 for kind in model.config.layer_types]
    with kvpatch.patched(model, "h2o", 10) as patch:
        model.generate(ids, attention_mask=left_pad(ids, [30, 5]), max_new_tokens=4, do_sample=False, pad_token_id=0)
        report = patch.report()
        _, cache = force(model, ids, ids[:, :4])
    assert report.to_dict()["bounds"] == windows
    kind, what = ("chunked", "chunks") if name.startswith("llama4") else ("sliding", "window")
    line = next(line for line in str(report).splitlines() if line.startswith(f"{kind} layers"))
    assert f"hold their own {what} of 7" in line
    for layer, window in enumerate(windows):
        held = cache.positions(layer).sort(-1).values
        assert held.shape[-1] <= (10 if window is None else window) + 1
        if window is not None:
            assert held[..., -7:].eq(torch.arange(27, 34)).all()


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in BOUNDED])
def test_all_other_layers_are_the_policys(name):
    model = make(name)
    with kvpatch.patched(model, "h2o", 10) as patch:
        assert patch.new_cache().settings.bounds == (None,) * model.config.num_hidden_layers
    size = "attention_chunk_size" if name.startswith("llama4") else "sliding_window"
    assert name not in ONE_WINDOW or getattr(make(name).config, size) == 7


def test_budgets_count_the_layers_that_see_all():
    certain("gemma2", "pyramidkv", 9)
    certain("gemma2", "h2o", [3, 9, 3, 5])
    certain("gpt_oss", "keyformer", 0.4, shared=True)
    model, ids = make("gemma2"), prompt(1, 40)
    with kvpatch.patched(model, "pyramidkv", 10, window=3) as patch:
        model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
        held = [(layer >= 0).sum(-1).flatten().tolist() for layer in patch.report().positions]
    assert sum(held[1]) + sum(held[3]) == 2 * (20 + 2 * 1)
    assert held[1] > held[3]


@pytest.mark.parametrize("schedule", ["prompt", "decode", "both"])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama4", "llama4_chunks", "llama4_tuned"])
def test_schedules(name, schedule):
    certain(name, "h2o", 6, schedule=schedule, steps=9)
    certain(name, "roco", 20, schedule=schedule, steps=9)  # the cache fills up first, then evicts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", THREE)
def test_half_precision(name, dtype):
    model, ids, fed = make(name, dtype=dtype), prompt(2, 25), prompt(2, 6, seed=2)
    mask = left_pad(ids, [25, 17])
    want, _ = force(make(name), ids, fed, mask)
    own, _ = force(model, ids, fed, mask)
    with kvpatch.patched(model, "h2o", 1.0):
        got, cache = force(model, ids, fed, mask)
    assert cache.layers[1].keys.dtype == dtype
    assert (got - want).abs().mean() < 1.2 * (own - want).abs().mean()
    for policy in ("h2o", "keyformer", "snapkv", "adakv", "roco"):
        with kvpatch.patched(model, policy, 0.4, **SMALL.get(policy, {})):
            assert torch.isfinite(force(model, ids, fed, mask)[0]).all()


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "olmo", "olmo2"])
def test_renumbered_in_half_precision(name):
    """OLMo's rotary tables are float32 in any model."""
    wide, model, ids, fed = make(name), make(name, dtype=torch.bfloat16), prompt(2, 20), prompt(2, 4, seed=2)
    with kvpatch.patched(wide, "window", 9, positions="renumbered"):
        want, _ = force(wide, ids, fed)
    with kvpatch.patched(model, "window", 9, positions="renumbered"):
        got, cache = force(model, ids, fed)
    assert cache.layers[0].keys.dtype == torch.bfloat16
    own = (force(model, ids, fed)[0] - force(wide, ids, fed)[0]).abs().mean()
    assert (got - want).abs().mean() < 2 * own


@pytest.mark.slow
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(
    chosen=sequences.settings_of_a_patch(),
    name=st.sampled_from((*THREE, "llama4", "llama4_chunks")),
    rows=st.integers(1, 3),
    n=st.integers(2, 30),
    deeds=sequences.DEEDS,
)
def test_any_sequence(tmp_path_factory, chosen, name, rows, n, deeds):
    _, policy, k, options = chosen
    needs = (kvpatch.get_policy(policy) if isinstance(policy, str) else policy).needs
    assume(name in ROTARY or "positions" not in options)
    assume(name in TURNED or needs.lookahead is None)
    model, path = make(name, dtype=torch.float64), tmp_path_factory.mktemp("sequences") / "cache.safetensors"
    with torch.no_grad(), kvpatch.patched(model, policy, k, **options) as patch:
        sequences.Texts(model, patch, rows, n, path).follow(deeds)


@pytest.mark.parametrize("name", [*THREE, "llama4_tuned"])
def test_a_prompt_in_chunks_and_assistance_change_nothing(name):
    model, ids = make(name), prompt(1, 23)
    for kind in ({"prefill_chunk_size": 5}, {"prompt_lookup_num_tokens": 3}):
        asked = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **kind}
        want = model.generate(ids, **asked)
        with kvpatch.patched(model, "h2o", 1.0):
            assert torch.equal(model.generate(ids, **asked), want)
        if "prompt_lookup_num_tokens" in kind:  # rolled back exactly under a budget too
            with kvpatch.patched(model, "h2o", 0.4):
                alone = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
                assert torch.equal(model.generate(ids, **asked), alone)


@pytest.mark.parametrize("name", ["opt", "gpt_bigcode"])
def test_learned_positions(name):
    """OPT counts them in the padding mask, StarCoder by columns; both run out of them."""
    model, ids = make(name), prompt(2, 16)
    mask = left_pad(ids, [16, 9])
    want = model(ids, attention_mask=mask).logits
    with kvpatch.patched(model, "h2o", 0.5):
        got = model(ids, attention_mask=mask).logits
        torch.testing.assert_close(got[mask.bool()], want[mask.bool()], atol=2e-5, rtol=0)
        with pytest.raises(kvpatch.KVPatchError, match="needs 513 positions, but this model has 512"):
            model(prompt(1, 513))


@pytest.mark.parametrize("name", ["gemma2", "exaone4", "llama4"])
def test_a_dynamic_cache_from_before_the_block(name):
    model, ids, fed = make(name), prompt(1, 20), prompt(1, 4, seed=2)
    with torch.no_grad():
        past = model(ids, use_cache=True).past_key_values
    want, _ = force(model, ids, fed)
    for policy, k in (("h2o", 1.0), ("window", 24)):
        with kvpatch.patched(model, policy, k) as patch:
            got, _ = force(model, fed[:, :1], fed[:, 1:], cache=patch.new_cache(past))
        torch.testing.assert_close(got, want[:, 1:], atol=2e-5, rtol=0)


REFUSED = {
    "renumbered, tables by layers": ("gemma3", {"positions": "renumbered"}, "its row does not declare Llama's rotary"),
    "renumbered, no rotation": ("opt", {"positions": "renumbered"}, "for opt: its positions are added to the hidden states"),
    "two-stage": ("bitnet", {"policy": "critical_snapkv"}, "in bitnet more than that stands between attention and its output"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_refused_before_anything_runs(which):
    name, options, words = REFUSED[which]
    model = make(name)
    before = snapshot(model)
    with pytest.raises(kvpatch.KVPatchError, match=words):
        kvpatch.patch(model, **{"policy": "h2o", "k": 0.5, **options})
    assert snapshot(model) == before


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3"])
def test_bidirectional_models_are_refused(name):
    model = make(name)
    model.config.use_bidirectional_attention = True
    with pytest.raises(kvpatch.KVPatchError, match="use_bidirectional_attention=True: kvpatch serves causal decoders"):
        kvpatch.patch(model, "h2o")


@pytest.mark.parametrize("by", ["argument", "configuration"])
@pytest.mark.parametrize("name", ["llama_gqa", "qwen3", "gemma3"])
def test_a_pass_that_is_told_to_read_both_ways_is_refused(name, by):
    model, ids = (make_tiny if name == "llama_gqa" else make)(name), prompt(2, 20)
    asked = {"is_causal": False} if by == "argument" else {}
    model.get_decoder().config.is_causal = by == "argument"
    with torch.no_grad():
        want = model(ids, use_cache=False, **asked).logits
        with kvpatch.patched(model, "h2o", 200):
            with pytest.raises(kvpatch.KVPatchError, match="read in both directions, and kvpatch serves causal decoders"):
                model(ids, **asked)
            got = [model(ids, use_cache=False, **asked).logits]
        with kvpatch.patched(model, "h2o", 1.0):
            got += [model(ids, **asked).logits]
    assert all(torch.allclose(one, want, atol=1e-5) for one in got)


@pytest.mark.parametrize("name", ["llama_gqa", "qwen3"])
def test_an_attention_function_of_one_s_own_is_refused(name, monkeypatch):
    def own(module, query, key, value, attention_mask, **asked):
        return sdpa_attention_forward(module, query, 2 * key, value, attention_mask, **asked)

    monkeypatch.setattr(AttentionInterface, "_global_mapping", {**AttentionInterface._global_mapping, "own": own})
    model, ids = (make_tiny if name == "llama_gqa" else make)(name), prompt(1, 12)
    model.set_attn_implementation("own")
    want, refused = model(ids, use_cache=False).logits, r"by a function of your own \('own'\), which attention under"
    with pytest.raises(kvpatch.KVPatchError, match=refused):
        kvpatch.patch(model, "h2o")
    model.set_attn_implementation("eager")
    with kvpatch.patched(model, "h2o"):
        model(ids)
        model.set_attn_implementation("own")
        with pytest.raises(kvpatch.KVPatchError, match=refused):
            model(ids)
        assert torch.equal(model(ids, use_cache=False).logits, want)
        model.set_attn_implementation("eager")
        model(ids)


@pytest.mark.parametrize("on", ["class", "module"])
@pytest.mark.parametrize(("name", "left_out"), [("llama_gqa", True), ("gpt2", True), ("qwen3", False)])
def test_a_replaced_forward_is_run_or_logged(name, left_out, on, monkeypatch, caplog):
    model, ids = (make if name == "qwen3" else make_tiny)(name), prompt(1, 12)
    attentions = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
    forward = type(attentions[0]).forward

    @functools.wraps(forward)
    def doubled(self, *args, **kwargs):
        y, *rest = forward(self, *args, **kwargs)
        return (2 * y, *rest)

    plain = model(ids).logits
    for one in [type(attentions[0])] if on == "class" else attentions:
        monkeypatch.setattr(one, "forward", doubled if on == "class" else MethodType(doubled, one))
    want = model(ids).logits
    refusals._warn_once.cache_clear()
    with kvpatch.patched(model, "h2o", 200):
        got = model(ids).logits
    torch.testing.assert_close(got, plain if left_out else want, atol=1e-5, rtol=0)
    assert ("is code of tests, which passes under a budget leave out" in caplog.text) == left_out


def test_layers_of_other_kinds_are_refused():
    model = make("qwen3")
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(kvpatch.KVPatchError, match="layers of type chunked_attention, whose state is no cache"):
        kvpatch.patch(model, "h2o")


@pytest.mark.parametrize("name", ["gemma2", "starcoder2", "persimmon", "gpt_bigcode", "seed_oss"])
def test_attention_dropout_is_refused_while_training(name):
    model = make(name).train()
    rate = {"gpt_bigcode": "attn_pdrop"}.get(name, "attention_dropout")
    setattr(model.config, rate, 0.2)
    for module in model.modules():
        if isinstance(getattr(module, rate, None), float):
            setattr(module, rate, 0.2)
    with kvpatch.patched(model, "h2o", 5, block=4), pytest.raises(kvpatch.KVPatchError, match=r"attention dropout of 0\.2"):
        model(prompt(1, 12))


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_a_module_keeps_its_attention_dropout_when_the_config_changes(name):
    """Setting model.config.attention_dropout on a loaded model does nothing; the error says what does."""
    model = make(name).train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2
    assert model.config.attention_dropout == 0.0
    words = r"attention dropout of 0\.2.*from_pretrained\(\.\.\., attention_dropout=0\.0\)"
    with kvpatch.patched(model, "h2o", 5, block=4), pytest.raises(kvpatch.KVPatchError, match=words):
        model(prompt(1, 12))


LLAMAS = ("llama4", "llama4_chunks", "llama4_tuned")


@pytest.mark.parametrize("name", ["qwen2_mixed", "gemma2", "gpt_oss", "opt", "gpt_bigcode", *LLAMAS])
def test_kvpatch_check(name):
    """The command's checks, which make masks of their own, know what the family does."""
    assert [result for result in Checks(make(name)).run() if not result.passed] == []
