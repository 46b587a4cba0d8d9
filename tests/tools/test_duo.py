"""Heads chosen by a calibration, beside chance."""

import torch

from tools.evaluation import duo


def test_a_model_s_row():
    ((name, own, chances),) = list(duo.rows(["llama-0"], 2))
    assert name == "llama-0" and len(chances) == duo.CHANCES and chances == sorted(chances)
    assert 0 < own < chances[-1]
    ids_BT, n = duo.texts(0, 2)
    assert not torch.equal(ids_BT, duo.texts(1, 2)[0]) and n < ids_BT.shape[1]
