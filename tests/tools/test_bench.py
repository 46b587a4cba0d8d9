"""The benchmark's lines are whole and its bounds are right; times themselves are not judged here."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from tests.helpers.marks import slow_but
from tools.bench import __main__ as bench
from tools.bench import decode as bench_decode
from tools.bench import gpu as bench_gpu
from tools.bench import lines as bench_lines
from tools.bench import memory as bench_memory
from tools.bench import models as bench_models
from tools.bench import paper, roofline
from tools.bench import prompt as bench_prompt
from tools.bench import replay as bench_replay
from tools.bench import sampled as bench_sampled

COMMON = {"date", "versions", "cpu", "threads", "parameters", "case", "arch", "policy", "k", "n", "repeats", "ratio"}
COMMON |= {"ratios", "ms", "ms_unpatched", "limits", "holds", "roof_ms", "roof_ratio", "ceilings"}
TOKEN = 2 * 2 * 64 * 4  # bytes: two layers, keys and values, one KV head of size 64, float32


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def invoke(*arguments):
    return CliRunner().invoke(bench.app, [str(argument) for argument in arguments])


def refusal(*arguments):
    """What the command says, in one line."""
    told = invoke(*arguments)
    assert told.exit_code == 2, told.output
    return re.sub(r"[\s│]+", " ", told.output)


# ---- the CPU's cases ----


@pytest.mark.slow
def test_decode_lines_are_whole():
    lines = list(bench_decode.decode_lines(["h2o", "full", bench.FLOOR], n=64, repeats=2, tiny=True, steps=4))
    for line in lines:
        assert json.loads(json.dumps(line)) == line
        assert set(line) >= COMMON | {"bytes", "bytes_unpatched", "bytes_ratio", "mean_ratio", "steps"}
        assert len(line["ratios"]) == 2
        assert line["roof_ratio"] == line["ms"] / line["roof_ms"]
    h2o, full, floor = lines
    assert h2o["bytes_unpatched"] == 64 * TOKEN
    assert h2o["bytes"] == floor["bytes"] == 33 * TOKEN
    assert h2o["bytes_seen"] == [h2o["bytes"]]
    assert full["bytes"] > full["bytes_unpatched"]
    assert (h2o["limits"], full["limits"]) == ({"bytes_ratio": bench_lines.BYTES_LIMIT}, {})
    assert (h2o["holds"], full["holds"]) == (False, None)  # 33 of 64 tokens are 0.516


PROMPTS = [("prompt", "llama"), ("arch", "mpt"), ("arch", "gptj")]


@pytest.mark.parametrize(("case", "arch"), slow_but(PROMPTS[1:2], PROMPTS))
def test_prompt_lines_are_whole(case, arch):
    line = bench_prompt.prompt_line(case, arch, "keyformer", n=64, repeats=1, tiny=True, memory=False)
    assert set(line) >= COMMON
    assert (line["case"], line["arch"], line["policy"], line["n"]) == (case, arch, "keyformer", 64)
    assert line["ratio"] == line["ms"] / line["ms_unpatched"]


def test_twins_share_weights_and_nothing_else():
    model = bench_models.build("llama", 64, tiny=True)
    other = bench_models.twin(model)
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert model.model.layers[0].self_attn is not other.model.layers[0].self_attn


def test_peak_growth_sees_the_prompt():
    block = []
    before = bench_memory.reset_peak()
    block.append(torch.ones(16 << 20))  # more than malloc keeps on its heap
    assert 60 << 20 <= bench_memory.peak() - before < 80 << 20


def test_replay_lines_are_whole():
    (line,) = bench_replay.replay_lines(["h2o"], n=300, repeats=1, tiny=True, memory=False)
    assert json.loads(json.dumps(line)) == line
    assert set(line) >= COMMON - {"roof_ms", "roof_ratio", "ceilings"}
    assert (line["case"], line["arch"], line["n"], line["k"], line["block"]) == ("replay", "llama", 300, 256, 16)
    assert line["record_bytes"] == 300 * (8 + 2 * 4) and line["first"] == 272, "of one KV head in each of two layers"
    assert line["ratio"] == line["ms"] / line["ms_unpatched"] and line["limits"] == {}
    assert bench_lines.limits("replay", "h2o", 2048) == {"ratio": 1.6, "memory_ratio": 1.10}
    assert list(bench.plan("replay", "", [])) == [("replay", "llama", ["h2o"], 2048)]


def test_limits_of_the_promise():
    limits = bench_lines.limits
    assert (limits("batch", "roco", 1024), limits("batch", "adakv", 1024)) == ({"ratio": 0.56}, {"ratio": 0.62})
    assert limits("batch", "roco", 512) == limits("batch", "tova", 1024) == {}
    assert limits("prompt", "tova", 2048) == {"ratio": 1.05, "memory_ratio": 1.10}
    assert limits("prompt", "tova", 4096) == {"memory_ratio": 1.10}
    for policy in ("h2o", "roco", "keyformer"):
        assert limits("prompt", policy, 2048) == {"ratio": 1.22, "memory_ratio": 1.10}
        assert limits("prompt", policy, 4096) == {"ratio": 1.27, "memory_ratio": 1.10}
    assert limits("prompt", "scissorhands", 2048)["ratio"] == 1.30
    assert (limits("prompt", "pyramidkv", 2048)["ratio"], limits("prompt", "critical_snapkv", 2048)["ratio"]) == (1.02, 1.05)
    assert [limits("prompt", policy, 8192)["ratio"] for policy in ("h2o", "roco", "keyformer")] == [1.20, 1.25, 1.30]
    assert limits("decode", "random", 8192) == {"over_floor": 1.05, "bytes_ratio": 0.51}
    assert limits("decode", "full", 4096) == {"ratio": 0.85}
    assert limits("decode", bench.FLOOR, 4096) == {}
    assert limits("arch", "h2o", 2048) == {"ratio": 0.8, "memory_ratio": 0.5}
    assert (limits("host", "full", 256), limits("host", "h2o", 256)) == ({"ratio": 1.05}, {"ratio": 1.15})
    assert limits("host", "h2o", 4096) == {}  # attention outweighs the host's share there


def test_a_line_above_the_floor_does_not_hold():
    model = bench_models.build("llama", 8, tiny=True)
    figures = {"ratio": 0.9, "over_floor": 1.06, "bytes_ratio": 0.5}
    assert bench_lines.record("decode", "llama", "h2o", 4096, 1, model, figures)["holds"] is False
    assert bench_lines.record("decode", "llama", "h2o", 4096, 1, model, figures | {"over_floor": 1.05})["holds"] is True


# ---- the roof ----

CEILINGS = roofline.Ceilings(bytes_per_s=1e9, flops_per_s=1e9)


def test_ceilings_are_what_the_work_takes(monkeypatch):
    monkeypatch.setattr(roofline, "fastest", lambda work, device: 2.0)
    assert roofline.bandwidth("cpu", torch.float32, 4096) == 3 * 4096 / 2  # the triad moves most
    best = roofline._measured.__wrapped__("cpu", torch.float32, small=True, threads=1)
    assert best == roofline.Ceilings(3 * (4 << 20) / 2, 2 * 256**3 / 2)


def test_fastest_is_the_fastest_and_leaves_the_first_out(monkeypatch):
    waits, now = iter([0.5, 3, 1, 2, 2, 2]), 0.0

    def work():
        nonlocal now
        now += next(waits)

    monkeypatch.setattr(bench_models.time, "process_time", lambda: now)
    assert roofline.fastest(work, "cpu") == 1


def test_bounds_are_counted_by_hand():
    model = bench_models.build("llama", 64, tiny=True)
    attention, mlp = 128 * (128 + 2 * 64 + 128), 3 * 128 * 341
    weights, norms, words = 2 * (attention + mlp), 5 * 128, 256 * 128
    assert roofline.weight_bytes(model) == 4 * (weights + norms + words)  # tied: the table is read as the output layer
    assert roofline.decode_ms(model, 1000, CEILINGS) == pytest.approx((4 * (weights + norms + words) + 1000) / 1e6)
    pairs = 10 * 11 / 2
    flops = 2 * 10 * weights + 2 * words + 2 * 4 * 128 * pairs
    assert roofline.prompt_ms(model, 10, CEILINGS) == pytest.approx(flops / 1e6)
    assert roofline.prompt_ms(model, 10, CEILINGS, batch=3) == pytest.approx(3 * flops / 1e6)
    # a budget of 2 and blocks of 3: 1 2 3, then 2 held and 1 2 3 of its own, three times, the last cut short
    seen = 6 + 2 * (3 + 4 + 5) + 3
    blocks = 2 * 10 * weights + 2 * words + 2 * 4 * 128 * seen
    assert roofline.prompt_ms(model, 10, CEILINGS, budget=2, block=3) == pytest.approx(blocks / 1e6)


def test_an_untied_table_is_not_read_by_a_token():
    model = bench_models.build("gptj", 64, tiny=True)
    every = sum(p.numel() for p in model.parameters())
    assert roofline.weight_bytes(model) == 4 * (every - 256 * 128)


# ---- Keyformer's table ----


@pytest.fixture(scope="module")
def table():
    with torch.no_grad():
        return list(paper.lines("cpu", tiny=True, lengths=[8]))


def test_the_paper_lines_are_whole(table):
    assert [(line["policy"], line["batch"]) for line in table] == [(name, b) for b in (1, 2) for name in paper.BUDGETS]
    for line in paper.compared(table):
        assert json.loads(json.dumps(line)) == line
        assert line["tokens_per_s"] == pytest.approx(line["batch"] * 8 / line["seconds"])
        assert line["roof_ratio"] == pytest.approx(line["roof_tokens_per_s"] / line["tokens_per_s"])
        assert line["speedup"] == line["tokens_per_s"] / table[3 * (line["batch"] - 1)]["tokens_per_s"]
        assert line["speedup_batch_1"] == line["tokens_per_s"] / table[0]["tokens_per_s"]
        assert line["peak_bytes"] >= 0


def test_the_paper_table_stands_beside_ours(table):
    wide = [line | {"n": 4096, "case": "paper"} for line in table]
    rows = [row.split(" | ") for row in paper.markdown(wide).splitlines()[2:]]
    assert [row[-2:] for row in rows[:3]] == [["8.30", "1.00 |"], ["14.10", "1.70 |"], ["17.00", "2.05 |"]]
    assert [row[-2:] for row in rows[3:]] == [["OOM", " |"], ["OOM", " |"], ["19.85", "2.39 |"]]
    lost = {name: value for name, value in wide[0].items() if "tokens_per_s" not in name} | {"out_of_memory": True}
    assert "| OOM |" in paper.markdown([lost])


def test_the_paper_bound_counts_steps_and_prompt(monkeypatch):
    model = bench_models.build("mpt-7b", 8, tiny=True)
    monkeypatch.setattr(paper, "prompt_ms", lambda model, n, best, batch: 100.0 * batch)
    monkeypatch.setattr(paper, "decode_ms", lambda model, nbytes, best: nbytes / 1000)
    token = 2 * 2 * 128 * 4 * 4
    for policy, held in (("full", 12), ("keyformer", 4)):
        seconds = (100 + 8 * held * token / 1000) / 1000
        found = paper.beside(model, policy, 8, 1, 1.0, CEILINGS)
        assert found["roof_tokens_per_s"] == pytest.approx(8 / seconds)


def test_memory_that_does_not_suffice_is_a_line(monkeypatch):
    def full(*_):
        raise torch.cuda.OutOfMemoryError("no")

    monkeypatch.setattr(paper, "generate", full)
    assert paper.throughput(bench_models.build("mpt-7b", 8, tiny=True), "h2o", 8, 1) == {"out_of_memory": True}


@pytest.mark.parametrize("arguments", [("--paper", "keyformer"), ("--case", "gpu"), ("--case", "gpu_side")])
def test_full_sizes_are_refused_without_a_gpu(monkeypatch, arguments):
    for module in (paper, bench_gpu):
        monkeypatch.setattr(module, "build", None)  # nothing of that size is made, even where nobody refuses
        monkeypatch.setattr(module, "ceilings", None)
    assert "--device cuda on a machine with one" in refusal(*arguments)
    if not torch.cuda.is_available():
        assert "torch finds no GPU" in refusal(*arguments, "--device", "cuda")


# ---- the GPU's cases, in tiny ----


@pytest.mark.parametrize("case", slow_but(("gpu_decode",), ("gpu_prompt", "gpu_decode")))
def test_gpu_lines_are_whole_and_become_tables(case):
    given = {"lengths": [16], "policies": ["keyformer"], "batches": [2], "repeats": 1}
    (line,) = bench_gpu.lines(case, "cpu", tiny=True, **given)
    assert json.loads(json.dumps(line)) == line
    assert (line["case"], line["policy"], line["n"], line["backend"] != "") == (case, "keyformer", 16, True)
    assert line["roof_ratio"] > 0
    if case == "gpu_decode":
        assert line["bytes"] == 2 * 17 * TOKEN and line["bytes_unpatched"] == 2 * 32 * TOKEN
        assert line["over_floor"] == pytest.approx(line["ms"] / line["ms_floor"])
    assert "keyformer" in bench.tables([line])


# ---- tables ----


@pytest.fixture(scope="module")
def line():
    with torch.no_grad():
        return bench_prompt.prompt_line("prompt", "llama", "window", n=64, repeats=1, tiny=True, memory=False)


def test_markdown_keeps_the_last_line_of_a_case(line):
    table = bench.tables([line, line | {"ratio": 0.5}]).splitlines()
    assert len(table) == 3
    assert "| 0.500 |" in table[2]


def test_the_command_makes_tables_and_refuses(tmp_path, line, table):
    source = tmp_path / "lines.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in (line, *table)))
    assert "absent" in refusal("--markdown", tmp_path / "absent").replace(" ", "")  # a long path is wrapped
    assert "tokens/s" in invoke("--markdown", source).output


def test_the_command_measures_and_writes(tmp_path):
    path = tmp_path / "lines.jsonl"
    told = invoke("--tiny", "--case", "ragged", "--policies", "adakv", "--lengths", "96", "--repeats", "1", "--json", path)
    assert told.exit_code == 0, told.output
    (line,) = map(json.loads, path.read_text().splitlines())
    assert (line["case"], line["policy"], line["n"], line["base"]) == ("ragged", "adakv", 96, "snapkv")


@pytest.mark.parametrize("wrong", [("--lengths", "4k"), ("--batches", "0"), ("--paper", "h2o"), ("--case", "gpu_x")])
def test_what_the_command_cannot_do_is_refused(wrong):
    assert "Invalid value" in refusal("--tiny", *wrong)


# ---- sampled rows ----


def test_agreement_counts_entries_of_both():
    one, other = [torch.tensor([[[0, 1, 2, 3], [0, 1, 2, 3]]])], [torch.tensor([[[2, 3, 4, 5], [0, 1, 2, 3]]])]
    assert bench_sampled.jaccard(one, other) == (2 / 6 + 1) / 2
    assert bench_sampled.jaccard(one, one) == 1.0


def test_threads_are_measured_each_by_its_own_clock(monkeypatch, tmp_path):
    """One by CPU time, several by wall time: 1 and 100 seconds of these here."""
    monkeypatch.setattr(bench_models.time, "process_time", iter(range(10**6)).__next__)
    monkeypatch.setattr(bench_models.time, "perf_counter", iter(range(0, 10**8, 100)).__next__)
    monkeypatch.setattr(bench_prompt, "apart", lambda *given: 1)
    before, path = torch.get_num_threads(), tmp_path / "lines.jsonl"
    asked = ["--tiny", "--case", "prompt", "--policies", "h2o", "--lengths", "64", "--repeats", "1", "--threads", "1,2"]
    try:
        assert invoke(*asked, "--json", path).exit_code == 0
    finally:
        torch.set_num_threads(before)
    one, two = (json.loads(line) for line in path.read_text().splitlines())
    assert (one["threads"], one["ms"], two["threads"], two["ms"]) == (1, 1000, 2, 100_000)
    assert bench.tables([one, two]).count("| prompt | llama | h2o | 64 |") == 2


def test_a_model_of_a_folder(tmp_path):
    """Its lines have the folder's name; cases that need shapes of their own do not take it."""
    assert "has no config.json" in refusal("--model", tmp_path)
    model = bench_models.build("llama", 64, tiny=True)
    assert bench_lines.record("prompt", str(tmp_path / "smollm2"), "h2o", 64, 1, model, {})["arch"] == "smollm2"
    model.save_pretrained(tmp_path)
    assert isinstance(bench_models.build(str(tmp_path), 64, tiny=False), type(model))
    assert [row[:2] for row in bench.plan("all", "h2o", [64], str(tmp_path))] == [
        ("prompt", str(tmp_path)), ("decode", str(tmp_path)),
    ]  # fmt: skip
    with pytest.raises(bench.typer.BadParameter, match="'host' is none of prompt, decode, block"):
        list(bench.plan("host", "h2o", [64], str(tmp_path)))
