"""The report: kept tokens, memory, passes in which the budget acted, and the backends that ran."""

from __future__ import annotations

import base64
import copy
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import plotting
from . import report_text as text
from .cache.cache import EvictingCache
from .cache.holding import keeps_new
from .cache.lossless import Verified
from .cache.recurrent import Stack
from .cache.settings import CacheSettings
from .cache.snapshot import Snapshot
from .errors import KVPatchError
from .hooks.run_log import RunLog
from .policies.budgets import Budget
from .policies.windows import Chunk


@dataclass(repr=False)
class Report:
    """Snapshot of a cache: the kept tokens, their memory, the passes so far, and the backends that ran.

    `str(report)` is a table for people, `to_dict()` plain numbers for programs, and `plot()` a picture; a notebook shows both.

    Attributes:
        policy: name of the policy.
        schedule: "prompt", "decode" or "both".
        budget: of each layer, tokens (int), a share of the prompt (float), one of these for each head (tuple), or such as Mass.
        backend: names of the backends that ran.
        bits: of each key and value held; 16 stands for the model's own precision.
        seen: columns that went through the cache, padding included.
        nbytes: bytes allocated for keys and values.
        full_nbytes: bytes of a cache that keeps every column.
        positions: of each layer, positions of the held tokens, int64 [B,H,T]; -1 in an empty slot. [] if no pass had a cache.
        lengths: tokens of each batch row without padding.
        backends: by task, the backend that ran last and the reason against each preferred one.
        mass: of each layer, the share of the prompt's attention on kept tokens, [B,H], over the query rows that the policy
            observed; None if it observed none or kept everything.
        bounds: of each layer, the sliding window in tokens if the layer keeps that instead of a budget, else None.
        part: the heads of this process, if several processes share the model; all numbers here count those alone.
        acted: True if some token of the text was computed after an eviction; tokens before it have a full cache's logits.
        peak_nbytes: most bytes allocated for keys and values at any time, counted where buffers are made.
        passes: of the patch, by kind ("training", "no_cache", "prompt", "decode", "full"): (all, those in which it acted).
        dropped: prompts from whose cache nothing went on.
        layers: of each layer on the budget, its number in the decoder.
        states: numbers of a hybrid's layers that keep a state of fixed size, which no budget applies to.
        state_nbytes: bytes of these states.
        record_nbytes: bytes of what is recorded for a replay.
        size: the budget in bytes, as it was given; "" for others.
        answers_nbytes: bytes of the newest answer's tokens, where a policy that evicts after the prompt keeps them all.
        readers: numbers of layers that hold nothing and use the keys of another, each with that layer's number.
        unfitted: heads that the last prompt's end left their values, because new ones were not finite (merged, refit).
        verified: with lossless=True, of its last cache: passes over all tokens, tokens drafted and accepted, and bytes moved.
        seconds: of the last generate(): "first_token", "per_token" (of the further ones) and "total"; empty after other calls.

    Example:
        with kvpatch.patched(model, policy="h2o", k=0.5) as patch:
            model.generate(**inputs)
        print(patch.report())
        patch.report().plot("kept.png")
    """

    policy: str
    schedule: str
    budget: tuple[Any, ...]
    backend: str
    seen: int
    nbytes: int
    full_nbytes: int
    positions: list[Tensor]
    lengths: tuple[int, ...] = ()
    backends: dict[str, tuple[str, str]] = field(default_factory=dict)
    mass: list[Tensor | None] = field(default_factory=list)
    bounds: tuple[int | None, ...] = ()
    part: str = ""
    acted: bool = True
    peak_nbytes: int = 0
    passes: dict[str, tuple[int, int]] = field(default_factory=dict)
    dropped: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    bits: int = 16
    layers: tuple[int, ...] = ()
    states: tuple[int, ...] = ()
    state_nbytes: int = 0
    record_nbytes: int = 0
    readers: tuple[tuple[int, int], ...] = ()
    size: str = ""
    answers_nbytes: int = 0
    unfitted: int = 0
    verified: Verified | None = None

    @classmethod
    def of(cls, cache: EvictingCache) -> Report:
        """Take a snapshot of `cache`, which later changes to the cache do not affect."""
        cache.was_read = True
        return cls._from_snapshot(Snapshot.of(cache))

    @classmethod
    def of_log(cls, log: RunLog) -> Report:
        """Make the report for `Patch.report` from the log of its passes: of the last one with a cache, with counts of all.

        If no pass had a cache, the report has no tokens. `RunLog.snapshot` marks the cache as looked at.
        """
        snapshot = log.snapshot()
        report = cls(**_describe_settings(log.settings), backend="", seen=0, nbytes=0, full_nbytes=0, positions=[], acted=False)
        report = report if snapshot is None else cls._from_snapshot(snapshot)
        report.backends = report.backends | log.replayed
        report.passes = log.counts()
        report.dropped = log.dropped
        report.verified = copy.copy(log.verified)
        return report

    @classmethod
    def _from_snapshot(cls, snapshot: Snapshot) -> Report:
        """Make a report from a snapshot of a cache, for `of` and `of_log`; positions are copied, since passes change them."""
        settings, parts = snapshot.settings, snapshot.parts.values()
        return cls(
            **_describe_settings(settings),
            backend=", ".join(dict.fromkeys(name for name, _ in snapshot.ran.values())) or "torch",
            backends=snapshot.ran,
            seen=snapshot.columns_read,
            nbytes=sum(part.nbytes for part in parts),
            full_nbytes=sum(part.full_nbytes for part in parts),
            positions=[part.positions_BHT.clone() for part in parts],
            lengths=() if snapshot.lengths_B is None else tuple(snapshot.lengths_B.tolist()),
            part="" if settings.parallel.size == 1 else str(settings.parallel),
            mass=[None if part.mass_BH is None else part.mass_BH.float().cpu() for part in parts],
            bounds=tuple(settings.bounds[index] for index in snapshot.parts),
            acted=snapshot.acted,
            peak_nbytes=snapshot.peak_nbytes,
            seconds=snapshot.seconds,
            state_nbytes=snapshot.state_nbytes,
            record_nbytes=0 if snapshot.lifetimes is None else snapshot.lifetimes.nbytes,
            answers_nbytes=_count_answers(snapshot),
            unfitted=sum(int(part.unfitted_BH.sum()) for part in parts if part.unfitted_BH is not None),
        )

    @property
    def share(self) -> float:
        """Bytes of the cache as a share of a full cache's, free slots beyond these not counted; 1.0 for an empty cache."""
        return min(self.nbytes / self.full_nbytes, 1.0) if self.full_nbytes else 1.0

    def held(self) -> Tensor:
        """Return how many tokens each head holds, int64 [L,B,H]; -1 where a layer has fewer heads than others."""
        if not self.positions:
            return torch.zeros(0, 0, 0, dtype=torch.long, device="cpu")
        held, heads = self._count_held(), self._count_heads()
        return torch.stack([F.pad(layer, (0, heads - layer.shape[1]), value=-1) for layer in held])

    def _count_held(self) -> list[Tensor]:
        return [(positions >= 0).sum(-1).cpu() for positions in self.positions]

    def _count_heads(self) -> int:
        return max(positions.shape[1] for positions in self.positions)

    def kept(self, row: int = 0) -> Tensor:
        """Return the held tokens of one batch row as a bool mask [L,H,T] over the T tokens of its text.

        Raises:
            KVPatchError: there is no such row, or the cache is empty.
        """
        if not self.positions:
            raise KVPatchError("The cache is empty: there is nothing to show. Run the model inside the block first.")
        B, H = len(self.positions[0]), self._count_heads()
        if isinstance(row, bool) or not isinstance(row, int) or not 0 <= row < B:
            raise KVPatchError(f"row={row!r}: the batch has the rows 0 to {B - 1}.")
        n = self.lengths[row] if self.lengths else 1 + max(int(p[row].max()) for p in self.positions)
        held = [positions[row].cpu() for positions in self.positions]
        known = torch.cat([slots.flatten() for slots in held]).unique()  # all positions held, in order
        if len(known) and int(known[-1]) >= n:  # positions count padding: take ranks, the newest token's is n - 1
            known = known[known >= 0]
            held = [torch.where(slots < 0, slots, torch.searchsorted(known, slots) + n - len(known)) for slots in held]
        kept = torch.zeros(len(held), H, n + 1, dtype=torch.bool, device="cpu")
        for layer, places in enumerate(held):
            kept[layer, : len(places)].scatter_(1, places % (n + 1), True)  # -1, empty: column n
        return kept[..., :n]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values that JSON can hold, for programs and for --json."""
        values = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
            if name != "positions"
        }
        return values | {
            "budget": Budget(self.budget).described(),
            "backends": {task: {"name": name, "why": why} for task, (name, why) in self.backends.items()},
            "held": [layer.tolist() for layer in self._count_held()],
            "readers": [list(pair) for pair in self.readers],
            "mass": [None if mass is None else mass.tolist() for mass in self.mass],
            "passes": {kind: {"total": total, "acted": acted} for kind, (total, acted) in self.passes.items()},
            "verified": None if self.verified is None else asdict(self.verified),
            "seconds": dict(self.seconds),
        }

    def __repr__(self) -> str:
        budget = text.format_budget(self.policy, self.schedule, self.budget)
        return f"<Report: {self.policy}, {budget}; {text.format_held(self.nbytes, self.full_nbytes, 0)}>"

    def __str__(self) -> str:
        return "\n".join(text.align_rows(self._list_rows()))

    def _repr_html_(self) -> str:
        """Return the table and the picture as HTML; a notebook calls it to show the report. Without matplotlib no picture."""
        try:
            image = base64.b64encode(plotting.encode_png(self.plot())).decode() if self.positions else None
        except KVPatchError:  # without matplotlib the table stands alone
            image = None
        return text.html_table(self._list_rows(), image)

    def _list_rows(self) -> list[tuple[str, str]]:
        """List the rows of `__str__` and `_repr_html_`: a name and a value each; without a name one continues the row above."""
        rows = [
            ("policy", text.format_policy(self.policy, self.schedule, self.budget)),
            ("budget", text.format_sized(self.size, self.schedule, self.answers_nbytes, self.policy, self.budget)),
        ]
        if self.bits != 16:
            rows.append(("precision", f"{self.bits} bits for each key and value held"))
        passes = text.list_passes(self.passes, self.dropped, text.never_evicts(self.policy, self.budget))
        rows += [("" if i else "passes", line) for i, line in enumerate(passes)]
        if self.passes and not self.positions:
            return [*rows, ("tokens held", "none: no pass had a cache")]
        rows += self._list_tokens()
        if self.verified is not None and self.verified.passes:  # under lossless=True evictions concern drafts alone
            rows += text.list_verified(self.verified)
        elif self.positions and not self.acted and self.nbytes < self.full_nbytes:
            none = "no token: all were computed before the first eviction, as with a full cache"
            rows.append(("budget acted on", none))
        masses = [mass for mass in self.mass if mass is not None]  # [B,H], the share of attention on kept tokens
        if masses and self.verified is None:
            mean, least = torch.stack(masses).mean(), min(float(mass.min()) for mass in masses)
            kept = f"{mean:.1%} of the mass that the prompt's rows gave; least in one head {least:.1%}"
            rows.append(("attention kept", kept))
        if self.unfitted:
            rows.append(("values", f"left as they were in {self.unfitted:,} heads, where new ones were not finite"))
        if self.seconds:
            rows.append(("time", text.format_times(self.seconds)))
        return rows + [("" if i else "attention by", line) for i, line in enumerate(text.list_backends(self.backends))]

    def _list_tokens(self) -> list[tuple[str, str]]:
        """List, for `_list_rows`, the rows that tell of tokens, layers and bytes; a row is a name and a value."""
        seen = f"{self.seen:,}"
        if self.lengths and min(self.lengths) != self.seen:
            seen += f" columns; the rows' own: {text.format_span(self.lengths)}"
        rows = [("tokens seen", seen)]
        bounds = {layer: bound for layer, bound in enumerate(self.bounds) if bound is not None}
        if bounds:
            chunked = any(isinstance(bound, Chunk) for bound in bounds.values())
            kind, what = ("chunked", "chunks") if chunked else ("sliding", "window")
            windows = f"{', '.join(map(str, bounds))} hold their own {what} of {text.format_span(list(bounds.values()))}"
            rows.append((f"{kind} layers", f"{windows}; the policy acts on the others"))
        if self.part:
            rows.append(("counted here", self.part))
        held = [layer.flatten() for layer in self._count_held()]
        if held:
            per_layer = [text.format_span(layer.tolist()) for layer in held]
            rows.append(("tokens held per head", text.format_span(torch.cat(held).tolist())))
            if len(set(per_layer)) > 1:
                rows.append(("  layer by layer", ", ".join(per_layer)))
            rows.append(("KV bytes", text.format_held(self.nbytes, self.full_nbytes, self.peak_nbytes)))
        if self.record_nbytes:
            rows.append(("record", text.format_size(self.record_nbytes)))
        if self.states or self.readers:
            rows.append(("layers on the budget", ", ".join(map(str, self.layers))))
        if self.states:  # of a hybrid, such as Mamba's
            kept = f"{', '.join(map(str, self.states))} keep a state of fixed size: {text.format_size(self.state_nbytes)}"
            rows.append(("other layers", kept))
        if self.readers:
            reading, sources = (", ".join(map(str, numbers)) for numbers in zip(*self.readers, strict=True))
            rows.append(("other layers", f"{reading} use the keys of {sources}"))
        return rows

    def strip(self, row: int = 0, width: int = 64) -> str:
        """Draw one line per layer for a terminal; a character shows the share of tokens kept in its part of the text.

        Args:
            row: of the batch.
            width: characters of a line; a text of fewer tokens gets one character per token.

        Raises:
            KVPatchError: there is no such row, or `width` is not a positive int.
        """
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise KVPatchError(f"width={width!r} must be a number of characters, at least 1.")
        kept = self.kept(row)
        edges = torch.linspace(0, kept.shape[2], min(width, kept.shape[2]) + 1, device="cpu").round().long().tolist()
        lines = []
        for layer, positions in enumerate(self.positions):
            share = kept[layer, : positions.shape[1]].float().mean(0)
            cells = (float(share[a:b].mean()) for a, b in pairwise(edges))
            lines.append(f"layer {layer:>2} |{''.join(map(text.block, cells))}| {share.mean():.0%}")
        return "\n".join(lines)

    def plot(self, path: str | PathLike[str] | None = None, row: int = 0, what: str = "kept") -> Any:
        """Draw one batch row: return the matplotlib Figure, or save it.

        Args:
            path: file to write, such as "kept.png"; None returns the Figure.
            row: of the batch.
            what: "kept" draws a line per layer and head and a column per token of the text; "budgets" a heat map of the
                number of tokens that each head holds.

        Raises:
            KVPatchError: matplotlib is missing, `path` cannot be written, or there is no such row or picture.

        Example:
            patch.report().plot("budgets.png", what="budgets")
        """
        if what not in ("kept", "budgets"):
            raise KVPatchError(f"what={what!r} is no picture; give 'kept' or 'budgets'.")
        budget = text.format_budget(self.policy, self.schedule, self.budget)
        sizes = text.format_held(self.nbytes, self.full_nbytes, 0)
        drawn = "Tokens" if what == "kept" else "Number of tokens"
        title = f"{drawn} that each KV head holds\n{self.policy}, {budget}: {sizes}"
        kept = self.kept(row)
        figure = plotting.draw_heads(kept, title) if what == "kept" else plotting.draw_budgets(kept.sum(-1), title)
        if path is None:
            return figure
        plotting.save(figure, path)
        return None


def _count_answers(snapshot: Snapshot) -> int:
    """Count, for `Report`, the bytes of generated tokens, which a policy that evicts at prompts alone keeps beside its budget.

    0 under other policies, whose budget counts generated tokens.
    """
    settings = snapshot.settings
    if settings.policy.schedule != "prompt":
        return 0
    # the bytes of a token in each layer that keeps generated ones
    kept = (part.token_nbytes for index, part in snapshot.parts.items() if keeps_new(settings, index))
    return snapshot.steps * sum(kept)  # steps: decode steps since the newest prompt


def _describe_settings(settings: CacheSettings) -> dict[str, Any]:
    """Return arguments of Report by name that follow from a patch's settings: policy, budget, and the layers that it acts on.

    `Report.of_log` and `Report._from_snapshot` call it. states: numbers of layers that keep a state of fixed size. readers: of
    layers that use the keys of another layer, with its number.
    """
    policy, stack = settings.policy, settings.layer_numbers or Stack((), ())
    values = {"policy": policy.name, "schedule": policy.schedule, "budget": settings.budget.per_layer, "bits": settings.bits}
    values["size"] = settings.budget.sizes[0] if settings.budget.of_all_layers else ""  # as text, such as "2GiB" for all layers
    states = tuple(number for number, _ in stack.states)
    return {**values, "layers": settings.numbers, "states": states, "readers": stack.readers}
