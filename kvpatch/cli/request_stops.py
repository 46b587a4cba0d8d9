"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopStringWatch:
    """A text up to the first stop string, handed on piece by piece.

    A piece whose end may begin a stop string is handed on without that end, until the next piece tells.

    Args:
        stops: the strings; none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.stopped, self._held = tuple(stops), False, ""

    def feed(self, piece: str) -> str:
        """Take an answer's next piece of text; return what can be sent of it. `WatchedDecoder.step` calls it for each piece.

        Ends the text before a stop string and sets `stopped`. Holds back, in `_held`, an end that may be the beginning of a
        stop string.
        """
        if self.stopped:
            return ""
        text = self._held + piece
        starts = [start for start in map(text.find, self.stops) if start >= 0]
        if starts:
            self.stopped, self._held = True, ""
            return text[: min(starts)]
        n_held = max((self._count_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        """Return what is still held back when the text ends, and hold it no longer. `_Streamer.end` calls it."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _count_overlap(text: str, stop: str) -> int:
        """Return the length of the longest end of a text that begins a stop string."""
        longest = min(len(text), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class WatchedDecoder:
    """A decoder of tokens whose text ends before a stop string."""

    def __init__(self, decoder: Any, watch: StopStringWatch) -> None:
        self.decoder, self.watch, self.tokens = decoder, watch, 0

    def step(self, tokenizer: Any, token: int) -> str | None:
        """Return the text to send that one more token adds, or None; count the token in `tokens` unless a stop string came.

        transformers' streamer calls it for each token, in place of the tokenizer's own decoder.
        """
        self.tokens += not self.watch.stopped
        text = self.decoder.step(tokenizer, token)
        return self.watch.feed(text) or None if text else None


def cut_tokens(processor: Any, tokens: list[int], text: str) -> list[int]:
    """Return tokens of an answer up to a stop string, for transformers' parsers (of reasoning and tool calls): they take ids.

    `generate_non_streaming` calls it if its text is to be parsed. tokens: of the whole answer. text: the answer before the stop
    string, which may end inside a token.
    """
    kept = list(tokens)
    while kept and len(before := processor.decode(kept, skip_special_tokens=True)) > len(text):
        kept.pop()
    rest = text[len(before) :] if kept else text  # the part of a token before the stop string: encoded anew
    return kept + processor(rest, add_special_tokens=False).input_ids if rest else kept
