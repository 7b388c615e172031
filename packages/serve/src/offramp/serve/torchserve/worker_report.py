"""A note from the worker to whoever started the server: why it could not load, or why its engine stopped.

TorchServe itself would only restart the worker again and again, and leave the reason in its log.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from offramp.common.errors import OfframpError

ENVIRONMENT_VARIABLE = "OFFRAMP_WORKER_REPORT"


@dataclass(frozen=True)
class WorkerReport:
    """A file with one sentence, or nowhere.

    Attributes:
        path: The file; None when nobody asked for a report.
    """

    path: Path | None

    @classmethod
    def from_environment(cls) -> WorkerReport:
        """The report that whoever started this process asked for."""
        path = os.environ.get(ENVIRONMENT_VARIABLE)
        return cls(Path(path) if path else None)

    def failed(self, error: Exception) -> None:
        """Writes why."""
        if self.path is None:
            return
        kind = "" if isinstance(error, OfframpError) else f"{type(error).__name__}: "
        scratch = self.path.with_suffix(".new")
        scratch.write_text(f"{kind}{error}\n", encoding="utf-8")
        scratch.replace(self.path)

    def read(self) -> str | None:
        """What was written; None when nothing was."""
        try:
            return self.path.read_text(encoding="utf-8").strip() if self.path else None
        except FileNotFoundError:
            return None
