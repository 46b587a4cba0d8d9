"""The parts of a model that a patch changes: found and checked before any change."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from ..arch import Adapter, adapter_of
from ..arch.adapter import dtype_of
from ..arch.automatic import AutomaticAdapter, automatic_adapters
from ..arch.kinds import count_query_heads, is_cross_attention
from ..arch.refusals import make_unknown_error, refuse_other_kinds, refuse_replaced, row_of
from ..arch.upstream import CACHE, CACHE_NAMES
from ..backends.entry_sizes import count_centre_bytes, count_entry_bytes
from ..backends.protocol import SPECIAL, Case
from ..errors import KVPatchError
from ..policies import Policy
from ..policies.measures import MEASURES, MORE
from ..policies.needs import Calibrated
from ..policies.served import FeatureSet, refuse
from ..policies.windows import Chunk
from ..storage.schema import LayerShape
from .accelerate import device_of
from .hybrid import Stack, find_state_modules, layer_numbers, stack_of, with_readers
from .identity import describe_weights
from .sharding import Parallel, check_layers, parallel_of
from .shell import makes_masks


def already_patched(module: nn.Module) -> KVPatchError:
    """Return the error that `Target.find` raises for a model that is patched already. module: one of its patched modules."""
    mark = vars(module)["_kvpatch"]
    return KVPatchError(
        f"This model is already patched with policy {mark.policy!r}: leave that block or call its Patch.remove() first. Patch "
        "once, at start, around all requests: another thread may hold that patch. If this model is a copy that was made "
        "inside a block, or its Patch is lost, kvpatch.unpatch(model) frees it."
    )


IMAGE_TOKENS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")  # names in configurations
SOUND_TOKENS = ("audio_token_id", "audio_token_index")
Attention = tuple[nn.Module, Adapter]
"""An attention module, and the adapter that runs its code."""


class Target:
    """The parts of a model that a patch changes.

    attentions: of the layers on the budget. readers: of layers without keys of their own, each with the index of the layer on
    the budget whose keys it uses. shell: a model around the decoder that makes its masks, or None. outer: the innermost model
    around the decoder that knows tokens of images or sounds, else the innermost one of another configuration, which may merge
    them too, else the innermost one, or None. given: the model that was patched.
    """

    def __init__(
        self,
        attentions: list[Attention],
        readers: list[tuple[int, Attention]],
        decoder: nn.Module,
        generators: list[nn.Module],
        parallel: Parallel,
        shell: nn.Module | None,
        outer: nn.Module | None,
        stack: Stack | None,
        given: nn.Module,
    ) -> None:
        """Hold the parts of a model that `find` has found; the class's docstring explains those that are its attributes.

        parallel: how processes share the heads. stack: numbers of a hybrid's layers, by what they keep, or None.
        """
        self.attentions, self.readers = attentions, readers
        self.decoder, self.generators, self.parallel = decoder, generators, parallel
        self.shell, self.outer, self.layer_numbers, self.given = shell, outer, stack, given

    @classmethod
    def find(cls, model: nn.Module, *, auto: bool = True) -> Target:
        """Find the attention modules, the decoder and the models with generate(), and check that they can be patched.

        `_find_target` calls it for `patched`, `check_model` and `calibrate` to look alone; it changes nothing. auto: whether a
        family without an adapter may get one that is derived from its code.

        Raises:
            KVPatchError: the model is no decoder, has no adapter, is patched already, or lacks layers on this process.
        """
        found = _find_attentions(model, auto)
        needed = {id(module) for module, _ in found}
        holders = [m for m in model.modules() if isinstance(m, PreTrainedModel) and needed <= {id(one) for one in m.modules()}]
        decoder = holders[-1] if holders else model  # the innermost model around all attention modules
        _check_code(decoder, found)
        generators: list[nn.Module] = [m for m in model.modules() if isinstance(m, GenerationMixin)]
        numbers = layer_numbers(decoder, [module for module, _ in found])
        found.sort(key=lambda pair: numbers[pair[0]])
        stack = with_readers(stack_of(decoder), numbers)
        with_keys, readers = _divide_layers(decoder, found, numbers, stack)
        shell = next((holder for holder in holders[:-1] if makes_masks(holder)), None)
        around = holders[-2::-1]  # models around the decoder, the innermost first
        merging = [holder for holder in around if _read_token_ids(holder, IMAGE_TOKENS + SOUND_TOKENS)]
        outer = next(iter([*merging, *(holder for holder in around if holder.config is not decoder.config), *around]), None)
        return cls(with_keys, readers, decoder, generators, parallel_of(model, found), shell, outer, stack, model)

    def modules(self) -> Iterator[tuple[int, bool, Attention]]:
        """Yield for each attention module: index of the layer whose keys it uses; True if it has none; (module, adapter)."""
        yield from ((layer, False, pair) for layer, pair in enumerate(self.attentions))
        yield from ((layer, True, pair) for layer, pair in self.readers)

    def find_caller(self) -> Any:
        """Return the model whose generate() a chat calls, or None; PEFT's wrapper, if any, since adapters are told the text."""
        wrapped = self.generators and hasattr(self.given, "peft_config")
        return self.given if wrapped else next(iter(self.generators), None)

    def bounds(self) -> tuple[int | None, ...]:
        """Return each layer's window, held in place of a budget; None for others, and for all if every layer has a window."""
        windows = tuple(adapter.sliding(module) for module, adapter in self.attentions)
        return windows if None in windows else (None,) * len(windows)

    def image_tokens(self) -> tuple[int, ...]:
        """Return the token ids that stand for an image or a video in a prompt; () for a model that reads text alone."""
        return () if self.outer is None else _read_token_ids(self.outer, IMAGE_TOKENS)

    def list_placeholders(self) -> dict[int, str]:
        """Return what each id that is no text stands for in a prompt: "an image" (or a video) or "a sound"."""
        sounds = () if self.outer is None else _read_token_ids(self.outer, SOUND_TOKENS)
        return dict.fromkeys(self.image_tokens(), "an image") | dict.fromkeys(sounds, "a sound")

    def check_projection(self, policy: Policy) -> None:
        """Raise KVPatchError, for `settings_of`, if a layer's output projection is no plain linear one, as the policy needs."""
        for module, adapter in self.attentions:
            automatic = isinstance(adapter, AutomaticAdapter)
            obstacle = None if adapter.projects else "more than a projection"
            row = row_of(module) if automatic else None  # the code that registers the family, for the error
            refuse("output projection", FeatureSet(policy, adapter=adapter.name, row=row, obstacle=obstacle))

    def check_rotations(self, policy: Policy, renumbered: bool = False) -> None:
        """Raise KVPatchError if an adapter cannot do with positions what is asked: renumber them, or undo their rotation.

        `settings_of` calls it as a model is patched. renumbered: positions="renumbered"; else the policy may ask to undo
        rotations, by its `lookahead` (scores are computed for queries at later positions).
        """
        if not renumbered and policy.needs.lookahead is None:
            return
        for _, adapter in self.attentions:
            obstacle = adapter.obstacle(self.decoder, renumbered)
            asked = FeatureSet(policy, renumbered=renumbered, adapter=adapter.name, obstacle=obstacle)
            refuse("renumbered" if renumbered else "rotations undone", asked)

    def find_alibi(self) -> str:
        """Return the name of an adapter that finds ALiBi in its module, "" if none does; for the errors of `settings_of`."""
        return next((adapter.name for module, adapter in self.attentions if adapter.slopes(module) is not None), "")

    def check_calibration(self, policy: Policy) -> None:
        """Raise KVPatchError unless the calibration that a policy needs is there, is of this model and has all layers.

        `settings_of` calls it as a model is patched. A calibration is a file of numbers measured or learned on the model
        (kvpatch calibrate). F: the numbers of a value, and MORE features of its token.
        """
        calibrated = policy.needs.find(Calibrated)
        if calibrated is None:
            return
        calibration = calibrated.calibration
        kinds = {MEASURES[name].kind for name in calibrated.names}
        command = "kvpatch learn" if "scores" in kinds else "kvpatch calibrate"
        if "outputs" in kinds:  # measured through the output projection
            self.check_projection(policy)
        if "turned" in kinds:  # measured of queries without their rotation
            self.check_rotations(policy)
            for module, adapter in self.attentions:
                if type(adapter).rotary_table is Adapter.rotary_table or adapter.slopes(module) is not None:
                    raise KVPatchError(
                        f"policy {policy.name!r} is about positions that are rotations, and {adapter.name} has none here: use "
                        "another policy, such as 'q_filter' or 'key_diff'."
                    )
        if calibration is None:
            raise KVPatchError(
                f"policy {policy.name!r} needs a calibration of this model: run `{command} NAME FILE --out "
                "calibration.safetensors` once, and pass calibration=kvpatch.load_calibration('calibration.safetensors')."
            )
        model, here = calibration.model, self.identity()
        for name in dict.fromkeys((*model, *here)):
            if model.get(name) != here.get(name):
                raise KVPatchError(
                    f"calibration= is of another model: {name} is {model.get(name)!r:.60} there and {here.get(name)!r} here. "
                    f"Run `{command}` on this model, in this dtype."
                )
        for layer, (bound, shape) in enumerate(zip(self.bounds(), self.shapes(), strict=True)):
            sizes = {"H": shape.heads * self.parallel.size, "G": shape.group, "D": shape.key, "F": shape.value + MORE}
            for name in calibrated.names if bound is None else ():  # layers with a sliding window are not calibrated
                tensor = calibration.layers.get(layer, {}).get(name)
                found = [] if tensor is None else list(tensor.shape)
                # axes that no configuration tells are as the file has them: load_calibration() checked that they agree
                wanted = [sizes.get(axis) or size for axis, size in zip(MEASURES[name].shape, found, strict=False)]
                if tensor is None or found != wanted:
                    raise KVPatchError(
                        f"calibration= has {found or 'nothing'} for {name!r} of layer {layer}"
                        f"{f' where {wanted} belongs' if found else ''}: calibrate this model anew, by `{command}`."
                    )

    def identity(self) -> dict[str, Any]:
        """Describe the model for files of caches and calibrations, which must agree: shapes, dtype, weights, adapters."""
        return {**self.describe_class(), "dtype": str(dtype_of(self.decoder)), **describe_weights(self.decoder)}

    def describe_class(self) -> dict[str, Any]:
        """Describe the model by class and shapes, not by its weights, which training changes.

        `Patch.record` notes it in a record of evictions, and `Patch.replay` compares it; `identity` adds to it.
        """
        module, adapter = self.attentions[0]
        heads, head_dim = adapter.kv_shape(module)
        part = {"part": str(self.parallel)} if self.parallel.size > 1 else {}  # the heads of this process
        shape = {"layers": len(self.attentions), "KV heads": heads, "head size": head_dim}
        return {"class": type(self.decoder).__name__, **part, **shape}

    def shapes(self) -> list[LayerShape]:
        """Return the shape of each layer's cache, with the heads of this process, to check settings, caches and files by."""
        config, shapes = getattr(self.decoder, "config", None), []
        for module, adapter in self.attentions:
            H, D = adapter.kv_shape(module)
            queries = count_query_heads(module, config)
            group = None if queries is None else queries // H
            here = H // self.parallel.size  # heads on this process
            value, latent = adapter.value_size(module), adapter.latent(module)
            shapes.append(LayerShape(here, D, value, group, adapter.sliding(module), latent))
        return shapes

    def list_cases(self, renumbered: bool, policy: Policy) -> Iterator[Case]:
        """Yield a Case (device, dtype, head size, features) for each layer, by which backends say if they support it.

        `settings_of` calls it as a model is patched.
        """
        dtype = dtype_of(self.decoder)
        for module, adapter in self.attentions:
            head_dim, value_dim = adapter.kv_shape(module)[1], adapter.value_size(module)
            alibi, window = adapter.slopes(module) is not None, adapter.sliding(module) is not None
            chunked = isinstance(adapter.sliding(module), Chunk)
            special = tuple(  # variants of attention that few kernels compute: the adapter has a method of each name
                name for name in SPECIAL if (chunked if name == "chunk" else getattr(adapter, name)(module) is not None)
            )
            device = device_of(module, self.decoder).type
            yield Case(  # group is left at 1: any
                device, dtype, head_dim, alibi=alibi, window=window, fresh=policy.needs.fresh, renumbered=renumbered,
                special=special, value_dim=value_dim,
            )  # fmt: skip

    def list_mixers(self) -> list[nn.Module]:
        """Return the attention modules and a hybrid's other layers that mix tokens; `kvpatch check` measures rounding there."""
        attentions = [module for _, _, (module, _) in self.modules()]
        others = {} if self.layer_numbers is None else find_state_modules(self.decoder, self.layer_numbers, attentions)
        return [*attentions, *others.values()]

    def counts_columns(self) -> bool:
        """Tell `settings_of` if the model counts distances in columns, padding included; policy "full" then does the same."""
        return any(
            not adapter.distances_from_mask and (adapter.sliding(module) is not None or adapter.slopes(module) is not None)
            for module, adapter in self.attentions
        )

    def why_positions_fixed(self) -> str | None:
        """Return why the model cannot be told each row's positions: it counts columns of the batch itself. None if it can.

        `Patch._make_state` reads it once. Joined caches, replays and packed requests need rows at different places, and are
        refused for this reason.
        """
        takes = inspect.signature(type(self.decoder).forward).parameters
        if "position_ids" not in takes and any(adapter.slopes(module) is None for module, adapter in self.attentions):
            return "it takes no position_ids"
        if any(adapter.counts_columns(module) for module, adapter in self.attentions):
            return "its attention counts columns, whatever position_ids say"
        return None

    def names(self) -> tuple[str, ...]:
        """Return the names of the attention modules, in the order of their layers."""
        names = {module: name for name, module in self.decoder.named_modules()}
        return tuple(names[module] for module, _ in self.attentions)

    def devices(self) -> list[torch.device]:
        """Return the device of each layer's cache: that on which the layer's attention module computes."""
        return [device_of(module, self.decoder) for module, _ in self.attentions]

    def state_devices(self) -> dict[int, torch.device]:
        """Return the device of each layer of a hybrid that has a state, by layer number; `load_cache` puts states there."""
        attentions = [module for module, _ in self.attentions]
        found = {} if self.layer_numbers is None else find_state_modules(self.decoder, self.layer_numbers, attentions)
        return {number: device_of(module, self.decoder) for number, module in found.items()}

    def bytes_per_token(self, bits: int, dtype: torch.dtype) -> int:
        """Return the bytes of a token in a layer, over all processes: `Budget.parse` divides budgets in bytes by this mean."""
        size, shapes = dtype.itemsize, self.shapes()
        total = sum(each.heads * count_entry_bytes(bits, each.key, each.value, size, each.latent) for each in shapes)
        return math.ceil(total * self.parallel.size / len(shapes))

    def bytes_of_centres(self, bits: int, dtype: torch.dtype) -> int:
        """Return the bytes of the centres that a layer's keys are rounded around, over all processes: the mean of layers."""
        shapes = self.shapes()
        total = sum(each.heads * count_centre_bytes(bits, each.key, dtype.itemsize) for each in shapes)
        return math.ceil(total * self.parallel.size / len(shapes))


def _check_decoder(decoder: nn.Module) -> None:
    """Raise KVPatchError, for `Target.find`, if a decoder's forward does not take the arguments that the patch passes."""
    takes = inspect.signature(type(decoder).forward).parameters
    named = next((name for name in CACHE_NAMES if name in takes), CACHE)
    missing = [name for name in (named, "attention_mask", "use_cache") if name not in takes]
    if missing and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        raise KVPatchError(
            f"The forward of {type(decoder).__name__} takes no {', '.join(missing)}: kvpatch hands the decoder its cache as "
            f"{CACHE}, a mask as attention_mask, and use_cache; add them, and hand the cache and the mask on to the "
            "attention modules."
        )


def _find_attentions(model: nn.Module, auto: bool) -> list[Attention]:
    """Return a model's attention modules, each with the adapter that runs its code, for `Target.find`.

    auto: whether a family without an adapter may get one that is derived from its code. Raises KVPatchError if there is none,
    or if the model is patched already.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise KVPatchError(f"{type(model).__name__} is an encoder-decoder; kvpatch serves decoder-only models.")
    known = ((module, adapter_of(module)) for name, module in model.named_modules() if not is_cross_attention(name, module))
    found = [(module, adapter) for module, adapter in known if adapter is not None]
    if not found:  # no attention module is of a registered family
        refuse_other_kinds(model)
        found = [*automatic_adapters(model)] if auto else []
    if not found:
        raise make_unknown_error(model)
    for module in model.modules():
        if "_kvpatch" in vars(module):
            raise already_patched(module)
    _refuse_prefix_tuning(model)
    return found


def _check_code(decoder: nn.Module, found: list[Attention]) -> None:
    """Raise KVPatchError, for `Target.find`, unless the adapters of a decoder's attentions can run its code."""
    if next(decoder.parameters(), None) is None:
        raise KVPatchError(
            f"{type(decoder).__name__} has no parameters of its own: FullyShardedDataParallel keeps them in one flat "
            "tensor. Patch the model before it is wrapped, wrap it with use_orig_params=True, or use fully_shard()."
        )
    for adapter in {id(adapter): adapter for _, adapter in found}.values():
        adapter.check(decoder)  # raises for variants of the family that it cannot run
    for module, adapter in found:
        refuse_replaced(module, adapter)  # raises if another library has put its code in place of the family's
    _check_decoder(decoder)


def _divide_layers(
    decoder: nn.Module, found: list[Attention], numbers: dict[nn.Module, int], stack: Stack | None
) -> tuple[list[Attention], list[tuple[int, Attention]]]:
    """Divide attentions, for `Target.find`, into those with keys of their own and those that use another layer's.

    The latter come with the index of that layer in the cache. numbers: of the layer of each module, by which `found` is sorted.
    """
    reads = dict(stack.readers) if stack else {}
    with_keys = [pair for pair in found if numbers[pair[0]] not in reads]
    layers = {module: numbers[module] for module, _ in with_keys}
    used = (layers[module] for _, module in decoder.named_modules(remove_duplicate=False) if module in layers)
    check_layers(sorted(used), stack.attention if stack else None)  # a model may use a module as two layers
    indices = {numbers[module]: index for index, (module, _) in enumerate(with_keys)}
    return with_keys, [(indices[reads[numbers[pair[0]]]], pair) for pair in found if numbers[pair[0]] in reads]


def _read_token_ids(model: Any, names: tuple[str, ...]) -> tuple[int, ...]:
    ids = (getattr(model.config, name, None) for name in names)
    return tuple(dict.fromkeys(one for one in ids if one is not None))


def _refuse_prefix_tuning(model: nn.Module) -> None:
    """Raise KVPatchError, for `Target.find`, if a model has a PEFT adapter with keys and values of its own."""
    for config in getattr(model, "peft_config", {}).values() if hasattr(model, "peft_config") else ():
        kind = str(getattr(config, "peft_type", ""))
        if "PREFIX" in kind or "CARTRIDGE" in kind:
            name = "cartridges" if "CARTRIDGE" in kind else "prefix tuning"
            raise KVPatchError(
                f"PEFT's {name} brings a KV cache of its own, which cannot be put on a budget; LoRA and other adapters that "
                "change weights work, and so does prompt tuning."
            )
