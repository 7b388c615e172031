"""Passes a run's journal on to MLflow from a thread of its own, for as long as it takes, and in order.

The run is made here too, so that nobody waits for the store. A store that does not answer is asked again after 1, 2, 4,
... seconds; what it refuses for good is put aside, so that the rest can follow. Everything may be sent twice: metrics
with the same time and step are one to MLflow, and a run is looked for by the name of its journal before it is made.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

from offramp.train.tracking.journal import Entry, Journal
from offramp.train.tracking.secrets import mask
from offramp.train.tracking.store import in_words, is_refusal, leave_retries_to_us

JOURNAL_TAG = "offramp.journal"
FLUSH_S = 1.0
"""How long entries gather before they are sent together."""
LONGEST_PAUSE_S = 30.0
"""Between two attempts."""

_METRICS_PER_REQUEST = 1000  # what MLflow's REST API accepts
_PER_REQUEST = 100  # parameters or tags


class _JournalFault(Exception):
    """The disk of the run directory is at fault, and not the store."""


@contextmanager
def _noting() -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        raise _JournalFault(str(fault)) from fault


class Sender(threading.Thread):
    """See the module.

    Args:
        journal: to be sent.
        tracking_uri: the MLflow store.
        noted: is told when the run is known.
    """

    def __init__(self, journal: Journal, tracking_uri: str, noted: Callable[[], None] = lambda: None) -> None:
        super().__init__(name="mlflow sender", daemon=True)
        leave_retries_to_us()
        self.journal, self.tracking_uri, self._noted = journal, tracking_uri, noted
        self.fault: Exception | None = None
        self._client: MlflowClient | None = None
        self._run_is_known = False
        self._resume_number: int | None = None
        self._closing = threading.Event()
        self._something = threading.Event()

    @property
    def all_sent(self) -> bool:
        """Whether the store was told everything."""
        return self.journal.sent >= self.journal.size

    def wake(self) -> None:
        """There is something new."""
        self._something.set()

    def wait(self, timeout_s: float, until: Callable[[], bool] | None = None) -> bool:
        """Wait until everything is sent, or something else holds, for so long at most; returns whether it does."""
        done = until or (lambda: self.all_sent)
        self.wake()
        deadline = time.monotonic() + timeout_s
        while not done() and self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        return done()

    def close(self, timeout_s: float) -> bool:
        """Send the rest and end: at the first fault, and after so long at most. Returns whether all was sent."""
        self._closing.set()
        self.wake()
        self.join(timeout_s)
        return self.all_sent

    def run(self) -> None:
        """Until closed."""
        pause = FLUSH_S
        while True:
            closing = self._closing.is_set()
            try:
                while not self.all_sent:
                    self._send()
                    pause = FLUSH_S
                    if self.fault is not None:
                        self.fault = None
                        rank_zero_info(f"what was logged reaches the MLflow store at {mask(self.tracking_uri)} again")
            except Exception as fault:  # whatever it is, training is to go on
                if self.fault is None:
                    rank_zero_warn(self._described(fault))
                pause = FLUSH_S if self.fault is None else min(2 * pause, LONGEST_PAUSE_S)
                self.fault = fault
            if closing:
                return
            if self.fault is None:
                self._something.wait()
            self._closing.wait(pause)
            self._something.clear()

    def _described(self, fault: Exception) -> str:
        if isinstance(fault, _JournalFault):
            return (
                f"{self.journal.path.parent} cannot be written, where it is noted what the MLflow store was told; the "
                f"run goes on, and nothing is sent until there is room: {in_words(fault)}"
            )
        return (
            f"the MLflow store at {mask(self.tracking_uri)} does not answer; the run goes on, and what is logged waits "
            f"in {self.journal.path}: {in_words(fault)}"
        )

    # ---- the run

    def _send(self) -> None:
        """Send some entries; raises when the store does not answer."""
        client = self._client = self._client or MlflowClient(self.tracking_uri)
        if not self._run_is_known:
            self._find_or_make_run(client)
            self._run_is_known = True
            self._noted()
        batch: list[Entry] = []
        count = 0
        for entry in self.journal.entries(self.journal.sent):
            metrics = entry.content.get("metrics")
            if metrics is None and not batch:
                batch = [entry]
                break
            if metrics is None or (batch and count + len(metrics) > _METRICS_PER_REQUEST):
                break
            batch.append(entry)
            count += len(metrics)
        self._tell(client, batch)

    def _tell(self, client: MlflowClient, batch: list[Entry]) -> None:
        try:
            self._pass_on(client, batch)
        except Exception as fault:
            if not is_refusal(fault):
                raise
            if len(batch) > 1:
                for entry in batch:  # to put aside what is refused, and not its neighbours
                    self._tell(client, [entry])
                return
            with _noting():
                self.journal.refuse(batch[0], in_words(fault))
            rank_zero_warn(
                f"the MLflow store at {mask(self.tracking_uri)} refuses something, which is put into "
                f"{self.journal.refused_path}: {in_words(fault)}"
            )
        self.journal.sent = batch[-1].end
        with _noting():
            self.journal.note()

    def _find_or_make_run(self, client: MlflowClient) -> None:
        journal, store = self.journal, mask(self.tracking_uri)
        run = None
        if journal.run_id is not None:
            try:
                run = client.get_run(journal.run_id)
            except MlflowException as fault:
                if fault.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                    raise
            if run is None or run.info.lifecycle_stage == "deleted":
                rank_zero_warn(
                    f"run {journal.run_id} is not continued, since it is no longer in the MLflow store at {store}; a "
                    "new one is made, and gets all that was logged"
                )
                run, journal.sent = None, 0
        run = run or self._made_earlier(client) or self._make_run(client)
        journal.run_id, journal.tracking_uri = run.info.run_id, store
        with _noting():
            journal.note()

    def _experiment_id(self, client: MlflowClient) -> str:
        described = self.journal.run
        experiment = client.get_experiment_by_name(described["experiment"])
        if experiment is not None and experiment.lifecycle_stage != "deleted":
            return str(experiment.experiment_id)
        return str(client.create_experiment(described["experiment"], described["artifact_location"]))

    def _made_earlier(self, client: MlflowClient) -> Run | None:
        """The run that an earlier attempt has made without getting to know it."""
        tag = f"tags.`{JOURNAL_TAG}` = '{self.journal.name}'"
        runs = client.search_runs([self._experiment_id(client)], tag, max_results=1)
        return runs[0] if runs else None

    def _make_run(self, client: MlflowClient) -> Run:
        described = self.journal.run
        tags = {**described["tags"], JOURNAL_TAG: self.journal.name}
        experiment = self._experiment_id(client)
        return client.create_run(experiment, start_time=described["time"], tags=tags, run_name=described["name"])

    # ---- what it is told

    def _pass_on(self, client: MlflowClient, batch: list[Entry]) -> None:
        run_id, content = self.journal.run_id, batch[0].content
        assert run_id is not None
        if "metrics" in content:
            metrics = [
                Metric(name, float(value), entry.content["time"], entry.content["step"])
                for entry in batch
                for name, value in entry.content["metrics"].items()
            ]
            client.log_batch(run_id, metrics=metrics)
        elif "params" in content:
            self._tell_parameters(client, run_id, content["params"])
        elif "text" in content:
            client.log_text(run_id, content["text"], content["artifact"])
        elif "file" in content:
            client.log_artifact(run_id, str(self.journal.run_directory / content["file"]))
        elif content.get("status") == "RUNNING":
            client.update_run(run_id, status="RUNNING")
        elif "status" in content:
            client.set_terminated(run_id, content["status"], content["time"])

    def _tell_parameters(self, client: MlflowClient, run_id: str, texts: dict[str, str]) -> None:
        """New ones are parameters; MLflow lets none change, so changed ones become tags `resume.N.<name>`."""
        data = client.get_run(run_id).data
        new = [Param(name, text) for name, text in texts.items() if name not in data.params]
        changed = {name: text for name, text in texts.items() if data.params.get(name, text) != text}
        for start in range(0, len(new), _PER_REQUEST):
            client.log_batch(run_id, params=new[start : start + _PER_REQUEST])
        if changed:
            prefix = f"resume.{self._number_of_resume(data.tags)}."
            tags = [RunTag(prefix + name, text) for name, text in changed.items()]
            for start in range(0, len(tags), _PER_REQUEST):
                client.log_batch(run_id, tags=tags[start : start + _PER_REQUEST])
            rank_zero_warn(f"parameters changed since the run began, logged as tags {prefix}*: {', '.join(changed)}")

    def _number_of_resume(self, tags: dict[str, Any]) -> int:
        if self._resume_number is None:
            numbers = [int(match[1]) for tag in tags if (match := re.match(r"resume\.(\d+)\.", tag))]
            self._resume_number = max(numbers, default=0) + 1
        return self._resume_number
