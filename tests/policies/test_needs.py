"""Needs: a user's own, as the guide has it, goes wherever a layer goes."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import kvpatch
from kvpatch.policies import Policy, Scope, Score
from kvpatch.policies.needs import Need
from tests.helpers.running import go_on
from tests.helpers.tiny import force, left_pad, make, prompt

GUIDE = (Path(__file__).parents[2] / "docs/extend/policy.md").read_text(encoding="utf-8")
NAME = "fading_query"


def define(word):
    """Return what the guide's block that defines `word` defines, without its example."""
    (code,) = (one for one in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if f"class {word}" in one)
    names = {}
    exec(code.split('name = "')[0], names)
    return names


@pytest.fixture(scope="module")
def fading():
    return Policy("fading", define("FadingQuery")["Fading"](), Scope(sinks=1, recent=0.25))


@pytest.fixture
def model():
    return make("llama_gqa", dtype=torch.float64)


@pytest.mark.parametrize("pads", [0, 2])
@pytest.mark.parametrize("tokens", [3, 20])
def test_the_guides_peak_of_a_prompt_is_the_mean_of_the_rows_there_are(model, tokens, pads):
    """So it sums to one over the keys, also where there are fewer rows than it asks for."""
    ids = prompt(2, tokens)
    mask = left_pad(ids, [tokens, tokens - pads])
    with kvpatch.patched(model, Policy("peak", define("FadingPeak")["Peak"](), Scope()), 64):
        cache = model(ids, attention_mask=mask).past_key_values
    layer = cache.layers[0]
    sums = (layer.state["peak"] * (layer.positions >= 0)).sum(-1)
    assert torch.allclose(sums, torch.ones_like(sums), atol=1e-5)


def read(model, patch, ids, steps=5):
    cache = patch.new_cache()
    force(model, ids, prompt(len(ids), steps, seed=3), cache=cache)
    return cache


def means(cache):
    return [layer.need_notes[NAME].q_BHGD for layer in cache.layers]


def test_padding_and_other_rows_change_nothing(model, fading):
    ids, fed = prompt(2, 20), prompt(2, 5, seed=3)
    mask = left_pad(ids, [20, 14])
    with torch.no_grad(), kvpatch.patched(model, fading, k=8) as patch:
        both, alone = patch.new_cache(), patch.new_cache()
        force(model, ids, fed, mask, both)
        force(model, ids[1:, 6:], fed[1:], cache=alone)
        for whole, own in zip(means(both), means(alone), strict=True):
            torch.testing.assert_close(whole[1:], own)
            assert not torch.allclose(whole[0], whole[1])


@pytest.mark.parametrize("change", ["rows", "copy", "file", "join"])
def test_the_note_goes_where_the_layer_goes(model, fading, change, tmp_path):
    ids = prompt(2, 20)
    with torch.no_grad(), kvpatch.patched(model, fading, k=8) as patch:
        cache = read(model, patch, ids)
        want = [mean.flip(0) if change == "rows" else mean for mean in means(cache)]
        if change == "rows":
            cache.reorder_cache(torch.tensor([1, 0]))
        elif change == "copy":
            cache, left = cache.clone(), cache
            go_on(model, prompt(2, 3, seed=8), left)
        elif change == "file":
            patch.save_cache(cache, tmp_path / "cache")
            cache = patch.load_cache(tmp_path / "cache")
        else:
            parts = [cache.select_rows([row]) for row in (0, 1)]
            cache = type(cache).concatenate(parts)
        for got, wanted in zip(means(cache), want, strict=True):
            assert torch.equal(got, wanted)
        cache.check_invariants()
        go_on(model, prompt(2, 2, seed=9), cache)


def test_a_step_is_taken_back(model, fading):
    with torch.no_grad(), kvpatch.patched(model, fading, k=8) as patch:
        cache = read(model, patch, prompt(1, 20))
        cache.activate_past_recording()
        before, held = [mean.clone() for mean in means(cache)], cache.positions(0).clone()
        for seed in (1, 2):
            go_on(model, prompt(1, 1, seed=seed), cache)
        assert not torch.equal(means(cache)[0], before[0])
        cache.crop(cache.get_seq_length() - 2)
        assert all(torch.equal(got, want) for got, want in zip(means(cache), before, strict=True))
        assert torch.equal(cache.positions(0)[cache.positions(0) >= 0], held[held >= 0])


def test_it_decides_what_is_kept(model, fading):
    """A head keeps the keys that its mean points at most, beside the first token and the newest."""
    with torch.no_grad(), kvpatch.patched(model, fading, k=8) as patch:
        cache = read(model, patch, prompt(1, 20), steps=0)
    with torch.no_grad(), kvpatch.patched(model, "full") as patch:
        keys = read(model, patch, prompt(1, 20), steps=0).layers[0].kv.numbers(20)[0]
    score = (keys @ means(cache)[0].mean(2)[..., None]).squeeze(-1)  # its scale ranks alike
    for head in range(keys.shape[1]):
        chosen = score[0, head, 1:18].topk(5).indices + 1
        assert sorted(p for p in cache.positions(0)[0, head].tolist() if p >= 0) == sorted([0, 18, 19, *chosen.tolist()])


def test_pieces_of_a_row_that_ended_leave_its_mean(model, fading):
    """Read in blocks of four, the shorter row ends earlier: its mean is that of its last block with a token."""
    ids, mask = prompt(2, 16), left_pad(prompt(2, 16), [16, 9])
    with torch.no_grad(), kvpatch.patched(model, fading, k=6, block=4) as patch:
        both, alone = patch.new_cache(), patch.new_cache()
        force(model, ids, prompt(2, 0), mask, both)
        force(model, ids[1:, 7:], prompt(1, 0), cache=alone)
    for whole, own in zip(means(both), means(alone), strict=True):
        torch.testing.assert_close(whole[1:], own)
        assert own.abs().sum() > 0


def test_a_need_that_does_not_say_so_is_not_stacked(model, fading):
    """A step of stacked layers has no queries of its own to read."""
    with torch.no_grad(), kvpatch.patched(model, fading, k=8) as patch:
        cache = read(model, patch, prompt(1, 20), steps=3)
        assert not cache.stacked
    assert fading.needs.alone and not kvpatch.get_policy("tova").needs.alone


# ---- numbers of each token ----


@dataclass(frozen=True)
class Numbers(Need):
    """Three numbers of each token, and small integers."""

    dtype: str
    name: ClassVar[str] = "numbers"

    def entry(self, new):
        position = new.positions_BQ[:, None].expand(new.k_BHQD.shape[:3])
        return {
            "three": torch.stack([position, -position, 2 * position], -1).double(),
            "small": (position % 7).to(getattr(torch, self.dtype)),
        }


@dataclass(frozen=True)
class Numbered(Score):
    """Tokens whose small number is high."""

    dtype: str

    @property
    def needs(self):
        return (Numbers(self.dtype),)

    def value(self, context):
        return context.state["small"].float() + context.state["three"].sum(-1).float() / 1000


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "bool", "float32"])
def test_numbers_of_any_kind_and_count_are_saved_and_loaded(model, dtype, tmp_path):
    with torch.no_grad(), kvpatch.patched(model, Policy("numbered", Numbered(dtype)), k=8) as patch:
        cache = read(model, patch, prompt(2, 20))
        patch.save_cache(cache, tmp_path / "cache")
        loaded = patch.load_cache(tmp_path / "cache")
        for got, want in zip(loaded.layers, cache.layers, strict=True):
            assert got.state["small"].dtype == getattr(torch, dtype) and want.state["three"].shape[3] == 3
            assert all(torch.equal(got.state[name], want.state[name]) for name in ("small", "three"))
        go_on(model, prompt(2, 2, seed=9), loaded)


# ---- attention of all rows ----


@dataclass(frozen=True)
class Greatest(Need):
    """The greatest attention that a row of a prompt gives to each token."""

    name: ClassVar[str] = "greatest"

    def entry(self, new):
        return {"greatest": new.k_BHQD.new_zeros(new.k_BHQD.shape[:3])}

    def read(self, prompt):
        def fold(rows):
            return rows.p_NGRM.mean(1).amax(1)

        found = prompt.attention(prompt.q_BHGQD, prompt.rows_BQ, prompt.lse_BHGQ, fold, "max")
        greatest = prompt.layer.statistic("greatest")
        greatest.copy_(torch.maximum(greatest, found))


@dataclass(frozen=True)
class Attended(Score):
    """Tokens that a row has looked at."""

    needs = (Greatest(),)

    def value(self, context):
        return context.state["greatest"].float()


def test_a_prompt_in_pieces_is_read_as_the_whole_one(model):
    ids, found = prompt(2, 20), []
    with torch.no_grad(), kvpatch.patched(model, Policy("attended", Attended()), k=12) as patch:
        for piece in (None, 7):
            cache = patch.new_cache()
            model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False, prefill_chunk_size=piece)
            found.append(cache)
    for layers in zip(*(cache.layers for cache in found), strict=True):
        (held, want), (other, got) = ([*_in_text_order(layer)] for layer in layers)
        assert torch.equal(held, other) and (want > 0).any()
        torch.testing.assert_close(got, want)


def _in_text_order(layer):
    order = layer.positions.argsort(-1)
    return layer.positions.gather(-1, order), layer.state["greatest"].gather(-1, order)
