"""Random sequences of what a cache can do, beside each row's text through a cache of its own."""

import torch
from hypothesis import assume
from hypothesis import strategies as st

from kvpatch.errors import KVPatchError
from tests.helpers.comparing import (
    ANY_SCHEDULE,
    EVICTING,
    PLACED,
    UNPLACED,
    WAITING,
    WINDOWED,
    combined,
    sorted_positions,
)
from tests.helpers.tiny import MODELS, prompt, sound
from tests.oracle.test_oracle_parts import fits

KINDS = ("decode", "decode", "decode", "turn", "clone", "crop", "reorder", "repeat", "save", "forget", "replace")
DEEDS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 6)), max_size=9)


@st.composite
def settings_of_a_patch(draw):
    policy = draw(st.sampled_from([name for name in EVICTING if name not in UNPLACED]))
    wrap = tuple(name for name in ("pyramid", "adaptive", "critical") if draw(st.booleans()))
    assume(fits(policy, wrap))
    name = draw(st.sampled_from(tuple(MODELS)))
    options = {"block": draw(st.one_of(st.none(), st.integers(1, 12)))}
    if policy in WAITING:
        options["block"] = None
    if policy in WINDOWED:
        options["window"] = draw(st.integers(1, 6))
    elif policy in ANY_SCHEDULE and draw(st.booleans()):
        options["schedule"] = "prompt"
    if policy == "keyformer" and options["block"] is None:
        options["shared"] = draw(st.booleans())
    if name != "gpt2" and policy not in PLACED and draw(st.booleans()):
        options["positions"] = "renumbered"
    return name, combined(policy, wrap), draw(st.one_of(st.floats(0.1, 0.9), st.integers(3, 40))), options


class Texts:
    """A cache of several rows, and the text that each row has seen."""

    def __init__(self, model, patch, rows, n, path):
        self.model, self.patch, self.rows, self.path = model, patch, rows, path
        self.cache, self.seed, self.texts = patch.new_cache(), 0, [[] for _ in range(rows)]
        self.feed(n)

    def feed(self, n, remembered=True):
        """n tokens in one forward: a prompt, or one generated token."""
        self.seed += 1
        ids = prompt(self.rows, n, seed=self.seed)
        self.logits = self.model(ids, past_key_values=self.cache, use_cache=True).logits[:, -1]
        sound(self.cache)
        if remembered:
            self.texts = [[*text, piece] for text, piece in zip(self.texts, ids, strict=True)]

    def do(self, deed, number):
        if deed == "decode":
            for _ in range(number):
                self.feed(1)
        elif deed == "turn":
            self.feed(number + 1)
        elif deed == "clone":
            self.cache = self.cache.clone()
        elif deed == "crop":
            self.cache.activate_past_recording()
            for _ in range(number):
                self.feed(1, remembered=False)
            self.cache.crop(-number)
        elif deed == "reorder":
            order = [(row * number + 1) % self.rows for row in range(self.rows)]
            self.cache.reorder_cache(torch.tensor(order))
            self.texts = [self.texts[row] for row in order]
        elif deed == "repeat":
            chosen = [(row * number) % (2 * self.rows) for row in range(self.rows)]
            self.cache.batch_repeat_interleave(2)
            self.cache.batch_select_indices(torch.tensor(chosen))
            self.texts = [self.texts[row // 2] for row in chosen]
        elif deed == "forget":
            seen = self.cache.get_seq_length()
            spans = [(number % seen, min(seen, 3 * number)), (seen - 1, seen)][: 1 + number % 2]
            self.cache.forget(spans if number * 3 < seen else spans[-1:])
            self.texts = [[*text, spans if number * 3 < seen else spans[-1:]] for text in self.texts]
        elif deed == "replace":
            self.replace(number)
        elif deed == "save":
            self.patch.save_cache(self.cache, self.path)
            self.cache = self.patch.load_cache(self.path)
        sound(self.cache)

    def replace(self, number):
        """Replace a span near the beginning by fewer tokens or as many, unless the model cannot be told its positions."""
        self.seed += 1
        seen, start = self.cache.get_seq_length(), number - 1
        span, reread = (start, min(seen, 3 * number)), number % 3
        new = prompt(self.rows, max(1, (span[1] - start) // (1 + number % 2)), seed=self.seed)
        reread = reread if span[1] + reread <= seen else 0
        if start >= span[1]:
            return
        try:
            self.patch.replace(self.cache, span, new, reread=reread)
        except KVPatchError as error:
            if not str(error).startswith("replace()"):
                raise
            return
        self.texts = [[*text, (span, piece, reread)] for text, piece in zip(self.texts, new, strict=True)]

    def follow(self, deeds):
        for deed, number in deeds:
            self.do(deed, number)
        self.check()

    def check(self):
        """One more token, beside every row's text through a cache of its own."""
        self.feed(1)
        held = [self.cache.positions(layer).tolist() for layer in range(2)]
        for row, text in enumerate(self.texts):
            alone = self.patch.new_cache()
            for piece in text:
                if isinstance(piece, list):
                    alone.forget(piece)
                    continue
                if isinstance(piece, tuple):
                    self.patch.replace(alone, *piece[:2], reread=piece[2])
                    continue
                logits = self.model(piece[None], past_key_values=alone, use_cache=True).logits[:, -1]
            own = [alone.positions(layer)[0].tolist() for layer in range(2)]
            assert sorted_positions([layer[row] for layer in held]) == sorted_positions(own)
            torch.testing.assert_close(self.logits[row], logits[0], atol=1e-6, rtol=0)
