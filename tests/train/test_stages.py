from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from helpers.tiny import tiny_model
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.train.pipeline.stages import ExitPlacement, Stage, layer_costs, plan_stages


@pytest.mark.parametrize("tied_embeddings", [True, False])
@pytest.mark.parametrize("exits", [ExitConfig((1, 2)), ExitConfig((2,), head="final"), ExitConfig((1, 3), tied=False)])
@pytest.mark.parametrize("placement", ["next_stage", "same_stage"])
def test_stages_in_a_row_are_the_model(placement: ExitPlacement, exits: ExitConfig, tied_embeddings: bool) -> None:
    model = tiny_model(exits, tie_word_embeddings=tied_embeddings)
    ids = torch.arange(12).view(1, 12)
    layout = model.layout(ids)
    expected = model(ids, layout)
    plan = plan_stages(model.config, exits, 3, exit_placement=placement)
    x, names = ids, set()
    for index in range(3):
        stage = Stage(model, plan, index)
        x, cuts, _ = stage(x, layout)
        names |= set(stage.state_dict())
        assert tuple(cuts) == plan.exits_of(index)
        for layer, (_, h) in cuts.items():
            assert torch.equal(h, expected.hidden_states[layer])
            everything = torch.ones(1, 12, dtype=torch.bool)
            assert torch.equal(stage.reader(layer)(h, everything, layout), expected.logits[layer][0])
    assert sorted(layer for index in range(3) for layer in plan.exits_of(index)) == [*exits.layers, 4]
    assert names == set(model.state_dict()), "stages name parameters as the model does, and leave none out"


def test_shared_parameters_are_those_that_several_stages_hold() -> None:
    model = tiny_model(ExitConfig((1, 2), head="final"), tie_word_embeddings=True)
    plan = plan_stages(model.config, model.exit_config, 2, [2])
    assert plan.shared == {"embed_tokens.weight": (0, 1), "norm.weight": (0, 1)}
    untied = tiny_model(ExitConfig((1, 2), tied=False), tie_word_embeddings=False)
    assert plan_stages(untied.config, untied.exit_config, 2, [2]).shared == {}
    held = [set(Stage(model, plan, index).state_dict()) for index in range(2)]
    assert held[0] & held[1] == set(plan.shared)


def test_an_exit_between_stages_belongs_to_the_later_one() -> None:
    model = tiny_model(ExitConfig((2,)))
    plan = plan_stages(model.config, model.exit_config, 2, [2])
    assert (plan.exits_of(0), plan.exits_of(1)) == ((), (2, 4))


def test_an_exit_between_stages_may_stay_with_the_earlier_one() -> None:
    model = tiny_model(ExitConfig((2,)))
    plan = plan_stages(model.config, model.exit_config, 2, [2], exit_placement="same_stage")
    assert (plan.exits_of(0), plan.exits_of(1)) == ((2,), (4,))
    with pytest.raises(OfframpError, match="exit_placement is 'middle'; choose one of next_stage, same_stage"):
        plan_stages(model.config, model.exit_config, 2, exit_placement="middle")  # pyright: ignore[reportArgumentType]


def test_balance_pays_for_an_exit_where_it_is_placed() -> None:
    # Three blocks' worth of vocabulary at the exit and at the end: 4 + 3 and 4 + 3, or 5 + 3 and 3 + 3.
    model = tiny_model(ExitConfig((4,), head="bare"), num_hidden_layers=8, vocab_size=816)
    same = plan_stages(model.config, model.exit_config, 2, exit_placement="same_stage")
    following = plan_stages(model.config, model.exit_config, 2)
    assert (same.bounds, following.bounds) == ((0, 4, 8), (0, 5, 8))


def test_balance_counts_heads_and_vocabulary() -> None:
    # A vocabulary that costs as much as four blocks, read by the last stage.
    model = tiny_model(num_hidden_layers=8, vocab_size=1088)
    costs = layer_costs(model.config, model.exit_config)
    assert costs.exits[8] == pytest.approx(1088 * 32)
    assert plan_stages(model.config, model.exit_config, 2).bounds == (0, 6, 8)
    assert plan_stages(model.config, model.exit_config, 2, labelled_share=0.0).bounds == (0, 4, 8)
    assert plan_stages(model.config, model.exit_config, 1).bounds == (0, 8)


@pytest.mark.parametrize("bounds", [[0], [4], [1, 2], [3, 2]])
def test_bounds_that_leave_a_stage_empty_are_refused(bounds: list[int]) -> None:
    model = tiny_model()
    with pytest.raises(OfframpError, match="stage_bounds"):
        plan_stages(model.config, model.exit_config, 2, bounds)


def test_stages_end_at_the_last_layer_that_runs() -> None:
    # Three blocks' worth of vocabulary at each exit that is there: three blocks and an exit, or three blocks and two.
    model = tiny_model(ExitConfig((3, 6, 7), head="bare"), num_hidden_layers=8, vocab_size=816)
    model.drop_layers_above(6)
    plan = plan_stages(model.config, model.exit_config, 2, depth=6)
    assert plan.bounds == (0, 4, 6)
    assert (plan.exits_of(0), plan.exits_of(1)) == ((3,), (6,))
    ids = torch.arange(12).view(1, 12)
    layout = model.layout(ids)
    first, last = Stage(model, plan, 0), Stage(model, plan, 1)
    _, cuts, _ = last(first(ids, layout)[0], layout)
    expected = model(ids, layout, exits=[6])
    assert torch.equal(cuts[6].above, expected.hidden_states[6])
    assert not any(name.startswith("norm") for name in {**first.state_dict(), **last.state_dict()})
    same = plan_stages(model.config, model.exit_config, 2, exit_placement="same_stage", depth=6)
    assert (same.exits_of(0), same.exits_of(1)) == ((3,), (6,))
    with pytest.raises(OfframpError, match="6 layers below the last exit cannot be divided into 7 stages"):
        plan_stages(model.config, model.exit_config, 7, depth=6)


def test_more_stages_than_layers_are_refused() -> None:
    model = tiny_model()
    with pytest.raises(OfframpError, match="4 layers cannot be divided into 5 stages"):
        plan_stages(model.config, model.exit_config, 5)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    from offramp.train.pipeline.stage_module import StageModule

    model = tiny_model()
    stage = Stage(model, plan_stages(model.config, model.exit_config, 1), 0)
    part = cast("Any", SimpleNamespace(stage=stage, slices={}))
    saved = {name: tensor + 1 for name, tensor in stage.state_dict().items()}
    save_file(saved, tmp_path / "stage_00.safetensors")
    StageModule.load_stages(part, tmp_path)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in stage.state_dict().items())
    save_file({**saved, "norm.weight": torch.zeros(31)}, tmp_path / "stage_00.safetensors")
    with pytest.raises(OfframpError, match=r"'norm.weight' has shape \[32\] here, and that has one of shape \[31\]"):
        StageModule.load_stages(part, tmp_path)
    del saved["norm.weight"]
    save_file(saved, tmp_path / "stage_00.safetensors")
    with pytest.raises(OfframpError, match=r"run of another model: 'norm.weight' .* that does not have it"):
        StageModule.load_stages(part, tmp_path)
