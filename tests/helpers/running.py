"""Runs that many tests share: a prompt and a continuation, under a policy."""

import torch

import kvpatch
from tests.helpers.comparing import combined
from tests.helpers.tiny import force, prompt

N = 20  # tokens of the prompt of `read`
SEVERAL = ("random", "streaming_llm", "scissorhands", "tova", "roco", "keyformer")
RAGGED = {
    "adakv": kvpatch.get_policy("adakv").with_options(window=5, kernel=3),
    "critical_adakv": kvpatch.get_policy("critical_adakv").with_options(window=5, kernel=3),
    "adaptive_roco": combined("roco", ("adaptive",)).with_options(recent=2, protected=0.2),
    "critical_adaptive_keyformer": combined("keyformer", ("adaptive", "critical")),
    "global_topk_snapkv": combined("snapkv", ("global_topk",)).with_options(window=5, kernel=3),
    "refit_kvzip": combined("kvzip", ("refit",)).with_options(chunk=11, floor=0.2, queries=9),
    "critical_global_topk_roco": combined("roco", ("global_topk", "critical")).with_options(recent=2, protected=0.2),
}


def kept(cache):
    """Per layer, row and head the sorted positions held."""
    return [
        [[sorted(p for p in head if p >= 0) for head in row] for row in cache.positions(layer).tolist()]
        for layer in range(len(cache.layers))
    ]


def run(model, ids, fed, policy, k, mask=None, **options):
    """Logits after a prompt and of each token fed behind it, and the cache."""
    with kvpatch.patched(model, policy, k, **options):
        logits, cache = force(model, ids, fed, mask)
    return logits, cache


def go_on(model, fed, cache):
    """Logits of tokens that are fed one by one, and the cache."""
    with torch.no_grad():
        steps = [model(fed[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in range(fed.shape[1])]
    return torch.cat(steps, 1), cache


def read(model, policy, k, steps=0, record=False, room=None, **options):
    """A cache that has read a prompt of N tokens and so many more, and its patch, which is gone."""
    with kvpatch.patched(model, policy, k, **options) as handle:
        cache = handle.new_cache(**({} if room is None else {"room": room}))
        if record:
            cache.activate_past_recording()
        model(prompt(2, N), past_key_values=cache)
        for t in range(steps):
            model(prompt(2, 9, seed=3)[:, t : t + 1], past_key_values=cache)
    return cache


def steps(model, policy, ids, fed, *, backend, compiled=False):
    """Logits [T,B,V] of tokens that are fed one by one behind a prompt, compiled or not, and positions of the first layer."""
    with torch.no_grad(), kvpatch.patched(model, policy, 0.4, backend=backend) as patch:
        cache = patch.new_cache(room=fed.shape[1])
        model(ids, past_key_values=cache)
        step = torch.compile(model.forward, fullgraph=True, backend="aot_eager") if compiled else model
        outs = [step(fed[:, t : t + 1], past_key_values=cache).logits[:, -1] for t in range(fed.shape[1])]
    return torch.stack(outs), [cache.positions(0).sort(-1).values]


def logits_of(model, ids, mask=None, **kwargs):
    """Logits of one forward, with positions that leave padding out."""
    if mask is not None and model.config.model_type != "mpt":
        kwargs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return model(ids, attention_mask=mask, **kwargs).logits


def uneven(cache):
    """The cache, of which some layer is ragged."""
    assert any(not layer.kv.appends for layer in cache.layers), "no layer is ragged: the test shows nothing"
    return cache


def feed(model, patch, *passes):
    """A cache that these passes went through."""
    cache = patch.new_cache()
    for ids in passes:
        model(ids, past_key_values=cache)
    return cache


def no_dropout(model):
    """The model, with every dropout at 0."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model
