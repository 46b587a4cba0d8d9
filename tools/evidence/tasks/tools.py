"""Tool calls: conversations of BFCL's multi-turn traces, whose right calls are known; the budget holds over all turns.

The package bfcl-eval (Apache-2.0) brings the data: `pip download --no-deps bfcl-eval==2026.3.23`, unpacked to .models/bfcl.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..chat import Frame
from ..samples import Probe, Sample

DATA = Path(".models/bfcl/bfcl_eval/data")
DOCS = {
    "GorillaFileSystem": "gorilla_file_system",
    "TwitterAPI": "posting_api",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "VehicleControlAPI": "vehicle_control",
    "TravelAPI": "travel_booking",
}
LEAST, MOST = 400, 1600


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _describe(name: str) -> str:
    """Write a tool set as one line a function: its call and the first sentence of what it does."""
    lines = []
    for tool in _lines(DATA / "multi_turn_func_doc" / f"{DOCS[name]}.json"):
        about = tool["description"].split("Tool description: ")[-1].split(". ")[0].strip()
        lines.append(f"{tool['name']}({', '.join(tool['parameters']['properties'])}): {about}")
    return "\n".join(lines)


def make_samples(tokenizer: Any, count: int) -> list[Sample]:
    """Make samples: the tools, then the user's turns with the right calls between them; the last turn's calls are judged."""
    answers = {line["id"]: line["ground_truth"] for line in _lines(DATA / "possible_answer" / "BFCL_v4_multi_turn_base.json")}
    samples = []
    for line in _lines(DATA / "BFCL_v4_multi_turn_base.json"):
        turns = [turn[0]["content"] for turn in line["question"]]
        calls = answers[line["id"]]
        if len(turns) < 3 or not all(calls):
            continue
        tools = "\n".join(_describe(name) for name in line["involved_classes"])
        frame = Frame(tokenizer, "You call tools. Answer with one line of Python per call.\n" + tools)
        after, said = frame.after, [frame.encode("\n".join(one)) for one in calls]
        messages = [frame.before + frame.encode(turns[0]) + after]
        for turn, done in zip(turns[1:], said, strict=False):
            messages.append(done + frame.encode("<|im_end|>\n<|im_start|>user\n" + turn) + after)
        if not LEAST <= sum(map(len, messages)) <= MOST:
            continue
        lead, answer = said[len(turns) - 1][:1], said[len(turns) - 1][1:48]
        if answer:
            samples.append(Sample(line["id"], tuple(messages), (Probe("call", lead, answer),)))
        if len(samples) == count:
            break
    return samples
