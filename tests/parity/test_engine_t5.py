"""The engine says of a source what naive generation says, and what transformers says: alone, batched, preempted."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.algorithm_1 import algorithm_1
from helpers.engines import Job, drain, make_engine, random_jobs, run_jobs
from helpers.tiny import VOCAB_SIZE
from helpers.tiny_t5 import EOS_ID, PAD_ID, SHAPES, hugging_face_t5, load_t5
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import ExitPolicy
from offramp.common.importing import NewExits, import_model
from offramp.common.model.exit_head import ExitClassifier
from offramp.common.t5.model import MultiExitT5
from offramp.serve.model.packed import PackedModel
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams

NUM_BLOCKS = 256
# Tied and scaled, gated, heads that do not fill D; every kind of exit head.
VARIANTS: list[tuple[str, ExitConfig]] = [
    ("t5, deep decoder", ExitConfig((1, 2, 4), "norm")),
    ("v1.1", ExitConfig((1, 3), "final")),
    ("flan, odd heads", ExitConfig((2,), "adapter", tied=False)),
    ("t5, narrow classes of distances", ExitConfig((1, 3), "bare")),
]
KV_POLICIES: tuple[KVPolicy, ...] = ("fill", "recompute", "verify")
Said = list[tuple[list[int], list[int]]]


@functools.cache
def model(number: int) -> MultiExitT5:
    shape, exits = VARIANTS[number]
    with tempfile.TemporaryDirectory() as folder:
        hugging_face_t5(Path(folder) / "hf", seed=number, **SHAPES[shape])
        import_model(str(Path(folder) / "hf"), Path(folder) / "out", exits=NewExits(exits))
        t5 = load_t5(Path(folder) / "out").model
    if number == 0:
        t5.add_classifiers()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for module in t5.exits.modules():
                if isinstance(module, ExitClassifier):
                    module.weight.normal_(0.0, 2.0 * module.in_features**-0.5, generator=generator)
    return t5


@functools.cache
def example(number: int) -> tuple[list[Job], Said]:
    """Jobs of every kind, and what they come to."""
    t5 = model(number)
    layers = t5.exit_config.layers
    policies = [
        ExitPolicy("max_probability", dict.fromkeys(layers, 0.3)),
        ExitPolicy("margin", dict.fromkeys(layers, 0.2), decay=2.0),
        ExitPolicy("margin", dict.fromkeys(layers, 0.2), shortlist=tuple(range(3, 150)), shortlist_only=True),
        ExitPolicy("cosine", dict.fromkeys(layers, 0.7)),
        ExitPolicy("entropy", dict.fromkeys(layers, 0.2), shortlist=tuple(range(3, 200))),
    ]
    if t5.exit_config.classifier:
        policies.append(ExitPolicy("classifier", dict.fromkeys(layers, 0.6)))
    plain = random_jobs(policies, seed=number)
    jobs = [
        replace(job, kv_policy=kv_policy, max_pending=(1, 2, 3, 8, 3, 2)[index])
        for kv_policy in KV_POLICIES
        for index, job in enumerate(plain)
    ]
    jobs += [Job(plain[1].prompt, 20, None, "static", static_layer=layers[-1]), Job(plain[0].prompt, 18)]
    return jobs, [job.naive(t5) for job in jobs]


def assert_same(jobs: Sequence[Job], got: Said, expected: Said) -> None:
    for job, one, other in zip(jobs, got, expected, strict=True):
        assert one == other, job


def test_the_examples_take_exits() -> None:
    every = []
    for number, (_, exits) in enumerate(VARIANTS):
        _, expected = example(number)
        taken = {layer for _, layers in expected for layer in layers}
        assert len(taken) > 1
        every.append(taken == {*exits.layers, model(number).config.num_layers})
    assert sum(every) >= 3


@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_alone(number: int) -> None:
    jobs, expected = example(number)
    for sync_policy in ("regroup", "all", "quantile"):
        engine = make_engine(model(number), sync_policy=sync_policy)
        assert_same(jobs, [run_jobs(engine, [job])[0] for job in jobs], expected)
    assert engine.num_free_blocks == NUM_BLOCKS
    assert engine.num_kept_tokens == 0


@pytest.mark.parametrize("number", range(len(VARIANTS)))
@pytest.mark.parametrize("kernels", ["plain", "auto"])
def test_side_by_side(number: int, kernels: str) -> None:
    """Few seats, a source of up to thirty tokens at a time, arrivals in between."""
    jobs, expected = example(number)
    engine = make_engine(model(number), kernels=kernels, max_num_seqs=6, max_tokens_per_iteration=32)
    assert_same(jobs, run_jobs(engine, jobs), expected)
    engine = make_engine(model(number), kernels=kernels, max_num_seqs=17, max_tokens_per_iteration=100)
    assert_same(jobs, run_jobs(engine, jobs, every=0), expected)
    assert engine.num_free_blocks == NUM_BLOCKS
    # What a decoder makes of a text depends on the source, so nothing is kept for others.
    assert engine.metrics.records[-1].after.cached_blocks == 0
    assert engine.metrics.totals.source_rows == sum(len(job.prompt) for job in jobs)


@pytest.mark.parametrize("settings", [{"deep_quorum": 0.5}, {"group_by_depth": True}, {"split_rule": "always"}])
@pytest.mark.parametrize("number", [0, 1])
def test_preempted(number: int, settings: dict[str, Any]) -> None:
    """A cache in which they cannot all go on: sources are read again, and texts run again, in chunks."""
    jobs, expected = example(number)
    engine = make_engine(model(number), num_blocks=20, max_num_seqs=6, max_tokens_per_iteration=32, **settings)
    assert_same(jobs, run_jobs(engine, jobs, every=0), expected)
    assert engine.metrics.totals.preemptions > 0
    assert engine.metrics.totals.source_rows > sum(len(job.prompt) for job in jobs)
    assert engine.num_free_blocks == 20


@torch.inference_mode()
def test_batch_synchronised_exit_is_algorithm_1() -> None:
    thresholds: dict[int, float] = {1: 0.05, 2: 0.05, 4: 0.05}
    policies = [ExitPolicy("margin", thresholds), ExitPolicy("max_probability", {1: 0.1, 4: 0.1}), None]
    prompts = [(9, 8, 7), (20, 30, 40, 50, 60), (7, 7)]
    jobs = [Job(prompt, 20, policy) for prompt, policy in zip(prompts, policies, strict=True)]
    expected = algorithm_1(model(0), jobs)
    assert len({layer for _, layers in expected[:2] for layer in layers}) > 2, "in the example several exits are taken"
    assert run_jobs(make_engine(model(0), sync_policy="all"), jobs, every=0) == expected


def test_a_prompt_of_the_decoder_is_chunked() -> None:
    """What the decoder reads first may be longer than one token; chunks do not change what follows."""
    text = tuple(torch.randint(2, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1)).tolist())
    answers: list[list[int]] = []
    for budget in (200, 26, 9):
        engine = make_engine(model(0), max_num_seqs=2, max_tokens_per_iteration=budget)
        request = Request("a", text, SamplingParams(max_tokens=12, temperature=0), source_token_ids=text[:9])
        engine.add_request(request)
        drain(engine)
        assert request.error is None
        answers.append(request.output_token_ids)
    assert answers[0] == answers[1] == answers[2]


@torch.inference_mode()
def test_transformers_on_two_hundred_sources(tmp_path: Path) -> None:
    theirs: Any = hugging_face_t5(tmp_path, **SHAPES["v1.1"])
    ours = load_t5(tmp_path).model
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(1, 24, (200,), generator=generator).tolist()
    sources = [torch.randint(2, VOCAB_SIZE, (length,), generator=generator) for length in lengths]
    padded = torch.nn.utils.rnn.pad_sequence(sources, batch_first=True, padding_value=PAD_ID)
    # The token that ends a text is one that texts meet.
    eos, length = 7, 8
    said = theirs.generate(
        padded,
        attention_mask=(padded != PAD_ID).long(),
        max_new_tokens=length,
        do_sample=False,
        eos_token_id=[EOS_ID, eos],
    )
    expected = []
    for row in said[:, 1:].tolist():
        end = next((place for place, token in enumerate(row) if token in (EOS_ID, eos)), length)
        expected.append(row[: end + 1])

    def request(index: int) -> Request:
        return Request(
            str(index),
            (PAD_ID,),
            SamplingParams(max_tokens=length, temperature=0),
            eos_token_ids=frozenset({EOS_ID, eos}),
            source_token_ids=tuple(sources[index].tolist()),
        )

    for batched in (True, False):
        engine = make_engine(ours, num_blocks=1024, max_num_seqs=32, max_tokens_per_iteration=128)
        requests = [request(index) for index in range(len(sources))]
        for one in requests:
            engine.add_request(one)
            if not batched:
                drain(engine)
        drain(engine)
        assert [one.output_token_ids for one in requests] == expected
    assert len({tuple(tokens) for tokens in expected}) > 100
    assert min(map(len, expected)) < length


def test_bf16_is_close_to_fp32_and_fp16_is_refused() -> None:
    jobs = example(0)[0]
    reported: dict[str, list[float]] = {}
    for dtype in ("fp32", "bf16"):
        engine = make_engine(model(0), dtype=dtype)
        requests = []
        for index, job in enumerate(jobs):
            request = job.request(str(index), PAD_ID)
            request.sampling = replace(request.sampling, logprobs=0)
            requests.append(request)
            engine.add_request(request)
        drain(engine)
        assert all(request.error is None for request in requests)
        reported[dtype] = [request.logprobs[0].logprob for request in requests]
    differences = torch.tensor(reported["fp32"]) - torch.tensor(reported["bf16"])
    assert differences.abs().mean() < 0.3
    with pytest.raises(OfframpError, match="T5 does not run in fp16, because its states outgrow"):
        PackedModel(model(0), torch.float16)


def test_int8_weights_mean_the_same_to_all_kernels() -> None:
    jobs = example(1)[0][:5]
    plain = run_jobs(make_engine(model(1), quantization="int8", kernels="plain"), jobs)
    assert run_jobs(make_engine(model(1), quantization="int8"), jobs) == plain


@pytest.mark.parametrize(
    ("prompt", "source", "settings", "message"),
    [
        ((PAD_ID,), (), {}, "the source has no token"),
        ((PAD_ID,), (VOCAB_SIZE,), {}, f"the source holds token {VOCAB_SIZE}, outside"),
        ((PAD_ID,), (5,) * 129, {}, "a source of 129 tokens is more than the 128 that are read; shorten it[.]"),
        ((PAD_ID,), (5,) * 65, {"max_tokens_per_iteration": 64}, "or raise max_tokens_per_iteration"),
        ((PAD_ID,), (5,) * 5, {"num_blocks": 4}, "beside 5 of the source, more than the 16 that the KV cache holds"),
    ],
)
def test_what_can_never_run_is_refused(
    prompt: tuple[int, ...], source: tuple[int, ...], settings: dict[str, Any], message: str
) -> None:
    engine = make_engine(model(1), **settings)
    with pytest.raises(OfframpError, match=message):
        engine.add_request(Request("a", prompt, SamplingParams(max_tokens=8), source_token_ids=source))


def test_prompt_logprobs_and_probes_are_refused() -> None:
    engine = make_engine(model(1))
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with pytest.raises(OfframpError, match="prompt_logprobs are those of a text that the model continues"):
        engine.add_request(Request("a", (PAD_ID,), sampling, source_token_ids=(5,)))
    with pytest.raises(OfframpError, match="this one has an encoder"):
        engine.probe([5, 6])
