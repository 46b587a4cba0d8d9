"""The benchmark's models: random weights in the shapes that it measures, on a CPU or a GPU."""

import copy
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor
from transformers import Cache, GPTJConfig, LlamaConfig, MptConfig, PreTrainedModel

STEPS = 64
Result = TypeVar("Result")
PAGES = Path(__file__).parents[2] / "docs"
LARGE = ("mpt-7b", "llama-8b")
CUT, WHOLE_TO = "llama-cut", 8192


def config(arch: str, positions: int, tiny: bool) -> transformers.PreTrainedConfig:
    """About 100M parameters with heads of size 64, or 2 layers and a small vocabulary if `tiny`, one of LARGE, or host's.

    CUT: the first two of Llama's twelve layers, for prompts above WHOLE_TO tokens, which all twelve read in minutes.
    llama-even: a KV head for each query head, and few weights beside them: a batch's step is spent on keys and values.
    """
    if arch == "llama-narrow":
        return narrow(positions, layers=2 if tiny else 32)
    if arch == "llama-even":
        layers, width = (2, 128) if tiny else (8, 512)
        return _llama(positions, layers, width, width // 64, width // 64, 1000)
    if arch == "llama-8b" and not tiny:
        return _llama(positions, 32, 4096, 32, 8, 128256, intermediate_size=14336, tie_word_embeddings=False)
    layers, width, vocab = (2, 128, 256) if tiny else (32, 4096, 50432) if arch in LARGE else (12, 768, 32000)
    heads = 32 if width == 4096 else width // 64
    if arch in ("mpt", "mpt-7b"):
        return MptConfig(d_model=width, n_heads=heads, n_layers=layers, vocab_size=vocab, max_seq_len=positions)
    if arch == "gptj":
        sizes = {"n_embd": width, "n_head": heads, "n_layer": layers, "vocab_size": vocab, "n_positions": positions}
        return GPTJConfig(**sizes, bos_token_id=1, eos_token_id=2)
    if arch in ("llama", "llama-8b", CUT):
        return _llama(positions, 2 if arch == CUT else layers, width, heads, max(heads // 3, 1), vocab)
    known = ("llama", CUT, "llama-narrow", "llama-even", "mpt", "gptj", *LARGE)
    raise ValueError(f"no model of architecture {arch!r} here: {', '.join(known)}")


def narrow(positions: int, layers: int) -> LlamaConfig:
    """Many layers of next to no arithmetic: four heads of size 16 over two KV heads."""
    return _llama(positions, layers, 64, 4, 2, 256)


def _llama(positions: int, layers: int, width: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> LlamaConfig:
    sizes = {"hidden_size": width, "intermediate_size": width * 8 // 3, "num_hidden_layers": layers, "vocab_size": vocab}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": positions}
    return LlamaConfig(**{**sizes, "tie_word_embeddings": True, **more})


def build(
    arch: str, n: int, tiny: bool, device: str = "cpu", dtype: torch.dtype = torch.float32, steps: int = STEPS
) -> PreTrainedModel:
    """A model with random weights for `n` + `steps` tokens, or that of a folder; MPT and GPT-J have eager attention only."""
    torch.manual_seed(0)
    if Path(arch).is_dir():
        of_folder = transformers.AutoModelForCausalLM.from_pretrained(arch, attn_implementation="sdpa", dtype=dtype)
        return of_folder.to(device).eval()
    attention = "sdpa" if arch.startswith("llama") else "eager"
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config(arch, n + steps, tiny), attn_implementation=attention, dtype=dtype
        )
    return model.eval()


def build_narrow(positions: int, layers: int) -> PreTrainedModel:
    """A model of so many narrow layers, always with the same weights."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(narrow(positions, layers), attn_implementation="sdpa").eval()


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Another model object over the same weights."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})


def tokens(model: PreTrainedModel, n: int, batch: int = 1) -> Tensor:
    """Token ids [batch,n]: random ones, or of this project's pages for the model of a folder."""
    if model.name_or_path and Path(model.name_or_path).is_dir():
        text = "".join(page.read_text() for page in sorted(PAGES.rglob("*.md")))
        ids = transformers.AutoTokenizer.from_pretrained(model.name_or_path)(text, return_tensors="pt").input_ids
        return ids[:, : batch * n].view(batch, n).to(model.device)
    ids = torch.randint(model.config.vocab_size, (batch, n), generator=torch.Generator().manual_seed(n))
    return ids.to(model.device)


def forward(model: PreTrainedModel, ids: Tensor, past: Cache | None = None, **given: Any) -> tuple[Cache, float]:
    """One forward, told what is `given`; the cache and the time in ms."""
    out, seconds = timed(lambda: model(ids, past_key_values=past, use_cache=True, logits_to_keep=1, **given), ids.device.type)
    return out.past_key_values, 1000 * seconds


def timed(work: Callable[[], Result], device: str = "cpu") -> tuple[Result, float]:
    """What some work returns, and its seconds by `clock`, on a GPU until all of it is done."""
    if device != "cpu":
        torch.cuda.synchronize()
    start = clock(device)
    found = work()
    if device != "cpu":
        torch.cuda.synchronize()
    return found, clock(device) - start


def clock(device: str = "cpu") -> float:
    """Seconds of CPU time on one thread, which other programs disturb less; of wall time on several, and on a GPU."""
    return time.process_time() if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()


def cache_bytes(past: Cache) -> int:
    """Bytes of keys and values that a cache has really allocated."""
    buffers = [t for layer in past.layers for t in (layer.keys, layer.values) if t is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in buffers if t.numel()}
    return sum(storages.values())
