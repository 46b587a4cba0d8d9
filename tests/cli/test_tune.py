"""`kvpatch tune`: what it writes and prints, and one line for every mistake."""

import json
import logging

import pytest

import kvpatch
from kvpatch.cli import output, tune_command
from kvpatch.evaluation import tune as tuning
from kvpatch.evaluation.divergence import Figures
from tests.cli.test_cli import folder, run  # noqa: F401

FEW = ("--policies", "h2o,snapkv", "--length", 24, "--max-new-tokens", 4, "--pieces", 2)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_text("what it reads, and reads again; and what it has not read. " * 9)
    return path


@pytest.fixture
def coarse(monkeypatch):
    """Few measurements."""
    monkeypatch.setattr(tuning, "GRID", (0.25, 0.5, 0.9))
    for name in ("FLOORS", "WINDOWS", "STEPS"):
        monkeypatch.setattr(tuning, name, ())


def test_it_writes_a_profile_that_generates(folder, text, tmp_path, coarse):  # noqa: F811
    out, level = tmp_path / "p.json", logging.getLogger("kvpatch").level
    result = run("tune", folder, text, "--out", out, "--tolerance", 5, *FEW)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("measuring h2o: 0 of at most ")
    assert logging.getLogger("kvpatch").level == level, "the log says as much as before"
    profile = kvpatch.load_profile(out)
    assert profile.measured["tokens"] == 2 * 28 and profile.measured["unseen_kl"] is not None
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{out}: {kvpatch.get_policy(profile.policy).name}, k=0.")
    measured = profile.measured
    assert lines[1] == f"{measured['share']:.0%} of the full cache's bytes; KL {measured['kl']:.4f} on 2 pieces."
    assert lines[2] == f"On pieces that the search did not read: KL {measured['unseen_kl']:.4f}."
    assert lines[-1] == f'    with kvpatch.patched(model, profile="{out}"):'
    again = json.loads(run("tune", folder, text, "--out", out, "--tolerance", 5, *FEW, "--json").stdout)
    assert again == {
        "file": str(out), "policy": profile.policy, "options": profile.options, "k": list(profile.k), **measured
    }  # fmt: skip


def test_a_text_of_one_piece_and_a_result_that_does_not_hold(folder, text, tmp_path, coarse, monkeypatch):  # noqa: F811
    short = tmp_path / "short"
    short.write_text("what it reads, and reads")
    out = tmp_path / "p.json"
    result = run("tune", folder, short, "--out", out, "--tolerance", 5, *FEW)
    assert "The text is one piece: nothing was left to check the result on" in result.stdout
    assert kvpatch.load_profile(out).measured["tokens"] == 24
    found = iter([0.01] * 1000)
    monkeypatch.setattr(
        tuning.Comparison, "figures", lambda self, policy, k: Figures(9, next(found), 0, 1, 0, 100, (9, 9), 9.0)
    )
    real = tuning.Search.run

    def search(self, policies):
        nonlocal found
        best, found = real(self, policies), iter([0.9] * 1000)
        return best

    monkeypatch.setattr(tuning.Search, "run", search)
    result = run("tune", folder, text, "--out", out, "--tolerance", 0.05, *FEW)
    assert "KL 0.9000, above 0.05: give more --pieces, or a smaller --tolerance." in result.stdout


def test_a_profile_has_the_name_that_reports_print(tmp_path, capsys):
    measured = {"share": 0.1, "kl": 0.1, "pieces": 1, "unseen_kl": None}
    profile = kvpatch.Profile({}, "adaptive(snapkv)", {"floor": 0.5}, 0.25, measured)
    tune_command._print_profile(profile, tmp_path / "p.json", 0.05)
    assert f"p.json: {kvpatch.get_policy('adaptive(snapkv)').name}, floor=0.5, k=0.25" in capsys.readouterr().out


def test_lines_tell_how_far_it_is_where_there_is_no_terminal(capsys):
    with output.Steps(output.console(stderr=True)) as steps:
        steps.set_total(40)
        for label in ["h2o"] * 3 + ["roco"] * 12:
            steps.count_step(label)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        f"measuring {label}: {done} of at most 40 measurements done" for label, done in (("h2o", 0), ("roco", 3), ("roco", 10))
    ]


def test_a_terminal_gets_a_bar_and_no_lines(capsys, monkeypatch):
    for variable, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(variable, value)
    with output.Steps(output.console(stderr=True)) as steps:
        steps.set_total(2)
        steps.count_step("h2o")
    assert "measurements done" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((), "Give a text after the model, a file of a few thousand words"),
        (("none",), "FILE none cannot be read"),
        (("text", "--tolerance", "0"), "--tolerance 0.0 must be a number of nats per token above 0, such as 0.05."),
        (("text", "--tolerance", "nan"), "--tolerance nan must be"),
        (("text", "--policies", ","), "--policies names none"),
        (("text", "--policies", "h20"), "h2o"),
        (("text", "--policies", "q_filter"), "q_filter needs a calibration, which a profile cannot hold"),
        (("text", "--max-new-tokens", "57"), "57: the model has 64 positions|too few"),
        (("tiny",), "FILE tiny has 4 tokens, too few for a prompt and --max-new-tokens 8"),
        (("text", "--policies", "h2o", "--tolerance", "1e-30"), "None of h2o stays within a KL of 1e-30"),
    ],
)
def test_mistakes(folder, text, monkeypatch, coarse, given, says):  # noqa: F811
    monkeypatch.chdir(text.parent)
    (text.parent / "tiny").write_text("read")
    if "--max-new-tokens" not in given:
        given = (*given, "--max-new-tokens", "8")
    result = run("tune", folder, *given, "--out", "p.json", "--length", 24)
    told = [line for line in result.stderr.splitlines() if not line.startswith("measuring ")]
    assert result.exit_code == 2 and len(told) == 1
    assert any(part in result.stderr for part in says.split("|")), result.stderr
    assert not (text.parent / "p.json").exists()
