"""`offramp plan`: what a recipe's pipeline will cost, from the recipe alone: no data, no weights, no devices.

The recipe is checked as `offramp fit` checks it, but nothing in it is built. Its section `plan:` says what is known
about the machines.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from offramp.common.checkpoint import EXITS_JSON
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig
from offramp.common.families import AnyModel, make_model, read_config
from offramp.common.hf import read_json
from offramp.common.t5.config import T5Config
from offramp.train.cli import DEFAULT_CLASSES, EXIT_USAGE, read_configuration
from offramp.train.depth_spread import DepthSpread
from offramp.train.encoder_decoder import check_module, check_pipeline
from offramp.train.exit_weights import Curriculum, WeightSchedule
from offramp.train.freezing import freeze_parameters, untrained
from offramp.train.objective import ObjectiveConfig, RunObjective
from offramp.train.pipeline.costs import MicroBatchShape, summed_bytes
from offramp.train.pipeline.estimate import Estimator, Variant, compare
from offramp.train.pipeline.filling import FillSettings
from offramp.train.pipeline.registration import NAME
from offramp.train.pipeline.report import (
    GIB,
    comparison_table,
    milliseconds,
    stage_records,
    stage_table,
    variant_records,
)
from offramp.train.pipeline.stages import plan_stages, replicas
from offramp.train.pipeline.tensor_parallel import check_tensor_parallel
from offramp.train.pipeline.timeline import draw
from offramp.train.pipeline.times import GivenTimes, ModuleTimes, estimated, matrix_speed, profiled, transfer_seconds
from offramp.train.recipe import PLAN, parse_command_line

STRATEGY = "offramp.train.pipeline.strategy.DeepSpeedPipelineStrategy"
_STRATEGY_DEFAULTS = {
    "pipe": 2,
    "tensor": 1,
    "micro_batches": 4,
    "zero_stage": 0,
    "labelled_share": 0.5,
    "checkpoint_activations": False,
    "fill_bubbles": False,
}
_DRAWN = 4
"""Micro-batches per stage that a drawing shows; more are only a longer middle."""

_HELP = """\
usage: offramp plan -c FILE [-c FILE ...] [--section.key=value ...] [--out DIR] [--json true]

Shows what the pipeline of a recipe will cost: layers, exits, parameters, time and memory of each stage, and a step with
and without each optimisation. Needs no data, no weights and no devices; config.json (and exits.json) of the model are
read.

options:
  -c FILE, --config FILE   a configuration file (YAML); several are merged in order
  --section.key=value      override one value; overrides win over all files
  --out DIR                write plan.json and timeline.png there
  --json true              print the JSON instead of tables
  -h, --help               show this and exit

What is known about the machines stands under plan: in the recipe, or here:
  --tflops X               10^12 floating-point operations per second that a device reaches; measured here if not given
  --profile true           run one layer, the embedding and the heads on this machine instead
  --time.NAME SECONDS      of a micro-batch: embedding_, layer_, encoder_layer_, exit_, final_ with forward or backward,
                           and transfer
  --link_gbps X            10^9 bits per second between neighbouring stages; messages take no time if not given
  --memory_gib X           of a device; a stage that needs more is pointed out
  --fill_warmup N, --fill_cooldown N   micro-batches put into the bubbles; as many as fit if not given
"""


@dataclass(frozen=True)
class Machine:
    """The section `plan:` of a recipe.

    Attributes:
        tflops: see the help.
        profile: see the help.
        link_gbps: see the help.
        memory_gib: see the help.
        fill_warmup: see the help.
        fill_cooldown: see the help.
        time: see the help.
    """

    tflops: float | None = None
    profile: bool = False
    link_gbps: float | None = None
    memory_gib: float | None = None
    fill_warmup: int | None = None
    fill_cooldown: int | None = None
    time: GivenTimes = field(default_factory=GivenTimes)

    @classmethod
    def from_recipe(cls, section: Any) -> Machine:
        """Reads the section.

        Raises:
            OfframpError: a key is not known, or a value is not what it must be.
        """
        if not isinstance(section, Mapping):
            raise OfframpError(f"configuration key {PLAN!r} must hold keys of its own, but its value is {section!r}")
        values = _checked(cls, section, PLAN)
        times = section.get("time") or {}
        if not isinstance(times, Mapping):
            raise OfframpError(f"configuration key '{PLAN}.time' must hold keys of its own, but its value is {times!r}")
        return cls(**{**values, "time": GivenTimes(**_checked(GivenTimes, times, f"{PLAN}.time"))})


def _checked(kind: type, section: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = {entry.name: str(entry.type) for entry in fields(kind)}
    values: dict[str, Any] = {}
    for key, value in section.items():
        if key not in known:
            raise OfframpError(f"unknown configuration key '{where}.{key}'; the keys there are {', '.join(known)}")
        if key == "time" or value is None:
            continue
        if known[key] == "bool":
            if str(value).lower() not in ("true", "false"):
                raise OfframpError(f"configuration key '{where}.{key}' must be true or false, but its value is {value}")
            values[key] = str(value).lower() == "true"
            continue
        whole = known[key].startswith("int")
        try:
            number = int(str(value)) if whole else float(str(value))
        except ValueError:
            number = math.nan
        at_least_one = where == PLAN and not whole
        if not (0.0 < number < math.inf if at_least_one else 0.0 <= number < math.inf):
            wanted = "a whole number, not negative" if whole else "above 0" if at_least_one else "0 or more"
            raise OfframpError(f"configuration key '{where}.{key}' must be {wanted}, but its value is {value}")
        values[key] = number
    return values


@dataclass(frozen=True)
class Planned:
    """A recipe's plan.

    Attributes:
        estimator: of its stages.
        variants: a step with and without each optimisation.
        machine: what was known.
        notes: what the reader should know, one sentence each.
    """

    estimator: Estimator
    variants: list[Variant]
    machine: Machine
    notes: list[str]

    def record(self) -> dict[str, Any]:
        """For `plan.json`: seconds and bytes."""
        estimator, times = self.estimator, self.estimator.times
        return {
            "stages": stage_records(estimator),
            "stage_bounds": list(estimator.plan.bounds[1:-1]),
            "exit_placement": estimator.plan.exit_placement,
            "micro_batches": estimator.micro_batches,
            "replicas": estimator.replicas,
            "tensor": estimator.tensor,
            "zero_stage": estimator.zero_stage,
            "micro_batch": asdict(estimator.shape),
            "times": {
                "source": times.source,
                "embedding": list(times.embedding),
                **({"encoder_layer": list(times.encoder_layer)} if estimator.plan.encoder_bounds else {}),
                "layer": list(times.layer),
                "heads": {str(layer): list(seconds) for layer, seconds in times.heads.items()},
                "transfer": times.transfer,
            },
            "variants": variant_records(self.variants),
            "notes": self.notes,
        }


def main(argv: list[str]) -> int:
    """`offramp plan`."""
    try:
        arguments = parse_command_line(argv)
    except OfframpError as error:
        print(f"offramp plan: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    if arguments.help:
        print(_HELP, end="")
        return 0
    if not arguments.files:
        print("offramp plan: error: give a configuration file with -c FILE", file=sys.stderr)
        return EXIT_USAGE
    own = {key: text for key, text in arguments.overrides if key in ("out", "json")}
    overrides = [
        (f"{PLAN}.{key}" if key.split(".")[0] in {entry.name for entry in fields(Machine)} else key, text)
        for key, text in arguments.overrides
        if key not in own
    ]
    planned = plan_recipe(arguments.files, overrides)
    if own.get("json", "false") == "true":
        print(json.dumps(planned.record(), indent=2))
    else:
        print(describe(planned))
    if "out" in own:
        out = Path(own["out"])
        out.mkdir(parents=True, exist_ok=True)
        (out / "plan.json").write_text(json.dumps(planned.record(), indent=2) + "\n", encoding="utf-8")
        _draw(planned, out / "timeline.png")
    return 0


def plan_recipe(files: Sequence[Path], overrides: Sequence[tuple[str, str]] = ()) -> Planned:
    """Plans a recipe.

    Raises:
        OfframpError: the recipe is at fault, or says too little.
    """
    configuration, machine_section = read_configuration(files, overrides)
    machine = Machine.from_recipe(machine_section)
    notes: list[str] = []
    model, module = _model(configuration["model"])
    trainer, data = configuration["trainer"], configuration["data"].get("init_args") or {}
    strategy = _strategy(trainer.get("strategy"))
    encoder = isinstance(model.config, T5Config)
    for key in ("batch_size", "sequence_length", *(("source_length",) if encoder else ())):
        if not isinstance(data.get(key), int):
            raise OfframpError(f"plan needs data.{key}; {configuration['data'].get('class_path')} does not say it")
    pipe, tensor, parts = strategy["pipe"], strategy["tensor"], strategy["micro_batches"]
    lora, compiled = bool(module.get("lora")), bool(module.get("compile_layers"))
    fills = FillSettings.from_value(strategy["fill_bubbles"])
    if isinstance(model.config, T5Config):
        check_module(model.config, lora=lora, compiled=compiled, precision=str(trainer.get("precision")))
        check_pipeline(tensor=tensor, fills=fills is not None)
    else:
        check_tensor_parallel(model.config, tensor, lora=lora, compiled=compiled)
    shape = MicroBatchShape(
        rows=_rows(data["batch_size"], parts),
        time=data["sequence_length"],
        labelled_share=strategy["labelled_share"],
        mixed="mixed" in str(trainer.get("precision")),
        source_time=data["source_length"] if encoder else 0,
    )
    bounds, placement = strategy.get("stage_bounds"), strategy.get("exit_placement", "next_stage")
    # The same call that the strategy makes, so that fit runs what is planned.
    share = shape.source_time / shape.time if encoder else 1.0
    plan = plan_stages(
        model.config, model.exit_config, pipe, bounds, shape.labelled_share, placement, model.depth, share
    )
    if module.get("fill_aware"):
        notes.append("fill_aware: tokens frozen at an exit still count as if all layers computed them.")
    if (module.get("objective") or {}).get("curriculum"):
        notes.append("curriculum: every exit is planned as if each step trained it.")
    if lora:
        notes.append("lora: planned without the corrections, the backbone trained or frozen as freeze says.")
    times = _times(model, shape, machine, tensor)
    replicated = _replicas(trainer, pipe, tensor, notes)
    estimator = Estimator(
        plan, model, shape, times, parts, replicated, strategy["zero_stage"], strategy["checkpoint_activations"],
        fills, tensor,
    )  # fmt: skip
    filling = estimator.filling()
    if filling is not None:
        notes += [*filling.shortfalls, filling.describe(parts)]
        if filling.inserted:  # a batch is cut into so many more
            shape = replace(shape, rows=_rows(data["batch_size"], parts + filling.inserted))
            estimator = replace(estimator, shape=shape, times=_times(model, shape, machine, tensor))
            parts += filling.inserted
    if data["batch_size"] % parts:
        notes.append(f"{data['batch_size']} rows in {parts} micro-batches: the larger ones are planned.")
    if tensor > 1:
        notes.append(
            f"tensor {tensor}: each layer sums {summed_bytes(model.config, shape) / 2**20:.3g} MiB of states among its "
            "ranks in the forward pass and as much in fp32 gradients in the backward pass; that takes no time here."
        )
    variants = compare(estimator, machine.fill_warmup, machine.fill_cooldown)
    _note_faults(estimator, variants, machine, notes)
    return Planned(estimator, variants, machine, notes)


def _rows(batch_size: int, parts: int) -> int:
    """Of the larger micro-batches."""
    if batch_size < parts:
        raise OfframpError(
            f"a batch of {batch_size} rows cannot be cut into {parts} micro-batches; enlarge data.batch_size or lower "
            "micro_batches."
        )
    return math.ceil(batch_size / parts)


def describe(planned: Planned) -> str:
    """The plan in words."""
    estimator, shape = planned.estimator, planned.estimator.shape
    world = estimator.replicas * estimator.plan.num_stages * estimator.tensor
    shared = "" if estimator.tensor == 1 else f" x {estimator.tensor} tensor ranks"
    step = next(variant for variant in planned.variants if variant.runs)
    parts = estimator.micro_batches + (step.filling.inserted if step.filling is not None else 0)
    tokens = parts * shape.positions * estimator.replicas
    lines = [
        f"{world} processes: {estimator.plan.num_stages} stages x {estimator.replicas} replicas{shared}; a step is "
        f"{parts} micro-batches of {shape.describe()} on each replica, "
        f"{tokens:,} tokens in all",
        f"times: {estimator.times.source}",
        "",
        stage_table(estimator),
        "",
        comparison_table(planned.variants),
        "",
        f"{tokens / step.timeline.seconds:,.0f} tokens per second in forward and backward passes; the optimizer's step "
        "and data-parallel reductions come on top",
    ]
    return "\n".join(lines + [f"note: {note}" for note in planned.notes])


def _draw(planned: Planned, path: Path) -> None:
    estimator = planned.estimator
    shown = min(estimator.micro_batches, _DRAWN * estimator.plan.num_stages)
    caption = f"{estimator.micro_batches} micro-batches"
    variants = planned.variants
    if shown < estimator.micro_batches:
        caption = (
            f"the first {shown} of {estimator.micro_batches} micro-batches, and the end of the step as if they were all"
        )
        few = replace(estimator, micro_batches=shown)
        variants = compare(few, planned.machine.fill_warmup, planned.machine.fill_cooldown)
    draw(path, [(variant.name, variant.timeline) for variant in variants], caption)


def _model(section: Mapping[str, Any]) -> tuple[AnyModel, Mapping[str, Any]]:
    """The model on the meta device, with what is frozen marked so; and the arguments of its module."""
    arguments = section.get("init_args") or {}
    if section.get("class_path") != DEFAULT_CLASSES["model"]:
        raise OfframpError(f"plan speaks of {DEFAULT_CLASSES['model']}, not of {section.get('class_path')}")
    directory = Path(arguments["checkpoint"])
    if not (directory / "config.json").is_file():
        raise OfframpError(f"model.checkpoint: there is no {directory / 'config.json'}; give a model directory")
    config = read_config(read_json(directory / "config.json"))
    exits = ExitConfig()
    if (directory / EXITS_JSON).is_file():
        exits = ExitConfig.from_json(read_json(directory / EXITS_JSON)["exits"])
    with torch.device("meta"):
        model = make_model(config, exits)
    objective = RunObjective(
        _objective_config(arguments.get("objective") or {}),
        arguments.get("exit_weights"),
        arguments.get("final_weight"),
        exits.layers,
        config.num_layers,
    ).widest
    if not arguments.get("from_scratch"):
        model.drop_layers_above(objective.depth)
    freeze_parameters(model, [*(arguments.get("freeze") or ()), *untrained(model, objective)])
    return model, arguments


def _objective_config(section: Mapping[str, Any]) -> ObjectiveConfig:
    parts = {"schedule": WeightSchedule, "curriculum": Curriculum, "depth_spread": DepthSpread}
    values = dict(section)
    for name, kind in parts.items():
        if values.get(name) is not None:
            values[name] = kind(**values[name])
    return ObjectiveConfig(**values)


def _strategy(value: Any) -> dict[str, Any]:
    """Arguments of the pipeline strategy; any other strategy is one stage."""
    if isinstance(value, Mapping) and value.get("class_path") == STRATEGY:
        return {**_STRATEGY_DEFAULTS, **(value.get("init_args") or {})}
    if value == NAME:
        return dict(_STRATEGY_DEFAULTS)
    return {**_STRATEGY_DEFAULTS, "pipe": 1, "micro_batches": 1}


def _replicas(trainer: Mapping[str, Any], pipe: int, tensor: int, notes: list[str]) -> int:
    devices, nodes = trainer.get("devices"), int(trainer.get("num_nodes") or 1)
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        devices = len(devices)
    if not str(devices).isdigit():
        notes.append(f"trainer.devices is {devices}: one replica is planned.")
        return 1
    return replicas(int(str(devices)) * nodes, pipe, tensor)


def _times(model: AnyModel, shape: MicroBatchShape, machine: Machine, tensor: int) -> ModuleTimes:
    config, exits = model.config, model.exit_config
    rate = None if machine.link_gbps is None else machine.link_gbps * 1e9 / 8
    transfer = transfer_seconds(config, shape, rate)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if machine.profile:
        times = profiled(config, exits, shape, device, transfer).shared_by(tensor)
    elif machine.tflops is not None:
        source = f"estimated from operations at {machine.tflops:g} TFLOP/s"
        times = estimated(config, exits, shape, machine.tflops * 1e12, source, transfer, tensor)
    else:
        speed = matrix_speed(device, shape.mixed)
        source = f"estimated from operations at {speed / 1e12:.3g} TFLOP/s, a matrix product's speed on this machine"
        times = estimated(config, exits, shape, speed, source, transfer, tensor)
    return times.with_given(machine.time)


def _note_faults(estimator: Estimator, variants: Sequence[Variant], machine: Machine, notes: list[str]) -> None:
    for variant in variants:
        if variant.bound is not None and variant.timeline.seconds > variant.bound * (1.0 + 1e-9):
            notes.append(f"{variant.name}: a step is longer than the bound, which supposes stages alike but for exits.")
        filling = variant.filling
        if filling is None:
            continue
        for part, asked, given in (
            ("fill_warmup", machine.fill_warmup, filling.warmup),
            ("fill_cooldown", machine.fill_cooldown, filling.cooldown),
        ):
            if asked is not None and asked > given:
                notes.append(f"{part} {asked} is more than the bubble has room for; {given} are planned.")
    if machine.memory_gib is not None:
        for stage in stage_records(estimator):
            if stage["total_bytes"] > machine.memory_gib * GIB:
                notes.append(
                    f"stage {stage['stage']} needs {stage['total_bytes'] / GIB:.1f} GiB, more than the "
                    f"{machine.memory_gib:g} GiB of a device."
                )
    slowest = max(work.total for work in estimator.works())
    mean = sum(work.total for work in estimator.works()) / estimator.plan.num_stages
    if slowest > 1.1 * mean:
        notes.append(
            f"the slowest stage takes {milliseconds(slowest)} ms per micro-batch, the mean is {milliseconds(mean)} ms."
        )
