"""The commands that open a door on this machine, started and stopped: each door is what a user would have."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from offramp.serve.http.keys import add_key

STOP_TIMEOUT_S = 60.0
_ACCESS_LOG = "access.log"


@dataclass(frozen=True)
class Door:
    """An open door.

    Attributes:
        port: On 127.0.0.1.
        key: That opens it.
        model: Name of the model behind it.
        commands: The processes that were started for it, by name; they may have children.
        metrics_url: Where TorchServe tells how the engine is, if it is there.
        access_log: A line of JSON for each request.
    """

    port: int
    key: str
    model: str
    commands: dict[str, int]
    metrics_url: str | None = None
    access_log: Path | None = None

    def processes(self) -> dict[str, psutil.Process]:
        """All processes of it by a name that says what they do."""
        found: dict[str, psutil.Process] = {}
        for name, pid in self.commands.items():
            found[name] = psutil.Process(pid)
            for child in found[name].children(recursive=True):
                found[_name(child)] = child
        return found


@contextlib.contextmanager
def torchserve(folder: Path, checkpoint: Path, engine: Sequence[str], *, model: str) -> Iterator[Door]:
    """`offramp serve` and `offramp gateway`; `engine` are options of the engine."""
    folder.mkdir(parents=True)
    options = ["--port", "0", "--name", model, "--run-folder", str(folder / "run"), *engine]
    with _command(folder, "serve", [str(checkpoint), *options]) as (server, said):
        [base_url] = re.findall(r'base_url="(\S+)"', said)
        [metrics_url] = re.findall(r"metrics: (\S+)", said)
        url = base_url.partition("/predictions")[0]
        key = _settings(folder, {"models": {model: {"url": url, "version": "1.0"}}})
        with _command(folder, "gateway", ["-c", str(folder / "door.yaml")]) as (gateway, said):
            commands = {"offramp serve": server, "gateway": gateway}
            yield Door(_port(said), key, model, commands, metrics_url, folder / _ACCESS_LOG)


@contextlib.contextmanager
def in_process(folder: Path, checkpoint: Path, engine: Sequence[str], *, model: str) -> Iterator[Door]:
    """`offramp serve --backend asgi`; `engine` are options of the engine."""
    folder.mkdir(parents=True)
    key = _settings(folder, {})
    options = [str(checkpoint), "--backend", "asgi", "-c", str(folder / "door.yaml"), "--name", model, *engine]
    with _command(folder, "serve", options) as (server, said):
        yield Door(_port(said), key, model, {"door and engine": server}, access_log=folder / _ACCESS_LOG)


BACKENDS = {"torchserve": torchserve, "asgi": in_process}


def _settings(folder: Path, more: dict[str, object]) -> str:
    """Writes `door.yaml`; gives a key."""
    settings = {"port": 0, "keys": "keys.json", "access_log": _ACCESS_LOG, **more}
    (folder / "door.yaml").write_text(json.dumps(settings))  # JSON is YAML
    return add_key(folder / "keys.json", "benchmark")


def _port(said: str) -> int:
    [port] = re.findall(r'base_url="http://127.0.0.1:(\d+)/v1"', said)
    return int(port)


@contextlib.contextmanager
def _command(folder: Path, name: str, options: list[str]) -> Iterator[tuple[int, str]]:
    """A command of Offramp's that runs until a signal: its process id, and what it has said when it is ready."""
    with (folder / f"{name}.stderr").open("wb") as errors:
        command = [sys.executable, "-m", "offramp.common.cli", name, *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("Stop with"):
                break
        else:
            raise RuntimeError((folder / f"{name}.stderr").read_text())
        yield process.pid, said
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _name(process: psutil.Process) -> str:
    if process.name() == "java":
        return "java"
    return "worker" if any("model_service_worker" in part for part in process.cmdline()) else "launcher"
