"""A TorchServe of one's own on loopback: written into a folder, started, waited for, stopped, started again.

Several may run beside each other: each has its own configuration, ports, temporary folder and process group. What was
registered while one ran is there again in the next one of its run folder.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from offramp.common.errors import OfframpError
from offramp.serve.torchserve.archive import read_manifest
from offramp.serve.torchserve.java import find_java
from offramp.serve.torchserve.snapshots import Snapshots
from offramp.serve.torchserve.worker_report import ENVIRONMENT_VARIABLE, WorkerReport

HOST = "127.0.0.1"
MAX_REQUEST_BYTES = 4_000_000
"""Longest request body; TorchServe answers a longer one with 413 itself."""

_CONFIGURATION = "config.properties"
_OTHER_PORTS = ("management_address", "metrics_address", "grpc_inference_port", "grpc_management_port")
_STOP_TIMEOUT_S = 20.0
_UNIX_SOCKET_PATH_LIMIT = 100  # bytes; the system's own is 108, and TorchServe appends `.ts.sock.9000`

_LOG_CONFIG = """<?xml version="1.0" encoding="UTF-8"?>
<!-- By default TorchServe writes about two kilobytes for every request, the access log among it. -->
<Configuration status="WARN">
  <Appenders>
    <Console name="STDOUT" target="SYSTEM_OUT"><PatternLayout pattern="%d{ISO8601} [%-5p] %c{1} - %m%n"/></Console>
  </Appenders>
  <Loggers>
    <Logger name="ACCESS_LOG" level="off"/>
    <Logger name="TS_METRICS" level="off"/>
    <Logger name="MODEL_METRICS" level="off"/>
    <Logger name="MODEL_LOG" level="info"/>
    <Root level="warn"><AppenderRef ref="STDOUT"/></Root>
  </Loggers>
</Configuration>
"""
# A worker of TorchServe is no rank of anything, and TorchServe itself reads some of these.
_FOREIGN_VARIABLES = re.compile(
    r"TS_.*|(LOG|METRICS)_LOCATION|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
)
_LOAD_FAILED = "Load model failed"  # Java's, whatever the worker died of
_WORKER_GAVE_UP = "500 - Unknown exception"  # the worker's own, after it has said what it was
_ERROR_LINE = re.compile(r"MODEL_LOG - (?P<error>[\w.]*(?:Error|Exception|Interrupt)\b.*)")


class TorchServe:
    """One TorchServe process that serves one model folder on 127.0.0.1.

    Use it as a context manager, or call `start`, `wait_until_ready` and `stop`.

    Args:
        model_folder: A model folder, as `offramp.serve.torchserve.archive` makes it.
        port: Where to answer; 0 takes a free one.
        run_folder: Where configuration, log and model store go; None makes a temporary folder, removed by a clean
            `stop`. One that was used before gives its ports, as far as they are free, and what was registered then:
            its default version answers again, and not `model_folder` if that was taken out.
        threads: CPU threads of the worker; None takes all that this process may use.
        manage: Let other versions be registered, on the port above the one for answers if that is fixed and the other
            one free. As a handler is a program, TorchServe then wants its keys (`key_file`), for requests as well.
    """

    def __init__(
        self,
        model_folder: Path,
        *,
        port: int = 8080,
        run_folder: Path | None = None,
        threads: int | None = None,
        manage: bool = False,
    ) -> None:
        self.name, self.version = read_manifest(model_folder)
        self._model_folder = model_folder.resolve()
        self._keep_run_folder = run_folder is not None
        self._manage = manage
        self._threads = threads or len(os.sched_getaffinity(0))
        _check_installed()
        self._java = find_java()
        self.port = _claim(port)
        if run_folder is None:
            self.run_folder = Path(tempfile.mkdtemp(prefix="offramp-serve-"))
        else:
            self.run_folder = run_folder.resolve()
            self.run_folder.mkdir(parents=True, exist_ok=True)
        wanted = _ports_before(self.run_folder / _CONFIGURATION)
        if manage and port and not wanted[0]:
            wanted[0] = port + 1  # where `offramp deploy` and gateways look for it
        management, self._metrics_port, grpc_inference, grpc_management = _free_ports(wanted, taken=self.port)
        self._management_port = management
        self._grpc_ports = (grpc_inference, grpc_management)
        self._temporary: Path | None = None
        self._log_begins = 0  # bytes of the log that are of the process before
        self._process: subprocess.Popen[bytes] | None = None
        self._report = WorkerReport(self.run_folder / "worker-report.txt")

    @property
    def base_url(self) -> str:
        """What an OpenAI client is to be given as `base_url`."""
        return f"http://{HOST}:{self.port}/predictions/{self.name}/{self.version}/v1"

    @property
    def metrics_url(self) -> str:
        """Where Prometheus may read."""
        return f"http://{HOST}:{self._metrics_port}/metrics"

    @property
    def management_url(self) -> str:
        """Where versions are registered and removed."""
        return f"http://{HOST}:{self._management_port}"

    @property
    def inference_url(self) -> str:
        """Where requests go, whatever the model."""
        return f"http://{HOST}:{self.port}"

    @property
    def store(self) -> Path:
        """The model store."""
        return self.run_folder / "store"

    @property
    def key_file(self) -> Path | None:
        """Where TorchServe writes its keys, if it wants any."""
        return self.run_folder / "key_file.json" if self._manage else None

    @property
    def log(self) -> Path:
        """What TorchServe and its worker wrote."""
        return self.run_folder / "server.log"

    @property
    def java_version(self) -> int:
        """Major version of the Java that runs it."""
        return self._java.major

    def __enter__(self) -> TorchServe:
        try:
            self.start()
            self.wait_until_ready()
        except BaseException:
            self.stop(keep_log=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(keep_log=error is not None)

    def start(self) -> None:
        """Starts the process; it is not ready yet. After a process that has ended, it gets what that one had."""
        assert not self.is_running(), "started twice"
        if self._process is not None:
            self._end()
        self._temporary = Path(tempfile.mkdtemp(prefix="offramp-ts-"))
        if len(os.fsencode(self._temporary)) > _UNIX_SOCKET_PATH_LIMIT - len("/.ts.sock.9000"):
            raise OfframpError(
                f"the temporary folder {self._temporary} has too long a path for a unix socket; set TMPDIR to a "
                "shorter one."
            )
        self.store.mkdir(exist_ok=True)
        link = self.store / self.name
        link.unlink(missing_ok=True)
        link.symlink_to(self._model_folder, target_is_directory=True)
        (self.run_folder / _CONFIGURATION).write_text(self._properties(self._restore()))
        (self.run_folder / "log4j2.xml").write_text(_LOG_CONFIG)
        assert self._report.path is not None
        self._report.path.unlink(missing_ok=True)
        if self.key_file is not None:
            self.key_file.unlink(missing_ok=True)  # of the run before
        command = [sys.executable, "-m", "ts.model_server", "--start", "--foreground"]
        # Always our own configuration: a start without one would take the last snapshot's.
        command += ["--ts-config", _CONFIGURATION, "--log-config", "log4j2.xml"]
        if not self._manage:
            command += ["--ncs"]  # no snapshots
        with self.log.open("ab") as log:
            self._log_begins = log.tell()
            self._process = subprocess.Popen(
                command,
                cwd=self.run_folder,  # TorchServe puts files of its own into the current folder
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal is ours alone, and the group can be ended whole
            )

    def wait_until_ready(self, timeout_s: float = 600.0, on_wait: Callable[[], object] = lambda: None) -> None:
        """Waits until a token has really been generated.

        Args:
            timeout_s: Longest wait.
            on_wait: Called several times a second, to show that something is going on.

        Raises:
            OfframpError: The server ended, its worker could not load the model, or it took too long.
        """
        deadline = time.monotonic() + timeout_s
        while not self._worker_is_ready():
            self._raise_if_failed()
            if time.monotonic() > deadline:
                raise OfframpError(f"TorchServe was not ready after {timeout_s:g} s; its log is {self.log}.")
            on_wait()
            time.sleep(0.1)
        prompt = {"model": self.name, "prompt": [0], "max_tokens": 1, "temperature": 0}
        path = f"/predictions/{self.name}/{self.version}/v1/completions"
        try:
            status, body = self._request("inference", "POST", path, prompt, max(deadline - time.monotonic(), 1.0))
        except (OSError, http.client.HTTPException) as error:
            self._raise_if_failed()
            raise OfframpError(f"the first token never came ({error}); the server's log is {self.log}.") from error
        if status != 200:
            raise OfframpError(f"the first token was refused with {status}: {body.decode(errors='replace')[:500]}")

    def worker_failure(self) -> str | None:
        """Why the worker has failed since the last call, or since the start; None when it has not."""
        failure = self._report.read()
        if failure is not None and self._report.path is not None:
            self._report.path.unlink(missing_ok=True)
        return failure

    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def wait_for_end(self, timeout_s: float) -> bool:
        """Waits until the process has ended by itself; whether it has."""
        assert self._process is not None, "not started"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return not self.is_running()

    def stop(self, *, keep_log: bool = False) -> None:
        """Ends the server and its worker; streams that are under way are cut.

        Args:
            keep_log: Leave a temporary run folder where it is.
        """
        self._end()
        if not keep_log and not self._keep_run_folder:
            shutil.rmtree(self.run_folder, ignore_errors=True)

    def _end(self) -> None:
        """Ends all that is left of the process, and forgets it."""
        if self._process is not None:
            self._end_process(self._process)
            self._process = None
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def _restore(self) -> list[str]:
        """The folders in the model store that are to be loaded: those of before, or the one that this was made for."""
        before = Snapshots(self.run_folder / "logs" / "config").newest() if self._manage else []
        there = [one for one in before if (self.store / one.folder).is_dir()]
        default = next((one for one in there if one.name == self.name), None)
        if default is not None and default.folder != self.name:
            self.version = default.version
        # The first version of a model that is loaded is its default one.
        return [*([] if default else [self.name]), *(one.folder for one in there)]

    def _end_process(self, process: subprocess.Popen[bytes]) -> None:
        # The launcher waits for Java, so it is Java that has to be asked; the launcher alone would leave it behind.
        java = None if self._temporary is None else _read_pid(self._temporary / ".model_server.pid")
        with contextlib.suppress(ProcessLookupError):
            if java is not None and process.poll() is None:
                os.kill(java, signal.SIGTERM)
            elif process.poll() is None:
                process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _worker_is_ready(self) -> bool:
        try:
            status, body = self._request("management", "GET", f"/models/{self.name}", None, 5.0)
            workers = json.loads(body)[0]["workers"] if status == 200 else []
        except (OSError, http.client.HTTPException, ValueError, LookupError):  # the file of keys may be half-written
            return False
        return any(worker["status"] == "READY" for worker in workers)

    def _request(self, api: str, method: str, path: str, body: object, timeout_s: float) -> tuple[int, bytes]:
        port = self.port if api == "inference" else self._management_port
        headers: dict[str, str] = {}
        if self.key_file is not None:
            headers["authorization"] = f"Bearer {json.loads(self.key_file.read_text())[api]['key']}"
        return _request(port, method, path, body, headers, timeout_s)

    def _raise_if_failed(self) -> None:
        if (failure := self._report.read()) is not None:
            raise OfframpError(f"the model could not be loaded: {failure}")
        if not self.is_running():
            raise OfframpError(f"TorchServe ended while it started: {self._last_error()}; its log is {self.log}.")
        if _LOAD_FAILED in self._said():
            raise OfframpError(
                f"TorchServe's worker died while it loaded the model: {self._last_error()}; its log is {self.log}."
            )

    def _last_error(self) -> str:
        """The last line of the log that names an error of the worker's."""
        errors = [match["error"] for line in self._said().splitlines() if (match := _ERROR_LINE.search(line))]
        errors = [error for error in errors if _WORKER_GAVE_UP not in error]
        return errors[-1] if errors else "it said nothing, as when memory runs out"

    def _said(self) -> str:
        """What the process and its workers have logged."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            log.seek(self._log_begins)
            return log.read().decode(errors="replace")

    def _properties(self, folders: Sequence[str]) -> str:
        """`config.properties`; paths are relative to the run folder, so that none needs escaping."""
        settings: dict[str, Any] = {
            "inference_address": f"http://{HOST}:{self.port}",
            "management_address": f"http://{HOST}:{self._management_port}",
            "metrics_address": f"http://{HOST}:{self._metrics_port}",
            "grpc_inference_address": HOST,
            "grpc_management_address": HOST,
            "grpc_inference_port": self._grpc_ports[0],
            "grpc_management_port": self._grpc_ports[1],
            "model_store": "store",
            "load_models": ",".join(folders),
            "enable_model_api": str(self._manage).lower(),
            "allowed_urls": "file://store/.*",  # models come from the store, and from no address
            # Its keys live an hour and it answers 400 for a wrong one; without management, loopback is the boundary.
            "disable_token_authorization": str(not self._manage).lower(),
            "decode_input_request": "false",  # bodies reach us as bytes, and malformed ones are not logged
            "metrics_mode": "prometheus",
            "model_metrics_auto_detect": "true",
            "disable_system_metrics": "true",
            "max_request_size": MAX_REQUEST_BYTES,
            "vmargs": "-Xmx512m",  # Java would take a quarter of the machine's memory
        }
        return "".join(f"{key}={value}\n" for key, value in settings.items())

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not _FOREIGN_VARIABLES.fullmatch(key)}
        threads = str(self._threads)
        return {
            **kept,
            "JAVA_HOME": str(self._java.home),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)]),
            "TMPDIR": str(self._temporary),  # the pid file, which two servers must not share
            "TEMP": str(self._temporary),  # Java's: unpacked models and the workers' sockets
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",  # a checkpoint is complete; a server asks nobody else
            ENVIRONMENT_VARIABLE: str(self._report.path),
        }


def _check_installed() -> None:
    if importlib.util.find_spec("ts") is None:
        raise OfframpError("TorchServe is not installed; `pip install 'offramp-serve[torchserve]'` brings it.")


def _claim(port: int) -> int:
    """A port that can be listened on now: `port`, or a free one for 0.

    Raises:
        OfframpError: It is taken, or not ours to take.
    """
    with socket.socket() as probe:
        # As TorchServe does: connections of a server that has just ended do not hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise OfframpError(f"port {port} of {HOST} cannot be used ({error}); choose another.") from error
        return probe.getsockname()[1]


def _ports_before(configuration: Path) -> list[int]:
    """The ports that an earlier configuration gave to everything but requests; 0 for each that it does not name."""
    lines = configuration.read_text().splitlines() if configuration.exists() else []
    said = {line.partition("=")[0]: line.rpartition("=")[2].rpartition(":")[2] for line in lines}
    return [int(port) if (port := said.get(name, "")).isdecimal() else 0 for name in _OTHER_PORTS]


def _free_ports(wanted: Sequence[int], *, taken: int) -> list[int]:
    """Distinct free ports, as wanted where that is free and not 0; all are held until the last is found."""
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for want in wanted:
            if want and want not in (taken, *ports):
                with contextlib.suppress(OfframpError):
                    ports.append(_claim(want))
                    continue
            while (port := _bind_any(stack)) in (taken, *ports):
                pass
            ports.append(port)
        return ports


def _bind_any(stack: contextlib.ExitStack) -> int:
    """A free port, which stays bound until the stack is left."""
    probe = stack.enter_context(socket.socket())
    probe.bind((HOST, 0))
    return probe.getsockname()[1]


def _request(
    port: int, method: str, path: str, body: object, headers: dict[str, str], timeout_s: float
) -> tuple[int, bytes]:
    """One request to the server: status code and body."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"content-type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _read_pid(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
