"""Faults of ours in the log, without what clients said."""

from __future__ import annotations

import logging
import traceback


def log_fault(log: logging.Logger, what: str, error: BaseException) -> None:
    """Logs where an error came from, but not its message: that may quote a client's words, which must not be kept."""
    log.error("%s: %s\n%s", what, type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))
