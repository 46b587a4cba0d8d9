"""The requests of a pass, read from vLLM's metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata

from ...policies.numbers import on_device
from .requests import Scheduled

NOBODY = 0  # vLLM's null page, which no request has: it ends a request's pages, and fills the rows of a warm-up pass


@dataclass
class Pass:
    """A forward pass: its requests, and how many of the columns are theirs."""

    scheduled: list[Scheduled]
    num_actual_tokens: int


class PassBuilder(AttentionMetadataBuilder[Pass]):
    """Reads the requests of a pass."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> Pass:
        """Describe the coming pass, a row a request, for the layers' attention. vLLM calls this before each pass."""
        metadata = common_attn_metadata
        assert metadata.is_prefilling is not None
        starts = metadata.query_start_loc_cpu.tolist()
        # on the host already, and exact where no token is speculated: asking the device would wait for all work under way
        lengths = metadata.seq_lens if metadata.seq_lens_cpu_upper_bound is None else metadata.seq_lens_cpu_upper_bound
        rows = zip(starts, starts[1:], lengths.tolist(), metadata.is_prefilling.tolist(), strict=False)
        # of each request: its first column (token) of the pass, its number of columns, the tokens before, in the prompt or not
        spans = [(start, stop - start, seen - (stop - start), prompt) for start, stop, seen, prompt in rows]
        pages_and_k = self._read_pages(metadata.block_table_tensor, [(columns, past) for _, columns, past, _ in spans])
        requests = [(pages, span, asked_k) for (pages, asked_k), span in zip(pages_and_k, spans, strict=True)]
        # rows of a warm-up pass have the null page (NOBODY) alone
        scheduled = [Scheduled(pages, *span, k) for pages, span, k in requests if span[1] > 0 and pages[0] != NOBODY]
        return Pass(scheduled, metadata.num_actual_tokens)

    def _read_pages(self, table_RM: Tensor, spans: Sequence[tuple[int, int]]) -> list[tuple[list[int], int]]:
        """Return each request's pages and the k that it asks for, or 0: all pages in its first pass, later only the first.

        `build` calls it. table_RM: vLLM's block table, a row for each of R requests, M pages wide. spans: each request's
        columns (tokens) in the pass, and its tokens before them. The host waits for the device once.
        """
        # the manager gave a request all its pages with its first tokens; the table has columns for the longest text
        widths = [self.kv_cache_spec.most_pages(columns) + 2 if past == 0 < columns else 1 for columns, past in spans]
        new_rows = [row for row, width in enumerate(widths) if width > 1]
        new_RM = table_RM[on_device(new_rows, table_RM.device), : max(widths, default=1)]
        # one transfer: the first page of each request, then whole rows of the new requests
        numbers = torch.cat([table_RM[: len(spans), 0], new_RM.flatten()]).tolist()
        pages = [([page], 0) for page in numbers[: len(spans)]]
        for place, row in enumerate(new_rows):
            start = len(spans) + place * new_RM.shape[1]
            written = numbers[start : start + widths[row]]
            count = written.index(NOBODY)  # the null page ends a request's pages; the manager wrote its k after that
            pages[row] = written[: max(count, 1)], written[count + 1]
        return pages
