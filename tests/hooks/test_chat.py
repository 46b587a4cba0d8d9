"""patch.chat(): one cache and one budget for a conversation, of which each turn reads what is new."""

import threading

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast

import kvpatch
from kvpatch.errors import KVPatchError
from tests.helpers.tiny import VOCAB, make

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = TEMPLATE.replace(
    "{{ m.content }}", "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}"
)
REFUSING = TEMPLATE.replace(
    "<|im_start|>{{ m.role",
    "{% if m.role == 'user' and loop.previtem and loop.previtem.role == 'user' %}{{ raise_exception('twice') }}{% endif %}"
    "<|im_start|>{{ m.role",
)
SHORTENED = TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last else m.content[:3] }}")
TURNS = ("hello there", "what is it?", "and then")


def make_tokenizer(template=TEMPLATE):
    """A token for each character, and for the markers."""
    characters = "\n abcdefghijklmnopqrstuvwxyz.?!ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789,;:'()[]{}+-*/="
    tokenizer = Tokenizer(BPE({one: index for index, one in enumerate(characters)}, [], unk_token=" "))
    tokenizer.decoder = Fuse()
    markers = ["<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in markers])
    tokenizer.add_tokens([AddedToken(one, special=False) for one in ("<think>", "</think>")])
    assert tokenizer.get_vocab_size() <= VOCAB
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = template
    return fast


class Say(LogitsProcessor):
    """Makes the model write given answers, one after the other."""

    def __init__(self, tokenizer, *answers):
        self.left = [token for one in answers for token in tokenizer(one, add_special_tokens=False).input_ids]

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([self.left.pop(0)]), 0.0)


def saying(tokenizer, *answers):
    """Options of a chat whose model gives these answers."""
    return {
        "logits_processor": LogitsProcessorList([Say(tokenizer, *(f"{one}<|im_end|>" for one in answers))]),
        "eos_token_id": tokenizer.eos_token_id,
        "max_new_tokens": 64,
    }


GREEDY = {"max_new_tokens": 7, "do_sample": False}


@pytest.fixture
def model():
    return make("llama_gqa", dtype=torch.float64)


@pytest.fixture
def tokenizer():
    return make_tokenizer()


def positions(cache):
    return {one for layer in range(2) for one in cache.positions(layer).flatten().tolist() if one >= 0}


def decode(chat, start, stop):
    return chat._tokenizer.decode(chat.ids[0, start:stop])


# ---- turns ----


def test_each_turn_is_generate_over_the_whole_conversation(model, tokenizer):
    with kvpatch.patched(model, "h2o", k=1.0) as patch:
        chat, found = patch.chat(tokenizer, system="be kind", **GREEDY), []
        for turn in TURNS:
            before = [dict(one) for one in chat.messages]
            assert chat.send(turn) == chat.messages[-1]["content"]
            found.append(([*before, {"role": "user", "content": turn}], chat.ids))
    for messages, ids in found:
        asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        assert model.generate(asked.input_ids, attention_mask=asked.attention_mask, **GREEDY).tolist() == ids.tolist()


def test_a_turn_reads_new_ids_alone_and_keeps_the_budget(model, tokenizer):
    read = []
    model.model.register_forward_pre_hook(lambda _, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    with kvpatch.patched(model, "roco", k=24) as patch:
        chat = patch.chat(tokenizer, **GREEDY)
        for turn in TURNS:
            chat.send(turn)
            assert sum(read) == chat.ids.shape[1] - 1  # the newest token has not been read
            assert max(int(chat.cache.held(layer).max()) for layer in range(2)) == 24
    assert chat.ids.shape[1] > 90


def test_spans_are_the_messages(model, tokenizer):
    with kvpatch.patched(model, "h2o", k=1.0) as patch:
        chat = patch.chat(tokenizer, system="be kind", **saying(tokenizer, "yes", "no"))
        assert chat.spans == []
        chat.send("one?")
        chat.send("two?")
        assert [decode(chat, *span) for span in chat.spans] == [
            "<|im_start|>system\nbe kind<|im_end|>\n",
            "<|im_start|>user\none?<|im_end|>\n",
            "<|im_start|>assistant\nyes<|im_end|>\n",
            "<|im_start|>user\ntwo?<|im_end|>\n",
            "<|im_start|>assistant\nno<|im_end|>",
        ]


def test_spans_under_a_template_that_refuses_two_questions_in_a_row(model):
    tokenizer = make_tokenizer(REFUSING.replace("{{ m.content }}", "{{ m.content if loop.last else m.content[:3] }}"))
    with kvpatch.patched(model, "h2o", k=1.0) as patch:
        chat = patch.chat(tokenizer, **saying(tokenizer, "yes indeed", "no"))
        chat.send("one?")
        chat.send("two?")
        assert [decode(chat, *span) for span in chat.spans] == [
            "<|im_start|>user\none<|im_end|>\n",
            "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\n",  # only the next message tells the end
            "two?<|im_end|>\n",
            "<|im_start|>assistant\nno<|im_end|>",
        ]


def test_a_role_and_arguments_of_the_template_are_handed_on(model, tokenizer):
    tokenizer.chat_template = "{{ greeting }}" + TEMPLATE
    with kvpatch.patched(model, "h2o", k=1.0) as patch:
        chat = patch.chat(tokenizer, template={"greeting": "hi!"}, **GREEDY)
        chat.send("7 degrees", role="tool")
        assert decode(chat, *chat.spans[0]) == "hi!<|im_start|>tool\n7 degrees<|im_end|>\n"


@pytest.mark.parametrize("first", [True, False])
def test_a_message_of_which_the_template_writes_nothing_is_refused(first, model, tokenizer):
    tokenizer.chat_template = TEMPLATE.replace("messages %}", "messages if m.role in ('user', 'assistant') %}", 1)
    with kvpatch.patched(model, "h2o", k=24) as patch:
        chat = patch.chat(tokenizer, **GREEDY)
        if not first:
            chat.send("hello")
        before = list(chat.messages)
        with pytest.raises(KVPatchError, match=r"writes nothing of a message of role='developer'.*such as 'user'"):
            chat.send("be kind", role="developer")
        assert chat.messages == before
        assert chat.send("hello")


class Slow:
    """A tokenizer that does not tell where its tokens lie."""

    is_fast = False

    def __init__(self, fast):
        self.fast = fast

    def __call__(self, text, add_special_tokens):
        return self.fast(text, add_special_tokens=add_special_tokens)

    def __getattr__(self, name):
        return getattr(self.fast, name)


def test_a_tokenizer_that_tells_no_places_gives_the_same_spans(model, tokenizer):
    with kvpatch.patched(model, "h2o", k=24) as patch:
        chats = [patch.chat(one, system="be kind", **GREEDY) for one in (tokenizer, Slow(tokenizer))]
        for chat in chats:
            chat.send(TURNS[0])
            chat.send(TURNS[1])
    assert chats[0].spans == chats[1].spans and chats[0].ids.tolist() == chats[1].ids.tolist()
    assert len(chats[0].spans) == 5


# ---- what a template takes away ----


def test_thinking_of_an_earlier_turn_is_forgotten_and_nothing_is_read_anew(model):
    tokenizer = make_tokenizer(THINKING)
    with kvpatch.patched(model, "h2o", k=1.0) as patch:
        chat = patch.chat(tokenizer, **saying(tokenizer, "<think>hm, well</think>yes", "<think>oh</think>no", "good"))
        chat.send("one?")
        cache, ids = chat.cache, tokenizer.decode(chat.ids[0])
        assert "<think>hm, well</think>yes" in ids
        chat.send("two?")
        chat.send("three?")
        assert chat.cache is cache and tokenizer.decode(chat.ids[0]).startswith(ids)
        held = tokenizer.decode(chat.ids[0, sorted(positions(cache))])
        wanted = tokenizer.apply_chat_template(chat.messages, tokenize=False)
        assert "yes<|im_end|>" in wanted and "hm" not in wanted
        assert wanted.startswith(held) and len(wanted) - len(held) <= len("<|im_end|>\n")
        assert decode(chat, *chat.spans[2]) == "<|im_start|>user\ntwo?<|im_end|>\n"


def test_what_the_template_changes_otherwise_is_read_anew(model):
    tokenizer = make_tokenizer(SHORTENED)
    with kvpatch.patched(model, "h2o", k=1.0) as patch:
        chat = patch.chat(tokenizer, **GREEDY)
        chat.send("hello there")
        cache = chat.cache
        chat.send("what is it?")
        assert chat.cache is not cache
        asked = tokenizer.apply_chat_template(chat.messages[:-1], tokenize=False, add_generation_prompt=True)
        assert "hel<|im_end|>" in asked and tokenizer.decode(chat.ids[0]).startswith(asked)
        assert chat.cache.get_seq_length() == chat.ids.shape[1] - 1


# ---- forget ----


@pytest.mark.parametrize("k", [1.0, 40])
def test_a_forgotten_message_is_held_nowhere_and_the_chat_goes_on(model, tokenizer, k):
    with kvpatch.patched(model, "streaming_llm", k) as patch:
        chat = patch.chat(tokenizer, **GREEDY)
        chat.send(TURNS[0])
        start, stop = chat.spans[0]
        assert positions(chat.cache) & set(range(start, stop))
        chat.forget(0)
        assert not positions(chat.cache) & set(range(start, stop))
        assert chat.messages[0] == {"role": "user", "content": TURNS[0], "forgotten": True}
        cache = chat.cache
        chat.send(TURNS[1])
        assert chat.cache is cache and chat.spans[0] == (start, stop)
        assert not positions(cache) & set(range(start, stop))


def test_the_last_token_of_a_forgotten_answer_goes_when_it_is_read(model, tokenizer):
    with kvpatch.patched(model, "h2o", k=1.0) as patch:
        chat = patch.chat(tokenizer, **saying(tokenizer, "yes", "no"))
        chat.send("one?")
        chat.forget(1)
        chat.send("two?")
        held = positions(chat.cache)
        assert not held & set(range(*chat.spans[1])) and held >= set(range(*chat.spans[2]))
        assert decode(chat, *chat.spans[1]) == "<|im_start|>assistant\nyes<|im_end|>\n"


def test_a_forgotten_message_is_not_read_anew(model):
    tokenizer = make_tokenizer(SHORTENED)
    with kvpatch.patched(model, "h2o", k=1.0) as patch:
        chat = patch.chat(tokenizer, system="be kind", **saying(tokenizer, "yes indeed", "no", "well"))
        chat.send("one?")
        chat.forget(1)
        chat.send("two?")  # the template shortens what came before
        assert "one" not in tokenizer.decode(chat.ids[0]) and len(chat.messages) == len(chat.spans) == 5
        assert chat.spans[1][0] == chat.spans[1][1] == chat.spans[2][0]
        assert decode(chat, *chat.spans[2]) == "<|im_start|>assistant\nyes<|im_end|>\n"
        before = [dict(one) for one in chat.messages]
        with pytest.raises(KVPatchError, match=r"replace\(1\): the text was read anew without this forgotten message"):
            chat.replace(1, "three?")
        assert chat.messages == before


# ---- replace ----


@pytest.mark.parametrize("k", [1.0, 60])
def test_a_message_is_replaced_and_the_chat_goes_on(model, tokenizer, k):
    with kvpatch.patched(model, "h2o", k) as patch:
        chat = patch.chat(tokenizer, system="be kind", **saying(tokenizer, "yes", "no", "well"))
        chat.send("what does the whole page say?")
        (start, stop), cache, size = chat.spans[1], chat.cache, chat.ids.shape[1]
        chat.replace(1, "a page")
        new = tokenizer("<|im_start|>user\na page<|im_end|>\n", add_special_tokens=False).input_ids
        assert chat.messages[1] == {"role": "user", "content": "a page"} and chat.spans[1] == (start, stop)
        assert chat.ids[0, start : start + len(new)].tolist() == new and chat.ids.shape[1] == size
        held = positions(cache)
        assert not held & set(range(start + len(new), stop)) and start + len(new) - 1 in held
        assert chat.send("two?") == "no" and chat.cache is cache
        chat.replace(1, "it")
        assert chat.send("three?") == "well" and chat.cache is cache


def test_what_replaces_a_message_is_what_another_chat_reads_in_its_place(model, tokenizer):
    """The entries of the new message, and of what is before it, are those of a chat that has had it from the beginning."""
    entries = []
    with torch.no_grad(), kvpatch.patched(model, "h2o", k=1.0) as patch:
        for first in ("the long page", "short"):
            chat = patch.chat(tokenizer, system="be kind", **saying(tokenizer, "yes"))
            chat.send(first)
            if first != "short":
                chat.replace(1, "short")
            layer, last = chat.cache.layers[1], chat.spans[1][0] + len("<user\nshort<\n")
            order = layer.positions[0, 0, : layer.columns_used].argsort()[:last]
            assert layer.positions[0, 0, order].tolist() == list(range(last))
            entries.append(layer.kv.numbers(layer.columns_used)[0][0, 0, order])
    torch.testing.assert_close(*entries, atol=1e-5, rtol=0)


def test_a_longer_text_moves_up_what_follows(model, tokenizer):
    """The conversation goes on as if every message had been as long as it is now."""
    with kvpatch.patched(model, "h2o", k=1.0, positions="renumbered") as patch:
        chat = patch.chat(tokenizer, system="be kind", **saying(tokenizer, "yes", "no", "well", "so"))
        chat.send("one?")
        chat.send("two?")
        chat.forget(3)
        spans, cache = chat.spans, chat.cache
        chat.replace(1, "one two one two ?")
        new = tokenizer("<|im_start|>user\none two one two ?<|im_end|>\n", add_special_tokens=False).input_ids
        more = spans[1][0] + len(new) - spans[1][1]
        assert more > 0 and chat.spans == [
            spans[0],
            (spans[1][0], spans[1][1] + more),
            *((a + more, b + more) for a, b in spans[2:]),
        ]
        rendered = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in chat.messages)
        whole = tokenizer(rendered, add_special_tokens=False).input_ids
        assert chat.ids[0].tolist() == whole[: chat.ids.shape[1]]
        held = positions(cache)
        assert not held & set(range(*chat.spans[3])) and held >= set(range(*chat.spans[2]))
        chat.forget(2)
        assert not positions(cache) & set(range(*chat.spans[2]))
        assert chat.send("three?") == "well" and chat.cache is cache


def test_a_summary_takes_the_place_of_a_forgotten_message(model, tokenizer):
    with kvpatch.patched(model, "h2o", k=1.0) as patch:
        chat = patch.chat(tokenizer, **saying(tokenizer, "yes", "no"))
        chat.send("a long question?")
        chat.forget(0)
        chat.replace(0, "one?")
        assert chat.messages[0] == {"role": "user", "content": "one?"}
        chat.send("two?")
        assert positions(chat.cache) >= set(range(len("<user\none?<\n")))


def test_a_message_that_cannot_be_replaced_stays(model, tokenizer):
    with kvpatch.patched(model, "h2o", k=1.0) as patch:
        chat = patch.chat(tokenizer, **saying(tokenizer, "yes"))
        with pytest.raises(KVPatchError, match=r"replace\(0\): 0 messages have been read"):
            chat.replace(0, "none")
        chat.send("one?")
        before, ids = [dict(one) for one in chat.messages], chat.ids.clone()
        with pytest.raises(KVPatchError, match=r"replace\(1\): the last token of the newest answer is not read: send\(\)"):
            chat.replace(1, "no")
        with pytest.raises(KVPatchError, match=r"replace\(0\): 17 tokens with the header, and the message has 12: shorten"):
            chat.replace(0, "one two ?")
        with pytest.raises(KVPatchError, match=r"not a int: write replace\(1, '...'\)"):
            chat.replace(0, 3)
        assert chat.messages == before and chat.ids.equal(ids)
        tokenizer.chat_template = TEMPLATE.replace("{{ m.content }}", "{{ messages[0].content[:1] }}{{ m.content }}")
        with pytest.raises(KVPatchError, match="other messages differently than they were read: send.*, or begin another chat"):
            chat.replace(0, "two?")
        assert chat.messages == before


# ---- streams ----


def test_a_stream_gives_the_answer_in_pieces(model, tokenizer):
    with kvpatch.patched(model, "h2o", k=24) as patch:
        sent, streamed = (patch.chat(tokenizer, **GREEDY) for _ in range(2))
        for turn in TURNS:
            assert "".join(streamed.stream(turn)) == sent.send(turn)
        assert streamed.messages == sent.messages and streamed.ids.tolist() == sent.ids.tolist()
        assert streamed.spans == sent.spans


def test_a_stream_runs_under_the_caller_s_autocast(tokenizer):
    """Autocast is of a thread, and generate() runs in another."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", k=24) as patch, torch.autocast("cpu", torch.bfloat16):
        sent, streamed = (patch.chat(tokenizer, **GREEDY) for _ in range(2))
        assert "".join(streamed.stream(TURNS[0])) == sent.send(TURNS[0])
        assert streamed.cache.nbytes == sent.cache.nbytes
        assert streamed.cache.layers[0].dtype == sent.cache.layers[0].dtype == torch.bfloat16


def test_who_stops_listening_ends_the_answer_there(model, tokenizer, monkeypatch):
    asked = threading.Event()

    class Heard(threading.Event):
        def set(self):
            super().set()
            asked.set()

    class Wait(Say):
        def __call__(self, input_ids, scores):
            if len(self.left) == 50:  # ten tokens were written
                assert asked.wait(60)
            return super().__call__(input_ids, scores)

    monkeypatch.setattr("kvpatch.hooks.streams.Event", Heard)
    slow = LogitsProcessorList([Wait(tokenizer, "a bc def ghi " + 47 * "z")])
    with kvpatch.patched(model, "h2o", k=24) as patch:
        chat = patch.chat(tokenizer, logits_processor=slow, max_new_tokens=60)
        pieces = chat.stream("go")
        first = next(pieces)
        pieces.close()
        answer = chat.messages[-1]["content"]
        assert "a bc def gh".startswith(answer) and answer.startswith(first)
        assert chat.cache.get_seq_length() == chat.ids.shape[1] - 1


@pytest.mark.parametrize("how", ["send", "stream", "forget", "replace"])
def test_a_stream_that_was_left_ends_where_the_next_turn_or_edit_begins(model, tokenizer, how):
    """Also if a variable holds its iterator, so that Python does not close it."""

    with kvpatch.patched(model, "h2o", k=1.0) as patch:
        chat = patch.chat(tokenizer, system="be kind", max_new_tokens=60, do_sample=False)
        pieces = chat.stream("go on")
        next(pieces)
        if how in ("send", "stream"):
            list(getattr(chat, how)("and"))
        else:
            getattr(chat, how)(1, *["no"][: how == "replace"])
        roles = ["system", "user", "assistant", *["user", "assistant"] * (how in ("send", "stream"))]
        assert [one["role"] for one in chat.messages] == roles and len(chat.spans) == len(roles)
        list(pieces)  # those that were written
        assert [one["role"] for one in chat.messages] == roles
        chat.cache.check_invariants()
        assert chat.cache.get_seq_length() == chat.ids.shape[1] - 1


def test_two_threads_do_not_take_a_turn_at_once(model, tokenizer):
    running, go = threading.Event(), threading.Event()

    class Wait(Say):
        def __call__(self, input_ids, scores):
            running.set()
            assert go.wait(60)
            return super().__call__(input_ids, scores)

    slow = LogitsProcessorList([Wait(tokenizer, *["y<|im_end|>"] * 2)])
    options = saying(tokenizer) | {"logits_processor": slow}
    with kvpatch.patched(model, "h2o", k=1.0) as patch:
        chat = patch.chat(tokenizer, **options)
        thread = threading.Thread(target=chat.send, args=("one?",))
        thread.start()
        assert running.wait(60)
        for call in (lambda: chat.send("two?"), lambda: list(chat.stream("two?")), lambda: chat.forget(0)):
            with pytest.raises(KVPatchError, match=r"Another thread's send\(\) runs in this chat: wait until it returns"):
                call()
        go.set()
        thread.join()
        assert [one["content"] for one in chat.messages] == ["one?", "y"]
        assert chat.send("two?") == "y"


@pytest.mark.parametrize("how", ["send", "stream"])
def test_a_turn_that_fails_leaves_the_conversation_as_it_was(model, tokenizer, how):
    with kvpatch.patched(model, "h2o", k=24) as patch:
        chat = patch.chat(tokenizer, **saying(tokenizer, "yes"))
        chat.send("one?")
        before = [dict(one) for one in chat.messages]
        with pytest.raises(IndexError, match="pop from empty list"):  # of Say: no answer is left
            list(getattr(chat, how)("two?"))
        assert chat.messages == before
        chat._options = GREEDY
        chat.send("two?")
        read = tokenizer.decode(chat.ids[0])
        assert read.count("one?") == read.count("two?") == 1 and read.count("yes") == 1


def test_stop_strings_are_in_the_chat_s_own_words(model, tokenizer):
    with kvpatch.patched(model, "h2o", k=24) as patch:
        chat = patch.chat(tokenizer, **saying(tokenizer, "yes. or no."), stop_strings=["."])
        assert chat.send("one?") == "yes."


@pytest.mark.parametrize("calls", [None, "assistant\n"])
def test_adapters_are_asked_as_peft_asks_them(model, tokenizer, calls):
    """PEFT's wrapper tells an aLoRA where in a text it sets in."""
    options = {} if calls is None else {"alora_invocation_tokens": tokenizer(calls, add_special_tokens=False).input_ids}
    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=64, init_lora_weights=False, target_modules=["q_proj", "v_proj"], **options
    )
    model = get_peft_model(model, config).double().eval()
    with kvpatch.patched(model, "h2o", k=1.0) as patch:
        chat = patch.chat(tokenizer, **GREEDY)
        chat.send("one?")
        asked = chat.ids[:, :-7]
        want = model.generate(input_ids=asked, attention_mask=torch.ones_like(asked), **GREEDY)
        assert torch.equal(chat.ids, want)
        with model.disable_adapter():
            plain = model.generate(input_ids=asked, attention_mask=torch.ones_like(asked), **GREEDY)
        assert not torch.equal(plain, want)


# ---- the system prompt ----


def test_a_system_prompt_is_kept(model, tokenizer):
    with kvpatch.patched(model, "h2o", k=60) as patch:
        tokens = patch.chat(tokenizer, system="be kind").system_tokens
        with pytest.raises(KVPatchError, match=rf"has {tokens} tokens. Write patched\(model, ..., k=..., sinks={tokens}\)"):
            patch.chat(tokenizer, system="be kind", keep_system=True)
        with pytest.raises(KVPatchError, match=r"there is none: write patch.chat\(tokenizer, system='...'\)"):
            patch.chat(tokenizer, keep_system=True)
    with kvpatch.patched(model, "h2o", k=0.5, sinks=tokens) as patch, pytest.raises(KVPatchError, match=r"a whole number"):
        patch.chat(tokenizer, system="be kind", keep_system=True)
    with kvpatch.patched(model, "h2o", k=60, sinks=tokens) as patch:
        chat = patch.chat(tokenizer, system="be kind", keep_system=True, **GREEDY)
        for turn in TURNS:
            chat.send(turn)
        assert chat.spans[0] == (0, tokens) and chat.ids.shape[1] > 90
        for layer in range(2):
            for head in chat.cache.positions(layer)[0].tolist():
                assert set(range(tokens)) <= set(head)


# ---- errors ----


def test_errors_say_what_to_type(model, tokenizer):
    with kvpatch.patched(model, "h2o", k=24) as patch:
        chat = patch.chat(tokenizer, **GREEDY)
        with pytest.raises(KVPatchError, match=r"forget\(0\): 0 messages have been read; send\(\) one first"):
            chat.forget(0)
        with pytest.raises(KVPatchError, match=r"not a int: write chat.send\('...'\)"):
            chat.send(3)
        chat.send("one?")
        with pytest.raises(KVPatchError, match="2 messages have been read; give 0 to 1, an index of chat.messages"):
            chat.forget(2)
        chat.forget(0)
        with pytest.raises(KVPatchError, match="Message 0 is forgotten already"):
            chat.forget(0)
        for name, value in {"past_key_values": None, "num_beams": 2, "streamer": None}.items():
            with pytest.raises(KVPatchError, match=f"leave (it|{name}) out"):
                patch.chat(tokenizer, **{name: value})
        several = GenerationConfig(num_return_sequences=2, do_sample=True)
        with pytest.raises(KVPatchError, match="num_return_sequences=2 makes several.*give num_return_sequences=1"):
            patch.chat(tokenizer, generation_config=several)
        patch.chat(tokenizer, generation_config=several, num_return_sequences=1, max_new_tokens=3).send("one?")
        model.generation_config.num_beams = 2
        with pytest.raises(KVPatchError, match="num_beams=2 makes several"):
            patch.chat(tokenizer)
        model.generation_config.num_beams, model.generation_config.return_dict_in_generate = 1, True
        patch.chat(tokenizer, **GREEDY).send("one?")
        tokenizer.chat_template = None
        with pytest.raises(KVPatchError, match=r"no chat template: .* set tokenizer.chat_template"):
            patch.chat(tokenizer)
    headless = make("llama_gqa").model
    with kvpatch.patched(headless, "h2o", k=24) as patch, pytest.raises(KVPatchError, match="has no generate"):
        patch.chat(make_tokenizer())
    tuned = get_peft_model(make("llama_gqa"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with kvpatch.patched(tuned, "h2o", k=24) as patch, pytest.raises(KVPatchError, match="prompt tuning puts tokens before"):
        patch.chat(make_tokenizer())
