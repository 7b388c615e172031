"""Engines whose stages are all in this process, and go on in any order that processes could."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from helpers.engines import MAX_MODEL_LEN
from offramp.common.checkpoint import AnyCheckpoint, CheckpointOf
from offramp.common.exits.policy import ExitPolicy
from offramp.common.model.transformer import MultiExitTransformer
from offramp.serve.config import EngineConfig
from offramp.serve.engine import Engine
from offramp.serve.pipeline.make_stage import StageSettings, make_stage
from offramp.serve.pipeline.relay import relay
from offramp.serve.pipeline.stage import Stage


class LoopBack:
    """Stages 2 .. S. Each runs its messages in order; which one goes on when, and who is heard first, is drawn."""

    is_lost = False

    def __init__(self, stages: list[Stage], seed: int) -> None:
        self.stages = stages
        self._random = random.Random(seed)
        self._inboxes: list[deque[bytes]] = [deque() for _ in stages]
        self._backs: list[deque[bytes]] = [deque() for _ in stages]

    @property
    def is_idle(self) -> bool:
        return not any(self._inboxes)

    def send(self, message: bytes) -> None:
        self._inboxes[0].append(message)

    def receive(self, *, wait: bool) -> list[bytes]:
        found: list[bytes] = []
        moves = self._random.randint(0, 2 * len(self.stages))
        while moves > 0 or (wait and not found):
            moves -= 1
            ready = [("run", number) for number, inbox in enumerate(self._inboxes) if inbox]
            ready += [("hear", number) for number, back in enumerate(self._backs) if back]
            if not ready:
                assert not wait or found, "the engine waits, and nothing is under way"
                return found
            what, number = self._random.choice(ready)
            if what == "hear":
                found.append(self._backs[number].popleft())
            else:
                self._run(number)
        return found

    def settle(self) -> None:
        """Let all stages run what has been sent to them."""
        while not self.is_idle:
            for number, inbox in enumerate(self._inboxes):
                if inbox:
                    self._run(number)

    def _run(self, number: int) -> None:
        onward = self._inboxes[number + 1].append if number + 1 < len(self.stages) else None
        relay(self.stages[number], self._inboxes[number].popleft(), self._backs[number].append, onward)


def staged_engine(
    model: MultiExitTransformer, num_stages: int, policy: ExitPolicy | None = None, seed: int = 0, **config: Any
) -> tuple[Engine, LoopBack | None]:
    settings = {"block_size": 4, "num_blocks": 256, "max_model_len": MAX_MODEL_LEN, **config}
    engine_config = EngineConfig(pipeline_stages=num_stages, **settings)
    checkpoint: AnyCheckpoint = CheckpointOf(model, {}, policy)
    later = None
    if num_stages > 1:
        made = [
            make_stage(
                model,
                StageSettings(engine_config, index, settings["num_blocks"], settings["max_model_len"]),
                poison_cache=True,
            )
            for index in range(1, num_stages)
        ]
        later = LoopBack(made, seed)
    return Engine(checkpoint, engine_config, poison_cache=True, later_stages=later), later
