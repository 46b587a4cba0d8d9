"""`kvpatch serve --protect system`: the tokens of a system message are held, and answers are those of patch.chat()."""

import pytest
import torch
from typer.testing import CliRunner

import kvpatch
from kvpatch.cache.messages import Messages
from kvpatch.cli.commands import app
from kvpatch.cli.loading import MODELS, Source
from kvpatch.errors import KVPatchError
from tests.helpers.marks import batches
from tests.helpers.served import started, until_idle

pytestmark = batches

TEMPLATE = (
    "{% for message in messages %}<bos>{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<bos>{% endif %}"
)
SYSTEM = "You write Python."
QUESTIONS = (
    "import os\nimport sys\n\n\ndef main(argv):\n    for name in argv[1:]:",
    "class Reader:\n    def read(self, name):\n",
)
NEW = 8


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    from kvpatch.serving.conversations import Conversations

    with started(tmp_path_factory.mktemp("model"), TEMPLATE, Conversations(1 << 30), protect="system") as found:
        yield found


@pytest.fixture(scope="module")
def own(served):
    source = Source(served[1], "float32", "cpu")
    return source.model(), source.tokenizer()


def tell(role, content):
    return {"role": role, "content": content}


def count_system(own):
    return len(own[1](f"<bos>{SYSTEM}", add_special_tokens=False).input_ids)


def count_kept(served, system, start=0):
    """The fewest of so many tokens that a head of the newest conversation holds."""
    until_idle(served[2])
    cache = served[2]._generation_state._cb_manager.conversations._kept[-1].cache
    assert cache.columns_read > 24
    held = [cache.positions(layer) for layer in range(len(cache.layers))]
    return min(int(((one >= start) & (one < start + system)).sum(-1).min()) for one in held)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_it_is_held(served, own, role):
    """Two turns, of which the second goes on from the first; the answers are those of a chat."""
    client, name = served[:2]
    with kvpatch.patched(own[0], "h2o", 24, protect="system") as patch:
        chat = patch.chat(own[1], system=SYSTEM, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        wanted = [chat.send(question) for question in QUESTIONS]
    messages = [tell(role, SYSTEM)]
    for turn, question in enumerate(QUESTIONS):
        messages.append(tell("user", question))
        found = client.chat.completions.create(model=name, messages=messages, max_tokens=NEW, temperature=0.0)
        assert found.choices[0].message.content == wanted[turn]
        assert (found.usage.prompt_tokens_details.cached_tokens > 0) >= (turn > 0)
        assert count_kept(served, count_system(own)) == count_system(own)
        messages.append(tell("assistant", wanted[turn]))


def test_instructions_are_held(served, own):
    client, name = served[:2]
    client.responses.create(model=name, instructions=SYSTEM, input=QUESTIONS[1] * 2, max_output_tokens=NEW, temperature=0.0)
    assert count_kept(served, count_system(own)) == count_system(own)


def test_a_later_system_message_is_held(served, own):
    """The text is read anew, since what was kept had another budget beside its system message."""
    client, name = served[:2]
    messages = [tell("user", QUESTIONS[0])]
    first = client.chat.completions.create(model=name, messages=messages, max_tokens=NEW, temperature=0.0)
    messages.append(tell("assistant", first.choices[0].message.content))
    start = len(own[1].apply_chat_template(messages, return_dict=True).input_ids)
    messages += [tell("system", SYSTEM), tell("user", QUESTIONS[1])]
    found = client.chat.completions.create(model=name, messages=messages, max_tokens=NEW, temperature=0.0)
    assert found.usage.prompt_tokens_details.cached_tokens == 0
    assert count_kept(served, count_system(own), start) == count_system(own)


def test_a_completion_has_none(served, own):
    """And a chat of the same tokens does not go on from it."""
    client, name = served[:2]
    text = f"<bos>{SYSTEM}<bos>{QUESTIONS[1]}<bos>"
    first = client.completions.create(model=name, prompt=text, max_tokens=NEW, temperature=0.0)
    assert count_kept(served, count_system(own)) < count_system(own)
    messages = [
        tell("system", SYSTEM),
        tell("user", QUESTIONS[1]),
        tell("assistant", first.choices[0].text),
        tell("user", "x ="),
    ]
    found = client.chat.completions.create(model=name, messages=messages, max_tokens=NEW, temperature=0.0)
    assert found.usage.prompt_tokens_details.cached_tokens == 0
    assert count_kept(served, count_system(own)) == count_system(own)


def test_one_beyond_the_budget_is_refused(served, own):
    import openai

    client, name = served[:2]
    long = tell("system", "with open(path) as file:\n" * 8)
    with pytest.raises(openai.BadRequestError, match=r"The system message has \d+ tokens.* budget of this text is 24: shorten"):
        client.chat.completions.create(model=name, messages=[long, tell("user", QUESTIONS[0])], max_tokens=NEW)
    found = client.chat.completions.create(model=name, messages=[tell("user", QUESTIONS[0])], max_tokens=NEW)
    assert found.choices[0].message.content


def test_a_template_that_hides_its_messages_is_refused(own):
    from kvpatch.cli.request_system import find_messages

    body = {"messages": [tell("system", SYSTEM), tell("user", QUESTIONS[0])]}
    ids = own[1].apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=True).input_ids
    assert find_messages(own[1], body, ids).count_system(len(ids)) == count_system(own)
    with pytest.raises(KVPatchError, match="does not tell where the messages of this text end"):
        find_messages(own[1], body, ids[:-1])


def test_a_request_without_messages_fails_alone(own):
    from kvpatch.cli.answering import start_engine

    with kvpatch.patched(own[0], "h2o", 24, protect="system"):
        manager = start_engine(own[0], {"num_blocks": 40})
        alone = manager.add_request([5] * 40, max_new_tokens=2)
        told = manager.add_request([5] * 40, max_new_tokens=2, messages=Messages(("system", "assistant"), (0, 10)))
        found = {one.request_id: one for one in (manager.get_result(timeout=120), manager.get_result(timeout=120))}
        manager.stop(block=True)
    assert "came without messages" in found[alone].error
    assert found[told].error is None and len(found[told].generated_tokens) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--protect", "user"], "--protect='user' must be one of system"),
        (["--protect", "system", "--keep-conversations", "1MiB", "--edits"], "Leave one out"),
        (["--protect", "system", "-o", "protect=[3]"], "give one of them"),
        (["--protect", "system"], "has no chat template"),
    ],
)
def test_refused_at_the_start(options, words):
    found = CliRunner().invoke(app, ["serve", str(MODELS / "llama-python"), "-k", "24", "--device", "cpu", *options])
    assert found.exit_code and words in " ".join(found.output.split())


def test_marks_are_counted():
    messages = Messages(("system", "user", "system", "assistant"), (0, 3, 5, 9))
    assert [messages.count_system(n) for n in (2, 5, 20)] == [2, 3, 7]
    assert torch.equal(messages.mark_system(6).nonzero()[:, 0], torch.tensor([0, 1, 2, 5]))
