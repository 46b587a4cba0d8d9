"""One table of what cannot be edited: each raises an error in words, and nothing that a saved cache would hold has changed."""

import json

import numpy as np
import pytest
import torch
from transformers import DynamicCache, Lfm2Config, Lfm2ForCausalLM

import kvpatch
from kvpatch.arch.upstream import HYBRIDS
from kvpatch.cache.lossless import LosslessCache
from kvpatch.errors import KVPatchError
from kvpatch.storage.save_load import _describe_cache
from tests.cache.test_paged import paged, pool_of
from tests.helpers.tiny import VOCAB, left_pad, make, prompt

MOVED = {"positions": "renumbered"}
EMPTY = torch.empty(2, 0, dtype=torch.long)


def hybrid():
    kinds = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "vocab_size": VOCAB, "hidden_size": 32}
    return Lfm2ForCausalLM(Lfm2Config(**kinds, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32)).eval()


# ---- caches of 43 tokens in two rows, or what each name says ----


def read(model, cache, n=40, rows=2, steps=3, **options):
    model(prompt(rows, n), past_key_values=cache, **options)
    for t in range(steps):
        model(prompt(rows, 1, seed=t), past_key_values=cache)
    return cache


def joined(model, patch):
    one = read(model, patch.new_cache())
    return kvpatch.EvictingCache.concatenate([one.select_rows(0), one.select_rows(1)])


def padded(model, patch):
    mask = left_pad(prompt(2, 20), [9, 20])
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    return read(model, patch.new_cache(), 20, steps=0, attention_mask=mask, position_ids=places)


def unfinished(model, patch):
    cache = patch.new_cache()
    cache.plans.prompt_len = 60
    return read(model, cache, steps=0)


def in_pages(model, patch):
    return read(model, paged(patch.new_cache(), [pool_of(8, 13) for _ in range(2)], [1, 2, 3, 4]), rows=1, steps=0)


def unknown(model, patch):
    """Read by the unpatched model's code, and three tokens by the patch."""
    past = DynamicCache()
    model(prompt(1, 40), past_key_values=past)
    return read(model, patch.new_cache(past), n=1, rows=1, steps=2)


def interrupted(model, patch):
    """A lossless cache whose last pass has failed, so that nothing drafts."""
    cache = read(model, patch.new_cache(), rows=1)
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(prompt(1, 4), past_key_values=cache)
    hook.remove()
    return cache


CACHES = {
    "plain": lambda model, patch: read(model, patch.new_cache()),
    "one row": lambda model, patch: read(model, patch.new_cache(), rows=1),
    "joined": joined,
    "padded": padded,
    "by columns": lambda model, patch: read(
        model, patch.new_cache(), 20, steps=0, attention_mask=left_pad(prompt(2, 20), [9, 20])
    ),
    "unfinished": unfinished,
    "unknown": unknown,
    "interrupted": interrupted,
    "lossless": lambda model, patch: read(model, patch.new_cache(), rows=1),
    "room": lambda model, patch: read(model, patch.new_cache(room=8), rows=1),
    "pages": in_pages,
    "empty": lambda model, patch: patch.new_cache(),
    "prefix": lambda model, patch: patch.prefix(prompt(1, 40)),
    "dynamic": lambda model, patch: DynamicCache(),
}


def describe(cache):
    """All that a file of the cache would hold, in bytes."""
    if isinstance(cache, LosslessCache):
        held = [layer.used_TE[: len(cache.kept_positions)].tolist() for layer in cache.layers if layer.is_initialized]
        return (
            list(cache.ids),
            list(cache.kept_positions),
            cache.edited,
            held,
            describe(cache.drafts) if cache.drafting else None,
        )
    if isinstance(cache, kvpatch.Prefix):
        cache = cache._cache
    if not isinstance(cache, kvpatch.EvictingCache) or not cache.get_seq_length():
        return None
    about, tensors = _describe_cache(cache, {})
    about = json.dumps(about, sort_keys=True, default=str)
    return about, {name: (tensor.shape, tensor.view(-1).view(torch.uint8).tolist()) for name, tensor in tensors.items()}


def forget(spans, row=None):
    return lambda patch, cache: cache.forget(spans, row)


def replace(span, ids, **options):
    return lambda patch, cache: patch.replace(cache, span, ids, **options)


def crop(count):
    return lambda patch, cache: cache.crop(count)


LOSSLESS = {"lossless": True}
WHOLE = {"policy": "full", "k": 1.0}

# cache, options of the patch beside h2o and 12 tokens, the edit, words of the error
TABLE = [
    # no spans
    ("plain", {}, forget([]), "was given no span"),
    ("plain", {}, forget([7]), "7 is not a span: give"),
    ("plain", {}, forget(7), r"forget\(\) was given 7: give a list of \(start, stop\)"),
    ("plain", {}, forget(None), r"forget\(\) was given None: give a list"),
    ("plain", {}, forget((3, 9)), r"3 is not a span: give \(start, stop\)"),
    ("plain", {}, forget("ab"), "is not a span"),
    ("plain", {}, forget([(1, 2, 3)]), "is not a span"),
    ("plain", {}, forget([(1.0, 2)]), r"\(1.0, 2\) is not a span"),
    ("plain", {}, forget([(True, 2)]), r"\(True, 2\) is not a span"),
    ("plain", {}, forget([(np.True_, 2)]), r"\(np.True_, 2\) is not a span"),
    ("plain", {}, forget([(0, torch.tensor(True))]), "is not a span"),
    ("plain", {}, forget([(np.float32(1), 2)]), "is not a span"),
    ("plain", {}, forget(np.array([3, 9])), "3 is not a span"),
    ("plain", {}, forget(torch.tensor(3)), r"forget\(\) was given 3: give a list"),
    ("plain", {}, forget([torch.empty(2, dtype=torch.long, device="meta")]), "is not a span"),
    ("plain", {}, forget([{1, 2}]), "is not a span"),
    ("plain", {}, forget([slice(1, 2)]), r"slice\(1, 2, None\) is not a span"),
    ("plain", {}, forget([(3, 3)]), r"The span \(3, 3\) has no tokens"),
    ("plain", {}, forget([(5, 2)]), "has no tokens"),
    ("plain", {}, forget([(-4, 2)]), r"The span \(-4, 2\) begins before the text"),
    ("plain", {}, replace((9, 3), [1]), "has no tokens"),
    ("plain", {}, replace(9, [1]), "9 is not a span"),
    # spans outside the text, not read yet, overlapping
    ("plain", {}, forget([(3, 44)]), "row 0 has read 43 tokens: spans end there or before; give row= where rows differ"),
    ("plain", {}, forget([(43, 44)]), "row 0 has read 43 tokens"),
    ("plain", {}, forget([(3, 44)], 1), "row 1 has read 43 tokens: spans end there or before."),
    ("one row", {}, forget([(3, 44)]), "row 0 has read 43 tokens: spans end there or before."),
    ("plain", {}, forget([(3, 9), (8, 12)]), r"The spans \(3, 9\) and \(8, 12\) overlap: join them"),
    ("plain", {}, forget([(3, 9), (3, 9)]), "overlap"),
    ("plain", {}, forget([(3, 9), (40, 44)]), "row 0 has read 43"),
    ("plain", {}, replace((3, 44), [1]), r"replace\(\) was given the span \(3, 44\), and row 0 has read 43"),
    ("plain", {}, replace((3, 9), [1], reread=35), "row 0 has read 43"),
    ("unfinished", {}, forget([(3, 9)]), r"forget\(\) in the middle of a prompt: read it to its end"),
    ("unfinished", {}, replace((3, 9), [1]), r"replace\(\) in the middle of a prompt: read it to its end"),
    # rows
    ("plain", {}, forget([(3, 9)], 2), "row=2: the cache has the rows 0 to 1"),
    ("plain", {}, forget([(3, 9)], -1), "row=-1: the cache has"),
    ("plain", {}, forget([(3, 9)], True), "row=True: the cache has"),
    ("plain", {}, forget([(3, 9)], "0"), "row='0': the cache has"),
    ("plain", {}, forget([(3, 9)], np.int64(2)), "row=2: the cache has"),
    ("padded", {}, forget([(8, 12)]), "row 0 has read 9 tokens.*give row= where rows differ"),
    ("padded", {}, forget([(8, 12)], 0), "row 0 has read 9 tokens"),
    ("padded", {}, replace((8, 12), [1]), "row 0 has read 9 tokens"),
    ("by columns", {}, replace((0, 4), [1]), "rows are at different columns"),
    ("joined", {}, replace((0, 4), [1]), r"take a row with cache.select_rows\(0\), replace, and join"),
    # tokens
    ("plain", {}, replace((3, 9), list(range(7))), "7 tokens for a span of 6, whose positions they take: give 6 or fewer"),
    ("plain", {}, replace((3, 9), []), r"no token: to take the span out, write cache.forget"),
    ("plain", {}, replace((3, 9), EMPTY), r"no token: to take the span out, write cache.forget\(\[span\]\)"),
    ("plain", {}, replace((3, 9), [1.5]), r"ids of torch.float32 and shape \[1\]: give token ids"),
    ("plain", {}, replace((3, 9), "text"), "a str as ids: give token ids"),
    ("plain", {}, replace((3, 9), None), "a NoneType as ids: give token ids"),
    ("plain", {}, replace((3, 9), [[1, 2], [3]]), "a list as ids: give token ids"),
    ("plain", {}, replace((3, 9), torch.ones(3, 2).long()), r"shape \[3, 2\]: give token ids, int64 \[N\] or \[2, N\]"),
    ("plain", {}, replace((3, 9), [97]), "token 97, but the model knows 97"),
    ("plain", {}, replace((3, 9), [-1]), "token -1"),
    ("plain", {}, replace((3, 9), [1], reread=-1), "reread=-1: give the number of tokens"),
    ("plain", {}, replace((3, 9), [1], reread=True), "reread=True"),
    ("plain", {}, replace((3, 9), [1], reread=2.0), "reread=2.0"),
    (
        "unknown",
        WHOLE,
        replace((3, 9), [1], reread=2),
        "reread=2: the cache does not know the ids of these tokens: leave reread",
    ),
    # insertions
    ("plain", {}, replace((3, 3), [1]), "span inserts, and what follows has its positions: patch with positions='renumbered'"),
    ("plain", {}, replace((3, 5), [1, 2, 3]), "3 tokens for a span of 2, whose positions they take: give 2 or fewer"),
    (
        "plain",
        MOVED,
        replace((43, 43), [1]),
        r"replace\(\) at 43: row 0 has read 43 tokens, and nothing follows there. Read on",
    ),
    ("plain", MOVED, replace((44, 44), [1]), "row 0 has read 43 tokens"),
    ("plain", MOVED, replace((5, 4), [1, 2]), "has no tokens"),
    ("plain", MOVED, replace((3, 3), []), "no token|ids of torch.float32"),
    ("plain", {**MOVED, "policy": "r_kv", "window": 4, "every": 4}, replace((3, 3), [1]), "'r_kv' does not go with that: it"),
    ("plain", {**MOVED, "policy": "raas"}, replace((3, 3), [1]), "'raas' does not go with that: it knows the steps"),
    ("plain", {**MOVED, "schedule": "decode"}, replace((3, 3), [1]), "schedule='decode' keeps a prompt by its own"),
    ("plain", {**MOVED, "policy": "snapkv", "turns": "each"}, replace((3, 3), [1]), "turns='each' counts by those of a turn"),
    (
        "plain",
        {},
        lambda patch, cache: cache.insert(3, [1]),
        r"write patch.replace\(cache, \(start, stop\), ids\); \(at, at\) ins",
    ),
    ("plain", {}, lambda patch, cache: cache.replace((3, 9), [1]), r"write patch.replace\(cache, \(start, stop\), ids\)"),
    ("plain", {}, lambda patch, cache: patch.insert(cache, 3, [1]), r"write patch.replace\(cache, \(start, stop\), ids\)"),
    # the full cache on the host, and its drafts
    ("lossless", LOSSLESS, forget([]), "was given no span"),
    ("lossless", LOSSLESS, forget(7), r"forget\(\) was given 7: give a list"),
    ("lossless", LOSSLESS, forget(torch.tensor(7)), r"forget\(\) was given 7: give a list"),
    ("lossless", LOSSLESS, forget([(True, 2)]), r"\(True, 2\) is not a span"),
    ("lossless", LOSSLESS, forget([(5, 5)]), "has no tokens"),
    ("lossless", LOSSLESS, forget([(3, 44)]), "row 0 has read 43 tokens: spans end there or before."),
    ("lossless", LOSSLESS, forget(iter([(3, 9), (8, 12)])), r"The spans \(3, 9\) and \(8, 12\) overlap"),
    ("lossless", LOSSLESS, forget([(3, 9)], 1), "row=1: the cache has the rows 0 to 0"),
    (
        "lossless",
        LOSSLESS,
        replace((3, 9), [1]),
        r"replace\(\) leaves what has seen the old tokens.* write cache.crop\(start\)",
    ),
    ("lossless", LOSSLESS, lambda patch, cache: cache.replace((3, 9), [1]), r"write cache.crop\(start\)"),
    ("lossless", LOSSLESS, lambda patch, cache: cache.insert(3, [1]), r"write cache.crop\(start\)"),
    ("lossless", LOSSLESS, crop(-44), "Cannot roll back 44 tokens: the cache has seen 43"),
    ("interrupted", LOSSLESS, forget([(3, 44)]), "row 0 has read 43 tokens"),
    ("interrupted", LOSSLESS, forget([(3, 9), (8, 12)]), "overlap"),
    ("empty", LOSSLESS, forget([(0, 1)]), "The cache is empty"),
    ("empty", LOSSLESS, replace((0, 1), [1]), r"write cache.crop\(start\)"),
    # caches
    ("empty", {}, forget([(0, 1)]), "The cache is empty"),
    ("empty", {}, replace((0, 1), [1]), "The cache is empty"),
    ("room", {}, forget([(0, 4)]), r"this cache was made with room=8 .* make it without room"),
    ("room", {}, replace((0, 4), [1]), r"replace\(\) moves buffers, and this cache was made with room=8"),
    ("pages", {}, forget([(0, 4)]), r"forget\(\) of a cache in an engine's pages: end the request, and send the edited text"),
    ("pages", {}, replace((0, 4), [1]), r"replace\(\) of a cache in an engine's pages"),
    ("dynamic", {}, replace((0, 4), [1]), "This is a DynamicCache: give a cache"),
    ("prefix", {}, replace((0, 4), [1]), r"texts share a Prefix: give its copy\(\)"),
    ("plain", {"record": True}, replace((0, 4), [1]), "record=True knows one token for each position"),
    ("plain", {"model": "mistral_sliding"}, replace((0, 4), [1]), "see a window of 12 tokens, and the tokens in front of the"),
]


@pytest.mark.parametrize(("name", "options", "edit", "words"), TABLE)
def test_a_bad_edit_changes_nothing(name, options, edit, words):
    given = {"policy": "h2o", "model": "llama_gqa", "k": 14, **options}
    model = make(given.pop("model"))
    with torch.no_grad(), kvpatch.patched(model, given.pop("policy"), given.pop("k"), **given) as patch:
        cache = CACHES[name](model, patch)
        before = describe(cache)
        with pytest.raises(KVPatchError, match=words):
            edit(patch, cache)
        assert describe(cache) == before
        if isinstance(cache, kvpatch.EvictingCache | LosslessCache) and cache.get_seq_length():
            model(prompt(len(cache.next_positions()), 1), past_key_values=cache)
            cache.check_invariants()


def test_a_cache_of_another_patch_is_not_edited():
    model, other = make("llama_gqa"), make("llama_gqa", seed=3)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 14) as first:
        cache = CACHES["plain"](model, first)
        before = describe(cache)
        with kvpatch.patched(other, "h2o", 14) as patch, pytest.raises(KVPatchError, match="Another model has read this cache"):
            patch.replace(cache, (3, 9), [1])
        with kvpatch.patched(other, "h2o", 15) as patch, pytest.raises(KVPatchError, match="made under another patch: k"):
            patch.replace(cache, (3, 9), [1])
        assert describe(cache) == before


@pytest.mark.skipif(not HYBRIDS, reason="models of this transformers take states from the cache's layers")
@pytest.mark.parametrize("edit", [forget([(0, 4)]), replace((0, 4), [1])])
def test_a_hybrids_states_cannot_forget(edit):
    model = hybrid()
    with torch.no_grad(), kvpatch.patched(model, "h2o", 8) as patch:
        cache = CACHES["plain"](model, patch)
        before = describe(cache)
        with pytest.raises(KVPatchError, match="of this hybrid keep a state of all that was read"):
            edit(patch, cache)
        assert describe(cache) == before
