"""`python -m tools.reliability.fuzz --minutes 10 --write`: cache files changed at random and loaded, for a time, and
docs/reliability.md about what came of it. Without --write that goes to the terminal. Exit status 1 after a crash."""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from tests.robustness.fuzz_states import STATES, attempt, seed
from tests.robustness.fuzzing import KINDS
from tools.bench.lines import rows
from tools.reliability.page import put


class Run:
    """Counts of files by kind of change and by what came of them, and the crashes."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.words: Counter[str] = Counter()
        self.crashes: list[str] = []
        self.files, self.seconds, self.peak = 0, 0.0, 0

    def one(self, seed: Any, kind: str, number: int, path: Path) -> None:
        file = KINDS[kind](seed.file, random.Random(number))
        path.write_bytes(file)
        self.files += 1
        try:
            words = attempt(seed, path)
        except Exception:  # whatever is no error of ours is a crash, to be told with what led to it
            self.crashes.append(f"{kind}, {seed.name}, {number}: {traceback.format_exc().splitlines()[-1]}")
            self.outcomes[kind, "crashed"] += 1
            return
        outcome = "unchanged" if file == seed.file else "loaded" if words is None else "refused"
        outcome = "refused while decoding" if (words or "").startswith("while decoding") else outcome
        self.outcomes[kind, outcome] += 1
        if words is not None:
            self.words[_general(words, path)] += 1


def _general(words: str, path: Path) -> str:
    """A refusal without what is different in each."""
    words = words.replace(str(path), "FILE")
    words = words.split(": ", 1)[-1] if "no valid saved cache" in words else words
    words = re.sub(r"\[.*\]|\{.*\}|'[^']*'", "...", words, flags=re.DOTALL)
    words = re.sub(r"layer \d+: |\b\d+\.(?=[a-z])", "", words)
    words = re.sub(r"-?\b\d[\w.+-]*", "n", words)
    return words.replace(" Save it anew with patch.save_cache().", "")[:90]


def run(minutes: float, start: int) -> Run:
    found, kinds = Run(), list(KINDS)
    with tempfile.TemporaryDirectory() as folder:
        seeds = [seed(name, Path(folder)) for name in STATES]
        began = time.monotonic()
        number = start
        while (gone := time.monotonic() - began) < 60 * minutes:
            r = random.Random(number)
            found.one(r.choice(seeds), r.choice(kinds), number, Path(folder) / "file")
            number += 1
        found.seconds = gone
    found.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return found


def page(found: Run, start: int) -> str:
    columns = ["refused", "loaded", "refused while decoding", "unchanged", "crashed"]
    names = [(make.__doc__ or kind).splitlines()[0] for kind, make in KINDS.items()]
    counts = [[found.outcomes[kind, column] for column in columns] for kind in KINDS]
    counts.append([sum(column) for column in zip(*counts, strict=True)])
    body = [(name, *(f"{count:,}" for count in row)) for name, row in zip([*names, "All"], counts, strict=True)]
    said = [(words.replace("|", " "), f"{count:,}") for words, count in found.words.most_common(40)]
    return "\n".join(
        [
            "## Fuzzing the loader",
            "",
            f"{found.files:,} files in {found.seconds / 60:.1f} minutes on one core, numbers {start:,} and on, made from "
            f"{len(STATES)} saved caches ({'; '.join(STATES)}). The checksum was made to fit wherever a file is put together. "
            f"{len(found.crashes)} crashes. Most memory in use: {found.peak:,} MiB. A cache that loads decodes three tokens, "
            "and after each one its budgets hold and its positions are unique and real.",
            "",
            rows(["What was done", *columns], body, left=1),
            "",
            f"The refusals, with numbers and names left out: the most frequent {len(said)} of {len(found.words)}.",
            "",
            rows(("Words", "Files"), said, left=1),
            "",
            *([f"Crashes:\n\n{chr(10).join('- ' + one for one in found.crashes[:50])}\n"] if found.crashes else []),
            "Written by `python -m tools.reliability.fuzz --minutes 10 --write`.",
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--start", type=int, default=0, help="the first number to draw by")
    parser.add_argument("--write", action="store_true", help="write docs/reliability.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = run(arguments.minutes, arguments.start)
    text = page(found, arguments.start)
    if arguments.write:
        put(text)
    else:
        print(text)
    print(f"{found.files} files, {len(found.crashes)} crashes", *found.crashes[:20], sep="\n")
    return 1 if found.crashes else 0


if __name__ == "__main__":
    sys.exit(main())
