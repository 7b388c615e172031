"""What a run was made with: packages, Python, machine and launcher."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

_LAUNCH_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "NODE_RANK",
    "OMP_NUM_THREADS",
    "SLURM_JOB_ID",
    "SLURM_JOB_NODELIST",
    "SLURM_NTASKS",
    "WORLD_SIZE",
)


def describe_environment() -> dict[str, Any]:
    """Plain values: versions of all installed packages, of Python and the system, devices, and how it was launched."""
    packages = {
        str(distribution.metadata["Name"]): distribution.version for distribution in importlib.metadata.distributions()
    }
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "devices": devices,
        "cuda": torch.version.cuda,
        "launch": {name: os.environ[name] for name in _LAUNCH_VARIABLES if name in os.environ},
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


def _processor() -> str:
    """Its name; `platform` knows none on Linux."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
