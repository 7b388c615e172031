"""How much a key may ask for: so many requests a minute, and so many at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from offramp.serve.http.keys import ApiKey
from offramp.serve.protocol.errors import ApiError

_MINUTE_S = 60.0


@dataclass
class _Use:
    """A key's use, as a bucket that a request takes one from and that fills again over a minute."""

    left: float
    at: float
    live: int = 0


class KeyLimits:
    """Counts what is asked for with each key, and with all together.

    Args:
        max_concurrent: Most requests of all keys that are answered at the same time.
        clock: Seconds.
    """

    def __init__(self, max_concurrent: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_concurrent = max_concurrent
        self._clock = clock
        self._live = 0
        self._uses: dict[str, _Use] = {}

    @contextmanager
    def admitted(self, key: ApiKey | None) -> Iterator[None]:
        """A request's time; None where keys are not asked for.

        Raises:
            ApiError: 429 where it is too much, with the time to wait.
        """
        if self._live >= self._max_concurrent:
            raise _too_many(f"The server answers as many requests as it takes, {self._max_concurrent}", 1.0)
        use = None if key is None else self._charge(key)
        self._live += 1
        if use is not None:
            use.live += 1
        try:
            yield
        finally:
            self._live -= 1
            if use is not None:
                use.live -= 1

    def _charge(self, key: ApiKey) -> _Use:
        # By its hash: a name may be given to another key, whose use is its own.
        now, limit = self._clock(), key.requests_per_minute
        use = self._uses.setdefault(key.sha256, _Use(left=float(limit or 0), at=now))
        if key.max_concurrent is not None and use.live >= key.max_concurrent:
            raise _too_many(f"Your key is good for {key.max_concurrent} requests at the same time", 1.0)
        if limit is not None:
            use.left = min(float(limit), use.left + (now - use.at) * limit / _MINUTE_S)
            use.at = now
            if use.left < 1:
                raise _too_many(f"Your key is good for {limit} requests a minute", (1 - use.left) * _MINUTE_S / limit)
            use.left -= 1
        return use


def _too_many(what: str, wait_s: float) -> ApiError:
    return ApiError(
        429,
        f"{what}; try again later.",
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(max(1, math.ceil(wait_s)))},
    )
