"""Imports DeepSpeed without its greetings, and tells it what this machine is. Import this before `deepspeed`."""

from __future__ import annotations

import logging

import torch

_quiet_until = logging.root.manager.disable
logging.disable(logging.WARNING)
try:
    import deepspeed
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.ops import __compatible_ops__
finally:
    logging.disable(_quiet_until)

# DeepSpeed builds a shared-memory all-reduce in C++ when it starts on CPU, which needs a compiler and half a minute,
# and fails without one. Nothing here uses it.
__compatible_ops__["deepspeed_shm_comm"] = False
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def use_device(device: torch.device) -> None:
    """Make DeepSpeed compute where the trainer does; left alone, it takes any GPU it finds."""
    accelerator = deepspeed.get_accelerator()
    if device.type == "cpu" and (accelerator is None or accelerator.device_name() != "cpu"):
        set_accelerator(CPU_Accelerator())
