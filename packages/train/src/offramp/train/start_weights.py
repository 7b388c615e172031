"""Weights that a run starts with, parameter by parameter: a process makes those that it keeps, and no others.

Modules are built on the meta device, where parameters have shapes and no numbers, cut and divided there, and only then
given numbers. So a process never holds more than its part of the model and the one parameter that it is reading or
drawing, however large the whole is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offramp.common.model.fresh_weights import fresh_weight
from offramp.common.stored_tensor import StoredTensor
from offramp.train.lora import checkpoint_name, fresh_correction
from offramp.train.stage_files import Slice


@dataclass(frozen=True)
class StartWeights:
    """Where numbers come from; the same for one name whoever asks.

    Attributes:
        stored: tensors of the whole model by name, which lie in a checkpoint directory; None: all are drawn.
        spread: standard deviation of a matrix that is drawn, by its name; see `MultiExitDecoder.fresh_spread`.
        seed: of what is drawn, corrections of LoRA among them.
    """

    stored: Mapping[str, StoredTensor] | None
    spread: Callable[[str], float]
    seed: int

    def materialise(self, module: nn.Module, slices: Mapping[str, Slice] | None = None) -> None:
        """Give the parameters of a module on the meta device their numbers, in fp32 on the CPU.

        Args:
            module: whose parameters have the names that they have in the whole model.
            slices: of parameters that the module has a part of only, by name.
        """
        for name, empty in list(module.named_parameters()):
            own = None if slices is None else slices.get(name)
            parameter = nn.Parameter(self._numbers(checkpoint_name(name), empty.shape, own), empty.requires_grad)
            for mark, value in vars(empty).items():  # that others have put on it
                setattr(parameter, mark, value)
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, parameter)

    def _numbers(self, name: str, shape: Sequence[int], own: Slice | None) -> Tensor:
        correction = fresh_correction(name, shape, self.seed)  # never in a directory that a run starts from
        if correction is not None:
            return correction
        if self.stored is not None:
            return self.stored[name].read(torch.float32, () if own is None else own.index)
        if own is None:
            return fresh_weight(name, shape, self.spread(name), self.seed)
        return own.of(fresh_weight(name, own.whole_shape(shape), self.spread(name), self.seed)).clone(
            memory_format=torch.contiguous_format
        )
