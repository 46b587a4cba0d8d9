"""Several prompts in one text: a chat's later turns, and one context for many questions."""

import functools

import pytest
import torch

import kvpatch
from tests.helpers.comparing import SMALL, UNPLACED, combined, draw, sorted_positions
from tests.helpers.marks import slow_but
from tests.helpers.tiny import force, left_pad, make, prompt
from tests.oracle import reference

TURNS = [(30, 5), (17, 4), (9, 3)]
POLICIES = ["h2o", "roco", "keyformer", "tova", "streaming_llm", "snapkv", "key_norm", "random"]


def feed_turns(model, cache, turns):
    """Each turn's prompt in one forward, its continuation token by token -> logits of every token [B,N,V]."""
    logits = []
    with torch.no_grad():
        for ids, fed in turns:
            logits.append(model(ids, past_key_values=cache, use_cache=True).logits)
            logits += [model(fed[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in range(fed.shape[1])]
    return torch.cat(logits, 1)


def compare(name, policy, k, *, wrap=(), turns="all", rows=2, sizes=TURNS, **options):
    """Library and oracle over several turns, on weights for which every decision is clear."""
    given = {"turns": turns} if turns != "all" else {}
    for weights in range(8):
        model = make(name, dtype=torch.float64, seed=weights)
        text = [
            (prompt(rows, n, seed=10 * weights + 2 * i), prompt(rows, m, seed=10 * weights + 2 * i + 1))
            for i, (n, m) in enumerate(sizes)
        ]
        if policy in UNPLACED:
            order = torch.rand(rows, 96, generator=torch.Generator().manual_seed(weights)).argsort(1) + 1
            pieces = order[:, : sum(map(sum, sizes))].split([size for turn in sizes for size in turn], 1)
            text = list(zip(pieces[::2], pieces[1::2], strict=True))
        with kvpatch.patched(model, combined(policy, wrap), k, **given, **options) as patch:
            cache = patch.new_cache()
            logits = feed_turns(model, cache, text)
            held = [cache.positions(layer).tolist() for layer in range(2)]
        wanted = [
            reference.run_turns(
                model, [(ids[row].tolist(), fed[row].tolist()) for ids, fed in text], policy=policy, k=k, wrap=wrap,
                turns=turns, draw=functools.partial(draw, 0), **options,
            )
            for row in range(rows)
        ]  # fmt: skip
        if min(want.margin for want in wanted) < 1e-6:
            continue
        for row, want in enumerate(wanted):
            assert sorted_positions([layer[row] for layer in held]) == want.kept[-1], (weights, row)
            torch.testing.assert_close(logits[row], want.logits, atol=1e-5, rtol=0)
        return
    raise AssertionError("every draw was too close to call")


@pytest.mark.parametrize("policy", slow_but(POLICIES[:2], POLICIES))
def test_a_later_turn_is_compressed_too(policy):
    for name in ("llama_gqa", "mistral_sliding"):
        compare(name, policy, 0.4, **SMALL.get(policy, {}))
        compare(name, policy, 13, **SMALL.get(policy, {}))


@pytest.mark.parametrize("turns", ["all", "each", "first"])
@pytest.mark.parametrize("policy", POLICIES)
def test_schedule_prompt_counts_all_each_or_the_first(policy, turns):
    compare("llama_gqa", policy, 0.4, turns=turns, schedule="prompt", **SMALL.get(policy, {}))


@pytest.mark.parametrize("turns", ["all", "each", "first"])
@pytest.mark.parametrize("wrap", [("adaptive",), ("critical",), ("adaptive", "critical"), ("pyramid",)], ids="+".join)
def test_turns_of_combinations(wrap, turns):
    for policy in ("h2o", "snapkv"):
        compare("llama_gqa", policy, 0.4, wrap=wrap, turns=turns, schedule="prompt", **SMALL.get(policy, {}))
    if turns == "all":
        compare("llama_gqa", "h2o", 0.4, wrap=wrap)


@pytest.mark.parametrize("turns", ["all", "each", "first"])
@pytest.mark.parametrize("policy", ["h2o", "snapkv", "adakv", "layer_defensive"])
def test_turns_with_quotas(policy, turns):
    """Spans of the first prompt have shares of each later budget."""
    quota = [*[0] * 8, -1, *[1] * 15, *[2] * 6]
    compare("llama_gqa", policy, 0.4, turns=turns, schedule="prompt", quota=quota, **SMALL.get(policy, {}))
    compare("llama_gqa", policy, 14, turns=turns, schedule="prompt", quota=quota, **SMALL.get(policy, {}))
    if policy == "h2o" and turns == "all":
        compare("llama_gqa", policy, 14, quota=quota)
        compare("llama_gqa", policy, 14, quota=quota, block=7, wrap=("adaptive",))


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "critical_adakv"])
def test_each_question_starts_from_the_same_context(policy):
    """Prefill once, clone per question: what one question does is never seen by another, nor by the context."""
    model, context = make("llama_gqa"), prompt(1, 40)
    options = SMALL.get(policy, {})
    questions = [prompt(1, 6, seed=5), prompt(1, 9, seed=6)]
    with torch.no_grad(), kvpatch.patched(model, policy, 0.3, **options) as patch:
        cache = patch.new_cache()
        model(context, past_key_values=cache)
        before = [cache.positions(layer) for layer in range(2)]
        answers = []
        for question in (*questions, *questions):
            past = cache.clone()
            ids = torch.cat([context, question], 1)
            answers.append(model.generate(ids, past_key_values=past, max_new_tokens=5, do_sample=False, pad_token_id=0))
            alone = patch.new_cache()
            model(context, past_key_values=alone)
            again = model.generate(ids, past_key_values=alone, max_new_tokens=5, do_sample=False, pad_token_id=0)
            assert torch.equal(answers[-1], again)
        assert torch.equal(answers[0], answers[2])
        assert torch.equal(answers[1], answers[3])
        for layer in range(2):
            assert torch.equal(before[layer], cache.positions(layer))


def test_turns_first_leaves_the_question_whole():
    """CriticalKV's harder scenario: the context is compressed before the question is known, and the question is not."""
    model, context, question = make("llama_gqa"), prompt(2, 40), prompt(2, 12, seed=3)
    with torch.no_grad(), kvpatch.patched(model, "adakv", 0.3, turns="first", window=4) as patch:
        cache = patch.new_cache()
        model(context, past_key_values=cache)
        kept = [cache.positions(layer) for layer in range(2)]
        model(question, past_key_values=cache)
        for layer in range(2):
            held = [[set(head) - {-1} for head in row] for row in cache.positions(layer).tolist()]
            old = [[set(head) - {-1} for head in row] for row in kept[layer].tolist()]
            assert held == [[head | set(range(40, 52)) for head in row] for row in old]


@pytest.mark.parametrize("policy", ["h2o", "adakv", "critical_snapkv", "dropkv"])
@pytest.mark.parametrize("short", [8, 11])
def test_a_padded_batch_has_turns_too(policy, short):
    """The second prompt is padded too, between what its row holds and what it brings; or it is not, and has no mask."""
    model, ids, fed, more = make("llama_gqa"), prompt(2, 30), prompt(2, 3, seed=7), prompt(2, 11, seed=4)
    with torch.no_grad(), kvpatch.patched(model, policy, 0.4, **SMALL.get(policy, {})):
        mask, second = left_pad(ids, [30, 21]), left_pad(more, [11, short])
        _, cache = force(model, ids, fed, mask)
        mask = torch.cat([mask, torch.ones(2, 3, dtype=mask.dtype), second], 1)
        places = (mask.cumsum(1)[:, -11:] - 1).clamp_min(0)
        masked = {"attention_mask": mask} if short < 11 else {}
        out = model(more, **masked, past_key_values=cache, position_ids=places).logits
        together = cache.held(1)
        for row, (n, m) in enumerate(((30, 11), (21, short))):
            one = slice(row, row + 1)
            _, alone = force(model, ids[one, 30 - n :], fed[one])
            own = model(more[one, 11 - m :], past_key_values=alone).logits
            torch.testing.assert_close(out[one, 11 - m :], own, atol=3e-5, rtol=0)
            assert torch.equal(alone.held(1)[0], together[row])
            kept = [sorted_positions([c.positions(1)[r].tolist()]) for c, r in ((alone, 0), (cache, row))]
            assert kept[0] == kept[1]


FOUND = {
    "a first block beside what was generated": {
        "name": "llama_mqa", "policy": "key_attention", "k": 39, "wrap": ("critical",), "turns": "first", "block": 7,
        "positions": "renumbered", "schedule": "prompt", "sizes": [(15, 4), (7, 0), (24, 6)],
    },
    "what each turn keeps, renumbered": {
        "name": "llama", "policy": "scissorhands", "k": 3, "turns": "each", "block": 16, "positions": "renumbered",
        "schedule": "prompt", "recent": 0.46, "sizes": [(9, 3), (23, 0)],
    },
    "sinks that a later turn brings": {
        "name": "gptj", "policy": "critical_adakv", "k": 0.66, "turns": "each", "block": 3, "sinks": 5, "window": 8,
        "kernel": 3, "sizes": [(3, 0), (12, 0), (22, 1)],
    },
    "a choice where a sink that has gone leaves the last queries one place": {
        "name": "llama_gqa", "policy": "vase", "k": 0.3, "rows": 1, "window": 3, "kernel": 3, "every": 1, "sinks": 2,
        "schedule": "both", "sizes": [(4, 0), (7, 0)],
    },
    "the same, by attention and redundancy": {
        "name": "llama_gqa", "policy": "r_kv", "k": 0.3, "rows": 1, "window": 3, "kernel": 3, "every": 1, "sinks": 2,
        "schedule": "both", "sizes": [(4, 2), (7, 2)],
    },
}  # fmt: skip


@pytest.mark.parametrize("what", FOUND)
def test_found_by_random_runs(what):
    compare(**FOUND[what])


def test_a_later_turn_may_protect_more_than_the_budget_where_it_evicts_nothing():
    model, more = make("llama"), prompt(1, 20, seed=2)
    marked = more[0, :9].tolist()
    other = torch.tensor([[token for token in range(90) if token not in marked][:12]])
    with torch.no_grad(), kvpatch.patched(model, "h2o", 4, schedule="prompt", turns="first", protect=marked) as patch:
        cache = patch.new_cache()
        model(other, past_key_values=cache)
        model(more, past_key_values=cache)
    assert cache.held(0).unique().tolist() == [24]


@pytest.mark.parametrize(
    ("policy", "k"), [("h2o", 5), ("raas", 5), ("tova", [[5, 3], [2, 7]]), ("h2o", kvpatch.Mass(0.5, ceiling=5))]
)
@pytest.mark.parametrize("pads", [(0, 0), (0, 6)])
def test_a_later_prompt_gives_generated_tokens_no_more_room(policy, k, pads):
    """The bug: schedule "decode" counted evicted tokens as kept, and a head held as many more of the next answer."""
    model, ids = make("llama_gqa"), prompt(2, 20)
    with torch.no_grad(), kvpatch.patched(model, policy, k, schedule="decode") as patch:
        cache = force(model, ids, prompt(2, 40, seed=2), left_pad(ids, [20 - pad for pad in pads]), patch.new_cache())[1]
        model(prompt(2, 9, seed=3), past_key_values=cache)
        before = [cache.held(layer) for layer in range(2)]
        force(model, prompt(2, 1, seed=4), prompt(2, 40, seed=5), cache=cache)  # tokens, one by one
    budgets = torch.tensor(k if isinstance(k, list) else [[5, 5]] * 2)
    for layer in range(2):
        assert (cache.held(layer) <= before[layer] + budgets[layer]).all()


def test_a_later_prompt_counts_no_score_that_an_earlier_answer_has_lost():
    """The bug: under schedule "decode" a share of the scores' sum was of tokens, too, that an earlier answer had evicted."""
    model, ids = make("llama_gqa", dtype=torch.float64), prompt(1, 20)
    with torch.no_grad(), kvpatch.patched(model, "key_attention", kvpatch.Mass(0.6), schedule="decode") as patch:
        cache = force(model, ids, prompt(1, 40, seed=2), cache=patch.new_cache())[1]
        assert all((layer.lost_BH1 > 0).all() for layer in cache.layers)
        model(prompt(1, 9, seed=3), past_key_values=cache)
        assert not any(layer.lost_BH1.any() for layer in cache.layers)
        cache.check_invariants()


def test_rows_move_in_the_middle_of_a_prompt():
    """The bug: where each row's turn began did not move with the rows, and the prompt's end failed or read another row's."""
    model, ids = make("llama_gqa"), prompt(2, 30)
    with kvpatch.patched(model, "snapkv", 0.5, window=4, turns="each") as patch, torch.no_grad():
        alone, both = patch.new_cache(), patch.new_cache()
        for cache, rows in ((alone, ids[1:]), (both, ids)):
            cache.plans.prompt_len = 30
            model(rows[:, :20], past_key_values=cache)
        both.batch_select_indices(torch.tensor([1]))
        want, got = (model(ids[1:, 20:], past_key_values=cache).logits for cache in (alone, both))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert both.positions(0).sort(-1).values.equal(alone.positions(0).sort(-1).values)
