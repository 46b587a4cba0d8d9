"""Checks of messages, input and tools of a request to `kvpatch serve`.

Each returns what is wrong, to be put after the field's name ("[0] needs content" gives "messages [0] needs content."), or None.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
_READ = {"role", "content", "tool_calls", "tool_call_id", "reasoning_content"}
_ANSWERED = {"annotations"}  # empty in this server's answers, which clients send back
_TEXTS = ("text", "input_text", "output_text")


def check_messages(value: object) -> str | None:
    """Return what is wrong with the messages of a request for a chat, or None. `_check_field` finds it in the table OBEYED."""
    if not isinstance(value, list) or not value:
        return "must be a list with at least one message"
    return next((f"[{i}]{wrong}" for i, one in enumerate(value) if (wrong := _check_message(one))), None)


def check_input(value: object) -> str | None:
    """Return what is wrong with `input` of /v1/responses, or None: a string, parts of a message, or messages and tool calls.

    `_check_field` finds it in the table OBEYED.
    """
    if isinstance(value, str):
        return None if value else "must have at least one character"
    if not isinstance(value, list) or not value:
        return "must be a string, or a list of messages"
    if not all(isinstance(one, dict) for one in value):
        return "must have objects alone"
    if "role" not in value[0]:
        return _check_parts(value)
    return next((f"[{i}]{wrong}" for i, one in enumerate(value) if (wrong := _check_item(one))), None)


def check_tools(value: object) -> str | None:
    """Return what is wrong with the tools that a request lets the model call, or None.

    `_check_field` finds it in OBEYED, the table of fields with their checks.
    """
    if not isinstance(value, list):
        return "must be a list of functions"
    for i, one in enumerate(value):
        if not isinstance(one, dict) or one.get("type") != "function":
            return f"[{i}] must be of type 'function': no other kind of tool is served"
        if not isinstance(one.get("function", one), dict) or not isinstance(one.get("function", one).get("name"), str):
            return f"[{i}] must name its function"
    return None


def check_template_kwargs(value: object) -> str | None:
    """Return what is wrong with a request's values for its chat template, or None: a name that apply_chat_template() sets.

    `_check_field` finds it in the table OBEYED.
    """
    from transformers import PreTrainedTokenizerBase

    if not isinstance(value, dict):
        return "must be an object"
    taken = sorted(set(value) & set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters))
    return f"may not have {', '.join(taken)}: give what the model's template reads, such as enable_thinking" if taken else None


def _check_item(item: dict[str, Any]) -> str | None:
    """Return how an item of `input` is wrong, or None: a message, a tool's call or output, reasoning. For `check_input`."""
    kind = item.get("type", "message")
    if "role" in item:
        return _check_message({name: one for name, one in item.items() if name not in ("type", "id", "status")})
    needed = {"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id", "output")}.get(str(kind))
    if kind == "reasoning":
        parts = item.get("content") or []
        valid = isinstance(parts, list) and all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in parts)
        return None if valid else ".content must be a list of texts"
    if needed is None:
        return f" is a {kind!r}, which is not served: send messages, function_call and function_call_output"
    missing = [name for name in needed if not isinstance(item.get(name), str)]
    if missing:
        return f" needs {', '.join(missing)} as a string"
    return _check_arguments(item["arguments"]) if kind == "function_call" else None


def _check_message(message: Any) -> str | None:
    """Return how a request's message is wrong, or None: role, fields, calls of tools, content. `check_messages` calls it."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        return f" must be an object whose role is one of {', '.join(ROLES)}"
    # _READ: fields that are used; _ANSWERED: fields of this server's own answers, which clients send back
    unknown = {name for name, value in message.items() if value is not None} - _READ - _ANSWERED
    if unknown:
        return f" has {', '.join(sorted(unknown))}, which nothing reads: leave that out"
    calls, content = message.get("tool_calls"), message.get("content")
    if not isinstance(message.get("reasoning_content") or "", str):
        return ".reasoning_content must be a string"
    if calls and (wrong := _check_calls(calls)):
        return wrong
    if content is None:
        return None if calls else " needs content"
    if isinstance(content, str):
        return None
    return _check_parts(content) if isinstance(content, list) else ".content must be a string or a list of texts"


def _check_parts(parts: list[Any]) -> str | None:
    """Return how the parts of a request's message are wrong, or None: all must be texts.

    `_check_message` calls it, and `check_input` for an `input` that is such parts.
    """
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXTS:
            return f" has a part of type {kind!r}: this server reads text alone"
        if not isinstance(part.get("text"), str):
            return " has a part without text"
    return None


def _check_calls(calls: Any) -> str | None:
    """Return how the tool calls of an assistant's message in a request are wrong, or None. `_check_message` calls it."""
    if not isinstance(calls, list):
        return ".tool_calls must be a list"
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or "arguments" not in function:
            return ".tool_calls must each have a function with name and arguments"
        if wrong := _check_arguments(function["arguments"]):
            return wrong
    return None


def _check_arguments(arguments: Any) -> str | None:
    """Return how a tool call's arguments (an object or its JSON) are wrong, or None; for `_check_calls` and `_check_item`."""
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        read = None
    return None if isinstance(read, dict) else " has arguments of a call that are no JSON object"
