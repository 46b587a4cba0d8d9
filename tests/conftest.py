import gc
import os
import sys
from collections import defaultdict
from zlib import crc32

from tests.helpers import devices as devices  # first: it chooses what torch sees

# isort: split
import pytest
import torch
from hypothesis import settings
from transformers.utils import logging

from tests.helpers.interpreter import prepare
from tools import real_model
from tools.frames import roomy

logging.set_verbosity_error()
if not torch.cuda.is_available():  # Triton's kernels then run in its interpreter, which must be said before they are imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
    prepare()
# the same examples everywhere; `pytest --hypothesis-profile=wide` draws new ones
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("wide", deadline=None, max_examples=2000)
settings.load_profile("fixed")


FAST = 3  # cases of one test that are fast


def _values(item):
    """Parameters with their values; equal ones of a product are one object, and what is no word or number has no order."""
    plain = (str, int, float, type(None))
    return {(name, one if isinstance(one, plain) else id(one)) for name, one in item.callspec.params.items()}


@pytest.hookimpl(tryfirst=True)  # before `-m` takes some away
def pytest_collection_modifyitems(items):
    """Skip what needs a GPU where there is none, and mark a test's cases.

    All are slow but FAST that show the most values; a slow one is wide as well if each of its values is in another case, or if
    its test is sampled and it is not the one in so many.
    """
    functions = defaultdict(list)
    for item in items:
        if item.get_closest_marker("gpu"):
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        elif hasattr(item, "callspec"):
            functions[item.function].append(item)
    for cases in functions.values():
        seen = set()
        left = sorted(cases, key=lambda case: crc32(case.nodeid.encode()))  # of equals, any
        for _ in range(FAST):
            if able := [case for case in left if not case.get_closest_marker("slow")]:
                left.remove(most := max(able, key=lambda case: len(_values(case) - seen)))
                seen |= _values(most)
        for number, case in enumerate(left):
            case.add_marker("slow")
            sampled = case.get_closest_marker("sampled")
            left_out = sampled is not None and number % sampled.args[0]
            if left_out or (_values(case) <= seen and not case.get_closest_marker("every")):
                case.add_marker("wide")
            seen |= _values(case)
    for item in items:
        if item.get_closest_marker("real"):
            item.add_marker("slow")
        item.obj = roomy(item.obj)
    items.sort(key=lambda item: item.path.parent.name != "tools")  # a test of minutes must not be the last one running


def pytest_collection_finish():
    """What is imported by now stays: the collector need not look at it again, nor run after every 700 objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(autouse=True)
def _one_thread_and_poison():
    """Tests run in processes side by side; what torch.empty returns is poisoned (NaN), so that reading it shows."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


_KEYS = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@pytest.fixture(autouse=True)
def _dispatch_as_it_was():
    """Each test begins with PyTorch's own dispatch keys.

    In one long run Python's was found excluded, after which every compilation in the process failed. By what is not known.
    """
    with torch._C._ForceDispatchKeyGuard(*_KEYS):
        yield


@pytest.fixture(autouse=True)
def _no_kernel_is_replaced():
    """A defect in a kernel's call must not pass for a launch that fails, after which torch serves."""
    yield
    refusals = sys.modules.get("kvpatch.backends.refusals")
    left = {key: why for key, why in refusals.known.items() if key[0].startswith("triton")} if refusals is not None else {}
    if left:
        refusals.known.clear()
        pytest.fail(f"a Triton kernel was refused: {left}")


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def scenes():
    """`scenes(name)`: a patched model of faults.SCENES."""
    from tests.helpers.faults import Scenes

    made = Scenes()
    yield made.of
    made.close()


@pytest.fixture(scope="session")
def real_name():
    """A pretrained model's folder, or what KVPATCH_REAL_MODEL names."""
    try:
        return real_model.find_model()
    except real_model.UnavailableError as error:
        pytest.skip(f"no pretrained model: {error} (or name one in {real_model.VARIABLE})")
