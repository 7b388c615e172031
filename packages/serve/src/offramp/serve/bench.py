"""Decode speed of the engine, and of transformers beside it, on the same prompts in the same minutes.

Machines are noisy and drift, so nothing is measured alone: every repetition runs all contestants in turn, and medians
are reported. Decoding is timed apart from prefill: from the first token of every sequence to the last.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offramp.common.checkpoint import DTYPES, load_checkpoint
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.config import Dtype, EngineConfig, SyncPolicy
from offramp.serve.engine import Engine
from offramp.serve.request import ExitOptions, Request, SamplingParams

Run = Callable[[Sequence[Sequence[int]], int], "Trial"]
"""Generates a number of tokens for every prompt, greedily and without an early end."""


@dataclass(frozen=True)
class Trial:
    """One run.

    Attributes:
        decode_s: seconds from the first token to the last.
        num_tokens: tokens generated in that time, all sequences together.
        mean_layers: layers run for each of them on average; None if that is not known.
    """

    decode_s: float
    num_tokens: int
    mean_layers: float | None = None


@dataclass
class Result:
    """All runs of one contestant at one batch size.

    Attributes:
        contestant: who.
        dtype: of weights and states.
        batch: sequences decoded together.
        rates: decode tokens per second, of each repetition.
        mean_layers: layers run per token on average; None if that is not known.
    """

    contestant: str
    dtype: Dtype
    batch: int
    rates: list[float] = field(default_factory=list)
    mean_layers: float | None = None

    @property
    def median(self) -> float:
        """Median decode tokens per second."""
        return statistics.median(self.rates)

    def to_json(self) -> dict[str, Any]:
        """Plain containers, for one line of JSON."""
        return {
            "contestant": self.contestant,
            "dtype": self.dtype,
            "batch": self.batch,
            "decode_tokens_per_s": round(self.median, 2),
            "lowest": round(min(self.rates), 2),
            "highest": round(max(self.rates), 2),
            "repetitions": len(self.rates),
            "mean_layers": self.mean_layers,
        }


@dataclass(frozen=True)
class BenchPlan:
    """What to measure.

    Attributes:
        batches: batch sizes.
        prompt_tokens: tokens of each prompt, drawn at random: speed does not depend on what they say, except where the
            checkpoint's own policy decides about exits.
        new_tokens: tokens to generate, at least 2.
        repetitions: runs of each contestant.
        exit_at: every token leaves at this exit, whatever it is worth: the most that early exits can give. None takes
            the checkpoint's policy.
        against_transformers: also measure `generate` of transformers.
    """

    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    repetitions: int
    exit_at: int | None
    against_transformers: bool


def run_bench(path: str | os.PathLike[str], dtype: Dtype, plan: BenchPlan) -> Iterator[Result]:
    """Measure all contestants with one dtype, batch size by batch size."""
    contestants = dict(_contestants(path, dtype, plan))
    vocab_size = load_checkpoint(path, verify=False).config.vocab_size
    for batch in plan.batches:
        generator = torch.Generator().manual_seed(batch)
        prompts = torch.randint(vocab_size, (batch, plan.prompt_tokens), generator=generator).tolist()
        results = {name: Result(name, dtype, batch) for name in contestants}
        for run in contestants.values():
            run(prompts, 2)  # the first calls at a batch size choose kernels and fault memory in
        for _ in range(plan.repetitions):
            for name, run in contestants.items():
                trial = run(prompts, plan.new_tokens)
                results[name].rates.append(trial.num_tokens / trial.decode_s)
                results[name].mean_layers = trial.mean_layers
        yield from results.values()


def _contestants(path: str | os.PathLike[str], dtype: Dtype, plan: BenchPlan) -> Iterator[tuple[str, Run]]:
    exits, early = _early_exits(path, plan)
    if plan.against_transformers:
        yield "transformers generate", _transformers(path, dtype)
    engines: dict[SyncPolicy, Engine] = {
        policy: Engine.from_checkpoint(path, _config(dtype, plan, policy), exits=exits)
        for policy in ("regroup", "all")
        if policy == "regroup" or early is not None
    }
    yield "engine, full depth", _engine(engines["regroup"], ExitOptions("full"))
    if early is not None:
        what = "early exit" if plan.exit_at is None else f"every exit at {plan.exit_at}"
        for policy, engine in engines.items():
            yield f"engine, {what}, {policy}", _engine(engine, early)


def _early_exits(path: str | os.PathLike[str], plan: BenchPlan) -> tuple[ExitConfig | None, ExitOptions | None]:
    """Exits to declare on a model that has none, and the exits to take; None if there are none."""
    checkpoint = load_checkpoint(path, verify=False)
    if plan.exit_at is None:
        return None, None if checkpoint.policy is None else ExitOptions()
    exits = None if checkpoint.exits.layers else ExitConfig((plan.exit_at,), "final")
    # No cosine is below -1, so this one is exceeded by every token.
    return exits, ExitOptions(policy=ExitPolicy("cosine", {plan.exit_at: -2.0}))


def _config(dtype: Dtype, plan: BenchPlan, sync_policy: SyncPolicy) -> EngineConfig:
    batch, block_size = max(plan.batches), 16
    return EngineConfig(
        block_size=block_size,
        num_blocks=batch * -(-(plan.prompt_tokens + plan.new_tokens) // block_size),
        max_num_seqs=batch,
        max_tokens_per_iteration=max(512, batch),
        max_waiting=batch,
        sync_policy=sync_policy,
        dtype=dtype,
    )


def _engine(engine: Engine, exits: ExitOptions) -> Run:
    def run(prompts: Sequence[Sequence[int]], new_tokens: int) -> Trial:
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        requests = [Request(str(index), tuple(prompt), sampling, exits) for index, prompt in enumerate(prompts)]
        for request in requests:
            engine.add_request(request)
        while not all(request.output_token_ids for request in requests):
            engine.step()
        done = [len(request.output_token_ids) for request in requests]
        start = time.perf_counter()
        while engine.has_unfinished:
            engine.step()
        seconds = time.perf_counter() - start
        layers = [layer for request, n in zip(requests, done, strict=True) for layer in request.exit_layers[n:]]
        return Trial(seconds, len(layers), statistics.mean(layers))

    return run


def _transformers(path: str | os.PathLike[str], dtype: Dtype) -> Run:
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    loaded: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=DTYPES[dtype], local_files_only=True)
    model: Any = loaded.eval()

    class Clock(StoppingCriteria):
        """Notes the time after every token, and stops nobody."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            self.times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def run(prompts: Sequence[Sequence[int]], new_tokens: int) -> Trial:
        clock = Clock()
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        num_layers = model.config.num_hidden_layers
        return Trial(clock.times[-1] - clock.times[0], len(prompts) * (len(clock.times) - 1), num_layers)

    return run
