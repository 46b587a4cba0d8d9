"""Misuses of registries, policies and of what stands behind the command line: rows as in misuse.py."""

from __future__ import annotations

from typing import Any

import torch
from typer.testing import CliRunner

import kvpatch
from kvpatch import (
    Adapter,
    InterfaceAdapter,
    KVPatchError,
    Policy,
    Settings,
    get_policy,
    register_arch,
    register_policy,
)
from kvpatch.cli import compare
from kvpatch.cli.commands import app
from kvpatch.cli.loading import load_model, load_tokenizer, read_prompt
from kvpatch.cli.options import parse_bits, parse_options
from kvpatch.evaluation.check import Checks
from kvpatch.policies import POLICIES
from kvpatch.policies.scopes import Scope
from kvpatch.policies.scores import Accumulated
from tests.helpers.misuse_world import row

HUGE, NAN = 10**30, float("nan")
EMBEDS = {"input_ids": None, "inputs_embeds": torch.ones(2, 20, 32)}
_m = row("model")


class Nameless(Adapter):
    classes = ("a.b.Attention",)


class OneString(Adapter):
    name, classes = "one", "a.b.Attention"  # type: ignore[assignment]


class NoClass(Adapter):
    name, classes = "none", ()


def _call(*arguments: str) -> Any:
    """A command of `kvpatch`; its mistake as the command line shows it."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    raise KVPatchError(result.stderr)


# fmt: off
ARGUMENTS = [
    _m("patched without a model", lambda w: kvpatch.patched(), r"model", TypeError),
    _m("patched a model's name", lambda w: kvpatch.patch("gpt2", "h2o"), r"takes a model \(torch\.nn\.Module\), not str"),
    _m("patched a model class", lambda w: kvpatch.patch(type(w.model), "h2o"), r"takes a model .* not type"),
    _m("a policy's class", lambda w: w.patched(Accumulated), r"Unknown policy .*Accumulated"),
    _m("a score for a policy", lambda w: w.patched(Accumulated()), r"Accumulated.*is a score.*Policy\("),
    _m("no policy", lambda w: w.patched(None), r"(?s)needs a policy.*patched\(model, \"snapkv\""),
    _m("k by a wrong name", lambda w: w.patched("h2o", K=0.5), r"patched\(\) has no option 'K'\. Did you mean 'k'\?"),
    _m("positions by a wrong name", lambda w: w.patched("h2o", position="original"), r"Did you mean 'positions'\?"),
    _m("k that is too large", lambda w: w.patched("h2o", HUGE), r"k=1\d+ tokens is more than"),
    _m("k as a tensor of two dimensions", lambda w: w.patched("h2o", torch.tensor([[0.5, 0.5]])), r"k has 1 entries"),
    _m("k as a tensor of truth", lambda w: w.patched("h2o", torch.tensor(True)), r"k=True is not a budget"),
    _m("k as bytes", lambda w: w.patched("h2o", b"2GiB"), r"k=b'2GiB' is not a budget"),
    _m("k as a set", lambda w: w.patched("h2o", {0.5, 0.2}), r"is not a budget"),
    _m("k per head, too few", lambda w: w.patched("h2o", [[0.5], 0.5]), r"length 1 for a layer that has 2 KV heads: give k\[l"),
    _m("k per head, nested", lambda w: w.patched("h2o", [[[4], [4]], 0.5]), r"k\[0\]\[0\]=\[4\] is not a budget"),
    _m("k per head in bytes", lambda w: w.patched("h2o", [["1GiB", 4], 4]), r"is a size in bytes.*give tokens such as"),
    _m("a mass above all", lambda w: w.patched("h2o", kvpatch.Mass(1.2)), r"Mass\(1\.2\): give a share of the scores' sum"),
    _m("a mass of no weights", lambda w: w.patched("window", kvpatch.Mass(0.9)), r"takes scores for weights.*such as those of"),
    _m("a mass without a size", lambda w: w.patched("h2o", kvpatch.Mass(0.9)), r"recent=0\.5 .*give tokens, such as recent=32"),
    _m("a threshold of no weights", lambda w: w.patched("key_diff", kvpatch.Threshold(1)), r"takes scores for weights"),
    _m("a growing share", lambda w: w.patched("h2o", kvpatch.Share(0.5), schedule="decode"), r"give schedule='both'"),
    _m("block that is too large", lambda w: w.patched("h2o", block=HUGE), r"block=1\d+ .*at most"),
    _m("block as text", lambda w: w.patched("h2o", block="8"), r"block='8' must be a number of tokens"),
    _m("seed of nothing", lambda w: w.patched("h2o", seed=None), r"seed=None must be an int"),
    _m("bits by transformers' name", lambda w: w.patched("h2o", nbits=4), r"no option 'nbits'\. Did you mean 'bits'\?"),
    _m("bits as a tensor", lambda w: w.patched("h2o", bits=torch.tensor(8)), r"bits=tensor\(8\) must be 16 .*8 or 4"),
    _m("bits per layer", lambda w: w.patched("h2o", bits=[8, 4]), r"bits=\[8, 4\] must be 16"),
    _m("positions of nothing", lambda w: w.patched("h2o", positions=None), r"positions=None is unknown; use"),
    _m("backend of nothing", lambda w: w.patched("h2o", backend=None), r"Unknown backend None"),
    _m("schedule as a number", lambda w: w.patched("h2o", schedule=3), r"schedule=3 must be one of"),
    _m("schedule of no letters", lambda w: w.patched("h2o", schedule=""), r"schedule='' must be one of"),
    _m("every as a share", lambda w: w.patched("h2o", every=0.5), r"every=0\.5 must be a number of tokens that decode steps"),
    _m("every of zero", lambda w: w.patched("h2o", every=0), r"every=0 must be a number .* at least 1"),
    _m("every above the budget", lambda w: w.patched("h2o", 8, every=9), r"every=9 evicts .* budget of 8 keeps: give every=8"),
    _m("every of one that evicts once", lambda w: w.patched("snapkv", every=4), r"every=4 is for policies that evict while"),
    _m("every of a policy that never evicts", lambda w: w.patched("full", every=4), r"every=4: policy 'full' never evicts"),
    _m("sinks of NaN", lambda w: w.patched("h2o", sinks=NAN), r"sinks=nan must be a number"),
    _m("recent of NaN", lambda w: w.patched("h2o", recent=NAN), r"recent=nan must be"),
    _m("recent of infinity", lambda w: w.patched("h2o", recent=float("inf")), r"recent=inf must be"),
    _m("protected of NaN", lambda w: w.patched("roco", protected=NAN), r"protected=nan must be"),
    _m("protect with negative ids", lambda w: w.patched("h2o", protect=[3, -1]), r"protect= names token -1"),
    _m("protect nothing", lambda w: w.patched("h2o", protect=[]), r"protect=\[\] marks nothing.*None"),
    _m("protect images in a model of text", lambda w: w.patched("h2o", protect="image"), r"names no token of an image"),
    _m("protect of three dimensions", lambda w: w.patched("h2o", protect=torch.ones(1, 1, 4).bool()), r"3 dimensions: give"),
    _m("protect as a set", lambda w: w.patched("h2o", protect={3, 4}), r"protect=\{3, 4\} must be a boolean mask"),
    _m("protect as lists of several lengths", lambda w: w.patched("h2o", protect=[[True], [True] * 2]), r"must be a boolean"),
    _m("protect a mask of another length", lambda w: w.reads("h2o", {}, protect=torch.ones(7).bool()),
       r"protect= is a mask of shape \[2, 7\], but the prompt is \[2, 20\]"),
    _m("protect a mask of more rows", lambda w: w.reads("h2o", {}, protect=torch.ones(3, 20).bool()),
       r"protect= is a mask of shape \[3, 20\], but the prompt is \[2, 20\]"),
    _m("protect by ids where there are none", lambda w: w.reads("h2o", EMBEDS, protect=[3]),
       r"needs input_ids; with inputs_embeds give a boolean mask"),
    _m("protect the system message of ids", lambda w: w.reads("h2o", {}, protect="system"), r"came without messages: use"),
    _m("quota of nothing", lambda w: w.patched("h2o", quota=[]), r"quota=\[\] names no span: give \(start, stop\) of each"),
    _m("quota of an empty span", lambda w: w.patched("h2o", quota=[(0, 4), (6, 6)]), r"the span \(6, 6\): give columns"),
    _m("quota of a span from behind", lambda w: w.patched("h2o", quota=[(-4, 3)]), r"the span \(-4, 3\): give .* 0 <= start"),
    _m("quota of a span of shares", lambda w: w.patched("h2o", quota=[(0.0, 0.5)]), r"the span \(0\.0, 0\.5\): give columns"),
    _m("quota of overlapping spans", lambda w: w.patched("h2o", quota=[(5, 9), (0, 6)]), r"spans \(0, 6\) and \(5, 9\), which"),
    _m("quota as a word", lambda w: w.patched("h2o", quota="turns"), r"quota='turns': give spans of the prompt"),
    _m("quota as a mask", lambda w: w.patched("h2o", quota=torch.ones(20).bool()), r"quota= has dtype torch\.bool and 1 dimen"),
    _m("quota of three dimensions", lambda w: w.patched("h2o", quota=torch.ones(1, 1, 4).long()), r"3 dimensions: give spans"),
    _m("quota of negative numbers", lambda w: w.patched("h2o", quota=[0, -2]), r"span number -2: give 0, 1, 2, \.\.\. and -1"),
    _m("quota without a span", lambda w: w.patched("h2o", quota=[-1] * 20), r"quota= has no span: give each of its tokens"),
    _m("quota of no tokens", lambda w: w.patched("h2o", quota=torch.empty(0).long()), r"quota= has no span: give each"),
    _m("quota beyond the prompt", lambda w: w.reads("h2o", {}, quota=[(3, 21)]), r"column 21, but the prompt has 20: give"),
    _m("quota of another length", lambda w: w.reads("h2o", {}, quota=[0] * 7), r"shape \[7\], but the prompt is \[2, 20\]"),
    _m("quota for more rows", lambda w: w.reads("h2o", {}, quota=torch.zeros(3, 20).long()),
       r"numbers of shape \[3, 20\], but the prompt is \[2, 20\]"),
    _m("quota of a prompt that stays", lambda w: w.patched("raas", quota=[(0, 9)]), r"schedule='decode' keeps the prompt"),
    _m("quota of a budget by mass", lambda w: kvpatch.patched(w.model, "h2o", kvpatch.Mass(0.9), quota=[(0, 9)]),
       r"k=Mass.* no budget to share: leave quota out"),
    _m("window that is too large", lambda w: w.patched("snapkv", window=HUGE), r"window=1\d+ .*at most"),
    _m("window True", lambda w: w.patched("snapkv", window=True), r"window=True must be a number of rows"),
    _m("kernel that is too large", lambda w: w.patched("snapkv", kernel=HUGE + 1),
       r"kernel=1\d+ must be an odd number of tokens, 1 to"),
    _m("kernel True", lambda w: w.patched("snapkv", kernel=True), r"kernel=True must be an odd number"),
    _m("dilation True", lambda w: w.patched("dilated_window", dilation=True), r"dilation=True must be a whole number"),
    _m("dilation that is too large", lambda w: w.patched("dilated_window", dilation=HUGE), r"dilation=1\d+ must be .* 0 to"),
    _m("tau of text", lambda w: w.patched("keyformer", tau="12"), r"tau='12' must be two positive temperatures"),
    _m("tau of words", lambda w: w.patched("keyformer", tau=("a", "b")), r"tau=\('a', 'b'\) must be two positive"),
    _m("tau of NaN", lambda w: w.patched("keyformer", tau=(NAN, 1.0)), r"tau=\(nan, 1\.0\) must be two positive"),
    _m("tau of infinity", lambda w: w.patched("keyformer", tau=(1.0, float("inf"))), r"tau=\(1\.0, inf\) must be two positive"),
    _m("damping as text", lambda w: w.patched("keyformer", damping="1"), r"damping='1' must be in \[0, 1\]"),
    _m("damping of NaN", lambda w: w.patched("keyformer", damping=NAN), r"damping=nan must be in"),
    _m("generation_length True", lambda w: w.patched("keyformer", generation_length=True), r"generation_length=True must be"),
    _m("resample as text", lambda w: w.patched("keyformer", resample="no"), r"resample='no' must be True or False"),
    _m("shared as text", lambda w: w.patched("keyformer", shared="no"), r"shared='no' must be True or False"),
    _m("noise of nothing", lambda w: w.patched("keyformer", noise=None), r"noise=None must be 'gumbel'"),
    _m("alpha of NaN", lambda w: w.patched("critical_snapkv", alpha=NAN), r"alpha=nan must be a number in"),
    _m("norm as text", lambda w: w.patched("critical_snapkv", norm="1"), r"norm='1' must be 1 or 2"),
    _m("floor as text", lambda w: w.patched("adakv", floor="0.2"), r"floor='0\.2' must be a share"),
    _m("beta of infinity", lambda w: w.patched("pyramidkv", beta=float("inf")), r"beta=inf must be a number"),
    _m("get_policy of nothing", lambda w: get_policy(None), r"Unknown policy None"),
    _m("get_policy of a broken combination", lambda w: get_policy("critical("), r"Unknown policy 'critical\('"),
    _m("get_policy of an empty combination", lambda w: get_policy("critical( )"), r"Unknown policy"),
    _m("critical of nothing", lambda w: kvpatch.policies.critical(None), r"Unknown policy None"),
    _m("a policy with a score's name", lambda w: Policy("mine", "h2o"), r"score='h2o' is not a kvpatch Score"),
    _m("a policy without a scope", lambda w: Policy("mine", Accumulated(), None), r"scope=None is not a kvpatch Scope"),
    _m("a policy named by a number", lambda w: Policy(3, Accumulated(), Scope()), r"name=3 .* such as 'my_policy'"),
    _m("register_policy without a name", lambda w: register_policy(None, get_policy("h2o")),
       r"must be an identifier.*not None"),
    _m("register_policy by a name with a space", lambda w: register_policy("my h2o", get_policy("h2o")), r"not 'my h2o'"),
    _m("register_policy by a known name", lambda w: register_policy("h2o", get_policy("tova")), r"already registered; choose"),
    _m("register_policy with a name for a policy", lambda w: register_policy("mine", "h2o"), r"not str: build one from"),
    _m("register_arch with a class", lambda w: register_arch(Nameless), r"takes an instance.*MyAdapter\(\)"),
    _m("register_arch without a name", lambda w: register_arch(Nameless()), r"Nameless has no name: set"),
    _m("register_arch with one string", lambda w: register_arch(OneString()),
       r"classes='a\.b\.Attention'.*\('a\.b\.Attention',\)"),
    _m("register_arch without classes", lambda w: register_arch(NoClass()), r"classes=\(\).*package\.module\.ClassName"),
    _m("register_arch of what is served", lambda w: register_arch(kvpatch.arch.LlamaAdapter()),
       r"served by the adapter 'llama'"),
    _m("an InterfaceAdapter by a short name", lambda w: register_arch(InterfaceAdapter("mine", "Attention")),
       r"package\.module\.ClassName"),
    _m("Checks of an unknown policy", lambda w: Checks(w.model, "h20"), r"Unknown policy 'h20'\. Did you mean 'h2o'"),
    _m("Checks of no budget", lambda w: Checks(w.model, "h2o", 0), r"k=0 tokens keeps nothing"),
    _m("Checks of no model", lambda w: Checks("gpt2"), r"takes a model .* not str"),
    _m("--dtype of another name", lambda w: load_model("x", "float8"), r"--dtype float8 is unknown.*Known: auto"),
    _m("--device of another name", lambda w: load_model("x", "auto", "gpu"), r"--device gpu cannot be used"),
    _m("a model of a missing folder", lambda w: load_model("./none"),
       r"The model \./none cannot be loaded: there is no such folder"),
    _m("a tokenizer of a missing folder", lambda w: load_tokenizer("./none"),
       r"The model \./none cannot be loaded: there is no such folder"),
    _m("a prompt that is missing", lambda w: read_prompt("no.txt"), r"FILE no\.txt cannot be read: No such file"),
    _m("a prompt that is a folder", lambda w: read_prompt(str(w.folder)), r"cannot be read: Is a directory"),
    _m("--option without a value", lambda w: parse_options(["window"]), r"--option window must look like name=value"),
    _m("--policies of none", lambda w: compare.choose_policies(",", {}, 8), r"--policies names none: give some"),
    _m("--option that no policy has", lambda w: compare.choose_policies("h2o", {"windw": 1}, 8),
       r"--option windw: none of h2o has it"),
    _m("--bits of none", lambda w: parse_bits(","), r"--bits names none: give some of 16, 8 and 4, or auto"),
    _m("--bits of another number", lambda w: parse_bits("16,5"), r"--bits='5' must be one of 16, 8, 4"),
    _m("--budgets of none", lambda w: compare.parse_budgets(" "), r"-k names no budget: give some"),
    _m("--budgets with a word", lambda w: compare.parse_budgets("0.5,much"), r"-k much is no budget"),

          _m("kvpatch generate by a wrong policy",
       lambda w: _call("generate", "--model", "x", "--prompt-file", "x", "--policy", "h20"),
       r"kvpatch: Unknown policy 'h20'\. Did you mean 'h2o'"),
    _m("kvpatch generate with other bits",
       lambda w: _call("generate", "--model", "x", "--prompt-file", "x", "--bits", "5"),
       r"kvpatch: --bits=5 must be one of 16, 8, 4"),
    _m("kvpatch compare under no budget", lambda w: _call("compare", "--model", "x", "x", "-k", "mass:"),
       r"-k mass: is no budget: give .* mass:0\.95, share:0\.5"),
    _m("settings that are not there", lambda w: kvpatch.patched(w.model, Settings.load("none")),
       r"There is no file none: give one that Settings\.save wrote"),
    _m("settings and k", lambda w: kvpatch.patched(w.model, Settings("h2o"), k=0.3),
       r"k=0\.3 is given beside Settings with k=0\.5: give k in the Settings, or beside"),
    _m("settings and an option that they have",
       lambda w: kvpatch.patched(w.model, Settings("h2o", 0.5, {"recent": 4}), recent=8),
       r"recent=8 is given beside Settings with recent=4: leave it out"),
    _m("settings with a misspelt option", lambda w: Settings("snapkv", 0.5, {"windw": 8}),
       r"no option 'windw'\. Did you mean 'window'"),
    _m("settings with a policy's object", lambda w: Settings(get_policy("h2o")),  # type: ignore[arg-type]
       r"policy of type Policy is no name that a file can hold: give one of list_policies\(\)"),
    _m("settings for checks with bits", lambda w: kvpatch.check_model(w.model, Settings("h2o", 9, {"bits": 8})),
       r"tests a policy and k, not bits=8 of the Settings"),
    _m("kvpatch check of a missing folder", lambda w: _call("check", "--model", "./none"),
       r"kvpatch: The model \./none cannot be loaded: there is no"),
]
# fmt: on
assert "mine" not in POLICIES
