from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.torchserve import Served, started_torchserve


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A running `offramp serve`: it takes long to start, so all files share it."""
    with started_torchserve(tmp_path_factory.mktemp("torchserve")) as served:
        yield served
