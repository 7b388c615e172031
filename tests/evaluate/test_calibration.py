"""Calibration: the chains, what ends them, what is chosen, and that promises hold as often as they say."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.tiny import tiny_checkpoint
from offramp.common.checkpoint import load_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.common.prompt_sketch import PromptSketch
from offramp.evaluate.answering import Answer, Answers, Setting
from offramp.evaluate.calibration import Calibration, Chain, calibrate, make_chains
from offramp.evaluate.cli.calibrate import main
from offramp.evaluate.learn_then_test import p_value
from offramp.serve.cli.generate import main as generate
from offramp.serve.config import EngineConfig, SyncPolicy

LAYERS = 8


class Oracle:
    """Answers a prompt, a number from 0 to 1, wrongly if it is below the risk of the candidate's threshold."""

    def __init__(self, risks: dict[float, float]) -> None:
        self.risks = risks
        self.asked: list[float] = []
        self.failing = 0

    def answer(
        self, setting: Setting, prompts: Sequence[str], max_tokens: int, stop: Sequence[str], *, may_fail: bool
    ) -> Answers:
        assert may_fail
        policy = setting.exits.policy
        if policy is None:
            full = [self._answer("right", LAYERS) for _ in prompts]
            full[: self.failing] = [replace(one, error="it broke") for one in full[: self.failing]]
            return Answers(setting, full, 1.0, float(LAYERS))
        (threshold,) = set(policy.thresholds.values())
        self.asked.append(threshold)
        risk = self.risks[threshold]
        given = [self._answer("wrong" if float(prompt) < risk else "right", 2) for prompt in prompts]
        return Answers(setting, given, 1.0, 2 + 6 * threshold)

    @staticmethod
    def _answer(text: str, layer: int) -> Answer:
        confidences = [None, None if layer == LAYERS else 0.5]
        return Answer(text, [1, 2], [LAYERS, layer], confidences, [0.1, 0.2], 0.1, "stop")


def differ(texts: Sequence[str], full: Sequence[str]) -> list[float]:
    return [float(text != other) for text, other in zip(texts, full, strict=True)]


def run(
    oracle: Oracle, prompts: Sequence[str], chains: Sequence[Chain], deltas: Sequence[float], **more: Any
) -> Calibration:
    answerer: Any = oracle
    return calibrate(answerer, EngineConfig(), prompts, differ, chains, deltas, **more)


def chain(*thresholds: float) -> list[Chain]:
    return make_chains(ExitPolicy("margin"), (2, 4), measures=("margin",), kv_policies=("fill",), thresholds=thresholds)


def test_a_chain_ends_at_the_first_that_is_not_certified_and_the_cheapest_is_chosen() -> None:
    prompts = [str(index / 400) for index in range(400)]
    oracle = Oracle({0.9: 0.0, 0.8: 0.02, 0.7: 0.2, 0.6: 0.0})
    found = run(oracle, prompts, chain(0.9, 0.8, 0.7, 0.6), [0.05, 0.01])
    assert oracle.asked == [0.9, 0.8, 0.7], "what lies behind the first that fails is not run"
    safe, loose = found.chosen[0.01], found.chosen[0.05]
    assert safe is not None
    assert loose is not None
    assert safe.candidate.policy.thresholds == {2: 0.9, 4: 0.9}
    assert loose.candidate.policy.thresholds == {2: 0.8, 4: 0.8}
    assert loose.risk == 0.02
    assert loose.p_values[0.05] == p_value("hoeffding_bentkus", 8, 400, 0.05)
    assert dict(loose.profile.depths) == {2: 400}, "the first token of an answer is not early exit's"


def test_nothing_certified_is_full_depth() -> None:
    found = run(Oracle({0.9: 0.5}), [str(index / 50) for index in range(50)], chain(0.9), [0.05])
    assert found.chosen == {0.05: None}


def test_what_saves_no_layer_is_not_chosen() -> None:
    found = run(Oracle({1.0: 0.0}), ["0.5"] * 400, chain(1.0), [0.05])
    assert found.chosen == {0.05: None}


def test_a_failed_answer_is_a_loss() -> None:
    oracle = Oracle({0.9: 0.0})
    oracle.failing = 3
    (_, (tried,)), *_ = run(oracle, ["0.5"] * 400, chain(0.9), [0.05]).chains
    assert (math.fsum(tried.losses), tried.num_failed) == (3, 3)
    assert tried.p_values[0.05] == p_value("hoeffding_bentkus", 3, 400, 0.05)


def test_losses_between_0_and_1_are_not_counted_as_if_they_were_0_or_1() -> None:
    answerer: Any = Oracle({0.9: 0.0})

    def halves(texts: Sequence[str], full: Sequence[str]) -> list[float]:
        return [0.5, 0.5, *([0.0] * (len(texts) - 2))]  # their sum is a whole number

    with pytest.raises(OfframpError, match="'binomial' is for losses of 0 or 1"):
        calibrate(answerer, EngineConfig(), ["0.5"] * 400, halves, chain(0.9), [0.05], bound="binomial")


def test_several_chains_share_epsilon() -> None:
    prompts = [str(index / 1000) for index in range(72)]
    oracle = Oracle({0.9: 0.0})
    p = p_value("hoeffding_bentkus", 0, 72, 0.05)
    assert 0.05 / 4 < p < 0.05
    assert run(oracle, prompts, chain(0.9), [0.05]).chosen[0.05] is not None
    assert run(oracle, prompts, chain(0.9) * 4, [0.05]).chosen[0.05] is None


def test_a_promise_is_wrong_at_most_as_often_as_epsilon_says() -> None:
    """1,000 calibrations whose chosen point has a risk above delta: Bin(1000, p) with p at most 0.1, above 137 once in

    10,000 times. The risks are known, and the last two of the chain are too high.
    """
    risks = dict(zip((0.9, 0.8, 0.7, 0.6, 0.5), (0.02, 0.06, 0.09, 0.105, 0.13), strict=True))
    generator, chains = np.random.default_rng(11), chain(*risks)
    wrong = useful = 0
    for _ in range(1000):
        prompts = [repr(float(value)) for value in generator.random(150)]
        chosen = run(Oracle(risks), prompts, chains, [0.1], epsilon=0.1).chosen[0.1]
        if chosen is not None:
            wrong += risks[chosen.candidate.policy.thresholds[2]] > 0.1
            useful += 1
    assert wrong <= 137
    assert useful > 900


@pytest.mark.parametrize(("risk", "kept"), [(0.0, "all"), (0.5, "regroup")])
def test_of_sync_policies_the_one_with_the_cheapest_points_is_kept(risk: float, kept: SyncPolicy) -> None:
    class Batched(Oracle):
        """Answers rightly under `regroup`; under `all` it saves more, and has the risk asked for."""

        def answer(self, setting: Setting, *rest: Any, **more: Any) -> Answers:
            together = setting.engine.sync_policy == "all"
            self.risks = {0.9: risk if together else 0.0}
            answers = super().answer(setting, *rest, **more)
            policies.append(setting.engine.sync_policy)
            return replace(answers, layers_per_token=answers.layers_per_token - together)

    policies: list[str] = []
    chains = make_chains(
        ExitPolicy("margin"),
        (2,),
        measures=("margin",),
        kv_policies=("fill",),
        sync_policies=("regroup", "all"),
        thresholds=(0.9,),
    )
    assert [one.name for one in chains] == ["margin, fill, regroup", "margin, fill, all"]
    found = run(Batched({}), ["0.25"] * 400, chains, [0.05])
    assert policies == ["regroup", "regroup", "all"]
    assert found.engine == EngineConfig(sync_policy=kept)
    assert found.chosen[0.05] is not None


def test_chains_are_all_combinations() -> None:
    template = ExitPolicy("margin", {2: 0.3}, min_layer=2, shortlist=(4, 5))
    chains = make_chains(
        template,
        (1, 2, 4),
        measures=("margin", "cosine"),
        kv_policies=("fill", "recompute"),
        decays=(None, 4.0),
        each_exit=True,
    )
    assert len(chains) == 2 * 2 * 2 * 2
    for one in chains:
        values = [max(point.policy.thresholds.values()) for point in one.candidates]
        assert values == sorted(values, reverse=True)
        assert {tuple(point.policy.thresholds) for point in one.candidates} in ({(2, 4)}, {(4,)})
        assert {point.policy.shortlist for point in one.candidates} == {(4, 5)}
    with pytest.raises(OfframpError, match="no early exit to calibrate"):
        make_chains(template, (1,), measures=("margin",), kv_policies=("fill",))
    with pytest.raises(OfframpError, match="must fall"):
        chain(0.5, 0.9)


# ---- the command


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [
        {"prompt": f"{word} {other}", "references": [word]}
        for word in ("Tiny", "models", "wander")
        for other in "abcdefgh"
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", ExitConfig((1, 2)), ExitPolicy("margin"))


@pytest.fixture
def directory(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


def command(directory: Path, data: Path, *more: str) -> list[str]:
    asked = ["--task", "summarisation", "--data", str(data), "--max-tokens", "6"]
    return [str(directory), *asked, "--threshold", "0.9,0.05,0.001", *more]


def test_points_and_record_can_be_checked(directory: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(directory, data, "--point", "safe=0.2", "--point", "fast=0.95", "--json")) == 0
    said = json.loads(capsys.readouterr().out)
    checkpoint = load_checkpoint(directory)
    assert checkpoint.points.to_json() == said["points"]
    found = checkpoint.calibration
    assert found is not None
    assert found["num_examples"] == 24
    (tested,) = found["chains"]
    for one in tested["tried"]:
        for delta, p in one["p_values"].items():
            assert p_value(found["bound"], one["total_loss"], one["n"], float(delta)) == pytest.approx(p)
            assert (float(delta) in one["certified"]) <= (p <= tested["epsilon"])
    assert "fast" in checkpoint.points.by_name, "with random weights nothing is lost that matters at 0.95"
    assert found["chosen"]["fast"]["layers"] < 4
    assert checkpoint.points.by_name["fast"].profile is not None
    assert checkpoint.policy == checkpoint.points.by_name[checkpoint.points.default or ""].policy


def test_prompts_are_asked_once_and_drawn_by_seed(
    directory: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = tmp_path / "twice.jsonl"
    twice.write_text(data.read_text() + "\n" + data.read_text())
    hashes = []
    for more in ([], ["--limit", "5"], ["--limit", "5", "--seed", "1"], ["--limit", "5", "--seed", "1"]):
        assert main(command(directory, twice, "--point", "fast=0.95", "--json", "--dry-run", *more)) == 0
        found = json.loads(capsys.readouterr().out)["calibration"]
        assert found["num_examples"] == (5 if more else 24)
        assert found["chains"][0]["tried"][0]["n"] == found["num_examples"]
        hashes.append(found["sha256"])
    assert hashes[2] == hashes[3]
    assert len(set(hashes)) == 3


def test_points_are_for_the_engine_that_was_calibrated(
    directory: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = ["--try-sync-policy", "all,quantile", "--max-num-seqs", "4", "--threshold", "0.001"]
    assert main(command(directory, data, *tried, "--point", "fast=0.99", "--epsilon", "0.4")) == 0
    record = load_checkpoint(directory).calibration
    assert record is not None
    assert record["chosen"]["fast"] is not None
    kept = record["engine"]["sync_policy"]
    assert f"This holds for engines with --sync-policy {kept}." in capsys.readouterr().out
    assert [one["sync_policy"] for one in record["chains"]] == ["all", "quantile"]
    asked = [str(directory), "--prompt", "Tiny", "--max-tokens", "3", "--max-num-seqs", "4"]
    for more, warned in (
        (["--sync-policy", kept], False),
        (["--sync-policy", "regroup"], True),
        (["--sync-policy", "regroup", "--operating-point", "exact"], False),
    ):
        assert generate([*asked, *more]) == 0
        said = capsys.readouterr().err
        assert (f"calibrated with sync_policy {kept} and not regroup" in said) == warned


def test_nothing_certified_leaves_full_depth(directory: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(directory, data, "--point", "safe=0.001")) == 0
    assert "nothing is certified that saves a layer" in capsys.readouterr().out
    checkpoint = load_checkpoint(directory)
    assert checkpoint.points.names == ("exact",)
    assert checkpoint.points.default == "exact"
    assert checkpoint.policy == ExitPolicy("margin")


def test_what_a_model_was_trained_on_is_refused(made: Path, data: Path, tmp_path: Path) -> None:
    provenance = {"data": {"prompts": PromptSketch.of(["models c"]).to_json()}}
    directory = Path(shutil.copytree(made, tmp_path / "model"))
    record = json.loads((directory / "exits.json").read_text())
    (directory / "exits.json").write_text(json.dumps({**record, "provenance": provenance}))
    with pytest.raises(OfframpError, match="trained on 1 of 24 calibration prompts"):
        main(command(directory, data, "--point", "safe=0.1"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--point", "safe=1.5"], "delta 1.5 must be"),
        (["--point", "safe=0.1", "--epsilon", "0"], "epsilon 0.0 must be"),
        (["--point", "exact=0.1"], "belongs to full depth"),
        (["--point", "safe=0.1", "--default", "fast"], "'fast' is no point to calibrate; choose one of exact, safe"),
        (["--point", "safe=0.1", "--measure", "classifier"], "this model has none"),
    ],
)
def test_faults_are_told_at_once(directory: Path, data: Path, more: list[str], words: str) -> None:
    with pytest.raises(OfframpError, match=words):
        main(command(directory, data, *more))
    assert load_checkpoint(directory).calibration is None


def test_prompts_may_be_chats(directory: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(directory, data, "--point", "fast=0.95", "--chat", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["calibration"]["chat"]


def test_logged_to_mlflow(
    directory: Path, data: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert main(command(directory, data, "--point", "fast=0.95", "--mlflow", "--dry-run")) == 0
    assert load_checkpoint(directory).calibration is None
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("calibration")
    assert experiment is not None
    (logged,) = client.search_runs([experiment.experiment_id])
    assert logged.info.status == "FINISHED"
    assert logged.data.metrics["fast/risk"] <= 0.95
    assert math.isfinite(logged.data.metrics["exact/tokens_per_second"])
