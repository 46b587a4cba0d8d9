"""Finer entries or more of them: all tokens rounded, and policies at equal bytes in 16, 8 and 4 bits, of measured lines."""

from __future__ import annotations

from pathlib import Path

from kvpatch.backends.entry_sizes import FULL as IN_FULL
from kvpatch.backends.entry_sizes import count_entry_bytes

from .page import USES, Results
from .statistics import estimate, find_sides
from .tables import mark, markdown, shown_share

POLICIES, BITS, BYTES = ("h2o", "snapkv", "kvzip"), (8, 4), (0.1, 0.2)
HEAD = 64  # numbers of a key, and of a value, of the model
USED = [use for use in USES if use.task == "document"]


def find_k(share: float, bits: int) -> float:
    """Return the share of a prompt's tokens that takes this share of the bytes that all of them take in 16 bits."""
    return round(share * count_entry_bytes(IN_FULL, HEAD, HEAD, 2) / count_entry_bytes(bits, HEAD, HEAD, 2), 3)


def write_table(folder: Path) -> str:
    """Write a row for each use, policy and share of bytes: the loss in 16 bits, and the difference in fewer."""
    found = {}
    rows = [(Results(folder, use), policy, share) for use in USED for policy in POLICIES for share in BYTES]
    for results, policy, share in rows:
        for bits in BITS:
            fewer = (f"{policy}, {bits} bits", find_k(share, bits))
            found[results.use, policy, share, bits] = results.differences(fewer, (policy, share))
    sides, texts = find_sides(found), []
    for results, policy, share in rows:
        few = results.lines[f"{policy}, 4 bits", find_k(share, 4)]
        lost = results.differences((policy, share), only=few)
        keys = [(results.use, policy, share, bits) for bits in BITS]
        cells = [mark(str(estimate(found[key])), -abs(sides[key])) for key in keys]
        texts.append([results.use.title, f"`{policy}`", f"{share:g}", f"{estimate(lost).mean:.3f}", *cells, str(len(lost))])
    return markdown(["", "policy", "bytes", "loses in 16 bits", *(f"{bits} bits, difference" for bits in BITS), "texts"], texts)


def write_rounded(folder: Path) -> str:
    """Write a row for each use where all tokens were held rounded: the loss with its interval, and the gain kept in 4 bits."""
    measured = [(results, bits) for use in USES for results in (Results(folder, use),) for bits in BITS]
    found = {(one, bits): lost for one, bits in measured if (lost := one.differences((f"full, {bits} bits", 1.0)))}
    losses = {key: mark(str(estimate(found[key])), side) for key, side in find_sides(found).items()}
    rows = [
        [one.use.title, losses[one, 8], losses[one, 4], shown_share(kept), str(kept.samples)]
        for one in dict.fromkeys(one for one, _ in found)
        if (kept := one.kept(("full, 4 bits", 1.0)))
    ]
    return markdown(["all tokens held", *(f"loses in {bits} bits" for bits in BITS), "gain kept in 4 bits", "texts"], rows)
