"""`offramp keys`: who may ask, in a file that holds no secret."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from offramp.serve.http.keys import KeyRing, add_key, remove_key


def main(argv: list[str]) -> int:
    """Runs the command with its arguments."""
    parser = argparse.ArgumentParser(
        prog="offramp keys", description="Make API keys for `offramp gateway` and `offramp serve --backend asgi`."
    )
    actions = parser.add_subparsers(dest="action", required=True)
    add = actions.add_parser("add", help="make a key, print it once, and keep its hash in the file")
    add.add_argument("file", type=Path, help="made if there is none")
    add.add_argument("name", help="whose it is; for the access log")
    add.add_argument("--requests-per-minute", type=int, metavar="N", help="(default: no limit)")
    add.add_argument("--max-concurrent", type=int, metavar="N", help="requests at the same time (default: no limit)")
    add.add_argument(
        "--use", choices=("api", "metrics"), default="api", help="the API, or /metrics alone (default: %(default)s)"
    )
    remove = actions.add_parser("remove", help="take a key out; servers refuse it a second later")
    remove.add_argument("file", type=Path)
    remove.add_argument("name")
    show = actions.add_parser("list", help="names and limits")
    show.add_argument("file", type=Path)
    options = parser.parse_args(argv)
    if options.action == "add":
        secret = add_key(
            options.file,
            options.name,
            use=options.use,
            requests_per_minute=options.requests_per_minute,
            max_concurrent=options.max_concurrent,
        )
        print("This key is shown once and kept nowhere:", file=sys.stderr)
        print(secret)
    elif options.action == "remove":
        remove_key(options.file, options.name)
    else:
        for key in KeyRing.read(options.file).keys:
            limits = ["/metrics alone"] if key.use == "metrics" else []
            limits += [f"{key.requests_per_minute} requests a minute"] if key.requests_per_minute else []
            limits += [f"{key.max_concurrent} at the same time"] if key.max_concurrent else []
            print(f"{key.name}\t{key.created or ''}\t{', '.join(limits) or 'no limit'}")
    return 0
