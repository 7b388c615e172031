from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.door import Opened, engine_backend, open_door
from helpers.fake_torchserve import FakeTorchServe, open_gateway
from helpers.openai_service import Engine
from helpers.sinks import eventually


@pytest.fixture(scope="package")
def opened() -> Iterator[Opened]:
    """A door without keys that all tests share: none of them may leave anything behind."""
    engine = Engine()
    with open_door(
        engine_backend(engine), engine, max_body_bytes=50_000, body_timeout_s=0.4, header_timeout_s=0.4
    ) as opened:
        yield opened


@pytest.fixture(scope="package", params=["engine", "torchserve"])
def either(request: pytest.FixtureRequest) -> Iterator[Opened]:
    """The same door with the engine behind it, and with something that speaks as TorchServe does."""
    if request.param == "engine":
        yield request.getfixturevalue("opened")
        return
    with FakeTorchServe().running() as torchserve:
        models = {"m": {"url": torchserve.url, "management": torchserve.url}}
        with open_gateway(models, torchserve.engine) as opened:
            eventually(lambda: opened.ask("GET", "/health/ready")[0] == 200)
            yield opened
