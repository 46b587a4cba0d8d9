"""`kvpatch serve` gives 20 prompts, and the turns of a conversation, the tokens of generate() under the same patch."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import kvpatch
from kvpatch.cli.loading import Source
from tests.helpers.marks import batches
from tests.helpers.served import serving

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("no_gradients"), batches]
WORDS = (Path(__file__).parents[2] / "tools" / "evidence" / "texts" / "pages.txt").read_text(encoding="utf-8").split()
PROMPTS = [f"{' '.join(WORDS[40 * i : 40 * i + 8 + 5 * i])}\n\nWhat is this about?" for i in range(20)]
NEW = 12


@pytest.fixture(scope="module")
def source(real_name):
    return Source(real_name, "float32", "cpu")


def generate(model, tokenizer, messages, cache=None):
    """What generate() gives, greedily, as text."""
    ids = torch.tensor([tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True).input_ids])
    given = {"max_new_tokens": NEW, "do_sample": False, "past_key_values": cache}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def ask(client, source, messages):
    return client.chat.completions.create(model=source.name, messages=messages, max_tokens=NEW, temperature=0.0)


@pytest.mark.parametrize("k", [pytest.param(1.0, marks=pytest.mark.wide), 64])
def test_twenty_prompts(source, k):
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    with serving(source, k, max_batch_tokens=2048) as (client, _, _), ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda one: ask(client, source, one).choices[0].message.content, chats))
    model, tokenizer = source.model(), source.tokenizer()
    with kvpatch.patched(model, "h2o", k):
        assert found == [generate(model, tokenizer, one) for one in chats]


def test_a_conversation(source):
    from kvpatch.serving.conversations import Conversations

    model, tokenizer = source.model(), source.tokenizer()
    with serving(source, 64, keeping=Conversations(1 << 30)) as (client, _, _), kvpatch.patched(model, "h2o", 64) as patch:
        cache, messages, before = patch.new_cache(), [], 0
        for question in (PROMPTS[9], "Say it in other words.", "And in one word?"):
            messages.append({"role": "user", "content": question})
            found = ask(client, source, messages)
            said = found.choices[0].message.content
            assert said == generate(model, tokenizer, messages, cache)
            assert found.usage.prompt_tokens_details.cached_tokens == before
            before = found.usage.total_tokens - 1
            messages.append({"role": "assistant", "content": said})
