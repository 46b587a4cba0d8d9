"""Misuses of a cache, a patch and a model: what is done, the class of the error, and its words.

test_misuse.py tries each row of ROWS; `python -m tools.reliability.misuse` prints them. Arguments of policies and of the
registries are in misuse_arguments.py, those of `patched` in test_errors.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny import force, make, prompt
from transformers import DynamicCache
from transformers.cache_utils import StaticCache

import kvpatch
from kvpatch import EvictingCache, KVPatchError

JOIN = EvictingCache.concatenate


@dataclass
class World:
    """What a misuse is done to: a tiny Llama of 2 layers and 2 KV heads and, where the row asks, its patch (h2o, k=0.5) and
    a cache of 2 rows that have seen 22 tokens."""

    model: Any
    folder: Path
    patch: Any = None
    cache: Any = None

    def step(self, **call: Any) -> Any:
        """One more token of both rows through the model, with `call` in place of its arguments."""
        with torch.no_grad():
            return self.model(**{"input_ids": prompt(2, 1), "past_key_values": self.cache, **call})

    def read(self, **call: Any) -> Any:
        """A prompt of both rows."""
        return self.step(**{"input_ids": prompt(2, 20), "past_key_values": None, **call})

    def generate(self, **call: Any) -> Any:
        return self.model.generate(**{"input_ids": prompt(2, 20), "max_new_tokens": 2, "pad_token_id": 0, **call})

    def patched(self, *args: Any, **kwargs: Any) -> None:
        with kvpatch.patched(self.model, *args, **kwargs):
            pass

    def file(self, cache: Any = None) -> Path:
        """A saved cache."""
        self.patch.save_cache(cache or self.read().past_key_values, self.folder / "cache")
        return self.folder / "cache"


@dataclass(frozen=True)
class Misuse:
    """on: "model" (not patched), "patch" (in a block), "cache" (in a block, with a cache)."""

    on: str
    name: str
    do: Callable[[World], Any]
    words: str
    kind: type[BaseException] = KVPatchError


def enter(model: Any, folder: Path, on: str) -> tuple[World, contextlib.ExitStack]:
    """The world of a row, and what undoes it."""
    world, stack = World(model, folder), contextlib.ExitStack()
    if on != "model":
        world.patch = stack.enter_context(kvpatch.patched(model, "h2o", 0.5))
    if on == "cache":
        _, world.cache = force(model, prompt(2, 20), prompt(2, 2, seed=2))
    return world, stack


def filled(name: str = "llama_gqa", policy: str = "h2o", k: Any = 0.5, **options: Any) -> Any:
    """A cache of another model or of other settings."""
    model = make(name)
    with kvpatch.patched(model, policy, k, **options), torch.no_grad():
        return model(prompt(2, 20)).past_key_values


def _full(rows: int = 2, layers: int = 2) -> DynamicCache:
    """What an unpatched model leaves."""
    model = make("llama_gqa", layers=layers)
    with torch.no_grad():
        return model(prompt(rows, 20)).past_key_values


def _static(w: World) -> StaticCache:
    return StaticCache(config=w.model.config, max_cache_len=64)


def _removed(w: World) -> Any:
    """The cache's model, no longer patched."""
    w.patch.remove()
    return w.step()


def _elsewhere(w: World, name: str = "llama_gqa", policy: str = "h2o", **options: Any) -> Any:
    """The cache in a block of another model or of other settings."""
    other = make(name)
    with kvpatch.patched(other, policy, **{"k": 0.5, **options}), torch.no_grad():
        return other(prompt(2, 1), past_key_values=w.cache)


def _half(w: World) -> Any:
    """A cache in the middle of a prompt."""
    cache = w.patch.new_cache()
    cache.prompt_len = 30
    w.read(past_key_values=cache)
    return cache


def _report_twice(w: World) -> Any:
    return kvpatch.patch(make("llama_gqa"), "h2o").report()


def _row(on: str) -> Callable[..., Misuse]:
    return lambda name, do, words, kind=KVPatchError: Misuse(on, name, do, words, kind)


_m, _p, _c = _row("model"), _row("patch"), _row("cache")
one, ids, mask = torch.tensor, prompt(2, 20), torch.ones(2, 20, dtype=torch.long)

# fmt: off
CACHES = [
    _c("reorder_cache with a list", lambda w: w.cache.reorder_cache([1, 0]), r"beam_idx=\[1, 0\] is a list.*give an int64 tensor"),
    _c("reorder_cache with floats", lambda w: w.cache.reorder_cache(one([1.0, 0.0])), r"beam_idx.*torch\.float32.*give an int64"),
    _c("reorder_cache with a mask", lambda w: w.cache.reorder_cache(one([True, False])), r"beam_idx.*torch\.bool.*give an int64"),
    _c("reorder_cache out of range", lambda w: w.cache.reorder_cache(one([0, 2])), r"names row 2.*rows 0 to 1"),
    _c("reorder_cache with a negative row", lambda w: w.cache.reorder_cache(one([0, -1])), r"names row -1.*rows 0 to 1"),
    _c("reorder_cache with two dimensions", lambda w: w.cache.reorder_cache(one([[0, 1]])), r"shape \[1, 2\].*give an int64"),
    _c("reorder_cache with another number of rows", lambda w: w.cache.reorder_cache(one([0, 1, 1])),
       r"beam_idx names 3 rows.*cache has 2.*batch_select_indices"),
    _c("reorder_cache on the meta device", lambda w: w.cache.reorder_cache(one([1, 0]).to("meta")), r"meta device"),
    _c("batch_select_indices out of range", lambda w: w.cache.batch_select_indices(one([0, 5])), r"names row 5.*rows 0 to 1"),
    _c("batch_select_indices with floats", lambda w: w.cache.batch_select_indices(one([0.5])), r"indices.*torch\.float32"),
    _c("batch_select_indices with a number", lambda w: w.cache.batch_select_indices(1), r"indices=1 is a int.*give an int64"),
    _c("batch_select_indices with a mask of another length", lambda w: w.cache.batch_select_indices(one([True] * 3)),
       r"mask of 3 rows, but the cache has 2"),
    _c("batch_select_indices with no row", lambda w: w.cache.batch_select_indices(one([False] * 2)), r"would leave no row.*reset"),
    _c("batch_select_indices with a 0-d tensor", lambda w: w.cache.batch_select_indices(one(1)), r"shape \[\].*give an int64"),
    _c("batch_repeat_interleave(0)", lambda w: w.cache.batch_repeat_interleave(0), r"repeats=0 must be.*at least 1"),
    _c("batch_repeat_interleave(-1)", lambda w: w.cache.batch_repeat_interleave(-1), r"repeats=-1 must be"),
    _c("batch_repeat_interleave(1.5)", lambda w: w.cache.batch_repeat_interleave(1.5), r"repeats=1\.5 must be"),
    _c("batch_repeat_interleave(True)", lambda w: w.cache.batch_repeat_interleave(True), r"repeats=True must be"),
    _p("crop of an empty cache", lambda w: w.patch.new_cache().crop(-3), r"Cannot roll back 3 tokens: the cache has seen 0"),
    _c("crop of more than was seen", lambda w: w.cache.crop(-99), r"Cannot roll back 99 tokens: the cache has seen 22"),
    _c("crop of what was not recorded", lambda w: w.cache.crop(-1), r"was not recorded.*activate_past_recording"),
    _c("crop to a length inside the prompt", lambda w: w.cache.crop(5), r"Cannot roll back 17 tokens.*clone\(\)"),
    _c("crop(1.5)", lambda w: w.cache.crop(1.5), r"tokens_to_remove=1\.5 must be a whole number"),
    _c("crop('all')", lambda w: w.cache.crop("all"), r"tokens_to_remove='all' must be a whole number.*reset\(\)"),
    _c("crop(None)", lambda w: w.cache.crop(None), r"tokens_to_remove=None must be"),
    _c("crop of several lengths", lambda w: w.cache.crop(one([-1, -2])), r"tokens_to_remove=.*must be a whole number"),
    _c("concatenate without a list", lambda w: JOIN(w.cache), r"takes a list of caches, not EvictingCache.*\[cache\]"),
    _c("concatenate nothing", lambda w: JOIN([]), r"was given no cache: give a list"),
    _c("concatenate one cache twice", lambda w: JOIN([w.cache, w.cache]), r"in the list twice: give its clone"),
    _c("concatenate with a DynamicCache", lambda w: JOIN([w.cache, _full()]), r"Cache 1 is a DynamicCache"),
    _c("concatenate with an empty one", lambda w: JOIN([w.cache, w.patch.new_cache()]), r"Cache 1 has read no prompt"),
    _c("concatenate with another policy's", lambda w: JOIN([w.cache, filled(policy="roco")]), r"made under another patch"),
    _c("concatenate with another model's", lambda w: JOIN([w.cache, filled("llama")]), r"KV heads is 4 there and 2 here"),
    _c("next_positions(0)", lambda w: w.cache.next_positions(0), r"Q=0 must be a number of tokens, at least 1"),
    _c("next_positions('2')", lambda w: w.cache.next_positions("2"), r"Q='2' must be"),
    _p("next_positions of an empty cache", lambda w: w.patch.new_cache().next_positions(), r"The cache is empty.*run a prompt"),
    _c("positions of a layer that is none", lambda w: w.cache.positions(2), r"layer=2: the cache has the layers 0 to 1"),
    _c("positions of a layer by name", lambda w: w.cache.positions("0"), r"layer='0': the cache has the layers"),
    _p("positions of an empty cache", lambda w: w.patch.new_cache().positions(0), r"The cache is empty.*run a prompt"),
    _c("held of a layer that is none", lambda w: w.cache.held(-3), r"layer=-3: the cache has the layers 0 to 1"),
    _p("held of an empty cache", lambda w: w.patch.new_cache().held(0), r"The cache is empty.*run a prompt"),
    _c("get_seq_length of a layer that is none", lambda w: w.cache.get_seq_length(7), r"layer_idx=7: the cache has the layers"),
    _c("update by hand", lambda w: w.cache.update(torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8), 0), r"not patched"),
    _m("EvictingCache made by hand", lambda w: EvictingCache("h2o", 0.5), r"Patch\.new_cache\(\)"),
]

PATCHES = [
    _p("new_cache of a tuple", lambda w: w.patch.new_cache(((), ())), r"past=.*is a tuple.*give a DynamicCache"),
    _p("new_cache of a cache under a policy that scores", lambda w: w.patch.new_cache(_full()), r"scores tokens by the attention"),
    _m("new_cache of a deeper model's cache", lambda w: kvpatch.patch(make("llama_gqa"), "window").new_cache(_full(layers=3)),
       r"has 3 layers, but this model has 2"),
    _m("new_cache of another model's cache", lambda w: kvpatch.patch(make("llama"), "window").new_cache(_full()),
       r"2 KV heads.*this model has 4"),
    _m("new_cache of an EvictingCache", lambda w: kvpatch.patch(make("llama_gqa"), "window").new_cache(filled()), r"use its clone\(\)"),
    _p("new_cache(room=0)", lambda w: w.patch.new_cache(room=0), r"room=0 must be a number of tokens, at least 1"),
    _p("new_cache(room=1.5)", lambda w: w.patch.new_cache(room=1.5), r"room=1\.5 must be"),
    _p("report before anything ran", lambda w: w.patch.report(), r"Nothing to report yet: call generate"),
    _m("report of a patch that never ran", _report_twice, r"Nothing to report yet"),
    _c("report of a row that is none", lambda w: w.patch.report().kept(2), r"row=2: the batch has the rows 0 to 1"),
    _c("strip of no width", lambda w: w.patch.report().strip(width=0), r"width=0 must be a number of characters"),
    _c("plot to a folder that is none", lambda w: w.patch.report().plot("no/such/kept.png"), r"the folder 'no/such' does not"),
    _c("plot of something else", lambda w: w.patch.report().plot(w.folder / "x.png", what="heat"), r"what='heat' is no picture"),
    _p("save_cache of an empty cache", lambda w: w.patch.save_cache(w.patch.new_cache(), w.folder / "x"), r"cache is empty"),
    _p("save_cache in the middle of a prompt", lambda w: w.patch.save_cache(_half(w), w.folder / "x"), r"middle of a prompt"),
    _p("save_cache of a DynamicCache", lambda w: w.patch.save_cache(_full(), w.folder / "x"), r"is a DynamicCache.*new_cache\(\)"),
    _p("save_cache of nothing", lambda w: w.patch.save_cache(None, w.folder / "x"), r"is a NoneType"),
    _p("save_cache of another policy's", lambda w: w.patch.save_cache(filled(policy="tova"), w.folder / "x"),
       r"another patch.*name is 'tova' there and 'h2o' here"),
    _p("save_cache of another model's", lambda w: w.patch.save_cache(filled("llama"), w.folder / "x"), r"4 KV heads.*has 2"),
    _c("save_cache without a path", lambda w: w.patch.save_cache(w.cache, None), r"path=None.*such as 'cache\.safetensors'"),
    _p("load_cache without a path", lambda w: w.patch.load_cache(7), r"path=7.*such as 'cache\.safetensors'"),
    _p("load_cache of no file", lambda w: w.patch.load_cache(w.folder / "none"), r"There is no file .*none"),
    _p("load_cache of a folder", lambda w: w.patch.load_cache(w.folder), r"is a folder: give"),
    _p("load_cache under another policy", lambda w: kvpatch.patch(make("llama_gqa"), "tova").load_cache(w.file()),
       r"policy: name is 'h2o' there and 'tova' here"),
    _p("load_cache under another model", lambda w: kvpatch.patch(make("llama"), "h2o").load_cache(w.file()),
       r"KV heads is 2 there and 4 here"),
    _c("a second patch", lambda w: w.patched("tova"), r"already patched with policy 'h2o': leave that block"),
]

PASSES = [
    _c("a pass after remove()", _removed, r"not patched \(or no longer is\)"),
    _c("a cache of another model", lambda w: _elsewhere(w, "llama"), r"2 KV heads.*this model has 4.*new_cache\(\)"),
    _c("a cache of a deeper model", lambda w: w.step(past_key_values=w.patch._settings.new_cache(1)), r"a model of 1 layers"),
    _c("a cache of another policy", lambda w: _elsewhere(w, policy="tova"), r"another patch.*'h2o' there and 'tova' here"),
    _c("a cache of another budget", lambda w: _elsewhere(w, k=0.25), r"another patch.*k is \[0\.5, 0\.5\] there"),
    _c("a cache of other positions", lambda w: _elsewhere(w, positions="renumbered"), r"'original' there and 'renumbered' here"),
    _c("a cache of another batch size", lambda w: w.step(input_ids=prompt(3, 1)), r"holds 2 rows, but the input has 3.*repeat"),
    _c("a DynamicCache that is filled", lambda w: w.step(past_key_values=_full()), r"filled outside the block"),
    _c("an empty DynamicCache", lambda w: w.step(past_key_values=DynamicCache()), r"An empty DynamicCache was passed"),
    _c("a tuple as cache", lambda w: w.step(past_key_values=((), ())), r"past_key_values is a tuple"),
    _c("input_ids of floats", lambda w: w.step(input_ids=torch.ones(2, 1)), r"input_ids.*torch\.float32.*token ids"),
    _c("input_ids of one dimension", lambda w: w.step(input_ids=one([1, 2])), r"input_ids.*\[2\].*\[B, tokens\]"),
    _c("input_ids of three dimensions", lambda w: w.step(input_ids=one([[[1]]])), r"input_ids.*\[1, 1, 1\].*\[B, tokens\]"),
    _c("input_ids as a list", lambda w: w.step(input_ids=[[1], [2]]), r"input_ids is a list.*torch\.tensor"),
    _c("input_ids without a token", lambda w: w.step(input_ids=ids[:, :0]), r"brings no token: the cache has seen 22"),
    _c("input_ids without a row", lambda w: w.step(input_ids=ids[:0]), r"no row"),
    _c("input_ids beyond the vocabulary", lambda w: w.step(input_ids=one([[1], [97]])), r"token 97.*knows 97.*0 to 96"),
    _c("negative input_ids", lambda w: w.step(input_ids=one([[1], [-5]])), r"token -5.*0 to 96"),
    _c("input_ids on the meta device", lambda w: w.step(input_ids=prompt(2, 1).to("meta")), r"meta device"),
    _c("ids and embeddings", lambda w: w.step(inputs_embeds=torch.ones(2, 1, 32)), r"exactly one of input_ids", ValueError),
    _c("embeddings of another width", lambda w: w.step(input_ids=None, inputs_embeds=torch.ones(2, 1, 8)), r"\[2, 1, 8\].*32"),
    _c("embeddings of two dimensions", lambda w: w.step(input_ids=None, inputs_embeds=torch.ones(2, 32)), r"\[2, 32\].*32"),
    _c("embeddings of ints", lambda w: w.step(input_ids=None, inputs_embeds=torch.ones(2, 1, 32).long()), r"torch\.int64"),
    _c("attention_mask of a wrong length", lambda w: w.step(attention_mask=mask), r"has 20 columns.*needs 23"),
    _c("attention_mask of other rows", lambda w: w.read(attention_mask=mask[:1].repeat(3, 1)), r"has 3 rows, but the input has 2"),
    _c("attention_mask that is additive", lambda w: w.read(attention_mask=torch.zeros(2, 20) - 1e4), r"holds -10000; give 1 for tokens and 0"),
    _c("attention_mask of NaN", lambda w: w.read(attention_mask=torch.full((2, 20), torch.nan)), r"holds nan"),
    _c("attention_mask of token counts", lambda w: w.read(attention_mask=mask * 2), r"holds 2"),
    _c("attention_mask of four dimensions", lambda w: w.read(attention_mask=mask[:, None, None]), r"padding mask \[B, tokens\]"),
    _c("attention_mask as a list", lambda w: w.read(attention_mask=[[1]]), r"padding mask \[B, tokens\], not list"),
    _c("attention_mask on the meta device", lambda w: w.read(attention_mask=mask.to("meta")), r"attention_mask.*meta device"),
    _c("attention_mask that hides a row", lambda w: w.read(attention_mask=one([[1] * 20, [0] * 20])), r"Row 1 .* all padding"),
    _c("attention_mask that hides a new token", lambda w: w.step(attention_mask=one([[1] * 22 + [0]] * 2)), r"as padding"),
    _c("position_ids of a wrong length", lambda w: w.read(position_ids=torch.arange(3)[None]), r"position_ids.*\[1, 3\].*\[2, 20\]"),
    _c("position_ids of other rows", lambda w: w.step(position_ids=one([[22]] * 3)), r"position_ids.*\[3, 1\].*\[2, 1\]"),
    _c("position_ids of one dimension", lambda w: w.read(position_ids=torch.arange(20)), r"position_ids.*\[20\].*\[2, 20\]"),
    _c("position_ids of floats", lambda w: w.step(position_ids=one([[22.0]])), r"position_ids.*torch\.float32"),
    _c("position_ids as a list", lambda w: w.step(position_ids=[[22]]), r"position_ids.*list"),
    _c("output_attentions", lambda w: w.step(output_attentions=True), r"output_attentions=True: under a budget.*Leave it out"),
    _c("generate with a StaticCache", lambda w: w.generate(past_key_values=_static(w)), r"An empty StaticCache"),
    _c("generate with cache_implementation", lambda w: w.generate(cache_implementation="static"), r"asks for another cache"),
    _c("generate with another batch's cache", lambda w: w.generate(input_ids=prompt(3, 25), past_key_values=w.cache), r"holds 2 rows"),
    _c("generate with another policy's cache", lambda w: w.generate(past_key_values=filled(policy="tova")), r"another patch"),
    _c("generate with right padding", lambda w: w.generate(attention_mask=one([[1] * 20, [1] * 19 + [0]])), r"padded on the right"),
    _c("generate with a mask of a wrong length", lambda w: w.generate(attention_mask=mask[:, :7]), r"attention_mask has 7 columns"),
    _c("generate with an additive mask", lambda w: w.generate(attention_mask=mask.float() - 1), r"holds|all padding"),
    _c("generate_batch", lambda w: w.model.generate_batch([[1, 2]]), r"transformers' continuous batching.*Use generate\(\)"),
]
# fmt: on
