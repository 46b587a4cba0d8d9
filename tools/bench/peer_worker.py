"""One side of a comparison: a process that loads given weights and measures, one unit at a time, when it is told to.

Both sides run this file, each in an environment of its own, so it needs torch and transformers alone. An order is a line of
JSON on stdin and its answer a line of JSON on stdout; what libraries print goes to stderr. A unit is a whole run, unpatched
and compressed in turns: the prompt, then single tokens. Times are CPU ms of one thread.
"""

import gc
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, PreTrainedModel

from tools.bench.memory import measure_growth, return_freed_memory
from tools.bench.models import cache_bytes, forward, twin

Answer = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """What differs between the sides.

    versions: of the packages. cases: the names that `compress` knows. compress(model, case): the context in which a prompt
    is compressed. stays: steps run inside that context too. eager: cases that need eager attention. kept(model, full, past):
    the positions that each head of each layer holds after the prompt; `full` is the unpatched cache of the same prompt.
    """

    versions: dict[str, str]
    cases: tuple[str, ...]
    compress: Callable[[PreTrainedModel, str], AbstractContextManager[object]]
    stays: bool
    kept: Callable[[PreTrainedModel, Cache, Cache], list[list[list[int]]]]
    eager: tuple[str, ...] = ()


class Worker:
    """Carries out orders. The unpatched model runs sdpa attention on both sides."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.model: PreTrainedModel

    def hello(self) -> Answer:
        return {"versions": self.side.versions, "cases": self.side.cases, "eager": self.side.eager}

    def load(self, path: str) -> Answer:
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", dtype=torch.float32)
        self.model = model.eval()
        return {"parameters": model.num_parameters()}

    def logits(self, n: int, path: str) -> Answer:
        """Write the unpatched model's logits of a prompt's last token to a file."""
        save_file({"logits": self.model(self.ids(n)).logits[0, -1].contiguous()}, path)
        return {}

    def unit(self, case: str, n: int, steps: int, kept: bool = False) -> Answer:
        """One run: [unpatched, compressed] ms of the prompt, and the median ms of a step of each."""
        gc.collect()
        ids, other = self.ids(n + steps), self.twin(case)
        full, plain_ms = forward(self.model, ids[:, :n])
        with ExitStack() as stack:
            stack.enter_context(self.side.compress(other, case))
            past, ms = forward(other, ids[:, :n])
            if not self.side.stays:
                stack.close()
            answer: Answer = {"prompt": [plain_ms, ms], "bytes": [cache_bytes(full), cache_bytes(past)]}
            if kept:
                answer["kept"] = self.side.kept(other, full, past)
            times = []
            for t in range(n, n + steps):
                one, at = ids[:, t : t + 1], torch.tensor([[t]])  # where a cache no longer tells it
                runs = (self.model, full), (other, past)
                times.append([forward(model, one, cache, position_ids=at)[1] for model, cache in runs])
        answer["decode"] = [statistics.median(column) for column in zip(*times, strict=True)]
        if case in self.side.eager:
            answer["eager"] = forward(self.twin(case), ids[:, :n])[1]
        return answer

    def growth(self, case: str | None, n: int) -> Answer:
        """Bytes by which a prompt raises the peak resident size; None: unpatched. Ask a new process."""
        return_freed_memory()
        ids, other = self.ids(n), self.twin(case)
        forward(other, ids[:, :16])
        with ExitStack() as stack:
            if case is not None:
                stack.enter_context(self.side.compress(other, case))
            return {"growth": measure_growth(lambda: forward(other, ids))}

    def ids(self, n: int) -> Tensor:
        """Random token ids [1,n], the same on both sides."""
        return torch.randint(self.model.config.vocab_size, (1, n), generator=torch.Generator().manual_seed(0))

    def twin(self, case: str | None) -> PreTrainedModel:
        """Another model object over the same weights, with the attention that the case needs."""
        other = twin(self.model)
        if case in self.side.eager:
            other.set_attn_implementation("eager")
        return other


@contextmanager
def answers() -> Iterator[Callable[[Answer], None]]:
    """Say(answer) on the real stdout; whatever else is printed goes to stderr."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)

        def say(answer: Answer) -> None:
            out.write(json.dumps(answer) + "\n")
            out.flush()

        yield say


def serve(side: Side) -> None:
    """Carry out the orders on stdin until it is closed."""
    torch.set_num_threads(1)
    worker = Worker(side)
    with torch.no_grad(), answers() as say:
        for line in sys.stdin:
            order = json.loads(line)
            say(getattr(worker, order.pop("do"))(**order))
