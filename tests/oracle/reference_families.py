"""Every family of transformers that routes attention through its attention interface, as the oracle needs it.

The family's own modules run, all of them, in float64; only what they call for attention is ours. Inside such a model's
attention module the order is: project, apply positions, norms (whatever the family does), then one call of an attention
function that is looked up by name. Here that function first hands over what it was called with, and in a second run of
the same module gives back the attention's output, so that what follows (the output projection) is the module's own too.

A module of latent attention hands its cache a latent and a rotary key per token, for all heads. There a token's key is these
two, its value is the latent, and each query head reads them through its own rows of the module's `kv_b_proj`.

Shapes: T tokens of one row, E model width, H query heads, K KV heads, D head size of keys and V of values; the models' own
batch axis is 1.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from tests.oracle.reference_models import FAMILIES, Decoder

NAME = "reference_capture"
PROJECTIONS = ("o_proj", "dense", "out_proj", "c_proj")
NOT_LINEAR = ("attn_sub_norm",)  # between the heads and the output projection
# (module, q [1, H, T, D], k [1, K, T, D], v [1, K, T, V], **what else it was given) -> y [1, T, H, V]
Answer = Callable[..., Tensor]

_answer: list[Answer] = []


def _attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any) -> tuple[Tensor, None]:
    return _answer[-1](module, q, k, v, **given), None


AttentionInterface.register(NAME, _attention)


def nothing(module: Any, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """An answer for runs in which attention does not matter."""
    return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])


class Before:
    """In place of a module's cache: what it asks for is how many tokens came before."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_seq_length(self, layer_idx: int) -> int:
        return self.count

    def update(self, k: Tensor, v: Tensor, layer_idx: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return k, v


def same_kind(output: Any, x: Tensor) -> Any:
    """x in the place of the hidden states that a layer returned."""
    return (x, *output[1:]) if isinstance(output, tuple) else x


class Given:
    """A cache that keeps nothing: it notes what a module of latent attention gives to it."""

    def update(self, latent: Tensor, rotary: Tensor, *rest: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.latent, self.rotary = latent, rotary
        return latent, rotary


class Routed(Decoder):
    """A family that calls the attention interface."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        modules = dict(model.named_modules())
        self.renumbers = any(name.endswith("rotary_emb") for name in modules)
        found = [name for name, module in modules.items() if type(module).__name__.endswith("Attention")]
        found = sorted(found, key=lambda name: modules[name].layer_idx)
        self.attentions: list[Any] = [modules[name] for name in found]
        self.stack: list[Any] = [modules[name.rpartition(".")[0]] for name in found]
        self.layers = len(found)
        self.calls: list[Any] = [None] * self.layers  # how the model calls each layer
        self.inner: list[Any] = [None] * self.layers  # how the layer calls its attention
        probes: list[Any] = [None] * self.layers

        def look(module: Any, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
            probes[module.layer_idx] = (q.shape[1], k.shape[1], v.shape[3], given)
            self.D = q.shape[3]
            return nothing(module, q, k, v)

        with torch.no_grad():
            self.run(look, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        self.query_heads, self.kv_heads, self.V, _ = probes[0]
        self.latent = hasattr(self.attentions[0], "kv_b_proj")
        if self.latent:
            sizes = self.attentions[0].config
            self.kv_heads, self.V, self.D = 1, sizes.kv_lora_rank, sizes.kv_lora_rank + sizes.qk_rope_head_dim
        self.given = [probe[3] for probe in probes]

    def run(self, answer: Answer, ids_T: Tensor, positions_T: Tensor) -> Any:
        """The model's own forward."""
        with self.answering(answer):
            return self.model(ids_T[None], position_ids=positions_T[None], use_cache=False)

    @contextmanager
    def answering(self, answer: Answer) -> Iterator[None]:
        configs = {id(module.config): module.config for module in self.attentions}.values()
        before = [config._attn_implementation for config in configs]
        _answer.append(answer)
        for config in configs:
            config._attn_implementation = NAME
        try:
            yield
        finally:
            _answer.pop()
            for config, name in zip(configs, before, strict=True):
                config._attn_implementation = name

    # What the module hands to its attention function says how it attends.

    def scale(self, l: int) -> float:
        return self.given[l]["scaling"]

    def softcap(self, l: int) -> float | None:
        return self.given[l].get("softcap")

    def sink(self, l: int, h: int) -> Tensor | None:
        sinks = self.given[l].get("s_aux")
        return None if sinks is None else sinks[h]

    def reach(self, l: int) -> int | None:
        """As the configuration says, for some families slide by their mask alone."""
        config = self.attentions[l].config
        kinds = getattr(config, "layer_types", None)
        if self.chunked(l):
            return config.attention_chunk_size
        if kinds is not None and kinds[l] != "sliding_attention":
            return None
        return getattr(config, "sliding_window", None)

    def chunked(self, l: int) -> bool:
        kinds = getattr(self.attentions[l].config, "layer_types", None)
        return kinds is not None and kinds[l] == "chunked_attention"

    # Everything but attention

    def embed(self, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """The hidden states that reach the first layer. How each layer is called is noted on the way."""
        first: list[Tensor] = []

        def note(l: int, layer: Any, args: Any, kwargs: Any) -> None:
            x, rest = (args[0], args[1:]) if args else (kwargs["hidden_states"], ())
            self.calls[l] = rest, {name: value for name, value in kwargs.items() if name != "hidden_states"}
            first.append(x)

        def hook(l: int) -> Callable[..., None]:
            return lambda *call: note(l, *call)

        handles = [layer.register_forward_pre_hook(hook(l), with_kwargs=True) for l, layer in enumerate(self.stack)]
        try:
            self.run(nothing, ids_T, positions_T)
        finally:
            for handle in handles:
                handle.remove()
        self.positions = positions_T
        return first[0][0]

    def block(self, l: int, x_TE: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        """The layer's own forward; its attention module is the oracle's meanwhile."""

        def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            h, rest = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
            self.inner[l] = rest, kwargs
            return attention(h[0])[None], None

        rest, kwargs = self.calls[l]
        self.attentions[l].forward = forward
        try:
            out = self.stack[l](x_TE[None], *rest, **kwargs)
        finally:
            del self.attentions[l].forward
        return (out[0] if isinstance(out, tuple) else out)[0]

    def attend(self, l: int, h_TE: Tensor, answer: Answer, cache: Any = None) -> Tensor:
        """The attention module's own forward."""
        rest, kwargs = self.inner[l]
        module = self.attentions[l]
        if getattr(module, "attn_temperature_tuning", False):
            cache = Before(int(self.positions[0]))
        takes = inspect.signature(type(module).forward).parameters
        name = "cache" if "cache" in takes else "past_key_values"  # since transformers 5.24, and before
        kwargs = {**kwargs, name: cache} if cache is not None else kwargs
        with self.answering(answer):
            return type(module).forward(module, h_TE[None], *rest, **kwargs)[0][0]

    def project(self, l: int, h_TE: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        taken: list[Tensor] = []

        def take(module: Any, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
            taken.extend((q[0], k[0], v[0]))
            return nothing(module, q, k, v)

        given = Given()
        self.attend(l, h_TE, take, given if self.latent else None)
        self.h_TE = h_TE
        q, k, v = taken
        if self.latent:
            size = q.shape[-1] - given.rotary.shape[-1]  # of a query head's channels without positions
            heads = [torch.cat([q[h, :, :size] @ self.reads(l, h)[:size], q[h, :, size:]], -1) for h in range(len(q))]
            q, k, v = torch.stack(heads), torch.cat([given.latent, given.rotary], -1)[0], given.latent[0]
        return q, k, v

    def reads(self, l: int, h: int) -> Tensor:
        """The rows of query head h in the projection from latents: those of its key, then those of its value."""
        return self.attentions[l].kv_b_proj.weight.chunk(self.query_heads)[h]

    def value_rows(self, l: int, h: int) -> Tensor:
        return self.reads(l, h)[self.attentions[l].qk_nope_head_dim :].T

    def tables(self, l: int, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        module = next(module for name, module in self.model.named_modules() if name.endswith("rotary_emb"))
        cos, sin = module(self.model.get_input_embeddings().weight, positions_T[None])
        return cos[0], sin[0]

    def rotate(self, x_HTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """What the family's own function makes of it; channels beyond its tables stay."""
        size = cos_TD.shape[-1]
        part, own = x_HTD[..., :size], sys.modules[type(self.attentions[0]).__module__].apply_rotary_pos_emb
        heads = part.reshape(1, -1, *part.shape[-2:])  # keys of one head have no axis for it
        turned = own(heads, heads, cos_TD[None], sin_TD[None])[0]
        return torch.cat([turned.view_as(part), x_HTD[..., size:]], -1)

    def rotations(self, l: int, count: int) -> Tensor:
        unit = torch.eye(self.D, dtype=torch.float64)[:, None].expand(-1, count, -1)
        if not any(name.endswith("rotary_emb") for name, _ in self.model.named_modules()):
            return unit.transpose(0, 1)  # learned positions: nothing is rotated
        cos, sin = self.tables(l, torch.arange(count))
        return self.rotate(unit, cos, sin).transpose(0, 1)

    def unplaced(self, l: int, h_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys with their rotations undone, one by one."""
        q, k, v = self.project(l, h_TE, self.positions)
        turned = self.rotations(l, int(self.positions.max()) + 1)[self.positions]
        q, k = (torch.linalg.solve(turned.transpose(1, 2)[None], x[..., None])[..., 0] for x in (q, k))
        return q, k, v

    def output(self, l: int, y_TE: Tensor) -> Tensor:
        y_THV = y_TE.unflatten(-1, (-1, self.V))
        if self.latent:
            y_THV = torch.stack([y_THV[:, h] @ self.value_rows(l, h) for h in range(self.query_heads)], 1)
        return self.attend(l, self.h_TE, lambda *call, **given: y_THV[None])

    def output_rows(self, l: int, h: int) -> Tensor:
        module = self.attentions[l]
        if any(hasattr(module, name) for name in NOT_LINEAR):
            raise ValueError("a norm comes before the output projection: no rows of it belong to a head")
        projection = next(getattr(module, name) for name in PROJECTIONS if hasattr(module, name))
        if self.latent:
            rows = self.value_rows(l, h)
            V = rows.shape[1]
            return rows @ projection.weight[:, h * V : (h + 1) * V].T
        return projection.weight[:, h * self.V : (h + 1) * self.V].T

    def logits(self, x_TE: Tensor) -> Tensor:
        """What the model's own forward makes of the last layer's output."""

        def hook(layer: Any, args: Any, output: Any) -> Any:
            return same_kind(output, x_TE[None])

        zeros_T = torch.zeros(len(x_TE), dtype=torch.int64)  # as many tokens; which and where does not matter any more
        handle = self.stack[-1].register_forward_hook(hook)
        try:
            return self.run(nothing, zeros_T, zeros_T).logits[0]
        finally:
            handle.remove()


def learn(*classes: type[nn.Module]) -> None:
    """Let `reference.run` take models of these classes."""
    FAMILIES.update({cls.__name__: Routed for cls in classes})
