"""Whatever comes, goes or is cancelled beside it: a request says what it says alone, and nothing of it is left over."""

from __future__ import annotations

import functools

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.engines import Job, drain, make_engine, random_jobs, run_jobs
from helpers.tiny import tiny_model
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import ExitPolicy
from offramp.common.model.transformer import MultiExitTransformer

NUM_BLOCKS = 24
MARGIN = ExitPolicy("margin", {1: 0.2, 2: 0.2})
COSINE = ExitPolicy("cosine", {1: 0.5, 2: 0.5})
SHORTLIST = ExitPolicy("margin", {1: 0.1, 2: 0.1}, shortlist=tuple(range(5, 150)))


@functools.cache
def model() -> MultiExitTransformer:
    # The block of a head has a cache of its own, and a window forgets: the hardest to get right together.
    return tiny_model(ExitConfig((1, 2), "block"), seed=1, model_type="mistral", sliding_window=6)


@functools.cache
def alone() -> list[tuple[Job, tuple[list[int], list[int]]]]:
    plain = random_jobs([MARGIN, COSINE, SHORTLIST, None] * 2, seed=6)
    carried: list[KVPolicy] = ["recompute", "recompute", "recompute", "verify", "verify", "verify"]
    jobs = plain + [
        Job(job.prompt, job.max_tokens, job.policy, kv_policy, max_pending)
        for job, kv_policy, max_pending in zip(plain[:3] * 2, carried, [1, 3, 8] * 2, strict=True)
    ]
    jobs.append(Job(plain[0].prompt, 15, None, "static", static_layer=1))
    return [(job, run_jobs(make_engine(model()), [job])[0]) for job in jobs]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    data=st.data(),
    seats=st.integers(1, 5),
    chunk=st.integers(0, 12),
    prefix_caching=st.booleans(),
    quorum=st.sampled_from([0.0, 0.5, 1.0]),
    patience=st.integers(1, 5),
)
def test_requests_do_not_touch_each_other(
    data: st.DataObject, seats: int, chunk: int, prefix_caching: bool, quorum: float, patience: int
) -> None:
    engine = make_engine(
        model(),
        num_blocks=NUM_BLOCKS,
        max_num_seqs=seats,
        # A pass may take tokens along that wait, as many as the most patient request lets.
        max_tokens_per_iteration=seats + 9 + chunk,
        max_waiting=64,
        prefix_caching=prefix_caching,
        deep_quorum=quorum,
        max_parked_iterations=patience,
    )
    kept = []
    for number in range(data.draw(st.integers(1, 10), "requests")):
        job, expected = alone()[data.draw(st.integers(0, len(alone()) - 1), "job")]
        request = job.request(str(number))
        request.priority = data.draw(st.integers(0, 2), "priority")
        engine.add_request(request)
        for _ in range(data.draw(st.integers(0, 6), "steps")):
            engine.step()
        if data.draw(st.integers(0, 3), "fate") == 0:
            engine.cancel(request.request_id)
        else:
            kept.append((request, expected))
    drain(engine)
    for request, expected in kept:
        assert request.error is None
        assert (request.output_token_ids, request.exit_layers) == expected
    assert engine.num_free_blocks == NUM_BLOCKS
    assert engine.num_kept_tokens == engine.num_parked_rows == 0
