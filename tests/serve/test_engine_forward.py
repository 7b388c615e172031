"""The executor: what it runs, what it leaves out, and how near its numbers are to the model's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pytest
import torch

from helpers.engines import MAX_MODEL_LEN, Job, layer_runs, make_engine, random_jobs, run_jobs
from helpers.tiny import tiny_model
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.common.model.transformer import MultiExitTransformer
from offramp.serve.config import EngineConfig, Kernels
from offramp.serve.execution.executor import Executor
from offramp.serve.execution.sync_policy import LeaveIfItPays, LeaveTogether, PassTimes, leave_alone
from offramp.serve.kv_cache.storage import KVStorage
from offramp.serve.model.packed import PackedModel
from offramp.serve.model.rows import build_rows
from offramp.serve.request.logits_use import LogitsUse
from offramp.serve.request.request import Request
from offramp.serve.request.sampling_params import SamplingParams
from offramp.serve.scheduling.scheduler_output import Phase, ScheduledRequest

EXITS = ExitConfig((1, 2, 3), "norm")
AT_2 = ExitPolicy("cosine", {2: -2.0})


@pytest.mark.parametrize("sync_policy", ["all", "regroup"])
def test_layers_above_the_exit_are_not_called(sync_policy: str) -> None:
    engine = make_engine(tiny_model(EXITS), sync_policy=sync_policy)
    jobs = [Job((5, 6, 7), 11, AT_2), Job((8, 9), 11, AT_2)]
    results = run_jobs(engine, jobs, every=0)
    assert [layers for _, layers in results] == [[4] + [2] * 10] * 2
    # One pass for the prompts, of 5 rows, at full depth; then ten of two rows that end at layer 2.
    assert layer_runs(engine) == ([11, 11, 1, 1], [25, 25, 5, 5])
    assert engine.metrics.totals.filled_rows == 0  # nobody looks at what lies above
    assert engine.num_kept_tokens == 0


def test_rows_that_left_are_not_carried_through_the_layers_above() -> None:
    engine = make_engine(tiny_model(EXITS))
    run_jobs(engine, [Job((5, 6, 7), 11, AT_2), Job((8, 9), 11, None)], every=0)
    assert layer_runs(engine) == ([11] * 4, [25, 25, 15, 15])


def test_one_row_at_full_depth_keeps_nobody_inside_under_all() -> None:
    engine = make_engine(tiny_model(EXITS), sync_policy="all")
    results = run_jobs(engine, [Job((5, 6, 7), 6, AT_2), Job((8, 9), 6, None)], every=0)
    assert results[0][1] == [4] + [2] * 5
    assert results[1][1] == [4] * 6


@pytest.mark.parametrize("sync_policy", ["all", "regroup"])
@pytest.mark.parametrize("measure", ["margin", "max_probability", "entropy", "cosine"])
@pytest.mark.parametrize(
    "thresholds",
    # The first are closed, so nothing is tested; the others are tested at every token and never exceeded.
    [{1: 1.0, 2: 1.5, 3: 2.0}, {1: 1 - 1e-9, 2: 1.5, 3: 1 - 1e-9}],
)
def test_thresholds_that_nothing_exceeds_are_exactly_full_depth(
    measure: str, sync_policy: str, thresholds: dict[int, float]
) -> None:
    model = tiny_model(EXITS, seed=1)
    never = ExitPolicy(measure, thresholds)  # pyright: ignore[reportArgumentType]
    jobs = random_jobs([never] * 4)
    full = run_jobs(make_engine(model), [Job(job.prompt, job.max_tokens) for job in jobs])
    engine = make_engine(model, sync_policy=sync_policy)
    assert run_jobs(engine, jobs) == full
    assert engine.metrics.totals.filled_rows == 0
    assert len(set(layer_runs(engine)[1])) == 1


def mask(text: str) -> npt.NDArray[np.bool_]:
    return np.array([char == "x" for char in text])


def test_sync_rules() -> None:
    everybody, most = LeaveTogether(), LeaveTogether(0.75)
    for sure, alone, together, quantile in [
        ("x.x.", "x.x.", "....", "...."),
        ("xxx.", "xxx.", "....", "xxxx"),
        ("xxxx", "xxxx", "xxxx", "xxxx"),
        ("....", "....", "....", "...."),
    ]:
        assert np.array_equal(leave_alone(mask(sure), 2, 9), mask(alone))
        assert np.array_equal(everybody(mask(sure), 2, 9), mask(together))
        assert np.array_equal(most(mask(sure), 2, 9), mask(quantile))


def test_a_batch_is_split_only_where_that_pays() -> None:
    times = PassTimes(inertia=0.5)
    rule = LeaveIfItPays(times, num_layers=4)
    sure = mask("x...")
    assert np.array_equal(rule(sure, 2, 4), sure), "what was never measured is tried"
    times.ran(0, 4, 4, 4.0)  # a second for each layer, and 2 above the exit
    times.left(2, 4, 0.4)  # a split costs a fifth of that
    assert np.array_equal(rule(sure, 2, 4), sure), "a quarter of the rows is more than a fifth"
    assert np.array_equal(rule(sure, 2, 3), sure), "3 rows are measured as up to 4 are"
    assert np.array_equal(rule(sure, 2, 5), sure), "for 5 rows nothing is known"
    times.left(2, 4, 0.8)
    assert np.isclose(times.pause(2, 4) or 0, 0.6)
    assert not rule(sure, 2, 4).any()
    assert np.array_equal(rule(mask("xx.."), 2, 4), mask("xx.."))
    # Where nobody leaves nothing is learnt, so what was measured once does not hold for ever.
    for _ in range(100):
        rule(sure, 2, 4)
    assert np.array_equal(rule(sure, 2, 4), sure)


def scheduled(prompt: list[int], start: int = 0, count: int | None = None, first_block: int = 0) -> ScheduledRequest:
    request = Request("a", tuple(prompt), SamplingParams(max_tokens=8, temperature=0))
    count = len(prompt) - start if count is None else count
    table = tuple(range(first_block, first_block + 16))
    return ScheduledRequest(request, Phase.PREFILL, start, count, table, samples=start + count == len(prompt))


def prompt_logits(
    model: MultiExitTransformer, prompt: list[int], chunks: list[int], dtype: torch.dtype, pack: bool = True
) -> torch.Tensor:
    """Logits [V] after a prompt that comes in chunks."""
    with torch.no_grad():
        packed = PackedModel(model, dtype, "packed" if pack else "plain")
    config = model.config
    cache = KVStorage(packed.num_cache_layers, 64, 4, config.num_kv_heads, config.head_dim, dtype, poison=True)
    executor = Executor(packed, cache, MAX_MODEL_LEN, EngineConfig())
    start = 0
    for count in chunks[:-1]:
        assert executor.run([scheduled(prompt, start, count)], [None], [LogitsUse.CHOICE]) == []
        start += count
    (departure,) = executor.run([scheduled(prompt, start)], [None], [LogitsUse.CHOICE])
    assert departure.logits is not None
    return departure.logits[0]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("chunks", [[23], [1, 22], [8, 8, 7], [22, 1]])
@pytest.mark.parametrize("window", [None, 5])
@torch.inference_mode()
def test_chunks_give_the_models_logits(chunks: list[int], window: int | None, pack: bool) -> None:
    kind = {} if window is None else {"model_type": "mistral", "sliding_window": window}
    model = tiny_model(**kind)
    prompt = list(range(10, 33))
    expected = model(torch.tensor([prompt])).logits[4][0, -1]
    torch.testing.assert_close(
        prompt_logits(model, prompt, chunks, torch.float32, pack), expected, rtol=1e-5, atol=1e-4
    )


@torch.inference_mode()
def test_bf16_is_as_near_to_fp32_as_the_models_own_bf16() -> None:
    ours, theirs = [], []
    for seed in range(6):
        model = tiny_model(seed=seed)
        prompt = list(range(10 + seed, 40 + seed))
        exact = model(torch.tensor([prompt])).logits[4][0, -1]
        ours.append((prompt_logits(model, prompt, [8, 22], torch.bfloat16) - exact).abs().mean())
        half = tiny_model(seed=seed).to(torch.bfloat16)
        theirs.append((half(torch.tensor([prompt])).logits[4][0, -1].float() - exact).abs().mean())
    assert sum(theirs) > 0
    assert sum(ours) < 1.5 * sum(theirs), (ours, theirs)


def keys_and_values(weights: Mapping[str, torch.Tensor], name: str, x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """By the book, in fp64: what the layer called `name` makes of states [N, D] at positions from 0 on, [N, 2 * K * E].

    Norm, projection, norm of keys where the model has one, rotation; nothing of it is the engine's or the model's code.
    """

    def normed(states: torch.Tensor, norm: str) -> torch.Tensor:
        scale = (states.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt()
        return states * scale * weights[f"{name}.{norm}.weight"].double()

    def projected(projection: str) -> torch.Tensor:
        product = normed(x.double(), "input_layernorm") @ weights[f"{name}.self_attn.{projection}.weight"].double().T
        bias = weights.get(f"{name}.self_attn.{projection}.bias")
        return product if bias is None else product + bias.double()

    keys = projected("k_proj").unflatten(1, (-1, head_dim))
    if f"{name}.self_attn.k_norm.weight" in weights:
        keys = normed(keys, "self_attn.k_norm")
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = torch.polar(torch.ones(len(x), 1, 1).double(), torch.arange(len(x))[:, None, None] * frequencies)
    first, second = keys.chunk(2, dim=-1)
    rotated = torch.complex(first, second) * turns
    return torch.cat((torch.cat((rotated.real, rotated.imag), dim=-1).flatten(1), projected("v_proj")), dim=1)


@pytest.mark.parametrize("kernels", ["auto", "plain"])
@pytest.mark.parametrize("kind", [{}, {"model_type": "qwen3", "head_dim": 16}, {"model_type": "qwen2"}])
@pytest.mark.parametrize("head", ["norm", "block"])
@torch.inference_mode()
def test_fill_writes_what_each_layer_would_make_of_the_exit_state(
    kind: dict[str, object], head: str, kernels: Kernels
) -> None:
    model = tiny_model(ExitConfig((1, 2), head), **kind)  # pyright: ignore[reportArgumentType]
    config = model.config
    packed = PackedModel(model, torch.float32, kernels)
    caches = [
        KVStorage(packed.num_cache_layers, 8, 4, config.num_kv_heads, config.head_dim, torch.float32, poison=True)
        for _ in range(2)
    ]
    rows = build_rows([scheduled([3, 4, 5, 6, 7], first_block=1)], packed.row_context(MAX_MODEL_LEN, 4))
    x = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(0))
    packed.fill(1, x, rows, caches[0])
    for index in range(1, config.num_layers):
        packed.layers.write(index, x, rows, caches[1])
    block = packed.exits[2].block
    if block is not None:
        block.write(x, rows, caches[1])
    first = packed.exits[1].next_cache_layer
    assert packed.num_cache_layers - first == (4 if head == "block" else 3)
    written = [cache.data[:, rows.slots] for cache in caches]
    torch.testing.assert_close(written[0][first:], written[1][first:], rtol=1e-5, atol=1e-5)
    names = ["layers.1", *(["exits.2.block"] if head == "block" else []), "layers.2", "layers.3"]
    weights = model.state_dict()
    defined = torch.stack([keys_and_values(weights, name, x, config.head_dim) for name in names]).float()
    torch.testing.assert_close(written[0][first:], defined, rtol=1e-5, atol=1e-5)
    for cache in caches:  # nothing anywhere else
        assert int(cache.data.isfinite().sum()) == written[0][first:].numel()
