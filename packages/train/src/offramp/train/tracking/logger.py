"""The MLflow logger: one run per fit, whose status is the truth and whose parameters survive a resume."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from mlflow import MlflowClient
from mlflow.entities import Param, RunTag
from mlflow.exceptions import MlflowException
from typing_extensions import override

from offramp.train.tracking.secrets import mask

DEFAULT_TRACKING_URI = "sqlite:///mlflow.db"
RUN_FILE = "mlflow_run.json"

_MAX_VALUE_LENGTH = 500  # what every MLflow server since 1.28 accepts
_BATCH_SIZE = 100  # parameters or tags per request that MLflow's REST API accepts
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def default_tracking_uri() -> str:
    """`MLFLOW_TRACKING_URI`, or a SQLite file in the working directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_TRACKING_URI


class OfframpMLFlowLogger(MLFlowLogger):
    """Lightning's MLflow logger, with these differences.

    - The store is `MLFLOW_TRACKING_URI`, or `mlflow.db` (SQLite) in the working directory.
    - A run ends as FINISHED, FAILED, or KILLED when SIGTERM or Ctrl-C ended it; the first verdict stands.
    - A parameter that has another value when a run is resumed goes to a tag `resume.N.<name>`; MLflow would refuse it.
    - Values that are too long are cut with a mark (the whole configuration is an artifact), memory addresses are left
      out, and secrets are masked.

    Args:
        experiment_name: experiment of the run, created when missing.
        run_name: name of the run.
        tracking_uri: any MLflow store.
        tags: of the run.
        artifact_location: where the artifacts of a new experiment go.
        run_id: continue this run.
    """

    def __init__(
        self,
        experiment_name: str = "offramp",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, str] | None = None,
        artifact_location: str | None = None,
        run_id: str | None = None,
    ) -> None:
        super().__init__(
            experiment_name=experiment_name,
            run_name=run_name,
            # The parent opens the store at once, which creates a SQLite database: on every rank, at the same time, and
            # even if the recipe is then refused. A REST store is opened only when it is used, and this one never is.
            tracking_uri="http://unused.invalid",
            tags=dict(tags or {}),
            artifact_location=artifact_location,
            run_id=run_id,
        )
        self._tracking_uri = tracking_uri or default_tracking_uri()
        self._client: MlflowClient | None = None
        self._resumed = run_id is not None
        self._resume_number: int | None = None
        self._verdict: str | None = None
        self._run_file: Path | None = None

    @property
    def tracking_uri(self) -> str:
        """The store."""
        return str(self._tracking_uri)

    @property
    def _mlflow_client(self) -> MlflowClient:
        if self._client is None:
            self._client = MlflowClient(self.tracking_uri)
        return self._client

    @_mlflow_client.setter
    def _mlflow_client(self, client: MlflowClient) -> None:
        """Leaves the parent's client unused, see above."""

    @rank_zero_only
    def remember_in(self, directory: Path, *, resume: bool) -> None:
        """Notes the run in a run directory when it is created, or continues the run noted there.

        Args:
            directory: the run directory.
            resume: continue the noted run. A run that is no longer in the store is said, and a new one made.
        """
        self._run_file = directory / RUN_FILE
        if not resume or self._run_id is not None or not self._run_file.is_file():
            return
        noted = json.loads(self._run_file.read_text(encoding="utf-8"))
        try:
            if noted["tracking_uri"] != mask(self.tracking_uri):
                raise MlflowException(f"the store was {noted['tracking_uri']}")
            self._mlflow_client.get_run(noted["run_id"])
        except MlflowException as fault:
            rank_zero_warn(f"run {noted['run_id']} is not continued, a new one is made: {fault}")
            return
        self._run_id, self._resumed = noted["run_id"], True

    @property
    @override
    def experiment(self) -> Any:
        """The MLflow client; the run exists, and is running, from the first use on (on rank 0)."""
        fresh = not self._initialized
        client = super().experiment
        if fresh and self._initialized:
            if self._resumed:
                client.update_run(self._run_id, status="RUNNING")
            self._note()
        return client

    @override
    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Logs parameters, flattened with `/`; changed ones of a resumed run become tags."""
        values = vars(params) if isinstance(params, Namespace) else params
        client = self.experiment
        texts = dict(flatten(mask(values)))
        known: Mapping[str, str] = client.get_run(self._run_id).data.params
        new = [Param(key, text) for key, text in texts.items() if key not in known]
        changed = {key: text for key, text in texts.items() if key in known and known[key] != text}
        for start in range(0, len(new), _BATCH_SIZE):
            client.log_batch(self._run_id, params=new[start : start + _BATCH_SIZE])
        if changed:
            prefix = f"resume.{self._number_of_resume()}."
            tags = [RunTag(prefix + key, text) for key, text in changed.items()]
            for start in range(0, len(tags), _BATCH_SIZE):
                client.log_batch(self._run_id, tags=tags[start : start + _BATCH_SIZE])
            rank_zero_warn(f"parameters changed since the run began, logged as tags {prefix}*: {', '.join(changed)}")

    @rank_zero_only
    def log_text(self, text: str, artifact: str) -> None:
        """Logs a text as an artifact."""
        self.experiment.log_text(self._run_id, text, artifact)

    @override
    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Ends the run; what was said first stands.

        Args:
            status: Lightning's word. "failed" means KILLED while the exception being handled is an interruption.
        """
        if not self._initialized or self._verdict is not None:
            return
        self._verdict = "FINISHED" if status in ("success", "finished") else "FAILED"
        if self._verdict == "FAILED" and _is_interruption(sys.exc_info()[1]):
            self._verdict = "KILLED"
        self._mlflow_client.set_terminated(self._run_id, self._verdict)

    def _note(self) -> None:
        if self._run_file is not None:
            self._run_file.parent.mkdir(parents=True, exist_ok=True)
            note = {"tracking_uri": mask(self.tracking_uri), "run_id": self._run_id}
            self._run_file.write_text(json.dumps(note) + "\n", encoding="utf-8")

    def _number_of_resume(self) -> int:
        if self._resume_number is None:
            tags = self.experiment.get_run(self._run_id).data.tags
            numbers = [int(match[1]) for tag in tags if (match := re.match(r"resume\.(\d+)\.", tag))]
            self._resume_number = max(numbers, default=0) + 1
        return self._resume_number


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key, text) of every leaf; keys are joined with `/`, and only hold what MLflow accepts."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{key}/")
        elif isinstance(value, list | tuple) and any(isinstance(part, Mapping) for part in value):
            yield from flatten({str(index): part for index, part in enumerate(value)}, f"{key}/")
        else:
            text = _ADDRESS.sub("", str(value))
            if len(text) > _MAX_VALUE_LENGTH:
                mark = f"... ({len(text)} characters)"
                text = text[: _MAX_VALUE_LENGTH - len(mark)] + mark
            yield re.sub(r"[^\w\-./ ]", "_", key), text


def _is_interruption(fault: BaseException | None) -> bool:
    """Whether SIGTERM or SIGINT is behind a fault, or behind what it led to."""
    while fault is not None:
        if isinstance(fault, KeyboardInterrupt) or (
            isinstance(fault, SystemExit) and fault.code in (128 + signal.SIGTERM, 128 + signal.SIGINT)
        ):
            return True
        if type(fault).__name__ == "SIGTERMException":  # Lightning's, private
            return True
        fault = fault.__cause__ or fault.__context__
    return False
