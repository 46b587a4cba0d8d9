"""Notices: warnings that are logged once per patch, however many texts it reads."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)


@dataclass
class Watched:
    """A warning that depends on a number of the device, which is on its way to the host."""

    name: str
    message: str
    host: Tensor
    arrival: torch.cuda.Event


class Notices:
    """Warnings of one patch; `said` holds the names of those that were logged."""

    def __init__(self) -> None:
        self.said: set[str] = set()
        self.watched: list[Watched] = []
        self._lock = threading.RLock()

    def say_if(self, flag: Tensor, name: str, message: str) -> None:
        """For `_warn_of_scores`: log a warning if `flag`, 0-d, is True. `look` logs it later if it comes from a GPU."""
        if flag.device.type != "cuda":
            if bool(flag):
                self.say(name, message)
            return
        # a copy to pinned memory, without a wait; an event tells when it has arrived
        host = torch.empty((), dtype=torch.bool, pin_memory=True, device="cpu")
        host.copy_(flag, non_blocking=True)
        with torch.cuda.device(flag.device):
            arrival = torch.cuda.Event()
            arrival.record()
        self.watched.append(Watched(name, message, host, arrival))

    def look(self, wait: bool = False) -> None:
        """Log the warnings whose flags have arrived from a GPU; `wait`: wait for all of them.

        Each pass calls this (`passes.begin`); `Patch.report` and `Patch.remove` wait.
        """
        with self._lock:  # passes may run in several threads
            while self.watched and (wait or self.watched[0].arrival.query()):
                notice = self.watched.pop(0)
                if wait:
                    notice.arrival.synchronize()
                if bool(notice.host):
                    self.say(notice.name, notice.message)

    def say(self, name: str, message: str) -> None:
        """Log a warning, unless one of that name was logged before; for `_warn_of_cut_sizes`, `say_if` and `look`."""
        with self._lock:
            if name in self.said:
                return
            self.said.add(name)
        _LOG.warning(f"[kvpatch] {message}")
