"""Calls of tools: messages with them as templates read them, and answers of which transformers cannot read one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.cli.serving.utils import BaseHandler, Modality, _normalize_tool_call


def convert_messages(messages: list[dict[str, Any]], modality: Modality) -> list[dict[str, Any]]:
    """Return a request's messages as its chat template takes them.

    transformers' handlers call it in place of their own function. That one leaves out an assistant's reasoning, and its text
    where it also calls tools. A developer's message becomes a system message: many templates leave out roles that they do not
    know. `find_messages` calls it too. `messages` is not changed.
    """
    converted = BaseHandler.get_processor_inputs_from_messages(messages, modality)
    for sent, result in zip(messages, converted, strict=True):
        result["role"] = "system" if sent["role"] == "developer" else sent["role"]
        if sent.get("tool_calls"):
            (text,) = BaseHandler.get_processor_inputs_from_messages([{**sent, "tool_calls": None}], modality)
            result["content"] = text["content"]
        if sent.get("reasoning_content"):
            result["reasoning_content"] = sent["reasoning_content"]
    return converted


def make_tolerant_parser(tokenizer: Any) -> Callable[..., Any]:
    """Return a function in place of the tokenizer's parse_response: an unreadable tool call becomes text, not an error.

    `run` of `kvpatch serve` calls it before the server starts.
    """
    parse = tokenizer.parse_response

    def parse_response(tokens: list[int], *given: Any, **more: Any) -> Any:
        """Parse an answer's tokens, or return them as text. transformers' handlers call this when it has ended."""
        try:
            parsed = parse(tokens, *given, **more)
            for call in parsed.get("tool_calls") or ():
                _normalize_tool_call(call)  # raises for a call that the handlers could not answer with
        except (ValueError, LookupError, TypeError):
            return {"content": tokenizer.decode(tokens, skip_special_tokens=True)}
        return parsed

    return parse_response
