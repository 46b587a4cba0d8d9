"""Every test must be able to fail: sabotages of the library, each of which some test must notice.

Each runs in a copy of the library with one change, and must turn the named tests red; the unchanged copy must pass them. These
are the laws, and what lies outside of policies/, cache/ and attention/: in there `make mutation` changes line by line.
"""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
OUTSIDE = {"the column kernel reads a key too many", "the forward kernel reads the place of a row too many"}
PARTS = "tests/oracle/test_oracle_parts.py"
REPLAY = "tests/attention/test_replay.py::test_logits_are_the_rollouts"
GRADIENTS = "tests/invariants/test_blocks_equal_pieces.py::test_gradients_agree_with_naive_autograd"
ORACLE = "tests/oracle/test_oracle.py::test_every_policy_on_every_architecture"
SAID = "tests/invariants/test_settings_say_what_is_held.py::test_the_settings_say_what"
OWN = "tests/arch/test_own_attention.py::test"
GRAPHED = "tests/hooks/test_generate_steps.py"
LATENT = "tests/arch/test_latent.py::test"
EDITS = "tests/invariants/test_edits_are_masks.py::test_"
TALKS = "tests/serving/test_conversations.py::test_"

# what is sabotaged: file, the text that stands there, what is put instead, the tests that must notice
MUTANTS = {
    "a pass over all tokens misses one": (
        "cache/lossless.py", "rows_TE = self._bring(layer, device)", "rows_TE = self._bring(layer, device)[:-1]",
        "tests/hooks/test_lossless.py::test_tokens_and_logits_are_the_unpatched_model_s[llama_gqa-h2o]"),
    "drafts are verified by other numbers than they were drawn from": (
        "hooks/lossless.py", "torch.stack(logits, 1) if self.samples", "torch.zeros(1, self.drafted, 97) if self.samples",
        "tests/hooks/test_lossless.py::test_sampled_tokens_have_the_unpatched_model_s_distribution"),
    "a chat over all tokens forgets what a template drops": (
        "hooks/chat.py", "            return False  # it keeps exact entries, and later tokens attended to these",
        "            pass",
        "tests/hooks/test_lossless_chat.py::test_what_a_template_takes_back_is_read_from_there_on"),
    "a file's places are not those of its tokens": (
        "storage/lossless.py", 'if edited > T or not torch.equal(newest, torch.arange(edited, T, device="cpu")):',
        "if edited > T:",
        "tests/storage/test_lossless_file.py::test_a_file_that_was_altered_is_refused"),
    "forget() leaves the last token of a span": (
        "cache/editing.py", "gone_BT[rows, start:stop] = True", "gone_BT[rows, start : stop - 1] = True",
        "tests/cache/test_forget.py::test_what_stays_is_bit_for_bit_what_it_was[16-h2o-12]"),
    "a place too many opens where a text becomes longer": (
        "cache/replacing.py", "max(ids_BN.shape[1] - (stop - start), 0)",
        "max(ids_BN.shape[1] - (stop - start) + int(stop == start), 0)", f"{EDITS}insertions_are_free_places[llama_gqa]"),
    "a span goes before the model that replaces it is checked": (
        "hooks/editing.py", "    ownership.note_reader(cache, reader, state)\n",
        "    cache.forget([span])\n    ownership.note_reader(cache, reader, state)\n",
        "tests/cache/test_bad_edits.py::test_a_cache_of_another_patch_is_not_edited"),
    "a calibration of another model is taken": (
        "hooks/target.py", "if model.get(name) != here.get(name):", "if False:",
        "tests/policies/test_calibration.py::test_another_model_and_other_shapes"),
    "options of settings are left out": (
        "storage/settings.py", '"k": self.k, **self.options, **given}', '"k": self.k, **given}',
        "tests/storage/test_settings.py::test_settings_keep_what_their_arguments_keep"),
    "a text that begins with a prefix writes to it": (
        "cache/prefix.py", "new = self._cache.clone()", "new = self._cache",
        "tests/hooks/test_prefix.py::test_as_if_read_anew[h2o-0.4-{}]"),
    "earlier turns are not compared": (
        "hooks/texts.py", "(known_BT >= 0)", "(known_BT >= 0) & (known_BT.new_ones(1, known_BT.shape[1]).cumsum(-1) > 30)",
        "tests/hooks/test_texts.py::test_an_edit_anywhere_is_refused_by_its_column[3]"),
    "a replayed token seen by the query that no longer saw it": (
        "backends/torch_backend.py", "(rows < keys.deaths_BHT", "(rows <= keys.deaths_BHT", f"{REPLAY}[gptj-h2o]"),
    "several texts packed into a row": (
        "hooks/positions.py", "        inputs.refuse_packed_rows(call)\n", "        pass\n",
        "tests/robustness/test_packing.py::test_texts_that_are_packed_into_a_row_are_refused"),
    "a conversation is the first row, whichever request ends": (
        "serving/rows.py", "return part.cache.select_rows(part.names.index(name))", "return part.cache.select_rows(0)",
        TALKS + "each_turn_is_that_of_one_cache[h2o-24-{}]"),
    "a conversation is taken back into an earlier prompt": (
        "serving/conversations.py", "if not one.cache.settings.transparent and length < one.answer:", "if False:",
        f"{TALKS}a_difference_in_an_earlier_turn"),
    "a request writes to the conversation that it goes on from": (
        "serving/conversations.py", "new, self._cache = self._cache.clone(), None", "new, self._cache = self._cache, None",
        f"{TALKS}two_requests_that_go_on_from_one_conversation"),
    "spans of an edited text are taken for those of the cache": (
        "serving/conversations.py", "return one.positions[start], one.positions[stop - 1] + 1", "return start, stop",
        f"{TALKS}spans_that_are_replaced"),
    "what a conversation holds is not claimed": (
        "serving/request.py", "count = before + rest + new", "count = rest + new",
        f"{TALKS}blocks_of_a_request_that_goes_on"),
    "packed rows in the order of requests": (
        "serving/pool.py", "columns_B1 = on_device([[first[name]] for name in rows.alive]",
        "columns_B1 = on_device([[first[name]] for name in reversed(rows.alive)]",
        "tests/serving/test_generate_batch.py::test_every_policy[24-h2o]"),
    "tokens that wait for their eviction are not counted": (
        "cache/holding.py", "outside + most + every - 1", "outside + most", f"{SAID}_heads_hold_and_allocate"),
    "a hybrid's states left where rows were": (
        "cache/cache.py", "            self.states.map_rows(change)\n", "",
        "tests/cache/test_hybrid.py::test_states_follow_rows_copies_and_files"),
    "score not reset when a slot is reused": (
        "cache/layer.py", "self.state[name].view(-1).index_fill_(0, slot, 0)", "pass", f"{ORACLE}[llama-h2o]"),
    "group not summed": (
        "policies/statistics.py", "    return block.p_NGRM.flatten(1, 2).sum(1)", "    return block.p_NGRM[:, 0].sum(1)",
        f"{ORACLE}[llama_gqa-h2o]"),
    "reorder forgets scores": (
        "cache/layer.py", '("positions", "state", "limits"', '("positions", "limits"',
        "tests/invariants/test_rows_are_as_alone.py::test_beams_carry_their_own_history"),
    "victim chosen before scores are updated": (
        "attention/decode.py",
        "    if call.steppers:",
        "    if call.evicting:\n        _evict_over_budget(call, newest_B11, t)\n        return\n    if call.steppers:",
        f"{ORACLE}[llama-tova]"),
    "sliding window off by one while decoding": (
        "backends/torch_backend.py", "(positions < find_oldest(geometry.sliding, newest_B11))",
        "(positions < find_oldest(geometry.sliding, newest_B11) - 1)", f"{ORACLE}[mistral_sliding-full]"),
    "ALiBi from slots instead of positions": (
        "backends/torch_backend.py", "_find_alibi(slopes, positions[:, :, None], newest_B11",
        "_find_alibi(slopes, torch.arange(positions.shape[-1]).expand_as(positions)[:, :, None], newest_B11",
        f"{ORACLE}[mpt-streaming_llm]"),
    "a sink takes no share": (
        "backends/torch_backend.py", "-1).softmax(-1)[..., :-1]", "-1)[..., :-1].softmax(-1)",
        "tests/arch/test_families.py::test_every_policy[gpt_oss-key_attention]"),
    "latents: values are noted unrounded": (
        "backends/entries.py",
        "return Rounded(whole.bits, self.D, self.D * whole.groups // whole.D, whole.dtype, centre).cached(x)",
        "return x", f"{LATENT}_values_are_noted_as_they_are_rounded"),
    "CodeGen's values taken as keys": (
        "arch/gptj.py", "q, v, k = (heads_first(part", "q, k, v = (heads_first(part",
        f"{OWN}_evictions_are_the_oracles[codegen-h2o]"),
    "keys and values beside the cache": (
        "arch/separate.py", 'if getattr(model, "use_prompt", False):', "if False:",
        f"{OWN}_what_stands_beside_the_cache_is_refused"),
    "a graph goes on after its model has changed": (
        "hooks/generate_steps.py", "described is None or described != self._described", "described is None",
        f"{GRAPHED}::test_a_model_that_has_changed_is_captured_anew[_swap]"),
    "a graph goes on although its cache has left": (
        "hooks/graph.py", " and cache.seen_B is self.seen_B and", " and",
        "tests/hooks/test_graph.py::test_two_graphs_may_take_turns_over_one_cache"),
    "prompts that were read together are all given the first one's row": (
        "serving/vllm/requests.py", "rows.cache.select_rows(rows.names.index(name))", "rows.cache.select_rows(0)",
        "tests/serving/test_prompts_together.py::test_each_prompt_gives_what_it_gives_alone[h2o---some wait-32]"),
    "roll-back forgets scores": (
        "cache/rollback.py", "        layer.state[name][:, :, :C] = tensor[:, :, :C]", "        pass",
        "tests/cache/test_rollback.py::test_rolling_back_restores_everything[roco]"),
    "shares without rounding": (
        "policies/budgets.py", "value * of + 1e-6", "value * of",
        "tests/invariants/test_held_within_budget.py::test_budgets_of_every_kind"),
    "a module stays patched": (
        "hooks/state.py", "        vars(module).pop(name, None)", "        pass",
        "tests/invariants/test_model_is_restored.py::test_after_the_block_the_model_is_as_before"),
    "training goes through the cache": (
        "hooks/decoder.py", "(not use_cache or decoder.training)", "(not use_cache)",
        "tests/invariants/test_training_outside_is_inside.py::test_a_training_step_is_bit_for_bit_the_same"),
    "bound steps: the key as the value": (
        "attention/bound_step.py", "self.kv.encode_pair(k, v)", "self.kv.encode_pair(k, k)",
        "tests/attention/test_bound_step.py::test_bound_steps_are_the_steps[h2o]"),
    "the mean of a second reading's rows for their maximum": (
        "backends/torch_backend.py", "x_NTR.amax(-1)", "x_NTR.mean(-1)", f"{ORACLE}[llama_gqa-kvzip]"),
    "a block's scores dropped": (
        "attention/prefill.py", "        call.add(sums)", "        if call.now.final:\n            call.add(sums)",
        f"{PARTS}::test_blocks[h2o-7]"),
    "no gradient through keys that are evicted later": (
        "cache/layer.py", "            with torch.enable_grad():\n                self.graph = (gather_entries",
        "            with torch.no_grad():\n                self.graph = (gather_entries",
        f"{GRADIENTS}[llama_gqa-roco-None]"),
    "an altered file passes": (
        "storage/file.py", "if given != checksum(text, tensors):", "if False:",
        "tests/storage/test_storage.py::test_truncated_altered_and_missing_files_are_refused"),
    "noise drawn from the slot, not the position": (
        "policies/needs/noisy_sums.py", 'rearrange(new.positions_BQ, "b q -> b 1 q 1")',
        'rearrange(torch.arange(Q).expand(B, Q), "b q -> b 1 q 1")', f"{ORACLE}[llama-keyformer]"),
    "a compiled step stands still": (
        "cache/compiled.py", "    cache.lengths_B.add_(1)", "    cache.lengths_B.add_(0)",
        "tests/cache/test_compiled.py::test_a_compiled_step_computes_what_an_uncompiled_one_does[llama_gqa-h2o-{'k': 0.5}]"),
    "the column kernel reads a key too many": (
        "backends/triton/columns.py", "k = tl.load(k_tile, mask=(n < T)[:, None]",
        "k = tl.load(k_tile, mask=(n < T + 1)[:, None]",
        "tests/backends/test_triton_columns.py::test_column_statistics[group 4]"),
    "the forward kernel reads the place of a row too many": (
        "backends/triton/forward.py", "rows = tl.load(rows_ptr + b * Q + m, mask=m < Q,",
        "rows = tl.load(rows_ptr + b * Q + m, mask=m < Q + 1,",
        "tests/backends/test_triton_forward.py::test_output_and_normalizers_in_one_pass[window]"),
    "the kernel's victim ignores the protected window": (
        "backends/triton/combine.py", "position > newest - recent, LAST", "position > newest, LAST",
        "tests/invariants/test_backends_agree.py::test_every_policy_on_the_kernels[h2o]"),
    "flash's window one too wide": (
        "backends/flash/flash_backend.py", "else geometry.sliding - 1", "else geometry.sliding",
        "tests/backends/test_flash.py::test_attention_and_log_sum_exp[torch-window]"),
    "attention that kvpatch does not reach passes": (
        "arch/interface.py", "        if not attended:", "        if False:",
        "tests/arch/test_remote_code.py::test_a_forward_that_hands_nothing_on_is_refused[keeps them]"),
}  # fmt: skip


@pytest.fixture(scope="module")
def worker():
    """`worker(folder, tests)` runs pytest there, in a fork of a process that has imported everything but the library."""
    command = [sys.executable, str(ROOT / "tools" / "reliability" / "mutation_worker.py")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(folder: Path, tests: list[str]) -> tuple[int, str]:
        log = folder / "log.txt"
        process.stdin.write(json.dumps({"folder": str(folder), "log": str(log), "tests": tests}) + "\n")
        process.stdin.flush()
        return int(process.stdout.readline()), log.read_text()[-3000:]

    yield run
    process.stdin.close()
    process.wait(timeout=600)


def copy_to(folder: Path) -> None:
    for part in ("kvpatch", "tests", "tools"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "models"))
    shutil.copy(ROOT / "setup.cfg", folder)  # the settings of pytest


@pytest.mark.slow
def test_the_unchanged_copy_passes(tmp_path, worker):
    copy_to(tmp_path)
    (tmp_path / "tests" / "test_where.py").write_text(
        f"import kvpatch\n\ndef test_where():\n    assert kvpatch.__file__.startswith({str(tmp_path)!r})\n"
    )
    status, log = worker(tmp_path, ["tests/test_where.py", f"{ORACLE}[llama-h2o]"])
    assert status == 0, log


def test_each_sabotage_finds_its_line_and_its_test():
    """A moved line is named here, before the slow tests begin."""
    for name, (file, before, after, tests) in MUTANTS.items():
        source = (ROOT / "kvpatch" / file).read_text()
        assert source.count(before) == 1, f"{name}: the line to sabotage stands {source.count(before)} times in {file}"
        assert ast.dump(ast.parse(source.replace(before, after))) != ast.dump(ast.parse(source)), f"{name}: changes nothing"
        path, *parts = tests.partition("[")[0].split("::")
        assert not parts or f"def {parts[-1]}(" in (ROOT / path).read_text(), f"{name}: no test {tests}"


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails_its_test(name, tmp_path, worker):
    file, before, after, tests = MUTANTS[name]
    if name in OUTSIDE and torch.cuda.is_available():
        pytest.skip("only Triton's interpreter tells which addresses are a tensor's")
    copy_to(tmp_path)
    path = tmp_path / "kvpatch" / file
    source = path.read_text()
    path.write_text(source.replace(before, after))
    status, log = worker(tmp_path, [tests])
    assert status == 1, f"{name}: nothing noticed\n{log}"
