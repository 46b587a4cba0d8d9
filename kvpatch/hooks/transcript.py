"""The text of a conversation as its template renders it, and where in it the messages lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

from ..errors import KVPatchError
from ..serving.edits import count_common

Message = dict[str, Any]
TRIED = 8
"""Number of tokens before the first different character that `find_dropped` tries as the beginning of what was left out."""


@dataclass
class Transcript:
    """The part of a conversation that was read.

    text: of it, as the template renders it now. starts: position of each message. answer: ids of the newest answer. forgotten:
    messages by index, with the position up to which each was taken out of the cache. left_out: messages that are not rendered.
    """

    text: str = ""
    starts: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    forgotten: dict[int, int] = field(default_factory=dict)
    left_out: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Rendered:
    """All messages, up to where the answer begins.

    begins: index in the text of each message, and of the answer's header.
    """

    text: str
    begins: list[int]


class Template:
    """A tokenizer's chat template, with what it takes besides the messages (such as tools, or enable_thinking)."""

    def __init__(self, tokenizer: Any, arguments: dict[str, Any]) -> None:
        """Take a tokenizer, for `Chat.__init__`. arguments: of apply_chat_template(), besides the messages."""
        if getattr(tokenizer, "chat_template", None) is None:
            raise KVPatchError(
                "This tokenizer has no chat template: give that of an instruct model, or set tokenizer.chat_template before "
                "patch.chat(tokenizer)."
            )
        self._tokenizer, self._arguments = tokenizer, arguments

    def _write(self, messages: list[Message], answer: bool) -> str:
        """Return the text of messages by the template; answer: with the header of an answer at the end."""
        cleaned = [{name: value for name, value in one.items() if name != "forgotten"} for one in messages]
        return self._tokenizer.apply_chat_template(cleaned, tokenize=False, add_generation_prompt=answer, **self._arguments)

    def render(self, messages: list[Message], left_out: frozenset[int] = frozenset()) -> Rendered:
        """Write a chat's messages and the header of an answer by the template; tell where in the text each message begins.

        `Chat` calls it in each turn, through `render_turn`. left_out: indices of messages that are not written; such a one
        begins where the next one does.
        """
        keep = [index not in left_out for index in range(len(messages))]
        kept = [one for one, stays in zip(messages, keep, strict=True) if stays]
        text, begins = self._write(kept, True), [0]
        for count in range(1, len(kept) + 1):
            begins.append(max(self._find_end(text, kept[:count]), begins[-1]))
        # a message begins where the written ones before it end; the last index is where the answer's header begins
        return Rendered(text, [begins[count] for count in accumulate(keep, initial=0)])

    def render_turn(self, messages: list[Message], left_out: frozenset[int]) -> Rendered:
        """Render as `render` does, for `Chat._ask`; raise KVPatchError if the template does not write the newest message.

        To see that, it renders once more with a character added to that message.
        """
        rendered, newest = self.render(messages, left_out), messages[-1]
        changed = {**newest, "content": newest["content"] + "\0"}
        if self.render([*messages[:-1], changed], left_out).text == rendered.text:
            raise KVPatchError(
                f"The chat template writes nothing of a message of role={newest['role']!r}: give a role that it knows, such as "
                "'user'."
            )
        return rendered

    def _find_end(self, text: str, messages: list[Message]) -> int:
        """Return the index in a rendered text at which its first messages, `messages`, end: where the next one begins.

        `render` calls it. A template may write the last message differently if nothing follows. Then a dummy message is added
        once, and twice: the two texts differ by the dummy's length, which tells where it begins. If the template refuses two,
        the end is where the rendered text and the one with one dummy begin to differ.
        """
        without = self._try_to_write(messages)
        if without and text.startswith(without):
            return len(without)
        dummy = {"role": "assistant" if messages[-1]["role"] == "user" else "user", "content": "\0"}
        once, twice = self._try_to_write([*messages, dummy]), self._try_to_write([*messages, dummy, dummy])
        end = 2 * len(once) - len(twice)
        if 0 < end <= len(once) and twice == once + once[end:] and text.startswith(once[:end]):
            return end
        return count_common(text, once)

    def rewrite(self, messages: list[Message], index: int, content: str, read: Transcript) -> tuple[str, list[int]] | None:
        """Return what `Chat.replace` puts for a message: the whole text read with the new `content`, and the message's new ids.

        The ids have the message's header. None: the template then writes other messages differently. Nothing is changed.
        """
        changed = [*messages[:index], {**messages[index], "content": content}, *messages[index + 1 :]]
        old, new = (self.render(all_of_them, read.left_out) for all_of_them in (messages, changed))
        start, old_stop, new_stop = old.begins[index], old.begins[index + 1], new.begins[index + 1]
        same = old.text[:start] == new.text[:start] and old.text[old_stop:] == new.text[new_stop:]
        if not same or new.begins[index] != start or not old.text.startswith(read.text):
            return None
        ids = self._tokenizer(new.text[start:new_stop], add_special_tokens=False).input_ids
        return new.text[:new_stop] + read.text[old_stop:], list(ids)

    def _try_to_write(self, messages: list[Message]) -> str:
        """Return the text of messages, for `_find_end`; "" where the template refuses them (a system message alone)."""
        try:
            return self._write(messages, False)
        except Exception:
            return ""

    def tokenize(self, rendered: Rendered, read: Transcript) -> tuple[list[int], list[int]]:
        """Return the ids of a new turn's text after what was read, and the index among them where each new message begins.

        `Chat._ask` calls it as a turn begins. rendered: the whole text; read: the part of the conversation that the cache has
        read.
        """
        n_read = len(read.text)
        begins = [max(index - n_read, 0) for index in rendered.begins[len(read.starts) :]]  # characters in `unread`
        unread = rendered.text[n_read:]
        if not getattr(self._tokenizer, "is_fast", False):
            # a slow tokenizer tells no offsets: cut the text where messages begin, and count the ids of each piece
            parts = [unread[start:stop] for start, stop in zip([0, *begins], [*begins, None], strict=True)]
            ids = [self._tokenizer(part, add_special_tokens=False).input_ids if part else [] for part in parts]
            return [*chain(*ids)], list(accumulate(map(len, ids[:-1])))
        encoded = self._tokenizer(unread, add_special_tokens=False, return_offsets_mapping=True)
        ends = [end for _, end in encoded.offset_mapping]  # some tokenizers leave blanks out of where tokens start
        return list(encoded.input_ids), [sum(end <= begin for end in ends) if begin else 0 for begin in begins]


def find_dropped(read: str, text: str, pieces: list[str]) -> tuple[tuple[int, int], str] | None:
    """Find the tokens of the newest answer that a template left out: without them the text `read` begins the new `text`.

    `Chat._forget_stripped` calls it where a new turn's text does not begin with what was read. pieces: text of each token of
    the answer. Returns the span of tokens to forget, as indices in `pieces`, and the text that is left; None if there is none.
    """
    answer_start = len(read) - sum(map(len, pieces))
    if read[answer_start:] != "".join(pieces):
        return None
    starts = list(accumulate(map(len, pieces), initial=answer_start))  # the character at which each token begins
    common = count_common(read, text)
    candidates = [index for index, start in enumerate(starts) if start <= common]
    # drop tokens first to last - 1: the texts agree before these, and `text` goes on with the rest of the answer
    for first in reversed(candidates[-TRIED:]):
        for last in range(first + 1, len(pieces)):  # the last token has not been read
            rest = read[starts[last] :]
            if text.startswith(rest, starts[first]):
                return (first, last), read[: starts[first]] + rest
    return None
