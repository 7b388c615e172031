"""A real TorchServe with the real engine and a tiny random model, started by `offramp serve`."""

from __future__ import annotations

import contextlib
import http.client
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import openai
import psutil
import pytest

from helpers.tiny import tiny_checkpoint
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy

NAME = "tiny"
MAX_MODEL_LEN = 16_384
MAX_NUM_SEQS, MAX_WAITING = 8, 8
CACHE_BYTES = 5 << 20  # 640 blocks of 16 tokens
CACHE_TOKENS = 640 * 16
API_KEY = "a-key-that-must-not-be-logged"


@dataclass
class Served:
    """A running `offramp serve`."""

    base_url: str
    metrics_url: str
    run_folder: Path
    process: psutil.Process

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.base_url, api_key=API_KEY, max_retries=0, timeout=120)

    def log(self) -> str:
        return (self.run_folder / "server.log").read_text()

    def gauge(self, name: str) -> float:
        """A metric over all versions, as Prometheus reads it: no request to a model, so it calls no handler."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as response:
            text = response.read().decode()
        return sum(map(float, re.findall(rf"^{name}\{{.*\}} (\S+)$", text, re.MULTILINE)))

    def post(self, body: bytes, content_type: str = "application/json") -> tuple[int, bytes]:
        url = urlsplit(self.base_url)
        assert url.hostname is not None
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
        try:
            connection.request("POST", f"{url.path}/completions", body, {"content-type": content_type})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def announce(self, num_bytes: int) -> int:
        """The status that a body of this length gets when it is announced and never sent."""
        url = urlsplit(self.base_url)
        assert url.hostname is not None
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=20)
        try:
            connection.putrequest("POST", f"{url.path}/completions")
            connection.putheader("content-type", "application/json")
            connection.putheader("content-length", str(num_bytes))
            connection.endheaders()
            return connection.getresponse().status
        finally:
            connection.close()


def make_checkpoint(path: Path) -> Path:
    # Without an end-of-sequence token, every request runs to its max_tokens.
    return tiny_checkpoint(
        path,
        ExitConfig(layers=(1, 2)),
        ExitPolicy(measure="max_probability", thresholds={1: 0.3, 2: 0.3}),
        eos_token_id=None,
        max_position_embeddings=MAX_MODEL_LEN,
    )


@contextlib.contextmanager
def started_torchserve(folder: Path, *options: str) -> Iterator[Served]:
    """Starts it in a folder, with further options, and sees that nothing of it is left behind in the end."""
    command = [sys.executable, "-m", "offramp.common.cli", "serve", str(make_checkpoint(folder / "checkpoint"))]
    command += ["--port", "0", "--name", NAME, "--run-folder", str(folder / "run"), "--num-threads", "1"]
    command += ["--kv-cache-bytes", str(CACHE_BYTES), "--max-num-seqs", str(MAX_NUM_SEQS)]
    command += ["--max-waiting", str(MAX_WAITING), *options]
    with (folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("Stop with"):
                break
        else:
            pytest.fail(f"offramp serve did not start: {(folder / 'stderr').read_text()}")
        base_url = re.search(r'base_url="(\S+)"', said)
        metrics_url = re.search(r"metrics: (\S+)", said)
        assert base_url
        assert metrics_url
        assert f"curl {base_url[1]}/completions" in said
        yield Served(base_url[1], metrics_url[1], folder / "run", psutil.Process(process.pid))
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) >= 3, "the launcher, Java and the worker"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, (folder / "stderr").read_text()
        _, left = psutil.wait_procs(started, timeout=10)
        assert left == [], "a process of the server was left behind"
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(metrics_url[1], timeout=5)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
