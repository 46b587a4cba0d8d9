"""Attention and column statistics from their definitions, in float64 with whole matrices, and prompts for them.

It shares no code with the library. Axes are those of the kernels: b text, h KV head, g query head of its group, r row, t
column. Padding holds NaN, and empty slots NaN or huge keys, wherever the kernels may not look.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

INF = float("inf")


@dataclass
class Prompt:
    """Arguments of the kernels: the tensors, and `options` by name. noise_BHTG: exp(noise)."""

    q_BHGQD: Tensor
    k_BHTD: Tensor
    v_BHTD: Tensor
    positions_BHT: Tensor
    rows_BQ: Tensor
    options: dict

    @property
    def tensors(self):
        return self.q_BHGQD, self.k_BHTD, self.positions_BHT, self.rows_BQ

    @property
    def holes(self):
        return bool((self.positions_BHT < 0).any() or (self.rows_BQ < 0).any())


def visible(prompt: Prompt) -> Tensor:
    """bool [B,H,Q,T]: which columns a row sees."""
    row = prompt.rows_BQ[:, None, :, None]
    position = prompt.positions_BHT[:, :, None, :]
    _, _, Q, T = torch.broadcast_shapes(row.shape, position.shape)
    seen = (row >= 0) & (position >= 0)
    if prompt.options.get("by_position"):
        seen = seen & (position <= row)
    else:
        r, t = torch.arange(Q)[:, None], torch.arange(T)[None, :]
        seen = seen & (t <= prompt.options.get("past", 0) + r).to(seen.device)
    if prompt.options.get("sliding") is not None:
        seen = seen & (row - position < prompt.options["sliding"])
    if prompt.options.get("deaths_BHT") is not None:
        seen = seen & (row < prompt.options["deaths_BHT"][:, :, None, :])
    return seen


def logits(prompt: Prompt, noisy: bool) -> Tensor:
    """float64 [B,H,G,Q,T], -inf where nothing is seen."""
    options = prompt.options
    x = options["scale"] * torch.einsum("bhgrd,bhtd->bhgrt", prompt.q_BHGQD.double(), prompt.k_BHTD.double())
    if options.get("softcap") is not None:
        x = options["softcap"] * torch.tanh(x / options["softcap"])
    if options.get("slopes_HG") is not None:
        distance = (prompt.positions_BHT[:, :, None] - prompt.rows_BQ[:, None, :, None]).double()
        x = x + options["slopes_HG"].double()[None, :, :, None, None] * distance[:, :, None]
    if noisy:
        x = x + options["noise_BHTG"].double().log().permute(0, 1, 3, 2)[:, :, :, None, :]
        x = x / options.get("tau", 1.0)
    return x.masked_fill(~visible(prompt)[:, :, None], -INF)


def is_noisy(prompt: Prompt) -> bool:
    return prompt.options.get("noise_BHTG") is not None


def normalisers(prompt: Prompt, noisy: bool | None = None) -> Tensor:
    """float64 [B,H,G,Q], +inf where a row sees nothing. Attention sinks join all but the noisy logits."""
    noisy = is_noisy(prompt) if noisy is None else noisy
    x = logits(prompt, noisy)
    lse = x.logsumexp(-1)
    if prompt.options.get("sinks_HG") is not None and not noisy:
        lse = torch.logaddexp(lse, prompt.options["sinks_HG"].double()[None, :, :, None])
    return lse.masked_fill((x == -INF).all(-1), INF)


def outputs(prompt: Prompt) -> Tensor:
    """float64 [B,H,G,Q,D], 0 where a row sees nothing."""
    p = (logits(prompt, False) - normalisers(prompt, False)[..., None]).exp()
    v = prompt.v_BHTD.double().masked_fill((prompt.positions_BHT < 0)[..., None], 0.0)
    return torch.einsum("bhgrt,bhtd->bhgrd", p.nan_to_num(0.0), v)


def gradients(prompt: Prompt, grad_BHGQD: Tensor) -> list[Tensor]:
    """float64 gradients of queries, keys and values, by autograd through the whole matrix."""
    leaves = [t.double().nan_to_num(0.0).requires_grad_() for t in (prompt.q_BHGQD, prompt.k_BHTD, prompt.v_BHTD)]
    seen = visible(prompt)[:, :, None]
    x = logits(Prompt(*leaves, prompt.positions_BHT, prompt.rows_BQ, prompt.options), False).masked_fill(~seen, -1e300)
    out = torch.einsum("bhgrt,bhtd->bhgrd", x.softmax(-1) * seen, leaves[2])
    out.backward(grad_BHGQD.double().nan_to_num(0.0))
    return [leaf.grad for leaf in leaves]


def keys(prompt: Prompt) -> Tensor:
    return visible(prompt).sum(-1)


def statistics(prompt: Prompt, slack: float = 0.0, counted: Tensor | None = None) -> dict[str, Tensor]:
    """Every statistic, float64 [B,H,T]. slack: by how much a probability must exceed its even share, in parts of it.
    counted: bool [B,H,G,Q], rows that count for something (all)."""
    p = (logits(prompt, is_noisy(prompt)) - normalisers(prompt)[..., None]).exp()
    if counted is not None:
        p = p * counted[..., None]
    share = p * keys(prompt)[:, :, None, :, None]
    # the one key of a row has exactly its share
    above = (share > 1.0 + slack) & (keys(prompt) > 1)[:, :, None, :, None]
    return {"sum": p.sum((2, 3)), "squares": p.mean(2).square().sum(2), "count": above.double().sum((2, 3))}


# ---- prompts ----


def make(
    Q: int,
    D: int = 64,
    *,
    B: int = 1,
    H: int = 2,
    G: int = 1,
    past: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    padding: list[tuple[int, int]] | None = None,
    counting: bool = True,
    offset: int = 0,
    alibi: bool = False,
    noise: bool = False,
    sinks: bool = False,
    gaps: bool = True,
    deaths: str | None = None,
    **options,
) -> Prompt:
    """A prompt of Q rows behind `past` columns of which some slots are empty and each head holds others.

    padding: [start, stop) of each text's rows that are none; those after it go on counting where they stopped, or
    not `counting`, as if they were some. offset: the first position. gaps: whether slots of the past are empty. deaths: "some"
    of the keys die at any later position, or "all" soon after their own.
    """
    draw = torch.Generator().manual_seed(Q + D + past)
    real = torch.ones(B, Q, dtype=torch.bool)
    for b, (start, stop) in enumerate(padding or []):
        real[b, start:stop] = False
    spread = 3 * past  # the past is what an eviction left of three times as many
    index = real.cumsum(1) - 1 if counting else torch.arange(Q).expand(B, Q)
    rows = (index + spread + offset).masked_fill(~real, -1)
    own = rows[:, None].expand(B, H, Q)
    positions = own
    if past:
        order = torch.rand(B, H, spread, generator=draw).argsort(-1)[..., :past]
        held = torch.rand(B, H, past, generator=draw) < (0.8 if gaps else 1.0)
        positions = torch.cat([(order + offset).masked_fill(~held, -1), own], -1)
    # as a model hands them over: heads beside each other within a token
    q_BQE = torch.randn(B, Q, H * G * D, generator=draw).mul(1.5)
    k_BTHD = torch.randn(B, past + Q, H, D, generator=draw).mul(1.5)
    q_BQE[:, ::2][~real[:, ::2]] = float("nan")  # every other row, so that neither numbers nor NaN are counted
    v_BTHD = torch.randn(B, past + Q, H, D, generator=draw)
    empty = positions.transpose(1, 2) < 0
    for tensor in (k_BTHD, v_BTHD):
        tensor[:, ::2][empty[:, ::2]] = float("nan")
        tensor[:, 1::2][empty[:, 1::2]] = 1e3
    q = q_BQE.to(dtype).view(B, Q, H, G, D).permute(0, 2, 3, 1, 4)
    k, v = (tensor.to(dtype).transpose(1, 2) for tensor in (k_BTHD, v_BTHD))
    options["scale"], options["past"] = D**-0.5, past
    if alibi:
        options["slopes_HG"] = (0.5 ** torch.arange(1, H * G + 1).view(H, G)).to(device)
    if noise:
        u_BHTG = torch.rand(B, H, past + Q, G, generator=draw)
        options["noise_BHTG"] = -u_BHTG.log().reciprocal().to(device)  # exp of Gumbel noise
    if sinks:
        options["sinks_HG"] = torch.randn(H, G, generator=draw).mul(2.0).to(device)
    if deaths is not None:
        left = torch.randint(1, 20 if deaths == "all" else 2 * Q, (B, H, T := past + Q), generator=draw)
        lives = (torch.rand(B, H, T, generator=draw) < 0.3) & (deaths == "some")
        dies = torch.where(lives, torch.iinfo(torch.int32).max, positions + left)
        options["deaths_BHT"] = dies.to(device, torch.int32)
    # .to keeps the strides
    return Prompt(q.to(device), k.to(device), v.to(device), positions.to(device), rows.to(device), options)


def tail(W: int, T: int, **arguments) -> Prompt:
    """The last W of the positions as rows over T slots in any order, some of them empty and some of them of the future."""
    prompt = make(T, **arguments)
    B, H = prompt.k_BHTD.shape[:2]
    draw = torch.Generator().manual_seed(W)
    order = torch.rand(B, H, T, generator=draw).argsort(-1).to(prompt.rows_BQ.device)
    empty = (torch.rand(B, H, T, generator=draw) < 0.2).to(order.device)
    prompt.positions_BHT = order.masked_fill(empty, -1)
    prompt.rows_BQ = torch.arange(T - W - 2, T - 2, device=order.device).expand(B, W).contiguous()
    prompt.rows_BQ[-1, 0] = -1
    prompt.q_BHGQD = prompt.q_BHGQD[:, :, :, T - W :].clone()
    prompt.q_BHGQD[-1, :, :, 0] = float("nan")
    prompt.options |= {"by_position": True, "past": 0}
    return prompt
