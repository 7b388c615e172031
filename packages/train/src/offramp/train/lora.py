"""LoRA on the backbone (Hu et al., 2021) through `peft`: low-rank corrections are trained beside frozen matrices.

A matrix W [out, in] acts as W + alpha / r * B A, with A [r, in] drawn and B [out, r] zero at the start. Checkpoints
keep the name of W and have A and B beside it (`q_proj.weight`, `q_proj.lora_A.weight`, `q_proj.lora_B.weight`), and
`offramp export` adds them up, so an exported model has nothing of LoRA in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offramp.common.errors import OfframpError
from offramp.common.model.fresh_weights import name_generator
from offramp.common.model.transformer import MultiExitTransformer

_NAMES = {"base_layer.": "", "lora_A.default.": "lora_A.", "lora_B.default.": "lora_B."}
"""What peft puts into names, and what stands there in a checkpoint."""
_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass
class LoraConfig:
    """The corrections.

    Attributes:
        r: rank.
        alpha: the correction is scaled by alpha / r.
        targets: matrices of a layer that get one: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj.
    """

    r: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "v_proj")

    def __post_init__(self) -> None:
        if self.r < 1:
            raise OfframpError(f"lora.r is {self.r}; it must be at least 1.")

    @property
    def scale(self) -> float:
        """Factor on B A."""
        return self.alpha / self.r


def add_lora(model: MultiExitTransformer, config: LoraConfig, layers: int) -> None:
    """Put corrections beside matrices of the first `layers` layers, which are frozen; they alone are trained there.

    The corrections are on the meta device; `fresh_correction` has their numbers.

    Raises:
        OfframpError: peft is not installed, or a layer has no such matrix.
    """
    try:
        import peft
    except ImportError as fault:
        raise OfframpError(
            f"model.lora needs the package peft ({fault}); install it with 'pip install offramp-train[lora]'."
        ) from None
    names = {name.rpartition(".")[2] for name, part in model.layers[0].named_modules() if isinstance(part, nn.Linear)}
    if wrong := sorted(set(config.targets) - names) or not config.targets:
        raise OfframpError(f"lora.targets {list(config.targets)}: a layer has no {wrong}; choose from {sorted(names)}.")
    settings = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]
        target_modules=list(config.targets),
        init_lora_weights=False,
    )
    blocks = model.layers[:layers]
    assert isinstance(blocks, nn.ModuleList)
    peft.inject_adapter_in_model(settings, blocks, low_cpu_mem_usage=True)
    for part in blocks.modules():
        if hasattr(part, "lora_A"):
            part.register_state_dict_post_hook(_to_checkpoint)
            part.register_load_state_dict_pre_hook(_from_checkpoint)


def fresh_correction(name: str, shape: Sequence[int], seed: int) -> Tensor | None:
    """What A or B starts with, as peft draws it: A uniform within 1 / sqrt(in), B zero; None if it is neither.

    Args:
        name: in a checkpoint.
        shape: [r, in] of A, [out, r] of B.
        seed: of the run; the numbers depend on it and the name alone.
    """
    if not name.endswith((_A, _B)):
        return None
    start = torch.zeros(*shape, dtype=torch.float32, device="cpu")
    bound = shape[1] ** -0.5
    return start.uniform_(-bound, bound, generator=name_generator(name, seed)) if name.endswith(_A) else start


def checkpoint_name(name: str) -> str:
    """What a parameter of a model with corrections is called in a checkpoint; others keep their names."""
    for inside, outside in _NAMES.items():
        name = name.replace(f".{inside}", f".{outside}")
    return name


def merge_lora(weights: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The weights of a checkpoint with corrections -> those of an ordinary model: W + scale * B A.

    Args:
        weights: by name.
        scale: alpha / r.
    """
    merged = {name: tensor for name, tensor in weights.items() if not name.endswith((_A, _B))}
    for name, a in weights.items():
        if name.endswith(_A):
            stem = name.removesuffix(_A)
            merged[f"{stem}.weight"] = weights[f"{stem}.weight"] + scale * (weights[stem + _B] @ a)
    return merged


def _to_checkpoint(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for inside, outside in _NAMES.items():
        for name in [name for name in state if name.startswith(prefix + inside)]:
            state[prefix + outside + name.removeprefix(prefix + inside)] = state.pop(name)


def _from_checkpoint(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        rest = name.removeprefix(prefix)
        inside = re.sub(r"^(lora_[AB])\.", r"\1.default.", rest) if rest.startswith("lora_") else f"base_layer.{rest}"
        state[prefix + inside] = state.pop(name)
