"""patch.chat() over a lossless cache: every answer is the unpatched model's to the conversation as the template writes it."""

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import kvpatch
from kvpatch.cache.lossless import LosslessCache
from kvpatch.errors import KVPatchError
from tests.helpers.tiny import make
from tests.hooks.test_chat import GREEDY, SHORTENED, THINKING, TURNS, make_tokenizer

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def model():
    return make("llama_gqa", dtype=torch.float64)


class Say(LogitsProcessor):
    """Makes the model write given answers, each behind its header: drafts ask for a token more than once."""

    def __init__(self, tokenizer, *answers):
        self.answers = [tokenizer(f"{one}<|im_end|>", add_special_tokens=False).input_ids for one in answers]
        self.header = tokenizer("<|im_start|>assistant\n", add_special_tokens=False).input_ids

    def __call__(self, input_ids, scores):
        starts = (input_ids[0] == self.header[0]).nonzero().flatten().tolist()
        answer, written = self.answers[len(starts) // 2 - 1], input_ids.shape[1] - starts[-1] - len(self.header)
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor(answer[min(written, len(answer) - 1)]), 0.0)


def write(model, tokenizer, messages, options):
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return model.generate(asked.input_ids, attention_mask=asked.attention_mask, **options)


def watch(model):
    read = []
    model.model.register_forward_pre_hook(lambda _, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    return read


def test_each_turn_is_the_unpatched_model_s(model):
    tokenizer, found = make_tokenizer(), []
    with kvpatch.patched(model, "h2o", k=0.3, lossless=True) as patch:
        chat = patch.chat(tokenizer, system="be kind", keep_system=True, **GREEDY)
        assert isinstance(chat.cache, LosslessCache)
        for index, turn in enumerate(TURNS):
            before, cache = [dict(one) for one in chat.messages], chat.cache
            said = "".join(chat.stream(turn)) if index == 1 else chat.send(turn)
            assert said == chat.messages[-1]["content"] and chat.cache is cache
            assert cache.ids == chat.ids[0, :-1].tolist()
            found.append(([*before, {"role": "user", "content": turn}], chat.ids))
        assert cache.verified.drafted
    for messages, ids in found:
        assert write(model, tokenizer, messages, GREEDY).tolist() == ids.tolist()


def test_stop_strings_end_an_answer_where_they_end_the_unpatched_model_s(model):
    tokenizer, said = make_tokenizer(), []
    for options in ({"k": 1.0}, {"k": 0.9, "lossless": True}):
        with kvpatch.patched(model, "h2o", **options) as patch:
            chat = patch.chat(tokenizer, stop_strings=["o", "."], max_new_tokens=40, do_sample=False)
            said.append([chat.send(turn) for turn in TURNS])
    assert said[0] == said[1]
    assert all(one[-1] in "o." and len(one) < 20 for one in said[0])


@pytest.mark.parametrize("place", ["argument", "configuration", "positional", "model"])
def test_stop_strings_end_a_text_wherever_they_are_given(place, model):
    tokenizer, ids, said = make_tokenizer(), torch.tensor([make_tokenizer()("hello").input_ids]), []
    asked = {"max_new_tokens": 20, "do_sample": False}
    config = GenerationConfig(**asked, eos_token_id=None, pad_token_id=0)
    free = model.generate(ids, generation_config=config)[0, ids.shape[1] :].tolist()
    stop = next(text for text in map(tokenizer.decode, free[2:]) if text.isprintable() and text)
    arguments, given = {"tokenizer": tokenizer}, [ids]
    if place == "argument":
        arguments |= asked | {"stop_strings": stop}
    else:
        (model.generation_config if place == "model" else config).stop_strings = stop
        arguments |= {"generation_config": config} if place == "configuration" else asked if place == "model" else {}
        given += [config] if place == "positional" else []
    for lossless in (False, True):
        with kvpatch.patched(model, "h2o", k=0.9 if lossless else 1.0, lossless=lossless):
            said.append(model.generate(*given, **arguments).tolist())
    assert said[0] == said[1]
    assert len(said[0][0]) < ids.shape[1] + 20


@pytest.mark.parametrize("template", [THINKING, SHORTENED])
def test_what_a_template_takes_back_is_read_from_there_on(template, model):
    """Nothing stays that has seen tokens which are gone; what is before them is not read again."""
    tokenizer, answers = make_tokenizer(template), ("<think>hm</think>yes", "no")
    options = {
        "logits_processor": LogitsProcessorList([Say(tokenizer, *answers)]),
        "eos_token_id": tokenizer.eos_token_id,
        "max_new_tokens": 32,
    }
    with kvpatch.patched(model, "h2o", k=0.3, lossless=True) as patch:
        chat = patch.chat(tokenizer, **options)
        chat.send("one?")
        cache, before, read = chat.cache, chat.ids[0].tolist(), watch(model)
        chat.send("two?")
        ids, messages = chat.ids, chat.messages[:-1]
        same = next(i for i, (old, new) in enumerate(zip(before, ids[0].tolist(), strict=False)) if old != new)
        assert chat.cache is cache and not cache.edited
        wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True).input_ids
        assert ids[0, : len(wanted)].tolist() == wanted and cache.ids == ids[0, :-1].tolist()
        assert read[0] == len(wanted) - 1 - same
        logits = model(prompt_after(ids), past_key_values=cache).logits
    want = model(torch.cat([ids, prompt_after(ids)[:, 1:]], 1)).logits[:, -3:]
    torch.testing.assert_close(logits, want, rtol=1e-8, atol=1e-8)


def prompt_after(ids):
    return torch.cat([ids[:, -1:], torch.tensor([[3, 4]])], 1)


def test_a_failed_turn_is_taken_back(model):
    tokenizer = make_tokenizer()
    with kvpatch.patched(model, "h2o", k=0.3, lossless=True) as patch:
        chat = patch.chat(tokenizer, **GREEDY)
        chat.send(TURNS[0])
        ids = chat.ids
        stream = chat.stream(TURNS[1])
        next(stream)
        stream.close()
        assert chat.messages[-1]["role"] == "assistant"
        chat.messages[-2:] = []
        chat._begin_again()
        assert chat.send(TURNS[1])
        want, whole = chat.ids, [dict(one) for one in chat.messages[:-1]]
        assert want[0, : ids.shape[1]].tolist() == ids[0].tolist()
        with pytest.raises(KVPatchError, match="leave beams and other searches out"):
            chat._options["penalty_alpha"], chat._options["top_k"] = 0.6, 4
            chat.send(TURNS[2])
        del chat._options["penalty_alpha"], chat._options["top_k"]
        assert len(chat.messages) == 4
        chat.send(TURNS[2])
        last = [dict(one) for one in chat.messages[:-1]]
        ids = chat.ids
    assert write(model, tokenizer, whole, GREEDY).tolist() == want.tolist()
    assert write(model, tokenizer, last, GREEDY).tolist() == ids.tolist()


def test_messages_are_forgotten_and_changed(model):
    tokenizer = make_tokenizer()
    with kvpatch.patched(model, "h2o", k=0.3, lossless=True) as patch:
        chat = patch.chat(tokenizer, **GREEDY)
        for turn in TURNS[:2]:
            chat.send(turn)
        start, stop = chat.spans[1]
        chat.forget(1)
        assert not set(range(start, stop)) & set(chat.cache.kept_positions) and chat.cache.edited
        with pytest.raises(KVPatchError, match=r"of a chat change chat\.messages"):
            chat.replace(0, "hi")
        chat.messages[0]["content"] = "hi"
        chat.send(TURNS[2])
        assert not chat.cache.edited and chat.cache.ids == chat.ids[0, :-1].tolist()
        ids, rendered = chat.ids, [one for one in chat.messages[:-1] if not one.get("forgotten")]
    assert write(model, tokenizer, rendered, GREEDY).tolist() == ids.tolist()


def test_a_cache_goes_back_to_where_texts_differ(model):
    ids = torch.arange(1, 31)[None]
    texts = ([*range(1, 31), 40], [*range(1, 31)], [*range(1, 11), 60, 61], [1, 50], [50, 2, 3])
    wanted = [model(torch.tensor([text])).logits for text in texts]
    with kvpatch.patched(model, "h2o", k=0.3, lossless=True) as patch:
        for text, want, left in zip(texts, wanted, (30, 29, 10, 1, 0), strict=True):
            cache = patch.new_cache()
            model(ids, past_key_values=cache)
            cache.go_back(text)
            assert cache.ids == list(range(1, left + 1)) and cache.get_seq_length() == left
            found = model(torch.tensor([text[left:]]), past_key_values=cache).logits
            torch.testing.assert_close(found, want[:, left:], rtol=1e-8, atol=1e-8)
        cache = patch.new_cache()
        model(ids, past_key_values=cache)
        cache.forget([(3, 6)])
        cache.go_back([*range(1, 31), 40])
        assert len(cache.ids) == 30 and len(cache.kept_positions) == 27
        cache.go_back([*range(1, 30), 40])
        assert cache.ids == [] and cache.nbytes == 0 and not cache.edited
