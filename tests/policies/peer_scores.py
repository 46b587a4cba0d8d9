"""Scores of NVIDIA kvpress' own code on a small model, as numbers that tests compare kvpatch's with.

    make peer-scores          writes tests/policies/peer_scores.json, in the environment of `make peer-env`

kvpress needs another transformers than kvpatch, so both build the same model from the same numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

TABLE = Path(__file__).with_name("peer_scores.json")
TOKENS, RATIO, QUESTION = 280, 0.5, 32
# kvpatch's policy and its options, and kvpress' press and its options
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "key_diff": ("key_diff", {}, "KeyDiffPress", {}),
    "cur": ("cur", {}, "CURPress", {}),
    "cur, mean": ("cur", {"combine": "mean", "window": 10, "sinks": 2}, "CURPress",
                  {"leverage_type": "kv_avg", "local_window_size": 10, "num_sinks": 2}),
    "lag_kv": ("lag_kv", {}, "LagKVPress", {}),
    "lag_kv, short": ("lag_kv", {"lag": 10, "sinks": 0}, "LagKVPress", {"lag_size": 10, "n_sink": 0}),
    "expected_attention": ("expected_attention", {}, "ExpectedAttentionPress", {}),
    "expected_attention, mean": ("expected_attention", {"covariance": False, "eps": 0.01, "future": 40},
                                 "ExpectedAttentionPress",
                                 {"use_covariance": False, "epsilon": 0.01, "n_future_positions": 40}),
    "chunk_kv": ("chunk_kv", {"window": 40, "kernel": 5, "pooling": "avg"}, "ChunkKVPress",
                 {"press": ("SnapKVPress", {"window_size": 40, "kernel_size": 5})}),
    "non-causal attention": ("compactor", {"blend": 0, "sinks": 0, "recent": 0, "chunk": 70, "sketch": 1}, "NonCausalAttnPress",
                             {"chunk_size": 70}),
    "observed attention": ("roco", {"recent": 0, "protected": 0, "schedule": "prompt"}, "ObservedAttentionPress", {}),
    "finch": ("snapkv", {"kernel": 1, "pooling": None}, "FinchPress", {"normalize_scores": False, "rerotate_keys": False}),
    "snapkv": ("snapkv", {"window": 64, "kernel": 5, "pooling": "avg"}, "SnapKVPress", {}),
    "tova": ("tova", {"schedule": "prompt", "recent": 1}, "TOVAPress", {}),
    "key_norm": ("key_norm", {"schedule": "prompt"}, "KnormPress", {}),
    "dropkv": ("dropkv", {}, "DropKV", {}),
    "merged": ("merged(snapkv)", {"window": 40, "kernel": 5, "pooling": "avg"}, "MergingPress",
               {"press": ("SnapKVPress", {"window_size": 40, "kernel_size": 5})}),
    "leverage": ("leverage", {"sketch": 6}, "LeverageScorePress", {"sketch_dimension": 6}),
    "compactor": ("compactor", {"sketch": 6, "chunk": 67, "blend": 0.5}, "CompactorPress",
                  {"sketch_dimension": 6, "chunk_size": 67}),
    "compactor, blended": ("compactor", {"sketch": 6, "chunk": 134, "blend": 0.8}, "CompactorPress",
                           {"sketch_dimension": 6, "chunk_size": 134, "blending": 0.8}),
    "kvzip": ("kvzip", {"chunk": 120, "instruction": ((5, 9, 11), (7, 13), (3,))}, "KVzipPress", {"chunk_size": 120}),
    "kvzip_plus": ("kvzip_plus", {"chunk": 300, "instruction": ((5, 9, 11), (7, 13), (3,))}, "KVzipPress",
                   {"chunk_size": 300, "kvzip_plus_normalization": True}),
}  # fmt: skip

AREAS, SINKS, RECENT = [[0.2, 0.5], [0.4, 0.3]], 16, 32
"""Of each layer and head, for duo: which of them keep everything."""


def sketch(shape: tuple[int, ...]) -> Tensor:
    """Return the numbers that stand in for a random matrix [1,H,D,columns] on both sides."""
    return torch.empty(shape, dtype=torch.float64).normal_(generator=torch.Generator().manual_seed(2))


def small_model() -> Any:
    """Return a Llama of two layers in float64, whose weights are the same in every version of transformers."""
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=1024, bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model, numbers = LlamaForCausalLM(config).eval().to(torch.float64), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.ndim == 2:
                weight.copy_(torch.randn(weight.shape, generator=numbers, dtype=torch.float64) * 0.25)
    return model


def text() -> Tensor:
    """Return the prompt, [1,n]."""
    return torch.randint(1, 97, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def main() -> None:
    """Write the scores and the kept tokens of each press."""
    found: dict[str, Any] = {}
    for name, (_, _, press_name, options) in CASES.items():
        kept, scores, *sizes = (_repeated if press_name == "KVzipPress" else _evicted)(press_name, options)
        rounded = [[[float(f"{x:.9g}") for x in head] for head in one[0].tolist()] for one in scores]
        found[name] = {"kept": kept, "scores": rounded} | ({"values": sizes[0]} if press_name == "MergingPress" else {})
    found["duo"] = {"kept": _streamed()}
    import kvpress

    found["presses"] = sorted(name for name in kvpress.__all__ if name.endswith("Press"))
    lines = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _evicted(name: str, options: dict[str, Any]) -> tuple[list[list[list[int]]], list[Tensor], list[list[list[float]]]]:
    """Return where the kept tokens stand, by layer and head, the scores of each layer [1,H,T], and the kept values' norms."""
    scores: list[Tensor] = []
    press, model, ids = _made(name, options, scores), small_model(), text()
    if name == "ObservedAttentionPress":
        model.set_attn_implementation("eager")
    if name == "FinchPress":  # the question behind a token that stands for nothing else
        press.delimiter_token_id = 0
        ids = torch.cat([ids[:, :-QUESTION], torch.zeros(1, 1, dtype=ids.dtype), ids[:, -QUESTION:]], 1)
    with torch.no_grad(), mock.patch.object(torch, "randn", lambda *shape, **_: sketch(shape)):
        whole = model(text()).past_key_values
        with press(model):
            held = model(ids).past_key_values
    sizes = []
    for a, b in zip(whole.layers, held.layers, strict=True):
        order = torch.cdist(b.keys[0], a.keys[0]).argmin(2).argsort(1)
        sizes.append(b.values[0].norm(dim=-1).gather(1, order).tolist())
    return [_places(a.keys[0], b.keys[0]) for a, b in zip(whole.layers, held.layers, strict=True)], scores, sizes


class _Tokenizer:
    """The instruction of the cases, as a tokenizer without a chat template gives it."""

    chat_template = None

    def encode(self, text: str, **_: Any) -> Tensor:
        found = {"": (), "\n": (3,)}.get(text, (7, 13) if "starting with" in text else (5, 9, 11))
        return torch.tensor([found], dtype=torch.long)


def _repeated(name: str, options: dict[str, Any]) -> tuple[list[list[list[int]]], list[Tensor]]:
    """Return the same of a press that masks what it evicts, once the prompt has been read a second time."""
    import kvpress
    import transformers

    press, model, scores = getattr(kvpress, name)(RATIO, **options), small_model(), list[Tensor]()
    own = press.compress_post

    def compress_post(model: Any) -> None:
        scores.extend(press.score_val.clone())
        own(model)

    press.compress_post = compress_post
    tokenizers = mock.patch.object(transformers.AutoTokenizer, "from_pretrained", return_value=_Tokenizer())
    torch.set_default_dtype(torch.float64)  # the press' own mask has it
    try:
        with torch.no_grad(), tokenizers, press(model):
            model(text(), past_key_values=transformers.DynamicCache())
    finally:
        torch.set_default_dtype(torch.float32)
    return _unmasked(model), scores


def _streamed() -> list[list[list[int]]]:
    """Return where the tokens stand that heads see of which some stream, by areas in place of those of a pass over text."""
    import kvpress
    import numpy
    from kvpress.presses import duo_attention_press

    class Shorter(kvpress.DuoAttentionPress):  # type: ignore[misc]
        def post_init_from_model(self, model: Any) -> None:
            super().post_init_from_model(model)
            self.sink_size, self.recent_size = SINKS, RECENT

    press, model = Shorter(head_compression_ratio=RATIO, on_the_fly_scoring=True), small_model()
    areas = mock.patch.object(duo_attention_press, "duo_attention_on_the_fly", return_value=numpy.array(AREAS))
    with torch.no_grad(), areas, press(model):
        model(text())
    return _unmasked(model)


def _unmasked(model: Any) -> list[list[list[int]]]:
    """Return where the tokens stand that a press has not masked, by layer and head."""
    kept = []
    for layer in model.model.layers:
        _, heads, places = layer.self_attn.masked_key_indices
        gone, H = set(zip(heads.tolist(), places.tolist(), strict=True)), model.config.num_key_value_heads
        kept.append([[i for i in range(TOKENS) if (head, i) not in gone] for head in range(H)])
    return kept


def _made(name: str, options: dict[str, Any], scores: list[Tensor]) -> Any:
    """Return a press, around another one if its options name one, that adds what it scores to `scores`."""
    import kvpress

    if "press" in options:
        inner, its_own = options["press"]
        return getattr(kvpress, name)(**options | {"press": _made(inner, its_own, scores)})
    press = (_dropkv() if name == "DropKV" else getattr(kvpress, name))(RATIO, **options)
    own = press.score

    def score(*args: Any, **call: Any) -> Tensor:
        scores.append(own(*args, **call))
        return scores[-1]

    press.score = score
    return press


def _dropkv() -> Any:
    """Return a press of DropKV's formula, as its authors proposed it to kvpress: no release has it."""
    from kvpress import ScorerPress
    from kvpress.utils import get_prerope_query_states
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    class DropKV(ScorerPress):  # type: ignore[misc]
        def score(self, module: Any, hidden: Tensor, keys: Tensor, values: Tensor, attentions: Any, given: Any) -> Tensor:
            W, G, s = 32, module.num_key_value_groups, keys.new_zeros(keys.shape[:3])
            queries, _ = apply_rotary_pos_emb(get_prerope_query_states(module, hidden), keys, *given["position_embeddings"])
            for h in range(queries.shape[1]):
                k, v = keys[0, h // G], values[0, h // G]
                for t in range(len(k) - W, len(k)):
                    p = (k[: t + 1] @ queries[0, h, t] * module.scaling).softmax(0)
                    moves = (p / (1 - p + 1e-6))[:, None] * (v[: t + 1] - p @ v[: t + 1])
                    s[0, h // G, : t + 1] += moves.square().sum(1) / G
            s = torch.nn.functional.avg_pool1d(s, 7, stride=1, padding=3)
            s[..., -W:] = s.max() + 1
            return s

    return DropKV


def _places(whole_HTD: Tensor, kept_HKD: Tensor) -> list[list[int]]:
    """Return where the kept keys stand among all of each head."""
    return [sorted(torch.cdist(kept, whole).argmin(1).tolist()) for whole, kept in zip(whole_HTD, kept_HKD, strict=True)]


if __name__ == "__main__":
    main()
