"""Named steps that are done once: a second run of the demo goes on where the first one stopped."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

SCRIPT = Path(sys.executable).with_name("offramp")
"""The one of this very environment, activated or not."""


class Steps:
    """Runs steps in order and remembers what each was made from.

    A step is done when its stamp holds the fingerprint of everything it was made from: its own inputs and the
    fingerprint of the step before. Changing an early step therefore makes every later one stale.
    """

    def __init__(self, work: Path, console: Console) -> None:
        self.work = work
        self.console = console
        self.seconds: dict[str, float] = {}
        self._upstream = ""
        self._number = 0

    def run(self, name: str, title: str, inputs: Sequence[Path | str], action: Callable[[Path], None]) -> Path:
        """Run `action(folder)` unless its stamp says that it is done; return the folder of its results.

        Args:
            name: folder under the work directory; results survive an interrupted step, so that it can resume.
            title: one line for the user.
            inputs: files and values the results depend on.
            action: does the work.
        """
        self._number += 1
        folder, stamp = self.work / name, self.work / f"{name}.done.json"
        fingerprint = self._fingerprint(inputs)
        self._upstream = fingerprint
        if stamp.is_file() and folder.is_dir():
            done = json.loads(stamp.read_text())
            if done["fingerprint"] == fingerprint:
                self.seconds[name] = done["seconds"]
                self.console.print(f"[bold]{self._number}. {title}[/]  [dim]done before ({done['seconds']:.0f} s)[/]")
                return folder
        self.console.print(f"[bold]{self._number}. {title}[/]")
        started = self.work / f"{name}.started"
        if not (started.is_file() and started.read_text() == fingerprint):
            shutil.rmtree(folder, ignore_errors=True)  # what lies there was made from something else
        folder.mkdir(parents=True, exist_ok=True)
        started.write_text(fingerprint)
        start = time.monotonic()
        action(folder)
        self.seconds[name] = time.monotonic() - start
        stamp.write_text(json.dumps({"fingerprint": fingerprint, "seconds": self.seconds[name]}))
        self.console.print(f"   [dim]{self.seconds[name]:.0f} s[/]")
        return folder

    def _fingerprint(self, inputs: Sequence[Path | str]) -> str:
        digest = hashlib.sha256(self._upstream.encode())
        for item in inputs:
            digest.update(item.read_bytes() if isinstance(item, Path) else str(item).encode())
        return digest.hexdigest()


def offramp(*arguments: str | Path, console: Console, threads: int | None = None) -> None:
    """Run an `offramp` command as a user would, showing it; a failure ends the demo with the command's own message."""
    words = [str(word) for word in arguments]
    console.print(f"   [cyan]offramp {' '.join(words)}[/]", soft_wrap=True, highlight=False)
    environment = dict(os.environ)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    code = subprocess.run([str(SCRIPT), *words], env=environment, check=False).returncode
    if code != 0:
        raise SystemExit(f"demo: `offramp {words[0]}` ended with exit code {code}; its message is above.")
