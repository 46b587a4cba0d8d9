"""The text that llama-python reads, its tokenizer, and its loss on text that it has not read.

Dimension key: B rows, T tokens, H heads, L layers, V vocabulary.
"""

import hashlib
import itertools
import math
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

TEXT_LENGTH, TEXT_TOKENS = 256, 2048
"""Tokens of llama-python's rows, <bos> included, and of a step of any model that reads this text."""

POSITIONS = (1, 16, 32, 64, 128, 192, 256)
"""Edges of the ranges of positions over which the held-out loss is reported."""


def python_sources(held_out: bool) -> list[str]:
    """The text of this Python's own library; one file in twenty, by the hash of its path, is held out.

    Another version of Python has other sources: losses compare within one version only.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "encodings", "lib2to3", "__pycache__"}
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    chosen = [
        name
        for name in names
        if skipped.isdisjoint(name.split("/")) and (hashlib.sha256(name.encode()).digest()[0] % 20 == 0) == held_out
    ]
    return [(root / name).read_text(encoding="utf-8", errors="ignore") for name in chosen]


def text_tokenizer(texts: list[str], vocabulary: int = 2048) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `vocabulary` tokens, trained on every fourth text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<bos>", "<eos>", "<pad>"]
    core.train_from_iterator(
        texts[::4],
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=special,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    names = dict(zip(("bos_token", "eos_token", "pad_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **names)


def text_stream(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Tensor:
    """All texts as one sequence of token ids, <eos> after each."""
    eos = tokenizer.eos_token_id
    return torch.tensor([i for ids in tokenizer(texts).input_ids for i in (*ids, eos)])


def text_rows(stream: Tensor, starts: list[int], bos: int) -> Tensor:
    """<bos> and the TEXT_LENGTH - 1 tokens from each start, [B, T]."""
    rows_BT = torch.stack([stream[start : start + TEXT_LENGTH - 1] for start in starts])
    return F.pad(rows_BT, (1, 0), value=bos)


@torch.no_grad()
def nats(model: PreTrainedModel, tokens_BT: Tensor, rows: int = 32) -> Tensor:
    """Cross entropy of every token but the first, [B, T - 1]; `rows` rows at a time."""
    return torch.cat(
        [
            F.cross_entropy(model(chunk, use_cache=False).logits[:, :-1].mT, chunk[:, 1:], reduction="none").cpu()
            for chunk in tokens_BT.to(model.device).split(rows)
        ]
    )


def held_out_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: int) -> dict[str, Any]:
    """Nats per token on `rows` windows of TEXT_LENGTH tokens, spread evenly over the held-out files: in all, by position, and
    what it costs the last 64 tokens, with its standard error over windows, when only <bos> and the 64 tokens before them are
    left."""
    texts = python_sources(held_out=True)
    stream = text_stream(tokenizer, texts)
    starts = torch.linspace(0, len(stream) - TEXT_LENGTH, rows).long().tolist()
    tokens_BT = text_rows(stream, starts, tokenizer.bos_token_id)
    nats_BT = nats(model, tokens_BT)
    bytes_per_token = sum(len(text.encode()) for text in texts) / (len(stream) - len(texts))
    recent_BT = torch.cat([tokens_BT[:, :1], tokens_BT[:, -128:]], 1)
    cost_B = (nats(model, recent_BT)[:, -64:] - nats_BT[:, -64:]).mean(1)
    return {
        "nats_per_token": nats_BT.mean().item(),
        "bits_per_byte": nats_BT.mean().item() / math.log(2) / bytes_per_token,
        "bytes_per_token": bytes_per_token,
        "bos_attention": bos_attention(model, tokens_BT[:16]),
        "nats_by_position": {f"{a}-{b - 1}": nats_BT[:, a - 1 : b - 1].mean().item() for a, b in itertools.pairwise(POSITIONS)},
        "cost_of_recent_64": cost_B.mean().item(),
        "standard_error": (cost_B.std() / rows**0.5).item(),
    }


@torch.no_grad()
def bos_attention(model: PreTrainedModel, tokens_BT: Tensor) -> float:
    """The share of attention that <bos> gets from positions 64 on, in the head that gives it most: is there a sink?"""
    model.set_attn_implementation("eager")
    attentions = model(tokens_BT.to(model.device), output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return max(a_BHTT[:, :, 64:, 0].mean((0, 2)).max().item() for a_BHTT in attentions)
