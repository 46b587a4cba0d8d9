"""Parameters of tests, and which of them `make test` runs."""

import pytest
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING

from kvpatch.hooks.versions import ENGINE

INSTALLED = Version(transformers.__version__)


def slow_but(fast, cases):
    """`cases` as parameters (a tuple: of several arguments), all marked slow but those in `fast`."""
    assert all(one in list(cases) for one in fast), f"{fast} names a case that is not there"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in fast else pytest.mark.slow)
        for case in cases
    ]


def since(version, why):
    """Mark a test of something that transformers has, or has mended, since a version."""
    return pytest.mark.skipif(INSTALLED < Version(version), reason=f"before transformers {version} {why}")


batches = since(ENGINE, "continuous batching is refused")


def skip_unless_known(kind):
    """Skip a test of a model type that the installed transformers does not have."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {INSTALLED} has no {kind}")
