"""Magic numbers hidden in real text, for models that are not ours [CriticalKV 4.4, Table 4].

The haystack is text of --data, else docstrings of Python's own library. A context is the template's first lines and
sentences, the last one cut so that it has exactly the tokens that were asked for. `single` hides one number, at the
boundary between sentences that is nearest to its depth; haystack, word and number are the same at every depth. `multi`
hides four numbers of one word, at boundaries anywhere. The answer's first words belong to the question, so that the
model goes on with the number. Words are chosen so that the questions of a kind have one length, and no row is padded.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product

from kvpatch import get_policy
from kvpatch.errors import KVPatchError
from kvpatch.evaluation.teacher_forcing import positions_of
from tools.training import train

from .data import documents
from .greedy import generate
from .task import FULL, Sample, Setting, Subject, digest
from .templates import Frame, frame, tokenizer_of
from .together import ROWS_PER_DRAW, seed_of, together

LENGTHS = (1024, 2048, 4096)
HEAD = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)
NEEDLE = " One of the special magic numbers for {word} is: {number}."
QUESTIONS = {
    "single": (
        "\nWhat is the special magic number for {word} mentioned in the provided text?",
        " The special magic number for {word} mentioned in the provided text is",
    ),
    "multi": (
        "\nWhat are all the special magic numbers for {word} mentioned in the provided text?",
        " The special magic numbers for {word} mentioned in the provided text are",
    ),
}
"""Per kind: the question and the beginning of its answer, with the end of the user's turn between them in a chat."""
NUMBERS = {"single": 1, "multi": 4}
WORDS = ("apple", "bridge", "candle", "desert", "engine", "forest", "garden", "hammer", "island", "jacket", "kettle")
WORDS += ("ladder", "market", "needle", "orange", "pencil", "river", "saddle", "temple", "valley", "window", "yellow")


@dataclass(frozen=True)
class Hidden:
    """ids: context and question. n: how many of them are read before the cache is compressed. new: to generate."""

    ids: tuple[int, ...]
    n: int
    numbers: tuple[str, ...]
    new: int
    draw: int

    @property
    def shape(self) -> Hashable:
        return len(self.ids), self.n, self.new


def docstrings() -> list[str]:
    """What stands in triple quotes in the files of Python's library that no model of ours was trained on."""
    return [text for source in train.python_sources(held_out=True) for text in re.findall(r'"""(.*?)"""', source, re.S)]


def sentences(texts: Sequence[str]) -> list[str]:
    """Sentences with one space between words, in order. Raises KVPatchError where there is none."""
    found = [" ".join(part.split()) for text in texts for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", text)]
    found = [sentence for sentence in found if sentence]
    if not found:
        raise KVPatchError("--data holds no sentence: give a file with text.")
    return found


class Maker:
    """Makes contexts and questions for one model."""

    def __init__(self, subject: Subject, data: str | None, template: str) -> None:
        self.subject, self.tokenizer = subject, tokenizer_of(subject, "the needle test")
        self.around: Frame = frame(template, self.tokenizer)
        texts = docstrings() if data is None else documents(data)
        self.hay = [ids for text in sentences(texts) if (ids := self.code(" " + text))]
        first = self.tokenizer(self.around.before + HEAD, add_special_tokens=self.around.special).input_ids
        bos = self.tokenizer.bos_token_id
        # some tokenizers put the first token of all texts in front themselves, some leave it to us
        self.head = first if bos is None or bos in first[:1] or not self.around.special else [bos, *first]
        self.words = {kind: self.alike(kind) for kind in NUMBERS}

    def code(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def question(self, kind: str, word: str) -> list[int]:
        ask, answer = (part.format(word=word) for part in QUESTIONS[kind])
        after = self.around.after
        return self.code(ask + after + answer.lstrip()) if after.strip() else self.code(ask + answer)

    def alike(self, kind: str) -> list[str]:
        """Words whose questions have the commonest length."""
        sizes = {word: len(self.question(kind, word)) for word in WORDS}
        common = Counter(sizes.values()).most_common(1)[0][0]
        return [word for word in WORDS if sizes[word] == common]

    def lengths(self, wanted: tuple[int, ...], new: int) -> list[int]:
        """Those that fit with question and answer; where none is given, the usual ones, or the longest that fits.

        Raises:
            KVPatchError: a length that was asked for does not fit.
        """
        limit = positions_of(self.subject.model)
        asking = max(len(self.question(kind, self.words[kind][0])) for kind in NUMBERS)
        most = None if limit is None else limit - new - asking
        for length in wanted:
            if not isinstance(length, int) or (most is not None and length > most):
                raise KVPatchError(
                    f"lengths={length}: {self.subject.name} has {limit} positions, which leaves {most} before question "
                    "and answer; give -o lengths= up to that, or fewer -o max_new_tokens=."
                )
        return [length for length in wanted or LENGTHS if most is None or length <= most] or [most or 0]

    def context(self, rng: random.Random, length: int, needles: list[list[int]], depth: float | None) -> list[int]:
        """`length` tokens; the needles at the boundary nearest to `depth`, or at boundaries drawn where it is None.

        Raises:
            KVPatchError: they do not fit.
        """
        room = length - len(self.head) - sum(map(len, needles))
        if room < 1:
            raise KVPatchError(f"length={length}: head and numbers take {length - room} tokens; give longer -o lengths=.")
        hay, at = [], rng.randrange(len(self.hay))
        while sum(map(len, hay)) < room:
            hay.append(self.hay[at % len(self.hay)])
            at += 1
        hay[-1] = hay[-1][: len(hay[-1]) - (sum(map(len, hay)) - room)]
        ends = list(accumulate(map(len, hay), initial=0))
        if depth is None:
            chosen = sorted(rng.choices(range(len(ends)), k=len(needles)))
        else:
            chosen = [min(range(len(ends)), key=lambda i: abs(ends[i] - depth * room))] * len(needles)
        whole = list(self.head)
        for i in range(len(ends)):
            whole += [token for needle, place in zip(needles, chosen, strict=True) if place == i for token in needle]
            whole += hay[i] if i < len(hay) else []
        return whole


def samples(
    subject: Subject, data: str | None, lengths: tuple[int, ...], depths: tuple[float, ...], count: int, seed: int,
    *, template: str, new: int,
) -> list[Sample]:  # fmt: skip
    """As in needle.py: `count` per scenario, kind, length and depth, those that run together side by side."""
    maker, found = Maker(subject, data, template), []
    cells = product(maker.lengths(lengths, new), ("regular", "context"), NUMBERS, range(count))
    for length, scenario, kind, index in cells:
        for depth in depths if kind == "single" else (None,):
            rng = random.Random(f"haystack {seed} {length} {kind} {index}")  # the same at every depth
            word = rng.choice(maker.words[kind])
            numbers = tuple(str(rng.randint(10**6, 10**7 - 1)) for _ in range(NUMBERS[kind]))
            needles = [maker.code(NEEDLE.format(word=word, number=number)) for number in numbers]
            ids = (*maker.context(rng, length, needles, depth), *maker.question(kind, word))
            n = len(ids) if scenario == "regular" else length
            hidden = Hidden(ids, n, numbers, new, index if kind == "single" else index // ROWS_PER_DRAW)
            group = {"scenario": scenario, "kind": kind, "length": length, "depth": "all" if depth is None else depth}
            name = "/".join(map(str, [*group.values(), index]))
            found.append(Sample(name, n, hidden, group, digest(ids, n, numbers, new)))
    return found


def share_found(text: str, numbers: Sequence[str]) -> float:
    """The share of the numbers that the text holds, none of them as a part of a longer one."""
    return sum(re.search(rf"(?<!\d){number}(?!\d)", text) is not None for number in numbers) / len(numbers)


def once(setting: Setting) -> Setting:
    """The setting, with questions behind the prompt left whole where the policy evicts after a prompt only."""
    if setting.policy == FULL.policy:
        return setting
    schedule = setting.options.get("schedule") or get_policy(setting.policy).schedule
    return replace(setting, options={"turns": "first", **setting.options}) if schedule == "prompt" else setting


def run(subject: Subject, setting: Setting, samples: list[Sample], size: int, seed: int) -> Iterator[dict[str, float | str]]:
    """What the model writes under a setting, and the share of the numbers that are in it."""
    for part, draw in together(samples, size, setting):
        hidden = [sample.data for sample in part]
        behind = len(hidden[0].ids) - hidden[0].n
        with once(setting).patched(subject.model, seed_of(seed, draw)) as patch:
            written = generate(subject, [list(one.ids) for one in hidden], hidden[0].new, behind or None, patch)
        for one, ids in zip(hidden, written, strict=True):
            text = subject.tokenizer.decode(ids, skip_special_tokens=True)  # type: ignore[union-attr]
            yield {"right": share_found(text, one.numbers), "text": text}
