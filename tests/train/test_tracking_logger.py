from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from offramp.train.tracking.logger import RUN_FILE, OfframpMLFlowLogger, flatten
from offramp.train.tracking.secrets import MASK, mask
from offramp.train.tracking.store import default_tracking_uri


@pytest.fixture
def store(tmp_path: Path, empty_store: Path) -> str:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


def params(store: str, run_id: str | None) -> dict[str, str]:
    assert run_id is not None
    return MlflowClient(store).get_run(run_id).data.params


def history(store: str, run_id: str | None, name: str) -> list[tuple[int, float]]:
    """(step, value) of a metric in the order in which the store was told."""
    assert run_id is not None
    return [(point.step, point.value) for point in MlflowClient(store).get_metric_history(run_id, name)]


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def test_default_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert default_tracking_uri() == "sqlite:///mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://there")
    assert OfframpMLFlowLogger().tracking_uri == "http://there"


def test_making_a_logger_touches_no_store(tmp_path: Path) -> None:
    logger = OfframpMLFlowLogger(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    logger.finalize("failed")
    assert not list(tmp_path.iterdir())


def test_long_values_are_cut_with_a_mark_and_many_are_logged(store: str) -> None:
    logger = OfframpMLFlowLogger(tracking_uri=store)
    many: dict[str, Any] = {f"p{n}": n for n in range(250)}
    logger.log_hyperparams({**many, "long": "x" * 7000, "function": "<function f at 0x7f12ab>"})
    logger.finalize()
    got = params(store, logger.run_id)
    assert len(got) == 252
    assert got["long"].endswith("... (7000 characters)")
    assert len(got["long"]) == 500
    assert got["function"] == "<function f>"


def test_flattening() -> None:
    nested = {"a": {"b": 1, "c": {}}, "l": [1, 2], "m": [{"x": None}, {"x": "y"}], "odd key!": True}
    want = {"a/b": "1", "a/c": "{}", "l": "[1, 2]", "m/0/x": "None", "m/1/x": "y", "odd key_": "True"}
    assert dict(flatten(nested)) == want


def test_the_client_is_at_hand_when_the_run_is(store: str) -> None:
    logger = OfframpMLFlowLogger(tracking_uri=store)
    client = logger.experiment
    assert client.search_experiments()
    client.set_tag(logger.run_id, "mine", "yes")
    logger.finalize()
    assert client.get_run(logger.run_id).data.tags["mine"] == "yes"


def test_the_first_verdict_stands(store: str) -> None:
    logger = OfframpMLFlowLogger(tracking_uri=store)
    logger.log_metrics({"loss": 1.0}, 0)
    assert logger.wait()
    run_id = logger.run_id
    assert run_id is not None
    assert MlflowClient(store).get_run(run_id).info.status == "RUNNING"
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        logger.finalize("failed")
    logger.finalize("success")
    assert MlflowClient(store).get_run(run_id).info.status == "KILLED"


def test_what_is_logged_after_the_end_arrives_and_changes_no_verdict(store: str, tmp_path: Path) -> None:
    logger = OfframpMLFlowLogger(tracking_uri=store)
    logger.keep_in(tmp_path, note=True)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.finalize("success")
    logger.log_metrics({"loss": 2.0}, 0)
    logger.finalize("success")
    assert history(store, logger.run_id, "loss") == [(0, 1.0), (0, 2.0)]
    assert MlflowClient(store).get_run(str(logger.run_id)).info.status == "FINISHED"


def test_a_resumed_run_is_running_again_and_counts_its_resumes(store: str, tmp_path: Path) -> None:
    first = OfframpMLFlowLogger(tracking_uri=store)
    first.keep_in(tmp_path, resume=True, note=True)  # nothing noted yet
    first.log_hyperparams({"lr": 1, "same": 2})
    first.finalize("failed")
    for number in (1, 2):
        logger = OfframpMLFlowLogger(tracking_uri=store)
        logger.keep_in(tmp_path, resume=True, note=True)
        with pytest.warns(UserWarning, match=rf"resume\.{number}\.\*: lr"):  # noqa: PT031 - a thread says it
            logger.log_hyperparams({"lr": 1 + number, "same": 2})
            assert logger.wait()
        assert logger.run_id == first.run_id
        assert logger.run_id is not None
        assert MlflowClient(store).get_run(logger.run_id).info.status == "RUNNING"
        logger.finalize("success")
    run_id = str(first.run_id)
    tags = MlflowClient(store).get_run(run_id).data.tags
    assert {key: tag for key, tag in tags.items() if key.startswith("resume.")} == {
        "resume.1.lr": "2",
        "resume.2.lr": "3",
    }
    fresh = OfframpMLFlowLogger(tracking_uri=store)
    fresh.keep_in(tmp_path, note=True)
    fresh.log_metrics({"loss": 1.0}, 0)
    fresh.finalize()
    assert fresh.run_id != run_id


def test_steps_that_a_killed_run_logged_are_not_logged_again(store: str, tmp_path: Path) -> None:
    first = OfframpMLFlowLogger(tracking_uri=store)
    first.keep_in(tmp_path, note=True)
    for step in range(5):
        first.log_metrics({"train/loss": float(step)}, step)
    first.log_metrics({"val/loss": 2.0}, 2)
    first.finalize("failed")
    again = OfframpMLFlowLogger(tracking_uri=store)
    again.keep_in(tmp_path, resume=True, note=True)
    for step in range(3, 7):  # from a checkpoint after step 2
        again.log_metrics({"train/loss": float(step)}, step)
    again.log_metrics({"val/loss": 4.0}, 4)
    again.finalize("success")
    assert history(store, first.run_id, "train/loss") == [(step, float(step)) for step in range(7)]
    assert history(store, first.run_id, "val/loss") == [(2, 2.0), (4, 4.0)]


def test_a_run_that_is_gone_is_said_and_made_anew_with_all_it_had(store: str, tmp_path: Path) -> None:
    first = OfframpMLFlowLogger(tracking_uri=store)
    first.keep_in(tmp_path, note=True)
    first.log_metrics({"loss": 1.0}, 0)
    first.finalize("failed")
    MlflowClient(store).delete_run(str(first.run_id))
    logger = OfframpMLFlowLogger(tracking_uri=store)
    logger.keep_in(tmp_path, resume=True, note=True)
    with pytest.warns(UserWarning, match="is not continued"):  # noqa: PT031 - a thread says it
        logger.log_metrics({"loss": 2.0}, 1)
        logger.finalize()
    assert logger.run_id != first.run_id
    assert history(store, logger.run_id, "loss") == [(0, 1.0), (1, 2.0)]
    assert json.loads((tmp_path / RUN_FILE).read_text())["run_id"] == logger.run_id


def test_a_run_of_another_store_is_not_continued(store: str, tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_text(json.dumps({"tracking_uri": "http://other", "run_id": "0" * 32}))
    logger = OfframpMLFlowLogger(tracking_uri=store)
    with pytest.warns(UserWarning, match="is in the store http://other"):
        logger.keep_in(tmp_path, resume=True, note=True)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.finalize()
    assert logger.run_id not in (None, "0" * 32)


def test_what_is_not_finite_is_logged_as_such(store: str) -> None:
    logger = OfframpMLFlowLogger(tracking_uri=store)
    logger.log_metrics({"loss": math.nan}, 0)
    logger.log_metrics({"loss": 3.0}, 1)
    logger.finalize()
    (_, first), second = history(store, logger.run_id, "loss")
    assert math.isnan(first)
    assert second == (1, 3.0)


def test_what_the_store_refuses_is_put_aside_and_the_rest_follows(store: str, tmp_path: Path) -> None:
    logger = OfframpMLFlowLogger(tracking_uri=store)
    logger.keep_in(tmp_path)
    with pytest.warns(UserWarning, match="refuses something"):  # noqa: PT031 - a thread says it
        logger.log_metrics({"loss": 1.0, "a" * 300: 1.0}, 0)
        logger.log_metrics({"loss": 2.0}, 1)
        logger.finalize()
    assert history(store, logger.run_id, "loss") == [(1, 2.0)]
    (refused,) = (tmp_path / "mlflow").glob("*.refused.jsonl")
    assert json.loads(refused.read_text())["metrics"]["loss"] == 1.0


def test_system_metrics_are_sampled(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    name = "system/cpu_utilization_percentage"
    logger = OfframpMLFlowLogger(tracking_uri=store)
    logger.log_metrics({"loss": 1.0}, 0)
    wait_for(lambda: logger.run_id is not None and len(history(store, logger.run_id, name)) > 2)
    logger.finalize()
    steps = [step for step, _ in history(store, logger.run_id, "system/system_memory_usage_percentage")]
    assert steps[:3] == [0, 1, 2]


def test_secrets_are_masked_and_tokenizers_are_not() -> None:
    config = {
        "hf_token": "abc",
        "data": {"tokenizer": "path", "max_tokens": 3, "api_key": "k", "password": "", "token": None},
        "list": [{"secret": "s"}, {"aws_secret_access_key": "x"}],
        "trainer/logger/tracking_uri": "https://me:pw@host/path",
        "plain": "see http://host/a@b",
    }
    assert mask(config) == {
        "hf_token": MASK,
        "data": {"tokenizer": "path", "max_tokens": 3, "api_key": MASK, "password": "", "token": None},
        "list": [{"secret": MASK}, {"aws_secret_access_key": MASK}],
        "trainer/logger/tracking_uri": f"https://{MASK}@host/path",
        "plain": "see http://host/a@b",
    }
