"""Requests and schedulers with small numbers, for tests that need no model."""

from __future__ import annotations

from typing import Any

from offramp.serve.config import EngineConfig
from offramp.serve.kv_cache.block_pool import BlockPool
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.iteration_result import IterationResult, SampledToken
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams
from offramp.serve.scheduling.scheduler import Scheduler
from offramp.serve.scheduling.scheduler_output import SchedulerOutput

NUM_LAYERS = 4
"""Of the model that the scheduler is told about."""


def make_request(
    request_id: str = "a",
    prompt: int | tuple[int, ...] = 3,
    eos: tuple[int, ...] = (),
    exits: ExitOptions | None = None,
    priority: int = 0,
    client: str = "",
    source: tuple[int, ...] = (),
    **sampling: Any,
) -> Request:
    """A request; `prompt` is its token ids or their number."""
    ids = tuple(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
    return Request(
        request_id,
        ids,
        SamplingParams(**sampling),
        exits or ExitOptions(),
        eos_token_ids=frozenset(eos),
        priority=priority,
        client=client,
        source_token_ids=source,
    )


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 4,
    budget: int = 16,
    max_waiting: int = 100,
    max_model_len: int = 10_000,
    prefix_caching: bool = False,
    group_by_depth: bool = False,
) -> tuple[Scheduler, BlockPool]:
    config = EngineConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_tokens_per_iteration=budget,
        max_waiting=max_waiting,
        prefix_caching=prefix_caching,
        group_by_depth=group_by_depth,
    )
    pool = BlockPool(num_blocks)
    return Scheduler(config, pool, max_model_len, NUM_LAYERS), pool


def say(output: SchedulerOutput, token_id: int = 7, exit_layer: int = NUM_LAYERS) -> dict[str, IterationResult]:
    """The same token for every row that predicts one."""
    return {
        item.request.request_id: IterationResult((SampledToken(token_id, exit_layer),))
        for item in output.scheduled
        if item.samples
    }
