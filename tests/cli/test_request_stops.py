"""Stop strings in a text that comes in pieces: the text ends before the first of them, wherever pieces are cut."""

import random

import pytest

from kvpatch.cli.request_stops import StopStringWatch


def read(pieces, stops):
    watch = StopStringWatch(stops)
    parts = [watch.feed(piece) for piece in pieces]
    return "".join(parts) + watch.flush(), watch.stopped, parts


def test_a_stop_string_in_the_midst_of_a_piece():
    assert read(["one, two", "; three. four"], [". "]) == ("one, two; three", True, ["one, two", "; three"])


def test_nothing_is_handed_on_that_may_begin_a_stop_string():
    text, stopped, parts = read(["ab", "c", "d"], ["bce"])
    assert (text, stopped, parts) == ("abcd", False, ["a", "", "bcd"])


def test_a_text_that_ends_in_half_a_stop_string():
    assert read(["ab"], ["bc"])[:2] == ("ab", False)


def test_after_the_stop_nothing_comes():
    watch = StopStringWatch(["b"])
    assert [watch.feed("ab"), watch.feed("cd"), watch.flush()] == ["a", "", ""]


@pytest.mark.parametrize("seed", range(30))
def test_any_cuts_give_the_text_before_the_stop(seed):
    rnd = random.Random(seed)
    text = "".join(rnd.choice("ab") for _ in range(60))
    stop = "".join(rnd.choice("ab") for _ in range(rnd.randint(1, 7)))
    cuts = sorted(rnd.sample(range(61), 12))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, 60], strict=True)]
    found, stopped, _ = read(pieces, [stop])
    assert found == text.partition(stop)[0] and stopped == (stop in text)
