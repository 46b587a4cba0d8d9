"""Counts that need no device: waits of the host, graphs that torch.compile makes, and bytes that captured steps keep alive.

All are exact and the same on every machine, so that tests hold them. Waits are counted as if all tensors were on a device
(counting.py); those of a pass of transformers' engine in the model's forward alone, since the engine itself reads the sampled
tokens. A captured step stands for a CUDA graph by what it keeps: the cache's tensors, its token ids and its logits. The memory
of its intermediate results, which a device adds, is not in these bytes.
"""

import gc
import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import Parameter
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import kvpatch
from kvpatch.hooks.graph import StepGraph

from .counting import counting
from .launches import Figure, counted, options, over_depths
from .lines import HOST_ARCH, K, Line, latest, record, rows
from .models import build, build_narrow, tokens

STEPS = 1000  # of a compiled forward
PROMPTS, SHORTEST, LONGEST = 100, 64, 256  # of captured steps: tokens
REQUESTS, BUDGET, NEW = (20, 40, 40, 60), 24, 6  # of the engine: prompts and the budget in tokens, tokens to generate


class KeptStep:
    """Stands for a recorder of graphs where only memory matters: runs the step at its capture, and never again."""

    def __init__(self, device: torch.device) -> None:
        pass

    def capture(self, run: Any) -> None:
        run()

    def replay(self) -> None:
        pass


@torch.no_grad()
def engine_waits(policy: str) -> dict[str, Figure]:
    """Waits of passes of transformers' engine: four prompts read, their four requests joined, the same requests decoded."""
    shallow, deep = over_depths(lambda layers: _engine_passes(policy, layers))
    names = ("engine_prompts", "engine_join", "engine_decode")
    return {name: Figure.of(shallow[at], deep[at]) for name, at in zip(names, (0, 1, -1), strict=True)}


def _engine_passes(policy: str, layers: int) -> list[int]:
    """Count the waits of each pass of four requests that begin together."""
    model, passes = build_narrow(max(REQUESTS) + NEW, layers), list[int]()
    forward = model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        with counting() as found:
            out = forward(*args, **kwargs)
        passes.append(found.waits.total())
        return out

    model.forward = watched
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    engine = ContinuousBatchingConfig(num_blocks=200, page_size=16, max_batch_tokens=256, max_requests_per_batch=len(REQUESTS))
    with kvpatch.patched(model, policy, k=BUDGET, **options(policy)):  # type: ignore[arg-type]
        texts = [tokens(model, n)[0].tolist() for n in REQUESTS]
        model.generate_batch(texts, generation_config=config, continuous_batching_config=engine)
    return passes


@torch.no_grad()
def compiled_graphs(policy: str, steps: int = STEPS) -> int:
    """Count the graphs that torch.compile makes of so many decode steps after a prompt of 64 tokens; every guard is checked."""
    model = build_narrow(64 + steps, 1)
    ids = tokens(model, 64 + steps)
    counters.clear()
    torch.compiler.reset()
    with kvpatch.patched(model, policy, k=K, **options(policy)) as patch:  # type: ignore[arg-type]
        cache = patch.new_cache(room=steps)
        model(ids[:, :64], past_key_values=cache)
        step = torch.compile(model.forward, fullgraph=True, backend="eager")
        for t in range(64, 64 + steps):
            step(ids[:, t : t + 1], past_key_values=cache)
    return int(counters["stats"]["unique_graphs"])


@torch.no_grad()
def kept_by_graphs(policy: str, k: float = K, prompts: int = PROMPTS) -> dict[str, float]:
    """Count captures of steps after prompts of different lengths, and the bytes alive once their caches are gone.

    Returns:
        captures; bytes alive, and `caches`, the same in keys and values of the longest prompt's cache.
    """
    model = build_narrow(LONGEST + 4, 2)
    lengths = [*random.Random(0).sample(range(SHORTEST, LONGEST), prompts - 1), LONGEST]
    with kvpatch.patched(model, policy, k=k, **options(policy)) as patch:  # type: ignore[arg-type]
        grows = patch.settings.policy.schedule == "prompt"
        before = _storages()
        graph, size = StepGraph(model, patch._state, KeptStep), 0
        for n in lengths:
            cache = patch.new_cache(room=3 if grows else None)
            model(tokens(model, n), past_key_values=cache)
            for _ in range(3):
                graph(tokens(model, 1), cache)
            size = cache.nbytes
            del cache
        alive = sum(nbytes for at, nbytes in _storages().items() if at not in before)
    return {"captures": graph.captures, "bytes": alive, "caches": round(alive / size, 2)}


def _storages() -> dict[int, int]:
    """Return the bytes of the memory of every tensor that is alive, by its address."""
    gc.collect()
    every = [one for one in gc.get_objects() if type(one) in (Tensor, Parameter)]
    alive = [one for one in every if one.device.type != "meta" and not torch._is_functional_tensor(one)]
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in alive}


def counts(policy: str) -> Line:
    """All counts of a policy."""
    plain, masked = counted(policy, "torch"), counted(policy, "torch", masked=True)
    waits = {"prompt": plain["prompt_waits"], "mask": masked["prompt_waits"], "step": plain["waits"], **engine_waits(policy)}
    return {
        **{f"waits_{name}": vars(figure) for name, figure in waits.items()},
        "graphs": kept_by_graphs(policy),
        "compiled": compiled_graphs(policy),
    }


def count_lines(policies: Iterable[str], n: int, repeats: int, tiny: bool) -> Iterable[Line]:
    """One line per policy; what is counted has lengths of its own."""
    model = build(HOST_ARCH, n, tiny=True)
    for policy in policies:
        yield record("counts", HOST_ARCH, policy, n, 1, model, counts(policy))


COLUMNS = ("policy", "prompt", "with a mask", "step", "engine: prompts", "requests join", "decode")
COLUMNS += ("graphs of 1,000 steps", "captures of 100 lengths", "caches alive")
WAITS = ("prompt", "mask", "step", "engine_prompts", "engine_join", "engine_decode")


def cells(line: Line) -> tuple[str, ...]:
    """One table row."""
    waits = (str(Figure(**line[f"waits_{name}"])) for name in WAITS)
    graphs = line["graphs"]
    return line["policy"], *waits, str(line["compiled"]), str(graphs["captures"]), f"{graphs['caches']:.1f}"


def markdown(lines: list[Line]) -> str:
    """The table of docs/benchmarks.md."""
    return rows(COLUMNS, [cells(line) for line in latest(lines)], left=1)
