from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "config",
        "request.request",
        "request.output",
        "scheduling.scheduler_output",
        "scheduling.scheduler",
        "kv_cache.prefix_cache",
        "recorder",
        "text",
    ],
)
def test_needs_no_tensors(module: str) -> None:
    code = f"import sys, offramp.serve.{module}; print(*{{'torch', 'transformers', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
