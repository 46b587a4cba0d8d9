"""Tokens in place of others, in every family: as the unpatched model reads them behind the same beginning."""

import pytest
import torch

import kvpatch
from kvpatch.arch.upstream import cache_argument, cache_of
from kvpatch.errors import KVPatchError
from kvpatch.policies.served import why_not
from tests.helpers import tiny, tiny_families
from tests.helpers.tiny import prompt
from tests.helpers.tiny_families import BY_COLUMNS, FAMILIES, OWN

START, STOP, N = 1, 4, 6  # within the windows of all families
UNSPLICED = ("xglm", "mvp", "rembert", "megatron-bert")  # no float64, or a cache of two parts


def splice(model, ids, new):
    """Logits of the last token over the cache of the old text, whose span is that of the new one."""
    spliced = cache_of(model(ids[:, :-1], use_cache=True))
    other = cache_of(model(torch.cat([ids[:, :START], new], 1), use_cache=True))
    for layer, source in zip(spliced.layers, other.layers, strict=True):
        for name in ("keys", "values"):
            getattr(layer, name)[:, :, START:STOP] = getattr(source, name)[:, :, START:STOP]
    return model(ids[:, -1:], **{cache_argument(type(model).forward): spliced}).logits


@pytest.mark.parametrize("name", [*FAMILIES, *(one for one in OWN if one not in UNSPLICED), *tiny.FIVE, "bloom", "falcon"])
def test_new_tokens_are_read_at_the_places_of_others(name):
    model = (tiny_families if name in {**FAMILIES, **OWN} else tiny).make(name, dtype=torch.float64)
    ids, new = prompt(2, N), prompt(2, STOP - START, seed=7)
    with torch.no_grad():
        expected = splice(model, ids, new)
        with kvpatch.patched(model, "h2o", 1.0) as patch:
            cache = patch.new_cache()
            model(ids[:, :-1], past_key_values=cache)
            if why_not("replace", cache.settings.list_features(positions_fixed=patch._state.why_positions_fixed)) is not None:
                with pytest.raises(KVPatchError, match=r"^replace\(\)"):
                    patch.replace(cache, (START, STOP), new)
                return
            patch.replace(cache, (START, STOP), new)
            cache.check_invariants()
            got = model(ids[:, -1:], past_key_values=cache).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_families_that_cannot_be_told_positions_are_refused():
    refused = []
    for name in FAMILIES:
        with kvpatch.patched(tiny_families.make(name), "h2o", 1.0) as patch:
            state = patch._state
            if why_not("replace", state.settings.list_features(positions_fixed=state.why_positions_fixed)) is not None:
                refused.append(name)
    assert refused == list(BY_COLUMNS)
