"""Whole runs of the trainer: processes, stages and micro-batches must not be visible in them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from helpers.fitting import Numbers, comparable, fit, fit_all, validate
from helpers.processes import run_processes
from helpers.tiny import tiny_checkpoint
from offramp.common.checkpoint import load_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.exits.policy import ExitPolicy
from offramp.common.model.transformer import MultiExitTransformer
from offramp.train.depth_spread import DepthSpread
from offramp.train.exit_weights import Curriculum, WeightSchedule
from offramp.train.export import export_checkpoint
from offramp.train.layer_dropout import LayerDropout
from offramp.train.objective import ObjectiveConfig

FILL_AWARE = {"fill_aware": {1: 0.2, 2: 0.2}, "peak_tflops": 2.0}
DISTILLED, SPREAD = ObjectiveConfig(distill=0.5), ObjectiveConfig(depth_spread=DepthSpread(weight=1.0))
CHANGING = {  # everything that depends on the step
    "objective": ObjectiveConfig(
        schedule=WeightSchedule(steps=5, initial=[1.0, 0.0]), curriculum=Curriculum("rotational", interval=2)
    ),
    "layer_dropout": LayerDropout(0.5, "exponential", 6),
}
TWO_STAGES = {"pipe": 2, "micro_batches": 3}
SHARED = {"pipe": 1, "tensor": 2, "micro_batches": 2, "zero_stage": 1}
PROMPTS = [[11, 12, 13], [40, 41, 42, 43, 44], [7]]
TWO_PROCESSES: dict[str, dict[str, Any]] = {
    "pipeline": {"strategy": TWO_STAGES, "module": FILL_AWARE, "prompts": PROMPTS},
    "pipeline, second half": {"strategy": TWO_STAGES, "module": FILL_AWARE, "resume": "pipeline"},
    "ZeRO-1": {"strategy": {**TWO_STAGES, "zero_stage": 1}, "module": FILL_AWARE},
    "ZeRO-1, second half": {
        "strategy": {**TWO_STAGES, "zero_stage": 1},
        "module": FILL_AWARE,
        "resume": "ZeRO-1",
    },
    "two replicas of one stage": {
        "strategy": {"pipe": 1, "micro_batches": 2},
        "module": FILL_AWARE,
        "prompts": PROMPTS,
    },
    "a shared stage": {"strategy": SHARED, "module": FILL_AWARE, "prompts": PROMPTS},
    "a shared stage, second half": {"strategy": SHARED, "module": FILL_AWARE, "resume": "a shared stage"},
    "a shared stage, second half of two stages": {"strategy": SHARED, "module": FILL_AWARE, "resume": "ZeRO-1"},
    "ddp": {"strategy": "ddp", "module": FILL_AWARE, "prompts": PROMPTS},
    "changing": {"strategy": TWO_STAGES, "module": CHANGING},
    "changing, second half": {"strategy": TWO_STAGES, "module": CHANGING, "resume": "changing"},
    "changing, ddp": {"strategy": "ddp", "module": CHANGING},
    "frozen": {"strategy": TWO_STAGES, "module": {"freeze": ["backbone"]}},
    "primed": {"strategy": "ddp", "priming": True, "trainer": {"val_check_interval": 1.0}},
    "classified": {"strategy": "ddp", "classifiers": True, "trainer": {"val_check_interval": 1.0}},
    "bf16": {"strategy": TWO_STAGES, "trainer": {"precision": "bf16-mixed"}},
    "fp16": {"strategy": {**TWO_STAGES, "checkpoint_activations": True}, "trainer": {"precision": "16-mixed"}},
    "fp16, second half": {"strategy": TWO_STAGES, "trainer": {"precision": "16-mixed"}, "resume": "fp16"},
    **{
        f"{precision}, a shared stage{more}": {
            "strategy": {"pipe": 1, "tensor": 2, "micro_batches": 2, **strategy},
            "module": module,
            "trainer": {"precision": setting},
        }
        for precision, setting in (("bf16", "bf16-mixed"), ("fp16", "16-mixed"))
        for more, strategy, module in (
            ("", {}, {}),
            (", ZeRO-1, checkpointing, fill-aware", {"checkpoint_activations": True, "zero_stage": 1}, FILL_AWARE),
        )
    },
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "distillation across stages": (
        {"strategy": TWO_STAGES, "module": {"objective": DISTILLED}},
        "final logits",
    ),
    "spread of depths across stages": (
        {
            "strategy": {**TWO_STAGES, "stage_bounds": [2]},
            "module": {"objective": SPREAD},
        },
        "depth_spread compares early exits with each other",
    ),
    "too small a batch": ({"strategy": {"pipe": 2, "micro_batches": 5}}, "batch of 4 rows"),
    "half weights": ({"strategy": TWO_STAGES, "trainer": {"precision": "bf16-true"}}, "32-true, bf16-mixed"),
    "three stages of two processes": ({"strategy": {"pipe": 3}}, "multiple of pipe"),
    "too many tensor ranks": ({"strategy": {"pipe": 1, "tensor": 4}}, "multiple of pipe x tensor"),
    "accumulation": ({"strategy": TWO_STAGES, "trainer": {"accumulate_grad_batches": 2}}, "micro_batches"),
    "filled bubbles with shared parameters": (
        {"strategy": {**TWO_STAGES, "fill_bubbles": True}},
        "fill_bubbles cannot be used where stages share trained parameters (embed_tokens.weight)",
    ),
    "priming": ({"strategy": TWO_STAGES, "priming": True}, "does not run on deepspeed_pipeline"),
    "classifiers": ({"strategy": TWO_STAGES, "classifiers": True}, "in one process or under DDP"),
}
TWO_PROCESSES |= {name: settings for name, (settings, _) in REFUSED.items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    policy = ExitPolicy(thresholds={1: 0.9}, shortlist=(1, 5, 9))
    exits = ExitConfig((1, 2), head="adapter")
    return tiny_checkpoint(tmp_path_factory.mktemp("start") / "model", exits, policy, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def one(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("one") / "whole.ckpt"
    return {**fit(str(checkpoint), str(out), module=FILL_AWARE, prompts=PROMPTS), "out": out}


@pytest.fixture(scope="module")
def two(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answers of rank 0 and rank 1 by name, and where the training checkpoints are."""
    folder = tmp_path_factory.mktemp("two")
    paths = {name: folder / f"{number}.ckpt" for number, name in enumerate(TWO_PROCESSES)}
    runs = []
    for name, settings in TWO_PROCESSES.items():
        run = {"checkpoint": str(checkpoint), "out": str(paths[name]), "devices": 2, **settings}
        if "resume" in run:
            path = paths[run["resume"]]
            run["resume"] = str(path.with_name(f"{path.stem}-step=3.ckpt"))
        runs.append(run)
    answers = run_processes(fit_all, 2, runs, timeout_s=900)
    return {"out": paths, **{name: (a, b) for name, a, b in zip(TWO_PROCESSES, *answers, strict=True)}}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline", "ZeRO-1", "two replicas of one stage", "a shared stage", "ddp"])
def test_two_processes_log_what_one_logs(name: str, one: dict[str, Any], two: dict[str, Any]) -> None:
    expected = comparable(one)
    assert {"train/loss", "train/loss_exit_01", "train/accuracy_exit_04", "train/lr", "train/grad_norm"} <= {
        metric for _, metric in expected
    }
    assert "val/loss_exit_02" in {metric for _, metric in expected}
    for answer in two[name]:
        assert comparable(answer) == pytest.approx(expected, rel=1e-4)
        assert answer["steps"] == 6


def operations_of_a_step(run: dict[str, Any], ranks: int) -> float:
    metrics = run["metrics"]
    assert (0, "train/step_seconds") not in metrics, "nothing is known about the first step"
    for rank in range(ranks):
        assert 0.05 < metrics[1, f"train/memory_gib_rank_{rank:02d}"] < 64.0
    assert (1, f"train/memory_gib_rank_{ranks:02d}") not in metrics
    seconds, speed = metrics[1, "train/step_seconds"], metrics[1, "train/model_tflops_per_second"]
    assert metrics[1, "train/tokens_per_second"] * seconds == pytest.approx(4 * 9)
    assert metrics[1, "train/mfu"] == pytest.approx(speed / (2.0 * ranks))
    return speed * seconds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline", "two replicas of one stage", "a shared stage", "ddp"])
def test_all_processes_together_count_what_one_counts(name: str, one: dict[str, Any], two: dict[str, Any]) -> None:
    expected = operations_of_a_step(one, 1)
    for answer in two[name]:
        assert operations_of_a_step(answer, 2) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["changing", "changing, ddp"])
def test_what_changes_with_the_step_is_the_same_in_two_processes(
    name: str, checkpoint: Path, two: dict[str, Any], tmp_path: Path
) -> None:
    expected = comparable(fit(str(checkpoint), str(tmp_path / "one.ckpt"), module=CHANGING))
    # The schedule goes from 1 to 0.3 and from 0 to 0.3 in five steps, and every other exit sits out.
    assert [expected[step, "train/weight_exit_01"] for step in range(3)] == pytest.approx([1.0, 0.0, 0.72])
    assert [expected[step, "train/weight_exit_02"] for step in range(4)] == pytest.approx([0.0, 0.06, 0.0, 0.18])
    assert (1, "train/loss_exit_01") not in expected
    assert (2, "val/loss_exit_01") in expected
    for answer in two[name]:
        assert comparable(answer) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline", "ZeRO-1", "a shared stage", "changing"])
def test_resuming_is_as_if_nothing_had_happened(name: str, two: dict[str, Any]) -> None:
    whole = comparable(two[name][0], range(3, 6))
    resumed = comparable(two[f"{name}, second half"][0], range(3, 6))
    assert resumed == whole
    assert (5, "val/loss") in whole


@pytest.mark.slow
def test_evaluating_again_gives_the_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    for run in (one, *two["pipeline"], *two["ddp"]):
        assert run["validated"] == {name: value for name, value in run["logged"].items() if name.startswith("val/")}


@pytest.mark.slow
def test_validation_weighs_every_token_once(checkpoint: Path, one: dict[str, Any]) -> None:
    """Against a plain loop over the rows; 7 rows in batches of 4 leave one empty row."""
    model = load_checkpoint(export_checkpoint(one["out"], one["out"].with_suffix(".exported"))).model
    data = Numbers()
    data.trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    losses = []
    with torch.no_grad():
        for batch in data.val_dataloader():
            log_p = model(batch.input_ids, exits=[2]).logits[2].log_softmax(-1)
            losses += [-log_p[b, t, batch.labels[b, t]] for b, t in (batch.labels >= 0).nonzero()]
    assert one["validated"]["val/loss_exit_02"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


@pytest.mark.slow
def test_exports_of_any_number_of_stages_are_equal(
    checkpoint: Path, one: dict[str, Any], two: dict[str, Any], tmp_path: Path
) -> None:
    whole = load_checkpoint(export_checkpoint(one["out"], tmp_path / "whole"))
    start = load_checkpoint(checkpoint)
    for name in ("pipeline", "ZeRO-1", "two replicas of one stage", "a shared stage", "ddp"):
        exported = load_checkpoint(export_checkpoint(two["out"][name], tmp_path / name.replace(" ", "-")))
        for tensor, value in whole.model.state_dict().items():
            torch.testing.assert_close(exported.model.state_dict()[tensor], value, rtol=1e-3, atol=1e-4)
        assert exported.exits == start.exits
        assert exported.hf_config == start.hf_config
        assert exported.provenance["step"] == 6
        assert exported.provenance["data"] == {"examples": 24}
        assert (tmp_path / name.replace(" ", "-") / "tokenizer.json").is_file()
        # Thresholds belong to the weights they were found for; the shortlist belongs to the task.
        assert exported.policy == ExitPolicy(shortlist=(1, 5, 9))
    moved = (whole.model.embed_tokens.weight - start.model.embed_tokens.weight).abs().max()
    assert float(moved) > 1e-3, "nothing was trained, so nothing was compared"


@torch.no_grad()
def greedy(model: MultiExitTransformer, prompt: list[int], layer: int) -> list[int]:
    text = list(prompt)
    for _ in range(5):
        text.append(int(model(torch.tensor([text]), exits=[layer]).logits[layer][0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.slow
def test_every_exit_says_what_it_will_say_when_exported(
    one: dict[str, Any], two: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("pipeline", "two replicas of one stage", "a shared stage", "ddp"):
        model = load_checkpoint(export_checkpoint(two["out"][name], tmp_path / name.replace(" ", "-"))).model.eval()
        expected = {layer: [greedy(model, prompt, layer) for prompt in PROMPTS] for layer in (1, 2, 4)}
        assert two[name][0]["said"] == two[name][1]["said"] == expected
    model = load_checkpoint(export_checkpoint(one["out"], tmp_path / "one")).model.eval()
    assert one["said"] == {layer: [greedy(model, prompt, layer) for prompt in PROMPTS] for layer in (1, 2, 4)}
    assert len({tuple(text) for texts in one["said"].values() for text in texts}) > 3, "texts differ"


@pytest.mark.slow
def test_a_frozen_backbone_keeps_every_bit(checkpoint: Path, two: dict[str, Any], tmp_path: Path) -> None:
    before = load_checkpoint(checkpoint).model.state_dict()
    after = load_checkpoint(export_checkpoint(two["out"]["frozen"], tmp_path / "frozen")).model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith("exits.") for name in changed)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_the_pipeline_refuses_what_it_cannot_do(name: str, two: dict[str, Any]) -> None:
    for answer in two[name]:
        assert REFUSED[name][1] in answer.get("fault", "not refused")


@pytest.mark.slow
def test_priming_on_two_ranks_gives_one_model(two: dict[str, Any], tmp_path: Path) -> None:
    assert two["primed"][0]["validated"] == two["primed"][1]["validated"]
    primed = load_checkpoint(export_checkpoint(two["out"]["primed"], tmp_path / "primed"))
    assert primed.policy is not None
    assert primed.policy.shortlist == (1, *range(10, 60)), "of both ranks' data together"


@pytest.mark.slow
def test_classifiers_on_two_ranks_are_one(two: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    """They meet all validation data, and each half of the training data."""
    assert two["classified"][0]["validated"] == two["classified"][1]["validated"]
    alone = fit(str(checkpoint), str(tmp_path / "alone.ckpt"), classifiers=True, trainer={"val_check_interval": 1.0})
    for exit_ in ("01", "02"):
        name = f"val/agreement_exit_{exit_}"
        assert two["classified"][0]["validated"][name] == pytest.approx(alone["validated"][name])
    made = load_checkpoint(export_checkpoint(two["out"]["classified"], tmp_path / "classified"))
    assert made.exits.classifier
    assert float(made.model.state_dict()["exits.1.classifier.weight"].abs().sum()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TWO_PROCESSES if name.startswith("bf16")])
def test_bf16_trains_about_as_fp32_does(name: str, two: dict[str, Any]) -> None:
    metrics = two[name][0]["metrics"]
    first = metrics[0, "train/loss"]
    assert first == pytest.approx(two["pipeline"][0]["metrics"][0, "train/loss"], rel=0.1)
    assert metrics[5, "train/loss"] < first
    assert comparable(two[name][1]) == comparable(two[name][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TWO_PROCESSES if name.startswith("fp16") and "half" not in name])
def test_fp16_trains_about_as_fp32_does(name: str, two: dict[str, Any]) -> None:
    metrics = two[name][0]["metrics"]
    first = metrics[0, "train/loss"]
    assert first == pytest.approx(two["pipeline"][0]["metrics"][0, "train/loss"], rel=0.1)
    assert metrics[5, "train/loss"] < first
    assert comparable(two[name][1]) == comparable(two[name][0])
    assert metrics[0, "train/loss_scale"] == 2.0**16
    # Each skipped step halves the scale.
    assert metrics[5, "train/loss_scale"] == 2.0 ** (16 - metrics[4, "train/overflows"])


@pytest.mark.slow
def test_fp16_goes_on_with_its_scale(two: dict[str, Any]) -> None:
    whole, again = (two[name][0]["metrics"] for name in ("fp16", "fp16, second half"))
    for step in range(3, 6):
        assert again[step, "train/loss_scale"] == whole[step, "train/loss_scale"]


@pytest.mark.slow
def test_a_shared_stage_goes_on_where_two_stages_stopped(two: dict[str, Any]) -> None:
    resumed = comparable(two["a shared stage, second half of two stages"][0], range(3, 6))
    assert resumed == pytest.approx(comparable(two["ZeRO-1"][0], range(3, 6)), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline", "a shared stage"])
def test_another_number_of_stages_validates_the_same_and_resumes(
    name: str, checkpoint: Path, two: dict[str, Any], tmp_path: Path
) -> None:
    trained = two["out"][name]
    half_way = trained.with_name(f"{trained.stem}-step=3.ckpt")
    arguments = (str(checkpoint), str(trained), str(half_way), str(tmp_path / "new.ckpt"))
    answers = run_processes(validate_and_resume, 1, *arguments)
    metrics, resumed = answers[0]
    assert metrics == pytest.approx(two[name][0]["validated"], rel=1e-5)
    whole = comparable(two[name][0], range(3, 6))
    assert comparable(resumed, range(3, 6)) == pytest.approx(whole, rel=1e-4)


def validate_and_resume(
    checkpoint: str, trained: str, half_way: str, out: str
) -> tuple[dict[str, float], dict[str, Any]]:
    one_stage = {"pipe": 1, "micro_batches": 2}
    metrics = validate(checkpoint, trained, one_stage)
    return metrics, fit(checkpoint, out, one_stage, module=FILL_AWARE, resume=half_way)


def test_from_scratch_needs_no_weights(checkpoint: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "exits.json"):
        (bare / name).write_bytes((checkpoint / name).read_bytes())
    run = fit(str(bare), str(tmp_path / "scratch.ckpt"), max_steps=2, module={"from_scratch": True})
    assert run["metrics"][0, "train/loss_exit_04"] == pytest.approx(5.7, abs=0.3)  # log 300


@pytest.mark.parametrize(
    ("module", "trainer", "message"),
    [
        ({"exit_weights": [1.0]}, {}, "exit_weights has 1 values, but .* has 2 early exits"),
        ({"freeze": ["layer.0"]}, {}, "'layer.0' names no parameter"),
        ({"freeze": ["backbone", "exits"]}, {}, "leaves nothing to train"),
        ({"fill_aware": {3: 0.1}}, {}, "fill_aware names layers"),
        ({}, {"accumulate_grad_batches": 2}, "micro_batches"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    module: dict[str, Any], trainer: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(OfframpError, match=message):
        fit(str(checkpoint), str(tmp_path / "x.ckpt"), module=module, trainer=trainer)


def test_a_first_exit_alone_trains_what_lies_below_it(checkpoint: Path, tmp_path: Path) -> None:
    alone = {"exit_weights": [1.0, 0.0], "final_weight": 0.0}
    plain = fit(str(checkpoint), str(tmp_path / "plain.ckpt"), module=alone)
    before = load_checkpoint(checkpoint).model.state_dict()
    after = load_checkpoint(export_checkpoint(tmp_path / "plain.ckpt", tmp_path / "plain")).model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".")[1] for name in moved if name.startswith(("layers.", "exits."))} == {"0", "1"}
    assert (0, "train/loss_exit_04") not in plain["metrics"]
    assert (5, "val/loss_exit_04") not in plain["metrics"], "layers above are not even loaded"


def test_compiled_layers_learn_the_same(
    checkpoint: Path, one: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    compile_module = torch.nn.Module.compile

    def without_a_compiler(self: torch.nn.Module, **options: Any) -> None:
        compiled.append(type(self).__name__)
        compile_module(self, backend="eager", **options)

    monkeypatch.setattr(torch.nn.Module, "compile", without_a_compiler)
    monkeypatch.setenv("CXX", sys.executable)  # is there, and is not called
    out = tmp_path / "compiled.ckpt"
    answer = fit(str(checkpoint), str(out), module={**FILL_AWARE, "compile_layers": True})
    assert compiled == ["Block"] * 4
    assert comparable(answer) == pytest.approx(comparable(one), rel=1e-4)
    export_checkpoint(out, tmp_path / "model")  # names of parameters are those of layers that are not compiled
    assert load_checkpoint(tmp_path / "model").config.num_layers == 4


def test_compiled_layers_without_a_compiler_are_refused_at_once(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(OfframpError, match="no-such-compiler"):
        fit(str(checkpoint), str(tmp_path / "compiled.ckpt"), module={"compile_layers": True})
