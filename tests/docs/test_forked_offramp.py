"""The quick `offramp` of tests is in every other respect the one that is installed."""

from __future__ import annotations

import select
import subprocess
import time
from pathlib import Path

import pytest


@pytest.mark.slow
def test_it_has_streams_and_exit_codes(quick_offramp: Path) -> None:
    done = subprocess.run([quick_offramp, "nonsense"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "unknown command 'nonsense'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_signals_reach_the_command(how: str, quick_offramp: Path, tmp_path: Path) -> None:
    command = [quick_offramp, "generate", tmp_path]  # waits for its prompt, which never comes
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as asked:
        assert asked.stdout is not None
        time.sleep(1)
        assert asked.poll() is None
        getattr(asked, how)()
        ended, _, _ = select.select([asked.stdout], [], [], 60)
        assert ended, "the command still has its end of the pipe"
        assert asked.stdout.read() == b""
        # On a machine so busy that the command was not yet begun, the signal ends who asked for it.
        assert asked.wait(60) in ((-9,) if how == "kill" else (128 + 15, -15))
