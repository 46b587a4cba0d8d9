"""Facts of the named policies and of their papers, for commands, pictures and pages: the one table of them.

Imports no torch, so that `kvpatch policies` answers at once. A policy's row names its paper, the colour of its lines, and the
defaults of its options. tests/policies/test_facts.py compares it with the registered policy, tests/test_docs.py with its page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .uses import list_uses

COMMON: dict[str, Any] = {"sinks": 0, "recent": 0, "protect": None, "turns": "all", "quota": None, "every": 1}
"""Options that every policy has, with the default of most."""


class Combination(NamedTuple):
    """Facts of a function that makes a policy of another one, as in "critical(h2o)".

    Attributes:
        options: defaults of the options that it adds.
        schedule: the schedule that it sets; "" leaves the other policy's.
        shared: as in `Fact`; "" leaves the other policy's.
    """

    options: dict[str, Any]
    schedule: str = ""
    shared: str = ""


COMBINATIONS = {
    "critical": Combination({"alpha": 0.5, "eps": 0.0001, "norm": 1}),
    "adaptive": Combination({"floor": 0.2}, shared="layer"),
    "global_topk": Combination({"floor": 0.2}, shared="model"),
    "pyramid": Combination({"beta": 20}),
    "chunked": Combination({"size": 20, "together": True}, schedule="prompt"),
    "merged": Combination({"threshold": 0.0}, schedule="prompt"),
    "refit": Combination({"ridge": 0.1, "queries": 256, "instruction": (), "chunk": 2048}, schedule="prompt"),
}
"""The row of each function of presets.py that goes around a policy."""


@dataclass(frozen=True)
class Paper:
    """Paper that policies come from.

    Attributes:
        name: short name of its method.
        address: its number on arXiv, or a URL if it is elsewhere.
        key: of its BibTeX entry on the pages of its policies.
        title: as printed.
    """

    name: str
    address: str
    key: str
    title: str

    @property
    def link(self) -> str:
        """URL of the paper."""
        return self.address if "/" in self.address else f"https://arxiv.org/abs/{self.address}"


@dataclass(frozen=True)
class Fact:
    """Facts of one policy.

    Attributes:
        name: as `patched` and `--policy` take it.
        colour: of its lines in pictures, as #rrggbb.
        marker: of its points, as matplotlib names it.
        paper: a name in PAPERS, "" for a baseline without one.
        schedule: the policy's own.
        about: what it keeps, in a few words, after a use if policies/uses.py names none.
        options: defaults of its options, those of COMMON only where they differ.
        shared: "layer" or "model" if the heads of a layer, or of all layers, share one budget by their scores.
    """

    name: str
    colour: str
    marker: str
    paper: str
    schedule: str
    about: str
    options: Mapping[str, Any] = field(default_factory=dict)
    shared: str = ""

    @property
    def address(self) -> str:
        """Address of the paper, or ""."""
        return PAPERS[self.paper].address if self.paper else ""

    @property
    def link(self) -> str:
        """URL of the paper, or ""."""
        return PAPERS[self.paper].link if self.paper else ""

    def list_options(self) -> dict[str, Any]:
        """List all options with their defaults, the policy's own first."""
        return {**self.options, **COMMON, **self.options}  # first for the order, last for the values

    def describe_use(self) -> str:
        """Return when to take the policy (its uses, if it has any) and what it keeps, as lists of policies show it."""
        uses = "; ".join(use.name for use in list_uses(self.name))
        return f"{uses}: {self.about}" if uses else self.about


_WINDOW: dict[str, Any] = {"window": 32, "kernel": 7, "pooling": "max"}
_CRITICAL, _PYRAMID = COMBINATIONS["critical"].options, COMBINATIONS["pyramid"].options
_ADAPTIVE, _CHUNKED = COMBINATIONS["adaptive"].options, COMBINATIONS["chunked"].options
_DEFENSIVE = _WINDOW | {"kernel": 5, "pooling": "avg", "floor": 0.0} | _CRITICAL
_REPEATED: dict[str, Any] = {"instruction": (), "chunk": 2048, "sinks": 4, "floor": 0.0}
_KEYFORMER: dict[str, Any] = {
    "scores": "all", "noise": "gumbel", "resample": False, "tau": (1.0, 2.0), "generation_length": 256, "shared": False,
    "damping": 1.0, "recent": 0.3,
}  # fmt: skip

# fmt: off
PAPERS = {paper.name: paper for paper in (
    Paper("Keyformer", "2403.09054", "adnan2024keyformer",
        "Keyformer: KV Cache Reduction through Key Tokens Selection for Efficient Generative Inference"),
    Paper("RoCo", "2402.06262", "ren2024efficacy",
        "On the Efficacy of Eviction Policy for Key-Value Constrained Generative Language Model Inference"),
    Paper("CriticalKV", "2502.03805", "feng2025criticalkv",
        "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective"),
    Paper("H2O", "2306.14048", "zhang2023h2o",
        "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"),
    Paper("Scissorhands", "2305.17118", "liu2023scissorhands",
        "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache Compression at Test Time"),
    Paper("StreamingLLM", "2309.17453", "xiao2024streamingllm", "Efficient Streaming Language Models with Attention Sinks"),
    Paper("TOVA", "2401.06104", "oren2024tova", "Transformers are Multi-State RNNs"),
    Paper("SnapKV", "2404.14469", "li2024snapkv", "SnapKV: LLM Knows What You are Looking for Before Generation"),
    Paper("PyramidKV", "2406.02069", "cai2024pyramidkv",
        "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling"),
    Paper("AdaKV", "2407.11550", "feng2024adakv",
        "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference"),
    Paper("KeyDiff", "2504.15364", "park2025keydiff",
        "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained Environments"),
    Paper("CurDKV", "2509.15038", "sengupta2025curdkv",
        "Value-Guided KV Compression for LLMs via Approximated CUR Decomposition"),
    Paper("LagKV", "2504.04704", "liang2025lagkv",
        "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important"),
    Paper("Expected Attention", "2510.00636", "devoto2025expected",
        "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution"),
    Paper("KVzip", "2505.23416", "kim2025kvzip", "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction"),
    Paper("KVzap", "2601.07891", "jegou2026kvzap", "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning"),
    Paper("DefensiveKV", "2510.13334", "feng2025taming", "Taming the Fragility of KV Cache Eviction in LLM Inference"),
    Paper("DropKV", "https://openreview.net/forum?id=MqfNzH3TVH", "dropkv2026", "DropKV"),
    Paper("Compactor", "2507.08143", "chari2025compactor",
        "Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores"),
    Paper("ChunkKV", "2502.00299", "liu2025chunkkv",
        "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference"),
    Paper("Q-Filters", "2503.02812", "godey2025qfilters",
        "Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression"),
    Paper("RaaS", "2502.11147", "hu2025raas", "RaaS: Reasoning-Aware Attention Sparsity for Efficient LLM Reasoning"),
    Paper("LazyEviction", "2506.15969", "zhang2025lazyeviction",
        "LazyEviction: Lagged KV Eviction with Attention Pattern Observation for Efficient Long Reasoning"),
    Paper("R-KV", "2505.24133", "cai2025rkv",
        "R-KV: Redundancy-aware KV Cache Compression for Training-Free Reasoning Models Acceleration"),
    Paper("VaSE", "2606.03928", "chang2026vase", "Value-Aware Stochastic KV Cache Eviction for Reasoning Models"),
    Paper("TriAttention", "2604.04921", "mao2026triattention",
        "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression"),
    Paper("DuoAttention", "2410.10819", "xiao2024duoattention",
        "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads"),
    Paper("L2 norm", "2406.11430", "devoto2024l2norm",
        "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression"),
)}
"""In the order in which the README lists them."""

FACTS = {fact.name: fact for fact in (
    Fact("full", "#000000", "*", "", "both", "a baseline: keeps every token"),
    Fact("random", "#737373", "x", "RoCo", "both", "a baseline that every other policy should beat: keeps tokens by chance"),
    Fact("window", "#1f77b4", "s", "RoCo", "both", "a baseline: keeps the newest tokens"),
    Fact("dilated_window", "#9ecae1", "s", "Keyformer", "both",
        "a baseline: keeps every second of the newest tokens", {"dilation": 1}),
    Fact("streaming_llm", "#17becf", "s", "StreamingLLM", "both", "keeps the first 4 tokens and the newest ones", {"sinks": 4}),
    Fact("key_attention", "#c5b0d5", "o", "Keyformer", "both",
        "a baseline: the most attention so far, without protecting the newest tokens", {"scores": "all"}),
    Fact("h2o", "#9467bd", "o", "H2O", "both",
        "keeps what drew the most attention so far, and the newest tokens", {"scores": "all", "recent": 0.5}),
    Fact("scissorhands", "#8c564b", "o", "Scissorhands", "both",
        "as h2o, but counts how often a token drew more than average attention",
        {"scores": "all", "recent": 0.5}),
    Fact("tova", "#bcbd22", "o", "TOVA", "both",
        "the newest token alone chooses what stays", {"heads": "layer"}),
    Fact("roco", "#e377c2", "o", "RoCo", "both",
        "keeps the highest mean attention, and tokens whose attention varies",
        {"scores": "all", "recent": 10, "protected": 0.5}),
    Fact("keyformer", "#ff7f0e", "o", "Keyformer", "both",
        "the most attention so far, under Gumbel noise unless noise='none', and the newest tokens", _KEYFORMER),
    Fact("snapkv", "#2ca02c", "^", "SnapKV", "prompt", "the prompt's last tokens choose what stays of the rest", _WINDOW),
    Fact("pyramidkv", "#00695c", "^", "PyramidKV", "prompt",
        "as snapkv, with larger budgets for the lower layers", _WINDOW | _PYRAMID),
    Fact("adakv", "#d62728", "^", "AdaKV", "prompt",
        "as snapkv, with one budget per layer that its heads share", _WINDOW | _ADAPTIVE, "layer"),
    Fact("dropkv", "#8ca252", "^", "DropKV", "prompt",
        "the question is at the prompt's end: keeps what its last tokens' outputs would change without",
        _WINDOW | {"pooling": "avg"}),
    Fact("key_norm", "#393b79", "D", "L2 norm", "both", "attention costs too much to sum: keeps keys of small norm"),
    Fact("key_diff", "#5254a3", "D", "KeyDiff", "both", "attention costs too much to sum: keeps keys unlike the mean key"),
    Fact("cur", "#9c9ede", "D", "CurDKV", "both",
        "attention costs too much to sum: keeps keys and values larger than their neighbours'",
        {"sinks": 4, "window": 16, "combine": "product"}),
    Fact("lag_kv", "#6b6ecf", "d", "LagKV", "prompt",
        "attention costs too much to sum: keeps tokens that the next ones do not resemble", {"sinks": 4, "lag": 128}),
    Fact("chunk_kv", "#ad494a", "^", "ChunkKV", "prompt",
        "the question is at the prompt's end: as snapkv, but keeps whole chunks of the text",
        _WINDOW | _CHUNKED),
    Fact("leverage", "#8c6d31", "D", "Compactor", "prompt",
        "attention costs too much to sum: keeps keys that span what the others do not", {"sketch": 48}),
    Fact("compactor", "#bd9e39", "D", "Compactor", "prompt",
        "questions come later: as leverage, and keeps what the tokens around look at",
        {"sinks": 8, "recent": 4, "sketch": 48, "chunk": 256, "blend": 0.35}),
    Fact("expected_attention", "#637939", "D", "Expected Attention", "prompt",
        "keeps what queries like the prompt's will look at",
        {"sinks": 4, "future": 512, "eps": 0.0, "covariance": True}),
    Fact("q_filter", "#cedb9c", "D", "Q-Filters", "both",
        "attention costs too much to sum: keeps keys along what a calibration's queries seek", {"calibration": None}),
    Fact("duo", "#de2d26", "*", "DuoAttention", "both",
        "some heads look far back: those of a calibration keep everything, the others the first and the newest",
        {"sinks": 128, "recent": 256, "calibration": None}),
    Fact("learned", "#74c476", "P", "KVzap", "prompt",
        "questions come later: keeps what `kvpatch learn` found a second reading of your text to look at",
        {"calibration": None, "sinks": 4, "floor": 0.5}, "model"),
    Fact("raas", "#756bb1", "s", "RaaS", "decode",
        "long answers in steps: keeps the prompt, and what was used last", {"alpha": 0.0001}),
    Fact("lazy", "#9e9ac8", "s", "LazyEviction", "decode",
        "long answers in steps: keeps the prompt, and what may be used again", {"alpha": 0.0001, "recent": 128, "every": 128}),
    Fact("r_kv", "#ce6dbd", "X", "R-KV", "both",
        "long answers that repeat themselves: keeps what the last tokens look at, and unlike keys",
        {"window": 8, "kernel": 7, "pooling": "max", "weight": 0.1, "alike": 0.5, "every": 128}),
    Fact("tri_attention", "#6a51a3", "D", "TriAttention", "decode",
        "long answers: keeps the prompt, and keys that a calibration's mean queries seek from afar",
        {"calibration": None, "reach": 65536, "every": 128}),
    Fact("vase", "#de9ed6", "X", "VaSE", "both",
        "long answers: keeps values of large range, and a sample of what the last tokens look at",
        {"window": 64, "kernel": 5, "pooling": "avg", "ranges": 0.25, "sinks": 4, "every": 64}),
    Fact("critical_snapkv", "#98df8a", "v", "CriticalKV", "prompt",
        "as snapkv, and weighs attention with the size of the values", _WINDOW | _CRITICAL),
    Fact("critical_pyramidkv", "#80cbc4", "v", "CriticalKV", "prompt",
        "as pyramidkv, and weighs attention with the size of the values",
        _WINDOW | _PYRAMID | _CRITICAL),
    Fact("critical_adakv", "#ff9896", "v", "CriticalKV", "prompt",
        "as adakv, and weighs attention with the size of the values",
        _WINDOW | _ADAPTIVE | _CRITICAL, "layer"),
    Fact("kvzip", "#31a354", "P", "KVzip", "prompt",
        "reads the prompt a second time, and keeps what repeating it looks at", _REPEATED, "model"),
    Fact("kvzip_plus", "#006d2c", "P", "KVzip", "prompt",
        "questions come later: as kvzip, and weighs attention with the size of the values", _REPEATED, "model"),
    Fact("defensive_snapkv", "#e6550d", "v", "DefensiveKV", "prompt",
        "as critical_adakv, by the greatest attention of the prompt's end", _DEFENSIVE, "layer"),
    Fact("layer_defensive", "#a63603", "v", "DefensiveKV", "prompt",
        "as defensive_snapkv, with one budget that all layers share", _DEFENSIVE, "model"),
)}
"""In the order of the registry."""
# fmt: on
