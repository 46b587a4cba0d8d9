"""Perplexity of a long text with sliding strides, as transformers' own guide has it, without and with a budget.

    python -m examples.perplexity_strides --policy h2o -k 32 --block 8

A window of `length` tokens moves on by `stride`; a pass computes the window's loss, in which labels of -100 mask what the
window before has counted. The loop knows nothing of kvpatch. Without block= it measures the unpatched model: a pass computes
all of its tokens before anything is evicted (kvpatch logs that when the block ends).
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvpatch
from kvpatch.cli.loading import parse_k

from .lm_eval_harness import load

TEXT = Path(kvpatch.__file__).parent / "attention/blockwise.py"


def windows(ids_1T: Tensor, length: int, stride: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Input ids and labels [1, length]: with stride < length every token but the first is counted, once."""
    counted = 0
    for start in range(0, ids_1T.shape[1], stride):
        stop = min(start + length, ids_1T.shape[1])
        labels = ids_1T[:, start:stop].clone()
        labels[:, : counted - start] = -100
        yield ids_1T[:, start:stop], labels
        counted = stop
        if stop == ids_1T.shape[1]:
            return


@torch.no_grad()
def nats(model: Any, ids_1T: Tensor, length: int, stride: int) -> Tensor:
    """Mean negative log-likelihood of a token, float64."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for inputs, labels in windows(ids_1T, length, stride):
        scored = int((labels[:, 1:] != -100).sum())  # the model shifts labels by one
        total += model(inputs, labels=labels).loss.double() * scored
        count += scored
    return total / count


def main(argv: Sequence[str] | None = None) -> dict[str, Tensor]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-python", help="a shipped model, a folder, or a name on the hub")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("-k", type=parse_k, default=32)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--stride", type=int, default=128)
    args = parser.parse_args(argv)
    model, tokenizer = load(args.model)
    ids_1T = tokenizer(args.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids
    found = {"unpatched": nats(model, ids_1T, args.length, args.stride)}
    for name, k, block in (("k=1.0", 1.0, None), (f"k={args.k}, block={args.block}", args.k, args.block)):
        with kvpatch.patched(model, args.policy, k, block=block):
            found[name] = nats(model, ids_1T, args.length, args.stride)
    print(f"{args.model}, {args.text.name}: {ids_1T.shape[1]} tokens, windows of {args.length}, stride {args.stride}")
    for name, loss in found.items():
        print(f"  {name:<16} {loss:.4f} nats per token, perplexity {loss.exp():.3f}")
    return found


if __name__ == "__main__":
    main()
