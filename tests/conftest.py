import pytest
import torch
from transformers.utils import logging

logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def _one_thread_and_no_leftovers():
    """Tests run several processes side by side; and what torch.empty returns is poisoned, so that reading it shows."""
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
