"""The table of docs/guides/train.md, from the runs of grpo_under_budget."""

from __future__ import annotations

from pathlib import Path

from .runs import Line, read_lines
from .statistics import Bootstrap, Estimate
from .tables import markdown, shown

ARMS = ("full cache", "budget, dense learner", "budget, replay")
COLUMNS = ("", "ratio, mean", "ratio, from", "ratio, to", "reward before", "reward after", "reward after, full cache")


def read(path: Path, policy: str) -> list[Line]:
    """Runs of one policy in a file of JSON lines."""
    return [one for one in read_lines(path) if one["policy"] == policy]


def table(runs: list[Line]) -> str:
    """Each arm's ratios and rewards, the replay's reward beyond the others', and what a rollout took: means over seeds."""
    by_arm = {arm: sorted((one for one in runs if one["arm"] == arm), key=lambda one: one["seed"]) for arm in ARMS}
    seeds = [[one["seed"] for one in by_arm[arm]] for arm in ARMS]
    if seeds[0] != seeds[1] or seeds[0] != seeds[2]:
        raise ValueError(f"one arm has other seeds than another: {seeds}")
    bootstrap = Bootstrap([("runs", str(seed)) for seed in seeds[0]])

    def over(arm: str, name: str) -> Estimate:
        return bootstrap.estimate([one[name] for one in by_arm[arm]])

    rows = []
    for arm in ARMS:
        least, most = min(one["least"] for one in by_arm[arm]), max(one["most"] for one in by_arm[arm])
        ratios = [f"{over(arm, 'ratio').mean:.6f}", *(f"{one:.6g}" for one in (least, most))]
        rows.append([arm, *ratios, *(shown(over(arm, name)) for name in ("before", "budget", "full"))])
    costs = [[arm, f"{over(arm, 'bytes').mean:,.0f}", shown(over(arm, "seconds"))] for arm in ARMS]
    gaps = []
    for other in ARMS[:2]:
        pairs = list(zip(by_arm[ARMS[2]], by_arm[other], strict=True))
        found = (bootstrap.estimate([a[name] - b[name] for a, b in pairs]) for name in ("budget", "full"))
        gaps.append([f"{ARMS[2]} - {other}", *(shown(one, signed=True) for one in found)])
    parts = (
        markdown(COLUMNS, rows),
        markdown(("difference, paired by seed", "reward after", "reward after, full cache"), gaps),
        markdown(("", "bytes of keys and values per row", "seconds per rollout"), costs),
    )
    return "\n\n".join(parts)
