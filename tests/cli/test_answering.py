"""Tokens of a text that a stop string has ended in the midst of one."""

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from kvpatch.cli.loading import MODELS, Source
from tests.helpers.marks import batches

pytestmark = batches

TEXT = "import os\nprint('é ünï → 日本', 3)  # done"


def test_tokens_of_a_text_that_was_cut():
    """They are its text, wherever it ends, and begin with the tokens that the model wrote."""
    from kvpatch.cli.request_stops import cut_tokens

    tokenizer = Source(str(MODELS / "llama-python")).tokenizer()
    tokens = tokenizer(TEXT, add_special_tokens=False).input_ids
    ends = [len(tokenizer.decode(tokens[:count])) for count in range(len(tokens) + 1)]
    for length in range(len(TEXT) + 1):
        found = cut_tokens(tokenizer, tokens, TEXT[:length])
        assert tokenizer.decode(found) == TEXT[:length]
        whole = max(
            count for count, end in enumerate(ends) if end <= length and TEXT.startswith(tokenizer.decode(tokens[:count]))
        )
        assert found[:whole] == tokens[:whole]
    assert cut_tokens(tokenizer, tokens, TEXT) == tokens
