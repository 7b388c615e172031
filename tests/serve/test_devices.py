"""The engine on another device, which the host only talks to: nothing of it may be computed on the CPU unseen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.elsewhere import elsewhere, there_is_elsewhere
from helpers.engines import Job, drain, make_engine, random_jobs, run_jobs
from helpers.recorder import Recorder
from helpers.tiny import tiny_model
from helpers.tiny_t5 import SHAPES, hugging_face_t5, load_t5
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import ExitPolicy
from offramp.common.importing import NewExits, import_model
from offramp.common.model.transformer import MultiExitTransformer
from offramp.serve import engine as engine_module
from offramp.serve.config import EngineConfig
from offramp.serve.devices import choose_device
from offramp.serve.model.flash_attention import BLOCK_MULTIPLE, can_flash
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Engines of this test are made for another device."""
    recorder = Recorder()
    device = elsewhere()
    monkeypatch.setattr(engine_module, "choose_device", lambda config: device)
    monkeypatch.setattr(engine_module, "captures", lambda device: recorder)
    return recorder


POLICIES = (
    ExitPolicy("max_probability", {1: 0.3, 2: 0.4, 3: 0.5}),
    ExitPolicy("cosine", {1: 0.5, 2: 0.6, 3: 0.7}),
    ExitPolicy("margin", {2: 0.2}),
    ExitPolicy("entropy", {1: 0.4, 3: 0.5}),
    ExitPolicy("margin", {1: 0.2, 3: 0.2}, shortlist=tuple(range(5, 200))),
    ExitPolicy("max_probability", {1: 0.3, 2: 0.5}, shortlist=tuple(range(100, 290)), shortlist_only=True),
    ExitPolicy("classifier", {1: 0.7, 2: 0.7, 3: 0.6}),
)
MODELS: dict[str, tuple[ExitConfig, dict[str, Any]]] = {
    "mlp": (ExitConfig((1, 2, 3), "mlp", classifier=True), {}),
    "block": (ExitConfig((1, 2, 3), "block", classifier=True), {"model_type": "qwen3"}),
    "adapter, window": (
        ExitConfig((1, 2, 3), "adapter", classifier=True),
        {"model_type": "mistral", "sliding_window": 9},
    ),
}


def _jobs(turn: int) -> list[Job]:
    """One of every policy and of every way to fill the cache, all at once; who goes with whom changes with the turn."""
    ways: tuple[KVPolicy, ...] = ("fill", "recompute", "verify")
    kinds: list[tuple[KVPolicy, ExitPolicy | None]] = [("full", None), ("static", None)]
    for place, policy in enumerate(POLICIES):
        kinds.append((ways[(place + turn) % 3], policy))
    return [
        Job(job.prompt, job.max_tokens, policy, kv_policy, static_layer=2 if kv_policy == "static" else None)
        for job, (kv_policy, policy) in zip(random_jobs([None] * len(kinds), turn), kinds, strict=True)
    ]


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_exits_are_those_of_naive_generation(recorder: Recorder, name: str, graphs: bool) -> None:
    exits, overrides = MODELS[name]
    model, jobs = tiny_model(exits, **overrides), _jobs(2 * list(MODELS).index(name) + graphs)
    wanted = [job.naive(model) for job in jobs]
    with there_is_elsewhere():
        engine = make_engine(model, cuda_graphs=graphs)
        assert engine.device == elsewhere()
        found = run_jobs(engine, jobs)
    assert found == wanted
    assert len({layer for _, layers in found for layer in layers}) > 2, "nobody left early, so little was tested"
    assert (recorder.replays > 0) == graphs


def test_an_encoder_decoder_model_says_there_what_it_says_naively(recorder: Recorder, tmp_path: Path) -> None:
    hugging_face_t5(tmp_path / "hf", **SHAPES["v1.1"])
    import_model(str(tmp_path / "hf"), tmp_path / "out", exits=NewExits(ExitConfig((1, 2, 3), "final")))
    model = load_t5(tmp_path / "out").model
    jobs = [job for job in _jobs(1) if job.policy is None or job.policy.measure != "classifier"]
    wanted = [job.naive(model) for job in jobs]
    with there_is_elsewhere():
        engine = make_engine(model)
        assert engine.device == elsewhere()
        assert run_jobs(engine, jobs) == wanted
    assert recorder.replays == 0


@contextmanager
def _on_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "choose_device", lambda config: torch.device("cpu"))
        yield


def _outputs(model: MultiExitTransformer, settings: Sequence[SamplingParams], **config: Any) -> list[Request]:
    """Requests that ask for all that logits can be asked for, finished."""
    engine = make_engine(model, POLICIES[0], **config)
    ways: tuple[KVPolicy, ...] = ("full", "fill", "verify", "recompute")
    requests = [
        Request(str(index), tuple(range(7 + index, 30 + index)), params, ExitOptions(ways[index % len(ways)]))
        for index, params in enumerate(settings)
    ]
    for request in requests:
        engine.add_request(request)
        engine.step()
    drain(engine)
    assert all(request.error is None for request in requests), [request.error for request in requests]
    return requests


def test_drawn_tokens_and_log_probabilities_are_those_of_the_cpu(recorder: Recorder) -> None:
    settings = [
        SamplingParams(max_tokens=6, temperature=0, logprobs=3, prompt_logprobs=2),
        SamplingParams(max_tokens=6, temperature=0.9, seed=1, top_k=20, presence_penalty=0.5),
        SamplingParams(max_tokens=6, temperature=1.0, seed=2, top_p=0.8, logprobs=2),
        SamplingParams(max_tokens=6, temperature=1.0, seed=3, repetition_penalty=1.2, logit_bias=((9, 2.0),)),
        SamplingParams(max_tokens=6, temperature=0, min_tokens=3, stop_token_ids=(11,), logprobs=0),
        SamplingParams(max_tokens=6, temperature=1.0, seed=4),
        SamplingParams(max_tokens=6, temperature=1.0, seed=5, min_p=0.05, logprobs=1),
    ]
    model = tiny_model(ExitConfig((1, 2, 3), "norm"))
    with there_is_elsewhere():
        found = _outputs(model, settings)
    with _on_cpu():
        wanted = _outputs(model, settings, kernels="plain")
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.output_token_ids == theirs.output_token_ids
        assert mine.exit_layers == theirs.exit_layers
        for one, other in zip(
            [*mine.logprobs, *mine.prompt_logprobs], [*theirs.logprobs, *theirs.prompt_logprobs], strict=True
        ):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.parametrize("sync_policy", ["all", "quantile", "regroup"])
def test_rows_that_wait_and_shared_blocks(recorder: Recorder, sync_policy: Any) -> None:
    model, prompt = tiny_model(ExitConfig((2,), "norm")), tuple(range(40, 57))
    policy = ExitPolicy("max_probability", {2: 0.35})
    config = {"sync_policy": sync_policy, "deep_quorum": 0.75 if sync_policy == "regroup" else 0.0}
    jobs = [Job((*prompt, 5 + tail), 8, policy, "recompute") for tail in range(5)]
    with there_is_elsewhere():
        engine = make_engine(model, **config)
        found = run_jobs(engine, jobs)
        assert sum(record.prefix_hit_tokens for record in engine.metrics.records) > 0
    if sync_policy == "regroup":
        assert found == [job.naive(model) for job in jobs]


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_the_host_waits_once_at_each_exit_and_once_for_the_tokens(recorder: Recorder, graphs: bool) -> None:
    model = tiny_model(ExitConfig((1, 3), "norm"))
    with there_is_elsewhere() as waits:
        engine = make_engine(model, ExitPolicy("max_probability", {1: 0.99, 3: 0.99}), cuda_graphs=graphs)
        params = SamplingParams(max_tokens=9, temperature=0)
        for index in range(3):
            engine.add_request(Request(str(index), (5, 6, 7 + index), params, ExitOptions("fill")))
        for _ in range(4):
            engine.step()
        waits.clear()
        engine.step()
        assert len(waits) == 3, waits


def test_what_every_exit_says_is_what_it_says_on_the_cpu(recorder: Recorder) -> None:
    model, tokens = tiny_model(ExitConfig((1, 2), "mlp")), list(range(5, 90))
    policy = ExitPolicy("margin", {1: 0.5}, shortlist=(4, 7, 9))
    with there_is_elsewhere():
        found = make_engine(model).probe(tokens, policy=policy)
    with _on_cpu():
        wanted = make_engine(model, kernels="plain").probe(tokens, policy=policy)
    for mine, theirs in zip(found, wanted, strict=True):
        for layer, reading in mine.exits.items():
            assert [token for token, _ in reading.top] == [token for token, _ in theirs.exits[layer].top]
            assert reading.confidence == pytest.approx(theirs.exits[layer].confidence, abs=1e-5)
            assert reading.tested == pytest.approx(theirs.exits[layer].tested, abs=1e-5)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(EngineConfig(device="auto")).type == "cpu"
    with pytest.raises(OfframpError, match=r"device 'cuda:1' is asked for, but .*; use device cpu or auto"):
        choose_device(EngineConfig(device="cuda:1"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device(EngineConfig(device="auto")) == torch.device("cuda", 0)
    assert choose_device(EngineConfig(device="cuda")) == torch.device("cuda", 0)
    with pytest.raises(OfframpError, match="there are 1 CUDA devices"):
        choose_device(EngineConfig(device="cuda:1"))


@pytest.mark.parametrize("device", ["tpu", "cuda:", "cuda:x", "CUDA", "", 0, None])
def test_a_device_of_no_known_name_is_refused(device: Any) -> None:
    with pytest.raises(OfframpError, match="choose cpu, cuda, cuda:N or auto"):
        EngineConfig(device=device)


@pytest.mark.parametrize("settings", [{"kernels": "native"}, {"kernels": "packed"}, {"split_rule": "cost"}])
def test_what_needs_the_cpu_is_refused_on_cuda(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    with pytest.raises(OfframpError, match="device"):
        EngineConfig(device="cuda:1", **settings)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(OfframpError, match="device"):
        choose_device(EngineConfig(device="auto", **settings))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_cuda_gives_what_naive_generation_gives(name: str, graphs: bool) -> None:
    exits, overrides = MODELS[name]
    model, jobs = tiny_model(exits, **overrides), _jobs(2 * list(MODELS).index(name) + graphs)
    found = run_jobs(make_engine(model, device="cuda", cuda_graphs=graphs), jobs)
    assert found == [job.naive(model) for job in jobs]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_cuda_has_flash_attention_over_blocks(head_dim: int) -> None:
    assert can_flash(torch.device("cuda", 0), torch.bfloat16, head_dim, BLOCK_MULTIPLE)
