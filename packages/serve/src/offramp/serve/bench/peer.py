"""Another engine as a contestant, in a process of its own."""

from __future__ import annotations

import json
import os
import select
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from offramp.common.errors import OfframpError
from offramp.serve.bench.contestants import Identity
from offramp.serve.bench.plan import Workload
from offramp.serve.bench.trial import Question, Trial

_ANSWER_S = 900.0


class Peer:
    """Another engine in a process of its own, which answers lines of JSON (see `benchmarks/peers/worker.py`).

    Attributes:
        who: see `Identity`.
        what: the engine and its version, as it says.
    """

    def __init__(self, name: str, command: str, path: Path, dtype: str, workloads: Sequence[Workload]) -> None:
        """Start it and wait until it is ready.

        Args:
            name: in tables.
            command: of the worker, without its options.
            path: of the model.
            dtype: of weights.
            workloads: all that it will be asked.

        Raises:
            OfframpError: it does not start.
        """
        self.who = Identity(name, dtype, own_process=True)
        options = {
            "--model": str(path),
            "--dtype": dtype,
            "--threads": str(torch.get_num_threads()),
            "--max-batch": str(max(load.batch for load in workloads)),
            "--max-tokens": str(max(load.prompt_tokens + load.new_tokens for load in workloads)),
        }
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (lives as long as the process)
        try:
            self._process = subprocess.Popen(
                [*shlex.split(command), *(word for pair in options.items() for word in pair)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                bufsize=1,
                # Its libraries must not be told how this process sets up its threads.
                env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            )
        except OSError as fault:
            raise OfframpError(f"{name} cannot be started: {fault}.") from None
        self.what = str(self._answer()["ready"])

    def run(self, question: Question) -> Trial:
        """See `Contestant`; every sequence runs at full depth."""
        asked = {
            "prompts": [list(prompt) for prompt in question.prompts],
            "new_tokens": question.new_tokens,
            "ignore_eos": not question.until_eos,
            "in_flight": question.in_flight,
        }
        assert self._process.stdin is not None
        try:
            print(json.dumps(asked), file=self._process.stdin, flush=True)
        except OSError:
            raise self._fault("does not listen any more") from None
        answer = self._answer()
        return Trial(answer["token_times"], answer["start_times"], question.in_flight if question.closed_loop else None)

    def close(self) -> None:
        """See `Contestant`."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _ANSWER_S)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise self._fault("has ended" if ready else f"has said nothing for {_ANSWER_S:g} s")
        answer = json.loads(line)
        if "error" in answer:
            raise OfframpError(f"{self.who.name} failed: {answer['error']}.")
        return answer

    def _fault(self, what: str) -> OfframpError:
        self._process.kill()
        self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return OfframpError(f"{self.who.name} {what}; its last words: {lines[-1] if lines else 'none'}")
