"""kvzip's second reading: what it may change and what not, what it costs, and where it is refused."""

from types import SimpleNamespace

import pytest
import torch

import kvpatch
from kvpatch.attention import compress
from kvpatch.hooks import second_reading
from kvpatch.policies.needs import SecondReading
from kvpatch.policies.repeated import FIRST, LATER, repeat_instruction
from tests.helpers.running import kept
from tests.helpers.tiny import force, left_pad, make, prompt, snapshot
from tests.oracle import reference

pytestmark = pytest.mark.usefixtures("no_gradients")
OPTIONS = {"chunk": 16, "instruction": (7, 3, 5)}


@pytest.fixture
def model():
    return make("llama_gqa", layers=3)


def lengths_of(model):
    """The tokens of each pass of the decoder, as they come."""
    seen = []
    model.model.register_forward_pre_hook(lambda *call: seen.append(call[2]["input_ids"].shape[1]), with_kwargs=True)
    return seen


def test_the_prompt_is_read_twice_and_nothing_of_the_second_reading_stays(model):
    ids, fed = prompt(2, 40), prompt(2, 5, seed=2)
    want, before = model(ids).logits, snapshot(model)
    seen = lengths_of(model)
    with kvpatch.patched(model, "kvzip", 0.3, **OPTIONS) as patch:
        out = model(ids, past_key_values=patch.new_cache())
        cache = out.past_key_values
        assert seen == [40, 3 + 16, 3 + 8 + 16, 3 + 8 + 8]
        torch.testing.assert_close(out.logits, want)
        cache.check_invariants()
        assert cache.get_seq_length() == 40
        assert not cache.unfinished
        held = torch.stack([cache.held(layer) for layer in range(3)], 1)
        assert held.sum((1, 2)).tolist() == [12 * 6] * 2
        assert len(held.unique()) > 1
        assert max(p for layer in kept(cache) for row in layer for head in row for p in head) < 40
        assert cache.nbytes <= (int(held.sum()) + 8 * held.numel()) * 2 * 8 * 4
        force(model, fed, fed[:, :0], cache=cache)
        assert patch.report().passes == {"prompt": (2, 1)}
    assert snapshot(model).keys() == before.keys()


def test_a_token_of_id_zero_is_a_token(model):
    ids = prompt(1, 20)
    ids[0, 7] = 0
    seen = lengths_of(model)
    with kvpatch.patched(model, "kvzip", 0.3, **OPTIONS):
        model(ids)
    assert seen == [20, 3 + 16, 3 + 8 + 4]


def test_generate_keeps_what_each_row_alone_would_keep(model):
    ids = prompt(3, 50)
    mask = left_pad(ids, [50, 33, 12])
    with kvpatch.patched(model, "kvzip", 0.4, **OPTIONS) as patch:
        out = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
        for row, n in enumerate((50, 33, 12)):
            alone = model.generate(ids[row : row + 1, -n:], max_new_tokens=6, do_sample=False, pad_token_id=0)
            assert torch.equal(alone[0, n:], out[row, 50:])
        assert patch.report().held().sum() == int(0.4 * 12) * 6 + 5 * 6


@pytest.mark.parametrize("k", [0.4, [1.0, 0.4, 0.4]])
@pytest.mark.parametrize("lengths", [(40, 31, 18), (40, 20, 9)])
def test_padding_takes_no_part_in_a_second_reading(lengths, k):
    """Where the rows' first chunks are equally long, and where they are not."""
    model, ids = make("llama_gqa", layers=3, dtype=torch.float64), prompt(3, 40)
    with kvpatch.patched(model, "kvzip", k, **OPTIONS):
        together = kept(force(model, ids, ids[:, :0], left_pad(ids, lengths))[1])
        for row, n in enumerate(lengths):
            alone = kept(force(model, ids[row : row + 1, -n:], ids[:1, :0])[1])
            assert [layer[row] for layer in together] == [layer[0] for layer in alone]


def test_beams_and_a_saved_cache_go_on(model, tmp_path):
    ids, fed = prompt(1, 30), prompt(1, 9, seed=2)
    with kvpatch.patched(model, "kvzip", 0.4, **OPTIONS) as patch:
        model.generate(ids, num_beams=3, max_new_tokens=6, do_sample=False, pad_token_id=0)
        cache = force(model, ids, fed[:, :2])[1]
        patch.save_cache(cache, tmp_path / "cache.safetensors")
        loaded = patch.load_cache(tmp_path / "cache.safetensors")
        for text in (fed[:, 2:3], fed):  # a step, and a prompt that is read twice behind the first
            mine, theirs = (model(text, past_key_values=past).logits for past in (cache, loaded))
            assert torch.equal(mine, theirs)
        assert kept(cache) == kept(loaded)


def test_a_prompt_in_pieces_is_read_again_as_one(model):
    ids = prompt(2, 44)
    with kvpatch.patched(model, "kvzip", 0.3, **OPTIONS) as patch:
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        whole = model.generate(ids, **options)
        held = kept_by(patch)
        assert torch.equal(model.generate(ids, prefill_chunk_size=13, **options), whole)
        assert kept_by(patch) == held


def test_rows_count_by_the_size_of_their_input():
    model, ids, fed = make("llama_gqa", dtype=torch.float64), prompt(1, 30), prompt(1, 3, seed=2)
    for layer in model.model.layers:  # else the norm gives all rows one size
        layer.input_layernorm.weight.copy_(torch.linspace(0, 4, len(layer.input_layernorm.weight)).square())
    with kvpatch.patched(model, "kvzip_plus", 0.4, **OPTIONS):
        cache = force(model, ids, fed)[1]
    options = {"policy": "kvzip_plus", "k": 0.4, **OPTIONS}
    assert [layer[0] for layer in kept(cache)] == reference.run(model, ids[0].tolist(), fed[0].tolist(), **options).kept[-1]


def kept_by(patch):
    return [p.sort(-1).values.tolist() for p in patch.report().positions]


def test_nothing_is_read_twice_without_a_budget(model):
    seen, ids = lengths_of(model), prompt(1, 20)
    with kvpatch.patched(model, "kvzip", 1.0):
        model(ids)
    with kvpatch.patched(model, "kvzip", 0.5, turns="first") as patch:
        cache = force(model, ids, ids[:, :0])[1]
        model(ids[:, :9], past_key_values=cache)
        assert patch.passes["prompt"] == (2, 1)
    assert seen == [20, 20, 20, 9]


def test_an_interrupted_second_reading_leaves_no_half_compressed_cache(model):
    calls = []

    def stop(*_):
        calls.append(0)
        if len(calls) == 5:  # three layers of the prompt, one of the second reading
            raise KeyboardInterrupt

    ids = prompt(1, 30)
    with kvpatch.patched(model, "kvzip", 0.3) as patch:
        cache = patch.new_cache()
        hooks = [layer.register_forward_pre_hook(stop) for layer in model.model.layers]
        with pytest.raises(KeyboardInterrupt):
            model(ids, past_key_values=cache)
        for hook in hooks:
            hook.remove()
        with pytest.raises(kvpatch.KVPatchError, match="did not finish"):
            model(ids, past_key_values=cache)
        cache.reset()
        model(ids, past_key_values=cache)
        assert sum(int(cache.held(layer).sum()) for layer in range(3)) == 9 * 6


def test_a_cache_that_contradicts_itself_is_noticed_after_a_second_reading(model, monkeypatch):
    def spoiled(cache, now):
        compress.finish(cache, now)
        cache.layers[1].positions[0, 0, :2] = 0

    monkeypatch.setattr(second_reading, "compress", SimpleNamespace(finish=spoiled))
    wrong = pytest.raises(kvpatch.KVPatchError, match="contradicts itself: layer 1: a head holds a token twice")
    with kvpatch.patched(model, "kvzip", 0.3, strict=True, **OPTIONS) as patch, wrong:
        model(prompt(1, 30), past_key_values=patch.new_cache())


def test_what_to_type_instead(model):
    ids = prompt(1, 20)
    for wrong in ("Repeat.", (1, "a"), ((1,), (2,)), 3, (-1,), None):
        with pytest.raises(kvpatch.KVPatchError, match=r"give kvpatch.policies.repeat_instruction\(tokenizer\)"):
            kvpatch.patch(model, "kvzip", 0.5, instruction=wrong)
    with pytest.raises(kvpatch.KVPatchError, match="chunk=0 must be a number of tokens"):
        kvpatch.patch(model, "kvzip", 0.5, chunk=0)
    with pytest.raises(kvpatch.KVPatchError, match="block=4: policy 'kvzip' evicts after a second reading"):
        kvpatch.patch(model, "kvzip", 0.5, block=4)
    with pytest.raises(kvpatch.KVPatchError, match="use positions='original'"):
        kvpatch.patch(model, "kvzip", 0.5, positions="renumbered")
    with pytest.raises(kvpatch.KVPatchError, match="schedule='both'"):
        kvpatch.patch(model, "kvzip", 0.5, schedule="both")
    past = model(ids, use_cache=True).past_key_values
    with kvpatch.patched(model, "kvzip", 0.5) as patch:
        with pytest.raises(kvpatch.KVPatchError, match="it needs input_ids, not inputs_embeds"):
            model(inputs_embeds=model.get_input_embeddings()(ids))
        with pytest.raises(kvpatch.KVPatchError, match="cannot be taken over under policy 'kvzip'"):
            patch.new_cache(past)


def test_a_model_without_positions_for_a_second_reading_says_so_before_it_reads():
    model, ids = make("gpt2"), prompt(1, 300)
    with kvpatch.patched(model, "kvzip", 0.5) as patch:
        cache = patch.new_cache()
        with pytest.raises(kvpatch.KVPatchError, match="reads 300 tokens a second time after 300, but this model has 512"):
            model(ids, past_key_values=cache)
        assert cache.get_seq_length() == 0
        assert not cache.unfinished
    with kvpatch.patched(model, "kvzip", 0.5, chunk=200):
        model(ids)


class Words:
    """A tokenizer of characters."""

    chat_template = None

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def test_the_instruction_of_a_tokenizer():
    first, later, close = repeat_instruction(Words())
    assert ["".join(map(chr, ids)) for ids in (first, later, close)] == [FIRST, LATER, "\n"]
    talks = Words()
    talks.chat_template = "..."
    talks.apply_chat_template = lambda turns, **_: f"<user>{turns[0]['content']}<end><model>"
    assert "".join(map(chr, repeat_instruction(talks)[2])) == "<end><model>"
    talks.apply_chat_template = lambda turns, **_: f"{turns[0]['content']}: <user>{turns[0]['content']}<end>"  # said twice
    assert "".join(map(chr, repeat_instruction(talks)[2])) == "<end>"
    need = SecondReading(instruction=((1, 2), (3,), (4,)), chunk=10)
    pieces = list(need.cut_pieces(list(range(100, 125))))
    assert [(start, stop) for start, stop, _ in pieces] == [(0, 10), (10, 20), (20, 25)]
    assert pieces[0][2] == [1, 2, 4, *range(100, 110)]
    assert pieces[1][2] == [3, *range(102, 110), 4, *range(110, 120)]
    assert max(len(text) for _, _, text in pieces) == need.longest(25)


def test_a_second_reading_follows_padding_and_given_positions(model):
    """It took the prompt to begin at 0, and so overlapped with a text that began behind padding."""
    ids = prompt(1, 40)
    padded = torch.cat([prompt(1, 6, seed=3), ids], 1)

    def read(ids, **more):
        return kept(model(ids, past_key_values=patch.new_cache(), **more).past_key_values)

    with kvpatch.patched(model, "kvzip", 0.3, **OPTIONS) as patch:
        alone = read(ids)
        assert read(padded, attention_mask=left_pad(padded, [40])) == alone
        assert read(ids, position_ids=torch.arange(9, 49)[None]) == alone
