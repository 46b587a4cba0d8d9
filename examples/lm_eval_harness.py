"""lm-evaluation-harness without and with a budget, its own tables one after the other.

    python -m examples.lm_eval_harness --policy h2o -k 0.2 --block 8 --tasks kvp_recall kvp_answer
    python -m examples.lm_eval_harness --model llama-python -k 0.2 --block 16 --tasks kvp_names kvp_source

kvp_recall (multiple choice), kvp_answer (generate_until), kvp_names (multiple choice over Python source) and kvp_source
(perplexity) read files in lm_eval_tasks/, so that nothing is fetched; any other name is one of the harness' own.

With code of your own that holds an HFLM, `with kvpatch.patched(lm.model, ...)` is enough for generate_until, for a `k` in
tokens, and for batch_size=1. Log-likelihoods under a share `k` need KVPatchLM, as here: the harness pads on the right and
gives no mask, so that a row's padding would count as its text.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpatch.cli.loading import parse_k
from tools.training import tasks as shipped

LOCAL = Path(__file__).parent / "lm_eval_tasks"


def load(name: str) -> tuple[Any, Any]:
    """Model and tokenizer: a shipped model's name, else a folder or a name on the hub."""
    if name in shipped.shipped():
        return shipped.load(name)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(name).eval(), AutoTokenizer.from_pretrained(name)


def manager(tasks: Sequence[str], metadata: dict[str, Any] | None = None) -> Any:
    """The harness' task manager: its own tasks, thousands, are only read where one of them is asked for."""
    from lm_eval.tasks import TaskManager

    local = {path.stem for path in LOCAL.glob("*.yaml")}
    return TaskManager(include_path=str(LOCAL), include_defaults=not local.issuperset(tasks), metadata=metadata)


def evaluate(lm: Any, tasks: Sequence[str], metadata: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """The harness' results for a model that it can run; options as of lm_eval.simple_evaluate.

    metadata: what tasks that make their own data are told, such as RULER's of lengths and tokenizer.
    """
    import lm_eval

    made = manager(tasks, metadata)
    return lm_eval.simple_evaluate(lm, tasks=list(tasks), task_manager=made, bootstrap_iters=0, **options)


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-0", help="a shipped model, a folder, or a name on the hub")
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("-k", type=parse_k, default=0.2, help="share (0.2), tokens (64) or size (2GiB)")
    parser.add_argument("--block", type=int, help="tokens between evictions: without it log-likelihoods feel no budget")
    parser.add_argument("--tasks", nargs="+", default=["kvp_recall", "kvp_answer"])
    parser.add_argument("--num-fewshot", type=int)
    parser.add_argument("--batch-size", default="8")
    parser.add_argument("--limit", type=int)
    args = parser.parse_args(argv)
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import make_table

    from kvpatch.evaluation.lm_eval import KVPatchLM

    model, tokenizer = load(args.model)
    common = {"pretrained": model, "tokenizer": tokenizer, "batch_size": args.batch_size}
    options = {"num_fewshot": args.num_fewshot, "limit": args.limit}
    results = {"unpatched": evaluate(HFLM(**common), args.tasks, **options)}
    lm = KVPatchLM(**common, policy=args.policy, k=args.k, block=args.block)
    results["patched"] = evaluate(lm, args.tasks, **options)
    lm.patch.remove()
    for name, result in results.items():
        setting = f": {args.policy}, k={args.k}, block={args.block}" if name == "patched" else ""
        print(f"{args.model} {name}{setting}\n{make_table(result)}")
    return results


if __name__ == "__main__":
    main()
