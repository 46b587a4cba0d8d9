"""A model over several processes by transformers' own tensor parallelism, on a budget.

    torchrun --nproc-per-node 2 -m examples.tensor_parallel
    torchrun --nproc-per-node 2 -m examples.tensor_parallel --model NAME --policy adakv -k 0.3

Every process has a part of each layer's heads and keeps their caches; a budget in bytes counts all of them together. The
patch is the same line as for one process, and all processes write the same text, the one that a single process writes.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import distributed
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import kvpatch
from kvpatch.cli.loading import MODELS, load_model, load_tokenizer, parse_k

PROMPT = "import os\n\n\ndef names(folder):\n    found = []\n    for name in os.listdir(folder):\n        path = "


def write(model: Any, inputs: Any, policy: str, k: Any, new: int) -> tuple[Any, torch.Tensor, kvpatch.Report]:
    """Generated ids, their logits [new,V], and what was kept."""
    with kvpatch.patched(model, policy, k) as patch:
        out = model.generate(**inputs, max_new_tokens=new, do_sample=False, return_dict_in_generate=True, output_logits=True)
    return out.sequences, torch.cat(out.logits), patch.report()


def main(
    model_name: str = str(MODELS / "llama-python"), policy: str = "keyformer", k: Any = 0.5, new: int = 16
) -> dict[str, Any]:
    """Does this process write what one process alone would?"""
    tokenizer = load_tokenizer(model_name)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    shared = DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]))  # by the model's own tp_plan
    model = AutoModelForCausalLM.from_pretrained(model_name, distributed_config=shared, dtype=torch.float32).eval()
    sequences, logits, report = write(model, inputs, policy, k, new)
    alone = load_model(model_name, "float32")  # only to compare: a model that needs several processes has no such copy
    expected, expected_logits, whole = write(alone, inputs, policy, k, new)
    rank, heads = distributed.get_rank(), report.held().shape[2]
    same = all(
        torch.equal(mine.sort(-1).values, theirs[:, rank * heads : (rank + 1) * heads].sort(-1).values)
        for mine, theirs in zip(report.positions, whole.positions, strict=True)
    )
    figures = {
        "same text": torch.equal(sequences, expected),
        "same tokens kept": same,
        "largest difference of logits": float((logits - expected_logits).abs().max()),
        "bytes": (report.nbytes, whole.nbytes),
    }
    if rank == 0:
        print(tokenizer.decode(sequences[0], skip_special_tokens=True))
        print(report)
    for turn in range(distributed.get_world_size()):
        distributed.barrier()
        if turn == rank:
            print(f"process {rank} of {distributed.get_world_size()}: {figures}", flush=True)
    distributed.destroy_process_group()
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODELS / "llama-python"))
    parser.add_argument("--policy", default="keyformer")
    parser.add_argument("-k", default="0.5")
    given = parser.parse_args()
    main(given.model, given.policy, parse_k(given.k))
