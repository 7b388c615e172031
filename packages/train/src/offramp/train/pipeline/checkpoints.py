"""Checkpoints of a pipeline: a directory that any layout of stages, replicas and ZeRO stages can go on from.

    NAME.ckpt/offramp.json                         the record: what export needs, and size and hash of every other file
    NAME.ckpt/checkpoint/stage_SS.safetensors      weights of stage SS
    NAME.ckpt/checkpoint/optimizer_SS_RR.safetensors   optimizer state of stage SS, the part that replica RR writes
    NAME.ckpt/checkpoint/*_rank_NN.safetensors     the same of other tensor-parallel ranks than the first
    NAME.ckpt/checkpoint/trainer.pt                loops, schedules, callbacks, data position and random states

Weights and optimizer state have the names of parameters in the whole model, and slices say what they are of, so nothing
in them depends on how that was cut up. DeepSpeed's own format names flat partitions of its optimizers; a general
converter is needed to go from one layout to another, and all of it is pickled.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from safetensors.torch import save_file
from torch import Tensor, nn

from offramp.common.errors import OfframpError
from offramp.train.checkpoint_io import cannot_write, write_durably, write_state
from offramp.train.lora import checkpoint_name
from offramp.train.pipeline import quiet_deepspeed  # noqa: F401 - before deepspeed
from offramp.train.stage_files import STAGES, Slice, find_saved, rank_suffix, slice_metadata
from offramp.train.training_checkpoint import (
    FILES,
    RECORD_FILE,
    damaged_file,
    describe,
    make_durable,
    put_in_place,
    remove_leftovers,
    scratch_of,
)
from offramp.train.training_record import RECORD

# isort: split
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

if TYPE_CHECKING:
    from offramp.train.pipeline.engine import EarlyExitPipelineEngine

WEIGHTS = "stage_{:02d}{}.safetensors"
"""Name of the weights of one stage and tensor-parallel rank; `offramp.train.stage_files` reads them."""
OPTIMIZER = "optimizer_{:02d}_{:02d}{}.safetensors"
"""Name of one replica's part of the optimizer state of one stage and tensor-parallel rank.

Its tensors are `PARAMETER/KEY`.
"""
TRAINER = "trainer.pt"
_SETTINGS = "settings"
"""In the metadata of the optimizer state: parameter -> rates and the like, as JSON."""


def save(engine: EarlyExitPipelineEngine, checkpoint: Mapping[str, Any], path: Path, layout: Mapping[str, Any]) -> None:
    """Write a checkpoint; every rank takes part.

    Args:
        engine: with weights and optimizer.
        checkpoint: Lightning's, with the record.
        path: directory to write; an older one is replaced when this one is whole.
        layout: of the processes, for the record.

    Raises:
        OfframpError: on every rank, if one of them cannot write its part. Other checkpoints are as they were.
    """
    rank, scratch = torch.distributed.get_rank(), scratch_of(path)
    stages = scratch / STAGES
    with _together(path):
        if rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(path.parent)
            stages.mkdir(parents=True)
    if _is_zero(engine.optimizer):
        _link(engine.optimizer)
    states, settings = _optimizer_state(engine)  # a collective, so no fault of writing may keep a rank from it
    written: list[Path] = []
    with _together(path):
        stage, replica = engine.stage_id, engine.grid.get_data_parallel_id()
        suffix, slices = rank_suffix(engine.module.tensor_rank), engine.module.slices
        if replica == 0:
            weights = engine.module.owned_tensors()
            written.append(stages / WEIGHTS.format(stage, suffix))
            metadata = {"format": "pt", **slice_metadata(weights, slices)}
            write_durably(partial(save_file, weights, metadata=metadata), written[-1])
        written.append(stages / OPTIMIZER.format(stage, replica, suffix))
        metadata = {"format": "pt", _SETTINGS: json.dumps(settings), **slice_metadata(states, slices)}
        write_durably(partial(save_file, states, metadata=metadata), written[-1])
        if rank == 0:
            rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
            written.append(stages / TRAINER)
            write_state(rest, written[-1])
    with _together(path):
        files = {file.relative_to(scratch).as_posix(): describe(file) for file in written}
    parts = _gathered(files)
    with _together(path):
        if rank == 0:
            record = {
                **checkpoint[RECORD],
                "processes": layout,
                "lightning": checkpoint["pytorch-lightning_version"],
                FILES: {name: about for part in parts for name, about in part.items()},
            }
            (scratch / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            make_durable([scratch / RECORD_FILE, stages, scratch])
            put_in_place(scratch, path)


def verify(path: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """See whether all files of a checkpoint are what was written; each rank looks at some of them.

    Raises:
        OfframpError: on every rank, if one file is not.
    """
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    reasons = _gathered(damaged_file(path, dict(list(files.items())[rank::world_size])))
    if reason := next(filter(None, reasons), None):
        raise OfframpError(f"{path} is damaged: {reason}; resume from another checkpoint ('last' finds one).")


def load(engine: EarlyExitPipelineEngine, path: Path, scheduler: Any) -> dict[str, Any]:
    """Read weights and optimizer state into an engine that has made no step yet; returns Lightning's checkpoint.

    Args:
        engine: of any layout.
        path: the directory.
        scheduler: of the learning rate, or None. Its state in the returned checkpoint is that of this stage, which may
            have other parameter groups than the stages that were saved.
    """
    engine.module.load_stages(path / STAGES)
    checkpoint: dict[str, Any] = torch.load(path / STAGES / TRAINER, map_location="cpu", weights_only=True)
    named = {parameter: name for name, parameter in _trained(engine)}
    states, settings = _read_optimizer(path / STAGES, set(named.values()), engine.module.slices)
    optimizer: Any = engine.optimizer
    groups = _groups(engine)
    for group, parameters in groups:
        # Parameters of a group have the same settings. A stage that trains nothing has one that stands in; what rates
        # it has is all the same.
        found = next((settings[named[p]] for p in parameters if named[p] in settings), next(iter(settings.values())))
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in found.items()})
    if _is_zero(engine.optimizer):
        _fill_partitions(engine.optimizer, named, states)
    else:
        for parameter, name in named.items():
            if name in states:
                optimizer.state[parameter] = {
                    # As torch's own loading has it: the number of steps lies where a fused optimizer wants it.
                    key: value.to(parameter.device)
                    for key, value in states[name].items()
                }
    for saved in checkpoint.get("lr_schedulers", ()) if scheduler is not None else ():
        own = {"base_lrs": "initial_lr", "_last_lr": "lr"}
        saved.update({key: [group[of] for group, _ in groups] for key, of in own.items() if key in saved})
        if "lr_lambdas" in saved:
            saved["lr_lambdas"] = [None] * len(groups)
    return checkpoint


def _is_zero(optimizer: Any) -> bool:
    return isinstance(optimizer, ZeROOptimizer)


def _trained(engine: EarlyExitPipelineEngine) -> list[tuple[str, nn.Parameter]]:
    """Trained parameters of this stage under their names in a checkpoint, and the one that stands in for none."""
    named = engine.module.stage.named_parameters()
    pairs = [(checkpoint_name(name), parameter) for name, parameter in named if parameter.requires_grad]
    return pairs if engine.module.idle is None else [*pairs, ("idle", engine.module.idle)]


def _groups(engine: EarlyExitPipelineEngine) -> list[tuple[dict[str, Any], list[nn.Parameter]]]:
    """Each parameter group of the optimizer, with the parameters of the model that are in it."""
    optimizer: Any = engine.optimizer
    if _is_zero(optimizer):
        return list(zip(optimizer.param_groups, optimizer.bit16_groups, strict=True))
    return [(group, group["params"]) for group in optimizer.param_groups]


def _optimizer_state(engine: EarlyExitPipelineEngine) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state that this rank writes, by `PARAMETER/KEY`, and all settings by parameter.

    Under ZeRO every parameter's state is put together from the replicas' partitions, one at a time, and each replica
    keeps every so-manieth.
    """
    named = {parameter: name for name, parameter in _trained(engine)}
    own = engine.module.owned_names()
    replicas, replica = engine.dp_world_size, engine.grid.get_data_parallel_id()
    states: dict[str, Tensor] = {}
    settings: dict[str, Any] = {}
    number = 0
    for index, (group, parameters) in enumerate(_groups(engine)):
        for parameter in parameters:
            name = named[parameter]
            settings[name] = {key: value for key, value in group.items() if key != "params"}
            if name not in own:  # another stage writes it, or it stands in for none
                continue
            number += 1
            for key, value in _state_of(engine.optimizer, index, parameter):
                if number % replicas == replica:
                    states[f"{name}/{key}"] = value.detach().cpu().contiguous()
    return states, settings


def _state_of(optimizer: Any, group: int, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
    if not _is_zero(optimizer):
        yield from optimizer.state.get(parameter, {}).items()
        return
    partition = optimizer.single_partition_of_fp32_groups[group]
    for key, value in optimizer.optimizer.state.get(partition, {}).items():
        if value.shape == partition.shape:
            whole = safe_get_full_optimizer_state(parameter, key)
            assert whole is not None
            yield key, whole
        else:
            yield key, value.clone()  # a partition has one number of steps for all of its parameters


def _read_optimizer(
    directory: Path, names: set[str], slices: Mapping[str, Slice]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """State of some parameters, or of slices of them, from the files of any number of stages, replicas and ranks.

    Also the settings of all parameters.
    """
    states: dict[str, dict[str, Tensor]] = {}
    settings: dict[str, Any] = {}
    files = sorted(directory.glob("optimizer_*.safetensors"))
    found, about = find_saved(files, lambda full: full.rpartition("/")[0] in names)
    for full, saved in found.items():
        name, _, key = full.rpartition("/")
        states.setdefault(name, {})[key] = saved.read(slices.get(name))
    for metadata in about:
        settings |= json.loads(metadata[_SETTINGS])
    return states, settings


def _fill_partitions(
    optimizer: Any, named: Mapping[nn.Parameter, str], states: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Put whole states into this replica's partitions of an optimizer of ZeRO-1, and weights into its copies."""
    for partition, parameters in zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True):
        filled: dict[str, Tensor] = {}
        for parameter in parameters:
            for key, value in states.get(named[parameter], {}).items():
                if value.shape == parameter.shape:
                    filled.setdefault(key, torch.zeros_like(partition))
                else:  # the number of steps, which a partition has but one of
                    steps = filled.get(key, value)
                    filled[key] = torch.maximum(value.to(partition.device), steps.to(partition.device))
        if filled:
            optimizer.optimizer.state[partition] = filled
    _link(optimizer)
    for parameter, name in named.items():
        for key, value in states.get(name, {}).items():
            if value.shape == parameter.shape:
                safe_set_full_optimizer_state(parameter, value.to(parameter.device), key)
    optimizer.refresh_fp32_params()


def _link(optimizer: Any) -> None:
    """Let parameters know where their states are; DeepSpeed does so after a step, and only for the first group."""
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()


@contextmanager
def _together(path: Path) -> Iterator[None]:
    """A fault on one rank becomes one on all of them: otherwise the others would wait for it."""
    fault, reason = None, None
    try:
        yield
    except OSError as error:
        fault, reason = error, str(error)
    except Exception as error:
        fault, reason = error, f"{type(error).__name__}: {error}"
    faults = [(rank, *one) for rank, one in enumerate(_gathered((reason, isinstance(fault, OSError)))) if one[0]]
    if not faults:
        return
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(scratch_of(path), ignore_errors=True)
    if fault is not None and not isinstance(fault, OSError):
        raise fault
    rank, reason, of_system = faults[0]
    if of_system:
        raise cannot_write(path, reason) from fault
    raise OfframpError(
        f"{path} cannot be written: rank {rank} met {reason}; see its message, and resume from the checkpoint before "
        "it, which is as it was."
    ) from fault


def _gathered(value: Any) -> list[Any]:
    """What each rank has, in their order."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
