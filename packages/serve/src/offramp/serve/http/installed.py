"""Whether what the HTTP side stands on is there."""

from __future__ import annotations

import importlib.util

from offramp.common.errors import OfframpError


def check_installed() -> None:
    """Raises `OfframpError` unless the web framework is installed."""
    wanted = ("starlette", "uvicorn", "aiohttp", "prometheus_client", "yaml")
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        raise OfframpError(f"{missing[0]} is not installed; `pip install 'offramp-serve[http]'` brings it.")
