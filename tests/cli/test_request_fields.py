"""Fields of requests to `kvpatch serve`: each is obeyed or refused in words, and the guide says which."""

import re
from pathlib import Path

import pytest

from kvpatch.cli.request_fields import OBEYED, PATHS, REFUSED, RefusedError, Served, read_request

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "serving.md"
CHAT, TEXT, RESPONSE = PATHS
NEEDED = {CHAT: {"messages": [{"role": "user", "content": "a"}]}, TEXT: {"prompt": "a"}, RESPONSE: {"input": "a"}}
SERVED = Served("m")


def read(path, served=SERVED, **fields):
    return read_request(path, {**NEEDED[path], **fields}, served)


def refusal(path, served=SERVED, **fields):
    with pytest.raises(RefusedError) as error:
        read(path, served, **fields)
    return error.value


def test_what_is_asked_for():
    asked = read(
        CHAT,
        model="m",
        temperature=0.5,
        top_k=3,
        seed=7,
        stop="x",
        max_tokens=9,
        max_completion_tokens=5,
        user="ann",
        n=1,
        tools=[],
    )
    assert asked.sampling == {"temperature": 0.5, "top_k": 3, "seed": 7}
    assert (asked.stops, asked.max_new_tokens, asked.user) == (["x"], 5, "ann")
    assert asked.body == {"model": "m", **NEEDED[CHAT], "tools": [], "stream": False}, "what the handler obeys itself"


def test_a_response_is_whole_unless_asked_for_in_pieces():
    """transformers streams responses by default, OpenAI does not."""
    assert read(RESPONSE).body["stream"] is False and read(RESPONSE, stream=True).body["stream"] is True


@pytest.mark.parametrize("path", PATHS)
def test_null_is_as_if_left_out(path):
    rows = {**OBEYED, **REFUSED}
    asked = read(path, **{name: None for name, row in rows.items() if PATHS[path] in row.paths and name not in NEEDED[path]})
    assert asked.sampling == {} and asked.max_new_tokens is None


@pytest.mark.parametrize("name", REFUSED)
def test_each_refused_field(name):
    """The error names the field, and a value that asks for nothing passes."""
    row = REFUSED[name]
    for path in (path for path, letter in PATHS.items() if letter in row.paths):
        error = refusal(path, **{name: {"of": "no value"}})
        assert error.param == name and row.instead in error.message and error.code == "unsupported_parameter"
        for harmless in row.harmless:
            read(path, **{name: harmless})


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT, {"n": 2}, r"n is not served \(but n=1\): send the request several times"),
        (CHAT, {"n": True}, "n is not served"),
        (CHAT, {"logprobs": True}, "logprobs is not served.*gives no probabilities"),
        (TEXT, {"logprobs": 0}, "logprobs is not served"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format is not served.*ask for it in the prompt"),
        (CHAT, {"tool_choice": "required"}, "tool_choice must be 'auto'"),
        (CHAT, {"temperature": -0.1}, "temperature must be a number from 0 to 2"),
        (CHAT, {"temperature": "1"}, "temperature must be a number"),
        (CHAT, {"temperature": float("nan")}, "temperature must be a number"),
        (CHAT, {"temperature": True}, "temperature must be a number"),
        (CHAT, {"top_p": 0}, "top_p must be a number above 0, at most 1"),
        (CHAT, {"max_tokens": 0}, "max_tokens must be a whole number from 1"),
        (CHAT, {"max_tokens": 1.5}, "max_tokens must be a whole number"),
        (CHAT, {"seed": 2**63}, "seed must be a whole number"),
        (CHAT, {"stop": ["a", ""]}, "stop must be a string, or a list"),
        (CHAT, {"stop": 3}, "stop must be a string, or a list"),
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias must give a number from -100 to 100"),
        (CHAT, {"logit_bias": {"9" * 5000: 1}}, "logit_bias must give a number from -100 to 100"),
        (CHAT, {"logit_bias": {"3": 101}}, "logit_bias must give a number from -100 to 100"),
        (CHAT, {"stream": "yes"}, "stream must be true or false"),
        (CHAT, {"stream_options": {"include_obfuscation": True}}, "stream_options may have include_usage alone"),
        (CHAT, {"messages": []}, "messages must be a list with at least one message"),
        (CHAT, {"messages": "a"}, "messages must be a list"),
        (CHAT, {"messages": [{"role": "user"}]}, r"messages \[0\] needs content"),
        (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, r"messages \[0\] must be an object whose role is one of"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "name": "b"}]}, r"\[0\] has name, which nothing reads"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type 'image_url'.*reads text alone"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": []}]}]}, r"type \[\].*reads text alone"),
        (CHAT, {"messages": [{"role": "assistant", "content": "a", "reasoning_content": 1}]}, "_content must be a string"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "no JSON"),
        (CHAT, {"tools": [{"type": "web_search"}]}, r"tools \[0\] must be of type 'function'"),
        (CHAT, {"chat_template_kwargs": {"chat_template": "a"}}, "may not have chat_template: give what"),
        (TEXT, {"prompt": ["a", "b"]}, "prompt must be one string: send a request for each"),
        (TEXT, {"prompt": ""}, "prompt must be a string with at least one character"),
        (TEXT, {"echo": True}, r"echo is not served \(but echo=False\)"),
        (RESPONSE, {"input": [{"type": "item_reference"}]}, "part of type 'item_reference'"),
        (RESPONSE, {"input": [{"role": "user", "content": "a"}, {"type": "computer_call"}]}, "'computer_call', which is not"),
        (RESPONSE, {"input": [{"role": "user", "content": "a"}, {"type": []}]}, r"a \[\], which is not served"),
        (RESPONSE, {"instructions": "a", "input": [{"role": "system", "content": "b"}]}, "begins with another: send one"),
        (RESPONSE, {"previous_response_id": "r"}, "previous_response_id is not served: nothing is stored"),
        (RESPONSE, {"stop": "a"}, "/v1/responses has no field 'stop'"),
        (CHAT, {"temprature": 1}, "no field 'temprature'. Did you mean 'temperature'"),
        (CHAT, {"zzz": 1}, "no field 'zzz'. It takes model, messages"),
        (CHAT, {"kvpatch": {"k": 64}}, "no field 'kvpatch'"),
    ],
)  # fmt: skip
def test_what_is_refused(path, fields, words):
    error = refusal(path, **fields)
    assert re.search(words, error.message), error.message
    assert error.status == 400 and error.param == next(iter(fields))
    assert error.describe()["error"] == {
        "message": error.message, "type": "invalid_request_error", "param": error.param, "code": error.code
    }  # fmt: skip


@pytest.mark.parametrize(
    "content",
    ["a", [{"type": "text", "text": "a"}]],
)
def test_messages_that_pass(content):
    """As a client sends back an answer with a call of a tool, and what the tool gave."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}
    read(CHAT, messages=[{"role": "user", "content": content}, answer, {"role": "tool", "tool_call_id": "c", "content": "1"}])
    spoken = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    told = {"type": "function_call_output", "call_id": "c", "output": "1"}
    read(RESPONSE, input=[{"role": "user", "content": content}, spoken, told])


def test_what_a_model_cannot_do():
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert "does not know how 'm' calls one" in refusal(CHAT, Served("m", tools=False), tools=tools).message
    read(CHAT, Served("m", tools=False), tools=[])
    assert "has no chat template: use /v1/completions" in refusal(CHAT, Served("m", chats=False)).message
    read(TEXT, Served("m", chats=False))
    error = refusal(CHAT, model="other")
    assert (error.status, error.code) == (404, "model_not_found") and "has the model 'm', not 'other'" in error.message


@pytest.mark.parametrize("body", [None, [], "a", 3])
def test_a_body_that_is_no_object(body):
    with pytest.raises(RefusedError, match="must be a JSON object"):
        read_request(CHAT, body, SERVED)


@pytest.mark.parametrize("path", PATHS)
def test_a_request_without_a_text(path):
    with pytest.raises(RefusedError, match="is missing: " + path):
        read_request(path, {}, SERVED)


def test_the_guide_names_every_field():
    table = GUIDE.read_text().partition("### Fields of a request")[2].partition("\n## ")[0]
    obeyed, refused = table.partition("Refused")[::2]
    for rows, text in ((OBEYED, obeyed), (REFUSED, refused)):
        missing = [name for name in rows if f"`{name}`" not in text]
        assert not missing, f"docs/guides/serving.md does not name {', '.join(missing)}"
