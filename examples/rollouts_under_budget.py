"""Reinforcement learning in plain PyTorch: rollouts under a budget, and a learner that replays them (group-relative REINFORCE).

    python -m examples.rollouts_under_budget
    python -m examples.rollouts_under_budget --model llama-python-1 --steps 40

Prints for each step the mean reward, and by how much the learner's log-probabilities differ from those with which the tokens
were drawn: in a replay by rounding, with full attention by what the budget has taken away.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import kvpatch
from examples.train_with_trainer import rows
from tools.training import tasks


def log_probs(model: Any, texts: Tensor, n: int) -> Tensor:
    """Return the log-probability of each token behind the first n, [B,T-n]."""
    logits = model(texts, use_cache=False).logits[:, n - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, texts[:, n:, None])[..., 0]


def drawn(scores: tuple[Tensor, ...], chosen: Tensor) -> Tensor:
    """Return the log-probabilities with which generate() drew its tokens."""
    return torch.stack(scores, 1).log_softmax(-1).gather(-1, chosen[..., None])[..., 0]


def learn(
    model: Any, prompt: Tensor, wanted: Tensor, steps: int, policy: str = "h2o", k: float = 0.25, group: int = 16, new: int = 24
) -> list[tuple[float, float, float]]:
    """Train `model` to write `wanted` tokens: per step the mean reward, and how far off a replay and full attention are."""
    optimizer, n, found = torch.optim.AdamW(model.parameters(), lr=1e-3), prompt.shape[1], []
    for _ in range(steps):
        model.eval()
        with kvpatch.patched(model, policy, k, record=True) as patch:
            asked = {"do_sample": True, "top_k": 0, "max_new_tokens": new, "min_new_tokens": new, "num_return_sequences": group}
            out = model.generate(prompt, **asked, pad_token_id=0, output_logits=True, return_dict_in_generate=True)
            record = patch.record()
        texts, chosen = out.sequences, out.sequences[:, n:]
        rollout = drawn(out.logits, chosen)
        reward = torch.isin(chosen, wanted).float().mean(-1)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        with torch.no_grad():
            dense = (log_probs(model, texts, n) - rollout).abs().max()
        model.train()
        with kvpatch.replay(model, record):
            mine = log_probs(model, texts, n)
            loss = -((mine - rollout).exp() * advantage[:, None]).mean()  # the ratio is 1 at the first step on a rollout
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(reward.mean()), float((mine.detach() - rollout).abs().max()), float(dense)))
    return found


def main(
    model: Annotated[str, typer.Option(help="a shipped model")] = "llama-python",
    policy: Annotated[str, typer.Option(help="any of `kvpatch policies`")] = "h2o",
    k: Annotated[float, typer.Option(help="the budget")] = 0.25,
    steps: Annotated[int, typer.Option(help="of the optimizer")] = 20,
) -> list[tuple[float, float, float]]:
    """Reward newlines, and print a line for each step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, tokenizer = tasks.load(model)
    prompt = torch.tensor([rows(tokenizer)[1]["input_ids"]])
    wanted = torch.tensor([token for token in range(len(tokenizer)) if "\n" in tokenizer.decode([token])])
    found = learn(net, prompt, wanted, steps, policy, k)
    for step, (reward, replayed, dense) in enumerate(found):
        print(f"step {step:3}: reward {reward:.3f}, off by {replayed:.1e} in a replay, {dense:.1e} with full attention")
    return found


if __name__ == "__main__":
    typer.run(main)
