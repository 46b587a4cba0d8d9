"""A thousand random edits, over every family: a cache goes on as the unpatched model whose tokens are masked from then on.

forget(), replace() and tokens put into free places, between prompts, steps, beams and copies, of rows that are padded or not.
"""

import random

import pytest
import torch

import kvpatch
from tests.arch.test_families import ROTARY
from tests.helpers import tiny, tiny_families
from tests.helpers.edited import Editing
from tests.helpers.inserted import Inserting
from tests.helpers.tiny_families import BY_COLUMNS, FAMILIES, OWN

UNTOLD = (*BY_COLUMNS, "falcon_alibi")
NAMES = [*FAMILIES, *tiny.MODELS, *tiny.MORE, *OWN]
BOUNDED = [name for name, (_, given) in FAMILIES.items() if {"sliding_window", "attention_chunk_size"} & set(given)]
RENUMBERED = [name for name in ROTARY if name not in BOUNDED] + ["phi3", "llama", "llama_gqa", "mpt", "gptj", "bloom", "falcon"]
INSERTIONS = 12
EDITS = -(-1000 // len(NAMES))
SPANS = {"quota": [(1, 6), (6, 12), (12, 17)], "recent": 0}  # shares that fill most of the budget
SETTINGS = [
    ("full", 1.0, {}),
    ("h2o", 1.0, {}),
    ("h2o", 0.5, {}),
    ("h2o", 14, SPANS),
    ("h2o", 14, {"protect": [5, 17, 40]}),
    ("snapkv", 0.6, {"window": 3}),
    ("adakv", 12, {"window": 3}),
    ("tova", 16, {}),
    ("window", 11, {"sinks": 2}),
    ("h2o", kvpatch.Share(0.5), {}),
    ("h2o", 12, {"bits": 8}),
    ("snapkv", 0.6, {"bits": 4, "window": 3}),
]


def make(name):
    wide = torch.float32 if name == "xglm" else torch.float64  # whose own code writes float32's least number
    return (tiny_families if name in {**FAMILIES, **OWN} else tiny).make(name, dtype=wide)


@pytest.mark.parametrize("name", NAMES)
def test_any_sequence(name):
    draw, model, left = random.Random(name), make(name), EDITS
    while left > 0:
        some = min(5, left)
        Editing(model, some, draw.choice(SETTINGS), draw, name in UNTOLD).run()
        left -= some


@pytest.mark.parametrize("name", RENUMBERED)
def test_insertions_are_free_places(name):
    """Under renumbered positions, with all that is read in the cache."""
    draw, model, done = random.Random(name), make(name), 0
    while done < INSERTIONS:
        policy = draw.choice(("full", "h2o", "roco", "tova", "snapkv", "adakv"))
        with torch.no_grad(), kvpatch.patched(model, policy, 1.0, positions="renumbered") as patch:
            both = Inserting(model, patch, draw)
            for _ in range(6):
                both.insert() if both.free and draw.randrange(3) else both.forget()
                both.step()
            done += both.done
