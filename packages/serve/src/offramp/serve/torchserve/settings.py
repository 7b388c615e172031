"""How a model runs under TorchServe: what `model-config.yaml` says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from offramp.common.errors import OfframpError
from offramp.serve.config import EngineConfig, WatchSettings
from offramp.serve.number_checks import check_number, check_whole, spelled

_LONGEST_WAIT = 60_000
"""As TorchServe gives a call of the handler up after a minute."""


@dataclass(frozen=True)
class HandlerSettings:
    """What the handler in TorchServe's worker needs to know; the `handler` section of `model-config.yaml`.

    Attributes:
        wait_ms: Longest wait for new tokens in one call of the handler, in milliseconds. A new request is seen at the
            latest after that time, so it is also a bound on the delay that the front adds to a first token.
        first_wait_ms: Longest time for which an answer is held back, its status included, until the first iteration of
            its requests is over: a fault found by then has a status code of its own. Others do not wait.
        prepare_wait_ms: The same for what precedes the first iteration and may take seconds, the compiling of a
            language. Then the answer begins without a word: only then is it noticed that the client goes away.
        compile_limit_s: Longest time for which a language is compiled, in seconds, and before that longest wait for
            those of others; the request is refused after it.
        lease_s: TorchServe stops calling when its last client has gone, so requests are cancelled after this many
            seconds without a call. Longer than the worst pause of the Java process.
        max_piece_bytes: Most bytes of one response handed over in one call; TorchServe kills the worker above its own
            `max_response_size`.
    """

    wait_ms: float = 20.0
    first_wait_ms: float = 1000.0
    prepare_wait_ms: float = 2000.0
    compile_limit_s: float = 30.0
    lease_s: float = 3.0
    max_piece_bytes: int = 1_000_000

    def __post_init__(self) -> None:
        for name in ("wait_ms", "first_wait_ms", "prepare_wait_ms", "compile_limit_s", "lease_s"):
            value = getattr(self, name)
            check_number(name, value)
            if not 0 <= value <= _LONGEST_WAIT:
                raise OfframpError(f"{name} {spelled(value)} must be in 0..{_LONGEST_WAIT}.")
        check_whole("max_piece_bytes", self.max_piece_bytes, low=1)


@dataclass(frozen=True)
class WorkerSettings:
    """TorchServe's own settings of a model, in its words.

    Attributes:
        job_queue_size: Requests waiting in Java; more get TorchServe's 503.
        response_timeout_s: Longest call of the handler, in seconds; the worker is killed after it.
        startup_timeout_s: Longest load of the model, in seconds.
        max_retry_timeout_s: TorchServe gives a worker up that has not come back this many seconds after it died.
    """

    job_queue_size: int = 512
    response_timeout_s: int = 60
    startup_timeout_s: int = 600
    max_retry_timeout_s: int = 600


_SPARE_JOBS = 64
"""Jobs that TorchServe hands over beyond those that the engine holds: requests to be told that the queue is full."""


def model_config(
    worker: WorkerSettings, handler: HandlerSettings, engine: dict[str, Any], watch: dict[str, Any]
) -> dict[str, Any]:
    """The content of `model-config.yaml`.

    `continuousBatching` and not `asyncCommunication`: with the latter one failing request takes all others with it,
    a client that went away is never noticed, and a dead worker leaves its clients hanging for ever.

    Args:
        worker: TorchServe's settings.
        handler: The handler's settings.
        engine: `EngineConfig` fields that differ from their defaults.
        watch: The same of `WatchSettings`.

    Raises:
        OfframpError: The engine does not allow a value; better now than in TorchServe's worker.
    """
    limits = EngineConfig(**engine)
    WatchSettings(**watch)
    if limits.pipeline_stages is not None:
        raise OfframpError(
            f"pipeline_stages {limits.pipeline_stages} are not for TorchServe, whose worker is one process; use "
            "`offramp serve --backend asgi`, or leave them out."
        )
    return {
        "minWorkers": 1,
        "maxWorkers": 1,  # each worker would be an engine of its own, with its own copy of the weights
        "batchSize": limits.max_num_seqs + limits.max_waiting + _SPARE_JOBS,
        "maxBatchDelay": 1,
        "responseTimeout": worker.response_timeout_s,
        "startupTimeout": worker.startup_timeout_s,
        "maxRetryTimeoutInSec": worker.max_retry_timeout_s,
        "jobQueueSize": worker.job_queue_size,
        "deviceType": "cpu",  # the engine chooses its device itself; TorchServe would only count workers per GPU
        "continuousBatching": True,
        "handler": dataclasses.asdict(handler),
        "engine": dict(sorted(engine.items())),  # however they were given, the file is the same
        **({"watch": dict(sorted(watch.items()))} if watch else {}),
    }
