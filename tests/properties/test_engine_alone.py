"""Random mixes of requests on a tiny model: each says what it says alone, and nothing is left behind.

`OFFRAMP_FUZZ_SECONDS=600` goes on with new mixes for that long.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace

from helpers.tiny import EOS_ID, tiny_model, tiny_tokenizer
from offramp.common.checkpoint import Checkpoint
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.config import EngineConfig, SyncPolicy
from offramp.serve.engine import Engine
from offramp.serve.model.native import native_library
from offramp.serve.request.constraint import Constraint
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams

EXITS = (1, 2, 3)
MODELS = [
    Checkpoint(tiny_model(ExitConfig(EXITS, "norm", classifier=True), seed=3), {}),
    Checkpoint(
        tiny_model(ExitConfig(EXITS, "block", classifier=True), seed=3, model_type="mistral", sliding_window=6), {}
    ),
    Checkpoint(tiny_model(ExitConfig(EXITS, "adapter", False, 5, classifier=True), 3, model_type="qwen3"), {}),
]
TOKENIZER = tiny_tokenizer()
MAX_MODEL_LEN = 64
NUM_MIXES = 16


def make_request(name: str, rng: random.Random) -> Request:
    prompt = rng.choice([(5, 6, 7, 8, 9, 10, 11, 12), (9, 8, 7)]) * rng.randrange(1, 4)
    constraint = rng.choice([None, None, None, Constraint("regex", "[a-f]{1,5}(x|yz)*")])
    prompt_logprobs = rng.choice([None, None, 0, 1])
    least = 0 if prompt_logprobs is not None and constraint is None else 1
    max_tokens = rng.randrange(least, 25)
    return Request(
        name,
        (*prompt, *rng.choices(range(5, 300), k=rng.randrange(4))),
        SamplingParams(
            max_tokens=max_tokens,
            min_tokens=0 if constraint else min(max_tokens, rng.choice([0, 0, 3])),
            temperature=rng.choice([0, 0, 0.9]),
            top_p=rng.choice([1, 0.9]),
            seed=rng.randrange(9),
            sequence=rng.randrange(2),
            stop=rng.choice([(), ("e",)]),
            logprobs=rng.choice([None, 1]),
            prompt_logprobs=prompt_logprobs,
            repetition_penalty=rng.choice([1, 1.3]),
            constraint=constraint,
        ),
        make_depth(rng),
        frozenset({EOS_ID}),
        priority=rng.randrange(2),
        client=rng.choice("ab"),
    )


def make_depth(rng: random.Random) -> ExitOptions:
    kv_policy: KVPolicy = rng.choice(["full", "fill", "recompute", "verify", "static"])
    if kv_policy == "full":
        return ExitOptions("full")
    if kv_policy == "static":
        return ExitOptions("static", static_layer=rng.choice(EXITS))
    shortlist = rng.choice([None, tuple(range(0, 300, 2))])
    policy = ExitPolicy(
        rng.choice(["margin", "max_probability", "entropy", "cosine", "classifier"]),
        {layer: rng.choice([-2.0, 0.1, 0.3, 0.9, 1.0]) for layer in EXITS if rng.random() < 0.8},
        min_layer=rng.randrange(3),
        decay=rng.choice([None, None, 2.0]),
        shortlist=shortlist,
        shortlist_only=shortlist is not None and rng.random() < 0.5,
    )
    return ExitOptions(kv_policy, policy, max_pending=rng.choice([1, 3, 8]))


def make_config(rng: random.Random) -> EngineConfig:
    block_size, max_num_seqs = rng.choice([1, 4, 5]), rng.randrange(1, 7)
    quorum = rng.choice([0.0, 0.3, 0.5, 1.0])
    sync_policy: SyncPolicy = "regroup" if quorum else rng.choice(["regroup", "all", "quantile"])
    return EngineConfig(
        block_size=block_size,
        num_blocks=-(-MAX_MODEL_LEN // block_size) + rng.randrange(20),
        max_num_seqs=max_num_seqs,
        max_tokens_per_iteration=max_num_seqs + 10 + rng.randrange(12),
        max_model_len=MAX_MODEL_LEN,
        sync_policy=sync_policy,
        quantile=1 - rng.random(),
        split_rule=rng.choice(["always", "cost"]) if sync_policy == "regroup" and not quorum else "always",
        deep_quorum=quorum,
        max_parked_iterations=rng.choice([1, 2, 8]),
        prefix_caching=rng.random() < 0.7,
        group_by_depth=rng.random() < 0.3,
        kernels=rng.choice(["auto", "auto", "auto", "plain"]),
        dtype=rng.choice(["fp32", "fp32", "bf16"]),
        quantization=rng.choice(["none", "none", "int8"]),
    )


def said(request: Request) -> tuple[object, ...]:
    return (
        request.output_token_ids,
        request.exit_layers,
        request.logprobs,
        request.prompt_logprobs,
        request.finish_reason,
    )


def run_mix(number: int) -> int:
    """One engine and its requests; how many of them were compared with themselves alone."""
    rng = random.Random(number)
    checkpoint, config = rng.choice(MODELS), make_config(rng)
    engine = Engine(checkpoint, config, TOKENIZER, poison_cache=True)
    requests: list[Request] = []
    for index in range(rng.randrange(2, 10)):
        requests.append(make_request(str(index), random.Random(1000 * number + index)))
        engine.add_request(requests[-1])
        for _ in range(rng.randrange(4)):
            engine.step()
        if rng.random() < 0.15:
            engine.cancel(rng.choice(requests).request_id)
    for _ in range(5000):
        if not engine.has_unfinished:
            break
        engine.step()
    assert not engine.has_unfinished, f"mix {number} does not end"
    left = (engine.num_free_blocks, engine.num_kept_tokens, engine.num_parked_rows)
    assert left == (config.num_blocks, 0, 0), number
    finished = [request for request in requests if request.finish_reason != "cancelled"]
    for request in finished:
        assert request.error is None, (number, request)
    # Only where each row leaves on its own, whatever shares its iteration, are answers those of a request alone; and
    # bitwise only where the kernels see to it.
    is_own = config.sync_policy == "regroup" and config.split_rule == "always" and engine.kernels == "native"
    if not is_own:
        return 0
    settings = replace(config, num_blocks=200, prefix_caching=False, deep_quorum=0.0)
    alone = Engine(checkpoint, settings, TOKENIZER, poison_cache=True)
    for request in finished:
        again = make_request("again", random.Random(1000 * number + int(request.request_id)))
        alone.add_request(again)
        while alone.has_unfinished:
            alone.step()
        assert said(again) == said(request), (number, request)
    return len(finished)


def test_in_any_mix_each_request_says_what_it_says_alone() -> None:
    deadline = time.monotonic() + float(os.environ.get("OFFRAMP_FUZZ_SECONDS", "0"))
    number = num_compared = 0
    while number < NUM_MIXES or time.monotonic() < deadline:
        num_compared += run_mix(number)
        number += 1
    assert num_compared or native_library() is None, "nothing was compared"
    print(f"{number} mixes, {num_compared} requests compared with themselves alone")
