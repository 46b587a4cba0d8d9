"""Conversations that `kvpatch serve` keeps: answers of generate() on one cache, and how many tokens are not read again."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from typer.testing import CliRunner

import kvpatch
from kvpatch.cli.amending import AmendingSend, complete_answer
from kvpatch.cli.commands import app
from kvpatch.cli.loading import Source
from kvpatch.cli.request_fields import AcceptedRequest
from tests.helpers.marks import batches
from tests.helpers.served import started, until_idle

pytestmark = batches

TEMPLATE = "{% for message in messages %}<bos>{{ message['content'] }}{% endfor %}<bos>"  # no token reaches over it
PAGE = "def read(name):\n    with open(name) as file:\n        return file.read()\n" * 3
QUESTIONS = ("import os, sys", "class Reader:", "import re")
NEW = 8


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    from kvpatch.serving.conversations import Conversations

    with started(tmp_path_factory.mktemp("model"), TEMPLATE, keeping=Conversations(1 << 30, edits=True)) as found:
        yield found


@pytest.fixture(scope="module")
def own(served):
    source = Source(served[1], "float32", "cpu")
    return source.model(), source.tokenizer()


def ask(served, messages, stream=False):
    """The answer, and its usage."""
    client, name = served[:2]
    given = {"model": name, "messages": messages, "max_tokens": NEW, "temperature": 0.0}
    if not stream:
        found = client.chat.completions.create(**given)
        return found.choices[0].message.content, found.usage
    parts = list(client.chat.completions.create(**given, stream=True))
    return "".join(part.choices[0].delta.content or "" for part in parts if part.choices), parts[-1].usage


def tell(role, content):
    return {"role": role, "content": content}


def answer(own, cache, messages):
    """What generate() gives on a cache, as text."""
    model, tokenizer = own
    ids = torch.tensor([tokenizer.apply_chat_template(messages, return_dict=True).input_ids])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


def talk(served, own, patch, first):
    """Ask the questions, turn by turn: the messages, and the tokens of each turn with its answer."""
    cache, messages, counts = patch.new_cache(), [tell("system", first)], []
    for turn, question in enumerate(QUESTIONS):
        messages.append(tell("user", question))
        said, usage = ask(served, messages, stream=turn == 1)
        assert said == answer(own, cache, messages)
        assert usage.prompt_tokens_details.cached_tokens == (counts[-1] - 1 if counts else 0)  # nothing has read the last one
        counts.append(usage.total_tokens)
        messages.append(tell("assistant", said))
    return messages, counts


def test_a_conversation(served, own):
    """Streamed or not; three that go on from an earlier turn, at once; and a text that shares only its beginning."""
    with kvpatch.patched(own[0], "h2o", 24) as patch:
        messages, counts = talk(served, own, patch, "You write Python.")
        other, cache = [*messages[:3], tell("user", "exit()")], patch.new_cache()
        wanted = [answer(own, cache, turn) for turn in (messages[:2], other)][-1]
        with ThreadPoolExecutor(3) as threads:
            found = list(threads.map(lambda one: ask(served, one), [other] * 3))
        assert {(said, usage.prompt_tokens_details.cached_tokens) for said, usage in found} == {(wanted, counts[0] - 1)}
        other = [messages[0], tell("user", "exit()")]
        said, usage = ask(served, other)
        assert said == answer(own, patch.new_cache(), other) and usage.prompt_tokens_details.cached_tokens == 0


def test_completions_and_responses(served):
    client, name = served[:2]
    given = {"model": name, "temperature": 0.0}
    prompt = "You write Python.<bos>x = [<bos>"
    first = client.completions.create(prompt=prompt, max_tokens=NEW, **given)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    text = prompt + first.choices[0].text + "<bos>import re<bos>"
    second = client.completions.create(prompt=text, max_tokens=NEW, **given)
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens - 1
    parts = list(client.completions.create(prompt=text, max_tokens=NEW, stream=True, **given))
    assert parts[-1].usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens - 1
    assert "".join(part.choices[0].text for part in parts) == second.choices[0].text
    found = client.responses.create(input=QUESTIONS[0], max_output_tokens=NEW, **given)
    assert found.usage.input_tokens_details.cached_tokens == 0
    again = [tell("user", QUESTIONS[0]), tell("assistant", found.output_text), tell("user", QUESTIONS[1])]
    found = client.responses.create(input=again, max_output_tokens=NEW, **given)
    assert found.usage.input_tokens_details.cached_tokens > 0


def test_an_edited_history(served, own):
    """A page that is dropped after its use is forgotten, and what was read behind it is not read again."""
    tokenizer = own[1]
    with kvpatch.patched(own[0], "h2o", 24) as patch:
        messages, counts = talk(served, own, patch, PAGE)
        page = len(tokenizer(f"<bos>{PAGE}", add_special_tokens=False).input_ids)
        cache = patch.new_cache()
        for last in (2, 4, 6):
            answer(own, cache, messages[:last])
        cache.forget([(0, page)])
        wanted = answer(own, cache, [*messages, tell("user", "exit()")])
        said, usage = ask(served, [*messages[1:], tell("user", "exit()")])
        assert said == wanted and usage.prompt_tokens_details.cached_tokens == counts[-1] - 1 - page


def test_sampling_on_a_conversation(served):
    """A seed gives one text, as often as a turn is asked for again."""
    client, name = served[:2]
    messages = [tell("system", "You write Python."), tell("user", "with open(path) as file:")]
    said, usage = ask(served, messages)
    messages += [tell("assistant", said), tell("user", "if not")]

    def draw(**fields):
        found = client.chat.completions.create(model=name, messages=messages, max_tokens=NEW, **fields)
        assert found.usage.prompt_tokens_details.cached_tokens == usage.total_tokens - 1
        return found.choices[0].message.content

    hot = [{"temperature": 2.0, "seed": seed} for seed in (1, 2)]
    first = [draw(**one) for one in hot]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda one: draw(**one), hot)) == first
    assert first[0] != first[1] and draw(temperature=2.0, extra_body={"top_k": 1}) == draw(temperature=0.0)


def test_what_is_shown(served):
    """Of conversations, their bytes and what was not read again."""
    address = served[-1]
    _, usage = ask(served, [tell("user", "print(1)")])
    health = json.loads(urllib.request.urlopen(f"{address}/health", timeout=30).read())
    lines = urllib.request.urlopen(f"{address}/metrics", timeout=30).read().decode().splitlines()
    shown = {key: float(value) for key, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}
    assert health["status"] == "ok" and set(health["conversations"]) == {"kept", "bytes", "tokens_reused"}
    assert shown["kvpatch_conversations"] == health["conversations"]["kept"] > 0
    assert shown["kvpatch_conversations_bytes"] == health["conversations"]["bytes"] > 1000 * health["conversations"]["kept"]
    before = health["conversations"]["tokens_reused"]
    _, usage = ask(served, [tell("user", "print(1)"), tell("assistant", ask(served, [tell("user", "print(1)")])[0])])
    health = json.loads(urllib.request.urlopen(f"{address}/health", timeout=30).read())
    assert health["conversations"]["tokens_reused"] - before == usage.prompt_tokens_details.cached_tokens


def test_a_client_that_hangs_up(served, own):
    """Its conversation is one like others: the text that follows has the right answer."""
    client, name, server = served[:3]
    stream = client.chat.completions.create(
        model=name, messages=[tell("user", PAGE)], max_tokens=400, temperature=0.0, stream=True
    )
    next(iter(stream))
    stream.close()
    until_idle(server)
    with kvpatch.patched(own[0], "h2o", 24) as patch:
        messages = [tell("user", PAGE + "pass")]
        said, usage = ask(served, messages)
        assert said == answer(own, patch.new_cache(), messages) and usage.prompt_tokens_details.cached_tokens == 0


def test_usage_in_an_answer():
    """Of chats and completions, and of responses; what has none stays as it is, to the byte."""
    sent = []

    async def send(message):
        sent.append(message)

    def run(kind, *bodies):
        sent.clear()
        amended = AmendingSend(send, lambda found: complete_answer(found, AcceptedRequest({}, cached=7)))
        headers = [(b"content-type", kind), (b"content-length", b"1")]
        messages = [{"type": "http.response.start", "status": 200, "headers": headers}]
        last = len(bodies) - 1
        messages += [{"type": "http.response.body", "body": body, "more_body": i < last} for i, body in enumerate(bodies)]
        for message in messages:
            with pytest.raises(StopIteration):
                amended(message).send(None)
        return b"".join(message.get("body", b"") for message in sent)

    found = run(b"application/json", b'{"usage": {"prompt', b'_tokens": 9, "prompt_tokens_details": {"a": 1}}}')
    assert json.loads(found) == {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"a": 1, "cached_tokens": 7}}}
    assert (b"content-length", str(len(found)).encode()) in sent[0]["headers"] and len(sent[0]["headers"]) == 2
    assert run(b"application/json", b'{"error": {"usage":  1}}') == b'{"error": {"usage":  1}}'
    found = run(b"text/event-stream", b'event: done\ndata: {"response": {"usage": {"input_tokens": 9}}}\n\n')
    assert found.startswith(b"event: done\ndata: {") and found.endswith(b"}\n\n")
    details = {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 7}}
    assert json.loads(found.split(b"data: ")[1]) == {"response": {"usage": details}}
    for part in (b'data: {"usage": null, "text":  "\\"usage\\":"}\n\n', b"data: [DONE]\n\n"):
        assert run(b"text/event-stream", part) == part


def test_what_is_refused_before_weights_are_loaded():
    run = CliRunner().invoke
    found = run(app, ["serve", "--model", "no/model", "--edits"])
    assert found.exit_code and "add --keep-conversations 1GiB" in found.output + found.stderr
    for size in ("7", "much", "0B"):
        found = run(app, ["serve", "--model", "no/model", "--keep-conversations", size])
        assert found.exit_code and f"--keep-conversations {size} is no size" in found.output + found.stderr
