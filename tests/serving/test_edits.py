"""Spans without which, or with other tokens in which, one text begins another."""

import random

import pytest

from kvpatch.serving.edits import RUN, count_common, find_edits
from tests.helpers.serving import prompts

(TEXT,) = prompts((120,), seed=3)
NEW = [1, 1, 1]


def apply(kept, edited):
    """The text that the edits make of the kept one."""
    ids = list(kept)
    for start, stop, new in reversed(edited.spans):
        ids[start:stop] = new
    return ids


def test_what_texts_begin_with_alike():
    assert count_common([], TEXT) == count_common(TEXT, []) == 0
    assert count_common(TEXT, TEXT + NEW) == len(TEXT) and count_common([0, *TEXT], TEXT) == 0
    for length in (1, 7, 64, 119):
        assert count_common(TEXT, TEXT[:length] + NEW) == length


def test_spans_that_are_gone_or_replaced():
    other = TEXT[:20] + TEXT[45:70] + [1, 1] + TEXT[90:] + NEW
    found = find_edits(TEXT, other, answer=110)
    assert found.spans == [(20, 45, []), (70, 90, [1, 1])]
    assert found.length == len(other) - len(NEW) and found.reused == 120 - 25 - 20
    assert apply(TEXT, found) == other[: found.length]


@pytest.mark.parametrize(
    "other",
    [
        TEXT + NEW,  # nothing is gone
        TEXT[:20] + TEXT[45:],  # nothing is left to read
        TEXT[:20] + NEW + TEXT[20:] + NEW,  # tokens without a place
        TEXT[:20] + NEW * 9 + TEXT[45:] + NEW,  # of more tokens than the span
        TEXT[:20] + TEXT[45:100] + NEW * 5,  # the end is another one, before the last answer
        TEXT[:60] + NEW * 20,
        TEXT[:20] + TEXT[45 : 45 + RUN - 1] + NEW * 20,  # too short a run to be the same text
    ],
    ids=["all kept", "no end", "inserted", "too long", "another end", "cut", "short run"],
)
def test_other_texts_are_no_edits(other):
    assert find_edits(TEXT, other, answer=110) is None


def test_the_rest_of_the_last_answer_may_be_gone():
    """Its thinking is, with an end too short to be found again."""
    other = TEXT[:112] + TEXT[117:] + NEW
    assert find_edits(TEXT, other, answer=110) == ([(112, 120, [])], 112)
    assert find_edits(TEXT, other, answer=113) is None


def test_a_run_that_comes_twice():
    """Behind a difference the text goes on, never back."""
    run = TEXT[10:30]
    kept = [*TEXT[:5], 0, 0, 0, *run, 0, 0, 0, 0, *run, *TEXT[60:80]]
    other = [*TEXT[:5], *run, *run, *TEXT[60:80], *NEW]
    assert find_edits(kept, other, answer=len(kept)) == ([(5, 8, []), (28, 32, [])], 65)


def test_random_edits_make_the_text():
    rnd = random.Random(0)
    for _ in range(300):
        kept = [rnd.randrange(2) for _ in range(80)]  # runs repeat
        cuts = sorted(rnd.sample(range(70), 4))
        other = kept[: cuts[0]] + kept[cuts[1] : cuts[2]] + [9] * rnd.randrange(3) + kept[cuts[3] :] + [7]
        found = find_edits(kept, other, answer=80)
        if found is not None:
            assert apply(kept, found) == other[: found.length]
            assert all(start < stop and len(new) <= stop - start for start, stop, new in found.spans)
