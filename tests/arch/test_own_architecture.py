"""An architecture that transformers does not know, an architecture that kvpatch does not know, and what is said then."""

import inspect

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BertModel,
    CpmAntConfig,
    CpmAntForCausalLM,
    FlexOlmoConfig,
    FlexOlmoForCausalLM,
)

import kvpatch
from examples import own_architecture
from examples.own_architecture import ToyAdapter, ToyAttention, toy
from kvpatch.arch import adapter as registry
from kvpatch.evaluation.check import Checks
from kvpatch.hooks.target import Target
from tests.helpers.comparing import agrees, sorted_positions
from tests.helpers.tiny import IDS, VOCAB, force, left_pad, prompt, spread_weights
from tests.oracle import reference_families


@pytest.fixture(autouse=True)
def _registry_as_it_was():
    before = dict(registry.REGISTRY)
    yield
    registry.REGISTRY.clear()
    registry.REGISTRY.update(before)


@pytest.fixture
def model():
    kvpatch.register_arch(ToyAdapter())
    return toy()


def test_the_example(capsys):
    report, results = own_architecture.main()
    assert all(result.passed for result in results), capsys.readouterr().out
    assert len(results) == 7
    assert report.held().eq(16).all()
    assert len(inspect.getsource(ToyAdapter).splitlines()) < 40


@pytest.mark.parametrize("kind", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_one_changes_nothing(model, kind):
    ids = prompt(2, 20)

    def generate():
        torch.manual_seed(3)
        asked = {"max_new_tokens": 8, "pad_token_id": 0, "do_sample": False, "return_dict_in_generate": True} | kind
        return model.generate(ids, attention_mask=left_pad(ids, [20, 13]), output_logits=True, **asked)

    want = generate()
    with kvpatch.patched(model, "h2o", 1.0):
        got = generate()
    assert torch.equal(want.sequences, got.sequences)
    for a, b in zip(want.logits, got.logits, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0)


def by_hand(model, ids, fed, k):
    """Accumulated attention over lists of tokens; logits after the prompt and after each step, and what is held."""
    held = [{"i": [], "k": [], "v": [], "s": {}} for _ in model.layers]
    logits, seen = [], 0
    for new in [ids, *fed.split(1)]:
        hidden = model.tokens(new) + model.places(torch.arange(seen, seen + len(new)))
        for layer, own in zip(model.layers, held, strict=True):
            q, k_T, v_T = (part[0] for part in layer.project(hidden[None]))
            rows = []
            for t in range(len(new)):
                own["i"].append(seen + t)
                own["k"].append(k_T[0, t])
                own["v"].append(v_T[0, t])
                a = torch.softmax(q[:, t] @ torch.stack(own["k"]).T, -1)
                rows.append((a @ torch.stack(own["v"])).flatten())
                for i, mass in zip(own["i"], a.mean(0).tolist(), strict=True):
                    own["s"][i] = own["s"].get(i, 0.0) + mass
            stay = sorted(sorted(own["i"], key=lambda i, s=own["s"]: (s[i], i))[-k:])
            for name in ("k", "v"):
                own[name] = [one for i, one in zip(own["i"], own[name], strict=True) if i in stay]
            own["i"] = stay
            hidden = hidden + layer.out(torch.stack(rows))
        seen += len(new)
        logits.append(model.head(hidden)[-1])
    return torch.stack(logits), [own["i"] for own in held]


@torch.no_grad()
@pytest.mark.parametrize("k", [3, 9])
def test_evictions_are_those_of_a_loop_by_hand(model, k):
    model.double()
    ids, fed = prompt(1, 24), prompt(1, 6, seed=2)
    with kvpatch.patched(model, "key_attention", k):
        got, cache = force(model, ids, fed)
    want, held = by_hand(model, ids[0], fed[0], k)
    assert sorted_positions([cache.positions(layer)[0].tolist() for layer in range(2)]) == [[one] for one in held]
    torch.testing.assert_close(got[0], want, atol=1e-9, rtol=0)
    with pytest.raises(AssertionError):  # and it is not what a full cache gives
        torch.testing.assert_close(force(model, ids, fed)[0][0], want, atol=1e-3, rtol=0)


def test_blocks_gradients_and_positions(model):
    ids = prompt(2, 30)
    model.train()
    with kvpatch.patched(model, "h2o", 6, block=5):
        model(ids).logits.square().mean().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        trained = model(ids).logits
        model.eval()
        torch.testing.assert_close(model(ids).logits, trained)
        with pytest.raises(kvpatch.KVPatchError, match="needs 270 positions, but this model has 256"):
            model(prompt(1, 270))
    with pytest.raises(kvpatch.KVPatchError, match="does not work for toy: its positions are learned"):
        kvpatch.patch(model, "h2o", 6, positions="renumbered")
    with kvpatch.patched(model, "critical_snapkv", 9, window=3):
        assert model(ids).past_key_values.held(1).eq(9).all()


class Plain(nn.Module):
    """The same attention in a module that inherits nothing of transformers."""

    def __init__(self, config):
        super().__init__()
        self.tokens, self.head = nn.Embedding(config.vocab_size, config.width), nn.Linear(config.width, config.vocab_size)
        self.layers = nn.ModuleList(ToyAttention(config, layer) for layer in range(2))

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=True):
        hidden, n = self.tokens(input_ids), input_ids.shape[1]
        causal = torch.full((n, n), -float("inf")).triu(1)
        for layer in self.layers:
            mask = causal if past_key_values is None else attention_mask
            hidden = hidden + layer(hidden, mask, past_key_values)[0]
        return self.head(hidden), past_key_values


class PlainAdapter(ToyAdapter):
    def max_positions(self, config):
        return None


def test_a_plain_module_is_served_too():
    kvpatch.register_arch(PlainAdapter())
    torch.manual_seed(0)
    model, ids = Plain(toy().config).eval(), prompt(2, 20)
    want = model(ids)[0]
    with kvpatch.patched(model, "h2o", 1.0):
        torch.testing.assert_close(model(ids)[0], want)
    with kvpatch.patched(model, "h2o", 5) as patch:
        _, cache = model(ids[:, :-1])
        last, cache = model(ids[:, -1:], past_key_values=cache)
        assert cache.held(1).tolist() == [[5], [5]]
        assert patch.report().held().eq(5).all()
    assert not torch.allclose(last[:, -1], want[:, -1], atol=1e-3)


class Closed(Plain):
    def forward(self, input_ids, past_key_values=None):
        return super().forward(input_ids, None, past_key_values)


def test_a_decoder_that_takes_no_mask_is_refused():
    kvpatch.register_arch(PlainAdapter())
    with pytest.raises(kvpatch.KVPatchError, match="forward of Closed takes no attention_mask, use_cache: kvpatch hands"):
        kvpatch.patch(Closed(toy().config), "h2o", 5)


# What kvpatch does not know


def flex_olmo(dtype=torch.float32):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = FlexOlmoConfig(vocab_size=VOCAB, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, **IDS, **sizes)
    config._experts_implementation = "eager"
    return spread_weights(FlexOlmoForCausalLM(config).eval()).to(dtype)


def test_the_error_for_a_family_without_a_row_holds_the_row():
    """Whoever types what it says has the family served."""
    model = flex_olmo(torch.float64)
    with pytest.raises(kvpatch.KVPatchError, match="No adapter for FlexOlmoForCausalLM. Known architectures: llama,") as caught:
        Target.find(model, auto=False)
    message = str(caught.value)
    row = message[message.index("kvpatch.register_arch(") : message.index("; then")]
    eval(row)  # the whole point
    assert "flex_olmo" in kvpatch.list_architectures()
    reference_families.learn(FlexOlmoForCausalLM)
    ids = prompt(2, 16)
    want = model(ids).logits
    with kvpatch.patched(model, "h2o", 1.0):
        torch.testing.assert_close(model(ids).logits, want)
    assert any(agrees("", "h2o", 0.4, n=20, steps=4, weights=weights, model=model) for weights in range(6))


def test_a_row_for_an_encoder_is_refused_and_for_its_decoder_served():
    """BERT's attention class serves both; as an encoder it would become causal without a word."""
    row = ("bert", "transformers.models.bert.modeling_bert.BertSelfAttention")
    kvpatch.register_arch(
        kvpatch.InterfaceAdapter(*row, projection=None, learned=True, dropout="config.attention_probs_dropout_prob")
    )
    small = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    with pytest.raises(kvpatch.KVPatchError, match=r"BertModel attends in both directions \(is_causal=False of BertSelfAtt"):
        kvpatch.patch(BertModel(BertConfig(**small)), "h2o", 1.0)
    model = BertLMHeadModel(BertConfig(**small, is_decoder=True)).eval()
    assert [result for result in Checks(model, "h2o").run() if not result.passed] == []


def test_the_error_for_any_other_model_holds_the_recipe_of_an_adapter():
    config = CpmAntConfig(vocab_size=VOCAB, hidden_size=32, num_attention_heads=4, dim_head=8, dim_ff=48, num_hidden_layers=2)
    with pytest.raises(kvpatch.KVPatchError, match=r"subclass kvpatch\.Adapter \(project, output, kv_shape.*register_arch"):
        kvpatch.patch(CpmAntForCausalLM(config), "h2o", 5)
    with pytest.raises(kvpatch.KVPatchError, match="No adapter for Linear"):
        kvpatch.patch(nn.Linear(2, 2), "h2o", 5)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"scale": 0.5}, r"asks for scaling=0\.35\d+, but its adapter 'flex' says 0\.5: set scale="),
        ({"softcap": "config.hidden_size"}, r"asks for softcap=None, but its adapter 'flex' says 32: set softcap="),
        ({"sinks": "q_norm.weight"}, r"asks for s_aux=None, but its adapter 'flex' says .*set sinks="),
    ],
    ids=["scale", "softcap", "sinks"],
)
def test_a_row_that_says_something_else_than_the_model_is_refused(wrong, words):
    model = flex_olmo()
    attention = type(model.model.layers[0].self_attn)
    kvpatch.register_arch(kvpatch.InterfaceAdapter("flex", f"{attention.__module__}.{attention.__qualname__}", **wrong))
    with kvpatch.patched(model, "h2o", 5), pytest.raises(kvpatch.KVPatchError, match="(?s)" + words):
        model(prompt(1, 8))


def test_a_dropout_that_a_row_does_not_know_is_refused():
    model = flex_olmo()
    attention = type(model.model.layers[0].self_attn)
    kvpatch.register_arch(kvpatch.InterfaceAdapter("flex", attention, dropout="config.attn_pdrop"))
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    words = r"asks for dropout=0\.2, but its adapter 'flex' says 0\.0: set dropout="
    with kvpatch.patched(model.train(), "h2o", 5, block=4), pytest.raises(kvpatch.KVPatchError, match=words):
        model(prompt(1, 8))
