"""What every rule of the state machine (stateful.py) does: a call on the library, with or without an exception thrown inside
it, and then the comparison of every cache with its oracles."""

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis.stateful import RuleBasedStateMachine

from kvpatch import EvictingCache, KVPatchError
from tests.helpers.tiny import prompt, snapshot
from tests.robustness import stateful_faults as faults
from tests.robustness.stateful_faults import Fault, Throw, name_of, thrown
from tests.robustness.stateful_oracle import PLAIN, Chosen, Shadow, check_cache, check_logits, subject

COUNTS: Counter[str] = Counter()  # what was done, for tools/reliability/soak.py
FOLDER = tempfile.TemporaryDirectory(prefix="kvpatch-stateful-")


class Live:
    """A cache, and what it should be."""

    def __init__(self, cache: EvictingCache, shadow: Shadow) -> None:
        self.cache, self.shadow = cache, shadow

    @property
    def rows(self) -> int:
        return len(self.shadow.oracles)


class Base(RuleBasedStateMachine):
    """Without rules."""

    def __init__(self) -> None:
        super().__init__()
        self.lives: list[Live] = []
        self.block: Any = None
        self.seed = 0
        self.path = Path(FOLDER.name) / "cache.safetensors"
        torch.set_grad_enabled(False)
        COUNTS["sequences"] += 1

    # ---- a block ----

    def choose(self, chosen: Chosen) -> None:
        self.chosen = chosen
        self.model, _, self.before, self.said = subject(chosen.name)

    def enter(self, chosen: Chosen, fault: Throw | None) -> None:
        """Enter a block of these settings, at the second try where a fault is thrown at the first."""
        if fault is not None:
            hop = faults.ENTER[fault.where % len(faults.ENTER)]
            with thrown(hop, fault) as fired:
                try:
                    block = chosen.patched(self.model)
                    block.__enter__()
                except (Fault, KeyboardInterrupt):
                    COUNTS["fault in " + fired[0]] += 1
                    self.check_unpatched()
                else:
                    assert not fired, "swallowed"
                    block.__exit__(None, None, None)
        self.chosen, self.block = chosen, chosen.patched(self.model)
        self.patch = self.block.__enter__()

    def leave(self, error: BaseException | None) -> None:
        block, self.block = self.block, None
        try:
            block.__exit__(None if error is None else type(error), error, None)
        except (Fault, KeyboardInterrupt):
            if error is None:
                raise
        self.check_unpatched()

    def check_unpatched(self) -> None:
        now = snapshot(self.model)
        changed = {key for key in {*now, *self.before} if key not in now or now[key] != self.before.get(key)}
        same = torch.equal(self.model(PLAIN, use_cache=False).logits, self.said)
        if changed or not same:
            subject.cache_clear()
        assert not changed, f"the model's attributes and hooks are not as before: {sorted(changed)}"
        assert same, "logits are not bit for bit as before"

    def teardown(self) -> None:
        if self.block is not None:
            self.leave(None)
        torch.set_grad_enabled(True)

    # ---- what every rule does ----

    def live(self, at: int) -> Live:
        return self.lives[at % len(self.lives)]

    def add(self) -> Live:
        """A new cache, in place of the oldest where there are three."""
        self.lives = [*self.lives[-2:], Live(self.patch.new_cache(), Shadow(self.chosen))]
        return self.lives[-1]

    def do(
        self,
        name: str,
        lives: list[Live],
        act: Callable[[], Any],
        expect: Callable[[Any], None],
        hops: list[tuple[Any, str]],
        fault: Throw | None,
    ) -> bool:
        """`act` on the library, then `expect` what came of it; or, where a fault was thrown in `act`, that nothing did."""
        COUNTS[name] += 1
        if fault is None:
            expect(act())
        else:
            hop = hops[fault.where % len(hops)]
            with thrown(hop, fault) as fired:
                try:
                    result = act()
                except (Fault, KeyboardInterrupt):
                    pass
                else:
                    assert not fired, f"{fired} was swallowed"
            if fired:
                COUNTS["faults"] += 1
                COUNTS["fault in " + name_of(hop)] += 1
                if fault.after and hops is faults.PASS and lives and self.advanced(lives[0]):
                    COUNTS["as after the call, after a fault"] += 1
                    expect(None)  # what came behind the last layer is not the cache's affair
                else:
                    for live in lives:
                        self.survey(live, name)
                    return False
            else:
                expect(result)
        for live in self.lives:
            if not live.cache.unfinished:
                live.cache.check_invariants()
            if live.shadow.oracles:
                compared, skipped = check_cache(live.cache, live.shadow)
                COUNTS["rows compared"] += compared
                COUNTS["rows too close to call"] += skipped
        if hops in (faults.ROWS, faults.CROP, faults.LOAD, faults.JOIN):  # what was moved shows in the next choice
            self.probe(self.lives[-1] if hops is faults.JOIN else lives[0])
        return True

    def probe(self, live: Live) -> None:
        """What a token more would give, on a copy."""
        if live.rows:
            cache, shadow = live.cache.clone(), live.shadow.fork()
            self.compare_step(cache, shadow, prompt(live.rows, 1, seed=78))
            check_cache(cache, shadow)

    @staticmethod
    def advanced(live: Live) -> bool:
        """Whether a pass that raised had gone through all layers."""
        cache = live.cache
        return not cache.unfinished and cache.plans.prompt_len is None and cache.get_seq_length() > live.shadow.columns

    def survey(self, live: Live, name: str) -> None:
        """After a fault a cache is as it was before the call, or raises our own error wherever it is used."""
        if name == "join, consuming" and not live.cache.get_seq_length() and not live.cache.unfinished:
            live.shadow = Shadow(live.shadow.chosen)  # emptied, as was asked
        if not live.shadow.oracles:
            seen_B = live.cache.seen_B
            pieces = live.cache.plans.prompt_len is not None  # more may be tokens generated behind them, which some refuse
            ids = prompt(1 if seen_B is None else len(seen_B), 1 if pieces else 3)
            usable = self.usable(lambda: self.forward(live.cache.clone(), ids))
            if usable and name == "prompt in pieces":  # it has those before the fault
                live.cache.reset()
            if usable:
                assert live.cache.get_seq_length() == 0, "tokens of a prompt that was not read"
        else:
            ids = prompt(live.rows, 1, seed=77)
            twin = live.shadow.fork()
            usable = self.usable(lambda: self.compare_step(live.cache.clone(), twin, ids))
            if usable:
                check_cache(live.cache, live.shadow)
        if usable:
            COUNTS["as before after a fault"] += 1
            return
        COUNTS["broken by a fault"] += 1
        rows = max(live.rows, 1)
        uses: dict[str, Callable[[], Any]] = {
            "a forward": lambda: self.forward(live.cache, prompt(rows, 1)),
            "save": lambda: self.patch.save_cache(live.cache, self.path),
            "concatenate": lambda: EvictingCache.concatenate([live.cache]),
        }
        for use, call in uses.items():
            assert not self.usable(call), f"broken by a fault in {name}, but {use} takes it"
        live.cache.reset()
        live.shadow = Shadow(live.shadow.chosen)

    @staticmethod
    def usable(call: Callable[[], Any]) -> bool:
        try:
            call()
        except KVPatchError:
            return False
        return True

    # ---- passes ----

    def forward(self, cache: EvictingCache, ids: torch.Tensor, shadow: Shadow | None = None, mask: Any = None) -> torch.Tensor:
        """A pass, with position_ids where a padded batch needs them."""
        more: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
        padded = mask is not None or (shadow is not None and shadow.padded)
        if padded and not cache.rows.concatenated and self.chosen.name != "mpt":
            seen = 0 if cache.seen_B is None else cache.next_positions()
            count = torch.ones_like(ids) if mask is None else mask
            more["position_ids"] = (seen + count.cumsum(1) - 1).clamp(min=0)
        return self.model(ids, past_key_values=cache, use_cache=True, **more).logits

    def compare_step(self, cache: EvictingCache, shadow: Shadow, ids: torch.Tensor) -> None:
        got, want = self.forward(cache, ids, shadow)[:, -1], shadow.step(ids[:, 0].tolist())
        for row in range(len(ids)):
            check_logits(got[row], want[row], shadow, row)

    def tokens(self, B: int, n: int) -> torch.Tensor:
        self.seed += 1
        return prompt(B, n, seed=self.seed)

    def read(self, live: Live, n: int, B: int, pads: tuple[int, ...], parts: int, fault: Throw | None) -> bool:
        """A prompt of n columns, left-padded; in `parts` pieces, of which generate() would know the whole length."""
        shadow = live.shadow
        B = live.rows or B
        pads = tuple(min(pad, n - 1) for pad in (*pads, 0, 0, 0)[:B])
        if live.rows and live.cache.settings.by_columns:
            # padding behind a row's tokens counts, as in the unpatched model (test_k_one_is_the_unpatched_model.py); the oracle
            # counts tokens
            pads = (0,) * B
        ids = self.tokens(B, n)
        mask = (torch.arange(n)[None] >= torch.tensor(pads)[:, None]).long() if any(pads) else None
        size = -(-n // parts)
        cuts = [slice(start, min(start + size, n)) for start in range(0, n, size)]

        def act() -> torch.Tensor:
            live.cache.plans.prompt_len = n if len(cuts) > 1 else None
            masks = [None if mask is None else mask[:, cut] for cut in cuts]
            logits = [self.forward(live.cache, ids[:, cut], shadow, m) for cut, m in zip(cuts, masks, strict=True)]
            live.cache.plans.prompt_len = None
            return torch.cat(logits, 1)

        def expect(got: torch.Tensor | None) -> None:
            pieces = [[ids[row, cut].tolist()[max(pads[row] - cut.start, 0) :] for cut in cuts] for row in range(B)]
            want = shadow.read(pieces, n)
            shadow.padded |= mask is not None
            for row in range(0 if got is None else B):
                check_logits(got[row, pads[row] :], want[row], shadow, row)

        return self.do("prompt in pieces" if len(cuts) > 1 else "prompt", [live], act, expect, faults.PASS, fault)

    def step(self, live: Live, fault: Throw | None) -> bool:
        ids = self.tokens(live.rows, 1)
        return self.do(
            "token", [live], lambda: self.forward(live.cache, ids, live.shadow),
            lambda got: self.expect_step(live, got, ids), faults.PASS, fault,
        )  # fmt: skip

    def expect_step(self, live: Live, got: torch.Tensor | None, ids: torch.Tensor) -> None:
        live.shadow.begin_pass()
        for t in range(ids.shape[1]):
            want = live.shadow.step(ids[:, t].tolist(), ids.shape[1] > 1)
            for row in range(0 if got is None else live.rows):
                check_logits(got[row, t], want[row], live.shadow, row)
