"""The engine as a contestant: scheduler, executor, sampler and detokeniser, iteration by iteration."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offramp.common.checkpoint import AnyCheckpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.bench.contestants import Identity
from offramp.serve.bench.plan import Fields, Head, Variant, Workload
from offramp.serve.bench.trial import Question, Trial
from offramp.serve.config import EngineConfig
from offramp.serve.devices import choose_device
from offramp.serve.engine import Engine, max_model_len
from offramp.serve.execution.kv_policy import check_exits
from offramp.serve.measures.records import IterationRecord
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request, prompt_and_source
from offramp.serve.request.sampling_params import SamplingParams

TOKEN_BUDGET = 2048
"""Rows of one iteration, as vLLM's default is: long prompts are not cut finer here than there."""

_BLOCK_SIZE = 16

_CUDA_BLOCK_SIZE = 256
"""Blocks that FlashAttention takes."""


class EngineContestant:
    """The whole engine in one of its variants.

    Attributes:
        who: see `Identity`.
    """

    def __init__(self, engine: Engine, variant: Variant) -> None:
        self.who = Identity(variant.name, engine.config.dtype, variant, engine.kernels)
        self._engine = engine
        self._exits = exit_options(variant, engine.checkpoint)
        engine.check(self._request(0, Question([(0,)], 1, 1)))

    def run(self, question: Question) -> Trial:
        """See `Contestant`."""
        requests = [self._request(index, question) for index in range(len(question.prompts))]
        try:
            return self._trial(requests, question.in_flight if question.closed_loop else None)
        finally:
            for request in requests:  # of a trial that failed; the next contestant has the same engine
                self._engine.cancel(request.request_id)

    def close(self) -> None:
        """See `Contestant`; the engine is its shelf's."""

    def _trial(self, requests: Sequence[Request], in_flight: int | None) -> Trial:
        engine = self._engine
        times: list[list[float]] = [[] for _ in requests]
        starts = [0.0] * len(requests)
        texts: list[list[str]] = [[] for _ in requests]
        exit_layers: list[tuple[float, int]] = []
        iterations: list[tuple[float, IterationRecord]] = []
        first = len(requests) if in_flight is None else in_flight
        waiting = iter(requests[first:])
        start = time.perf_counter()
        for request in requests[:first]:
            engine.add_request(request)
        while engine.has_unfinished:
            outputs = engine.step()
            now = time.perf_counter() - start
            iterations.append((now, engine.metrics.records[-1]))
            for output in outputs:
                if output.error is not None:
                    raise OfframpError(f"a request of the benchmark failed: {output.error}.")
                index = int(output.request_id)
                known = times[index]
                exit_layers += [(now, layers) for layers in output.exit_layers[0 if known else 1 :]]
                known += [now] * len(output.new_token_ids)
                texts[index].append(output.text)
                if output.finish_reason is not None and (request := next(waiting, None)) is not None:
                    starts[int(request.request_id)] = time.perf_counter() - start
                    engine.add_request(request)
        return Trial(times, starts, in_flight, exit_layers, iterations, ["".join(pieces) for pieces in texts])

    def _request(self, index: int, question: Question) -> Request:
        prompt, source = prompt_and_source(question.prompts[index], self._engine.decoder_start_token_id)
        return Request(
            str(index),
            prompt,
            SamplingParams(max_tokens=question.new_tokens, temperature=0),
            ExitOptions("full") if question.is_hard(index) else self._exits,
            frozenset(self._engine.checkpoint.eos_token_ids) if question.until_eos else frozenset[int](),
            source_token_ids=source,
        )


def exit_options(variant: Variant, checkpoint: AnyCheckpoint) -> ExitOptions:
    """How deep a variant's sequences run.

    Raises:
        OfframpError: the checkpoint has no exit policy to take thresholds for, or there is no such policy.
    """
    if variant.kv_policy == "full":
        return ExitOptions("full")
    if variant.kv_policy == "static":
        return ExitOptions("static", static_layer=variant.exit_layer)
    if variant.exit_layer is not None:
        # No cosine is below -1, so this one is exceeded by every token.
        return ExitOptions(variant.kv_policy, ExitPolicy("cosine", {variant.exit_layer: -2.0}))
    policy = checkpoint.policy
    if variant.threshold is None and not variant.policy:
        return ExitOptions(variant.kv_policy)
    if policy is None:
        raise OfframpError("the checkpoint has no exit policy, so there is nothing to change; give --exit-at.")
    if variant.policy:
        policy = with_fields(policy, variant.policy)
    if variant.threshold is not None:
        policy = policy.with_threshold(variant.threshold, checkpoint.exits.layers)
    return ExitOptions(variant.kv_policy, policy)


def with_fields(settings: Any, values: Fields) -> Any:
    """A dataclass with some fields changed.

    Raises:
        OfframpError: it has no such field, or does not take the value.
    """
    known = [one.name for one in dataclasses.fields(settings)]
    for name, _ in values:
        if name not in known:
            raise OfframpError(f"{type(settings).__name__} has no field {name!r}; its fields are {', '.join(known)}.")
    return dataclasses.replace(settings, **dict(values))


class EngineShelf:
    """Engines, one for each set of engine settings, made when they are first needed."""

    def __init__(self, path: Path, exits: ExitConfig | None, workloads: Sequence[Workload]) -> None:
        """Make an empty shelf.

        Args:
            path: of the checkpoint.
            exits: exits to declare on a plain one.
            workloads: all that the engines will have to hold.
        """
        self._path, self._exits = path, exits
        self._seats = max(load.batch for load in workloads)
        self._workloads = workloads
        self._engines: dict[tuple[EngineConfig, Head], Engine] = {}

    def contestant(self, variant: Variant) -> EngineContestant:
        """A variant of the engine.

        Raises:
            OfframpError: the checkpoint or the machine does not allow it.
        """
        device = choose_device(EngineConfig(device=variant.setting("device")))
        config = self._config(variant, _BLOCK_SIZE if device.type == "cpu" else _CUDA_BLOCK_SIZE)
        if (config, variant.head) not in self._engines:
            self._engines[config, variant.head] = Engine.from_checkpoint(
                self._path, config, exits=self._exits, shortlist_head=variant.head == "shortlist"
            )
        return EngineContestant(self._engines[config, variant.head], variant)

    def check(self, variant: Variant, checkpoint: AnyCheckpoint) -> None:
        """Raise `OfframpError` if its settings cannot be, on any machine; nothing is loaded."""
        max_model_len(self._config(variant, _BLOCK_SIZE), checkpoint.model.config)
        exits = checkpoint.exits if self._exits is None else self._exits
        check_exits(exit_options(variant, checkpoint), checkpoint.policy, exits, checkpoint.model.config.vocab_size)

    def _config(self, variant: Variant, size: int) -> EngineConfig:
        """Settings with room for the workloads, in blocks of `size` tokens."""
        base = EngineConfig(
            block_size=size,
            # Blocks more than each can fill: a source and its target may begin one each, and the scheduler lets nobody
            # in who might soon have to go again.
            num_blocks=max(
                load.batch * (-(-(load.prompt_tokens + load.new_tokens) // size) + 3) for load in self._workloads
            ),
            max_num_seqs=self._seats,
            max_tokens_per_iteration=max(TOKEN_BUDGET, self._seats),
            max_waiting=self._seats,
            prefix_caching=False,  # every repetition asks the same
        )
        config: EngineConfig = with_fields(base, variant.engine)
        return config
