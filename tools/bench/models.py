"""The benchmark's models: random weights in the shapes that it measures, on a CPU or a GPU."""

import copy
import time
from itertools import chain
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import Cache, GPTJConfig, LlamaConfig, MptConfig, PreTrainedModel

STEPS = 64
PAGES = Path(__file__).parents[2] / "docs"
LARGE = ("mpt-7b", "llama-8b")
CUT, WHOLE_TO = "llama-cut", 8192


def config(arch: str, positions: int, tiny: bool) -> transformers.PreTrainedConfig:
    """About 100M parameters with heads of size 64, or 2 layers and a small vocabulary if `tiny`, one of LARGE, or host's.

    CUT: the first two of Llama's twelve layers, for prompts above WHOLE_TO tokens, which all twelve read in minutes.
    """
    if arch in LARGE and not tiny:
        return _large(arch, positions)
    if arch == "llama-narrow":
        return narrow(positions, layers=2 if tiny else 32)
    if arch == "llama-even":
        return _even(positions, *((2, 128) if tiny else (8, 512)))
    layers, width, vocab = (2, 128, 256) if tiny else (12, 768, 32000)
    layers = 2 if arch == CUT else layers
    heads = width // 64
    if arch in ("mpt", "mpt-7b"):
        return MptConfig(d_model=width, n_heads=heads, n_layers=layers, vocab_size=vocab, max_seq_len=positions)
    if arch == "gptj":
        sizes = {"n_embd": width, "n_head": heads, "n_layer": layers, "vocab_size": vocab, "n_positions": positions}
        return GPTJConfig(**sizes, bos_token_id=1, eos_token_id=2)
    if arch in ("llama", "llama-8b", CUT):
        return LlamaConfig(
            hidden_size=width,
            intermediate_size=width * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=max(heads // 3, 1),
            vocab_size=vocab,
            max_position_embeddings=positions,
            tie_word_embeddings=True,
        )
    known = ("llama", CUT, "llama-narrow", "llama-even", "mpt", "gptj", *LARGE)
    raise ValueError(f"no model of architecture {arch!r} here: {', '.join(known)}")


def narrow(positions: int, layers: int) -> transformers.PreTrainedConfig:
    """Many layers of next to no arithmetic: four heads of size 16 over two KV heads."""
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=170,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )


def _even(positions: int, layers: int, width: int) -> transformers.PreTrainedConfig:
    """A KV head of size 64 for each query head, and few weights beside them: a batch's step is spent on keys and values."""
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=1000,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )


def _large(arch: str, positions: int) -> transformers.PreTrainedConfig:
    """The shapes of MPT-7B and of Llama 3 8B."""
    if arch == "mpt-7b":
        return MptConfig(d_model=4096, n_heads=32, n_layers=32, vocab_size=50432, max_seq_len=positions)
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
    )


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


def forward(model: PreTrainedModel, ids: Tensor, past: Cache | None = None, mask: Tensor | None = None) -> tuple[Cache, float]:
    """One forward; the cache and its time in ms: by `clock`, on a GPU until all its work is done."""
    on_cpu = ids.device.type == "cpu"
    if not on_cpu:
        torch.cuda.synchronize()
    start = clock(ids.device.type)
    out = model(ids, attention_mask=mask, past_key_values=past, use_cache=True, logits_to_keep=1)
    if not on_cpu:
        torch.cuda.synchronize()
    return out.past_key_values, 1000 * (clock(ids.device.type) - start)


def clock(device: str = "cpu") -> float:
    """Seconds of CPU time on one thread, which other programs disturb less; of wall time on several, and on a GPU."""
    return time.process_time() if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()


def cache_bytes(past: Cache) -> int:
    """Bytes of keys and values that a cache has really allocated."""
    buffers = [t for layer in past.layers for t in (layer.keys, layer.values) if t is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in buffers if t.numel()}
    return sum(storages.values())
