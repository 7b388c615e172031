from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from offramp.train.tracking.logger import OfframpMLFlowLogger, default_tracking_uri, flatten
from offramp.train.tracking.secrets import MASK, mask


@pytest.fixture
def store(tmp_path: Path, empty_store: Path) -> str:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


def params(store: str, run_id: str | None) -> dict[str, str]:
    assert run_id is not None
    return MlflowClient(store).get_run(run_id).data.params


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
    got = params(store, logger.run_id)
    assert len(got) == 252
    assert got["long"].endswith("... (7000 characters)")
    assert len(got["long"]) == 500
    assert got["function"] == "<function f>"


def test_flattening() -> None:
    nested = {"a": {"b": 1, "c": {}}, "l": [1, 2], "m": [{"x": None}, {"x": "y"}], "odd key!": True}
    want = {"a/b": "1", "a/c": "{}", "l": "[1, 2]", "m/0/x": "None", "m/1/x": "y", "odd key_": "True"}
    assert dict(flatten(nested)) == want


def test_the_first_verdict_stands(store: str) -> None:
    logger = OfframpMLFlowLogger(tracking_uri=store)
    run_id = logger.run_id
    assert run_id is not None
    assert MlflowClient(store).get_run(run_id).info.status == "RUNNING"
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        logger.finalize("failed")
    logger.finalize("success")
    assert MlflowClient(store).get_run(run_id).info.status == "KILLED"


def test_a_resumed_run_is_running_again_and_counts_its_resumes(store: str, tmp_path: Path) -> None:
    first = OfframpMLFlowLogger(tracking_uri=store)
    first.remember_in(tmp_path, resume=True)  # nothing noted yet
    first.log_hyperparams({"lr": 1, "same": 2})
    first.finalize("failed")
    for number in (1, 2):
        logger = OfframpMLFlowLogger(tracking_uri=store)
        logger.remember_in(tmp_path, resume=True)
        with pytest.warns(UserWarning, match=rf"resume\.{number}\.\*: lr"):
            logger.log_hyperparams({"lr": 1 + number, "same": 2})
        assert logger.run_id == first.run_id
        assert logger.run_id is not None
        assert MlflowClient(store).get_run(logger.run_id).info.status == "RUNNING"
        logger.finalize("success")
    tags = MlflowClient(store).get_run(logger.run_id).data.tags
    assert {key: tag for key, tag in tags.items() if key.startswith("resume")} == {
        "resume.1.lr": "2",
        "resume.2.lr": "3",
    }
    fresh = OfframpMLFlowLogger(tracking_uri=store)
    fresh.remember_in(tmp_path, resume=False)
    assert fresh.run_id != first.run_id


def test_a_run_that_is_gone_is_said_and_replaced(store: str, tmp_path: Path) -> None:
    (tmp_path / "mlflow_run.json").write_text(f'{{"tracking_uri": "{store}", "run_id": "{"0" * 32}"}}')
    logger = OfframpMLFlowLogger(tracking_uri=store)
    with pytest.warns(UserWarning, match="is not continued"):
        logger.remember_in(tmp_path, resume=True)
    assert logger.run_id != "0" * 32


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
