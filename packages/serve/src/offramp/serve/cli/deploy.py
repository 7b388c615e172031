"""`offramp deploy`: a checkpoint directory or a registered model becomes what a TorchServe answers with."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

from offramp.common.errors import OfframpError
from offramp.serve.cli.engine_options import add_engine_options, engine_settings
from offramp.serve.cli.stopping import Stop, signals_raise_stop
from offramp.serve.cli.watch_options import add_watch_options, watch_settings
from offramp.serve.deploy.archives import ArchiveStore
from offramp.serve.deploy.client import TorchServeClient, check_url
from offramp.serve.deploy.keys import KeyFile
from offramp.serve.deploy.retirement import Retirement
from offramp.serve.deploy.rollout import Event, roll_out
from offramp.serve.deploy.watch import Wanted, Watch
from offramp.serve.model_source import default_cache, is_uri, look_up, model_name, resolve_model

_ALIAS = re.compile(r"(?P<model>\w+:/[^/@]+)@[^/@]+")
_SECONDS = ("ready_timeout", "drain_timeout", "drain_grace", "interval")


def main(argv: list[str]) -> int:
    """Runs the command with its arguments; with `--watch` it returns when a signal comes."""
    options = _parser().parse_args(argv)
    _check(options)
    name = options.name or model_name(options.source)
    keys = None if options.key_file is None else KeyFile(options.key_file)
    client = TorchServeClient(options.to, options.inference or _inference_of(options.to), keys)
    store = ArchiveStore(options.store)
    report = _say_json if options.json else _say
    retirement = Retirement(name, client, store, report, keep=options.keep, grace_s=options.drain_grace)

    def deploy(uri: str, version: str | None) -> None:
        with store.deploying(name):
            checkpoint = resolve_model(uri, options.cache)
            archive = store.place(
                checkpoint, name=name, version=version, engine=engine_settings(options), watch=watch_settings(options)
            )
            roll_out(archive, client, store, report, timeout_s=options.ready_timeout)

    try:
        with signals_raise_stop():
            if options.watch:
                report(Event("watching", name, None, f"following {options.source}, every {options.interval:g} s"))
                Watch(
                    name,
                    lambda: Wanted(*look_up(options.source)),
                    # By number, because the alias may move while the archive is made.
                    lambda wanted: deploy(f"{_model_of(options.source)}/{wanted.version}", wanted.version),
                    retirement.look,
                    client,
                    report,
                ).run(options.interval)
            elif is_uri(options.source):
                version, _ = look_up(options.source)
                deploy(f"{_model_of(options.source)}/{version}", options.version or version)
            else:
                deploy(options.source, options.version)
            retirement.finish(options.drain_timeout)
    except (Stop, KeyboardInterrupt):
        report(Event("stopped", name, None, "stopped"))
        return 0 if options.watch else 130
    finally:
        client.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="offramp deploy",
        description="Put a model in place at a TorchServe: registered, warmed, made the default; the version before "
        "answers until then and is removed when it has drained.",
    )
    parser.add_argument("source", help="a checkpoint directory, models:/NAME@ALIAS or models:/NAME/VERSION")
    parser.add_argument("--to", required=True, metavar="URL", help="TorchServe's management address")
    parser.add_argument(
        "--inference", metavar="URL", help="its inference address (default: one port below the management address)"
    )
    parser.add_argument("--store", required=True, type=Path, metavar="DIR", help="its model_store")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="its key_file.json, where it wants keys")
    parser.add_argument("--name", help="name in the URL and in requests (default: the model's or the directory's)")
    parser.add_argument(
        "--version", help="version in the URL (default: the registered version's, or a hash of directory and settings)"
    )
    parser.add_argument(
        "--keep", type=int, default=0, metavar="N", help="earlier versions that stay registered (default: %(default)s)"
    )
    parser.add_argument("--watch", action="store_true", help="follow the alias until Ctrl-C or SIGTERM")
    for name, default, what in (
        ("interval", 10.0, "between two looks of --watch"),
        ("ready-timeout", 600.0, "to load and warm a version"),
        ("drain-grace", 5.0, "for which an earlier version must be without a request before it is removed"),
        ("drain-timeout", 600.0, "after which one that still has some is left there"),
    ):
        parser.add_argument(
            f"--{name}", type=float, default=default, metavar="SECONDS", help=f"{what} (default: %(default)s)"
        )
    parser.add_argument("--json", action="store_true", help="print events as JSON, one a line")
    parser.add_argument(
        "--cache", type=Path, default=default_cache(), help="where models:/ downloads go (default: %(default)s)"
    )
    add_engine_options(parser)
    add_watch_options(parser)
    return parser


def _check(options: argparse.Namespace) -> None:
    for name in _SECONDS:
        value = getattr(options, name)
        if not 0 < value < math.inf:
            raise OfframpError(f"--{name.replace('_', '-')} {value} must be a finite number of seconds above 0.")
    if options.keep < 0:
        raise OfframpError(f"--keep {options.keep} must be at least 0.")
    if options.watch and _ALIAS.fullmatch(options.source) is None:
        raise OfframpError(f"--watch follows an alias, and {options.source!r} names none; write models:/NAME@ALIAS.")
    if options.watch and options.version:
        raise OfframpError("--watch takes the versions of the registry, so it goes without --version.")


def _model_of(uri: str) -> str:
    """``models:/NAME`` of a URI."""
    return uri.partition("@")[0] if "@" in uri else uri.rpartition("/")[0]


def _inference_of(management: str) -> str:
    """By TorchServe's own habit: 8080 for requests, 8081 for their management.

    Raises:
        OfframpError: The address has no port.
    """
    port = urlsplit(check_url(management)).port
    if port is None:
        raise OfframpError(f"{management} names no port; give the inference address with --inference.")
    return f"{management.rstrip('/').removesuffix(f':{port}')}:{port - 1}"


def _say(event: Event) -> None:
    print(f"{datetime.now():%H:%M:%S} {event.model}: {event.message}", flush=True)


def _say_json(event: Event) -> None:
    moment = datetime.now().astimezone().isoformat(timespec="milliseconds")
    print(json.dumps({"time": moment, **dataclasses.asdict(event)}), flush=True)
