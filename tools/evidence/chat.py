"""Token ids of the parts of a templated chat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MARK = "\x00"


@dataclass(frozen=True)
class Frame:
    """What a chat template puts around a user's message: `before` with the system message, `after` up to the answer's start."""

    tokenizer: Any
    system: str | None = None

    def _around(self) -> tuple[str, str]:
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages.append({"role": "user", "content": MARK})
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before, after = text.split(MARK)
        return before, after

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text without the tokenizer's own first or last token."""
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    @property
    def before(self) -> tuple[int, ...]:
        """Ids up to the user's message."""
        return self.encode(self._around()[0])

    @property
    def between(self) -> str:
        """Text from the end of an answer to the next user's message."""
        messages = [{"role": role, "content": MARK} for role in ("user", "assistant", "user")]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text.split(MARK)[2]

    @property
    def after(self) -> tuple[int, ...]:
        """Ids from the end of the user's message to the beginning of the answer."""
        return self.encode(self._around()[1])
