"""kill -9 of the workers, of TorchServe and of the gateway, with clients under way.

Everybody is told within seconds, all comes back by itself, and what was registered is served again.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.sinks import eventually
from helpers.tiny import tiny_checkpoint
from helpers.torchserve import MAX_MODEL_LEN, NAME, Served, started_torchserve
from offramp.common.cli import main
from offramp.common.exits.config import ExitConfig
from offramp.serve.deploy.client import TorchServeClient
from offramp.serve.deploy.keys import KeyFile
from offramp.serve.http.keys import add_key

pytestmark = pytest.mark.slow

log = logging.getLogger(__name__)

TOLD_WITHIN_S = 5.0
BACK_WITHIN_S = 120.0
"""Loading torch takes most of it, on a machine that has other things to do."""


@dataclass
class Gateway:
    """`offramp gateway` as a command of its own, which may be killed and started again."""

    settings: Path
    key: str
    port: int = 0

    def start(self) -> None:
        command = [sys.executable, "-m", "offramp.common.cli", "gateway", "-c", str(self.settings)]
        with (self.settings.parent / "stderr").open("ab") as errors:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)], stdout=subprocess.PIPE, stderr=errors, text=True
            )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if match := re.search(r'base_url="http://127.0.0.1:(\d+)/v1"', line):
                self.port = int(match[1])
            if line.startswith("Stop with"):
                return
        pytest.fail((self.settings.parent / "stderr").read_text())

    def ask(self, **fields: Any) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a completion; an error of `http.client` where there is none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=BACK_WITHIN_S)
        try:
            body = json.dumps({"model": NAME, "prompt": [5, 6], "temperature": 0, **fields})
            head = {"content-type": "application/json", "authorization": f"Bearer {self.key}"}
            connection.request("POST", "/v1/completions", body, head)
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def answer(self) -> tuple[str, str]:
        """Version and text of a short answer; both empty where there is none."""
        try:
            status, headers, body = self.ask(max_tokens=8)
        except (OSError, http.client.HTTPException):
            return "", ""
        return (headers["offramp-version"], json.loads(body)["choices"][0]["text"]) if status == 200 else ("", "")


@dataclass
class Client:
    """Asks for a long answer in a thread of its own.

    Attributes:
        told: What it was told in the end: status and code of the error, or the name of the exception.
        ended: When, in seconds of `time.monotonic`.
    """

    gateway: Gateway
    stream: bool
    told: tuple[int, str] | str = "nothing"
    ended: float = 0.0
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            status, _, body = self.gateway.ask(max_tokens=10_000, stream=self.stream)
            if status == 200:
                *_, last, done, empty = body.split(b"\n\n")
                assert (done, empty) == (b"data: [DONE]", b"")
                body = last.removeprefix(b"data: ")
            self.told = status, json.loads(body)["error"]["code"]
        except Exception as error:
            self.told = type(error).__name__
        self.ended = time.monotonic()


@dataclass
class Door:
    """Two versions of a model in a TorchServe, the second one deployed, and a gateway in front."""

    served: Served
    gateway: Gateway
    management: TorchServeClient

    def kill(self, processes: list[psutil.Process]) -> dict[bool, object]:
        """Kills processes while a stream and a whole answer are under way; what each was told."""
        clients = [Client(self.gateway, stream) for stream in (True, False)]
        eventually(lambda: self.served.gauge("offramp_running_requests") == 2, 30, every_s=0.05)
        killed = time.monotonic()
        for process in processes:
            process.kill()
        for client in clients:
            client.thread.join(60)
            assert not client.thread.is_alive(), "a client was left hanging"
            log.info("told %s after %.2f s", client.told, client.ended - killed)
            assert client.ended - killed < TOLD_WITHIN_S
        return {client.stream: client.told for client in clients}

    def comes_back(self, answer: tuple[str, str]) -> None:
        began = time.monotonic()
        eventually(lambda: self.gateway.answer() == answer, BACK_WITHIN_S, every_s=0.1)
        log.info("an answer again after %.2f s", time.monotonic() - began)


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    folder = tmp_path_factory.mktemp("kills")
    with started_torchserve(folder, "--manage") as served, contextlib.ExitStack() as stack:
        run, inference = served.run_folder, served.base_url.partition("/predictions")[0]
        [address] = re.findall(r"^management_address=(\S+)$", (run / "config.properties").read_text(), re.MULTILINE)
        second = tiny_checkpoint(
            folder / "second", ExitConfig((1, 2)), seed=1, eos_token_id=None, max_position_embeddings=MAX_MODEL_LEN
        )
        command = ["deploy", str(second), "--name", NAME, "--version", "2", "--to", address, "--inference", inference]
        command += ["--store", str(run / "store"), "--key-file", str(run / "key_file.json"), "--keep", "1"]
        assert main([*command, "--num-threads", "1", "--cache", str(folder / "cache")]) == 0
        model = {"url": inference, "management": address, "key_file": str(run / "key_file.json")}
        settings = {"keys": "keys.json", "models": {NAME: model}, "poll_s": 0.2}
        (folder / "gateway.yaml").write_text(json.dumps(settings))  # JSON is YAML
        gateway = Gateway(folder / "gateway.yaml", add_key(folder / "keys.json", "test"))
        gateway.start()
        stack.callback(lambda: (gateway.process.kill(), gateway.process.wait()))
        management = TorchServeClient(address, inference, KeyFile(run / "key_file.json"))
        stack.callback(management.close)
        eventually(lambda: gateway.answer()[0] == "2", 30, every_s=0.1)
        yield Door(served, gateway, management)


def test_killed_workers_are_started_again(door: Door) -> None:
    answer = door.gateway.answer()
    children = door.served.process.children(recursive=True)
    workers = [child for child in children if any("model_service_worker" in part for part in child.cmdline())]
    assert len(workers) == 2
    told = door.kill(workers)
    assert told == {True: (200, "server_gone"), False: (503, "server_gone")}
    door.comes_back(answer)


def test_a_killed_torchserve_comes_back_with_all_that_was_registered(
    door: Door,
) -> None:
    answer, versions = door.gateway.answer(), door.management.versions(NAME)
    assert sorted(one.version for one in versions) == ["1.0", "2"]
    [java] = [child for child in door.served.process.children(recursive=True) if child.name() == "java"]
    told = door.kill([java])
    assert told == {True: (200, "server_gone"), False: (503, "server_gone")}
    door.comes_back(answer)
    eventually(lambda: all(one.ready for one in door.management.versions(NAME)), BACK_WITHIN_S, every_s=0.2)
    assert {(one.version, one.url) for one in door.management.versions(NAME)} == {
        (one.version, one.url) for one in versions
    }
    status, headers, _ = door.gateway.ask(model=f"{NAME}@1.0", max_tokens=1)
    assert (status, headers["offramp-version"]) == (200, "1.0")


def test_a_killed_gateway_leaves_nothing_running_and_another_answers_at_once(
    door: Door,
) -> None:
    answer = door.gateway.answer()
    told = door.kill([psutil.Process(door.gateway.process.pid)])
    assert told == {True: "IncompleteRead", False: "RemoteDisconnected"}
    door.gateway.process.wait()
    # Ten thousand tokens take much longer.
    eventually(lambda: door.served.gauge("offramp_running_requests") == 0, 20, every_s=0.05)
    door.gateway.start()
    door.comes_back(answer)
