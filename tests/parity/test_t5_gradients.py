"""T5: losses and gradients of packed batches, of stages in a row and in processes are those of single pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from helpers.gradients import pipeline
from helpers.gradients_t5 import ENCODER_LAYERS, T5Case, in_a_row, t5_oracle, worst
from helpers.processes import run_processes
from offramp.train.layer_dropout import LayerDropout
from offramp.train.losses import ExitLosses, ExitSums, exit_reader
from offramp.train.model_input import enter
from offramp.train.objective import ObjectiveConfig

BACKBONE = ("embed_tokens", "encoder", "layers", "norm", "relative")
WHOLE = {
    "T5, tied and scaled": T5Case(),
    "v1.1, a head of its own": T5Case(tied_embeddings=False),
    "exits with unembeddings of their own": T5Case(tied_exits=False),
    "shared final norm": T5Case(exits=(1, 3), head="final"),
    "adapters, fill-aware": T5Case(head="adapter", fill_aware={1: 0.3, 2: 0.3}),
    "layer dropout": T5Case(layer_dropout=LayerDropout(0.6)),
    "CALM's weights": T5Case(exits=(1, 2, 3), exit_weights="calm"),
}
STAGES = {
    "tied, between encoder and decoder": (2, T5Case()),
    "untied": (2, T5Case(tied_embeddings=False)),
    "nothing tied": (2, T5Case(tied_embeddings=False, tied_exits=False)),
    "in the middle of the encoder": (2, T5Case(bounds=(1,))),
    "in the middle of the decoder, an exit there": (2, T5Case(bounds=(ENCODER_LAYERS + 2,), exits=(1, 2, 3))),
    "an exit there, on the earlier stage": (
        2, T5Case(bounds=(ENCODER_LAYERS + 2,), exits=(2,), exit_placement="same_stage"),
    ),
    "four stages": (4, T5Case(bounds=(2, 4, 5), exits=(1, 2, 3), head="final")),
    "four stages, untied": (4, T5Case(bounds=(2, 4, 5), tied_embeddings=False, fill_aware={1: 0.3, 2: 0.3})),
    "a stage for every layer": (7, T5Case(bounds=None, exits=(1, 2, 3))),
    "one stage": (1, T5Case(bounds=(), exits=(1, 3))),
    "activation checkpointing, layer dropout": (
        3, T5Case(bounds=(2, 5), checkpoint_activations=True, layer_dropout=LayerDropout(0.6)),
    ),
    "frozen encoder": (3, T5Case(bounds=(2, 5), frozen=("encoder", "embed_tokens"))),
    "exits alone": (2, T5Case(bounds=(5,), head="adapter", frozen=BACKBONE, exits=(1, 2))),
}  # fmt: skip
PROCESSES: dict[str, tuple[int, T5Case]] = {
    "tied": (2, T5Case()),
    "untied": (2, T5Case(tied_embeddings=False)),
    "cut in the decoder, clipping": (2, T5Case(bounds=(ENCODER_LAYERS + 1,), clip=0.5, exits=(1, 2, 3))),
    "cut in the encoder, ZeRO-1": (2, T5Case(bounds=(2,), zero_stage=1)),
    "two replicas": (1, T5Case(bounds=(), micro_batches=2)),
}
FOUR_PROCESSES: dict[str, tuple[int, T5Case]] = {
    "two stages, two replicas": (2, T5Case(micro_batches=2)),
    "the same, cut in the decoder, untied": (
        2, T5Case(bounds=(ENCODER_LAYERS + 2,), tied_embeddings=False, exits=(1, 2, 3), micro_batches=2),
    ),
    "four stages": (4, T5Case(bounds=(2, 4, 5), exits=(1, 2, 3), head="final")),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_a_packed_batch_is_its_pairs(name: str) -> None:
    case = replace(WHOLE[name], double=True)
    exact, report = t5_oracle(case)
    model, batch = case.model(), case.batch(0)
    assert int(batch.tokens.segment_ids.max()) > 1, "nothing is packed"
    objective = case.run_objective().at(case.step)
    h, layout = enter(model, batch)
    states, depth = {}, 0
    for layer in objective.layers:
        h, depth = model.run_layers(h, depth, layer, layout), layer
        states[layer] = h
    sums, readers = ExitSums(objective.layers, h.device), {layer: exit_reader(model, layer) for layer in states}
    losses = ExitLosses(objective, readers, states, batch, layout, objective.counts(batch), sums)
    torch.stack(list(losses)).sum().backward()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    error, parameter = worst(found, exact, report["norm"])
    assert error < 1e-12, f"{parameter}: {error}"
    reported = sums.report(objective)
    for key in (key for key in report if key.startswith("loss")):
        assert reported[key] == pytest.approx(report[key], rel=1e-11)


@pytest.mark.parametrize("name", STAGES)
def test_stages_in_a_row_are_one_process(name: str) -> None:
    num_stages, case = STAGES[name]
    case = replace(case, double=True)
    exact, report = t5_oracle(case)
    found, reported = in_a_row(case, num_stages)
    assert found.keys() == exact.keys()
    error, parameter = worst(found, exact, report["norm"])
    assert error < 1e-12, f"{parameter}: {error}"
    for key in (key for key in report if key.startswith("loss")):
        assert reported[key] == pytest.approx(report[key], rel=1e-11)
    if "encoder" not in case.frozen and not name.startswith("exits alone"):
        assert float(exact["encoder.layers.0.self_attn.q_proj.weight"].norm()) > 1e-4, "the encoder learns nothing"


def fp32_error(case: T5Case, replicas: int, exact: dict[str, Any], norm: float) -> float:
    single, _ = t5_oracle(case, replicas)
    return worst(single, exact, norm)[0]


def check_processes(num_processes: int, cases: dict[str, tuple[int, T5Case]]) -> None:
    """Gradients, their norm and losses of a pipeline's processes are those of one process."""
    answers = run_processes(pipeline, num_processes, cast("list[Any]", list(cases.values())), timeout_s=600)
    for index, (name, (pipe, case)) in enumerate(cases.items()):
        replicas = num_processes // pipe
        exact, report = t5_oracle(replace(case, double=True), replicas)
        bound, close = 1e-12, 1e-11
        if not case.double:
            bound, close = max(1e-6, 2.0 * fp32_error(case, replicas, exact, report["norm"])), 1e-5
        if case.clip:
            scale = case.clip / (report["norm"] + 1e-6)
            assert scale < 1.0
            exact = {parameter: gradient * scale for parameter, gradient in exact.items()}
        seen = set()
        for answer in (every[index] for every in answers):
            error, parameter = worst(answer["gradients"], exact, report["norm"])
            assert error < bound, f"{name}, {parameter}: {error}"
            assert answer["norm"] == pytest.approx(report["norm"], rel=close)
            seen |= answer["gradients"].keys()
            for kind in ("train", "eval"):
                for key in (key for key in report if key.startswith("loss")):
                    assert answer[kind][key] == pytest.approx(report[key], rel=10 * close), f"{name}: {kind} {key}"
        assert seen == exact.keys(), "a parameter lies on no stage"


@pytest.mark.slow
def test_two_processes_equal_one() -> None:
    """In fp64 to 1e-12, and in fp32 about as exactly as one process is."""
    cases = {name: (pipe, replace(case, double=not case.zero_stage)) for name, (pipe, case) in PROCESSES.items()}
    check_processes(2, cases | {f"{name}, fp32": PROCESSES[name] for name in ("tied", "untied")})


@pytest.mark.slow
def test_four_processes_equal_one() -> None:
    check_processes(4, {name: (pipe, replace(case, double=True)) for name, (pipe, case) in FOUR_PROCESSES.items()})


def test_distillation_and_soft_labels_read_scaled_states() -> None:
    """Everything that asks a reader for states gets them as the unembedding reads them."""
    case = T5Case(exits=(2,), objective=ObjectiveConfig(distill=0.5), double=True)
    model, batch = case.model(), case.batch(0)
    h, layout = enter(model, batch)
    mask = batch.trained(4)
    for layer in (2, 4):
        state = model.run_layers(h, 0, layer, layout)
        expected = model.exit_logits(state, layer)[mask]
        torch.testing.assert_close(exit_reader(model, layer)(state, mask, layout), expected)
