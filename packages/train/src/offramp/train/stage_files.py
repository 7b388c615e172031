"""Slices of tensors in safetensors files: a tensor-parallel rank writes its part of a stage, and readers join them.

A file says which tensors in it are slices, and of what. So a checkpoint of any number of stages and ranks is the same
set of named whole tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from offramp.common.errors import OfframpError
from offramp.common.stored_tensor import StoredTensor, open_safetensors, read_stored, stored_tensors

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


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint, not read yet: whole in one file, or in slices, each in one.

    Attributes:
        pieces: what each file holds, None being all of it; slices in their order.
    """

    pieces: tuple[tuple[Slice | None, StoredTensor], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        own, stored = self.pieces[0]
        return stored.shape if own is None else own.whole_shape(stored.shape)

    def read(self, own: Slice | None = None) -> Tensor:
        """The tensor, or a slice of it, in memory of its own; nothing else is read. A scalar has no slices."""
        first, stored = self.pieces[0]
        dtype: torch.dtype = getattr(torch, stored.dtype)
        if first is None:
            return stored.read(dtype, () if own is None or not stored.shape else own.index)
        start, stop = (0, first.whole) if own is None else (own.start, own.stop)
        parts: list[Tensor] = []
        for piece, stored in self.pieces:
            assert piece is not None
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                within = replace(piece, start=low - piece.start, stop=high - piece.start)
                parts.append(stored.read(dtype, within.index))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=first.dim)


def read_stages(directory: Path) -> dict[str, Tensor]:
    """All parameters of a checkpoint, whole, under their names in the model; see `find_stages`."""
    found = find_stages(directory)
    whole = {name: saved.pieces[0][1] for name, saved in found.items() if saved.pieces[0][0] is None}
    return {**read_stored(whole), **{name: saved.read() for name, saved in found.items() if name not in whole}}


def find_stages(directory: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, SavedTensor]:
    """Parameters of a checkpoint of any number of stages and ranks, under their names in the model.

    Args:
        directory: the checkpoint.
        wanted: whether the parameter of some name is.

    Raises:
        OfframpError: there are no stages, a file is damaged, or slices are missing.
    """
    files = sorted(directory.glob("stage_*.safetensors"))
    if not files:
        raise OfframpError(f"{directory} holds no stage_*.safetensors; it is not a checkpoint of deepspeed_pipeline.")
    return find_saved(files, wanted)[0]


def find_saved(
    files: Sequence[Path], wanted: Callable[[str], bool] = lambda name: True
) -> tuple[dict[str, SavedTensor], list[dict[str, str]]]:
    """Tensors of several files, and the metadata of each file.

    Args:
        files: of one kind, those of all ranks.
        wanted: whether a tensor of some name is.

    Raises:
        OfframpError: a file is damaged, or slices are missing.
    """
    pieces: dict[str, list[tuple[Slice | None, StoredTensor]]] = {}
    about: list[dict[str, str]] = []
    for file in files:
        with open_safetensors(file) as handle:
            about.append(handle.metadata() or {})
        slices = json.loads(about[-1].get(_SLICES, "{}"))
        for name, stored in stored_tensors(file).items():
            if wanted(name):
                pieces.setdefault(name, []).append((Slice(*slices[name]) if name in slices else None, stored))
    return {name: _in_order(files[0].parent, name, found) for name, found in pieces.items()}, about


def _in_order(directory: Path, name: str, pieces: list[tuple[Slice | None, StoredTensor]]) -> SavedTensor:
    pieces.sort(key=lambda piece: 0 if piece[0] is None else piece[0].start)
    end, whole = 0, 0
    for own, _ in pieces:
        if own is None:
            break
        whole = own.whole
        if own.start != end:
            break
        end = own.stop
    if end != whole:
        raise OfframpError(
            f"{directory} is incomplete: {name!r} is there up to {end} of {whole}; copy all files of the checkpoint."
        )
    return SavedTensor(tuple(pieces))
