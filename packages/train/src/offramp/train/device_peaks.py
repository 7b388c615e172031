"""How many floating-point operations a second a device can do at most, as its maker says.

Lightning has such a table too; it does not know every name that a driver gives (`NVIDIA H200`), and some of its figures
are those of sparse matrices.
"""

from __future__ import annotations

import re

import torch

# TFLOP/s of dense matrix products with sums in fp32: fp16 and bf16, TF32, fp32; from the makers' data sheets, whose
# larger figures are those of sparse matrices. The first pattern that is found in a device's name counts.
_TERAFLOPS: tuple[tuple[str, tuple[float, float | None, float]], ...] = (
    (r"\bB200\b", (2250.0, 1125.0, 75.0)),
    (r"\bH[12]00 NVL\b", (835.0, 417.0, 60.0)),
    (r"\bH100 PCIe\b", (756.0, 378.0, 51.0)),
    (r"\b(GH200|H200|H100)\b", (989.0, 494.0, 67.0)),
    (r"\bA100\b", (312.0, 156.0, 19.5)),
    (r"\bA30\b", (165.0, 82.0, 10.3)),
    (r"\bA10\b", (125.0, 62.5, 31.2)),
    (r"\bL40S\b", (362.0, 183.0, 91.6)),
    (r"\bL4\b", (121.0, 60.0, 30.3)),
    (r"\bRTX 4090\b", (165.2, 82.6, 82.6)),
    (r"\bRTX 3090\b", (71.0, 35.6, 35.6)),
    (r"\bV100\b", (125.0, None, 15.7)),
    (r"\bT4\b", (65.0, None, 8.1)),
)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Floating-point operations per second of a device, as its maker says; None on CPU and on a device unknown here.

    Args:
        device: of this process.
        precision: as the trainer has it, such as `bf16-mixed`.
    """
    return known_flops(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None


def known_flops(name: str, precision: str) -> float | None:
    """As `peak_flops`, by the name of a device."""
    for pattern, (half, tf32, single) in _TERAFLOPS:
        if re.search(pattern, name, re.IGNORECASE):
            if precision.startswith(("16", "bf16")):
                return half * 1e12
            faster = tf32 if torch.get_float32_matmul_precision() != "highest" else None
            return (faster or single) * 1e12
    return None
