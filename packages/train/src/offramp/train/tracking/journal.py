"""A run's journal: everything that MLflow is to be told, in order, in a file beside the run.

What is logged is first written here, which takes microseconds and needs no store; a `Sender` passes it on. So nothing
is lost when the store is away or the process is killed, memory stays as it is however long the store is away, and a
resumed run knows which steps were logged. One JSON value a line:

    {"run": {...}}                                   the experiment, name and tags of the run; always the first line
    {"metrics": {name: value}, "step": n, "time": ms}
    {"params": {name: text}}
    {"text": ..., "artifact": name}
    {"file": path}                                   from the run directory, if it is in there; sent as it is by then
    {"status": "RUNNING", "time": ms}

Beside it, `.state.json` says which run of which store this became, and how many bytes of the journal it was told.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from offramp.common.errors import OfframpError

DIRECTORY = "mlflow"
"""Folder of the journals in a run directory."""


class Entry(NamedTuple):
    """A line of the journal.

    Attributes:
        content: what it says.
        end: bytes of the journal up to its end.
    """

    content: dict[str, Any]
    end: int


class Journal:
    """See the module. Safe to write from several threads; one process at a time has it.

    Args:
        path: of the file; what a killed process left unfinished at its end is cut off.

    Attributes:
        run_id: the MLflow run that this became, None before that.
        tracking_uri: the store of that run, without secrets.
        sent: bytes that the store was told.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._owner = FileLock(f"{path}.lock")
        try:
            self._owner.acquire(timeout=0)
        except Timeout:
            raise OfframpError(f"{path} belongs to a run that is still going on; wait for its end.") from None
        self._size = _whole_lines(path)
        self._file = path.open("ab")
        self._file.truncate(self._size)
        self.run_id: str | None = None
        self.tracking_uri: str | None = None
        self.sent = 0
        self._is_closed = False
        if self._state_path.is_file():
            state = json.loads(self._state_path.read_text(encoding="utf-8"))
            self.run_id, self.tracking_uri = state["run_id"], state["tracking_uri"]
            self.sent = min(int(state["sent"]), self._size)

    @classmethod
    def create(cls, run_directory: Path, run: Mapping[str, Any]) -> Journal:
        """A new one.

        Args:
            run_directory: it goes to `mlflow/` in there.
            run: what the first line says.
        """
        folder = run_directory / DIRECTORY
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
        journal = cls(folder / f"{name}.jsonl")
        journal.append({"run": run})
        return journal

    @property
    def name(self) -> str:
        """Unlike that of any other."""
        return self.path.stem

    @property
    def run_directory(self) -> Path:
        """That it belongs to."""
        return self.path.parent.parent

    @property
    def size(self) -> int:
        """Bytes."""
        return self._size

    @property
    def run(self) -> dict[str, Any]:
        """What the first line says."""
        return next(self.entries(0)).content["run"]

    def append(self, content: Mapping[str, Any]) -> None:
        """Write a line.

        Raises:
            OSError: it cannot be written, for example because the disk is full.
        """
        line = json.dumps(content, allow_nan=False).encode() + b"\n"
        with self._lock:
            try:
                self._file.write(line)
                self._file.flush()
            except OSError:
                # Half a line would make one with the next, and a buffer that could not be written is tried again.
                self._file = self.path.open("ab")
                self._file.truncate(self._size)
                raise
            self._size += len(line)

    def append_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write metrics, with the time of day."""
        finite = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
        self.append({"metrics": finite, "step": step, "time": int(time.time() * 1000)})

    def append_status(self, status: str) -> None:
        """Write that the run goes on or has ended."""
        self.append({"status": status, "time": int(time.time() * 1000)})

    def entries(self, start: int) -> Iterator[Entry]:
        """The lines after the first `start` bytes, as far as the file goes now."""
        stop = self._size
        with self.path.open("rb") as file:
            file.seek(start)
            while start < stop:
                line = file.readline()
                start += len(line)
                yield Entry(json.loads(line), start)

    def last_steps(self) -> dict[str, int]:
        """The highest step of every metric."""
        last: dict[str, int] = {}
        for entry in self.entries(0):
            step = entry.content.get("step", 0)
            for name in entry.content.get("metrics", ()):
                last[name] = max(step, last.get(name, step))
        return last

    def note(self) -> None:
        """Write down `run_id`, `tracking_uri` and `sent`; nothing after `close`, since it may be another's by then."""
        if self._is_closed:
            return
        state = {"run_id": self.run_id, "tracking_uri": self.tracking_uri, "sent": self.sent}
        scratch = self._state_path.with_suffix(".tmp")
        scratch.write_text(json.dumps(state) + "\n", encoding="utf-8")
        os.replace(scratch, self._state_path)

    def refuse(self, entry: Entry, reason: str) -> None:
        """Write a line that the store does not take, and why, to a file of such lines."""
        with self.refused_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"reason": reason, **entry.content}) + "\n")

    @property
    def refused_path(self) -> Path:
        """The file of lines that the store does not take."""
        return self.path.with_suffix(".refused.jsonl")

    @property
    def _state_path(self) -> Path:
        return self.path.with_suffix(".state.json")

    def close(self) -> None:
        """Let another process have it."""
        self._is_closed = True
        self._file.close()
        self._owner.release()


def journals(run_directory: Path) -> list[Path]:
    """The journals of a run directory, oldest first."""
    found = (run_directory / DIRECTORY).glob("*.jsonl")
    return sorted(path for path in found if not path.name.endswith(".refused.jsonl"))


def is_sent(path: Path) -> bool:
    """Whether the store was told all of a journal, without opening it."""
    state = path.with_suffix(".state.json")
    return state.is_file() and json.loads(state.read_text(encoding="utf-8"))["sent"] >= path.stat().st_size


def _whole_lines(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        stop = size
        while stop > 0:
            start = max(stop - (1 << 16), 0)
            file.seek(start)
            end = file.read(stop - start).rfind(b"\n")
            if end >= 0:
                return start + end + 1
            stop = start
    return 0
