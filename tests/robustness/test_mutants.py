"""Every test must be able to fail: sabotages of the library, each of which some test must notice.

Each runs in a copy of the library with one change, and must turn the named tests red; the unchanged copy must pass them.
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
ALIKE = "tests/oracle/test_oracle.py::test_rows_of_one_length"
SHELLS = "tests/arch/test_shells.py::test_tokens_of_images_are_protected_by_name_and_by_id"
PARTS = "tests/oracle/test_oracle_parts.py"
READERS = "tests/cache/test_shared_keys.py"
KERNELS = "tests/backends/test_triton_replay.py::test"
REPLAY = "tests/attention/test_replay.py::test_logits_are_the_rollouts"
GRADIENTS = "tests/invariants/test_blocks_equal_pieces.py::test_gradients_agree_with_naive_autograd"
ORACLE = "tests/oracle/test_oracle.py::test_every_policy_on_every_architecture"
BUDGETS = "tests/oracle/test_oracle_budgets.py::test_kept_tokens_and_logits"
SAID = "tests/invariants/test_settings_say_what_is_held.py::test_the_settings_say_what"
RHYTHM = "tests/attention/test_rhythm.py"
OWN = "tests/arch/test_own_attention.py::test"
CHUNKS = "tests/arch/test_chunks.py::test"
PAGED = "tests/cache/test_paged.py::test_rows_in_pages_are_rows"
STEPS = "tests/oracle/test_oracle_decoding.py::test_every_architecture[llama_gqa"
GRAPHED = "tests/hooks/test_generate_steps.py"
PROBES = "tests/oracle/test_oracle_decoding.py::test_by_a_calibration[llama_gqa-tri_attention"
DECODES = "tests/policies/test_decoding.py::test"
LATENT = "tests/arch/test_latent.py::test"
CENTRE = "tests/cache/test_centre.py::test"
REPLACE = "tests/cache/test_replace.py::test_"
NARROW = "tests/cache/test_narrow.py::test_every_policy_on_every_architecture"

# what is sabotaged: file, the text that stands there, what is put instead, the tests that must notice
MUTANTS = {
    "forget() leaves the last token of a span": (
        "cache/editing.py", "gone_BT[rows, start:stop] = True", "gone_BT[rows, start : stop - 1] = True",
        "tests/cache/test_forget.py::test_what_stays_is_bit_for_bit_what_it_was[16-h2o-12]"),
    "forget() of one row takes tokens of all": (
        "cache/editing.py", "gone_BT[rows, start:stop] = True", "gone_BT[:, start:stop] = True",
        "tests/cache/test_forget.py::test_what_stays_is_bit_for_bit_what_it_was[16-h2o-12]"),
    "new tokens in a span's place see what is behind them": (
        "attention/edit.py", "slots.positions.masked_fill_(self.behind, -1)", "pass",
        f"{REPLACE}what_follows_is_as_the_masked_model_reads_it[llama_gqa-h2o]"),
    "what is behind an edit loses its scores": (
        "attention/edit.py", "torch.where(mask, old, tensor)", "tensor",
        f"{REPLACE}what_stays_is_bit_for_bit_what_it_was[tova-12-8]"),
    "what is behind an edit is evicted for it": (
        "attention/edit.py", "return keys.masked_fill(kept, LAST)", "return keys",
        f"{REPLACE}what_stays_is_bit_for_bit_what_it_was[tova-12-8]"),
    "tokens that are read again are those of other positions": (
        "cache/editing.py", "stop + torch.arange(reread)", "start + torch.arange(reread)",
        f"{REPLACE}tokens_behind_are_read_again[7-h2o]"),
    "a roll-back goes behind an edit": (
        "cache/editing.py", "if cache.seen - count < cache.rows.edited:", "if False:",
        "tests/cache/test_forget.py::test_a_roll_back_stops_at_an_edit"),
    "a record does not note what was forgotten": (
        "cache/editing.py", "            if cache.lifetimes is not None:\n                cache.lifetimes.note",
        "            if False:\n                cache.lifetimes.note",
        "tests/cache/test_forget.py::test_a_record_says_when_tokens_went"),
    "a file does not say that its text was edited": (
        "storage/save_load.py", '{"edited": rows.edited} if rows.edited else {}', "{}",
        "tests/cache/test_forget.py::test_a_cache_is_saved_joined_copied_and_reordered_after_an_edit"),
    "uses of tokens not noted": (
        "policies/needs/last_uses.py", "        if not step.observes:", "        if True:", f"{STEPS}-raas-0]"),
    "the first interval of recurrence stays the longest": (
        "policies/needs/last_uses.py", "torch.maximum(longest, newest_B11 - last)", "longest", f"{STEPS}-lazy-3]"),
    "padding takes the first of the last queries' columns": (
        "policies/needs/last_queries.py", "positions % W, W)", "positions % W, 0)", f"{DECODES}_recent_queries_by_hand"),
    "the last queries kept through a roll-back": (
        "cache/rollback.py", "layer.notes[name].restore(overwritten)", "pass",
        f"{DECODES}_rolling_back_restores_everything[r_kv]"),
    "the last queries stay where rows move": (
        "cache/layer.py", '"limits", "notes", *(', '"limits", *(',
        f"{DECODES}_rows_come_and_go_and_are_saved[r_kv]"),
    "the last queries look at their own tokens": (
        "attention/layer_call.py", "(positions <= newest[:, None] - positions_BW.shape[1])", "(positions <= newest[:, None])",
        f"{STEPS}-vase-6]"),
    "the greatest logit of the group is its first head's": (
        "policies/decoding.py", "looks.x_BHGWT.amax(2).softmax(-1)", "looks.x_BHGWT[:, :, 0].softmax(-1)", f"{STEPS}-r_kv-5]"),
    "a key is like itself": (
        "policies/decoding.py", "(cosine > alike) & (own != at[:, None])", "cosine > alike", f"{DECODES}_what_is_said_again"),
    "newest tokens ranked by their values": (
        "policies/scopes.py", "(position > context.recent_B11) | (position < limits.prompt.clamp(min=0))",
        "position < limits.prompt.clamp(min=0)", f"{STEPS}-vase-6]"),
    "a sample without chance": (
        "policies/decoding.py", ".log() + noise.gumbel(u)", ".log()", f"{STEPS}-vase-6]"),
    "a calibration of another model is taken": (
        "hooks/target.py", "if model.get(name) != own.get(name):", "if False:",
        "tests/policies/test_calibration.py::test_another_model_and_other_shapes"),
    "options of settings are left out": (
        "storage/settings.py", '"k": self.k, **self.options, **given}', '"k": self.k, **given}',
        "tests/storage/test_settings.py::test_settings_keep_what_their_arguments_keep"),
    "k beside settings is taken": (
        "storage/settings.py", 'if "k" in given:', "if False:",
        "tests/storage/test_settings.py::test_what_settings_have_is_refused_beside_them"),
    "settings without their schedule": (
        "storage/settings.py", 'with_options(self.options.get("schedule"), **own)', "with_options(None, **own)",
        "tests/storage/test_settings.py::test_the_policy_of_settings"),
    "settings with another budget than the advised one": (
        "cli/compare.py", "view.settings(*given).save(path)", "view.settings(*given[:1], '0.5', *given[2:]).save(path)",
        "tests/cli/test_compare.py::test_the_advised_settings_are_written"),
    "values of other tokens": (
        "backends/torch_backend.py", "return v_NTD[own].gather(1, order.expand(-1, -1, v_NTD.shape[-1]))", "return v_NTD[own]",
        "tests/cache/test_turns.py::test_a_padded_batch_has_turns_too[dropkv]"),
    "an altered calibration is read": (
        "storage/kinds.py", 'verify_checksum(texts.get("checksum"), texts["kvpatch"], tensors)', "pass",
        "tests/policies/test_calibration.py::test_an_altered_file_and_none"),
    "a direction points away from the queries": (
        "policies/measures.py", "torch.where(side < 0, -1.0, 1.0)", "torch.where(side < 0, 1.0, -1.0)",
        "tests/policies/test_calibration.py::test_directions_are_those_of_the_queries"),
    "a probe of the newest token's position": (
        "policies/calibration.py", "context.newest_B11 + 1 + offset", "context.newest_B11 + offset", f"{PROBES}-1]"),
    "a group's mean probe": ("policies/calibration.py", ".amax(2)", ".mean(2)", f"{PROBES}-0]"),
    "queries do not spread": (
        "policies/calibration.py", "spread = norm - measure_pairs(mean, pairs)", "spread = norm", f"{PROBES}-0]"),
    "a kept prompt is standardized": (
        "policies/calibration.py", "(context.limits.prompt.clamp(min=0) if context.limits.any_prompt else 0)", "0",
        f"{PROBES}-0]"),
    "whole turns are lost": (
        "policies/measures.py", "(angle + 2 * math.pi * whole)", "angle",
        "tests/policies/test_calibration.py::test_angles_of_a_rounded_table"),
    "mean queries are not lengthened": (
        "evaluation/calibrate.py", "turning.adapter.rotate(plain, torch.zeros_like(places), turning.table)", "plain",
        "tests/policies/test_calibration.py::test_mean_queries_without_their_rotation[yarn]"),
    "sinks teach": (
        "evaluation/calibrate.py", "positions_BHT[0, 0] >= sinks", "positions_BHT[0, 0] >= 0",
        "tests/policies/test_learned.py::test_weights_are_those_of_least_squares[gpt2]"),
    "attention is learned without its logarithm": (
        "policies/learned.py", "(repeated_BHT.double() + LEAST).log()", "repeated_BHT.double() + LEAST",
        "tests/policies/test_learned.py::test_weights_are_those_of_least_squares[gpt2]"),
    "a ridge in another unit": (
        "policies/measures.py", "ridge, total / size) / size", "ridge, total / size)",
        "tests/policies/test_learned.py::test_weights_are_those_of_least_squares[gpt2]"),
    "a feature without size": (
        "policies/measures.py", "size = torch.where(size > 0, size, 1.0)", "pass",
        "tests/policies/test_learned.py::test_a_feature_that_is_always_zero_weighs_nothing"),
    "positions count from zero": (
        "policies/learned.py", ".log1p()", "", "tests/policies/test_learned.py::test_as_the_oracle_has_it"),
    "weights of the first heads": (
        "policies/learned.py", '"weight", new.k_BHQD)[new.first : new.first + H]', '"weight", new.k_BHQD)[:1]',
        "tests/policies/test_learned.py::test_as_the_oracle_has_it"),
    "a type that is refused once its weights are loaded": (
        "cli/model_class.py", "                _check(auto, config)", "                pass",
        "tests/cli/test_cli.py::test_a_type_is_refused_before_its_weights_are_loaded"),
    "a model without numbers that judges itself": (
        "arch/proof.py", "(offloaded or not all(parameter.is_meta for parameter in model.parameters()))", "True",
        "tests/arch/test_automatic.py::test_a_small_model_without_a_twin_is_judged_once_it_has_its_numbers"),
    "a piece that the positions do not hold twice": (
        "cli/calibrate_command.py", "(limit - teacher.needs.find(SecondReading).longest(0)) // 2", "limit",
        "tests/policies/test_learned.py::test_pieces_fit_twice"),
    "kinds of statistics mixed": (
        "storage/calibration.py", "if own not in known:", "if not own:",
        "tests/policies/test_learned.py::test_a_file_that_is_none"),
    "a record whose tokens die unborn": (
        "storage/record.py", "(deaths_NHT > torch.arange(T))", "(deaths_NHT >= 0)",
        "tests/storage/test_record.py::test_a_file_that_is_none"),
    "a record is sized without its ids": (
        "handle.py", "(8 + 4 * sum(", "(4 * sum(", "tests/storage/test_record.py::test_its_size_beforehand"),
    "a statistic of another shape": (
        "hooks/target.py", "if tensor is None or found != wanted:", "if tensor is None:",
        "tests/policies/test_calibration.py::test_a_file_without_mean_queries"),
    "learned positions are taken for rotations": (
        "hooks/target.py", "if type(adapter).rotary_table is Adapter.rotary_table or", "if",
        "tests/policies/test_calibration.py::test_without_a_rotation[gpt2]"),
    "statistics disagree": (
        "storage/kinds.py", "or [str(size) for size in entry.shape] != right", "",
        "tests/policies/test_calibration.py::test_a_file_that_is_none"),
    "areas of the first tokens": (
        "policies/measures.py", "sample.area_HT[:, FIRST:]", "sample.area_HT",
        "tests/policies/test_calibration.py::test_areas_are_those_under_the_cumulated_attention[llama_gqa]"),
    "areas of tokens, not of shares of the text": (
        "policies/statistics.py", "/ (row_NR1 + 1).clamp(min=1)", "/ 1",
        "tests/policies/test_calibration.py::test_areas_are_those_under_the_cumulated_attention[llama_gqa]"),
    "areas of attention alone": (
        "evaluation/calibrate.py", " * projected_norms(v_BHTD, rows, 2)[0]", "",
        "tests/policies/test_calibration.py::test_areas_are_those_under_the_cumulated_attention[llama_gqa]"),
    "heads that look near are whole": (
        "policies/calibration.py", "argsort(descending=True, stable=True)", "argsort(descending=False, stable=True)",
        "tests/policies/test_peer_scores.py::test_heads_that_stream_keep_the_peer_s_tokens"),
    "no head is whole": (
        "policies/calibration.py", "max(1, share(part, len(order)))", "share(part, len(order))",
        "tests/policies/test_calibration.py::test_heads_of_the_largest_areas_are_whole"),
    "a size is a share of heads": (
        "policies/calibration.py", "if not isinstance(part, float):", "if part is None:",
        "tests/policies/test_calibration.py::test_whole_heads_have_no_other_budget"),
    "pairs outside a head": (
        "storage/calibration.py", "_check_pairs(layer, own)\n", "pass\n",
        "tests/policies/test_calibration.py::test_a_file_that_is_none"),
    "a text that begins with a prefix writes to it": (
        "cache/prefix.py", "new = self._cache.clone()", "new = self._cache",
        "tests/hooks/test_prefix.py::test_as_if_read_anew[h2o-0.4-{}]"),
    "the shortest prefix is taken": (
        "cache/prefix.py", "max(fit, key=len, default=None)", "min(fit, key=len, default=None)",
        "tests/serving/test_prefixes.py::test_tokens[h2o-24-{}]"),
    "another model takes a prefix": (
        "cache/model_stamp.py", "or not _are_equal(self.sample, now.sample)", "",
        "tests/hooks/test_prefix.py::test_refused"),
    "a change of weights is not noticed": (
        "cache/model_stamp.py", "same and self.versions != now.versions", "False",
        "tests/hooks/test_identity.py::test_changed_weights[one number of one weight]"),
    "a fused step is not noticed": (
        "cache/model_stamp.py", "or not _are_equal(self.sample, now.sample)", "",
        "tests/hooks/test_identity.py::test_changed_weights[a fused step, which torch does not count]"),
    "another adapter is not noticed": (
        "cache/model_stamp.py", "if one != other:", "if False:",
        "tests/hooks/test_identity.py::test_the_words_name_adapters_and_they_may_come_back"),
    "adapters stay where rows move": (
        "cache/cache.py", "None if self.read_by is None else self.read_by.map_rows(change)", "self.read_by",
        "tests/hooks/test_identity.py::test_rows_with_adapters_of_their_own"),
    "requests begin with what old weights read": (
        "cache/prefix.py", "if prefix is None or self.renew is None:", "if True:",
        "tests/hooks/test_identity.py::test_prefixes_of_continuous_batching_are_read_anew"),
    "earlier turns are not compared": (
        "hooks/texts.py", "(known_BT >= 0)", "(known_BT >= 0) & (known_BT.new_ones(1, known_BT.shape[1]).cumsum(-1) > 30)",
        "tests/hooks/test_texts.py::test_an_edit_anywhere_is_refused_by_its_column[3]"),
    "generated tokens are not compared": (
        "cache/passes.py", "    cache.note_ids(input_ids, now", "    cache.note_ids(input_ids if now.prompt else None, now",
        "tests/hooks/test_texts.py::test_an_edit_anywhere_is_refused_by_its_column[30]"),
    "new tokens alone are taken for the whole text": (
        "hooks/texts.py", "self.columns is None or not self.alone", "True",
        "tests/hooks/test_texts.py::test_new_tokens_alone_are_a_prompt_of_both[h2o-10-50]"),
    "another mask is taken": (
        "hooks/texts.py", "    _check_padding(given, known_BT)\n    if given.ids", "    if given.ids",
        "tests/hooks/test_texts.py::test_a_mask_that_is_not_of_the_text_read"),
    "ids stay where rows move": (
        "cache/cache.py", "self.ids = self.ids.map_rows(change)", "pass",
        "tests/hooks/test_texts.py::test_ids_follow_rows[reorder_cache]"),
    "ids of compiled steps are lost": (
        "cache/compiled.py", "cache.counters.tensors.write_tape(ids_B1)", "pass",
        "tests/hooks/test_texts.py::test_steps_under_torch_compile_leave_their_ids"),
    "assisted decoding reads the whole text again": (
        "hooks/decoder.py", "if again and tokens", "if False and tokens",
        "tests/hooks/test_assisted_on_a_cache.py::test_it_reads_what_is_new_and_answers_as_without[lookup-prefix]"),
    "a prefix has one row": (
        "hooks/decoder.py", "if spread and B > 1:", "if False:",
        "tests/hooks/test_prefix.py::test_several_rows_and_beams_begin_with_it"),
    "a request reads its prefix again": (
        "serving/admission.py", "state.remaining_prefill_tokens[len(prefix) :]", "state.remaining_prefill_tokens",
        "tests/serving/test_prefixes.py::test_requests_that_come_and_are_cancelled"),
    "what is kept beside a prompt claims no blocks": (
        "cache/holding.py", "else prompt - read + new)", "else new)",
        "tests/serving/test_prefixes.py::test_blocks_of_what_is_kept_beside_a_prompt"),
    "a replayed token seen by the query that no longer saw it": (
        "backends/torch_backend.py", "(rows < keys.deaths_BHT", "(rows <= keys.deaths_BHT", f"{REPLAY}[gptj-h2o]"),
    "a dead key seen by one row more in the forward kernel": (
        "backends/triton/forward.py", "row_place[:, None] < (deaths - origin)", "row_place[:, None] <= (deaths - origin)",
        f"{KERNELS}_output_and_log_sum_exp[all die]"),
    "whole tiles of the forward kernel ask no deaths": (
        "backends/triton/forward.py", "        begin, mid = lo, lo  # a key", "        mid = mid  # a key",
        f"{KERNELS}_output_and_log_sum_exp[all die]"),
    "a dead key has a share in one more query's gradient": (
        "backends/triton/backward.py", "row_place[:, None] < (deaths - origin)", "row_place[:, None] <= (deaths - origin)",
        f"{KERNELS}_gradients[all die]"),
    "a dead key gets a gradient from one row more": (
        "backends/triton/backward.py", "row_place[None, :] < death_place", "row_place[None, :] <= death_place",
        f"{KERNELS}_gradients[some die]"),
    "rows end with the first death of a block of keys": (
        "backends/triton/backward.py", "end = tl.max(tl.where(", "end = tl.min(tl.where(", f"{KERNELS}_gradients[some die]"),
    "a key's gradient is of its group's first head": (
        "backends/triton/backward.py", "range(tl.cdiv(hi - lo, BLOCK_M) * G)", "range(tl.cdiv(hi - lo, BLOCK_M))",
        f"{KERNELS}_gradients[group 3]"),
    "probabilities sum to more than one in a key's gradient": (
        "backends/triton/backward.py", "- delta[None, :])", "- 0.0 * delta[None, :])", f"{KERNELS}_gradients[some die]"),
    "padding's keys read for the gradient of queries": (
        "backends/triton/backward.py", "            here = here & (positions >= 0)[:, None]", "            here = here",
        f"{KERNELS}_gradients[window padding]"),
    "the gradient kernels' window one too wide": (
        "backends/triton/backward.py", "(row_place[None, :] - key_place[:, None] < sliding)",
        "(row_place[None, :] - key_place[:, None] <= sliding)", f"{KERNELS}_gradients[window padding]"),
    "the replay's kernels never run": (
        "attention/replay.py", '        if name == "torch":', "        if name:",
        f"{KERNELS}_a_model_s_replay[llama_gqa-False]"),
    "a gradient kernel that failed is launched again": (
        "attention/replay.py", 'refusals.known[f"{name} replay", case] = refusals', "refusals",
        f"{KERNELS}_a_first_launch_that_fails[_queries_kernel]"),
    "positions that an eviction empties are shown as they lie": (
        "attention/layer_call.py", "keys = replace(keys, positions_BHT=keys.positions_BHT.clone())", "pass",
        f"{READERS}::test_evictions_are_those_of_the_model_under_a_mask[gemma4_text-h2o]"),
    "entries that an eviction moves are shown as they lie": (
        "attention/decode.py", "copied=more or moves", "copied=more",
        f"{READERS}::test_evictions_are_those_of_the_model_under_a_mask[gemma4_text-every]"),
    "a prompt's last column sees itself alone": (
        "attention/reading.py", "past=keys.past + first", "past=keys.past",
        f"{READERS}::test_a_prompt_s_last_column_alone_sees_the_whole_prompt"),
    "drafts of a reader see the first column's keys": (
        "attention/reading.py", "shown[t - P]", "shown[0]",
        f"{READERS}::test_several_columns_each_see_what_was_held_then[gemma4_text]"),
    "deaths of a decode step not noted": (
        "attention/decode.py", "    if call.evicts:\n        call.note_deaths(newest_B11)", "    pass", f"{REPLAY}[gptj-h2o]"),
    "deaths of the first row followed by all": (
        "attention/replay.py", "[self.text_B.to(positions_BQ.device)]", "[self.text_B.to(positions_BQ.device) * 0]",
        f"{REPLAY}[gptj-h2o]"),
    "deaths kept through a roll-back": (
        "cache/editing.py", "            cache.lifetimes.crop(cache.seen_B)", "                pass",
        "tests/attention/test_replay.py::test_rolled_back_joined_and_chosen_rows"),
    "several texts packed into a row": (
        "hooks/decoder.py", "    inputs.one_text_a_row(call)\n", "",
        "tests/robustness/test_packing.py::test_texts_that_are_packed_into_a_row_are_refused"),
    "several texts packed into a replayed row": (
        "hooks/replay.py", "    inputs.one_text_a_row(call)\n", "",
        "tests/robustness/test_packing.py::test_a_replay_refuses_them_too"),
    "an altered text replayed": (
        "hooks/replay.py", "    if agree >= n - 1:", "    if agree >= n - 9:",
        "tests/attention/test_replay.py::test_what_a_replay_refuses"),
    "masks kept for the gradient": (
        "backends/torch_backend.py", "if keys.deaths_BHT is not None and torch.is_grad_enabled():", "if False:",
        "tests/attention/test_replay.py::test_masks_are_made_again_for_the_gradient"),
    "request ended, its row kept": (
        "serving/pool.py", "        self.rows.drop(request_id)", "        pass",
        "tests/serving/test_generate_batch.py::test_arrivals_and_cancellations[h2o-fifo]"),
    "packed rows in the order of requests": (
        "serving/pool.py", "columns = on_device([first[name] for name in rows.alive]",
        "columns = on_device([first[name] for name in reversed(rows.alive)]",
        "tests/serving/test_generate_batch.py::test_every_policy[24-h2o]"),
    "a prompt cut where the pass is full": (
        "serving/pool.py", "if request_len < min(waiting, self.chunk):", "if not request_len:",
        "tests/serving/test_generate_batch.py::test_chunks_are_blocks[h2o]"),
    "a block ended before the sequences of a prompt part": (
        "serving/packed.py", "self.cache.running.blocks[-1].ends_prompt = False", "pass",
        "tests/serving/test_generate_batch.py::test_several_sequences_of_a_prompt[options1]"),
    "tokens that wait for their eviction are not counted": (
        "cache/holding.py", "outside + most + every - 1", "outside + most", f"{SAID}_heads_hold_and_allocate"),
    "the slot of the token that is written is not counted": (
        "cache/holding.py", "max(count(prompt, None)) + 1 + waste", "max(count(prompt, None)) + waste",
        f"{SAID}_heads_hold_and_allocate"),
    "a share of all tokens is counted as one of the prompt": (
        "policies/moving.py", "else self.tokens(n + new)", "else self.tokens(n)", f"{SAID}_heads_hold_and_allocate"),
    "blocks claimed for the whole text": (
        "cache/holding.py", "return [min(limit, (prompt if longest", "return [max(limit, (prompt if longest",
        "tests/serving/test_generate_batch.py::test_memory_of_a_request_is_constant"),
    "a hybrid's states left where rows were": (
        "cache/cache.py", "            self.states.map_rows(change)\n", "",
        "tests/cache/test_hybrid.py::test_states_follow_rows_copies_and_files"),
    "padding read into a hybrid's states": (
        "hooks/state.py", "**dict.fromkeys(STATES, real_BQ)", "**dict.fromkeys(STATES)",
        "tests/cache/test_hybrid.py::test_rows_of_a_padded_batch_are_as_alone"),
    "padding takes part in a second reading": (
        "attention/second_reading.py", "holes=keys.holes or padded", "holes=keys.holes and padded",
        "tests/hooks/test_second_reading.py::test_padding_takes_no_part_in_a_second_reading"),
    "strict looks at no cache that was read twice": (
        "hooks/second_reading.py", "    if cache.settings.strict:", "    if cache.settings.strict and now.reread_BN is None:",
        "tests/hooks/test_second_reading.py::test_a_cache_that_contradicts_itself_is_noticed_after_a_second_reading"),
    "a hybrid's pass ended with its last budget": (
        "cache/passes.py", " or (follow and not cache.scratch)", "",
        "tests/cache/test_hybrid.py::test_a_pass_that_fails_behind_the_last_budget_is_noticed"),
    "rows that wait thrown away": (
        "serving/rows.py", "(waits, outside)", "([], outside)",
        "tests/serving/test_rows.py::test_rows_are_those_asked_for"),
    "numbers of an earlier row left in a page": (
        "cache/paged.py", "    pool[table_BN.flatten()] = 0", "    pass", f"{PAGED}[None-snapkv-8-options2]"),
    "slots looked up in a row's first page": (
        "cache/paged.py", "self.table_BN.gather(1, slot_BH // P) if", "self.table_BN[:, :1] if",
        f"{PAGED}[None-snapkv-8-options2]"),
    "a page between a batch's own taken for one of them": (
        "cache/paged.py", " if first == [*here] else None", "",
        "tests/cache/test_paged.py::test_pages_that_lie_together_are_read_where_they_lie"),
    "rows of pages joined as they came": (
        "serving/rows.py", "if self.order is None or", "if True or",
        "tests/cache/test_paged.py::test_pages_that_lie_together_are_read_where_they_lie"),
    "a page's slots read behind the first page": (
        "backends/triton/split.py", " + c // PAGE, mask=there", ", mask=there",
        "tests/backends/test_triton_decode.py::test_follows_the_twin[pages]"),
    "every page's values read where its keys are": (
        "cache/paged.py", "Memory(flat, flat[behind:]", "Memory(flat, flat",
        "tests/backends/test_triton_pages.py::test_steps_copy_nothing[h2o-13-options0]"),
    "pages of a row counted from its first": (
        "cache/paged.py", "begin_BHM = (self.table_BN[:, None, : -(-C // P)]", "begin_BHM = (self.table_BN[:, None, :1]",
        "tests/backends/test_triton_pages.py::test_steps_copy_nothing[roco-5-options1]"),
    "rows of pages joined as if tokens had moved to the front": (
        "cache/concat.py", "next_BH if moved else None", "next_BH", f"{PAGED}[None-h2o-13-options0]"),
    "score not reset when a slot is reused": (
        "cache/layer.py", "self.state[name].view(-1).index_fill_(0, slot, 0)", "pass", f"{ORACLE}[llama-h2o]"),
    "squares of one head instead of the group's mean": (
        "policies/statistics.py", "block.group_NRM.square()", "block.p_NGRM[:, 0]",
        f"{ORACLE}[llama_gqa-roco]"),
    "one thread's rows without the scale": (
        "backends/torch_backend.py", "beta=-1 if minus else 0, alpha=scale", "beta=-1 if minus else 0, alpha=scale / parts",
        "tests/backends/test_threads.py"),
    "small probabilities stay": (
        "backends/torch_backend.py", "torch.threshold_(p_NGRM[n], FLOOR, 0.0)", "pass", "tests/backends/test_threads.py"),
    "the group is summed twice": (
        "policies/statistics.py", "return block.group_NRM.sum(1)", "return block.group_NRM.sum(1) * 2",
        f"{ORACLE}[llama_gqa-roco]"),
    "group not summed": (
        "policies/statistics.py", "    return block.p_NGRM.flatten(1, 2).sum(1)", "    return block.p_NGRM[:, 0].sum(1)",
        f"{ORACLE}[llama_gqa-h2o]"),
    "padding counted in n": (
        "cache/passes.py", "before, rows_BP[:, -1] + 1, real.sum(1)", "before, before + prompt, real.sum(1)",
        f"{ORACLE}[llama-window]"),
    "tau not advanced": (
        "policies/needs/noisy_sums.py", "return first + min(step, length)", "return first + 0 * min(step, length)",
        "tests/oracle/test_oracle.py::test_generate_passes_its_length_to_tau"),
    "reorder forgets scores": (
        "cache/layer.py", '("positions", "state", "limits"', '("positions", "limits"',
        "tests/invariants/test_rows_are_as_alone.py::test_beams_carry_their_own_history"),
    "position taken from the slot's index": (
        "cache/layer.py", "index_copy_(0, slot, positions_B1.expand(B, H).reshape(-1))",
        "index_copy_(0, slot, self.mode.free_BH.reshape(-1))", f"{ORACLE}[llama-window]"),
    "protected window off by one": (
        "policies/scopes.py", "recent = position > context.recent_B11", "recent = position >= context.recent_B11",
        f"{ORACLE}[llama-h2o]"),
    "victim chosen before scores are updated": (
        "attention/decode.py",
        "    if call.steppers:",
        "    if call.evicting:\n        _evict_over_budget(call, newest_B11, t)\n        return\n    if call.steppers:",
        f"{ORACLE}[llama-tova]"),
    "sliding window off by one while decoding": (
        "backends/torch_backend.py", "(positions < find_oldest(geometry.sliding, newest_B11))",
        "(positions < find_oldest(geometry.sliding, newest_B11) - 1)", f"{ORACLE}[mistral_sliding-full]"),
    "queries of the sinks counted": (
        "policies/needs/query_moments.py", "counted = positions >= prompt.sinks", "counted = positions >= 0",
        f"{ORACLE}[llama-expected_attention]"),
    "queries keep their rotation": (
        "arch/rotary.py", "[cos / size, -sin / size]", "[cos / cos, sin * 0]", f"{ORACLE}[llama-expected_attention]"),
    "rotations of the past instead of the coming": (
        "attention/layer_call.py", "coming = now.copy(now.n_B, like.device)[:, None] + ",
        "coming = 0 * now.copy(now.n_B, like.device)[:, None] + ", f"{ORACLE}[llama-expected_attention]"),
    "attention expected of the sinks too": (
        "policies/expected.py", "context.positions_BHT < context.limits.first", "context.positions_BHT < 0",
        "tests/policies/test_peer_scores.py"),
    "keys not centred over their own tokens": (
        "policies/content.py", "real.sum(2, keepdim=True).clamp(min=1)", "real.shape[2]", f"{ORACLE}[llama-leverage]"),
    "heads choose their chunks alone": (
        "policies/selection.py", "        if self.together:\n", "        if False:\n", f"{ORACLE}[llama-chunk_kv]"),
    "ALiBi from slots instead of positions": (
        "backends/torch_backend.py", "_find_alibi(slopes, positions[:, :, None], newest_B11",
        "_find_alibi(slopes, torch.arange(positions.shape[-1]).expand_as(positions)[:, :, None], newest_B11",
        f"{ORACLE}[mpt-streaming_llm]"),
    "logits not capped while decoding": (
        "backends/torch_backend.py", "    x = _cap_logits(x, geometry)\n    x = x if bias", "    x = x if bias",
        "tests/arch/test_families.py::test_every_policy[gemma2-tova]"),
    "a sink takes no share": (
        "backends/torch_backend.py", "-1).softmax(-1)[..., :-1]", "-1)[..., :-1].softmax(-1)",
        "tests/arch/test_families.py::test_every_policy[gpt_oss-key_attention]"),
    "sliding layers count in the pyramid": (
        "cache/settings.py",
        "self.budgeted.index(layer), policy.schedule", "layer, policy.schedule",
        "tests/arch/test_families.py::test_budgets_count_the_layers_that_see_all"),
    "a head that may hold more is not compressed either": (
        "attention/compress.py", "return any(map(operator.gt, held, most))", "return all(map(operator.gt, held, most))",
        f"{BUDGETS}[h2o-table-one]"),
    "heads of a table taken for aligned": (
        "attention/layer_call.py", "self.policy.aligned and self.rule.aligned", "self.policy.aligned",
        f"{BUDGETS}[tova-table]"),
    "a share of what was seen stays the prompt's": (
        "policies/moving.py", "seen = (context.newest_B11 + 1)", "seen = (context.newest_B11 * 0 + 30)",
        f"{BUDGETS}[h2o-share]"),
    "a mass forgets what was lost": (
        "policies/moving.py", "lost + (held - reached", "0 * lost + (held - reached", f"{BUDGETS}[h2o-mass]"),
    "a mass one token too many": (
        "policies/moving.py", "* self.share).sum(-1, keepdim=True) + 1", "* self.share).sum(-1, keepdim=True) + 2",
        f"{BUDGETS}[h2o-mass]"),
    "the floor of a mass ignored": (
        "policies/moving.py", "count = torch.maximum(enough, least)", "count = enough", f"{BUDGETS}[h2o-mass-floor]"),
    "tokens of the window add to the mass": (
        "policies/moving.py", "if any(need.protects for need in score.needs):", "if False:", f"{BUDGETS}[snapkv-mass]"),
    "a protected token outside the sliding window adds to the mass": (
        "policies/moving.py", "counted = counted & ~dead", "counted = counted & (dead | ~dead)",
        "tests/oracle/test_oracle_mechanisms.py::test_found_by_random_runs"),
    "a text that ended is measured again": (
        "attention/compress.py", "mine if rows else held for", "mine for", f"{BUDGETS}[snapkv-mass-block]"),
    "a threshold of summed query heads": (
        "policies/moving.py", "self.x * score.unit(context.group)", "self.x", f"{BUDGETS}[key_attention-threshold]"),
    "packing leaves the scores behind": (
        "cache/layer.py", "fitted(gather_entries(tensor, order), C, 0)", "fitted(tensor, max(C, tensor.shape[2]), 0)[:, :, :C]",
        "tests/cache/test_moving.py::test_a_head_never_loses_more_than_it_may"),
    "losses are not rolled back": (
        "cache/rollback.py", "        setattr(layer, name, tensor)", "        pass",
        "tests/cache/test_moving.py::test_rolled_back[mass]"),
    "ties to the lower position": (
        "policies/selection.py", "return (bits.long() << 30) | positions",
        "return (bits.long() << 30) | (MAX_POSITION - positions)",
        f"{ORACLE}[llama-scissorhands]"),
    "bits: half a step lower": (
        "backends/entries.py", ".round_().clamp_(0, top)", ".floor_().clamp_(0, top)", f"{NARROW}[llama-h2o-8]"),
    "bits: the halves of a byte change places": (
        "backends/entries.py", "return low | (high << 4)", "return high | (low << 4)", f"{NARROW}[llama-h2o-4]"),
    "bits: one scale for a whole key": (
        "backends/entry_sizes.py", "range(min(D, GROUP), 0, -1)", "range(D, 0, -1)",
        "tests/backends/test_entries.py::test_an_entry_has_the_bytes_that_are_counted[64-8-torch.float32]"),
    "bits: a prompt attends to rounded keys": (
        "cache/narrow.py", "    return ReadingSlots(keys, values, then, packed)",
        "    return ReadingSlots(then[0].round_trip(keys), then[1].round_trip(values), then, packed)",
        "tests/cache/test_narrow.py::test_the_prompt_attends_in_full[llama-4]"),
    "bits: an earlier prompt's entries are rounded again": (
        "cache/narrow.py", "            if W:\n", "            if False:\n",
        "tests/cache/test_narrow.py::test_a_later_prompt_leaves_earlier_entries_their_bytes[torch.bfloat16-8]"),
    "bits: a later block reads what was not rounded": (
        "cache/layer.py", "        self.kv = opened(self.kv)\n", "", "tests/cache/test_narrow.py::test_blocks[h2o-8]"),
    "bits: norms are noted of what attention does not see": (
        "attention/layer_call.py", "key_codec.round_trip(k_BHQD)", "k_BHQD",
        "tests/cache/test_narrow.py::test_norms_of_generated_tokens_are_of_the_keys_that_attention_reads[4]"),
    "bits: a step unpacks the layer": (
        "backends/entries.py", "size = max(most // max(math.prod(N) * codec.size(entries_NTW), 1), 1)", "size = T",
        "tests/cache/test_narrow.py::test_a_step_unpacks_a_few_columns_at_a_time[h2o-8]"),
    "zeros beside values that are smaller than keys": (
        "backends/torch_backend.py", "return out[..., : keys.v_BHTD.shape[-1]], lse", "return out, lse",
        "tests/arch/test_families.py::test_one_changes_nothing[deepseek_v3]"),
    "values of a step in the keys' size": (
        "attention/bound_step.py", "kv.values.view(N, self.C, -1)", "kv.values.view(N, self.C, D)",
        "tests/arch/test_latent.py::test_steps_between_the_first_layer_and_the_last[1]"),
    "latents: values are stored beside their keys": (
        "cache/slots.py", "(self.keys,) if self.latent else (self.keys, self.values)", "(self.keys, self.values)",
        f"{LATENT}_bytes_are_those_of_latents[16]"),
    "latents: a scale for latent and rotary channels": (
        "backends/entry_sizes.py", "math.gcd(key, value) if latent else key", "key",
        f"{LATENT}_rounded_entries_are_the_oracle_s[8]"),
    "latents: values are noted unrounded": (
        "backends/entries.py",
        "return Rounded(whole.bits, self.D, self.D * whole.groups // whole.D, whole.dtype, centre).round_trip(x)",
        "return x", f"{LATENT}_values_are_noted_as_they_are_rounded"),
    "latents: the largest head's norm for their mean": (
        "attention/layer_call.py", "norms.unflatten(1, (H, each)).mean(2)", "norms.unflatten(1, (H, each)).amax(2)",
        f"{LATENT}_values_are_weighed_through_both_projections[critical_snapkv]"),
    "latents: a wrapped projection's weight is read": (
        "arch/latent.py", "if type(expands) is not nn.Linear or", "if not isinstance(expands, nn.Linear) or",
        f"{LATENT}_a_projection_that_cannot_be_read_leaves_entries_expanded"),
    "latents: part of a projection is read for all of it": (
        "arch/latent.py", "weight.shape == (attn.num_heads * (attn.qk_nope_head_dim + attn.v_head_dim), attn.kv_lora_rank)",
        "weight.shape[1] == attn.kv_lora_rank", f"{LATENT}_part_of_a_projection_is_not_taken_for_all_of_it"),
    "latents: taken over behind their rotary keys": (
        "cache/from_dynamic.py", "torch.cat([keys, values], -1)", "torch.cat([values, keys], -1)",
        f"{LATENT}_a_cache_of_transformers_is_taken_over"),
    "latents: merged": (
        "policies/served.py", '"latent attention": lambda it: it.latent', '"latent attention": lambda it: False',
        f"{LATENT}_values_cannot_be_merged"),
    "a need's refusal counts for nothing where the table has no row": (
        "policies/served.py", "return None if need is None else", "return None if True else",
        "tests/policies/test_served.py::test_a_need_brings_its_refusals_with_it"),
    "latents: entries without a cache of the caller's are expanded": (
        "arch/interface.py", "call[cache_argument(type(attn).forward)] = Entries()", "pass",
        f"{LATENT}_a_pass_without_a_cache_of_the_caller_s"),
    "what an encoder read is passed on": (
        "hooks/inputs.py", 'if call.get("encoder_hidden_states") is not None:', "if False:",
        f"{OWN}_what_an_encoder_read_is_refused"),
    "a model without a cache is not told apart": (
        "arch/refusals.py", "if attentions and not any(map(_may_take_cache, attentions)):", "if False:",
        "tests/arch/test_automatic.py::test_refused_with_what_it_is[openai-gpt]"),
    "cross-attention that is not skipped": (
        "arch/refusals.py", 'return "encoder_hidden_states" in inspect', 'return True or "encoder_hidden_states" in inspect',
        "tests/arch/test_automatic.py::test_refused_with_what_it_is[mllama]"),
    "a decoder is told positions that it does not take": (
        "hooks/target.py", 'if "position_ids" not in takes and any', "if False and any",
        f"{OWN}_what_needs_positions_of_our_own_is_refused[roformer]"),
    "GPT-Neo without windows": (
        "arch/separate.py", 'return attn.config.window_size if attn.attention_type == "local" else None', "return None",
        f"{OWN}_evictions_are_the_oracles[gpt_neo-h2o]"),
    "CodeGen's values taken as keys": (
        "arch/gptj.py", "q, v, k = (heads_first(part", "q, k, v = (heads_first(part",
        f"{OWN}_evictions_are_the_oracles[codegen-h2o]"),
    "the last layer's bias left out": (
        "arch/gpt_neox_japanese.py", ", call), attn.dense_bias", ", call), None",
        f"{OWN}_one_changes_nothing[gpt_neox_japanese]"),
    "values that are not rotated": (
        "arch/separate.py", "if attn.rotary_value:", "if False:", f"{OWN}_one_changes_nothing[roformer_values]"),
    "an encoder with an adapter is served": (
        "arch/separate.py", "raise decoder_wanted(model)", "pass", f"{OWN}_an_encoder_is_refused[rembert]"),
    "keys and values beside the cache": (
        "arch/separate.py", 'if getattr(model, "use_prompt", False):', "if False:",
        f"{OWN}_what_stands_beside_the_cache_is_refused"),
    "the encoder's heads for the decoder's": (
        "arch/interface.py", 'names = ("decoder_attention_heads", "num_key_value_heads", "num_attention_heads")',
        'names = ("num_key_value_heads", "num_attention_heads")', f"{OWN}_a_decoder_that_reads_alone"),
    "cross-attention taken for the layer's own": (
        "hooks/target.py", "model.named_modules() if not is_cross_attention(name, module))", "model.named_modules())",
        f"{OWN}_one_changes_nothing[trocr]"),
    "check: padding is not where the mask has it": (
        "evaluation/masked.py", "held = [one + self.pads_B[:, None, None] * (one >= 0) for one in held]", "pass",
        f"{OWN}_kvpatch_check[mvp]"),
    "values saved in the keys' size": (
        "storage/save_load.py", "codecs(layer.bits, shape.key, shape.value,", "codecs(layer.bits, shape.key, shape.key,",
        "tests/arch/test_latent.py::test_saved_and_joined[4]"),
    "bits: bytes are counted in full": (
        "hooks/target.py", "entry_bytes(bits, key", "entry_bytes(16, key",
        "tests/cache/test_narrow.py::test_a_budget_in_bytes_holds_more_tokens"),
    "bits: a saved cache is not looked into": (
        "storage/contents.py", "layer.kv.numbers(layer.kv.width)", "(layer.kv.keys, layer.kv.values)",
        "tests/cache/test_narrow.py::test_a_saved_cache_with_a_scale_that_is_no_number_is_refused[8]"),
    "bits: kernels of a prompt read bytes as numbers": (
        "backends/triton/triton_backend.py", 'if case.bits != FULL and task in PROMPTS:', "if False:",
        "tests/cache/test_narrow.py::test_flash_kernels_leave_rounded_slots_to_others[8]"),
    "bits: a kernel's token in the precision that it came in": (
        "backends/triton/rounded.py",
        "first = tl.reshape((low * scale.to(tl.float32)[:, None] + zero.to(tl.float32)[:, None] + centre)"
        ".to(dtype), [COLUMNS])", "first = tl.load(X + tl.arange(0, COLUMNS))",
        "tests/backends/test_triton_rounded.py::test_attention_sees_the_rounded_token[4]"),
    "bits: keys are rounded around zero": (
        "cache/narrow.py", "centre_codecs(self.then, centre)", "centre_codecs(self.then, torch.zeros_like(centre))",
        f"{CENTRE}_large_channels_cost_nothing[llama_gqa-4]"),
    "bits: padding is a key of the centre": (
        "backends/entries.py", "empty, wide = ~real_BHT[..., None],", "empty, wide = ~real_BHT[..., None] & False,",
        f"{CENTRE}_a_row_of_a_padded_batch_has_the_centre_that_it_has_alone[4]"),
    "bits: joined texts get the first one's centre": (
        "cache/concat.py", "torch.cat(centres) if centres else None", "centres[0] if centres else None",
        f"{CENTRE}_texts_keep_their_centres_when_they_are_joined[full-4]"),
    "bits: rows of a ragged layer get the first heads' centres": (
        "backends/entries.py", "self.centre.flatten(0, 1)[heads_N]", "self.centre.flatten(0, 1)[heads_N * 0]",
        f"{CENTRE}_heads_of_a_ragged_layer_have_their_own[adakv-4]"),
    "bits: a later prompt's centre for all": (
        "cache/narrow.py", "            if known is not None:  # a row", "            if False:  # a row",
        f"{CENTRE}_a_later_prompt_leaves_the_centre[4]"),
    "bits: a kernel's key without its centre": (
        "backends/triton/rounded.py", "        x += centre[None, :, :]", "        x += 0.0",
        "tests/backends/test_triton_rounded.py::test_follows_the_twin[one block-4]"),
    "bits: a kernel takes the first head's centre": (
        "backends/triton/split.py", "CENTRE = CENTRES + n * D", "CENTRE = CENTRES + n * 0",
        "tests/backends/test_triton_rounded.py::test_a_new_key_is_rounded_around_its_head_s_centre[64-torch.float32-4]"),
    "a size in bytes in the dtype of the door": (
        "cache/state.py", "            self.settings = self.settings.in_dtype(dtype)", "            pass",
        "tests/cache/test_bytes.py::test_autocast[torch.bfloat16]"),
    "an observation window takes the whole budget": (
        "policies/scopes.py", "    return window if window < room else (room + 1) // 2", "    return min(window, room)",
        "tests/policies/test_scopes.py::test_a_short_prompt_keeps_tokens_by_score[40-snapkv]"),
    "bytes of answers are not told": (
        "report.py", "return snapshot.steps * sum(kept)", "return 0",
        "tests/cache/test_bytes.py::test_the_report_says_what_a_size_bounds"),
    "bits: a kernel takes the scale of the group before": (
        "backends/triton/rounded.py", "PIECE * (HALF // GROUP) + j\n", "PIECE * (HALF // GROUP) + j // 2\n",
        "tests/backends/test_triton_rounded.py::test_follows_the_twin[head size 128-8]"),
    "bits: a kernel's ties go up": (
        "backends/triton/rounded.py", "+ TO_EVEN - TO_EVEN", "+ 0.5",
        "tests/backends/test_triton_rounded.py::test_a_new_token_is_rounded_as_torch_rounds_it[64-torch.float32-8]"),
    "bits: a kernel's second piece is its first": (
        "backends/triton/split.py", "numbers(code >> 4, VALUES", "numbers(code & 15, VALUES",
        "tests/backends/test_triton_rounded.py::test_follows_the_twin[one block-4]"),
    "a captured step names its free slots in new memory": (
        "cache/layer.py", "            self.mode.free_BH.copy_(slot_BH)", "            self.mode.free_BH = slot_BH.clone()",
        "tests/hooks/test_graph.py::test_replayed_steps_are_the_model_s[llama_gqa-h2o-{'k': 9}-False]"),
    "a later prompt's cache is not brought into the graph's memory": (
        "hooks/graph.py", "                tensor.copy_(holder[name])\n", "                pass\n",
        "tests/hooks/test_graph.py::test_replayed_steps_are_the_model_s[llama_gqa-h2o-{'k': 9}-False]"),
    "the cache that leaves a graph's memory keeps it": (
        "hooks/graph.py", "holder[name] = holder[name].clone()", "pass",
        "tests/hooks/test_graph.py::test_caches_in_turns_and_steps_of_the_model_in_between"),
    "slots that were added for a graph's class hold a token": (
        "hooks/capacity.py", "fitted(layer.positions[:, :, :used], C, -1)", "fitted(layer.positions[:, :, :used], C, 0)",
        "tests/hooks/test_capacity.py::test_prompts_of_different_lengths_share_one_graph[llama_gqa-h2o-{}]"),
    "a graph goes on after its model has changed": (
        "hooks/generate_steps.py", "described is None or described != self._described", "described is None",
        f"{GRAPHED}::test_a_model_that_has_changed_is_captured_anew[_swap]"),
    "a graph leaves out what a hook does": (
        "hooks/generate_steps.py", "all(_home(one) in HOOKS for one in hooks)", "True",
        f"{GRAPHED}::test_code_of_the_user_s_runs_for_every_token[_hooked]"),
    "a graph gives its own memory away as logits": (
        "hooks/generate_steps.py", "logits=logits.clone()", "logits=logits",
        f"{GRAPHED}::test_a_step_is_what_its_call_asks_for"),
    "a graph keeps the places of its capture": (
        "hooks/generate_steps.py", '"input_ids": ids, "position_ids": inputs.get("position_ids")}', '"input_ids": ids}',
        f"{GRAPHED}::test_a_step_is_what_its_call_asks_for"),
    "graphs keep all memory after generate()": (
        "hooks/generate_steps.py", "                graph.drop(graph.limit)\n", "",
        f"{GRAPHED}::test_what_is_kept_between_texts_is_bounded_in_bytes[0]"),
    "a graph goes on although its cache has left": (
        "hooks/graph.py", " and cache.seen_B is self.seen_B and", " and",
        "tests/hooks/test_graph.py::test_two_graphs_may_take_turns_over_one_cache"),
    "a prompt's last piece is a step": (
        "hooks/generate_steps.py", "cache.seen < (cache.request.prompt_len or 0)", "False",
        f"{GRAPHED}::test_a_piece_of_a_prompt_is_no_step"),
    "a tape of ids overflows": (
        "hooks/graph.py", "        if cache.keeps_ids:  # on", "        if False:  # on",
        f"{GRAPHED}::test_ids_of_a_long_text_are_known"),
    "a window's rows under another layer's budget": (
        "policies/needs/window_attention.py", 'f"{W} rows under {id(layer.limits)}"', 'f"{W} rows"',
        "tests/attention/test_prefill.py::test_layers_of_unlike_budgets_have_windows_of_their_own[torch]"),
    "prompts that were read together are all given the first one's row": (
        "serving/vllm/requests.py", "rows.cache.select_rows(rows.names.index(name))", "rows.cache.select_rows(0)",
        "tests/serving/test_prompts_together.py::test_each_prompt_gives_what_it_gives_alone[h2o---some wait-32]"),
    "roll-back forgets scores": (
        "cache/rollback.py", "        layer.state[name][:, :, :C] = tensor[:, :, :C]", "        pass",
        "tests/cache/test_rollback.py::test_rolling_back_restores_everything[roco]"),
    "sampled sums not scaled up": (
        "attention/prefill.py", "total * every_B11 for", "total * 1.0 for",
        f"{PARTS}::test_sampled_rows[llama_gqa-h2o]"),
    "the newest rows of a sample count as often as others": (
        "attention/prefill.py", "newest[name] + total * every_B11 for", "(newest[name] + total) * every_B11 for",
        "tests/policies/test_sampling.py::test_the_mean_over_all_samples_is_the_sum_over_all_rows[13-h2o]"),
    "sampled rows see what is newer": (
        "backends/torch_backend.py", "unseen = positions[..., first:] > self", "unseen = positions[..., first:] > 1 + self",
        f"{PARTS}::test_sampled_rows[llama_gqa-h2o]"),
    "damping ignored": (
        "policies/scores.py", "decay=self.damping", "decay=1.0",
        "tests/oracle/test_oracle.py::test_options[keyformer-{'damping': 0.5, 'recent': 3}]"),
    "sinks forgotten": (
        "policies/scopes.py", "first = position < limits.first", "first = position < 0", f"{ORACLE}[llama-streaming_llm]"),
    "shares without rounding": (
        "policies/budgets.py", "value * of + 1e-6", "value * of",
        "tests/invariants/test_held_within_budget.py::test_budgets_of_every_kind"),
    "pooling sees the window's own tokens": (
        "policies/scores.py", "outside = score.masked_fill(~candidate, -torch.inf)", "outside = score",
        f"{ORACLE}[llama-snapkv]"),
    "tokens out of the window are kept": (
        "policies/policy.py", "dead = context.dead_BHT", "dead = None", f"{ORACLE}[mistral_sliding-key_attention]"),
    "resampled noise is not": (
        "policies/needs/noisy_sums.py", "row, key = head[:, :, None, None], row[:, None, :, None]",
        "row, key = head[:, :, None, None], -1",
        "tests/oracle/test_oracle.py::test_options[keyformer-{'resample': True}]"),
    "rows of an earlier chunk forgotten": (
        "policies/needs/window_attention.py", "layer.notes[self.name] = WindowRows(q_BHGWD, rows_BW.gather(1, index_BW))",
        "pass",
        "tests/attention/test_prefill.py::test_a_prompt_in_chunks_evicts_at_its_end[llama_gqa-snapkv]"),
    "a module stays patched": (
        "hooks/install.py", "        own.pop(name, None)", "        pass",
        "tests/invariants/test_model_is_restored.py::test_after_the_block_the_model_is_as_before"),
    "training goes through the cache": (
        "hooks/decoder.py", "(not use_cache or decoder.training)", "(not use_cache)",
        "tests/invariants/test_training_outside_is_inside.py::test_a_training_step_is_bit_for_bit_the_same"),
    "stacked layers: score not reset": (
        "attention/stacked.py", 'if self.backend != "triton":', "if False:", f"{ALIKE}[llama-h2o]"),
    "bound steps: the key as the value": (
        "attention/bound_step.py", "v.reshape(self.value_row))", "k.reshape(self.value_row))",
        "tests/attention/test_bound_step.py::test_bound_steps_are_the_steps[h2o]"),
    "bound steps: of another batch": (
        "attention/bound_step.py", " or step.kv is not call.slots.kv", "",
        "tests/attention/test_bound_step.py::test_whatever_happens_between_steps[full-_selected]"),
    "kernels append over the last column": (
        "cache/layer.py", "_bound_columns())\n        self.used += 1\n", "_bound_columns())\n",
        "tests/attention/test_stacked.py::test_kernels_append[full-False]"),
    "stacked layers: victim before the scores": (
        "attention/decode.py", "stack.call, _NOTHING, stack.p_BHGT,", "stack.call, _NOTHING, None,",
        f"{ALIKE}[llama-tova]"),
    "stacked layers: one layer's noise for all": (
        "attention/stacked.py", "repeat_interleave(B)", "repeat_interleave(B) * 0", f"{ALIKE}[llama-keyformer]"),
    "stacked layers: the freed slot still counts": (
        "cache/layer.py", "self.positions.view(-1).index_fill_(0, self.free_slots(), -1)", "pass",
        "tests/invariants/test_held_within_budget.py::test_schedules[random-both]"),
    "rhythm: heads that differ evict before they are full": (
        "attention/decode.py", ">= slots.own_budget_BH1[..., 0] + every", "> slots.own_budget_BH1[..., 0]",
        f"{RHYTHM}::test_rows_in_different_phases_are_joined"),
    "rhythm: the first to evict waits for the last": (
        "cache/modes.py", "self.waits[0] == 1", "self.waits[-1] == 1",
        f"{RHYTHM}::test_rows_in_different_phases_are_joined"),
    "rhythm: every step looks": (
        "attention/decode.py", "return not (slots.mode.due or ", "return not (slots.holes or slots.mode.due or ",
        f"{RHYTHM}::test_steps_between_evictions_choose_nothing"),
    "rhythm: keys and values stay behind": (
        "cache/layer.py", "        self.move_entries(into, out)\n", "", f"{RHYTHM}::test_every_policy[h2o-pads0]"),
    "rhythm: the evicted moved to the front": (
        "policies/rhythm.py", "stable=True, dim=-1)", "stable=True, dim=-1, descending=True)",
        f"{RHYTHM}::test_moves_leave_what_stays_in_front"),
    "rhythm: one eviction rolled back without its keys": (
        "cache/rollback.py", "layer.kv.write_at(layer.kv.rows_of(columns), k, v)", "pass",
        f"{RHYTHM}::test_rolling_back_over_evictions[3-h2o-0.4-(0, 0)]"),
    "rhythm: what waits is not in a size": (
        "policies/budgets.py", " // bytes_per_token - beside\n", " // bytes_per_token\n",
        f"{RHYTHM}::test_a_size_in_bytes_counts_what_waits"),
    "rhythm: an undone step's column counts": (
        "cache/rollback.py", "    layer.floor = min(layer.floor, layer.used)\n", "",
        f"{RHYTHM}::test_rolling_back_to_a_prompt_below_its_budget"),
    "stage one skipped": (
        "policies/selection.py", "critical = in_top(first, count_BH1, _one_for_all(count_BH1))",
        "critical = torch.zeros_like(first, dtype=torch.bool)", f"{PARTS}::test_options[critical-{{'alpha': 1.0}}]"),
    "norm over the wrong heads": (
        "arch/bound.py", '"(n g d) e -> n g d e", n=N, g=group', '"(g n d) e -> n g d e", n=N, g=group',
        f"{PARTS}::test_combinations[llama_gqa-h2o-critical]"),
    "norm of one query head instead of the group's mean": (
        "backends/value_norms.py", "rows_NDE, size = rows_HGDE.flatten(0, 1),",
        "rows_NDE, size = rows_HGDE[:, :1].expand_as(rows_HGDE).flatten(0, 1),",
        f"{PARTS}::test_options[critical-{{'alpha': 0.0}}]"),
    "norms of stacked layers in the order of another layer": (
        "attention/stacked.py", ".mean(2).transpose(1, 2)", ".mean(2).transpose(1, 2).flip(0)",
        "tests/attention/test_stacked.py::test_norms_of_generated_tokens_are_those_of_their_layer_s_values"),
    "a bound step without the norm of its value": (
        "attention/bound_step.py", "            self.call.write_norms(v, self.norms_NB)\n", "            pass\n",
        "tests/attention/test_bound_step.py::test_bound_steps_are_the_steps[critical_keyformer]"),
    "scores not normalised before the second stage": (
        "policies/selection.py", "share = score / score.sum(-1, keepdim=True).clamp_min(torch.finfo(score.dtype).tiny)",
        "share = score", f"{PARTS}::test_options[critical-{{'alpha': 0.25, 'eps': 0.01}}]"),
    "floor ignored": (
        "policies/allocation.py", "max(share(float(self.floor), budget), nominal)", "nominal",
        f"{PARTS}::test_options[adaptive-{{'floor': 1.0}}]"),
    "tokens of images protected as text": (
        "cache/passes.py", "invert=isinstance(protect, AllBut)", "invert=False", f"{SHELLS}[text-mistral3]"),
    "ids that became embeddings forgotten": (
        "hooks/decoder.py", "merged = state.merged.take(B, Q)", "merged = None", f"{SHELLS}[image-mistral3]"),
    "heads share by the selection's order": (
        "attention/compress.py", "        self.context.keep_BH1 = None  # heads share by score alone\n", "",
        "tests/cache/test_turns.py::test_turns_of_combinations[adaptive+critical-all]"),
    "the mean of a second reading's rows for their maximum": (
        "backends/torch_backend.py", "x_NTR.amax(-1)", "x_NTR.mean(-1)", f"{ORACLE}[llama_gqa-kvzip]"),
    "a second reading scored among all tokens": (
        "attention/second_reading.py", "first = min(sinks, start)", "first = start",
        "tests/oracle/test_oracle.py::test_options[kvzip-{'chunk': 7, 'instruction': (5, 9)}]"),
    "a second reading that leaves out what its chunk does not show": (
        "attention/second_reading.py", "if not part.rest:", "if True:",
        "tests/oracle/test_oracle.py::test_options[kvzip-{'chunk': 7, 'instruction': (5, 9)}]"),
    "joined attention without its shares": (
        "backends/torch_backend.py", "(part - base).exp_()[..., None]", "(part - base).mul(0).exp_()[..., None] / 2",
        "tests/backends/test_earlier_keys.py::test_attention_to_earlier_and_own_keys_is_joined[False]"),
    "rows that see no own key as rows of logit 0": (
        "backends/torch_backend.py", "lse = lse.masked_fill(unseen, -torch.inf)", "pass",
        "tests/backends/test_earlier_keys.py::test_attention_to_earlier_and_own_keys_is_joined[True]"),
    "heads without earlier keys as keys of logit 0": (
        "backends/torch_backend.py", "lse = lse.masked_fill(none[..., None], -torch.inf)", "pass",
        "tests/backends/test_earlier_keys.py::test_attention_to_earlier_and_own_keys_is_joined[True]"),
    "probabilities of a second reading's padding": (
        "backends/torch_backend.py", "shift_BHGQ.masked_fill(rows_BQ[:, None, None] < 0, torch.inf)", "shift_BHGQ",
        "tests/backends/test_earlier_keys.py::test_the_greatest_probability_of_each_earlier_key[False-None-True]"),
    "kvzip_plus without the rows' size": (
        "attention/second_reading.py", "dtype=accumulator(hidden_BQE.dtype)).reciprocal()",
        "dtype=accumulator(hidden_BQE.dtype)).fill_(1.0)",
        "tests/hooks/test_second_reading.py::test_rows_count_by_the_size_of_their_input"),
    "kvzip_plus without the values' size": (
        "attention/second_reading.py", "most_BHGM * call.head_norms(part.shown.v_BHTD) if", "most_BHGM if",
        f"{ORACLE}[llama_gqa-kvzip_plus]"),
    "a compressed cache that forgets its padding": (
        "cache/from_dynamic.py", "cache.rows.padded = mine.holes", "pass",
        "tests/hooks/test_compression.py::test_what_was_read_before_the_block_is_kept_as_if_it_were_read_inside[key_diff-True]"),
    "padding repeated as tokens": (
        "hooks/compression.py", "ids.masked_fill(mask.to(ids.device) == 0, -1)", "ids",
        "tests/hooks/test_compression.py::test_what_was_read_before_the_block_is_kept_as_if_it_were_read_inside[kvzip-True]"),
    "evicted before the second reading": (
        "attention/compress.py", "if now.reread_BN is not None or (together and call.layer", "if (together and call.layer",
        f"{ORACLE}[llama_gqa-kvzip]"),
    "a row repeated at another's length": (
        "cache/passes.py", "(torch.tensor(whole.n_B)[:, None] + column)", "(max(whole.n_B) + column).repeat(len(pieces), 1)",
        f"{ORACLE}[llama_gqa-kvzip]"),
    "the mean of an observation window left out of its maxima": (
        "policies/scores.py", "return torch.maximum(score, mean)", "return score",
        "tests/oracle/test_oracle.py::test_float32[defensive_snapkv]"),
    "pooling that leaks behind the candidates": (
        "policies/scores.py", "        pooled = pooled * candidate_NM[:, None, None]\n", "",
        f"{ORACLE}[llama_gqa-defensive_snapkv]"),
    "local attention with a causal mask": (
        "policies/needs/chunk_attention.py", "    total = (p *", "    p = p.tril()\n    total = (p *",
        f"{ORACLE}[llama_gqa-compactor]"),
    "chunks counted from the prompt's first token": (
        "policies/needs/chunk_attention.py", "self.size, prompt.sinks", "self.size, 0",
        f"{ORACLE}[llama_gqa-compactor]"),
    "rows of an incomplete chunk forgotten": (
        "policies/needs/chunk_attention.py", "layer.notes[self.name] = rows.newest(size - 1, whole_B1)", "pass",
        "tests/attention/test_prefill.py::test_a_prompt_in_chunks_evicts_at_its_end[llama_gqa-compactor]"),
    "rows of a complete chunk counted again": (
        "policies/needs/chunk_attention.py", "positions.masked_fill(positions < start_B1, -1)", "positions",
        "tests/attention/test_prefill.py::test_a_prompt_in_chunks_evicts_at_its_end[llama_gqa-compactor]"),
    "standardized over all that is held": (
        "policies/content.py", "among = (position >= context.limits.first.clamp(min=0)) & (position <= context.recent_B11)",
        "among = position >= 0", f"{ORACLE}[llama_gqa-compactor]"),
    "merged into any token": (
        "policies/merging.py", "target = index_BHK.shape[-1] - 1 - target", "target = target * 0",
        f"{PARTS}::test_merged[h2o-merged]"),
    "merged with the weight of another": (
        "policies/merging.py", "size + size_BHK.gather(2, target) + _EPS", "2 * size + _EPS",
        f"{PARTS}::test_merged[h2o-merged]"),
    "merged where keys differ": (
        "policies/merging.py", " | (most < self.threshold), 0.0)", ", 0.0)", f"{PARTS}::test_merged[snapkv-merged]"),
    "merged: what was kept is merged too": (
        "policies/merging.py", "live_BHT & (stays_BHT == 0)", "live_BHT", f"{PARTS}::test_merged[h2o-merged]"),
    "merged values written to the first heads": (
        "cache/layer.py", "rows, values = rows[real], values[real]", "rows, values = rows[: len(real)], values[real]",
        f"{PARTS}::test_merged[roco-adaptive+merged]"),
    "the change of an output not squared": (
        "policies/outputs.py", "(p_NLM / (1 - p_NLM + _EPS)).square()", "(p_NLM / (1 - p_NLM + _EPS))",
        f"{ORACLE}[llama_gqa-dropkv]"),
    "outputs without what the window itself gave": (
        "policies/outputs.py", "v_NMD = rows.p_NGRM.double(), rows",
        "v_NMD = (rows.p_NGRM * rows.candidate_NM[:, None, None]).double(), rows",
        f"{ORACLE}[llama_gqa-dropkv]"),
    "the greatest of several blocks' sums": (
        "attention/prefill.py", '"sum": torch.add}', '"sum": torch.maximum}',
        "tests/policies/test_scores.py::test_a_window_in_several_blocks_of_rows[dropkv]"),
    "the maximum over one query head": (
        "policies/scores.py", "return (pooled * (total / scaled.clamp_min(torch.finfo(scaled.dtype).tiny))).amax((1, 2))",
        "return (pooled * (total / scaled.clamp_min(torch.finfo(scaled.dtype).tiny)))[:, 0].amax(1)",
        f"{ORACLE}[llama_gqa-layer_defensive]"),
    "each layer evicts before the next one has read the prompt": (
        "attention/compress.py", "(together and call.layer != _last(call.cache))", "False",
        f"{PARTS}::test_combinations[llama_gqa-h2o-global_topk]"),
    "a budget of all layers divided by layer": (
        "attention/compress.py", "        _end(ended)\n", "        for one in ended:\n            _end([one])\n",
        f"{PARTS}::test_combinations[llama_gqa-h2o-global_topk]"),
    "norms of tokens that are appended forgotten": (
        "attention/bound_step.py", "entry = call.policy.stores or call.policy.keeps_norms",
        "entry = call.policy.stores",
        "tests/attention/test_bound_step.py::test_norms_of_tokens_that_are_appended_are_kept"),
    "norms of layers that wait forgotten": (
        "policies/policy.py", 'self.schedule != "prompt" or self.over_model', 'self.schedule != "prompt"',
        "tests/cache/test_common_budget.py::test_weights_of_a_layer_are_not_needed_after_it"),
    "one head's extent off by one": (
        "backends/head_offsets.py", "accumulate((capacities[n] for n", "accumulate((capacities[n] - (n == 1) for n",
        "tests/cache/test_ragged.py::test_long_texts_agree_with_the_oracle"),
    "the edges of ragged heads count their first entry again": (
        "backends/head_offsets.py", "blocks.edge_slot_NE] * blocks.real_NE", "blocks.edge_slot_NE]",
        f"{PARTS}::test_combinations[llama_gqa-snapkv-adaptive]"),
    "pyramid upside down": (
        "policies/slopes.py", "2 * budget - last - step * layer", "last + step * layer",
        f"{PARTS}::test_combinations[llama_gqa-h2o-pyramid]"),
    "a block's scores dropped": (
        "attention/prefill.py", "        call.add(sums)", "        if call.now.final:\n            call.add(sums)",
        f"{PARTS}::test_blocks[h2o-7]"),
    "blocks cut by columns instead of the row's own tokens": (
        "cache/forward_context.py", "(positions_BQ < 0).long().argsort(dim=1, stable=True)",
        "torch.arange(P, device=positions_BQ.device).expand_as(positions_BQ)", f"{PARTS}::test_blocks[window-7]"),
    "a block's budget is of what was read so far": (
        "cache/passes.py",
        "now.budget_n_B = n_B if now.fixed_B is None else now.rows_B", "now.budget_n_B = [n // 2 for n in n_B]",
        f"{PARTS}::test_blocks[window-7]"),
    "damping of rows whose text has ended": (
        "attention/layer_call.py", "if min(self.now.rows_B, default=1) > 0:", "if True:",
        f"{PARTS}::test_blocks_of_keyformer[{{'damping': 0.5}}]"),
    "no gradient through keys that are evicted later": (
        "cache/layer.py", "            with torch.enable_grad():\n                self.graph = (gather_entries",
        "            with torch.no_grad():\n                self.graph = (gather_entries",
        f"{GRADIENTS}[llama_gqa-roco-None]"),
    "gradient only through this block's keys": (
        "attention/prefill.py", "old = slots.graph or (keys", "old = (keys",
        f"{GRADIENTS}[gpt2-roco-None]"),
    "checkpointed layers lose their cache": (
        "hooks/attention.py", "            out.cache = args[0].cache", "            pass",
        f"{GRADIENTS}[gpt2-roco-{{'use_reentrant': True}}]"),
    "renumbered queries keep their position": (
        "attention/layer_call.py",
        "own.repeat_interleave(self.group, 1), table)", "own.repeat_interleave(self.group, 1) + 1, table)",
        f"{PARTS}::test_renumbered[llama_gqa-h2o]"),
    "renumbered ALiBi counts missing tokens": (
        "attention/layer_call.py", "ranks.amax(-1, keepdim=True) - ranks", "positions.amax(-1, keepdim=True) - positions",
        f"{PARTS}::test_renumbered[mpt-h2o]"),
    "pooling over empty slots": (
        "policies/scores.py", "        if not context.empty:\n            return self._pool_scores",
        "        if True:\n            return self._pool_scores",
        "tests/cache/test_turns.py::test_turns_of_combinations[adaptive-all]"),
    "one head's score for tokens that others do not hold": (
        "policies/scores.py", "        if context.aligned:", "        if True:",
        f"{PARTS}::test_combinations[llama_gqa-tova-critical]"),
    "a later turn counts its own tokens alone": (
        "cache/passes.py", "begin_B if later and turns == \"each\" else None", "begin_B if later else None",
        "tests/cache/test_turns.py::test_a_later_turn_is_compressed_too[h2o]"),
    "generated rows forgotten between turns": (
        "policies/policy.py", "return bool(self.needs.sums) and", "return False and",
        "tests/cache/test_turns.py::test_schedule_prompt_counts_all_each_or_the_first[h2o-all]"),
    "an altered file passes": (
        "storage/file.py", "if given != checksum(text, tensors):", "if False:",
        "tests/storage/test_storage.py::test_truncated_altered_and_missing_files_are_refused"),
    "noise drawn from the slot, not the position": (
        "policies/needs/noisy_sums.py", 'rearrange(new.positions_BQ, "b q -> b 1 q 1")',
        'rearrange(torch.arange(Q).expand(B, Q), "b q -> b 1 q 1")', f"{ORACLE}[llama-keyformer]"),
    "a compiled step stands still": (
        "cache/compiled.py", "    cache.lengths_B.add_(1)", "    cache.lengths_B.add_(0)",
        "tests/cache/test_compiled.py::test_a_compiled_step_computes_what_an_uncompiled_one_does[llama_gqa-h2o-{'k': 0.5}]"),
    "compiled steps are not counted": (
        "cache/compiled.py", "    cache.counters.behind = True", "    cache.counters.behind = False",
        "tests/cache/test_compiled.py::test_a_compiled_step_computes_what_an_uncompiled_one_does[llama_gqa-h2o-{'k': 0.5}]"),
    "a temperature compiled in": (
        "cache/state.py", "device.steps + ahead", "device.steps * 0 + ahead",
        "tests/cache/test_compiled.py::test_a_compiled_step_computes_what_an_uncompiled_one_does"
        "[llama_gqa-keyformer-{'k': 0.5, 'tau': (1.0, 9.0), 'generation_length': 12, 'damping': 0.3}]"),
    "slots taken by compiled steps forgotten": (
        "cache/state.py", "layer.mode.count(count)", "pass",
        "tests/cache/test_compiled.py::test_what_is_done_to_an_opened_cache"),
    "a compiled step reads its counters": (
        "cache/state.py", "        if now.traced:\n            device", "        if False:\n            device",
        "tests/cache/test_compiled.py::test_a_compiled_step_computes_what_an_uncompiled_one_does"
        "[llama_gqa-keyformer-{'k': 0.5, 'tau': (1.0, 9.0), 'generation_length': 12, 'damping': 0.3}]"),
    "squares of one head in the column kernel": (
        "backends/triton/columns.py", "group = tl.where(g == 0, p, group + p)", "group = p",
        "tests/backends/test_triton_columns.py::test_column_statistics[group 4]"),
    "the column kernel reads a key too many": (
        "backends/triton/columns.py", "k = tl.load(k_tile, mask=(n < T)[:, None]",
        "k = tl.load(k_tile, mask=(n < T + 1)[:, None]",
        "tests/backends/test_triton_columns.py::test_column_statistics[group 4]"),
    "the forward kernel reads the place of a row too many": (
        "backends/triton/forward.py", "rows = tl.load(rows_ptr + b * Q + m, mask=m < Q,",
        "rows = tl.load(rows_ptr + b * Q + m, mask=m < Q + 1,",
        "tests/backends/test_triton_forward.py::test_output_and_normalizers_in_one_pass[window]"),
    "rows between two splits of the column kernel left out": (
        "backends/triton/columns.py", "hi = tl.minimum(begin + blocks * (split + 1) // splits * BLOCK_M, hi)",
        "hi = tl.minimum(begin + blocks * (split + 1) // splits * BLOCK_M - 1, hi)",
        "tests/backends/test_triton_columns.py::test_rows_split_over_programs[shape1-1024]"),
    "key blocks of one head first": (
        "backends/triton/columns.py", "_columns_kernel[(B * H * splits, blocks)](",
        "_columns_kernel[(blocks, B * H * splits)](",
        "tests/backends/test_triton_columns.py::test_programs_that_see_most_rows_start_first"),
    "the forward kernel's window one too wide": (
        "backends/triton/forward.py", "(row_place[:, None] - place[None, :] < sliding)",
        "(row_place[:, None] - place[None, :] <= sliding)",
        "tests/backends/test_triton_forward.py::test_output_and_normalizers_in_one_pass[window]"),
    "whole tiles of the forward kernel reach out of the window": (
        "backends/triton/forward.py", "tl.maximum(begin, m0 + BLOCK_M - sliding)", "tl.maximum(begin, m0 - sliding)",
        "tests/backends/test_triton_forward.py::test_output_and_normalizers_in_one_pass[window]"),
    "sinks have no share in the forward kernel": (
        "backends/triton/forward.py", "        total += 1.0\n", "        total += 0.0\n",
        "tests/backends/test_triton_forward.py::test_output_and_normalizers_in_one_pass[sinks]"),
    "sinks have no share in a decode step": (
        "backends/triton/split.py", "total = p_new + tl.exp2(sink - rest(maximum))", "total = p_new",
        "tests/backends/test_triton_decode.py::test_follows_the_twin[sinks]"),
    "sinks in every segment of a decode step": (
        "backends/triton/split.py", "SINKS + h * G + g, mask=own_g", "SINKS + h * G + g, mask=real_g",
        "tests/backends/test_triton_decode.py::test_follows_the_twin[cap and sinks]"),
    "sinks in the noisy softmax of a decode step": (
        "backends/triton/split.py", "total_y = x_new * cooling, alone", "total_y = x_new * cooling, total",
        "tests/backends/test_triton_decode.py::test_follows_the_twin[sinks, noise, ragged]"),
    "the new token's logit uncapped": (
        "backends/triton/split.py", "capped(product, inner) * unit", "product * unit",
        "tests/backends/test_triton_decode.py::test_follows_the_twin[cap]"),
    "a compiled step without its cap": (
        "backends/triton/triton_backend.py", "softcap=softcap, sinks_HG=sinks, begin_N", "sinks_HG=sinks, begin_N",
        "tests/backends/test_triton_rounded.py::test_the_operator_of_compiled_steps_knows_bits_cap_and_sinks[8]"),
    "renumbered keys keep the rotation of their family's forward": (
        "arch/rotary.py", "(torch.ones_like(cos), torch.zeros_like(sin))", "(cos, sin)",
        "tests/arch/test_families.py::test_renumbered[qwen3]"),
    "a renumbered text is looked up beyond GPT-J's table": (
        "hooks/decoder.py", "if renumbered and state.max_positions is not None:", "if False:",
        "tests/robustness/test_errors.py::test_a_renumbered_gptj_says_when_a_head_would_hold_too_much"),
    "rotations undone that follow the text's length": (
        "arch/rotary.py", "follows = not renumbered and kind in BY_LENGTH", "follows = False",
        "tests/arch/test_families.py::test_rotations_that_follow_the_length_are_not_undone[dynamic]"),
    "rotary tables in float32 make keys float32": (
        "arch/rotary.py", "return turned.to(x_BHTD.dtype)", "return turned",
        "tests/arch/test_families.py::test_renumbered_in_half_precision[olmo]"),
    "the noisy sum stays on an old maximum": (
        "backends/triton/forward.py", "noisy_total = noisy_total * shrunk", "noisy_total = noisy_total",
        "tests/backends/test_triton_forward.py::test_output_and_normalizers_in_one_pass[noise]"),
    "values of empty slots read by the forward kernel": (
        "backends/triton/forward.py", "here = here & (positions >= 0)[:, None]", "here = here",
        "tests/backends/test_triton_forward.py::test_output_and_normalizers_in_one_pass[past]"),
    "capped logits taken for products in the column kernel": (
        "backends/triton/columns.py", "x = capped(x, inner)", "x = x * inner",
        "tests/backends/test_triton_columns.py::test_column_statistics[cap]"),
    "the column kernel forgets ALiBi": (
        "backends/triton/columns.py", "x += (slope * key_place)[:, None]", "x += 0.0",
        "tests/invariants/test_backends_agree.py::test_every_architecture_on_the_kernels[mpt-roco-False]"),
    "the kernel's victim ignores the protected window": (
        "backends/triton/combine.py", "position > newest - recent, LAST", "position > newest, LAST",
        "tests/invariants/test_backends_agree.py::test_every_policy_on_the_kernels[h2o]"),
    "the kernel's noise left out": (
        "backends/triton/combine.py", "                        x += tl.log2(noise)", "                        x += 0.0 * noise",
        "tests/backends/test_triton_decode.py::test_follows_the_twin[alibi, window, gumbel]"),
    "the victim of the first chunk alone": (
        "backends/triton/combine.py", "at = tl.load(here + 1, mask=there, other=NOWHERE)",
        "at = tl.load(here + 1, mask=s < 1, other=0)",
        "tests/backends/test_triton_decode.py::test_follows_the_twin[recency over chunks]"),
    "tokens of the first chunk alone counted": (
        "backends/triton/combine.py", "tl.load(here + 2, mask=there, other=0)", "tl.load(here + 2, mask=s < 1, other=0)",
        "tests/backends/test_triton_decode.py::test_follows_the_twin[holes over chunks]"),
    "segments beyond the first sixteen outweigh them in the output": (
        "backends/triton/combine.py", "acc = acc * fade + tl.sum(o * weight, 0)", "acc = acc + tl.sum(o * weight, 0)",
        "tests/backends/test_triton_decode.py::test_follows_the_twin[a group of five in many segments]"),
    "segments beyond the first sixteen outweigh them in the statistics": (
        "backends/triton/combine.py", "total * tl.exp2(maximum - rest(higher)) + tl.sum(more, 0)", "total + tl.sum(more, 0)",
        "tests/backends/test_triton_decode.py::test_follows_the_twin[a group of five in many segments]"),
    "the newest tokens of a batch read as one column": (
        "backends/triton/triton_backend.py", "newest_B = newest_B.contiguous()", "newest_B = newest_B.view_as(newest_B)",
        "tests/backends/test_backends.py::test_several_decode_tokens_in_one_pass[2]"),
    "keys that a row attends to, without those before": (
        "backends/triton/triton_backend.py", "return own[:, None] + held", "return own[:, None] + 0 * held",
        "tests/backends/test_backends.py::test_keys_that_a_row_attends_to[None]"),
    "flash's window one too wide": (
        "backends/flash/flash_backend.py", "else geometry.sliding - 1", "else geometry.sliding",
        "tests/backends/test_flash.py::test_attention_and_log_sum_exp[torch-window]"),
    "cuDNN with keys before the prompt": (
        "backends/flash/kernels.py", "        past=False,  # its causal", "        past=True,  # its causal",
        "tests/backends/test_flash.py::test_attention_and_log_sum_exp[cudnn-past]"),
    "a failed launch leaves what it wrote": (
        "backends/refusals.py", "            tensor.copy_(old)", "            tensor.copy_(tensor)",
        "tests/backends/test_launch_failures.py::test_what_a_failed_launch_has_written_is_as_before"),
    "masks on a GPU as small as a CPU's": (
        "backends/torch_backend.py", 'MASK_BLOCK if device == "cpu" else DEVICE_BLOCK', "MASK_BLOCK",
        "tests/backends/test_torch_on_gpus.py::test_a_batch_with_alibi_is_attended_in_few_calls"),
    "groups left to torch on a GPU": (
        "backends/torch_backend.py", 'if G == 1 or q_BNQD.device.type == "cpu":', "if True:",
        "tests/backends/test_torch_on_gpus.py::test_groups_are_expanded_where_no_fused_kernel_takes_them[how0-None]"),
    "numbers that the host knows are read from the device": (
        "attention/compress.py", "held_B = now.n_B if now.padding is None else now.padding.real_B", "held_B = None",
        "tests/attention/test_host_waits.py::test_a_prompt_of_tokens_alone_waits_for_nothing[h2o-torch]"),
    "chunks slide": (
        "policies/windows.py", "return t // int(window) * int(window) if isinstance(window, Chunk) else t - window + 1",
        "return t - window + 1", f"{CHUNKS}_attention_to_chunks_behind_evicted_tokens"),
    "a chunk's tokens are seen for as long as a window's": (
        "policies/windows.py", "return (i // int(window) + 1) * int(window) if isinstance(window, Chunk) else i + window",
        "return i + window", f"{CHUNKS}_a_window_by_its_mask[Chunk5]"),
    "a kernel takes chunks of a text that goes on": (
        "attention/layer_call.py", "sliding >= T and not keys.past and task", "sliding >= T and task",
        f"{CHUNKS}_only_a_text_of_several_chunks_is_for_torch"),
    "chunks of a padded row begin at the batch's first column": (
        "evaluation/masked.py", "torch.arange(seen_BNQT.shape[-1]) - pads_B[:, None]",
        "torch.arange(seen_BNQT.shape[-1]) - 0 * pads_B[:, None]",
        "tests/arch/test_families.py::test_kvpatch_check[llama4_tuned]"),
    "a chunk without a size": (
        "arch/interface.py", 'if getattr(config, "attention_chunk_size", None) else', "if True else",
        "tests/arch/test_families.py::test_layers_of_other_kinds_are_refused"),
    "attention that counts columns is told places": (
        "hooks/target.py", "if any(adapter.counts_columns(module) for module, adapter in self.attentions):", "if False:",
        f"{OWN}_what_needs_positions_of_our_own_is_refused[llama4_tuned]"),
    "the tokens of an image are those of the innermost model": (
        "hooks/target.py", "in reversed(holders[:-1]) if _image_tokens(holder)", "in reversed(holders[:-1])",
        "tests/arch/test_shells.py::test_the_tokens_of_an_image_are_those_of_the_model_that_names_them"),
    "attention that kvpatch does not reach passes": (
        "arch/interface.py", "        if not attended:", "        if False:",
        "tests/arch/test_remote_code.py::test_a_forward_that_hands_nothing_on_is_refused[keeps them]"),
    "a CPU gets the interpreter's kernels": (
        "backends/dispatch.py", 'if name == "triton" and self.wanted != name and case.device == "cpu":', "if False:",
        "tests/backends/test_backends.py::test_a_cpu_gets_torch_and_the_report_says_why"),
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
