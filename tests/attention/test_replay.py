"""A replay computes in one parallel pass what a rollout under a budget computed token by token, with gradients."""

import copy
import functools

import pytest
import torch

import kvpatch
from tests.helpers.comparing import SMALL, draw
from tests.helpers.counting import Largest
from tests.helpers.running import logits_of, no_dropout
from tests.helpers.tiny import FIVE, force, left_pad, make, prompt
from tests.helpers.training import gradients
from tests.oracle import reference

POLICIES = (
    "h2o", "roco", "keyformer", "snapkv", "adakv", "tova", "streaming_llm", "critical_snapkv", "scissorhands", "window",
    "pyramidkv", "key_diff", "kvzip",
)  # fmt: skip


def recorded(model, turns, policy="h2o", k=9, mask=None, **options):
    """Logits of each turn's end and of the tokens fed behind it, the record of all, and the text."""
    with kvpatch.patched(model, policy, k, record=True, **{**SMALL.get(policy, {}), **options}) as patch:
        cache, found = patch.new_cache(), []
        for ids, fed in turns:
            if mask is not None and found:  # what stands before this turn is there
                mask = torch.nn.functional.pad(mask, (0, cache.get_seq_length() + ids.shape[1] - mask.shape[1]), value=1)
            logits, cache = force(model, ids, fed, mask, cache)
            found.append(logits)
        return found, patch.record(cache), torch.cat([part for turn in turns for part in turn], 1)


def close(got, want, atol=1e-10):
    torch.testing.assert_close(got, want, atol=atol, rtol=0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FIVE)
def test_logits_are_the_rollouts(name, policy):
    """A padded batch; the padding of the replay stands on either side, and its rows in another order."""
    model, ids, fed = make(name, dtype=torch.float64), prompt(2, 26), prompt(2, 14, seed=5)
    mask = left_pad(ids, [26, 17])
    (rollout,), record, text = recorded(model, [(ids, fed)], policy, 0.4, mask)
    whole = torch.cat([mask, torch.ones_like(fed)], 1)
    with torch.no_grad(), kvpatch.replay(model, record):
        replayed = logits_of(model, text, whole)
        right = [text[1:, 9:], text[:1]]
        padded = torch.cat([torch.nn.functional.pad(right[0], (0, 9)), right[1]])
        swapped = logits_of(model, padded, _right(padded, [31, 40]))
    close(replayed[:, 25:], rollout)
    close(swapped[0, 16:31], rollout[1])
    close(swapped[1, 25:], rollout[0])
    assert all((deaths < 40).any() for deaths in record.deaths), "nothing was evicted"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FIVE)
def test_several_turns_of_a_padded_batch(name, policy, dtype):
    """Two prompts, each with tokens behind it; rows of unlike length."""
    model, tolerance = make(name, dtype=dtype), 1e-10 if dtype == torch.float64 else 1e-5
    (ids, fed), (more, last) = turns = [(prompt(2, 20), prompt(2, 6, seed=5)), (prompt(2, 9, seed=6), prompt(2, 8, seed=7))]
    mask = left_pad(ids, [20, 13])
    (first, second), record, text = recorded(model, turns, policy, 8, mask)
    whole = torch.cat([mask, torch.ones_like(torch.cat([fed, more, last], 1))], 1)
    with torch.no_grad(), kvpatch.replay(model, record):
        logits = logits_of(model, text, whole)
    close(logits[:, 19:26], first, tolerance)
    close(logits[:, 34:], second, tolerance)
    assert all((deaths < 43).any() for deaths in record.deaths), "nothing was evicted"


def _right(ids, lengths):
    return (torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None]).long()


def test_float32_and_autocast():
    model, ids, fed = make("llama_gqa"), prompt(2, 24), prompt(2, 12, seed=5)
    (rollout,), record, text = recorded(model, [(ids, fed)])
    with torch.no_grad(), kvpatch.replay(model, record):
        close(logits_of(model, text)[:, 23:], rollout, 1e-5)
        with torch.autocast("cpu"):
            assert (logits_of(model, text)[:, 23:] - rollout).abs().max() < 0.3


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
def test_any_attention_implementation_of_the_model(attention):
    """Its own attention runs outside of the block alone."""
    model, ids, fed = make("llama_gqa", dtype=torch.float64), prompt(2, 24), prompt(2, 12, seed=5)
    mask = left_pad(ids, [24, 15])
    (rollout,), record, text = recorded(model, [(ids, fed)], mask=mask)
    model.set_attn_implementation(attention)
    with torch.no_grad(), kvpatch.replay(model, record):
        close(logits_of(model, text, torch.cat([mask, torch.ones_like(fed)], 1))[:, 23:], rollout)
    assert model.config._attn_implementation == attention


def test_generated_texts_beams_and_one_token_more():
    """generate() returns a token that it has not read; beams are rows that move, and drafts are rolled back."""
    model, ids = make("llama_gqa", dtype=torch.float64), prompt(2, 24)
    mask = left_pad(ids, [24, 15])
    for options in ({}, {"num_beams": 3, "num_return_sequences": 3}, {"prompt_lookup_num_tokens": 3}):
        rows = 1 if "prompt_lookup_num_tokens" in options else 2
        given = {"attention_mask": mask[:rows], "max_new_tokens": 12, "do_sample": False, **options}
        with kvpatch.patched(model, "h2o", 8, record=True) as patch:
            text = model.generate(ids[:rows], **given)
            record = patch.record()
        fed, copies = text[:, 24:], len(text) // rows
        whole = torch.cat([mask[:rows].repeat_interleave(copies, 0), torch.ones_like(fed)], 1)
        with torch.no_grad(), kvpatch.replay(model, record):
            logits = logits_of(model, text, whole)
        with kvpatch.patched(model, "h2o", 8):
            again, _ = force(model, ids[:rows].repeat_interleave(copies, 0), fed, whole[:, :24])
        close(logits[:, 23:], again)


def test_a_turn_is_replayed_as_it_was_read_where_a_later_one_read_it_anew():
    """The second record begins with the first's text, all of which its prompt saw."""
    model, ids, fed = make("llama_gqa", dtype=torch.float64), prompt(1, 20), prompt(1, 8, seed=5)
    (first,), one, text = recorded(model, [(ids, fed[:, :-1])])
    text = torch.cat([text, fed[:, -1:]], 1)  # generate() returns a token that it has not read
    more, last = torch.cat([text, prompt(1, 6, seed=6)], 1), prompt(1, 8, seed=7)
    (second,), two, longer = recorded(model, [(more, last)])
    for records in ([one, two], [two, one]):
        with torch.no_grad(), kvpatch.replay(model, records):
            close(logits_of(model, text)[:, 19:-1], first)
            close(logits_of(model, longer)[:, 33:], second)
            assert torch.isfinite(logits_of(model, text[:, :20])).all(), "no query of it misses a token in either"
            refused(
                "Row 0 is the beginning of several recorded texts that were read otherwise", model, lambda m: m(text[:, :25])
            )


def test_rolled_back_joined_and_chosen_rows():
    model, ids, fed = make("gptj", dtype=torch.float64), prompt(3, 24), prompt(3, 10, seed=5)
    with kvpatch.patched(model, "tova", 8, record=True) as patch:
        cache = patch.new_cache()
        cache.activate_past_recording()
        _, cache = force(model, ids, prompt(3, 6, seed=9), cache=cache)
        cache.crop(-6)
        with torch.no_grad():
            steps = [model(fed[:, t : t + 1], past_key_values=cache).logits for t in range(10)]
        other = patch.new_cache()
        model(prompt(1, 31, seed=3), past_key_values=other)
        both = kvpatch.EvictingCache.concatenate([cache.select_rows([2, 0]), other])
        record = patch.record(both.clone())
    text = torch.cat([ids, fed], 1)
    with torch.no_grad(), kvpatch.replay(model, record):
        close(model(text[[0, 2, 0]]).logits[:, 24:], torch.cat(steps, 1)[[0, 2, 0]])


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}])
@pytest.mark.parametrize("policy", ["h2o", "tova", "snapkv"])
@pytest.mark.parametrize("name", FIVE)
def test_gradients_are_those_of_the_token_loop(name, policy, checkpointing):
    """The oracle's loop keeps autograd through every row and key, also of those evicted later."""
    given = SMALL.get(policy, {})
    for weights in range(6):
        model, ids = make(name, dtype=torch.float64, seed=weights), prompt(1, 16, seed=weights)
        fed = prompt(1, 8, seed=weights + 9)
        sampled = functools.partial(draw, 0)
        want = reference.run(model, ids[0].tolist(), fed[0].tolist(), policy=policy, k=7, grad=True, draw=sampled, **given)
        if want.margin > 1e-6:
            break
    text = torch.cat([ids, fed], 1)
    loss = torch.nn.functional.cross_entropy(want.logits[:-1], text[0, 1:])
    naive = gradients(model, loss)
    _, record, _ = recorded(model, [(ids, fed)], policy, k=7)
    no_dropout(model).train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
        model.enable_input_require_grads()
    with kvpatch.replay(model, record):
        mine = torch.nn.functional.cross_entropy(model(text).logits[0, :-1], text[0, 1:])
        got = gradients(model, mine)
    close(mine, loss.detach(), 1e-8)
    for key, gradient in naive.items():
        torch.testing.assert_close(got[key], gradient, atol=1e-8, rtol=0, msg=lambda m, key=key: f"{key}: {m}")


def test_no_tensor_is_as_large_as_all_masks():
    """The largest tensor of a pass and its gradient is a mask of a block of rows, however long the text."""
    model, ids = make("llama_gqa", layers=1), prompt(1, 400)
    _, record, text = recorded(model, [(ids, prompt(1, 2, seed=5))], "window", 20, block=20)
    largest = {}
    for entries in (1 << 22, 1 << 15):
        with pytest.MonkeyPatch.context() as change:
            change.setattr("kvpatch.backends.torch_backend.MASK_BLOCK", entries)
            seen = Largest()
            with kvpatch.replay(model, record), seen:
                model(text).logits.sum().backward()
        largest[entries] = seen.numel
    assert largest[1 << 22] >= 4 * 362 * 402  # of 4 query heads, from the first eviction on
    assert largest[1 << 15] <= 2 << 15


def test_masks_are_made_again_for_the_gradient():
    """What autograd keeps of a layer grows with the text, not with its square."""
    model = make("llama_gqa", layers=1)
    kept = []
    for n in (100, 400):
        _, record, text = recorded(model, [(prompt(1, n), prompt(1, 2, seed=5))], "window", 20, block=20)
        seen = list[int]()

        def note(one, seen=seen):
            seen.append(one.numel())
            return one

        with kvpatch.replay(model, record), torch.autograd.graph.saved_tensors_hooks(note, lambda one: one):
            model(text)
        kept.append(max(seen))
    assert kept[1] <= 5 * kept[0], "a mask of all rows"


def test_in_a_patched_block_passes_with_a_cache_are_on_the_budget():
    model, ids, fed = make("llama_gqa", dtype=torch.float64), prompt(1, 24), prompt(1, 9, seed=5)
    with kvpatch.patched(model, "h2o", 8, record=True) as patch, torch.no_grad():
        logits, cache = force(model, ids, fed)
        text, first = torch.cat([ids, fed], 1), patch.record(cache)
        _, cache = force(model, ids + 1, fed)
        before = model(text, use_cache=False).logits
        with patch.replay([first, patch.record(cache)]):
            replayed = model(text).logits
            again, _ = force(model, ids, fed, cache=patch.new_cache())
        assert torch.equal(model(text, use_cache=False).logits, before)
        assert patch.report().backends["replay"] == ("torch", "triton: kernels run on a GPU")
    close(replayed[:, 23:], logits)
    assert torch.equal(again, logits)
    with pytest.raises(kvpatch.KVPatchError, match=r"was removed.*with kvpatch\.replay\(model, record\)"), patch.replay(first):
        model(text)


def replaying(model, record):
    with kvpatch.replay(model, record):
        pass


def refused(words, model, run):
    with pytest.raises(kvpatch.KVPatchError, match=words):
        run(model)


def test_what_a_replay_refuses():
    model, ids, fed = make("llama_gqa"), prompt(2, 20), prompt(2, 6, seed=5)
    _, record, text = recorded(model, [(ids, fed)])
    changed, longer = text.clone(), torch.cat([text, fed], 1)
    changed[1, 22] = (changed[1, 22] + 1) % 90 + 1
    with kvpatch.replay(model, record):
        refused(r"Row 1 is no recorded text: token 22 of it differs from .* text 1", model, lambda m: m(changed))
        refused(r"Row 0 has 32 tokens, but its text was recorded up to 26: cut the row to 27", model, lambda m: m(longer))
        refused("give input_ids, not inputs_embeds", model, lambda m: m(inputs_embeds=m.get_input_embeddings()(text)))
        refused("output_attentions=True: under a budget", model, lambda m: m(text, output_attentions=True))
        refused("reads whole texts without a cache", model, lambda m: m.generate(ids, max_new_tokens=2))
        assert torch.isfinite(model(text[:, :15]).logits).all()
        refused("already patched", model, lambda m: kvpatch.replay(m, record).__enter__())
    for none in (None, [], "rollout.safetensors", [record, 3]):
        words = r"A record is needed, or several, not .*: give what patch.record\(\)"
        refused(words, model, lambda m, none=none: replaying(m, none))
    assert "_kvpatch" not in vars(model), "nothing is left behind"
    refused("layers is 2 there, 3 in this one", make("llama_gqa", layers=3), lambda m: kvpatch.replay(m, record).__enter__())
    drops = make("gpt2")
    _, other, text = recorded(drops, [(ids, fed)])
    refused("of another model", drops, lambda m: kvpatch.Record.join([record, other]))
    with kvpatch.replay(drops.train(), other):
        refused("attention dropout", drops, lambda m: m(text))


def test_what_recording_refuses():
    model, ids = make("llama_gqa"), prompt(1, 20)
    refused("positions='renumbered'", model, lambda m: kvpatch.patched(m, "h2o", 8, record=True, positions="renumbered"))
    refused("bits=8", model, lambda m: kvpatch.patched(m, "h2o", 8, record=True, bits=8))
    refused("changes the values of kept tokens", model, lambda m: kvpatch.patched(m, "merged(h2o)", 8, record=True))
    refused("record=1 must be True or False", model, lambda m: kvpatch.patched(m, "h2o", 8, record=1))
    with kvpatch.patched(model, "window", 8) as patch:
        refused(r"write patched\(model, \.\.\., record=True\)", model, lambda m: patch.record())
    with kvpatch.patched(model, "window", 8, record=True) as patch:
        refused("call generate", model, lambda m: patch.record())
        refused("input_ids, not inputs_embeds", model, lambda m: m(inputs_embeds=m.get_input_embeddings()(ids), use_cache=True))
        refused("not known from their beginning", model, lambda m: patch.record(patch.new_cache(_unpatched(m, ids))))


def _unpatched(model, ids):
    twin = copy.deepcopy(model)
    kvpatch.unpatch(twin)
    return twin(ids).past_key_values


def test_a_record_knows_its_size_and_moves():
    model = make("llama_gqa")
    _, record, _ = recorded(model, [(prompt(2, 20), prompt(2, 6, seed=5))])
    _, other, _ = recorded(model, [(prompt(1, 30), prompt(1, 2, seed=5))])
    assert record.nbytes == 2 * 26 * (8 + 2 * 2 * 4) and len(record) == 2
    joined = kvpatch.Record.join([record, other.to("cpu")])
    assert len(joined) == 3 and joined.ids.shape == (3, 32) and "3 texts" in repr(joined)
