"""Random schedules of requests: they arrive, stream and are cancelled at random, under random terms of the engine."""

from __future__ import annotations

import random
import time
from typing import Any

import kvpatch
from tests.helpers.serving import alone, collect, prompts, running

POLICIES = ("h2o", "keyformer", "snapkv", "tova", "roco", "streaming_llm", "adakv", "critical(h2o)", "key_diff", "pyramidkv")
CHUNK, REQUESTS = 48, 8


class Schedules:
    """Schedules on one model; what generate() gives for a prompt is computed once."""

    def __init__(self, model: Any) -> None:
        self.model, self.texts = model, prompts((20, 61, 9, 100, 33, 5, 47, 80, 12, 28), seed=3)
        self.known: dict[tuple[Any, ...], list[int]] = {}
        self.cancelled = self.compared = 0

    def run(self, seed: int) -> list[str]:
        """Run the schedule of a seed; returns the requests whose tokens are not those of generate()."""
        rnd = random.Random(seed)
        policy, k = rnd.choice(POLICIES), rnd.choice((12, 16, 0.4))
        asked = [(rnd.randrange(len(self.texts)), rnd.randrange(2, 20)) for _ in range(REQUESTS)]
        terms = {
            "max_batch_tokens": rnd.choice((CHUNK, CHUNK + 1, 256)),
            "max_requests_per_batch": rnd.randrange(1, 6),
            "num_blocks": rnd.choice((16, 60)),
            "scheduler_type": rnd.choice(("fifo", "prefill_first")),
        }
        names, dropped = list[str](), set[str]()
        with kvpatch.patched(self.model, policy, k), running(self.model, **terms) as manager:
            for index, new in asked:
                streams = rnd.random() < 0.3
                names.append(manager.add_request(self.texts[index], max_new_tokens=new, streaming=streams))
                time.sleep(rnd.random() * 0.01)
                if rnd.random() < 0.3:
                    dropped.add(rnd.choice(names))
                    manager.cancel_request(sorted(dropped)[-1])
            found = collect(manager, [name for name in names if name not in dropped])
            chunk = manager.batch_processor.cache.chunk
        self.cancelled += len(dropped)
        self.compared += len(found)
        return [
            f"seed {seed}: {policy}, k={k}, {terms}, request {name}: {one.error or 'other tokens'}"
            for name, (index, new) in zip(names, asked, strict=True)
            if (one := found.get(name)) is not None
            and (one.error or one.generated_tokens != self._alone(policy, k, chunk, index, new))
        ]

    def _alone(self, policy: str, k: float, chunk: int, index: int, new: int) -> list[int]:
        """The tokens of generate(), whose blocks are the engine's chunks where the prompt is longer than one."""
        ids = self.texts[index]
        block = chunk if len(ids) > chunk else None
        key = (policy, k, block, index, new)
        if key not in self.known:
            with kvpatch.patched(self.model, policy, k, block=block):
                self.known[key] = alone(self.model, ids, new)
        return self.known[key]
