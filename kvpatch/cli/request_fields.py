"""The fields of a request to `kvpatch serve`: each is obeyed, or refused with a sentence before the engine sees it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import suggest
from . import request_messages as messages

PATHS = {"/v1/chat/completions": "c", "/v1/completions": "t", "/v1/responses": "r"}  # chat, text, responses
READ = ("model", "messages", "prompt", "input", "instructions", "tools", "chat_template_kwargs", "parallel_tool_calls")
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "seed",
)  # fmt: skip


class RefusedError(Exception):
    """A request that is answered with an error in OpenAI's form.

    Args:
        message: a sentence that tells what to send instead.
        param: the field.
        status: of HTTP.
        code: for programs.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def describe(self) -> dict[str, Any]:
        """Return the body of the answer, an error in OpenAI's form. Its type follows from the HTTP status."""
        kind = {401: "authentication_error"}.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Served:
    """The model of a server: its name, and whether its chat template and its calls of tools are known."""

    name: str
    chats: bool = True
    tools: bool = True


@dataclass
class AcceptedRequest:
    """A request that was accepted.

    body: what transformers' handler reads. sampling: fields of SAMPLING. stops: strings that end the text. max_new_tokens: if
    the client gives it. user: as the client calls it. Filled in as the request runs: n_prompt, n_generated: its tokens, cached:
    those that were not read again, end_reason.
    """

    body: dict[str, Any]
    sampling: dict[str, Any] = field(default_factory=dict)
    stops: list[str] = field(default_factory=list)
    max_new_tokens: int | None = None
    user: str = ""
    n_prompt: int = 0
    cached: int = 0
    n_generated: int = 0
    end_reason: str = ""


class Obeyed(NamedTuple):
    """A field that is obeyed: letters of PATHS that take it, and a check that returns what is wrong, or None."""

    paths: str
    check: Callable[[object], str | None]


class FieldRefusal(NamedTuple):
    """A field that is refused: letters of PATHS where it is, values that pass (they ask for nothing), what to do instead."""

    paths: str
    harmless: tuple[object, ...]
    instead: str


def _expect_number(low: float, high: float, above: bool = False) -> Callable[[object], str | None]:
    """Return a check for OBEYED, the table of fields, made at import: it says what is wrong with a number, or None.

    `_check_field` calls the check. above: `low` itself is wrong too.
    """
    bounds = f"above {low:g}, at most {high:g}" if above else f"from {low:g} to {high:g}"

    def check(value: object) -> str | None:
        valid = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
        return None if valid and not (above and value == low) else f"must be a number {bounds}"

    return check


def _expect_integer(low: int, high: int) -> Callable[[object], str | None]:
    """Return a check, for the table OBEYED, by which `_check_field` learns what is wrong with a whole number, or None."""

    def check(value: object) -> str | None:
        valid = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return None if valid else f"must be a whole number from {low} to {high}"

    return check


def _expect_type(kind: type, word: str) -> Callable[[object], str | None]:
    """Return a check for the table OBEYED: it says that a value must be `word`, such as "a string", unless it is a `kind`."""
    return lambda value: None if isinstance(value, kind) else f"must be {word}"


def _check_prompt(value: object) -> str | None:
    """Return what is wrong with the prompt of a text completion, or None. `_check_field` finds this in the table OBEYED."""
    if isinstance(value, list):
        return "must be one string: send a request for each prompt, and text in place of token ids"
    return None if isinstance(value, str) and value else "must be a string with at least one character"


def _check_stop(value: object) -> str | None:
    """Return what is wrong with a request's stop strings, or None. `_check_field` finds this in the table OBEYED."""
    given = [value] if isinstance(value, str) else value
    valid = isinstance(given, list) and len(given) <= 16 and all(isinstance(one, str) and one for one in given)
    return None if valid else "must be a string, or a list of at most 16, none of them empty"


def _check_bias(value: object) -> str | None:
    """Return what is wrong with a request's logit_bias (numbers by token ids as text), or None.

    `_check_field` finds this in the table OBEYED.
    """
    valid = isinstance(value, dict) and all(
        re.fullmatch(r"[0-9]{1,9}", str(token)) and _expect_number(-100, 100)(bias) is None for token, bias in value.items()
    )
    return None if valid else "must give a number from -100 to 100 for each token id"


def _check_stream_options(value: object) -> str | None:
    """Return what is wrong with a request's stream_options, or None. `_check_field` finds this in the table OBEYED."""
    valid = isinstance(value, dict) and set(value) <= {"include_usage"} and isinstance(value.get("include_usage", True), bool)
    return None if valid else "may have include_usage alone (usage comes with the last piece of every stream)"


def _check_tool_choice(value: object) -> str | None:
    """Return what is wrong with a request's tool_choice, or None. `_check_field` finds this in the table OBEYED."""
    return None if value == "auto" else "must be 'auto': nothing here makes a model call a tool, or keeps it from it"


_TEXT, _TRUTH, _LONGEST = _expect_type(str, "a string"), _expect_type(bool, "true or false"), 2**31 - 1
_AGAIN = "send the request several times, with a seed of its own each"
_RANK = "this server gives no probabilities"
_FORM = "nothing here holds a model to a format: ask for it in the prompt"
_STORE = "nothing is stored here: send the whole conversation each time"

OBEYED = {
    "model": Obeyed("ctr", _TEXT),
    "messages": Obeyed("c", messages.check_messages),
    "prompt": Obeyed("t", _check_prompt),
    "input": Obeyed("r", messages.check_input),
    "instructions": Obeyed("r", _TEXT),
    "stream": Obeyed("ctr", _TRUTH),
    "stream_options": Obeyed("ct", _check_stream_options),
    "max_tokens": Obeyed("ct", _expect_integer(1, _LONGEST)),
    "max_completion_tokens": Obeyed("c", _expect_integer(1, _LONGEST)),
    "max_output_tokens": Obeyed("r", _expect_integer(1, _LONGEST)),
    "stop": Obeyed("ct", _check_stop),
    "temperature": Obeyed("ctr", _expect_number(0, 2)),
    "top_p": Obeyed("ctr", _expect_number(0, 1, above=True)),
    "top_k": Obeyed("ctr", _expect_integer(-1, _LONGEST)),
    "min_p": Obeyed("ctr", _expect_number(0, 1)),
    "repetition_penalty": Obeyed("ctr", _expect_number(0, 2, above=True)),
    "presence_penalty": Obeyed("ct", _expect_number(-2, 2)),
    "frequency_penalty": Obeyed("ct", _expect_number(-2, 2)),
    "logit_bias": Obeyed("ct", _check_bias),
    "seed": Obeyed("ctr", _expect_integer(-(2**63), 2**63 - 1)),
    "tools": Obeyed("cr", messages.check_tools),
    "tool_choice": Obeyed("cr", _check_tool_choice),
    "chat_template_kwargs": Obeyed("c", messages.check_template_kwargs),
    "user": Obeyed("ctr", _TEXT),
}

REFUSED = {
    "n": FieldRefusal("ct", (1,), _AGAIN),
    "best_of": FieldRefusal("t", (1,), _AGAIN),
    "logprobs": FieldRefusal("ct", (False,), _RANK),
    "top_logprobs": FieldRefusal("cr", (0,), _RANK),
    "echo": FieldRefusal("t", (False,), "put the prompt before the answer yourself"),
    "suffix": FieldRefusal("t", ("",), "the model reads from left to right: put all of the text into prompt"),
    "response_format": FieldRefusal("c", ({"type": "text"},), _FORM),
    "text": FieldRefusal("r", ({}, {"format": {"type": "text"}}), _FORM),
    "parallel_tool_calls": FieldRefusal("cr", (True,), "nothing here keeps a model from several calls"),
    "functions": FieldRefusal("c", ([],), "give tools"),
    "function_call": FieldRefusal("c", ("none",), "give tools"),
    "max_tool_calls": FieldRefusal("r", (), "nothing here counts a model's calls"),
    "generation_config": FieldRefusal("ctr", (), "give temperature, top_p and the other fields by name"),
    "reasoning_effort": FieldRefusal("c", (), "give what the model's template reads in chat_template_kwargs"),
    "reasoning": FieldRefusal("r", ({},), "the model's own template decides"),
    "verbosity": FieldRefusal("c", (), "ask for it in the prompt"),
    "audio": FieldRefusal("c", (), "this server answers with text"),
    "modalities": FieldRefusal("c", (["text"],), "this server answers with text"),
    "prediction": FieldRefusal("c", (), "this server takes no draft of an answer"),
    "web_search_options": FieldRefusal("c", (), "this server searches nothing"),
    "background": FieldRefusal("r", (False,), "wait for the answer"),
    "include": FieldRefusal("r", ([],), "the answer has all that there is"),
    "previous_response_id": FieldRefusal("r", (), _STORE),
    "conversation": FieldRefusal("r", (), _STORE),
    "prompt": FieldRefusal("r", (), "give input"),
    "truncation": FieldRefusal("r", ("disabled",), "shorten the input: nothing is left out of it here"),
    "store": FieldRefusal("cr", (False,), _STORE),
    "metadata": FieldRefusal("cr", ({},), _STORE),
    "service_tier": FieldRefusal("cr", ("auto", "default"), "all requests are alike here"),
    "prompt_cache_key": FieldRefusal("cr", (), "a conversation that is kept is found by its tokens"),
    "safety_identifier": FieldRefusal("cr", (), "give user, which the log names"),
}


def read_request(path: str, body: Any, served: Served) -> AcceptedRequest:
    """Check the fields of an arriving request, and sort them by use: by transformers' handlers, in sampling, as stop strings.

    `Gate._check_and_answer` calls it for each. Fields that are null count as missing.

    Args:
        path: one of PATHS.
        body: the JSON that came.
        served: the server's model.

    Raises:
        RefusedError: a field is unknown, wrong, or cannot be obeyed.
    """
    letter = PATHS[path]  # "c": chat completions, "t": text completions, "r": responses
    if not isinstance(body, dict):
        raise RefusedError("The body must be a JSON object with the fields of the request.")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        _check_field(letter, path, name, value)
    _check_model(given, letter, served)
    # fields that are missing, and fields that contradict each other
    needed = {"c": "messages", "t": "prompt", "r": "input"}[letter]
    if needed not in given:
        raise RefusedError(f"{needed} is missing: {path} needs it.", needed)
    first = given["input"][0] if isinstance(given.get("input"), list) else {}
    if "instructions" in given and first.get("role") == "system":  # transformers would drop the latter
        raise RefusedError("instructions is a system message, and input begins with another: send one of them.", "instructions")
    stops = given.get("stop", [])
    most = next((given[name] for name in ("max_completion_tokens", "max_output_tokens", "max_tokens") if name in given), None)
    return AcceptedRequest(
        # READ: what transformers' handlers read
        body={name: given[name] for name in READ if name in given} | {"stream": given.get("stream", False)},
        sampling={name: given[name] for name in SAMPLING if name in given},
        stops=[stops] if isinstance(stops, str) else stops,
        max_new_tokens=most,
        user=given.get("user", ""),
    )


def _check_field(letter: str, path: str, name: str, value: object) -> None:
    """Raise RefusedError unless a request to `path` may have this field with this value; `read_request` calls it for each.

    letter: PATHS[path]. OBEYED has a check for each field that works here. REFUSED has the others, and the values of each that
    ask for nothing (`harmless`): those pass.
    """
    obeyed, refused = OBEYED.get(name), REFUSED.get(name)
    if obeyed is not None and letter in obeyed.paths:
        wrong = obeyed.check(value)
        if wrong is not None:
            raise RefusedError(f"{name} {wrong}.", name)
    elif refused is not None and letter in refused.paths:
        if not any(type(one) is type(value) and one == value for one in refused.harmless):
            unless = f" (but {name}={refused.harmless[0]!r})" if refused.harmless else ""
            raise RefusedError(f"{name} is not served{unless}: {refused.instead}.", name, code="unsupported_parameter")
    else:
        names = [one for one, row in OBEYED.items() if letter in row.paths]
        near = suggest(name, names) or f" It takes {', '.join(names)}."
        raise RefusedError(f"{path} has no field {name!r}.{near}", name, code="unknown_parameter")


def _check_model(given: dict[str, Any], letter: str, served: Served) -> None:
    """Raise RefusedError if an arriving request names another model than the server's, or needs a template that it has not.

    `read_request` calls it. A chat or a response needs a chat template. Tools need to be known to transformers for this model.
    """
    if given.get("model", served.name) != served.name:
        note = f"This server has the model {served.name!r}, not {given['model']!r}: GET /v1/models lists it."
        raise RefusedError(note, "model", 404, "model_not_found")
    if letter != "t" and not served.chats:
        raise RefusedError(f"The model {served.name!r} has no chat template: use /v1/completions.", "messages")
    if given.get("tools") and not served.tools:
        note = f"tools are not served: transformers does not know how {served.name!r} calls one. Describe them in the prompt."
        raise RefusedError(note, "tools", code="unsupported_parameter")
