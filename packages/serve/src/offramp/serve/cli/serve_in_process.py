"""`offramp serve --backend asgi`: the engine in this process, behind the door that the gateway has as well."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from offramp.common.errors import OfframpError
from offramp.serve.cli.how_to_ask import how_to_ask
from offramp.serve.config import EngineConfig, WatchSettings
from offramp.serve.http.door import application
from offramp.serve.http.engine_backend import EngineBackend
from offramp.serve.http.server import Server, log_to
from offramp.serve.http.settings import DoorSettings
from offramp.serve.served_model import ServedModel


def serve_in_process(
    checkpoint: Path, config: EngineConfig, watch: WatchSettings, settings: DoorSettings, *, name: str, version: str
) -> None:
    """Serves a checkpoint directory until a signal comes.

    Raises:
        OfframpError: It cannot be loaded, the address cannot be listened at, or the engine has stopped by itself.
    """
    began = time.monotonic()
    log_to(settings)
    weights = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    print(f"Loading {weights / 1e6:,.0f} MB of weights ...", file=sys.stderr, flush=True)
    model = ServedModel.load(checkpoint, config, name=name, version=version, watch=watch)
    backend = EngineBackend(model.start, model.engine.metrics, model.watch)

    def say_ready() -> None:
        print(f"Ready after {time.monotonic() - began:.1f} s: {name} {version}", file=sys.stderr, flush=True)
        how_to_ask(server.url, settings, name, metrics=True)

    def check() -> None:
        if backend.failure is not None:  # who is waiting has been told; whoever supervises this starts another
            raise OfframpError(f"the engine has stopped: {backend.failure}; start it again.")

    server = Server(application(backend, settings), settings, on_ready=say_ready, check=check)
    server.serve_forever()
