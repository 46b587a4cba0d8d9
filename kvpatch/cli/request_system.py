"""Places of a request's messages in its tokens: `kvpatch serve --protect system` never evicts a system message."""

from __future__ import annotations

from typing import Any

from ..cache.messages import Messages
from ..errors import KVPatchError
from ..hooks.transcript import Template, Transcript


def find_messages(tokenizer: Any, body: dict[str, Any], ids: list[int]) -> Messages:
    """Return the roles of a request's messages and the places where they begin in its tokens; a completion has none.

    `_accept_request` calls it under --protect system, so that a policy spares the system message.

    Args:
        tokenizer: of the model.
        body: of the request, as transformers' handlers read it.
        ids: the request's tokens, as the handlers have made them.

    Raises:
        KVPatchError: the messages, put through the template one by one, give other tokens than `ids`; or there is no template.
    """
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.utils import Modality

    from .tool_calls import convert_messages

    if "prompt" in body:
        return Messages((), ())
    tools, messages = body.get("tools"), body.get("messages")
    if messages is None:  # of /v1/responses
        tools, messages = ResponseHandler._normalize_tools(tools), ResponseHandler._normalize_input(body)
    messages = convert_messages(messages, Modality.LLM)
    # render the conversation once more, message by message, to learn at which token each begins
    template = Template(tokenizer, {"tools": tools, **body.get("chat_template_kwargs", {})})
    # an empty Transcript: nothing was read before
    rendered_ids, starts = template.tokenize(template.render(messages), Transcript())
    if rendered_ids != ids:
        raise KVPatchError(
            "--protect system: this model's chat template does not tell where the messages of this text end. Leave the option "
            "out, or protect tokens by their ids (-o protect=[1,2])."
        )
    return Messages([*(one["role"] for one in messages), "assistant"], starts)  # the last: the answer to come
