"""Requests that go on from what others have read: the tokens of generate() on one cache, and only new turns are read."""

import gc
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import kvpatch
from kvpatch.serving.conversations import Conversations
from tests.helpers.serving import collect, engine, greedy, prompts, until
from tests.helpers.tiny import make

FIRST, OTHER, SECOND, THIRD = prompts((50, 30, 12, 9), seed=1)
NEW = 6
CASES = [
    ("h2o", 24, {}),
    ("h2o", 1.0, {}),
    ("tova", 24, {"positions": "renumbered"}),
    ("keyformer", 0.4, {}),
    ("adakv", 0.4, {}),
    ("snapkv", 24, {"window": 8}),
    ("snapkv", 24, {"window": 8, "turns": "each"}),
    ("snapkv", 24, {"window": 8, "turns": "first"}),
    ("h2o", 24, {"block": 16}),
    ("h2o", 24, {"bits": 8}),
]


def go_on(model, cache, ids, new=NEW):
    """The tokens of generate() on a cache that has read the beginning of a text."""
    given = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones(1, len(ids), dtype=torch.long)  # a token of the pad's number is a token
    return model.generate(torch.tensor([ids]), attention_mask=mask, past_key_values=cache, **given)[0, len(ids) :].tolist()


def read(model, cache, ids):
    """The token that follows some more."""
    with torch.no_grad():
        return int(model(torch.tensor([ids]), past_key_values=cache).logits[0, -1].argmax())


class Kept:
    """An engine that keeps conversations, and the tokens that each request has reused."""

    def __init__(self, manager, conversations):
        self.manager, self.conversations, self.reused = manager, conversations, {}
        conversations.note_reuse = self.reused.__setitem__

    def ask(self, *texts, new=NEW):
        """The tokens of requests that run together, and of how many each has not read again."""
        names = [self.manager.add_request(list(ids), max_new_tokens=new) for ids in texts]
        found = collect(self.manager, names)
        assert all(found[name].error is None for name in names), [found[name].error for name in names]
        return [list(found[name].generated_tokens) for name in names], [self.reused.get(name, 0) for name in names]

    def cancel_after(self, tokens):
        """Cancel every request once it has so many tokens."""
        scheduler = self.manager.batch_processor.scheduler

        def look(state):
            if len(state.generated_tokens) == tokens:
                scheduler.set_request_cancellation(state.request_id)

        self.pool.after_token = look

    @property
    def pool(self):
        return self.manager.batch_processor.cache


@contextmanager
def keeping(model, most=1 << 30, edits=False, **options):
    conversations = Conversations(most, edits)
    manager = model.init_continuous_batching(
        generation_config=greedy(NEW), continuous_batching_config=engine(**options), conversations=conversations
    )
    manager.start()
    try:
        until(lambda: manager.batch_processor is not None)
        yield Kept(manager, conversations)
    finally:
        manager.stop(block=True, timeout=30)


@pytest.mark.parametrize(("policy", "k", "options"), CASES, ids=str)
def test_each_turn_is_that_of_one_cache(policy, k, options):
    """Of two conversations, whose rows are joined; the budget is that of the whole conversation."""
    model = make("llama_gqa")
    with kvpatch.patched(model, policy, k, **options) as patch, keeping(model) as kept:
        caches, texts, read = [patch.new_cache() for _ in range(2)], [[], []], [0, 0]
        for turns in ((FIRST, OTHER), (SECOND, THIRD), (THIRD, SECOND)):
            texts = [ids + turn for ids, turn in zip(texts, turns, strict=True)]
            wanted = [go_on(model, cache, ids) for cache, ids in zip(caches, texts, strict=True)]
            assert kept.ask(*texts) == (wanted, read)
            texts = [ids + found for ids, found in zip(texts, wanted, strict=True)]
            read = [len(ids) - 1 for ids in texts]
        for ids, cache in zip(texts, caches, strict=True):
            (own,) = [one.cache for one in kept.conversations._kept if one.ids == ids[:-1]]
            assert all(torch.equal(own.held(layer), cache.held(layer)) for layer in range(2))


def test_two_requests_that_go_on_from_one_conversation():
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 24) as patch, keeping(model) as kept:
        cache = patch.new_cache()
        first = go_on(model, cache, FIRST)
        kept.ask(FIRST)
        texts = [FIRST + first + turn for turn in (SECOND, THIRD)]
        wanted = [go_on(model, cache.clone(), ids) for ids in texts]
        assert kept.ask(*texts) == (wanted, [55, 55])
        assert kept.ask(texts[0]) == (wanted[:1], [55]), "later, too"
        (one,) = [one for one in kept.conversations._kept if one.ids == (FIRST + first)[:-1]]
        assert kept.conversations._kept[0] is one, "it goes before those that went on from it"


@pytest.mark.parametrize(("policy", "k", "reused"), [("h2o", 1.0, 52), ("snapkv", 24, 52), ("h2o", 24, 0)])
def test_a_difference_in_the_last_answer(policy, k, reused):
    """What follows it is taken back where that is exact, as where nothing was evicted for it; else all is read anew."""
    model, options = make("llama_gqa"), {"window": 8} if policy == "snapkv" else {}
    with kvpatch.patched(model, policy, k, **options) as patch, keeping(model) as kept:
        cache = patch.new_cache()
        first = go_on(model, cache, FIRST)
        kept.ask(FIRST)
        ids = FIRST + first[:2] + SECOND
        assert first[2] != SECOND[0]
        if reused:
            cache.crop(-3)
        wanted = go_on(model, cache if reused else patch.new_cache(), ids)
        assert kept.ask(ids) == ([wanted], [reused])


@pytest.mark.parametrize(("policy", "k", "reused"), [("h2o", 1.0, 20), ("snapkv", 400, 0), ("h2o", 24, 0)])
def test_a_difference_in_an_earlier_turn(policy, k, reused):
    """Reused only where nothing is evicted: a shorter prompt has another budget and other scores."""
    model, options = make("llama_gqa"), {"window": 8} if policy == "snapkv" else {}
    with kvpatch.patched(model, policy, k, **options) as patch, keeping(model) as kept:
        kept.ask(FIRST)
        ids = FIRST[:20] + THIRD
        assert kept.ask(ids) == ([go_on(model, patch.new_cache(), ids)], [reused])
        again = kept.ask(FIRST)
        assert again == ([go_on(model, patch.new_cache(), FIRST)], [49 if reused else 0]), "its last token is read"


@pytest.mark.parametrize("turns", ["all", "each", "first"])
def test_blocks_of_a_request_that_goes_on(turns):
    """As many as it holds when it has ended, in blocks of one token, and one for the last token, which nothing reads."""
    model = make("llama_gqa")
    options = {"window": 8, "turns": turns}
    with kvpatch.patched(model, "snapkv", 24, **options), keeping(model) as kept:
        (first,), _ = kept.ask(FIRST)
        ids = FIRST + first + prompts((40,))[0]
        kept.pool.page = 1
        claimed = kept.pool.count_blocks(len(ids), NEW, kept.conversations.find(ids))
        kept.pool.page = 16
        kept.ask(ids)
        assert kept.conversations._kept[-1].held == [claimed - 1] * 2


def test_bytes_of_conversations():
    """The one that was used least recently goes."""
    model = make("llama_gqa")
    texts = prompts((50, 50, 50), seed=8)
    with kvpatch.patched(model, "h2o", 24), keeping(model) as kept:
        answers = [kept.ask(ids)[0][0] for ids in texts[:2]]
        each = kept.conversations.nbytes // 2
        assert each > model.config.num_hidden_layers * 2 * 24 * 4 * model.config.head_dim * 2  # keys and values of two heads
        kept.conversations.most = 5 * each // 2
        assert kept.ask(texts[0] + answers[0] + [5])[1] == [55]
        kept.ask(texts[2])
        assert len(kept.conversations) == 2 and kept.conversations.nbytes <= 5 * each // 2
        assert kept.ask(texts[1] + answers[1] + [5])[1] == [0]
        kept.conversations.most = each - 1
        kept.ask(texts[2])
        assert len(kept.conversations) == kept.conversations.nbytes == 0, "one alone is too much"


def test_one_that_is_too_large_takes_no_other_s_place():
    kept = Conversations(100)
    for size in (60, 101):
        kept.keep(SimpleNamespace(ids=[size], nbytes=size))
    assert kept.nbytes == 60


def test_a_conversation_that_others_begin_with_stays():
    model = make("llama_gqa")
    with kvpatch.patched(model, "full", 1.0), keeping(model) as kept:
        kept.ask(FIRST)
        kept.ask(OTHER)
        assert kept.ask(FIRST[:20] + THIRD)[1] == [20]
        assert [one.ids[:21] for one in kept.conversations._kept] == [OTHER[:21], FIRST[:21], FIRST[:20] + THIRD[:1]]


def test_a_conversation_that_goes_while_a_request_goes_on_from_it():
    """Its memory is free at once, and the request has the right answer."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 24) as patch, keeping(model) as kept:
        cache, alive = patch.new_cache(), []
        first = go_on(model, cache, FIRST)
        kept.ask(FIRST)
        held = weakref.ref(kept.conversations._kept[0].cache)

        def drop(state):
            kept.conversations.clear()
            gc.collect()
            alive.append(held() is not None)

        kept.pool.after_token = drop
        ids = FIRST + first + SECOND
        assert kept.ask(ids) == ([go_on(model, cache, ids)], [55])
        assert alive == [False] * NEW


def test_what_is_left_of_requests():
    """The caches that are kept, and no other."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 24) as patch, keeping(model, edits=True) as kept:
        texts = [FIRST, OTHER]
        for turn in (SECOND, THIRD, SECOND):
            found, _ = kept.ask(*texts)
            kept.conversations.most = min(kept.conversations.most, 2 * kept.conversations.nbytes)
            texts = [ids[:5] + ids[9:] + answer + turn for ids, answer in zip(texts, found, strict=True)]

        def count():
            gc.collect()
            found = (one for one in gc.get_objects() if type(one) is kvpatch.EvictingCache)
            return sum(one.settings is patch.settings for one in found)

        until(lambda: count() == len(kept.conversations) > 2)
        assert not kept.pool.requests and not kept.pool.beginnings and not kept.pool.rows.parts


def test_a_request_that_is_cancelled():
    """What it has read is kept, and goes on like any other text."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 24) as patch, keeping(model) as kept:
        kept.cancel_after(10)
        kept.manager.add_request(FIRST, max_new_tokens=20)
        until(lambda: len(kept.conversations) == 1)
        cache = patch.new_cache()
        ids = FIRST + go_on(model, cache, FIRST, 10)
        assert [one.ids for one in kept.conversations._kept] == [ids[:-1]]
        assert kept.ask(ids + SECOND) == ([go_on(model, cache, ids + SECOND)], [59])
        assert not kept.pool.requests and not kept.pool.beginnings


def test_an_answer_of_one_token():
    """Nothing has read it: the row ends with its prompt."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 24) as patch, keeping(model) as kept:
        cache = patch.new_cache()
        first = go_on(model, cache, FIRST, new=1)
        assert kept.ask(FIRST, new=1) == ([first], [0])
        ids = FIRST + first + SECOND
        assert kept.ask(ids) == ([go_on(model, cache, ids)], [50])


def test_a_prompt_in_several_passes():
    """Each is compressed; a request that is cancelled between them leaves the conversation that it went on from."""
    model = make("llama_gqa")
    (long,) = prompts((70,), seed=5)
    with kvpatch.patched(model, "h2o", 24) as patch, keeping(model, max_batch_tokens=32) as kept:
        cache = patch.new_cache()

        def answer(pieces):
            found = [[read(model, cache, piece) for piece in pieces][-1]]
            while len(found) < NEW:
                found.append(read(model, cache, found[-1:]))
            return found

        first = answer([FIRST[:32], FIRST[32:]])
        assert kept.ask(FIRST) == ([first], [0])
        ids, own = FIRST + first + long, kept.pool.next_pass
        second = answer([[first[-1], *long[:31]], long[31:63], long[63:]])

        def cancel():
            kept.pool.next_pass = own
            kept.manager.batch_processor.scheduler.set_request_cancellation("in three")
            return own()

        kept.pool.next_pass = cancel
        kept.manager.add_request(ids, request_id="in three")
        until(lambda: kept.pool.next_pass == own and not kept.pool.requests)
        assert [one.ids for one in kept.conversations._kept] == [(FIRST + first)[:-1]]
        assert kept.ask(ids) == ([second], [55])


def test_a_model_that_has_changed_reads_anew():
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 24) as patch, keeping(model) as kept:
        (first,), _ = kept.ask(FIRST)
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.5)
        ids = FIRST + first + SECOND
        assert kept.ask(ids) == ([go_on(model, patch.new_cache(), ids)], [0])


def test_a_request_that_fails_is_not_kept():
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 24), keeping(model) as kept:
        kept.ask(FIRST)
        own, passes = kept.pool.next_pass, []

        def fail():
            passes.append(1)
            if len(passes) == 3:
                raise RuntimeError("out of memory")
            return own()

        kept.pool.next_pass = fail
        name = kept.manager.add_request(OTHER)
        assert collect(kept.manager, [name])[name].error
        until(lambda: not kept.pool.requests)
        assert [one.ids[:3] for one in kept.conversations._kept] == [FIRST[:3]]


# ---- edits ----


@pytest.mark.parametrize(("policy", "k", "options"), CASES[:6], ids=str)
def test_a_span_that_is_gone_is_forgotten(policy, k, options):
    """As cache.forget() leaves it, twice; each turn reads what is new."""
    model = make("llama_gqa")
    with kvpatch.patched(model, policy, k, **options) as patch, keeping(model, edits=True) as kept:
        cache, ids = patch.new_cache(), FIRST
        first = go_on(model, cache, ids)
        assert kept.ask(ids)[0] == [first]
        whole = ids + first + SECOND
        cache.forget([(10, 25)])
        second = go_on(model, cache, whole)
        ids = whole[:10] + whole[25:]
        assert kept.ask(ids) == ([second], [40])
        whole = whole + second + THIRD
        cache.forget([(30, 40)])
        ids = whole[:10] + whole[25:30] + whole[40:]
        assert kept.ask(ids) == ([go_on(model, cache, whole)], [48])
        assert kept.conversations._kept[-1].positions[:20] == [*range(10), *range(25, 30), *range(40, 45)]


def test_an_edited_conversation_whose_last_answer_differs():
    """The rest of that answer is forgotten, in a text that was edited before."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 24) as patch, keeping(model, edits=True) as kept:
        cache = patch.new_cache()
        first = go_on(model, cache, FIRST)
        kept.ask(FIRST)
        ids = FIRST[:10] + FIRST[25:] + first
        kept.ask(ids + SECOND)
        cache.forget([(10, 25), (52, 55)])
        assert first[2] != THIRD[0]
        assert kept.ask(ids[:37] + THIRD) == ([go_on(model, cache, FIRST + first[:5] + THIRD)], [37])


def test_an_edited_conversation_stays_beside_its_copy():
    """Another text that is an edit of it takes nothing from its own next turn, unless there is no room for both."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 24) as patch, keeping(model, edits=True) as kept:
        cache = patch.new_cache()
        first = go_on(model, cache, FIRST)
        kept.ask(FIRST)
        kept.ask(FIRST[:10] + FIRST[25:] + first + SECOND)
        assert kept.ask(FIRST + first + THIRD) == ([go_on(model, cache, FIRST + first + THIRD)], [len(FIRST + first) - 1])
        newest = kept.conversations._kept[-1]
        kept.conversations.most = newest.nbytes * 3 // 2
        kept.ask(FIRST[:10] + FIRST[25:] + first + THIRD + SECOND)
        assert newest not in kept.conversations._kept and len(kept.conversations) == 1


def test_spans_that_are_replaced():
    """Behind one that is gone since an earlier turn, and before one that goes later: places are those of the cache."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 24) as patch, keeping(model, edits=True) as kept:
        cache = patch.new_cache()
        first = go_on(model, cache, FIRST)
        kept.ask(FIRST, OTHER)  # in one batch
        cache.forget([(2, 6)])
        read = FIRST + first + SECOND  # by the cache
        second = go_on(model, cache, read)
        assert [one[0] for one in kept.ask(read[:2] + read[6:], OTHER)] == [second, 51]
        patch.replace(cache, (20, 30), [3, 4, 5])
        read = [*read[:20], 3, 4, 5, *read[23:], *second, *THIRD]
        third = go_on(model, cache, read)
        assert kept.ask(read[:2] + read[6:23] + read[30:]) == ([third], [59])
        assert kept.conversations._kept[-1].positions[:24] == [0, 1, *range(6, 23), *range(30, 35)]
        cache.forget([(21, 40)])
        read = [*read, *third, 7, 8, 9]
        assert kept.ask(read[:2] + read[6:21] + read[40:]) == ([go_on(model, cache, read)], [65])


def test_an_edit_that_cannot_be_is_read_anew():
    """The conversation stays as it was, for those that go on from it."""

    def fail(cache, span, ids):
        raise RuntimeError("out of memory")

    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 24) as patch, keeping(model, edits=True) as kept:
        cache = patch.new_cache()
        first = go_on(model, cache, FIRST)
        kept.ask(FIRST)
        kept.conversations.replace = fail
        ids = [*FIRST[:2], *FIRST[12:20], 3, 4, 5, *FIRST[25:], *first, *SECOND]
        assert kept.ask(ids) == ([go_on(model, patch.new_cache(), ids)], [0])
        ids = FIRST + first + SECOND
        assert kept.ask(ids) == ([go_on(model, cache, ids)], [55])


def test_positions_end():
    """An edited text that is short enough is read anew where the positions of all that was read are used up."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 24) as patch, keeping(model, edits=True) as kept:
        (first,), _ = kept.ask(FIRST)
        kept.manager.batch_processor.scheduler.max_positions = 70
        ids = FIRST[:10] + FIRST[30:] + first + SECOND
        assert kept.ask(ids) == ([go_on(model, patch.new_cache(), ids)], [0]), "73 columns, but 53 tokens"
