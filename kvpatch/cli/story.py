"""Implementation of `kvpatch demo MODEL`: a text is read once under each policy, and questions about it come afterwards."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import plotting
from ..arch.upstream import CACHE
from ..cache.cache import EvictingCache
from ..errors import KVPatchError
from ..patching import patched
from ..policies.uses import CHANCE, SPARED
from ..report import Report
from . import story_view as view
from .generating import continue_ids
from .loading import Source, fit_prompt
from .output import make_console, make_folder, make_progress_bar, print_json

TEXT = Path(__file__).parent / "texts" / "harbour.txt"
"""A text that no model has been trained on, for it was written for this demo."""
QUESTIONS = {
    "What is the name of the lifeboat?": "Margaret Dunne",
    "Who is the coxswain?": "Peter Halloran",
    "Which trawler was rescued in the winter of 1962?": "Anna Karlsen",
}
"""Questions, and the words of the text that answer them."""
K, ANSWER_TOKENS = 0.3, 20
POLICIES: dict[str, Mapping[str, Any]] = {
    "full": {},
    CHANCE: SPARED,
    "streaming_llm": {},
    "h2o": {},
    "kvzip": {"floor": 0.2},
}


@dataclass(frozen=True)
class StoryText:
    """Text and questions as a model reads them.

    Attributes:
        text: what is read before any question.
        ids_1T: its tokens.
        spans: of its tokens, (start, stop) in characters of `text`.
        asked: the tokens [1,N] of the text and a question after it, by question.
    """

    text: str
    ids_1T: Tensor
    spans: list[tuple[int, int]]
    asked: dict[str, Tensor]

    def find_tokens(self, phrase: str) -> list[int]:
        """Return the tokens that have a part of this phrase of the text."""
        start = self.text.index(phrase)
        return [i for i, (a, b) in enumerate(self.spans) if a < start + len(phrase) and b > start]


def run(source: Source, out: Path, json: bool = False) -> None:
    """Print the answers under the full cache, random eviction and three policies, and save a picture of the words kept.

    The work of `kvpatch demo MODEL`: the command `demo` calls it.

    Args:
        source: the model.
        out: folder of the picture.
        json: print the table's rows to stdout as JSON, and everything else to stderr.

    Raises:
        KVPatchError: the model cannot be loaded or has no room for the text, or `out` cannot be written.
    """
    console = make_console(stderr=json)
    make_folder(out)
    model, tokenizer = source.model(), source.tokenizer()
    reading = read_story(model, tokenizer)
    view.show_story(console, source.name, reading.ids_1T.shape[1], K, list(QUESTIONS))
    outcomes = []
    with make_progress_bar(console) as bar:
        task = bar.add_task("", total=len(POLICIES))
        for policy in POLICIES:
            bar.update(task, description=f"{policy} ...")
            outcomes.append(ask(model, tokenizer, reading, policy))
            bar.advance(task)
    if json:
        for one in outcomes:
            print_json(one.to_dict(outcomes[0]))
    view.show(console, outcomes)
    plotting.save(draw(reading, outcomes[1:]), out / "kept.png")
    console.print(f"\nThe text, as each policy kept it: {out / 'kept.png'}")


def draw(reading: StoryText, outcomes: list[view.PolicyAnswers]) -> Any:
    """Draw the text once per policy, a word the darker the more heads kept its tokens (share_T); `run` saves the figure."""
    pages = [(f"{one.policy}: {sum(one.right)} of {len(QUESTIONS)} answers right", one.share_T) for one in outcomes]
    title = f"Words that are left of the text under a budget of {K:.0%}: the darker, the more heads kept them"
    return plotting.draw_text(reading.text, reading.spans, pages, list(QUESTIONS.values()), title)


def read_story(model: Any, tokenizer: Any) -> StoryText:
    """Encode the demo's document, alone and with each question after it, by the tokenizer's chat template if there is one.

    `run` calls it once.

    Raises:
        KVPatchError: the model has no room for document, question and answer, or the tokenizer does not say where its tokens
            stand in a text.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise KVPatchError(
            "This tokenizer does not say where its tokens stand in a text (it is no fast one), so that kept words cannot be "
            "shown. Give another model, or none: kvpatch demo."
        )
    document = TEXT.read_text(encoding="utf-8")
    rendered = {
        question: _render_message(tokenizer, f"{document}\nAnswer in one short sentence. {question}") for question in QUESTIONS
    }
    # tokens up to the document's end are the same for all questions; one across that end may have a part of the question
    first = next(iter(rendered.values()))
    end = first.index(document) + len(document.rstrip())
    encoded = tokenizer(first, add_special_tokens=False, return_offsets_mapping=True)
    spans = [(a, b) for a, b in encoded["offset_mapping"] if b <= end]
    ids_by_question = {
        question: tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids.to(model.device)
        for question, text in rendered.items()
    }
    for ids_1N in ids_by_question.values():
        if fit_prompt(model, ids_1N, ANSWER_TOKENS)[1]:
            raise KVPatchError(
                f"The demo's text and an answer take {ids_1N.shape[1] + ANSWER_TOKENS:,} tokens, more than the positions of "
                "this model. Give another model, or none: kvpatch demo."
            )
    return StoryText(first[:end], next(iter(ids_by_question.values()))[:, : len(spans)], spans, ids_by_question)


def _render_message(tokenizer: Any, text: str) -> str:
    """Return a text as a user's message by the chat template, for `read_story`; without one, with "Answer:" added."""
    if not getattr(tokenizer, "chat_template", None):
        return f"{tokenizer.bos_token or ''}{text}\nAnswer:"
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def ask(model: Any, tokenizer: Any, reading: StoryText, policy: str) -> view.PolicyAnswers:
    """Read the text under a policy ("full": none), and answer all questions from its cache, for a row of the demo's table.

    `run` calls it for each policy. CACHE: the name of generate()'s argument for a cache.
    """
    start = time.perf_counter()
    with patched(model, policy, 1.0 if policy == "full" else K, **POLICIES[policy]) as patch, torch.no_grad():
        cache = patch.new_cache()
        model(reading.ids_1T, logits_to_keep=1, **{CACHE: cache})
        kept_LHT = Report.of(cache).kept()
        answers = [_answer_question(model, tokenizer, reading, question, cache) for question in QUESTIONS]
    share_T = kept_LHT.float().mean((0, 1))  # of each token, the share of all layers' heads that kept it
    held = [float(share_T[reading.find_tokens(phrase)].mean()) for phrase in QUESTIONS.values()]  # of each answer's words
    right = [phrase.casefold() in answer.casefold() for phrase, answer in zip(QUESTIONS.values(), answers, strict=True)]
    return view.PolicyAnswers(policy, cache.nbytes, time.perf_counter() - start, answers, held, right, share_T)


def _answer_question(model: Any, tokenizer: Any, reading: StoryText, question: str, cache: EvictingCache) -> str:
    """Answer one of the demo's questions, greedily and on one line, from a copy of the cache: no question sees another.

    `ask` calls it for each question. The ids hold the document too; generate() skips the tokens that the cache has read.
    """
    ids_1N = reading.asked[question]
    new_1N = continue_ids(model, ids_1N, max_new_tokens=ANSWER_TOKENS, do_sample=False, **{CACHE: cache.clone()})
    return " ".join(tokenizer.decode(new_1N[0], skip_special_tokens=True).split())
