"""A `Stage` as DeepSpeed wants it: a `PipelineModule` with the process groups of pipeline, replicas and tensor ranks.

Legend: B batch, T time, D model, S stages.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from offramp.common.errors import OfframpError
from offramp.common.families import AnyModel
from offramp.train.pipeline import quiet_deepspeed  # noqa: F401 - before deepspeed
from offramp.train.pipeline.stages import Stage, StageOutput, StagePlan
from offramp.train.pipeline.t5_stages import make_stage
from offramp.train.pipeline.tensor_parallel import shard_stage
from offramp.train.stage_files import Slice, find_stages
from offramp.train.start_weights import StartWeights
from offramp.train.tensor_group import TensorGroup

# isort: split
from deepspeed import comm as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology


class StageModule(PipelineModule):
    """A `Stage` as DeepSpeed wants it: process groups, and the parameters that stages share.

    For DeepSpeed the pipeline has S layers, one per stage, and the stages of others are empty. Its own tied layers
    are not used: they cannot share one parameter among several heads of a stage, and they save and load it in only one
    of them.
    Needs an initialised process group. Neighbouring ranks are those of one tensor group, then come data-parallel
    replicas, then stages.

    Args:
        model: of which this rank's part is taken. With `start` it is on the meta device, and of no more use.
        plan: its stages.
        tensor: ranks that share each stage.
        checkpoint_activations: see `Stage`.
        start: numbers of the parameters that this rank keeps; None: the model has them.
    """

    def __init__(
        self,
        model: AnyModel,
        plan: StagePlan,
        tensor: int = 1,
        checkpoint_activations: bool = False,
        start: StartWeights | None = None,
    ) -> None:
        replicas = dist.get_world_size() // (plan.num_stages * tensor)
        topology = PipeModelDataParallelTopology(plan.num_stages, tensor, replicas)
        index = topology.get_coord(dist.get_rank()).pipe
        stage = make_stage(model, plan, index, checkpoint_activations)
        self.sharding = None if tensor == 1 else shard_stage(stage, _tensor_group(topology))
        if start is not None:
            start.materialise(stage, self.slices)
        layers: list[nn.Module] = [nn.Identity() for _ in range(plan.num_stages)]
        layers[index] = stage
        self._plan = plan
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its layers, which say nothing here
            super().__init__(layers=layers, topology=topology, partition_method="uniform")
        self.stage = stage
        # DeepSpeed's optimizers and gradient norms need at least one parameter on every rank.
        self.idle = None
        if not any(parameter.requires_grad for parameter in stage.parameters()):
            self.idle = nn.Parameter(torch.zeros(1, device=next(stage.parameters()).device))

    def forward(self, forward_input: Tensor, layout: Any) -> StageOutput:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See `Stage.forward`."""
        return self.stage(forward_input, layout)

    def _index_tied_modules(self) -> dict[str, Any]:
        stage = next(module for module in self.forward_funcs if isinstance(module, Stage))
        own, tied = dict(stage.shared_parameters()), {}
        for name, holders in self._plan.shared.items():
            # Every rank takes part in making every group.
            for replica, rank in product(range(self._grid.data_parallel_size), range(self._grid.model_parallel_size)):
                ranks = [self._grid.stage_to_global(stage_id=s, data=replica, model=rank) for s in holders]
                group = dist.new_group(ranks=ranks)
                if self.global_rank not in ranks:
                    continue
                tied[name] = {"ranks": ranks, "group": group, "weight_attr": [name], "module": stage}
                if self.global_rank != ranks[0]:
                    setattr(own[name], "ds_pipe_replicated", True)  # noqa: B010 - so that norms count it once
        return tied

    @torch.no_grad()
    def _synchronize_tied_weights(self) -> None:
        super()._synchronize_tied_weights()

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """Shared parameters that are trained, with the process group of their holders, sorted by name."""
        pairs = [(self.stage.get_parameter(name), tie["group"]) for name, tie in self.tied_comms.items()]
        return [(parameter, group) for parameter, group in pairs if parameter.requires_grad]

    @property
    def groups(self) -> list[ProcessGroup]:
        """The process groups that this rank has beside those of DeepSpeed's grid."""
        tied = [tie["group"] for tie in self.tied_comms.values()]
        return tied if self.sharding is None else [*tied, self.sharding.ranks.group]

    @property
    def tensor_rank(self) -> int:
        """Among the ranks that share this stage; all of them have the same states and losses."""
        return self._grid.get_tensor_model_parallel_rank()

    def counted(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts a parameter, or its part of it, in norms; every number is counted by one rank."""
        if getattr(parameter, "ds_pipe_replicated", False):
            return False
        return self.tensor_rank == 0 or getattr(parameter, "tensor_model_parallel", False)

    def sum_partial_gradients(self) -> None:
        """See `Sharding`."""
        if self.sharding is not None:
            self.sharding.sum_partial_gradients(self.stage)

    @property
    def slices(self) -> Mapping[str, Slice]:
        """Of the parameters that this rank has a part of only."""
        return {} if self.sharding is None else self.sharding.slices

    def owned_names(self) -> set[str]:
        """Names of the parameters that this rank writes into a checkpoint: a shared one is written by its owner."""
        others = {name for name, stages in self._plan.shared.items() if stages[0] != self.stage.index}
        own = self.stage.state_dict().keys() - others
        return own if self.sharding is None else {name for name in own if self.sharding.owned(name)}

    def owned_tensors(self) -> dict[str, Tensor]:
        """The parameters of `owned_names`, on CPU."""
        own = self.owned_names()
        return {
            name: tensor.detach().cpu().contiguous() for name, tensor in self.stage.state_dict().items() if name in own
        }

    def load_stages(self, directory: Path) -> None:
        """Read this rank's parameters, one after the other, from the files of any number of stages and ranks.

        Raises:
            OfframpError: a parameter is not there, or has another shape.
        """
        state = self.stage.state_dict()
        found = find_stages(directory, state.keys().__contains__)
        for name, tensor in state.items():
            own, saved = self.slices.get(name), found.get(name)
            shape = tuple(tensor.shape) if own is None else own.whole_shape(tensor.shape)
            if saved is None or saved.shape != shape:
                has = "does not have it" if saved is None else f"has one of shape {list(saved.shape)}"
                raise OfframpError(
                    f"{directory} was written by a run of another model: {name!r} has shape {list(shape)} here, and "
                    f"that {has}; resume the run's own checkpoint."
                )
            with torch.no_grad():
                tensor.copy_(saved.read(own))


def _tensor_group(topology: PipeModelDataParallelTopology) -> TensorGroup:
    """Of this process. The grid has one too, but comes only after the layers."""
    mine = None
    for ranks in topology.get_axis_comm_lists("model"):
        group = dist.new_group(ranks=ranks)  # every rank takes part in making every group
        if isinstance(group, ProcessGroup) and dist.get_rank() in ranks:
            mine = TensorGroup(group, ranks.index(dist.get_rank()), len(ranks))
    assert mine is not None
    return mine
