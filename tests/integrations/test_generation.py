"""The examples of examples that generate: what they show is so."""

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.utils import logging

from examples import assisted, chat, compiled, decoding, embeddings, many_prompts, own_processor, pipeline, streaming

logging.disable_progress_bar()


def test_pipeline():
    shown = pipeline.main(k=0.5)
    assert shown["held"].unique().tolist() == [18, 19]
    assert shown["texts"] != shown["plain"], "half of the prompt is another text"
    assert pipeline.main(k=1.0)["texts"] == shown["plain"]


def test_chat_keeps_the_template_s_markers():
    shown = chat.main(k=48)
    text, held = shown["text"][0], shown["held"]
    assert held.unique().tolist() == [48]
    assert len(text) > 2 * 48
    written = {i for i, token in enumerate(text.tolist()) if token in shown["markers"]}
    assert len(written) >= 9
    for head in shown["positions"][0].tolist():
        assert written - {len(text) - 1} <= set(head), "the last token has not been read"


def test_chat_reads_what_the_template_makes_of_the_whole_conversation():
    shown = chat.main(k=1.0)
    assert shown["read"].count("# system") == 1 and shown["read"].count("# user") == 3
    assert shown["whole"].startswith(shown["read"]) and len(shown["whole"]) - len(shown["read"]) <= len("<eos>")


def test_chat_is_read_anew_where_the_template_changes_an_earlier_turn():
    """As templates do that drop the reasoning of earlier answers; here each message but the last loses its end."""
    shorter = chat.TEMPLATE.replace("message['content']", "(message['content'] if loop.last else message['content'][:3])")
    shown = chat.main(k=1.0, template=shorter)
    assert shown["read"].count("# system") == 1 and shown["read"].count("# user\nWri<eos>") == 1
    assert shown["read"].count("# user") == 3 and shown["positions"].max() < shown["text"].shape[1]


def test_streaming():
    shown = streaming.main(k=0.5)
    assert "".join(shown["thread"]) == "".join(shown["coroutine"]) == shown["text"]
    assert len([piece for piece in shown["thread"] if piece]) > 3, "it came in pieces"
    assert shown["held"].unique().tolist() == [shown["read"] // 2]


def test_decoding_under_a_budget_and_without():
    shown = decoding.main(k=0.5, new=6)
    assert {row["held"] for row in shown["results"].values()} == {shown["read"] // 2}
    assert not all(row["same"] for row in shown["results"].values())
    shown = decoding.main(k=1.0, new=6)
    assert [name for name, row in shown["results"].items() if not row["same"]] == []


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.17"), reason="transformers 5.15 fails on unpatched ones that stop early"
)
def test_assisted():
    shown = assisted.main(k=0.4, new=8)
    assert len(shown["difference"]) == 5
    assert max(shown["difference"].values()) < 5e-5
    assert int(shown["held"].max()) < 30


def test_many_prompts():
    shown = many_prompts.main(k=0.5)
    assert shown["alone"] == shown["together"]
    assert shown["held"] == shown["rows"]
    assert len(set(shown["rows"])) == 3, "each by its own length"


def test_embeddings():
    shown = embeddings.main(k=0.5)
    assert torch.equal(shown["logits"]["soft"], shown["logits"]["plain"])
    assert torch.equal(shown["logits"]["both"], shown["logits"]["plain"])
    assert shown["seen"] == shown["again"].shape[1] - 1
    assert int(shown["held"].max()) < shown["seen"] - 5


def test_own_processor():
    shown = own_processor.main(k=0.5)
    for name in ("greedy", "second"):
        assert len(shown[name]) == len(set(shown[name])) == 10, name
    assert shown["greedy"] != shown["second"]
    assert shown["held"].unique().tolist() == [shown["read"] // 2]


def test_compiled():
    shown = compiled.main(k=0.5, new=3, backend="eager")
    assert shown["difference"] < 1e-5
    assert torch.equal(shown["held"], shown["plain"])
    assert shown["held"].unique().tolist() == [14]
