"""Token ids of the parts of a templated chat."""

from __future__ import annotations

from typing import Any

MARK = "\x00"


class Frame:
    """Ids of a chat template around a user's message: `before` with the system message, `after` up to the answer's start."""

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        messages = [] if system is None else [{"role": "system", "content": system}]
        around = self._render([*messages, {"role": "user", "content": MARK}])
        self.before, self.after = map(self.encode, around)

    def _render(self, messages: list[dict[str, str]]) -> list[str]:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).split(MARK)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text without the tokenizer's own first or last token."""
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    @property
    def between(self) -> str:
        """Text from the end of an answer to the next user's message."""
        return self._render([{"role": role, "content": MARK} for role in ("user", "assistant", "user")])[2]
