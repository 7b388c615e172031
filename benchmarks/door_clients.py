"""Clients of OpenAI's API as they come from PyPI at the whole door, and what each of them met.

    python -m benchmarks.door_clients DIR --vllm build/bench/peers/vllm/bin/vllm

The official `openai` client, lm-eval (both of its OpenAI models, loglikelihood tasks included, on tasks that need no
hub), `vllm bench serve` and schemathesis ask a door that is opened by the commands that a user would give: TorchServe
behind the gateway, and the engine in the server's process. Nothing about them is changed. The table counts requests and
statuses in the door's access log; the clients' own words are in the folder of results. What several backends were asked
alike they must have answered alike. Exit code 1 says that a client found a fault, or that there was a 5xx.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.door.client_commands import Ran, lm_eval, schemathesis, vllm_bench
from benchmarks.door.openai_client import OpenAIClient
from benchmarks.door.servers import BACKENDS, Door
from transformers import AutoTokenizer

MODEL = "asked"
CLIENTS = ("openai", "lm-eval", "vllm", "schemathesis")
ENGINE = ("--max-model-len", "512", "--max-num-seqs", "16", "--num-threads", "1")
"""A short context, so that nobody who asks for all of it waits long."""

LOG_SETTLES_S = 1.0
NEAR = 1e-3
"""Of figures that two backends give: sums of log-probabilities in float32."""


@dataclass
class Row:
    """What one client met at one backend.

    Attributes:
        backend: Whom it asked.
        client: Who asked.
        what: It did, part by part.
        seconds: That took.
        statuses: How many requests got each status, as the access log has it.
        faults: What was wrong, in the client's words.
        figures: What the client found out.
    """

    backend: str
    client: str
    what: list[str]
    seconds: float
    statuses: dict[int, int]
    faults: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def of_the_server(self) -> int:
        """Requests that the server has failed."""
        return sum(count for status, count in self.statuses.items() if status >= 500)

    def line(self) -> str:
        """As Markdown."""
        statuses = ", ".join(f"{count} × {status}" for status, count in sorted(self.statuses.items()))
        cells = (self.client, self.backend, sum(self.statuses.values()), statuses, self.of_the_server, len(self.faults))
        return f"| {' | '.join(str(cell) for cell in cells)} |"


HEAD = "| client | backend | requests | statuses | 5xx | faults |\n|---|---|---|---|---|---|"


def ask(client: str, door: Door, folder: Path, options: argparse.Namespace) -> list[Ran]:
    """Has one client ask."""
    if client == "openai":
        end_token: int = AutoTokenizer.from_pretrained(str(options.directory)).eos_token_id
        url = f"http://127.0.0.1:{door.port}/v1"
        tried, faults = OpenAIClient(url, door.key, door.model, end_token).run()
        return [Ran(", ".join(tried), faults)]
    started: dict[str, Callable[[], list[Ran]]] = {
        "lm-eval": lambda: lm_eval(
            _command(options.lm_eval), door, options.directory, folder, documents=options.documents
        ),
        "vllm": lambda: vllm_bench(_command(options.vllm), door, options.directory, folder, requests=options.requests),
        "schemathesis": lambda: schemathesis(
            _command(options.schemathesis),
            door,
            folder,
            vocabulary=json.loads((options.directory / "config.json").read_text())["vocab_size"],
            cases=options.cases,
            seed=options.seed,
        ),
    }
    return started[client]()


def _command(given: str) -> list[str]:
    """The parts of a command that can be called from any folder."""
    first, *more = shlex.split(given)
    found = shutil.which(first)
    if found is None:
        raise SystemExit(f"{first} is no command")
    return [str(Path(found).absolute()), *more]


def visit(client: str, backend: str, door: Door, folder: Path, options: argparse.Namespace) -> Row:
    """Has one client ask, and reads in the access log what it was answered."""
    assert door.access_log is not None
    before = door.access_log.stat().st_size if door.access_log.exists() else 0
    began = time.monotonic()
    done = ask(client, door, folder, options)
    seconds = time.monotonic() - began
    time.sleep(LOG_SETTLES_S)
    with door.access_log.open("rb") as log:
        log.seek(before)
        statuses = Counter[int](json.loads(line).get("status", 0) for line in log)
    row = Row(backend, client, [ran.what for ran in done], seconds, dict(statuses))
    for ran in done:
        row.faults += ran.faults
        row.figures |= {f"{ran.what}: {name}": value for name, value in ran.figures.items()}
    return row


def differences(rows: Sequence[Row]) -> list[str]:
    """Where backends that were asked alike gave different figures."""
    faults: list[str] = []
    first: dict[tuple[str, str], Row] = {}
    for row in rows:
        for name, value in row.figures.items():
            other = first.setdefault((row.client, name), row)
            if not math.isclose(other.figures[name], value, rel_tol=NEAR, abs_tol=NEAR):
                faults.append(
                    f"{row.client}: {name} is {value:g} at {row.backend}, {other.figures[name]:g} at {other.backend}"
                )
    return faults


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="a checkpoint directory with a tokenizer and a chat template")
    parser.add_argument("--backend", action="append", choices=sorted(BACKENDS), help="(default: all)")
    parser.add_argument(
        "--client", action="append", choices=CLIENTS, help="(default: all for which there is a command)"
    )
    parser.add_argument("--lm-eval", default=f"{sys.executable} -m lm_eval", help="command (default: %(default)s)")
    parser.add_argument("--vllm", help="command; without one it does not take part")
    parser.add_argument(
        "--schemathesis", default=f"{sys.executable} -m schemathesis.cli", help="command (default: %(default)s)"
    )
    parser.add_argument("--cases", type=int, default=10_000, help="of schemathesis (default: %(default)d)")
    parser.add_argument("--requests", type=int, default=64, help="of each vllm bench (default: %(default)d)")
    parser.add_argument("--documents", type=int, default=40, help="of each of lm-eval's tasks (default: %(default)d)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/bench/clients"), help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    clients = options.client or [client for client in CLIENTS if client != "vllm" or options.vllm]
    if "vllm" in clients and not options.vllm:
        parser.error("--client vllm needs --vllm COMMAND")
    if options.out.exists():
        parser.error(f"{options.out} is there already; remove it, or choose another folder")
    rows: list[Row] = []
    for backend in options.backend or sorted(BACKENDS):
        folder = options.out / backend
        with BACKENDS[backend](folder / "door", options.directory, ENGINE, model=MODEL) as door:
            for client in clients:
                rows.append(visit(client, backend, door, folder / client, options))
                print(rows[-1].line(), flush=True)
                for fault in rows[-1].faults:
                    print(f"    {fault}", flush=True)
    different = differences(rows)
    table = "\n".join([HEAD, *(row.line() for row in sorted(rows, key=lambda row: CLIENTS.index(row.client)))])
    (options.out / "clients.md").write_text(table + "\n")
    (options.out / "clients.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(f"\n{table}")
    for fault in different:
        print(fault)
    return 1 if different or any(row.faults or row.of_the_server for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
