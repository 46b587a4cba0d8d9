"""Names, options and papers of the policies, and models of the architectures, written out for commands that answer at once.

The registries have the same names and defaults, but importing them imports torch, which takes seconds;
tests/cli/test_catalogue.py compares the two.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from ..errors import KVPatchError, named, suggest
from ..policies.uses import find_use, list_uses

COMMON = {"sinks": 0, "recent": 0, "protect": None, "turns": "all", "every": 1}
"""Options that every policy has, with the default of most."""

SCHEDULES = ("prompt", "decode", "both")
POSITIONS = ("original", "renumbered")
BACKENDS = ("auto", "torch", "flash", "triton")
BITS = (16, 8, 4)

DEFAULT_POLICY = find_use("question").policy
"""Policy of the commands where none is given: a file holds a text with its question, and so does a request to a server."""


@dataclass(frozen=True)
class PolicyEntry:
    """Entry of one policy.

    Attributes:
        name: as `--policy` takes it.
        about: what it keeps, in a few words, after a use if policies/uses.py names none.
        paper: short name of the paper, "" for a baseline.
        arxiv: its number on arXiv, or the address of a paper that is elsewhere.
        schedule: the policy's own.
        options: defaults of its options, those of COMMON only where they differ.
    """

    name: str
    about: str
    paper: str = ""
    arxiv: str = ""
    schedule: str = "both"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def use(self) -> str:
        """When to take it, and what it keeps."""
        uses = "; ".join(use.name for use in list_uses(self.name))
        return f"{uses}: {self.about}" if uses else self.about

    @property
    def link(self) -> str:
        """Address of the paper, or ""."""
        return self.arxiv and (self.arxiv if "/" in self.arxiv else f"https://arxiv.org/abs/{self.arxiv}")


_WINDOW = {"window": 32, "kernel": 7, "pooling": "max"}
_CRITICAL = {"alpha": 0.5, "eps": 0.0001, "norm": 1}
_DEFENSIVE = _WINDOW | {"kernel": 5, "pooling": "avg", "floor": 0.0} | _CRITICAL
_REPEATED: dict[str, Any] = {"instruction": (), "chunk": 2048, "sinks": 4, "floor": 0.0}
_KEYFORMER = {
    "scores": "all", "noise": "gumbel", "resample": False, "tau": (1.0, 2.0), "generation_length": 256, "shared": False,
    "damping": 1.0,
}  # fmt: skip

# fmt: off
POLICIES = {entry.name: entry for entry in (
    PolicyEntry("full", "a baseline: keeps every token"),
    PolicyEntry("random", "a baseline that every other policy should beat: keeps tokens by chance", "RoCo", "2402.06262"),
    PolicyEntry("window", "a baseline: keeps the newest tokens", "RoCo", "2402.06262"),
    PolicyEntry("dilated_window", "a baseline: keeps every second of the newest tokens", "Keyformer", "2403.09054",
                options={"dilation": 1}),
    PolicyEntry("streaming_llm", "keeps the first 4 tokens and the newest ones", "StreamingLLM", "2309.17453",
                options={"sinks": 4}),
    PolicyEntry("key_attention", "a baseline: the most attention so far, without protecting the newest tokens",
                "Keyformer", "2403.09054", options={"scores": "all"}),
    PolicyEntry("h2o", "keeps what drew the most attention so far, and the newest tokens",
                "H2O", "2306.14048", options={"scores": "all", "recent": 0.5}),
    PolicyEntry("scissorhands", "long generation: as h2o, but counts how often a token drew more than average attention",
                "Scissorhands", "2305.17118", options={"scores": "all", "recent": 0.5}),
    PolicyEntry("tova", "text that depends on little: the newest token alone chooses what stays", "TOVA", "2401.06104",
                options={"heads": "layer"}),
    PolicyEntry("roco", "keeps the highest mean attention, and tokens whose attention varies",
                "RoCo", "2402.06262", options={"scores": "all", "recent": 10, "protected": 0.5}),
    PolicyEntry("keyformer", "long generation: the most attention so far under Gumbel noise, and the newest tokens",
                "Keyformer", "2403.09054", options=_KEYFORMER | {"recent": 0.3}),
    PolicyEntry("snapkv", "the prompt's last tokens choose what stays of the rest",
                "SnapKV", "2404.14469", "prompt", _WINDOW),
    PolicyEntry("pyramidkv", "as snapkv, with larger budgets for the lower layers", "PyramidKV", "2406.02069", "prompt",
                _WINDOW | {"beta": 20}),
    PolicyEntry("adakv", "as snapkv, with one budget per layer that its heads share", "AdaKV", "2407.11550", "prompt",
                _WINDOW | {"floor": 0.2}),
    PolicyEntry("dropkv", "the question is at the prompt's end: keeps what its last tokens' outputs would change without",
                "DropKV", "https://openreview.net/forum?id=MqfNzH3TVH", "prompt", _WINDOW | {"pooling": "avg"}),
    PolicyEntry("key_norm", "attention costs too much to sum: keeps keys of small norm", "L2 norm", "2406.11430"),
    PolicyEntry("key_diff", "attention costs too much to sum: keeps keys unlike the mean key", "KeyDiff", "2504.15364"),
    PolicyEntry("cur", "attention costs too much to sum: keeps keys and values larger than their neighbours'", "CurDKV",
                "2509.15038", options={"sinks": 4, "window": 16, "combine": "product"}),
    PolicyEntry("lag_kv", "attention costs too much to sum: keeps tokens that the next ones do not resemble", "LagKV",
                "2504.04704", "prompt", {"sinks": 4, "lag": 128}),
    PolicyEntry("chunk_kv", "the question is at the prompt's end: as snapkv, but keeps whole chunks of the text", "ChunkKV",
                "2502.00299", "prompt", _WINDOW | {"size": 20, "together": True}),
    PolicyEntry("leverage", "attention costs too much to sum: keeps keys that span what the others do not", "Compactor",
                "2507.08143", "prompt", {"sketch": 48}),
    PolicyEntry("compactor", "questions come later: as leverage, and keeps what the tokens around look at", "Compactor",
                "2507.08143", "prompt", {"sinks": 8, "recent": 4, "sketch": 48, "chunk": 256, "blend": 0.35}),
    PolicyEntry("expected_attention", "questions come later: keeps what queries like the prompt's will look at",
                "Expected Attention", "2510.00636", "prompt", {"sinks": 4, "future": 512, "eps": 0.0, "covariance": True}),
    PolicyEntry("q_filter", "attention costs too much to sum: keeps keys along what a calibration's queries seek",
                "Q-Filters", "2503.02812", options={"calibration": None}),
    PolicyEntry("duo", "some heads look far back: those of a calibration keep everything, the others the first and the newest",
                "DuoAttention", "2410.10819", options={"sinks": 128, "recent": 256, "calibration": None}),
    PolicyEntry("learned", "questions come later: keeps what `kvpatch learn` found a second reading of your text to look at",
                "KVzap", "2601.07891", "prompt", {"calibration": None, "sinks": 4, "floor": 0.5}),
    PolicyEntry("raas", "long answers in steps: keeps the prompt, and what was used last", "RaaS", "2502.11147", "decode",
                {"alpha": 0.0001}),
    PolicyEntry("lazy", "long answers in steps: keeps the prompt, and what may be used again", "LazyEviction", "2506.15969",
                "decode", {"alpha": 0.0001, "recent": 128, "every": 128}),
    PolicyEntry("r_kv", "long answers that repeat themselves: keeps what the last tokens look at, and unlike keys", "R-KV",
                "2505.24133", options={"window": 8, "kernel": 7, "pooling": "max", "weight": 0.1, "alike": 0.5, "every": 128}),
    PolicyEntry("tri_attention", "long answers: keeps the prompt, and keys that a calibration's mean queries seek from afar",
                "TriAttention", "2604.04921", "decode", {"calibration": None, "reach": 65536, "every": 128}),
    PolicyEntry("vase", "long answers: keeps values of large range, and a sample of what the last tokens look at", "VaSE",
                "2606.03928", options={"window": 64, "kernel": 5, "pooling": "avg", "ranges": 0.25, "sinks": 4, "every": 64}),
    PolicyEntry("critical_snapkv", "as snapkv, and weighs attention with the size of the values",
                "CriticalKV", "2502.03805", "prompt", _WINDOW | _CRITICAL),
    PolicyEntry("critical_pyramidkv", "as pyramidkv, and weighs attention with the size of the values",
                "CriticalKV", "2502.03805", "prompt", _WINDOW | {"beta": 20} | _CRITICAL),
    PolicyEntry("critical_adakv", "as adakv, and weighs attention with the size of the values",
                "CriticalKV", "2502.03805", "prompt", _WINDOW | {"floor": 0.2} | _CRITICAL),
    PolicyEntry("kvzip", "reads the prompt a second time, and keeps what repeating it looks at", "KVzip",
                "2505.23416", "prompt", _REPEATED),
    PolicyEntry("kvzip_plus", "questions come later: as kvzip, and weighs attention with the size of the values", "KVzip",
                "2505.23416", "prompt", _REPEATED),
    PolicyEntry("defensive_snapkv", "questions come later: as critical_adakv, by the greatest attention of the prompt's end",
                "DefensiveKV", "2510.13334", "prompt", _DEFENSIVE),
    PolicyEntry("layer_defensive", "questions come later: as defensive_snapkv, with one budget that all layers share",
                "DefensiveKV", "2510.13334", "prompt", _DEFENSIVE),
)}

ARCHITECTURES = {
    "llama": "Llama 1 to 3.3, Vicuna, TinyLlama, Yi, SmolLM 1 and 2, DeepSeek-R1-Distill-Llama",
    "mistral": "Mistral 7B, Mistral Nemo, Mistral Small, Zephyr",
    "mpt": "MPT 7B and 30B",
    "gptj": "GPT-J 6B",
    "gpt2": "GPT-2, DistilGPT-2, Cerebras-GPT",
    "falcon": "Falcon 7B, 40B and 180B",
    "bloom": "BLOOM, BLOOMZ",
    "codegen": "CodeGen 1 and 2",
    "gpt_neox_japanese": "GPT-NeoX Japanese 2.7B",
    "gpt_neo": "GPT-Neo 125M to 2.7B, TinyStories",
    "xglm": "XGLM",
    "mvp": "MVP, the decoder",
    "trocr": "TrOCR, the decoder",
    "rembert": "RemBERT with is_decoder=True",
    "megatron_bert": "Megatron-BERT with is_decoder=True",
    "roformer": "RoFormer with is_decoder=True",
    "longcat_flash": "LongCat-Flash",
    "qwen2": "Qwen 1.5, 2 and 2.5, QwQ, DeepSeek-R1-Distill-Qwen",
    "qwen3": "Qwen 3, dense",
    "qwen2_moe": "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    "qwen3_moe": "Qwen3-30B-A3B, Qwen3-235B-A22B",
    "phi": "Phi 1, 1.5 and 2",
    "phi3": "Phi 3, Phi 3.5 mini, Phi 4",
    "gemma": "Gemma 2B and 7B, CodeGemma",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3, text",
    "gpt_neox": "Pythia, GPT-NeoX 20B, Dolly 2",
    "gpt_bigcode": "StarCoder, SantaCoder",
    "opt": "OPT",
    "starcoder2": "StarCoder 2",
    "olmo": "OLMo",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "olmoe": "OLMoE 1B-7B",
    "mixtral": "Mixtral 8x7B and 8x22B",
    "ministral": "Ministral 8B",
    "granite": "Granite 3, dense",
    "granitemoe": "Granite 3, mixture of experts",
    "cohere": "Command R and R+, Aya",
    "cohere2": "Command A, Command R7B",
    "gpt_oss": "gpt-oss 20B and 120B",
    "stablelm": "StableLM 3B and 2, Stable Code",
    "glm": "GLM-4 9B, GLM-Edge",
    "glm4": "GLM-4-0414",
    "smollm3": "SmolLM3 3B",
    "nemotron": "Nemotron-4, Minitron",
    "arcee": "AFM 4.5B",
    "helium": "Helium 1",
    "seed_oss": "Seed-OSS 36B",
    "ernie4_5": "ERNIE 4.5, dense",
    "exaone4": "EXAONE 4.0",
    "hunyuan_v1_dense": "Hunyuan 0.5B to 7B, dense",
    "apertus": "Apertus 8B and 70B",
    "bitnet": "BitNet b1.58 2B4T",
    "deepseek_v2": "DeepSeek V2 and V2 Lite",
    "deepseek_v3": "DeepSeek V3 and R1, Kimi K2",
    "minicpm3": "MiniCPM3 4B",
    "youtu": "Youtu-LLM 2B",
    "persimmon": "Persimmon 8B",
    "llama4": "Llama 4 Scout and Maverick",
}
# fmt: on

_COMBINED = re.compile(r"\s*(?:critical|adaptive|global_topk|pyramid|chunked|merged)\((.+)\)\s*", re.IGNORECASE)


def _registered() -> Collection[str]:
    """Return the names of all registered policies if the library has been imported, by a program that registers its own."""
    presets = sys.modules.get("kvpatch.policies.presets")
    return () if presets is None else presets.list_policies()


def check_policy(name: str, options: dict[str, Any] | None = None) -> None:
    """Refuse a misspelt policy or option without importing torch; the library checks the rest.

    Raises:
        KVPatchError: no policy of this name, or it has none of the `options` of that name.
    """
    if (combined := _COMBINED.fullmatch(name)) is not None:
        return check_policy(combined[1])
    if (known_as := named(name, POLICIES)) is None:
        if name in _registered():
            return None
        raise KVPatchError(f"Unknown policy {name!r}.{suggest(name, POLICIES)} Known: {', '.join(POLICIES)}.")
    entry = POLICIES[known_as]
    known = entry.options | COMMON
    for option in options or ():
        if option not in known:
            raise KVPatchError(
                f"Policy {entry.name!r} has no option {option!r}.{suggest(option, known)} It has: {', '.join(known)}."
            )
    return None


def check_calibration(name: str, options: dict[str, Any]) -> None:
    """Refuse a policy that needs a calibration and got none. Raises KVPatchError."""
    while (combined := _COMBINED.fullmatch(name)) is not None:
        name = combined[1]
    known_as = named(name, POLICIES)
    if known_as is None or "calibration" not in POLICIES[known_as].options or options.get("calibration") is not None:
        return
    command, file = ("learn", "learned") if known_as == "learned" else ("calibrate", "calibration")
    raise KVPatchError(
        f"Policy {known_as!r} needs a calibration of this model: run `kvpatch {command} MODEL FILE --out {file}.safetensors` "
        f"once, and give -o calibration={file}.safetensors."
    )


def check_choice(option: str, value: object, known: tuple[object, ...]) -> None:
    """Raise KVPatchError unless the option is not given or its value is one of `known`."""
    if value is not None and value not in known:
        names = [str(one) for one in known]
        raise KVPatchError(f"--{option}={value!r} must be one of {', '.join(names)}.{suggest(value, names)}")
