"""The oracle against the unpatched models, against numbers worked out by hand, and against its own promises."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
)
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from tests.helpers.training import gradients
from tests.oracle import reference
from tests.oracle.reference import Row, run, run_turns
from tests.oracle.reference_models import Decoder, decoder_of

# Real models. Wide initial weights, so that attention is far from uniform and a wrong key would show.

WIDE = {"vocab_size": 61, "initializer_range": 0.3, "attn_implementation": "eager"}
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, **WIDE}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, **WIDE}
MPT = {"d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64, **WIDE}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}

MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **LLAMA)),
    "llama-mqa-wide-heads": lambda: LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, head_dim=12, **LLAMA)),
    "llama-biases": lambda: LlamaForCausalLM(LlamaConfig(attention_bias=True, mlp_bias=True, **LLAMA)),
    "llama-yarn": lambda: LlamaForCausalLM(LlamaConfig(rope_parameters=YARN, **LLAMA)),
    "llama-dynamic": lambda: LlamaForCausalLM(LlamaConfig(rope_parameters=DYNAMIC, max_position_embeddings=9, **LLAMA)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(num_key_value_heads=2, sliding_window=None, **LLAMA)),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(num_key_value_heads=2, sliding_window=7, **LLAMA)),
    "mpt": lambda: MptForCausalLM(MptConfig(**MPT)),
    "mpt-odd-heads": lambda: MptForCausalLM(MptConfig(**MPT | {"n_heads": 6, "d_model": 48})),
    "mpt-clip-scale": lambda: MptForCausalLM(MptConfig(attn_config={"clip_qkv": 1.0, "softmax_scale": 0.7}, **MPT)),
    "gptj": lambda: GPTJForCausalLM(GPTJConfig(rotary_dim=4, **GPT2)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "gpt2-by-layer": lambda: GPT2LMHeadModel(GPT2Config(scale_attn_by_inverse_layer_idx=True, **GPT2)),
    "gpt2-unscaled": lambda: GPT2LMHeadModel(GPT2Config(scale_attn_weights=False, **GPT2)),
}
FIVE = ("llama", "mistral", "mpt", "gptj", "gpt2")


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the biases, and the scales of the norms, start as exact zeros and ones
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def text(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 61, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def draw(kind: str, l: int, h: int, t: int, i: int) -> float:
    """Reproducible numbers, different for every argument."""
    u = (math.sin(12.9898 * l + 78.233 * h + 37.719 * t + 4.581 * i + len(kind)) * 43758.5453) % 1.0
    u = min(max(u, 1e-6), 1 - 1e-6)
    return -math.log(-math.log(u)) if kind == "gumbel" else u


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_full_is_the_unpatched_model(name: str, dtype: torch.dtype) -> None:
    model, prompt, rest = make(name).to(dtype), text(14), text(6, 2)
    ours = run(model, prompt, rest, policy="full", k=0.5)
    exact = not name.startswith(("mpt", "gptj"))  # these two have attention code of their own, in float32 always
    if exact:
        model.set_attn_implementation("sdpa")
    theirs, cache = [], None
    with torch.no_grad():
        for chunk in (prompt, *([token] for token in rest)):  # a dynamic RoPE depends on how the text was cut
            out = model(torch.tensor([chunk]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            theirs.append(out.logits[0].double())
    assert ours.logits.std() > 0.1
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9 if exact else 1e-5
    torch.testing.assert_close(ours.logits, torch.cat(theirs), rtol=0, atol=tolerance)
    assert ours.logits.dtype == torch.float64
    assert all(head == list(range(20)) for layer in ours.kept[-1] for head in layer)
    assert ours.margin == math.inf
    assert next(model.parameters()).dtype == dtype  # the model itself is left alone


@pytest.mark.parametrize("name", ["mpt", "mpt-odd-heads"])
def test_alibi_slopes_are_the_models_own(name: str) -> None:
    decoder = decoder_of(make(name))
    theirs = -build_mpt_alibi_tensor(decoder.query_heads, 2)[:, 0, 0].double()
    ours = torch.tensor([decoder.slope(h) for h in range(decoder.query_heads)], dtype=torch.float64)
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=0)
    assert len(set(ours.tolist())) == decoder.query_heads


@pytest.mark.parametrize("name", [*FIVE, "mistral-window"])
def test_sinks_and_window_are_the_model_under_a_mask(name: str) -> None:
    """With the same tokens in every layer and head the unpatched model can do it, by one mask over the whole text."""
    model, prompt, rest = make(name), text(20), text(6, 2)
    ours = run(model, prompt, rest, policy="streaming_llm", k=6)
    n, N, window = 20, 26, getattr(model.config, "sliding_window", None) or 10**6
    hidden = torch.finfo(torch.float32).min
    mask = torch.full((N, N), hidden)
    for t in range(N):
        held = range(t) if t < n else [*range(4), t - 2, t - 1]
        for i in (*held, t):
            if t - i < window:
                mask[t, i] = 0.0
    with torch.no_grad():
        theirs = model(torch.tensor([prompt + rest]), attention_mask=mask[None, None], use_cache=False).logits[0]
        causal = model(torch.tensor([prompt + rest]), use_cache=False).logits[0]
    torch.testing.assert_close(ours.logits, theirs.double(), rtol=0, atol=1e-4)
    assert (ours.logits - causal)[n:].abs().max() > 0.01  # the mask matters
    for j, moment in enumerate(ours.kept):
        assert all(head == [0, 1, 2, 3, n + j - 2, n + j - 1] for layer in moment for head in layer)


def test_prompt_scores_from_the_models_own_attention() -> None:
    """What the prompt's eviction keeps, from the attention matrices that transformers itself returns."""
    model, n, b = make("llama").double(), 24, 8
    prompt = text(n)
    with torch.no_grad():
        out = model(torch.tensor([prompt]), output_attentions=True, use_cache=True)
    position, safe = torch.arange(n), 1e3  # `safe` outranks any score: these are protected

    def newest(r: int) -> Tensor:
        return safe * (position >= n - r)

    for l, attention in enumerate(out.attentions):
        by_head_HTT = attention[0]
        a_KTT = by_head_HTT.unflatten(0, (2, 2)).mean(1)
        total, rows = a_KTT.sum(1), n - position
        std = ((a_KTT**2).sum(1) / rows - (total / rows) ** 2).clamp(min=0).sqrt()
        spread = torch.zeros(2, n).scatter_(1, std.topk(4).indices, safe)
        above = (by_head_HTT > 1 / (position + 1.0)[:, None]) & (position > 0)[:, None]
        above_K = above.double().unflatten(0, (2, 2)).mean(1).sum(1)
        window = nn.functional.max_pool1d(a_KTT[:, -4:, : n - 4].mean(1), 3, 1, 1)
        scores = {
            "key_attention": total,
            "h2o": total + newest(4),
            "scissorhands": above_K + newest(4) + position * 1e-6,  # the position breaks ties
            "tova": a_KTT[:, -1].mean(0).expand(2, n),
            "roco": total / rows + newest(2) + spread,
            "snapkv": nn.functional.pad(window, (0, 4), value=safe) + position * 1e-9,
            "key_norm": -out.past_key_values.layers[l].keys[0].norm(dim=-1),
        }
        options: dict[str, dict[str, Any]] = {"roco": {"recent": 2}, "snapkv": {"window": 4, "kernel": 3}}
        for policy, s in scores.items():
            ours = run(model, prompt, [], policy=policy, k=b, **options.get(policy, {}))
            assert ours.margin > 1e-5, policy
            assert ours.kept[0][l] == s.topk(b).indices.sort().values.tolist(), policy


# Worked out by hand: a decoder whose attention is a table of numbers


class Table(Decoder):
    """Logits x[l][h][t][i] written down; key i is the i-th unit vector and so is its value, so that the "logits" that
    come out of a one-layer table are the probabilities themselves: entry h * size + i of row t is a[t, i] of head h."""

    def __init__(
        self,
        x: Sequence[Sequence[Sequence[Sequence[float]]]],
        kv_heads: int = 1,
        window: int | None = None,
        rows: Sequence[Sequence[Sequence[float]]] | None = None,
    ):
        self.size = len(x[0][0])
        padded = [[[[*row, *[0.0] * (self.size - len(row))] for row in head] for head in layer] for layer in x]
        self.x_LHTT = torch.tensor(padded, dtype=torch.float64)
        self.layers, self.query_heads, self.kv_heads, self.window = len(x), len(x[0]), kv_heads, window
        self.rows = rows  # rows[h][i]: value i behind the output projection of head h

    def scale(self, l: int) -> float:
        return 1.0

    def embed(self, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        return torch.zeros(len(ids_T), self.query_heads * self.size, dtype=torch.float64)

    def project(self, l: int, h_TE: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        unit = torch.eye(self.size, dtype=torch.float64)[positions_T].expand(self.kv_heads, -1, -1)
        return self.x_LHTT[l][:, positions_T], unit, unit

    def output(self, l: int, y_TE: Tensor) -> Tensor:
        return y_TE

    def output_rows(self, l: int, h: int) -> Tensor:
        return torch.tensor(self.rows[h], dtype=torch.float64)

    def block(self, l: int, x_TE: Tensor, attention: Any) -> Tensor:
        return attention(x_TE)

    def logits(self, x_TE: Tensor) -> Tensor:
        return x_TE


def logs(p: Sequence[Sequence[float]]) -> list[list[float]]:
    """Logits whose softmax is p."""
    return [[math.log(value) for value in row] for row in p]


def rows_of(*heads: Sequence[Sequence[float]]) -> list[Row]:
    """The rows of one KV head whose query heads have these probabilities; x is their logarithm."""
    rows = []
    for t in range(len(heads[0])):
        a = {i: [head[t][i] for head in heads] for i in range(len(heads[0][t]))}
        rows.append(Row(t, {i: [math.log(value) for value in values] for i, values in a.items()}, a))
    return rows


#     key: 0    1     2    3     4
P = [
    [1.0],
    [0.6, 0.4],
    [0.5, 0.3, 0.2],
    [0.1, 0.2, 0.3, 0.4],
    [0.1, 0.2, 0.3, 0.2, 0.2],
]
Q = [[1.0], [0.2, 0.8], [0.45, 0.05, 0.5], [0.3, 0.05, 0.3, 0.35]]


def kept(p: Any, n: int, policy: str, k: Any, **options: Any) -> list[list[int]]:
    """kept[moment] of a one-layer, one-head table fed n prompt tokens and then the rest."""
    size = len(p)
    result = run(Table([[logs(p)]]), [0] * n, [0] * (size - n), policy=policy, k=k, **options)
    return [moment[0][0] for moment in result.kept]


def test_scores_by_hand() -> None:
    rows = rows_of(P[:4])
    assert [reference.accumulated(rows, i) for i in range(4)] == pytest.approx([2.2, 0.9, 0.5, 0.4])
    assert [reference.mean(rows, i) for i in range(4)] == pytest.approx([0.55, 0.3, 0.25, 0.4])
    # Row 0 sees one key, a = 1/1, which is not above 1/1; row 2: 0.5 > 1/3 only; row 3: 0.3 and 0.4 > 1/4.
    counted, closest = zip(*(reference.quantized(rows, i) for i in range(4)), strict=True)
    assert counted == (2.0, 0.0, 1.0, 1.0)
    assert min(closest) == pytest.approx(0.1)  # row 2, key 1: 0.3 * 3
    # The keys that t attends to, not those before it: 0.3 and 0.7 against 1/2, though t is 9.
    late = [Row(9, {}, {0: [0.3], 4: [0.7]})]
    assert [reference.quantized(late, i)[0] for i in (0, 4)] == [0.0, 1.0]
    assert [reference.last(rows, i) for i in range(4)] == [0.1, 0.2, 0.3, 0.4]
    # Key 0: (1 + 0.36 + 0.25 + 0.01) / 4 - 0.55^2. Key 1: 0.29 / 3 - 0.3^2. Key 2: 0.13 / 2 - 0.25^2. Key 3: one row.
    variances = [0.1025, 0.29 / 3 - 0.09, 0.0025, 0.0]
    assert [reference.deviation(rows, i) ** 2 for i in range(4)] == pytest.approx(variances)
    assert reference.deviation(rows, 3) == 0.0


def test_groups_by_hand() -> None:
    """Two query heads, one KV head: probabilities are averaged, squares are of the average, indicators per head."""
    rows = rows_of([[1.0], [0.9, 0.1], [0.2, 0.2, 0.6]], [[1.0], [0.3, 0.7], [0.4, 0.5, 0.1]])
    assert [reference.accumulated(rows, i) for i in range(3)] == pytest.approx([1 + 0.6 + 0.3, 0.4 + 0.35, 0.35])
    assert reference.deviation(rows, 1) == pytest.approx(0.025)  # 0.4 and 0.35, half their distance
    # Row 1 (> 1/2): head 0 takes key 0, head 1 key 1. Row 2 (> 1/3): head 0 takes key 2, head 1 keys 0 and 1.
    assert [reference.quantized(rows, i)[0] for i in range(3)] == [1.0, 1.0, 0.5]


def test_thirds_are_exact() -> None:
    """With three query heads 1/3 + 1/3 + 1/3 must equal one whole count, or ties would break by rounding."""
    one, two = [[1.0], [0.9, 0.1]], [[1.0], [0.1, 0.9]]
    scores = [reference.quantized(rows_of(*heads) * 7, 0)[0] for heads in ((one, two, two), (two, one, two), (two, two, one))]
    assert scores == [7 / 3] * 3


def test_gumbel_softmax_by_hand() -> None:
    row = Row(1, {0: [0.0, 0.0], 1: [math.log(8), math.log(8)]}, {0: [1 / 9] * 2, 1: [8 / 9] * 2})
    assert reference.gumbel_softmax(row, lambda j, i: 0.0, 1.5) == pytest.approx({0: 0.2, 1: 0.8})  # 8^(2/3) = 4
    # A constant changes nothing; log 8 on key 0 of the second head makes the two keys equal there.
    assert reference.gumbel_softmax(row, lambda j, i: 0.5772, 1.5) == pytest.approx({0: 0.2, 1: 0.8})
    noise = {(1, 0): math.log(8)}
    assert reference.gumbel_softmax(row, lambda j, i: noise.get((j, i), 0.0), 1.5) == pytest.approx({0: 0.35, 1: 0.65})


def test_observation_window_by_hand() -> None:
    p = [[1.0], [0.5, 0.5], [0.2, 0.3, 0.5], [0.1, 0.5, 0.1, 0.3], [0.3, 0.1, 0.1, 0.4, 0.1]]
    rows = rows_of(p)
    assert reference.observation(rows, range(5), 2, 3, None) == pytest.approx({0: 0.2, 1: 0.3, 2: 0.1})
    assert reference.observation(rows, range(5), 2, 3, "max") == pytest.approx({0: 0.3, 1: 0.3, 2: 0.3})
    assert reference.observation(rows, range(5), 2, 3, "avg") == pytest.approx({0: 0.5 / 3, 1: 0.2, 2: 0.4 / 3})
    assert reference.observation(rows, range(5), 0, 3, "max") == dict.fromkeys(range(5), 0.0)
    assert kept(p, 5, "snapkv", 3, window=2, kernel=1, pooling=None) == [[1, 3, 4]]
    assert kept(p, 5, "snapkv", 3, window=2, kernel=3) == [[2, 3, 4]]  # pooled to equal scores: the higher position
    assert kept(p, 5, "snapkv", 3, window=9) == [[2, 3, 4]]  # the window is clamped to the budget
    assert kept(p, 5, "snapkv", 3, window=9, sinks=1) == [[0, 3, 4]]  # and to what sinks leave of it


def test_decode_step_by_hand() -> None:
    """The cache holds 0 and 1; the new token attends to these and itself, over a denominator of 0.1 + 0.2 + 0.2."""
    result = run(Table([[logs(P)]]), [0] * 4, [0], policy="key_attention", k=2)
    assert [moment[0][0] for moment in result.kept] == [[0, 1], [0, 1]]
    assert result.logits[4].tolist() == pytest.approx([0.2, 0.4, 0.0, 0.0, 0.4])
    assert result.margin == pytest.approx(0.4)  # at the prompt 0.9 - 0.5; at the step 0.9 + 0.4 - 0.4
    assert result.logits[3].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.0])


@pytest.mark.parametrize(
    ("policy", "options", "expected"),
    [
        ("window", {}, [[2, 3], [3, 4]]),
        ("window", {"sinks": 1}, [[0, 3], [0, 4]]),
        ("window", {"protect": [False, True, False, False]}, [[1, 3], [1, 4]]),
        ("window", {"sinks": 7, "protect": [False, True, False, False]}, [[0, 1], [0, 1]]),
        ("window", {"sinks": 1, "protect": [False, True, True, False]}, [[1, 2], [1, 2]]),
        ("window", {"quota": [0, 0, -1, -1]}, [[1, 3], [1, 4]]),  # 2 * 2 / 4 is one token of 0 and 1
        ("window", {"quota": [0, -1, -1, -1]}, [[2, 3], [3, 4]]),  # 2 * 1 / 4 is none
        ("window", {"quota": [0, 0, 1, 1]}, [[1, 3], [1, 3]]),
        ("window", {"sinks": 1, "quota": [0, 0, -1, -1]}, [[0, 3], [0, 4]]),  # 0 counts
        ("window", {"recent": 2, "quota": [0, 0, -1, -1]}, [[2, 3], [3, 4]]),  # no room
        ("dilated_window", {}, [[0, 2], [2, 4]]),
        ("dilated_window", {"dilation": 0}, [[2, 3], [3, 4]]),
        ("dilated_window", {"dilation": 2}, [[0, 3], [0, 3]]),
        ("streaming_llm", {"sinks": 1}, [[0, 3], [0, 4]]),
        ("streaming_llm", {}, [[0, 1], [0, 1]]),
        ("key_attention", {"recent": 1}, [[0, 3], [0, 4]]),
        ("h2o", {}, [[0, 3], [0, 4]]),
        ("h2o", {"recent": 2}, [[2, 3], [3, 4]]),
        ("scissorhands", {"recent": 0}, [[0, 3], [0, 3]]),  # counts 2 0 1 1; at the step 0.2 0.4 0.4: 2 . . 2 1
        ("tova", {}, [[2, 3], [2, 4]]),  # at the step 0.3, 0.2, 0.2 over 0.7: of the equal ones the higher position
        ("roco", {"recent": 0, "protected": 0}, [[0, 3], [0, 4]]),  # at the step 2.343/5, 0.686/2, 0.4
        ("keyformer", {"noise": "none", "recent": 0, "tau": (1, 1)}, [[0, 1], [0, 1]]),
        ("key_norm", {}, [[2, 3], [3, 4]]),  # all norms are 1: the higher positions stay
    ],
)
def test_kept_by_hand(policy: str, options: dict[str, Any], expected: list[list[int]]) -> None:
    assert kept(P, 4, policy, 2, **options) == expected


def test_roco_protects_what_varies() -> None:
    """Means 0.4875, 0.3, 0.4, 0.35; variances 0.0955, 0.125, 0.01, 0."""
    assert kept(Q, 4, "roco", 2, recent=0, protected=0) == [[0, 2]]
    assert kept(Q, 4, "roco", 2, recent=0, protected=1) == [[0, 1]]
    assert kept(Q, 4, "roco", 2, recent=0) == [[0, 1]]  # half of 2
    assert kept(Q, 4, "roco", 2, recent=1) == [[1, 3]]
    assert kept(Q, 4, "roco", 2) == [[2, 3]]  # the ten newest take all of the budget
    # Recent tokens take part in the ranking. Deviations 0.35 0.22 0.37 0: the one place goes to key 2, which is recent
    # anyway, so that of 0 and 1 the mean decides: 0.4375 and 0.493.
    p = [[1.0], [0.4, 0.6], [0.3, 0.69, 0.01], [0.05, 0.19, 0.75, 0.01]]
    assert kept(p, 4, "roco", 3, recent=2, protected=1) == [[1, 2, 3]]


def test_decode_only_ranks_generated_tokens_alone() -> None:
    """Of 2 3 4 the means are 0.167 0.175 0.2, and 2 varies most; the prompt's tokens 0 and 1 vary more than these."""
    p = [[1.0], [0.1, 0.9], [0.3, 0.3, 0.4], [0.5, 0.3, 0.05, 0.15], [0.35, 0.2, 0.05, 0.2, 0.2]]
    given = {"schedule": "decode", "recent": 0}
    assert kept(p, 2, "roco", 2, protected=0, **given) == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 3, 4]]
    assert kept(p, 2, "roco", 2, protected=1, **given)[-1] == [0, 1, 2, 4]


def test_random_keeps_the_largest_numbers() -> None:
    numbers = {(3, 0): 0.3, (3, 1): 0.9, (3, 2): 0.1, (3, 3): 0.5, (4, 1): 0.2, (4, 3): 0.6, (4, 4): 0.4}
    assert kept(P, 4, "random", 2, draw=lambda kind, l, g, t, i: numbers[t, i]) == [[1, 3], [3, 4]]


def test_keyformer_temperature_noise_and_damping_by_hand() -> None:
    # n = 1: nothing is evicted at the prompt; T = 2, so step 1 has tau 1.5, steps 2 and later 2.
    x = [[0.0], [0.0, math.log(8)], [0.0, 0.0, math.log(16)], [0.0, 0.0, 0.0, 0.0]]
    calls: list[tuple[str, int, int, int, int]] = []

    def record(*arguments: Any) -> float:
        calls.append(arguments)
        return 0.0

    def scores(**options: Any) -> tuple[float, ...]:
        """The two scores of tokens 0 and 1 after step 1, found from a run with budget 1 through its margin."""
        given = {"noise": "none", "recent": 0, **options}
        result = run(Table([[x]]), [0], [0], policy="keyformer", k=1, generation_length=2, **given)
        return result.margin, result.kept[1][0][0][0]

    assert scores() == pytest.approx((1.2 - 0.8, 0))  # 1 + 0.2 and 0.8
    assert scores(tau=(1.0, 1.0)) == pytest.approx((1 + 1 / 9 - 8 / 9, 0))
    assert scores(damping=0.5) == pytest.approx((0.8 - 0.7, 1))
    assert scores(noise="gumbel", draw=record) == pytest.approx((0.4, 0))
    assert calls == [("gumbel", 0, 0, -1, 0), ("gumbel", 0, 0, -1, 1)]
    calls.clear()
    scores(noise="gaussian", resample=True, draw=record)
    assert calls == [("gaussian", 0, 0, t, i) for t, i in ((0, 0), (1, 0), (1, 1))]
    assert scores(noise="gumbel", draw=lambda *a: math.log(8) if a[4] == 0 else 0.0) == pytest.approx((1.0, 0))
    # Step 2, budget 2: tau 2 makes 16 a 4, f = 1/6 1/6 2/3. Sums: 1 + 0.2 + 1/6, 0.8 + 1/6, 2/3: the newest goes.
    given = {"policy": "keyformer", "k": 2, "recent": 0, "noise": "none"}
    result = run(Table([[x]]), [0], [0, 0], generation_length=2, **given)
    assert (result.kept[2][0][0], result.margin) == ([0, 1], pytest.approx(0.3))
    # T = 1: tau is 2 at step 1 and stays 2 at step 2, where the square root of 10000 gives f = 1/101 100/101.
    x[2] = [0.0, 0.0, math.log(10000)]
    result = run(Table([[x]]), [0], [0, 0], generation_length=1, **{**given, "k": 1})
    assert result.margin == pytest.approx(1 + 1 / (1 + math.sqrt(8)) + 1 / 101 - 100 / 101)


def test_noise_is_drawn_per_query_head() -> None:
    calls: set[tuple[Any, ...]] = set()

    def record(*arguments: Any) -> float:
        calls.add(arguments)
        return 0.0

    table = Table([[logs(P[:2])] * 6] * 2, kv_heads=2)
    run(table, [0, 0], [], policy="keyformer", k=1, draw=record)
    assert calls == {("gumbel", l, h, -1, i) for l in range(2) for h in range(6) for i in range(2)}
    # Noise on the fourth query head is the second KV head's: there row 1 is 0.6 0.4 twice and 0 1 once. Row 0 is 1.
    lone = run(table, [0, 0], [], policy="keyformer", k=1, draw=lambda *a: 99.0 if a[1:3] + a[4:] == (0, 3, 1) else 0.0)
    assert lone.kept == [[[[0], [0]], [[0], [0]]]]
    assert lone.margin == pytest.approx((1 + 2 * 0.6 / 3) - (2 * 0.4 + 1) / 3)


def test_damping_counts_the_prompt_as_one_addition() -> None:
    undamped = run(Table([[logs(P)]]), [0] * 4, [0], policy="keyformer", k=2, recent=0, noise="none", tau=(1.0, 1.0))
    damped = run(Table([[logs(P)]]), [0] * 4, [0], policy="keyformer", k=2, recent=0, noise="none", tau=(1.0, 1.0), damping=0.0)
    assert undamped.kept[0] == damped.kept[0] == [[[0, 1]]]  # 2.2 0.9 0.5 0.4
    assert undamped.kept[1] == [[[0, 1]]]
    assert damped.kept[1] == [[[1, 4]]]  # the last row alone: 0.2 0.4 0.4


def test_shared_scores_go_through_the_layers() -> None:
    """Layer 0's own sums are 2.2 0.9 0.5 0.4 and layer 1's 1.04 1.16 1.75 0.05; shared, layer 1 decides by 3.24 2.06
    2.25 0.45, in which key 2 still has what layer 0 gave it before evicting it."""
    second = [[1.0], [0.02, 0.98], [0.01, 0.09, 0.9], [0.01, 0.09, 0.85, 0.05], [0.1, 0.2, 0.1, 0.3, 0.3]]
    given = {"policy": "keyformer", "k": 2, "recent": 0, "noise": "none", "tau": (1.0, 1.0)}
    table = Table([[logs(P)], [logs(second)]])
    own = run(table, [0] * 4, [0], **given)
    assert own.kept == [[[[0, 1]], [[1, 2]]]] * 2
    shared = run(table, [0] * 4, [0], shared=True, **given)
    # The step. Layer 0 over 0 1 4: 3.24 + 0.2, 2.06 + 0.4, 0.4. Layer 1 over 0 2 4: 3.44 + 0.2, 2.25 + 0.2, 0.4 + 0.6.
    assert shared.kept == [[[[0, 1]], [[0, 2]]]] * 2
    assert shared.margin == pytest.approx(2.25 - 2.06)
    # Damped, layer 1's addition halves layer 0's: 1.1 + 1.04, 0.45 + 1.16, 0.25 + 1.75, 0.2 + 0.05.
    damped = run(table, [0] * 4, [], shared=True, damping=0.5, **given)
    assert (damped.kept, damped.margin) == ([[[[0, 1]], [[0, 2]]]], pytest.approx(2.0 - 1.61))


def test_tova_keeps_one_set_or_one_per_head() -> None:
    first = [[1.0], [0.5, 0.5], [0.1, 0.3, 0.6]]
    second = [[1.0], [0.5, 0.5], [0.55, 0.35, 0.1]]
    table = Table([[logs(first), logs(second)]], kv_heads=2)
    assert run(table, [0] * 3, [], policy="tova", k=1).kept == [[[[2], [2]]]]  # 0.325 0.325 0.35
    assert run(table, [0] * 3, [], policy="tova", k=1, heads="each").kept == [[[[2], [0]]]]


def test_a_token_outside_the_sliding_window_is_evicted_first() -> None:
    """Window 3: after the prompt of 4 the next query, 4, sees 2 and 3 only. 0 and 1 are dead, whatever their score."""
    p = [[1.0], [0.8, 0.2], [0.8, 0.1, 0.1], [0.0, 0.8, 0.1, 0.1], [0.0, 0.0, 0.8, 0.1, 0.1]]
    x = [[math.log(value) if value else 9.0 for value in row] for row in p]  # 9: must never be looked at
    table = Table([[x]], window=3)
    result = run(table, [0] * 4, [0], policy="key_attention", k=2)
    assert [moment[0][0] for moment in result.kept] == [[2, 3], [3, 4]]  # at the step 2 is dead: 5 - 2 >= 3
    assert run(table, [0] * 4, [], policy="key_attention", k=3).kept == [[[[0, 2, 3]]]]  # of the dead, 2.6 and 1.1
    assert run(table, [0] * 4, [], policy="key_attention", k=3, sinks=1).kept == [[[[0, 2, 3]]]]
    assert run(table, [0] * 4, [0], policy="key_attention", k=2, sinks=1).kept[1] == [[[0, 4]]]
    assert result.logits[3].tolist() == pytest.approx([0.0, 0.8, 0.1, 0.1, 0.0])
    assert result.margin == math.inf  # dead against live is no near-tie


# Its promises, on a real model

ALL = [name for name, options in reference.POLICIES.items() if name != "full" and "calibration" not in options]
ONCE = [name for name in ALL if reference.POLICIES[name].get("schedule") == "prompt"]  # evict at the prompt's end only
# of generated tokens, or of many tokens at once: test_oracle_decoding.py
LATER = [name for name in ALL if reference.POLICIES[name]["score"] in (*reference.LATER, *reference.RECENT)]
SHARING = {"pyramid", "adaptive", "global_topk"}
EVEN = [name for name in ALL if name not in LATER and not SHARING & {*reference.POLICIES[name].get("wrap", ())}]


@pytest.mark.parametrize("policy", EVEN)
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_sizes_and_protection(policy: str, name: str) -> None:
    n, m = 21, 4
    protect = [i == 9 for i in range(n)]
    result = run(make(name), text(n), text(m, 2), policy=policy, k=[0.4, 6, 1.0], sinks=2, protect=protect, recent=3, draw=draw)
    assert len(result.kept) == m + 1
    for j, moment in enumerate(result.kept):
        grows = policy in ONCE
        for layer, b in zip(moment, (8, 6, n), strict=True):
            for head in layer:
                assert len(head) == (b + j if grows or b == n else b)
                assert head == sorted(set(head))
                assert {0, 1, 9, n + j - 1, n + j - 2, n + j - 3} <= set(head)
                assert max(head) == n + j - 1


@pytest.mark.parametrize("policy", ALL)
def test_one_never_evicts(policy: str) -> None:
    model = make("llama")
    full = run(model, text(12), text(4, 2), policy="full", k=0.2)
    all_kept = run(model, text(12), text(4, 2), policy=policy, k=1.0, draw=draw)
    assert torch.equal(all_kept.logits, full.logits)
    assert all_kept.kept == full.kept
    if policy not in (*ONCE, *LATER):
        some = run(model, text(12), text(4, 2), policy=policy, k=0.5, draw=draw)
        assert not torch.allclose(some.logits[13:], full.logits[13:])


@pytest.mark.parametrize("schedule", ["prompt", "decode", "both"])
@pytest.mark.parametrize("policy", ["h2o", "roco", "keyformer", "window", "tova"])
def test_schedules(policy: str, schedule: str) -> None:
    n, m, b = 10, 8, 4
    result = run(make("gpt2"), text(n), text(m, 2), policy=policy, k=0.4, schedule=schedule, draw=draw)
    for j, moment in enumerate(result.kept):
        for head in (head for layer in moment for head in layer):
            if schedule == "decode":
                assert head[:n] == list(range(n))
                assert len(head) == n + min(j, b)
            else:
                assert len(head) == (b + j if schedule == "prompt" else b)


def test_a_short_prompt_fills_the_budget_first() -> None:
    sizes = [len(moment[0][0]) for moment in run(make("gpt2"), text(3), text(5, 2), policy="h2o", k=6).kept]
    assert sizes == [3, 4, 5, 6, 6, 6]
    late = run(make("gpt2"), text(2), text(8, 2), policy="window", k=6, sinks=4).kept[-1]
    assert late[0][0] == [0, 1, 2, 3, 8, 9]  # sinks 2 and 3 came after the prompt


def test_a_constant_is_no_noise_and_noise_is_some() -> None:
    model = make("mistral")

    def keyformer(noise: str) -> reference.Run:
        return run(model, text(20), text(6, 2), policy="keyformer", k=0.4, noise=noise, draw=draw, generation_length=6)

    none, constant, gumbel = keyformer("none"), keyformer("constant"), keyformer("gumbel")
    assert none.margin > 1e-9
    assert constant.kept == none.kept
    torch.testing.assert_close(constant.logits, none.logits, rtol=0, atol=1e-12)
    assert gumbel.kept != none.kept


def test_divided_budgets_are_exact() -> None:
    """Pyramid and adaptive, alone and together, over any policy: the layer's and the model's totals to the token."""
    n, m, b = 21, 5, 8
    first, last = 2 * b - 1, 1  # n = 21 holds 15; b / 20 is below 1
    for policy, wrap in (
        ("adakv", ()),
        ("critical_adakv", ()),
        ("roco", ("adaptive",)),
        ("random", ("adaptive",)),
        ("tova", ("adaptive", "critical")),
        ("h2o", ("pyramid",)),
        ("keyformer", ("pyramid", "adaptive")),
        ("scissorhands", ("pyramid", "adaptive", "critical")),
    ):
        options = {"window": 3, "kernel": 3} if policy in ONCE else {"recent": 2} if policy == "roco" else {}
        result = run(make("llama"), text(n), text(m, 2), policy=policy, k=b, wrap=wrap, draw=draw, **options)
        divided = []
        for j, moment in enumerate(result.kept):
            for layer, budget in zip(moment, (first, b, last) if "pyramid" in wrap else (b, b, b), strict=True):
                sizes = [len(head) for head in layer]
                assert sum(sizes) == 2 * (budget + j if policy in ONCE else budget), (policy, wrap, j)
                divided.append(sizes[0] != sizes[1])
                if policy in ONCE:
                    assert all(set(range(n - 3, n + j)) <= set(head) for head in layer)
        # tova has one score for all heads, and a total that is even: both heads keep the same number
        assert any(divided) == (policy not in ("tova", "h2o")), (policy, wrap)


def test_budgets_and_shares() -> None:
    assert [reference.budget(k, 100) for k in (0.29, 0.001, 1.0, 7, 1)] == [29, 1, None, 7, 1]
    assert [reference.budget(0.5, n) for n in (1, 2, 3, 11, 12)] == [1, 1, 1, 5, 6]
    assert [reference.tokens(size, 10) for size in (0.3, 0.5, 1.0, 3, 0)] == [3, 5, 10, 3, 0]
    assert reference.tokens(0.29, 100) == 29


@pytest.mark.parametrize(
    ("policy", "b", "options", "expected"),
    [  # how many are fixed, recent', r', w'
        ("h2o", 9, {}, (0, 4, 0, 0)),
        ("scissorhands", 9, {}, (0, 4, 0, 0)),
        ("keyformer", 10, {}, (0, 3, 0, 0)),
        ("roco", 30, {}, (0, 10, 15, 0)),
        ("roco", 12, {}, (0, 10, 2, 0)),
        ("roco", 12, {"sinks": 1}, (1, 10, 1, 0)),
        ("streaming_llm", 9, {}, (4, 0, 0, 0)),
        ("snapkv", 40, {}, (0, 0, 0, 32)),
        ("h2o", 4, {"recent": 1.0, "sinks": 2, "schedule": "decode"}, (50, 4, 0, 0)),  # the prompt is outside b
    ],
)
def test_protected_sizes(policy: str, b: int, options: dict[str, Any], expected: tuple[int, ...]) -> None:
    oracle = reference.Oracle(Table([[logs(P)]]), 50, b, reference.settings(policy, options), 256, None)
    fixed, *sizes = oracle.sizes(b)
    assert (len(fixed), *sizes) == expected


def test_ties_and_margins() -> None:
    assert reference.worst({3: 1.0, 1: 1.0, 2: 5.0}, 1) == ({1}, 4.0)  # 1 and 3 tie: what could change is 5 against 1
    assert reference.worst({3: 1.0, 1: 1.5, 2: 5.0}, 1) == ({3}, 0.5)
    assert reference.worst({0: 2.0, 1: 2.0}, 1) == ({0}, math.inf)
    assert reference.worst({0: 9.0, 1: 2.0}, 1, dead=lambda i: i == 0) == ({0}, math.inf)
    assert reference.worst({0: 9.0, 1: 2.0}, 2) == ({0, 1}, math.inf)


# Divided budgets


@pytest.mark.parametrize(
    ("b", "layers", "beta", "w", "n", "expected"),
    [
        (10, 3, 20, 0, 100, [19, 10, 1]),  # last = max(10 / 20, 1)
        (10, 4, 20, 0, 100, [19, 13, 7, 1]),
        (10, 3, 20, 5, 100, [14, 10, 6]),  # last = w + 1
        (10, 3, 20, 32, 100, [10, 10, 10]),  # at most b
        (10, 3, 4, 0, 100, [18, 10, 2]),  # 17.5 10 2.5: of equal fractions the lower layer has the missing token
        (3, 5, 2.5, 0, 100, [5, 4, 3, 2, 1]),  # 4.8 3.9 3 2.1 1.2: 13 and two missing, for .9 and .8
        (10, 3, 20, 0, 12, [12, 10, 8]),  # the first layer cannot keep more than 12
        (10, 3, 20, 0, 9, [10, 10, 10]),
        (10, 3, 20, 0, None, [19, 10, 1]),
        (10, 3, 1, 0, 100, [10, 10, 10]),
        (7, 1, 20, 0, 100, [7]),
        (1, 4, 20, 0, 100, [1, 1, 1, 1]),
    ],
)
def test_pyramid_by_hand(b: int, layers: int, beta: float, w: int, n: int | None, expected: list[int]) -> None:
    assert reference.pyramid(b, layers, beta, w, n) == expected


def test_pyramid_totals() -> None:
    for b in range(1, 40):
        for layers in range(1, 8):
            for beta in (1, 1.7, 3, 20, 100):
                sizes = reference.pyramid(b, layers, beta, b % 6, None)
                assert sum(sizes) == b * layers
                assert sizes == sorted(sizes, reverse=True)
                assert min(sizes) >= min(b, b % 6 + 1)


def test_pyramid_in_a_run() -> None:
    """Budgets 14 10 6 (w + 1 = 6) of 25 tokens; 12 8 4 for a window of 3, k = 8; shares are of the layer's own budget."""
    snap = run(make("llama"), text(25), [], policy="pyramidkv", k=0.4, window=5, kernel=3).kept[0]
    assert [len(layer[0]) for layer in snap] == [14, 10, 6]
    given = {"k": 10, "policy": "h2o", "wrap": ("pyramid",), "beta": 2}
    for layer, b in zip(run(make("llama"), text(30), text(3, 2), **given).kept[3], (15, 10, 5), strict=True):
        for head in layer:
            assert len(head) == b
            assert head[-(b // 2) :] == list(range(33 - b // 2, 33))
    kept = run(make("llama"), text(3), text(22, 2), schedule="decode", **given).kept[-1]  # 2 * 10 - 3 is no limit here
    assert [len(layer[0]) for layer in kept] == [18, 13, 8]


def two_heads(first: Sequence[float], second: Sequence[float]) -> Table:
    """A layer of two KV heads whose last rows are these; the rows before them are uniform."""
    even = [[1.0 / (t + 1)] * (t + 1) for t in range(len(first) - 1)]
    return Table([[logs([*even, first]), logs([*even, second])]], kv_heads=2)


A, B = [0.4, 0.3, 0.2, 0.1], [0.7, 0.05, 0.05, 0.2]


@pytest.mark.parametrize(
    ("b", "options", "expected"),
    [
        (
            2,
            {"floor": 0},
            [[0, 1], [0, 3]],
        ),  # 0.7 0.4 0.3, and of two 0.2 the higher position, though its head is later
        (2, {"floor": 0.0, "sinks": 1}, [[0, 1], [0, 3]]),
        (3, {"floor": 0}, [[0, 1, 2, 3], [0, 3]]),
        (3, {"floor": 0.99}, [[0, 1, 2, 3], [0, 3]]),  # two tokens each
        (3, {"floor": 1.0}, [[0, 1, 2], [0, 2, 3]]),
        (3, {"floor": 1}, [[0, 1, 2], [0, 2, 3]]),  # a share all the same
        (1, {"floor": 0}, [[0], [0]]),
        (3, {"floor": 0, "recent": 3}, [[1, 2, 3], [1, 2, 3]]),  # all of the budget is protected
        (3, {"floor": 0, "recent": 1}, [[0, 1, 2, 3], [0, 3]]),  # protected 3, 3; then 0.7 0.4 0.3 0.2
        (3, {"floor": 0, "sinks": 1, "recent": 1}, [[0, 1, 2, 3], [0, 3]]),
        (2, {"floor": 0, "protect": [False, False, True, False]}, [[0, 2], [0, 2]]),
    ],
)
def test_adaptive_by_hand(b: int, options: dict[str, Any], expected: list[list[int]]) -> None:
    given = {"policy": "tova", "heads": "each", "wrap": ("adaptive",), "k": b}
    assert run(two_heads(A, B), [0] * 4, [], **given, **options).kept == [[expected]]


def test_adaptive_leaves_a_head_its_floor() -> None:
    flat, sharp = [0.25] * 4, [0.91, 0.04, 0.03, 0.02]
    given = {"policy": "tova", "heads": "each", "wrap": ("adaptive",), "k": 2}

    def adaptive(floor: float, **options: Any) -> tuple[list[list[int]], float]:
        result = run(two_heads(sharp, flat), [0] * 4, [], floor=floor, **given, **options)
        return result.kept[0][0], result.margin

    # 0.91, then three of four 0.25; what an error could change is the order of 0.25 with the nearest other score.
    assert adaptive(0) == ([[0], [1, 2, 3]], pytest.approx(0.25 - 0.04))
    # One each, 0.91 and token 3; then as before.
    assert adaptive(0.5) == ([[0], [1, 2, 3]], pytest.approx(0.25 - 0.04))
    assert adaptive(1) == ([[0, 1], [2, 3]], pytest.approx(0.04 - 0.03))
    assert adaptive(0, recent=1) == ([[0, 3], [2, 3]], pytest.approx(0.25 - 0.04))
    # Decoding goes on with the budgets of the prompt's end, 1 and 3, each head by itself: 0.8 of 0.91 goes, 0.04 stays.
    x = [logs([[1.0], [0.5, 0.5], [1 / 3] * 3, row, [row[0], *[0.3] * 4]]) for row in (sharp, flat)]
    steps = run(Table([x], kv_heads=2), [0] * 4, [0], floor=0, **given).kept
    assert steps == [[[[0], [1, 2, 3]]], [[[0], [2, 3, 4]]]]
    # A prompt that does not fill the budget leaves each head an equal part of the rest: two tokens each. Step 2 evicts
    # 0, all being equal; step 3 the 3 of 0.04 0.03 0.02, or the 1 of equal ones; step 4 the lowest position again.
    short = run(Table([x], kv_heads=2), [0], [0] * 4, floor=0, **given).kept
    assert short == [[[[0], [0]]], [[[0, 1]] * 2], [[[1, 2]] * 2], [[[1, 2], [2, 3]]], [[[2, 4], [3, 4]]]]


def test_adaptive_ties_go_to_the_higher_position_then_to_the_lower_head() -> None:
    even = [[1.0], [0.5, 0.5], [1 / 3] * 3]
    flat, last = logs([*even, [0.25] * 4]), logs([*even, [0.4, 0.4, 0.1, 0.1]])
    given = {"policy": "tova", "heads": "each", "wrap": ("adaptive",), "k": 1, "floor": 0}
    result = run(Table([[flat, flat, last]], kv_heads=3), [0] * 4, [], **given)
    assert (result.kept, result.margin) == ([[[[3], [], [0, 1]]]], pytest.approx(0.15))
    # One set of scores for all heads: 4 tokens of 2 heads, by position and then by head.
    recency = run(two_heads(A, B), [0] * 4, [], policy="window", wrap=("adaptive",), k=2, floor=0)
    assert recency.kept == [[[[2, 3], [2, 3]]]]
    assert reference.adaptive([0, 0], [{0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}], [0, 0], 3) == ([2, 1], 1.0)
    assert reference.adaptive([0, 0], [{0: 2.0, 1: 2.0}, {0: 2.0, 1: 2.0}], [0, 0], 3) == ([2, 1], math.inf)
    # Live before dead, whatever the score; protected tokens count in the floor.
    assert reference.adaptive([0, 0], [{0: 9.0, 1: 2.0, 2: 3.0}, {0: 9.0, 1: 1.0}], [0, 0], 2, lambda i: i == 0)[0] == [2, 0]
    assert reference.adaptive([2, 0], [{0: 9.0, 1: 5.0}, {0: 3.0, 1: 1.0, 2: 0.5}], [2, 2], 5)[0] == [3, 2]
    # The gap of a head's own first token, 1 and 0.9, is smaller than that of 4 and 3 among the others.
    s = [{0: 1.0, 1: 0.9, 2: 0.1}, {0: 5.0, 1: 4.0, 2: 3.0}]
    assert reference.adaptive([0, 0], s, [1, 1], 3) == ([1, 2], pytest.approx(0.1))


def test_adaptive_guarantees_the_nominal_protected_size() -> None:
    """RoCo, two recent and one by deviation, b = 3, floor 0: three tokens are guaranteed, also to the first head, where
    the one of largest deviation is recent anyway. So the 0.97 of the second head finds no place."""
    first = [[1.0], [0.4, 0.6], [0.3, 0.69, 0.01], [0.05, 0.19, 0.75, 0.01]]
    second = [[1.0], [0.02, 0.98], [0.02, 0.97, 0.01], [0.02, 0.96, 0.01, 0.01]]
    given = {"policy": "roco", "recent": 2, "protected": 1, "wrap": ("adaptive",), "floor": 0}
    table = Table([[logs(first), logs(second)]], kv_heads=2)
    assert run(table, [0] * 4, [], k=3, **given).kept == [[[[1, 2, 3], [0, 2, 3]]]]


# Two-stage selection

S, N = {0: 5.0, 1: 3.0, 2: 1.5, 3: 0.5}, {0: 1.0, 1: 1.0, 2: 4.0, 3: 20.0}


@pytest.mark.parametrize(
    ("norms", "c", "alpha", "eps", "gone", "margin"),
    [
        (N, 2, 0.5, 0.0, {1, 2}, 0.4),  # 0 by its score; 0.3 0.6 1.0; the gap 1.0 - 0.6 of 1.0
        (N, 2, 0, 0.0, {0, 1}, 0.1),  # 0.5 0.3 0.6 1.0
        (N, 2, 1, 0.0, {2, 3}, 1.5),  # by score alone
        (N, 3, 0.5, 0.0, {1}, 0.3),  # one by its score, floor(1.5)
        (N, 0, 0.5, 0.0, {0, 1, 2, 3}, math.inf),
        ({**N, 2: 1.9, 3: 0.1}, 2, 0.5, 0.0, {2, 3}, 0.05),  # 0.3 0.285
        ({**N, 2: 1.9, 3: 0.1}, 2, 0.5, 0.1, {1, 3}, 0.075 / 0.475),  # 0.4 0.475: eps is added to shares, not to scores
        ({i: 1e6 * value for i, value in N.items()}, 2, 0.5, 0.0, {1, 2}, 0.4),  # the gap has no unit
    ],
)
def test_two_stages_by_hand(norms: Any, c: int, alpha: float, eps: float, gone: set[int], margin: float) -> None:
    assert reference.two_stage(S, norms, c, alpha, eps) == (gone, pytest.approx(margin))


def test_two_stages_at_their_edges() -> None:
    # Scores that are all zero: by position, then by norm.
    assert reference.two_stage(dict.fromkeys(range(4), 0.0), N, 2, 0.5, 1e-4)[0] == {0, 1}
    assert reference.two_stage(dict.fromkeys(range(4), 0.0), {**N, 0: 9.0, 3: 5.0}, 2, 0.5, 1e-4)[0] == {1, 2}
    # Dead tokens go first at either stage: 0 is not taken by its score, 3 not by its product.
    assert reference.two_stage(S, N, 2, 0.5, 0.0, lambda i: i in (0, 3)) == ({0, 3}, 1.5)  # 1 before 2
    assert reference.two_stage(S, N, 3, 0.4, 0.0, lambda i: i == 3) == ({3}, 2.0)
    # Of equal products the higher position stays; what could change is the next one.
    assert reference.two_stage({0: 2.0, 1: 1.0, 2: 1.0}, {0: 1.0, 1: 1.0, 2: 1.0}, 2, 0.5, 0.0) == ({1}, 1.0)
    assert reference.two_stage({0: 2.0, 1: 1.0, 2: 2.0}, {0: 1.0, 1: 2.0, 2: 1.0}, 1, 0.0, 0.0) == ({0, 1}, math.inf)
    # A near-tie at the first stage counts, though the second settles it far away.
    assert reference.two_stage({0: 1.0, 1: 1.1, 2: 0.1}, N, 2, 0.5, 0.0)[1] == pytest.approx(0.1)


def test_norms_by_hand() -> None:
    """Two query heads to a KV head: each has its own rows, and their norms are averaged."""
    rows = [[[3.0, -4.0], [1.0, 0.0]], [[0.0, 0.0], [5.0, 12.0]], [[1.0, 1.0], [2.0, 2.0]], [[1.0, 1.0], [2.0, 2.0]]]
    table = Table([[logs(P[:2])] * 4], kv_heads=2, rows=rows)
    for norm, expected in ((1, [{0: 3.5, 1: 9.0}, {0: 2.0, 1: 4.0}]), (2, [{0: 2.5, 1: 7.0}, {0: 2**0.5, 1: 8**0.5}])):
        oracle = reference.Oracle(table, 2, 2, reference.settings("h2o", {"norm": norm}, ["critical"]), 256, None)
        oracle.forward([0, 0])
        assert [oracle.norms(0, g, [0, 1]) for g in range(2)] == [pytest.approx(values) for values in expected]


def critical(norms: Sequence[float], k: int, **options: Any) -> list[list[int]]:
    """kept[moment] of P under accumulated scores 2.2 0.9 0.5 0.4 and two stages, values having these norms."""
    table = Table([[logs(P)]], rows=[[[norm] for norm in norms]])
    given = {"policy": "key_attention", "wrap": ("critical",), "k": k}
    return [moment[0][0] for moment in run(table, [0] * 4, [0], **given, **options).kept]


def test_critical_in_a_run() -> None:
    # One by score. Of 1 2 3 the shares are 0.225 0.125 0.1. At the step, 0 3 4 have 2.4 0.8 0.4.
    assert critical([1.0] * 5, 2) == [[0, 1], [0, 1]]
    assert critical([1.0, 1.0, 1.0, -4.0, 1.0], 2) == [[0, 3], [0, 3]]
    assert critical([1.0, 1.0, 1.0, 4.0, 10.0], 2) == [[0, 3], [0, 4]]
    assert critical([1.0, 1.0, 1.0, 4.0, 4.0], 2, alpha=1) == [[0, 1], [0, 1]]
    assert critical([0.1, 1.0, 1.0, 4.0, 4.0], 2, alpha=0)[0] == [1, 3]
    # alpha divides what the protected leave: 0.7 of 2 is one token, of 3 it would be two.
    assert critical([1.0, 1.0, 9.0, 1.0, 1.0], 3, alpha=0.7, recent=1)[0] == [0, 2, 3]
    assert critical([1.0, 1.0, 9.0, 1.0, 1.0], 3, alpha=1, recent=1)[0] == [0, 1, 3]
    # Shares are of the candidates' sum alone: 0.9 and 0.5 of 1.4, not of 3.6, or 0.3 could not be made up for.
    assert critical([1.0, 1.0, 1.3, 1.0, 1.0], 3, alpha=0, eps=1.0, sinks=1, recent=1)[0] == [0, 2, 3]
    assert critical([1.0, 1.0, 1.2, 1.0, 1.0], 3, alpha=0, eps=1.0, sinks=1, recent=1)[0] == [0, 1, 3]
    assert critical([1.0] * 4 + [9.0], 1, schedule="decode", alpha=0) == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_critical_inside_adaptive_budgets() -> None:
    """Scores divide the budget, 3 and 1; norms then choose inside each head."""
    sharp, flat = [0.91, 0.04, 0.03, 0.02], [0.25] * 4
    table = two_heads(flat, sharp)
    table.rows = [[[9.0], [1.0], [1.0], [1.0]], [[1.0], [1.0], [1.0], [99.0]]]
    given = {"policy": "tova", "heads": "each", "k": 2, "floor": 0}
    assert run(table, [0] * 4, [], wrap=("adaptive",), **given).kept == [[[[1, 2, 3], [0]]]]
    assert run(table, [0] * 4, [], wrap=("adaptive", "critical"), eps=0.0, **given).kept == [[[[0, 2, 3], [3]]]]


@pytest.mark.parametrize("name", ["llama", "gpt2", "mpt"])
def test_adakv_and_critical_from_the_models_own_attention(name: str) -> None:
    model, n, b, w, G = make(name).double(), 24, 8, 3, 2 if name == "llama" else 1
    prompt = text(n)
    with torch.no_grad():
        out = model(torch.tensor([prompt]), output_attentions=True, use_cache=True)
    c = b - w
    for l, attention in enumerate(out.attentions):
        a_KTT = attention[0].double().unflatten(0, (-1, G)).mean(1)
        s_KI = nn.functional.max_pool1d(a_KTT[:, -w:, : n - w].mean(1), 3, 1, 1)
        v_KTD = out.past_key_values.layers[l].values[0]
        y_HTD = v_KTD.repeat_interleave(G, 0)
        project = {
            "llama": lambda y, l=l: model.model.layers[l].self_attn.o_proj(y),
            "gpt2": lambda y, l=l: model.transformer.h[l].attn.c_proj(y),
            "mpt": lambda y, l=l: model.transformer.blocks[l].attn.out_proj(y),
        }[name]
        with torch.no_grad():
            alone_HHTD = torch.stack([y_HTD * (torch.arange(len(y_HTD)) == h)[:, None, None] for h in range(len(y_HTD))])
            change = project(alone_HHTD.transpose(1, 2).flatten(2)) - project(torch.zeros(1, y_HTD[:, 0].numel()).double())
        norms_KI = change.abs().sum(-1).unflatten(0, (-1, G)).mean(1)[:, : n - w]
        ranked = s_KI + 1e-9 * torch.arange(n - w)  # of equal scores the higher position
        product_KI = (s_KI / s_KI.sum(1, keepdim=True) + 1e-4) * norms_KI

        def two_stages(g: int, c: int, s_KI: Tensor = ranked, product_KI: Tensor = product_KI) -> Tensor:
            return product_KI[g].index_fill(0, s_KI[g].topk(c // 2).indices, 1e6).topk(c).indices

        best = ranked.flatten().topk(len(s_KI) * c).indices  # the floor, 0.2 * 8, is within the window
        chosen = {
            "snapkv": ranked.topk(c).indices,
            "critical_snapkv": [two_stages(g, c) for g in range(len(s_KI))],
            "adakv": [best[best // (n - w) == g] % (n - w) for g in range(len(s_KI))],
        }
        sizes = [len(head) for head in chosen["adakv"]]
        chosen["critical_adakv"] = [two_stages(g, size) for g, size in enumerate(sizes)]
        assert len(set(sizes)) > 1
        for policy, heads in chosen.items():
            ours = run(model, prompt, [], policy=policy, k=b, window=w, kernel=3)
            assert ours.margin > 1e-6, policy
            assert ours.kept[0][l] == [[*sorted(head.tolist()), *range(n - w, n)] for head in heads], (policy, l)


@pytest.mark.parametrize("name", MODELS)
def test_output_rows_are_the_output_projection(name: str) -> None:
    decoder = decoder_of(make(name))
    D = 12 if "wide" in name else 8
    y_THD = torch.randn(5, decoder.query_heads, D, dtype=torch.float64)
    with torch.no_grad():
        for l in range(decoder.layers):
            ours = sum(y_THD[:, h] @ decoder.output_rows(l, h) for h in range(decoder.query_heads))
            theirs = decoder.output(l, y_THD.flatten(1)) - decoder.output(l, torch.zeros_like(y_THD.flatten(1)))
            torch.testing.assert_close(ours, theirs)


# Blocks


def random_table(size: int, seed: int = 0) -> Table:
    return Table(torch.randn(1, 1, size, size, generator=torch.Generator().manual_seed(seed)).tolist())


@pytest.mark.parametrize("block", [1, 2, 3, 5, 11, 40])
def test_blocks_by_a_loop(block: int) -> None:
    """key_attention over 11 tokens with a budget of 4: the loop that the definition says."""
    x, b, n = random_table(11), 4, 11
    held, s, rows = [], {}, []
    for start in range(0, n, block):
        for t in range(start, min(start + block, n)):
            held.append(t)
            a = torch.softmax(x.x_LHTT[0, 0, t, held], -1).tolist()
            rows.append([a[held.index(i)] if i in held else 0.0 for i in range(n)])
            for i, value in zip(held, a, strict=True):
                s[i] = s.get(i, 0.0) + value
        held = sorted(sorted(held, key=lambda i: s[i])[-b:])
    result = run(x, [0] * n, [], policy="key_attention", k=b, block=block)
    assert result.kept == [[[held]]]
    torch.testing.assert_close(result.logits, torch.tensor(rows, dtype=torch.float64))


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("h2o", {}),
        ("roco", {"recent": 2, "sinks": 1}),
        ("keyformer", {"damping": 0.5}),
        ("keyformer", {"shared": True}),
        ("snapkv", {"window": 4, "kernel": 3}),
        ("critical_adakv", {"window": 4, "kernel": 3}),
        ("scissorhands", {"wrap": ("adaptive", "critical")}),
        ("tova", {"positions": "renumbered"}),
    ],
)
def test_blocks_are_turns_without_answers(policy: str, options: dict[str, Any]) -> None:
    """With a budget in tokens, a prompt in blocks is the same as feeding one block after the other."""
    model, prompt = make("llama"), text(23)
    given = {"policy": policy, "k": 6, "draw": draw, **options}
    ours = run(model, prompt, text(3, 2), block=5, **given)
    fed = [prompt[start : start + 5] for start in range(0, 23, 5)]
    theirs = run_turns(model, [*((part, []) for part in fed[:-1]), (fed[-1], text(3, 2))], **given)
    assert ours.kept == theirs.kept[len(fed) - 1 :]
    assert len(ours.kept) == 4
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-12)
    assert not torch.allclose(ours.logits, run(model, prompt, text(3, 2), **given).logits)


def test_blocks_have_the_budget_of_the_whole_prompt() -> None:
    table = random_table(10)
    a = run(table, [0] * 10, [], policy="window", k=0.4, block=5).logits
    assert [i for i in range(10) if a[5, i] > 0] == [1, 2, 3, 4, 5]  # 4 of 10, not 2 of 5
    mask = [i in (0, 6) for i in range(10)]
    a = run(table, [0] * 10, [], policy="window", k=0.4, block=5, protect=mask).logits
    assert [i for i in range(10) if a[5, i] > 0] == [0, 2, 3, 4, 5]  # 6 is not read yet and takes no place
    assert run(table, [0] * 10, [], policy="window", k=0.4, block=5, protect=mask).kept == [[[[0, 6, 8, 9]]]]
    mask = [i in (6, 8) for i in range(10)]  # nor does what is not read yet take the place of a sink
    result = run(table, [0] * 10, [], policy="window", k=0.4, block=5, protect=mask, sinks=3)
    assert [i for i in range(10) if result.logits[5, i] > 0] == [0, 1, 2, 4, 5]
    assert result.kept == [[[[0, 1, 6, 8]]]]


def test_a_block_observes_with_its_own_rows() -> None:
    """Blocks of 3 of 7 tokens, b = 4, window 3. The last block has one row, so that w' = 1 and three others stay."""
    x = random_table(7, 10)
    held = [0, 1, 2, 3, 4, 5]
    s = [torch.softmax(x.x_LHTT[0, 0, t, held[: t + 1]], -1).tolist() for t in (3, 4, 5)]
    older = sorted(range(3), key=lambda i: sum(row[i] for row in s))
    held = [older[-1], 3, 4, 5]
    assert run(x, [0] * 6, [], policy="snapkv", k=4, window=3, kernel=1, block=3).kept == [[[held]]]
    last = torch.softmax(x.x_LHTT[0, 0, 6, [*held, 6]], -1).tolist()
    gone = held[min(range(4), key=lambda j: last[j])]
    seven = run(x, [0] * 7, [], policy="snapkv", k=4, window=3, kernel=1, block=3).kept
    assert seven == [[[[i for i in [*held, 6] if i != gone]]]]
    assert gone in (4, 5)  # a window of three would have kept these


def test_pooling_is_over_what_is_held() -> None:
    """Of 0 4 5 9, held, the newest is the window; 4's neighbours are 0 and 5, which are far from it in the text."""
    rows = [Row(9, {}, {0: [0.1], 4: [0.2], 5: [0.3], 9: [0.4]})]
    assert reference.observation(rows, [0, 4, 5, 9], 1, 3, "max") == {0: 0.2, 4: 0.3, 5: 0.3}
    assert reference.observation(rows, [0, 4, 5, 9], 1, 3, "avg") == pytest.approx({0: 0.1, 4: 0.2, 5: 0.5 / 3})


# Renumbered positions


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "mistral", "mistral-window", "mpt", "gptj"])
def test_renumbered_is_the_same_until_something_goes(name: str) -> None:
    given = {"policy": "h2o", "k": 12, "draw": draw}
    original = run(make(name), text(10), text(6, 2), **given)
    new = run(make(name), text(10), text(6, 2), positions="renumbered", **given)
    torch.testing.assert_close(new.logits[:13], original.logits[:13], rtol=0, atol=1e-5)
    if name != "mistral-window":  # where the oldest go, and leave the distances of the others as they were
        assert (new.logits[13:] - original.logits[13:]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["llama", "llama-mqa-wide-heads", "llama-yarn", "mistral-window", "mpt", "gptj"])
def test_renumbered_is_the_model_on_the_shortened_text(name: str) -> None:
    """In a model of one layer a key depends on its own token alone: what a head holds, read as a text of its own, gives
    what renumbering must. The sliding window alone goes on counting in the whole text."""
    whole = make(name).double()
    body = whole.model if hasattr(whole, "model") else whole.transformer
    layers = "layers" if hasattr(body, "layers") else "blocks" if hasattr(body, "blocks") else "h"
    setattr(body, layers, getattr(body, layers)[:1])
    for key in ("num_hidden_layers", "n_layers", "n_layer"):
        if key in whole.config.to_dict():
            setattr(whole.config, key, 1)
    ids = text(16)
    window = getattr(whole.config, "sliding_window", None) or 10**6
    n = 12 if window > 16 else 6  # short, so that for one step a sink is in the window and a token between is gone
    new = run(whole, ids[:n], ids[n:], policy="streaming_llm", sinks=2, k=6, positions="renumbered")
    old = run(whole, ids[:n], ids[n:], policy="streaming_llm", sinks=2, k=6)
    for t in range(n, 16):
        held = [0, 1, t - 4, t - 3, t - 2, t - 1, t]
        mask = torch.full((7, 7), torch.finfo(torch.float64).min, dtype=torch.float64).triu(1)
        mask[-1, [j for j, i in enumerate(held) if t - i >= window]] = torch.finfo(torch.float64).min
        with torch.no_grad():
            shortened = torch.tensor([[ids[i] for i in held]])
            theirs = whole(shortened, attention_mask=mask[None, None], use_cache=False).logits[0, -1]
        torch.testing.assert_close(new.logits[t], theirs, rtol=0, atol=1e-5)
    assert (old.logits - new.logits)[n:].abs().max() > 1e-3


def test_renumbered_by_hand_for_one_head() -> None:
    """Heads of a layer hold different tokens: one head's attention, from its own ranks, with RoPE written out."""
    model = make("llama").double()
    decoder = decoder_of(model)
    oracle = reference.Oracle(decoder, 12, 5, reference.settings("key_attention", {"positions": "renumbered"}), 256, None)
    with torch.no_grad():
        oracle.forward(text(12))
        held = sorted(oracle.keys[0][1])
        assert held != sorted(oracle.keys[0][0])
        oracle.step = 1
        oracle.forward([7])
        m, D = model.model.layers[0].self_attn, 8
        h_TE = model.model.layers[0].input_layernorm(model.model.embed_tokens(torch.tensor([*text(12), 7])))
        angle = torch.arange(6)[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)  # ranks 0 ... 5

        def turned(x_ID: Tensor, ranks: Tensor) -> Tensor:
            x, y = x_ID.chunk(2, -1)
            cos, sin = angle[ranks].cos(), angle[ranks].sin()
            return torch.cat([x * cos - y * sin, y * cos + x * sin], -1)

        keys = turned(m.k_proj(h_TE)[[*held, 12], D : 2 * D], torch.arange(6))
        for j, h in enumerate((2, 3)):
            q = turned(m.q_proj(h_TE)[12:, h * D : (h + 1) * D], torch.tensor([5]))[0]
            a = torch.softmax(keys @ q / math.sqrt(D), -1)
            assert oracle.rows[0][1][-1].t == 12
            ours = [oracle.rows[0][1][-1].a[i][j] for i in [*held, 12]]
            assert ours == pytest.approx(a.tolist(), abs=1e-6)


def test_learned_positions_cannot_be_renumbered() -> None:
    with pytest.raises(ValueError, match="learned"):
        run(make("gpt2"), text(4), [], policy="window", k=2, positions="renumbered")


# Turns

TALK = [([0] * 4, [0]), ([0] * 3, [0])]


@pytest.mark.parametrize(
    ("k", "turns", "options", "expected"),
    [  # 0 1 2 3, decode 4, 5 6 7, decode 8
        (0.5, "all", {}, [[2, 3], [3, 4], [4, 5, 6, 7], [5, 6, 7, 8]]),
        (0.5, "all", {"schedule": "prompt"}, [[2, 3], [2, 3, 4], [4, 5, 6, 7], [4, 5, 6, 7, 8]]),
        (2, "all", {"schedule": "prompt"}, [[2, 3], [2, 3, 4], [6, 7], [6, 7, 8]]),
        (0.5, "all", {"sinks": 1}, [[0, 3], [0, 4], [0, 5, 6, 7], [0, 6, 7, 8]]),
        (0.5, "each", {"schedule": "prompt"}, [[2, 3], [2, 3, 4], [2, 3, 4, 7], [2, 3, 4, 7, 8]]),
        (2, "each", {"schedule": "prompt"}, [[2, 3], [2, 3, 4], [2, 3, 4, 6, 7], [2, 3, 4, 6, 7, 8]]),
        (2, "each", {"schedule": "prompt", "sinks": 1}, [[0, 3], [0, 3, 4], [0, 3, 4, 6, 7], [0, 3, 4, 6, 7, 8]]),
        (2, "each", {"schedule": "prompt", "sinks": 1, "block": 1}, [[0, 3], [0, 3, 4], [0, 3, 4, 6, 7], [0, 3, 4, 6, 7, 8]]),
        (5, "each", {"schedule": "prompt"}, [[0, 1, 2, 3], [*range(5)], [*range(8)], [*range(9)]]),
        (0.5, "first", {"schedule": "prompt"}, [[2, 3], [2, 3, 4], [2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7, 8]]),
        (2, "each", {"schedule": "prompt", "protect": [i in (1, 4, 5) for i in range(9)]},
         [[1, 3], [1, 3, 4], [1, 3, 4, 5, 7], [1, 3, 4, 5, 7, 8]]),
        (0.5, "all", {"protect": [i == 1 for i in range(4)]}, [[1, 3], [1, 4], [1, 5, 6, 7], [1, 6, 7, 8]]),
        (1.0, "all", {}, [[*range(4)], [*range(5)], [*range(8)], [*range(9)]]),
    ],
)  # fmt: skip
def test_turns_by_hand(k: float, turns: str, options: dict[str, Any], expected: list[list[int]]) -> None:
    result = run_turns(random_table(9), TALK, policy="window", k=k, turns=turns, **options)
    assert [moment[0][0] for moment in result.kept] == expected


@pytest.mark.parametrize("name", FIVE)
def test_turns_are_one_text(name: str) -> None:
    model, ids = make(name), text(20)
    talk = [(ids[:7], ids[7:9]), (ids[9:14], []), (ids[14:18], ids[18:])]
    for options in ({"policy": "full", "k": 2}, {"policy": "adakv", "k": 1.0}, {"policy": "roco", "k": 20}):
        result = run_turns(model, talk, **options)
        assert len(result.kept) == 7
        whole = run(model, ids, [], policy="full", k=2)
        torch.testing.assert_close(result.logits, whole.logits, rtol=0, atol=1e-9)
    one, other = (run_turns(model, talk, policy="roco", k=k) for k in (6, 20))
    assert not torch.allclose(one.logits, other.logits)


def test_a_turn_observes_with_its_own_rows() -> None:
    """Turn 2 has one token, hence one row: w' = 1 whatever the window. Tokens 0 ... 4 are scored by row 5 alone."""
    x = random_table(6, 5)
    given = {"policy": "snapkv", "window": 3, "kernel": 1}
    result = run_turns(x, [([0] * 4, [0]), ([0], [])], k=4, **given)
    a = torch.softmax(x.x_LHTT[0, 0, 5, [0, 1, 2, 3, 4, 5]], -1).tolist()
    best = sorted(range(5), key=lambda i: a[i])[-3:]
    assert result.kept[-1] == [[sorted([*best, 5])]]
    assert best != [2, 3, 4]


def test_temperature_starts_anew_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    softmax = reference.gumbel_softmax
    monkeypatch.setattr(reference, "gumbel_softmax", lambda row, z, tau: (seen.append((row.t, tau)), softmax(row, z, tau))[1])
    given = {"policy": "keyformer", "noise": "none", "k": 3, "generation_length": 2, "block": 2}
    run_turns(random_table(9), [([0] * 3, [0, 0]), ([0] * 3, [0])], **given)
    assert seen == [*((t, 1.0) for t in range(3)), (3, 1.5), (4, 2.0), *((t, 1.0) for t in (5, 6, 7)), (8, 1.5)]


def test_a_block_is_one_addition() -> None:
    """With damping 0 the last addition alone counts. Rows look at 0, but row 4 at 1 and row 5 at 3."""
    x = [[9.0, *[0.0] * 5] for _ in range(6)]
    x[4], x[5] = [0.0, 9.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 9.0, 0.0, 0.0]
    given = {"policy": "keyformer", "noise": "none", "recent": 0, "k": 2}
    assert run(Table([[x]]), [0] * 6, [], damping=0.0, **given).kept == [[[[0, 1]]]]
    # In blocks: 0 1, then of 0 1 4 5 the 1 of row 4, and the 4, whose equal is 0; row 5 finds no 3 and is even.
    assert run(Table([[x]]), [0] * 6, [], damping=0.0, block=4, **given).kept == [[[[1, 4]]]]
    assert run(Table([[x]]), [0] * 6, [], damping=1.0, block=4, **given).kept == [[[[0, 1]]]]


def test_adaptive_over_turns() -> None:
    """Heads of 3 and 1 tokens; turn 2 divides anew what is held, or with a larger budget adds to each an equal part."""
    sharp, flat = [0.91, 0.04, 0.03, 0.02], [0.25] * 4
    late = [[0.2] * 5, [1 / 6] * 6, [1 / 7] * 7, [1 / 8] * 8, [1 / 9] * 9]
    x = [logs([[1.0], [0.5, 0.5], [1 / 3] * 3, row, *late]) for row in (flat, sharp)]
    given = {"policy": "tova", "heads": "each", "wrap": ("adaptive",), "floor": 0}
    result = run_turns(Table([x], kv_heads=2), [([0] * 4, [0] * 3), ([0], [0])], k=0.5, **given)
    assert [[len(head) for head in moment[0]] for moment in result.kept] == [[3, 1]] * 4 + [[4, 2], [5, 3]]
    again = run_turns(Table([x], kv_heads=2), [([0] * 4, []), ([0] * 3, [0])], k=2, **given)
    # Row 6 is even over 6 and over 4 keys: 1/6 each and 1/4 each, so that the second head takes all.
    assert [[len(head) for head in moment[0]] for moment in again.kept] == [[3, 1], [0, 4], [0, 4]]


def test_pyramid_over_turns() -> None:
    """n is all tokens of the row: 4, so that all layers have 5; then 8, and 2 * 5 - 8 = 2 for the last layer."""
    talk = [(text(4), text(1)), (text(3), [])]
    kept = run_turns(make("llama"), talk, policy="window", wrap=("pyramid",), k=5).kept
    assert [[len(layer[0]) for layer in moment] for moment in kept] == [[4, 4, 4], [5, 5, 5], [8, 5, 2]]
    # Where the budget is of the turn's own prompt, so is n: 4, and 2 * 3 - 4 = 2 for the last layer.
    given = {"policy": "window", "wrap": ("pyramid",), "k": 3, "turns": "each", "schedule": "prompt"}
    kept = run_turns(make("llama"), [(text(4), text(1)), (text(4), [])], **given).kept
    assert [[len(layer[0]) for layer in moment] for moment in kept] == [[4, 3, 2], [5, 4, 3], [9, 7, 5]]


# Gradients


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral-window"])
def test_gradients_are_those_of_the_model_under_a_mask(name: str) -> None:
    """Sinks and a window, as above: the unpatched model's own gradients, through what is evicted later as well."""
    model, ids = make(name).double(), text(20)
    window = getattr(model.config, "sliding_window", None) or 10**6
    ours = run(model, ids[:14], ids[14:], policy="streaming_llm", k=6, grad=True)
    weight = torch.randn(ours.logits.shape, dtype=torch.float64)
    grads = gradients(model, (ours.logits * weight).sum())
    mask = torch.full((20, 20), torch.finfo(torch.float64).min, dtype=torch.float64)
    for t in range(20):
        for i in (*(range(t) if t < 14 else (*range(4), t - 2, t - 1)), t):
            if t - i < window:
                mask[t, i] = 0.0
    model.set_attn_implementation("sdpa")  # the eager one has its softmax in float32
    logits = model(torch.tensor([ids]), attention_mask=mask[None, None], use_cache=False).logits[0]
    torch.testing.assert_close(ours.logits, logits, rtol=0, atol=1e-6)
    theirs = gradients(model, (logits * weight).sum())
    assert set(grads) == set(theirs)
    for key, grad in theirs.items():
        torch.testing.assert_close(grads[key], grad, rtol=1e-5, atol=1e-5 * float(grad.abs().max()), msg=key)
    assert min(float(grad.abs().max()) for key, grad in theirs.items() if "bias" not in key) > 1e-3


@pytest.mark.parametrize("name", ["llama", "mpt", "gptj"])
def test_gradients_by_differences(name: str) -> None:
    """Decisions are piecewise constant: a small step along any direction changes the loss by the gradient times it."""
    model = make(name).double()
    given = {
        "policy": "roco",
        "k": 7,
        "recent": 2,
        "wrap": ("adaptive", "critical"),
        "positions": "renumbered",
        "block": 6,
    }
    plain = run(model, text(20), text(2, 2), **given)
    ours = run(model, text(20), text(2, 2), grad=True, **given)
    assert plain.kept == ours.kept
    assert not plain.logits.requires_grad
    torch.testing.assert_close(plain.logits, ours.logits, rtol=0, atol=1e-12)
    ours.logits.square().mean().backward()
    step = {p: torch.randn_like(p) for p in model.parameters() if p.grad is not None}
    slope = sum(float((p.grad * direction).sum()) for p, direction in step.items())
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, direction in step.items():
                p += sign * 1e-5 * direction
            result = run(model, text(20), text(2, 2), **given)
            assert result.kept == plain.kept
            losses.append(float(result.logits.square().mean()))
            for p, direction in step.items():
                p -= sign * 1e-5 * direction
    assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(slope, rel=1e-3)
    with pytest.raises(ValueError):
        run(make(name), text(4), [], policy="full", k=2, grad=True)  # a float32 model
