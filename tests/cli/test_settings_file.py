"""`--settings FILE` of generate, check and serve, in place of --policy and -k."""

import json

import pytest

import kvpatch
from kvpatch import Settings
from kvpatch.cli import generating, serving
from kvpatch.evaluation import check
from tests.cli.test_cli import folder, prompt, run  # noqa: F401

OPTIONS = {"recent": 4, "schedule": "prompt", "bits": 8, "seed": 3}


@pytest.fixture
def file(tmp_path):
    Settings("h2o", 9, OPTIONS).save(tmp_path / "settings.json")
    return tmp_path / "settings.json"


@pytest.fixture
def patches(monkeypatch):
    """What `generate` hands to `patched`."""
    given, real = [], kvpatch.patched

    def patched(model, policy, k, **how):
        given.append((policy, k, how))
        return real(model, policy, k, **how)

    monkeypatch.setattr(generating, "patched", patched)
    return given


def test_generate_takes_a_file(folder, prompt, file, patches):  # noqa: F811
    arguments = ("generate", folder, prompt, "--max-new-tokens", 2, "--settings", file)
    result = run(*arguments, "--strict", "-o", "sinks=3")
    assert result.exit_code == 0, result.output
    wanted = kvpatch.get_policy("h2o").with_options("prompt", recent=4, sinks=3)
    others = {"bits": 8, "block": None, "positions": "original", "backend": "auto", "seed": 3, "strict": True}
    assert patches == [(wanted, 9, others)]
    typed = ("--policy", "h2o", "-k", 9, "--schedule", "prompt", "--bits", 8, "--seed", 3, "-o", "recent=4")
    plain = run(*arguments[:-2], *typed)
    assert run(*arguments).stdout.partition(generating.MARK)[0] == plain.stdout.partition(generating.MARK)[0]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--policy", "h2o"), "--policy h2o and --settings settings.json both name a policy: give one of them."),
        (("-k", "0.5"), "k='0.5' is given beside Settings with k=9: give k in the Settings, or beside"),
        (("--bits", "16"), "bits=16 is given beside Settings with bits=8: leave it out, or change it in the Settings."),
        (
            ("-o", "recent=8"),
            "recent=8 is given beside Settings with recent=4: leave it out, or change it in the Settings.",
        ),
        (("-o", "recnt=8"), "Policy 'h2o' has no option 'recnt'. Did you mean 'recent'?"),
        (("--settings", "none"), "There is no file none: give one that Settings.save wrote."),
    ],
)
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_mistakes(folder, prompt, file, monkeypatch, command, more, says):  # noqa: F811
    monkeypatch.chdir(file.parent)
    monkeypatch.setattr("kvpatch.cli.loading.load_model", None)
    texts = (prompt,) if command == "generate" else ()
    result = run(command, folder, *texts, "--settings", "settings.json", *more)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"kvpatch: {says}") and len(result.stderr.splitlines()) == 1


def test_a_calibration_is_asked_for(folder, prompt, tmp_path):  # noqa: F811
    Settings("q_filter").save(tmp_path / "q.json")
    result = run("generate", folder, prompt, "--settings", tmp_path / "q.json")
    assert result.exit_code == 2 and "give -o calibration=calibration.safetensors" in result.stderr


def test_check_takes_policy_and_seed(folder, file, tmp_path, monkeypatch):  # noqa: F811
    given, real = [], check.check_model
    monkeypatch.setattr(check, "check_model", lambda model, **how: given.append(how) or real(model, **how))
    Settings("snapkv", 0.3, {"window": 4, "seed": 3}).save(tmp_path / "plain.json")
    result = run("check", folder, "--settings", tmp_path / "plain.json", "--json")
    assert result.exit_code == 0, result.output
    assert given == [{"policy": kvpatch.get_policy("snapkv").with_options(window=4), "k": 0.3, "seed": 3}]
    table = json.loads(result.stdout)
    assert (table["policy"], table["k"]) == ("snapkv", "0.3")
    result = run("check", folder, "--settings", file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"--settings {file} has bits=8, which check does not test: give --policy and -k." in result.stderr


def test_serve_hands_on_what_the_file_has(folder, file, monkeypatch):  # noqa: F811
    given = []
    monkeypatch.setattr(serving, "run", lambda *arguments, conversations: given.append(arguments))
    assert run("serve", folder, "--settings", file, "--backend", "torch").exit_code == 0
    (_, policy, k, how, *_), = given  # fmt: skip
    assert (policy, k) == (kvpatch.get_policy("h2o").with_options("prompt", recent=4), 9)
    assert how == {"bits": 8, "positions": "original", "backend": "torch", "seed": 3}
