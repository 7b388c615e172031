"""`offramp gateway`: the OpenAI API at one address, for every model and version of TorchServe behind it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from offramp.serve.cli.how_to_ask import how_to_ask
from offramp.serve.cli.stopping import Stop, signals_raise_stop
from offramp.serve.gateway.settings import GatewaySettings
from offramp.serve.http.installed import check_installed
from offramp.serve.http.settings import make_settings, read_settings


def main(argv: list[str]) -> int:
    """Runs the command with its arguments; returns when it has been stopped."""
    parser = argparse.ArgumentParser(
        prog="offramp gateway", description="Answer the OpenAI API for the models of TorchServe, until Ctrl-C."
    )
    parser.add_argument("-c", "--settings", type=Path, required=True, metavar="FILE", help="YAML; see docs/gateway.md")
    parser.add_argument("--port", type=int, help="0 takes a free one (default: what the settings say)")
    options = parser.parse_args(argv)
    check_installed()
    settings = read_settings(options.settings, GatewaySettings)
    if options.port is not None:
        given = settings.model_dump() | {"port": options.port}
        settings = make_settings(GatewaySettings, given, where=str(options.settings))
    # Only now: --help needs no web framework.
    from offramp.serve.gateway.torchserve_backend import TorchServeBackend
    from offramp.serve.http.door import application
    from offramp.serve.http.server import Server, log_to

    log_to(settings)
    backend = TorchServeBackend(settings)
    server = Server(
        application(backend, settings),
        settings,
        on_ready=lambda: how_to_ask(server.url, settings, next(iter(settings.models))),
    )
    with signals_raise_stop():
        try:
            server.serve_forever()
        except (Stop, KeyboardInterrupt):
            print("Stopped.", file=sys.stderr)
    return 0
