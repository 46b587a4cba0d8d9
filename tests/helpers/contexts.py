"""A small eviction context, written out."""

from types import SimpleNamespace

import torch

from kvpatch.policies.context import EvictionContext, Limits


def small_context(group, sliding):
    positions = torch.tensor([[[0, 3, 5, 9]]])
    return EvictionContext(
        layer=0, seed=0, positions_BHT=positions, newest_B11=torch.tensor([[[9]]]), recent_B11=torch.tensor([[[9]]]),
        state={"sum": torch.tensor([[[6.0, 3.0, 2.0, 1.0]]]), "squares": torch.tensor([[[8.0, 2.0, 1.5, 1.0]]])},
        limits=Limits.of([(0, 0, 0, 2, 0, 0)], torch.device("cpu")), group=group, sliding=sliding, empty=False,
    )  # fmt: skip


def orders(B=2, H=3, T=9):
    """Eviction keys [B,H,T], all different."""
    return torch.randperm(B * H * T, generator=torch.Generator().manual_seed(B * H + T)).view(B, H, T)


def reading(**what):
    """A layer, as far as the views of needs ask it: each name returns what is given."""
    return SimpleNamespace(**{name: lambda *args, value=value: value for name, value in what.items()})
