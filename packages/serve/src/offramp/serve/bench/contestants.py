"""Who is measured: the engine in its variants, transformers' `generate`, and other engines in processes of their own.

All of them answer the same question with the same thing, when each token came, and all figures are made of that.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import shlex
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from offramp.common.checkpoint import DTYPES, Checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.bench.plan import Variant, Workload
from offramp.serve.config import Dtype, EngineConfig
from offramp.serve.engine import Engine
from offramp.serve.measures.records import RECORDS_KEPT, IterationRecord
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams

TOKEN_BUDGET = 2048
"""Rows of one iteration, as vLLM's default is: long prompts are not cut finer here than there."""

_BLOCK_SIZE = 16
_ANSWER_S = 900.0


@dataclass(frozen=True)
class Trial:
    """One run over one workload.

    Attributes:
        token_times: for each sequence, seconds from the start to each of its tokens.
        exit_layers: of every token that came after `first_all_s`; empty if that is not known.
        iterations: records of the engine's iterations after `first_all_s`; empty for others.
    """

    token_times: list[list[float]]
    exit_layers: list[int] = field(default_factory=list)
    iterations: list[IterationRecord] = field(default_factory=list)

    @property
    def first_all_s(self) -> float:
        """Seconds until every sequence had a token: the end of prefill, and the begin of what counts as decoding."""
        return max(times[0] for times in self.token_times)

    @property
    def total_s(self) -> float:
        """Seconds until every sequence had all its tokens."""
        return max(times[-1] for times in self.token_times)

    @property
    def num_tokens(self) -> int:
        """All tokens generated."""
        return sum(map(len, self.token_times))

    @property
    def decode_tokens(self) -> int:
        """Tokens that came after `first_all_s`."""
        first = self.first_all_s
        return sum(moment > first for times in self.token_times for moment in times)

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second while all decode; None if nothing came after the first tokens."""
        seconds = self.total_s - self.first_all_s
        return self.decode_tokens / seconds if seconds > 0 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring tokens, of all sequences."""
        return [b - a for times in self.token_times for a, b in itertools.pairwise(times)]


class Contestant(Protocol):
    """Somebody who generates, greedily.

    Attributes:
        name: in tables.
        dtype: of weights and states.
        variant: of the engine; None for others.
        kernels: what computes the engine's layers here; None for others.
        max_batch: most sequences at once; None is no limit.
    """

    name: str
    dtype: Dtype
    variant: Variant | None
    kernels: str | None
    max_batch: int | None

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int, num_hard: int) -> Trial:
        """Generate for all prompts at once; the first `num_hard` of them at full depth."""
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


class EngineContestant:
    """The whole engine: scheduler, executor, sampler and detokeniser, iteration by iteration.

    Attributes:
        name: see `Contestant`.
        dtype: see `Contestant`.
        variant: see `Contestant`.
        kernels: see `Contestant`.
        max_batch: see `Contestant`.
    """

    max_batch: int | None = None

    def __init__(self, engine: Engine, variant: Variant, until_eos: bool) -> None:
        self.name = variant.name
        self.dtype: Dtype = variant.dtype
        self.variant: Variant | None = variant
        self.kernels: str | None = engine.kernels
        self._engine = engine
        self._exits = exit_options(variant, engine.checkpoint)
        self._eos = frozenset(engine.checkpoint.eos_token_ids) if until_eos else frozenset[int]()
        engine.check(self._request(0, (0,), 1, hard=False))

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int, num_hard: int) -> Trial:
        """See `Contestant`."""
        engine = self._engine
        requests = [
            self._request(index, prompt, new_tokens, hard=index < num_hard) for index, prompt in enumerate(prompts)
        ]
        try:
            return self._trial(requests)
        finally:
            for request in requests:  # of a trial that failed; the next contestant has the same engine
                engine.cancel(request.request_id)

    def close(self) -> None:
        """See `Contestant`; the engine is its shelf's."""

    def _trial(self, requests: Sequence[Request]) -> Trial:
        engine = self._engine
        times: list[list[float]] = [[] for _ in requests]
        late_layers: list[int] = []
        late_iterations = 0
        start = time.perf_counter()
        for request in requests:
            engine.add_request(request)
        missing = len(requests)
        while engine.has_unfinished:
            outputs = engine.step()
            now = time.perf_counter() - start
            late_iterations += not missing
            for output in outputs:
                if output.error is not None:
                    raise OfframpError(f"a request of the benchmark failed: {output.error}.")
                of_request = times[int(output.request_id)]
                if not missing:
                    late_layers += output.exit_layers
                missing -= not of_request and bool(output.new_token_ids)
                of_request += [now] * len(output.new_token_ids)
        kept = min(late_iterations, RECORDS_KEPT)
        return Trial(times, late_layers, list(engine.metrics.records)[-kept:] if kept else [])

    def _request(self, index: int, prompt: Sequence[int], new_tokens: int, hard: bool) -> Request:
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0)
        return Request(str(index), tuple(prompt), sampling, ExitOptions("full") if hard else self._exits, self._eos)


def exit_options(variant: Variant, checkpoint: Checkpoint) -> ExitOptions:
    """How deep a variant's sequences run.

    Raises:
        OfframpError: the checkpoint has no exit policy to take thresholds for.
    """
    if variant.kv_policy == "full":
        return ExitOptions("full")
    if variant.kv_policy == "static":
        return ExitOptions("static", static_layer=variant.exit_layer)
    if variant.exit_layer is not None:
        # No cosine is below -1, so this one is exceeded by every token.
        return ExitOptions(variant.kv_policy, ExitPolicy("cosine", {variant.exit_layer: -2.0}))
    if variant.threshold is None:
        return ExitOptions(variant.kv_policy)
    if checkpoint.policy is None:
        raise OfframpError("the checkpoint has no exit policy, so there is no threshold to change; give --exit-at.")
    return ExitOptions(variant.kv_policy, checkpoint.policy.with_threshold(variant.threshold, checkpoint.exits.layers))


class EngineShelf:
    """Engines, one for each set of engine settings, made when they are first needed."""

    def __init__(self, path: Path, exits: ExitConfig | None, workloads: Sequence[Workload], until_eos: bool) -> None:
        """Make an empty shelf.

        Args:
            path: of the checkpoint.
            exits: exits to declare on a plain one.
            workloads: all that the engines will have to hold.
            until_eos: sequences end at the model's end-of-sequence tokens.
        """
        self._path, self._exits, self._until_eos = path, exits, until_eos
        self._seats = max(load.batch for load in workloads)
        # One block more than each can fill: the scheduler lets nobody in who might soon have to go again.
        self._blocks = max(
            load.batch * (-(-(load.prompt_tokens + load.new_tokens) // _BLOCK_SIZE) + 1) for load in workloads
        )
        self._engines: dict[EngineConfig, Engine] = {}

    def contestant(self, variant: Variant) -> EngineContestant:
        """A variant of the engine.

        Raises:
            OfframpError: the checkpoint or the machine does not allow it.
        """
        config = EngineConfig(
            block_size=_BLOCK_SIZE,
            num_blocks=self._blocks,
            max_num_seqs=self._seats,
            max_tokens_per_iteration=max(TOKEN_BUDGET, self._seats),
            max_waiting=self._seats,
            sync_policy=variant.sync_policy,
            prefix_caching=False,  # every repetition asks the same
            kernels=variant.kernels,
            dtype=variant.dtype,
        )
        if config not in self._engines:
            self._engines[config] = Engine.from_checkpoint(self._path, config, exits=self._exits)
        return EngineContestant(self._engines[config], variant, self._until_eos)


class Transformers:
    """`generate` of transformers in this process; optionally speculating with its own first layers.

    Attributes:
        name: see `Contestant`.
        dtype: see `Contestant`.
        variant: see `Contestant`.
        kernels: see `Contestant`.
        max_batch: see `Contestant`.
    """

    variant: Variant | None = None
    kernels: str | None = None

    def __init__(self, path: Path, dtype: Dtype, until_eos: bool, assistant_layers: int | None = None) -> None:
        """Load.

        Args:
            path: of the checkpoint; its early exits are not used.
            dtype: of weights.
            until_eos: sequences end at the model's end-of-sequence tokens.
            assistant_layers: draft with this many layers (`assistant_early_exit`), one sequence at a time.
        """
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        # It warns of what it does itself with the options of `generate`, in every call.
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        loaded: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=DTYPES[dtype], local_files_only=True)
        self._model: Any = loaded.eval()
        self._until_eos, self._assistant_layers = until_eos, assistant_layers
        self.dtype: Dtype = dtype
        self.name = "transformers" if assistant_layers is None else f"transformers, drafts at {assistant_layers}"
        self.max_batch: int | None = None if assistant_layers is None else 1

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int, num_hard: int) -> Trial:
        """See `Contestant`; every sequence runs at full depth."""
        from transformers import StoppingCriteria, StoppingCriteriaList

        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        steps: list[tuple[float, int]] = []

        class Clock(StoppingCriteria):
            """Notes how many tokens there are when, and stops nobody."""

            def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
                steps.append((time.perf_counter() - start, input_ids.shape[1] - longest))
                return torch.zeros(len(input_ids), dtype=torch.bool)

        options: dict[str, Any] = {} if self._until_eos else {"min_new_tokens": new_tokens}
        if self._assistant_layers is not None:
            options["assistant_early_exit"] = self._assistant_layers
        start = time.perf_counter()
        with torch.inference_mode():
            answer = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=new_tokens,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([Clock()]),
                **options,
            )
        times: list[float] = []
        for moment, count in steps:
            times += [moment] * (count - len(times))
        return Trial([times[: self._length(row[longest:].tolist())] for row in answer])

    def close(self) -> None:
        """See `Contestant`."""
        del self._model

    def _length(self, tokens: list[int]) -> int:
        """Tokens up to the first that ends a sequence, which counts."""
        if not self._until_eos:
            return len(tokens)
        ends = self._model.generation_config.eos_token_id
        stops = set(ends if isinstance(ends, list) else [ends])
        return next((place + 1 for place, token in enumerate(tokens) if token in stops), len(tokens))


class Peer:
    """Another engine in a process of its own, which answers lines of JSON (see `benchmarks/peers/worker.py`).

    Attributes:
        name: see `Contestant`.
        dtype: see `Contestant`.
        variant: see `Contestant`.
        kernels: see `Contestant`.
        max_batch: see `Contestant`.
        what: the engine and its version, as it says.
    """

    variant: Variant | None = None
    kernels: str | None = None
    max_batch: int | None = None

    def __init__(
        self, name: str, command: str, path: Path, dtype: Dtype, workloads: Sequence[Workload], until_eos: bool
    ) -> None:
        """Start it and wait until it is ready.

        Args:
            name: in tables.
            command: of the worker, without its options.
            path: of the model.
            dtype: of weights.
            workloads: all that it will be asked.
            until_eos: sequences end at the model's end-of-sequence tokens.

        Raises:
            OfframpError: it does not start.
        """
        self.name, self._until_eos = name, until_eos
        self.dtype: Dtype = dtype
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

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int, num_hard: int) -> Trial:
        """See `Contestant`; every sequence runs at full depth."""
        question = {"prompts": [list(prompt) for prompt in prompts], "new_tokens": new_tokens}
        assert self._process.stdin is not None
        try:
            print(json.dumps({**question, "ignore_eos": not self._until_eos}), file=self._process.stdin, flush=True)
        except OSError:
            raise self._fault("does not listen any more") from None
        return Trial(self._answer()["token_times"])

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
            raise OfframpError(f"{self.name} failed: {answer['error']}.")
        return answer

    def _fault(self, what: str) -> OfframpError:
        self._process.kill()
        self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return OfframpError(f"{self.name} {what}; its last words: {lines[-1] if lines else 'none'}")
