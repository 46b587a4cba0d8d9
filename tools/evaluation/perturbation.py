"""What eviction does to attention's output, head by head: does CriticalKV's selection lower it [CriticalKV 4.6]?

    python -m tools.evaluation.perturbation --json benchmarks/perturbation.jsonl     every model, a CPU minute each
    python -m tools.evaluation.perturbation --models llama-0 --rows 8                a quick look
    python -m tools.evaluation.perturbation --markdown benchmarks/perturbation.jsonl the tables of docs/perturbation.md

A prompt is read and evicted from once; the true continuation follows. Its queries come from one run of the unpatched
model, so that both kept sets are asked the same. For one query of one query head, with a the softmax over all keys, K the
kept ones (tokens behind the prompt are always kept), u_i = v_i W_O the projected values and m = sum of a_i over K:

    o = sum a_i u_i      o^ = sum over K of (a_i / m) u_i      lost = sum over the evicted of a_i u_i
    l1 = ||o - o^||_1 = ||sum over the evicted of a_i (u_i - o)||_1 / m          what is measured, exactly
    theta = sum over the evicted of a_i ||u_i||_1 + (1/m - 1) sum over K of a_i ||u_i||_1 >= l1     [Theorem 3.3]
    weighted = sum over the evicted of a_i ||u_i||_1 >= ||lost||_1               what the second stage minimises
    sink s = ||o - o^||_1 / (1 - s) if one more key with no value, always kept, took the share s of the attention

`lost` is sink s for s -> 1: a head whose attention sits on a sink renormalises nothing. Only models with sinks have such heads.
Dimension key: L layers, B rows, N query heads, Q queries behind the prompt, T tokens, D head size, E hidden size.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from einops import rearrange, repeat
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

import kvpatch
from kvpatch.arch import Adapter, adapter_of
from kvpatch.arch.bound import BoundAdapter
from kvpatch.evaluation.teacher_forcing import feed
from tools.evaluation.models import SUNK
from tools.training import tasks, train

BUDGETS, WINDOW, EPS = (0.1, 0.2, 0.4), 8, 1e-4
MODELS = ("llama-0", "llama-1", "llama-2", "mistral-0", "mpt-0", "gptj-0", "gpt2-0", "llama-python", *SUNK)
STUDIED = ("llama-0", "mistral-0", "llama-python")
EVERYWHERE = ("snapkv", "adakv", "norm=2")
"""Models that get every variant, and variants that every model gets."""
PAIRS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "snapkv": ("snapkv", "critical_snapkv", {}, {}),
    "adakv": ("adakv", "critical_adakv", {}, {}),
    "norm=2": ("snapkv", "critical_snapkv", {}, {"norm": 2}),
    "alpha=0.25": ("snapkv", "critical_snapkv", {}, {"alpha": 0.25}),
    "alpha=0": ("snapkv", "critical_snapkv", {}, {"alpha": 0.0}),
    "pooling=None": ("snapkv", "critical_snapkv", {"pooling": None}, {}),
    "window=16": ("snapkv", "critical_snapkv", {"window": 16}, {}),
}
"""Variant: two policies, options of both, options of the second."""
SINKS = (0.5, 0.9)
LADDER = ("weighted", "theta", "lost", *(f"sink {s}" for s in reversed(SINKS)), "l1")
SPLIT = (0.01, 0.1, 0.5)
"""Cases are split by the share of attention that is lost, the mean of both policies."""


@dataclass(frozen=True)
class Layer:
    """One layer under the full cache, in float64, heads of a group written out: x_BNRT the logits of the rows from
    `start` on, -inf where a query does not see a key; v_BNTD; w_NDE the rows of the output projection; y_BRE the module's
    own output."""

    x_BNRT: Tensor
    v_BNTD: Tensor
    w_NDE: Tensor
    y_BRE: Tensor

    def since(self, row: int) -> "Layer":
        return Layer(self.x_BNRT[:, :, row:], self.v_BNTD, self.w_NDE, self.y_BRE[:, row:])

    def attention(self, kept: Tensor | None = None) -> Tensor:
        """a [B,N,R,T], or a over the kept tokens alone; `kept` is a bool [B,N,1 or R,T]."""
        return (self.x_BNRT if kept is None else self.x_BNRT.masked_fill(~kept, -torch.inf)).softmax(-1)

    def values(self) -> Tensor:
        """u [B,N,T,E]."""
        return self.v_BNTD @ self.w_NDE


@torch.no_grad()
def look(model: PreTrainedModel, tokens_BT: Tensor, start: int) -> tuple[list[Layer], Tensor]:
    """The layers of one unpatched run over `tokens`, for queries from `start` on, and its logits [B,T,V]."""
    calls, hooks = [], []
    for module in model.modules():
        adapter = adapter_of(module)
        if adapter is not None and type(adapter).project is Adapter.project:
            raise kvpatch.KVPatchError(
                f"Perturbations are measured from queries, which {adapter.name}'s attention keeps to itself: take a model of "
                "an architecture with an adapter of its own (llama, mistral, mpt, gptj, gpt2)."
            )
        if adapter is not None:
            hooks.append(module.register_forward_hook(lambda *call: calls.append(call), with_kwargs=True))
    run = model(tokens_BT, past_key_values=DynamicCache(), use_cache=True)  # keeps what sliding windows have left, too
    for hook in hooks:
        hook.remove()
    layers, T = [], tokens_BT.shape[1]
    behind = torch.arange(start, T)[:, None] - torch.arange(T)  # how far key i lies before query t
    for (attn, args, kwargs, out), cached in zip(calls, run.past_key_values.layers, strict=True):
        adapter, k, v = adapter_of(attn), cached.keys, cached.values
        hidden_BTE = args[0] if args else kwargs.pop("hidden_states")
        q = adapter.project(attn, hidden_BTE, *args[1:], **kwargs)[0]
        bound_adapter, group = BoundAdapter(adapter, attn, k.shape[1]), q.shape[1] // k.shape[1]
        geometry, (rows_HGDE, _) = bound_adapter.geometry(k.device), bound_adapter.output_rows(v, group)
        k, v = (repeat(t, "b h t d -> b (h g) t d", g=group).double() for t in (k, v))
        x = q[:, :, start:].double() @ k.mT * geometry.scale
        if geometry.slopes_HG is not None:
            x = x - geometry.slopes_HG.flatten()[:, None, None] * behind
        seen = (behind >= 0) & (behind < (geometry.sliding or T))
        w = rearrange(rows_HGDE, "h g d e -> (h g) d e").double()
        layers.append(Layer(x.masked_fill(~seen, -torch.inf), v, w, out[0][:, start:].double()))
    return layers, run.logits


def kept_sets(
    model: PreTrainedModel, tokens_BT: Tensor, n: int, policy: str, k: float, **options: Any
) -> tuple[list[Tensor], Tensor]:
    """What each head holds of prompt and continuation, a bool [B,N,T] per layer, and logits [B,1+Q,V] from the prompt's end."""
    with kvpatch.patched(model, policy, k, **options):
        fed = feed(model, tokens_BT, n)
    kept = []
    for layer in range(len(fed.cache.layers)):
        at_BHS = fed.cache.positions(layer)
        held = torch.zeros(*at_BHS.shape[:2], tokens_BT.shape[1] + 1, dtype=torch.bool)
        held.scatter_(-1, at_BHS.where(at_BHS >= 0, tokens_BT.shape[1]), True)
        assert bool(held[..., n:-1].all()), "nothing goes once the prompt has been read"
        kept.append(repeat(held[..., :-1], "b h t -> b (h g) t", g=model.config.num_attention_heads // held.shape[1]))
    return kept, fed.logits_BSV


# ---- measures ----


def measures(layer: Layer, kept: Tensor, norms_BNT: Tensor | None = None) -> dict[str, Tensor]:
    """mass m, weighted, theta, lost, sinks, l1 as above, each [B,N,Q], and the heads' sum before the norm, layer_l1 [B,1,Q]."""
    norms_BNT = layer.values().abs().sum(-1) if norms_BNT is None else norms_BNT
    a, v, w = layer.attention(), layer.v_BNTD, layer.w_NDE
    inside, outside = a * kept, a.masked_fill(kept.expand_as(a), 0.0)
    moved = ((a - layer.attention(kept)) @ v) @ w
    weighted, mass = (outside @ norms_BNT[..., None])[..., 0], inside.sum(-1)
    rest = (inside @ norms_BNT[..., None])[..., 0]
    out = {
        "mass": mass,
        "weighted": weighted,
        "theta": weighted + outside.sum(-1) / mass.clamp_min(1e-300) * rest,
        "lost": ((outside @ v) @ w).abs().sum(-1),
        "l1": moved.abs().sum(-1),
        "layer_l1": moved.sum(1, keepdim=True).abs().sum(-1),
    }
    for s in SINKS:
        out[f"sink {s}"] = (((a - inside / (s + (1 - s) * mass)[..., None]) @ v) @ w).abs().sum(-1)
    return out


def top(score: Tensor, count: int) -> Tensor:
    """A mask of the `count` highest scores of the last dimension."""
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, score.topk(count, -1).indices, True)


def two_stage(score: Tensor, weight: Tensor, count: int, eps: float = EPS) -> Tensor:
    """CriticalKV's selection of `count` candidates [..., T] with alpha 0.5; `score` sums to one, `weight` is ||u||."""
    first = top(score, count // 2)
    return top(((score + eps) * weight).masked_fill(first, torch.inf), count)


def lower(base: Tensor, other: Tensor, differ: Tensor) -> float | None:
    """Share of the cases that differ in which `other` is lower; None where there is none."""
    differ = differ.expand_as(base)
    return round((other < base)[differ].double().mean().item(), 4) if bool(differ.any()) else None


def _stacked(layers: list[Layer], kept: list[Tensor], norms: list[Tensor]) -> dict[str, Tensor]:
    """measures() of all layers, each [L,B,N,Q]."""
    found = [measures(layer, one[:, :, None], norm) for layer, one, norm in zip(layers, kept, norms, strict=True)]
    return {name: torch.stack([one[name] for one in found]) for name in found[0]}


def compare(layers: list[Layer], sets: tuple[list[Tensor], list[Tensor]], norms: list[Tensor]) -> dict[str, Any]:
    """Both kept sets against each other: shares of cases, heads and layers with a lower l1 under the second, and means."""
    base, other = (_stacked(layers, kept, norms) for kept in sets)
    differ = torch.stack([(a != b).any(-1) for a, b in zip(*sets, strict=True)])  # [L,B,N]
    cases = differ[..., None]
    line: dict[str, Any] = {
        "cases": base["l1"].numel(),
        "ties": round(1 - differ.double().mean().item(), 4),
        "lower": lower(base["l1"], other["l1"], cases),
        "lower_row_heads": lower(base["l1"].mean(-1), other["l1"].mean(-1), differ),
        "lower_heads": lower(base["l1"].mean((1, 3)), other["l1"].mean((1, 3)), differ.any(1)),
        "heads": base["l1"].shape[0] * base["l1"].shape[2],
        "layer_lower": lower(base["layer_l1"], other["layer_l1"], cases.any(2, keepdim=True)),
    }
    for name in LADDER[:-1]:
        line[f"{name}_lower"] = lower(base[name], other[name], cases)
        line[f"{name}_lower_heads"] = lower(base[name].mean((1, 3)), other[name].mean((1, 3)), differ.any(1))
    for name in ("l1", "layer_l1", "mass"):
        line[name] = [round(one[name].mean().item(), 4) for one in (base, other)]
    gone, edges = (
        1 - (base["mass"] + other["mass"]) / 2,
        (-1.0, *SPLIT, 2.0),
    )  # of one alone would favour it below, the other above
    line["split"] = []
    for low, high in pairwise(edges):
        here = cases & (gone >= low) & (gone < high)
        means = [round(one["l1"][here].mean().item(), 4) if bool(here.any()) else None for one in (base, other)]
        line["split"].append([round(here.double().mean().item(), 4), lower(base["l1"], other["l1"], here), *means])
    return line


def explain(layers: list[Layer], norms: list[Tensor], kept: list[Tensor], n: int, window: int) -> dict[str, Any]:
    """What the criterion has to work with, and what it would choose if it knew the attention of each query.

    `layers` begin at the prompt's observation window; `kept` are the base policy's. Correlations are over the tokens before
    the window (the candidates), means over heads; "rank": of ranks. aligned: ||o|| / sum a_i ||u_i||, one where values point
    one way. cancelled: the part of sum a_i ||u_i - o|| / m over the evicted that is not in l1. assumption: share of cases in
    which stage one holds more than half of the attention [Assumption 3.4].
    oracle: for each query alone, the top by a against two-stage by a, as many as the base keeps: "bound" as published,
    "eps=0" without eps, "shuffled" with the norms of other tokens, "centred" with ||u_i - o|| for ||u_i||.
    """
    parts: dict[str, list[Tensor]] = {}
    for all_rows, norm, held in zip(layers, norms, kept, strict=True):
        layer, c = all_rows.since(window), n - window
        a, u, score = layer.attention(), layer.values(), all_rows.attention()[:, :, :window, :c].mean(2)
        o, later, norm_c = (a @ layer.v_BNTD) @ layer.w_NDE, a[..., :c].mean(2), norm[..., :c]
        centred = torch.cdist(o.float(), u.float(), p=1).double()
        share = a[..., :c] / a[..., :c].sum(-1, keepdim=True).clamp_min(1e-300)
        count, plain, tail = (
            int(held[0, 0, :c].sum()),
            norm_c[:, :, None],
            torch.ones_like(a[..., c:], dtype=torch.bool),
        )
        mixed = plain[..., torch.randperm(c, generator=torch.Generator().manual_seed(0))]
        best = torch.cat([top(share, count), tail], -1)
        first = (a * torch.cat([top(share, count // 2), tail], -1)).sum(-1) > 0.5
        base, topped = measures(layer, held[:, :, None], norm), measures(layer, best, norm)
        error = (a.masked_fill(held[:, :, None].expand_as(a), 0.0) * centred).sum(-1) / base["mass"].clamp_min(1e-300)
        found = {
            "norm_cv": norm_c.std(-1) / norm_c.mean(-1),
            "norm_later_rank": _correlation(_ranks(norm_c), _ranks(later)),
            "norm_centred": _correlation(plain.expand_as(share), centred[..., :c]),
            "aligned": o.abs().sum(-1) / (a @ norm[..., None])[..., 0],
            "cancelled": 1 - base["l1"] / error.clamp_min(1e-300),
            "sink_mass": a[..., 0].mean((0, 2)),
            "sink_norm": norm[..., 0] / norm.mean(-1),
            "score_later_rank": _correlation(_ranks(score), _ranks(later)),
            "mass": base["mass"],
            "oracle_mass": topped["mass"],
            "assumption": first.double(),
            "top_l1": topped["l1"],
        }
        criteria = {"bound": (plain, EPS), "eps=0": (plain, 0.0), "shuffled": (mixed, EPS)}
        criteria["centred"] = (centred[..., :c], 0.0)
        for name, (weight, eps) in criteria.items():
            mask = torch.cat([two_stage(share, weight, count, eps), tail], -1)
            mine, differ = measures(layer, mask, norm), (mask != best).any(-1)
            found[f"{name}_l1"] = mine["l1"]
            for what in LADDER if name in ("bound", "eps=0") else ("l1",):
                won = mine[what] < topped[what]
                found[f"{name}_{what}_lower"] = won[differ].double()
                if what in ("theta", "l1"):
                    found[f"{name}_{what}_lower_assumed"] = won[differ & first].double()
        for name, value in found.items():
            parts.setdefault(name, []).append(value.flatten())
    line = {name: round(torch.cat(one).mean().item(), 4) for name, one in parts.items()}
    return line | {"sink_mass_max": round(torch.cat(parts["sink_mass"]).max().item(), 4)}


def _ranks(x: Tensor) -> Tensor:
    return x.argsort(-1).argsort(-1).double()


def _correlation(x: Tensor, y: Tensor) -> Tensor:
    """Over the last dimension."""
    return F.cosine_similarity(x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True), dim=-1)


# ---- texts and runs ----


@dataclass(frozen=True)
class Text:
    """`tokens_BT` behind whose first n the budget bites. batch: whose answers count; None: every next token does."""

    tokens_BT: Tensor
    n: int
    batch: tasks.Batch | None = None

    def right(self, logits_BSV: Tensor) -> float:
        predicted = logits_BSV.argmax(-1)
        right = self.batch.correct(predicted) if self.batch else predicted == self.tokens_BT[:, self.n :]
        return right.double().mean().item()


def texts(name: str, tokenizer: PreTrainedTokenizerBase, rows: int) -> dict[str, Text]:
    """What a model is asked, by scenario: "in" has the question in the prompt, "after" behind it."""
    if name == "llama-python":
        stream = train.text_stream(tokenizer, train.python_sources(held_out=True))
        starts = [i * (len(stream) - 256) // rows for i in range(rows)]
        return {"source": Text(train.text_rows(stream, starts, tokenizer.bos_token_id)[:, :232], 160)}
    batches = {}
    for task, questions in ((tasks.recall, 8), (tasks.needle, 4)):
        for scenario, asked in (("in", 1), ("after", questions)):
            batch = task(random.Random(99), rows, questions=asked, in_prompt=scenario == "in")
            batches[f"{task.__name__} {scenario}"] = Text(batch.tokens_BT, batch.prompt_length, batch)
    return batches


def study(name: str, rows: int) -> Iterator[dict[str, Any]]:
    """Every text, budget and variant of one model, a line each."""
    model, tokenizer = tasks.load(name)
    for scenario, text in texts(name, tokenizer, rows).items():
        tokens, n = text.tokens_BT[:, :-1], text.n
        layers, full = look(model, tokens, n - WINDOW)
        later, full = [layer.since(WINDOW) for layer in layers], full[:, n - 1 :]
        norms = [layer.values().abs().sum(-1) for layer in layers]
        record_BT = tokens[:, :n] >= tasks.KEYS.start if text.batch else None
        for k in BUDGETS:
            head = {"model": name, "scenario": scenario, "k": k, "rows": rows, "n": n, "queries": tokens.shape[1] - n}
            run = cache(partial(kept_sets, model, tokens, n, k=k))
            for variant, (base, critical, both, second) in PAIRS.items():
                both = {"window": WINDOW} | both
                if both["window"] >= int(k * n) or (name not in STUDIED and variant not in EVERYWHERE):
                    continue
                pair = run(policy=base, **both), run(policy=critical, **both, **second)
                line = compare(later, (pair[0][0], pair[1][0]), norms) | {"right_full": round(text.right(full), 4)}
                line["right"] = [round(text.right(logits), 4) for _, logits in pair]
                line["kl"] = [round(_divergence(full, logits), 5) for _, logits in pair]
                line["nats"] = [round(_nats(logits, text), 4) for logits in (pair[0][1], pair[1][1], full)]
                if record_BT is not None:
                    line["records_kept"] = [round(_share(torch.stack(kept), record_BT), 4) for kept, _ in pair]
                yield {"what": "compare", **head, "variant": variant, **line}
            line = explain(layers, norms, run(policy="snapkv", window=WINDOW)[0], n, WINDOW)
            if record_BT is not None:
                means = [_means(torch.stack(norms)[..., :n], mask) for mask in (record_BT, ~record_BT)]
                line["record_norm"] = round((means[0] / means[1]).mean().item(), 4)
            yield {"what": "why", **head, **line}


def _means(x_LBNT: Tensor, mask_BT: Tensor) -> Tensor:
    return (x_LBNT * mask_BT[:, None]).sum(-1) / mask_BT.sum(-1)[:, None]


def _share(kept_LBNT: Tensor, mask_BT: Tensor) -> float:
    """The share of the marked tokens that is kept."""
    return _means(kept_LBNT[..., : mask_BT.shape[1]].double(), mask_BT).mean().item()


def _divergence(full_BSV: Tensor, other_BSV: Tensor) -> float:
    """Mean KL of the next token's distribution from the full cache's; the prompt's own prediction is the same, and left out."""
    p, q = (x[:, 1:].double().log_softmax(-1) for x in (full_BSV, other_BSV))
    return (p.exp() * (p - q)).sum(-1).mean().item()


def _nats(logits_BSV: Tensor, text: Text) -> float:
    return F.cross_entropy(logits_BSV[:, 1:].flatten(0, 1), text.tokens_BT[:, text.n + 1 :].flatten()).item()


# ---- tables ----

Lines = list[dict[str, Any]]
FACTS: tuple[str, ...] = (
    "norm_cv",
    "norm_later_rank",
    "norm_centred",
    "aligned",
    "cancelled",
    "sink_mass_max",
    "sink_norm",
)
FACTS += ("score_later_rank", "mass", "oracle_mass", "assumption", "record_norm")


def _mean(lines: Lines, name: str, of: Callable[[Any], float | None] = lambda value: value) -> str:
    found = [of(line[name]) for line in lines if line.get(name) is not None]
    known = [value for value in found if value is not None]
    return f"{sum(known) / len(known):.2f}" if known else "-"


def _table(names: str, rows: Iterable[Iterable[str]]) -> str:
    head = names.split(", ")
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---", *["---:"] * (len(head) - 1)], *rows))


def _shares(here: Lines) -> list[str]:
    shares = [_mean(here, name) for name in ("ties", "lower", "lower_row_heads", "lower_heads", "layer_lower")]
    ratios = [_mean(here, name, lambda pair: pair[1] / pair[0]) for name in ("l1", "layer_l1")]
    return [*shares, *ratios, *(_mean(here, name, itemgetter(i)) for name in ("kl", "right") for i in (0, 1))]


def _headline(here: Lines) -> list[str]:
    """The share of heads with a lower L1, the mean L1 and the accuracy, without and with two-stage selection."""
    return [_mean(here, "lower_heads"), *(_mean(here, name, itemgetter(i)) for name in ("l1", "right") for i in (0, 1))]


def markdown(lines: Lines) -> str:
    """The study's tables, models without sinks first and those with them behind."""
    groups = {"without sinks": False, "with sinks": True}
    parts = {title: [line for line in lines if (line["model"] in SUNK) == sunk] for title, sunk in groups.items()}
    return "\n\n".join(f"## Models {title}\n\n{tables(own)}" for title, own in parts.items() if own)


def tables(lines: Lines) -> str:
    """The study in seven tables; each figure is the mean over the scenarios, models and budgets that are not named."""
    compared, why = ([line for line in lines if line["what"] == what] for what in ("compare", "why"))
    models, scenarios = (list(dict.fromkeys(line[name] for line in lines)) for name in ("model", "scenario"))
    plain = [line for line in compared if line["variant"] == "snapkv"]

    def at(lines: Lines, **wanted: Any) -> Lines:
        return [line for line in lines if wanted.items() <= line.items()]

    shares = "ties, cases, rows' heads, heads, layers, L1 ratio, layer's, KL, with critical, right, with critical"
    by_variant = [[v, str(k), *_shares(at(compared, variant=v, k=k))] for v in PAIRS for k in BUDGETS]
    ladder = []
    for what in LADDER:
        name = "" if what == "l1" else f"{what}_"
        ladder.append([what, _mean(plain, f"{name}lower"), _mean(plain, f"{name}lower_heads")])
        ladder[-1] += [_mean(why, f"{how}_{what}_lower") for how in ("bound", "eps=0", "shuffled", "centred")]
    split = [
        [f"up to {edge}", *(_mean(plain, "split", lambda bins, i=i, j=j: bins[i][j]) for j in range(4))]
        for i, edge in enumerate((*SPLIT, 1))
    ]
    found = (
        _table(
            "model, k, heads, L1, with critical, right, with critical",
            [[name, str(k), *_headline(at(plain, model=name, k=k))] for name in models for k in BUDGETS],
        ),
        _table(f"model (k = 0.2), {shares}", [[name, *_shares(at(plain, model=name, k=0.2))] for name in models]),
        _table(f"scenario (k = 0.2), {shares}", [[name, *_shares(at(plain, scenario=name, k=0.2))] for name in scenarios]),
        _table(f"variant, k, {shares}", by_variant),
        _table(
            f"model (k = 0.2), {', '.join(FACTS)}",
            [[name, *(_mean(at(why, model=name, k=0.2), fact) for fact in FACTS)] for name in models],
        ),
        _table("measure, cases, heads, oracle: bound, eps=0, shuffled, centred", ladder),
        _table("attention lost, share of cases, lower, L1, with critical", split),
    )
    return "\n\n".join(found)


def main(
    models: Annotated[str, typer.Option(help="comma-separated names of shipped models")] = ",".join(MODELS),
    rows: Annotated[int, typer.Option(help="sequences per scenario")] = 32,
    json_file: Annotated[Path | None, typer.Option("--json", help="write JSON lines here")] = None,
    table: Annotated[Path | None, typer.Option("--markdown", help="print this JSON-lines file as tables")] = None,
) -> None:
    """Measure what two-stage selection does to attention's output, on shipped models."""
    if table is not None:
        print(markdown([json.loads(line) for line in table.read_text().splitlines() if line.strip()]))
        return
    torch.set_num_threads(1)
    if json_file is not None:
        json_file.write_text("")
    for name in models.split(","):
        for line in study(name, rows):
            print(
                line["what"],
                name,
                line["scenario"],
                line["k"],
                line.get("variant", ""),
                line.get("lower", ""),
                flush=True,
            )
            if json_file is not None:
                with json_file.open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    typer.run(main)
