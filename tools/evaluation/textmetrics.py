"""How close a text is to a reference, from 0 to 1: ROUGE, BLEU, METEOR, and LongBench's six measures."""

from __future__ import annotations

import importlib
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from kvpatch.errors import KVPatchError

ROUGE = ("rouge1", "rouge2", "rougeL")
WORDS = {
    "rouge1": "F of shared words (rouge-score, stemmed)",
    "rouge2": "F of shared pairs of words",
    "rougeL": "F of the longest common subsequence of words",
    "bleu": "sentence BLEU (sacrebleu, 0 to 1)",
    "meteor": "METEOR (nltk), where WordNet is installed",
}
"""What `scores` returns, in words."""


def need(module: str, package: str) -> Any:
    """A module of the extra `eval`. Raises KVPatchError where its package is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise KVPatchError(f"This task needs the package {package}: pip install {package}") from error


def names() -> tuple[str, ...]:
    """The scores that can be had on this machine."""
    return tuple(name for name in WORDS if name != "meteor" or _wordnet() is not None)


def scores(text: str, references: Sequence[str], sample: str = "") -> dict[str, float]:
    """Each score with the reference for which it is highest; all are 0 where `text` is empty.

    Raises:
        KVPatchError: a reference is empty (`sample` says which sample's), or a package is missing.
    """
    if not references or not all(reference.strip() for reference in references):
        raise KVPatchError(f"Sample {sample!r} has an empty reference, so nothing compares with it: leave it out.")
    each = [_scores(text, reference) for reference in references]
    return {name: max(one[name] for one in each) for name in each[0]}


def _scores(text: str, reference: str) -> dict[str, float]:
    rouge = _rouge().score(reference, text)
    found = {name: rouge[name].fmeasure for name in ROUGE}
    found["bleu"] = min(1.0, need("sacrebleu", "sacrebleu").sentence_bleu(text, [reference]).score / 100)
    if _wordnet() is not None:
        tokens = need("nltk.tokenize", "nltk").NLTKWordTokenizer().tokenize
        measure = need("nltk.translate.meteor_score", "nltk").single_meteor_score
        found["meteor"] = measure(tokens(reference), tokens(text), wordnet=_wordnet())
    return found


@cache
def _rouge() -> Any:
    return need("rouge_score.rouge_scorer", "rouge-score").RougeScorer(list(ROUGE), use_stemmer=True)


@cache
def _wordnet() -> Any | None:
    """nltk's WordNet, or None; how to get it is said once."""
    try:
        corpus = importlib.import_module("nltk.corpus").wordnet
        corpus.ensure_loaded()
        return corpus
    except (ImportError, LookupError):
        print(
            "METEOR is left out, for it needs nltk and WordNet: pip install nltk, then python -m nltk.downloader wordnet",
            file=sys.stderr,
        )
        return None


# ---- LongBench [CriticalKV Appendix D] ----

_ARTICLES = re.compile(r"\b(a|an|the)\b")


def _plain(text: str) -> list[str]:
    """Words in lower case without punctuation and articles."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return _ARTICLES.sub(" ", text).split()


def qa_f1(prediction: str, truth: str, classes: Sequence[str] = ()) -> float:
    """F of the words that both have."""
    mine, wanted = Counter(_plain(prediction)), Counter(_plain(truth))
    shared = (mine & wanted).total()
    return 2 * shared / (mine.total() + wanted.total()) if shared else 0.0


def rouge_l(prediction: str, truth: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L as the package `rouge` counts it: no stemming, words are what white space separates."""
    rouge = need("rouge", "rouge").Rouge(metrics=["rouge-l"])
    try:
        return rouge.get_scores([prediction], [truth])[0]["rouge-l"]["f"]
    except (ValueError, RecursionError):  # nothing but white space and full stops; a text too long for its recursion
        return 0.0


def classification(prediction: str, truth: str, classes: Sequence[str] = ()) -> float:
    """One over the number of classes that the prediction names, if the right one is among them. A class whose name is a
    part of the right one's does not count as named."""
    named = {name for name in classes if name in prediction and (name == truth or name not in truth)}
    return 1 / len(named) if truth in named else 0.0


def retrieval(prediction: str, truth: str, classes: Sequence[str] = ()) -> float:
    """The share of the prediction's numbers that are the right paragraph's."""
    found = re.search(r"Paragraph (\d+)", truth)
    return count(prediction, found[1]) if found else 0.0


def count(prediction: str, truth: str, classes: Sequence[str] = ()) -> float:
    """The share of the prediction's numbers that are right."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(truth.strip()) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, truth: str, classes: Sequence[str] = ()) -> float:
    """Edit similarity, in whole percents, of the first line that is no comment and no fence."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(need("rapidfuzz.fuzz", "rapidfuzz").ratio(line, truth)) / 100


LONGBENCH: dict[str, Callable[[str, str, Sequence[str]], float]] = {
    "qa_f1": qa_f1,
    "rouge_l": rouge_l,
    "classification": classification,
    "retrieval": retrieval,
    "count": count,
    "code_similarity": code_similarity,
}
