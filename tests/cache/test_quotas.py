"""Quotas of spans in a cache's life: pieces, later prompts, files, copies, joined rows, edits and steps taken back."""

import pytest
import torch

import kvpatch
from kvpatch.cache.cache import EvictingCache
from kvpatch.errors import KVPatchError
from tests.helpers.tiny import force, left_pad, make, prompt

SPANS = [(2, 9), (9, 25), (25, 28)]  # of 30 columns
CODES = {1: (1, 7), 2: (2, 16), 3: (3, 3)}  # number and tokens of each


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa")


def kept(cache, layer=1, row=0):
    """The positions that each head holds."""
    return [{p for p in head if p >= 0} for head in cache.positions(layer)[row].tolist()]


def count(held, span):
    return [len(head & set(range(*span))) for head in held]


def spans_of(cache, layer=1, row=0):
    """The positions that heads hold of each span, by what the state says."""
    slots = cache.layers[layer]
    found = {}
    for number, tokens in CODES.values():
        marked = (slots.state["span"][row] == (number << 32) + tokens) & (slots.positions[row] >= 0)
        found[number] = [set(p[m].tolist()) for p, m in zip(slots.positions[row], marked, strict=True)]
    return found


@pytest.mark.parametrize("policy", ["h2o", "roco", "tova", "window", "snapkv", "adakv", "key_diff"])
def test_each_span_keeps_its_share_at_every_step(model, policy):
    """Of 12 tokens floor(12 * 7 / 30) = 2, floor(12 * 16 / 30) = 6 and floor(12 * 3 / 30) = 1."""
    given = {"window": 2, "kernel": 1} if policy in ("snapkv", "adakv") else {"recent": 2}
    given |= {"protected": 1} if policy == "roco" else {}
    ids, fed = prompt(1, 30, seed=4), prompt(1, 12, seed=5)
    shares, needed = (2, 6, 1), False
    for quota in (None, SPANS):
        with torch.no_grad(), kvpatch.patched(model, policy, 12, quota=quota, **given) as patch:
            cache = patch.new_cache()
            model(ids, past_key_values=cache)
            for token in fed[0]:
                for span, share in zip(SPANS, shares, strict=True):
                    least = min(n for layer in range(2) for n in count(kept(cache, layer), span))
                    assert quota is None or least >= share
                    needed |= least < share
                model(token.view(1, 1), past_key_values=cache)
    assert needed, "every span keeps its share without a quota"


def test_a_generated_token_has_no_span(model):
    """Also where it gets the slot of a token that had one."""
    with torch.no_grad(), kvpatch.patched(model, "window", 12, quota=[SPANS[1]]):
        _, cache = force(model, prompt(1, 30), prompt(1, 20, seed=2))
    assert any(p >= 30 for head in kept(cache) for p in head)
    for layer in range(2):
        state, positions = cache.layers[layer].state["span"], cache.layers[layer].positions
        assert positions[state > 0].unique().tolist() == list(range(19, 25))  # 12 * 16 / 30


def test_pieces_of_a_prompt(model):
    """generate() announces the prompt's length: a span that two pieces share is one."""
    ids, mask = prompt(2, 30), left_pad(prompt(2, 30), [30, 18])
    held = []
    for chunk in (None, 7):
        with torch.no_grad(), kvpatch.patched(model, "h2o", 0.4, quota=SPANS) as patch:
            cache = patch.new_cache()
            model.generate(
                ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False, pad_token_id=0,
                prefill_chunk_size=chunk,
            )  # fmt: skip
            held.append([kept(cache, layer, row) for layer in range(2) for row in range(2)])
    assert held[0] == held[1]


def test_a_later_prompt_counts_anew(model):
    """Under k=12 spans share the budget with a second prompt as long as the first: floor(12 * 16 / 60) = 3."""
    with torch.no_grad(), kvpatch.patched(model, "h2o", 12, quota=SPANS, recent=1, schedule="prompt") as patch:
        cache = patch.new_cache()
        model(prompt(1, 30), past_key_values=cache)
        first = cache.layers[1].state["quota"][cache.layers[1].positions >= 0]
        model(prompt(1, 30, seed=3), past_key_values=cache)
        slots = cache.layers[1]
    assert set(first.tolist()) == {0, 2, 6, 1}
    second = slots.state["quota"][(slots.state["span"] >> 32 == 2) & (slots.positions >= 0)]
    assert set(second.tolist()) == {3}
    assert min(count(kept(cache), SPANS[1])) >= 3


@pytest.mark.parametrize("policy", ["h2o", "adakv"])
def test_files_and_copies(model, tmp_path, policy):
    given = {} if policy == "h2o" else {"window": 2, "kernel": 1}
    fed = prompt(1, 10, seed=2)
    with torch.no_grad(), kvpatch.patched(model, policy, 12, quota=SPANS, **given) as patch:
        _, cache = force(model, prompt(1, 30), fed[:, :4])
        patch.save_cache(cache, tmp_path / "cache.safetensors")
        others = [cache.clone(), patch.load_cache(tmp_path / "cache.safetensors")]
        more = [force(model, fed[:, 4:5], fed[:, 5:], cache=one)[0] for one in (cache, *others)]
        for one, logits in zip(others, more[1:], strict=True):
            assert torch.equal(logits, more[0])
            assert [kept(one, layer) for layer in range(2)] == [kept(cache, layer) for layer in range(2)]
            assert spans_of(one) == spans_of(cache)
    given["quota"] = [*SPANS[:2], (25, 29)]
    with kvpatch.patched(model, policy, 12, **given) as patch, pytest.raises(KVPatchError, match="quota"):
        patch.load_cache(tmp_path / "cache.safetensors")


def test_joined_rows_keep_their_own(model):
    """Rows that were read alone go on together as they go on alone."""
    fed = prompt(1, 9, seed=2)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 12, quota=SPANS, recent=2):
        alone = []
        for seed in (1, 7):
            _, cache = force(model, prompt(1, 30, seed=seed), fed[:, : seed % 3])
            alone.append(cache)
        joined = EvictingCache.concatenate([one.clone() for one in alone])
        for token in fed[0, 3:]:
            for cache in alone:
                model(token.view(1, 1), past_key_values=cache)
            model(token.view(1, 1).expand(2, 1), past_key_values=joined)
        for row, cache in enumerate(alone):
            assert kept(joined, 1, row) == kept(cache)
            assert spans_of(joined, 1, row) == spans_of(cache)


def test_forgotten_tokens_leave_their_span(model):
    with torch.no_grad(), kvpatch.patched(model, "h2o", 12, quota=SPANS, recent=2):
        _, cache = force(model, prompt(1, 30), prompt(1, 4, seed=2))
        cache.forget([(9, 25)])
        assert count(kept(cache), (9, 25)) == [0, 0]
        for token in prompt(1, 14, seed=3)[0]:
            model(token.view(1, 1), past_key_values=cache)
        spans = spans_of(cache)
    assert spans[2] == [set(), set()]
    assert min(map(len, spans[1])) >= 2 and min(map(len, spans[3])) >= 1
    assert all(len(head) <= 12 for head in kept(cache))


def test_steps_taken_back(model):
    """A token that its span had lost is of the span again."""
    with torch.no_grad(), kvpatch.patched(model, "window", 12, quota=SPANS) as patch:
        cache = patch.new_cache()
        cache.activate_past_recording()
        model(prompt(1, 30), past_key_values=cache)
        before, spans = kept(cache), spans_of(cache)
        fed = prompt(1, 5, seed=2)
        first = [model(token.view(1, 1), past_key_values=cache).logits for token in fed[0]]
        after = kept(cache)
        cache.crop(30)
        assert kept(cache) == before and spans_of(cache) == spans
        again = [model(token.view(1, 1), past_key_values=cache).logits for token in fed[0]]
    assert kept(cache) == after != before
    assert torch.equal(torch.cat(first), torch.cat(again))
