"""Offramp's own CPU kernels: which of them this machine can run, and how they are built and loaded.

The sources lie in `csrc` beside this package and are compiled once for each instruction set ("ISA level"). A library is
looked for where a wheel would have put it, then in the user's cache, and else compiled with the C++ compiler that is
there. Without one, or where the result computes anything else than torch does, there is no library, and callers use
torch's operations instead.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from offramp.common.errors import OfframpError
from offramp.serve.model.native_check import agrees_with_torch

log = logging.getLogger(__name__)

ISA_LEVELS = ("amx", "avx512_bf16", "avx512", "avx2", "portable")
"""Every ISA level, best first."""

_AVX2 = ("avx2", "fma")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
# What Linux calls the instructions that a level needs.
_CPU_FLAGS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
    "avx512_bf16": (*_AVX512, "avx512_bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "portable": (),
}
# -ffp-contract=off: the kernels say themselves where a product is fused with a sum (see vec.h).
_COMPILE_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=off", "-fvisibility=hidden")
_BUILD_TIMEOUT_S = 600

_SOURCES = Path(__file__).parents[1] / "csrc"


@dataclass(frozen=True)
class NativeLibrary:
    """A loaded library.

    Attributes:
        isa: its ISA level.
        path: its file.
        ops: its operations, a namespace of `torch.ops`; what each takes stands with its registration in `csrc`.
    """

    isa: str
    path: Path
    ops: Any


def supported_isa_levels() -> tuple[str, ...]:
    """The ISA levels that this machine's CPU can run, best first."""
    flags = _cpu_flags()
    return tuple(level for level in ISA_LEVELS if flags.issuperset(_CPU_FLAGS[level]))


def native_library() -> NativeLibrary | None:
    """The library of the best ISA level that works here, or None, for which the log then has the reason.

    The environment variable `OFFRAMP_ISA` asks for one level instead.

    Raises:
        OfframpError: if `OFFRAMP_ISA` names a level that does not exist or that this CPU cannot run.
    """
    return _chosen_library(os.environ.get("OFFRAMP_ISA") or None)


@functools.cache
def _chosen_library(asked: str | None) -> NativeLibrary | None:
    supported = supported_isa_levels()
    if asked is not None and asked not in supported:
        raise OfframpError(f"OFFRAMP_ISA is {asked!r}; this machine can run {', '.join(supported)}.")
    reasons: list[str] = []
    for isa in supported if asked is None else (asked,):
        try:
            return load_library(isa)
        except NativeUnavailableError as error:
            reasons.append(f"{isa}: {error}")
            if error.for_every_level:
                break
    log.warning("The engine's own CPU kernels cannot be used, torch's are used instead (%s)", "; ".join(reasons))
    return None


class NativeUnavailableError(Exception):
    """There is no working library of an ISA level.

    Attributes:
        for_every_level: whether other levels fail for the same reason.
    """

    def __init__(self, reason: str, *, for_every_level: bool = False) -> None:
        super().__init__(reason)
        self.for_every_level = for_every_level


@functools.cache
def load_library(isa: str) -> NativeLibrary:
    """Load, and if need be build, the library of one ISA level, and compare it with torch.

    Raises:
        NativeUnavailableError: if it cannot be built or loaded, or computes anything else than torch does.
    """
    path = _prebuilt(isa)
    if path is None:
        path = _built(isa)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise NativeUnavailableError(f"{path} cannot be loaded; delete it to have it built anew: {error}") from error
    library = NativeLibrary(isa, path, getattr(torch.ops, f"offramp_{isa}"))
    if not library.ops.may_run():
        raise NativeUnavailableError("the operating system does not let this process use these instructions")
    if not agrees_with_torch(library.ops):
        raise NativeUnavailableError(f"{path} does not compute what torch does")
    return library


def _cpu_flags() -> frozenset[str]:
    """What the CPU calls its instruction sets; empty where nobody says."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    # Levels are described by x86's flags, and no other architecture has flags of these names.
    return frozenset(next((line for line in text.splitlines() if line.startswith("flags")), "").split())


def _prebuilt(isa: str) -> Path | None:
    """The library that came with the distribution, if it was built for this torch: torch's C++ interface changes."""
    major_minor = ".".join(torch.__version__.split(".")[:2])
    path = _SOURCES / "prebuilt" / f"offramp_{isa}_torch{major_minor}_{platform.machine()}.so"
    return path if path.is_file() else None


def _built(isa: str) -> Path:
    """The library of the user's cache, built if it is not there. Its name says all that it was made from."""
    compiler = _compiler()
    flags = (*_COMPILE_FLAGS, *map(_compiler_flag, _CPU_FLAGS[isa]), f"-DOFFRAMP_ISA={isa}")
    try:
        asked = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailableError(f"the C++ compiler does not run: {error}", for_every_level=True) from error
    made_from = hashlib.sha256(repr((compiler, asked.stdout, torch.__version__, flags)).encode())
    for source in sorted(_SOURCES.glob("*.[ch]*")):
        made_from.update(source.name.encode() + b"\0" + source.read_bytes())
    path = _cache_directory() / f"offramp_{isa}_{made_from.hexdigest()[:24]}.so"
    if not _is_whole(path):
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with FileLock(path.parent / "lock"):  # processes that start together wait for the first one's build
                if not _is_whole(path):
                    if path.is_file():
                        log.warning("%s is damaged: it is not what was built; building it again", path)
                    else:
                        log.info("Building the engine's CPU kernels, once: %s", path)
                    _compile(compiler, flags, path)
        except OSError as error:
            raise NativeUnavailableError(f"{path.parent} cannot be written: {error}", for_every_level=True) from error
    return path


def _compiler_flag(cpu_flag: str) -> str:
    """The compiler's option for what Linux calls `cpu_flag`: `avx512_bf16` is -mavx512bf16, `amx_tile` -mamx-tile."""
    return "-m" + cpu_flag.replace("amx_", "amx-").replace("_", "")


def _compiler() -> list[str]:
    chosen = os.environ.get("CXX")
    if chosen and not chosen.isspace():
        try:
            return shlex.split(chosen)
        except ValueError as error:
            raise NativeUnavailableError(
                f"CXX is {chosen!r}, which no shell could read: {error}", for_every_level=True
            ) from error
    for name in ("g++", "clang++", "c++"):
        found = shutil.which(name)
        if found is not None:
            return [found]
    raise NativeUnavailableError("there is no C++ compiler; install g++ or clang++", for_every_level=True)


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "offramp" / "native"


def _compile(compiler: list[str], flags: tuple[str, ...], path: Path) -> None:
    """Build under another name and rename: whoever looks for `path` meanwhile finds nothing or all of it."""
    root = Path(str(torch.__file__)).parent
    with tempfile.TemporaryDirectory(prefix="building-", dir=path.parent) as directory:
        partial = Path(directory) / path.name
        command = [
            *compiler,
            *flags,
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-isystem{include}" for include in (root / "include", root / "include/torch/csrc/api/include")),
            str(_SOURCES / "module.cpp"),
            f"-L{root / 'lib'}",
            *("-ltorch_cpu", "-lc10"),
            *("-o", str(partial)),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise NativeUnavailableError(f"the build took more than {_BUILD_TIMEOUT_S} s") from error
        if done.returncode != 0:
            log.debug("%s\n%s", shlex.join(command), done.stderr)
            first = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
            raise NativeUnavailableError(f"the build failed: {first}")
        if not partial.is_file():
            raise NativeUnavailableError(f"{compiler[0]} makes no library: is it a C++ compiler?", for_every_level=True)
        digest = partial.with_suffix(".sha256")
        digest.write_text(_sha256(partial), encoding="ascii")
        for file in (partial, digest):
            with file.open("rb") as written:
                os.fsync(written.fileno())
        os.replace(digest, _digest_file(path))
        os.replace(partial, path)


def _is_whole(path: Path) -> bool:
    """Whether a library is there as it was built: to load one that was cut short would kill the process."""
    try:
        return _digest_file(path).read_text(encoding="ascii") == _sha256(path)
    except (OSError, UnicodeDecodeError):
        return False


def _digest_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
