"""A device that is none: its tensors lie in the CPU's memory, but no operation takes them together with the CPU's own.

So what computes on a GPU can be run where there is none, with the same numbers, and it shows whether every tensor is
where it has to be. As on CUDA, tensors go from one device to the other by `to`, `cpu`, `copy_`, `tolist` and `item`
alone, a tensor elsewhere may be indexed by indices of the CPU, and scalars (of no dimension) go with everything.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_NAME = "elsewhere"
_WAITING = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::masked_select")
_COPYING = ("aten::copy_", "aten::to", "aten::_to_copy")
_INDEXED = ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_")


class ElsewhereError(Exception):
    """Tensors of two devices in one operation."""


@functools.cache
def elsewhere() -> torch.device:
    """The device."""
    _setup_privateuseone_for_python_backend(_NAME)
    return torch.device(_NAME, 0)


@contextmanager
def there_is_elsewhere() -> Iterator[list[str]]:
    """In this context the device works; the list gets the names of operations for which the host waits."""
    elsewhere()
    mode, before = _Mode(), torch._C._only_lift_cpu_tensors()
    # `torch.tensor(.., device=..)` makes a tensor of the CPU first, and copies it by an operation that the mode sees.
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with mode:
            yield mode.waits
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


class _Away(Tensor):
    here: Tensor

    @staticmethod
    def __new__(cls: type[_Away], here: Tensor) -> _Away:
        with torch.inference_mode(False):  # a view that is made in that mode of a tensor that is not has no version
            away: Any = Tensor._make_wrapper_subclass(
                cls,
                here.size(),
                strides=here.stride(),
                storage_offset=here.storage_offset(),
                dtype=here.dtype,
                device=elsewhere(),
            )
        away.here = here
        return away

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {}, [])

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert a tensor that is elsewhere to numpy; copy it to the host first")
        return self.cpu().numpy()


class _Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {}, self.waits)


def _compute(func: Any, args: Any, kwargs: dict[str, Any], waits: list[str]) -> Any:
    name = func._schema.name
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    away = [one for one in tensors if isinstance(one, _Away)]
    is_mixed = bool(away) and any(not isinstance(one, _Away) and one.dim() > 0 for one in tensors)
    if is_mixed and name != "aten::copy_":
        is_indexing = name in _INDEXED and all(isinstance(one, _Away) or one.dim() == 0 for one in _but_indices(args))
        if not is_indexing:
            raise ElsewhereError(f"{name} of {[(type(one).__name__, tuple(one.shape)) for one in tensors]}")
    named = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
    goes_away = named[0].type == _NAME if named else bool(away)
    if name == "aten::copy_":
        goes_away = isinstance(args[0], _Away)
    if (goes_away and _sends_and_waits(func, args, kwargs)) or (away and (not goes_away or name in _WAITING)):
        waits.append(name)
    result = func(*tree_map(_here, args), **tree_map(_here, kwargs))
    if not goes_away:
        # What comes to the host is a copy.
        return result.clone() if any(result is one.here for one in away) else result
    known = {id(one.here): one for one in away}
    return tree_map(lambda one: _back(one, known), result)


def _sends_and_waits(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operation copies from the host, which has to wait until it is done."""
    if func._schema.name not in _COPYING:
        return False
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    source = given["src" if func._schema.name == "aten::copy_" else "self"]
    if isinstance(source, _Away) or source.dim() == 0:
        return False
    return not given.get("non_blocking", False)


def _but_indices(args: Sequence[Any]) -> list[Tensor]:
    return [one for place, one in enumerate(args) if place != 1 and isinstance(one, Tensor)]


def _here(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return leaf.here if isinstance(leaf, _Away) else leaf


def _back(leaf: Any, known: dict[int, _Away]) -> Any:
    """A result as a tensor elsewhere; what an operation changes in place is the very tensor that it was given."""
    if not isinstance(leaf, Tensor):
        return leaf
    found = known.get(id(leaf))
    return _Away(leaf) if found is None else found
