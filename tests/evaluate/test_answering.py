"""Answers through the engine: those of naive generation, with times that add up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.tiny import tiny_checkpoint
from offramp.common.checkpoint import load_checkpoint, save_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.common.generation import generate
from offramp.evaluate.answering import Answer, Answerer, Answers, Setting, costs
from offramp.serve.config import EngineConfig
from offramp.serve.request.exit_options import ExitOptions

CONFIG = EngineConfig(prefix_caching=False, max_num_seqs=2)
POLICY = ExitPolicy("margin", {1: 0.3, 2: 0.3, 3: 0.3})
PROMPTS = ["Tiny random models", "wander", "and are drawn wider"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", ExitConfig((1, 2, 3)), POLICY)


@pytest.mark.parametrize("exits", [ExitOptions("full"), ExitOptions("fill"), ExitOptions("verify")])
def test_answers_are_those_of_naive_generation(directory: Path, exits: ExitOptions) -> None:
    answerer = Answerer(directory)
    answers = answerer.answer(Setting("it", exits, CONFIG), PROMPTS, 12)
    model = load_checkpoint(directory).model
    tokenizer = answerer.engine(CONFIG).tokenizer
    early = 0
    for prompt, answer in zip(PROMPTS, answers.given, strict=True):
        wanted = generate(model, tokenizer(prompt)["input_ids"], 12, kv_policy=exits.kv_policy, policy=POLICY)
        assert answer.token_ids == wanted.token_ids
        assert answer.exit_layers == wanted.exit_layers
        assert answer.exit_layers[0] == 4
        assert len(answer.times) == len(answer.token_ids) == len(answer.confidences)
        assert answer.times == sorted(answer.times)
        assert answer.finish_reason == "length"
        early += sum(layer < 4 for layer in answer.deep_layers)
    assert (early > 0) == (exits.kv_policy != "full")
    assert answers.depths.total() == 3 * 11
    said_after = sum(layer * count for layer, count in answers.depths.items()) / (3 * 11)
    if exits.kv_policy == "verify":  # rows that left run their other layers later
        assert said_after < answers.layers_per_token
    else:
        assert answers.layers_per_token == pytest.approx(said_after)
    last = max(answer.times[-1] for answer in answers.given)
    assert sum(answer.cost_s for answer in answers.given) == pytest.approx(last)
    assert last <= answers.seconds
    assert answers.tokens_per_second == pytest.approx(36 / answers.seconds)


def test_times_as_the_paper_counts_them() -> None:
    def answer(*times: float) -> Answer:
        return Answer("", [0] * len(times), [4] * len(times), [None] * len(times), list(times), 0.0, "stop")

    answers = Answers(Setting("it"), [answer(1.0, 2.0, 4.0), answer(3.0)], 5.0, 4.0)
    assert answers.tokens_per_second == 4 / 5
    assert answers.inner_token_latency_s == (4 - 1 + 0) / 4


def test_an_iteration_is_shared_by_those_who_get_a_token() -> None:
    # Seconds 0..2 are the first one's alone, 2..3 both share, and two tokens at once are one share.
    assert costs([[2.0, 3.0], [3.0, 3.0, 7.0]]) == [2.5, 4.5]
    assert costs([]) == []


def test_one_engine_at_a_time(directory: Path) -> None:
    answerer = Answerer(directory)
    first = answerer.engine(CONFIG)
    assert answerer.engine(EngineConfig(prefix_caching=False, max_num_seqs=2)) is first
    assert answerer.engine(EngineConfig(prefix_caching=False)) is not first


def test_a_failed_answer_is_told_or_kept(directory: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(directory)
    broken, sound = 7, 8
    with torch.no_grad():
        checkpoint.model.embed_tokens.weight[broken] = torch.nan
    answerer = Answerer(save_checkpoint(tmp_path / "broken", checkpoint, assets=directory))
    setting, prompts = Setting("it", engine=CONFIG), [[sound], [broken]]
    with pytest.raises(OfframpError, match="1 of 2 answers failed, the first because the logits at layer 4 are not"):
        answerer.answer(setting, prompts, 1)
    answers = answerer.answer(setting, prompts, 1, may_fail=True)
    assert [answer.finish_reason for answer in answers.given] == ["length", "error"]
    assert [answer.error is None for answer in answers.given] == [True, False]
    assert answers.num_tokens == 1
    with pytest.raises(OfframpError, match="1 of 1 answers failed"):
        answerer.answer(setting, prompts[1:], 1, may_fail=True)


def test_what_cannot_be_answered(directory: Path) -> None:
    with pytest.raises(OfframpError, match="no prompt"):
        Answerer(directory).answer(Setting("it", engine=CONFIG), [], 4)
    with pytest.raises(OfframpError, match="prompt 1"):
        Answerer(directory).answer(Setting("it", engine=CONFIG), ["a", "b" * 5000], 4)
