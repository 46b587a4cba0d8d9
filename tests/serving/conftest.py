"""Requests of continuous batching are put on a budget from transformers 5.19 on; below, the refusal is tested."""

from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from kvpatch.hooks.versions import ENGINE

HERE = Path(__file__).parent
ANYWHERE = ("test_refusals.py", "test_vllm_terms.py")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    if Version(transformers.__version__) >= Version(ENGINE):
        return
    for item in items:
        if item.path.parent == HERE and item.path.name not in ANYWHERE:
            item.add_marker(pytest.mark.skip(reason=f"continuous batching needs transformers {ENGINE}"))
