"""A real MLflow server goes away, hangs and comes back; runs go on, and in the end it knows everything once."""

from __future__ import annotations

import errno
import json
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException, RestException
from requests import ConnectionError as NoConnection

from helpers.mlflow_server import MlflowServer
from helpers.processes import free_port
from offramp.common.errors import OfframpError
from offramp.train.tracking import logger as logger_module
from offramp.train.tracking.journal import Journal, journals
from offramp.train.tracking.logger import OfframpMLFlowLogger
from offramp.train.tracking.register import register
from offramp.train.tracking.store import is_refusal
from offramp.train.tracking.sync import main, sync

AT_ONCE_S = 1.5
"""A call that waited for a store that hangs would take longer: requests time out after 2 s here."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[MlflowServer]:
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(empty_store, folder / "mlflow.db")
    server = MlflowServer(folder / "mlflow.db")
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


def make_logger(uri: str, folder: Path, *, resume: bool = False) -> OfframpMLFlowLogger:
    logger = OfframpMLFlowLogger(experiment_name=folder.name, tracking_uri=uri, system_metrics=False)
    logger.keep_in(folder, resume=resume, note=True)
    return logger


def log(logger: OfframpMLFlowLogger, steps: range) -> None:
    for step in steps:
        before = time.perf_counter()
        logger.log_metrics({"train/loss": 10.0 - step, "train/lr": 0.1}, step)
        assert time.perf_counter() - before < AT_ONCE_S


def told(server: MlflowServer, run_id: str | None, name: str = "train/loss") -> list[tuple[int, float]]:
    assert run_id is not None
    return [(point.step, point.value) for point in MlflowClient(server.uri).get_metric_history(run_id, name)]


def expected(steps: int) -> list[tuple[int, float]]:
    return [(step, 10.0 - step) for step in range(steps)]


def complaints(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message) for warning in caught if "MLflow store" in str(warning.message)]


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a server that is there or is not, and never hangs: a busy machine must not look like one that does."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")


@pytest.mark.slow
def test_a_server_that_dies_and_returns_is_told_everything_in_order(
    server: MlflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(monkeypatch)
    server.start()
    logger = make_logger(server.uri, tmp_path)
    log(logger, range(5))
    assert logger.wait(60)
    server.kill()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log(logger, range(5, 8))
        logger.log_text("hello", "notes/a.txt")
        deadline = time.monotonic() + 60
        while not complaints(caught):
            assert time.monotonic() < deadline
            assert not logger.wait(0.1)
        (tmp_path / "a.png").write_bytes(b"a picture")
        logger.log_file(tmp_path / "a.png")
        log(logger, range(8, 2000))
        server.start()
        assert logger.wait(90)
    (complaint,) = complaints(caught)
    assert f"the MLflow store at {server.uri} does not answer; the run goes on" in complaint
    assert told(server, logger.run_id) == expected(2000)
    logger.finalize("success")
    client = MlflowClient(server.uri)
    assert client.get_run(str(logger.run_id)).info.status == "FINISHED"
    assert [item.path for item in client.list_artifacts(str(logger.run_id), "notes")] == ["notes/a.txt"]
    assert Path(client.download_artifacts(str(logger.run_id), "a.png")).read_bytes() == b"a picture"


@pytest.mark.slow
def test_a_server_that_hangs_holds_nobody_up_and_gets_one_run(
    server: MlflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logger_module, "END_WAIT_S", 4.0)
    server.kill()
    server.start()
    server.pause()
    logger = make_logger(server.uri, tmp_path)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            logger.log_hyperparams({"lr": 0.1})
            log(logger, range(3))
            before = time.perf_counter()
            logger.finalize("success")
            assert time.perf_counter() - before < 15, "it waits for END_WAIT_S, whatever the machine does besides"
        assert logger.run_id is None
        first, last = complaints(caught)
        assert "does not answer" in first
        assert f"send it with: offramp sync {tmp_path}" in last
    finally:
        server.go_on()
    patient(monkeypatch)
    assert main([str(tmp_path), "--tracking-uri", server.uri]) == 0
    assert "sent to run" in capsys.readouterr().out
    assert main([str(tmp_path), "--tracking-uri", server.uri]) == 0
    assert "everything was sent before" in capsys.readouterr().out
    client = MlflowClient(server.uri)
    experiment = client.get_experiment_by_name(tmp_path.name)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert told(server, run.info.run_id) == expected(3)
    assert run.data.params == {"lr": "0.1"}
    assert run.info.status == "FINISHED"


@pytest.mark.slow
def test_a_run_that_ends_while_the_server_is_down_is_told_by_its_resume(
    server: MlflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(monkeypatch)
    server.kill()
    server.start()
    first = make_logger(server.uri, tmp_path)
    log(first, range(3))
    assert first.wait(60)
    server.kill()
    log(first, range(3, 6))
    with pytest.warns(UserWarning, match="offramp sync"):
        first.finalize("failed")
    server.start()
    again = make_logger(server.uri, tmp_path, resume=True)
    log(again, range(4, 9))
    assert again.wait(60)
    again.finalize("success")
    assert again.run_id == first.run_id
    assert told(server, again.run_id) == expected(9)
    assert MlflowClient(server.uri).get_run(str(again.run_id)).info.status == "FINISHED"


def test_nobody_listens(tmp_path: Path) -> None:
    logger = make_logger(f"http://me:secret@127.0.0.1:{free_port()}", tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log(logger, range(3))
        before = time.perf_counter()
        logger.finalize("success")
        assert time.perf_counter() - before < 5
    assert len(complaints(caught)) == 2
    written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "secret" not in written + "".join(complaints(caught))
    (path,) = journals(tmp_path)
    steps = [entry.content["step"] for entry in Journal(path).entries(0) if "metrics" in entry.content]
    assert steps == [0, 1, 2]


def test_sync_says_what_it_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match="holds no journal"):
        sync(tmp_path)
    store = f"http://127.0.0.1:{free_port()}"
    logger = make_logger(store, tmp_path)
    with pytest.warns(UserWarning, match="offramp sync"):  # noqa: PT031
        log(logger, range(1))
        with pytest.raises(OfframpError, match="still going on"):
            sync(tmp_path, store)
        logger.finalize()
    with pytest.raises(OfframpError, match=f"the MLflow store at {store} does not answer"):
        sync(tmp_path, store)
    journal = Journal(journals(tmp_path)[0])
    journal.run_id, journal.tracking_uri = "1", "http://elsewhere"
    journal.note()
    journal.close()
    with pytest.raises(OfframpError, match="is in the store http://elsewhere"):
        sync(tmp_path, store)


def test_registering_at_a_dead_server_ends_soon(tmp_path: Path) -> None:
    store = f"http://me:secret@127.0.0.1:{free_port()}"
    before = time.perf_counter()
    with pytest.raises(OfframpError, match=r"the MLflow store at http://\*\*\*@127.*does not answer") as caught:
        register(tmp_path, "name", tracking_uri=store)
    assert time.perf_counter() - before < 20
    assert "secret" not in str(caught.value)


def test_what_a_killed_process_left_half_written_is_cut_off(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, {"experiment": "e"})
    journal.append_metrics({"loss": 1.0}, 0)
    journal.close()
    with journal.path.open("ab") as file:
        file.write(b'{"metrics": {"lo')
    again = Journal(journal.path)
    again.append_metrics({"loss": 2.0}, 1)
    assert [entry.content.get("step") for entry in again.entries(0)] == [None, 0, 1]
    assert again.last_steps() == {"loss": 1}
    assert json.loads(journal.path.read_text().splitlines()[-1])["metrics"] == {"loss": 2.0}


def test_a_full_disk_is_not_called_a_fault_of_the_store(empty_store: Path, tmp_path: Path) -> None:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    logger = make_logger(f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path)
    log(logger, range(1))
    assert logger.wait(60)
    journal = journals(tmp_path)[0]
    in_the_way = journal.with_suffix(".state.tmp")
    in_the_way.mkdir()  # as good as a full disk to whoever wants to write a file there
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log(logger, range(1, 3))
        deadline = time.monotonic() + 60
        while not complaints(caught):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        in_the_way.rmdir()
        log(logger, range(3, 4))
        logger.finalize("success")
    (complaint,) = complaints(caught)
    assert f"{journal.parent} cannot be written" in complaint
    assert "does not answer" not in complaint
    history = MlflowClient(logger.tracking_uri).get_metric_history(str(logger.run_id), "train/loss")
    assert [(point.step, point.value) for point in history] == expected(4)


@pytest.mark.parametrize(
    ("fault", "refused"),
    [
        (MlflowException("connection refused"), False),
        (RestException({"error_code": "TEMPORARILY_UNAVAILABLE", "message": "503"}), False),
        (RestException({"error_code": "REQUEST_LIMIT_EXCEEDED", "message": "429"}), False),
        (RestException({"error_code": "PERMISSION_DENIED", "message": "403"}), False),
        (RestException({"error_code": "INVALID_PARAMETER_VALUE", "message": "400"}), True),
        (RestException({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "404"}), True),
        (NoConnection("no route"), False),
        (PermissionError("/srv/artifacts"), True),
        (OSError(errno.ENOSPC, "of the artifact store"), False),
        (OSError(errno.ESTALE, "of the artifact store"), False),
        (ConnectionResetError("by the artifact store"), False),
        (TimeoutError("of the artifact store"), False),
    ],
)
def test_what_is_worth_another_attempt(fault: Exception, refused: bool) -> None:
    assert is_refusal(fault) == refused
