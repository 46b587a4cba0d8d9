"""Law 5: a row of a batch gives what it gives alone, whatever happens beside it; rows and heads may be permuted."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvpatch
from tests.helpers import sequences
from tests.helpers.comparing import (
    CALIBRATED,
    CONTENT,
    DECODING,
    EVICTING,
    SMALL,
    SMALL_STEPS,
    WINDOWED,
    calibrated,
    distinct,
)
from tests.helpers.joined import Loop, scenario
from tests.helpers.marks import slow_but
from tests.helpers.running import RAGGED, kept, run, uneven
from tests.helpers.sequences import settings_of_a_patch
from tests.helpers.tiny import FIVE, force, left_pad, make, prompt


@pytest.mark.parametrize("policy", [*(name for name in EVICTING if name not in RAGGED), *RAGGED, *CALIBRATED])
@pytest.mark.parametrize("name", FIVE)
def test_a_padded_row_gives_what_it_gives_alone_and_rows_permute(name, policy):
    model, lengths = make(name), [36, 23, 30]
    ids, fed = distinct(3, 36, 8) if policy in CONTENT else (prompt(3, 36), prompt(3, 8, seed=2))
    options, ragged = {"window": 5} if policy in WINDOWED and policy not in RAGGED else {}, policy in RAGGED
    if policy in CALIBRATED:
        own = calibrated(policy, name, torch.float32)
        if own is None:
            pytest.skip(f"{name} has no rotations")
        options, ragged = SMALL.get(policy, {}) | SMALL_STEPS.get(policy, {}) | own, policy in ("duo", "learned")
    policy = RAGGED.get(policy, policy)
    logits, cache = run(model, ids, fed, policy, 0.4, left_pad(ids, lengths), **options)
    together = kept(uneven(cache) if ragged else cache)
    for row, n in enumerate(lengths):
        alone, one = run(model, ids[row : row + 1, 36 - n :], fed[row : row + 1], policy, 0.4, **options)
        torch.testing.assert_close(logits[row : row + 1], alone, atol=3e-5, rtol=0)
        assert [layer[row] for layer in together] == [layer[0] for layer in kept(one)]
    order = torch.tensor([2, 0, 1])
    turned, cache = run(
        model, ids[order], fed[order], policy, 0.4, left_pad(ids, [lengths[i] for i in order.tolist()]), **options
    )
    torch.testing.assert_close(logits[order], turned, atol=3e-5, rtol=0)
    assert [[layer[i] for i in order.tolist()] for layer in together] == kept(cache)


@pytest.mark.parametrize("options", [{}, {"every": 3}, {"schedule": "prompt"}], ids=str)
@pytest.mark.parametrize("policy", ["h2o", "adaptive(h2o)"])
def test_a_protected_last_token_protects_no_token_that_is_generated(policy, options):
    model, ids, fed = make("llama_gqa"), prompt(2, 24) % 90 + 1, prompt(2, 14, seed=2) % 90 + 1
    ids[:, -1] = 95  # rows and heads keep different numbers of tokens: slots are empty where the first tokens go
    options = {**options, "protect": [95]}
    logits, cache = run(model, ids, fed, policy, 0.5, left_pad(ids, [24, 10]), **options)
    for layer in cache.layers:
        marked = layer.state["protect"] & (layer.positions >= 0)
        assert set(layer.positions[0][marked[0]].tolist()) == {23} and set(layer.positions[1][marked[1]].tolist()) == {9}
    alone, _ = run(model, ids[1:, 14:], fed[1:], policy, 0.5, **options)
    torch.testing.assert_close(logits[1:], alone, atol=3e-5, rtol=0)


def test_permuting_kv_heads_permutes_what_they_keep():
    model, ids, fed = make("llama_gqa"), prompt(1, 36), prompt(1, 8, seed=2)
    logits, cache = run(model, ids, fed, "roco", 0.4)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            for proj, heads in ((attention.q_proj, 4), (attention.k_proj, 2), (attention.v_proj, 2)):
                weight = proj.weight.view(2, heads // 2 * 8, 32).flip(0).reshape(heads * 8, 32)
                proj.weight.copy_(weight)
            attention.o_proj.weight.copy_(attention.o_proj.weight.view(32, 2, 16).flip(1).reshape(32, 32))
    turned, other = run(model, ids, fed, "roco", 0.4)
    torch.testing.assert_close(logits, turned, atol=3e-5, rtol=0)
    assert [[row[::-1] for row in layer] for layer in kept(cache)] == kept(other)


@pytest.mark.parametrize("policy", ["h2o", "keyformer", "tova", "roco", *RAGGED])
def test_beams_carry_their_own_history(policy):
    """A beam's logits are those of its own text fed through a cache of its own."""
    n = 40 if policy in RAGGED else 30
    model, ids = make("llama_gqa"), prompt(2, n)
    mask = left_pad(ids, [n, n - 9])
    with kvpatch.patched(model, RAGGED.get(policy, policy), 0.4) as patch:
        out = model.generate(
            ids, attention_mask=mask, num_beams=4, max_new_tokens=12, do_sample=False, pad_token_id=0,
            num_return_sequences=4, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        sums = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices).sum(1)
        for row in range(8):
            text, source = out.sequences[row : row + 1, n:], slice(row // 4, row // 4 + 1)
            cache = patch.new_cache()
            cache.plans.new_tokens = 12
            logits, _ = force(model, ids[source], text[:, :-1], mask[source], cache)
            score = logits.log_softmax(-1).gather(2, text[..., None]).sum()
            torch.testing.assert_close(score, sums[row], atol=2e-4, rtol=0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("sequences") / "cache.safetensors"


@pytest.mark.slow
@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(
    chosen=settings_of_a_patch(),
    rows=st.integers(1, 3),
    n=st.integers(2, 30),
    deeds=sequences.DEEDS,
)
def test_any_sequence_of_one_cache(path, chosen, rows, n, deeds):
    name, policy, k, options = chosen
    model = make(name, dtype=torch.float64)
    with torch.no_grad(), kvpatch.patched(model, policy, k, **options) as patch:
        sequences.Texts(model, patch, rows, n, path).follow(deeds)


@pytest.mark.parametrize("policy", slow_but(("h2o", "keyformer", "tova", "adakv"), ["full", *EVICTING, *DECODING, *CALIBRATED]))
def test_joined_rows_of_every_policy_and_architecture(policy):
    """Joined, dropped and added between steps, each row gives what it gives alone; rows of one budget, and of their own."""
    options = SMALL.get(policy, {}) | SMALL_STEPS.get(policy, {})
    if policy == "keyformer":
        options["generation_length"] = 9
    for index, name in enumerate(FIVE, kvpatch.list_policies().index(policy)):
        model, own = make(name, dtype=torch.float64), calibrated(policy, name)
        if own is None:
            continue
        k = 0.4 if policy == "duo" else (0.4, 6)[index % 2]
        with torch.no_grad(), kvpatch.patched(model, policy, k, **options, **own) as patch:
            scenario(Loop(model, patch))
