"""Features that do not go together: for each feature that is asked for, those that it cannot go with, and the words.

`REFUSED` is the table. A gate says what it is asked for (`Combination`) and calls `refuse`, or `why_not` where the same is done
in another way without an error. `refuse_pairs` is for all that one call brings together: a policy, or arguments of `patched`.
What a need cannot go with is its own to say (`Need.refuses`): it brings its words, and changes nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import KVPatchError, suggest
from .needs.second_reading import Rereading
from .needs.sums import has_sums
from .scopes import protect_tensor


@dataclass(frozen=True)
class FeatureSet:
    """Features that are asked for together. A caller of `refuse` gives those that it knows; others count as not asked for."""

    policy: Any  # a Policy, which may be in the making
    acts: bool = True  # it evicts from some layer
    # of a call; block, bits, renumbered, record, strict and lossless as in patched()
    block: int | None = None
    bits: int = 16
    renumbered: bool = False
    record: bool = False
    strict: bool = False
    lossless: bool = False
    k: Any = None  # as messages show it
    listed: bool = False  # k is a list
    table: bool = False  # k has a number for each head
    varied: str | None = None  # a budget that gives heads numbers of their own, in words
    of_the_prompt: bool = False  # k is a share of the prompt
    least: int | None = None  # the fewest tokens of a budget in tokens
    whole: int | None = None  # a layer that keeps every token
    drafts: int = 0  # generated tokens in one pass
    past: str = ""  # class of a cache that was filled outside
    unknown: bool = False  # the ids of the tokens are not known
    messages: bool = False  # an engine gets each text with its messages
    crop: int = 0  # tokens to be taken back
    # of a model
    latent: bool = False  # values are a part of their keys
    windows: bool = False  # some layers have windows of their own
    chunks: bool = False  # some layers attend in chunks
    states: str = ""  # numbers of the layers with a state
    recurrent: bool = False  # nothing takes back such a state
    borrows: bool = False  # some layers use the keys of others
    mixed: bool = False  # some layers are not on the budget: they have a state, or use the keys of others
    sharded: bool = False  # processes share its heads
    alibi: str = ""  # name of an adapter with ALiBi's slopes
    positions_fixed: str | None = None  # why its decoder cannot be told positions
    adapter: str = ""  # name of the adapter that has an obstacle, or is automatic
    obstacle: str | None = None
    row: str | None = None  # to be registered in place of an automatic one

    @property
    def unweighed(self) -> str:
        """Text for messages: policies that do not weigh values by the output projection, to use in place of this one."""
        other = "'streaming_llm'" if self.policy.needs.find(Rereading) is None else "'kvzip'"
        return "the policy without critical" if self.policy.weighs_values else other


def refuse(path: str, asked: FeatureSet) -> None:
    """Raise KVPatchError if something that is asked for does not go with `path`, a feature of REFUSED that is about to run."""
    if (why := why_not(path, asked)) is not None:
        raise KVPatchError(why)


def refuse_pairs(asked: FeatureSet) -> None:
    """Raise KVPatchError if two features asked for together do not go together: as a policy is made, and by `patched`.

    Also raises if what a user's need (what a score reads) declares in `refuses` is no feature. Changes nothing.
    """
    valid = {*FEATURES, *REFUSED}
    for need in asked.policy.needs:
        for name in need.refuses.keys() - valid:
            raise KVPatchError(f"{type(need).__name__}.refuses names {name!r}, no feature of served.py.{suggest(name, valid)}")
    for path, is_asked in FEATURES.items():
        if is_asked(asked) and (why := why_not(path, asked, always=True)) is not None:
            raise KVPatchError(why)


def why_not(path: str, asked: FeatureSet, always: bool = False) -> str | None:
    """Return why a feature that is asked for does not go with `path`, or None.

    `refuse` and `refuse_pairs` raise it as an error; `Call.__init__` and `LayerStack.of` do without `path` then. path: a
    feature of the table REFUSED, as "kernels": for each, the features it excludes with a sentence; NEED stands for what the
    policy's needs (what its score reads) refuse. always: look at that even if nothing is evicted.
    """
    name, why = repr(asked.policy.name), asked.policy.needs.refusal(path) if asked.acts or always else None
    why = why and why.replace("{name}", name)
    for feature, sentence in REFUSED.get(path, {}).items():
        refused = why is not None if feature == NEED else FEATURES[feature](asked)
        if refused:
            return sentence.format(it=asked, name=name, why=why)
    return None if why is None else f"Policy {name} does not go with {path}: {why}."


NEED = "a need of the policy"  # that refuses the path by its name; {why} is what it says

FEATURES: dict[str, Callable[[FeatureSet], object]] = {
    # of a policy
    "adaptive budgets": lambda it: it.policy.over_heads is not None,
    "divided budget": lambda it: it.policy.over_layers is not None or it.policy.over_heads is not None,
    "critical": lambda it: it.acts and it.policy.weighs_values,
    "every": lambda it: it.policy.every > 1,
    "merging": lambda it: it.policy.merging is not None,
    "no eviction": lambda it: not it.policy.evicts,
    "one budget for all layers": lambda it: it.policy.over_model,
    "output projection": lambda it: it.policy.projects,
    "protect=": lambda it: it.policy.scope.protect is not None,
    "protect='system'": lambda it: it.policy.scope.keeps_system and not it.messages,
    "protect= as a mask": lambda it: _has_protect(it, masked=True),
    "protect= by unknown token ids": lambda it: it.unknown and _has_protect(it, masked=False),
    "pyramid": lambda it: it.policy.over_layers is not None,
    "quota=": lambda it: it.policy.scope.quota is not None,
    "rotations undone": lambda it: it.policy.needs.lookahead is not None,
    "schedule='decode'": lambda it: it.policy.schedule == "decode",
    "schedule='prompt'": lambda it: it.policy.schedule == "prompt",
    "eviction by steps": lambda it: it.policy.schedule != "prompt",
    "eviction layer by layer": lambda it: it.policy.needs.alone,
    "scores of the prompt's rows": lambda it: it.acts and it.policy.reads,
    "scores measured anew by steps": lambda it: it.policy.schedule != "prompt" and not has_sums(it.policy.score.needs),
    "scores that are no weights": lambda it: it.policy.evicts and not it.policy.score.is_weight,
    "selection": lambda it: it.policy.selection is not None,
    "second reading": lambda it: it.policy.needs.find(Rereading) is not None,
    "second reading of unknown tokens": lambda it: it.acts and it.unknown and it.policy.needs.find(Rereading) is not None,
    "shared sums": lambda it: it.acts and it.policy.needs.across_layers,
    "turns": lambda it: it.policy.scope.turns != "all",
    # of a call
    "block": lambda it: it.block is not None,
    "bits": lambda it: it.bits != 16,
    "renumbered": lambda it: it.renumbered,
    "record": lambda it: it.record,
    "strict": lambda it: it.strict,
    "lossless": lambda it: it.lossless,
    "budgets by head": lambda it: it.varied is not None,
    "budget below every": lambda it: it.least is not None and it.least < it.policy.every,
    "k as a list": lambda it: it.listed,
    "budget that evicts nothing": lambda it: not it.acts,
    "k=1.0": lambda it: isinstance(it.k, float) and it.k == 1.0,
    "pyramid of a share": lambda it: it.policy.over_layers is not None and it.of_the_prompt,
    "k as a table": lambda it: it.table,
    "layer that keeps everything": lambda it: it.whole is not None,
    # of a model
    "ALiBi": lambda it: bool(it.alibi),
    "attention in chunks": lambda it: it.chunks,
    "automatic row": lambda it: it.row is not None,
    "keys of other layers": lambda it: it.borrows,
    "latent attention": lambda it: it.latent,
    "layers without a budget": lambda it: it.mixed,
    "obstacle": lambda it: it.obstacle is not None,
    "positions by columns": lambda it: it.positions_fixed is not None,
    "recurrence": lambda it: it.recurrent,
    "sliding windows": lambda it: it.windows,
    "states": lambda it: it.states,
    "tensor parallel": lambda it: it.sharded,
}


def _has_protect(it: FeatureSet, masked: bool) -> bool:
    """Tell whether an evicting policy has `protect=` as a mask over columns (masked) or as token ids.

    Two rows of FEATURES call it, as `why_not` looks them up. protect_tensor: a bool tensor for a mask, int64 for ids.
    """
    protect = it.policy.scope.protect
    if protect is None or isinstance(protect, str):  # a kind of tokens, before the model says which
        return False
    return it.acts and masked is (protect_tensor(protect).dtype == torch.bool)


REFUSED: dict[str, dict[str, str]] = {
    # two features that one call brings together
    "block": {
        "schedule='decode'": "block={it.block} evicts while the prompt is read, but schedule='decode' keeps the prompt whole: "
        "use schedule='prompt' or 'both', or leave block out.",
        NEED: "block={it.block}: {why}",
        "one budget for all layers": "block={it.block}: policy {name} has one budget for all layers, but a layer reads all "
        "blocks before the next layer runs. Use adaptive() in place of global_topk() (defensive_snapkv for layer_defensive), "
        "or feed the blocks one by one.",
        "keys of other layers": "block={it.block}: in this model layers use the keys of layers before them, which read all "
        "blocks before the next layer runs. Leave block out, or feed the text in pieces.",
    },
    "k as a list": {
        "pyramid": "k is a list, but policy {name} divides one budget over the layers itself: give one k, or use a policy "
        "without the pyramid.",
    },
    "k as a table": {
        "adaptive budgets": "k is a table, but policy {name} divides a budget over the heads itself: give one k, or use a "
        "policy without adaptive() and global_topk().",
    },
    "merging": {
        "latent attention": "policy {name} changes the values of kept tokens, but in this model a token's value is the latent "
        "in its key: use the policy that it goes around.",
    },
    "renumbered": {
        "obstacle": "positions='renumbered' does not work for {it.adapter}: {it.obstacle}. Use positions='original'.",
        NEED: "positions='renumbered' does not go with policy {name}, {why}: use positions='original'.",
    },
    "shared sums": {
        "layer that keeps everything": "k={it.k}: with shared=True each layer adds to one score, but layer {it.whole} keeps "
        "everything and scores nothing. Give it a share below 1.0, or use shared=False.",
    },
    "tensor parallel": {
        "budgets by head": "k={it.varied} gives heads budgets of their own, which processes that share a model's heads do not "
        "agree on: give one k for all heads, or load the model on one device.",
        "quota=": "quota= protects other tokens in each head, and processes that share a model's heads would count other sums: "
        "use protect=, or load the model on one device.",
        "ALiBi": "{it.alibi} has an ALiBi slope for each head, which kvpatch does not share out over processes: load the "
        "model without a tp_plan.",
    },
    "quota=": {
        "schedule='decode'": "quota= divides a budget over spans of the prompt, but schedule='decode' keeps the prompt whole: "
        "leave quota out, or use schedule='prompt' or 'both'.",
    },
    "every": {
        "no eviction": "every={it.policy.every}: policy {name} never evicts. Leave every out, or use another policy.",
        "schedule='prompt'": "every={it.policy.every} is for policies that evict while decoding, but policy {name} does so "
        "only where a prompt ends (schedule='prompt'): leave every out, or use schedule='both' with a policy that has it, such "
        "as 'h2o'.",
        "budget below every": "every={it.policy.every} evicts more tokens at once than the budget of {it.least} keeps: give "
        "every={it.least} or less, or k={it.policy.every} or more.",
    },
    "turns": {
        "eviction by steps": "turns={it.policy.scope.turns!r} says what later prompts of a chat count, which "
        "schedule={it.policy.schedule!r} does not allow, for its budget holds all the time; use schedule='prompt'.",
    },
    "critical": {
        "scores that are no weights": "Two-stage selection multiplies scores with norms, but the score of policy {name} is no "
        "weight: it may be negative or only ranks tokens. Use a score made of attention, such as those of h2o, roco or snapkv.",
    },
    "record": {
        "renumbered": "record=True does not go with positions='renumbered', where a key's position changes with "
        "every eviction: use positions='original'.",
        "bits": "record=True does not go with bits={it.bits}: a replay attends to unrounded keys. Use bits=16.",
        "merging": "record=True does not go with policy {name}, which changes the values of kept tokens: use the policy that "
        "it goes around.",
    },
    "lossless": {
        "budget that evicts nothing": "lossless=True: policy {name} at k={it.k} evicts nothing, so that drafts are of the full "
        "cache: give a smaller k, or leave lossless out.",
        "block": "lossless=True: block={it.block} evicts while the prompt is read, whose entries are then not the unpatched "
        "model's: leave block out.",
        "schedule='decode'": "lossless=True: schedule='decode' keeps the prompt whole, which is then twice there: use "
        "schedule='prompt' or 'both'.",
        "renumbered": "lossless=True verifies at the original positions: use positions='original'.",
        "record": "record=True follows what evictions leave, and lossless=True writes the unpatched model's text: leave "
        "one out.",
        "second reading": "lossless=True chooses its budget anew with each pass, and policy {name} reads the prompt a second "
        "time for that: use 'h2o'.",
        "protect=": "lossless=True loses no token: leave protect= out.",
        "quota=": "lossless=True loses no token: leave quota= out.",
        "layers without a budget": "lossless=True takes rejected drafts back, and some layers of this model keep a state, or "
        "use the keys of others: leave lossless out.",
        "tensor parallel": "lossless=True streams one process's cache: load the model on one device.",
    },
    # budgets that follow the text
    "moving budget": {
        "divided budget": "k={it.k}: policy {name} divides one number of tokens over layers or heads, which this budget does "
        "not have: use a policy without pyramid(), adaptive() and global_topk(), or give k as a share or tokens.",
        "selection": "k={it.k}: policy {name} selects by more than its score, which needs a number of tokens: use it without "
        "critical() and chunked(), or give k as a share or tokens.",
        "every": "k={it.k} evicts what it can at every step: leave every={it.policy.every} out.",
    },
    "weighed budget": {
        "quota=": "k={it.k} keeps as many tokens as the scores say, so that spans have no budget to share: leave quota out, or "
        "give k as a share or tokens.",
        "scores that are no weights": "k={it.k} takes scores for weights, but the score of policy {name} is none: it may be "
        "negative or only ranks tokens. Use a score made of attention, such as those of h2o, roco or snapkv, or give k as a "
        "share or tokens.",
    },
    "Mass": {
        "scores measured anew by steps": "k={it.k} keeps a share of what scores sum to over the text, but those of policy "
        "{name} are measured anew at each step: use schedule='prompt', a policy such as 'h2o' or 'roco', or Threshold.",
    },
    "Share": {
        "schedule='decode'": "k={it.k} counts the prompt too, but schedule='decode' keeps the prompt whole: give "
        "schedule='both', or k as tokens, which are then of the generated text.",
    },
    # what a patch offers
    "generate() of the class": {
        "lossless": "lossless=True drafts in the generate() of the patched model: call model.generate(...), not its class's."
    },
    "prefix": {"lossless": "lossless=True keeps each text's own cache: leave lossless out, or give generate() the whole text."},
    "room=": {
        "lossless": "room= is for steps that are compiled, and lossless=True drafts and verifies: leave one of them out."
    },
    "compress": {
        "lossless": "patch.compress() keeps what a budget holds of a prompt, and lossless=True keeps all of it: give "
        "generate() the prompt itself, or leave lossless out.",
        "block": "block={it.block} evicts while a prompt is read, but this one is read already: leave block out.",
    },
    # of a model's attention module
    "rotations undone": {
        "obstacle": "policy {name} reads queries or keys without their rotation, but in {it.adapter} {it.obstacle}: use "
        "another policy, such as 'key_diff' or 'snapkv'.",
    },
    "output projection": {
        "automatic row": "Policy {name} weighs values by the output projection, which the automatic row of {it.adapter} does "
        "not name: register a row, {it.row}, where o_proj is that projection, or use {it.unweighed}.",
        "obstacle": "Policy {name} weighs values by the output projection, but in {it.adapter} more than that stands between "
        "attention and its output: use {it.unweighed}.",
    },
    "adapter_names=": {
        "output projection": "Policy {name} weighs values by the output projection, and adapter_names= gives each row another "
        "one: generate the rows of each adapter by themselves, after set_adapter(name), or use {it.unweighed}.",
    },
    # passes
    "drafts": {
        NEED: "{it.drafts} generated tokens in one pass (assisted decoding, prompt lookup): {why}",
    },
    "drafts with the prompt": {
        NEED: "{it.drafts} generated tokens in one pass with the prompt (assisted decoding, prompt lookup): policy {name} "
        "{why}.",
        "one budget for all layers": "{it.drafts} generated tokens in one pass with the prompt (assisted decoding, prompt "
        "lookup): policy {name} divides its budget once all layers have read the prompt. Use adaptive() in place of "
        "global_topk(), or feed the prompt first.",
    },
    "inputs_embeds": {
        NEED: "Policy {name} {why}. Use another policy.",
        "record": "record=True knows a text by its token ids: give input_ids, not inputs_embeds, or leave record out.",
        "protect= by unknown token ids": "protect= by token ids needs input_ids; with inputs_embeds give a boolean mask.",
    },
    "prompt of joined rows": {NEED: "Policy {name} {why}. Use another policy."},
    "joined rows": {
        "positions by columns": "Rows of a concatenated cache are at different places of their texts, which this model's "
        "decoder cannot be told, for {it.positions_fixed}: continue the caches one by one.",
    },
    "other positions": {
        NEED: "The model would place this prompt's tokens at other positions than those that count each row's tokens (without "
        "position_ids it counts padding, too), and policy {name} {why}: give "
        "position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0).",
    },
    "replay": {
        "positions by columns": "A replay gives each token the position that it had, which this model's decoder cannot be "
        "told, for {it.positions_fixed}: compute logits in the rollout.",
    },
    # caches
    "a filled cache": {
        "second reading of unknown tokens": "A {it.past} cannot be taken over under policy {name}, which reads the prompt's "
        "tokens a second time: give them, as in patch.compress(past, ids), or run the prompt inside the block.",
        "scores of the prompt's rows": "A {it.past} cannot be taken over under policy {name}: it scores tokens by the "
        "attention or the queries of the prompt's rows, which that cache does not hold. Run the prompt inside the block.",
        "critical": "A {it.past} cannot be taken over under policy {name}: its selection weighs values as they are read. Run "
        "the prompt inside the block.",
        "renumbered": "A {it.past} holds keys at their original positions; with positions='renumbered' run the "
        "prompt inside the block.",
        "protect=": "protect= marks prompt tokens as they are read: run the prompt inside the block.",
        "quota=": "quota= marks spans of a prompt as it is read: run the prompt inside the block.",
        "states": "A {it.past} of a hybrid, whose layers {it.states} keep a state of their own, is not taken over: run the "
        "prompt inside the block.",
    },
    "forget": {
        "states": "forget(): layers {it.states} of this hybrid keep a state of all that was read, and no token can be taken "
        "out of it. Read the text anew without these tokens.",
        "tensor parallel": "forget() changes how many tokens heads hold, and other processes hold some of these heads: read "
        "the text anew without these tokens.",
    },
    "replace": {
        "lossless": "replace() leaves what has seen the old tokens as it is, and lossless=True is exact: write "
        "cache.crop(start) and give generate() the new text; of a chat change chat.messages. What follows is then read anew.",
        "states": "replace(): layers {it.states} of this hybrid keep a state of all that was read, and no token can be taken "
        "out of it. Read the text anew.",
        "tensor parallel": "replace() changes how many tokens heads hold, and other processes hold some of these heads: read "
        "the text anew.",
        "positions by columns": "replace() reads tokens at the positions of others, which this model's decoder cannot be "
        "told, for {it.positions_fixed}: read the text anew.",
        "record": "record=True knows one token for each position of a text: read the text anew, or leave record out.",
    },
    "insert": {
        NEED: "replace() moves what follows to other positions, and policy {name} does not go with that: {why}. Give a longer "
        "span, or fewer tokens.",
        "schedule='decode'": "replace() moves what follows to other positions, and schedule='decode' keeps a prompt by its "
        "own: give a longer span, or fewer tokens.",
        "turns": "replace() moves what follows to other positions, and turns={it.policy.scope.turns!r} counts by those of a "
        "turn: give a longer span, or fewer tokens.",
    },
    "roll-back": {
        "recurrence": "Cannot roll back {it.crop} tokens: layers {it.states} of this hybrid keep a recurrent state, in which "
        "earlier ones are gone. Call cache.clone() before generating and go on from the copy.",
    },
    # decode steps
    "compile_config": {
        "layers without a budget": "The decode step of a hybrid, or of layers that use others' keys, is not compiled under a "
        "budget: leave compile_config out.",
    },
    "trace": {
        "tensor parallel": "heads on other processes may take part",
        "strict": "numbers are read back and checked",
        "record": "evictions are noted on the host",
        "states": "transformers' own layers change, too",
        "keys of other layers": "later layers use what a layer held before it evicted",
        NEED: "{why}",
    },
    "graph()": {
        "lossless": "lossless=True drafts and verifies in generate(): leave lossless out to capture steps of your own.",
        "layers without a budget": "Steps of a hybrid, or of layers that use others' keys, are not captured, for not all of it "
        "is the cache's own: call the model itself.",
        "positions by columns": "Steps of this model are not captured, for its decoder counts positions on the host "
        "({it.positions_fixed}): call the model itself.",
    },
    "stack": {
        "layer that keeps everything": "a layer keeps everything",
        "eviction layer by layer": "each layer's score reads what it holds",
        NEED: "{why}",
        "sliding windows": "layers have windows of their own",
    },
    "kernels": {NEED: "{why}"},
    # engines
    "continuous batching": {
        "lossless": "lossless=True drafts for one text at a time: use generate(), or leave lossless out.",
        "record": "record=True does not follow requests of continuous batching: use generate(), or leave it out.",
        "layers without a budget": "Continuous batching packs the tokens of all requests into one row, which the recurrent "
        "states of a hybrid, or layers that use others' keys, cannot be read from: use generate().",
        "positions by columns": "Continuous batching packs requests that are at different places of their texts, which this "
        "model's decoder cannot be told, for {it.positions_fixed}: use generate().",
        "attention in chunks": "transformers' continuous batching knows no layers that attend in chunks, in this model's own "
        "code either: use generate().",
        NEED: "Continuous batching packs prompts, and policy {name} {why}: use generate(), or another policy.",
        "protect= as a mask": "protect= is a mask, which fits one prompt; continuous batching reads many. Give token ids, or "
        "use generate().",
        "protect='system'": "protect='system' needs to see messages, and continuous batching reads token ids: give the "
        "template's own, or use patch.chat().",
        "quota=": "quota= has spans of one prompt; continuous batching reads many. Use generate().",
        "budgets by head": "k={it.varied}: continuous batching claims a request's blocks when it is admitted, so all heads of "
        "a layer need one size: give k as tokens, a share of the prompt or bytes, or use generate().",
        "every": "every={it.policy.every}: in continuous batching requests come and go between the steps that would evict. "
        "Give every=1, or use generate().",
        "tensor parallel": "Continuous batching of a model under tensor parallelism (tp_plan) is not on a budget yet: use "
        "generate(), or load the model on one device.",
    },
    "blocks of an engine": {
        "schedule='decode'": "schedule='decode' keeps the prompt whole",
        NEED: "{why}",
        "one budget for all layers": "layers share a budget",
        "quota=": "spans of one prompt have quotas",
    },
    "vllm": {
        "renumbered": "positions='renumbered' is not served in vLLM, which rotates keys itself: use 'original'.",
        "k as a list": "k={it.k!r}: in vLLM all layers have one budget: give tokens, such as 1024, a share or a size.",
        "budgets by head": "k={it.varied} is not served in vLLM, which claims its pages at once: give tokens, a share or "
        "a size.",
        "k=1.0": "k=1.0 keeps everything, as vLLM does without kvpatch: leave its settings out.",
        "no eviction": "Policy {name} is not served in vLLM: it evicts nothing, as vLLM does without kvpatch.",
        "adaptive budgets": "Policy {name} is not served in vLLM: its heads hold different numbers of tokens, and a page has "
        "one: use 'snapkv'.",
        "merging": "Policy {name} is not served in vLLM: it changes values, which vLLM's pages then hold: use the policy "
        "that it goes around.",
        NEED: "Policy {name} is not served in vLLM: {why}.",
        "every": "Policy {name} is not served in vLLM: every= lets tokens wait, and a request's pages are claimed for its "
        "budget: give every=1.",
        "turns": "Policy {name} is not served in vLLM: turns= tells prompts of a chat apart, and vLLM has one text: leave it "
        "out.",
        "pyramid of a share": "k={it.k} of policy {name} is not served in vLLM, where layers that hold different numbers have "
        "pages for the longest prompt: give k as a number of tokens or a size.",
        "schedule='decode'": "schedule='decode' is not served in vLLM: a request claims its pages before the length of its "
        'prompt is known. Give "schedule": "both".',
    },
    "a model in vLLM": {
        "latent attention": "kvpatch in vLLM: this model's keys and values are one latent vector. Start without kvpatch's "
        "settings.",
        "attention in chunks": "kvpatch in vLLM: vLLM makes several texts of one in chunks. Start without kvpatch's settings.",
        "layers without a budget": "kvpatch in vLLM: some layers of this model keep a state in place of keys. Use "
        "kvpatch.patched() in transformers.",
    },
}
"""By feature (or path), the features that it does not go with, in the order in which they are asked, and what a user reads."""
QUIET = ("trace", "stack", "kernels", "blocks of an engine")
"""Paths that are left for another one without an error; their words are for reports and for readers."""
