"""Words and numbers of a report: sizes, budgets, passes, backends, times, as text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .policies.budgets import Budget, Rule

if TYPE_CHECKING:
    from .cache.lossless import Verified  # imports torch, and the command line must not

BLOCKS = " ▁▂▃▄▅▆▇█"
"""Characters for shares of kept tokens, from none to all in eighths."""
_WHEN = {"prompt": "after the prompt", "decode": "while generating", "both": "after the prompt and while generating"}
_ASKED = "asked for"
_ON_CPU = ("triton: kernels run on a GPU", "flash: flash kernels run on CUDA devices, not on cpu")


def block(share: float) -> str:
    """Return the character for a share in [0, 1]: blank for exactly none, full for exactly all."""
    eighths = round(8 * share)
    return BLOCKS[8 if share >= 1 else 0 if share <= 0 else min(max(eighths, 1), 7)]


def format_size(nbytes: int) -> str:
    """Return bytes in binary units, for reports and plans.

    Example:
        >>> format_size(264 * 1024), format_size(1_155_072)
        ('264 KiB', '1.10 MiB')
    """
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    digits = 0 if unit == "B" or value >= 100 or value == int(value) else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def format_span(numbers: Sequence[int]) -> str:
    """Write the range of some numbers, such as "3 to 7"; a single number if all are equal."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def format_tokens(count: int) -> str:
    """Write a number of tokens, such as "1,024 tokens"."""
    return f"{count:,} token{'s' * (count != 1)}"


def never_evicts(name: str, ks: Sequence[Any]) -> bool:
    """Tell if the policy of this name never evicts under the budgets `ks` of its layers."""
    return name == "full" or not any(rule.evicts for rule in Budget(tuple(ks)).rules)


def format_policy(name: str, schedule: str, ks: Sequence[Any]) -> str:
    """Write a policy's name and when it evicts, for `Report`. schedule: the policy's; ks: the budgets of its layers."""
    return f"{name} ({'never evicts' if never_evicts(name, ks) else f'evicts {_WHEN.get(schedule, schedule)}'})"


def format_budget(name: str, schedule: str, ks: Sequence[Any]) -> str:
    """Write the budgets `ks` of a policy's layers, for `Report` and Patch's repr; as one, where all layers have the same."""
    if name == "full":
        return "all tokens"
    budgets = [_format_budget(k) for k in ks]
    if len(set(budgets)) > 1:
        return f"layer by layer: {', '.join(budgets)}"
    return budgets[0] + (", counting generated tokens only" if schedule == "decode" else "")


def format_sized(given: str, schedule: str, answers: int, name: str, ks: Sequence[Any]) -> str:
    """Write the budget, for `Report._list_rows`, in tokens; where the user gave a size in bytes (`given`), that comes first.

    schedule: "prompt", if generated tokens are not counted in the budget; answers: their bytes. name, ks: the policy, and the
    budgets of its layers.
    """
    counted = format_budget(name, schedule, ks)
    if not given:
        return counted
    if schedule != "prompt":
        return f"{given}: {counted}"
    return f"{given} for the prompt: {counted}; answers are kept beside it, now {format_size(answers)}"


def _format_budget(k: Any) -> str:
    """Write one layer's or head's budget, for `format_budget`: a rule (such as Mass), tokens, or a share of the prompt."""
    if isinstance(k, Rule):
        return str(k)
    if isinstance(k, tuple | list):  # of one layer, head by head
        return f"[{', '.join(map(_format_budget, k))}]"
    if isinstance(k, int):
        return format_tokens(k)
    return "all tokens" if k == 1.0 else f"{k:g} of the prompt"


def format_held(nbytes: int, full: int, peak: int) -> str:
    """Write a cache's bytes, for `Report`: their share of a full cache's bytes, those of free slots, and the most so far.

    nbytes: allocated. full: bytes of a cache that keeps everything; 0 if nothing was read. peak: 0 leaves the most out.
    """
    spare = max(nbytes - full, 0) if full else 0
    share = f"{(nbytes - spare) / full:.0%}" if full else "nothing read"
    slots = f", and {format_size(spare)} in free slots for coming tokens" if spare else ""
    at_most = f"; at most {format_size(peak)} at a time" if peak > nbytes else ""
    return f"{format_size(nbytes - spare)} of {format_size(full)} in full ({share}){slots}{at_most}"


def list_passes(counts: Mapping[str, tuple[int, int]], dropped: int, never: bool) -> list[str]:
    """Write lines, for `Report._list_rows`: passes by kind, and in how many the budget acted (tokens came after an eviction).

    counts: by kind of pass, (all, those in which the budget acted); the kind "full" is a pass over all tokens of a lossless
    cache. dropped: prompts that nothing went on from. never: the policy never evicts.
    """
    if never:
        # -1: the lines do not say in how many passes the budget acted
        counts = {kind: (total, -1) for kind, (total, _) in counts.items()}
    names = {"training": "training", "no_cache": "forward without a cache"}
    known = [(name, counts[kind]) for kind, name in names.items() if kind in counts]
    lines = [
        _format_acted(f"{name}: {_format_count(count[0], 'pass')}", count)
        + (" (block= would make it act)" if not count[1] else "")
        for name, count in known
    ]
    (prompts, acted), steps = counts.get("prompt", (0, 0)), counts.get("decode", (0, 0))
    full = counts.get("full", (0, 0))[0]
    if prompts:
        unused = "" if not dropped else ", none continued" if dropped == prompts else f", {dropped:,} not continued"
        said = f"; the budget acted in {_name_part(acted, prompts)}" if acted > 0 else ""
        lines.append(f"{_format_count(prompts, 'prompt')}{unused}{said}")
    if steps[0]:
        lines.append(_format_acted(_format_count(steps[0], "decode step"), steps))
    if full:
        lines.append(f"{_format_count(full, 'pass')} over all tokens, as unpatched")
    return lines


def _format_acted(what: str, count: tuple[int, int]) -> str:
    """Write, for `list_passes`, in how many passes the budget acted. count: (all, those in which it did; -1: leave it out)."""
    return what if count[1] < 0 else f"{what}, the budget acted in {_name_part(count[1], count[0])}"


def _name_part(some: int, every: int) -> str:
    """Write how many of `every` passes `some` are: "none", "all", or a number."""
    return "none" if not some else "all" if some == every else f"{some:,}"


def _format_count(number: int, what: str) -> str:
    ending = "" if number == 1 else "es" if what.endswith("s") else "s"
    return f"{number:,} {what}{ending}"


def list_backends(ran: Mapping[str, tuple[str, str]]) -> list[str]:
    """Write lines, for `Report._list_rows`, on the backends (code for attention) that ran: tasks of each, and why none faster.

    ran: by task, (backend, reason against each preferred one).
    """
    reasons = {part for _, why in ran.values() for part in why.split("; ")}
    # torch alone, as asked for or on a CPU, needs no reasons
    if {name for name, _ in ran.values()} <= {"torch"} and (not ran or reasons & {_ASKED, *_ON_CPU}):
        return [f"torch ({_ASKED})" if _ASKED in reasons else "torch"]
    groups: dict[tuple[str, str], list[str]] = {}  # tasks by backend and reason
    for task, chosen in ran.items():
        groups.setdefault(chosen, []).append(task)
    tasks = {chosen: f" for {', '.join(names)}" if len(groups) > 1 else "" for chosen, names in groups.items()}
    return [f"{name}{tasks[name, why]}" + (f" ({why})" if why else "") for name, why in groups]


def list_verified(verified: Verified) -> list[tuple[str, str]]:
    """Return rows, for `Report._list_rows` under lossless=True: tokens drafted and accepted, bytes of the full cache read."""
    drafts = (
        f"{verified.accepted:,} of {verified.drafted:,} tokens accepted; {verified.per_pass:.1f} tokens a pass over all tokens"
    )
    moved = f"{format_size(round(verified.nbytes_per_token))} a token"
    return [("drafts", drafts), ("moved", moved)]


def format_times(seconds: Mapping[str, float]) -> str:
    """Write the times of a generate(), for `Report._list_rows`: to the first token, and per further token, or in all."""
    if "first_token" not in seconds:
        return f"{_format_time(seconds['total'])} in all"
    further = f", {_format_time(seconds['per_token'])} for each further one" if "per_token" in seconds else ""
    return f"{_format_time(seconds['first_token'])} to the first token{further}"


def _format_time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:,.2f} s"


def align_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Join the cells of each row to a line, in columns, for reports, plans, checks and the command line off a terminal."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def html_table(rows: Sequence[tuple[str, str]], image: str | None) -> str:
    """Write a report's rows as an HTML table, for `Report._repr_html_`, and below it a picture, a PNG in base64, if any."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th><td style='text-align:left'>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    drawn = "" if image is None else f"<img alt='kept tokens' style='max-width:100%' src='data:image/png;base64,{image}'>"
    return f"<table>{cells}</table>{drawn}"
