"""The engine's life: requests that come, go, stop, fail and are cancelled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.engines import Job, drain, make_engine, run_jobs
from helpers.tiny import EOS_ID, tiny_checkpoint, tiny_model, tiny_tokenizer
from offramp.common.checkpoint import Checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.config import EngineConfig
from offramp.serve.engine import Engine
from offramp.serve.execution.departures import Departure
from offramp.serve.execution.executor import Executor
from offramp.serve.execution.stored_states import StoredStates
from offramp.serve.model.packed import PackedModel
from offramp.serve.offline import generate
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.output import RequestOutput
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams
from offramp.serve.scheduling.scheduler import QueueFullError
from offramp.serve.text import TextStream

EXITS = ExitConfig((1, 2, 3), "norm")
EARLY = ExitPolicy("margin", {1: 0.2, 2: 0.2, 3: 0.2})


def make_request(request_id: str, prompt: Sequence[int] = (5, 6, 7), **sampling: Any) -> Request:
    return Request(request_id, tuple(prompt), SamplingParams(**{"temperature": 0, "max_tokens": 8, **sampling}))


def finished(outputs: Sequence[RequestOutput]) -> dict[str, RequestOutput]:
    return {output.request_id: output for output in outputs if output.finish_reason is not None}


def test_outputs_come_as_tokens_do_and_the_last_one_says_so() -> None:
    engine = make_engine(tiny_model(EXITS), EARLY)
    engine.add_request(make_request("a"))
    outputs = drain(engine)
    assert [len(output.new_token_ids) for output in outputs] == [1] * 8
    assert [output.finish_reason for output in outputs] == [None] * 7 + ["length"]
    assert outputs[-1].usage.completion_tokens == 8
    assert engine.step() == []


def test_the_checkpoints_policy_is_the_default_and_full_overrides_it() -> None:
    engine = make_engine(tiny_model(EXITS), ExitPolicy("cosine", {2: -2.0}))
    early = make_request("early")
    full = Request("full", (5, 6, 7), SamplingParams(temperature=0, max_tokens=8), ExitOptions("full"))
    engine.add_request(early)
    engine.add_request(full)
    drain(engine)
    assert early.exit_layers == [4] + [2] * 7
    assert full.exit_layers == [4] * 8


def test_drawn_tokens_do_not_depend_on_the_batch() -> None:
    model = tiny_model(EXITS)
    alone = make_request("seeded", temperature=0.9, seed=11, max_tokens=20, top_p=0.9)
    engine = make_engine(model, EARLY)
    engine.add_request(alone)
    drain(engine)
    crowded = make_request("seeded", temperature=0.9, seed=11, max_tokens=20, top_p=0.9)
    engine = make_engine(model, EARLY, max_num_seqs=5, max_tokens_per_iteration=6)
    for index in range(3):
        engine.add_request(make_request(f"before{index}", range(9, 20), temperature=1.0, max_tokens=3 + 4 * index))
    engine.step()
    engine.add_request(crowded)
    for index in range(5):
        engine.add_request(make_request(f"after{index}", range(30, 33 + index), temperature=1.0, seed=index))
    drain(engine)
    assert crowded.output_token_ids == alone.output_token_ids
    assert crowded.exit_layers == alone.exit_layers


def test_cancelling_midway_frees_the_blocks_and_disturbs_nobody() -> None:
    model = tiny_model(EXITS)
    jobs = [Job((5, 6, 7), 12, EARLY), Job((9, 10, 11, 12), 12, EARLY)]
    expected = run_jobs(make_engine(model), jobs)
    engine = make_engine(model, max_tokens_per_iteration=32)
    requests = [job.request(str(index)) for index, job in enumerate(jobs)]
    for request in requests:
        engine.add_request(request)
    for name in ("decoding", "in-prefill", "waiting"):
        engine.add_request(make_request(name, [20] * (40 if name == "in-prefill" else 5), max_tokens=60))
    engine.step()
    for name in ("decoding", "in-prefill", "waiting", "unknown"):
        assert engine.cancel(name) is (name != "unknown")
        assert not engine.cancel(name)
    outputs = drain(engine)
    assert {output.request_id for output in outputs} == {"0", "1"}
    assert [(request.output_token_ids, request.exit_layers) for request in requests] == expected
    assert engine.num_free_blocks == 256


def test_an_error_in_an_iteration_fails_its_requests_with_the_cause_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model(EXITS)
    run = Executor.run
    calls = 0

    def failing(self: Executor, *arguments: Any) -> list[Departure]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of paper")
        return run(self, *arguments)

    monkeypatch.setattr(Executor, "run", failing)
    engine = make_engine(model, max_num_seqs=2)
    requests = [make_request(name) for name in "abcd"]
    for request in requests:
        engine.add_request(request)
    ends = finished(drain(engine))
    assert [ends[name].finish_reason for name in "abcd"] == ["error", "error", "length", "length"]
    for name in "ab":
        assert "out of paper" in str(ends[name].error)
    assert requests[2].output_token_ids == requests[0].output_token_ids + requests[2].output_token_ids[2:]
    assert engine.num_free_blocks == 256


def test_errors_while_kept_tokens_are_filled_in_leave_no_stored_state(monkeypatch: pytest.MonkeyPatch) -> None:
    put, forget = StoredStates.put, StoredStates.forget
    stored: list[int] = []
    num_faults = 0

    def putting(self: StoredStates, states: Tensor) -> list[int]:
        slots = put(self, states)
        stored.extend(slots)
        return slots

    def forgetting(self: StoredStates, slots: Sequence[int]) -> None:  # taking them back ends here too
        for slot in slots:
            stored.remove(slot)
        forget(self, slots)

    def failing(*arguments: Any) -> None:
        nonlocal num_faults
        num_faults += 1
        raise RuntimeError("out of ink")

    monkeypatch.setattr(StoredStates, "put", putting)
    monkeypatch.setattr(StoredStates, "forget", forgetting)
    monkeypatch.setattr(PackedModel, "fill", failing)
    # Of those who share an iteration, some want to be filled in and others carried on.
    engine = make_engine(tiny_model(EXITS), max_num_seqs=6)
    ways: tuple[KVPolicy, ...] = ("fill", "recompute", "verify")
    for index in range(24):
        engine.add_request(Job((5 + index, 6, 7), 20, EARLY, ways[index % 3], 2).request(str(index)))
    drain(engine)
    assert num_faults > 3
    assert stored == []


def test_logits_that_are_not_finite_fail_one_request_and_leave_no_trace_in_its_blocks() -> None:
    model = tiny_model(EXITS)
    good = run_jobs(make_engine(model), [Job((5, 6, 7), 8, EARLY)])[0]
    with torch.no_grad():
        model.embed_tokens.weight[99] = torch.nan
    engine = make_engine(model, num_blocks=6)  # so few that the blocks of the first are used again
    bad, beside = make_request("bad", (5, 99, 7)), Job((5, 6, 7), 8, EARLY).request("beside")
    engine.add_request(bad)
    engine.add_request(beside)
    after = [Job((5, 6, 7), 8, EARLY).request(f"after{index}") for index in range(3)]
    for request in after:
        engine.add_request(request)
    ends = finished(drain(engine))
    assert ends["bad"].finish_reason == "error"
    assert "not finite" in str(ends["bad"].error)
    for request in (beside, *after):
        assert (request.output_token_ids, request.exit_layers) == good


def test_logits_of_a_prompt_that_are_not_finite_fail_the_request_that_asks_for_them() -> None:
    model = tiny_model(EXITS)
    with torch.no_grad():
        model.embed_tokens.weight[99] = torch.nan
    engine = make_engine(model)
    bad = make_request("bad", (5, 99, 7), max_tokens=0, prompt_logprobs=1)
    beside = make_request("beside", (5, 6, 7), max_tokens=0, prompt_logprobs=1)
    engine.add_request(bad)
    engine.add_request(beside)
    ends = finished(drain(engine))
    assert "not finite" in str(ends["bad"].error)
    assert ends["bad"].prompt_logprobs == ()
    assert (ends["beside"].finish_reason, len(ends["beside"].prompt_logprobs)) == ("length", 2)


def test_a_token_that_cannot_be_read_fails_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    push = TextStream.push
    broken: list[TextStream] = []

    def reading(self: TextStream, token_id: int, may_stop: bool = True) -> str:
        if not broken or self in broken:
            broken.append(self)
            raise ValueError("no such piece")
        return push(self, token_id, may_stop)

    monkeypatch.setattr(TextStream, "push", reading)
    config = EngineConfig(num_blocks=64, max_model_len=64)
    engine = Engine(Checkpoint(tiny_model(EXITS), {}), config, tiny_tokenizer())
    for name in ("bad", "beside"):
        engine.add_request(make_request(name))
    ends = finished(drain(engine))
    assert ends["bad"].finish_reason == "error"
    assert "no such piece" in str(ends["bad"].error)
    assert ends["beside"].finish_reason == "length"
    assert engine.num_free_blocks == 64


def test_requests_that_can_never_run_are_refused_at_once() -> None:
    engine = make_engine(tiny_model(EXITS), max_waiting=1)
    refused = {
        "outside the vocabulary": make_request("a", (5, 300)),
        "more than the 128": make_request("a", [5] * 100, max_tokens=29),
        "stop strings need a tokenizer": make_request("a", stop=("x",)),
        "stop_token_ids name every token": make_request("a", stop_token_ids=tuple(range(300)), min_tokens=1),
        "thresholds name layers": Job((5,), 4, ExitPolicy("margin", {4: 0.5})).request("a"),
        "shortlist names token": Job((5,), 4, ExitPolicy("margin", {1: 0.5}, shortlist=(1, 300))).request("a"),
    }
    for message, request in refused.items():
        with pytest.raises(OfframpError, match=message):
            engine.add_request(request)
    assert not engine.has_unfinished
    engine.add_request(make_request("a"))
    with pytest.raises(QueueFullError):
        engine.add_request(make_request("b"))
    drain(engine)
    engine.add_request(make_request("a"))  # a finished request's id is free again


def test_settings_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(OfframpError, match="max_model_len 257"):
        make_engine(tiny_model(), max_model_len=257)


def test_a_cache_sized_in_bytes_is_no_larger_than_can_be_used() -> None:
    engine = make_engine(tiny_model(), num_blocks=None, max_num_seqs=2)
    assert engine.cache_tokens == 2 * 128


def test_memory_that_was_asked_for_is_used_beyond_what_the_seats_need() -> None:
    config = EngineConfig(max_num_seqs=2, max_tokens_per_iteration=8, kv_cache_bytes=1 << 20)
    engine = Engine(Checkpoint(tiny_model(EXITS), {}), config)
    block_bytes = (1 << 20) // (engine.cache_tokens // config.block_size)
    assert engine.cache_tokens > 2 * engine.max_model_len
    assert (1 << 20) - block_bytes < engine.num_free_blocks * block_bytes <= 1 << 20


@pytest.mark.parametrize("head", ["norm", "block"])
def test_from_checkpoint_serves_text(tmp_path: Path, head: str) -> None:
    policy = ExitPolicy("margin", {1: 0.3, 2: 0.3})
    path = tiny_checkpoint(tmp_path / "model", ExitConfig((1, 2), head), policy)  # pyright: ignore[reportArgumentType]
    engine = Engine.from_checkpoint(path, EngineConfig(num_blocks=64))
    assert engine.checkpoint.policy == policy
    sampling = SamplingParams(max_tokens=24, temperature=0)
    (whole,) = generate(engine, ["hello"], sampling)
    assert whole.text
    assert set(whole.exit_layers) - {4}, "some tokens leave early"
    stop = whole.text[3:5]
    (cut,) = generate(engine, ["hello"], SamplingParams(max_tokens=24, temperature=0, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    # The weights of the layers were given up when they were packed.
    assert next(engine.checkpoint.model.layers.parameters()).is_meta


def test_any_end_token_ends_the_text_unless_ignored(tmp_path: Path) -> None:
    settings = SamplingParams(max_tokens=12, temperature=0)
    (whole,) = generate(Engine.from_checkpoint(tiny_checkpoint(tmp_path / "a")), ["hello"], settings)
    end = whole.token_ids[5]
    stop = whole.token_ids.index(end) + 1
    path = tiny_checkpoint(tmp_path / "b", eos_token_id=[EOS_ID, end])
    engine = Engine.from_checkpoint(path)
    (cut,) = generate(engine, ["hello"], settings)
    assert cut.token_ids == whole.token_ids[:stop]
    assert cut.finish_reason == "stop"
    (ignored,) = generate(engine, ["hello"], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert ignored.token_ids == whole.token_ids


def test_offline_prompts_wait_their_turn_also_where_blocks_run_out() -> None:
    # Whoever loses its blocks waits again, beside a queue that is full.
    engine = make_engine(tiny_model(EXITS), max_num_seqs=2, max_waiting=1, num_blocks=6)
    completions = generate(engine, [[5 + index, 6, 7] for index in range(6)], SamplingParams(max_tokens=16))
    assert engine.metrics.totals.preemptions > 0
    assert [len(completion.token_ids) for completion in completions] == [16] * 6


def test_offline_completions_are_in_order_however_long_the_queue() -> None:
    engine = make_engine(tiny_model(EXITS), EARLY, max_num_seqs=2, max_waiting=1)
    prompts = [[token, token + 1] for token in range(5, 15)]
    settings = [SamplingParams(max_tokens=1 + index % 4, temperature=0) for index in range(10)]
    together = generate(engine, prompts, settings)
    alone = [generate(engine, [prompt], params)[0] for prompt, params in zip(prompts, settings, strict=True)]
    for one, other in zip(together, alone, strict=True):
        assert one.confidences == pytest.approx(other.confidences, abs=1e-5)
        assert dataclasses.replace(one, confidences=[]) == dataclasses.replace(other, confidences=[])
    with pytest.raises(OfframpError, match="prompt 1: "):
        generate(engine, [[5], [5] * 200], settings[0])
    assert not engine.has_unfinished
