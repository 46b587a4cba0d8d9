"""protect="system" and quota="messages" in a chat: the messages say which tokens these are."""

import pytest
import torch

import kvpatch
from kvpatch.errors import KVPatchError
from tests.helpers.comparing import calibrated
from tests.helpers.marks import batches
from tests.helpers.tiny import make, prompt
from tests.hooks.test_chat import GREEDY, TURNS, make_tokenizer

SYSTEM = "be brief. no lists."
POLICIES = [name for name in kvpatch.list_policies() if name != "full"]


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def generate(model, ids, cache):
    model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **GREEDY)


def missing(chat, span):
    """How many tokens of a span some head does not hold, at most."""
    heads = (head for layer in range(2) for head in chat.cache.positions(layer)[0].tolist())
    return max(len(set(range(*span)) - set(head)) for head in heads)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_drops_an_instruction(model, tokenizer, policy):
    """By its defaults, under a budget of half the text, in every turn."""
    given = calibrated(policy, "llama_gqa", torch.float32)
    with kvpatch.patched(model, policy, 0.5, protect="system", **given) as patch:
        chat = patch.chat(tokenizer, system=SYSTEM, keep_system=True, **GREEDY)
        for turn in ("x" * 90, *TURNS):
            chat.send(turn)
            assert missing(chat, (0, chat.system_tokens)) == 0
        evicts = kvpatch.get_policy(policy).schedule != "decode" and policy != "duo"  # whose heads keep 384 tokens
        assert missing(chat, (0, chat.ids.shape[1])) > 60 or not evicts


def test_they_drop_some_without_it(model, tokenizer):
    for policy in ("window", "h2o", "snapkv"):
        with kvpatch.patched(model, policy, 0.5) as patch:
            chat = patch.chat(tokenizer, system=SYSTEM, **GREEDY)
            chat.send("x" * 90)
            assert missing(chat, (0, chat.system_tokens)) > 0, policy


def test_the_system_message_alone_is_protected(model, tokenizer):
    """What a mask over its tokens keeps."""
    with kvpatch.patched(model, "h2o", 0.5, protect="system") as patch:
        chat = patch.chat(tokenizer, system=SYSTEM, **GREEDY)
        chat.send("what is it? " * 3)
        by_word, tokens, ids = chat.cache.positions(1), chat.system_tokens, chat.ids
        asked = chat.spans[2][0] + len(tokenizer("<|im_start|>assistant\n", add_special_tokens=False).input_ids)
    mask = torch.arange(asked) < tokens
    with kvpatch.patched(model, "h2o", 0.5, protect=mask) as patch:
        cache = patch.new_cache()
        generate(model, ids[:, :asked], cache)
    assert torch.equal(by_word, cache.positions(1))


def test_a_later_system_message_is_protected_too(model, tokenizer):
    with kvpatch.patched(model, "window", 90, protect="system") as patch:
        chat = patch.chat(tokenizer, system="be kind", **GREEDY)
        chat.send(TURNS[0])
        chat.send("be brief", role="system")
        chat.send("x" * 60)
    assert missing(chat, chat.spans[0]) == missing(chat, chat.spans[3]) == 0 < missing(chat, chat.spans[1])


def test_messages_have_quotas(model, tokenizer):
    """What spans give at the first prompt; and each later message keeps its share of the budget."""
    with kvpatch.patched(model, "h2o", 60, quota="messages", schedule="prompt", recent=4) as patch:
        chat = patch.chat(tokenizer, system=SYSTEM, **GREEDY)
        chat.send("x" * 60)
        spans, first, ids = chat.spans[:2], chat.cache.positions(1), chat.ids
        for turn in TURNS:
            chat.send(turn)
            for message, (start, stop) in zip(chat.messages, chat.spans, strict=True):
                share = 60 * (stop - start) // chat.ids.shape[1]
                assert message["role"] == "assistant" or (stop - start) - missing(chat, (start, stop)) >= share > 0
    header = len(tokenizer("<|im_start|>assistant\n", add_special_tokens=False).input_ids)
    with kvpatch.patched(model, "h2o", 60, quota=spans, schedule="prompt", recent=4) as patch:
        cache = patch.new_cache()
        generate(model, ids[:, : spans[1][1] + header], cache)
    assert torch.equal(first, cache.positions(1))


def test_another_system_message_in_its_place_is_protected(model, tokenizer):
    with kvpatch.patched(model, "window", 90, protect="system") as patch:
        chat = patch.chat(tokenizer, system="be kind", **GREEDY)
        chat.send(TURNS[0])
        chat.replace(0, "be rude")
        cache = chat.cache
        chat.send("x" * 60)
    assert chat.cache is cache
    assert missing(chat, chat.spans[0]) == 0 < missing(chat, chat.spans[1])


@pytest.mark.parametrize("policy", ["h2o", "window"])
def test_a_system_message_without_room_in_its_place_is_refused(model, tokenizer, policy):
    """Later tokens have filled the heads since it was forgotten."""
    with kvpatch.patched(model, policy, 40, protect="system") as patch:
        chat = patch.chat(tokenizer, system="be kind", **GREEDY)
        chat.send(TURNS[0])
        chat.forget(0)
        cache = chat.cache.clone()
        patch.replace(cache, chat.spans[0], chat.ids[0, :17])  # its own place is free still
        assert set(range(17)) <= set(cache.positions(1)[0, 0].tolist())
        chat.send(TURNS[1])
        text, before = chat.ids.clone(), [chat.cache.positions(layer) for layer in range(2)]
        with pytest.raises(KVPatchError, match="marks 16 of the new .* head 0 of layer 0 has room for 0, since"):
            chat.replace(0, "be bad")
        assert chat.messages[0] == {"role": "system", "content": "be kind", "forgotten": True} and torch.equal(chat.ids, text)
        assert all(torch.equal(one, chat.cache.positions(layer)) for layer, one in enumerate(before))
        for index in (1, 2, 3):
            chat.forget(index)
        chat.replace(0, "be bad")
        chat.send(TURNS[2])
        assert missing(chat, (0, 16)) == 0


def test_an_answer_is_no_span(model, tokenizer):
    """Neither is its last token, which the next prompt brings."""
    with kvpatch.patched(model, "h2o", 200, quota="messages") as patch:
        chat = patch.chat(tokenizer, system="be kind", **GREEDY)
        for turn in TURNS:
            chat.send(turn)
    slots = chat.cache.layers[1]
    numbers = dict(zip(slots.positions[0, 0].tolist(), (slots.state["span"][0, 0] >> 32).tolist(), strict=True))
    for index, (message, (start, stop)) in enumerate(zip(chat.messages, chat.spans, strict=True)):
        number = 0 if message["role"] == "assistant" else index + 1
        assert {numbers[at] for at in range(start, min(stop, slots.columns_read))} == {number}


def test_each_turn_shares_out_its_own_budget(model, tokenizer):
    """With turns="each" what is held of earlier turns takes no room from the spans of this one."""
    with kvpatch.patched(model, "window", 12, quota="messages", schedule="prompt", turns="each") as patch:
        chat = patch.chat(tokenizer, **GREEDY)
        for turn in TURNS:
            before = 0 if not chat.messages else chat.spans[-1][1] - 1
            chat.send(turn + " " + "x" * 20)
            start, stop = chat.spans[-2]
            n = chat.spans[-1][1] - GREEDY["max_new_tokens"] - before
            assert stop - start - missing(chat, (start, stop)) >= 12 * (stop - start) // n > 4


def test_without_messages_they_are_refused(model, tokenizer):
    for given, words in (
        (
            {"protect": "system"},
            r"protect='system' .* without messages: use patch.chat\(tokenizer, system='...'\), or give a b",
        ),
        ({"quota": "messages"}, r"quota='messages' .* without messages: use patch.chat\(tokenizer, .*\), or give spans"),
    ):
        with kvpatch.patched(model, "h2o", 8, **given), pytest.raises(KVPatchError, match=words):
            model.generate(prompt(1, 20), **GREEDY)
    said = r"there is none: write patch.chat\(tokenizer, system='...'\)"
    with kvpatch.patched(model, "h2o", 60, protect="system") as patch, pytest.raises(KVPatchError, match=said):
        patch.chat(tokenizer)


@batches
def test_engines_see_no_messages(model, tokenizer):
    said = r"continuous batching reads token ids: give the template's own"
    with kvpatch.patched(model, "h2o", 60, protect="system"), pytest.raises(KVPatchError, match=said):
        model.generate_batch([[1, 2, 3]])


def test_a_system_message_beyond_the_budget_is_refused(model, tokenizer):
    with kvpatch.patched(model, "h2o", 20, protect="system") as patch:
        chat = patch.chat(tokenizer, system=SYSTEM, **GREEDY)
        with pytest.raises(KVPatchError, match=rf"marks {chat.system_tokens} tokens .* but the budget is 20: raise k"):
            chat.send("what is it?")
        assert [one["role"] for one in chat.messages] == ["system"]
