"""What goes between the processes of a pipeline: a number, arrays, and a kind that says what they mean.

A message is a header of fixed length and then, for each array, its type, its shape and its bytes. Nothing is unpickled.

Legend: N rows, D model, V vocabulary.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offramp.common.exits.policy import ExitPolicy
from offramp.serve.execution.departures import Departure
from offramp.serve.execution.sweep import BestTokens
from offramp.serve.pipeline.plan import StagePlan

Array = npt.NDArray[Any]

_HEADER = struct.Struct("<4sHHq")
_MAGIC = b"OFR1"
_ARRAY = struct.Struct("<BB")
_DTYPES = [np.dtype(name) for name in ("uint8", "int16", "int32", "int64", "float32", "float64")]


class Kind(IntEnum):
    """What a message says."""

    READY = 0
    """To the first stage: a stage has loaded its weights."""
    FAULT = 1
    """To the first stage: a stage ends; the array is why, in UTF-8."""
    RULE = 2
    """Onward: the number stands for a measure and a shortlist from now on."""
    PLAN = 3
    """Onward: rows of an iteration, and their states after the layers of the stage that sends it."""
    ANSWER = 4
    """To the first stage: what newest rows of an iteration have predicted at one exit."""
    DONE = 5
    """To the first stage: an iteration has left the last stage."""


class Message(NamedTuple):
    """One message.

    Attributes:
        kind: what it says.
        number: of the iteration, or the rule.
        arrays: the rest.
    """

    kind: Kind
    number: int = 0
    arrays: tuple[Array, ...] = ()


def encode(message: Message) -> bytes:
    """A message as bytes."""
    parts = [_HEADER.pack(_MAGIC, message.kind, len(message.arrays), message.number)]
    for array in message.arrays:
        parts += [_ARRAY.pack(_DTYPES.index(array.dtype), array.ndim), struct.pack(f"<{array.ndim}q", *array.shape)]
        parts.append(array.tobytes())
    return b"".join(parts)


def kind_of(data: bytes) -> Kind:
    """What a message says, without the rest of it."""
    return Kind(_HEADER.unpack_from(data)[1])


def decode(data: bytes) -> Message:
    """Inverse of `encode`; the arrays have memory of their own.

    Raises:
        ValueError: it is no message, or not a whole one.
    """
    try:
        magic, kind, count, number = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            raise ValueError(f"a message begins with {magic!r}, not {_MAGIC!r}")
        place, arrays = _HEADER.size, []
        for _ in range(count):
            code, rank = _ARRAY.unpack_from(data, place)
            shape = struct.unpack_from(f"<{rank}q", data, place + _ARRAY.size)
            place += _ARRAY.size + 8 * rank
            array = np.frombuffer(data, _DTYPES[code], int(np.prod(shape)), place).reshape(shape).copy()
            place += array.nbytes
            arrays.append(array)
    except (struct.error, IndexError) as fault:
        raise ValueError(f"a message of {len(data)} bytes is not whole: {fault}") from None
    if place != len(data):
        raise ValueError(f"a message of {len(data)} bytes ends after {place}")
    return Message(Kind(kind), number, tuple(arrays))


def rule_message(number: int, policy: ExitPolicy) -> Message:
    """The measure and the shortlist that `number` stands for."""
    return Message(Kind.RULE, number, (_text(json.dumps(policy.to_json())),))


def rule_of(message: Message) -> ExitPolicy:
    """Inverse of `rule_message`."""
    return ExitPolicy.from_json(json.loads(text_of(message)))


def fault_message(cause: str) -> Message:
    """Why a stage ends."""
    return Message(Kind.FAULT, 0, (_text(cause),))


def text_of(message: Message) -> str:
    """The text that a message holds."""
    return message.arrays[0].tobytes().decode()


def plan_message(plan: StagePlan, x: Tensor) -> Message:
    """A plan, and states [N, D] after the layers of the stage that sends it."""
    return Message(Kind.PLAN, plan.number, (*plan.arrays, _states(x)))


def plan_of(message: Message, dtype: torch.dtype) -> tuple[StagePlan, Tensor]:
    """Inverse of `plan_message`; `dtype` is that of states."""
    *arrays, states = message.arrays
    return StagePlan(message.number, *arrays), torch.from_numpy(states).view(dtype)


def answer_message(number: int, departures: Sequence[Departure]) -> Message:
    """What rows of the iteration `number` have predicted."""
    arrays: list[Array] = []
    for one in departures:
        confidence = [np.nan if value is None else value for value in one.confidence]
        arrays += [
            np.array([one.exit_layer, one.best is not None, one.logits is not None], dtype=np.int64),
            np.array(one.items, dtype=np.int64),
            np.array(confidence, dtype=np.float64),
        ]
        if one.best is not None:
            arrays += [one.best.token_ids, one.best.logits]
        if one.logits is not None:
            arrays.append(one.logits.numpy(force=True))
    return Message(Kind.ANSWER, number, tuple(arrays))


def answer_of(message: Message) -> list[Departure]:
    """Inverse of `answer_message`."""
    rest = iter(message.arrays)
    departures: list[Departure] = []
    for what in rest:
        layer, has_best, has_logits = what.tolist()
        items: list[int] = next(rest).tolist()
        confidence = [value if value == value else None for value in next(rest).tolist()]
        best = BestTokens(next(rest), next(rest)) if has_best else None
        departures.append(
            Departure(items, layer, confidence, best, torch.from_numpy(next(rest)) if has_logits else None)
        )
    return departures


def _text(text: str) -> Array:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _states(x: Tensor) -> Array:
    """Numpy knows no bfloat16: its bits are sent as whole numbers."""
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).contiguous().numpy(force=True)
