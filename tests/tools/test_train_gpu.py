"""What trains on a GPU does so here at small size; its plan, its limits and its checks do what they say."""

import dataclasses
import itertools
import json
import os
import random
import sys
import tarfile
from types import SimpleNamespace

import pytest
import torch
import typer

from tools.training import ahead as train_ahead
from tools.training import cards as train_cards
from tools.training import gpu as train_gpu
from tools.training import ruler, source_code, tasks, train
from tools.training.text import text_tokenizer

LONG = [name for name, recipe in train.RECIPES.items() if recipe.families]
CODE = train.RECIPES["llama-code"]
POSITIONS = {"mpt": "max_seq_len", "gptj": "n_positions", "gpt2": "n_positions"}


# ------------------------------------------------------------------ recipes


def test_a_longer_recipe_is_its_short_one_continued():
    assert set(LONG) == {f"{name}-1k" for name, recipe in train.RECIPES.items() if name in train_gpu.ARCHITECTURES}
    for name in LONG:
        short, long = train.RECIPES[name.removesuffix("-1k")], train.RECIPES[name]
        assert long.stages[: len(short.stages)] == short.stages
        assert [length for length, _ in long.stages[len(short.stages) :]] == [384, 512, 768, 1024]
        changed = {key for key, value in long.config.items() if short.config[key] != value}
        assert changed == {POSITIONS.get(long.architecture, "max_position_embeddings")}
        assert long.config[changed.pop()] == 1024


@pytest.mark.parametrize("name", LONG)
def test_a_longer_recipe_trains_and_is_measured(name, tmp_path, monkeypatch):
    real = train.RECIPES[name]
    tiny = dataclasses.replace(real, stages=((16, 32), (24, 48)), max_steps=3)
    monkeypatch.setitem(train.RECIPES, name, tiny)
    monkeypatch.setattr(train.tasks, "accuracies", lambda model, n: {"recall": 0.96})
    card = train.train(name, 2, tmp_path, 2)
    assert (card["steps"], card["longest_row"], card["name"]) == (3, 16, f"{name}-2")
    assert card["command"] == f"python -m tools.training {name} --seed 2 --out tools/models"
    text = (tmp_path / f"{name}-2" / "README.md").read_text()
    assert text == train.describe(json.loads((tmp_path / f"{name}-2" / "card.json").read_text()))
    assert "Rows of up to 16 tokens were seen" in text
    model, _ = tasks.load(f"{name}-2", tmp_path)
    names = ("recall", "needle", *ruler.FAMILIES)
    assert set(train.long_accuracies(model, 1, real)) == {f"{name}-{length}" for name in names for length in (512, 1024)}


def test_long_tasks_fill_the_rows_and_are_measured_where_trained(monkeypatch):
    seen = []
    monkeypatch.setattr(
        train.tasks, "exact_match", lambda model, batch, rows: seen.append(batch.tokens_BT.shape[1]) or torch.ones(1)
    )
    train.long_accuracies(None, 2, train.RECIPES["llama-1k"])
    assert seen == [512, 477, 486, 484, 484, 1024, 989, 998, 996, 996]
    assert train.long_accuracies(None, 2, train.RECIPES["llama"]) == {}


def test_a_run_with_rows_made_ahead_repeats_itself():
    """Any device but "cpu" takes its rows from another process: "cpu:0" is the way of a GPU, here."""
    recipe = dataclasses.replace(train.RECIPES["llama-1k"], stages=((16, 32), (24, 48)), max_steps=2)
    sums = []
    for seed, device in ((0, "cpu:0"), (0, "cpu:0"), (0, "cpu"), (1, "cpu:0")):
        model, steps, longest = train.train_synthetic(recipe, seed, device)
        assert (steps, longest) == (2, 16)
        sums.append(sum(parameter.double().sum().item() for parameter in model.parameters()))
    assert sums[0] == sums[1]
    assert len(set(sums)) == 3, "another seed and the way of the CPU have other rows"


def test_training_stops_when_its_time_is_up():
    recipe = dataclasses.replace(train.RECIPES["llama-1k"], stages=((16, 16),), max_steps=20)
    _, steps, _ = train.train_synthetic(recipe, 0, seconds=0.0)
    assert steps == 1


def test_the_code_model_is_as_large_as_agreed(tmp_path):
    model = train.build(CODE, 0)
    assert 6.9e6 < model.num_parameters() < 7.0e6
    assert model.config.num_hidden_layers == 8 and model.config.hidden_size == 256
    assert model.config.max_position_embeddings == 2048
    model.bfloat16().save_pretrained(tmp_path)
    train_gpu.check_weights(tmp_path)
    with pytest.raises(ValueError, match=r"13,9\d\d,\d\d\d bytes, more than 13,900,000"):
        train_gpu.check_weights(tmp_path, 13_900_000)


# ------------------------------------------------------------------ rows made ahead


def _place(step: int, stage: int) -> tuple[int, int]:
    return step, stage


def test_rows_made_ahead_are_those_made_in_turn():
    ahead = train_ahead.Ahead(_place)
    try:
        stages = [0, 0, 0, 1, 1, 2, 2, 2]
        made = [ahead(step, stage) for step, stage in enumerate(stages, 1)]
        assert made == list(zip(range(1, 9), stages, strict=True))
        assert set(ahead.pending) == {(8, 2), (9, 2), (10, 2), (11, 2)}
    finally:
        ahead.close()


def test_a_gpu_run_has_other_rows_at_every_step_and_seed_but_of_the_same_kind():
    stages, make = ((16, 64), (32, 64)), train.RECIPES["llama"].make
    with train_ahead.training_rows(make, stages, 0, "meta") as rows:
        tokens_BT, weights_BT = rows(1, 1)
        assert tokens_BT.device.type == weights_BT.device.type == "meta"
        assert tokens_BT.shape == weights_BT.shape == (2, 32)
    made = [train_ahead.batch(make, stages, seed, step, 0)[0] for seed, step in ((0, 1), (0, 1), (0, 2), (1, 1))]
    assert (made[0] == made[1]).all()
    assert all((made[0] != other).any() for other in made[2:])
    expected_BT, _ = tasks.training_batch(random.Random("0/0/1"), 16, 64, 0.3)
    assert torch.equal(torch.from_numpy(made[0]), expected_BT)


def test_the_rows_of_a_cpu_run_are_drawn_from_one_generator():
    """The shipped models were trained on them."""
    with train_ahead.training_rows(train.RECIPES["gptj"].make, train.STAGES, 3, "cpu") as rows:
        drawn = [rows(1, 0), rows(2, 0), rows(3, 4)]
    rng = random.Random(3)
    for (tokens_BT, weights_BT), length in zip(drawn, (16, 16, 64), strict=True):
        expected = tasks.training_batch(rng, length, 1024, 0.6)
        assert torch.equal(tokens_BT, expected[0]) and torch.equal(weights_BT, expected[1])


# ------------------------------------------------------------------ the code model


def _write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def roots(tmp_path):
    """A library, and packages inside its folder as they mostly are: 120 small files, and two to be left out."""
    library, packages = tmp_path / "lib", tmp_path / "lib" / "site-packages"
    for i in range(60):
        functions = "".join(f"def f{i}_{j}(x):\n    return x + {j}\n" for j in range(40))
        _write(library, f"a{i}.py", f"# library {i}\n{functions}")
        _write(packages, f"pack/b{i}.py", f"# package {i}\n" + f"value = {i}\n" * 200)
    _write(packages, "pack/tests/large.py", "x = 1\n" * 40_000)
    _write(packages, "__pycache__/stale.py", "x = 2\n")
    return [library, packages]


def test_sources_are_found_once_and_split_by_the_hash_of_their_path(roots):
    held_out, kept = source_code.sources(True, roots), source_code.sources(False, roots)
    assert len(held_out) + len(kept) == 120
    assert kept == sorted(kept, key=lambda text: text.split()[1:3]), "in the order of their paths"
    assert not set(held_out) & set(kept)
    assert any("# package" in text for text in held_out) and any("# library" in text for text in kept)
    assert 2 <= len(held_out) <= 15
    assert not any("x = 1\n" in text or "x = 2\n" in text for text in held_out + kept)
    assert source_code.sources(False, roots[:1]) == [text for text in kept if "# library" in text]


def test_a_copy_of_a_held_out_file_is_not_trained_on(roots):
    copied = source_code.sources(True, roots)[0]
    name = next(f"copy{i}.py" for i in itertools.count() if _kept(f"copy{i}.py"))
    _write(roots[0], name, copied)
    assert copied in source_code.sources(False, roots)
    assert copied not in source_code.training_sources(roots)


def _kept(name: str) -> bool:
    return source_code.hashlib.sha256(name.encode()).digest()[0] % 20 != 0


def test_a_corpus_that_is_too_large_is_thinned_everywhere(roots):
    whole = source_code.sources(False, roots)
    some = source_code.sources(False, roots, limit=sum(map(len, whole)) // 2)
    assert 0.4 < sum(map(len, some)) / sum(map(len, whole)) <= 0.5
    assert some == [text for text in whole if text in set(some)]
    packages = sum("# package" in text for text in some) / sum("# package" in text for text in whole)
    assert 0.25 < packages < 0.75, "some of everything, not the first half"


def test_the_tokenizer_learns_from_a_sample_of_everything():
    texts = [f"{i:10}" for i in range(1000)]
    assert source_code.sample(texts, size=500) == texts[::5], "2000 bytes, of which the tokenizer reads a quarter"
    assert source_code.sample(texts, size=10_000) == texts


def test_encoding_is_the_tokenizers_with_an_end_after_each_text(roots):
    texts = source_code.sources(False, roots)[:7]
    tokenizer = text_tokenizer(texts, 300)
    assert len(tokenizer) == 300
    stream = source_code.encode(tokenizer, texts, files=3)
    assert stream.dtype == torch.int16
    assert stream.tolist() == [i for text in texts for i in (*tokenizer(text).input_ids, tokenizer.eos_token_id)]


def test_batches_are_spans_of_the_stream_and_reach_both_ends():
    stream = torch.arange(100, 112, dtype=torch.int16)
    rows = torch.cat(list(itertools.islice(source_code.batches(stream, 7, 10, seed=0, rows=8), 8)))
    assert rows.shape == (64, 11) and rows.dtype == torch.int64
    assert (rows[:, 0] == 7).all()
    assert (rows[:, 2:] - rows[:, 1:-1] == 1).all()
    assert rows[:, 1].unique().tolist() == [100, 101, 102]


def test_the_learning_rate_follows_the_clock():
    """Ten steps of one second: full rate for half of them, then down to almost nothing."""
    scales, ticks = [], itertools.count()
    optimizer = SimpleNamespace(step=lambda loss, scale: scales.append(round(scale, 6)))
    endless = iter(lambda: None, 1)
    zero = lambda model, rows: torch.zeros(())  # noqa: E731
    steps = source_code.fit(None, optimizer, endless, 10.0, zero, lambda: float(next(ticks)))
    assert scales == [1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]
    assert steps == 10
    scales.clear()
    assert source_code.fit(None, optimizer, endless, -3.0, zero) == 1


def test_the_code_recipe_trains_and_its_card_tells_the_verdict(roots, tmp_path, monkeypatch):
    """At this size nothing is learned: the model must be refused."""
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    small |= {"max_position_embeddings": 96, "vocab_size": 300}
    monkeypatch.setitem(train.RECIPES, "llama-code", dataclasses.replace(CODE, config=CODE.config | small))
    found, span = source_code.sources, ((16, 32), (32, 64), (64, 96))
    monkeypatch.setattr(source_code, "sources", lambda held_out, _=None, limit=1e9: found(held_out, roots, limit))
    monkeypatch.setattr(source_code.batches, "__defaults__", (4,))
    monkeypatch.setattr(source_code.examine, "__defaults__", (None, span))
    card = train.train("llama-code", 0, tmp_path, 6, seconds=1.5)
    assert card["name"] == "llama-code" and card["steps"] >= 1
    assert card["command"] == "python -m tools.training llama-code --seed 0 --seconds 2 --out tools/models"
    assert set(card["checks"]) == {"sinks", "falls_past_128", "induction"}
    assert not card["checks"]["sinks"] and not card["usable"] and not train_cards.usable(card)
    assert 2 <= card["held_out"]["windows"] <= 6 and card["held_out"]["length"] == 96
    assert torch.tensor(card["held_out"]["sink_share"]).shape == (4, 2)
    text = (tmp_path / "llama-code" / "README.md").read_text()
    assert train_cards.NOT_USABLE in text and "Stored in bfloat16" in text
    assert "to rank" not in train.describe(card | {"usable": True, "checks": dict.fromkeys(card["checks"], True)})
    assert json.loads((tmp_path / "llama-code" / "config.json").read_text())["dtype"] == "bfloat16"


# ------------------------------------------------------------------ the checks on hand-made inputs


def losses(*levels: float, noise: float = 0.2) -> torch.Tensor:
    """Nats of 64 windows of 2048 tokens at these levels from positions 1, 128, 512 and 1024 on."""
    generator = torch.Generator().manual_seed(0)
    level_T = torch.cat([torch.full((n,), level) for n, level in zip((127, 384, 512, 1024), levels, strict=True)])
    hardness_B1 = torch.randn(64, 1, generator=generator)
    return level_T + hardness_B1 + noise * torch.randn(64, 2047, generator=generator)


def test_the_loss_must_keep_falling():
    assert source_code.keeps_falling(losses(3.0, 2.5, 2.4, 2.3))
    assert not source_code.keeps_falling(losses(3.0, 2.5, 2.5, 2.5)), "flat past 128"
    assert not source_code.keeps_falling(losses(3.0, 2.5, 2.4, 2.4)), "flat past 1024"
    assert not source_code.keeps_falling(losses(3.0, 2.5, 2.3, 2.4)), "rises"
    assert source_code.keeps_falling(losses(1.0, 2.5, 2.4, 2.3)), "what lies before 128 does not matter"
    assert not source_code.keeps_falling(losses(3.0, 2.5, 2.499, 2.498, noise=2.0)), "less than two standard errors"


def test_falling_is_paired_within_windows():
    """A gap of 0.1 is far below the spread of windows (1.0), and far above that of the differences."""
    nats_BT = losses(3.0, 2.5, 2.4, 2.3)
    assert nats_BT.mean(1).std() > 0.8
    assert source_code.clearly_above(nats_BT[:, 127:255].mean(1), nats_BT[:, 511:1023].mean(1))
    shuffled = nats_BT[torch.randperm(64, generator=torch.Generator().manual_seed(1))]
    assert not source_code.clearly_above(nats_BT[:, 127:255].mean(1), shuffled[:, 511:1023].mean(1))


def attention(share: float, n: int = 128) -> torch.Tensor:
    """Causal, one head [1, 1, T, T]: `share` on the first four tokens, the rest spread over the others."""
    a_TT = torch.tril(torch.ones(n, n))
    a_TT[:, :4] = 0.0
    a_TT = a_TT / a_TT.sum(-1, keepdim=True).clamp(min=1) * (1 - share)
    a_TT[:, 0] = share
    return a_TT[None, None]


def test_the_share_of_the_first_tokens_counts_from_position_64_on():
    a_BHTT = torch.cat([attention(0.5), attention(0.1)], 1)
    torch.testing.assert_close(source_code.sink_share(a_BHTT), torch.tensor([0.5, 0.1]))
    a_BHTT[:, :, :64] = 0.0
    a_BHTT[:, :, :64, 0] = 1.0
    torch.testing.assert_close(source_code.sink_share(a_BHTT), torch.tensor([0.5, 0.1]))


def test_sinks_are_wanted_in_most_heads_of_middle_layers():
    share_LH = torch.full((8, 4), 0.05)
    assert not source_code.has_sinks(share_LH)
    share_LH[[0, 1, 6, 7]] = 0.9
    assert not source_code.has_sinks(share_LH), "outer layers do not count"
    share_LH[2:4] = 0.4
    assert not source_code.has_sinks(share_LH), "half of the heads are not most"
    share_LH[4, 0] = 0.4
    assert source_code.has_sinks(share_LH)


def test_sinks_of_a_model_are_measured_in_every_layer_and_head():
    model, tokenizer = tasks.load("llama-0")
    tokens_BT = tasks.needle(random.Random(0), 2, context=120).tokens_BT
    share_LH = source_code.sinks(model, tokens_BT)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(tokens_BT, output_attentions=True).attentions
    expected_LH = torch.stack([a_BHTT[:, :, 64:, :4].sum(-1).mean((0, 2)) for a_BHTT in attentions])
    torch.testing.assert_close(share_LH, expected_LH, atol=1e-4, rtol=1e-4)


def test_a_model_that_copies_is_seen_to():
    """llama-0 has learned to copy; what it was before its training has not."""
    spans_BT = tasks.copy(random.Random(0), 8, length=48).tokens_BT[:, :49]
    trained, _ = tasks.load("llama-0")
    first_B, again_B = source_code.repeated(trained, torch.cat([spans_BT, spans_BT], 1), span=48)
    assert source_code.clearly_above(first_B, again_B)
    first_B, again_B = source_code.repeated(train.build(train.RECIPES["llama"], 0).eval(), spans_BT, span=20)
    assert not source_code.clearly_above(first_B, again_B)


def test_windows_lie_inside_one_file_each(roots):
    texts = source_code.sources(True, roots)
    tokenizer = text_tokenizer(source_code.sources(False, roots), 400)
    tokens_BT = source_code.windows(tokenizer, texts, 64, 100)
    assert 2 <= len(tokens_BT) <= len(texts)
    for tokens in tokens_BT:
        assert tokens[0] == tokenizer.bos_token_id
        assert sum(tokenizer.decode(tokens[1:]) in text for text in texts) == 1
    assert len(source_code.windows(tokenizer, texts, 64, 2)) == 2
    with pytest.raises(ValueError, match=r"length=9999: 0 of \d+ held-out files"):
        source_code.windows(tokenizer, texts, 9999, 5)


def test_which_models_may_rank_policies():
    assert train_cards.usable({"accuracy": {"recall": 0.96, "needle": 1.0}})
    assert not train_cards.usable({"accuracy": {"recall": 0.94, "needle": 1.0}})
    assert not train_cards.usable({"held_out": {}}), "a language model that was not checked"
    assert train_cards.usable({"held_out": {}, "usable": True})
    assert not train_cards.usable({"held_out": {}, "usable": False})


# ------------------------------------------------------------------ the plan


def test_the_plan_has_every_architecture_before_the_second_seed():
    names = [job.name for job in train_gpu.plan()]
    assert names[0] == "llama-code"
    assert len(names) == len(set(names)) == 16
    assert {name.rsplit("-1k-")[0] for name in names[1:6]} == {"llama", "mistral", "mpt", "gptj", "gpt2"}
    for seed in range(3):
        assert all(name.endswith(f"-1k-{seed}") for name in names[1 + 5 * seed : 6 + 5 * seed])
    assert not set(names) & {"llama-0", "llama-python"}


def test_the_command_of_a_job_is_one_that_train_takes(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(train, "train", lambda *arguments: calls.append(arguments) or {})
    monkeypatch.setattr(train, "pick", lambda device: "cpu")
    app = typer.Typer()
    app.command()(train.main)
    for job in (train_gpu.Job("llama-code", 0), train_gpu.Job("gpt2-1k", 2)):
        command = job.command(tmp_path, "cuda", 12.6, 64, compiled=True)
        assert command[:3] == [sys.executable, "-m", "tools.training"]
        app(command[3:], standalone_mode=False)
    assert calls == [
        ("llama-code", 0, tmp_path, 64, "cpu", 13.0, True),
        ("gpt2-1k", 2, tmp_path, 64, "cpu", 13.0, False),
    ]


def test_jobs_run_side_by_side_and_the_late_are_killed(tmp_path):
    """Five jobs, two at a time: two hang until the limit, one ends, one fails, one comes too late."""
    jobs = [train_gpu.Job("llama-1k", seed) for seed in range(5)]
    code = ["sleep 600", "echo fine", "echo why; exit 3", "sleep 600", "echo late"]
    started, ticks = [], itertools.count()

    def command(job, seconds):
        started.append((job.seed, seconds))
        return ["sh", "-c", code[job.seed]]

    def clock():  # stands until the fourth has started, however long that takes
        return next(ticks) / 4 if len(started) == 4 else 0.0

    fates = train_gpu.run(jobs, command, tmp_path, limit=2.0, parallel=2, reserve=1.0, clock=clock)
    states = [fates[job.name]["state"] for job in jobs]
    assert states == ["killed", "done", "failed", "killed", "not started"]
    assert fates["llama-1k-2"]["log"] == ["why"]
    assert started == [(seed, 1.0) for seed in range(4)], "training ends a reserve before the limit"


def test_no_job_starts_when_only_the_reserve_is_left(tmp_path):
    jobs, started = [train_gpu.Job("llama-1k", seed) for seed in range(2)], []

    def command(job, seconds):
        started.append(job)
        return ["true"]

    fates = train_gpu.run(jobs, command, tmp_path, 20.0, 1, reserve=19.7, clock=lambda: 0.5 if started else 0.0)
    assert [fates[job.name]["state"] for job in jobs] == ["done", "not started"]


def test_a_killed_job_leaves_no_process_behind(tmp_path):
    """Both processes hold a pipe open, whose end comes when they are dead."""
    log, pipe = tmp_path / "llama-1k-0.log", tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    code = f"""import os, time
held = open({str(pipe)!r}, "w")
os.fork() and print("forked", flush=True)
time.sleep(600)
held.write("lived")"""

    def clock():
        return 2.0 if log.exists() and "forked" in log.read_text() else 0.0

    fates = train_gpu.run([train_gpu.Job("llama-1k", 0)], lambda *_: [sys.executable, "-c", code], tmp_path, 1.0, 1, 0.1, clock)
    assert fates["llama-1k-0"]["state"] == "killed"
    os.set_blocking(reader, True)
    with open(reader) as held:
        assert held.read() == ""


def _folder(root, name, size):
    (root / name).mkdir(parents=True)
    (root / name / "card.json").write_text("{}")
    (root / name / "model.safetensors").write_bytes(bytes(size))
    return root / name


def test_archives_stay_below_the_limit_and_hold_everything(tmp_path):
    sizes = (90_000, 1, 40_000, 40_000, 20_000)
    folders = [_folder(tmp_path / "models", f"m{i}", size) for i, size in enumerate(sizes)]
    archives = train_gpu.pack(folders, tmp_path / "out", limit=110_000)
    assert [archive.name for archive in archives] == ["models-0.tar", "models-1.tar", "models-2.tar"]
    assert all(archive.stat().st_size <= 110_000 for archive in archives)
    for archive in archives:
        with tarfile.open(archive) as tar:
            tar.extractall(tmp_path / "again", filter="data")
    for folder in folders:
        again = tmp_path / "again" / folder.name / "model.safetensors"
        assert again.read_bytes() == (folder / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"m0: \d+,\d+ bytes, more than the 80,000"):
        train_gpu.pack(folders, tmp_path / "out", limit=80_000)


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 9_000])
def test_folder_bytes_is_what_an_archive_needs(size, tmp_path):
    folder = _folder(tmp_path, "m", size)
    (archive,) = train_gpu.pack([folder], tmp_path / "out")
    with tarfile.open(archive) as tar:
        end = max(member.offset_data + -(-member.size // 512) * 512 for member in tar.getmembers())
    assert train_gpu.folder_bytes(folder) == end


def test_the_whole_command_packs_what_was_trained_and_reports_the_rest(tmp_path, monkeypatch):
    card = {"accuracy": {"recall": 0.5}, "steps": 3}

    def run(jobs, command, logs, limit, parallel):
        assert limit == 30
        _folder(tmp_path / "models", "llama-1k-0", 1000)
        (tmp_path / "models" / "llama-1k-0" / "card.json").write_text(json.dumps(card))
        return {"llama-1k-0": {"state": "done", "seconds": 1}, "llama-code": {"state": "killed", "seconds": 2}}

    monkeypatch.setattr(train_gpu, "run", run)
    with pytest.raises(typer.Exit) as done:
        train_gpu.main(0.5, tmp_path / "out", tmp_path / "models", "cpu", 0, 2, ["llama-1k-0", "llama-code"], compiled=False)
    assert done.value.exit_code == 1, "one model is missing"
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["llama-1k-0"] == {"state": "done", "seconds": 1, "usable": False, **card}
    assert report["llama-code"] == {"state": "killed", "seconds": 2}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["models-0.tar", "report.json"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without one")
def test_a_gpu_that_is_not_there_is_refused_in_words():
    assert train.pick("auto") == train.pick("cpu") == "cpu"
    with pytest.raises(typer.BadParameter, match=r"'cuda'.*no CUDA device"):
        train.pick("cuda")
