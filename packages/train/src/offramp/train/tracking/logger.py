"""The MLflow logger: one run per fit, which never waits for the store, and whose status is the truth.

What is logged goes into a journal beside the run (`offramp.train.tracking.journal`); a thread passes it on.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from mlflow import MlflowClient
from mlflow.tracking.context.registry import resolve_tags
from typing_extensions import override

from offramp.common.errors import OfframpError
from offramp.train.tracking.journal import DIRECTORY, Journal, is_sent, journals
from offramp.train.tracking.secrets import mask
from offramp.train.tracking.sender import Sender
from offramp.train.tracking.store import REQUEST_TIMEOUT_S, default_tracking_uri, in_words
from offramp.train.tracking.system_metrics import PREFIX as SYSTEM
from offramp.train.tracking.system_metrics import SystemMetrics

RUN_FILE = "mlflow_run.json"
END_WAIT_S = 10.0
"""How long the end of a run waits for a store that is slow."""

_MAX_VALUE_LENGTH = 500  # what every MLflow server since 1.28 accepts
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class OfframpMLFlowLogger(Logger):
    """Logs to MLflow, and goes on whatever becomes of the store.

    - The store is `MLFLOW_TRACKING_URI`, or `mlflow.db` (SQLite) in the working directory. While it is away or slow,
      what is logged waits in the run directory and is sent in order when it is back; at the end of the run it gets ten
      more seconds. `offramp sync` sends what is left.
    - A run ends as FINISHED, FAILED, or KILLED when SIGTERM or Ctrl-C ended it; the first verdict stands.
    - A resumed run goes on where its metrics end: steps that were logged before are not logged again.
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
        system_metrics: log the use of processors, memory, disk, network and GPUs of the first machine as well.
    """

    def __init__(
        self,
        experiment_name: str = "offramp",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, str] | None = None,
        artifact_location: str | None = None,
        run_id: str | None = None,
        system_metrics: bool = True,
    ) -> None:
        super().__init__()
        self.tracking_uri = tracking_uri or default_tracking_uri()
        self.tags = dict(tags or {})
        self._experiment_name, self._run_name, self._artifact_location = experiment_name, run_name, artifact_location
        self._run_id, self._wants_system_metrics = run_id, system_metrics
        self._directory: Path | None = None
        self._notes = False
        self._continued: str | None = None
        self._journal: Journal | None = None
        self._sender: Sender | None = None
        self._system_metrics: SystemMetrics | None = None
        self._logged: dict[str, int] = {}
        self._verdict: str | None = None
        self._is_broken = False

    # ---- the run

    @rank_zero_only
    def keep_in(self, directory: Path, *, resume: bool = False, note: bool = False) -> None:
        """Keeps the journal in a run directory rather than in a temporary one.

        Args:
            directory: the run directory.
            resume: continue the run noted there. A run in another store is said, and a new one made.
            note: note the run there.
        """
        self._directory, self._notes = directory, note
        file = directory / RUN_FILE
        if resume and self._run_id is None and file.is_file():
            noted = json.loads(file.read_text(encoding="utf-8"))
            if noted["tracking_uri"] == mask(self.tracking_uri):
                self._run_id, self._continued = noted["run_id"], noted.get("journal")
            else:
                rank_zero_warn(
                    f"run {noted['run_id']} is not continued, since it is in the store {noted['tracking_uri']}; a new "
                    f"one is made in {mask(self.tracking_uri)}"
                )
        waiting = [path for path in journals(directory) if not is_sent(path) and path.name != self._continued]
        if waiting:
            rank_zero_warn(
                f"{directory} holds what {len(waiting)} earlier runs could not send to MLflow; send it with: "
                f"offramp sync {directory}"
            )

    @property
    @override
    def name(self) -> str:
        """The experiment."""
        return self._experiment_name

    @property
    @override
    def version(self) -> str | None:
        """The run, see `run_id`."""
        return self.run_id

    @property
    def run_id(self) -> str | None:
        """The run, None until the store has made it; nobody waits for that. `wait` does."""
        return self._run_id if self._journal is None else self._journal.run_id

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The MLflow client, for what this logger does not do; what is called on it waits for the store and the run.

        Lightning asks for it at the start of everything, so that the run exists also if nothing is logged.
        """
        self._open()
        return _LazyClient(self.client)

    def client(self) -> MlflowClient:
        """The MLflow client, when the run is made.

        Raises:
            OfframpError: the store does not answer.
        """
        sender = self._open()
        if not sender.wait(REQUEST_TIMEOUT_S, lambda: self.run_id is not None):
            detail = "it is too slow" if sender.fault is None else in_words(sender.fault)
            raise OfframpError(f"the MLflow store at {mask(self.tracking_uri)} does not answer: {detail}")
        return MlflowClient(self.tracking_uri)

    def wait(self, timeout_s: float = END_WAIT_S) -> bool:
        """Waits until the store was told everything, but no longer than this; returns whether it was."""
        return self._sender is None or self._sender.wait(timeout_s)

    # ---- what is logged

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs metrics, but for those of steps that the run logged before it was resumed."""
        number, values = step or 0, {}
        for name, value in metrics.items():
            key = re.sub(r"[^\w/. -]+", "", name)
            if number > self._logged_before().get(key, -1):
                values[key] = float(value)
        if values:
            self._write(lambda journal: journal.append_metrics(values, number))

    @override
    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Logs parameters, flattened with `/`; changed ones of a resumed run become tags."""
        texts = dict(flatten(mask(vars(params) if isinstance(params, Namespace) else params)))
        self._write(lambda journal: journal.append({"params": texts}))

    @rank_zero_only
    def log_text(self, text: str, artifact: str) -> None:
        """Logs a text as an artifact."""
        self._write(lambda journal: journal.append({"text": text, "artifact": artifact}))

    @rank_zero_only
    def log_file(self, path: Path) -> None:
        """Logs a file as an artifact under its name; if it changes before the store has it, only as it is then."""

        def write(journal: Journal) -> None:
            place, directory = path.resolve(), journal.run_directory.resolve()
            inside = place.is_relative_to(directory)  # so that a run directory can be moved before it is sent
            journal.append({"file": str(place.relative_to(directory) if inside else place)})

        self._write(write)

    @override
    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Ends the run; what was said first stands. Waits for the store, but not long.

        Args:
            status: Lightning's word. "failed" means KILLED while the exception being handled is an interruption.
        """
        if self._journal is None or self._sender is None:
            return
        if self._system_metrics is not None:
            self._system_metrics.stop()
        if self._verdict is None:
            self._verdict = "FINISHED" if status in ("success", "finished") else "FAILED"
            if self._verdict == "FAILED" and _is_interruption(sys.exc_info()[1]):
                self._verdict = "KILLED"
            self._write(lambda journal: journal.append_status(str(self._verdict)))
        journal = self._journal
        if not self._sender.close(END_WAIT_S):
            rank_zero_warn(
                f"the MLflow store at {mask(self.tracking_uri)} was not told everything; the rest waits in "
                f"{journal.path}, send it with: offramp sync {journal.run_directory}"
            )
        journal.close()
        # Whatever is logged later, for example by a validation after the fit, opens it again.
        self._directory, self._continued, self._run_id = journal.run_directory, journal.path.name, journal.run_id
        self._journal = self._sender = None

    # ---- the journal

    def _open(self) -> Sender:
        if self._journal is None or self._sender is None:
            self._journal = self._journal_of_run()
            self._sender = Sender(self._journal, self.tracking_uri, self._note)
            self._sender.start()
            self._note()
            if self._wants_system_metrics and self._system_metrics is None:  # last, since it writes from its thread
                samples = [step for name, step in self._logged.items() if name.startswith(SYSTEM)]
                self._system_metrics = SystemMetrics(self.log_metrics, max(samples, default=-1) + 1)
                self._system_metrics.start()
        return self._sender

    def _journal_of_run(self) -> Journal:
        directory = self._directory or Path(tempfile.mkdtemp(prefix="offramp-"))
        path = None if self._continued is None else directory / DIRECTORY / self._continued
        if path is not None and path.is_file():
            journal = Journal(path)
            if self._verdict is None:
                self._logged = journal.last_steps()
        else:
            described = {
                "experiment": self._experiment_name,
                "name": self._run_name,
                "tags": resolve_tags(self.tags),
                "artifact_location": self._artifact_location,
                "time": int(time.time() * 1000),
            }
            journal = Journal.create(directory, described)
            journal.run_id = self._run_id
        if self._run_id is not None and self._verdict is None:
            journal.append_status("RUNNING")
        return journal

    def _logged_before(self) -> dict[str, int]:
        if self._journal is None:
            self._open()
        return self._logged

    def _write(self, write: Callable[[Journal], None]) -> None:
        sender = self._open()
        assert self._journal is not None
        try:
            write(self._journal)
        except OSError as fault:
            if not self._is_broken:
                self._is_broken = True
                rank_zero_warn(f"cannot write {self._journal.path}, so metrics are lost: {fault}")
        sender.wake()

    def _note(self) -> None:
        if not self._notes or self._directory is None or self._journal is None:
            return
        note = {"tracking_uri": mask(self.tracking_uri), "run_id": self.run_id, "journal": self._journal.path.name}
        scratch = self._directory / f".{RUN_FILE}"
        scratch.write_text(json.dumps(note) + "\n", encoding="utf-8")
        scratch.replace(self._directory / RUN_FILE)


class _LazyClient:
    def __init__(self, make: Callable[[], MlflowClient]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Any:
        return getattr(self._make(), name)


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
