"""What test_tensor_parallel.py runs twice: on a model in one process, and (as a program, under torchrun) on its halves in two.

torchrun --nproc-per-node 2 -m tests.integrations.sharded FOLDER     # results: FOLDER/0.pt, FOLDER/1.pt
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch

import kvpatch
from tests.helpers.tiny import force, left_pad, prompt

SNAP = {"window": 5, "kernel": 3}
# model, policy, k, options: every way in which heads look at each other or draw numbers, and some that do not
CASES: tuple[tuple[str, str, Any, dict[str, Any]], ...] = (
    ("llama", "window", 0.3, {}),
    ("llama", "random", 0.3, {}),
    ("llama", "h2o", "3KiB", {}),
    ("llama", "tova", 0.3, {}),
    ("llama", "keyformer", 0.3, {}),
    ("llama", "keyformer", 0.3, {"shared": True}),
    ("llama", "keyformer", 0.3, {"resample": True}),
    ("llama", "roco", 0.3, {"recent": 2}),
    ("llama", "snapkv", 0.3, SNAP),
    ("llama", "adakv", 0.3, SNAP),
    ("llama", "adakv", 0.5, {**SNAP, "turns": "each"}),
    ("llama", "critical_adakv", 0.3, SNAP),
    ("llama", "pyramidkv", 0.3, SNAP),
    ("llama", "critical(tova)", 0.3, {}),
    ("llama", "defensive_snapkv", 0.35, SNAP),
    ("llama", "layer_defensive", 0.4, SNAP),
    ("llama", "global_topk(snapkv)", 0.45, SNAP),
    ("llama", "kvzip", 0.3, {}),
    ("llama", "adaptive(tova)", 33, {}),
    ("llama", "adaptive(random)", 0.3, {}),
    ("llama", "adaptive(keyformer)", 0.3, {"block": 8}),
    ("llama", "tova", 0.3, {"every": 3}),
    ("llama", "adaptive(tova)", 0.4, {"every": 3}),
    ("mistral", "h2o", 0.3, {"positions": "renumbered"}),
    ("mistral", "tova", 0.3, {}),
    ("mistral", "critical_adakv", 0.3, SNAP),
    ("whole", "critical_adakv", 0.3, SNAP),
    ("whole", "keyformer", 0.3, {}),
)
# every process computes all heads: queries, keys and values are gathered, as transformers does where a model fuses them
GATHERED = {f"model.layers.*.self_attn.{name}_proj": "colwise_gather_output" for name in "qkv"}
GATHERED["model.layers.*.self_attn.o_proj"] = "rowwise_split_input"
IDS, FED, MASK = prompt(2, 30), prompt(2, 8, seed=2), left_pad(prompt(2, 30), [30, 21])


def run(model: Any, policy: str, k: Any, options: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of a padded batch, of eight more tokens and of another prompt; positions held in each layer at the end."""
    with kvpatch.patched(model, policy, k, **options), torch.no_grad():
        logits, cache = force(model, IDS, FED, MASK)
        again = model(IDS[:, :6], past_key_values=cache).logits
        held = [cache.positions(layer).sort(-1).values for layer in range(len(cache.layers))]
        return torch.cat([logits, again], 1), held


def generated(model: Any, **options: Any) -> torch.Tensor:
    """Scores of what generate() chose, [new,V]."""
    with kvpatch.patched(model, "keyformer", 0.3):
        out = model.generate(IDS[:1], max_new_tokens=8, return_dict_in_generate=True, output_logits=True, **options)
    return torch.stack(out.logits)[:, 0]


def trained(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and a gradient of a text read in blocks under an adaptive budget."""
    with kvpatch.patched(model, "adaptive(h2o)", 0.3, block=8):
        loss = model(IDS, labels=IDS, use_cache=False).loss
        loss.backward()
    weight = model.model.layers[0].self_attn.k_proj.weight
    gradient = weight.grad.full_tensor() if hasattr(weight.grad, "full_tensor") else weight.grad
    model.zero_grad()
    return loss.detach(), gradient


def kept(model: Any, path: Path) -> torch.Tensor:
    """Logits after a cache was saved, loaded and cloned."""
    with kvpatch.patched(model, "adaptive(tova)", 0.4) as patch, torch.no_grad():
        cache = patch.new_cache()
        model(IDS, past_key_values=cache)
        patch.save_cache(cache, path)
        past = patch.load_cache(path).clone()
        return model(FED[:, :1], past_key_values=past).logits


def words(function: Any) -> str:
    """Those of the KVPatchError that it raises."""
    try:
        function()
    except kvpatch.KVPatchError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    torch.set_num_threads(1)
    plans = {"llama": None, "mistral": None, "whole": GATHERED, "mqa": None}  # None: the model's own
    names = {"whole": "llama"}
    models = {
        name: AutoModelForCausalLM.from_pretrained(
            folder / names.get(name, name), distributed_config=DistributedConfig(tp_size=2, tp_plan=plan)
        ).eval()
        for name, plan in plans.items()
    }
    rank, llama = distributed.get_rank(), models["llama"]
    mine, other = (folder / f"cache-{at}.safetensors" for at in (rank, 1 - rank))
    found: dict[str, Any] = {"cases": [run(models[name], *case) for name, *case in CASES]}
    found["greedy"] = generated(llama, do_sample=False)
    found["lookup"] = generated(llama, do_sample=False, prompt_lookup_num_tokens=3)
    found["beams"] = generated(llama, do_sample=False, num_beams=2)
    found["trained"] = trained(copy.copy(llama))
    found["kept"] = kept(llama, mine)
    distributed.barrier()
    with kvpatch.patched(llama, "adaptive(tova)", 0.4) as patch:
        found["another's cache"] = words(lambda: patch.load_cache(other))
        _, cache = force(llama, IDS, FED[:, :2])
        found["report"] = patch.report()
        del cache
    by_hand = AutoModelForCausalLM.from_pretrained(folder / "llama")
    parallelize_module(by_hand, init_device_mesh("cpu", (2,)), {"model.layers.0.self_attn.q_proj": ColwiseParallel()})
    found["by hand"] = words(lambda: run(by_hand, "h2o", 0.3, {}))
    found["mqa"] = words(lambda: run(models["mqa"], "h2o", 0.3, {}))
    torch.save(found, folder / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
