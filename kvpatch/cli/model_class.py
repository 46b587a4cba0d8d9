"""The class of transformers that loads a model, and the refusal of what cannot be served, from the configuration alone."""

from __future__ import annotations

from typing import Any

from ..errors import KVPatchError


def find_auto_class(name: str, config: Any, remote_code: bool) -> Any:
    """Return the Auto class that loads this configuration: for causal language models, else for models that read images too.

    `load_model` calls it before weights are read.

    Args:
        name: of the model, for errors.
        config: the model's configuration.
        remote_code: whether Python code that comes with the model may run.

    Raises:
        KVPatchError: the model is an encoder-decoder, or `patched` would refuse it.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto

    mapped, kind = getattr(config, "auto_map", None) or {}, config.model_type  # classes of code that comes with the model
    causal, image = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    for auto, model_types in ((AutoModelForCausalLM, causal), (AutoModelForImageTextToText, image)):
        if kind in model_types or auto.__name__ in mapped:
            if not (remote_code and auto.__name__ in mapped):  # else its class is its own code, which only loading runs
                _check_served(auto, config)
            return auto
    if getattr(config, "is_encoder_decoder", False):
        raise KVPatchError(f"The model {name} is of type {kind}, an encoder-decoder: kvpatch serves decoder-only models.")
    return AutoModelForCausalLM  # whose error names the types that it knows


def _check_served(auto: Any, config: Any) -> None:
    """Raise KVPatchError if `patched` would refuse such a model; `find_auto_class` calls it before weights are loaded.

    Builds the model without weights, on the meta device. A refusal that depends on weights is left for loading, and so is any
    other error.
    """
    import torch

    from ..arch.automatic import NeedsWeights
    from ..hooks.target import Target

    try:
        with torch.device("meta"):
            model = auto.from_config(config, trust_remote_code=False)
        Target.find(model)  # raises as `patched` does
    except KVPatchError as error:
        if not isinstance(error, NeedsWeights):
            raise
    except Exception:  # transformers' classes may raise anything here: if it matters, loading raises it again
        return
