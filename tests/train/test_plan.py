"""`offramp plan`: every recipe of the repository can be planned, and the numbers are those of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from helpers.tiny import tiny_checkpoint
from offramp.common.checkpoint import load_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.model.config import ModelConfig
from offramp.train.cli import build
from offramp.train.pipeline.costs import layer_cost
from offramp.train.pipeline.report import stage_records
from offramp.train.pipeline.stages import Stage
from offramp.train.plan import Planned, describe, main, plan_recipe
from offramp.train.recipe import RecipeArguments

ROOT = Path(__file__).parents[2]
# Classifiers are trained on cached states, without the stages that a plan is about.
RECIPES = [path for path in sorted((ROOT / "configs" / "train").glob("*.yaml")) if path.stem != "classifiers"]
STRATEGY = "offramp.train.pipeline.strategy.DeepSpeedPipelineStrategy"
TFLOPS = ("plan.tflops", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied, so that bubbles may be filled."""
    exits = ExitConfig((1, 2), head="norm", tied=False)
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", exits)


@pytest.fixture
def recipe(tmp_path: Path, model: Path) -> Path:
    return write(tmp_path, model)


def write(
    directory: Path,
    model: Path,
    init_args: dict[str, Any] | None = None,
    module: dict[str, Any] | None = None,
    **sections: Any,
) -> Path:
    content = {
        "data": {"tokenizer": str(model), "train": {"path": "nowhere.jsonl"}, "sequence_length": 64, "batch_size": 16},
        "model": {"checkpoint": str(model), **(module or {})},
        "trainer": {
            "devices": 4,
            "strategy": {"class_path": STRATEGY, "init_args": {"pipe": 4, "micro_batches": 8, **(init_args or {})}},
            "precision": "32-true",
        },
        **sections,
    }
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def steps(planned: Planned) -> dict[str, float]:
    return {variant.name: variant.timeline.seconds for variant in planned.variants}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_plans(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    planned = plan_recipe([path], [("plan.tflops", "100")])
    text = describe(planned)
    assert text.count("what fit runs") == 1
    remarks = ("the slowest stage", "curriculum: every exit", "tensor 4: each layer sums")
    faults = [note for note in planned.notes if not note.startswith(remarks)]
    assert not faults, "recipes are cut evenly and fit their devices"
    for variant in planned.variants:
        assert variant.bound is None or variant.timeline.seconds <= variant.bound * (1 + 1e-9)
    # The model is what its name says.
    totals = {
        "1.3b": 1.35e9,
        "7b": 6.7e9 + 0.26e9,
        "30b": 32.5e9 + 0.43e9,
        "tune_llama-3-8b": 12.97e9 - 4 * 0.218e9,  # layers above the last exit are not there
        "tune_qwen3-8b": 10.5e9 - 9 * 0.193e9,
    }
    if path.stem in totals:
        parameters = sum(p.numel() for p in planned.estimator.model.parameters())
        assert parameters == pytest.approx(totals[path.stem], rel=0.1)


def test_there_are_recipes() -> None:
    assert {"tiny", "125m", "1.3b", "7b", "30b", "layerskip_1.3b"} <= {path.stem for path in RECIPES}


def test_the_plan_is_that_of_the_strategy(recipe: Path, model: Path) -> None:
    planned = plan_recipe([recipe], [TFLOPS])
    estimator, network = planned.estimator, load_checkpoint(model).model
    for index, memory in enumerate(estimator.memory()):
        stage = Stage(network, estimator.plan, index)
        assert memory.parameters == sum(p.numel() for p in stage.parameters())
        assert memory.weights == 4 * memory.parameters
    assert (estimator.micro_batches, estimator.shape.rows, estimator.replicas) == (8, 2, 1)
    assert estimator.plan.num_stages == 4


def test_what_fit_would_refuse_is_refused(tmp_path: Path, model: Path) -> None:
    unknown = write(tmp_path, model, {"expert": 2})
    for refuse in (lambda: plan_recipe([unknown], [TFLOPS]), lambda: build(RecipeArguments([unknown]))):
        with pytest.raises(OfframpError, match=r"unknown configuration key 'trainer\.strategy.*expert'"):
            refuse()
    with pytest.raises(OfframpError, match=r"unknown configuration key 'model.curriculum'"):
        plan_recipe([write(tmp_path, model, module={"curriculum": "rotational"})], [TFLOPS])
    with pytest.raises(OfframpError, match=r"6 processes .* cannot form pipelines of 4 stages"):
        plan_recipe([write(tmp_path, model)], [TFLOPS, ("trainer.devices", "6")])
    with pytest.raises(OfframpError, match="a batch of 16 rows cannot be cut into 32 micro-batches"):
        plan_recipe([write(tmp_path, model, {"micro_batches": 32})], [TFLOPS])
    with pytest.raises(OfframpError, match="4 layers cannot be divided into 5 stages"):
        plan_recipe([write(tmp_path, model, {"pipe": 5})], [TFLOPS, ("trainer.devices", "5")])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("plan.speed", "3", "unknown configuration key 'plan.speed'; the keys there are tflops"),
        ("plan.time.head", "3", "unknown configuration key 'plan.time.head'"),
        ("plan.tflops", "0", "'plan.tflops' must be above 0"),
        ("plan.time.transfer", "-1", "'plan.time.transfer' must be 0 or more"),
        ("plan.fill_warmup", "1.5", "'plan.fill_warmup' must be a whole number"),
        ("plan.profile", "perhaps", "'plan.profile' must be true or false"),
        ("plan.link_gbps", "fast", "'plan.link_gbps' must be above 0, but its value is fast"),
    ],
)
def test_faults_of_the_section_plan(recipe: Path, key: str, value: str, message: str) -> None:
    with pytest.raises(OfframpError, match=message):
        plan_recipe([recipe], [(key, value)])


def test_tensor_ranks_share_parameters_work_and_activations(tmp_path: Path, model: Path) -> None:
    shared = plan_recipe([write(tmp_path, model, {"pipe": 2, "tensor": 2})], [TFLOPS])
    whole = plan_recipe([write(tmp_path, model, {"pipe": 2})], [TFLOPS])
    assert (shared.estimator.replicas, whole.estimator.replicas) == (1, 2)
    for half, full, norms in zip(shared.estimator.memory(), whole.estimator.memory(), (5, 6), strict=True):
        assert half.parameters == full.parameters / 2 + 32 * norms / 2, "norms are on every rank"
    for half, full in zip(shared.estimator.works(), whole.estimator.works(), strict=True):
        assert half.forward == pytest.approx(full.forward / 2)
        assert full.held / 2 < half.held < full.held
    assert "2 stages x 1 replicas x 2 tensor ranks" in describe(shared)
    assert any("sums" in note for note in shared.notes)
    with pytest.raises(OfframpError, match=r"tensor is 3, but 4 query heads .* choose one of 1, 2"):
        plan_recipe([write(tmp_path, model, {"pipe": 1, "tensor": 3})], [TFLOPS])


def test_given_times_are_used(recipe: Path) -> None:
    given = [
        TFLOPS,
        ("plan.time.layer_forward", "2"),
        ("plan.time.exit_forward", "0"),
        ("plan.time.final_forward", "0"),
    ]
    planned = plan_recipe([recipe], given)
    times = steps(planned)
    # Four stages of one layer each, 2 s forward and 4 s back; (M + S - 1) (f + b).
    assert times["no early exits"] == pytest.approx((8 + 3) * 6.0)
    assert times["exits, deferred to the backward pass"] == pytest.approx((8 + 3) * 6.0)
    assert times["deferred, activation checkpointing"] == pytest.approx((8 + 3) * 8.0)
    assert times["deferred, bubbles filled"] == pytest.approx((8 + 3) * 6.0)
    filled = planned.variants[-1].filling
    assert filled is not None
    # K = 2, but the last exit that early stages meet is that of stage 2, which two micro-batches cannot both reach.
    assert (filled.capacity, filled.warmup, filled.cooldown) == (2, 1, 2)
    assert planned.estimator.plan.exits_of(0) == ()
    assert [n for n in planned.notes if "fill" in n] == []
    more = plan_recipe([recipe], [*given, ("plan.fill_warmup", "5"), ("plan.fill_cooldown", "1")])
    assert more.notes == ["fill_warmup 5 is more than the bubble has room for; 1 are planned."]
    assert "given, and what is not given estimated" in describe(more)


def test_times_from_operations(recipe: Path) -> None:
    planned = plan_recipe([recipe], [("plan.tflops", "0.001"), ("plan.link_gbps", "1")])
    times, shape = planned.estimator.times, planned.estimator.shape
    config = planned.estimator.model.config
    assert isinstance(config, ModelConfig)
    assert times.layer.forward == pytest.approx(layer_cost(config, shape).flops / 1e9)
    assert times.layer.backward == pytest.approx(2 * times.layer.forward)
    assert times.transfer == pytest.approx(2 * 64 * 32 * 4 * 8 / 1e9)


def test_a_profile_measures_every_module(recipe: Path) -> None:
    planned = plan_recipe([recipe], [("plan.profile", "true")])
    times = planned.estimator.times
    assert "measured on this machine" in times.source
    for seconds in (times.embedding, times.layer, *times.heads.values()):
        assert 0 < seconds.forward < 10
        assert 0 < seconds.backward < 10
    assert set(times.heads) == {1, 2, 4}


def test_a_frozen_backbone_costs_no_backward_pass(tmp_path: Path, model: Path) -> None:
    heads = [("plan.time.exit_forward", "0"), ("plan.time.final_forward", "0")]
    frozen = plan_recipe([write(tmp_path, model, module={"freeze": ["backbone"]})], [TFLOPS, *heads])
    whole = plan_recipe([write(tmp_path, model)], [TFLOPS, *heads])
    for work, layer in zip(frozen.estimator.works(), whole.estimator.works(), strict=True):
        assert work.seconds("backward") == 0
        assert work.seconds("forward") == layer.seconds("forward") > 0
        assert work.held < layer.held
    assert sum(memory.trained for memory in frozen.estimator.memory()) == 2 * (32 + 300 * 32)
    # Where only the upper half is trained, its first layer needs no gradient of its input.
    upper = plan_recipe([write(tmp_path, model, module={"freeze": ["embed_tokens", "layers.0", "layers.1"]})], [TFLOPS])
    unit = upper.estimator.times.layer.backward
    assert [work.backward for work in upper.estimator.works()] == pytest.approx([0, 0, unit / 2, unit])


def test_layers_above_the_last_trained_exit_cost_nothing(tmp_path: Path, model: Path) -> None:
    tuned = {"freeze": ["backbone"], "final_weight": 0.0}
    planned = plan_recipe([write(tmp_path, model, {"pipe": 2}, tuned, plan={"tflops": 1})])
    assert planned.record()["stages"][-1]["layers"] == [2, 2]
    assert [stage["exits"] for stage in planned.record()["stages"]] == [[], [1, 2]]


def test_shared_parameters_forbid_filling(tmp_path: Path) -> None:
    tied = tiny_checkpoint(tmp_path / "tied", ExitConfig((1, 2)), tie_word_embeddings=True)
    planned = plan_recipe([write(tmp_path, tied)], [TFLOPS])
    assert planned.variants[-1].filling is None
    assert "not with parameters that stages share (embed_tokens.weight)" in describe(planned)


def test_memory_of_checkpointing_and_placement(recipe: Path) -> None:
    variants = {v.name: v.timeline.peaks for v in plan_recipe([recipe], [TFLOPS]).variants}
    ends = variants["exits, at the end of their stage"]
    starts = variants["exits, at the start of the next"]
    deferred = variants["exits, deferred to the backward pass"]
    again = variants["deferred, activation checkpointing"]
    assert [peak.logits for peak in ends] == [4, 3, 0, 1]
    assert [peak.logits for peak in starts] == [0, 3, 2, 1]
    assert [peak.logits for peak in deferred] == [0, 1, 1, 1]
    assert [peak.in_flight for peak in deferred] == [4, 3, 2, 1]
    for some, less in ((starts, deferred), (deferred, again)):
        assert all(a.bytes >= b.bytes for a, b in zip(some, less, strict=True))
    assert again[0].bytes < deferred[0].bytes


def test_what_fit_runs_is_what_the_strategy_says(tmp_path: Path, model: Path) -> None:
    kept = plan_recipe([write(tmp_path, model)], [TFLOPS])
    again = plan_recipe([write(tmp_path, model, {"checkpoint_activations": True})], [TFLOPS])
    names = [[variant.name for variant in planned.variants if variant.runs] for planned in (kept, again)]
    assert names == [["exits, deferred to the backward pass"], ["deferred, activation checkpointing"]]
    first = [stage_records(planned.estimator)[0] for planned in (kept, again)]
    assert first[1]["activations_bytes"] < 0.5 * first[0]["activations_bytes"]
    assert first[1]["backward_s"] > first[0]["backward_s"]


def test_ddp_is_one_stage(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path, model)
    content = yaml.safe_load(path.read_text())
    content["trainer"] = {"devices": 4, "strategy": "ddp"}
    path.write_text(yaml.safe_dump(content))
    planned = plan_recipe([path], [TFLOPS])
    assert (planned.estimator.plan.bounds, planned.estimator.replicas) == ((0, 4), 4)
    assert planned.variants[0].timeline.bubble_share == 0


def test_the_command_writes_json_and_a_picture(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-c", str(recipe), "--tflops", "1", "--time.transfer=1e-6", "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "stage  layers  exits" in text
    assert main(["-c", str(recipe), "--tflops=1", "--time.transfer=1e-6", "--json", "true"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((tmp_path / "out" / "plan.json").read_text())
    assert [stage["layers"] for stage in record["stages"]] == [[1, 1], [2, 2], [3, 3], [4, 4]]
    assert sum(variant["runs"] for variant in record["variants"]) == 1
    assert (tmp_path / "out" / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "give a configuration file" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "--tflops" in capsys.readouterr().out


def test_nothing_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    planned = plan_recipe([ROOT / "configs" / "train" / "30b.yaml"])
    assert all(p.device == torch.device("meta") for p in planned.estimator.model.parameters())
