"""Text through multimodal models: Gemma 3 as AutoModelForCausalLM loads it, and models that only merge images.

Qwen 2.5 VL has no row: an automatic one serves its text model.
"""

import copy

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import kvpatch
from kvpatch.cache.cache import EvictingCache
from kvpatch.evaluation.check import Checks
from kvpatch.hooks.target import Target
from tests.helpers.tiny import IDS, VOCAB, force, left_pad, prompt, snapshot, spread_weights
from tests.helpers.tiny import make as tiny_model
from tests.helpers.tiny_families import CHUNKS

TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, **IDS,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
IMAGE, VIDEO, SOFT = 5, 6, 4  # the tokens of an image and a video, and tokens per image
GEMMA = {"sliding_window": 7, "layer_types": [*["sliding_attention"] * 3, "full_attention"], "query_pre_attn_scalar": 8}
SIGLIP = {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False}

SHELLS = {
    "gemma3": {"text_config": {**TEXT, **GEMMA}, "vision_config": SIGLIP, "mm_tokens_per_image": SOFT, "image_token_id": IMAGE},
    "gemma4": {
        "text_config": {
            **TEXT, **GEMMA, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
            "use_bidirectional_attention": "vision",
        },
        "vision_config": {**VISION, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8}, "audio_config": None,
        "image_token_id": VOCAB, "video_token_id": VOCAB + 1,  # which no prompt has: their embeddings are others
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **TEXT, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **VISION, "head_dim": 8},
        "image_token_id": IMAGE, "spatial_merge_size": 1,
    },
    "llava_next": {
        "text_config": {"model_type": "llama", **TEXT}, "vision_config": {"model_type": "clip_vision_model", **VISION},
        "image_token_index": IMAGE,
    },
    "llama4": {
        "text_config": {**TEXT, **CHUNKS, "no_rope_layers": [1, 1, 1, 0]},
        "vision_config": {
            **VISION, "patch_size": 2, "intermediate_size": 64, "pixel_shuffle_ratio": 0.5, "vision_output_dim": 16,
            "projector_input_dim": 16, "projector_output_dim": 16,
        },
        "image_token_index": IMAGE,
    },
    "qwen2_5_vl": {
        "text_config": {
            **{key: value for key, value in TEXT.items() if key != "head_dim"},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        },
        "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32},
    },
}  # fmt: skip


def make(kind, dtype=torch.float32):
    if kind == "llama4" and transformers.__version__ == "5.24.0":
        pytest.skip("Llama4ForConditionalGeneration of 5.24.0 reads an attribute that its output does not have, unpatched too")
    torch.manual_seed(0)
    auto = AutoModelForCausalLM if kind == "gemma3" else AutoModelForImageTextToText
    model = spread_weights(auto.from_config(AutoConfig.for_model(kind, **SHELLS[kind])).eval())
    return model if dtype == torch.float32 else model.to(dtype)  # a table of complex numbers would become real


def greedy(model, ids, **asked):
    asked = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, **asked}
    return model.generate(ids, output_logits=True, **asked)


@pytest.mark.parametrize("kind", SHELLS)
def test_text_at_one_is_the_unpatched_model(kind):
    model, ids, fed = make(kind), prompt(2, 20), prompt(2, 4, seed=2)
    mask, before = left_pad(ids, [20, 13]), snapshot(model)

    def everything():
        forced, cache = force(model, ids, fed, mask)
        runs = [greedy(model, ids, attention_mask=mask), greedy(model, ids, attention_mask=mask, num_beams=3)]
        with torch.no_grad():
            logits = [forced, model(ids).logits, model(ids, use_cache=False).logits]
        return [*logits, *(torch.stack(run.logits) for run in runs)], [run.sequences for run in runs], cache

    want, sequences, _ = everything()
    with kvpatch.patched(model, "h2o", 1.0):
        got, same, cache = everything()
    assert isinstance(cache, EvictingCache) and cache.get_seq_length() == 24
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, atol=3e-5, rtol=0)
    assert all(map(torch.equal, sequences, same))
    after = snapshot(model)
    for own in (before, after):
        own.pop(("model", "rope_deltas"), None)  # generate() of a Qwen VL model sets it, patched or not
    assert after == before


@pytest.mark.parametrize("kind", SHELLS)
def test_evictions_are_those_of_the_text_model(kind):
    """The whole model evicts as its language model does alone, which the oracle checks; and as a mask would."""
    model, ids, fed = make(kind, torch.float64), prompt(2, 24), prompt(2, 6, seed=2)
    mask = left_pad(ids, [24, 15])
    decoder = model.get_decoder()
    with torch.no_grad(), kvpatch.patched(decoder, "h2o", 0.4):
        hidden = decoder(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=True)
    with kvpatch.patched(model, "h2o", 0.4) as patch:
        _, cache = force(model, ids, fed, mask)
        with torch.no_grad():
            alone = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).past_key_values
        for layer in range(4):
            assert torch.equal(alone.positions(layer).sort(-1).values, hidden.past_key_values.positions(layer).sort(-1).values)
        assert cache.held(3).tolist() == [[9, 9], [6, 6]]
        greedy(model, ids, attention_mask=mask)
        assert patch.report().held()[3].max() == 9
    assert [result for result in Checks(make(kind), "window", 0.4).run() if not result.passed] == []


@pytest.mark.parametrize("kind", SHELLS)
def test_blocks_and_gradients(kind):
    model, ids, atol = make(kind, torch.float64), prompt(1, 26), 1e-9 if kind != "llama4" else 2e-5  # it rotates in float32
    with kvpatch.patched(model, "roco", 8, block=6) as patch:
        with torch.no_grad():
            want, cache = model(ids).logits, patch.new_cache()
            parts = [model(ids[:, at : at + 6], past_key_values=cache).logits for at in range(0, 26, 6)]
        torch.testing.assert_close(want, torch.cat(parts, 1), atol=atol, rtol=0)
        model.train()
        logits = model(ids).logits
        torch.testing.assert_close(logits, want, atol=atol, rtol=0)
        logits.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.get_decoder().parameters())


@pytest.mark.parametrize("kind", SHELLS)
def test_training_steps_inside_are_those_outside(kind):
    model, ids = make(kind).train(), prompt(2, 12)

    def gradients():
        model.zero_grad()
        types = {"token_type_ids": torch.zeros_like(ids)} if kind == "gemma3" else {}
        model(ids, attention_mask=left_pad(ids, [12, 8]), labels=ids, **types).loss.backward()
        return {key: parameter.grad.clone() for key, parameter in model.named_parameters() if parameter.grad is not None}

    want = gradients()
    with kvpatch.patched(model, "h2o", 0.5):
        got = gradients()
    assert want.keys() == got.keys() and all(torch.equal(want[key], got[key]) for key in want)


def image_of(kind):
    ids = prompt(1, 14)
    ids[ids == IMAGE] = 1
    ids[:, 2 : 2 + SOFT] = IMAGE
    pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    extra = {"mistral3": {"image_sizes": torch.tensor([[8, 8]])}}.get(kind, {})
    return ids, {"pixel_values": pixels, **extra}


def test_gemma_images_are_refused_before_anything_runs():
    model, (ids, image) = make("gemma3"), image_of("gemma3")
    types = (ids == IMAGE).long()
    want = model(ids, token_type_ids=types, **image).logits
    with kvpatch.patched(model, "h2o", 0.5):
        for run in (model, model.generate):
            with pytest.raises(kvpatch.KVPatchError, match=r"Gemma3Model reads the tokens of an image in both directions"):
                run(input_ids=ids, token_type_ids=types, **image)
        text = torch.zeros_like(ids)  # what its processor makes of a text
        assert model(ids, token_type_ids=text).past_key_values.held(3).eq(7).all()
        with pytest.raises(kvpatch.KVPatchError, match="must be a padding mask"):
            model(ids, attention_mask=torch.ones(1, 1, 14, 14))
    with kvpatch.patched(model, "h2o", 0.5), torch.no_grad():  # a pass without a cache runs the model's own code
        torch.testing.assert_close(model(ids, token_type_ids=types, use_cache=False, **image).logits, want)


def test_images_alone_are_read_in_both_directions():
    model, ids = make("gemma4"), prompt(1, 14)
    with kvpatch.patched(model, "h2o", 0.5):
        assert model(ids, mm_token_type_ids=torch.zeros_like(ids)).past_key_values.held(3).eq(7).all()
        with pytest.raises(kvpatch.KVPatchError, match=r"Gemma4Model reads the tokens of an image in both directions"):
            model(ids, mm_token_type_ids=torch.ones_like(ids))


def test_images_under_a_causal_mask_are_served():
    model, (ids, image) = make("mistral3"), image_of("mistral3")
    want = model(ids, **image).logits
    with kvpatch.patched(model, "h2o", 1.0):
        torch.testing.assert_close(model(ids, **image).logits, want, atol=3e-5, rtol=0)
    assert not torch.allclose(model(ids, pixel_values=image["pixel_values"] + 1, image_sizes=image["image_sizes"]).logits, want)
    with kvpatch.patched(model, "h2o", 5):
        assert model(ids, **image).past_key_values.held(3).eq(5).all()


def two_images(kind):
    """Two rows of two images, the second row padded; returns ids, mask and what else the model takes."""
    ids = prompt(2, 24)
    ids[(ids == IMAGE) | (ids == VIDEO)] = 1
    for start in (2, 12):
        ids[:, start : start + SOFT] = IMAGE
    mask = left_pad(ids, [24, 23])
    generator = torch.Generator().manual_seed(1)
    if kind == "llama4":
        return ids, mask, {"pixel_values": torch.randn(4, 3, 8, 8, generator=generator)}
    if kind == "mistral3":
        return ids, mask, {"pixel_values": torch.randn(4, 3, 8, 8, generator=generator), "image_sizes": torch.full((4, 2), 8)}
    grid = torch.tensor([[1, 4, 4]] * 4)
    pixels = torch.randn(4 * 16, 3 * 16, generator=generator)
    return ids, mask, {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).long()}


def make_reader(kind, dtype=torch.float32):
    """A model whose processor would give it images of 4 tokens."""
    if kind != "qwen2_5_vl":
        return make(kind, dtype)
    config = copy.deepcopy(SHELLS[kind])
    config["vision_config"] |= {
        "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1, "window_size": 16, "fullatt_block_indexes": [0],
    }  # fmt: skip
    marks = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 7, "vision_end_token_id": 8}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **config, **marks)).eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, 0.0, 0.25)
    return model.to(dtype)


@pytest.mark.parametrize("kind", ["mistral3", "llama4", "qwen2_5_vl"])
def test_generate_with_images(kind):
    """At k=1.0 as unpatched, rotary positions of several dimensions included; with less, each row as alone."""
    model, (ids, mask, images) = make_reader(kind), two_images(kind)
    want = torch.stack(greedy(model, ids, attention_mask=mask, **images).logits)
    with kvpatch.patched(model, "h2o", 1.0):
        got = torch.stack(greedy(model, ids, attention_mask=mask, **images).logits)
    torch.testing.assert_close(got, want, atol=3e-5, rtol=0)
    with kvpatch.patched(model, "h2o", 10) as patch:
        got = torch.stack(greedy(model, ids, attention_mask=mask, **images).logits)
        assert patch.report().held()[3].max() == 10
        alone = {name: value[: len(value) // 2] for name, value in images.items()}
        first = torch.stack(greedy(model, ids[:1], **alone).logits)
    assert not torch.allclose(got, want, atol=1e-3)
    assert got.argmax(-1)[:, 0].tolist() == first.argmax(-1)[:, 0].tolist()
    torch.testing.assert_close(got[:, :1], first, atol=3e-5, rtol=0)


@pytest.mark.parametrize("kind", ["mistral3", "llama4", "qwen2_5_vl"])
@pytest.mark.parametrize("protect", ["image", "text", [IMAGE]])
def test_tokens_of_images_are_protected_by_name_and_by_id(kind, protect):
    """As by a mask, although the decoder gets embeddings."""
    model, (ids, mask, images) = make_reader(kind), two_images(kind)
    marked = (ids == IMAGE) if protect != "text" else (ids != IMAGE) & mask.bool()

    def kept(protected):
        with kvpatch.patched(model, "roco", 17, protect=protected), torch.no_grad():
            cache = model(ids, attention_mask=mask, **images).past_key_values
        return [cache.positions(layer).sort(-1).values for layer in range(4)]

    by_name = kept(protect)
    assert all(map(torch.equal, by_name, kept(marked)))
    assert not all(map(torch.equal, by_name, kept(None)))
    for row in range(2):
        own = (marked[row][mask[row].bool()]).nonzero().flatten()
        assert torch.isin(own, by_name[3][row, 0]).all()


def test_the_model_that_merges_images_may_hold_a_causal_model():
    """BLIP-2 holds an OPTForCausalLM, whose configuration names no token of an image; its generate() gives embeddings alone."""
    text = {"vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"word_embed_proj_dim": 32, "max_position_embeddings": 64, **IDS, "model_type": "opt"}
    vision, query = {**VISION, "hidden_size": 16}, {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    query |= {"intermediate_size": 16, "encoder_hidden_size": 16, "cross_attention_frequency": 1, "vocab_size": 9}
    config = {"text_config": text, "vision_config": vision, "qformer_config": query, "num_query_tokens": SOFT}
    torch.manual_seed(0)
    config = AutoConfig.for_model("blip-2", **config, image_token_index=IMAGE)
    model = AutoModelForImageTextToText.from_config(config).eval()
    ids = prompt(1, 24)
    ids[ids == IMAGE] = 1
    ids[:, 2 : 2 + SOFT] = IMAGE
    pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with kvpatch.patched(model, "window", 8, protect="image") as patch, torch.no_grad():
        model(input_ids=ids, pixel_values=pixels, use_cache=True)
        assert patch.report().positions[1].sort(-1).values[0, 0, -8:].tolist()[:SOFT] == [2, 3, 4, 5]
        with pytest.raises(kvpatch.KVPatchError, match="needs input_ids; with inputs_embeds give a boolean mask"):
            model.generate(input_ids=ids, pixel_values=pixels, max_new_tokens=2, do_sample=False, pad_token_id=0)


def test_a_model_of_text_has_no_image_to_protect():
    model = make("gemma3").model.language_model
    with pytest.raises(kvpatch.KVPatchError, match="names no token of an image. Give token ids"):
        kvpatch.patched(model, "h2o", 5, protect="image")


def test_compiled_steps_of_a_shell():
    model, ids = make("gemma3"), prompt(1, 12)
    with kvpatch.patched(model, "window", 6) as patch, torch.no_grad():
        cache = patch.new_cache(room=8)
        model(ids, past_key_values=cache)
        other = cache.clone()
        step = torch.compile(model, backend="eager")
        for token in prompt(1, 4, seed=3).split(1, 1):
            want = model(token, past_key_values=other).logits
            torch.testing.assert_close(step(token, past_key_values=cache).logits, want, atol=1e-5, rtol=0)


def test_a_copy_of_a_patched_shell_evicts_on_its_own():
    model, ids = make("gemma3"), prompt(1, 12)
    with kvpatch.patched(model, "h2o", 5, block=4):
        twin = copy.deepcopy(model)
        model.train()
    with torch.no_grad():
        assert twin(ids).past_key_values.held(3).eq(5).all()


class Seeing(transformers.LlamaPreTrainedModel):
    """A causal language model within one that reads images, whose configuration alone names their tokens."""

    def __init__(self, language, **names):
        config = copy.deepcopy(language.config)
        config.update(names)
        super().__init__(config)
        self.language = language

    def forward(self, *given, **named):
        return self.language(*given, **named)


def test_the_tokens_of_an_image_are_those_of_the_model_that_names_them():
    for names, want in (({"image_token_id": 5, "video_token_id": 7}, (5, 7)), ({"image_token_index": 5}, (5,)), ({}, ())):
        assert Target.find(Seeing(tiny_model("llama_gqa"), **names)).image_tokens() == want
