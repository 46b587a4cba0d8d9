"""Law 11: whatever is done to a cache, each of its rows goes on as its text does in a cache of its own, however it is stored.

Rows come, go and move, caches are copied and saved, steps are taken back, later prompts are read.
"""

import pytest
import torch

import kvpatch
from kvpatch import Mass, Share, Threshold
from tests.helpers.comparing import SMALL_STEPS, combined
from tests.helpers.joined import Loop, do
from tests.helpers.running import RAGGED
from tests.helpers.tiny import make

DEEDS = (
    ("step", 2), ("add", 4), ("step", 1), ("reorder", 2), ("step", 1), ("save", 1), ("step", 3), ("crop", 3), ("step", 2),
    ("clone", 1), ("drop", 1), ("step", 2), ("repeat", 1), ("step", 3), ("turn", 4), ("step", 2),
)  # fmt: skip
ONE_PROMPT = tuple(deed for deed in DEEDS if deed[0] != "turn")
SETTINGS = {
    "share": ("h2o", Share(0.4), {"recent": 4}),
    "mass": ("roco", Mass(0.8, floor=2, ceiling=30), {"recent": 3, "protected": 2}),
    "threshold": ("tova", Threshold(0.02), {"recent": 4}),
    "table": ("h2o", [[6, 25], [1.0, 14]], {}),
    "every": ("h2o", 0.4, {"every": 4}),
    "every, critical": (combined("roco", ("critical",)), 9, {"every": 3, "recent": 2, "protected": 2}),
    "8 bits": ("h2o", 0.4, {"bits": 8}),
    "4 bits, ragged": (RAGGED["adakv"], 0.4, {"bits": 4}),
    "4 bits, all": ("full", 1.0, {"bits": 4}),
    "after the prompt": ("roco", 0.4, {"schedule": "prompt"}),
    "while decoding": ("h2o", 6, {"schedule": "decode"}),
    "shared": ("keyformer", 0.4, {"shared": True, "generation_length": 30}),
    "resampled": ("keyformer", 0.4, {"resample": True, "damping": 0.9, "generation_length": 30}),
    "renumbered": ("h2o", 0.4, {"positions": "renumbered"}),
    "block": ("h2o", 0.4, {"block": 5, "sinks": 2}),
    "heads and layers": (combined("roco", ("pyramid", "adaptive", "critical")), 0.4, {"protected": 0.2, "recent": 1}),
    "refitted": (combined("h2o", ("refit",)), 0.4, {"recent": 3, "queries": 9}),
    "refitted, 8 bits": (combined("expected_attention", ("refit",)), 0.4, {"future": 9, "bits": 8}),
    "refitted, 4 bits, ragged": (RAGGED["refit_kvzip"], 0.4, {"bits": 4}),
    **{name: (name, k, SMALL_STEPS[name]) for name, k in (("raas", 4), ("lazy", 5), ("r_kv", 9), ("vase", 9))},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_row_goes_on_as_alone(name, tmp_path):
    policy, k, options = SETTINGS[name]
    model = make("llama_gqa", dtype=torch.float64)
    with torch.no_grad(), kvpatch.patched(model, policy, k, **options) as patch:
        loop = Loop(model, patch)
        loop.add((40, 1), (23, 3))
        one_prompt = name in ("while decoding", *SMALL_STEPS) or name.startswith("refitted")  # which reads no joined rows again
        for deed, number in ONE_PROMPT if one_prompt else DEEDS:
            do(loop, deed, number, tmp_path / "cache.safetensors")
