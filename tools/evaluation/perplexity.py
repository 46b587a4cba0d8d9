"""Nats per token of a text that a language model reads under a budget."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpatch.evaluation.teacher_forcing import feed, wide


@torch.no_grad()
def nats(model: Any, ids_BT: Tensor, counted: int, way: str) -> Tensor:
    """Cross entropy of the last `counted` tokens, [B,C], under whatever patch is in force.

    way: "token" reads the others as a prompt and these one by one; "block" reads all in one pass, which a patch may cut.
    """
    n = ids_BT.shape[1] - counted
    if way == "token":
        logits_BCV = feed(model, ids_BT[:, :-1], n).logits_BSV
    else:
        fewer = "logits_to_keep" in inspect.signature(model.forward).parameters
        given = {"logits_to_keep": counted + 1} if fewer else {}
        logits_BCV = model(ids_BT, use_cache=False, **given).logits[:, -counted - 1 : -1]
    return F.cross_entropy(wide(logits_BCV).mT, ids_BT[:, n:], reduction="none")
