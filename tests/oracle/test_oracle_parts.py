"""The oracle's word on what is put around a score: pyramid, adaptive and two-stage, blocks, renumbered positions, turns."""

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import kvpatch
from kvpatch.policies import sampling
from tests.helpers.comparing import ANY_SCHEDULE, EVICTING, PLACED, SMALL, WAITING, WINDOWED, agrees, certain
from tests.helpers.tiny import FIVE, IDS, MODELS, VOCAB
from tests.oracle import reference

WHOLE = (("global_topk",), ("pyramid", "global_topk"), ("global_topk", "critical"))  # layers evict together: no blocks
BLOCKED = (("pyramid",), ("adaptive",), ("critical",), ("pyramid", "adaptive"), ("adaptive", "critical"))
WRAPS = (*BLOCKED, *WHOLE)
VARIED = (
    "h2o", "roco", "tova", "keyformer", "random", "scissorhands", "window", "snapkv", "key_diff", "cur", "lag_kv",
    "expected_attention", "leverage",
)  # fmt: skip
WEIGHTS = tuple(p for p in EVICTING if kvpatch.get_policy(p).score.is_weight)


def fits(policy, wrap):
    over_heads = kvpatch.get_policy(policy).over_heads
    if kvpatch.get_policy(policy).schedule == "decode" and {"adaptive", "global_topk"} & set(wrap):
        return False  # no budget is divided where a prompt ends
    if over_heads is not None and {"adaptive", "global_topk"} & set(wrap):
        return policy in ("adakv", "critical_adakv") and "global_topk" not in wrap  # a budget is divided once
    return "critical" not in wrap or (policy in WEIGHTS and policy != "chunk_kv")  # a policy has one selection


@pytest.mark.parametrize("wrap", WRAPS, ids="+".join)
@pytest.mark.parametrize("policy", VARIED)
@pytest.mark.parametrize("name", ["llama_gqa", "mistral_sliding"])
def test_combinations(name, policy, wrap):
    k = 0.8 if policy == "key_diff" else 0.4  # two tokens of a small budget are equally unlike their mean
    if fits(policy, wrap):
        certain(name, policy, k, wrap=wrap, **SMALL.get(policy, {}))


@pytest.mark.parametrize("wrap", WRAPS, ids="+".join)
@pytest.mark.parametrize("name", MODELS)
def test_combinations_on_every_architecture(name, wrap):
    certain(name, "roco", 0.45, wrap=wrap, pads=(0, 6), recent=3)
    certain(name, "roco", 0.45, wrap=wrap, pads=(0, 0), recent=3)


OPTIONS = [
    (("pyramid",), {"beta": 1}),
    (("pyramid",), {"beta": 2.5}),
    (("adaptive",), {"floor": 0.0}),
    (("adaptive",), {"floor": 1.0}),
    (("adaptive",), {"floor": 0.5, "sinks": 3}),
    (("critical",), {"alpha": 0.0}),
    (("critical",), {"alpha": 1.0}),
    (("critical",), {"alpha": 0.25, "eps": 0.01}),
    (("critical",), {"norm": 2}),
    (("adaptive", "critical"), {"norm": 2, "floor": 0.1, "alpha": 0.75}),
    (("pyramid", "adaptive", "critical"), {"beta": 3, "floor": 0.3, "alpha": 0.3}),
    (("global_topk",), {"floor": 0.0}),
    (("global_topk",), {"floor": 1.0, "sinks": 2}),
    (("pyramid", "global_topk", "critical"), {"beta": 3, "floor": 0.3, "alpha": 0.3}),
]


@pytest.mark.parametrize(("wrap", "options"), OPTIONS, ids=[f"{'+'.join(w)}-{o}" for w, o in OPTIONS])
def test_options(wrap, options):
    for name, policy in (("llama_gqa", "h2o"), ("gpt2", "snapkv"), ("mpt", "mean_or_roco")):
        certain(name, policy.replace("mean_or_", ""), 0.4, wrap=wrap, **SMALL.get(policy, {}), **options)


CHUNKS = [
    ("h2o", ("chunked",), {"size": 4}),
    ("roco", ("chunked",), {"size": 3, "recent": 2, "together": False}),
    ("tova", ("chunked",), {"size": 7, "sinks": 3, "heads": "each"}),
    ("cur", ("chunked", "adaptive"), {"size": 4, "together": False}),
    ("snapkv", ("pyramid", "chunked"), {"size": 5, "window": 3}),
    ("leverage", ("chunked",), {"size": 4, "block": 11}),
    ("chunk_kv", (), {"size": 1, "window": 5, "kernel": 1}),
    ("chunk_kv", (), {"size": 40, "window": 5}),
    ("chunk_kv", ("adaptive",), {"size": 4, "window": 5, "block": 9}),
    ("chunk_kv", ("global_topk",), {"size": 4, "window": 5}),
]


@pytest.mark.parametrize(("policy", "wrap", "options"), CHUNKS, ids=[f"{p}-{o}" for p, _, o in CHUNKS])
def test_chunks(policy, wrap, options):
    for name, pads in (("llama_gqa", (0, 9)), ("mistral_sliding", (0,)), ("mpt", (0, 0))):
        certain(name, policy, 0.4, pads=pads, wrap=wrap, **options)


MERGED = [
    ("h2o", ("merged",), {}),
    ("snapkv", ("merged",), {"window": 5, "kernel": 3, "threshold": 0.6}),
    ("roco", ("adaptive", "merged"), {"recent": 3}),
    ("h2o", ("global_topk", "merged"), {}),
    ("roco", ("merged",), {"recent": 3, "block": 9}),
    ("scissorhands", ("merged",), {"block": 8, "bits": 8}),
    ("cur", ("critical", "merged"), {"window": 4}),
    ("snapkv", ("chunked", "merged"), {"window": 5, "size": 4, "block": 12}),
]


@pytest.mark.parametrize(("policy", "wrap", "options"), MERGED, ids=[f"{p}-{'+'.join(w)}" for p, w, _ in MERGED])
def test_merged(policy, wrap, options):
    for name, pads in (("llama_gqa", (0, 9)), ("mistral_sliding", (0,)), ("gptj", (0, 4))):
        certain(name, policy, 0.4, pads=pads, wrap=wrap, **options)


REFITTED = [
    ("kvzip", ("refit",), {"chunk": 11, "instruction": (3, 1), "floor": 0.2}),
    ("kvzip_plus", ("refit",), {"chunk": 50, "queries": 9, "ridge": 1.0}),
    ("h2o", ("adaptive", "refit"), {"recent": 3, "queries": 7, "bits": 8}),
    ("roco", ("global_topk", "refit"), {"recent": 3, "instruction": (2,), "chunk": 9}),
    ("snapkv", ("critical", "refit"), {"window": 5, "kernel": 3, "ridge": 1e-3, "queries": 3}),
    ("leverage", ("chunked", "refit"), {"size": 4, "ridge": 10.0, "bits": 4}),
    ("adakv", ("pyramid", "refit"), {"window": 5, "kernel": 3, "turns": "each", "queries": 40}),
]
SINGULAR = {
    "one token kept": {"k": 1},
    "one token but for one": {"k": 1, "n": 11},
    "more kept than asked": {"k": 0.9, "queries": 1},
    "nothing but its own values": {"k": 0.4, "ridge": 1e6},
}


@pytest.mark.parametrize(("policy", "wrap", "options"), REFITTED, ids=[f"{p}-{'+'.join(w)}" for p, w, _ in REFITTED])
def test_refitted(policy, wrap, options):
    shapes = (("llama_gqa", (0, 9)), ("mistral_sliding", (0,)), ("gptj", (0, 4)), ("mpt", (0, 0)), ("gpt2", (3, 0)))
    for name, pads in shapes:
        certain(name, policy, 0.4, pads=pads, wrap=wrap, **options)


@pytest.mark.parametrize("what", SINGULAR)
def test_refitted_where_little_is_known(what):
    for name, pads in (("llama_gqa", (0, 9)), ("mistral_sliding", (0,)), ("mpt", (3, 0))):
        for policy in ("kvzip", "tova"):
            certain(name, policy, wrap=("refit",), pads=pads, **{"chunk": 11, **SINGULAR[what]})


@pytest.mark.parametrize("wrap", WHOLE, ids="+".join)
@pytest.mark.parametrize("k", [0.05, 0.97, [0.3, 0.6], [0.5, 1.0]], ids=str)
def test_one_budget_for_all_layers(k, wrap):
    """Lists give each layer a part of it; a layer that keeps everything has none."""
    if isinstance(k, float) or "pyramid" not in wrap:
        certain("llama_gqa", "h2o", k, wrap=wrap, steps=5)
        certain("llama_gqa", "keyformer", k, wrap=wrap, steps=5, **({} if isinstance(k, list) else {"shared": True}))


@pytest.mark.parametrize("positions", ["original", "renumbered"])
@pytest.mark.parametrize("wrap", WHOLE, ids="+".join)
def test_one_budget_for_all_layers_rounded(wrap, positions):
    for bits in (8, 4):
        certain("llama_gqa", "h2o", 0.4, wrap=wrap, bits=bits, positions=positions)


@st.composite
def runs(draw):
    """Arguments of `agrees`: any policy with any parts around it, on any shape."""
    policy = draw(st.sampled_from(EVICTING))
    wrap = tuple(name for name in ("pyramid", "adaptive", "critical") if draw(st.integers(0, 2)) == 0)
    if "adaptive" not in wrap and draw(st.integers(0, 2)) == 0:
        wrap = ("global_topk", *wrap)
    assume(fits(policy, wrap))
    name = draw(st.sampled_from(tuple(MODELS)))
    pads = draw(st.lists(st.one_of(st.just(0), st.integers(0, 12)), min_size=1, max_size=3))
    options = {"sinks": draw(st.integers(0, 4)), "block": draw(st.one_of(st.none(), st.integers(1, 20)))}
    if "global_topk" in wrap or policy in WAITING:
        options["block"] = None
    if name != "gpt2" and policy not in PLACED and draw(st.integers(0, 3)) == 0:
        options["positions"] = "renumbered"
    if policy in WINDOWED:
        options |= {"window": draw(st.integers(1, 8)), "pooling": draw(st.sampled_from(["max", "avg", None]))}
    elif policy in ANY_SCHEDULE:
        whole = options["block"] or {"adaptive", "global_topk"} & set(wrap)
        schedules = ["prompt", "both"] if whole else ["prompt", "decode", "both"]
        options |= {"schedule": draw(st.sampled_from(schedules)), "recent": draw(st.one_of(st.integers(0, 6), st.floats(0, 1)))}
    else:
        options[next(iter(SMALL[policy]))] = draw(st.integers(2, 9))
    return {
        "name": name,
        "policy": policy,
        "k": draw(st.one_of(st.floats(0.02, 0.98), st.integers(1, 40))),
        "n": max(pads) + draw(st.integers(1, 34)),
        "steps": draw(st.integers(0, 12)),
        "pads": tuple(pads),
        "weights": draw(st.integers(0, 1000)),
        "wrap": wrap,
        **options,
    }


@pytest.mark.slow
@settings(max_examples=250, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(runs())
def test_any_shape(arguments):
    assume(agrees(**arguments))


FOUND = {
    "slots that evict are no text in order": {
        "name": "mistral", "policy": "scissorhands", "k": 9, "n": 9, "steps": 13, "pads": (0, 0), "positions": "renumbered",
    },
    "one row is full while another fills up": {
        "name": "llama", "policy": "window", "k": 26, "n": 30, "steps": 4, "pads": (0, 8), "wrap": ("pyramid",),
    },
    "heads of different budgets that hold as many": {
        "name": "mistral", "policy": "tova", "k": 30, "n": 30, "steps": 3, "pads": (0,), "wrap": ("adaptive", "critical"),
        "block": 9, "positions": "renumbered", "floor": 0.8, "heads": "each",
    },
}  # fmt: skip


@pytest.mark.parametrize("what", FOUND)
def test_found_by_random_runs(what):
    certain(**FOUND[what])


# ---- blocks ----


@pytest.mark.parametrize("block", [1, 4, 7, 50])
@pytest.mark.parametrize("policy", [policy for policy in EVICTING if policy not in WAITING])
def test_blocks(policy, block):
    for name in ("llama_gqa", "mistral_sliding"):
        certain(name, policy, 0.4, block=block, **SMALL.get(policy, {}))


@pytest.mark.parametrize("policy", ["roco", "keyformer", "snapkv", "tova"])
@pytest.mark.parametrize("name", FIVE)
def test_blocks_on_every_architecture(name, policy):
    certain(name, policy, 9, block=8, pads=(0, 0), **SMALL.get(policy, {}))
    certain(name, policy, 9, block=8, pads=(0, 11), **SMALL.get(policy, {}))


@pytest.mark.parametrize("wrap", BLOCKED, ids="+".join)
def test_blocks_of_combinations(wrap):
    for policy in ("h2o", "snapkv"):
        certain("llama_gqa", policy, 0.4, wrap=wrap, block=6, pads=(0, 5), **SMALL.get(policy, {}))


@pytest.mark.parametrize("options", [{"damping": 0.5}, {"resample": True}, {"tau": (0.6, 3.0)}], ids=str)
def test_blocks_of_keyformer(options):
    certain("llama_gqa", "keyformer", 0.4, block=5, pads=(0, 12), recent=2, **options)


def test_blocks_with_protected_tokens():
    mask = [i in (2, 17, 23) for i in range(30)]
    certain("llama_gqa", "h2o", 8, block=4, pads=(0,), protect=mask, sinks=1)


# ---- scores from a sample of the rows ----


@pytest.fixture
def short_samples(monkeypatch):
    """Blocks of 2 rows, of which about 6 are read, so that prompts of the oracle's length are sampled."""
    for module in (sampling, reference):
        monkeypatch.setattr(module, "ROWS", 2)
        monkeypatch.setattr(module, "READ", 6)


@pytest.mark.parametrize("policy", ["h2o", "scissorhands", "roco", "keyformer", "key_attention"])
@pytest.mark.parametrize("name", ["llama_gqa", "mpt", "gptj", "mistral_sliding"])
def test_sampled_rows(name, policy, short_samples):
    for seed in (0, 1):
        certain(name, policy, 0.4, scores="sampled", pads=(0, 9), seed=seed)


PASSES = [{"pads": (0,)}, {"block": 13}, {"dtype": torch.float32}, {"positions": "renumbered"}]


@pytest.mark.parametrize("options", PASSES, ids=str)
def test_sampled_rows_of_other_passes(options, short_samples):
    for policy in ("h2o", "keyformer"):
        certain("llama_gqa", policy, 0.4, scores="sampled", **options)
    certain("llama_gqa", "keyformer", 0.4, scores="sampled", resample=True, shared="block" not in options, **options)


@pytest.mark.parametrize("wrap", WRAPS, ids="+".join)
def test_sampled_rows_of_combinations(wrap, short_samples):
    certain("llama_gqa", "h2o", 0.4, wrap=wrap, scores="sampled")


# ---- renumbered positions ----


@pytest.mark.parametrize("policy", ["h2o", "roco", "keyformer", "streaming_llm", "key_norm", "snapkv"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt2"])
def test_renumbered(name, policy):
    certain(name, policy, 0.4, positions="renumbered", **SMALL.get(policy, {}))
    certain(name, policy, 0.4, positions="renumbered", pads=(0, 0), **SMALL.get(policy, {}))


@pytest.mark.parametrize("name", ["llama_gqa", "mpt", "gptj"])
def test_renumbered_with_blocks_and_shared_budgets(name):
    for wrap in ((), ("adaptive",), ("adaptive", "critical")):
        certain(name, "h2o", 0.4, positions="renumbered", block=6, pads=(0, 7), wrap=wrap)


def test_every_windowed_policy_is_small_here():
    assert set(SMALL) >= set(WINDOWED)


SCALINGS = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "factor": 2.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_renumbered_under_every_rope_scaling(kind):
    """The prompt is longer than the 16 positions of training, what is held later is not."""
    rope = {"rope_type": kind, "rope_theta": 100.0, **SCALINGS[kind]}
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **IDS}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    agreed, plain = [], LlamaForCausalLM(LlamaConfig(**sizes))
    for weights in range(6):
        torch.manual_seed(weights)
        model = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope)).eval().double()
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, 0.0, 0.25)
        agreed.append(agrees("", "h2o", 10, pads=(0,), weights=weights, model=model, positions="renumbered"))
    assert any(agreed), "every draw was too close to call"
    tables = [one.model.rotary_emb(torch.zeros(1), torch.arange(30)[None])[0] for one in (model, plain)]
    assert not torch.allclose(*tables), "the scaling changes nothing"
