"""A real MLflow server that can be killed, stopped and started again within a moment."""

from __future__ import annotations

import os
import signal
import time
import urllib.error
import urllib.request
from multiprocessing.process import BaseProcess
from pathlib import Path

from helpers.processes import forkserver, free_port


class MlflowServer:
    """The server's own application over SQLite, forked from a process that has imported it.

    Args:
        database: SQLite file, with its tables.
    """

    def __init__(self, database: Path) -> None:
        self.database, self.port = database, free_port()
        self._context = forkserver()
        self._process: BaseProcess | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process = self._context.Process(target=_serve, args=(str(self.database), self.port), daemon=True)
        self._process.start()
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < deadline, "the server does not start"
                assert self._process.is_alive(), "the server died"
                time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def pause(self) -> None:
        """It takes connections, and answers nothing."""
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _serve(database: str, port: int) -> None:
    os.environ.update(
        _MLFLOW_SERVER_FILE_STORE=f"sqlite:///{database}",
        _MLFLOW_SERVER_ARTIFACT_ROOT="mlflow-artifacts:/",
        _MLFLOW_SERVER_ARTIFACT_DESTINATION=str(Path(database).parent / "artifacts"),
        _MLFLOW_SERVER_SERVE_ARTIFACTS="true",
    )
    import uvicorn
    from mlflow.server.fastapi_app import app

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")
