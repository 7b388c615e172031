"""The handler in TorchServe's worker: loads the engine once, then translates each call. The only importer of `ts`."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ts.metrics.metric_type_enum import MetricTypes

from offramp.common.errors import OfframpError
from offramp.serve.config import EngineConfig, WatchSettings
from offramp.serve.metrics import METRICS, MetricsReporter
from offramp.serve.protocol.errors import PHRASES
from offramp.serve.request.output import RequestOutput
from offramp.serve.served_model import ServedModel
from offramp.serve.torchserve import archive, checksums, worker_log
from offramp.serve.torchserve.jobs import REQUEST_ID_HEADER, Job, Jobs, Piece
from offramp.serve.torchserve.settings import HandlerSettings
from offramp.serve.torchserve.worker_report import WorkerReport

log = logging.getLogger(__name__)

_FORMS = ("application/x-www-form-urlencoded", "multipart/")
_REQUEST_ID = re.compile(r"[0-9a-f]{32}")
RESTART_AFTER_S = 1.0
"""Seconds from the engine's death to the worker's: time to tell every client why, before TorchServe starts another."""


class OfframpHandler:
    """One model in one worker. The module in a model folder subclasses it, as TorchServe wants one class there."""

    def initialize(self, context: Any) -> None:
        """Loads the model that lies in the model folder.

        Raises:
            RuntimeError: It cannot be loaded; the reason is in the worker's report as well, for `offramp serve`.
        """
        worker_log.quieten()
        report = WorkerReport.from_environment()
        try:
            self._start(context, report)
        except Exception as error:
            report.failed(error)
            if not isinstance(error, OfframpError):
                raise
            # TorchServe answers a RuntimeError with a message and lets the worker die of anything else.
            raise RuntimeError(str(error)) from error

    def handle(self, data: Sequence[dict[str, Any]], context: Any) -> list[bytes]:
        """At most one piece for each live job; TorchServe calls it in a loop while there are any. Never raises."""
        pieces = self._jobs.pump([_job(context, index, parameters) for index, parameters in enumerate(data)])
        for index, piece in enumerate(pieces):
            if piece is None:
                # The message that goes back is made of the requests that are named here.
                del context.request_ids[index]
            else:
                _set_head(context, index, piece)
        context.stopping_criteria = [_criterion(None if piece is None else piece.last) for piece in pieces]
        return [b"" if piece is None else piece.body for piece in pieces]

    def _start(self, context: Any, report: WorkerReport) -> None:
        sections = context.model_yaml_config or {}
        config = EngineConfig(**sections.get("engine", {}))
        settings = HandlerSettings(**sections.get("handler", {}))
        manifest = context.manifest["model"]
        # resolve: TorchServe gives a link of its own making, which would mean nothing in a message.
        folder = Path(context.system_properties["model_dir"]).resolve()
        sha256 = checksums.verify(folder)
        model = ServedModel.load(
            folder / archive.CHECKPOINT,
            config,
            name=context.model_name,
            version=str(manifest["modelVersion"]),
            archive_sha256=sha256,
            watch=WatchSettings(**sections.get("watch", {})),
        )
        labels = {"model_name": model.card.name, "model_version": model.card.version}
        metrics = {
            name: context.metrics.add_metric_to_cache(name, unit, list(labels), MetricTypes[kind])
            for name, (kind, unit) in METRICS.items()
        }
        totals = MetricsReporter(
            lambda name, value: metrics[name].add_or_update(value, list(labels.values())),
            model.engine.metrics,
            model.watch,
        )

        def after_iteration(outputs: Sequence[RequestOutput]) -> None:
            self._jobs.wake()
            totals.observe(outputs, thread.num_running, thread.num_waiting)
            if thread.failure is not None:
                report.failed(thread.failure)
                threading.Timer(RESTART_AFTER_S, os._exit, args=(1,)).start()

        thread, service = model.start(after_iteration, lease_s=settings.lease_s)
        self._jobs = Jobs(service, thread, settings, totals.first_token, totals.finished)
        log.warning("Serving %s %s since %s", model.card.name, model.card.version, time.strftime("%H:%M:%S"))


def _job(context: Any, index: int, parameters: dict[str, Any]) -> Job:
    """A job as TorchServe shows it: its body is one of several named parameters; after its first call it has none."""
    headers = {name.lower(): value for name, value in context.get_all_request_header(index).items()}
    body = parameters.get("body", parameters.get("data"))
    if body is None and (parameters or str(headers.get("content-type", "")).startswith(_FORMS)):
        body = b""  # a form, which TorchServe takes apart and this API does not take
    request_id = str(headers.get(REQUEST_ID_HEADER, ""))
    return Job(
        context.get_request_id(index),
        headers.get("url_path") or "",
        body,
        request_id if _REQUEST_ID.fullmatch(request_id) else None,
    )


def _set_head(context: Any, index: int, piece: Piece) -> None:
    context.set_response_status(piece.status, PHRASES.get(piece.status, ""), index)
    context.set_response_content_type(index, piece.content_type)
    for name, value in piece.headers.items():
        context.set_response_header(index, name, value)


def _criterion(last: bool | None) -> Any:
    """TorchServe asks a function of the output: None a whole answer, False a piece, True the last piece."""
    return lambda output: last
