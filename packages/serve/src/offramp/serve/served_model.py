"""A checkpoint behind the protocol: engine, thread and service put together, in the one way that every front needs."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from offramp.common.checkpoint import AnyCheckpoint
from offramp.serve.config import EngineConfig, WatchSettings
from offramp.serve.engine import Engine
from offramp.serve.engine_thread import EngineThread
from offramp.serve.exit_overrides import point_options
from offramp.serve.protocol.card import ModelCard
from offramp.serve.protocol.service import OpenAIService
from offramp.serve.request.output import RequestOutput
from offramp.serve.watch import Calibrated, Watch, unlike_calibration

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """A model that has been loaded to be served.

    Attributes:
        engine: Holds the model.
        card: What is served, and its limits.
        max_requests: Most requests that run and wait together.
        watch: What it sees of itself.
    """

    engine: Engine
    card: ModelCard
    max_requests: int
    watch: Watch

    @classmethod
    def load(
        cls,
        checkpoint: Path,
        config: EngineConfig,
        *,
        name: str,
        version: str,
        archive_sha256: str | None = None,
        watch: WatchSettings | None = None,
    ) -> ServedModel:
        """Loads a checkpoint directory.

        Args:
            checkpoint: The directory.
            config: Settings of the engine.
            name: The model's name.
            version: Its version.
            archive_sha256: Hash of the model folder that the directory lies in, if it does.
            watch: How the model watches itself; the defaults if None.

        Raises:
            OfframpError: The directory is not complete and consistent, or does not fit the settings.
        """
        # The thread refuses what is too much, in the call that brings it. The engine's own limit must not come before:
        # all that the thread admits may arrive between two iterations, when nobody has a seat yet.
        max_requests = config.max_num_seqs + config.max_waiting
        engine = Engine.from_checkpoint(checkpoint, dataclasses.replace(config, max_waiting=max_requests))
        card = ModelCard.of(
            engine.checkpoint,
            name=name,
            version=version,
            max_model_len=engine.max_model_len,
            cache_tokens=engine.cache_tokens,
            max_source_len=engine.max_source_len,
            decoder_start_token_id=engine.decoder_start_token_id,
            block_size=engine.config.block_size,
            archive_sha256=archive_sha256,
            default_kv_policy=engine.config.default_kv_policy,
        )
        if engine.checkpoint.points.by_name and (why := unlike_calibration(engine.checkpoint.calibration, config)):
            log.warning("%s", why)
        return cls(engine, card, max_requests, Watch(watch or WatchSettings(), _calibrated(engine.checkpoint)))

    def start(
        self, on_iteration: Callable[[Sequence[RequestOutput]], None], *, lease_s: float | None = None
    ) -> tuple[EngineThread, OpenAIService]:
        """Starts the engine's thread, and gives the service on it; both arguments are those of `EngineThread`."""

        def after_iteration(outputs: Sequence[RequestOutput]) -> None:
            on_iteration(outputs)
            self.watch.advance(thread)

        thread = EngineThread(
            self.engine,
            max_requests=self.max_requests,
            lease_s=lease_s,
            on_iteration=after_iteration,
            on_finished=self.watch.finished,
        )
        service = OpenAIService(thread, self.engine.tokenizer, self.card, self.engine.check, self.watch.adapted)
        # What loading made stays until the end, and a full collection takes hundreds of milliseconds to walk over it.
        gc.collect()
        gc.freeze()
        return thread, service


def _calibrated(checkpoint: AnyCheckpoint) -> list[Calibrated]:
    """Ways of answering that can be compared with their calibration."""
    points = checkpoint.points.by_name.values()
    return [Calibrated(point_options(point), point.profile) for point in points if point.profile is not None]
