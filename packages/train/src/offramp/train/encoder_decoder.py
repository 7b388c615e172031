"""What does not go with an encoder-decoder model."""

from __future__ import annotations

import torch

from offramp.common.errors import OfframpError
from offramp.common.families import check_dtype
from offramp.common.t5.config import T5Config


def check_module(config: T5Config, *, lora: bool, compiled: bool, precision: str) -> None:
    """Raise `OfframpError` for settings of a module or trainer that only decoder-only models know."""
    for setting, is_set in (("lora", lora), ("compile_layers", compiled)):
        if is_set:
            raise OfframpError(f"model.{setting} is made for decoder-only models; leave it out for a T5.")
    if precision.startswith("16-"):
        check_dtype(config, torch.float16)


def check_pipeline(*, tensor: int, fills: bool) -> None:
    """Raise `OfframpError` for settings of the pipeline that only decoder-only models know."""
    if tensor > 1:
        raise OfframpError(f"tensor is {tensor}, but the layers of a T5 are not divided among ranks; set it to 1.")
    if fills:
        raise OfframpError("fill_bubbles is made for decoder-only models; set it to false for a T5.")
