"""patch.replace(): other tokens stand in place of a span, and see what is before it alone.

The oracle is the unpatched model: the new tokens come behind the old ones in its input, at the positions of the span, and a
mask of each head's own says what each query sees.
"""

import random

import pytest
import torch

import kvpatch
from kvpatch.arch.upstream import cache_of
from kvpatch.errors import KVPatchError
from kvpatch.evaluation.masked import predict_masked
from kvpatch.hooks.target import Target
from kvpatch.policies import DeviationScope, Policy, scores
from tests.cache.test_forget import read
from tests.helpers.comparing import entries, same
from tests.helpers.tiny import left_pad, make, prompt

POLICIES = ("full", "h2o", "roco", "keyformer", "tova", "snapkv", "adakv", "critical_adakv", "kvzip", "layer_defensive")
POLICIES += (
    "r_kv",
    "raas",
    "vase",
    "expected_attention",
    "cur",
    "pyramid(h2o)",
    "adaptive(roco)",
    "compactor",
    "chunk_kv",
    "leverage",
)
N, BEFORE, AFTER = 40, 2, 4


class Reading:
    """Columns of the unpatched model's input, in the order of reading, and what each sees by layer, row and head."""

    def __init__(self, layers, heads):
        self.ids, self.places, self.seen = [], [], [[] for _ in range(layers)]
        self.heads, self.column = heads, {}

    def add(self, ids_BQ, places, held):
        """Add tokens that see `held`, positions [B,H,T] by layer, and those of themselves before them."""
        first = len(self.places)
        for q, place in enumerate(places):
            for layer, rows in enumerate(self.seen):
                seen = torch.zeros(len(ids_BQ), self.heads, 200, dtype=torch.bool)
                if held is not None:
                    for b, h in torch.cartesian_prod(torch.arange(len(ids_BQ)), torch.arange(self.heads)).tolist():
                        seen[b, h, [self.column[p] for p in held[layer][b, h].tolist() if p >= 0]] = True
                seen[:, :, first : first + q + 1] = True
                rows.append(seen)
            self.ids.append(ids_BQ[:, q])
            self.places.append(place)
        self.column |= {place: first + q for q, place in enumerate(places)}

    def logits(self, model, last, group):
        """The unpatched model's logits of the last columns."""
        T = len(self.places)
        seen = [torch.stack(rows, 2)[..., :T].repeat_interleave(group, 1) for rows in self.seen]
        ids, places = torch.stack(self.ids, 1), torch.tensor(self.places).expand(len(self.ids[0]), -1)
        mask = torch.ones_like(ids)  # without it positions that begin anew are taken for packed texts
        return predict_masked(model, Target.find(model), ids, T - last + 1, seen, {"position_ids": places}, mask)


def held(cache, below=None):
    """Positions that each layer's heads hold."""
    found = [cache.positions(layer) for layer in range(len(cache.layers))]
    return found if below is None else [one.masked_fill(one >= below, -1) for one in found]


def follow(model, policy, k, span, new, reread=0, **options):
    """Logits of the tokens behind an edit, and the oracle's."""
    ids = prompt(2, N + BEFORE + AFTER)
    with torch.no_grad(), kvpatch.patched(model, policy, k, **options) as patch:
        cache = patch.new_cache()
        model(ids[:, :N], past_key_values=cache)
        oracle = Reading(len(cache.layers), cache.layers[0].positions.shape[1])
        oracle.add(ids[:, :N], range(N), None)
        for t in range(N, N + BEFORE):
            oracle.add(ids[:, t : t + 1], [t], held(cache))
            model(ids[:, t : t + 1], past_key_values=cache)
        before = held(cache)
        patch.replace(cache, span, new, reread=reread)
        cache.check_invariants()
        stop, new = span[1], torch.as_tensor(new).expand(2, -1)
        places = [*range(span[0], span[0] + new.shape[1]), *range(stop, stop + reread)]
        oracle.add(torch.cat([new, ids[:, stop : stop + reread]], 1), places, [p.masked_fill(p >= span[0], -1) for p in before])
        got, after = [], held(cache)
        for t in range(N + BEFORE, N + BEFORE + AFTER):
            oracle.add(ids[:, t : t + 1], [t], held(cache))
            got.append(model(ids[:, t : t + 1], past_key_values=cache).logits)
            cache.check_invariants()
        group = cache.steps.calls[0].group
    expected = oracle.logits(model, AFTER, group)
    torch.testing.assert_close(torch.cat(got, 1), expected[:, -AFTER:], atol=2e-4, rtol=1e-4)
    return before, after


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["llama_gqa", "gpt2", "gptj"])
def test_what_follows_is_as_the_masked_model_reads_it(name, policy):
    span, new = (11, 26), prompt(2, 9, seed=7)
    before, after = follow(make(name), policy, 1.0 if policy == "full" else 0.6, span, new)
    for was, left in zip(before, after, strict=True):
        for b, h in torch.cartesian_prod(*map(torch.arange, was.shape[:2])).tolist():
            old, now = ({p for p in one[b, h].tolist() if p >= 0} for one in (was, left))
            assert {p for p in old if p >= 26} == {p for p in now if p >= 26}, "what is behind the edit stays"
            assert now - old <= set(range(11, 20)) and not now & set(range(20, 26))
            outside = old - set(range(11, 26))
            assert len(now) >= min(len(outside) + 9, len(old)), "what was forgotten is room for what is new"


@pytest.mark.parametrize(("policy", "k"), [("h2o", 0.95), ("snapkv", 0.95), ("h2o", 1.0), ("full", 1.0)])
@pytest.mark.parametrize("reread", [1, 7])
def test_tokens_behind_are_read_again(policy, k, reread):
    _, after = follow(make("llama_gqa"), policy, k, (11, 26), prompt(1, 9, seed=7)[0], reread)
    assert (after[0] == 26).any(-1).all()


def test_random_edits():
    draw, model = random.Random(0), make("llama_gqa")
    for _ in range(12):
        start = draw.randrange(0, 36)
        stop = draw.randrange(start + 1, 43)
        new = prompt(2, draw.randrange(1, stop - start + 1), seed=start)
        policy, k = draw.choice([("h2o", 0.3), ("h2o", 0.99), ("roco", 20), ("snapkv", 0.5), ("adakv", 0.4), ("tova", 12)])
        follow(model, policy, k, (start, stop), new, draw.randrange(0, 43 - stop))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("policy", "k"),
    [
        ("full", 1.0),
        ("h2o", 12),
        ("adakv", 0.4),
        ("snapkv", 0.4),
        ("h2o", kvpatch.Share(0.4)),
        ("h2o", kvpatch.Mass(0.8)),
        ("tova", 12),
    ],
)
def test_what_stays_is_bit_for_bit_what_it_was(policy, k, bits):
    model, options = make("llama_gqa"), {"recent": 4} if isinstance(k, kvpatch.Mass) else {}
    with torch.no_grad(), kvpatch.patched(model, policy, k, bits=bits, **options) as patch:
        cache = read(model, patch)
        before, copy = [entries(cache, layer) for layer in range(2)], cache.clone()
        patch.replace(cache, (12, 20), prompt(1, 5, seed=3))
        cache.check_invariants()
        for layer in range(2):
            behind, now = {at: one for at, one in before[layer].items() if at[2] >= 20}, entries(cache, layer)
            assert same({at: one for at, one in now.items() if at[2] >= 20}, behind), "entries and scores"
            assert same(entries(copy, layer), before[layer]), "a clone keeps its own"
            assert any(12 <= at[2] < 17 for at in now)
        for t in range(30):
            model(prompt(2, 1, seed=t), past_key_values=cache)
            cache.check_invariants()


@pytest.mark.parametrize("name", ["mpt", "bloom", "falcon", "gpt2", "gptj", "mistral_sliding"])
def test_positions_of_the_span_are_those_of_the_new_tokens(name):
    """The unpatched model's cache of the old text, with entries of the new tokens behind the same beginning put into it."""
    model, ids, new = make(name), prompt(1, 12), prompt(1, 6, seed=7)
    spliced = cache_of(model(ids[:, :-1], use_cache=True))
    beside = cache_of(model(torch.cat([ids[:, :4], new], 1), use_cache=True))
    for layer, other in zip(spliced.layers, beside.layers, strict=True):
        for name in ("keys", "values"):
            getattr(layer, name)[:, :, 4:10] = getattr(other, name)[:, :, 4:10]
    argument = kvpatch.arch.upstream.cache_argument(type(model).forward)
    expected = model(ids[:, -1:], **{argument: spliced}).logits
    with torch.no_grad(), kvpatch.patched(model, "h2o", 1.0) as patch:
        cache = patch.new_cache()
        model(ids[:, :-1], past_key_values=cache)
        patch.replace(cache, (4, 10), new)
        got = model(ids[:, -1:], past_key_values=cache).logits
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


def test_renumbered_positions_close_up():
    model, ids, new, found = make("llama_gqa"), prompt(1, 20), prompt(1, 6, seed=7), []
    for tail in (0, 5):  # tokens of the span beyond the new ones
        with torch.no_grad(), kvpatch.patched(model, "h2o", 1.0, positions="renumbered") as patch:
            cache = patch.new_cache()
            model(torch.cat([ids[:, :10], prompt(1, tail, seed=5), ids[:, 10:]], 1), past_key_values=cache)
            patch.replace(cache, (4, 10 + tail), new)
            cache.check_invariants()
            found.append({at: one for at, one in entries(cache, 1).items() if at[2] < 10})
            assert cache.held(1).eq(20).all()
            model(prompt(1, 1), past_key_values=cache)
            cache.check_invariants()
    assert same(*found) and len(found[0]) == 20, "of two heads"


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "adakv"])
def test_rows_of_a_padded_batch_are_as_alone(policy):
    model, lengths = make("llama_gqa"), [24, 40]
    options = {"window": 4} if policy != "h2o" else {}
    ids, mask, new = prompt(2, 40), left_pad(prompt(2, 40), lengths), prompt(2, 5, seed=3)
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), kvpatch.patched(model, policy, 14, **options) as patch:
        both = patch.new_cache()
        model(ids, attention_mask=mask, position_ids=places, past_key_values=both)
        patch.replace(both, (8, 16), new)
        both.check_invariants()
        for row in range(2):
            alone, going = patch.new_cache(), both.clone()
            model(ids[row : row + 1, 40 - lengths[row] :], past_key_values=alone)
            patch.replace(alone, (8, 16), new[row])
            for layer in range(2):
                assert {at[1:] for at in entries(both, layer) if at[0] == row} == {at[1:] for at in entries(alone, layer)}
            for t in range(6):
                token, at = prompt(1, 1, seed=t), torch.tensor(lengths)[:, None] + t
                full = torch.cat([mask, torch.ones(2, t + 1, dtype=torch.long)], 1)
                logits = model(token.expand(2, 1), attention_mask=full, past_key_values=going, position_ids=at).logits[row]
                own = model(token, past_key_values=alone, position_ids=at[row : row + 1]).logits[0]
                torch.testing.assert_close(logits, own, atol=1e-4, rtol=0)


def test_generate_goes_on_from_the_edited_text():
    model, ids, new = make("llama_gqa"), prompt(1, 40), prompt(1, 6, seed=7)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.6) as patch:
        cache = patch.new_cache()
        model(ids, past_key_values=cache)
        patch.replace(cache, (5, 30), new)
        text = torch.cat([ids[:, :5], new, ids[:, 11:], prompt(1, 3, seed=9)], 1)
        with pytest.raises(KVPatchError, match="input_ids differ from what the cache has read at column 5"):
            model.generate(torch.cat([ids, text[:, 40:]], 1), past_key_values=cache.clone(), max_new_tokens=2)
        assert model.generate(text, past_key_values=cache, max_new_tokens=6, do_sample=False).shape == (1, 49)
        cache.check_invariants()


def test_what_was_forgotten_can_be_replaced_later():
    model, ids, new = make("llama_gqa"), prompt(1, 40), prompt(1, 6, seed=7)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 1.0) as patch:
        one, two = patch.new_cache(), patch.new_cache()
        for cache in (one, two):
            model(ids, past_key_values=cache)
        two.forget([(3, 20)])
        patch.replace(one, (3, 20), new)
        patch.replace(two, (3, 9), new)
        assert all(same(entries(one, layer), entries(two, layer)) for layer in range(2))


@pytest.mark.parametrize("recent", [8, 11])
def test_the_newest_of_the_new_tokens_are_protected_as_recent_ones(recent):
    """Those behind the edit are, too; in a head full of both the text's first token, which is no sink, goes."""
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, "h2o", 16, recent=recent) as patch:
        cache = read(model, patch)
        assert (cache.positions(0) == 0).any()
        patch.replace(cache, (10, 38), prompt(2, 20, seed=3))
        for head in cache.positions(0).flatten(0, 1).tolist():
            assert {*range(30 - recent, 30), *range(38, 43)} <= set(head) and len({p for p in head if p >= 0}) == 16


def test_the_last_queries_stay_those_of_the_newest_tokens():
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, "r_kv", 20, window=4, every=4) as patch:
        cache = read(model, patch)
        patch.replace(cache, (10, 25), prompt(2, 9, seed=3))
        assert cache.layers[0].need_notes["recent"].positions_BW.sort(-1).values.tolist() == [[39, 40, 41, 42]] * 2


def test_sums_that_layers_share_begin_anew():
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, "keyformer", 20, shared=True) as patch:
        cache = read(model, patch)
        other = cache.clone()
        other.shared_score[:, :, 11:26] = 0
        for one in (cache, other):
            patch.replace(one, (10, 25), prompt(2, 15, seed=3))
        assert cache.shared_score[:, :, 11:26].gt(0).any()
        assert torch.equal(cache.shared_score, other.shared_score)


def test_a_prefix_that_others_use_keeps_its_tokens():
    model, ids = make("llama_gqa"), prompt(1, 30)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 12) as patch:
        prefix = patch.prefix(ids)
        first, second = prefix.copy(), prefix.copy()
        text, before = second.ids.ids_BT.clone(), [entries(second, layer) for layer in range(2)]
        patch.replace(first, (3, 20), prompt(1, 9, seed=3))
        for other in (second, prefix.copy()):
            assert all(same(entries(other, layer), before[layer]) for layer in range(2)) and other.ids.ids_BT.equal(text)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_an_edit_in_any_mode_of_gradients(mode):
    model = make("llama_gqa")
    with kvpatch.patched(model, "roco", 12, strict=True) as patch:
        with mode():
            cache = read(model, patch)
            patch.replace(cache, (3, 20), prompt(1, 9, seed=3))
        assert not any(one.requires_grad for one in cache.layers[0].kv.numbers(2))
        with torch.no_grad():
            model(prompt(2, 9, seed=4), past_key_values=cache)
            model(prompt(2, 1, seed=4), past_key_values=cache)
            patch.replace(cache, (3, 12), prompt(1, 9, seed=5))
        cache.check_invariants()


def test_after_the_block_it_is_refused_and_the_cache_stays():
    model = make("llama_gqa")
    with torch.no_grad():
        with kvpatch.patched(model, "h2o", 12) as patch:
            cache = read(model, patch)
        before = [entries(cache, layer) for layer in range(2)]
        with pytest.raises(KVPatchError, match=r"This patch was removed.* replace\(\) inside its block"):
            patch.replace(cache, (3, 20), prompt(2, 9, seed=3))
        assert all(same(entries(cache, layer), before[layer]) for layer in range(2))
        with kvpatch.patched(model, "h2o", 12) as patch:
            model(prompt(2, 1), past_key_values=cache)


def test_an_interrupted_edit_leaves_a_cache_that_says_so():
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, "h2o", 12) as patch:
        cache = read(model, patch)

        def interrupt(*_):
            raise KeyboardInterrupt

        handle = model.model.layers[1].mlp.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            patch.replace(cache, (3, 20), prompt(1, 9, seed=3))
        handle.remove()
        cache.refuse_unfinished()
        cache.check_invariants()
        handle = model.model.layers[0].mlp.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            patch.replace(cache, (3, 20), prompt(1, 9, seed=3))
        handle.remove()
        with pytest.raises(KVPatchError, match="An earlier edit of this cache did not finish"):
            model(prompt(2, 1), past_key_values=cache)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("positions", ["original", "renumbered"])
def test_means_are_over_the_rows_that_have_seen_a_token(positions, every, tmp_path):
    """Those behind an edit have not seen its tokens, and its rows have seen those in front a second time."""
    model, rows, inserts, asked = make("llama_gqa"), {p: 20 - p for p in range(20)}, positions == "renumbered", 0

    class Noted(scores.Mean):
        def value(self, context):
            nonlocal asked
            for at, count in zip(context.positions_BHT.flatten().tolist(), context.rows_seen.flatten().tolist(), strict=True):
                asked += at >= 0
                assert at < 0 or count == rows[at], (at, count, rows[at])
            return super().value(context)

    def read(n):
        """Read n tokens at the end."""
        for p in rows:
            rows[p] += n
        rows.update({len(rows) + q: n - q for q in range(n)})
        model(prompt(1, n), past_key_values=cache)

    def replace(start, stop, n, reread=0):
        opened, behind = max(n - (stop - start), 0), stop + reread
        was = {p + opened * (p >= behind): count for p, count in rows.items() if not start <= p < behind}
        places = [*range(start, start + n), *range(stop + opened, behind + opened)]
        now = {p: count + len(places) * (p < start) for p, count in was.items()}
        now |= {p: len(places) - q for q, p in enumerate(places)}
        rows.clear()
        rows.update({p: now.get(p, 0) for p in range(max(now) + 1)})  # a place may be empty
        patch.replace(cache, (start, stop), prompt(1, n, seed=3), reread=reread)

    policy = Policy("mine", Noted(), DeviationScope(recent=1, protected=0.3), every=every)
    with torch.no_grad(), kvpatch.patched(model, policy, 14, positions=positions) as patch:
        cache = patch.new_cache()
        model(prompt(1, 20), past_key_values=cache)
        read(1)
        replace(4, 9, 8 if inserts else 3)
        read(1)
        replace(2, 5, 2, reread=2)
        for _ in range(4):
            read(1)
        patch.save_cache(cache, tmp_path / "cache")
        cache = patch.load_cache(tmp_path / "cache")
        read(7)
        cache = kvpatch.EvictingCache.concatenate([cache.select_rows(0)])
        for _ in range(5):
            read(1)
    assert asked > 200


def test_a_cache_is_saved_joined_and_copied_after_an_edit(tmp_path):
    model = make("llama_gqa")
    for policy in ("h2o", "adakv", "keyformer"):
        with torch.no_grad(), kvpatch.patched(model, policy, 12) as patch:
            cache = read(model, patch)
            patch.replace(cache, (2, 30), prompt(2, 6, seed=3))
            patch.save_cache(cache, tmp_path / "cache.safetensors")
            others = [patch.load_cache(tmp_path / "cache.safetensors"), cache.clone()]
            others.append(kvpatch.EvictingCache.concatenate([cache.select_rows(0), cache.select_rows(1)]))
            for other in others:
                assert all(same(entries(other, layer), entries(cache, layer)) for layer in range(2))
                model(prompt(2, 1), past_key_values=other)
                other.check_invariants()
            model(prompt(2, 9, seed=4), past_key_values=cache)
            cache.check_invariants()


def test_a_row_that_leaves_a_joined_batch():
    """It is edited as the text alone is, beside which it was read."""
    model, more = make("llama_gqa"), torch.tensor([[7], [8]])
    with kvpatch.patched(model, "h2o", k=20) as patch, torch.no_grad():
        caches = [patch.new_cache() for _ in range(2)]
        for cache, n in zip(caches, (40, 30), strict=True):
            model(prompt(1, n), past_key_values=cache)
        joined = kvpatch.EvictingCache.concatenate(caches)
        model(more, past_key_values=joined)
        for index, cache in enumerate(caches):
            model(more[index : index + 1], past_key_values=cache)
            row = joined.select_rows(index)
            logits = []
            for one in (cache, row):
                patch.replace(one, (5, 12), [3, 4, 5])
                logits.append(model(torch.tensor([[9, 10, 11]]), past_key_values=one).logits)
                one.check_invariants()
            torch.testing.assert_close(*logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("policy", ["pyramidkv", "critical(pyramidkv)"])
def test_a_later_turn_pools_over_neighbours_in_the_text(policy):
    """Columns of rows that keep different tokens have gaps, and are put in text order; those of a row alone must be as well."""
    texts = prompt(2, 6, seed=1), prompt(2, 1, seed=2), prompt(2, 2, seed=3)
    model = make("gpt2", dtype=torch.float64)
    with torch.no_grad(), kvpatch.patched(model, policy, 0.85, window=1) as patch:

        def held(rows):
            cache = patch.new_cache()
            model(texts[0][rows], past_key_values=cache)
            patch.replace(cache, (0, 3), texts[1][rows], reread=1)
            model(texts[2][rows], past_key_values=cache)
            return [[sorted(p for p in head if p >= 0) for head in row] for row in cache.positions(1).tolist()]

        assert held([0, 1]) == [*held([0]), *held([1])]
