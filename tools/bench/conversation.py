"""A conversation whose tool results are dropped after use, through `kvpatch serve` and openai: tokens that are not read again.

    python -m tools.bench.conversation .models/smollm2

Each turn asks a question and brings a page of prose as a tool's result; those of the newest two turns stay in the history,
older ones are left out of it. Without a budget and with one, with and without --edits; prints the table of
docs/guides/serving.md. A server for each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import openai

from tools.reliability.clients import PAGES, serve, user

from .lines import rows

TURNS, STAY, WORDS, NEW = 12, 2, 60, 8
KEEPS = "--policy h2o --dtype float32 --memory 0.1 --max-batch-tokens 2048 --keep-conversations 1GiB"
SERVERS = {
    f"k={k}{', --edits' if edits else ''}": [*KEEPS.split(), "-k", k, *(["--edits"] if edits else [])]
    for k in ("1.0", "256")
    for edits in (False, True)
}


class Turn(NamedTuple):
    """Tokens of a turn's prompt, those that were not read again, and the seconds until its answer had come."""

    prompt: int
    cached: int
    seconds: float


def hold_conversation(client: Any, model: str) -> Iterator[Turn]:
    """Yield the turns of the conversation."""
    words = PAGES.read_text(encoding="utf-8").split()
    history: list[dict[str, str]] = [{"role": "system", "content": "Answer in a few words."}]
    for turn in range(TURNS):
        page = " ".join(words[turn * WORDS : (turn + 1) * WORDS])
        history += [user(f"What does page {turn + 1} say?"), {"role": "tool", "content": page}]
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
    for options in SERVERS.values():
        with serve(model, options) as (_, address):
            client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=600)
            columns.append(list(hold_conversation(client, model)))
    body = [
        (str(number), str(turns[0].prompt), *(str(one.cached) for one in turns))
        for number, turns in enumerate(zip(*columns, strict=True), 1)
    ]
    print(rows(("turn", "tokens", *SERVERS), body, left=0))
    for name, turns in zip(SERVERS, columns, strict=True):
        read = sum(one.prompt - one.cached for one in turns)
        print(f"{name}: {read} tokens read, {sum(one.seconds for one in turns):.1f} s", flush=True)


if __name__ == "__main__":
    main()
