"""Prompts of equal length that begin in one pass of vLLM are read as rows of one cache, and give what each gives alone."""

from types import SimpleNamespace

import pytest
import torch

from kvpatch.arch.adapter import Adapter
from kvpatch.arch.bound import BoundAdapter
from kvpatch.attention.attend import attend
from kvpatch.cache.settings import CacheSettings
from kvpatch.policies import get_policy
from kvpatch.policies.budgets import Budget
from kvpatch.serving.vllm.requests import Requests, Scheduled
from tests.helpers.counting import HostWaits

ON_A_CPU = ("cache/notices", "backends/torch_backend")  # which read values there alone
pytestmark = pytest.mark.usefixtures("no_gradients")
LAYERS, H, G, D, K = 3, 2, 2, 8, 12
PAGES = {32: 1, 4: 8}  # slots of a page -> pages of a request, for K tokens and what is generated


class Plain(Adapter):
    """An attention of scaled products."""

    name, classes = "plain", ()

    def scale(self, attn):
        return attn.factor


class Engine:
    """Passes of requests, of which each has random queries, keys and values of its own; `outs` of each, column by column.

    own: the k of requests that have one of their own.
    """

    def __init__(self, policy, slots, k=K, own=None, **options):
        self.own, budget = own or {}, Budget.parse(k, n_layers=LAYERS, bytes_per_token=1)
        settings = CacheSettings(get_policy(policy).with_options(**options), budget)
        self.requests, self.slots = Requests(settings, torch.device("cpu")), slots
        self.pools = [torch.full((2, 64 * H, slots, D), torch.nan, dtype=torch.float64) for _ in range(LAYERS)]
        self.bound = BoundAdapter(Plain(), SimpleNamespace(factor=D**-0.5), H)
        self.outs, self.calls = {}, 0

    def core(self, layer):
        def run(cache, q, k, v):
            self.calls += layer == 0
            return attend(cache, layer, q, k, v, self.bound)

        return run

    def step(self, *spans):
        """One pass of requests (name, tokens before, columns, is a prompt's)."""
        scheduled, column = [], 0
        for name, past, columns, prompt in spans:
            first = 1 + 8 * name
            pages = [*range(first, first + PAGES[self.slots])] if past == 0 else [first]
            scheduled.append(Scheduled(pages, column, columns, past, prompt, self.own.get(name, 0) if past == 0 else 0))
            column += columns
        self.calls = 0
        for layer in range(LAYERS):
            self.requests.newest_pass[layer] = scheduled
            if layer == 0:
                packed = self.requests.begin(scheduled)
            self.requests.pools[layer] = self.pools[layer]
            parts = [text(name, layer)[:, past : past + columns] for name, past, columns, _ in spans]
            q, k, v = torch.cat(parts, 1)[None].split([H * G, H, H], 1)
            out = packed.attend(self.core(layer), q, k, v)[0]
            for own, (name, past, *_) in zip(out.split([columns for _, _, columns, _ in spans]), spans, strict=True):
                self.outs.setdefault((name, past), []).append(own)

    def run(self, passes):
        for spans in passes:
            self.step(*spans)
        return self

    def kept(self, name):
        """The positions that each head of each layer holds."""
        rows = self.requests.rows[self.own.get(name, 0)].gather([str(1 + 8 * name)])
        heads = (head for layer in range(LAYERS) for head in rows.cache.positions(layer)[0].tolist())
        return [sorted(position for position in head if position >= 0) for head in heads]


def text(name, layer):
    draw = torch.Generator().manual_seed(100 * name + layer)
    return torch.randn(H * (G + 2), 80, D, generator=draw, dtype=torch.float64)


LENGTHS = {0: 30, 1: 7, 2: 30, 3: 30, 4: 7, 5: 1, 6: 1}
READ = [(name, 0, n, True) for name, n in LENGTHS.items()]


def decode(t, *names):
    return [(name, LENGTHS[name] + t, 1, False) for name in names]


PASSES = {
    "all go on": [READ, *(decode(t, *LENGTHS) for t in range(9))],
    "some wait": [READ, decode(0, 0, 1, 4), decode(0, 2), decode(0, 3, 5), decode(1, *LENGTHS), decode(2, 3, 0)],
    "some end": [
        READ, decode(0, *LENGTHS), decode(1, 0, 3), [*decode(2, 0), (2, 0, 30, True), (1, 0, 30, True)],
        [*decode(3, 0), (2, 30, 1, False), (1, 30, 1, False)],
    ],
    "one ends before it decodes": [READ, [(3, 0, 7, True), (1, 0, 7, True)], [*decode(0, 0, 2), (3, 7, 1, False)]],
    "one is read in pieces": [
        [(0, 0, 20, True), (2, 0, 20, True), (3, 0, 20, True)], [(0, 20, 1, False), (2, 20, 25, True)],
        [(0, 21, 1, False), (2, 45, 1, False), (3, 20, 1, False)], [(3, 21, 1, False), (2, 46, 1, False)],
    ],
}  # fmt: skip


def alone(passes, name):
    """The passes of one request, without the others'."""
    return [own for spans in passes if (own := [span for span in spans if span[0] == name])]


@pytest.mark.parametrize("slots", PAGES)
@pytest.mark.parametrize("case", PASSES)
@pytest.mark.parametrize(
    ("policy", "options"),
    [("h2o", {}), ("snapkv", {"window": 4}), ("keyformer", {"generation_length": 9}), ("roco", {}), ("tova", {})],
    ids=lambda given: given if isinstance(given, str) else "-",
)
def test_each_prompt_gives_what_it_gives_alone(policy, options, case, slots):
    passes = PASSES[case]
    together = Engine(policy, slots, **options).run(passes)
    last = {name for name, *_ in passes[-1]}
    for name in {span[0] for spans in passes for span in spans}:
        one = Engine(policy, slots, **options).run(alone(passes, name))
        for at, outs in one.outs.items():
            for mine, theirs in zip(outs, together.outs[at], strict=True):
                torch.testing.assert_close(theirs, mine, atol=1e-9, rtol=0)
        if name in last:
            assert one.kept(name) == together.kept(name), name


@pytest.mark.parametrize("slots", PAGES)
@pytest.mark.parametrize("case", PASSES)
@pytest.mark.parametrize(("policy", "options"), [("h2o", {}), ("snapkv", {"window": 4})], ids=["h2o", "snapkv"])
def test_requests_with_a_k_of_their_own(policy, options, case, slots):
    """Each gives what it gives alone under settings with that k, beside requests that have another, or the server's."""
    passes, own = PASSES[case], {0: 6, 1: 15, 3: 6, 5: 20}
    together = Engine(policy, slots, own=own, **options).run(passes)
    last = {name for name, *_ in passes[-1]}
    for name in {span[0] for spans in passes for span in spans}:
        one = Engine(policy, slots, own.get(name, K), **options).run(alone(passes, name))
        for at, outs in one.outs.items():
            for mine, theirs in zip(outs, together.outs[at], strict=True):
                torch.testing.assert_close(theirs, mine, atol=1e-9, rtol=0)
        if name in last:
            assert one.kept(name) == together.kept(name), name


def test_prompts_of_one_length_are_one_part():
    """Seven prompts of three lengths: three calls of a layer, not seven; rows lie as their pages do, and stay together."""
    engine = Engine("h2o", 32)
    engine.step(*reversed(READ))
    assert engine.calls == 3
    engine.step(*decode(0, 0, 2, 3))
    assert engine.calls == 1 and [part.names for part in engine.requests.rows[0].parts] == [["1", "17", "25"]]
    engine.step(*decode(0, 1, 4, 5, 6), *decode(1, 0, 2, 3))
    assert engine.calls == 1 and len(engine.requests.rows[0].parts) == 1 and not engine.requests.reading


def test_a_pass_of_prompts_waits_as_often_for_many_as_for_one():
    found = []
    for names in ((0,), (0, 2, 3)):
        engine = Engine("h2o", 32)
        with HostWaits() as waits:
            engine.step(*[(name, 0, 30, True) for name in names])
        found.append({what: count for what, count in waits.at.items() if not what.startswith(ON_A_CPU)})
    assert found[0] == found[1]
