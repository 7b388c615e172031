"""Whatever comes, goes or is cancelled beside it: a request says what it says alone, and nothing of it is left over."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.engines import Job, drain, make_engine, random_jobs, run_jobs
from helpers.tiny import tiny_model
from helpers.tiny_t5 import SHAPES, hugging_face_t5, load_t5
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import ExitPolicy
from offramp.common.families import AnyModel
from offramp.common.importing import NewExits, import_model

Family = Literal["decoder-only", "t5"]
NUM_BLOCKS = 24
LONGEST_SOURCE = 30
MARGIN = ExitPolicy("margin", {1: 0.2, 2: 0.2})
COSINE = ExitPolicy("cosine", {1: 0.5, 2: 0.5})
SHORTLIST = ExitPolicy("margin", {1: 0.1, 2: 0.1}, shortlist=tuple(range(5, 150)))


@functools.cache
def model(family: Family) -> AnyModel:
    if family == "t5":
        with tempfile.TemporaryDirectory() as folder:
            hugging_face_t5(Path(folder) / "hf", seed=1, **SHAPES["t5"])
            import_model(str(Path(folder) / "hf"), Path(folder) / "out", exits=NewExits(ExitConfig((1, 2), "final")))
            return load_t5(Path(folder) / "out").model
    # The block of a head has a cache of its own, and a window forgets: the hardest to get right together.
    return tiny_model(ExitConfig((1, 2), "block"), seed=1, model_type="mistral", sliding_window=6)


@functools.cache
def alone(family: Family) -> list[tuple[Job, tuple[list[int], list[int]]]]:
    plain = random_jobs([MARGIN, COSINE, SHORTLIST, None] * 2, seed=6)
    carried: list[KVPolicy] = ["recompute", "recompute", "recompute", "verify", "verify", "verify"]
    jobs = plain + [
        Job(job.prompt, job.max_tokens, job.policy, kv_policy, max_pending)
        for job, kv_policy, max_pending in zip(plain[:3] * 2, carried, [1, 3, 8] * 2, strict=True)
    ]
    jobs.append(Job(plain[0].prompt, 15, None, "static", static_layer=1))
    return [(job, run_jobs(make_engine(model(family)), [job])[0]) for job in jobs]


@pytest.mark.parametrize("family", ["decoder-only", "t5"])
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
    family: Family,
    data: st.DataObject,
    seats: int,
    chunk: int,
    prefix_caching: bool,
    quorum: float,
    patience: int,
) -> None:
    engine = make_engine(
        model(family),
        num_blocks=NUM_BLOCKS,
        max_num_seqs=seats,
        # A pass may take tokens along that wait, as many as the most patient request lets.
        max_tokens_per_iteration=seats + 9 + chunk + (LONGEST_SOURCE if family == "t5" else 0),
        max_waiting=64,
        prefix_caching=prefix_caching,
        deep_quorum=quorum,
        max_parked_iterations=patience,
    )
    kept = []
    for number in range(data.draw(st.integers(1, 10), "requests")):
        job, expected = alone(family)[data.draw(st.integers(0, len(alone(family)) - 1), "job")]
        request = job.request(str(number), engine.decoder_start_token_id)
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
