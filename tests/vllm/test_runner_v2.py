"""Model Runner V2, which vLLM runs on GPUs: what its own functions hand the plugin, as far as they run without a GPU.

Its block tables keep what an ended request left behind a shorter one's blocks, and its first passes, which warm it up, give
each request one block.
"""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.worker.gpu import attn_utils, warmup
from vllm.v1.worker.utils import AttentionGroup

from kvpatch.serving.vllm.pages import BudgetSpec, LayerBudget
from kvpatch.serving.vllm.scheduled import NOBODY, PassBuilder

SLOTS, LONGEST = 16, 512


def make_spec(k=40):
    return BudgetSpec(
        block_size=SLOTS,
        num_kv_heads=2,
        head_size=8,
        dtype=torch.float32,
        held=LayerBudget(k, False, False, k),
        longest=LONGEST,
    )


def build(rows, padded=0):
    """Let V2 build the metadata of a pass. rows: (columns, past, whether its prompt is read, row of the table)."""
    made = object.__new__(PassBuilder)
    made.kv_cache_spec = make_spec()
    group = AttentionGroup(None, ["layer"], made.kv_cache_spec, 0, metadata_builders=[made])
    table = torch.zeros(len(rows) + padded, LONGEST // SLOTS + 3, dtype=torch.int32)
    for place, (*_, blocks) in enumerate(rows):
        table[place, : len(blocks)] = torch.tensor(blocks)
    stops = torch.tensor([0, *(row[0] for row in rows)], dtype=torch.int32).cumsum(0).int()
    stops = torch.cat([stops, stops[-1:].expand(padded)])
    lengths = torch.tensor([columns + past for columns, past, _, _ in rows] + [0] * padded, dtype=torch.int32)
    found = attn_utils.build_attn_metadata(
        attn_groups=[[group]],
        num_reqs=len(rows) + padded,
        num_tokens=int(stops[-1]),
        query_start_loc_gpu=stops,
        query_start_loc_cpu=stops,
        max_query_len=max(row[0] for row in rows),
        seq_lens=torch.full_like(lengths, -1),  # on the device: not to be read
        max_seq_len=int(lengths.max()),
        block_tables=[table],
        slot_mappings=torch.zeros(1, int(stops[-1]), dtype=torch.long),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=made.kv_cache_spec)]),
        seq_lens_cpu_upper_bound=lengths,
        is_prefilling=torch.tensor([row[2] for row in rows]),
    )
    return found["layer"].scheduled


def test_blocks_that_an_ended_request_left_are_no_ones():
    left = [31, NOBODY, 32, 33]
    rows = [
        (20, 0, True, [5, NOBODY, 12, *left]),
        (30, 0, True, [6, 7, 8, NOBODY, 0, *left]),
        (1, 70, False, [9, 30, NOBODY, 0]),
    ]
    found = build(rows, padded=2)
    assert [(one.pages, one.asked_k, one.past) for one in found] == [([5], 12, 0), ([6, 7, 8], 0, 0), ([9], 0, 70)]


def test_a_request_of_the_warm_up_has_a_block_that_holds_it():
    """V2 takes the spec for a ring buffer's, one block a request, and reads prompts of up to 15 tokens and five more."""
    told = {"num_lookahead_tokens": 0, "max_model_len": LONGEST, "max_encoder_len": 0}
    assert warmup._reserved_block_count(LONGEST, make_spec(), **told) == 1
    (found,) = build([(15, 0, True, [3])])
    assert found.pages == [3] and found.columns == 15
