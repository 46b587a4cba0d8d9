"""Types of models that kvpatch refuses, by what they have; tests/planning compares it with docs/architectures.md."""

from __future__ import annotations

from ..errors import KVPatchError
from .configuration import Configuration

REFUSED: dict[str, tuple[str, ...]] = {
    "linear layers whose states are in a cache of the model's own": ("minimax",),
    "a recurrent state and no keys and values": ("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"),
    "no cache of keys and values": ("openai-gpt",),
    "attention to an encoder": (
        "blt", "mllama", "blip", "florence2", "idefics", "pix2struct", "pp_formulanet", "t5gemma2", "udop",
        "vision-encoder-decoder",
    ),
    "attention in both directions": (
        "bigbird_pegasus", "xlm", "paligemma", "pi0",
    ),
    "layers that attend by an index or in another way of their own": (
        "axk2", "deepseek_v32", "deepseek_v4", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4", "inkling2_loop_text",
        "inkling2_text", "qwen4_exp", "qwen4_exp_text", "glm5_next", "hy_v4_vl", "inkling2", "inkling2_loop", "mistral_large4",
        "unlimited_ocr",
    ),
    "several sets of keys per layer": ("diffllama", "hrm_text"),
    "no twin to check an automatic row on: a row has to be registered": (
        "dory", "gemma4_unified_assistant", "phi4_multimodal", "kosmos-2", "kosmos-2.5", "qwen3_omni_moe_thinker", "step3p7",
    ),
    "an automatic row that did not pass the checks": ("doge", "inkling_text", "recurrent_gemma", "zaya", "inkling_mm_model"),
    "attention code of its own: an adapter has to be written": (
        "big_bird", "cpmant", "git", "prophetnet", "reformer", "xlnet",
    ),
}  # fmt: skip


def refuse_kind(config: Configuration) -> None:
    """Raise KVPatchError, for `plan`, for a type of model that `patched` refuses: one in REFUSED, or an encoder-decoder."""
    for reason, kinds in REFUSED.items():
        for kind in (config.outer, config.kind):  # of the whole model, and of its part that writes text
            if kind in kinds:
                raise KVPatchError(
                    f"kvpatch refuses {config.name}: a model of type {kind} has {reason}. Name a decoder that `kvpatch "
                    "architectures` lists."
                )
    if config.values.get("is_encoder_decoder"):
        raise KVPatchError(
            f"kvpatch refuses {config.name}: a model of type {config.kind} is an encoder-decoder. Name a decoder, as "
            "`kvpatch architectures` lists them."
        )
