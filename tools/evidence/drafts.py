"""How many tokens a pass over the full cache verifies under `lossless=True`, and how many bytes move for a token.

The unpatched model writes TOKENS tokens, greedily; each policy and budget writes them again, which must be the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import kvpatch
from kvpatch.arch.upstream import cache_of
from kvpatch.hooks import lossless
from kvpatch.plotting import find_style, new_figure, save

from .chat import Frame
from .link import write_estimate
from .offloaded import count_offloaded
from .runs import Line, read_lines
from .settings import ROWS, Row
from .statistics import estimate
from .tables import markdown
from .tasks import code
from .texts import group_parts, sentences

TOKENS = 64
SHORT = "snapkv, window=8"
DRAFTING = ROWS | {f"{name}, window=8": Row(f"{name}, window=8", name, {"window": 8}) for name in ("snapkv", "adakv")}
LABELS = (SHORT, "adakv, window=8", "snapkv", "h2o", "tova", "roco", "streaming_llm", "random, ends kept")
ROWS_SHOWN = (
    *((label, 0.1, lossless.MOST) for label in LABELS),
    *((label, k, lossless.MOST) for k in (0.05, 0.2, 0.3) for label in (SHORT, "h2o")),
    *((SHORT, 0.1, longest) for longest in (2, 4, 8)),
)
"""Policy, budget and the longest draft of each row of the table."""
LAYERS_HELD = 2 / 30  # of the model, by an offloaded cache
HEAD, ASK = "Read this text.\n\n", "\n\nExplain to a beginner what this text says."

Text = tuple[str, str, torch.Tensor]


def make_texts(tokenizer: Any, count: int) -> list[Text]:
    """Return (name, kind, prompt [1,N]) for `count` texts of each kind."""
    frame, found = Frame(tokenizer), list[Text]()
    for kind, tokens in (("chat", 800), ("long chat", 3000)):
        for i, parts in enumerate(group_parts(tokenizer, sentences(), tokens, " ")[::-1][:count]):
            ids = frame.before + frame.encode(HEAD + " ".join(parts) + ASK) + frame.after
            found.append((f"{kind} {i}", kind, torch.tensor([ids])))
    found += [(one.name, "code", torch.tensor([one.turns[0]])) for one in code.make_samples(tokenizer, count)]
    return found


def _generate(model: Any, ids_1N: torch.Tensor) -> Any:
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "return_dict_in_generate": True}
    return model.generate(ids_1N, attention_mask=torch.ones_like(ids_1N), **options)


def measure(model: Any, tokenizer: Any, count: int, lines: list[Line]) -> Iterator[list[Line]]:
    """Measure what the lines lack, text by text, a line for each policy and budget."""
    known = {(line["text"], line["label"], line["k"], line["longest"]) for line in lines}
    for name, kind, ids_1N in make_texts(tokenizer, count):
        wanted = [row for row in ROWS_SHOWN if (name, *row) not in known]
        written = _generate(model, ids_1N).sequences if wanted else None
        for label, k, longest in wanted:
            row = DRAFTING[label]
            limited = mock.patch.multiple(lossless, FIRST=min(lossless.FIRST, longest), MOST=longest)
            with limited, kvpatch.patched(model, row.policy, k, lossless=True, **row.options):
                out = _generate(model, ids_1N)
            cache = cache_of(out)
            own = cache.verified
            yield [{
                "text": name, "kind": kind, "tokens": ids_1N.shape[1], "label": label, "k": k, "longest": longest,
                "passes": own.passes, "drafted": own.drafted, "accepted": own.accepted,
                "moved": round(own.nbytes_per_token / cache.nbytes, 4),
                "held": round(cache.drafts.nbytes / cache.nbytes, 4),
                "same": torch.equal(out.sequences, written),
            }]  # fmt: skip


def write_table(path: Path) -> str:
    """A row for each policy and budget: tokens a pass by kind of text, tokens accepted, bytes moved and held."""
    lines = read_lines(path)
    kinds, rows = list(dict.fromkeys(line["kind"] for line in lines)), []
    for row in ROWS_SHOWN:
        own = _select(lines, *row)
        counts = [(line["kind"], 1 + line["accepted"] / line["passes"]) for line in own]
        by_kind = [[count for kind, count in counts if kind == one] for one in kinds]
        every = estimate([count for _, count in counts])
        taken = sum(line["accepted"] for line in own) / max(sum(line["drafted"] for line in own), 1)
        cells = [*(f"{sum(found) / len(found):.1f}" if found else "" for found in by_kind), f"{every:.1f}", f"{len(own)}"]
        rows.append([f"`{row[0]}`", *map(str, row[1:]), *cells, f"{taken:.0%}", f"{_mean(own, 'moved'):.2f}"])
    same = sum(line["same"] for line in lines)
    header = ["policy", "k", "drafts up to", *kinds, "all", "texts", "of drafts", "bytes a token"]
    texts = len({line["text"] for line in lines})
    said = f"{texts} texts; {same} of {len(lines)} answers are the unpatched model's, token by token."
    best = _select(lines, SHORT, 0.1, lossless.MOST)
    drafted, accepted = (
        sum(line[name] for line in best) / sum(line["passes"] for line in best) for name in ("drafted", "accepted")
    )
    return f"{said}\n\n{markdown(header, rows)}\n\n{write_estimate(0.1, drafted, 1 + accepted)}"


def _select(lines: list[Line], *row: Any) -> list[Line]:
    """The lines of a policy, a budget and the longest draft."""
    return [line for line in lines if (line["label"], line["k"], line["longest"]) == row]


def _mean(lines: list[Line], name: str) -> float:
    return sum(line[name] for line in lines) / len(lines)


def show_offloaded(model: Any, tokenizer: Any) -> None:
    """Print what transformers' offloaded cache moves for a token of the first text."""
    _, _, ids_1N = make_texts(tokenizer, 1)[0]
    print("offloaded cache, full caches a token: read {:.2f}, written {:.2f}".format(*count_offloaded(model, ids_1N, 4)))


def draw(lines: Path, path: Path) -> None:
    """Write a PNG: bytes held on the device, and bytes that cross the link for a token, both in full caches."""
    found = read_lines(lines)
    figure = new_figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for label in LABELS:
        by_k = [own for k in (0.05, 0.1, 0.2, 0.3) if (own := _select(found, label, k, lossless.MOST))]
        if not by_k:
            continue
        colour, marker = find_style(DRAFTING[label].policy)
        x, y = ([_mean(own, name) for own in by_k] for name in ("held", "moved"))
        axes.plot(x, y, color=colour, marker=marker, ms=6, lw=1.2, label=label, ls="-" if "window" in label else ":")
    for x, y, name in ((1.0, 0.0, "full on the device"), (LAYERS_HELD, 1.0, "transformers' offloaded cache")):
        axes.plot([x], [y], "k*", ms=9)
        axes.annotate(
            name, (x, y), textcoords="offset points", xytext=(-8, 6) if x == 1 else (8, -4), ha="right" if x == 1 else "left"
        )
    axes.set_xlabel("bytes held on the device, share of the full cache")
    axes.set_ylabel("full caches moved for a token")
    axes.set_xlim(0, 1.05)
    axes.set_ylim(-0.03, 1.08)
    axes.grid(alpha=0.2)
    axes.legend(fontsize=8)
    save(figure, path)
