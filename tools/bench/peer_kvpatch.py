"""kvpatch's side of a comparison with a peer: the policies, with the peer's default options, evicting after the prompt."""

import platform
from contextlib import AbstractContextManager

import torch
import transformers
from transformers import Cache, PreTrainedModel

import kvpatch
from kvpatch.policies import Policy, get_policy
from kvpatch.policies.scores import Mean
from tools.bench.peer_worker import Side, serve

WINDOW = {"window": 64, "kernel": 5, "pooling": "avg"}
SNAPKV_LIKE = ("snapkv", "pyramidkv", "adakv", "critical_snapkv", "critical_adakv")
RANKED = ("streaming_llm", "tova", "key_norm", "random")
POLICIES = {name: get_policy(name).with_options(**WINDOW) for name in SNAPKV_LIKE}
POLICIES |= {name: get_policy(name).with_options("prompt") for name in RANKED}
POLICIES["h2o"] = Policy("observed", Mean(), schedule="prompt")
POLICIES["block_key_norm"] = get_policy("key_norm").with_options("prompt")
BLOCKS = {"block_key_norm": 256}


def compress(model: PreTrainedModel, case: str) -> AbstractContextManager[object]:
    return kvpatch.patched(model, POLICIES[case], k=0.5, block=BLOCKS.get(case))


def kept(model: PreTrainedModel, full: Cache, past: Cache) -> list[list[list[int]]]:
    assert isinstance(past, kvpatch.EvictingCache)
    each = [past.positions(layer)[0] for layer in range(len(past.layers))]
    return [[sorted(head[head >= 0].tolist()) for head in layer] for layer in each]


def side() -> Side:
    versions = {"kvpatch": kvpatch.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    versions["python"] = platform.python_version()
    return Side(versions, tuple(POLICIES), compress, stays=True, kept=kept)


if __name__ == "__main__":
    serve(side())
