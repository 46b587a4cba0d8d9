"""The oracle against the unpatched models, against numbers worked out by hand, and against its own promises."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import reference
import torch
from reference import Row, run
from reference_models import Decoder, decoder_of
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

    def __init__(self, x: Sequence[Sequence[Sequence[Sequence[float]]]], kv_heads: int = 1, window: int | None = None):
        self.size = len(x[0][0])
        padded = [[[[*row, *[0.0] * (self.size - len(row))] for row in head] for head in layer] for layer in x]
        self.x_LHTT = torch.tensor(padded, dtype=torch.float64)
        self.layers, self.query_heads, self.kv_heads, self.window = len(x), len(x[0]), kv_heads, window

    def scale(self, l: int) -> float:
        return 1.0

    def embed(self, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        return torch.zeros(len(ids_T), self.query_heads * self.size, dtype=torch.float64)

    def project(self, l: int, h_TE: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        unit = torch.eye(self.size, dtype=torch.float64)[positions_T].expand(self.kv_heads, -1, -1)
        return self.x_LHTT[l][:, positions_T], unit, unit

    def output(self, l: int, y_TE: Tensor) -> Tensor:
        return y_TE

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
    scores = [
        reference.quantized(rows_of(*heads) * 7, 0)[0] for heads in ((one, two, two), (two, one, two), (two, two, one))
    ]
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
    assert reference.observation(rows, 5, 2, 3, None) == pytest.approx({0: 0.2, 1: 0.3, 2: 0.1})
    assert reference.observation(rows, 5, 2, 3, "max") == pytest.approx({0: 0.3, 1: 0.3, 2: 0.3})
    assert reference.observation(rows, 5, 2, 3, "avg") == pytest.approx({0: 0.5 / 3, 1: 0.2, 2: 0.4 / 3})
    assert reference.observation(rows, 5, 0, 3, "max") == dict.fromkeys(range(5), 0.0)
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
    damped = run(
        Table([[logs(P)]]), [0] * 4, [0], policy="keyformer", k=2, recent=0, noise="none", tau=(1.0, 1.0), damping=0.0
    )
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


def test_a_dead_token_goes_first() -> None:
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

ALL = [name for name in reference.POLICIES if name != "full"]


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_sizes_and_protection(policy: str, name: str) -> None:
    n, m = 21, 4
    protect = [i == 9 for i in range(n)]
    result = run(
        make(name), text(n), text(m, 2), policy=policy, k=[0.4, 6, 1.0], sinks=2, protect=protect, recent=3, draw=draw
    )
    assert len(result.kept) == m + 1
    for j, moment in enumerate(result.kept):
        grows = policy == "snapkv"
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
    if policy != "snapkv":
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


@pytest.mark.parametrize(
    ("policy", "k", "options"),
    [
        ("h2o", 2, {"protect": [True, True, True, False]}),
        ("h2o", 2, {"protect": [True]}),
        ("h2o", 0, {}),
        ("h2o", 1.5, {}),
        ("h2o", [2, 2], {}),
        ("h2o", 2, {"tau": (1, 2)}),
        ("h2o", 2, {"schedule": "sometimes"}),
        ("snapkv", 2, {"schedule": "both"}),
        ("snapkv", 2, {"kernel": 4}),
        ("keyformer", 2, {"noise": "some"}),
        ("keyformer", 2, {}),  # no draw
        ("nothing", 2, {}),
    ],
)
def test_errors(policy: str, k: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        run(Table([[logs(P)]]), [0] * 4, [0], policy=policy, k=k, **options)
