"""Continuous batching: requests join the batch when a row is free, and leave it when their text has ended.

    python -m examples.continuous_batching --rows 3 --policy h2o -k 0.5

A prompt is read alone; its cache, compressed to its own budget, then joins those of the requests under way. Each step
continues all rows by a token, whatever the lengths of their texts, and nothing is padded.
"""

import argparse
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvpatch
from kvpatch import EvictingCache
from kvpatch.cli.loading import MODELS, load_model, load_tokenizer, parse_k

LENGTHS = ((180, 12), (24, 30), (90, 8), (12, 20), (140, 25), (40, 6))  # of each prompt and of what is wanted


@dataclass
class Request:
    ids_1T: Tensor
    wanted: int
    tokens: list[int] = field(default_factory=list)
    steps: int = 0  # it was in the batch


@torch.no_grad()
def serve(model: Any, patch: kvpatch.Patch, requests: Sequence[Request], rows: int, end: int | None) -> list[tuple[int, int]]:
    """Fill in every request's tokens; returns rows and bytes of keys and values of each step."""
    queue, running, cache, memory = deque(requests), [], None, []

    def take(request: Request, logits_V: Tensor) -> None:
        request.tokens.append(int(logits_V.argmax()))

    while queue or running:
        while queue and len(running) < rows:
            request, own = queue.popleft(), patch.new_cache()
            take(request, model(request.ids_1T, past_key_values=own).logits[0, -1])
            cache = own if cache is None else EvictingCache.concatenate([cache, own], consume=True)
            running.append(request)
        going = [row for row, one in enumerate(running) if len(one.tokens) < one.wanted and one.tokens[-1] != end]
        if len(going) < len(running):
            running = [running[row] for row in going]
            if going:
                cache.batch_select_indices(torch.tensor(going))
            else:
                cache = None
            continue  # there is room for those who wait
        newest_B1 = torch.tensor([[request.tokens[-1]] for request in running], device=model.device)
        logits_BV = model(newest_B1, past_key_values=cache).logits[:, -1]
        memory.append((len(running), cache.nbytes))
        for request, logits_V in zip(running, logits_BV, strict=True):
            take(request, logits_V)
            request.steps += 1
    return memory


def requests_of(tokenizer: Any, device: torch.device) -> list[Request]:
    """Pieces of this library's own code, to be written on."""
    ids = tokenizer((Path(kvpatch.__file__).parent / "cache/layer.py").read_text(), return_tensors="pt").input_ids.to(device)
    starts = range(0, 10_000, 300)
    return [Request(ids[:, start : start + n], wanted) for start, (n, wanted) in zip(starts, LENGTHS, strict=False)]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODELS / "llama-python"), help="a folder, or a name on the hub")
    parser.add_argument("--rows", type=int, default=3, help="requests at once")
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("-k", type=parse_k, default=0.5)
    args = parser.parse_args(argv)
    model, tokenizer = load_model(args.model), load_tokenizer(args.model)
    requests, end = requests_of(tokenizer, model.device), tokenizer.eos_token_id
    with kvpatch.patched(model, args.policy, args.k) as patch:
        memory = serve(model, patch, requests, args.rows, end)
    for number, one in enumerate(requests):
        n, written = one.ids_1T.shape[1], len(one.tokens)
        print(f"request {number}: {n:4} tokens read, {written:3} written, {one.steps:3} steps in the batch")
    for step in range(0, len(memory), 4):
        print(f"step {step:3}: {memory[step][0]} rows, {memory[step][1] / 1024:7.1f} KiB held")
    tokens, most = sum(one.steps for one in requests), max(held for _, held in memory) / 1024
    print(f"{len(memory)} steps for {tokens} tokens; at most {most:.1f} KiB of keys and values")
    return {"model": model, "requests": requests, "memory": memory}


if __name__ == "__main__":
    main()
