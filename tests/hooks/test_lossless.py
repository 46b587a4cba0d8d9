"""lossless=True: the unpatched model's own tokens, drafted from a budget and verified over all entries on the host."""

import functools
import gc
import itertools
import os
from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

import kvpatch
from kvpatch.arch.upstream import cache_of
from kvpatch.backends import torch_backend
from kvpatch.cache.host import HostLayer, find_free
from kvpatch.cache.lossless import LosslessCache
from kvpatch.hooks import lossless
from tests.helpers import tiny_families
from tests.helpers.tiny import VOCAB, make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")
MODELS = ("llama_gqa", "mistral", "mpt", "gptj", "gpt2")
OPTIONS = {
    "max_new_tokens": 24,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": None,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def generate(model, ids, **options):
    return model.generate(ids, attention_mask=torch.ones_like(ids), **{**OPTIONS, **options})


def assert_same(found, want):
    assert torch.equal(found.sequences, want.sequences)
    torch.testing.assert_close(
        torch.stack(found.logits), torch.stack(want.logits), rtol=1e-5, atol=1e-5
    )  # some models compute some of it in float32


@pytest.mark.parametrize(
    "policy",
    ["h2o", "snapkv", "streaming_llm", "critical_snapkv", "keyformer", "adakv", "expected_attention", "global_topk(snapkv)"],
)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_logits_are_the_unpatched_model_s(name, policy):
    model = make(name, dtype=torch.float64)
    want = generate(model, prompt(1, 40))
    with kvpatch.patched(model, policy, 0.5, lossless=True) as patch:
        found = generate(model, prompt(1, 40))
        assert_same(found, want)
        assert patch.passes["full"][0] == patch.report().verified.passes
    cache = cache_of(found)
    assert isinstance(cache, LosslessCache) and cache.ids == found.sequences[0, :-1].tolist()
    assert cache.verified.drafted > 0
    assert cache.drafts.ids.ids_BT.tolist() == [cache.ids]  # rejected tokens were taken back there, too
    for layer in range(2):
        assert int(cache.drafts.positions(layer).max()) < len(cache.ids) == cache.drafts.get_seq_length()
    cache.drafts.check_invariants()


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny_families.FAMILIES)
@pytest.mark.sampled(3)
def test_every_family(name):
    """Latent attention, windows, chunks, sinks, capped logits: whatever bounds a layer bounds its full cache."""
    model, ids = tiny_families.make(name, dtype=torch.float64), prompt(1, 30)
    want = generate(model, ids, max_new_tokens=10)
    with kvpatch.patched(model, "snapkv", 0.4, lossless=True):
        assert_same(generate(model, ids, max_new_tokens=10), want)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_forty_prompts_of_each_architecture(name):
    accepted = 0
    model = make(name, dtype=torch.float64)
    for seed in range(40):
        ids = prompt(1, 20 + seed, seed)
        want = generate(model, ids)
        with kvpatch.patched(model, ("h2o", "snapkv", "tova", "roco")[seed % 4], 0.5, lossless=True) as patch:
            assert_same(generate(model, ids), want)
            accepted += patch.report().verified.accepted
    assert accepted > 0


def test_the_full_cache_holds_what_the_unpatched_model_s_does():
    model = make("llama_gqa", dtype=torch.float64)
    want = cache_of(generate(model, prompt(1, 40)))
    with kvpatch.patched(model, "h2o", 0.3, lossless=True):
        cache = cache_of(generate(model, prompt(1, 40)))
    for own, its in zip(cache.layers, want.layers, strict=True):
        for found, wanted in zip(own.view(own.used_TE), (its.keys, its.values), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_a_later_turn_goes_on_from_the_cache_and_a_clone_stays():
    model = make("llama_gqa", dtype=torch.float64)
    first, more = prompt(1, 40), prompt(1, 25, 2)
    with kvpatch.patched(model, "h2o", 0.4, lossless=True):
        cache = cache_of(generate(model, first))
        said = torch.tensor([cache.ids])
        copy, texts = cache.clone(), [torch.cat([said, more], 1), torch.cat([said, more[:, :3]], 1)]
        found = [generate(model, texts[0], past_key_values=cache), generate(model, texts[1], past_key_values=copy)]
    for text, one in zip(texts, found, strict=True):
        assert_same(one, generate(model, text))
    assert cache.ids == found[0].sequences[0, :-1].tolist()


@pytest.mark.parametrize("how", ["use_cache", "of the class"])
def test_a_later_turn_goes_on_from_the_cache_however_it_is_called(how):
    """use_cache=False with a cache would feed the whole text to every step."""
    model, ids = make("llama_gqa", dtype=torch.float64), prompt(1, 40)
    want = generate(model, ids, return_dict_in_generate=False, output_logits=False)
    with kvpatch.patched(model, "h2o", 0.5, lossless=True) as patch:
        cache = patch.new_cache()
        first = model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False, pad_token_id=0)
        of_class = functools.partial(type(model).generate, model)
        run = of_class if how == "of the class" else functools.partial(model.generate, use_cache=False)
        found = run(first, past_key_values=cache, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert torch.equal(found, want)
        with pytest.raises(kvpatch.KVPatchError, match="call model.generate"):
            of_class(found, past_key_values=cache, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("piece", [1, 7, 39, 64])
def test_a_prompt_is_read_in_pieces_against_the_host(piece):
    """No more than a piece is read at once, so that a device need not hold a layer's activations of the whole prompt."""
    model, ids, most = make("llama_gqa", dtype=torch.float64), prompt(1, 40), []
    hook = model.model.layers[0].register_forward_pre_hook(lambda _, args: most.append(args[0].shape[1]))
    with kvpatch.patched(model, "h2o", 0.4, lossless=True):
        found = generate(model, ids, prefill_chunk_size=piece)
    hook.remove()
    assert max(most) <= max(piece, lossless.MOST + 1) and most[0] == min(piece, 39)
    assert_same(found, generate(model, ids))


def test_tokens_that_are_taken_back_leave_the_budget_too():
    """Drafts after them are those of a cache that has not held them."""
    model, ids, more = make("llama_gqa", dtype=torch.float64), prompt(1, 40), prompt(1, 6, 3)
    with kvpatch.patched(model, "h2o", 16, lossless=True, recent=4) as patch:
        cache = patch.new_cache()
        model(ids, past_key_values=cache)
        model(more, past_key_values=cache)
        before = [cache.drafts.positions(layer) for layer in range(2)]
        cache.crop(-4)
        for layer, held in enumerate(before):
            left = cache.drafts.positions(layer)
            assert int(left.max()) < 42 == cache.drafts.get_seq_length()
            assert {*left.flatten().tolist()} - {-1} == {one for one in held.flatten().tolist() if 0 <= one < 42}
        assert cache.drafts.ids.ids_BT.tolist() == [cache.ids]
        cache.drafts.check_invariants()


def test_a_lossless_cache_answers_or_refuses_whatever_is_asked_of_an_evicting_one():
    public = [name for name in vars(kvpatch.EvictingCache) if not name.startswith("_")]
    assert [name for name in public if not hasattr(LosslessCache, name)] == []
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 0.3, lossless=True):
        cache = cache_of(model(prompt(1, 40)))
        cache.forget([(3, 9)])
        left = [*range(3), *range(9, 40)]
        assert cache.positions(-1).tolist() == [[left] * model.config.num_key_value_heads]
        assert cache.held(0).tolist() == [[34] * model.config.num_key_value_heads]
        assert cache.next_positions(2).tolist() == [[40, 41]]
        cache.check_invariants()
        cache.layers[1].length = 33
        with pytest.raises(kvpatch.errors.InvalidError, match="Layer 1 has the entries of 33 tokens, and 34 are there"):
            cache.check_invariants()


@pytest.mark.parametrize("bits", [8, 4])
def test_bits_round_the_budget_and_no_entry_on_the_host(bits):
    model, ids = make("llama_gqa", dtype=torch.float64), prompt(1, 40)
    want, nbytes = generate(model, ids), {}
    for width in (16, bits):
        with kvpatch.patched(model, "h2o", 0.4, lossless=True, bits=width):
            found = generate(model, ids)
        assert torch.equal(found.sequences, want.sequences)
        for own, its in zip(cache_of(found).layers, cache_of(want).layers, strict=True):
            for entries, wanted in zip(own.view(own.used_TE), (its.keys, its.values), strict=True):
                torch.testing.assert_close(entries, wanted, rtol=1e-10, atol=1e-10)
        nbytes[width] = cache_of(found).drafts.nbytes
    assert nbytes[bits] < nbytes[16]


FORGETTING = ("llama_gqa", "mistral_sliding", "mpt", "gpt2")


@pytest.mark.parametrize("name", FORGETTING)
def test_what_is_forgotten_is_masked_from_then_on(name):
    """As the full cache is that has forgotten the same, which equals the masked model (tests/cache/test_forget.py)."""
    model, ids, more = make(name, dtype=torch.float64), prompt(1, 40), prompt(1, 9, 4)
    spans = [(3, 9), (20, 31)]
    with kvpatch.patched(model, "full", 1.0) as patch:
        want = patch.new_cache()
        model(ids, past_key_values=want)
        want.forget(spans)
        wanted = model(more, past_key_values=want).logits
        want.forget([(0, 1)])
        after = model(more[:, :1], past_key_values=want).logits
    with kvpatch.patched(model, "h2o", 0.4, lossless=True) as patch:
        cache = patch.new_cache()
        model(ids, past_key_values=cache)
        before = cache.nbytes
        cache.forget(iter(spans))
        assert cache.nbytes == before * 23 // 40 and cache.get_seq_length() == 40
        twin = cache.clone()
        torch.testing.assert_close(model(more, past_key_values=cache).logits, wanted, rtol=1e-5, atol=1e-6)
        cache.crop(-9)
        with pytest.raises(kvpatch.KVPatchError, match="edited after 40"):
            cache.crop(-1)
        torch.testing.assert_close(model(more, past_key_values=cache).logits, wanted, rtol=1e-5, atol=1e-6)
        cache.forget([(0, 1)])
        torch.testing.assert_close(model(more[:, :1], past_key_values=cache).logits, after, rtol=1e-5, atol=1e-6)
        cache.drafts.check_invariants()
        text = torch.cat([ids, more], 1)
        found = generate(model, text, past_key_values=twin, max_new_tokens=12)
        assert twin.ids == found.sequences[0, :-1].tolist() and twin.verified.drafted
        torch.testing.assert_close(found.logits[0].double(), wanted[:, -1], rtol=1e-5, atol=1e-6)


def test_kernels_learn_that_forgotten_tokens_leave_gaps(monkeypatch):
    """Windows and ALiBi of flash kernels count columns."""
    model, seen, attend = make("llama_gqa"), [], torch_backend.attend

    def watch(q, keys, *args):
        seen.append(keys.ordered)
        return attend(q, keys, *args)

    monkeypatch.setattr(torch_backend, "attend", watch)
    with kvpatch.patched(model, "streaming_llm", 8, lossless=True):
        cache = cache_of(model(prompt(1, 40)))
        model(prompt(1, 3), past_key_values=cache)
        assert seen == [True] * 4
        cache.forget([(3, 9)])
        model(prompt(1, 3), past_key_values=cache)
        assert seen[4:] == [False] * 2


def test_a_loop_of_one_s_own_reads_all_tokens():
    model = make("llama_gqa", dtype=torch.float64)
    ids = prompt(1, 40)
    with kvpatch.patched(model, "h2o", 4, lossless=True):
        out = model(ids[:, :20])
        cache, logits = cache_of(out), [out.logits]
        for at in range(20, 40):
            logits.append(model(ids[:, at : at + 1], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(logits, 1), model(ids).logits, rtol=1e-8, atol=1e-8)
    assert isinstance(cache, LosslessCache) and cache.get_seq_length() == 40


def test_stop_tokens_streamers_processors_and_criteria_are_transformers_own():
    model = make("llama_gqa", dtype=torch.float64)
    ids = prompt(1, 40)
    whole = generate(model, ids).sequences[0, 40:].tolist()

    class Streamer:
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.tokens.append("end")

    def ban(input_ids, scores):
        scores = scores.clone()
        scores[:, whole[0]] = -torch.inf
        return scores

    def longer(input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 50, dtype=torch.bool)

    def spoken(input_ids, scores, **kwargs):
        return input_ids[:, -1] == whole[1]

    for options in (
        {"eos_token_id": whole[6]},
        {"stopping_criteria": StoppingCriteriaList([spoken])},
        {"logits_processor": LogitsProcessorList([ban])},
        {"repetition_penalty": 1.3},
        {"stopping_criteria": StoppingCriteriaList([longer])},
    ):
        want = generate(model, ids, **options).sequences
        streamer = Streamer()
        with kvpatch.patched(model, "h2o", 0.9, lossless=True):
            found = generate(model, ids, streamer=streamer, **options).sequences
        assert torch.equal(found, want)
        assert streamer.tokens == [*found[0].tolist(), "end"]


@pytest.mark.slow
def test_sampled_tokens_have_the_unpatched_model_s_distribution():
    """Chi-square of the second and third token over a vocabulary cut to 6, against the exact probabilities."""
    model = make("llama_gqa", dtype=torch.float64)
    ids, few, runs = prompt(1, 24), 6, 600

    def keep_few(input_ids, scores):
        scores = scores.clone()
        scores[:, few:] = -torch.inf
        return scores

    options = {"max_new_tokens": 4, "do_sample": True, "top_k": 0, "logits_processor": LogitsProcessorList([keep_few])}
    counts = torch.zeros(few, few)
    torch.manual_seed(0)
    with kvpatch.patched(model, "h2o", 0.3, lossless=True) as patch:
        base = cache_of(generate(model, ids, **{**options, "max_new_tokens": 1}))
        assert base.ids == ids[0].tolist()
        for _ in range(runs):
            found = generate(model, ids, **{**options, "max_new_tokens": 3, "output_logits": False}).sequences[0, 24:]
            counts[found[1], found[2]] += 1
        assert 0 < patch.report().verified.drafted
    wanted = torch.zeros(few, few, dtype=torch.float64)
    start = model(ids).logits[0, -1, :few].softmax(-1)
    for a in range(few):
        one = torch.cat([ids, torch.tensor([[a]])], 1)
        second = model(one).logits[0, -1, :few].softmax(-1)
        for b in range(few):
            third = model(torch.cat([one, torch.tensor([[b]])], 1)).logits[0, -1, :few].softmax(-1)
            wanted[b] += start[a] * second[b] * third
    expected = wanted * runs
    chi = ((counts - expected) ** 2 / expected)[expected > 5].sum()
    assert chi < 2 * (expected > 5).sum(), "twice the degrees of freedom: p below 0.001"


def test_bytes_are_counted_and_pages_are_released():
    model = make("llama_gqa", layers=4, dtype=torch.float64)
    with kvpatch.patched(model, "h2o", 0.2, lossless=True) as patch:
        cache = cache_of(generate(model, prompt(1, 300)))
        verified, report = cache.verified, patch.report()
        assert cache.nbytes == 323 * 4 * 2 * 2 * 8 * model.config.head_dim
        assert cache.drafts.nbytes < cache.nbytes / 3
        # each pass reads the entries of all tokens before it, of which a prompt has none
        assert cache_of(generate(model, prompt(1, 9), max_new_tokens=1)).verified.moved_nbytes == 0
        assert 300 / 323 * cache.nbytes * verified.passes <= verified.moved_nbytes <= cache.nbytes * verified.passes
        assert not {"budget acted on", "attention kept"} & {line.partition("  ")[0] for line in str(report).splitlines()}
        assert "over all tokens" in str(report) and report.to_dict()["verified"]["passes"] == verified.passes


def _resident(name):
    """Return the bytes of a process's memory that map deleted temporary files."""
    found, ours = 0, False
    with open("/proc/self/smaps", encoding="utf-8") as file:
        for line in file:
            if "-" in line.split(" ", 1)[0] and ":" not in line.split(" ", 1)[0]:
                ours = name in line
            elif ours and line.startswith("Rss:"):
                found += int(line.split()[1]) * 1024
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux's /proc")
def test_memory_holds_two_layers_of_the_full_cache_at_most(tmp_path):
    model, most = make("llama_gqa", layers=6, dtype=torch.float64), []
    with kvpatch.patched(model, "h2o", 0.1, lossless=True, offload_folder=tmp_path):
        cache = cache_of(generate(model, prompt(1, 3000), max_new_tokens=1))
        exchange = LosslessCache.exchange

        def watch(self, *args):
            found = exchange(self, *args)
            found[0].sum(), found[1].sum()  # what attention reads
            most.append(_resident(str(tmp_path)))
            return found

        with pytest.MonkeyPatch.context() as patching:
            patching.setattr(LosslessCache, "exchange", watch)
            generate(model, torch.cat([torch.tensor([cache.ids]), prompt(1, 1)], 1), past_key_values=cache, max_new_tokens=4)
        layer = cache.layers[0]
        a_layer = layer.store.rows_NE.nbytes
        assert 0.5 * layer.nbytes <= max(most) <= 2 * a_layer + 65536
        assert _resident(str(tmp_path)) <= 65536


@pytest.mark.parametrize(
    ("policy", "k", "options"),
    [
        ("h2o", kvpatch.Share(0.5), {}),
        ("h2o", 12, {"every": 4}),
        ("h2o", "8KiB", {}),
        ("snapkv", [0.3, 0.6], {}),
        ("h2o", 0.4, {"bits": 4}),
        ("global_topk(h2o)", 0.4, {}),
        ("pyramid(h2o)", 0.4, {}),
        ("keyformer", 0.4, {"shared": True}),
        ("merged(snapkv)", 0.4, {}),
        ("snapkv", 0.4, {"turns": "each"}),
    ],
)
def test_budgets_and_wrappers_keep_their_invariants(policy, k, options):
    model, ids = make("llama_gqa", dtype=torch.float64), prompt(1, 40)
    want = generate(model, ids)
    with kvpatch.patched(model, policy, k, lossless=True, strict=True, **options):
        found = generate(model, ids)
        cache_of(found).drafts.check_invariants()
    assert_same(found, want)


def test_the_file_goes_with_the_cache(tmp_path):
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 0.3, lossless=True, offload_folder=tmp_path):
        cache = cache_of(generate(model, prompt(1, 40)))
        assert _open_files(tmp_path) and not list(tmp_path.iterdir())
        del cache
        gc.collect()
    assert _open_files(tmp_path) == 0


def _open_files(folder):
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += str(folder) in os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
    return found


def test_a_full_disk_is_said_before_it_is_written(monkeypatch):
    def full(file, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvpatch.cache.host._reserve", full)
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 0.3, lossless=True), pytest.raises(kvpatch.KVPatchError, match="which has no room"):
        generate(model, prompt(1, 40))


@pytest.mark.parametrize(("call", "tokens"), [("pass", 40), ("generate", 40), ("pieces", 40), ("turn", 256)])
def test_no_room_on_the_host_is_said_before_anything_is_read(call, tokens, monkeypatch):
    """With the bytes: the rows that the store would have, of all layers."""
    model, read = make("llama_gqa", layers=3), []
    row = 3 * 2 * 2 * model.config.head_dim * 4
    with kvpatch.patched(model, "h2o", 0.3, lossless=True) as patch:
        cache = patch.new_cache()
        if call == "turn":
            model(prompt(1, 40), past_key_values=cache)
        needed = (296 - 256 if call == "turn" else 256) * row
        model.model.layers[0].register_forward_pre_hook(lambda _, args: read.append(args[0].shape[1]))
        free = needed - 1
        monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
        ids = prompt(1, tokens) if call != "turn" else torch.cat([prompt(1, 40), prompt(1, tokens, 2)], 1)
        options = {"max_new_tokens": 2, "past_key_values": cache} | ({"prefill_chunk_size": 8} if call == "pieces" else {})
        said = f"{needed:,} bytes more for these {tokens} tokens, and {free:,} are free"
        with pytest.raises(kvpatch.KVPatchError, match=said):
            model(ids, past_key_values=cache) if call == "pass" else generate(model, ids, **options)
        assert not read and len(cache.ids) == (40 if call == "turn" else 0)
        free = needed if call != "turn" else 2**40  # the store grows by a quarter then
        assert generate(model, ids, **options).sequences.shape[1] == ids.shape[1] + 2


def test_free_memory_beside_a_device(monkeypatch, tmp_path):
    monkeypatch.setattr("kvpatch.cache.host.MEMORY", tmp_path / "meminfo")
    device = torch.device("cuda")
    assert find_free(None, device) == ("host memory", None)
    (tmp_path / "meminfo").write_text("MemTotal:  90 kB\nMemAvailable:   12 kB\n")
    assert find_free(None, device) == ("host memory", 12 * 1024)
    assert find_free(tmp_path, device)[0] == str(tmp_path)


def test_entries_of_another_dtype_are_refused():
    """They would be rounded to those that are there."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 0.3, lossless=True):
        cache = cache_of(model(prompt(1, 40)))
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(kvpatch.KVPatchError, match="under the same autocast"):
            model(prompt(1, 3), past_key_values=cache)
        model(prompt(1, 3), past_key_values=cache)
        assert len(cache.ids) == 43


class Elsewhere(LosslessCache):
    """Takes the way of a device on the CPU."""

    def _bring(self, layer, device):
        self.verified.moved_nbytes += self.layers[layer].nbytes
        return self._bring_staged(layer, device)


def test_the_way_of_a_device_gives_the_same(monkeypatch):
    monkeypatch.setattr(lossless, "LosslessCache", Elsewhere)
    model = make("llama_gqa", layers=3, dtype=torch.float64)
    want = generate(model, prompt(1, 40))
    with kvpatch.patched(model, "h2o", 0.3, lossless=True):
        found = generate(model, prompt(1, 40))
    assert_same(found, want)
    assert type(cache_of(found)) is Elsewhere and cache_of(found)._staged == {}


def test_hopeless_drafts_are_given_up_and_said_once(caplog, monkeypatch):
    model = make("llama_gqa", dtype=torch.float64)
    want = generate(model, prompt(1, 40), max_new_tokens=40)
    true = lossless.Drafter.get_candidates

    def miss(self, input_ids, **others):
        text, logits = true(self, input_ids, **others)
        n = input_ids.shape[1]
        return torch.cat([input_ids, (want.sequences[:, n : text.shape[1]] + 1) % VOCAB], 1), logits

    monkeypatch.setattr(lossless.Drafter, "get_candidates", miss)
    with kvpatch.patched(model, "h2o", 0.3, lossless=True) as patch:
        assert_same(generate(model, prompt(1, 40), max_new_tokens=40), want)
        generate(model, prompt(1, 40), max_new_tokens=40)
        verified = patch.report().verified
    assert verified.accepted == 0 and verified.passes == 39
    assert [one.message for one in caplog.records if "lossless" in one.message] == [f"[kvpatch] {lossless.HOPELESS}"]


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_an_interrupted_pass_leaves_both_caches_as_before(at, monkeypatch):
    model = make("llama_gqa", dtype=torch.float64)
    text = prompt(1, 40)
    with kvpatch.patched(model, "h2o", 0.3, lossless=True):
        cache = cache_of(generate(model, text, max_new_tokens=4))
        more, calls, append = torch.cat([torch.tensor([cache.ids]), prompt(1, 6, 3)], 1), [], HostLayer.append

        def interrupt(self, *args):
            calls.append(self)
            if len(calls) == at:
                raise KeyboardInterrupt
            return append(self, *args)

        with monkeypatch.context() as patching:
            patching.setattr(HostLayer, "append", interrupt)
            with pytest.raises(KeyboardInterrupt):
                generate(model, more, past_key_values=cache)
        found = generate(model, more, past_key_values=cache)
    assert_same(found, generate(model, more))


class Interrupts(LogitsProcessor):
    """Interrupts generate() when it is asked for the n-th time."""

    def __init__(self, n):
        self.left = n

    def __call__(self, input_ids, scores):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return scores


@pytest.mark.parametrize("at", [2, 9, 14])  # in the first draft, in the pass that verifies it, and later
@pytest.mark.parametrize("edited", [False, True])
def test_an_interrupted_call_leaves_the_text_as_it_was(at, edited):
    model, text = make("llama_gqa", dtype=torch.float64), prompt(1, 40)
    more = torch.cat([text, prompt(1, 6, 3)], 1)
    with kvpatch.patched(model, "h2o", 0.3, lossless=True) as patch:
        for cache, read in ((patch.new_cache(), text), (patch.new_cache(), text[:, :0])):
            if read.numel():
                model(read, past_key_values=cache)
            if read.numel() and edited:
                cache.forget([(3, 7)])
            want = generate(model, more, past_key_values=cache.clone())
            with pytest.raises(KeyboardInterrupt):
                generate(model, more, past_key_values=cache, logits_processor=LogitsProcessorList([Interrupts(at)]))
            assert cache.ids == read[0].tolist()
            cache.check_invariants()
            assert_same(generate(model, more, past_key_values=cache), want)


def test_inference_mode_may_come_and_go(tmp_path):
    model, text = make("llama_gqa", dtype=torch.float64), prompt(1, 40)
    more, last = torch.cat([text, prompt(1, 6, 3)], 1), prompt(1, 3, 4)
    want = [generate(model, more), model(torch.cat([text, last], 1)).logits[:, -3:]]
    modes = (torch.inference_mode, torch.no_grad)
    for first, second in itertools.product(modes, modes):
        with kvpatch.patched(model, "h2o", 0.3, lossless=True) as patch:
            with first():
                cache = patch.new_cache()
                model(text, past_key_values=cache)
                patch.save_cache(cache, tmp_path / "cache")
                copies = [cache.clone(), patch.load_cache(tmp_path / "cache"), cache]
            for one in copies:
                with second():
                    torch.testing.assert_close(model(last, past_key_values=one).logits, want[1])
                    one.crop(-3)
                with first():
                    assert_same(generate(model, more, past_key_values=one), want[0])
                    one.forget([(3, 7)])
                with second():
                    model(last, past_key_values=one)


def test_an_interrupted_prompt_is_read_anew(monkeypatch):
    model = make("llama_gqa", dtype=torch.float64)
    append, calls = HostLayer.append, []

    def interrupt(self, *args):
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return append(self, *args)

    with kvpatch.patched(model, "h2o", 0.3, lossless=True) as patch:
        cache = patch.new_cache()
        with monkeypatch.context() as patching:
            patching.setattr(HostLayer, "append", interrupt)
            with pytest.raises(KeyboardInterrupt):
                generate(model, prompt(1, 40), past_key_values=cache)
        found = generate(model, prompt(1, 40), past_key_values=cache)
    assert_same(found, generate(model, prompt(1, 40)))


def test_other_texts_rows_and_caches_are_refused():
    model, ids = make("llama_gqa"), prompt(1, 40)
    foreign = cache_of(model(ids))
    with kvpatch.patched(model, "h2o", 0.3, lossless=True):
        cache = cache_of(generate(model, ids))
        for text, past, said in (
            (prompt(2, 40), None, "one text at a time"),
            (prompt(1, 80, 5), cache, "do not go on from the 63 tokens"),
            (torch.tensor([cache.ids]), cache, "do not go on from the 63 tokens"),
            (ids, foreign, "a DynamicCache that this patch did not make"),
        ):
            with pytest.raises(kvpatch.KVPatchError, match=said):
                generate(model, text, past_key_values=past)
        mask = torch.ones_like(ids)
        mask[:, :3] = 0
        with pytest.raises(kvpatch.KVPatchError, match="without padding"):
            model.generate(ids, attention_mask=mask, **OPTIONS)
        with pytest.raises(kvpatch.KVPatchError, match="not served"):
            cache.reorder_cache(torch.zeros(1))
        for spans, said in (([(60, 64)], "has read 63 tokens"), ([], "no span"), ([(0, 5), (3, 8)], "overlap")):
            with pytest.raises(kvpatch.KVPatchError, match=said):
                cache.forget(spans)
        for removed, said in ((-64, "has seen 63"), (1.5, "a whole number"), (True, "a whole number")):
            with pytest.raises(kvpatch.KVPatchError, match=said):
                cache.crop(removed)
        cache.crop(100)  # as of any cache: keep so many
        assert cache.get_seq_length() == 63


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lossless": "a folder"}, "offload_folder='a folder', beside lossless=True"),
        ({"lossless": 3}, "lossless=3 must be True or False"),
        ({"offload_folder": "no such folder"}, "offload_folder='no such folder' must be a folder that exists"),
        ({"offload_folder": 3}, "offload_folder=3 must be a folder that exists"),
        ({"lossless": False, "offload_folder": "."}, "give both, or neither"),
        ({"k": 1.0}, "evicts nothing"),
        ({"policy": "kvzip"}, "use 'h2o'"),
        ({"protect": [3]}, "leave protect= out"),
        ({"policy": "full", "k": 1.0}, "evicts nothing"),
        ({"block": 8}, "block=8 evicts while"),
        ({"schedule": "decode"}, "keeps the prompt whole"),
        ({"positions": "renumbered"}, "original positions"),
        ({"record": True}, "leave one out"),
    ],
)
def test_what_does_not_go_with_it_is_refused_before_anything_runs(options, said):
    model = make("llama_gqa")
    with pytest.raises(kvpatch.KVPatchError, match=said):
        kvpatch.patched(model, **{"policy": "h2o", "k": 0.5, "lossless": True, **options})


def test_nothing_is_left_on_the_model():
    model = make("llama_gqa")
    before = set(vars(model))
    with kvpatch.patched(model, "h2o", 0.3, lossless=True):
        generate(model, prompt(1, 40))
    assert set(vars(model)) == before


def test_a_cache_without_its_patch_is_refused():
    model, ids = make("llama_gqa"), prompt(1, 40)
    with kvpatch.patched(model, "h2o", 0.3, lossless=True):
        cache = cache_of(generate(model, ids))
    with pytest.raises(kvpatch.KVPatchError, match="no longer in force"):
        model(ids[:, :2], past_key_values=cache)
    with kvpatch.patched(model, "h2o", 0.3, lossless=True), pytest.raises(kvpatch.KVPatchError, match="did not make"):
        generate(model, torch.cat([torch.tensor([cache.ids]), ids], 1), past_key_values=cache)
    with kvpatch.patched(model, "h2o", 0.3), pytest.raises(kvpatch.KVPatchError, match="LosslessCache"):
        model(ids[:, :2], past_key_values=cache)


def test_an_error_before_the_first_pass_leaves_no_token_to_be_dropped(monkeypatch):
    """generate() brings the last token that was read once more; a call of the model by hand brings new ones alone."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 0.5, lossless=True) as patch:
        cache = patch.new_cache()
        model(prompt(1, 20), past_key_values=cache)
        monkeypatch.setattr(type(model), "_assisted_decoding", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.generate(prompt(1, 24), past_key_values=cache, max_new_tokens=4, do_sample=False)
        read = cache.get_seq_length()
        model(prompt(1, 3, seed=2), past_key_values=cache)
        assert cache.get_seq_length() == read + 3


def test_a_store_that_was_emptied_takes_another_dtype():
    layer = HostLayer(None)
    for dtype in (torch.float32, torch.float64):
        entries = torch.ones(1, 2, 3, 4, dtype=dtype)
        layer.append(entries, entries)
        assert layer.length == 3 and layer.store.rows_NE.dtype == dtype
        layer.reset()
        assert layer.length == layer.nbytes == 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_copy_of_a_store_is_of_the_same_kind(device):
    """A copy of rows in host memory, for a device other than the host, lay in a temporary file."""
    layer, entries = HostLayer(None), torch.randn(1, 2, 3, 4)
    layer.begin((2, 4, 4), entries.dtype, torch.device(device))
    layer.append(entries, entries)
    twin = layer.copy()
    assert type(twin.store) is type(layer.store)
    assert torch.equal(twin.used_TE, layer.used_TE) and twin.used_TE.data_ptr() != layer.used_TE.data_ptr()
    assert type(twin.copy().store) is type(layer.store)


def test_bytes_of_tokens_that_were_taken_back_do_not_count():
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 0.5, lossless=True) as patch:
        cache = patch.new_cache()
        model(prompt(1, 20), past_key_values=cache)
        before = cache.nbytes
        cache.crop(-5)
        assert cache.nbytes == before * 15 // 20 and cache.clone().nbytes == cache.nbytes
        cache.check_invariants()
