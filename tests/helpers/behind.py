"""An open door with a real engine and a tiny model behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import openai

from helpers.door import Opened, open_door
from helpers.openai_service import Engine
from helpers.sinks import eventually
from helpers.torchserve import CACHE_BYTES, CACHE_TOKENS, MAX_NUM_SEQS, MAX_WAITING, NAME, Served
from offramp.serve.config import EngineConfig
from offramp.serve.engine_thread import EngineThread
from offramp.serve.gateway.settings import GatewaySettings
from offramp.serve.gateway.torchserve_backend import TorchServeBackend
from offramp.serve.http.engine_backend import EngineBackend, OnIteration
from offramp.serve.http.keys import add_key
from offramp.serve.http.settings import make_settings
from offramp.serve.protocol.service import OpenAIService
from offramp.serve.served_model import ServedModel

CONFIG = EngineConfig(kv_cache_bytes=CACHE_BYTES, max_num_seqs=MAX_NUM_SEQS, max_waiting=MAX_WAITING, num_threads=1)


@dataclass
class Behind:
    """What is behind an open door.

    Attributes:
        opened: The door.
        key: A key for it.
        running: How many requests the engine works on.
        live_blocks: How many blocks of the cache they hold.
    """

    opened: Opened
    key: str
    running: Callable[[], float]
    live_blocks: Callable[[], float]

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.opened.server.url}/v1", api_key=self.key, max_retries=0, timeout=120)


@contextlib.contextmanager
def engine_behind(folder: Path, checkpoint: Path) -> Iterator[Behind]:
    """The engine in this process."""
    model = ServedModel.load(checkpoint, CONFIG, name=NAME, version="1.0")
    started: list[tuple[EngineThread, OpenAIService]] = []

    def start(on_iteration: OnIteration) -> tuple[EngineThread, OpenAIService]:
        started.append(model.start(on_iteration))
        return started[0]

    key = add_key(folder / "keys.json", "test")
    with open_door(EngineBackend(start, model.engine.metrics), Engine(), keys=str(folder / "keys.json")) as opened:
        engine, blocks = model.engine, CACHE_TOKENS // CONFIG.block_size
        yield Behind(opened, key, lambda: started[0][0].num_running, lambda: blocks - engine.num_free_blocks)


@contextlib.contextmanager
def torchserve_behind(folder: Path, served: Served) -> Iterator[Behind]:
    """A TorchServe that runs."""
    key = add_key(folder / "keys.json", "test")
    given = {
        "keys": "unused",
        "models": {NAME: {"url": served.base_url.partition("/predictions")[0], "version": "1.0"}},
    }
    backend = TorchServeBackend(make_settings(GatewaySettings, given, where="test"))
    with open_door(backend, Engine(), keys=str(folder / "keys.json")) as opened:
        eventually(lambda: opened.ask("GET", "/health/ready")[0] == 200, 30, every_s=0.1)
        running, live_blocks = "offramp_running_requests", "offramp_live_blocks"
        yield Behind(opened, key, lambda: served.gauge(running), lambda: served.gauge(live_blocks))
