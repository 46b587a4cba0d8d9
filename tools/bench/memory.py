"""Memory of a process, its peak and its slope: nothing but Python is needed."""

import ctypes
import functools
import gc
import multiprocessing
import os
import platform
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from resource import RUSAGE_SELF, getrusage


@functools.cache
def apart(function: Callable[..., int], *given: object) -> int:
    """The result of a function, called in a process of its own, once for the same arguments."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *given).result()


def return_freed_memory() -> None:
    """Make glibc map tensors of 128 KiB and more one by one: freed ones leave the resident size at once.

    Otherwise the peak depends on how the heap happens to be fragmented, by a third from run to run.
    """
    mallopt, mmap_threshold = getattr(ctypes.CDLL(None), "mallopt", None), -3
    if mallopt is not None:
        mallopt(mmap_threshold, 128 * 1024)


def reset_peak() -> int:
    """Give freed memory back and start the peak anew, where the system can; the peak so far in bytes."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (AttributeError, OSError):
        pass  # the peak before may then lie above what is in use, and the growth comes out smaller
    return peak()


def measure_growth(work: Callable[[], object]) -> int:
    """Bytes by which some work raises the peak resident size."""
    gc.collect()
    before = reset_peak()
    work()
    return peak() - before


def measure_resident(process: int | str = "self") -> int:
    """The bytes that a process has in memory now."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def find_slope(points: Sequence[tuple[float, float]], warm: float) -> float:
    """The slope of (x, y) by least squares, over all but the first `warm` of x: that is where allocators warm up."""
    kept = [point for point in points if point[0] >= warm * points[-1][0]]
    mean_x, mean_y = (sum(column) / len(kept) for column in zip(*kept, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in kept)
    return sum((x - mean_x) * (y - mean_y) for x, y in kept) / spread if spread else 0.0


def peak() -> int:
    """The largest resident size of this process since `reset_peak`, in bytes."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    unit = 1 if platform.system() == "Darwin" else 1024
    return 1024 * int(found[1]) if found else unit * getrusage(RUSAGE_SELF).ru_maxrss
