"""The benchmark's lines are whole; times themselves are not judged here."""

import json

import pytest
import torch

from tools import bench

COMMON = {"date", "versions", "cpu", "threads", "parameters", "case", "arch", "policy", "k", "n", "repeats", "ratio"}
COMMON |= {"ratios", "ms", "ms_unpatched", "limits", "holds"}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def test_decode_lines_are_whole():
    lines = list(bench.decode_lines(["h2o", "full", bench.FLOOR], n=64, repeats=2, tiny=True, steps=4))
    for line in lines:
        assert json.loads(json.dumps(line)) == line
        assert set(line) >= COMMON | {"bytes", "bytes_unpatched", "bytes_ratio", "mean_ratio", "steps"}
        assert len(line["ratios"]) == 2
    h2o, full, floor = lines
    token = 2 * 2 * 64 * 4  # two layers, keys and values, one KV head of size 64, float32
    assert h2o["bytes_unpatched"] == 64 * token
    assert h2o["bytes"] == floor["bytes"] == 33 * token
    assert h2o["bytes_seen"] == [h2o["bytes"]]
    assert full["bytes"] > full["bytes_unpatched"]
    assert (h2o["limits"], full["limits"]) == ({"bytes_ratio": bench.BYTES_LIMIT}, {})
    assert (h2o["holds"], full["holds"]) == (False, None)  # 33 of 64 tokens are 0.516


@pytest.mark.parametrize(("case", "arch"), [("prompt", "llama"), ("arch", "mpt"), ("arch", "gptj")])
def test_prompt_lines_are_whole(case, arch):
    line = bench.prompt_line(case, arch, "keyformer", n=64, repeats=1, tiny=True, memory=False)
    assert set(line) >= COMMON
    assert (line["case"], line["arch"], line["policy"], line["n"]) == (case, arch, "keyformer", 64)
    assert line["ratio"] == line["ms"] / line["ms_unpatched"]


def test_twins_share_weights_and_nothing_else():
    model = bench.build("llama", 64, tiny=True)
    other = bench.twin(model)
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert model.model.layers[0].self_attn is not other.model.layers[0].self_attn


def test_peak_growth_sees_the_prompt():
    block = []
    before = bench.reset_peak()
    block.append(torch.ones(16 << 20))  # more than malloc keeps on its heap
    assert 60 << 20 <= bench.peak() - before < 80 << 20


def test_limits_of_the_promise():
    assert bench.limits("prompt", "tova", 2048) == {"ratio": 1.05, "memory_ratio": 1.10}
    assert bench.limits("prompt", "roco", 2048) == {"ratio": 1.30, "memory_ratio": 1.10}
    assert bench.limits("decode", "random", 8192) == {"ratio": 0.52, "bytes_ratio": 0.51}
    assert bench.limits("decode", "full", 4096) == {"ratio": 0.85}
    assert bench.limits("arch", "h2o", 2048) == {"ratio": 0.8, "memory_ratio": 0.5}


def test_markdown_keeps_the_last_line_of_a_case():
    line = bench.prompt_line("prompt", "llama", "window", n=64, repeats=1, tiny=True, memory=False)
    table = bench.markdown([line, line | {"ratio": 0.5}]).splitlines()
    assert len(table) == 3
    assert "| 0.500 |" in table[2]
