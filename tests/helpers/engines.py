"""Engines over tiny models, whose caches start as NaN: attending to a slot that was never written fails the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offramp.common.checkpoint import AnyCheckpoint, CheckpointOf
from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import ExitPolicy
from offramp.common.families import AnyModel
from offramp.common.generation import generate
from offramp.serve.config import EngineConfig
from offramp.serve.engine import Engine
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.output import RequestOutput
from offramp.serve.request.request import Request, prompt_and_source
from offramp.serve.request.sampling_params import SamplingParams

MAX_MODEL_LEN = 128


def make_engine(model: AnyModel, policy: ExitPolicy | None = None, **config: Any) -> Engine:
    settings = {"block_size": 4, "num_blocks": 256, "max_model_len": MAX_MODEL_LEN, **config}
    checkpoint: AnyCheckpoint = CheckpointOf(model, {}, policy)
    return Engine(checkpoint, EngineConfig(**settings), poison_cache=True)


@dataclass(frozen=True)
class Job:
    """A prompt, how many tokens to generate greedily, and the exits to take; no policy runs every layer.

    The prompt of an encoder-decoder model is its source.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    policy: ExitPolicy | None = None
    kv_policy: KVPolicy = "fill"
    max_pending: int = 8
    static_layer: int | None = None

    @property
    def exits(self) -> ExitOptions:
        if self.kv_policy != "static" and self.policy is None:
            return ExitOptions("full")
        return ExitOptions(self.kv_policy, self.policy, self.max_pending, self.static_layer)

    def naive(self, model: AnyModel) -> tuple[list[int], list[int]]:
        """What it comes to without cache or batch: tokens and exit layers."""
        result = generate(
            model,
            self.prompt,
            self.max_tokens,
            kv_policy=self.exits.kv_policy,
            policy=self.policy,
            max_pending=self.max_pending,
            static_layer=self.static_layer,
            rope_length=MAX_MODEL_LEN,
        )
        return result.token_ids, result.exit_layers

    def request(self, request_id: str, decoder_start: int | None = None) -> Request:
        """For an engine whose decoder starts with a token of its own, or does not."""
        prompt, source = prompt_and_source(self.prompt, decoder_start)
        sampling = SamplingParams(max_tokens=self.max_tokens, temperature=0)
        return Request(request_id, prompt, sampling, self.exits, source_token_ids=source)


def layer_runs(engine: Engine) -> tuple[list[int], list[int]]:
    """For each backbone layer, how often it was called, and on how many rows in all."""
    calls = [0] * engine.checkpoint.model.config.num_layers
    rows = list(calls)
    for record in engine.metrics.records:
        for run in record.segments:
            for index in range(run.start, run.stop):
                calls[index] += 1
                rows[index] += run.rows
    return calls, rows


def random_jobs(policies: Sequence[ExitPolicy | None], seed: int = 0) -> list[Job]:
    """One job for each policy, with prompts of 1 to 30 tokens and 6 to 20 tokens to generate."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    return [Job(tuple(draw(5, 300, draw(1, 31, 1)[0])), draw(6, 21, 1)[0], policy) for policy in policies]


def drain(engine: Engine) -> list[RequestOutput]:
    """Step until nothing is unfinished."""
    outputs: list[RequestOutput] = []
    while engine.has_unfinished:
        outputs += engine.step()
    return outputs


def run_jobs(engine: Engine, jobs: Sequence[Job], every: int = 1) -> list[tuple[list[int], list[int]]]:
    """Tokens and exit layers of each job; a new job arrives every `every` iterations, so that they come and go."""
    requests = [job.request(str(index), engine.decoder_start_token_id) for index, job in enumerate(jobs)]
    for request in requests:
        engine.add_request(request)
        for _ in range(every):
            engine.step()
    drain(engine)
    assert all(request.error is None for request in requests), [request.error for request in requests]
    return [(request.output_token_ids, request.exit_layers) for request in requests]
