from __future__ import annotations

import csv
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from mlflow import MlflowClient

from helpers.processes import start_command
from helpers.tiny import tiny_checkpoint, tiny_tokenizer
from offramp.common.cli import main
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.train.cli import Stage, build, run
from offramp.train.recipe import parse_command_line
from offramp.train.recipe_errors import explain
from offramp.train.tracking.logger import RUN_FILE

RECIPE = """
vars: {steps: 3}
trainer:
  accelerator: cpu
  devices: 1
  max_steps: ${vars.steps}
  enable_progress_bar: false
  enable_model_summary: false
  log_every_n_steps: 1
  callbacks:
    - class_path: ModelCheckpoint
      init_args: {every_n_train_steps: 1, save_top_k: -1, filename: 's{step}'}
model: {class_path: helpers.probe.Probe, lr: 1e-3}
data:
  tokenizer: tokenizer
  sequence_length: 48
  batch_size: 2
  cache_directory: cache
  train: {kind: generator, path: 'helpers.rows:counted', options: {count: 40}}
  validation: {kind: generator, path: 'helpers.rows:counted', options: {count: 5, start: 100}}
"""


@pytest.fixture
def here(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # Creating the tables of a new store takes seconds, so all tests start from copies of one. The path is absolute,
    # because MLflow keeps stores by their URI and would find the one of another test under a relative path.
    shutil.copy(empty_store, "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    tiny_tokenizer().save_pretrained("tokenizer")
    Path("recipe.yaml").write_text(RECIPE)
    return tmp_path


def argv(**overrides: str) -> list[str]:
    return ["-c", "recipe.yaml", *(f"--{key.replace('__', '.')}={value}" for key, value in overrides.items())]


def store() -> MlflowClient:
    return MlflowClient(f"sqlite:///{Path.cwd()}/mlflow.db")


def runs() -> list[Any]:
    return store().search_runs([experiment.experiment_id for experiment in store().search_experiments()])


def test_fit_trains_logs_and_saves_what_it_ran(here: Path) -> None:
    assert run("fit", argv(model__note="007")) == 0
    (logged,) = runs()
    assert logged.info.status == "FINISHED"
    assert logged.info.run_name == "recipe"
    assert logged.data.params["model/init_args/lr"] == "0.001"
    assert logged.data.params["model/init_args/note"] == "007"
    assert logged.data.metrics["train/loss"] > 0
    folder = here / "runs" / "recipe"
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {f"sstep={n}.ckpt" for n in (1, 2, 3)}
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["trainer"]["max_steps"] == 3
    assert saved["model"]["init_args"]["note"] == "007"
    artifacts = [item.path for item in store().list_artifacts(logged.info.run_id)]
    assert artifacts == ["config.yaml", "environment.json"]
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    # The saved configuration is a recipe of the same run.
    again = build(parse_command_line(["-c", str(folder / "config.yaml")]))
    assert again.resolved() == saved


def test_resume_continues_the_run_and_keeps_changed_parameters_as_tags(here: Path) -> None:
    assert run("fit", argv(ckpt_path="last")) == 0  # nothing there yet
    with pytest.warns(UserWarning, match=r"parameters changed.*resume\.1\."):
        assert run("fit", argv(ckpt_path="last", vars__steps="5", model__lr="0.5")) == 0
    (logged,) = runs()
    assert logged.info.status == "FINISHED"
    assert logged.data.params["trainer/max_steps"] == "3"
    assert logged.data.tags["resume.1.trainer/max_steps"] == "5"
    assert logged.data.tags["resume.1.model/init_args/lr"] == "0.5"
    history = store().get_metric_history(logged.info.run_id, "train/loss")
    assert [point.step for point in history] == [0, 1, 2, 3, 4]
    assert run("fit", argv()) == 0
    assert len(runs()) == 2


class Trap:
    """Says so when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("unpickled"),)


@pytest.mark.parametrize("command", ["fit", "validate", "test"])
def test_a_checkpoint_is_never_unpickled(here: Path, command: Stage) -> None:
    torch.save({"state_dict": {}, "anything": Trap()}, "foreign.ckpt")
    with pytest.raises(OfframpError, match=r"foreign\.ckpt holds more than tensors and plain values"):
        run(command, argv(ckpt_path="foreign.ckpt", data__test="${data.validation}"))
    assert not Path("unpickled").exists()


def test_validate_and_test_have_runs_of_their_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fit", argv()) == 0
    noted = (here / "runs" / "recipe" / RUN_FILE).read_text()
    assert run("validate", argv(ckpt_path="last")) == 0
    assert main(["test", *argv()]) == 1
    assert "nothing to test: set data.test to a source" in capsys.readouterr().err
    assert (here / "runs" / "recipe" / RUN_FILE).read_text() == noted
    assert sorted(logged.info.status for logged in runs()) == ["FAILED", "FINISHED", "FINISHED"]
    assert (here / "runs" / "recipe" / "validate-config.yaml").is_file()


@pytest.mark.parametrize(
    ("trouble", "status", "raised"),
    [
        ("raise", "FAILED", RuntimeError),
        ("interrupt", "KILLED", KeyboardInterrupt),
        ("terminate", "KILLED", SystemExit),
    ],
)
def test_the_status_of_a_run_is_the_truth(here: Path, trouble: str, status: str, raised: type[BaseException]) -> None:
    import signal

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(raised) as caught:
        run("fit", argv(model__trouble=trouble))
    signal.signal(signal.SIGINT, before[1])  # Lightning leaves it ignored after an interruption
    assert signal.getsignal(signal.SIGTERM) == before[0]
    if trouble == "terminate":
        assert caught.value.code == 143  # pyright: ignore[reportAttributeAccessIssue]
    (logged,) = runs()
    assert logged.info.status == status
    assert logged.data.params["model/init_args/trouble"] == trouble


@pytest.mark.slow
def test_two_processes_make_one_run_and_sigterm_ends_both(here: Path, quick_offramp: Path) -> None:
    command = [str(quick_offramp), "fit"]  # Lightning starts the other rank
    two = {"trainer__devices": "2", "trainer__strategy": "ddp", "data__batch_size": "1"}
    done = subprocess.run([*command, *argv(**two)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (logged,) = runs()
    assert logged.info.status == "FINISHED"
    killed = [*command, *argv(**two, model__trouble="terminate")]
    done = subprocess.run(killed, capture_output=True, text=True, timeout=300)
    assert done.returncode == 143, done.stderr
    assert sorted(logged.info.status for logged in runs()) == ["FINISHED", "KILLED"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["-1", "1"])
def test_a_fault_of_several_ranks_is_said_once(here: Path, rank: str) -> None:
    recipe = yaml.safe_load(Path("recipe.yaml").read_text())
    recipe["trainer"] |= {"devices": 2, "strategy": "ddp", "logger": False}
    recipe["trainer"]["callbacks"].append({"class_path": "helpers.faults.Fault", "init_args": {"rank": int(rank)}})
    recipe["data"]["batch_size"] = 1
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    processes = start_command(["fit", "-c", "recipe.yaml"], Path("said"), ranks=2)
    for process in processes:
        process.join(300)
    said = Path("said").read_text()
    assert said.count("offramp: error: the moon is full; wait.") == 1
    assert all(process.exitcode for process in processes)
    if rank == "-1":  # where rank 1 alone is at fault, rank 0 may say besides that it has lost it
        assert "Traceback" not in said
        assert processes[0].exitcode == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"trainer__max_stepz": "3"}, r"unknown configuration key 'trainer.max_stepz'; did you mean 'max_steps'\?"),
        (
            {"data__batchsize": "3"},
            r"unknown configuration key 'data.batchsize' \(TextDataModule\); did you mean 'batch_size'",
        ),
        (
            {"data__train__pth": "3"},
            r"unknown configuration key 'data.train.pth' \(TextDataModule\); did you mean 'path'",
        ),
        ({"data__validation__streamin": "1"}, r"'data.validation.streamin' \(SourceConfig\); did you mean 'streaming'"),
        ({"model__xyzzy": "3"}, r"'model.xyzzy' \(Probe\); the keys there are lr, note, trouble"),
        ({"trainr__max_steps": "3"}, r"unknown configuration key 'trainr.max_steps'; the keys there are .*trainer"),
        (
            {"trainer__callbacks__0__init_args__dirpat": "x"},
            r"'trainer.callbacks.dirpat' \(ModelCheckpoint\); did you mean 'dirpath'",
        ),
        ({"trainer__max_steps": "soon"}, "'trainer.max_steps' must be int, but its value is soon"),
        ({"data__batch_size": "2.5"}, "'data.batch_size' must be int, but its value is 2.5"),
        ({"data__train__limit": "few"}, "'data.train.limit' must be int, but its value is few"),
        (
            {"data__train__kind": "disk"},
            "'data.train.kind' must be Literal.*files.*but its value is disk",
        ),
        ({"data__train__limit": "0"}, "^source limit 0 must be at least 1"),
        ({"model__class_path": "helpers.probe.Prob"}, "'model'.*no attribute 'Prob'"),
        ({"trainer__strategy": "warp"}, "the configuration is refused.*invalid strategy.*warp"),
        ({"trainer__accelerator": "gpu"}, "the configuration is refused: No supported gpu backend found"),
        ({"trainer__precision": "fp16"}, "'trainer.precision' must be .*'bf16-mixed'.*, but its value is fp16"),
        ({"trainer": "5"}, "'trainer' must hold keys of its own, but its value is '5'"),
        ({"data": "rows.jsonl"}, "'data' must hold keys of its own, but its value is 'rows.jsonl'"),
        ({"ckpt_path": "none.ckpt"}, "'ckpt_path'.*none.ckpt does not exist"),
        ({"ckpt_path": "recipe.yaml"}, "recipe.yaml cannot be read as a Lightning checkpoint"),
        ({"ckpt_path": "tokenizer"}, "tokenizer is a directory.*deepspeed_pipeline"),
    ],
)
def test_faults_of_a_recipe_are_one_sentence(here: Path, overrides: dict[str, str], words: str) -> None:
    with pytest.raises(OfframpError, match=words) as caught:
        run("fit", argv(**overrides))
    assert "\n" not in str(caught.value)
    assert runs() == []


def test_missing_argument_is_named(here: Path) -> None:
    Path("recipe.yaml").write_text("model: {class_path: helpers.probe.Probe}\ndata: {train: {path: x}}")
    with pytest.raises(OfframpError, match="'data': the following arguments are required: tokenizer"):
        run("fit", argv())


def test_usage_faults_and_help(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit"]) == 2
    assert "give a configuration file" in capsys.readouterr().err
    assert main(["fit", "recipe.yaml"]) == 2
    assert "unexpected argument 'recipe.yaml'" in capsys.readouterr().err
    assert main(["fit", "-c", "nowhere.yaml"]) == 1
    assert "offramp: error: there is no configuration file nowhere.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["fit", "validate", "test"])
def test_help_lists_the_keys(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"usage: offramp {command} -c FILE" in shown
    for key in ("max_steps: int", "sequence_length: int = 512", "exit_weights", "default_root_dir"):
        assert key in shown


def test_the_default_model_is_built_and_trained(here: Path) -> None:
    tiny_checkpoint("model", ExitConfig(layers=(2,)))
    text = RECIPE.replace("class_path: helpers.probe.Probe, lr: 1e-3", "checkpoint: model, optimizer: {lr: 1e-3}")
    Path("recipe.yaml").write_text(text.replace("tokenizer: tokenizer", "tokenizer: ${model.checkpoint}"))
    assert run("fit", argv(model__optimizer__warmup_steps="2", trainer__val_check_interval="2")) == 0
    (logged,) = runs()
    assert logged.info.status == "FINISHED"
    assert {"train/loss_exit_02", "val/loss_exit_02", "train/step_seconds"} <= set(logged.data.metrics)
    check_pictures_and_samples(logged.info.run_id, steps=[1])
    again = argv(model__optimizer__warmup_steps="2", trainer__val_check_interval="2")
    Path("runs/recipe/loss_per_exit.png").unlink()
    with pytest.warns(UserWarning, match=r"parameters changed.*resume\.1\."):
        assert run("fit", [*again, "--ckpt_path=last", "--vars.steps=6"]) == 0
    check_pictures_and_samples(logged.info.run_id, steps=[1, 3, 5])
    kept = torch.load("runs/recipe/checkpoints/sstep=6.ckpt", weights_only=True)["callbacks"]["LossCurves"]
    assert [step for step, _ in kept["train"]["02"]["points"]] == [0, 1, 2, 3, 4, 5]
    assert [step for step, _ in kept["validation"]["04"]["points"]] == [1, 3], "saved before the last validation"
    with pytest.raises(OfframpError, match=r"did you mean 'warmup_steps'"):
        run("fit", argv(model__optimizer__warmup_step="2"))
    for file in Path("cache").iterdir():
        file.unlink()
    with pytest.raises(OfframpError, match=r"data.sequence_length is 257, but the model has positions for 256 tokens"):
        run("fit", argv(data__sequence_length="257"))
    assert not list(Path("cache").glob("tokens-*"))


def check_pictures_and_samples(run_id: str, steps: list[int]) -> None:
    """In the run directory, and the same in MLflow."""
    client, folder = store(), Path("runs/recipe")
    names = ["loss_per_exit.png", *(f"exit_samples/step_{step:08d}.csv" for step in steps)]
    assert sorted(folder.glob("exit_samples/*")) == [folder / name for name in names[1:]]
    for name in names:
        there = client.download_artifacts(run_id, name)
        assert Path(there).read_bytes() == (folder / name).read_bytes()
    assert (folder / names[0]).read_bytes().startswith(b"\x89PNG")
    with (folder / names[-1]).open(newline="") as file:
        header, *lines = csv.reader(file)
    assert header == ["prompt", "expected", "exit 02", "exit 04 (final)"]
    assert len(lines) == 2
    assert all(line[0].startswith("row 10") and line[2] and line[3] for line in lines)


def test_explain_names_the_type_of_the_innermost_key() -> None:
    message = """Parser key "trainer.strategy":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'str'>, <class 'lightning.pytorch.strategies.strategy.Strategy'>]
  Errors:
    - Expected a <class 'str'>
    - Problem with given class_path 'some.Strategy':
        Parser key "zero_stage":
          Expected a typing.Literal[0, 1]. Got value: 2"""
    assert explain(message, {}) == (
        "configuration key 'trainer.strategy.zero_stage' must be Literal[0, 1], but its value is 2"
    )


def test_explain_survives_what_it_does_not_know() -> None:
    assert explain("something new", {}) == "the configuration is refused: something new"
    assert "\n" not in explain("", {})


def test_logger_can_be_off(here: Path) -> None:
    assert run("fit", argv(trainer__logger="false")) == 0
    assert runs() == []
