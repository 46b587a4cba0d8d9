"""A pretrained model keeps the promises that tiny ones keep: SmolLM2-135M-Instruct, or what KVPATCH_REAL_MODEL names.

Where a test says so, the model is cut to its first two layers, to save time.
"""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import kvpatch
from kvpatch.evaluation.check import Checks
from kvpatch.policies.needs import Calibrated
from tests.helpers.marks import batches
from tools import real_model

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("no_gradients")]
TEXT = (Path(__file__).parents[2] / "tools" / "evidence" / "texts" / "pages.txt").read_text(encoding="utf-8")
UNCALIBRATED = [name for name in kvpatch.list_policies() if kvpatch.get_policy(name).needs.find(Calibrated) is None]
NEW = 16


@pytest.fixture(scope="module")
def model(real_name):
    return AutoModelForCausalLM.from_pretrained(real_name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(real_name):
    return AutoTokenizer.from_pretrained(real_name)


@pytest.fixture(scope="module")
def short(model):
    """The first two layers."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    cut = type(model)(config).eval()
    cut.load_state_dict(model.state_dict(), strict=False)
    return cut


def ask(tokenizer, words, question="What is this about?"):
    """Ids [1,N] of a prompt by the chat template: the first words of a page of prose, and a question."""
    content = f"{' '.join(TEXT.split()[:words])}\n\n{question}"
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids


def in_int8(model):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def write_gguf(model, path):
    """Write a Llama's weights as llama.cpp's converter does: halves of rotated pairs beside each other."""
    gguf = pytest.importorskip("gguf")
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        if name != "lm_head.weight":  # tied
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.half().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_whole_budget_changes_no_token_of_a_gguf_file(short, tokenizer, tmp_path):
    write_gguf(short, tmp_path / "model.gguf")
    own = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    ids = ask(tokenizer, 120)
    wanted = own(ids).logits
    assert torch.allclose(wanted, short(ids).logits, atol=0.1), "the file holds the model"
    with kvpatch.patched(own, "h2o", k=1.0):
        assert torch.allclose(own(ids, use_cache=True).logits, wanted, atol=1e-4)
        full = own.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(full, own.generate(ids, max_new_tokens=NEW, do_sample=False))
    table = kvpatch.check_model(own, "snapkv", k=0.4)
    assert table.passed, str(table)


CHANGES = {
    "float32": lambda model: model,
    "bfloat16": lambda model: copy.deepcopy(model).to(torch.bfloat16),
    "int8": lambda model: in_int8(copy.deepcopy(model)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_the_whole_budget_changes_no_token(model, tokenizer, kind):
    """Prompt and 16 greedy tokens; logits are compared, too, within the rounding of the model's own numbers."""
    own, ids = CHANGES[kind](model), ask(tokenizer, 120)
    wanted = own.generate(ids, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True)
    with kvpatch.patched(own, "h2o", k=1.0) as patch:
        found = own.generate(ids, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True)
        assert patch.report().share == 1
    assert found.sequences.tolist() == wanted.sequences.tolist()
    most, mean = (1.0, 0.1) if own.dtype == torch.bfloat16 else (2e-3, 2e-4)  # of logits up to some 30, whose steps are 0.125
    apart = (torch.stack(found.logits).float() - torch.stack(wanted.logits).float()).abs()
    assert apart.max() <= most and apart.mean() <= mean, (apart.max(), apart.mean())


@pytest.mark.parametrize("policy", UNCALIBRATED)
@pytest.mark.sampled(3)
def test_promises_hold(short, policy):
    """Of two layers."""
    table = kvpatch.check_model(short, policy, k=0.4)
    assert table.passed, str(table)


class LongChecks(Checks):
    """Checks on 2,000 tokens."""

    def _prompt_length(self, settings):
        return 2000


@pytest.mark.parametrize("policy", UNCALIBRATED)
@pytest.mark.sampled(6)
def test_eviction_is_masking_at_2000_tokens_of_prose(short, tokenizer, policy):
    """Of two layers."""
    checks = LongChecks(short, policy, k=0.3)
    ids_T = tokenizer(TEXT[:40_000], return_tensors="pt").input_ids[0]
    checks.ids_BT = ids_T[: checks.ids_BT.numel()].reshape(checks.ids_BT.shape)
    found = checks._run_check(policy, checks.check_evictions)
    assert found.passed and "NOTHING" not in found.detail, found.detail


def test_promises_hold_in_all_layers(model):
    table = kvpatch.check_model(model, "snapkv", k=0.4)
    assert table.passed, str(table)


@batches
@pytest.mark.parametrize("policy", ["h2o", "snapkv"])
def test_a_batch_of_requests_gets_the_tokens_of_generate(model, tokenizer, policy):
    prompts = [ask(tokenizer, words)[0].tolist() for words in (90, 150)]
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    with kvpatch.patched(model, policy, k=0.5) as patch:
        wanted = [model.generate(torch.tensor([one]), generation_config=config)[0, len(one) :].tolist() for one in prompts]
        found = model.generate_batch(prompts, generation_config=config, progress_bar=False)
        assert patch.report().share < 1
    assert sorted(one.generated_tokens for one in found.values()) == sorted(wanted)


# ---- a chat ----

TURNS = ("What is the capital of France?", "And of Italy?", "Which of the two is larger?")


def test_each_turn_of_a_chat_is_generate_over_the_whole_conversation(model, tokenizer):
    options = {"max_new_tokens": 24, "do_sample": False}
    with kvpatch.patched(model, "h2o", k=1.0) as patch:
        chat, turns = patch.chat(tokenizer, system="You answer in a few words.", **options), []
        for turn in TURNS:
            before = [*chat.messages, {"role": "user", "content": turn}]
            chat.send(turn)
            turns.append((before, chat.ids))
    for messages, ids in turns:
        asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        assert model.generate(**asked, **options).tolist() == ids.tolist()
    for index, (start, _) in enumerate(chat.spans[1:], 1):
        before = tokenizer.apply_chat_template(chat.messages[:index], tokenize=False)
        assert tokenizer.decode(chat.ids[0, :start]) == before
    assert "Paris" in chat.messages[2]["content"] and "Rome" in chat.messages[4]["content"]


def test_a_chat_under_a_budget_forgets_and_goes_on(model, tokenizer):
    with kvpatch.patched(model, "roco", k=64, sinks=16) as patch:
        chat = patch.chat(tokenizer, system="You answer in a few words.", keep_system=True, max_new_tokens=24, do_sample=False)
        assert "Paris" in chat.send(TURNS[0])
        chat.forget(1)
        assert "Rome" in chat.send(TURNS[1])
        chat.send(TURNS[2])
        gone = set(range(*chat.spans[1]))
        for layer in range(model.config.num_hidden_layers):
            held = chat.cache.positions(layer)[0]
            assert (held >= 0).sum(-1).max() <= 64 < chat.cache.get_seq_length()
            assert all(set(range(*chat.spans[0])) <= set(head) and not gone & set(head) for head in held.tolist())


# ---- the tool that makes it ----


def test_another_model_takes_its_place_by_the_variable():
    code = "from tools import real_model; print(real_model.find_model())"
    environment = {real_model.VARIABLE: "somebody/some-model"}
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=real_model.FOLDER.parent
    )
    assert said.stdout.strip() == "somebody/some-model", said.stderr


def test_its_numbers_are_those_of_the_digest(real_name):
    if Path(real_name) != real_model.FOLDER / "smollm2":
        pytest.skip("another model is in its place")
    assert real_model.digest_numbers(Path(real_name)) == real_model.NUMBERS
