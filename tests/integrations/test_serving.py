"""The examples of serving, run in process."""

import torch

import kvpatch
from examples import continuous_batching
from kvpatch.cli.loading import MODELS, load_model, load_tokenizer


def test_continuous_batching(capsys):
    """Every request gets the tokens that generate() gives it alone, under the same patch, unless two tie."""
    found = continuous_batching.main(["--rows", "3"])
    model, requests, memory = found["model"], found["requests"], found["memory"]
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.5):
        for one in requests:
            given = {"max_new_tokens": one.wanted, "do_sample": False, "pad_token_id": 0}
            given |= {"return_dict_in_generate": True, "output_logits": True}
            alone = model.generate(one.ids_1T, attention_mask=torch.ones_like(one.ids_1T), **given)
            for token, logits_1V in zip(one.tokens, alone.logits, strict=True):
                assert logits_1V[0, token] > logits_1V.max() - 0.01  # two steps of float16 at the size of these logits
                if token != logits_1V.argmax():
                    break  # what follows is another text
    assert len(memory) < sum(one.steps for one in requests) / 2, "rows ran together"
    assert {rows for rows, _ in memory} <= {1, 2, 3} and (3 in {rows for rows, _ in memory})
    config = model.config
    per_slot = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    budgets = sorted((one.ids_1T.shape[1] // 2 + 1 for one in requests), reverse=True)
    assert max(held for _, held in memory) <= per_slot * sum(budgets[:3]), "no more than the three longest requests' budgets"
    printed = capsys.readouterr().out
    assert "request 0:  180 tokens read,  12 written,  11 steps in the batch" in printed
    assert f"{len(memory)} steps for {sum(one.steps for one in requests)} tokens" in printed


def test_requests_end_early_and_alone():
    """A text that ends at once leaves no row behind; one row at a time is a batch too."""
    name = str(MODELS / "llama-python")
    model = load_model(name)
    requests = continuous_batching.requests_of(load_tokenizer(name), model.device)[2:4]
    again = [continuous_batching.Request(one.ids_1T, one.wanted) for one in requests]
    with kvpatch.patched(model, "adakv", 0.5) as patch:
        memory = continuous_batching.serve(model, patch, requests, 1, None)
        assert len(memory) == sum(one.steps for one in requests) == sum(one.wanted - 1 for one in requests)
        end = requests[0].tokens[0]
        continuous_batching.serve(model, patch, again, 4, end)
    for one, whole in zip(again, requests, strict=True):
        cut = whole.tokens.index(end) + 1 if end in whole.tokens else len(whole.tokens)
        assert one.tokens == whole.tokens[:cut]
    assert again[0].steps == 0
