"""Batches whose rows differ: what they cost, and caches that are joined and dropped between steps."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvpatch
from kvpatch import EvictingCache, KVPatchError, Report
from kvpatch.backends.dispatch import Choice
from kvpatch.cache import concat as joining
from kvpatch.cache.layer import slack
from tests.helpers.comparing import EVICTING, SMALL, combined, sorted_positions
from tests.helpers.tiny import FIVE, force, left_pad, make, prompt
from tests.invariants.test_sequences import settings_of_a_patch

# ---- one padded batch ----

LENGTHS = (400, 40)
PADDED = [
    *(("h2o", (), schedule) for schedule in ("prompt", "decode", "both")),
    *(("roco", ("adaptive",), schedule) for schedule in ("prompt", "both")),
    *(("tova", ("pyramid",), schedule) for schedule in ("prompt", "decode", "both")),
    ("snapkv", ("adaptive", "critical"), "prompt"),
]


@pytest.mark.parametrize(("policy", "wrap", "schedule"), PADDED, ids=str)
def test_a_short_row_beside_a_long_one_holds_its_own_budget(policy, wrap, schedule):
    """After the prompt and at every step: the sum of what rows may hold, a free slot each, and little more."""
    model, steps = make("llama_gqa", dtype=torch.float64), 18
    ids, fed = prompt(2, max(LENGTHS)), prompt(2, steps, seed=2)
    with torch.no_grad(), kvpatch.patched(model, combined(kvpatch.get_policy(policy), wrap), 0.5, schedule=schedule) as patch:
        cache, mask = patch.new_cache(), left_pad(ids, LENGTHS)
        logits, _ = force(model, ids, fed[:, :0], mask, cache=cache)
        outs, most = [logits], []
        for t in range(steps + 1):
            grown = t if schedule == "prompt" else 0
            whole = 1 if schedule == "decode" else 0
            rows = [n // 2 + whole * n + grown + (slack(n // 2 + grown) if schedule == "prompt" else 1) for n in LENGTHS]
            per_slot = cache.nbytes / (model.config.num_hidden_layers * 2 * 2 * 8 * 8)
            most.append(per_slot <= sum(rows) + 2 * (slack(220) if schedule == "prompt" else 0))
            assert per_slot <= 0.8 * 2 * max(rows), "no more than a batch of longest rows: the short one must cost less"
            if t < steps:
                place = {"position_ids": cache.next_positions()}
                outs.append(model(fed[:, t : t + 1], past_key_values=cache, **place).logits)
        assert all(most), most
        for row, n in enumerate(LENGTHS):
            alone, one = force(model, ids[row : row + 1, -n:], fed[row : row + 1])
            torch.testing.assert_close(torch.cat(outs, 1)[row : row + 1], alone, atol=1e-6, rtol=0)
            same_kept(cache, row, one)


# ---- rows that come and go ----


def same_kept(cache, row, alone):
    """The same tokens, exactly, and the same scores beside them."""
    for layer in range(len(cache.layers)):
        one, other = cache.layers[layer], alone.layers[layer]
        assert torch.equal(cache.held(layer)[row], alone.held(layer)[0]), (layer, row)
        K = int(alone.held(layer).max())
        (mine, at), (own, own_at) = (cache.positions(layer)[row].sort(-1), alone.positions(layer)[0].sort(-1))
        assert torch.equal(mine[:, -K:], own[:, -K:]), (layer, row)
        for name in set(one.state) & set(other.state):
            got, want = (t if t.ndim == 2 else t.mean(-1) for t in (one.state[name][row], other.state[name][0]))
            got, want = got.gather(1, at)[:, -K:], want.gather(1, own_at)[:, -K:]
            close = 1e-6 if one.dtype == torch.float64 else 1e-4
            torch.testing.assert_close(got[own[:, -K:] >= 0].double(), want[own[:, -K:] >= 0].double(), atol=close, rtol=0)


class Loop:
    """A cache whose rows come and go, and beside each row a cache that its text has to itself."""

    def __init__(self, model, patch):
        self.model, self.patch, self.cache, self.alone, self.seed = model, patch, None, [], 0

    def read(self, n, ahead=0):
        """A text of n tokens and `ahead` generated ones, by itself."""
        self.seed += 1
        ids, fed = prompt(1, n, seed=self.seed), prompt(1, ahead, seed=self.seed + 500)
        return force(self.model, ids, fed, cache=self.patch.new_cache())[1]

    def add(self, *texts, consume=False):
        new = [self.read(*text) for text in texts]
        self.alone += [one.clone() for one in new]
        self.cache = EvictingCache.concatenate(([] if self.cache is None else [self.cache]) + new, consume=consume)

    def drop(self, row):
        going = [r for r in range(len(self.alone)) if r != row]
        self.cache.batch_select_indices(torch.tensor(going))
        self.alone = [self.alone[r] for r in going]

    def step(self, count=1, Q=1, **kwargs):
        for _ in range(count):
            self.seed += 1
            ids = prompt(len(self.alone), Q, seed=self.seed)
            got = self.model(ids, past_key_values=self.cache, use_cache=True, **kwargs).logits
            want = [self.model(ids[r : r + 1], past_key_values=one).logits for r, one in enumerate(self.alone)]
            torch.testing.assert_close(got, torch.cat(want), atol=1e-6, rtol=0)
            for row, one in enumerate(self.alone):
                same_kept(self.cache, row, one)


def scenario(loop):
    loop.add((30, 0), (7, 3))
    loop.step(2)
    loop.add((19, 7), consume=True)
    loop.step()
    loop.drop(0)
    loop.step(2)
    loop.drop(1)
    loop.step()


@pytest.mark.parametrize("policy", kvpatch.list_policies())
def test_every_policy_and_architecture(policy):
    """Joined, dropped and added between steps, each row gives what it gives alone; rows of one budget, and of their own."""
    options = dict(SMALL.get(policy, {}))
    if policy == "keyformer":
        options["generation_length"] = 9
    for index, name in enumerate(FIVE, kvpatch.list_policies().index(policy)):
        model = make(name, dtype=torch.float64)
        with torch.no_grad(), kvpatch.patched(model, policy, (0.4, 6)[index % 2], **options) as patch:
            scenario(Loop(model, patch))


@pytest.mark.parametrize("policy", [name for name in EVICTING if name not in SMALL])
def test_schedules(policy):
    for schedule in ("prompt", "decode"):
        model = make("llama_gqa", dtype=torch.float64)
        with torch.no_grad(), kvpatch.patched(model, policy, 0.4, schedule=schedule) as patch:
            scenario(Loop(model, patch))


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("keyformer", {"shared": True, "generation_length": 9}),
        ("keyformer", {"resample": True, "damping": 0.9, "generation_length": 9}),
        ("keyformer", {"positions": "renumbered"}),
        ("h2o", {"block": 5, "sinks": 2}),
        (combined("roco", ("pyramid", "adaptive", "critical")), {"protected": 0.2, "recent": 1}),
    ],
    ids=["shared", "resample", "renumbered", "block", "pyramid+adaptive+critical"],
)
def test_options(policy, options):
    model = make("llama_gqa", dtype=torch.float64)
    with torch.no_grad(), kvpatch.patched(model, policy, 0.4, **options) as patch:
        scenario(Loop(model, patch))


def test_one_layer_for_all_where_rows_are_alike():
    """Rows that are all full share a Deck, with a temperature for each row."""
    model = make("llama_gqa", dtype=torch.float64)
    with torch.no_grad(), kvpatch.patched(model, "keyformer", 6, generation_length=9) as patch:
        loop = Loop(model, patch)
        loop.add((30, 0), (17, 3), (19, 7))
        loop.step(3)
        assert loop.cache.stack is not None and loop.cache.counters.lag_B.tolist() == [7, 4, 0]
        loop.step(Q=4)  # a later turn counts from its own end
        assert loop.cache.counters.lag_B is None
        loop.step(2)


@pytest.mark.parametrize("turns", ["all", "each", "first"])
def test_later_turns_of_joined_rows(turns):
    """Each row's budget counts its own text, from where its own turn began."""
    for policy in ("snapkv", "roco"):
        options = {**SMALL.get(policy, {}), "turns": turns, "schedule": "prompt", "protect": [3, 5, 8]}
        model = make("llama_gqa", dtype=torch.float64)
        with torch.no_grad(), kvpatch.patched(model, policy, 0.6, **options) as patch:
            loop = Loop(model, patch)
            loop.add((40, 2), (21, 0))
            loop.step(Q=13)
            loop.step()
            loop.add((30, 2))
            loop.step(Q=14)
            loop.step(2)


@pytest.mark.parametrize("policy", ["h2o", "adakv", "full"])
def test_inference_mode(policy):
    """What a cache does under torch.inference_mode() leaves it as writable as it was."""
    model = make("llama_gqa", dtype=torch.float64)
    with torch.inference_mode(), kvpatch.patched(model, policy, 0.4, **SMALL.get(policy, {})) as patch:
        loop = Loop(model, patch)
        loop.add((30, 0), (7, 3), (19, 7))
        loop.step()
        for deed in ("drop", "clone", "repeat", "reorder", "step"):
            do(loop, deed, 1, None)
            loop.step()
        beams = {"num_beams": 2, "do_sample": False, "max_new_tokens": 3}
        inside = model.generate(prompt(1, 20), **beams)
        with torch.inference_mode(False), torch.no_grad():
            loop.step()
            assert torch.equal(model.generate(prompt(1, 20), **beams), inside)


DEEDS = ("step", "step", "add", "add", "drop", "turn", "clone", "reorder", "repeat", "save", "crop")


@settings(max_examples=16, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(
    chosen=settings_of_a_patch(),
    texts=st.lists(st.tuples(st.integers(2, 24), st.integers(0, 5)), min_size=1, max_size=3),
    deeds=st.lists(st.tuples(st.sampled_from(DEEDS), st.integers(1, 5)), max_size=7),
)
def test_any_sequence(tmp_path_factory, chosen, texts, deeds):
    name, policy, k, options = chosen
    path = tmp_path_factory.mktemp("batches") / "cache.safetensors"
    model = make(name, dtype=torch.float64)
    with torch.no_grad(), kvpatch.patched(model, policy, k, **options) as patch:
        loop = Loop(model, patch)
        loop.add(*texts)
        for deed, number in deeds:
            do(loop, deed, number, path)
        loop.step()


def do(loop, deed, number, path):
    rows = len(loop.alone)
    if deed == "step":
        loop.step(number)
    elif deed == "add" and rows < 5:
        loop.add((3 * number, number % 3), consume=number % 2 == 0)
    elif deed == "drop" and rows > 1:
        loop.drop(number % rows)
    elif deed == "turn":
        loop.step(Q=number + 1)
    elif deed == "clone":
        loop.cache = loop.cache.clone()
    elif deed == "reorder":
        order = [(row * number + 1) % rows for row in range(rows)]
        loop.cache.reorder_cache(torch.tensor(order))
        loop.alone = [loop.alone[row].clone() for row in order]
    elif deed == "repeat" and rows < 4:
        loop.cache.batch_repeat_interleave(2)
        loop.alone = [one.clone() for one in loop.alone for _ in range(2)]
    elif deed == "save":
        loop.patch.save_cache(loop.cache, path)
        loop.cache = loop.patch.load_cache(path)
    elif deed == "crop":
        loop.cache.activate_past_recording()
        for t in range(number):
            loop.model(prompt(rows, 1, seed=t), past_key_values=loop.cache)
        loop.cache.crop(-number)


# ---- positions ----


@pytest.mark.parametrize("name", ["llama_gqa", "gptj", "gpt2"])
def test_positions_are_filled_in_and_wrong_ones_refused(name):
    model = make(name, dtype=torch.float64)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.4) as patch:
        loop = Loop(model, patch)
        loop.add((30, 0), (9, 2))
        assert loop.cache.next_positions(2).tolist() == [[30, 31], [11, 12]]
        assert loop.cache.get_seq_length() == 30
        loop.step(2)  # without position_ids
        loop.step(position_ids=loop.cache.next_positions())
        loop.step(attention_mask=torch.ones(2, 1, dtype=torch.long))
        before = [loop.cache.positions(layer) for layer in range(2)]
        for wrong in ([[33]], [[34], [34]]):
            with pytest.raises(KVPatchError, match=r"Row 1 has seen 15 tokens\.|Row 0 has seen 34 tokens\."):
                model(prompt(2, 1), past_key_values=loop.cache, position_ids=torch.tensor(wrong))
        assert all(torch.equal(a, loop.cache.positions(layer)) for layer, a in enumerate(before))
        loop.step()


def test_a_long_row_that_has_gone_takes_no_positions_with_it():
    """GPT-2 has 512 positions: what is left of the batch is told by the rows that are there."""
    model = make("gpt2", dtype=torch.float64)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 8) as patch:
        loop = Loop(model, patch)
        loop.add((510, 0), (9, 2))
        loop.step(2)
        with pytest.raises(KVPatchError, match="The text needs 513 positions, but this model has 512"):
            model(prompt(2, 1), past_key_values=loop.cache)
        loop.drop(0)
        assert loop.cache.get_seq_length() == 13
        loop.step(2)


@pytest.mark.parametrize("policy", ["adakv", "full", "h2o"])
def test_the_longest_row_goes_and_the_others_outgrow_their_slack(policy):
    model = make("llama_gqa", dtype=torch.float64)
    with torch.no_grad(), kvpatch.patched(model, policy, 0.5, **SMALL.get(policy, {})) as patch:
        loop = Loop(model, patch)
        loop.add((90, 0), (12, 0), (14, 3))
        whole = loop.cache.nbytes
        loop.drop(0)
        assert loop.cache.nbytes < whole / 2
        loop.step(12)


def test_a_decoder_that_takes_no_positions_is_refused():
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.4) as patch:
        loop = Loop(model, patch)
        loop.add((12, 0), (9, 2))
        patch._settings.decoder_parameters = ("input_ids", "attention_mask", "past_key_values", "use_cache")
        with pytest.raises(KVPatchError, match="it takes no position_ids: continue the caches one by one"):
            model(prompt(2, 1), past_key_values=loop.cache)


def test_padded_batches_join_where_their_positions_leave_padding_out():
    model, ids, mask = make("gpt2", dtype=torch.float64), prompt(2, 20), left_pad(prompt(2, 20), [20, 11])
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.4) as patch:
        _, padded = force(model, ids, ids[:, :3], mask, cache=patch.new_cache())
        loop = Loop(model, patch)
        loop.alone = [force(model, ids[r : r + 1, -n:], ids[r : r + 1, :3])[1] for r, n in enumerate((20, 11))]
        loop.cache = EvictingCache.concatenate([padded])
        loop.add((8, 2))
        loop.step(3)
        careless = model(ids, attention_mask=mask).past_key_values
        with pytest.raises(KVPatchError, match="Cache 1 read a padded batch without position_ids"):
            EvictingCache.concatenate([loop.cache, careless])


# ---- the rest of what a cache can do ----


@pytest.mark.parametrize("policy", ["h2o", "adakv", "full"])
@pytest.mark.parametrize("name", ["llama_gqa", "gpt2", "mpt"])
def test_generate_goes_on_from_a_joined_cache(name, policy):
    model, lengths = make(name), (30, 9, 17)
    texts = [prompt(1, n + 2, seed=n) for n in lengths]
    wide = torch.cat([torch.nn.functional.pad(text, (32 - text.shape[1], 0)) for text in texts])
    mask = left_pad(wide, [n + 2 for n in lengths])
    given = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad(), kvpatch.patched(model, policy, 0.4, **SMALL.get(policy, {})) as patch:
        caches = [force(model, text[:, :-2], text[:, :0], cache=patch.new_cache())[1] for text in texts]
        alone = [model.generate(t, past_key_values=c.clone(), **given) for t, c in zip(texts, caches, strict=True)]
        for ids in (wide, wide[:, -2:]):
            cache = EvictingCache.concatenate(caches)
            out = model.generate(ids, attention_mask=mask, past_key_values=cache, **given)
            for row, one in enumerate(alone):
                got, want = torch.cat(out.logits, 0)[row::3], torch.cat(one.logits, 0)
                torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
        with pytest.raises(KVPatchError, match="position_ids do not go on|brings no token: the cache has seen 30 already"):
            model.generate(wide[:, -2:], past_key_values=EvictingCache.concatenate(caches), **given)


def test_rows_are_saved_without_those_that_have_gone(tmp_path):
    """Protected sizes too have a row for each that is left."""
    model = make("llama_gqa", dtype=torch.float64)
    for policy in ("keyformer", "adakv", "roco"):
        with torch.no_grad(), kvpatch.patched(model, policy, 0.4, **SMALL.get(policy, {})) as patch:
            loop = Loop(model, patch)
            loop.add((30, 0), (9, 2), (20, 4))
            loop.drop(0)
            patch.save_cache(loop.cache, tmp_path / policy)
            loop.cache = patch.load_cache(tmp_path / policy)
            assert loop.cache.rows.joined and loop.cache.get_seq_length() == 24
            loop.step(2)
            report = Report.of(loop.cache)
            assert report.lengths == (13, 26) and "26 columns; the rows' own: 13 to 26" in str(report)
            loop.cache.reset()
            assert not loop.cache.rows.joined and loop.cache.counters.lag_B is None
            _, again = force(model, prompt(1, 30), prompt(1, 2), cache=loop.cache)
            same_kept(again, 0, force(model, prompt(1, 30), prompt(1, 2))[1])


def test_consumed_caches_are_emptied_layer_by_layer(monkeypatch):
    model, held, made = make("llama_gqa"), [], []
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.4) as patch:
        loop = Loop(model, patch)
        caches = [loop.read(40), loop.read(25, 3)]
        whole = sum(cache.nbytes for cache in caches)
        fill = joining._fill

        def watched(new, parts):
            made.append(new)
            own = sum(tensor.numel() * tensor.element_size() for layer in made for tensor in (layer.keys, layer.values))
            held.append(own + sum(cache.nbytes for cache in caches))
            fill(new, parts)

        monkeypatch.setattr(joining, "_fill", watched)
        kept = EvictingCache.concatenate(caches)
        assert held == [1.5 * whole, 2 * whole] and sum(cache.nbytes for cache in caches) == whole == kept.nbytes
        held.clear(), made.clear()
        joined = EvictingCache.concatenate(caches, consume=True)
        assert held == [1.5 * whole, 1.5 * whole] and joined.nbytes == whole
        assert all(cache.nbytes == 0 and cache.get_seq_length() == 0 for cache in caches)


def test_only_steps_of_the_joined_cache_roll_back():
    model = make("llama_gqa", dtype=torch.float64)
    for policy in ("keyformer", "full"):
        with torch.no_grad(), kvpatch.patched(model, policy, 0.4) as patch:
            loop = Loop(model, patch)
            loop.add((30, 3), (9, 4))
            with pytest.raises(KVPatchError, match="Cannot roll back 2 tokens"):
                loop.cache.crop(-2)
            loop.cache.activate_past_recording()
            do(loop, "crop", 3, None)
            loop.step(2)


def test_steps_can_be_compiled():
    model = make("llama_gqa", layers=1, dtype=torch.float64)
    with torch.no_grad(), kvpatch.patched(model, "keyformer", 0.4, generation_length=9) as patch:
        loop = Loop(model, patch)
        loop.add((30, 3), (9, 4))
        loop.step()
        compiled, twin = torch.compile(model, backend="eager", dynamic=False), loop.cache.clone()
        for t in range(3):
            ids = prompt(2, 1, seed=t)
            want = model(ids, past_key_values=twin).logits
            got = compiled(ids, past_key_values=loop.cache).logits
            torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
        assert loop.cache.counters.behind, "no step was traced"
        assert loop.cache.next_positions().tolist() == twin.next_positions().tolist()
        for row in range(2):
            assert sorted_positions(loop.cache.positions(0)[row][None].tolist()) == sorted_positions(
                twin.positions(0)[row][None].tolist()
            )


@pytest.mark.parametrize("policy", ["h2o", "keyformer", "adakv"])
def test_the_triton_backend_takes_joined_rows(policy):
    """Keyformer's rows have temperatures of their own, which its kernel does not; torch takes these steps."""
    pytest.importorskip("triton")
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, policy, 0.4, **SMALL.get(policy, {})) as patch:
        loop = Loop(model, patch)
        loop.add((20, 0), (9, 3))
        loop.cache.choice = Choice("triton")
        fed = prompt(2, 2)
        for t in range(2):
            got = model(fed[:, t : t + 1], past_key_values=loop.cache).logits
            want = [model(fed[r : r + 1, t : t + 1], past_key_values=one).logits for r, one in enumerate(loop.alone)]
            torch.testing.assert_close(got, torch.cat(want), atol=2e-5, rtol=0)
            for row, one in enumerate(loop.alone):
                same_kept(loop.cache, row, one)
        ran = {task: by for task, (by, _) in loop.cache.choice.ran.items()}
        assert set(ran.values()) == {"torch" if policy == "keyformer" else "triton"}


# ---- what is refused ----


def unread(model, patch):
    return patch.new_cache()


def in_a_prompt(model, patch):
    cache = patch.new_cache()
    cache.request.prompt_len = 30
    model(prompt(1, 20), past_key_values=cache)
    return cache


def with_room(model, patch):
    cache = patch.new_cache(room=8)
    model(prompt(1, 20), past_key_values=cache)
    return cache


def read_by(policy="h2o", k=0.4, name="llama_gqa", dtype=torch.float32, **options):
    def read(model, patch):
        other = make(name, dtype=dtype)
        with kvpatch.patched(other, policy, k, **options) as own:
            return force(other, prompt(1, 9), prompt(1, 0), cache=own.new_cache())[1]

    return read


REFUSED = {
    "unread": (unread, "Cache 1 has read no prompt: run one through it first"),
    "prompt": (in_a_prompt, "Cache 1 is in the middle of a prompt: read it to its end, then concatenate"),
    "room": (with_room, r"Cache 1 was made with room=8 .* Make it without room"),
    "policy": (read_by("roco"), "another patch or model than cache 0: the policy's name is 'roco' there and 'h2o' here"),
    "recent": (read_by(recent=0.25), r"the policy's recent is 0\.25 there and 0\.5 here"),
    "k": (read_by(k=0.5), r"k is \[0\.5, 0\.5\] there and \[0\.4, 0\.4\] here"),
    "seed": (read_by(seed=3), "seed is 3 there and 0 here"),
    "block": (read_by(block=4), "block is 4 there and None here"),
    "positions": (read_by(positions="renumbered"), "positions is 'renumbered' there and 'original' here"),
    "heads": (read_by(name="llama"), "layer 0's KV heads is 4 there and 2 here"),
    "dtype": (read_by(dtype=torch.float64), r"dtype is torch\.float64 there and torch\.float32 here"),
    "other": (lambda model, patch: [1], "Cache 1 is a list: only caches that the patched model filled"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_joined(case):
    make_one, words = REFUSED[case]
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.4) as patch:
        mine = force(model, prompt(1, 12), prompt(1, 1), cache=patch.new_cache())[1]
    patch = kvpatch.patch(model, "h2o", 0.4)
    try:
        with torch.no_grad():
            other = make_one(model, patch)
    finally:
        patch.remove()
    with pytest.raises(KVPatchError, match=words):
        EvictingCache.concatenate([mine, other])


def test_nothing_twice_and_no_row():
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.4) as patch:
        cache = force(model, prompt(1, 12), prompt(1, 1), cache=patch.new_cache())[1]
        with pytest.raises(KVPatchError, match="was given no cache"):
            EvictingCache.concatenate([])
        with pytest.raises(KVPatchError, match=r"in the list twice: give its clone\(\)"):
            EvictingCache.concatenate([cache, cache])
        with pytest.raises(KVPatchError, match="would leave no row"):
            cache.batch_select_indices(torch.tensor([], dtype=torch.long))
        with pytest.raises(KVPatchError, match="The cache is empty, so that it has no rows yet"):
            patch.new_cache().next_positions()


def test_reordered_rows_know_the_longest_of_them():
    model, ids = make("llama_gqa"), prompt(1, 30)
    with kvpatch.patched(model, "h2o", 0.5) as patch, torch.no_grad():
        caches = [patch.new_cache(), patch.new_cache()]
        for cache, n in zip(caches, (30, 10), strict=True):
            model(ids[:, :n], past_key_values=cache)
        joined = EvictingCache.concatenate(caches)
        joined.reorder_cache(torch.tensor([1, 1]))
        assert joined.get_seq_length() == 10


def test_caches_from_files_join_where_positions_are_distances(tmp_path):
    model, ids = make("mpt"), prompt(1, 30)
    with kvpatch.patched(model, "h2o", 0.5) as patch, torch.no_grad():
        caches = []
        for n in (30, 10):
            model(ids[:, :n], past_key_values=(cache := patch.new_cache()))
            patch.save_cache(cache, tmp_path / f"{n}")
            caches.append(patch.load_cache(tmp_path / f"{n}"))
        joined = EvictingCache.concatenate(caches)
        assert model(ids[:, :1].expand(2, 1), past_key_values=joined).logits.isfinite().all()
