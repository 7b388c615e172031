"""What a benchmark measures, and what it asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.tiny import tiny_tokenizer
from offramp.common.errors import OfframpError
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.bench.engine_contestant import with_fields
from offramp.serve.bench.plan import Choices, fields, full_plan, quick_plan
from offramp.serve.bench.prompts import PromptLines, RandomTokens, TextStretches, read_prompts
from offramp.serve.config import EngineConfig


def test_plans() -> None:
    choices = Choices(batches=(1, 4), exit_at=2, static_layers=(2,), thresholds=(None,))
    (quick,) = quick_plan(choices)
    assert [variant.name for variant in quick.variants] == [
        "full depth", "static at 2", "fill, all at 2, regroup", "fill, all at 2, all",
    ]  # fmt: skip
    assert [(load.batch, load.new_tokens, load.requests) for load in quick.workloads] == [(1, 64, None), (4, 64, None)]
    # Without a policy or an exit to force there is nothing to be sure of.
    assert [variant.name for variant in quick_plan(Choices())[0].variants] == ["full depth"]
    names = [experiment.name for experiment in full_plan(Choices(has_policy=True))]
    assert names == ["batch", "prompt", "output", "hard", "threshold", "kernels"]
    for experiment in full_plan(Choices(has_policy=True, engine={"dtype": ("bf16", "fp32"), "quantile": (0.5, 0.9)})):
        assert len(set(experiment.variants)) == len(experiment.variants)
        for variant in experiment.variants:
            assert variant.baseline in experiment.variants
    loop = quick_plan(Choices(batches=(1, 8), closed_loop=True))[0]
    assert [load.requests for load in loop.workloads] == [24, 48]


def test_any_setting_can_be_swept() -> None:
    choices = Choices(
        engine={"dtype": ("bf16", "fp32"), "split_rule": ("always", "cost")},
        policy={"min_layer": (1, 2)},
        has_policy=True,
        has_shortlist=True,
    )
    (quick,) = quick_plan(choices)
    of_bf16 = [variant for variant in quick.variants if variant.setting("dtype") == "bf16"]
    assert [variant.name for variant in of_bf16] == [
        "full depth",
        "full depth, shortlist head",
        "fill, regroup, split_rule always, min_layer 1",
        "fill, regroup, split_rule always, min_layer 2",
        "fill, regroup, split_rule cost, min_layer 1",
        "fill, regroup, split_rule cost, min_layer 2",
    ]
    assert len(quick.variants) == 12
    for variant in of_bf16:
        # What decides when tokens leave means nothing at full depth; what computes the layers does.
        assert variant.baseline == of_bf16[0]
        assert variant.shortlist_baseline == of_bf16[1]
    assert [variant.depends_on_batch for variant in of_bf16] == [False, False, False, False, True, True]


def test_settings_that_do_not_exist() -> None:
    with pytest.raises(OfframpError, match="EngineConfig has no field 'nonsense'"):
        with_fields(EngineConfig(), fields(nonsense=1))
    with pytest.raises(OfframpError, match="quantile"):
        with_fields(EngineConfig(), fields(quantile=2.0))
    assert with_fields(ExitPolicy(), fields(min_layer=3)) == ExitPolicy(min_layer=3)


def test_prompts_are_the_same_each_time(tmp_path: Path) -> None:
    for prompts in (RandomTokens(300), TextStretches(list(range(100)))):
        drawn = prompts.draw(3, 7)
        assert [len(prompt) for prompt in drawn] == [7] * 3
        assert prompts.draw(3, 7) == drawn
        assert len({tuple(prompt) for prompt in drawn}) == 3
    with pytest.raises(OfframpError, match="longer text"):
        TextStretches([1, 2]).draw(1, 3)
    assert PromptLines([[1, 2, 3], [4]]).draw(3, 2) == [[2, 3], [4], [2, 3]]

    tokenizer = tiny_tokenizer()
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "ab"}\n\n"cd"\n', encoding="utf-8")
    assert [tokenizer.decode(ids) for ids in read_prompts(lines, tokenizer).draw(2, 99)] == ["ab", "cd"]
    text = tmp_path / "text.txt"
    text.write_text("a long text " * 20, encoding="utf-8")
    assert [len(ids) for ids in read_prompts(text, tokenizer).draw(2, 5)] == [5, 5]
    lines.write_text('{"prompt": "ab"}\n{"text": "cd"}\n', encoding="utf-8")
    with pytest.raises(OfframpError, match="line 2"):
        read_prompts(lines, tokenizer)
    lines.write_text('{"prompt": "half of a character: \\ud800"}\n', encoding="utf-8")
    with pytest.raises(OfframpError, match="line 1: the prompt is not Unicode"):
        read_prompts(lines, tokenizer)
