"""Libraries of native kernels for tests."""

from __future__ import annotations

import os
import shutil

import pytest

from offramp.serve.model.native import NativeLibrary, NativeUnavailableError, load_library


def loaded(isa: str) -> NativeLibrary:
    """The library of a level. Only a machine that has nothing to build it with may do without."""
    try:
        return load_library(isa)
    except NativeUnavailableError:
        if os.environ.get("CXX") or any(shutil.which(name) for name in ("g++", "clang++", "c++")):
            raise
        pytest.skip("there is no C++ compiler, and torch's kernels are used")
