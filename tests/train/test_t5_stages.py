"""How a T5 is divided among stages."""

from __future__ import annotations

import pytest

from helpers.gradients_t5 import ENCODER_LAYERS, T5Case
from offramp.common.errors import OfframpError
from offramp.train.pipeline.stages import layer_costs, plan_stages
from offramp.train.pipeline.t5_stages import make_stage


def test_stages_share_the_tables_of_biases_and_what_exits_read() -> None:
    model = T5Case(tied_embeddings=False, head="final").model()
    plan = plan_stages(model.config, model.exit_config, 4, [2, 4, 5])
    assert (plan.encoder_bounds, plan.bounds) == ((0, 2, 3, 3, 3), (0, 0, 1, 2, 4))
    assert [plan.exits_of(stage) for stage in range(4)] == [(), (), (1,), (2, 4)]
    assert plan.shared == {
        "encoder.relative_attention_bias.weight": (0, 1),
        "lm_head.weight": (2, 3),
        "norm.weight": (2, 3),
        "relative_attention_bias.weight": (1, 2, 3),
    }
    held = [set(make_stage(model, plan, index).state_dict()) for index in range(4)]
    assert set().union(*held) == set(model.state_dict()), "stages name parameters as the model does"
    for one in range(4):
        for other in range(one):
            shared = {name for name, stages in plan.shared.items() if {one, other} <= set(stages)}
            assert held[one] & held[other] == shared


def test_long_sources_move_the_boundary_into_the_encoder() -> None:
    model = T5Case().model()
    config, exits = model.config, model.exit_config
    short, long = (plan_stages(config, exits, 2, source_share=share) for share in (0.1, 20.0))
    assert short.bounds[1] > 0
    assert 0 < long.encoder_bounds[1] < ENCODER_LAYERS
    one, two = (layer_costs(config, exits, source_share=share).blocks for share in (1.0, 2.0))
    encoder = sum(p.numel() for p in model.encoder.layers[0].parameters() if p.dim() == 2)
    assert (one[0], two[0]) == (encoder, 2 * encoder)
    decoder = sum(p.numel() for p in model.layers[0].parameters() if p.dim() == 2)
    cross = model.layers[0].cross_attn
    keys_values = cross.k_proj.weight.numel() + cross.v_proj.weight.numel()
    assert (one[-1], two[-1]) == (decoder, decoder + keys_values)


def test_too_many_stages_are_refused() -> None:
    model = T5Case().model()
    with pytest.raises(OfframpError, match=r"stage_bounds \[7\] must be 1 ascending layer numbers inside 1\.\.6"):
        plan_stages(model.config, model.exit_config, 2, [7])
    with pytest.raises(OfframpError, match="a model of 7 layers cannot be divided into 8 stages"):
        plan_stages(model.config, model.exit_config, 8)
