"""`offramp serve`: a model on this machine, behind TorchServe or in this process, until Ctrl-C."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from offramp.common.errors import OfframpError
from offramp.serve.cli.engine_options import add_engine_options, engine_settings
from offramp.serve.cli.stopping import Stop, signals_raise_stop
from offramp.serve.cli.watch_options import add_watch_options, watch_settings
from offramp.serve.config import EngineConfig, WatchSettings
from offramp.serve.http.installed import check_installed
from offramp.serve.http.settings import DoorSettings, make_settings, read_settings
from offramp.serve.model_source import default_cache, model_name, resolve_model
from offramp.serve.torchserve.archive import CHECKPOINT, archive, is_model_folder
from offramp.serve.torchserve.server import TorchServe


def main(argv: list[str]) -> int:
    """Runs the command with its arguments; returns when the server has been stopped."""
    parser = argparse.ArgumentParser(
        prog="offramp serve",
        description="Answer the OpenAI API on this machine until Ctrl-C.",
    )
    parser.add_argument(
        "source", help="a checkpoint directory, a model folder of `offramp archive`, or models:/NAME@ALIAS"
    )
    parser.add_argument(
        "--backend",
        choices=("torchserve", "asgi"),
        default="torchserve",
        help="a TorchServe of its own, or the engine in this process behind the gateway's door (default: %(default)s)",
    )
    parser.add_argument("--port", type=int, help="0 takes a free one (default: 8080, or what the settings say)")
    parser.add_argument(
        "-c", "--settings", type=Path, metavar="FILE", help="asgi: address, keys, TLS and limits, as of the gateway"
    )
    parser.add_argument("--name", help="name in the URL and in requests (default: the directory's)")
    parser.add_argument("--version", help="version in the URL (default: 1.0)")
    parser.add_argument(
        "--run-folder", type=Path, help="torchserve: where configuration and log go (default: a temporary folder)"
    )
    parser.add_argument(
        "--manage",
        action="store_true",
        help="torchserve: let `offramp deploy` register other versions; every request then needs one of its keys",
    )
    parser.add_argument(
        "--ready-timeout", type=float, default=600.0, metavar="SECONDS", help="torchserve (default: %(default)s)"
    )
    parser.add_argument(
        "--cache", type=Path, default=default_cache(), help="where models:/ downloads go (default: %(default)s)"
    )
    add_engine_options(parser)
    add_watch_options(parser)
    options = parser.parse_args(argv)
    if not 0 < options.ready_timeout < math.inf:
        raise OfframpError(f"--ready-timeout {options.ready_timeout} must be a finite number of seconds above 0.")
    settings, watch = engine_settings(options), watch_settings(options)
    in_process = options.backend == "asgi"
    if options.settings is not None and not in_process:
        raise OfframpError("--settings are those of --backend asgi; TorchServe stands behind `offramp gateway`.")
    if options.manage and in_process:
        raise OfframpError("--manage is for TorchServe; with --backend asgi the engine is in this process.")
    with signals_raise_stop():
        try:
            source = resolve_model(options.source, options.cache)
            if is_model_folder(source):
                if settings or watch or options.name or options.version:
                    raise OfframpError(
                        f"{source} is a model folder with settings of its own; make another with `offramp archive`."
                    )
                if in_process:
                    raise OfframpError(f"{source} is a model folder; give --backend asgi a checkpoint directory.")
                _serve(source, options)
            elif in_process:
                _serve_in_process(source, settings, watch, options)
            else:
                # Beside the checkpoint, because weights can be hard-linked only within a file system.
                with _scratch_store(source) as store:
                    name = options.name or model_name(options.source)
                    version = options.version or "1.0"
                    folder = archive(source, store / name, name=name, version=version, engine=settings, watch=watch)
                    with _faults_name(source, folder / CHECKPOINT):
                        _serve(folder, options)
        except (Stop, KeyboardInterrupt):
            print("Stopped.", file=sys.stderr)
    return 0


def _serve(folder: Path, options: argparse.Namespace) -> None:
    """Serves a model folder until a signal comes."""
    began = time.monotonic()
    port = 8080 if options.port is None else options.port
    server = TorchServe(
        folder,
        port=port,
        run_folder=options.run_folder,
        threads=options.num_threads,
        manage=options.manage,
    )
    keep_log = True
    made_for = server.version
    try:
        weights = sum(file.stat().st_size for file in (folder / CHECKPOINT).glob("*.safetensors"))
        _say(f"Starting TorchServe with Java {server.java_version}, loading {weights / 1e6:,.0f} MB of weights ...")
        server.start()
        # How far the worker has come is not known here, but that it is at work can be seen.
        with tqdm(desc="Loading", bar_format="{desc} for {elapsed}", leave=False, disable=None, file=sys.stderr) as bar:
            server.wait_until_ready(options.ready_timeout, on_wait=bar.refresh)
        _say(f"Ready after {time.monotonic() - began:.1f} s: {server.name} {server.version}, log {server.log}")
        if server.version != made_for:
            _say(f"{server.version} was deployed here before and answers again, not {made_for}.")
        print(f"{_how_to_ask(server)}\nmetrics: {server.metrics_url}\nStop with Ctrl-C.", flush=True)
        while True:
            if server.wait_for_end(0.5):
                _start_again(server, options.ready_timeout)
            elif (failure := server.worker_failure()) is not None:
                _say(f"The worker has failed and is started again: {failure}")
    except (Stop, KeyboardInterrupt):
        keep_log = False
        _say("Stopping ...")
        raise
    finally:
        server.stop(keep_log=keep_log)


def _how_to_ask(server: TorchServe) -> str:
    """What to run against the server, ready to be pasted."""
    example = {"model": server.name, "prompt": "Once upon a time", "max_tokens": 32}
    curl = f"curl {server.base_url}/completions -H 'content-type: application/json'"
    key, of_gateway = "none", ""
    if server.key_file is not None:
        key = "INFERENCE_KEY"
        curl += f" -H 'authorization: Bearer {key}'"
        file, store = shlex.quote(str(server.key_file)), shlex.quote(str(server.store))
        of_gateway = (
            f"\nofframp deploy CHECKPOINT_OR_MODELS_URI --name {server.name} --to {server.management_url} "
            f"--inference {server.inference_url} --store {store} --key-file {file}\n\n"
            f"models:  # of `offramp gateway`, whose keys last\n  {server.name}:\n    url: {server.inference_url}\n"
            f"    management: {server.management_url}\n    key_file: {server.key_file}\n\n"
            f"{key} is that of `inference` in {server.key_file}, and good for an hour:\n"
        )
    return (
        f"{of_gateway}\n{curl} -d {shlex.quote(json.dumps(example))}\n\n"
        f'client = openai.OpenAI(base_url="{server.base_url}", api_key="{key}")\n'
    )


def _start_again(server: TorchServe, timeout_s: float) -> None:
    """After TorchServe has ended by itself: killed, or out of memory.

    Raises:
        OfframpError: It ends again before it is ready. Then this command ends, for whoever supervises it to see.
    """
    began = time.monotonic()
    _say("TorchServe has ended by itself and is started again.")
    server.start()
    server.wait_until_ready(timeout_s)
    _say(f"Ready again after {time.monotonic() - began:.1f} s: {server.name} {server.version}")


def _serve_in_process(
    checkpoint: Path, engine: dict[str, Any], watch: dict[str, Any], options: argparse.Namespace
) -> None:
    check_installed()
    # Where the engine is TorchServe's, neither torch nor a web framework is needed here.
    from offramp.serve.cli.serve_in_process import serve_in_process

    name, version = options.name or model_name(options.source), options.version or "1.0"
    serve_in_process(
        checkpoint, EngineConfig(**engine), WatchSettings(**watch), _door(options), name=name, version=version
    )


def _door(options: argparse.Namespace) -> DoorSettings:
    port = {} if options.port is None else {"port": options.port}
    if options.settings is None:
        return make_settings(DoorSettings, {"port": 8080, **port}, where="offramp serve")
    settings = read_settings(options.settings, DoorSettings)
    return make_settings(DoorSettings, settings.model_dump() | port, where=str(options.settings))


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


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
