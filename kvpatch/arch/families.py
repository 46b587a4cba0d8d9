"""The table of model families that InterfaceAdapter serves, one row each."""

from __future__ import annotations

from typing import Any

from .interface import InterfaceAdapter, RotaryInterfaceAdapter
from .llama4 import Llama4Adapter


def _make_row(name: str, stem: str, summary: str, *, rotary: bool = False, **where: Any) -> InterfaceAdapter:
    """Build the adapter of a family. stem: its attention class's name without "Attention"; rotary: it has Llama's positions."""
    kind = RotaryInterfaceAdapter if rotary else InterfaceAdapter
    return kind(name, f"transformers.models.{name}.modeling_{name}.{stem}Attention", summary, **where)


# fmt: off
FAMILIES = (
    _make_row("qwen2",       "Qwen2",       "Qwen 2 and 2.5: rotary positions, GQA", rotary=True),
    _make_row("qwen3",       "Qwen3",       "Qwen 3: query and key norms", rotary=True),
    _make_row("qwen2_moe",   "Qwen2Moe",    "Qwen 1.5 and 2, mixture of experts", rotary=True),
    _make_row("qwen3_moe",   "Qwen3Moe",    "Qwen 3, mixture of experts", rotary=True, slides=True),
    _make_row("phi",         "Phi",         "Phi 1 and 2: partial rotary positions", rotary=True, projection="dense"),
    _make_row("phi3",        "Phi3",        "Phi 3 and 4: fused projection, LongRoPE", rotary=True, slides=True),
    _make_row("gemma",       "Gemma",       "Gemma: wide heads", rotary=True),
    _make_row("gemma2",      "Gemma2",      "Gemma 2: capped logits, every other layer slides", rotary=True,
         softcap="attn_logit_softcapping"),
    _make_row("gemma3",      "Gemma3",      "Gemma 3, text: five of six layers slide"),
    _make_row("gpt_neox",    "GPTNeoX",     "GPT-NeoX and Pythia: partial rotary positions", rotary=True, projection="dense"),
    _make_row("gpt_bigcode", "GPTBigCode",  "StarCoder and SantaCoder: MQA, learned positions", projection="c_proj",
         dropout="config.attn_pdrop", learned=True),
    _make_row("opt",         "OPT",         "OPT: learned positions", projection="out_proj", scale=1.0, learned=True,
         positions_from_mask=True),
    _make_row("starcoder2",  "Starcoder2",  "StarCoder 2: sliding window", rotary=True, slides=True),
    _make_row("olmo",        "Olmo",        "OLMo: clipped projections", rotary=True),
    _make_row("olmo2",       "Olmo2",       "OLMo 2: norms over all heads", rotary=True),
    _make_row("olmo3",       "Olmo3",       "OLMo 3: three of four layers slide"),
    _make_row("olmoe",       "Olmoe",       "OLMoE: mixture of experts", rotary=True),
    _make_row("mixtral",     "Mixtral",     "Mixtral: mixture of experts", rotary=True, slides=True),
    _make_row("ministral",   "Ministral",   "Ministral: layers that slide", rotary=True),
    _make_row("granite",     "Granite",     "Granite 3: multipliers", rotary=True),
    _make_row("granitemoe",  "GraniteMoe",  "Granite 3, mixture of experts", rotary=True),
    _make_row("cohere",      "Cohere",      "Command R: parallel blocks, query and key norms"),
    _make_row("cohere2",     "Cohere2",     "Command A and R7B: three of four layers slide, the others have no positions"),
    _make_row("gpt_oss",     "GptOss",      "gpt-oss: attention sinks, every other layer slides", sinks="sinks"),
    _make_row("stablelm",    "StableLm",    "StableLM: partial rotary positions", rotary=True),
    _make_row("glm",         "Glm",         "GLM 4, first models: partial interleaved rotary positions"),
    _make_row("glm4",        "Glm4",        "GLM 4: sandwich norms"),
    _make_row("smollm3",     "SmolLM3",     "SmolLM 3: one of four layers has no positions"),
    _make_row("nemotron",    "Nemotron",    "Nemotron: partial rotary positions", rotary=True),
    _make_row("arcee",       "Arcee",       "Arcee: rotary positions, GQA", rotary=True),
    _make_row("helium",      "Helium",      "Helium: interleaved rotary positions"),
    _make_row("seed_oss",    "SeedOss",     "Seed-OSS: rotary positions, GQA", rotary=True),
    _make_row("ernie4_5",    "Ernie4_5",    "ERNIE 4.5: interleaved rotary positions"),
    _make_row("exaone4",     "Exaone4",     "EXAONE 4: three of four layers slide"),
    _make_row("hunyuan_v1_dense", "HunYuanDenseV1", "Hunyuan: norms after the rotary positions"),
    _make_row("apertus",     "Apertus",     "Apertus: query and key norms", rotary=True),
    _make_row("bitnet",      "BitNet",      "BitNet: a norm before the output projection", rotary=True, projection=None),
    _make_row("deepseek_v2", "DeepseekV2",  "DeepSeek V2: latent attention, mixture of experts"),
    _make_row("deepseek_v3", "DeepseekV3",  "DeepSeek V3 and R1, Kimi K2: latent attention, mixture of experts"),
    _make_row("minicpm3",    "MiniCPM3",    "MiniCPM 3: latent attention"),
    _make_row("youtu",       "Youtu",       "Youtu: latent attention"),
    _make_row("persimmon",   "Persimmon",   "Persimmon: partial rotary positions, query and key norms", rotary=True,
         projection="dense"),
    Llama4Adapter("llama4", "transformers.models.llama4.modeling_llama4.Llama4TextAttention",
         "Llama 4: three of four layers attend in chunks, the others have no positions"),
)
# fmt: on

LONGCAT = InterfaceAdapter(  # two modules of attention to a layer, whose class is not named so
    "longcat_flash",
    "transformers.models.longcat_flash.modeling_longcat_flash.LongcatFlashMLA",
    "LongCat Flash: latent attention, mixture of experts",
)
