"""Four synthetic tasks that a tiny model can learn perfectly and that need its cache: recall, needle, copy, summary.

A row of tokens is `<bos> context tail`. The context is filler (a fixed bigram chain) with records `k v v v` and marks
`m x` strewn in; the tail asks for what the context said:

    recall   <q> k v v v, several times: which values followed key k? keys repeat in the context, by Zipf's law
    needle   the same with a few records in a long context, each written once
    copy     the context is a list of distinct tokens, the tail is <rec> and the list again
    summary  <sum> m1 x m2 x ...: what stood beside each mark?

Values have three tokens, because the first answer token is computed while the prompt is still whole: a one-token answer
would be right under any eviction. Dimension key: B sequences, T tokens, A answers per sequence, W tokens per answer.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from kvpatch.cli import loading

MODELS = Path(__file__).parents[1] / "models"
DEMO = loading.MODELS / "llama-0" / "needles.json"
"""The prompts of `kvpatch demo`: rows of `needle`, made by demo_prompts()."""

BOS, QUESTION, COPY, SUMMARY, PAD, EOS = 0, 1, 2, 3, 12, 13
MARKS, FILLER, KEYS, VALUES = range(4, 12), range(16, 48), range(48, 80), range(80, 144)
WORDS = (
    ["<bos>", "<q>", "<rec>", "<sum>"]
    + [f"m{i}" for i in range(1, 9)]
    + ["<pad>", "<eos>", "<free0>", "<free1>"]
    + [f"w{i:02}" for i in range(32)]
    + [f"k{i:02}" for i in range(32)]
    + [f"v{i:02}" for i in range(64)]
)
"""The readable name of token ids 0 to 143; ids 144 to 399 are the 256 bytes."""

HARD, EASY = 1.0, 0.1
"""Loss weights: a token that must be looked up in the context, and one that its neighbour gives away."""

SUCCESSORS = {word: random.Random(word).sample(FILLER, 4) for word in FILLER}


@dataclass(frozen=True)
class Batch:
    """Evaluation rows: `tokens_BT[:, :prompt_length]` is prefilled, the rest is fed or generated after compression.

    `answers_AW` holds the columns of tokens_BT that are scored: an answer counts when all of its W tokens are right.
    """

    tokens_BT: Tensor
    prompt_length: int
    answers_AW: Tensor

    @property
    def prompt_BT(self) -> Tensor:
        return self.tokens_BT[:, : self.prompt_length]

    @property
    def continuation_BT(self) -> Tensor:
        return self.tokens_BT[:, self.prompt_length :]

    @property
    def answer_BAW(self) -> Tensor:
        return self.tokens_BT[:, self.answers_AW]

    def correct(self, predicted_BT: Tensor) -> Tensor:
        """Which answers are right, bool [B, A]; `predicted_BT[:, i]` is the guess for `continuation_BT[:, i]`."""
        return (predicted_BT[:, self.answers_AW - self.prompt_length] == self.answer_BAW).all(-1)


@dataclass
class Row:
    """A row under construction: token ids and the loss weight of predicting each of them."""

    tokens: list[int]
    weights: list[float]

    def add(self, tokens: Sequence[int], weight: float) -> None:
        self.tokens.extend(tokens)
        self.weights.extend([weight] * len(tokens))


Records = dict[int, list[int]]


def _records(rng: random.Random, n_keys: int) -> tuple[Records, list[int]]:
    """Keys with three values each, and the values that may stand beside marks.

    First and second values are distinct across keys and occur nowhere else, so what follows them is never ambiguous.
    """
    if not 0 < n_keys < len(VALUES) // 2:
        raise ValueError(f"a sequence of {n_keys} keys: 1 to {len(VALUES) // 2 - 1} have distinct values")
    values = rng.sample(VALUES, len(VALUES))
    spare = values[2 * n_keys :]
    keys = rng.sample(KEYS, n_keys)
    return {key: [*values[2 * i : 2 * i + 2], rng.choice(spare)] for i, key in enumerate(keys)}, spare


def _zipf(rng: random.Random, keys: Sequence[int], exponent: float, n: int) -> list[int]:
    return rng.choices(keys, [(rank + 1) ** -exponent for rank in range(len(keys))], k=n)


def _context(rng: random.Random, length: int, records: Records, mentions: Sequence[int], marked: Sequence[int]) -> Row:
    """`length` tokens from <bos> on: the mentioned records, and the marks m1, m2 ... in this order, among filler.

    The first mention of a record is noise and weighs nothing; every repeat must be looked up.
    """
    n_filler = length - 1 - 4 * len(mentions) - 2 * len(marked)
    if n_filler < 0:
        raise ValueError(f"length={length}: {len(mentions)} records and {len(marked)} marks need {length - n_filler}")
    slots = [*mentions, *[SUMMARY] * len(marked), *[PAD] * n_filler]
    rng.shuffle(slots)
    row, seen, marks, filler = Row([BOS], [0.0]), set(), iter(zip(MARKS, marked, strict=False)), None
    for slot in slots:
        if slot == PAD:
            filler, weight = (rng.choice(SUCCESSORS[filler]), EASY) if filler else (rng.choice(FILLER), 0.0)
            row.add([filler], weight)
            continue
        filler = None
        if slot == SUMMARY:
            row.add(next(marks), 0.0)
            continue
        row.add([slot], 0.0)
        row.add(records[slot], HARD if slot in seen else 0.0)
        seen.add(slot)
    return row


def _ask(row: Row, records: Records, keys: Sequence[int]) -> Row:
    for key in keys:
        row.add([QUESTION, key], 0.0)
        row.add(records[key], HARD)
    return row


def _summarize(row: Row, marked: Sequence[int]) -> Row:
    row.add([SUMMARY], 0.0)
    for mark, value in zip(MARKS, marked, strict=False):
        row.add([mark], EASY)
        row.add([value], HARD)
    return row


def _copy_row(rng: random.Random, length: int) -> Row:
    items = rng.sample(range(FILLER.start, VALUES.stop), length)
    row = Row([BOS], [0.0])
    row.add([*items, COPY], 0.0)
    row.add(items, HARD)
    return row


def training_row(rng: random.Random, length: int, summaries: float = 0.3) -> Row:
    """One row of at most `length` tokens; short rows are dense and half of them copies: they teach looking back."""
    short = length <= 64
    if rng.random() < (0.5 if short else 0.15):
        longest = min(96, length // 2 - 1)
        return _copy_row(rng, rng.randint(3 * longest // 4, longest))
    n_marks = rng.randint(2, 8) if length >= 64 and rng.random() < summaries else 0
    n_questions = rng.randint(1, max(1, min(8, length // 16)))
    size = length - (1 + 2 * n_marks if n_marks else 5 * n_questions)
    density = rng.uniform(0.3, 1.0) if short else rng.uniform(0.06, 0.5)
    n_mentions = max(1, int(density * (size - 1 - 2 * n_marks) / 4))
    records, spare = _records(rng, rng.randint(2, max(2, min(20, size // 6))))
    mentions = _zipf(rng, list(records), rng.uniform(0.0, 1.2), n_mentions)
    marked = rng.sample(spare, n_marks)
    row = _context(rng, size, records, mentions, marked)
    return _summarize(row, marked) if marked else _ask(row, records, rng.choices(mentions, k=n_questions))


def training_batch(rng: random.Random, length: int, n_tokens: int, summaries: float = 0.3) -> tuple[Tensor, Tensor]:
    """Tokens and loss weights [B, length] of n_tokens // length rows; `weights[:, t]` is for predicting token t.

    `summaries` is the share of summary rows among those that are no copies, from a length of 64 on.
    """
    return padded([training_row(rng, length, summaries) for _ in range(n_tokens // length)], length)


def padded(rows: Sequence[Row], length: int) -> tuple[Tensor, Tensor]:
    """Tokens and loss weights [B, length] of rows that are at most so long."""
    for row in rows:
        row.add([PAD] * (length - len(row.tokens)), 0.0)
    return torch.tensor([row.tokens for row in rows]), torch.tensor([row.weights for row in rows])


def _batch(rows: list[Row], context: int, head: int | None, answers_AW: Tensor) -> Batch:
    """`head` tokens of the tail belong to the prompt; None: the question comes after compression."""
    return Batch(torch.tensor([row.tokens for row in rows]), context + (head or 0), answers_AW + context)


def recall(
    rng: random.Random,
    n_sequences: int,
    *,
    context: int = 216,
    keys: int = 16,
    zipf: float = 1.0,
    density: float = 0.3,
    questions: int = 8,
    in_prompt: bool = False,
) -> Batch:
    """A `density` share of the context is records of `keys` keys; a key mentioned often is asked for more often.

    No sequence asks for a key twice: the second answer could be read from the first.
    """
    n_mentions = int(density * (context - 1) / 4)
    if questions > min(keys, n_mentions):
        raise ValueError(f"questions={questions}: only {min(keys, n_mentions)} different keys can be mentioned")

    def row() -> Row:
        records, _ = _records(rng, keys)
        for _ in range(1000):
            mentions = _zipf(rng, list(records), zipf, n_mentions)
            asked = list(dict.fromkeys(rng.sample(mentions, n_mentions)))
            if len(asked) >= questions:
                break
        else:
            raise ValueError(f"questions={questions}: {n_mentions} mentions hardly ever name so many of {keys} keys")
        return _ask(_context(rng, context, records, mentions, ()), records, asked[:questions])

    answers_AW = 5 * torch.arange(questions)[:, None] + torch.arange(2, 5)
    return _batch([row() for _ in range(n_sequences)], context, 2 if in_prompt else None, answers_AW)


def needle(
    rng: random.Random,
    n_sequences: int,
    *,
    context: int = 232,
    needles: int = 4,
    questions: int = 1,
    in_prompt: bool = True,
) -> Batch:
    """`needles` records, each written once at a uniform place; the questions ask for different ones."""

    def row() -> Row:
        records, _ = _records(rng, needles)
        return _ask(_context(rng, context, records, list(records), ()), records, rng.sample(list(records), questions))

    answers_AW = 5 * torch.arange(questions)[:, None] + torch.arange(2, 5)
    return _batch([row() for _ in range(n_sequences)], context, 2 if in_prompt else None, answers_AW)


def copy(rng: random.Random, n_sequences: int, *, length: int = 64, in_prompt: bool = True) -> Batch:
    """`length` distinct tokens to say again; every token is an answer of its own."""
    rows = [_copy_row(rng, length) for _ in range(n_sequences)]
    return _batch(rows, length + 1, 1 if in_prompt else None, torch.arange(1, length + 1)[:, None])


def summary(
    rng: random.Random,
    n_sequences: int,
    *,
    context: int = 216,
    marks: int = 6,
    keys: int = 8,
    density: float = 0.2,
    in_prompt: bool = False,
) -> Batch:
    """`marks` marked values in a context with records as in recall; the answers are the values, one token each."""
    if marks > len(MARKS):
        raise ValueError(f"marks={marks}: there are {len(MARKS)}")

    def row() -> Row:
        records, spare = _records(rng, keys)
        mentions, marked = _zipf(rng, list(records), 1.0, int(density * context / 4)), rng.sample(spare, marks)
        return _summarize(_context(rng, context, records, mentions, marked), marked)

    answers_AW = 2 * torch.arange(marks)[:, None] + 2
    return _batch([row() for _ in range(n_sequences)], context, 1 if in_prompt else None, answers_AW)


def tokenizer() -> PreTrainedTokenizerFast:
    """The 144 words, then one token per byte, so that any text can be encoded.

    Words swallow the white space before them and are written with one space: `k07 v12` is two tokens, and text comes
    back as it was but for the space around words. No token is added at either end: write <bos> where it is meant.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS + alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = "|".join(re.escape(word) for word in WORDS)
    core.decoder = decoders.Sequence(
        [
            decoders.Replace(Regex(f"^(?=(?:{words})$)"), "\u0120"),
            decoders.ByteLevel(),
            decoders.Replace(Regex(f"^ (?=(?:{words})(?!\\w))"), ""),
        ]
    )
    special = {"bos_token": WORDS[BOS], "eos_token": WORDS[EOS], "pad_token": WORDS[PAD]}
    for word in WORDS:
        token = AddedToken(word, lstrip=True, single_word=word.isalnum(), normalized=False)
        (core.add_special_tokens if word in special.values() else core.add_tokens)([token])
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **special)


TASKS: dict[str, Callable[..., Batch]] = {"recall": recall, "needle": needle, "copy": copy, "summary": summary}


@torch.no_grad()
def exact_match(model: PreTrainedModel, batch: Batch, rows: int = 32) -> Tensor:
    """Which answers the model gives right with its full cache, bool [B, A]; `rows` sequences at a time.

    The true continuation is fed: an answer that is right throughout is the one greedy generation gives.
    """
    predicted = [
        model(chunk_BT[:, :-1].to(model.device), use_cache=False).logits[:, batch.prompt_length - 1 :].argmax(-1).cpu()
        for chunk_BT in batch.tokens_BT.split(rows)
    ]
    return batch.correct(torch.cat(predicted))


def accuracies(model: PreTrainedModel, n_sequences: int, seed: int = 1234) -> dict[str, float]:
    """Share of right answers with the full cache in each task's default form."""
    return {
        name: exact_match(model, task(random.Random(seed), n_sequences)).float().mean().item() for name, task in TASKS.items()
    }


def demo_prompts() -> str:
    """The text of DEMO."""
    rows = needle(random.Random(7), 24).tokens_BT.tolist()
    return json.dumps({"keys": [*KEYS], "rows": rows}, separators=(",", ":")) + "\n"


def shipped() -> dict[str, Path]:
    """Every committed model's folder by its name: those of tools/models, and the two that the package brings for its demo."""
    cards = (card for folder in (loading.MODELS, MODELS) for card in folder.glob("*/card.json"))
    return {card.parent.name: card.parent for card in sorted(cards)}


def load(name: str, folder: Path | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A shipped model (or one of another `folder`) in float32, ready for evaluation, and its tokenizer."""
    known = shipped() if folder is None else {path.parent.name: path.parent for path in folder.glob("*/config.json")}
    if name not in known:
        where, there = f" in {folder}" if folder else "", ", ".join(sorted(known)) or "none"
        raise ValueError(f"name={name!r} is no model{where}; there are: {there}")
    model = AutoModelForCausalLM.from_pretrained(known[name], dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(known[name])
