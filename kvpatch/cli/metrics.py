"""Figures of `kvpatch serve` in Prometheus' text format. It imports neither torch nor a web framework."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..cache.holding import count_held
from .request_fields import AcceptedRequest

ROWS = (
    ("requests_total", "counter", "Requests that were answered, by path and status."),
    ("requests_ended_total", "counter", "Requests that the engine has ended, by reason; gone: the client hung up."),
    ("prompt_tokens_total", "counter", "Tokens of prompts of requests that have ended."),
    ("generated_tokens_total", "counter", "Tokens written by requests that have ended."),
    ("evicted_tokens_total", "counter", "Tokens that requests had seen and no longer held when they ended, of a KV head."),
    ("compressed_requests_total", "counter", "Requests that had evicted a token when they ended."),
    ("reused_tokens_total", "counter", "Tokens of prompts that were not read again, of requests that have ended."),
    ("requests_running", "gauge", "Requests that the engine reads or writes for."),
    ("requests_waiting", "gauge", "Requests that wait for room."),
    ("tokens_seen", "gauge", "Tokens that running requests have read and written."),
    ("tokens_held", "gauge", "Tokens that running requests hold, of a KV head, the mean of the layers."),
    ("blocks_claimed", "gauge", "Blocks of the pool that running requests claim."),
    ("blocks", "gauge", "Blocks of the pool."),
    ("conversations", "gauge", "Conversations that are kept."),
    ("conversations_bytes", "gauge", "Bytes of the conversations that are kept."),
)  # fmt: skip


class ServerMetrics:
    """Counters of a server, and the state of its engine when they are asked for.

    Args:
        engine: its manager of continuous batching.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.counts: Counter[tuple[str, str]] = Counter()  # by the name of a row and its labels

    def note_answer(self, path: str, status: int) -> None:
        """Count an answer that was sent, by its path and status. `Gate` calls this."""
        self.counts["requests_total", f'{{path="{path}",status="{status}"}}'] += 1

    def note_end(self, request: AcceptedRequest) -> None:
        """Count in `counts` a request that ends: its tokens, and how many were evicted. `_end_request` calls it once."""
        n_read = request.n_prompt + max(request.n_generated - 1, 0)  # the last token is never fed back to the model
        evicted = n_read - self._count_held(request.n_prompt, n_read) if request.n_generated else 0
        self.counts["requests_ended_total", f'{{reason="{request.end_reason}"}}'] += 1
        self.counts["prompt_tokens_total", ""] += request.n_prompt
        self.counts["reused_tokens_total", ""] += request.cached
        self.counts["generated_tokens_total", ""] += request.n_generated
        self.counts["evicted_tokens_total", ""] += evicted
        self.counts["compressed_requests_total", ""] += evicted > 0

    def describe_conversations(self) -> dict[str, int]:
        """Return the number and bytes of kept conversations (caches of ended requests), and the prompt tokens they saved.

        `Gate._add_conversations` puts them into the answer to /health, and `_measure_engine` into /metrics.
        """
        kept = self.engine.conversations
        number, nbytes = (0, 0) if kept is None else (len(kept), kept.nbytes)
        return {"kept": number, "bytes": nbytes, "tokens_reused": self.counts["reused_tokens_total", ""]}

    def render(self) -> str:
        """Return all counters and gauges as Prometheus reads them; `_check_and_answer` sends it for each GET /metrics."""
        values = dict(self.counts)
        for name, value in self._measure_engine().items():
            values[name, ""] = value
        lines = list[str]()
        for name, kind, about in ROWS:  # ROWS: each metric's name, "counter" or "gauge", and help
            lines += [f"# HELP kvpatch_{name} {about}", f"# TYPE kvpatch_{name} {kind}"]
            samples = sorted((labels, value) for (metric, labels), value in values.items() if metric == name)
            lines += [f"kvpatch_{name}{labels} {value}" for labels, value in samples or [("", 0)]]
        return "\n".join(lines) + "\n"

    def _measure_engine(self) -> dict[str, int]:
        """Return gauges, for `render`: requests, tokens and cache blocks now. Lists are copied: the engine's thread goes on."""
        scheduler, pool = self.engine.batch_processor.scheduler, self.engine.pool
        running = list(scheduler.active_requests.values())
        read_counts = [(len(one.initial_tokens), one.current_len()) for one in running]
        kept = self.describe_conversations()
        return {
            "requests_running": len(running),
            "requests_waiting": len(scheduler.waiting_requests),
            "tokens_seen": sum(count for _, count in read_counts),
            "tokens_held": sum(self._count_held(prompt, count) for prompt, count in read_counts),
            "blocks_claimed": pool.claimed_blocks,
            "blocks": pool.num_blocks,
            "conversations": kept["kept"],
            "conversations_bytes": kept["bytes"],
        }

    def _count_held(self, prompt: int, seen: int) -> int:
        """Return how many tokens a KV head holds when a request has read `seen` of them: the mean of the layers.

        `note_end` and `_measure_engine` call it. Computed from the server's settings (policy and budget), without a look at the
        cache.
        """
        if seen < prompt:  # nothing is evicted yet
            return seen
        settings = self.engine.terms.settings  # terms: policy, budget and geometry that the engine serves under
        # of each layer, its head that holds the most
        held = [max(count_held(settings, layer, prompt, seen - prompt).heads) for layer in range(settings.n_layers)]
        return round(sum(held) / len(held))
