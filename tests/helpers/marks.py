"""Parameters of tests, and which of them `make test` runs."""

import pytest


def slow_but(fast, cases):
    """`cases` as parameters (a tuple: of several arguments), all marked slow but those in `fast`."""
    assert all(one in list(cases) for one in fast), f"{fast} names a case that is not there"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in fast else pytest.mark.slow)
        for case in cases
    ]
