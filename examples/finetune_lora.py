"""LoRA adapters and a budget: train them inside the block, generate with them, switch them off, merge them.

    python -m examples.finetune_lora
    python -m examples.finetune_lora --block 16        # train the adapter under the budget as well

PEFT's wrappers are called as the modules that they are, so nothing is special: without `block=` the adapter's gradients are
those of the unpatched model, bit for bit.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated, Any

import torch
import typer
from peft import LoraConfig, get_peft_model

import kvpatch
from examples.train_with_trainer import rows
from tools.training import tasks


def train(model: Any, data: torch.Tensor, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    model.train()
    losses = []
    for step in range(steps):
        ids_BT = data[4 * step : 4 * step + 4]
        loss = model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def generate(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits [N,V] of the tokens that are generated."""
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 2}
    out = model.generate(input_ids=ids, output_logits=True, return_dict_in_generate=True, **options)
    return torch.cat(out.logits)


def main(
    model: Annotated[str, typer.Option(help="a shipped model")] = "llama-python",
    policy: Annotated[str, typer.Option(help="any of `kvpatch policies`")] = "h2o",
    k: Annotated[float, typer.Option(help="the budget")] = 0.25,
    block: Annotated[int | None, typer.Option(help="evict while training, after every so many tokens")] = None,
    steps: Annotated[int, typer.Option(help="of training")] = 3,
) -> dict[str, Any]:
    """Train an adapter outside the block and inside, then use it inside in every form."""
    torch.set_num_threads(1)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], r=4)
    found: dict[str, Any] = {}
    for where in ("outside", "inside"):
        torch.manual_seed(0)
        base, tokenizer = tasks.load(model)
        data = torch.tensor([row["input_ids"] for row in rows(tokenizer)])
        lora = get_peft_model(base, config)
        with kvpatch.patched(lora, policy, k, block=block) if where == "inside" else nullcontext():
            found[where] = train(lora, data, steps), [p.detach().clone() for p in lora.parameters() if p.requires_grad]
    same = all(map(torch.equal, found["inside"][1], found["outside"][1]))
    prompt = data[:1]
    with kvpatch.patched(lora, policy, k) as patch:
        wrapped = generate(lora, prompt)
        with lora.disable_adapter():
            off = generate(lora, prompt)
        merged_inside = generate(lora.merge_and_unload(), prompt)
        found["held"] = patch.report().held()
    with kvpatch.patched(base, policy, k):
        merged_outside = generate(base, prompt)
    found |= {"same": same, "wrapped": wrapped, "off": off, "merged": (merged_inside, merged_outside)}
    for where in ("outside", "inside"):
        print(f"losses {where:7} {found[where][0]}")
    print(f"adapters are the same, bit for bit: {same}")
    print(f"merged or not, logits differ by {(wrapped[0] - merged_inside[0]).abs().max():.1e} at most")
    print(f"tokens held per head: {found['held'].unique().tolist()}")
    return found


if __name__ == "__main__":
    typer.run(main)
