"""Stop strings of continuous batching, which transformers' engine has none of: looked for when a request's token is known."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.stopping_criteria import StopStringCriteria


class StopStrings:
    """Strings that end a request, found as generate() finds them.

    tokenizer: of the model. strings: one, or several.
    """

    def __init__(self, tokenizer: Any, strings: str | list[str]) -> None:
        self.criteria = StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)

    def end(self, tokens: list[int]) -> bool:
        """Tell if a text ends with one of the strings."""
        newest = tokens[-self.criteria.maximum_token_len :]
        return bool(self.criteria(torch.tensor([newest]), torch.empty(0))[0])
