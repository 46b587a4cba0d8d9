"""Calls of tools in `kvpatch serve`: those that cannot be read, and what stands beside them in messages."""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpatch.cli.loading import MODELS, Source
from tests.helpers.marks import batches
from tests.helpers.served import started, until_idle

pytest.importorskip("fastapi")
pytest.importorskip("openai")

pytestmark = batches

TEXT = "import os\nimport sys\n\n\ndef main(argv):\n    for name in argv[1:]:\n"
NEW = 24
CALL = {
    "open": "s",
    "close": "\n",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
"""How this model calls a tool, whose text of source code is hardly ever JSON."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(MODELS / "llama-python", folder, dirs_exist_ok=True)
    path, fields = folder / "tokenizer_config.json", {"tool_calls": CALL, "content": {"content": "text"}}
    template = {"start_anchor": "argv[1:]:\n", "fields": fields}
    path.write_text(json.dumps({**json.loads(path.read_text()), "response_template": template}))
    with started(folder) as found:
        yield found


def test_a_call_that_cannot_be_read(served):
    """A stream ends with an error, a plain answer is its text; requests that end in the same passes are answered."""
    import openai

    client, name, server, alone, _ = served
    messages, wanted = [{"role": "user", "content": TEXT}], alone(TEXT, NEW)
    assert any("s" in line for line in wanted.splitlines()[:-1]), "the text has no call"
    given = {"model": name, "temperature": 0.0}
    plain = client.chat.completions.create(messages=messages, max_tokens=NEW, **given)
    assert (plain.choices[0].message.content, plain.choices[0].finish_reason) == (wanted, "length")

    def stream():
        with pytest.raises(openai.APIError, match="answer cannot be read: .*JSON"):
            for _ in client.chat.completions.create(messages=messages, max_tokens=NEW, stream=True, **given):
                begun.set()

    def ask(new):
        return client.completions.create(prompt=TEXT, max_tokens=new, **given).choices[0].text

    begun = threading.Event()
    with ThreadPoolExecutor(NEW + 1) as threads:
        streamed = threads.submit(stream)
        begun.wait(30)
        others = list(threads.map(ask, range(1, NEW + 1)))
        streamed.result()
    assert others == [alone(TEXT, new) for new in range(1, NEW + 1)]
    until_idle(server)


def test_a_text_beside_a_call(served):
    """A message has both, and the template gets both: of chats, and of responses, where they are two items."""
    client, name, _, _, _ = served
    tokenizer = Source(name).tokenizer()
    asked, said = {"role": "user", "content": TEXT}, {"role": "assistant", "content": "x = 1  # now I look"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = client.chat.completions.create(model=name, messages=[asked, {**said, "tool_calls": [call]}], max_tokens=1)
    spoken = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    response = client.responses.create(model=name, input=[asked, said, spoken], max_output_tokens=1)
    wanted = len(tokenizer(TEXT + said["content"]).input_ids)
    assert (chat.usage.prompt_tokens, response.usage.input_tokens) == (wanted, wanted)


def test_what_a_template_gets():
    """Thinking that a client sends back, an empty text beside a call, and roles that templates know: they drop others."""
    from transformers.cli.serving.utils import Modality

    from kvpatch.cli.tool_calls import convert_messages

    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    told = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "why"}
    (found,) = convert_messages([told], Modality.LLM)
    assert (found["content"], found["reasoning_content"]) == ("", "why")
    assert found["tool_calls"][0]["function"]["arguments"] == {}
    messages = [{"role": role, "content": "x"} for role in ("developer", "user", "system", "assistant")]
    assert [one["role"] for one in convert_messages(messages, Modality.LLM)] == ["system", "user", "system", "assistant"]
