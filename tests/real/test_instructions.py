"""protect="system" on a pretrained model: no policy drops an instruction of the system prompt that the full cache obeys."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvpatch
from kvpatch.cache.messages import Messages
from kvpatch.policies.uses import USES
from tests.real.test_real_model import UNCALIBRATED
from tools.evidence.chat import Frame
from tools.evidence.measure import judge, read_ids, reuse
from tools.evidence.samples import Probe
from tools.evidence.tasks import instructions
from tools.evidence.texts import group_parts, sentences

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("no_gradients")]
K, TOKENS = 0.2, 240  # of prose behind the instruction
SHOP = "You are the assistant of a shop."
# nats a token: SmolLM2's are 1.6 under the full cache, at most 1.1 protected, and 12 or more where it is dropped
CLOSE, FAR = 0.5, 5.0


@dataclass
class Told:
    """A prompt that begins with an instruction, read by the unpatched model.

    system: tokens of the system message. probe: a request that the instruction is for, and the answer that obeys it. known:
    what is the same under every policy. nats: of the answer, under the full cache.
    """

    model: Any
    ids: tuple[int, ...]
    system: int
    probe: Probe
    known: dict
    nats: float


@pytest.fixture(scope="module")
def told(real_name):
    model = AutoModelForCausalLM.from_pretrained(real_name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(real_name)
    topic, words = instructions.write_system(0)[0][0]
    system = f"{SHOP} {instructions.RULE.format(topic=topic, words=words)}"
    frame = Frame(tokenizer, system)
    message = tokenizer.apply_chat_template([{"role": "system", "content": system}], tokenize=False)
    text = frame.encode("Here is a text for later.\n\n" + " ".join(group_parts(tokenizer, sentences(), TOKENS, " ")[0]))
    ask, lead = (one.format(topic=topic) for one in (instructions.ASK, instructions.LEAD))
    probe = Probe("instruction", frame.encode(ask) + frame.after + frame.encode(lead), frame.encode(f" {words}"))
    with torch.no_grad():
        known: dict = {}
        with reuse(known, model.base_model):
            _, cache = read_ids(model, frame.before + text, None)
        _, untold = read_ids(model, Frame(tokenizer, SHOP).before + text, None)
        nats, unknown = (judge(model, [probe], one, [None])[0][0].nats for one in (cache, untold))
    assert nats + FAR < unknown, "the full cache obeys it"
    return Told(model, frame.before + text, len(frame.encode(message)), probe, known, nats)


def measure(told, policy, **protect):
    """Nats of the answer that obeys, once a policy has evicted."""
    with kvpatch.patched(told.model, policy, K, **protect) as patch:
        cache = patch.new_cache()
        cache.messages = Messages(["system", "user"], [0, told.system])
        with reuse(told.known, told.model.base_model):
            read_ids(told.model, told.ids, cache)
        assert int(cache.held(0).min()) < len(told.ids) / 2 or kvpatch.get_policy(policy).schedule == "decode"
        return judge(told.model, [told.probe], cache, [None])[0][0].nats


EVICTING = [name for name in UNCALIBRATED if name != "full"]
ADVISED = {name for use in USES for name in (use.policy, *use.also)}


@pytest.mark.parametrize(
    "policy", [name if name in ADVISED else pytest.param(name, marks=pytest.mark.wide) for name in EVICTING]
)
def test_no_policy_drops_a_protected_instruction(told, policy):
    assert measure(told, policy, protect="system") < told.nats + CLOSE


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "streaming_llm", "random"])
def test_policies_drop_it_without_protection(told, policy):
    assert measure(told, policy) > told.nats + FAR
