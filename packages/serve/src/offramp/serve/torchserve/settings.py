"""How a model runs under TorchServe: what `model-config.yaml` says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HandlerSettings:
    """What the handler in TorchServe's worker needs to know; the `handler` section of `model-config.yaml`.

    Attributes:
        max_waiting: Requests held beyond those that the engine runs together; more are answered 429.
        wait_ms: Longest wait for new tokens in one call of the handler, in milliseconds. A new request is seen at the
            latest after that time, so it is also a bound on the delay that the front adds to a first token.
        lease_s: TorchServe stops calling when its last client has gone, so requests are cancelled after this many
            seconds without a call. Longer than the worst pause of the Java process.
        max_piece_bytes: Most bytes of one response handed over in one call; TorchServe kills the worker above its own
            `max_response_size`.
    """

    max_waiting: int = 256
    wait_ms: float = 20.0
    lease_s: float = 3.0
    max_piece_bytes: int = 1_000_000


@dataclass(frozen=True)
class WorkerSettings:
    """TorchServe's own settings of a model, in its words.

    Attributes:
        batch_size: Most requests handed to the handler together; the others wait in Java, without a status. It must
            exceed what the handler admits, or nobody is ever told that the queue is full.
        job_queue_size: Requests waiting in Java; more get TorchServe's 503.
        response_timeout_s: Longest call of the handler, in seconds; the worker is killed after it.
        startup_timeout_s: Longest load of the model, in seconds.
        max_retry_timeout_s: TorchServe gives a worker up that has not come back this many seconds after it died.
    """

    batch_size: int = 512
    job_queue_size: int = 512
    response_timeout_s: int = 60
    startup_timeout_s: int = 600
    max_retry_timeout_s: int = 600


def model_config(worker: WorkerSettings, handler: HandlerSettings, engine: dict[str, Any]) -> dict[str, Any]:
    """The content of `model-config.yaml`.

    `continuousBatching` and not `asyncCommunication`: with the latter one failing request takes all others with it,
    a client that went away is never noticed, and a dead worker leaves its clients hanging for ever.

    Args:
        worker: TorchServe's settings.
        handler: The handler's settings.
        engine: `EngineConfig` fields that differ from their defaults.
    """
    return {
        "minWorkers": 1,
        "maxWorkers": 1,  # each worker would be an engine of its own, with its own copy of the weights
        "batchSize": worker.batch_size,
        "maxBatchDelay": 1,
        "responseTimeout": worker.response_timeout_s,
        "startupTimeout": worker.startup_timeout_s,
        "maxRetryTimeoutInSec": worker.max_retry_timeout_s,
        "jobQueueSize": worker.job_queue_size,
        "deviceType": "cpu",  # the engine chooses its device itself; TorchServe would only count workers per GPU
        "continuousBatching": True,
        "handler": dataclasses.asdict(handler),
        "engine": engine,
    }
