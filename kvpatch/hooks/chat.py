"""A conversation on one cache: the template renders all messages in each turn, and only what is new is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

from ..arch.upstream import CACHE
from ..cache.cache import EvictingCache
from ..cache.lossless import LosslessCache
from ..cache.messages import Messages
from ..cache.settings import CacheSettings
from ..errors import KVPatchError
from .accelerate import device_of
from .chat_checks import check_kept, check_options
from .streams import Outcome, Stop, refuse_turn
from .target import Target
from .transcript import Template, Transcript, find_dropped


class Chat:
    """A conversation under a patch's budget, made by `Patch.chat()`.

    Where a template takes something from the newest answer, such as its thinking, the cache forgets these tokens; where it
    changes anything else, the conversation is read anew; a lossless cache goes back to the first token that differs.

    Attributes:
        messages: as the template takes them; a forgotten one has "forgotten": True.
        cache: of the whole conversation.
        ids: int64 [1,N], every token that was read, and the last one of the newest answer.
    """

    def __init__(
        self, model: Any, tokenizer: Any, new_cache: Callable[[], EvictingCache | LosslessCache], replace: Callable[..., None],
        system: str | None, **options: Any,
    ) -> None:  # fmt: skip
        """Begin an empty chat, for `begin_chat`. new_cache, replace: Patch's methods. options: of generate(), or `template`."""
        check_options(options, model.generation_config)
        self.messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._template = Template(tokenizer, dict(options.pop("template", None) or {}))
        self._model, self._tokenizer, self._options = model, tokenizer, options
        self._new_cache, self._replace, self.cache = new_cache, replace, new_cache()
        self._running: Callable[[], None] | None = None  # ends the turn that is running, if another one or an edit begins
        self._begin_again()

    @property
    def system_tokens(self) -> int:
        """Count the tokens of the system prompt with its header, 0 without one; `begin_chat` reads it to check the budget."""
        if not self.messages or self.messages[0]["role"] != "system":
            return 0
        rendered = self._template.render([self.messages[0], {"role": "user", "content": ""}])
        return self._template.tokenize(rendered, Transcript())[1][1]  # the index of the token at which the next message begins

    def __repr__(self) -> str:
        return f"<Chat of {len(self.messages)} messages: {self.ids.shape[1]} tokens>"

    def _begin_again(self) -> None:
        """Empty `cache`, `ids` and `_read` (the text read): for a new chat, in `_take_back`, or where `_ask` must reread."""
        if not isinstance(self.cache, LosslessCache):  # a lossless cache is kept: `_generate` crops it where texts differ
            self.cache = self._new_cache()
        self.ids = torch.empty(1, 0, dtype=torch.long, device=device_of(self._model))
        self._read = Transcript(left_out=frozenset(i for i, message in enumerate(self.messages) if message.get("forgotten")))

    def send(self, text: str, role: str = "user") -> str:
        """Add a message and return the model's answer.

        Args:
            text: the message.
            role: of the message, such as "tool" for a result that the model has asked for.

        Raises:
            KVPatchError: the message is no text, or generate() refuses an option; the conversation is then as before. Or
                another thread's send() has not returned.
        """
        asked = self._ask(text, role)
        try:
            return self._end_turn(self._generate(asked), asked)
        except BaseException:
            self._take_back()
            raise

    def stream(self, text: str, role: str = "user") -> Iterator[str]:
        """Add a message and yield the answer in pieces of text.

        The answer ends where the caller leaves the loop: at once if nothing else holds the iterator, else as the next turn or
        edit begins.

        Args:
            text: the message.
            role: of the message.

        Raises:
            KVPatchError: as for send().
        """
        asked = self._ask(text, role)
        streamer = TextIteratorStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        stop, done = Stop(), Outcome(device_of(self._model).type)  # what can end generate(), and its result or error
        thread = Thread(target=done.keep, args=(lambda: self._generate(asked, stop, streamer=streamer), streamer.end))

        def end() -> None:
            """End the answer here, unless it has ended."""
            stop.asked.set()
            thread.join()
            if self._running is end and done.error is None:
                self._end_turn(done.value, asked)
            elif self._running is end:
                self._take_back()

        self._running = end
        thread.start()
        try:
            yield from streamer
        finally:
            end()
        if done.error is not None:
            raise done.error

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Positions (start, stop) of each message read, with its header; text in front of all messages is part of the first."""
        starts = self._read.starts
        return list(zip(starts, [*starts[1:], self.ids.shape[1]], strict=True)) if starts else []

    def forget(self, index: int) -> None:
        """Evict a message's tokens from the cache, in all heads. Later tokens, which were computed with it, stay as they are.

        Args:
            index: of the message in `messages`.

        Raises:
            KVPatchError: there is no such message, it was not read or is forgotten, or the cache cannot be edited.

        Example:
            chat.forget(1)
        """
        self._check_index("forget", index)
        if self.messages[index].get("forgotten"):
            raise KVPatchError(f"Message {index} is forgotten already: give one without 'forgotten' in chat.messages.")
        self._forget_span(index)
        self.messages[index]["forgotten"] = True

    def replace(self, index: int, text: str) -> None:
        """Put another text in place of a message, such as the summary of a tool's result; what follows is not read again.

        Args:
            index: of the message in `messages`; it may be forgotten, but not the newest answer (not yet read to its end).
            text: of at most as many tokens as the message has had, or of any with `positions="renumbered"`.

        Raises:
            KVPatchError: there is no such message, the text has no room, or the cache cannot be edited (see `Patch.replace`).
                The conversation is then as before.

        Example:
            chat.replace(3, "(the page on limits: 100 requests a minute)")
        """
        read = self._check_index("replace", index)
        if not isinstance(text, str):
            raise KVPatchError(f"replace() takes the text of a message, not a {type(text).__name__}: write replace(1, '...').")
        if index in self._read.left_out:
            raise KVPatchError(f"replace({index}): the text was read anew without this forgotten message: send() the new one.")
        if index == read - 1:
            raise KVPatchError(f"replace({index}): the last token of the newest answer is not read: send() the next one first.")
        written, (start, stop) = self._template.rewrite(self.messages, index, text, self._read), self.spans[index]
        if written is None:
            raise KVPatchError(
                f"replace({index}): the template then writes other messages differently than they were read: send() the next "
                "message first, for what it changes in the newest answer, or begin another chat."
            )
        new_text, ids = written  # the whole text read so far, and the message's tokens
        more = max(len(ids) - (stop - start), 0)
        if more and not self.cache.settings.renumbered:
            raise KVPatchError(
                f"replace({index}): {len(ids)} tokens with the header, and the message has {stop - start}: shorten the text, "
                "or patch with positions='renumbered'."
            )
        self._replace(self.cache, (start, stop), ids)  # later tokens move up by `more`, in the cache and in the notes below
        self.ids = torch.cat([self.ids[:, :stop], self.ids.new_zeros(1, more), self.ids[:, stop:]], 1)
        self.ids[0, start : start + len(ids)] = torch.tensor(ids, device="cpu")
        self._read.starts = [place + more if place >= stop else place for place in self._read.starts]
        self._read.forgotten = {i: end + more if i > index else end for i, end in self._read.forgotten.items() if i != index}
        self._read.text, self.messages[index] = new_text, {"role": self.messages[index]["role"], "content": text}

    def _check_index(self, method: str, index: object) -> int:
        """Return how many messages were read; raise KVPatchError, which names the public `method`, unless `index` is of one.

        `forget` and `replace` call it first: it ends a stream that its caller has left.
        """
        if self._running is not None:
            self._running()
        read = len(self.spans)
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < read:
            known = f"give 0 to {read - 1}, an index of chat.messages" if read else "send() one first"
            raise KVPatchError(f"{method}({index!r}): {read} messages have been read; {known}.")
        return read

    def _forget_span(self, index: int) -> None:
        """Evict what the cache has read of a message, for `forget`; note in `_read.forgotten` up to which position.

        The last token of an answer is read in the next turn only: `_end_turn` calls this again then, which evicts it.
        """
        start, stop = self.spans[index]
        start, stop = max(start, self._read.forgotten.get(index, 0)), min(stop, self.cache.get_seq_length())
        if start < stop:
            self.cache.forget([(start, stop)])
            self._read.forgotten[index] = stop

    def _ask(self, text: str, role: str) -> Tensor:
        """Begin a turn of `send` or `stream`: add a message, update `_read`, return the ids [1,N] of the whole text with it."""
        if not isinstance(text, str):
            raise KVPatchError(f"A message is a text, not a {type(text).__name__}: write chat.send('...').")
        if self._running is not None:
            self._running()
        self._running = refuse_turn
        self.messages.append({"role": role, "content": text})
        try:
            rendered = self._template.render_turn(self.messages, self._read.left_out)
            # A template may rewrite what was read. A part of the newest answer that it drops is evicted from the cache. If it
            # changes more, the cache is emptied to read all anew without forgotten messages, which `left_out` names then
            if not rendered.text.startswith(self._read.text) and not self._forget_stripped(rendered.text):
                self._begin_again()
                rendered = self._template.render(self.messages, self._read.left_out)
            unread, starts = self._template.tokenize(rendered, self._read)  # new ids, and where in them messages begin
        except BaseException:
            self.messages.pop()
            self._running = None
            raise
        self._read.starts += [self.ids.shape[1] + start for start in starts]
        self._read.text = rendered.text
        return torch.cat([self.ids, torch.tensor([unread], device=self.ids.device)], 1)

    def _forget_stripped(self, text: str) -> bool:
        """Evict what `text`, rendered by `_ask`, leaves out of the newest answer; False if more differs, or eviction fails."""
        if isinstance(self.cache, LosslessCache):
            return False  # it keeps exact entries, and later tokens attended to these
        answer_start = self.ids.shape[1] - len(self._read.answer)
        dropped = find_dropped(self._read.text, text, [self._tokenizer.decode([token]) for token in self._read.answer])
        if dropped is None:
            return False
        (first, last), text_left = dropped  # tokens of the answer, and the text read without them
        try:
            self.cache.forget([(answer_start + first, answer_start + last)])
        except KVPatchError:  # a recurrent state has taken the tokens in, or other processes hold heads
            return False
        self._read.text = text_left
        return True

    def _generate(self, asked: Tensor, *criteria: StoppingCriteria, **options: Any) -> Tensor:
        """Call generate() for `send` or `stream`, to read the new tokens of `asked`; return `asked` and answer, ids [1,N]."""
        if isinstance(self.cache, LosslessCache):
            self.cache.go_back(asked[0].tolist())  # crops it where its text and `asked` begin to differ
        else:
            self.cache.messages = Messages([*(one["role"] for one in self.messages), "assistant"], list(self._read.starts))
        given = self._options | options | {"tokenizer": self._tokenizer, "return_dict_in_generate": False, CACHE: self.cache}
        if stops := StoppingCriteriaList([*(given.pop("stopping_criteria", None) or ()), *criteria]):
            given["stopping_criteria"] = stops
        return self._model.generate(input_ids=asked, attention_mask=torch.ones_like(asked), **given)

    def _end_turn(self, ids: Tensor, asked: Tensor) -> str:
        """End a turn of `send` or `stream`: add the answer to `messages` and `_read`; return it. ids: of the whole text."""
        self._running, self._read.answer = None, ids[0, asked.shape[1] :].tolist()
        self.ids = ids
        self._read.text += self._tokenizer.decode(self._read.answer)
        answer = self._tokenizer.decode(self._read.answer, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": answer})
        for index in list(self._read.forgotten):
            self._forget_span(index)
        return answer

    def _take_back(self) -> None:
        """Take back the message of a turn that failed, and empty the cache: the next turn reads the conversation anew."""
        self._running = None
        self.messages.pop()
        self._begin_again()


def begin_chat(
    target: Target, settings: CacheSettings, new_cache: Callable[[], EvictingCache | LosslessCache],
    replace: Callable[..., None], tokenizer: Any, system: str | None, keep_system: bool, options: dict[str, Any],
) -> Chat:  # fmt: skip
    """Make the Chat, for `Patch.chat`; nothing is read yet. KVPatchError: the model, options or patch do not suit it."""
    model = target.find_caller()
    if model is None:
        raise KVPatchError("This model has no generate(): patch a model with a language head, such as AutoModelForCausalLM.")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise KVPatchError(
            "PEFT's prompt tuning puts tokens before a text, which no chat counts: call generate() with patch.new_cache()."
        )
    chat = Chat(model, tokenizer, new_cache, replace, system, **options)
    keeps_system = settings.policy.scope.keeps_system
    asked = "protect='system'" if keeps_system else "keep_system=True" if keep_system else None
    if asked and not chat.system_tokens:
        raise KVPatchError(f"{asked} keeps a system prompt, and there is none: write patch.chat(tokenizer, system='...').")
    if keep_system and not keeps_system:
        check_kept(settings, chat.system_tokens)
    return chat
