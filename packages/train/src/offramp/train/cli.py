"""`offramp fit|validate|test`: a recipe, checked against the classes it names, run by Lightning.

LightningCLI does the typing and building; merging is done in `recipe.py`. Every fault in a recipe is one sentence.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch.distributed
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from offramp.common.errors import OfframpError
from offramp.train.checkpoint_io import WholeFileIO, keep_previous
from offramp.train.launch import check_launch, cluster_environment, find_launch, with_launch
from offramp.train.lost_process import lost_process
from offramp.train.one_voice import one_voice, this_rank
from offramp.train.pipeline.registration import register_strategy
from offramp.train.recipe import PLAN, RecipeArguments, import_object, load_recipe, parse_command_line
from offramp.train.recipe_errors import explained
from offramp.train.shared_directory import SharedDirectory
from offramp.train.tracking.exit_samples import ExitSamples
from offramp.train.tracking.logger import OfframpMLFlowLogger
from offramp.train.tracking.loss_curves import LossCurves
from offramp.train.tracking.recorder import RunRecorder, Termination
from offramp.train.training_checkpoint import CHECKPOINTS, newest_whole

Stage = Literal["fit", "validate", "test"]

DEFAULT_CLASSES = {
    "model": "offramp.train.module.MultiExitModule",
    "data": "offramp.train.data.datamodule.TextDataModule",
}
DEFAULT_SEED = 0
EXIT_USAGE = 2

_HELP = """\
usage: offramp {stage} -c FILE [-c FILE ...] [--section.key=value ...]

{summary}

options:
  -c FILE, --config FILE   a configuration file (YAML); several are merged in order
  --section.key=value      override one value; overrides win over all files
  --ckpt_path PATH         training checkpoint to {use}; 'last' is the newest of the run directory
  -h, --help               show this and exit

Interpolations such as ${{trainer.max_steps}} and ${{oc.env:HOME}} are resolved after files and overrides are merged.
Values under vars: exist to be referred to. The run directory is trainer.default_root_dir (runs/NAME of the last file by
default); checkpoints and the resolved config.yaml go there. trainer.logger is MLflow at MLFLOW_TRACKING_URI or
sqlite:///mlflow.db; set it to false to log nowhere.

"""
_SUMMARIES: dict[Stage, str] = {
    "fit": "Train a model and its exits as a recipe says.",
    "validate": "Measure loss and accuracy of every exit on a recipe's validation data.",
    "test": "Measure loss and accuracy of every exit on a recipe's test data.",
}


def fit_main(argv: list[str]) -> int:
    """`offramp fit`."""
    return run("fit", argv)


def validate_main(argv: list[str]) -> int:
    """`offramp validate`."""
    return run("validate", argv)


def test_main(argv: list[str]) -> int:
    """`offramp test`."""
    return run("test", argv)


def run(stage: Stage, argv: Sequence[str]) -> int:
    """Runs one stage of a recipe and returns the exit code.

    Raises:
        OfframpError: the recipe is at fault.
        KeyboardInterrupt: the user interrupted.
    """
    try:
        arguments = parse_command_line(argv)
    except OfframpError as error:
        print(f"offramp {stage}: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    if arguments.help:
        _print_help(stage)
        return 0
    if not arguments.files:
        print(f"offramp {stage}: error: give a configuration file with -c FILE", file=sys.stderr)
        return EXIT_USAGE
    _hush_libraries()
    with one_voice(), Termination() as termination:
        cli = build(arguments)
        cli.trainer.callbacks.insert(0, termination)  # pyright: ignore[reportAttributeAccessIssue]
        checkpoint = cli.config.get("ckpt_path")
        if checkpoint == "last":
            checkpoint = last_checkpoint(cli.trainer)
        elif checkpoint is not None:
            check_checkpoint(checkpoint, cli.trainer)
        loggers = [logger for logger in cli.trainer.loggers if isinstance(logger, OfframpMLFlowLogger)]
        for logger in loggers:
            is_fit = stage == "fit"
            resume = is_fit and checkpoint is not None
            logger.keep_in(Path(cli.trainer.default_root_dir), resume=resume, note=is_fit)
        try:
            _run_trainer(stage, cli, checkpoint)
        except BaseException as fault:
            # Lightning finalises loggers for faults inside its loops; this covers the rest and changes no verdict.
            for logger in loggers:
                logger.finalize("failed")
            if isinstance(fault, SystemExit) and isinstance(fault.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from fault  # Lightning turns Ctrl-C into exit code 1
            if isinstance(fault, UnpicklingError):
                raise OfframpError(
                    f"{checkpoint} holds more than tensors and plain values, and nothing else is unpickled; give a "
                    "checkpoint that Offramp wrote."
                ) from fault
            if isinstance(fault, MisconfigurationException):
                raise OfframpError(f"the configuration is refused: {' '.join(str(fault).split())}") from fault
            if (lost := lost_process(fault, this_rank(), alone=_alone())) is not None:
                raise lost from fault
            raise
        if torch.distributed.is_initialized():
            # Left to the interpreter's end, gloo's threads are now and then joined in an order that never returns.
            torch.distributed.destroy_process_group()
    return 0


def _alone() -> bool:
    """Whether this process is in touch with no other."""
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1


def _hush_libraries() -> None:
    """Leave out what libraries say to their own developers, or for their makers' other products."""
    for message in (r"`isinstance\(treespec, LeafSpec\)`", "Precision .* is not supported by the model summary"):
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "[litlogger]" not in record.getMessage() and "[litmodels]" not in record.getMessage()
    )


def _run_trainer(stage: Stage, cli: RecipeCLI, checkpoint: str | None) -> None:
    trainer, data = cli.trainer, cli.datamodule
    # Left to its default, Lightning unpickles whatever a local file holds; ours hold plain containers and tensors.
    if stage == "fit":
        trainer.fit(cli.model, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    elif stage == "validate":
        trainer.validate(cli.model, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    else:
        trainer.test(cli.model, datamodule=data, ckpt_path=checkpoint, weights_only=True)


def last_checkpoint(trainer: pl.Trainer) -> str | None:
    """The newest whole checkpoint in the trainer's checkpoint directory; None says that there is none yet.

    Lightning's own "last" finds only files that are named so.

    Raises:
        OfframpError: there are some, and none is whole.
    """
    callback = trainer.checkpoint_callback
    directory = Path(getattr(callback, "dirpath", None) or Path(trainer.default_root_dir) / CHECKPOINTS)
    # Of what the pipeline wrote, all ranks load what rank 0 finds, so one of them is enough to read it all.
    found = newest_whole(directory, tell=rank_zero_warn, read=this_rank() == 0)
    if found is not None:
        return str(found)
    rank_zero_info(f"no checkpoint in {directory} yet; starting from the beginning")
    return None


def check_checkpoint(checkpoint: str, trainer: pl.Trainer) -> None:
    """Refuses what cannot be a training checkpoint before anything is prepared for it; addresses are left to Lightning.

    Raises:
        OfframpError: there is nothing, or not what the trainer's strategy reads.
    """
    path = Path(checkpoint)
    if "://" in checkpoint:
        return
    if not path.exists():
        raise OfframpError(
            f"configuration key 'ckpt_path': {path} does not exist; give a training checkpoint, or 'last'"
        )
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        return  # it says itself what it does not read
    if path.is_dir():
        raise OfframpError(
            f"{path} is a directory, which only deepspeed_pipeline reads; set trainer.strategy, or turn it into a "
            "checkpoint directory with 'offramp export' and start a new run from that"
        )
    if not zipfile.is_zipfile(path):
        raise OfframpError(f"{path} cannot be read as a Lightning checkpoint; it is something else, or cut short")


class RecipeCLI(LightningCLI):
    """LightningCLI over a resolved recipe: builds trainer, model and data, and runs nothing.

    Args:
        recipe: plain containers, as `load_recipe` returns them, with every default filled in.
        environment: of the processes; None lets Lightning look for it.
    """

    datamodule: pl.LightningDataModule
    model: pl.LightningModule
    trainer: pl.Trainer

    def __init__(self, recipe: dict[str, Any], environment: ClusterEnvironment | None = None) -> None:
        self._environment = environment
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
            super().__init__(
                pl.LightningModule,
                pl.LightningDataModule,
                args=recipe,
                run=False,
                subclass_mode_model=True,
                subclass_mode_data=True,
                # The recorder saves the configuration: Lightning's own callback refuses to write it twice, so that a
                # resumed run would fail.
                save_config_callback=None,
                seed_everything_default=DEFAULT_SEED,
                auto_configure_optimizers=False,
                parser_kwargs={"exit_on_error": False},
            )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds what the commands take beside trainer, model and data."""
        parser.add_argument("--ckpt_path", type=str | None, default=None, help="Training checkpoint to start from.")

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Builds the trainer, with the environment of the processes among its plugins."""
        if self._environment is not None:
            given = self._get(self.config_init, "trainer.plugins") or []
            plugins = given if isinstance(given, list) else [given]
            if not any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):  # a recipe's own comes first
                kwargs["plugins"] = [*plugins, self._environment]
        return super().instantiate_trainer(**kwargs)

    def resolved(self) -> dict[str, Any]:
        """The configuration with all defaults, as plain containers; a recipe that repeats this run."""
        return cast("dict[str, Any]", yaml.safe_load(self.parser.dump(self.config, skip_unset=False)))


def build(arguments: RecipeArguments) -> RecipeCLI:
    """Builds trainer, model and data from a recipe.

    Raises:
        OfframpError: the recipe is at fault; the sentence names the key.
    """
    recipe, _ = _load(arguments.files, arguments.overrides)
    launch = find_launch(os.environ)
    recipe["trainer"] = with_launch(recipe["trainer"], launch)
    with explained(recipe):
        cli = RecipeCLI(recipe, cluster_environment(launch, os.environ))
    trainer = cli.trainer
    check_launch(trainer, launch, os.environ)
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # and not one that the recipe names
        trainer.strategy.checkpoint_io = WholeFileIO()
    for callback in cast("list[pl.Callback]", trainer.callbacks):  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            # Lightning's choice depends on the logger's run id, so that a resumed run could not find its checkpoints.
            callback.dirpath = str(Path(trainer.default_root_dir) / CHECKPOINTS)
        if isinstance(callback, ModelCheckpoint):
            keep_previous(callback)
    own: list[pl.Callback] = [SharedDirectory(), RunRecorder(cli.resolved()), LossCurves()]
    if not any(isinstance(callback, ExitSamples) for callback in trainer.callbacks):  # pyright: ignore[reportAttributeAccessIssue]
        own.append(ExitSamples())
    trainer.callbacks[:0] = own  # pyright: ignore[reportAttributeAccessIssue]
    return cli


class _UnbuiltCLI(RecipeCLI):
    """A recipe with every key and type checked, and nothing built."""

    def instantiate_classes(self) -> None:
        """Leave it at the configuration."""

    def _set_seed(self) -> None:
        """Nothing is drawn."""


def read_configuration(
    files: Sequence[Path], overrides: Sequence[tuple[str, str]] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Checks a recipe as `build` does, without the devices and files that it speaks of.

    Returns:
        The resolved configuration with all defaults, and the section `plan:`.

    Raises:
        OfframpError: the recipe is at fault; the sentence names the key.
    """
    recipe, plan = _load(files, overrides)
    with explained(recipe):
        return _UnbuiltCLI(recipe).resolved(), plan


def _load(files: Sequence[Path], overrides: Sequence[tuple[str, str]]) -> tuple[dict[str, Any], dict[str, Any]]:
    recipe = load_recipe(files, overrides)
    plan = recipe.pop(PLAN, None) or {}
    register_strategy()
    return with_defaults(recipe, files[-1].stem), plan


def with_defaults(recipe: dict[str, Any], name: str) -> dict[str, Any]:
    """A recipe with the command's defaults: classes, run directory, logger, one seed for all."""
    recipe = dict(recipe)
    for section in ("trainer", *DEFAULT_CLASSES):
        if not isinstance(part := recipe.get(section), dict | None):
            raise OfframpError(f"configuration key {section!r} must hold keys of its own, but its value is {part!r}")
    for section, class_path in DEFAULT_CLASSES.items():
        recipe[section] = {"class_path": class_path, **(recipe.get(section) or {})}
    trainer = dict(recipe.get("trainer") or {})
    trainer.setdefault("default_root_dir", f"runs/{name}")
    if trainer.get("logger") in (None, True, "true"):
        trainer["logger"] = {
            "class_path": "offramp.train.tracking.logger.OfframpMLFlowLogger",
            "init_args": {"run_name": Path(str(trainer["default_root_dir"])).name},
        }
    recipe["trainer"] = trainer
    data = recipe["data"]
    if data["class_path"] == DEFAULT_CLASSES["data"]:
        arguments = dict(data.get("init_args") or {})
        seed = recipe.get("seed_everything", DEFAULT_SEED)
        if str(seed).lstrip("-").isdigit():
            arguments.setdefault("seed", seed)
        recipe["data"] = {**data, "init_args": arguments}
    return recipe


def _print_help(stage: Stage) -> None:
    use = "resume" if stage == "fit" else "measure"
    print(_HELP.format(stage=stage, summary=_SUMMARIES[stage], use=use))
    print("sections and their keys:")
    for section, target in (("trainer", pl.Trainer), *((s, import_object(p)) for s, p in DEFAULT_CLASSES.items())):
        print(f"\n{section}:" + (f"  (class_path: {DEFAULT_CLASSES[section]})" if section in DEFAULT_CLASSES else ""))
        for key, kind, default in _parameters(target):
            print(f"  {key}: {kind}" + ("" if default is inspect.Parameter.empty else f" = {default!r}"))


def _parameters(target: Any) -> Iterator[tuple[str, str, Any]]:
    for name, parameter in inspect.signature(target.__init__).parameters.items():
        if name != "self":
            kind = parameter.annotation
            text = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
            yield name, str(text).replace("typing.", ""), parameter.default
