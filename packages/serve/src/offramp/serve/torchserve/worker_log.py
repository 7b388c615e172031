"""What TorchServe's worker may write: nothing that repeats on every call, nothing that a client sent."""

from __future__ import annotations

import logging

_PER_CALL = ("Backend received inference at", "[METRICS]PredictionTime", "[METRICS]HandlerTime")


def quieten() -> None:
    """Drops the lines that TorchServe's worker writes on every call of the handler, several hundred a second.

    They must stay at the level INFO otherwise, because TorchServe's metrics are lines of log as well.
    """
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: not record.getMessage().startswith(_PER_CALL))
