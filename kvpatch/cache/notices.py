"""Notices: warnings that are logged once per patch, however many texts it reads."""

from __future__ import annotations

import logging
import threading

_LOG = logging.getLogger(__name__)


class Notices:
    """Warnings of one patch; `said` holds the names of those that were logged."""

    def __init__(self) -> None:
        self.said: set[str] = set()
        self._lock = threading.Lock()

    def say(self, name: str, message: str) -> None:
        """Log a warning, unless one of that name was logged before."""
        with self._lock:
            if name in self.said:
                return
            self.said.add(name)
        _LOG.warning(f"[kvpatch] {message}")
