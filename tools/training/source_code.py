"""llama-code: a language model on all Python sources found, trained by the clock, and what it must show before use.

A model judges StreamingLLM, H2O and RoCo only if it has what they are about, so its card says whether
- its first tokens are attention sinks,
- it uses context further back than 128 tokens,
- it recognises a repeated span.
Dimension key: B rows or windows, T tokens, H heads, L layers, V vocabulary.
"""

import hashlib
import itertools
import math
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tools.training.text import nats

ROWS = 32
"""Rows per step."""

EDGES = (1, 16, 64, 128, 256, 512, 1024, 2048)
"""Edges of the ranges of positions over which the held-out loss is reported."""

FALLING = ((128, 256), (512, 1024), (1024, 2048))
"""Ranges of positions over which the held-out loss must fall."""

FIRST, AFTER, SINK = 4, 64, 0.3
"""The first four tokens (those that StreamingLLM keeps) are sinks where they get this share from position 64 on."""

LARGEST_FILE, LARGEST_CORPUS, TOKENIZER_SAMPLE = 200_000, 300_000_000, 20_000_000
"""Bytes. A larger file is a generated table; the tokenizer learns from a sample."""


def sources(
    held_out: bool, roots: Sequence[Path] | None = None, limit: int = LARGEST_CORPUS, largest: int = LARGEST_FILE
) -> list[str]:
    """The different Python sources of the standard library and of site-packages, in the order of their paths.

    One file in twenty, by the hash of its path, is held out: of the library the same files as in text.py. Where
    there is more than `limit` bytes, the hash decides which files to take, too.
    """
    paths = sysconfig.get_paths()
    roots = roots or [Path(paths[kind]) for kind in ("stdlib", "purelib", "platlib")]
    skipped = {"site-packages", "dist-packages", "encodings", "lib2to3", "__pycache__"}
    found: dict[str, tuple[bytes, Path]] = {}
    for root in roots:
        for path in root.rglob("*.py"):
            name = path.relative_to(root).as_posix()
            digest = hashlib.sha256(name.encode()).digest()
            if skipped.isdisjoint(name.split("/")) and (digest[0] % 20 == 0) == held_out and path.is_file():
                found.setdefault(name, (digest, path))
    kept, total = [], 0
    for name in sorted(found, key=lambda name: found[name][0][1:]):
        size = found[name][1].stat().st_size
        if 0 < size <= largest and total + size <= limit:
            kept.append(name)
            total += size
    return list(dict.fromkeys(found[name][1].read_text(encoding="utf-8", errors="ignore") for name in sorted(kept)))


def training_sources(roots: Sequence[Path] | None = None, limit: int = LARGEST_CORPUS) -> list[str]:
    """Those that are not held out, without copies of held-out files: packages carry one another's sources."""
    held_out = set(sources(True, roots))
    return [text for text in sources(False, roots, limit) if text not in held_out]


def sample(texts: list[str], size: int = TOKENIZER_SAMPLE) -> list[str]:
    """Evenly spaced texts; the fourth of them that train_text.text_tokenizer reads has about `size` bytes."""
    return texts[:: max(1, sum(map(len, texts)) // (4 * size))]


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], files: int = 512) -> Tensor:
    """All texts as one sequence of token ids, int16, <eos> after each; `files` at a time, for memory's sake."""
    core, eos, parts = tokenizer.backend_tokenizer, tokenizer.eos_token_id, []
    for start in range(0, len(texts), files):
        encodings = core.encode_batch(texts[start : start + files], add_special_tokens=False)
        parts.append(torch.tensor([i for e in encodings for i in (*e.ids, eos)], dtype=torch.int16))
    return torch.cat(parts)


def batches(stream: Tensor, bos: int, length: int, seed: int, rows: int = ROWS) -> Iterator[Tensor]:
    """<bos> and `length` tokens from random places of the stream, [B, length + 1], on the stream's device, for ever."""
    generator = torch.Generator().manual_seed(seed)
    offsets_T = torch.arange(length, device=stream.device)
    while True:
        starts_B = torch.randint(len(stream) - length + 1, (rows,), generator=generator).to(stream.device)
        yield F.pad(stream[starts_B[:, None] + offsets_T].long(), (1, 0), value=bos)


def decay(share: float) -> float:
    """Factor of the learning rate when this share of the time has passed: constant, then linear to 0 from half on."""
    return min(1.0, 2 * (1 - share))


def loss(model: PreTrainedModel, tokens_BT: Tensor) -> Tensor:
    """Mean cross entropy in nats, in bfloat16 autocast."""
    with torch.autocast(tokens_BT.device.type, torch.bfloat16):
        logits_BTV = model(tokens_BT[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), tokens_BT[:, 1:].flatten())


def fit(
    model: PreTrainedModel,
    optimizer: Any,
    batches: Iterator[Tensor],
    seconds: float,
    loss_of: Callable[[PreTrainedModel, Tensor], Tensor] = loss,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Train until `seconds` have passed, at least one step; the number of steps.

    The schedule follows the clock, not the steps: nobody knows beforehand how many fit, and the rate ends near 0.
    """
    began, step, share = clock(), 0, 0.0
    while step == 0 or share < 1:
        step += 1
        nats_now = loss_of(model, next(batches))
        optimizer.step(nats_now, decay(min(share, 1.0)))
        if step % 100 == 0:
            typer.echo(f"step {step:5d}  loss {nats_now.item():.4g}  time {share:.0%}")
        share = (clock() - began) / seconds if seconds > 0 else 1.0
    return step


def windows(tokenizer: PreTrainedTokenizerBase, texts: list[str], length: int, n: int) -> Tensor:
    """<bos> and length - 1 tokens from somewhere inside each of at most n held-out files that are long enough, [B, T].

    One window per file, so that windows are independent, and never across files: what another file said is no context.
    """
    generator, rows = torch.Generator().manual_seed(0), []
    order = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
    for text in order:
        if len(rows) == n:
            break
        ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) >= length - 1:
            start = int(torch.randint(len(ids) - length + 2, (), generator=generator))
            rows.append([tokenizer.bos_token_id, *ids[start : start + length - 1]])
    if len(rows) < 2:
        raise ValueError(f"length={length}: {len(rows)} of {len(texts)} held-out files are so long, 2 are needed")
    return torch.tensor(rows)


def clearly_above(high_B: Tensor, low_B: Tensor) -> bool:
    """Is the mean difference over windows more than two standard errors?"""
    gap_B = high_B - low_B
    return bool(gap_B.mean() > 2 * gap_B.std() / len(gap_B) ** 0.5)


def keeps_falling(nats_BT: Tensor, spans: Sequence[tuple[int, int]] = FALLING) -> bool:
    """Does the loss fall from each range of positions to the next? Column t holds the loss of the token at t + 1."""
    mean_B = [nats_BT[:, a - 1 : b - 1].mean(1) for a, b in spans]
    return all(clearly_above(early_B, late_B) for early_B, late_B in itertools.pairwise(mean_B))


def sink_share(attention_BHTT: Tensor) -> Tensor:
    """The mean share of attention that the first tokens get from position AFTER on, [H]."""
    return attention_BHTT[:, :, AFTER:, :FIRST].sum(-1).mean((0, 2))


def has_sinks(share_LH: Tensor) -> bool:
    """Do the first tokens get more than SINK in most heads of the middle layers (without the outer quarters)?"""
    n_layers = len(share_LH)
    middle_LH = share_LH[n_layers // 4 : n_layers - n_layers // 4]
    return bool((middle_LH > SINK).float().mean() > 0.5)


@torch.no_grad()
def sinks(model: PreTrainedModel, tokens_BT: Tensor) -> Tensor:
    """sink_share of every layer, [L, H]; row by row, since eager attention is a T x T matrix per head and layer."""
    model.set_attn_implementation("eager")
    share_LH = sum(
        torch.stack([sink_share(a_BHTT) for a_BHTT in model(row_BT, output_attentions=True).attentions])
        for row_BT in tokens_BT.to(model.device).split(1)
    ) / len(tokens_BT)
    model.set_attn_implementation("sdpa")
    return share_LH.cpu()


def repeated(model: PreTrainedModel, tokens_BT: Tensor, span: int = 512) -> tuple[Tensor, Tensor]:
    """Nats per token of a span on its first occurrence and when it follows again at once, each [B]."""
    span = min(span, (tokens_BT.shape[1] - 1) // 2)
    bos_B1, span_BT = tokens_BT[:, :1], tokens_BT[:, 1 : span + 1]
    nats_BT = nats(model, torch.cat([bos_B1, span_BT, span_BT], 1), rows=8)
    return nats_BT[:, :span].mean(1), nats_BT[:, span:].mean(1)


def examine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    n: int,
    length: int | None = None,
    spans: Sequence[tuple[int, int]] = FALLING,
) -> dict[str, Any]:
    """What the card says: losses on at most n held-out windows, the three checks, and `usable`: all of them hold."""
    tokens_BT = windows(tokenizer, texts, length or model.config.max_position_embeddings, n)
    length = tokens_BT.shape[1]
    nats_BT = nats(model, tokens_BT, rows=8)
    first_B, again_B = repeated(model, tokens_BT)
    share_LH = sinks(model, tokens_BT[:16])
    bytes_per_token = len("".join(tokenizer.batch_decode(tokens_BT[:, 1:])).encode()) / tokens_BT[:, 1:].numel()
    ranges = itertools.pairwise([edge for edge in EDGES if edge < length] + [length])
    checks = {
        "sinks": has_sinks(share_LH),
        "falls_past_128": keeps_falling(nats_BT, spans),
        "induction": clearly_above(first_B, again_B),
    }
    return {
        "held_out": {
            "windows": len(tokens_BT),
            "windows_hash": hashlib.sha256(tokens_BT.numpy().tobytes()).hexdigest()[:16],
            "length": length,
            "nats_per_token": nats_BT.mean().item(),
            "bits_per_byte": nats_BT.mean().item() / math.log(2) / bytes_per_token,
            "bytes_per_token": bytes_per_token,
            "span_first": first_B.mean().item(),
            "span_again": again_B.mean().item(),
            "sink_share": [[round(share, 3) for share in row] for row in share_LH.tolist()],
            "nats_by_position": {f"{a}-{b - 1}": nats_BT[:, a - 1 : b - 1].mean().item() for a, b in ranges},
        },
        "checks": checks,
        "usable": all(checks.values()),
    }
