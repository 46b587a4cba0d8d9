"""Attention code of its own with separate projections, and positions in the hidden states: GPT-Neo, XGLM, BERT's kin."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..errors import KVPatchError
from .adapter import IN_HIDDEN_STATES, Adapter, Core, Forward, project_heads, qualified_name, source_module
from .kinds import NO_DECODER, make_encoder_error, position_limit


class SeparateAdapter(Adapter):
    """Adapter of a family whose attention has q_proj, k_proj, v_proj and out_proj.

    Args:
        name: as listed by `list_architectures()`.
        attention: qualified name of the attention class, "package.module.ClassName".
        summary: one line for tables.
        learned: whether positions are a table with config.max_position_embeddings rows.
        one_mask: as in Adapter.
    """

    projection: str | None = "out_proj"
    why_not = IN_HIDDEN_STATES
    turns_back = True  # nothing is rotated

    def __init__(self, name: str, attention: str, summary: str, *, learned: bool = True, one_mask: bool = False) -> None:
        self.name, self.classes, self.summary, self.learned, self.one_mask = name, (attention,), summary, learned, one_mask

    def project(self, attn: Any, hidden_BQE: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
        return project_heads(hidden_BQE, attn.head_dim, attn.q_proj, attn.k_proj, attn.v_proj)

    def dropout(self, attn: Any) -> float:
        return attn.dropout

    def kv_shape(self, attn: Any) -> tuple[int, int]:
        return attn.num_heads, attn.head_dim

    def max_positions(self, config: Any) -> int | None:
        return position_limit(config) if self.learned else None

    def check(self, model: nn.Module) -> None:
        """Raise KVPatchError for `Target.find` if a model has cross-attention, or learned prompt keys outside the cache."""
        super().check(model)
        if getattr(model, "use_prompt", False):
            raise KVPatchError(
                f"This {type(model).__name__} has use_prompt=True: its prompts are keys and values outside the cache, which no "
                "budget counts."
            )


class GPTNeoAdapter(SeparateAdapter):
    """GPT-Neo: logits are not scaled; every other layer sees a window."""

    def output(self, attn: Any, y_BQE: Tensor) -> Tensor:
        return attn.resid_dropout(attn.out_proj(y_BQE))

    def scale(self, attn: Any) -> float:
        return 1.0

    def sliding(self, attn: Any) -> int | None:
        return attn.config.window_size if attn.attention_type == "local" else None

    def dropout(self, attn: Any) -> float:
        return attn.attn_dropout.p


class BertAdapter(SeparateAdapter):
    """BERT's kin as decoders; the output projection belongs to the module around attention."""

    projection = None

    def run(self, attn: Any, own: Forward, core: Core, hidden_BQE: Tensor, call: dict[str, Any]) -> Any:
        return core(*self.project(attn, hidden_BQE, **call)), None

    def project(self, attn: Any, hidden_BQE: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
        return project_heads(hidden_BQE, attn.attention_head_size, attn.query, attn.key, attn.value)

    def scale(self, attn: Any) -> float:
        return attn.attention_head_size**-0.5

    def dropout(self, attn: Any) -> float:
        return attn.dropout.p

    def kv_shape(self, attn: Any) -> tuple[int, int]:
        return attn.num_attention_heads, attn.attention_head_size

    def check(self, model: nn.Module) -> None:
        if any(not module.is_decoder for module in model.modules() if qualified_name(module) in self.classes):
            raise make_encoder_error(model, NO_DECODER)
        super().check(model)


class RoFormerAdapter(BertAdapter):
    """RoFormer: rotary positions, which its configuration may apply to values too."""

    turns_back = False
    why_not = Adapter.why_not

    def check(self, model: nn.Module) -> None:
        """Raise KVPatchError for `Target.find` if a model is no decoder, or transformers masks it as an encoder."""
        super().check(model)
        if not hasattr(source_module(model), "create_causal_mask"):
            raise KVPatchError(
                f"{type(model).__name__} of this transformers reads a text both ways even as a decoder: install a newer"
                " one, pip install -U 'transformers<6'."
            )

    def project(self, attn: Any, hidden_BQE: Tensor, sinusoidal_pos: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Project hidden states, for `run`, and rotate queries and keys; values too if the configuration says so."""
        q, k, v = super().project(attn, hidden_BQE)
        if attn.rotary_value:
            return attn.apply_rotary_position_embeddings(sinusoidal_pos, q, k, v)
        return *attn.apply_rotary_position_embeddings(sinusoidal_pos, q, k), v


def _name_class(home: str, name: str) -> str:
    return f"transformers.models.{home}.modeling_{home}.{name}"


# fmt: off
SEPARATE = (
    GPTNeoAdapter(
        "gpt_neo", _name_class("gpt_neo", "GPTNeoSelfAttention"), "GPT-Neo: every other layer slides, learned positions"
    ),
    SeparateAdapter("xglm", _name_class("xglm", "XGLMAttention"), "XGLM: sinusoidal positions", learned=False, one_mask=True),
    SeparateAdapter("mvp", _name_class("mvp", "MvpAttention"), "MVP, the decoder: learned positions", one_mask=True),
    SeparateAdapter("trocr", _name_class("trocr", "TrOCRAttention"), "TrOCR, the decoder: absolute positions", one_mask=True),
    BertAdapter("rembert", _name_class("rembert", "RemBertSelfAttention"), "RemBERT as a decoder: learned positions"),
    BertAdapter("megatron_bert", _name_class("megatron_bert", "MegatronBertSelfAttention"),
                "Megatron-BERT as a decoder: learned positions"),
    RoFormerAdapter("roformer", _name_class("roformer", "RoFormerSelfAttention"), "RoFormer as a decoder: rotary positions"),
)
# fmt: on
