"""Slices of tensors in safetensors files: a tensor-parallel rank writes its part of a stage, and readers join them.

A file says which tensors in it are slices, and of what. So a checkpoint of any number of stages and ranks is the same
set of named whole tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from offramp.common.errors import OfframpError

STAGES = "checkpoint"
"""In a directory of `deepspeed_pipeline`, the folder with the stages."""
_SLICES = "slices"


@dataclass(frozen=True)
class Slice:
    """Part of a whole tensor: `start` .. `stop` of one dimension.

    Attributes:
        dim: the dimension.
        start: first index.
        stop: one past the last.
        whole: size of the dimension in the whole tensor.
        owned: of the ranks that hold this very slice, one owns it: it is written, and counted in norms, there.
    """

    dim: int
    start: int
    stop: int
    whole: int
    owned: bool = True

    def of(self, tensor: Tensor) -> Tensor:
        """The slice as a view of the whole tensor."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start)

    @property
    def index(self) -> tuple[slice, ...]:
        """The slice as an index of the whole tensor."""
        return (*[slice(None)] * self.dim, slice(self.start, self.stop))

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole tensor, from that of this slice, or of another one of it."""
        return (*part[: self.dim], self.whole, *part[self.dim + 1 :])


def rank_suffix(rank: int) -> str:
    """What the files of a tensor-parallel rank have in their names; nothing on the first."""
    return f"_rank_{rank:02d}" if rank else ""


def slice_metadata(tensors: Mapping[str, Tensor], slices: Mapping[str, Slice]) -> dict[str, str]:
    """What a file says about the slices in it.

    Args:
        tensors: in the file, named as a parameter or `PARAMETER/KEY` (of its shape, or a scalar).
        slices: of parameters.
    """
    known = {name: slices.get(name.partition("/")[0]) for name, tensor in tensors.items() if tensor.dim()}
    found = {name: [own.dim, own.start, own.stop, own.whole] for name, own in known.items() if own is not None}
    return {_SLICES: json.dumps(found)} if found else {}


def read_stages(directory: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """Parameters of a checkpoint of any number of stages and ranks, whole, under their names in the model.

    Args:
        directory: the checkpoint.
        wanted: whether the parameter of some name is.

    Raises:
        OfframpError: there are no stages, a file is damaged, or slices are missing.
    """
    files = sorted(directory.glob("stage_*.safetensors"))
    if not files:
        raise OfframpError(f"{directory} holds no stage_*.safetensors; it is not a checkpoint of deepspeed_pipeline.")
    return read_whole(files, wanted)[0]


def read_whole(
    files: Sequence[Path], wanted: Callable[[str], bool] = lambda name: True
) -> tuple[dict[str, Tensor], list[dict[str, str]]]:
    """Tensors of several files, slices joined, and the metadata of each file.

    Args:
        files: of one kind, those of all ranks.
        wanted: whether a tensor of some name is.

    Raises:
        OfframpError: a file is damaged, or slices are missing.
    """
    tensors: dict[str, Tensor] = {}
    parts: dict[str, list[tuple[Slice, Tensor]]] = {}
    about: list[dict[str, str]] = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                about.append(handle.metadata() or {})
                found = {name: handle.get_tensor(name) for name in handle.keys() if wanted(name)}  # noqa: SIM118
        except (SafetensorError, OSError) as fault:
            raise OfframpError(
                f"{file} cannot be read as safetensors: {fault}; it may be cut short, copy it again."
            ) from None
        slices = json.loads(about[-1].get(_SLICES, "{}"))
        for name, tensor in found.items():
            if name in slices:
                parts.setdefault(name, []).append((Slice(*slices[name]), tensor))
            else:
                tensors[name] = tensor
    for name, pieces in parts.items():
        tensors[name] = _join(files[0].parent, name, sorted(pieces, key=lambda piece: piece[0].start))
    return tensors, about


def _join(directory: Path, name: str, pieces: list[tuple[Slice, Tensor]]) -> Tensor:
    end, whole = 0, pieces[0][0].whole
    for own, _ in pieces:
        if own.start != end:
            break
        end = own.stop
    if end != whole:
        raise OfframpError(
            f"{directory} is incomplete: {name!r} is there up to {end} of {whole}; copy all files of the checkpoint."
        )
    return torch.cat([tensor for _, tensor in pieces], dim=pieces[0][0].dim)
