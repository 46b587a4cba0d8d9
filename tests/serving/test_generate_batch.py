"""generate_batch() under a patch gives, request by request, the tokens that generate() gives under it."""

import time

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

import kvpatch
from kvpatch.serving.pool import RequestPool
from tests.helpers.serving import alone, batched, collect, engine, greedy, prompts, running, until
from tests.helpers.tiny import VOCAB, make

POLICIES = (
    "window",
    "streaming_llm",
    "tova",
    "h2o",
    "roco",
    "keyformer",
    "snapkv",
    "critical(h2o)",
    "key_diff",
    "adakv",
    "defensive_snapkv",
    "layer_defensive",
    "global_topk(snapkv)",
)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("k", [24, 0.4])
def test_every_policy(policy, k):
    model, texts = make("llama_gqa"), prompts()
    with kvpatch.patched(model, policy, k):
        assert batched(model, texts) == [alone(model, ids) for ids in texts]


@pytest.mark.parametrize("name", ["mistral", "mistral_sliding", "gpt2", "gptj", "falcon_gqa", "falcon_alibi", "bloom", "mpt"])
@pytest.mark.parametrize("policy", ["h2o", "roco", "snapkv"])
def test_every_kind_of_model(name, policy):
    model, texts = make(name), prompts()
    with kvpatch.patched(model, policy, 0.4):
        assert batched(model, texts) == [alone(model, ids) for ids in texts]


@pytest.mark.parametrize("name", ["gptj", "mpt", "mistral"])
def test_renumbered_positions_of_every_kind(name):
    """GPT-J's rotations, ALiBi and Llama's, each by the rank of a token among those that its head holds."""
    model, texts = make(name), prompts()
    with kvpatch.patched(model, "h2o", 0.4, positions="renumbered"):
        assert batched(model, texts) == [alone(model, ids) for ids in texts]


@pytest.mark.parametrize(
    ("policy", "k", "options"),
    [
        ("h2o", "12KiB", {}),
        ("roco", [12, 30], {}),
        ("pyramidkv", 0.3, {}),
        ("h2o", 24, {"schedule": "prompt"}),
        ("h2o", 24, {"schedule": "decode"}),
        ("h2o", 24, {"bits": 8}),
        ("r_kv", 24, {"window": 4, "every": 1}),
        ("vase", 24, {"window": 4, "every": 1}),
        ("raas", 5, {"alpha": 0.03}),
        ("roco", 24, {"sinks": 2, "protect": [5, 7]}),
        ("h2o", 24, {"positions": "renumbered"}),
        ("keyformer", 24, {"shared": True}),
        ("h2o", 24, {"block": 16}),
        ("h2o", 24, {"strict": True}),
    ],
    ids=str,
)
def test_every_option(policy, k, options):
    model, texts = make("llama_gqa"), prompts()
    with kvpatch.patched(model, policy, k, **options):
        assert batched(model, texts) == [alone(model, ids) for ids in texts]


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "window", "keyformer"])
def test_chunks_are_blocks(policy):
    """A prompt longer than a pass takes is compressed after every chunk, as block= does."""
    model, texts = make("llama_gqa"), prompts((20, 61, 9, 130, 33))
    with kvpatch.patched(model, policy, 24):
        found = batched(model, texts, max_batch_tokens=32)
    with kvpatch.patched(model, policy, 24, block=32):
        assert found == [alone(model, ids) for ids in texts]


def test_chunks_of_whole_blocks():
    """Under block= a chunk ends where a block does."""
    model, texts = make("llama_gqa"), prompts((20, 61, 9, 130, 33))
    with kvpatch.patched(model, "h2o", 24, block=24):
        assert batched(model, texts, max_batch_tokens=60) == [alone(model, ids) for ids in texts]


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_rounded_entries_leave_room_for_more_blocks(bits):
    """The engine divides its memory by the bytes that a token takes: those of rounded entries are fewer."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 99, bits=bits) as patch, torch.no_grad():
        manager = model.init_continuous_batching(continuous_batching_config=engine(num_blocks=8))
        sizes = []
        for n in (20, 61):
            cache = patch.new_cache()
            model(torch.tensor(prompts((n,))), past_key_values=cache)
            sizes.append((sum(layer.kv.nbytes for layer in cache.layers), sum(layer.kv.width for layer in cache.layers)))
        (less, slots), (more, slots_of_more) = sizes
        assert (more - less) * len(cache.layers) == manager.terms.kv_bytes * (slots_of_more - slots)


@pytest.mark.parametrize(("options", "held"), [({}, 12), ({"schedule": "decode"}, 90 * 4)])
def test_a_prompt_that_waits_to_be_rounded_claims_its_memory(options, held):
    """Where no block can end before the prompt does, its tokens are rounded, and evicted, only there."""
    with kvpatch.patched(make("llama_gqa"), "h2o", 12, bits=4, **options) as patch:
        pool = RequestPool(patch.settings, 1000, 1, 32, torch.device("cpu"))
        assert pool.count_blocks(90, 5) == held
        assert pool.count_blocks(20, 5) <= 25, "of one pass: a layer is rounded before the next one is read"


def test_a_large_request_is_not_overtaken():
    """Small ones that come later would leave it no room as long as any come."""
    model, texts = make("llama_gqa"), prompts((12, 60, *[12] * 12))
    with kvpatch.patched(model, "h2o", 1.0, bits=8), running(model, wait=True, num_blocks=6) as manager:
        names = [manager.add_request(texts[0], max_new_tokens=30)]
        names += [manager.add_request(ids, max_new_tokens=6 + at) for at, ids in enumerate(texts[1:])]
        manager.start()  # none may end before the last one has come
        found = collect(manager, names)
    begun = [found[name].lifespan[0] for name in names]
    assert not any(one.error for one in found.values()) and begun == sorted(begun)


@pytest.mark.parametrize("options", [{}, {"block": 16}])
def test_several_sequences_of_a_prompt(options):
    """They share the prompt's pass up to its last token; greedy, all are alike."""
    model, texts = make("llama_gqa"), prompts((20, 61, 1, 49))
    with kvpatch.patched(model, "h2o", 24, **options):
        found, want = batched(model, texts, sequences=3), [alone(model, ids) for ids in texts]
        assert batched(model, texts[2:3], sequences=3) == [want[2]] * 3, "a pass may have no token"
    assert found == [tokens for tokens in want for _ in range(3)]


def test_temperatures_are_each_request_s():
    """keyformer's temperature rises over the new tokens of a request, and rows were asked for different numbers."""
    model, texts, wanted = make("llama_gqa"), prompts((40, 61, 30, 52)), (6, 30, 13, 21)
    with kvpatch.patched(model, "keyformer", 16, tau=(1.0, 8.0)):
        with running(model) as manager:
            names = [manager.add_request(ids, max_new_tokens=new) for ids, new in zip(texts, wanted, strict=True)]
            found = collect(manager, names)
        for name, ids, new in zip(names, texts, wanted, strict=True):
            assert found[name].generated_tokens == alone(model, ids, new)


@pytest.mark.parametrize(("policy", "scheduler"), [("h2o", "fifo"), ("keyformer", "prefill_first")])
def test_arrivals_and_cancellations(policy, scheduler):
    """Requests that come and go at random change no token of the others."""
    model, texts = make("llama_gqa"), prompts((20, 61, 9, 100, 33, 5, 47, 80, 12, 28), seed=3)
    wanted = [5 + 7 * (i % 4) for i in range(len(texts))]
    draw = torch.Generator().manual_seed(5)
    with kvpatch.patched(model, policy, 16), running(model, max_batch_tokens=48, scheduler_type=scheduler) as manager:
        names, dropped = [], set()
        for ids, new in zip(texts, wanted, strict=True):
            names.append(manager.add_request(ids, max_new_tokens=new, streaming=bool(torch.rand((), generator=draw) < 0.3)))
            time.sleep(float(torch.rand((), generator=draw)) * 0.03)
            if torch.rand((), generator=draw) < 0.3:
                dropped.add(names[-1])
                manager.cancel_request(names[-1])
        found = collect(manager, [name for name in names if name not in dropped])
        pool = manager.batch_processor.cache
        until(lambda: not pool.requests and not pool.rows.parts)  # nothing is kept of what has ended
    with kvpatch.patched(model, policy, 16, block=48):
        for name, ids, new in zip(names, texts, wanted, strict=True):
            assert name in dropped or found[name].generated_tokens == alone(model, ids, new), name
    assert dropped and len(dropped) < len(names)


@pytest.mark.parametrize("new", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_memory_of_a_request_is_constant(new, monkeypatch):
    """A request holds ceil(k / page) blocks however long its text, and its row no more slots than that."""
    model, texts, seen = make("llama_gqa"), prompts((100, 61, 33)), []
    model.config.max_position_embeddings = 4096
    begin = RequestPool.next_pass

    def watched(self):
        seen.append((self.claimed_blocks, [layer.kv.width for part in self.rows.parts for layer in part.cache.layers]))
        return begin(self)

    monkeypatch.setattr(RequestPool, "next_pass", watched)
    with kvpatch.patched(model, "h2o", 32), running(model, new, wait=True) as manager:
        names = [manager.add_request(ids) for ids in texts]
        manager.start()  # else the first pass might have some of them only
        collect(manager, names)
    assert len(seen) >= new - 1
    assert {blocks for blocks, _ in seen} == {6}, "three requests, two blocks of 16 tokens each"
    assert {width for _, widths in seen[2:] for width in widths} == {33}, "and the slot of the token that is written"


def test_rows_are_moved_only_when_requests_come_or_go(monkeypatch):
    model, texts, joined = make("llama_gqa"), prompts(), []
    concatenate = kvpatch.EvictingCache.concatenate
    monkeypatch.setattr(
        kvpatch.EvictingCache, "concatenate", staticmethod(lambda *a, **k: joined.append(1) or concatenate(*a, **k))
    )
    with kvpatch.patched(model, "h2o", 24):
        batched(model, texts, new=40)
    assert len(joined) <= len(texts)


def test_sampling_and_stopping():
    """Sampling among one token is greedy; a request ends at its stop token."""
    model, texts = make("llama_gqa"), prompts()
    with kvpatch.patched(model, "h2o", 24):
        want = [alone(model, ids) for ids in texts]
        config = greedy()
        config.do_sample, config.top_k, config.eos_token_id = True, 1, want[0][3]
        found = model.generate_batch(texts, generation_config=config, continuous_batching_config=engine())
    for one, tokens in zip(found.values(), want, strict=True):
        end = tokens.index(want[0][3]) + 1 if want[0][3] in tokens else len(tokens)
        assert one.generated_tokens == tokens[:end]


def letters():
    """A tokenizer whose token i is one letter, `letter(i)`."""
    tokenizer = Tokenizer(BPE({letter(i): i for i in range(VOCAB)}, []))
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def letter(token):
    return chr(ord("a") + token)


def stopping(*strings, **options):
    config = greedy(**options)
    config.stop_strings = list(strings)
    return {"generation_config": config, "continuous_batching_config": engine()}


def test_stop_strings_end_a_request_as_they_end_generate():
    """A token, two tokens, and one that the prompt's last token begins; the blocks of what has ended are free."""
    model, texts, tokenizer = make("llama_gqa"), prompts(), letters()
    with kvpatch.patched(model, "h2o", 12):
        free = [alone(model, ids) for ids in texts]
        stops = ["".join(map(letter, tokens)) for tokens in (free[0][3:4], free[1][4:6], [texts[2][-1], free[2][0]])]
        want = []
        for ids in texts:
            asked = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            found = model.generate(torch.tensor([ids]), stop_strings=stops, tokenizer=tokenizer, **asked)
            want.append(found[0, len(ids) :].tolist())
        lengths = [len(tokens) for tokens in want]
        assert lengths[0] <= 4 and lengths[1] <= 6 and lengths[2] == 1, lengths
        got = model.generate_batch(texts, **stopping(*stops), tokenizer=tokenizer)
        assert [one.generated_tokens for one in got.values()] == want
        assert all(one.is_finished() and one.error is None for one in got.values())
        manager = model.init_continuous_batching(**stopping(*stops, sequences=2), tokenizer=tokenizer)
        manager.start()
        try:
            names = [manager.add_request(texts[0], streaming=streaming, max_new_tokens=12) for streaming in (False, True)]
            found = collect(manager, [name for one in names for name in (one, f"{one}__child#0")])
            assert [one.generated_tokens for one in found.values()] == [want[0]] * 4
            until(lambda: not manager.pool.claimed_blocks)
        finally:
            manager.stop(block=True, timeout=30)


def test_stop_strings_without_a_tokenizer_are_ignored_and_the_log_says_so(caplog):
    model, texts = make("llama_gqa"), prompts((20, 33))
    given = stopping("a")
    plain = [one.generated_tokens for one in model.generate_batch(texts, **given).values()]
    assert plain == batched(model, texts) and not caplog.records
    with kvpatch.patched(model, "h2o", 12):
        want = [alone(model, ids) for ids in texts]
        assert [one.generated_tokens for one in model.generate_batch(texts, **given).values()] == want
    assert "stop_strings without a tokenizer are ignored" in caplog.text


def test_streams():
    """A streamed request is delivered token by token."""
    model, ids = make("llama_gqa"), prompts((40,))[0]
    with kvpatch.patched(model, "h2o", 24), running(model) as manager:
        name = manager.add_request(ids, streaming=True)
        parts = [list(one.generated_tokens) for one in manager.request_id_iter(name)]
        assert parts[-1] == alone(model, ids) and parts == [parts[-1][: i + 1] for i in range(len(parts[-1]))]


def test_few_blocks_serve_many_requests():
    """Requests that find no free block wait; none is read again."""
    model, texts = make("llama_gqa"), prompts()
    with kvpatch.patched(model, "h2o", 24):
        assert batched(model, texts, num_blocks=4) == [alone(model, ids) for ids in texts]


def test_the_report_counts():
    model, texts = make("llama_gqa"), prompts()
    with kvpatch.patched(model, "h2o", 24) as patch:
        batched(model, texts)
        assert patch.passes["prompt"][0] == len(texts) and patch.passes["decode"][1] > 0
        assert "24" in str(patch.report())
