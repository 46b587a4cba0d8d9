"""A cache knows all that it has read, and generate() goes on with nothing else: F4 and F5 of a public list of faults."""

import copy
import logging

import pytest
import torch
from transformers import DynamicCache

import kvpatch
from kvpatch import KVPatchError
from kvpatch.cache.cache import EvictingCache
from kvpatch.cache.token_ids import PADDING, UNKNOWN
from tests.helpers.tiny import left_pad, make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")
OPTIONS = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
PLAIN = OPTIONS | {"eos_token_id": None}


def changed(text, column):
    other = text.clone()
    other[:, column] = (other[:, column] + 1) % 90 + 1
    return other


def goes_on(model, cache, text, more=3):
    return model.generate(torch.cat([text, prompt(len(text), more, seed=9)], 1), past_key_values=cache, **PLAIN)


@pytest.mark.parametrize(("seen", "new"), [(10, 50), (30, 31), (30, 30), (50, 10), (20, 1)])
@pytest.mark.parametrize("policy", ["h2o", "snapkv"])
def test_new_tokens_alone_are_a_prompt_of_both(policy, seen, new):
    model, first, more = make("llama_gqa"), prompt(1, seen), prompt(1, new, seed=4)
    with kvpatch.patched(model, policy, 0.5, **({"window": 4} if policy == "snapkv" else {})) as patch:
        cache = patch.new_cache()
        model(first, past_key_values=cache)
        other = cache.clone()
        whole = model.generate(torch.cat([first, more], 1), past_key_values=cache, **PLAIN)
        mask = torch.ones(1, seen + new, dtype=torch.long)
        alone = model.generate(more, attention_mask=mask, past_key_values=other, **PLAIN)
        assert torch.equal(whole[:, seen:], alone)
        assert all(torch.equal(cache.positions(layer), other.positions(layer)) for layer in range(2))
        assert torch.equal(cache.ids.ids_BT, whole[:, :-1]) and torch.equal(other.ids.ids_BT, whole[:, :-1])


def test_new_tokens_alone_of_a_padded_batch():
    model, first, more = make("llama_gqa"), prompt(2, 20), prompt(2, 30, seed=4)
    mask = left_pad(first, [20, 13])
    both = torch.cat([mask, torch.ones_like(more)], 1)
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        cache = patch.new_cache()
        model(first, attention_mask=mask, past_key_values=cache)
        other = cache.clone()
        whole = model.generate(torch.cat([first, more], 1), attention_mask=both, past_key_values=cache, **PLAIN)
        alone = model.generate(more, attention_mask=both, past_key_values=other, **PLAIN)
        assert torch.equal(whole[:, 20:], alone) and torch.equal(cache.held(0), other.held(0))
        assert cache.ids.ids_BT[1, :8].tolist() == [PADDING] * 7 + [int(first[1, 7])]


@pytest.mark.parametrize("column", [0, 3, 29, 30, 33, 40, 52])
def test_an_edit_anywhere_is_refused_by_its_column(column):
    """In the first turn, in a reply, in a later turn and its reply."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 24) as patch:
        cache = patch.new_cache()
        text = model.generate(prompt(1, 30), past_key_values=cache, **PLAIN)
        text = goes_on(model, cache, text, 12)
        text = goes_on(model, cache, text)
        kept = cache.clone()
        with pytest.raises(KVPatchError, match=rf"at column {column} of row 0.*patch\.new_cache\(\) and read the text anew"):
            goes_on(model, cache, changed(text, column))
        assert torch.equal(goes_on(model, cache, text), goes_on(model, kept, text)), "nothing has changed"


def test_thinking_that_was_stripped():
    """The reply's first part is gone, and the next message stands where it was."""
    model, asked = make("llama_gqa"), prompt(1, 30)
    with kvpatch.patched(model, "h2o", 24) as patch:
        cache = patch.new_cache()
        text = model.generate(asked, past_key_values=cache, **PLAIN | {"max_new_tokens": 20})
        with pytest.raises(KVPatchError, match="differ from what the cache has read at column 30"):
            goes_on(model, cache, torch.cat([asked, text[:, 40:]], 1), 30)


def test_a_mask_that_is_not_of_the_text_read():
    model, text = make("llama_gqa"), prompt(2, 20)
    mask = left_pad(text, [20, 13])
    with kvpatch.patched(model, "h2o", 10) as patch:
        cache = patch.new_cache()
        out = model.generate(text, attention_mask=mask, past_key_values=cache, **PLAIN)
        longer = torch.cat([out, prompt(2, 3, seed=4)], 1)
        right = torch.cat([mask, torch.ones_like(longer[:, 20:])], 1)
        for row, column, words in ((1, 6, "a token at .* has read padding"), (0, 4, "padding at .* has read a token")):
            wrong = right.clone()
            wrong[row, column] = 1 - wrong[row, column]
            for ids in (longer, longer[:, 23:]):
                with pytest.raises(KVPatchError, match=rf"attention_mask has {words}"):
                    model.generate(ids, attention_mask=wrong, past_key_values=cache, **PLAIN)
        model.generate(longer, attention_mask=right, past_key_values=cache, **PLAIN)


MOVES = {
    "clone": lambda cache, texts: (cache.clone(), texts),
    "deepcopy": lambda cache, texts: (copy.deepcopy(cache), texts),
    "select_rows": lambda cache, texts: (cache.select_rows([1]), texts[1:]),
    "reorder_cache": lambda cache, texts: (cache.reorder_cache(torch.tensor([1, 0])), texts[[1, 0]]),
    "batch_select_indices": lambda cache, texts: (cache.batch_select_indices(torch.tensor([1])), texts[1:]),
    "batch_repeat_interleave": lambda cache, texts: (cache.batch_repeat_interleave(2), texts.repeat_interleave(2, 0)),
}


@pytest.mark.parametrize("what", MOVES)
def test_ids_follow_rows(what):
    model, texts = make("llama_gqa"), prompt(2, 20)
    with kvpatch.patched(model, "h2o", 10) as patch:
        cache = patch.new_cache()
        texts = model.generate(texts, past_key_values=cache, **PLAIN)
        moved, texts = MOVES[what](cache, texts)
        cache = cache if moved is None else moved
        assert torch.equal(cache.ids.ids_BT, texts[:, :-1])
        row = len(texts) - 1
        other = texts.clone()
        other[row] = changed(texts[row:], 21)[0]
        with pytest.raises(KVPatchError, match=f"at column 21 of row {row}"):
            goes_on(model, cache, other)
        goes_on(model, cache, texts)


def test_roll_back_and_beams():
    model, text = make("llama_gqa"), prompt(1, 20)
    with kvpatch.patched(model, "h2o", 10) as patch:
        cache = patch.new_cache()
        model(text, past_key_values=cache)
        cache.activate_past_recording()
        for token in (5, 6, 7):
            model(torch.tensor([[token]]), past_key_values=cache)
        cache.crop(-2)
        assert cache.ids.ids_BT.tolist() == [[*text[0].tolist(), 5]]
        beams = patch.new_cache()
        given = {"num_beams": 3, "num_return_sequences": 3, "return_dict_in_generate": True}
        found = model.generate(text, past_key_values=beams, **PLAIN | given)
        assert beams.ids.columns == 23 and torch.equal(beams.ids.ids_BT[:, :20], text.expand(3, -1))
        texts = {tuple(row) for row in found.sequences[:, :22].tolist()}
        assert {tuple(row) for row in beams.ids.ids_BT[:, :22].tolist()} & texts, "rows hold what beams read"


def test_rows_that_were_joined_end_together():
    model, texts = make("llama_gqa"), [prompt(1, 20), prompt(1, 9, seed=3), prompt(1, 14, seed=4)]
    with kvpatch.patched(model, "h2o", 8) as patch:
        caches = []
        for text in texts:
            caches.append(patch.new_cache())
            model(text, past_key_values=caches[-1])
        joined = EvictingCache.concatenate(caches)
        assert joined.ids.ids_BT[1].tolist() == [PADDING] * 11 + texts[1][0].tolist()
        model(torch.tensor([[5], [6], [7]]), past_key_values=joined)
        assert joined.ids.ids_BT[:, -1].tolist() == [5, 6, 7]
        joined.batch_select_indices(torch.tensor([2, 1]))
        assert joined.get_seq_length() == joined.ids.columns == 15
        assert joined.ids.ids_BT.tolist() == [[*texts[2][0].tolist(), 7], [*[PADDING] * 5, *texts[1][0].tolist(), 6]]
        again = EvictingCache.concatenate([joined, caches[0]])
        assert again.ids.ids_BT[0].tolist() == [*[PADDING] * 5, *texts[2][0].tolist(), 7]


def test_files_have_them_and_old_ones_are_read(tmp_path, monkeypatch):
    model, path = make("llama_gqa"), tmp_path / "cache.safetensors"
    with kvpatch.patched(model, "h2o", 10) as patch:
        cache = patch.new_cache()
        text = model.generate(prompt(2, 20), past_key_values=cache, **PLAIN)
        patch.save_cache(cache, path)
        loaded = patch.load_cache(path)
        assert torch.equal(loaded.ids.ids_BT, text[:, :-1])
        with pytest.raises(KVPatchError, match="at column 4 of row 0"):
            goes_on(model, loaded, changed(text, 4))
        without = cache.clone()
        without.ids = type(cache.ids)()
        patch.save_cache(without, path)
        loaded = patch.load_cache(path)
        assert torch.equal(goes_on(model, loaded, text), goes_on(model, cache, text))
        assert (loaded.ids.ids_BT[:, :23] == UNKNOWN).all() and torch.equal(loaded.ids.ids_BT[:, 23], text[:, 23])


def test_embeddings_have_none_and_it_is_said_once(caplog):
    model, text = make("llama_gqa"), prompt(1, 20)
    embed = model.get_input_embeddings()
    with kvpatch.patched(model, "h2o", 10) as patch, caplog.at_level(logging.WARNING, "kvpatch"):
        first, second = patch.new_cache(), patch.new_cache()
        model(inputs_embeds=embed(text), past_key_values=first)
        model(text, past_key_values=second)
        assert (first.ids.ids_BT == UNKNOWN).all() and not caplog.records
        for cache in (first.clone(), first, second):
            longer = torch.cat([text, prompt(1, 4 + cache.get_seq_length(), seed=2)], 1)
            if cache is second:
                with pytest.raises(KVPatchError, match="inputs_embeds have 20 columns, but the cache has read 20 tokens"):
                    model.generate(inputs_embeds=embed(text), past_key_values=cache, **PLAIN)
                model.generate(inputs_embeds=embed(longer), past_key_values=cache, **PLAIN)
            else:
                model.generate(longer, past_key_values=cache, **PLAIN)
        assert second.ids.ids_BT[:, 20:].unique().numel() > 1, "generated tokens have ids"
    assert len([one for one in caplog.records if "not compared" in one.message]) == 1


def test_a_cache_that_was_filled_before_the_block():
    model, text = make("llama_gqa"), prompt(1, 20)
    past = DynamicCache()
    model(text, past_key_values=past)
    with kvpatch.patched(model, "key_diff", 10) as patch:
        for cache, known in ((patch.new_cache(past), False), (patch.compress(past, text), True), (patch.compress(past), False)):
            out = goes_on(model, cache, text)
            assert (cache.ids.ids_BT[:, :20] == (text if known else UNKNOWN)).all()
            assert torch.equal(cache.ids.ids_BT[:, 20:], out[:, 20:-1])


def test_steps_under_torch_compile_leave_their_ids():
    """They go to a tape, which is read when the cache is looked at; of more steps than it holds, the last are known."""
    model, text = make("llama_gqa"), prompt(2, 20)
    with kvpatch.patched(model, "h2o", 10) as patch:
        cache = patch.new_cache(room=8)
        model(text, past_key_values=cache)
        step = torch.compile(model.forward, backend="eager", fullgraph=True)
        for token in range(5):
            step(torch.tensor([[token + 5], [token + 6]]), past_key_values=cache)
        assert cache.counters.has_uncounted_steps, "the steps were traced"
        assert cache.get_seq_length() == 25
        assert cache.ids.ids_BT[:, 20:].tolist() == [[5, 6, 7, 8, 9], [6, 7, 8, 9, 10]]
        tape = cache.counters.tensors
        tape.tape_BN = tape.tape_BN[:, :3].clone()
        for token in range(4):
            step(torch.tensor([[token + 50], [token + 60]]), past_key_values=cache)
        cache.catch_up()
        assert cache.ids.ids_BT[0, 25:].tolist() == [UNKNOWN, 51, 52, 53]


def test_requests_of_continuous_batching_have_them():
    from kvpatch.serving.rows import RowPool

    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 8) as patch:
        rows, texts = RowPool(), [prompt(1, n, seed=n) for n in (9, 15)]
        for name, text in zip("ab", texts, strict=True):
            cache = patch.new_cache()
            model(text, past_key_values=cache)
            rows.add(name, cache)
        part = rows.gather(["a", "b"])
        model(torch.tensor([[5], [6]]), past_key_values=part.cache)
        rows.drop("b")
        assert rows.gather(["a"]).cache.ids.ids_BT.tolist() == [[*texts[0][0].tolist(), 5]]
