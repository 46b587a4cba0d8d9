"""What continuous batching does not do under a budget is refused in words; a request that cannot be served fails alone."""

import logging

import pytest
import torch

import kvpatch
from kvpatch.hooks import versions
from tests.helpers.marks import batches
from tests.helpers.serving import alone, batched, collect, engine, greedy, prompts, running
from tests.helpers.tiny import VOCAB, make

pytestmark = batches


def test_a_mask_of_one_prompt():
    model = make("llama_gqa")
    with (
        kvpatch.patched(model, "h2o", 24, protect=torch.ones(40, dtype=torch.bool)),
        pytest.raises(kvpatch.KVPatchError, match=r"protect= is a mask.*Give token ids"),
    ):
        batched(model, prompts())


def test_eviction_that_waits():
    model = make("llama_gqa")
    with (
        kvpatch.patched(model, "h2o", 24, every=4),
        pytest.raises(kvpatch.KVPatchError, match=r"every=4: in continuous batching.*Give every=1, or use generate\(\)"),
    ):
        batched(model, prompts())


@pytest.mark.parametrize(
    "k", [kvpatch.Mass(0.9), kvpatch.Threshold(0.01), kvpatch.Share(0.5), [[12, 14], [16, 16]]], ids=lambda k: type(k).__name__
)
def test_heads_of_several_sizes(k):
    model = make("llama_gqa")
    with (
        kvpatch.patched(model, "h2o", k, recent=8),
        pytest.raises(kvpatch.KVPatchError, match=r"heads of a layer need one size: give k as tokens.*or use generate\(\)"),
    ):
        batched(model, prompts())


def test_tensor_parallelism(monkeypatch):
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 24):
        monkeypatch.setattr(model, "_device_mesh", object(), raising=False)
        with pytest.raises(kvpatch.KVPatchError, match=r"tensor parallelism \(tp_plan\).*use generate\(\)"):
            batched(model, prompts())


def test_older_versions(monkeypatch):
    for old in ("5.15.0", "5.18.3"):
        with pytest.raises(kvpatch.KVPatchError, match=r"transformers 5.19 or newer.*pip install 'transformers>=5.19,<6'"):
            versions.check_engine(old)
    for new in ("5.19.0", "5.23.0.dev0", "5.30.1"):
        versions.check_engine(new)
    model = make("llama_gqa")
    monkeypatch.setattr(versions, "ENGINE", "99.1")
    with kvpatch.patched(model, "h2o", 24), pytest.raises(kvpatch.KVPatchError, match=r"transformers 99.1 or newer"):
        model.generate_batch(prompts(), generation_config=greedy())


@pytest.mark.parametrize(
    ("name", "options", "bad", "words"),
    [
        ("gpt2", {}, {"input_ids": [5] * 600, "max_new_tokens": 4}, "needs 603 positions, but this model has 512"),
        ("llama_gqa", {}, {"input_ids": [5] * 6000, "max_new_tokens": 4}, "needs 6003 positions, but this model has"),
        (
            "llama_gqa",
            {"schedule": "prompt", "positions": "renumbered"},  # under which positions are no limit
            {"input_ids": [5] * 30, "max_new_tokens": None},
            "no limit of new tokens",
        ),
        ("llama_gqa", {"k": 0.9}, {"input_ids": [5] * 400, "max_new_tokens": 4}, "needs 23 blocks of 16 tokens"),
        ("llama_gqa", {}, {"input_ids": [], "max_new_tokens": 4}, "has no token"),
    ],
)
def test_a_request_fails_alone(name, options, bad, words):
    model, ids = make(name), prompts((40,))[0]
    k = options.pop("k", 24)
    with kvpatch.patched(model, "h2o", k, **options):
        with running(model, new=None, num_blocks=20) as manager:
            names = [manager.add_request(ids, max_new_tokens=12), manager.add_request(**bad)]
            names.append(manager.add_request(ids, max_new_tokens=12))
            found = collect(manager, names)
        assert words in found[names[1]].error
        for one in (names[0], names[2]):
            assert found[one].error is None and found[one].generated_tokens == alone(model, ids)


@pytest.mark.parametrize(("name", "kind"), [("video_token_id", "an image"), ("audio_token_index", "a sound")])
def test_a_token_that_is_no_text(name, kind):
    """transformers would read its embedding, which no image or sound has replaced."""
    model, ids = make("llama_gqa"), prompts((40,))[0]
    token = next(token for token in range(VOCAB) if token not in ids)
    setattr(model.config, name, token)
    with kvpatch.patched(model, "h2o", 24), running(model) as manager:
        names = [manager.add_request([*ids, token]), manager.add_request(ids)]
        found = collect(manager, names)
        assert f"holds token {token}, which stands for {kind}" in found[names[0]].error
        assert found[names[1]].generated_tokens == alone(model, ids)


@pytest.mark.parametrize("length", [490, 512])
def test_a_request_without_limit_ends_at_the_last_position(length):
    model, ids = make("gpt2"), prompts((length,))[0]
    with kvpatch.patched(model, "h2o", 24), running(model, new=None, max_batch_tokens=512) as manager:
        found = collect(manager, [name := manager.add_request(ids)])
        assert found[name].error is None and len(found[name].generated_tokens) == 512 - length + 1
        assert found[name].generated_tokens == alone(model, ids, 512 - length + 1)


def test_what_is_switched_off_is_said(caplog):
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 24), caplog.at_level(logging.INFO, "kvpatch"):
        batched(model, prompts())
        assert [one.getMessage() for one in caplog.records if "continuous batching" in one.getMessage()] == [
            "[kvpatch] continuous batching under a budget: prefix sharing and CPU offload are off."
        ]
        caplog.clear()
        config = engine(cpu_offload_space=1.0, use_cuda_graph=True)
        model.generate_batch(prompts(), generation_config=greedy(), continuous_batching_config=config)
        (said,) = [one for one in caplog.records if "continuous batching" in one.getMessage()]
        assert said.levelno == logging.WARNING and "so are CPU offload, CUDA graphs, which" in said.getMessage()
        assert config.cpu_offload_space == 1.0, "the caller's own configuration stays"


def test_the_block_ends_while_requests_run():
    """The manager is stopped with the patch; what was under way fails with an error, and the model is as before."""
    model, ids = make("llama_gqa"), prompts((40,))[0]
    before = set(vars(model))
    with kvpatch.patched(model, "h2o", 24, positions="renumbered"):  # under which a text has no end
        manager = model.init_continuous_batching(generation_config=greedy(100_000), continuous_batching_config=engine())
        manager.start()
        name = manager.add_request(ids, streaming=True)
        assert next(manager.request_id_iter(name)).generated_tokens
    assert not manager.is_running() and set(vars(model)) == before
    error = collect(manager, [name])[name].error
    assert "finished before this request completed" in error or "made under was removed" in error


def test_a_manager_that_is_started_too_late():
    """It does not run the unpatched model."""
    model, ids = make("llama_gqa"), prompts((40,))[0]
    with kvpatch.patched(model, "h2o", 24):
        manager = model.init_continuous_batching(generation_config=greedy(), continuous_batching_config=engine())
    manager.start()
    found = collect(manager, [name := manager.add_request(ids)])
    assert "manager was made under was removed" in found[name].error
    manager.stop(block=True)


def test_a_persistent_manager_is_the_patch_s():
    """One that was kept before the block is put aside in it, and one that was kept in it goes with it."""
    model, texts = make("llama_gqa"), prompts((20, 61))
    given = {"generation_config": greedy(), "continuous_batching_config": engine(), "persistent_manager": True}
    first = model.generate_batch(texts, **given)
    plain = model._cached_continuous_batching_manager
    with kvpatch.patched(model, "h2o", 12):
        own = [alone(model, ids) for ids in texts]
        for _ in range(2):
            assert [one.generated_tokens for one in model.generate_batch(texts, **given).values()] == own
        assert model._cached_continuous_batching_manager is not plain
    assert model._cached_continuous_batching_manager is plain
    again = model.generate_batch(texts, **given)
    assert [one.generated_tokens for one in again.values()] == [one.generated_tokens for one in first.values()] != own
    model.destroy_cached_continuous_batching_manager()


def test_without_eviction_the_engine_s_own_pages_serve():
    model, texts = make("llama_gqa"), prompts((20, 61))
    plain = batched(model, texts)
    with kvpatch.patched(model, "h2o", 1.0):
        assert batched(model, texts) == plain
