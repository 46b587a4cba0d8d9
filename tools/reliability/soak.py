"""Random sequences of everything that can be done to a patched model and its caches, for as long as is asked: `make soak`.

    python -m tools.reliability.soak --minutes 30 --processes 2 [--seed N] [--write]
    python -m tools.reliability.soak --repeat SEED

The sequences are those of tests/robustness/stateful.py, beside its oracles, drawn anew; a seed stands for EACH of them. A
failure is printed with its shortest steps and with the seed that repeats it, and makes the exit status 1.
"""

import argparse
import multiprocessing
import os
import platform
import queue
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tools.reliability.page import put

ROOT = Path(__file__).parents[2]
EACH, STEPS = 20, 5  # sequences of a seed, and rules of a sequence
SHRINKING = 20  # seconds at most to look for a failure's shortest steps


def run(seed: int) -> str:
    """The sequences of one seed -> what failed, or nothing."""
    import hypothesis
    from hypothesis import HealthCheck, settings
    from hypothesis.internal.conjecture import engine
    from hypothesis.stateful import run_state_machine_as_test

    from tests.robustness.stateful import Machine  # type: ignore[import-not-found]

    engine.MAX_SHRINKING_SECONDS = SHRINKING
    machine = hypothesis.seed(seed)(type("Soak", (Machine,), {}))
    chosen = settings(
        max_examples=EACH, stateful_step_count=STEPS, suppress_health_check=list(HealthCheck), database=None, deadline=None,
        report_multiple_bugs=False, derandomize=False,
    )  # fmt: skip
    try:
        run_state_machine_as_test(machine, settings=chosen)
    except Exception:
        return f"To repeat: python -m tools.reliability.soak --repeat {seed}\n{traceback.format_exc(limit=-4)}"
    return ""


def prepare() -> Counter[str]:
    """Import the machine, as the tests do -> what it counts."""
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import torch
    from transformers.utils import logging

    from tests.robustness.stateful_base import COUNTS  # type: ignore[import-not-found]

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # what torch.empty returns is then poisoned
    torch.utils.deterministic.fill_uninitialized_memory = True
    return COUNTS


def work(seeds: range, until: float, results: Any) -> None:
    """Seed after seed until the time is over."""
    counts, failures = prepare(), []
    for seed in seeds:
        if time.time() > until:
            break
        if failure := run(seed):
            failures.append(failure)
            print(failure, flush=True)
            if len(failures) == 5:
                break
    results.put((dict(counts), failures))


def soak(minutes: float, processes: int, seed: int) -> tuple[Counter[str], list[str], float]:
    context, started = multiprocessing.get_context("spawn"), time.time()
    results: Any = context.Queue()
    spans = [range(seed + one * 10**6, seed + (one + 1) * 10**6) for one in range(processes)]
    until = started + 60 * minutes
    workers = [context.Process(target=work, args=(span, until, results), daemon=True) for span in spans]
    for worker in workers:
        worker.start()
    counts, failures = Counter[str](), []
    for _ in workers:
        try:  # the last seed, and shrinking what it may find, have some time of their own
            own, failed = results.get(timeout=max(until - time.time(), 0) + 20 * SHRINKING)
        except queue.Empty:
            failures.append("a process did not report: it hangs or was killed")
            continue
        counts.update(own)
        failures += failed
    for worker in workers:
        worker.join(10)
        worker.kill()
    return counts, failures, time.time() - started


def page(counts: Counter[str], failures: list[str], seconds: float, given: argparse.Namespace) -> str:
    """The report, as Markdown."""
    import hypothesis
    import torch
    import transformers

    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    faults = {name.removeprefix("fault in "): n for name, n in counts.items() if name.startswith("fault in ")}
    kinds = ("sequences", "rows compared", "rows too close to call", "faults", "broken by a fault", "as before after a fault")
    kinds += ("as after the call, after a fault",)
    steps = {name: n for name, n in counts.items() if name not in kinds and not name.startswith("fault in ")}
    rows = [
        ("seconds", f"{seconds:.0f}"),
        ("processes", given.processes),
        ("first seed", given.seed),
        ("sequences", counts["sequences"]),
        ("calls", sum(steps.values())),
        *((f"calls: {name}", n) for name, n in sorted(steps.items())),
        ("rows compared with an oracle, after a call", counts["rows compared"]),
        ("rows whose oracle met a choice too close to call, not compared", counts["rows too close to call"]),
        ("faults thrown", sum(faults.values())),
        ("of these, the cache was broken and refused to be used", counts["broken by a fault"]),
        ("of these, the cache was as before", counts["as before after a fault"]),
        ("of these, the pass had gone through all layers and counts", counts["as after the call, after a fault"]),
        ("failures", len(failures)),
    ]
    lines = [
        "## Soak",
        "",
        f"Made by `python -m tools.reliability.soak --minutes {given.minutes:g} --processes {given.processes} --write`: random",
        "sequences of prompts, tokens, drafts, roll-back, reordered, selected, repeated and joined rows, copies, files,",
        "entering and leaving the block, with exceptions thrown inside. After each call the invariants are checked, and every",
        "row is compared with an oracle (tests/robustness/stateful.py).",
        "",
        f"{versions}, hypothesis {hypothesis.__version__}.",
        "",
        "| what | figure |",
        "|---|---:|",
        *(f"| {name} | {value} |" for name, value in rows),
        "",
        f"Faults by place, {len(faults)} places: " + ", ".join(f"{name} {n}" for name, n in sorted(faults.items())) + ".",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=None, help="the first one; by default the clock's")
    parser.add_argument("--repeat", type=int, metavar="SEED", help="only the sequences of this one")
    parser.add_argument("--write", action="store_true", help="write docs/reliability.md")
    given = parser.parse_args()
    if given.repeat is not None:
        prepare()
        failure = run(given.repeat)
        print(failure or "no failure")
        sys.exit(bool(failure))
    given.seed = int(time.time()) if given.seed is None else given.seed
    counts, failures, seconds = soak(given.minutes, given.processes, given.seed)
    text = page(counts, failures, seconds, given)
    print(text)
    for failure in failures:
        print(failure)
    if given.write:
        put(text)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
