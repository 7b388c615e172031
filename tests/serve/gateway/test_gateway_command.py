"""`offramp gateway` as a process: what it says, and how it ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from offramp.common.errors import OfframpError
from offramp.serve.cli.gateway import main
from offramp.serve.http.keys import add_key

RUN = "import sys; from offramp.serve.cli.gateway import main; sys.exit(main(sys.argv[1:]))"


def test_it_answers_without_its_models_and_ends_on_sigterm(tmp_path: Path) -> None:
    add_key(tmp_path / "keys.json", "alice")
    file = tmp_path / "gateway.yaml"
    file.write_text("keys: keys.json\naccess_log: access.log\nmodels: {m: {url: 'http://127.0.0.1:9', version: '1'}}\n")
    command = [sys.executable, "-c", RUN, "-c", str(file), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = ""
            for line in process.stdout:
                said += line
                if line.startswith("Stop with"):
                    break
            base_url = re.search(r'base_url="(\S+)/v1"', said)
            assert base_url is not None, said
            assert urllib.request.urlopen(f"{base_url[1]}/health/live", timeout=20).status == 200
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(f"{base_url[1]}/health/ready", timeout=20)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert errors.endswith("Stopped.\n")
    assert "Traceback" not in errors
    assert (tmp_path / "access.log").read_text().count("\n") == 2


def test_keys_that_are_not_there_are_said(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("keys: keys.json\nmodels: {m: {url: 'http://127.0.0.1:9', version: '1'}}\n")
    with pytest.raises(OfframpError, match=r"keys\.json cannot be read .* `offramp keys add`"):
        main(["-c", str(file), "--port", "0"])
