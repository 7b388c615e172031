"""In fp32 the engine says what naive generation says: every token and every exit layer, whatever shares the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.algorithm_1 import algorithm_1
from helpers.engines import MAX_MODEL_LEN, Job, make_engine, random_jobs, run_jobs
from helpers.tiny import tiny_model
from offramp.common.exits.config import ExitConfig, HeadKind
from offramp.common.exits.policy import ExitPolicy
from offramp.common.model.transformer import MultiExitTransformer

LLAMA: dict[str, Any] = {}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-biased": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "llama3-rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "dynamic-rope": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": MAX_MODEL_LEN},
    "mistral-window": {"model_type": "mistral", "sliding_window": 7},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 4},
}
# Requests of every kind side by side: each measure, some exits or all, a shortlist, a decaying threshold, exits that
# are never taken, and full depth.
POLICIES = [
    ExitPolicy("margin", {1: 0.3, 2: 0.3, 3: 0.3}),
    ExitPolicy("max_probability", {1: 0.4, 3: 0.4}),
    ExitPolicy("entropy", {1: 0.4, 2: 0.4, 3: 0.4}, shortlist=tuple(range(5, 60))),
    ExitPolicy("cosine", {1: 0.6, 2: 0.6, 3: 0.6}),
    ExitPolicy("margin", {1: 2.0, 2: 1.0, 3: 2.0}),
    ExitPolicy("margin", {1: 0.1, 3: 0.2}, decay=2.0),
    ExitPolicy("cosine", {1: 0.5, 2: 0.5}, min_layer=2),
    ExitPolicy("entropy", {2: 0.3}),
    None,
    ExitPolicy("classifier", {1: 0.7, 2: 0.7, 3: 0.7}),
    ExitPolicy("classifier", {1: 0.7, 3: 0.6}, shortlist=tuple(range(5, 60)), shortlist_only=True),
]


def check(model: MultiExitTransformer, seed: int) -> None:
    jobs = random_jobs(POLICIES, seed)
    expected = [job.naive(model) for job in jobs]
    assert {layer for _, layers in expected for layer in layers} == {1, 2, 3, 4}, "the example takes every exit"
    # 4 seats for 11 requests, prompts in chunks of at most 8 tokens, arrivals in between: they come and go.
    batched = make_engine(model, max_num_seqs=4, max_tokens_per_iteration=8)
    assert run_jobs(batched, jobs) == expected
    assert batched.num_free_blocks == 256
    # Alone, both sync policies are naive early exit.
    for sync_policy in ("regroup", "all"):
        engine = make_engine(model, sync_policy=sync_policy)
        assert [run_jobs(engine, [job])[0] for job in jobs] == expected


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_architecture(variant: str) -> None:
    check(tiny_model(ExitConfig((1, 2, 3), "norm", classifier=True), **VARIANTS[variant]), seed=1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["bare", "adapter", "mlp", "block"])
def test_every_head(head: HeadKind, tied: bool) -> None:
    check(tiny_model(ExitConfig((1, 2, 3), head, tied, classifier=True)), seed=2)


def test_the_final_norm_as_head() -> None:
    check(tiny_model(ExitConfig((1, 2, 3), "final", classifier=True)), seed=3)


@pytest.mark.parametrize("variant", ["mistral-window", "qwen3", "llama-biased"])
def test_a_block_as_head_has_a_cache_of_its_own(variant: str) -> None:
    check(tiny_model(ExitConfig((1, 2, 3), "block", classifier=True), **VARIANTS[variant]), seed=4)


@pytest.mark.parametrize("head", ["norm", "block"])
@torch.inference_mode()
def test_batch_synchronised_exit_is_algorithm_1(head: HeadKind) -> None:
    model = tiny_model(ExitConfig((1, 2, 3), head), seed=5)
    thresholds: dict[int, float] = {1: 0.05, 2: 0.05, 3: 0.05}
    policies = [
        ExitPolicy("margin", thresholds),
        ExitPolicy("max_probability", {1: 0.1, 3: 0.1}),  # may leave at 2 because it was sure at 1
        ExitPolicy("entropy", dict.fromkeys((1, 2, 3), 0.1)),
        None,
    ]
    prompts = [(9, 8, 7), (20, 30, 40, 50, 60), (100,), (7, 7)]
    jobs = [Job(prompt, 24, policy) for prompt, policy in zip(prompts, policies, strict=True)]
    expected = algorithm_1(model, jobs)
    taken = {layer for _, layers in expected[:3] for layer in layers}
    assert 4 in taken, "in the example some passes do not end early"
    assert len(taken) > 2, "in the example passes end at several exits"
    assert run_jobs(make_engine(model, sync_policy="all"), jobs, every=0) == expected
