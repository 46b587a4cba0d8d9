"""What stands around a prompt: chat templates of the papers, the instructions of each task, and the way to token ids.

llama2-chat, wizardlm, zephyr   as RoCo's Appendix A prints them
alpaca                          what Keyformer's GPT-J was tuned with (MLPerf): the document is an input of its own
auto                            the tokenizer's own chat template; none where it has none
none                            the plain text, with a cue behind it for a model that only writes on
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from kvpatch.errors import KVPatchError, suggest
from kvpatch.evaluation.teacher_forcing import positions_of

from .task import Subject

_ASSISTANT = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while being safe. "
    "Your answers should not include any harmful, unethical, racist, sexist, toxic, dangerous, or illegal content. "
    "Please ensure that your responses are socially unbiased and positive in nature. If a question does not make any "
    "sense, or is not factually coherent, explain why instead of answering something not correct. If you don't know "
    "the answer to a question, please don't share false information."
)
_FRIENDLY = "You are a friendly chatbot who always responds in a helpful and detailed manner to the user's questions."
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{prompt}\n\n### Response:"
)
CHAT = {
    "llama2-chat": "[INST] <<SYS>>\n" + _ASSISTANT + "\n<</SYS>>\n{prompt}[/INST]",
    "wizardlm": _ALPACA,
    "zephyr": "<|system|>\n" + _FRIENDLY + "</s>\n<|user|>\n{prompt}</s>\n<|assistant|>\n",
    "alpaca": _ALPACA,
}
WITH_INPUT = {
    "alpaca": "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
    "### Input:\n{prompt}\n\n### Response:"
}
"""Templates with a place of its own for the document."""
INSTRUCTIONS = {
    "summarize": ("Summarize the following news article:", "Summary:"),
    "reconstruct": ("Write the following text again, word for word, from beginning to end:", "The text again:"),
    "instruct": ("", ""),
}
"""Per task: what is asked of a chat model, and the cue behind the text where there is no template."""
NAMES = ("auto", "none", *CHAT)


@dataclass(frozen=True)
class Frame:
    """What stands before and behind a prompt. special: the tokenizer adds its own special tokens."""

    before: str
    after: str
    special: bool = True


def frame(name: str | None, tokenizer: Any, instruction: str = "", cue: str = "") -> Frame:
    """A template around a prompt that `instruction` asks something of.

    Raises:
        KVPatchError: no such template, or the tokenizer's own cannot take a single user message.
    """
    name = name or "none"
    if name not in NAMES:
        raise KVPatchError(f"template={name} is unknown.{suggest(name, NAMES)} Known: {', '.join(NAMES)}.")
    own = name == "auto" and bool(getattr(tokenizer, "chat_template", None))
    asked = f"{instruction}\n\n" if instruction else ""
    if name == "none" or (name == "auto" and not own):
        return Frame(asked, f"\n\n{cue}" if cue else "")
    if own:
        before, after = _own(tokenizer)
        return Frame(before + asked, after, special=False)
    if instruction and name in WITH_INPUT:
        before, _, after = WITH_INPUT[name].replace("{instruction}", instruction).partition("{prompt}")
        return Frame(before, after)
    before, _, after = CHAT[name].partition("{prompt}")
    return Frame(before + asked, after)


def _own(tokenizer: Any) -> tuple[str, str]:
    """Both sides of the tokenizer's own template, which writes special tokens itself."""
    place = "PLACE-OF-THE-PROMPT"
    message, other = {"role": "user", "content": place}, "give -o template=none or another."
    try:
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program, and raises what it likes
        raise KVPatchError(f"The tokenizer's chat template failed ({error}): {other}") from error
    before, found, after = text.partition(place)
    if not found:
        raise KVPatchError(f"The tokenizer's chat template does not write the user's message: {other}")
    return before, after


def tokenizer_of(subject: Subject, task: str) -> Any:
    """Raises KVPatchError where the model came without one."""
    if subject.tokenizer is None:
        raise KVPatchError(f"{subject.name} has no tokenizer, and {task} needs text: give a model with one.")
    return subject.tokenizer


def encode(subject: Subject, around: Frame, head: str, tail: str = "") -> tuple[list[int], int]:
    """Token ids of the framed prompt `head + tail`, and how many of them belong to the frame's beginning and `head`.

    It is encoded as one text; a token that reaches from the head into the tail is the tail's.
    """
    tokenizer: Any = subject.tokenizer
    start = len(around.before + head)
    text, fast = around.before + head + tail + around.after, tokenizer.is_fast
    coded = tokenizer(text, add_special_tokens=around.special, return_offsets_mapping=fast, verbose=False)
    ids = list(coded["input_ids"])
    if fast:
        split = next((i for i, (_, end) in enumerate(coded["offset_mapping"]) if end > start), len(ids))
    else:
        split = len(tokenizer(around.before + head, add_special_tokens=around.special)["input_ids"])
    if subject.synthetic or subject.python:  # trained on rows that begin with it
        return [tokenizer.bos_token_id, *ids], split + 1
    return ids, split


def fit(subject: Subject, ids: list[int], new: int, split: int | None = None) -> tuple[list[int], int]:
    """`ids` less their middle where `new` more would not fit into the model's positions, and where `split` then is.

    As many are kept of the beginning as of the end, which is how LongBench cuts.

    Raises:
        KVPatchError: `new` leaves no room for a prompt.
    """
    split, limit = len(ids) if split is None else split, positions_of(subject.model)
    if limit is None or len(ids) + new <= limit:
        return ids, split
    half = (limit - new) // 2
    if half < 1:
        raise KVPatchError(
            f"max_new_tokens={new}: {subject.name} has {limit} positions, so no room is left for a prompt; give fewer "
            "with -o max_new_tokens=."
        )
    dropped = len(ids) - 2 * half
    return ids[:half] + ids[-half:], split - min(max(split - half, 0), dropped)


def say_cut(subject: Subject, prompts: list[int], new: int) -> None:
    """Say on standard error how many prompts of these lengths `fit` cut."""
    limit = positions_of(subject.model) or sys.maxsize
    cut = sum(n + new > limit for n in prompts)
    if cut:
        print(
            f"{cut} of {len(prompts)} prompts are longer than {subject.name}'s {limit:,} positions less {new} new "
            "tokens: cut in the middle.",
            file=sys.stderr,
        )
