from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from helpers.behind import Behind, engine_behind, torchserve_behind
from helpers.torchserve import Served, make_checkpoint, started_torchserve


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A running `offramp serve`: it takes long to start, so all files share it."""
    with started_torchserve(tmp_path_factory.mktemp("torchserve")) as served:
        yield served


@pytest.fixture(scope="module", params=["engine", "torchserve"])
def behind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    """The same door with the engine behind it, and with TorchServe."""
    folder = tmp_path_factory.mktemp(request.param)
    with contextlib.ExitStack() as stack:
        if request.param == "engine":
            yield stack.enter_context(engine_behind(folder, make_checkpoint(folder / "checkpoint")))
        else:
            yield stack.enter_context(torchserve_behind(folder, request.getfixturevalue("served")))
