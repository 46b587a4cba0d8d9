"""A state machine over one patched model and up to three caches: whatever is done in whatever order, and wherever an
exception is thrown, each row answers as an oracle of its own text does, or its cache refuses to be used any more."""

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from kvpatch import EvictingCache, KVPatchError, Report
from tests.robustness import stateful_faults as faults
from tests.robustness.stateful_base import COUNTS, Base, Live
from tests.robustness.stateful_faults import Fault, Throw, perhaps
from tests.robustness.stateful_oracle import LONGEST, PLAIN, Chosen, Shadow, check_cache, check_logits, chosen_settings

at_any, few, batches = st.integers(0, 11), st.integers(1, 3), st.sampled_from((1, 1, 2, 2, 3))
pads_of_rows = st.one_of(st.just((0, 0, 0)), st.tuples(*[st.integers(0, 4)] * 3))


class Machine(Base):
    @initialize(chosen=chosen_settings(), n=st.integers(1, 10), B=batches, pads=pads_of_rows, parts=few, fault=perhaps)
    def begin(self, chosen: Chosen, n: int, B: int, pads: tuple[int, ...], parts: int, fault: Throw | None) -> None:
        self.choose(chosen)
        self.enter(chosen, None)
        self.prompt(self.add(), n, B, pads, parts, fault)

    def prompt(self, live: Live, n: int, B: int, pads: tuple[int, ...], parts: int, fault: Throw | None) -> None:
        """A first prompt, or a later one, as far as these settings have one."""
        chosen, shadow = live.shadow.chosen, live.shadow
        if live.rows and (chosen.one_turn or n == 1 or shadow.longest + n > LONGEST):
            return
        if shadow.joined and live.cache.settings.rereads:  # refused
            return
        # layers that share a score, and blocks that count padding, see a prompt in pieces as pieces
        whole = live.rows or dict(chosen.options).get("shared") or (chosen.block is not None and any(pads))
        self.read(live, n, B, pads, 1 if whole else parts, fault)

    # ---- passes ----

    @rule(at=at_any, n=st.integers(2, 7), B=batches, pads=pads_of_rows, parts=few, fault=perhaps)
    def turn(self, at: int, n: int, B: int, pads: tuple[int, ...], parts: int, fault: Throw | None) -> None:
        self.prompt(self.live(at), n, B, pads, parts, fault)

    @rule(at=at_any, n=few, fault=perhaps)
    def decode(self, at: int, n: int, fault: Throw | None) -> None:
        live = self.live(at)
        for _ in range(n if live.rows and live.shadow.longest + n <= LONGEST else 0):
            if not self.step(live, fault):
                break
            fault = None

    @rule(at=at_any, n=st.integers(2, 4), back=st.integers(0, 4), fault=perhaps)
    def draft(self, at: int, n: int, back: int, fault: Throw | None) -> None:
        """Several generated tokens in one pass, as assisted decoding has them verified, of which some are taken back."""
        live = self.live(at)
        if not live.rows or live.shadow.longest + n > LONGEST or dict(live.shadow.chosen.options).get("shared"):
            return
        ids = self.tokens(live.rows, n)

        def act() -> torch.Tensor:
            live.cache.plans.prompt_len = live.shadow.columns
            try:
                return self.forward(live.cache, ids, live.shadow)
            finally:
                live.cache.plans.prompt_len = None

        if self.do("draft", [live], act, lambda got: self.expect_step(live, got, ids), faults.PASS, fault):
            self.take_back(live, min(back, n), None)

    @rule(at=at_any)
    def record(self, at: int) -> None:
        live = self.live(at)
        live.cache.activate_past_recording()
        live.shadow.recording = True

    @rule(at=at_any, count=st.integers(1, 6), fault=perhaps)
    def crop(self, at: int, count: int, fault: Throw | None) -> None:
        live = self.live(at)
        if live.rows and count < min(map(len, live.shadow.texts)):
            self.take_back(live, count, fault)

    def take_back(self, live: Live, count: int, fault: Throw | None) -> None:
        def expect(_: None) -> None:
            shadow = live.shadow
            if self.refused:
                assert count > shadow.recorded, f"{shadow.recorded} steps were recorded, but {count} cannot be rolled back"
                return
            if count <= len(shadow.history) or shadow.lossless:
                live.shadow = shadow.cropped(count)
                return
            # tokens of a later turn that evicted nothing may go; the oracle cannot be shortened over the turn before
            assert all(oracle.turn for oracle in shadow.oracles), "rolled back over a prompt that was evicted from"
            live.cache.reset()
            live.shadow = Shadow(self.chosen)

        def act() -> None:
            self.refused = False
            try:
                live.cache.crop(-count)
            except KVPatchError:
                self.refused = True

        if count:
            self.do("crop", [live], act, expect, faults.CROP, fault)

    # ---- rows ----

    @rule(at=at_any, kind=st.integers(0, 2), picks=st.lists(st.integers(0, 5), min_size=1, max_size=3), fault=perhaps)
    def rows(self, at: int, kind: int, picks: list[int], fault: Throw | None) -> None:
        live = self.live(at)
        if not live.rows:
            return
        if kind == 0:
            picks = [picks[row % len(picks)] % live.rows for row in range(live.rows)]
        elif kind == 1:
            picks = [pick % live.rows for pick in picks]
        else:
            repeats = 2 if live.rows < 3 else 1
            picks = [row for row in range(live.rows) for _ in range(repeats)]
        deeds = (
            lambda: live.cache.reorder_cache(torch.tensor(picks)),
            lambda: live.cache.batch_select_indices(torch.tensor(picks)),
            lambda: live.cache.batch_repeat_interleave(repeats),
        )
        name = ("reorder", "select", "repeat")[kind]
        self.do(name, [live], deeds[kind], lambda _: live.shadow.select(picks), faults.ROWS, fault)

    @rule(at=at_any, other=at_any, ahead=st.integers(0, 2), consume=st.booleans(), fault=perhaps)
    def join(self, at: int, other: int, ahead: int, consume: bool, fault: Throw | None) -> None:
        """A cache and another one, or a new one with a text of its own, become one."""
        live, second = self.live(at), self.live(other)
        if not live.rows or live.shadow.chosen != self.chosen:
            return
        if second is live or not second.rows or second.shadow.chosen != self.chosen:
            second = Live(self.patch.new_cache(), Shadow(self.chosen))
            self.read(second, 2 + other % 4, 1, (0,), 1, None)
            for _ in range(ahead):
                self.step(second, None)
        both = [live, second]
        if live.rows + second.rows > 4:
            return
        sources = [EvictingCache.clone(one.cache) if one.shadow.recorded and not consume else one.cache for one in both]

        def expect(cache: EvictingCache) -> None:
            joined = Shadow(self.chosen)
            for one in both:
                part = one.shadow.fork()
                joined.oracles, joined.texts = joined.oracles + part.oracles, joined.texts + part.texts
                joined.padded |= part.padded
                joined.recording |= part.recording
            joined.joined, joined.columns = True, joined.longest
            if consume:
                for one in both:
                    one.shadow = Shadow(self.chosen)
            self.lives = [*[one for one in self.lives if one is not live][-2:], Live(cache, joined)]

        name = "join, consuming" if consume else "join"
        self.do(name, both, lambda: EvictingCache.concatenate(sources, consume=consume), expect, faults.JOIN, fault)

    # ---- copies ----

    @rule(at=at_any, original=st.booleans(), fault=perhaps)
    def clone(self, at: int, original: bool, fault: Throw | None) -> None:
        """A twin; and going on with either."""
        live = self.live(at)

        def expect(cache: EvictingCache) -> None:
            twin = Live(cache, live.shadow.fork())
            self.lives = [*[one for one in self.lives if one is not live][-1:], live, twin][:: 1 if original else -1]

        self.do("clone", [live], live.cache.clone, expect, faults.CLONE, fault)

    @rule(at=at_any, saving=st.booleans(), fault=perhaps)
    def save(self, at: int, saving: bool, fault: Throw | None) -> None:
        live = self.live(at)
        if not live.rows:
            return
        self.path.unlink(missing_ok=True)

        def read(cache: EvictingCache) -> None:
            shadow = live.shadow.fork()
            shadow.recording, shadow.recorded = False, 0
            check_cache(cache, shadow)
            live.cache, live.shadow = cache, shadow

        def write() -> None:
            self.patch.save_cache(live.cache, self.path)

        whole = self.do("save", [live], write, lambda _: None, faults.SAVE, fault if saving else None)
        if whole and live.shadow.chosen == self.chosen:
            self.do("load", [live], lambda: self.patch.load_cache(self.path), read, faults.LOAD, None if saving else fault)
        elif self.usable(lambda: self.patch.load_cache(self.path)):  # of other settings, or interrupted where all was done
            check_cache(self.patch.load_cache(self.path), live.shadow)

    @rule(at=at_any)
    def reset(self, at: int) -> None:
        live = self.live(at)
        recording = live.shadow.recording

        def expect(_: None) -> None:
            live.shadow = Shadow(live.shadow.chosen)
            live.shadow.recording = recording
            assert live.cache.get_seq_length() == 0 and live.cache.nbytes == 0

        self.do("reset", [live], live.cache.reset, expect, faults.PASS, None)

    @rule()
    def new(self) -> None:
        self.add()

    @rule(at=at_any)
    def look(self, at: int) -> None:
        """What only reads changes nothing."""
        live = self.live(at)
        if live.rows:
            assert str(Report.of(live.cache))
            check_cache(live.cache, live.shadow)

    @rule(fault=perhaps)
    def no_cache(self, fault: Throw | None) -> None:
        """A pass that keeps none runs the model's own code, unless blocks are to be evicted from."""

        def expect(got: torch.Tensor) -> None:
            if self.chosen.block is None:
                assert torch.equal(got, self.said)
            else:
                scratch = Shadow(self.chosen)
                check_logits(got[0], scratch.read([[PLAIN[0].tolist()]], PLAIN.shape[1])[0], scratch, 0)

        self.do("no cache", [], lambda: self.model(PLAIN, use_cache=False).logits, expect, faults.PASS, fault)

    # ---- blocks ----

    @rule(other=st.none() | chosen_settings(), raising=st.sampled_from((None, Fault, KeyboardInterrupt)), fault=perhaps)
    def leave_and_enter(self, other: Chosen | None, raising: type[BaseException] | None, fault: Throw | None) -> None:
        """Out of the block and into another; a cache of the first one goes on as it began, or is refused."""
        COUNTS["leave and enter"] += 1
        self.leave(None if raising is None else raising())
        for live in self.lives:
            if live.rows:
                ids = self.tokens(live.rows, 1)
                assert not self.usable(lambda: self.model(ids, past_key_values=live.cache))  # noqa: B023
                check_cache(live.cache, live.shadow)
        chosen = self.chosen
        if other is not None:
            chosen = other.on(chosen.name)
        self.enter(chosen, fault)
        for live in list(self.lives):
            if live.rows:
                twin, ids = live.shadow.fork(), self.tokens(live.rows, 1)
                if not self.usable(lambda: self.compare_step(live.cache.clone(), twin, ids)):  # noqa: B023
                    assert chosen != live.shadow.chosen, "settings as before"
                    self.lives.remove(live)
            elif live.shadow.chosen != chosen:
                self.lives.remove(live)
        if not self.lives:
            self.add()
