"""Figures of budgets beside vLLM's own in its /metrics: the scheduler counts, and the process that answers clients tells.

Prometheus' library has files that several processes count in. vLLM uses them where it has several servers; else the plugin
makes a folder for them, whose name the scheduler's process finds in its environment.
"""

from __future__ import annotations

import os
import tempfile

FOLDER = "KVPATCH_VLLM_FIGURES"
"""The environment variable with the name of the folder."""
ROWS = {
    "seen_tokens": ("counter", "Tokens that requests had read and written when they ended."),
    "held_tokens": ("counter", "Of these, tokens that a KV head held, the mean of the layers."),
    "evicted_tokens": ("counter", "Of these, tokens that it no longer held."),
    "ended_requests": ("counter", "Requests that have ended."),
    "compressed_requests": ("counter", "Requests that had evicted a token when they ended."),
    "prompt_cuts": ("counter", "Passes that read a piece of a prompt without its end."),
    "blocks": ("gauge", "Pages of the KV cache."),
    "blocks_claimed": ("gauge", "Pages that running requests claim."),
}
_kept: list[tempfile.TemporaryDirectory[str]] = []


def offer_figures() -> None:
    """Let vLLM's /metrics show kvpatch's counters, which Prometheus' library gathers from files of several processes.

    Makes a folder for the files, and names it in the environment, which an engine's process inherits. `_register_backends`
    calls this when vLLM loads the plugin. Does nothing in an engine's process, or where vLLM gathers such files itself.
    """
    if FOLDER in os.environ or "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        return  # a process of an engine; or vLLM gathers all files itself
    try:
        from prometheus_client import REGISTRY
        from prometheus_client.multiprocess import MultiProcessCollector
    except ImportError:  # vLLM brings it along, for its own figures
        return

    _kept.append(tempfile.TemporaryDirectory(prefix="kvpatch-"))  # removed when the process ends
    os.environ[FOLDER] = _kept[-1].name
    MultiProcessCollector(REGISTRY, _kept[-1].name)


class Figures:
    """The counts of one process, in files that the folder's other readers see."""

    def __init__(self, folder: str) -> None:
        """Make this process's files in the folder, which /metrics reads, each figure of ROWS at 0.

        `find_figures` does so once.
        """
        from prometheus_client.mmap_dict import MmapedDict, mmap_key

        files = {kind: os.path.join(folder, f"{name}_kvpatch{os.getpid()}.db") for kind, name in _FILES.items()}
        self._files = {kind: MmapedDict(file) for kind, file in files.items()}
        self._keys = dict[str, str]()
        self.values = dict.fromkeys(ROWS, 0.0)
        for name, (kind, about) in ROWS.items():
            metric = f"kvpatch_{name}"
            # Prometheus' library finds a value in such a file by a key of names, labels and help text
            self._keys[name] = mmap_key(metric, f"{metric}_total" if kind == "counter" else metric, (), (), about)
            self.set(name, 0)

    def set(self, name: str, value: float) -> None:
        """Set a figure of ROWS, here and in the process's file."""
        self.values[name] = value
        self._files[ROWS[name][0]].write_value(self._keys[name], value, 0.0)

    def add(self, name: str, value: float = 1) -> None:
        """Add to a figure of ROWS, here and in the process's file."""
        self.set(name, self.values[name] + value)


_FILES = {"counter": "counter", "gauge": "gauge_sum"}  # as Prometheus' library reads the names: kind, way of adding up, process
_figures: dict[str, Figures] = {}


def find_figures() -> Figures | None:
    """Return the counters of this process for /metrics, made at the first call; None where no folder for them was made.

    `BudgetManager` calls it as vLLM's scheduler starts.
    """
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR") or os.environ.get(FOLDER)
    if not folder or not os.path.isdir(folder):
        return None
    if folder not in _figures:
        _figures[folder] = Figures(folder)
    return _figures[folder]
