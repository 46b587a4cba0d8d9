"""Names of vLLM's that the plugin takes, looked up in vLLM's sources without importing or installing them.

    python -m tools.reliability.vllm_names FOLDER       a folder with the package vllm: an unpacked wheel, or site-packages

Looked up are: every name that kvpatch/serving/vllm imports; the attributes below; and of each method of vLLM's that a class
there overrides, the arguments that vLLM may hand it. What is missing is printed, and makes the exit status 1. A name that is
there may still mean something else: only a run tells.
"""

from __future__ import annotations

import argparse
import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

PLUGIN = Path(__file__).parents[2] / "kvpatch/serving/vllm"
READ = {
    "vllm.config:VllmConfig": (
        "additional_config cache_config compilation_config kv_transfer_config model_config parallel_config "
        "scheduler_config speculative_config"
    ),
    "vllm.config:ModelConfig": (
        "attention_chunk_size dtype get_head_size get_total_num_kv_heads is_hybrid logits_processors max_model_len use_mla"
    ),
    "vllm.config:CacheConfig": "block_size enable_prefix_caching user_specified_block_size",
    "vllm.config:SchedulerConfig": "enable_chunked_prefill max_num_batched_tokens",
    "vllm.config:ParallelConfig": (
        "decode_context_parallel_size distributed_executor_backend pipeline_parallel_size tensor_parallel_size"
    ),
    "vllm.config:CompilationConfig": "static_forward_context",
    "vllm.distributed.parallel_state:GroupCoordinator": "device_group rank_in_group world_size",
    "vllm.sampling_params:SamplingParams": "extra_args",
    "vllm.platforms.interface:Platform": "is_cpu is_cuda",
    "vllm.v1.attention.backend:AttentionBackend": (
        "customize_spec forward_includes_kv_cache_update get_builder_cls get_impl_cls "
        "get_supported_kernel_block_sizes supported_dtypes supported_kv_cache_dtypes "
        "supported_kv_cache_layouts supports_kv_connector supports_sink supports_sliding_window"
    ),
    "vllm.v1.attention.backend:AttentionImpl": "forward process_weights_after_loading",
    "vllm.v1.attention.backend:AttentionMetadataBuilder": "build",
    "vllm.v1.attention.backend:CommonAttentionMetadata": (
        "block_table_tensor is_prefilling num_actual_tokens query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound"
    ),
    "vllm.v1.attention.backends.registry:AttentionBackendEnum": "AMX_MLA CPU_ATTN CPU_MLA CUSTOM get_path is_overridden",
    "vllm.v1.core.block_pool:BlockPool": "blocks null_block touch",
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": "block_id is_null ref_cnt",
    "vllm.v1.core.sched.scheduler:Scheduler": "kv_cache_config requests vllm_config",
    "vllm.v1.core.single_type_kv_cache_manager:CircularBufferManager": (
        "allocate_new_blocks block_pool get_num_blocks_to_allocate kv_cache_group_id pop_blocks_for_free req_to_blocks"
    ),
    "vllm.v1.engine.input_processor:InputProcessor": "vllm_config",
    "vllm.v1.kv_cache_interface:KVCacheConfig": "kv_cache_groups num_blocks",
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": "kv_cache_spec layer_names role",
    "vllm.v1.kv_cache_interface:KVCacheLayout": "LBHNC",
    "vllm.v1.kv_cache_interface:CircularBufferSpec": (
        "block_size dtype head_size is_uniform_with_collection max_memory_usage_bytes max_num_blocks_per_req "
        "num_kv_heads page_size_bytes"
    ),
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry": "_ensure_registered get_manager_class register",
    "vllm.v1.sample.logits_processor.interface:LogitsProcessor": "apply is_argmax_invariant update_state validate_params",
    "vllm.v1.worker.gpu.sample.logits_processor.interface:LogitsProcessor": "add_request apply validate_params",
    "vllm.v1.request:Request": (
        "is_finished max_tokens num_computed_tokens num_prompt_tokens num_tokens resumable sampling_params"
    ),
}
"""Attributes that the plugin reads of vLLM's objects, by module and class."""


class Sources:
    """The package in a folder, parsed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cache  # noqa: B019 - one folder a run
    def parse(self, module: str) -> ast.Module | None:
        """Return a module, or None if there is none."""
        path = self.folder.joinpath(*module.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.exists():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Return where a name is defined, and what it is; None if the module has none."""
        tree = self.parse(module)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name and node in tree.body:
                return module, node
            if isinstance(node, ast.ImportFrom):
                for one in node.names:
                    if (one.asname or one.name) == name:
                        home = _resolve(module, node, self)
                        return self.find(home, one.name) or self._module(f"{home}.{one.name}") or (home, node)
            if isinstance(node, ast.Assign | ast.AnnAssign) and node in tree.body and name in _targets(node):
                return module, node
            if isinstance(node, ast.Constant) and node.value == name:  # names that a package looks up when they are asked for
                return module, node
        return self._module(f"{module}.{name}")

    def _module(self, name: str) -> tuple[str, ast.AST] | None:
        tree = self.parse(name)
        return None if tree is None else (name, tree)

    def lineage(self, module: str, name: str) -> Iterator[ast.ClassDef]:
        """Yield a class of vLLM's and its bases in vLLM."""
        found = self.find(module, name)
        if found is not None and isinstance(found[1], ast.ClassDef):
            yield found[1]
            for base in found[1].bases:
                base = base.value if isinstance(base, ast.Subscript) else base
                if isinstance(base, ast.Name):
                    yield from self.lineage(found[0], base.id)


def _resolve(module: str, node: ast.ImportFrom, sources: Sources) -> str:
    """Return the absolute name of the module of an import."""
    if not node.level:
        return node.module or ""
    path = sources.folder.joinpath(*module.split("."))
    parts = module.split(".")[: len(module.split(".")) - node.level + (path / "__init__.py").exists()]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}


def _members(found: ast.ClassDef) -> set[str]:
    """Return the names that a class's body and its methods give: fields, methods, and attributes of self."""
    names = set[str]()
    for node in found.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            names |= _targets(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
    attributes = (node for node in ast.walk(found) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return names | {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "self"}


def imported() -> Iterator[tuple[str, str, str]]:
    """Yield each file of the plugin, the module of vLLM that it imports from, and the name."""
    for file in sorted(PLUGIN.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm" and not node.level:
                yield from ((file.name, node.module or "", one.name) for one in node.names)


def _overridden(sources: Sources) -> Iterator[tuple[str, str]]:
    """Yield a place in the plugin, and what a method that it overrides is told and does not take."""
    for file in sorted(PLUGIN.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        homes = {
            one.asname or one.name: (node.module or "", one.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "vllm"
            for one in node.names
        }
        for own in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            bases = [homes[name] for base in own.bases for name in [ast.unparse(base).partition("[")[0]] if name in homes]
            for method in (node for node in own.body if isinstance(node, ast.FunctionDef)):
                if (method.args.vararg and method.args.kwarg) or method.name == "__init__":
                    continue
                for base in bases:
                    yield from _compare(f"{file.name} {own.name}.{method.name}", method, sources, base)


def _compare(place: str, method: ast.FunctionDef, sources: Sources, base: tuple[str, str]) -> Iterator[tuple[str, str]]:
    theirs = next(
        (
            node
            for found in sources.lineage(*base)
            for node in found.body
            if isinstance(node, ast.FunctionDef) and node.name == method.name
        ),
        None,
    )
    if theirs is None:
        return
    known = {one.arg for one in (*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs)}
    told = [one.arg for one in (*theirs.args.args, *theirs.args.kwonlyargs)]
    missing = [] if method.args.vararg else [name for name in told if name not in known]
    if missing:
        yield place, f"is told {', '.join(missing)}, too"


def look_up(folder: Path) -> tuple[int, list[str]]:
    """Return how many names were looked up in a folder, and what is missing."""
    sources, missing, count = Sources(folder), list[str](), 0
    for file, module, name in imported():
        count += 1
        if sources.find(module, name) is None:
            missing.append(f"{file}: {module} has no {name}")
    for place, names in READ.items():
        module, _, owner = place.partition(":")
        known = set[str]().union(*(_members(found) for found in sources.lineage(module, owner)))
        for name in names.split():
            count += 1
            if name not in known:
                missing.append(f"{place} has no {name}")
    for method, told in _overridden(sources):
        missing.append(f"{method} {told}")
    return count, missing


def main() -> int:
    """Run what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    count, missing = look_up(parser.parse_args().folder)
    print(f"{count} names looked up, {len(missing)} missing or changed", *missing, sep="\n")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
