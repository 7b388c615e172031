"""`offramp plan` of encoder-decoder models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.tiny_t5 import hugging_face_t5, load_t5
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.importing import NewExits, import_model
from offramp.train.pipeline.t5_costs import decoder_layer_cost, encoder_layer_cost
from offramp.train.pipeline.t5_stages import make_stage
from offramp.train.plan import describe, plan_recipe

ROOT = Path(__file__).parents[2]
STRATEGY = "offramp.train.pipeline.strategy.DeepSpeedPipelineStrategy"
TFLOPS = ("plan.tflops", "0.001")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three encoder and four decoder layers, exits after the first and the second of these."""
    folder = tmp_path_factory.mktemp("t5")
    hugging_face_t5(folder / "hf", num_layers=3, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    import_model(str(folder / "hf"), folder / "start", exits=NewExits(ExitConfig((1, 2), "norm")))
    return folder / "start"


def write(
    directory: Path, start: Path, strategy: dict[str, Any], module: dict[str, Any] | None = None, **trainer: Any
) -> Path:
    sizes = {"batch_size": 8, "sequence_length": 32, "source_length": 64}
    arguments = {"pipe": 2, "micro_batches": 4, **strategy}
    content = {
        "data": {"tokenizer": str(start), "train": {"path": "nowhere.jsonl"}, **sizes},
        "model": {"checkpoint": str(start), **(module or {})},
        "trainer": {
            "devices": 4,
            "strategy": {"class_path": STRATEGY, "init_args": arguments},
            "precision": "32-true",
            **trainer,
        },
    }
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_stages_hold_slices_of_both_sides(tmp_path: Path, start: Path) -> None:
    planned = plan_recipe([write(tmp_path, start, {"pipe": 4, "stage_bounds": [2, 4, 5]})], [TFLOPS])
    model, estimator = load_t5(start).model, planned.estimator
    stages = planned.record()["stages"]
    assert [(stage["encoder_layers"], stage["layers"]) for stage in stages] == [
        ([1, 2], []),
        ([3, 3], [1, 1]),
        ([], [2, 2]),
        ([], [3, 4]),
    ]
    assert [stage["exits"] for stage in stages] == [[], [], [1], [2, 4]]
    for index, memory in enumerate(estimator.memory()):
        assert memory.parameters == sum(p.numel() for p in make_stage(model, estimator.plan, index).parameters())
    text = describe(planned)
    assert "encoder layers  decoder layers" in text
    assert "4 micro-batches of 2 x (64 source + 32 target) tokens on each replica, 768 tokens in all" in text
    assert text.count("what fit runs") == 1
    assert "bubbles filled" not in text, "fit does not fill those of a T5"
    for variant in planned.variants:
        assert variant.bound is None or variant.timeline.seconds <= variant.bound * (1 + 1e-9)


def test_long_sources_move_the_boundary_and_take_their_time(tmp_path: Path, start: Path) -> None:
    recipe = write(tmp_path, start, {})
    given = [TFLOPS, ("plan.link_gbps", "1")]
    planned = plan_recipe([recipe], given)
    estimator, shape = planned.estimator, planned.estimator.shape
    config = load_t5(start).config
    times = estimator.times
    assert times.encoder_layer.forward == pytest.approx(encoder_layer_cost(config, shape).flops / 1e9)
    assert times.layer.forward == pytest.approx(decoder_layer_cost(config, shape).flops / 1e9)
    assert times.transfer == pytest.approx(2 * (64 + 32) * 32 * 4 * 8 / 1e9), "sources and targets are one message"
    longer = plan_recipe([recipe], [*given, ("data.source_length", "640")]).estimator
    assert longer.plan.encoder_bounds[1] < estimator.plan.encoder_bounds[1] + estimator.plan.bounds[1]
    assert longer.times.encoder_layer.forward > 10 * times.encoder_layer.forward, "attention grows faster than sources"
    # Cross-attention reads them, too.
    assert longer.times.layer.forward > times.layer.forward
    again = replace(shape, source_time=640)
    assert longer.times.layer.forward == pytest.approx(decoder_layer_cost(config, again).flops / 1e9)


def test_a_profile_measures_layers_of_both_sides(tmp_path: Path, start: Path) -> None:
    planned = plan_recipe([write(tmp_path, start, {})], [("plan.profile", "true")])
    times = planned.estimator.times
    for seconds in (times.embedding, times.encoder_layer, times.layer, *times.heads.values()):
        assert 0 < seconds.forward < 10
        assert 0 < seconds.backward < 10
    given = plan_recipe([write(tmp_path, start, {})], [TFLOPS, ("plan.time.encoder_layer_forward", "0.25")])
    assert given.record()["times"]["encoder_layer"] == [0.25, 0.5]


def test_a_frozen_encoder_costs_no_backward_pass(tmp_path: Path, start: Path) -> None:
    bounds = {"stage_bounds": [3]}
    whole, frozen = (
        plan_recipe([write(tmp_path, start, bounds, {"freeze": names})], [TFLOPS]).estimator.works()
        for names in ([], ["encoder", "embed_tokens"])
    )
    assert (whole[0].backward, frozen[0].backward) == (pytest.approx(2 * whole[0].forward), 0.0)
    assert frozen[0].held < 0.5 * whole[0].held
    assert frozen[1].backward <= whole[1].backward


def test_what_fit_would_refuse_is_refused(tmp_path: Path, start: Path) -> None:
    with pytest.raises(OfframpError, match="tensor is 2, but the layers of a T5"):
        plan_recipe([write(tmp_path, start, {"tensor": 2})], [TFLOPS])
    with pytest.raises(OfframpError, match="fill_bubbles is made for decoder-only models"):
        plan_recipe([write(tmp_path, start, {"fill_bubbles": True})], [TFLOPS])
    with pytest.raises(OfframpError, match="T5 does not run in fp16"):
        plan_recipe([write(tmp_path, start, {}, precision="16-mixed")], [TFLOPS])
    with pytest.raises(OfframpError, match=r"plan needs data\.source_length"):
        plan_recipe([write(tmp_path, start, {})], [TFLOPS, ("data.source_length", "null")])


def test_the_recipe_for_e2e_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    model = ("vars.model", "configs/t5/models/small")
    planned = plan_recipe([Path("configs/t5/e2e.yaml")], [TFLOPS, model, ("vars.data", "nowhere")])
    plan = planned.estimator.plan
    assert (plan.encoder_bounds, plan.bounds) == ((0, 4), (0, 8))
    assert describe(planned).count("what fit runs") == 1
