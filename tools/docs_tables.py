"""Writes the tables of the documentation that come from the library: `python -m tools.docs_tables`.

A table stands between `<!-- name -->` and `<!-- /name -->` in a page of docs/; `TABLES` says what makes it. A test compares.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import kvpatch
from kvpatch.arch.adapter import REGISTRY
from kvpatch.policies import POLICIES, Policy
from kvpatch.policies.facts import COMMON, PAPERS
from kvpatch.policies.served import NEED, QUIET, REFUSED
from kvpatch.policies.uses import USES
from tools.bench.__main__ import tables
from tools.bench.lines import read
from tools.bench.lines import rows as markdown
from tools.evidence import agents, bits, chooser, grpo_table, quotas, refits

DOCS = Path(__file__).parents[1] / "docs"
BENCHMARKS = {
    "cpu": DOCS.parent / "benchmarks/cpu-amd-epyc-zen5.jsonl",
    "earlier": DOCS.parent / "benchmarks/cpu-amd-epyc-zen4.jsonl",
    "replay": DOCS.parent / "benchmarks/replay-cpu-amd-epyc-zen4.jsonl",
    "threads": DOCS.parent / "benchmarks/threads-cpu-intel-xeon.jsonl",
    "counts": DOCS.parent / "benchmarks/counts.jsonl",
    "kvpress": DOCS.parent / "benchmarks/kvpress-cpu-amd-epyc-zen4.jsonl",
}
_MARK = re.compile(r"<!-- (?P<name>\w+)(?:: (?P<argument>\w+))? -->\n.*?<!-- /(?P=name) -->", re.DOTALL)
_ATTRIBUTE = re.compile(r"^ {8}(\w+): ")

GROUPS = {
    "Patch a model": ("patched", "patch", "Patch", "unpatch", "Settings"),
    "Plan before a model is loaded": ("plan", "Plan"),
    "Record and replay": ("Record", "replay", "save_record", "load_record"),
    "Look at what was kept": ("Report",),
    "Caches": ("EvictingCache", "Prefix", "Chat"),
    "Policies": (
        "list_policies", "get_policy", "register_policy", "unregister_policy", "critical", "adaptive", "global_topk",
        "pyramid", "chunked", "merged", "refit", "load_calibration", "Policy", "Score", "Scope",
    ),
    "Budgets that follow the text": ("Share", "Mass", "Threshold"),
    "Architectures": ("list_architectures", "register_arch", "unregister_arch", "Adapter", "InterfaceAdapter"),
    "Checks and errors": ("check_model", "KVPatchError"),
}  # fmt: skip
"""Sections of the Python reference; a public name that none of them has goes to "More"."""
MEMBERS = {
    "Patch": (
        "new_cache", "compress", "replace", "chat", "prefix", "prefixes", "warmup", "graph", "save_cache", "load_cache",
        "report", "passes", "record", "record_nbytes", "replay", "remove",
    ),
    "Record": ("nbytes", "to", "join"),
    "Settings": ("save", "load"),
    "Plan": ("to_dict",),
    "EvictingCache": (
        "clone", "concatenate", "select_rows", "batch_select_indices", "batch_repeat_interleave", "reorder_cache", "forget",
        "crop", "activate_past_recording", "reset", "held", "positions", "next_positions", "nbytes", "get_seq_length",
        "check_invariants",
    ),
    "Policy": ("options", "with_options"),
    "Score": ("value", "needs", "entry", "check"),
    "Scope": ("check", "mask"),
    "Adapter": ("project", "output", "kv_shape", "value_size"),
}  # fmt: skip
"""Public members of these classes; of any other all that have a docstring."""


def policies(_: str) -> str:
    """One row for each registered policy; what it does is the first sentence of its page."""
    rows = []
    for name, policy in POLICIES.items():
        page = DOCS / "policies" / f"{name}.md"
        link, about = f"`{name}`", ""
        if page.is_file():
            about = page.read_text(encoding="utf-8").split("\n\n")[1].replace("\n", " ")
            link = f"[{name}]({page.name})"
        rows.append((link, about, "never" if policy.score is None else policy.schedule, policy.source))
    return markdown(("policy", "keeps", "evicts", "source"), rows)


def options(name: str) -> str:
    """The options of one policy, and what its parts' docstrings say about them."""
    policy = POLICIES[name]
    meaning = {key: text for part in _parts(policy) for key, text in _attributes(part).items()}
    rows = [
        (f"`{option}`", f"`{value!r}`", meaning.get(option, ""))
        for option, value in policy.options().items()
        if option not in COMMON or value != COMMON[option]
    ]
    return markdown(("option", "default", "means"), rows) if rows else "None of its own."


def _parts(policy: Policy) -> list[type]:
    found = [getattr(policy, field.name) for field in dataclasses.fields(policy)]
    return [base for part in found if dataclasses.is_dataclass(part) for base in reversed(type(part).__mro__)]


def _attributes(part: type) -> dict[str, str]:
    """What the section "Attributes" of a docstring says, by name."""
    found: dict[str, str] = {}
    name = None
    _, _, section = (part.__doc__ or "").partition("Attributes:\n")
    for line in section.splitlines():
        match = _ATTRIBUTE.match(line)
        if match:
            name, line = match[1], line[match.end() :]
        elif not line.startswith(" " * 8):
            break
        if name is not None:
            found[name] = f"{found.get(name, '')} {line.strip()}".strip()
    return found


def architectures(_: str) -> str:
    """One row for each family; its models come first in the summary of its adapter."""
    rows = []
    for adapter in dict.fromkeys(REGISTRY.values()):
        models, _, rest = adapter.summary.partition(": ")
        rows.append((models, rest, f"`{adapter.name}`"))
    return markdown(("models", "attention", "row"), rows)


def api(_: str) -> str:
    """Autodoc directives for every public name, by section."""
    known = {name for names in GROUPS.values() for name in names}
    rest = tuple(name for name in kvpatch.__all__ if name not in known and name != "policies")
    lines: list[str] = []
    for title, names in {**GROUPS, "More": rest}.items():
        here = [name for name in names if name in kvpatch.__all__]
        if here:
            lines += [f"## {title}", "", "```{eval-rst}", *(line for name in here for line in _directive(name)), "```", ""]
    return "\n".join(lines).rstrip()


def _directive(name: str) -> list[str]:
    thing = getattr(kvpatch, name)
    if not isinstance(thing, type):
        return [f".. autofunction:: kvpatch.{name}", ""]
    members = f" {', '.join(one for one in MEMBERS[name] if hasattr(thing, one))}" if name in MEMBERS else ""
    return [f".. autoclass:: kvpatch.{name}", *([] if name == "patched" else [f"   :members:{members}"]), ""]


def bench(name: str) -> str:
    """The table of a file of JSON lines in benchmarks/, as `python -m tools.bench --markdown` prints it."""
    return tables(read(BENCHMARKS[name])).split("\n\n")[0].rstrip()


def served(_: str) -> str:
    """How many families have a row, and how many model types are served."""
    page = (DOCS / "architectures.md").read_text(encoding="utf-8")
    found = re.search(r"^(\d+) of (\d+) types are served", page, re.MULTILINE)
    if found is None:
        raise ValueError("docs/architectures.md has no count: run python -m tools.architectures --write")
    rows = f"[{len(kvpatch.list_architectures())} families](docs/models.md) have a row of their own"
    return f"{rows}; {found[1]} of transformers' {found[2]} causal model types [are served](docs/architectures.md)."


def papers(_: str) -> str:
    """One sentence with a link to every paper of a policy."""
    *most, last = (f"[{paper.name}]({paper.link})" for paper in PAPERS.values())
    return f"The policies are those of {', '.join(most)} and {last}."


FOLDERS = {"readme": "docs/policies/", "guides": "../policies/", "policies": ""}
"""Where the policies' pages are, seen from a page."""


def uses(page: str) -> str:
    """One row for each use: the policy to take, its budget, why, and what it keeps on a pretrained model."""
    rows = []
    for use in USES:
        names = " or ".join(f"[{name}]({FOLDERS[page]}{name}.md)" for name in (use.policy, *use.also))
        budget = ", ".join(f"{name}={value!r}" for name, value in {"k": use.k, **use.options}.items())
        rows.append((f"**{use.name}**", names, f"`{budget}`", use.why, chooser.describe_use(use)))
    return markdown(("use", "policy", "budget", "why", "gain kept"), rows)


def combinations(_: str) -> str:
    """One row for each refused combination; a need's own words stand where the table leaves the word to it."""
    policies = (*POLICIES.values(), POLICIES["keyformer"].with_options(shared=True))
    needs = {type(need).__name__: need.refuses for policy in policies for need in policy.needs if need.refuses}
    rows = []
    for path, cells in REFUSED.items():
        for feature, words in cells.items() if path not in QUIET else ():
            own = {f"`{name}`": refuses[path] for name, refuses in needs.items() if path in refuses}
            for name, why in own.items() if feature == NEED else [(feature, "")]:
                rows.append((path, name, re.sub(r"\{[^}]*\}", "...", words.replace("{why}", why))))
    return markdown(("asked for", "does not go with", "the words"), rows)


TABLES: dict[str, Callable[[str], str]] = {  # the argument is what stands behind the name in the mark
    "policies": policies,
    "options": options,
    "architectures": architectures,
    "api": api,
    "bench": bench,
    "served": served,
    "grpo": lambda policy: grpo_table.table(grpo_table.read(DOCS / "grpo.jsonl", policy)),
    "uses": uses,
    "kept": chooser.write_kept,
    "papers": papers,
    "combinations": combinations,
    "agents": lambda _: agents.write_table(chooser.LINES / "agents.jsonl"),
    "quotas": lambda _: quotas.write_table(chooser.LINES / "quotas.jsonl"),
    "refits": lambda _: refits.write_table(chooser.LINES),
    "bits": lambda _: bits.write_table(chooser.LINES),
    "rounded": lambda _: bits.write_rounded(chooser.LINES),
}


def refresh(text: str) -> str:
    """Replace every table in a page."""

    def table(match: re.Match[str]) -> str:
        name, argument = match["name"], match["argument"]
        if name not in TABLES:
            return match[0]
        return f"{match[0].splitlines()[0]}\n{TABLES[name](argument or '')}\n<!-- /{name} -->"

    return _MARK.sub(table, text)


def pages() -> list[Path]:
    """Every page of the documentation."""
    return [path for path in sorted(DOCS.rglob("*.md")) if "_build" not in path.parts]


if __name__ == "__main__":
    for page in (DOCS.parent / "README.md", *pages()):
        before = page.read_text(encoding="utf-8")
        if refresh(before) != before:
            page.write_text(refresh(before), encoding="utf-8")
            print(page)
