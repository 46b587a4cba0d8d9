"""Texts with images: what a model keeps beside the cache (rope_deltas) goes with the cache, and ids alone are no image.

https://github.com/vllm-project/vllm/issues/20261, https://github.com/Blaizzy/mlx-vlm/pull/1143, https://github.com/huggingface/trl/issues/5088
"""

import pytest
import torch
from transformers import GenerationConfig

import kvpatch
from tests.arch.test_shells import IMAGE, VIDEO, make_reader, two_images
from tests.helpers.marks import batches
from tests.helpers.tiny import prompt

pytestmark = pytest.mark.usefixtures("no_gradients")


def words(B, n, seed):
    ids = prompt(B, n, seed)
    return ids.masked_fill((ids == IMAGE) | (ids == VIDEO), 1)


def world(kind):
    """A model, a text of one row with two images and what else the model takes of it, a text without, a question."""
    ids, _, images = two_images(kind)
    half = {name: value[: len(value) // 2] for name, value in images.items()}
    half = {name: value.double() if value.is_floating_point() else value for name, value in half.items()}
    return make_reader(kind, torch.float64), ids[:1], half, words(1, 20, 4), words(1, 5, 9)


def generate(model, ids, **options):
    return model.generate(ids, **{"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **options})


def steps(model, cache, ids):
    """Logits of tokens that are read one by one."""
    return torch.cat([model(token, past_key_values=cache).logits for token in ids.split(1, 1)], 1)


@pytest.mark.parametrize("k", [0.5, 1.0])
def test_two_conversations_in_turns(k):
    model, ids, images, text, question = world("qwen2_5_vl")
    with kvpatch.patched(model, "h2o", k) as patch:

        def talk(between):
            cache = patch.new_cache()
            said = generate(model, ids, past_key_values=cache, **images)
            between()
            twin = cache.clone()
            between()
            answer = generate(model, torch.cat([said, question], 1), past_key_values=cache)
            between()
            fed = steps(model, twin, question)
            between()
            return answer, fed, steps(model, cache, question)

        want, got = talk(lambda: None), talk(lambda: generate(model, text))
    for one, other in zip(want, got, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=0)


def test_rows_take_theirs_along():
    model, ids, images, text, question = world("qwen2_5_vl")
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        caches = [patch.new_cache(), patch.new_cache()]
        model(ids, past_key_values=caches[0], **images)
        model(text, past_key_values=caches[1])
        alone = [steps(model, cache.clone(), question) for cache in caches]
        assert not torch.equal(*(cache.ids.offsets_B1 for cache in caches))
        both = kvpatch.EvictingCache.concatenate(caches)
        model(text)
        together = steps(model, both.clone(), question.repeat(2, 1))
        torch.testing.assert_close(together, torch.cat(alone), atol=1e-9, rtol=0)
        last = both.select_rows([1, 0])
        torch.testing.assert_close(last.ids.offsets_B1, torch.cat([caches[1].ids.offsets_B1, caches[0].ids.offsets_B1]))
        for row, want in ((0, alone[1]), (1, alone[0])):
            model(text)
            torch.testing.assert_close(steps(model, last.select_rows(row), question), want, atol=1e-9, rtol=0)


@pytest.mark.parametrize("k", [0.5, 1.0])
@pytest.mark.parametrize("kind", ["mistral3", "qwen2_5_vl"])
def test_a_prefix_of_text_whatever_was_read_before(kind, k):
    model, ids, images, text, question = world(kind)
    whole = torch.cat([text, question], 1)
    with kvpatch.patched(model, "h2o", k) as patch:
        want = generate(model, whole, past_key_values=patch.prefix(text))
        generate(model, ids, **images)
        assert torch.equal(generate(model, whole, past_key_values=patch.prefix(text)), want)
        generate(model, ids, **images)
        logits = model(question, past_key_values=patch.prefix(text)).logits
        patch.prefixes.drop(patch.prefix(text))
        torch.testing.assert_close(model(question, past_key_values=patch.prefix(text)).logits, logits, atol=1e-9, rtol=0)
    if k == 1.0:
        assert torch.equal(want, generate(model, whole))


@pytest.mark.parametrize("kind", ["mistral3", "qwen2_5_vl"])
def test_a_prefix_cannot_hold_an_image(kind):
    model, ids, images, _, question = world(kind)
    whole = torch.cat([ids, question], 1)
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        with pytest.raises(kvpatch.KVPatchError, match=rf"holds token {IMAGE}, which stands for an image.*cache\.clone"):
            patch.prefix(ids)
        cache = patch.new_cache()  # what the words say
        model(ids, past_key_values=cache, **images)
        one, other = (generate(model, whole, past_key_values=cache.clone()) for _ in range(2))
        assert torch.equal(one, other)


def test_files_hold_no_offsets(tmp_path):
    model, ids, images, text, question = world("qwen2_5_vl")
    path = tmp_path / "cache.safetensors"
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        cache = patch.new_cache()
        model(text, past_key_values=cache)
        patch.save_cache(cache, path)
        want = steps(model, cache, question)
        seen = patch.new_cache()
        model(ids, past_key_values=seen, **images)
        torch.testing.assert_close(steps(model, patch.load_cache(path), question), want, atol=1e-9, rtol=0)
        with pytest.raises(kvpatch.KVPatchError, match="has read images.*read the text and its images anew"):
            patch.save_cache(seen, path)
        with pytest.raises(kvpatch.KVPatchError, match="in a text with images, after which positions count otherwise"):
            patch.replace(seen, (0, 1), [3])


@batches
@pytest.mark.parametrize("kind", ["mistral3", "qwen2_5_vl"])
def test_continuous_batching_reads_text(kind):
    model, ids, images, text, _ = world(kind)
    config = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with kvpatch.patched(model, "h2o", 0.5):
        generate(model, ids, **images)
        found = model.generate_batch([text[0].tolist(), text[0, 8:].tolist()], generation_config=config)
        for one, given in ((found["req_0"], text), (found["req_1"], text[:, 8:])):
            assert one.generated_tokens == generate(model, given)[0, given.shape[1] :].tolist()


def test_an_edited_text_with_images_is_noticed():
    model, ids, images, _, question = world("qwen2_5_vl")
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        cache = patch.new_cache()
        said = generate(model, ids, past_key_values=cache, **images)
        said[0, -3] = said[0, -3] % 90 + 1
        with pytest.raises(kvpatch.KVPatchError, match="input_ids differ from what the cache has read at column 26"):
            generate(model, torch.cat([said, question], 1), past_key_values=cache)
