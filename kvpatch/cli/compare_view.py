"""Output of `kvpatch compare`: rows with notes, advice with a line of Python, and a picture."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean
from typing import Any

from .. import plotting
from ..evaluation.divergence import DivergenceFigures, DivergenceTable, Row
from ..policies import Policy, get_policy
from ..policies.uses import CHANCE
from ..storage.settings import Settings
from .loading import parse_k

_HEADS = ("policy", "k", "held", "KL", "worst", "same", "loss", "KV")
LEGEND = (
    "held: tokens per head at the end, on average. KL: mean over the fed tokens of KL(full || evicted) of the next token, "
    "nats; worst: the largest. The prediction after the prompt itself is left out: nothing had been evicted before it. same: "
    "share of predictions whose likeliest token is the full cache's. loss: by how much the fed text's own rises, nats per "
    "token. KV: bytes of keys and values at the end, of the full cache's. random (chance): spares the first four tokens and "
    "the newest ones, a quarter of the budget, as good policies do. Time is left out: one run of so few tokens says nothing "
    "of it."
)


def _mark_chance(policy: str) -> str:
    """Return a policy's name as the table shows it: random eviction, the baseline to beat, gets "(chance)" added."""
    return f"{policy} (chance)" if policy == CHANCE else policy


class Lines:
    """Rows of a table whose widths are known before anything is measured, so that each can be printed when it is.

    Args:
        policies: by the names that are shown.
        sizes: texts of the budgets, with the bits where they are fewer.
        empty: the result without rows.
    """

    def __init__(self, policies: dict[str, Policy], sizes: Iterable[str], empty: DivergenceTable) -> None:
        """Set the widths of the table's columns (see _HEADS), when `_measure_prompt` begins.

        sizes: budgets as text. empty: the result without rows, for the sizes of the text and of the full cache.
        """
        tokens = len(f"{empty.n + empty.fed:,}")
        names = max(len(_mark_chance(name)) for name in ["full", *policies])
        self.widths = (names, max(map(len, sizes)) + 1, max(4, tokens), 7, 6, 4, 7, 4)
        self.result = empty

    @property
    def head(self) -> str:
        """Names of the columns."""
        return self._align_cells(_HEADS)

    def format_full(self) -> str:
        """Return the table's first line, for the full cache: all tokens are held, and no prediction differs.

        `_measure_prompt` prints it.
        """
        total = self.result.n + self.result.fed
        # budget, KL, worst KL, agreement, loss, bytes, fewest and most tokens held, and their mean
        return self.format_row(
            Row("full", "", DivergenceFigures(0, 0.0, 0.0, 1.0, 0.0, self.result.nbytes, (total, total), total))
        )

    def format_row(self, row: Row) -> str:
        """Return a line of the table of `compare`: a setting's measurements, or "refused" where the policy does not accept it.

        An asterisk after the budget: it is smaller than the number of tokens that the policy protects from eviction.
        """
        one = row.figures
        if one is None:
            return self._align_cells((_mark_chance(row.policy), row.size, "", "refused"))
        cells = (
            _mark_chance(row.policy),
            row.size + "*" * bool(one.cut),
            f"{one.mean_held:,.0f}",
            f"{one.kl:.4f}",
            f"{one.worst:.2f}",
            f"{one.agreement:.0%}",
            "" if one.loss is None else f"{one.loss:+.3f}",
            f"{one.nbytes / self.result.nbytes:.0%}",
        )
        return self._align_cells(cells)

    def _align_cells(self, cells: tuple[str, ...]) -> str:
        """Return a line of `compare`'s table, padded to columns: the first cell flush left, all others flush right."""
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, self.widths, strict=False))
        ]
        return "  ".join(padded).rstrip()


def write_python(
    name: str, k: str, policy: Policy, schedule: str | None, seed: int, bits: int = 16, calibration: str | None = None
) -> str:
    """Return a line of Python, to paste, that patches a model with the setting that `compare` advises. `_show_end` prints it.

    calibration: path of the file, or None.
    """
    options = _list_options(name, policy, schedule, seed, bits)
    # a number as it is, a rule such as "mass:0.95" as kvpatch.Mass(0.95), other text such as "2GiB" in quotes
    size = k if k.replace(".", "", 1).isdigit() else f"kvpatch.{parse_k(k)}" if ":" in k else repr(k)
    loaded = {"calibration": f"kvpatch.load_calibration({calibration!r})"}
    arguments = "".join(f", {option}={loaded.get(option, repr(value))}" for option, value in options.items())
    return f'with kvpatch.patched(model, policy="{name}", k={size}{arguments}):'


def make_settings(name: str, k: str, policy: Policy, schedule: str | None, seed: int, bits: int = 16) -> Settings:
    """Return the advised setting as Settings, which `_show_end` saves. A calibration is left out: Settings cannot hold one."""
    options = _list_options(name, policy, schedule, seed, bits)
    options.pop("calibration", None)
    return Settings(name, parse_k(k), options)


def _list_options(name: str, policy: Policy, schedule: str | None, seed: int, bits: int) -> dict[str, Any]:
    """Return the arguments of `patched` in which an advised setting is not the default, for the Python and the file to save."""
    options = find_changes(name, policy)
    if schedule is not None:
        options["schedule"] = schedule
    if seed:
        options["seed"] = seed
    if bits != 16:
        options["bits"] = bits
    return options


def find_changes(name: str, policy: Policy) -> dict[str, Any]:
    """Return a policy's options that are not its defaults, for `_list_options`.

    Without `generation_length`: generate() sets it.
    """
    defaults = get_policy(name).options()
    changed = {option: value for option, value in policy.options().items() if option in defaults and value != defaults[option]}
    changed.pop("generation_length", None)
    return changed


def list_notes(rows: list[Row]) -> list[str]:
    """Return notes to print below a prompt's rows: protected tokens that were cut to fit a budget, and reasons of refusals.

    `_measure_prompt` prints them. A note names all settings that it holds for.
    """
    cut: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for row in rows:
        if row.figures is None:
            refused.setdefault(row.error, []).append(f"{row.policy} at k={row.size}")
        for option, (size, remaining) in row.figures.cut.items() if row.figures else ():
            cut.setdefault(row.policy, []).append(f"{option} {size} cut to {remaining} at k={row.size}")
    reason = "protects more than the budget holds, which leaves nothing to choose by score"
    lines = [f"* {policy} {reason}: {', '.join(sizes)}." for policy, sizes in cut.items()]
    return lines + [f"refused: {', '.join(which)}: {why}" for why, which in refused.items()]


# ---- advice ----

Setting = tuple[str, str, int]
"""Name of a policy, text of a budget, and bits."""


def _pool_figures(results: list[DivergenceTable]) -> dict[Setting, DivergenceFigures]:
    """Pool measurements over prompts: the worst values, and mean bytes, of each setting that ran on all of them.

    `find_best` and `write_advice` choose by them. nbytes of a result is in millionths of the full cache's bytes.
    """
    # of each setting, the measurements on every text, and the share that its cache had of the full cache's bytes
    by_setting: dict[Setting, list[DivergenceFigures]] = {}
    shares: dict[Setting, list[float]] = {}
    for result in results:
        for row in result.rows:
            if row.figures is not None:
                setting = row.policy, row.k, row.bits
                by_setting.setdefault(setting, []).append(row.figures)
                shares.setdefault(setting, []).append(row.figures.nbytes / result.nbytes)
    return {
        setting: DivergenceFigures(
            budget=figures[0].budget,
            kl=max(one.kl for one in figures),
            worst=max(one.worst for one in figures),
            agreement=min(one.agreement for one in figures),
            loss=None,
            nbytes=round(1e6 * mean(shares[setting])),
            held=figures[0].held,
            mean_held=figures[0].mean_held,
        )
        for setting, figures in by_setting.items()
        if len(figures) == len(results)
    }


def find_best(results: list[DivergenceTable], tolerance: float, agreement: float) -> Setting | None:
    """Return the setting to advise: of those within both limits the one of fewest bytes, else that of lowest KL, or None.

    `_show_end` and `write_advice` call it. None: nothing smaller than the full cache was measured. tolerance: largest KL.
    agreement: smallest share of equal predictions.
    """
    pooled = _pool_figures(results).items()
    candidates = {setting: one for setting, one in pooled if setting[0] != CHANCE and one.nbytes < 1e6}  # 1e6: a full cache
    within = {setting: one for setting, one in candidates.items() if _is_within(one, tolerance, agreement)}
    if within:
        return min(within, key=lambda setting: (within[setting].nbytes, within[setting].kl))
    return min(candidates, key=lambda setting: candidates[setting].kl, default=None)


def write_advice(results: list[DivergenceTable], tolerance: float, agreement: float) -> str:
    """Return the advice that `_show_end` prints: the setting of fewest bytes within both limits, or that of the lowest KL.

    Ties go to the lower KL. Random eviction ("chance") and settings as large as the full cache are never advised. The sentence
    gives what was measured, and the KL of random eviction under the same budget.
    """
    chosen = find_best(results, tolerance, agreement)
    if chosen is None:
        return "No setting that holds less than the full cache was measured, so there is none to advise."
    pooled, several = _pool_figures(results), len(results) > 1
    limits = f"a KL of {tolerance:g} nats per token and {agreement:.0%} agreement"
    where = f"each of these {len(results)} texts" if several else "this text"
    text = _describe_setting(chosen, pooled[chosen], several)
    if _is_within(pooled[chosen], tolerance, agreement):
        text = f"The cheapest of these settings within {limits} on {where} is {text}."
    else:
        text = f"None of these settings stays within {limits} on {where}; the closest is {text}."
    counted = sum(result.counted for result in results)
    text = f"{text} Measured on {counted:,} predicted tokens"
    # random eviction under the same budget: if it does as well, the text cannot tell policies apart
    chance = pooled.get((CHANCE, *chosen[1:]))
    if chance is None:
        return f"{text}."
    text = f"{text}; chance has a KL of{' at most' if several else ''} {chance.kl:.4f} under the same budget"
    if chance.kl > pooled[chosen].kl and not _is_within(chance, tolerance, agreement):
        return f"{text}."
    return f"{text}, so {'these texts' if several else 'this text'} cannot tell policies apart there."


def _is_within(one: DivergenceFigures, tolerance: float, agreement: float) -> bool:
    """Tell whether a setting may be advised: a KL of at most `tolerance`, and enough equal predictions (`agreement`)."""
    return one.kl <= tolerance and one.agreement >= agreement


def _describe_setting(setting: Setting, one: DivergenceFigures, several: bool) -> str:
    """Return the part of the advice that names a setting and its measurements, as `_pool_figures` has them.

    Its bytes are in millionths of the full cache's. several: the measurements are the worst of several texts.
    """
    most, least = (" at most", " at least") if several else ("", "")
    kl = f"a KL of{most} {one.kl:.4f} (worst token {one.worst:.2f})"
    policy, k, bits = setting
    name_and_budget = f"{policy} at k={Row(policy, k, None, bits=bits).size}"
    return f"{name_and_budget}: {one.nbytes / 1e6:.0%} of the full cache's bytes, {kl},{least} {one.agreement:.1%} agreement"


def draw_picture(result: DivergenceTable, tolerance: float, title: str) -> Any:
    """Draw one prompt's KL against the bytes held at the end, a line per policy. `run` saves the figure that this returns."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in result.rows:
        if row.figures is not None:
            curves.setdefault(row.policy, []).append((row.figures.nbytes, row.figures.kl))
    return plotting.draw_divergence(
        {policy: sorted(points) for policy, points in curves.items()}, CHANCE, result.nbytes, tolerance, title
    )
