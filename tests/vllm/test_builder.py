"""A pass of vLLM's requests, from its metadata: exact, in one look at the device."""

import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from kvpatch.serving.vllm.scheduled import NOBODY, PassBuilder
from tests.helpers.counting import HostWaits

WIDTH = 8193  # of the table: pages of 16 slots, and texts of 131,072 tokens


def metadata(rows, told_on_host):
    """rows: (columns, past, prompt, pages) of each request."""
    stops = torch.tensor([0, *(row[0] for row in rows)]).cumsum(0)
    table = torch.zeros(len(rows), WIDTH, dtype=torch.int32)
    for place, (_, _, _, pages) in enumerate(rows):
        table[place, : len(pages)] = torch.tensor(pages)
    lengths = torch.tensor([columns + past for columns, past, _, _ in rows])
    return SimpleNamespace(
        query_start_loc_cpu=stops,
        seq_lens=lengths if not told_on_host else torch.full_like(lengths, -1),
        seq_lens_cpu_upper_bound=lengths if told_on_host else None,
        block_table_tensor=table,
        is_prefilling=torch.tensor([prompt for _, _, prompt, _ in rows]),
        num_actual_tokens=int(stops[-1]),
    )


def builder():
    made = object.__new__(PassBuilder)
    made.kv_cache_spec = SimpleNamespace(most_pages=lambda prompt: -(-prompt // 16) + 1)
    return made


@pytest.mark.parametrize("told_on_host", [True, False])
def test_requests_of_a_pass(told_on_host):
    draw = random.Random(1)
    for _ in range(50):
        rows, want, start = [], [], 0
        for request in range(draw.randrange(1, 12)):
            kind = draw.choice(("begins", "goes on", "piece", "empty", "nobody"))
            columns = {"begins": draw.randrange(1, 70), "piece": draw.randrange(2, 70), "empty": 0}.get(kind, 1)
            past = 0 if kind in ("begins", "empty", "nobody") else draw.randrange(1, 500)
            own = [100 * (request + 1) + page for page in range(draw.randrange(1, -(-columns // 16) + 2))]
            k = draw.choice((0, 12, 4096))  # its own
            pages = [NOBODY] if kind == "nobody" else [*own, NOBODY, k, 8, 9]  # behind it, what an ended request had
            rows.append((columns, past, kind in ("begins", "piece"), pages))
            if kind not in ("empty", "nobody"):
                seen, k = (own, k) if past == 0 else (own[:1], 0)
                want.append((seen, start, columns, past, kind in ("begins", "piece"), k))
            start += columns
        found = builder().build(0, metadata(rows, told_on_host))
        assert [tuple(one) for one in found.scheduled] == want and found.num_actual_tokens == start


def test_one_look_at_the_device_and_few_pages_of_a_wide_table(monkeypatch):
    taken, whole = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: (taken.append(tensor.numel()), whole(tensor))[1])
    rows = [(1, 900, False, [7 * row + 1]) for row in range(250)] + [(40, 0, True, [5000, 5001, 5002, 5003, NOBODY])] * 6
    with HostWaits() as waits:
        builder().build(0, metadata(rows, told_on_host=True))
    assert max(taken) <= 256 + 6 * 6, "the table of 256 requests has 2.1 million entries"
    assert sum(waits.at.values()) <= 4, "starts, lengths and marks are on the host already; pages are read at once"
