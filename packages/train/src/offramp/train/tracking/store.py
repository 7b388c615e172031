"""Talking to an MLflow store that may be gone: how long to wait, and what a fault means."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from mlflow.exceptions import MlflowException
from requests import RequestException

from offramp.train.tracking.secrets import mask

DEFAULT_TRACKING_URI = "sqlite:///mlflow.db"
REQUEST_TIMEOUT_S = 10
"""How long a store may take to answer a small request."""

_TIMEOUT, _RETRIES = "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
_CAUSE = re.compile(r"\[Errno -?\d+\] [^()'\"]+|\w+ timed out|too many \d+ error responses")
_CLIENT_ERROR, _SERVER_ERROR = 400, 500
# Too slow, too many, and whoever is asked to log in: all of these can be mended while a run goes on.
_MAY_CHANGE = (401, 403, 407, 408, 425, 429)
# The same of the machine: disks are emptied, and mounted again.
_DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)


def default_tracking_uri() -> str:
    """`MLFLOW_TRACKING_URI`, or a SQLite file in the working directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_TRACKING_URI


@contextmanager
def brief_requests(timeout_s: int = REQUEST_TIMEOUT_S, retries: int = 1) -> Iterator[None]:
    """Within, MLflow gives up early; left alone, it tries a server that is gone for many minutes."""
    short = {_TIMEOUT: str(timeout_s), _RETRIES: str(retries)}
    before = {name: os.environ.get(name) for name in short}
    os.environ.update(short)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def leave_retries_to_us() -> None:
    """Let every request of this process fail soon, unless the user has set otherwise: who asks tries again anyway."""
    os.environ.setdefault(_TIMEOUT, str(REQUEST_TIMEOUT_S))
    os.environ.setdefault(_RETRIES, "0")


def is_refusal(fault: Exception) -> bool:
    """Whether the store will say the same however often it is asked."""
    status: int | None = None
    if isinstance(fault, MlflowException):
        status = fault.get_http_status_code()
    elif isinstance(fault, RequestException):
        status = None if fault.response is None else fault.response.status_code
    elif isinstance(fault, ConnectionError | TimeoutError):  # stores for artifacts have protocols of their own
        return False
    elif isinstance(fault, OSError):
        return fault.errno not in _DISK_FAULTS
    elif isinstance(fault, ValueError | TypeError | KeyError):
        return True  # an artifact that cannot be read or written
    return status is not None and _CLIENT_ERROR <= status < _SERVER_ERROR and status not in _MAY_CHANGE


def in_words(fault: BaseException) -> str:
    """The first line of what a fault says, without secrets; of a connection that failed, only why."""
    text = str(fault).partition("\n")[0]
    cause = _CAUSE.search(text) if "HTTPConnectionPool" in text or "HTTPSConnectionPool" in text else None
    return mask(text if cause is None else cause[0]) or type(fault).__name__
