"""Which model types of transformers kvpatch serves: `python -m tools.architectures --write` makes docs/architectures.md.

Each type that AutoModelForCausalLM or AutoModelForImageTextToText knows is built from its configuration class, without numbers.
A type of a known family is served by its row. Of any other with a row that can be derived, a tiny twin goes through the checks
of `kvpatch check`; what is refused is listed with the sentence that a user gets. Takes about five minutes on one core.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto import modeling_auto

import kvpatch
from kvpatch.arch.automatic import AutomaticAdapter
from kvpatch.hooks.target import Target
from tools.bench.lines import rows as markdown

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
CAUSAL: dict[str, Any] = dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
IMAGE: dict[str, Any] = dict(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)

_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = {**_PLAIN, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
_INDEXED = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 512}
_INDEXED |= {"indexer_compress_ratio": 4}
_GIVEN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert reformer", {"is_decoder": True}),
    ("rembert roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl", {"is_decoder": True}),
    ("hunyuan_v1_dense hunyuan_v1_moe ministral", {"head_dim": 64}),
    ("nemotron", {"num_key_value_heads": 8}),
    ("dots1", {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}),
    ("cohere_compass_text", {"rope_parameters": {"full_attention": _PLAIN}}),
    ("cohere_compass", {"text_config": {"rope_parameters": {"full_attention": _PLAIN}}}),
    ("dbrx", {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 10000.0}}),
    ("qwen4_exp_text", _INDEXED),
    ("qwen4_exp", {"text_config": _INDEXED}),
    ("xmod", {"default_language": "en_XX", "is_decoder": True}),
    ("bamba", {"attn_layer_indices": [1, 3]}),
    ("granitemoehybrid", {"layer_types": ["linear_attention", "full_attention"] * 16}),
    ("lfm2_moe", {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8}),
    ("lfm2", {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "num_hidden_layers": 16}),
    ("glm46v glm4v glmga", {"text_config": {"rope_parameters": _SECTIONS}}),
    ("glm4v_moe", {"text_config": {"rope_parameters": _SECTIONS, "head_dim": 128}}),
)
GIVEN = {kind: config for kinds, config in _GIVEN for kind in kinds.split()}
"""What a configuration class needs besides its defaults, so that a decoder can be built of it."""

ROW, AUTOMATIC, UNBUILT = "row", "automatic", "unbuilt"
CAUSES = {
    "linear layers whose states are in a cache of the model's own": r"in a cache of its own",
    "a recurrent state and no keys and values": r"keeps a recurrent state",
    "no cache of keys and values": r"keeps no cache of keys and values",
    "attention to an encoder": r"attends to what an encoder read|encoder-decoder",
    "attention in both directions": r"in both directions|bidirectional|diffusion",
    "layers that attend by an index or in another way of their own": r"has layers of type|several classes",
    "layers that use the keys of others, nothing says whose": r"uses the keys and values of a layer before it",
    "several sets of keys per layer": r"attends more than once|share a layer_idx|layers more than once",
    "no twin to check an automatic row on: a row has to be registered": r"no tiny twin|its tiny twin does not run",
    "an automatic row that did not pass the checks": r"no automatic row serves it|did not pass the checks",
    "attention code of its own: an adapter has to be written": r"^No adapter for",
}
"""Causes of a refusal, and what the error of each says; the first that fits counts."""


@dataclass
class Verdict:
    """What became of a model type.

    Attributes:
        kind: the type.
        model: name of its class.
        by: ROW, AUTOMATIC, UNBUILT, or one of CAUSES.
        detail: the row that serves it, or the first sentence of the error.
    """

    kind: str
    model: str
    by: str
    detail: str


def judge(kind: str) -> Verdict:
    """Build a model of this type without numbers, and look for what serves it."""
    auto, names = (AutoModelForCausalLM, CAUSAL) if kind in CAUSAL else (AutoModelForImageTextToText, IMAGE)
    name = names[kind] if isinstance(names[kind], str) else names[kind][0]
    try:
        with torch.device("meta"):
            model = auto.from_config(AutoConfig.for_model(kind, **GIVEN.get(kind, {}))).eval()
    except Exception as error:  # a class of any shape
        return Verdict(kind, name, UNBUILT, f"{type(error).__name__}: {_first_sentence(str(error))}")
    try:
        adapters = {adapter.name: adapter for _, adapter in Target.find(model).attentions}
    except kvpatch.KVPatchError as error:
        cause = next(cause for cause, words in CAUSES.items() if re.search(words, str(error)))
        return Verdict(kind, name, cause, _first_sentence(str(error)))
    automatic = any(isinstance(adapter, AutomaticAdapter) for adapter in adapters.values())
    return Verdict(kind, name, AUTOMATIC if automatic else ROW, ", ".join(adapters))


def _first_sentence(text: str) -> str:
    text = re.sub(r" Known architectures: [^.]*\.", "", " ".join(text.split()))
    return re.split(r"(?<=[.:]) (?=[A-Z])|: (?=an? |call |Register )", text)[0].rstrip(".:").replace("|", "/")[:200]


def page(verdicts: Iterable[Verdict]) -> str:
    """Format docs/architectures.md."""
    every = sorted(verdicts, key=lambda verdict: verdict.kind)
    causal, image = ([one for one in every if (one.kind in CAUSAL) is first] for first in (True, False))
    parts = [
        "# Model types",
        f"Made by `python -m tools.architectures --write` with transformers {transformers.__version__}. Every type that "
        "`AutoModelForCausalLM` or `AutoModelForImageTextToText` knows is built from its configuration class. A type of a "
        "family with a row is served by it; of any other a tiny twin has to pass the checks of `kvpatch check` (k=1.0 gives "
        "the unpatched logits, evictions agree with the model under a mask, a batch agrees with its rows, or where its own "
        "positions count the padding with the masked model). Your checkpoint may differ in its configuration: `kvpatch check "
        "MODEL` tells.",
        *_kinds("Causal language models", causal),
        *_kinds("Models that read images and text", image),
    ]
    return "\n\n".join(parts) + "\n"


def _kinds(title: str, verdicts: list[Verdict]) -> Iterator[str]:
    served = [one for one in verdicts if one.by in (ROW, AUTOMATIC)]
    yield f"## {title}"
    yield f"{len(served)} of {len(verdicts)} types are served."
    yield markdown(("type", "class", "served by"), [(f"`{one.kind}`", f"`{one.model}`", _row(one)) for one in served])
    refused = [one for one in verdicts if one.by in CAUSES]
    if refused:
        rows = [(cause, ", ".join(f"`{one.kind}`" for one in refused if one.by == cause)) for cause in CAUSES]
        yield f"{len(refused)} are refused, before the model is touched, and the error says why:"
        yield markdown(("what it has", "types"), [row for row in rows if row[1]])
    unbuilt = [one for one in verdicts if one.by == UNBUILT]
    if unbuilt:
        yield f"Of {len(unbuilt)} no model was built, for their configuration class needs more than its defaults, or a package:"
        yield markdown(("type", "error"), [(f"`{one.kind}`", one.detail) for one in unbuilt])


def _row(verdict: Verdict) -> str:
    return f"row `{verdict.detail}`" if verdict.by == ROW else "automatic row"


def main(
    kinds: Annotated[list[str] | None, typer.Argument(help="Types to judge; all by default.")] = None,
    write: Annotated[bool, typer.Option(help=f"Write {PAGE.name}.")] = False,
) -> None:
    """Judge model types and print what became of each."""
    verdicts = []
    for kind in kinds or sorted({*CAUSAL, *IMAGE}):
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            verdicts.append(judge(kind))
        typer.echo(f"{kind}: {verdicts[-1].by}: {verdicts[-1].detail}")
    if write:
        PAGE.write_text(page(verdicts), encoding="utf-8")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    typer.run(main)
