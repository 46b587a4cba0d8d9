"""Adapters, one per model architecture, and their registry."""

from .adapter import Adapter, adapter_of, list_architectures, register_arch, unregister_arch
from .bloom import BloomAdapter
from .falcon import FalconAdapter
from .families import FAMILIES, LONGCAT
from .gpt2 import GPT2Adapter
from .gpt_neox_japanese import GPTNeoXJapaneseAdapter
from .gptj import CodeGenAdapter, GPTJAdapter
from .interface import InterfaceAdapter
from .llama import LlamaAdapter
from .mistral import MistralAdapter
from .mpt import MptAdapter
from .separate import SEPARATE

_OWN = (LlamaAdapter, MistralAdapter, MptAdapter, GPTJAdapter, GPT2Adapter, FalconAdapter, BloomAdapter)
_OTHERS = (CodeGenAdapter, GPTNeoXJapaneseAdapter)
for _adapter in (*(kind() for kind in (*_OWN, *_OTHERS)), *SEPARATE, LONGCAT, *FAMILIES):
    register_arch(_adapter)

__all__ = [
    "Adapter",
    "InterfaceAdapter",
    "adapter_of",
    "list_architectures",
    "register_arch",
    "unregister_arch",
]
