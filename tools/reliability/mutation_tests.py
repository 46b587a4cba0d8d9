"""Which tests run each line of kvpatch, what they take, and the order in which a mutant meets them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

from tools.reliability.mutants import Mutant

SECONDS = 40.0  # of tests that a mutant meets at most, by what they took unchanged and observed
MOST = 150  # tests
SWIFT, SLOW = 0.05, 5.0  # seconds of a test that is met at once, and of one that is met by who has survived the others
PATIENCE = 4  # times as many for one that has survived so many, and is tried again
AGAIN_LIMIT = 1500  # seconds of a processor for that, UNSEEN included
# what notices most; left out are the command line, tools, other processes and whatever needs a GPU
FILES = (
    "oracle/test_oracle", "oracle/test_oracle_parts", "invariants/test_*", "policies/test_*", "cache/test_*",
    "attention/test_*", "storage/test_*", "hooks/test_*", "evaluation/test_*", "test_patching", "test_report",
    "arch/test_bound", "backends/test_backends", "integrations/test_generation_contract", "robustness/test_numerics",
    "robustness/test_errors", "robustness/test_faults", "robustness/test_faults_files", "robustness/test_misuse",
)  # fmt: skip
NOT = "cache/test_memory"  # which watches the process that it runs in
# of a mutant that is tried again: slow tests too, the kernels', and files of which coverage sees little, since what they run
# is in a graph of torch.compile or in other processes: these are met by every survivor, whole, at the end
AGAIN = ("backends/test_triton_decode", "backends/test_triton_columns", "integrations/test_decoding")
UNSEEN = ("tests/cache/test_compiled.py", "tests/integrations/test_tensor_parallel.py")
# of what runs when a module is imported: defaults and the table of policies
ALWAYS = (
    "tests/policies/test_facts.py::test_a_row_has_the_schedule_the_options_and_the_defaults_of_its_policy",
    "tests/policies/test_policy.py::test_a_policy_is_data",
    "tests/policies/test_scores.py::test_declarations",
    "tests/cache/test_cache.py::test_before_anything_was_read",
)


def files(root: Path, again: bool = False) -> list[str]:
    """Test files that are there, more of them for mutants that are tried `again`."""
    names = (*FILES, *AGAIN) if again else FILES
    found = (path for name in names for path in sorted((root / "tests").glob(f"{name}.py")))
    return [path.relative_to(root).as_posix() for path in found if path != root / "tests" / f"{NOT}.py"]


class Tests:
    """What coverage found, and which tests have noticed what so far."""

    __test__ = False  # for pytest, which collects names that begin so

    def __init__(self, found: dict[str, dict]) -> None:  # type: ignore[type-arg]
        self.seconds = {test: one["seconds"] for test, one in found.items()}
        self.by_line: dict[tuple[str, int], set[str]] = defaultdict(set)
        for test, one in found.items():
            for file, lines in one["lines"].items():
                for line in lines:
                    self.by_line[file, line].add(test)
        self.noticed: dict[str, Counter[str]] = defaultdict(Counter)

    def of(self, mutant: Mutant, again: bool = False) -> list[str]:
        """The tests to run, more of them for a mutant that is tried again: those that noticed a change of the same function
        first, then swift ones, then one of each function, the fastest first, then the second of each, and so on; in the end
        UNSEEN."""
        lines = mutant.lines if not mutant.at_import else mutant.span
        known = set().union(*(self.by_line.get((mutant.file, line), ()) for line in range(lines[0], lines[1] + 1)))
        if not known:  # nobody runs this line: whoever runs its function
            known = set().union(*(self.by_line.get((mutant.file, line), ()) for line in range(*mutant.span)))
        if not known:
            known = {test for (file, _), tests in self.by_line.items() if file == mutant.file for test in tests}
        rounds: Counter[str] = Counter()
        ranked = []
        for test in sorted(known, key=lambda test: (self.seconds[test], test)):
            function = re.sub(r"\[.*", "", test)
            swift = self.seconds[test] <= SWIFT
            if again or self.seconds[test] <= SLOW:
                ranked.append((-1 if swift else rounds[function], self.seconds[test], test))
            rounds[function] += not swift
        best = [test for test, _ in self.noticed[f"{mutant.file}:{mutant.where}"].most_common(6) if test in known]
        best += [test for test, _ in self.noticed[mutant.file].most_common(4) if test in known and test not in best]
        chosen = [*(ALWAYS if mutant.at_import else ()), *best]
        most, enough = (MOST * PATIENCE, SECONDS * PATIENCE) if again else (MOST, SECONDS)
        spent = sum(self.seconds.get(test, 1.0) for test in chosen)
        for _, seconds, test in sorted(ranked):
            if len(chosen) >= most:
                break
            if test not in chosen and spent + seconds <= enough:
                chosen.append(test)
                spent += seconds
        return [*chosen, *UNSEEN] if again else chosen

    def note(self, mutant: Mutant, test: str) -> None:
        """`test` noticed it."""
        if test in self.seconds:
            self.noticed[f"{mutant.file}:{mutant.where}"][test] += 1
            self.noticed[mutant.file][test] += 1
