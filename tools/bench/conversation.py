"""A conversation whose tool results are dropped after use, through `kvpatch serve` and openai: tokens that are not read again.

    python -m tools.bench.conversation .models/smollm2

Each turn asks a question and brings a page of prose as a tool's result; those of the newest two turns stay in the history,
older ones are left out of it. Without a budget and with one, with and without --edits; prints the table of
docs/guides/serving.md. A server for each runs in this process.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import openai

import kvpatch
from kvpatch.cli.loading import Source
from kvpatch.cli.serving import Address, Keeping, run

TURNS, STAY, WORDS, NEW = 12, 2, 60, 8
PAGES = Path(__file__).parents[1] / "evidence" / "texts" / "pages.txt"
SERVERS: tuple[tuple[str, float | int, bool], ...] = (
    ("h2o", 1.0, False),
    ("h2o", 1.0, True),
    ("h2o", 256, False),
    ("h2o", 256, True),
)


class Turn(NamedTuple):
    """Tokens of a turn's prompt, those that were not read again, and the seconds until its answer had come."""

    prompt: int
    cached: int
    seconds: float


@contextmanager
def serve(model: str, policy: str, k: float | int, edits: bool) -> Iterator[Any]:
    """Serve a model that keeps conversations; yields a client."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    source, engine = Source(model, "float32", "cpu"), {"num_blocks": 400, "max_batch_tokens": 2048}
    place, keeping = Address("localhost", port), Keeping(1 << 30, edits)
    server = run(source, kvpatch.get_policy(policy), k, {}, place, engine, background=True, keeping=keeping)
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"http://localhost:{port}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.1)
        yield openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0, timeout=600)
    finally:
        server.kill_server()


def hold_conversation(client: Any, model: str) -> Iterator[Turn]:
    """Yield the turns of the conversation."""
    words = PAGES.read_text(encoding="utf-8").split()
    history: list[dict[str, str]] = [{"role": "system", "content": "Answer in a few words."}]
    for turn in range(TURNS):
        page = " ".join(words[turn * WORDS : (turn + 1) * WORDS])
        history += [{"role": "user", "content": f"What does page {turn + 1} say?"}, {"role": "tool", "content": page}]
        results = [one for one in history if one["role"] == "tool"]
        history = [one for one in history if one["role"] != "tool" or any(one is kept for kept in results[-STAY:])]
        began = time.perf_counter()
        given: Any = {"messages": history, "max_tokens": NEW, "temperature": 0.0}
        found = client.chat.completions.create(model=model, **given)
        yield Turn(found.usage.prompt_tokens, found.usage.prompt_tokens_details.cached_tokens, time.perf_counter() - began)
        history.append({"role": "assistant", "content": found.choices[0].message.content})


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    model, columns = parser.parse_args().model, list[list[Turn]]()
    for policy, k, edits in SERVERS:
        with serve(model, policy, k, edits) as client:
            columns.append(list(hold_conversation(client, model)))
    names = [f"{'k=' + str(k)}{', --edits' if edits else ''}" for _, k, edits in SERVERS]
    print(f"| turn | tokens | {' | '.join(names)} |\n|---:|---:|{'---:|' * len(names)}")
    for number, turns in enumerate(zip(*columns, strict=True), 1):
        print(f"| {number} | {turns[0].prompt} | {' | '.join(str(one.cached) for one in turns)} |")
    for name, turns in zip(names, columns, strict=True):
        read = sum(one.prompt - one.cached for one in turns)
        print(f"{name}: {read} tokens read, {sum(one.seconds for one in turns):.1f} s", flush=True)


if __name__ == "__main__":
    main()
