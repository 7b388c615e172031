"""Operations of a step against those that torch counts."""

from __future__ import annotations

import psutil
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from helpers.fitting import make_batch
from helpers.tiny import tiny_model
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.train.device_peaks import known_flops, peak_flops
from offramp.train.freezing import freeze_parameters
from offramp.train.losses import ExitLosses, ExitSums, MicroBatch, Objective, exit_reader
from offramp.train.model_flops import ModelFlops
from offramp.train.module import MultiExitModule
from offramp.train.step_meter import peak_memory_bytes

LENGTH, PROMPT = 40, 8


@pytest.mark.parametrize(
    ("exits", "freeze", "depth"),
    [
        (ExitConfig((1, 3), "adapter"), [], 4),
        (ExitConfig((1, 3), "mlp", tied=False), [], 4),
        (ExitConfig((1, 3), "adapter"), ["backbone"], 4),
        (ExitConfig((1, 3), "norm", tied=False), ["backbone"], 4),
        (ExitConfig((1, 3), "final"), ["layers.0.*", "embed_tokens"], 4),
        (ExitConfig((1, 3), "adapter"), [], 3),
    ],
)
def test_operations_are_those_that_torch_counts(exits: ExitConfig, freeze: list[str], depth: int) -> None:
    model = tiny_model(exits, intermediate_size=80).train()
    freeze_parameters(model, freeze)
    model.drop_layers_above(depth)
    micro = MicroBatch(make_batch([(7, PROMPT), (20, PROMPT), (30, 0)], LENGTH))
    reached = tuple(layer for layer in model.exit_layers if layer <= depth)
    objective = Objective(dict.fromkeys(reached, 1.0))
    sums, counts = ExitSums(reached, torch.device("cpu")), objective.counts(micro)
    with FlopCounterMode(display=False) as counter:
        layout = micro.layout(model.config)
        h, done, states = model.embed(micro.tokens.input_ids), 0, {}
        for layer in reached:
            h, done = model.run_layers(h, done, layer, layout), layer
            states[layer] = h
        readers = {layer: exit_reader(model, layer) for layer in reached}
        losses = list(ExitLosses(objective, readers, states, micro, layout, counts, sums))
        sum_of_losses = torch.stack(losses).sum()
        sum_of_losses.backward()
    flops = ModelFlops.of(model)
    trained = dict(zip(reached, counts.tolist(), strict=True))
    assert list(trained.values()) == [3 * LENGTH - 2 * PROMPT] * len(reached)
    # The counter does not know this attention kernel, two products over the causal half of T x T, nor `addmm_`, which
    # makes the gradient of an unembedding.
    attention = 2 * LENGTH * 3 * LENGTH * model.config.num_heads * model.config.head_dim
    product = 2 * (3 * LENGTH - 2 * PROMPT) * model.config.hidden_size * model.config.vocab_size
    products = product * sum(model.unembedding(layer).requires_grad for layer in reached)
    expected = counter.get_total_flops() + attention * sum(flops.layers) + products
    assert flops.of_step(3 * LENGTH, LENGTH, depth, trained) == pytest.approx(expected, rel=0.01)


def test_exits_that_are_left_out_cost_nothing() -> None:
    flops = ModelFlops.of(tiny_model(ExitConfig((1, 3), "adapter")))
    some = flops.of_step(80, LENGTH, 4, {1: 0.0, 3: 50.0, 4: 50.0})
    assert some < flops.of_step(80, LENGTH, 4, {1: 50.0, 3: 50.0, 4: 50.0})
    assert flops.of_step(80, LENGTH, 3, {1: 0.0, 3: 50.0, 4: 0.0}) < some
    assert flops.of_step(0, LENGTH, 4, {}) == 0.0


def test_peaks_of_devices() -> None:
    assert known_flops("NVIDIA H200", "bf16-mixed") == 989e12
    assert known_flops("NVIDIA H100 80GB HBM3", "32-true") == 67e12
    assert known_flops("NVIDIA H100 PCIe", "16-mixed") == 756e12
    assert known_flops("NVIDIA A100-SXM4-80GB", "bf16-mixed") == 312e12
    assert known_flops("Tesla T4", "32-true") == 8.1e12
    assert known_flops("NVIDIA A1000 Laptop GPU", "32-true") is None
    assert peak_flops(torch.device("cpu"), "32-true") is None


def test_peak_memory_is_that_of_the_process() -> None:
    before, now = peak_memory_bytes(torch.device("cpu")), psutil.Process().memory_info().rss
    held = torch.zeros(before - now + 2**26, dtype=torch.uint8).fill_(1)
    assert before + 2**25 < peak_memory_bytes(torch.device("cpu")) < before + 2**27
    assert held[0] == 1


def test_a_peak_of_nothing_is_refused() -> None:
    with pytest.raises(OfframpError, match=r"peak_tflops is 0\.0; it must be above 0"):
        MultiExitModule("nowhere", peak_tflops=0.0)
