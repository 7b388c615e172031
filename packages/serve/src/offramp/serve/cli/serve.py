"""`offramp serve`: a model behind TorchServe on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tqdm import tqdm

from offramp.common.errors import OfframpError
from offramp.serve.cli.engine_options import add_engine_options, engine_settings
from offramp.serve.model_source import default_cache, resolve_model
from offramp.serve.torchserve.archive import CHECKPOINT, archive, is_model_folder
from offramp.serve.torchserve.server import TorchServe


class _Stop(BaseException):
    """A signal asked for the end. Not an `Exception`, so that nothing on the way takes it for a fault."""


def main(argv: list[str]) -> int:
    """Runs the command with its arguments; returns when the server has been stopped."""
    parser = argparse.ArgumentParser(
        prog="offramp serve",
        description="Start TorchServe on 127.0.0.1 and answer the OpenAI API until Ctrl-C.",
    )
    parser.add_argument(
        "source", help="a checkpoint directory, a model folder of `offramp archive`, or models:/NAME@ALIAS"
    )
    parser.add_argument("--port", type=int, default=8080, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--name", help="name in the URL and in requests (default: the directory's)")
    parser.add_argument("--version", help="version in the URL (default: 1.0)")
    parser.add_argument("--run-folder", type=Path, help="where configuration and log go (default: a temporary folder)")
    parser.add_argument("--ready-timeout", type=float, default=600.0, metavar="SECONDS", help="(default: %(default)s)")
    parser.add_argument(
        "--cache", type=Path, default=default_cache(), help="where models:/ downloads go (default: %(default)s)"
    )
    add_engine_options(parser)
    options = parser.parse_args(argv)
    if not 0 < options.ready_timeout < math.inf:
        raise OfframpError(f"--ready-timeout {options.ready_timeout} must be a finite number of seconds above 0.")
    settings = engine_settings(options)
    with _signals_raise_stop():
        try:
            source = resolve_model(options.source, options.cache)
            if is_model_folder(source):
                if settings or options.name or options.version:
                    raise OfframpError(
                        f"{source} is a model folder with settings of its own; make another with `offramp archive`."
                    )
                _serve(source, options)
            else:
                # Beside the checkpoint, because weights can be hard-linked only within a file system.
                with _scratch_store(source) as store:
                    name = options.name or _name_of(options.source)
                    version = options.version or "1.0"
                    folder = archive(source, store / name, name=name, version=version, engine=settings)
                    with _faults_name(source, folder / CHECKPOINT):
                        _serve(folder, options)
        except (_Stop, KeyboardInterrupt):
            print("Stopped.", file=sys.stderr)
    return 0


def _serve(folder: Path, options: argparse.Namespace) -> None:
    """Serves a model folder until a signal comes."""
    began = time.monotonic()
    server = TorchServe(folder, port=options.port, run_folder=options.run_folder, threads=options.num_threads)
    keep_log = True
    try:
        weights = sum(file.stat().st_size for file in (folder / CHECKPOINT).glob("*.safetensors"))
        _say(f"Starting TorchServe with Java {server.java_version}, loading {weights / 1e6:,.0f} MB of weights ...")
        server.start()
        # How far the worker has come is not known here, but that it is at work can be seen.
        with tqdm(desc="Loading", bar_format="{desc} for {elapsed}", leave=False, disable=None, file=sys.stderr) as bar:
            server.wait_until_ready(options.ready_timeout, on_wait=bar.refresh)
        _say(f"Ready after {time.monotonic() - began:.1f} s: {server.name} {server.version}, log {server.log}")
        example = {"model": server.name, "prompt": "Once upon a time", "max_tokens": 32}
        print(
            f"\ncurl {server.base_url}/completions -H 'content-type: application/json' "
            f"-d {shlex.quote(json.dumps(example))}\n\n"
            f'client = openai.OpenAI(base_url="{server.base_url}", api_key="none")\n\n'
            f"metrics: {server.metrics_url}\nStop with Ctrl-C.",
            flush=True,
        )
        while server.is_running():
            time.sleep(0.5)
            if (failure := server.worker_failure()) is not None:
                _say(f"The worker has failed and is started again: {failure}")
        raise OfframpError(f"TorchServe has ended by itself; its log is {server.log}.")
    except (_Stop, KeyboardInterrupt):
        keep_log = False
        _say("Stopping ...")
        raise
    finally:
        server.stop(keep_log=keep_log)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _name_of(source: str) -> str:
    """A name for the URL: of ``models:/NAME@ALIAS`` NAME, of a path its last part."""
    last = source.rstrip("/").rpartition("/")[2] if ":/" in source else Path(source).resolve().name
    return "".join(char if char.isalnum() or char in "._-" else "-" for char in last.partition("@")[0]).strip("-.")


@contextmanager
def _scratch_store(checkpoint: Path) -> Iterator[Path]:
    try:
        store = tempfile.TemporaryDirectory(prefix=".offramp-store-", dir=checkpoint.resolve().parent)
    except OSError:  # a read-only place: then the weights are copied
        store = tempfile.TemporaryDirectory(prefix="offramp-store-")
    with store as path:
        yield Path(path)


@contextmanager
def _faults_name(source: Path, copy: Path) -> Iterator[None]:
    """Lets a fault in a checkpoint name the place that the user knows, not the copy that is gone afterwards."""
    try:
        yield
    except OfframpError as fault:
        raise OfframpError(str(fault).replace(str(copy.resolve()), str(source))) from fault


@contextmanager
def _signals_raise_stop() -> Iterator[None]:
    """SIGTERM and SIGINT end the command in order, so that no server stays behind."""

    def stop(number: int, frame: FrameType | None) -> None:
        # A second one must not interrupt the stopping.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Stop

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
