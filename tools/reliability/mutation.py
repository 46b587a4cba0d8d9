"""Mutation testing: every change of policies/, cache/ and attention/ that cosmic-ray can think of, and who notices.

    python -m tools.reliability.mutation [--files policies/noise.py ...] [--sample 300] [--minutes 60] [--page-only]

A mutant meets the tests that run its line (coverage is collected first, and again when sources or tests have changed), the
most telling first; it is killed by the first that fails, or by a time limit. `--again survived` adds slow tests, the kernels',
and those of which coverage sees little (torch.compile, several processes). Results are kept in .mutation/ by mutated
function, so that a later run does what is missing. The page is docs/reliability.md.
"""

from __future__ import annotations

import argparse
import compileall
import dataclasses
import hashlib
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.reliability.mutants import Mutant, mutants
from tools.reliability.mutation_page import UNKNOWN, read_reasons, reason, write_page
from tools.reliability.mutation_tests import AGAIN_LIMIT, ALWAYS, UNSEEN, Tests, files
from tools.reliability.mutation_worker import LIMIT, TIME
from tools.reliability.page import PAGE, ROOT

STATE = ROOT / ".mutation"
FOLDERS = ("attention", "cache", "policies")
PARTS = ("kvpatch", "tests", "docs", "README.md", "pyproject.toml", "setup.cfg")


class Worker:
    """A process of mutation_worker.py with a copy of the tree for it."""

    def __init__(self, name: str) -> None:
        self.folder = STATE / name
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, self.folder / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, self.folder / part)
        compileall.compile_dir(self.folder, quiet=2)  # children compile the changed file alone
        command = [sys.executable, str(Path(__file__).with_name("mutation_worker.py"))]
        own = {"PYTHONPATH": str(ROOT)}  # for tools/, which tests import; kvpatch is the folder's, which comes before
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=os.environ | own, **pipes)

    def run(self, tests: list[str], cover: Path | None = None, limit: int = LIMIT, slow: bool = False) -> tuple[int, str]:
        """Exit status of pytest, and the first test that failed. slow: cover slow tests too."""
        log = self.folder / "log.txt"
        job = {"folder": str(self.folder), "log": str(log), "tests": tests, "limit": limit, "slow": slow}
        job["cover"] = None if cover is None else str(cover)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"The worker in {self.folder} has gone; see {log}.")
        failed = re.search(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)(?: - |$)", log.read_text(), re.MULTILINE)
        return int(answer), failed[1] if failed else ""

    def try_on(self, mutant: Mutant, tests: list[str], limit: int) -> tuple[str, str]:
        """The verdict on a mutant, and who noticed."""
        path = self.folder / "kvpatch" / mutant.file
        path.write_text(mutant.source)
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            stale.unlink()
        try:
            status, failed = self.run(tests, limit=limit)
        finally:
            shutil.copy(ROOT / "kvpatch" / mutant.file, path)
        return "survived" if status == 0 else "timeout" if status in TIME else "killed", failed

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def in_scope() -> list[str]:
    package = ROOT / "kvpatch"
    return [str(path.relative_to(package)) for folder in FOLDERS for path in sorted((package / folder).glob("*.py"))]


def collect(workers: list[Worker], only: list[str] | None, again: bool) -> Tests:
    """What each test runs: from an earlier run where neither the library nor the test's file has changed since.

    again: also slow tests, and more files.
    """
    begun, found = time.monotonic(), {}
    sources = b"".join(path.read_bytes() for path in sorted((ROOT / "kvpatch").rglob("*.py")))
    todo: queue.Queue[tuple[str, Path]] = queue.Queue()
    for name in only or files(ROOT, again):
        state = hashlib.sha256(sources + (ROOT / name.split("::")[0]).read_bytes() + name.encode()).hexdigest()
        todo.put((name, STATE / f"coverage-{state[:20]}{'-slow' * again}.json"))

    def work(worker: Worker) -> None:
        while True:
            try:
                name, path = todo.get_nowait()
            except queue.Empty:
                return
            if not path.is_file():
                worker.run([name], cover=path, slow=again)
            if path.is_file():
                found.update(json.loads(path.read_text()))
            print(f"covered {name}: {len(found)} tests so far, {time.monotonic() - begun:.0f} s", flush=True)

    _in_threads(workers, work)
    return Tests(found)


def _in_threads(workers: list[Worker], work: Callable[[Worker], None]) -> None:
    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(work, workers))  # raises what a thread raises


def check_unchanged(worker: Worker, tests: Tests, limit: int) -> None:
    """A test that fails on the unchanged copy would kill everything. (Coverage left out those that failed.)"""
    status, failed = worker.run([*ALWAYS, *list(tests.seconds)[:1], *(UNSEEN if limit > LIMIT else ())], limit=limit)
    if status:
        raise SystemExit(f"The unchanged copy fails {failed}: mend that first.")


def run(args: argparse.Namespace) -> None:
    STATE.mkdir(exist_ok=True)
    wanted = args.files or in_scope()
    listed = [mutant for file in wanted for mutant in mutants(ROOT, file, args.seed, args.packages)]
    print(f"{len(listed)} mutants in {len(wanted)} files", flush=True)
    order = listed[:]
    random.Random(args.seed).shuffle(order)
    order = order[: args.sample]
    known = read_results()
    todo = [mutant for mutant in order if known.get(mutant.key, {}).get("verdict") == args.again]
    if args.again:
        reasons = read_reasons(ROOT)
        todo = [mutant for mutant in todo if reason(reasons, mutant)[0] == UNKNOWN]
    print(f"{len(todo)} of {len(order)} to do: those {f'that {args.again}' if args.again else 'with no result'}", flush=True)
    limit = AGAIN_LIMIT if args.again else LIMIT
    begun, lock, results = time.monotonic(), threading.Lock(), (STATE / "results.jsonl").open("a")
    if todo and not args.page_only:
        workers = [Worker(f"copy-{number}") for number in range(args.workers)]
        try:
            tests = collect(workers, args.tests, args.again is not None)
            check_unchanged(workers[0], tests, limit)
            counts = {"killed": 0, "survived": 0, "timeout": 0}

            def work(worker: Worker) -> None:
                while todo and time.monotonic() - begun < args.minutes * 60:
                    with lock:
                        if not todo:
                            return
                        mutant = todo.pop()
                        chosen = tests.of(mutant, args.again is not None)
                    started = time.monotonic()
                    verdict, failed = worker.try_on(mutant, chosen, limit) if chosen else ("survived", "")
                    with lock:
                        tests.note(mutant, failed)
                        counts[verdict] += 1
                        one = {**dataclasses.asdict(mutant), "source": "", "verdict": verdict, "by": failed, "met": len(chosen)}
                        results.write(json.dumps(one | {"seconds": round(time.monotonic() - started, 2)}) + "\n")
                        results.flush()
                        if verdict == "survived":
                            print(f"survived: {mutant.file}:{mutant.line} {mutant.before}  =>  {mutant.after}", flush=True)

            _in_threads(workers, work)
            print(f"{counts}, {len(todo)} left, {time.monotonic() - begun:.0f} s", flush=True)
        finally:
            for worker in workers:
                worker.close()
    results.close()
    write_page(PAGE, ROOT, listed, read_results(), args.seed)


def read_results() -> dict[str, dict[str, Any]]:
    """The last verdict on each mutant, by key."""
    path = STATE / "results.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return {one["key"]: one for one in map(json.loads, lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="*", help="below kvpatch/; all of the scope without it")
    parser.add_argument("--tests", nargs="*", help="files or tests to try; without it those of mutation_tests.py")
    parser.add_argument("--sample", type=int, help="so many mutants, drawn by the seed")
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    again = "those that have this result and that equivalent.toml does not explain, with more tests, slow ones too, and time"
    parser.add_argument("--again", choices=("survived", "timeout"), help=again)
    parser.add_argument("--page-only", action="store_true", help="write the page from the results there are")
    parser.add_argument("--packages", default=str(STATE / "packages"), help="where pip put cosmic-ray (--target)")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
