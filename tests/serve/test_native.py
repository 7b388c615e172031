"""Which library of native kernels is used, how it is built, and what happens where there is none."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.native import loaded
from offramp.common.errors import OfframpError
from offramp.serve.model import native
from offramp.serve.model.linear import PackedLinear, choose_kernels
from offramp.serve.model.native import NativeUnavailableError, native_library, supported_isa_levels
from offramp.serve.model.native_check import agrees_with_torch

COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "compiler {version}"; exit 0; fi
echo run >> {log}
for argument; do out=$argument; done
sleep 0.2
{action}
"""


@pytest.fixture(autouse=True)
def _fresh_choice() -> Iterator[None]:
    """What was chosen under a patch must not outlive the test."""
    yield
    native._chosen_library.cache_clear()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own, so that nothing is found in it, and no choice made before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native._chosen_library.cache_clear()
    return tmp_path / "cache" / "offramp" / "native"


def compiler(directory: Path, action: str, version: str = "1") -> tuple[str, Path]:
    """A program that behaves like a compiler and notes in a file when it runs."""
    path, log = directory / "compiler", directory / "runs"
    path.write_text(COMPILER.format(version=version, log=log, action=action))
    path.chmod(0o755)
    return str(path), log


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    monkeypatch.setattr(native, "load_library", native.load_library.__wrapped__)  # as in a new process


def test_every_cpu_runs_the_portable_level(monkeypatch: pytest.MonkeyPatch) -> None:
    assert supported_isa_levels()[-1] == "portable"
    monkeypatch.setattr(native, "_cpu_flags", frozenset)
    assert supported_isa_levels() == ("portable",)


def test_levels_go_by_what_the_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"sse2", "avx2", "fma"}
    monkeypatch.setattr(native, "_cpu_flags", lambda: frozenset(flags))
    assert supported_isa_levels() == ("avx2", "portable")
    flags |= {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}
    assert supported_isa_levels() == ("avx512_bf16", "avx512", "avx2", "portable")
    flags -= {"fma"}  # a hypervisor may hide anything
    assert supported_isa_levels() == ("portable",)


def test_the_best_level_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFRAMP_ISA", raising=False)
    best = loaded(supported_isa_levels()[0])
    assert native_library() is best


def test_the_environment_may_ask_for_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFRAMP_ISA", "portable")
    assert native_library() is loaded("portable")


@pytest.mark.parametrize("asked", ["sse9", "AVX2"])
def test_a_level_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("OFFRAMP_ISA", asked)
    with pytest.raises(OfframpError, match=f"OFFRAMP_ISA is '{asked}'; this machine can run .*portable"):
        native_library()


def test_without_a_compiler_torch_computes(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_compiler(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert native_library() is None
        assert native_library() is None
    assert len(caplog.records) == 1
    assert "install g++ or clang++" in caplog.text
    assert choose_kernels("auto", torch.float32) in ("packed", "plain")
    weight, x = torch.randn(5, 7), torch.randn(3, 7)
    layer = PackedLinear(weight)
    torch.testing.assert_close(layer(x), x @ weight.T, rtol=1e-5, atol=1e-5)
    assert layer.head(x).token_ids.tolist() == (x @ weight.T).argmax(dim=-1).tolist()
    with pytest.raises(OfframpError, match="C\\+\\+ compiler"):
        choose_kernels("native", torch.float32)


def test_a_failing_build_says_why_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, log = compiler(tmp_path, "echo 'vec.h:1: error: no such thing' >&2; echo half > $out; exit 1")
    monkeypatch.setenv("CXX", path)
    with pytest.raises(NativeUnavailableError, match="error: no such thing"):
        native._built("portable")
    assert log.is_file()
    assert {file.name for file in cache.iterdir()} <= {"lock"}


@pytest.mark.parametrize(
    ("named", "words"),
    [('g++ "', "which no shell could read"), ("true", "true makes no library: is it a C\\+\\+ compiler")],
)
def test_a_compiler_that_is_none_is_a_reason(
    named: str, words: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", named)
    with pytest.raises(NativeUnavailableError, match=words) as caught:
        native._built("portable")
    assert caught.value.for_every_level
    assert not list(cache.glob("*.so"))


def test_a_level_that_does_not_build_gives_way_to_the_next(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("OFFRAMP_ISA", raising=False)
    monkeypatch.setattr(native, "supported_isa_levels", lambda: ("avx512", "portable"))
    portable = loaded("portable")

    def load(isa: str) -> native.NativeLibrary:
        if isa == "portable":
            return portable
        raise NativeUnavailableError("an old compiler")

    monkeypatch.setattr(native, "load_library", load)
    assert native_library() is portable


def test_a_cache_that_cannot_be_written_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("CXX", compiler(tmp_path, "echo made > $out")[0])
    with pytest.raises(NativeUnavailableError, match="cannot be written"):
        native._built("portable")


def test_processes_that_start_together_build_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, log = compiler(tmp_path, "echo made > $out")
    monkeypatch.setenv("CXX", path)
    paths: list[Path] = []
    # The lock is on the open file, so threads that open it stand for processes.
    threads = [threading.Thread(target=lambda: paths.append(native._built("portable"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert paths[0].read_text() == "made\n"
    assert log.read_text() == "run\n"
    assert native._built("portable") == paths[0]
    assert log.read_text() == "run\n"


@pytest.mark.parametrize("damage", ["truncated", "changed", "undigested"])
def test_a_damaged_library_is_built_again(
    damage: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, runs = compiler(tmp_path, "echo made > $out")
    monkeypatch.setenv("CXX", path)
    library = native._built("portable")
    if damage == "truncated":
        library.write_bytes(library.read_bytes()[:2])
    elif damage == "changed":
        library.write_text("mode\n")
    else:
        library.with_suffix(".sha256").unlink()
    with caplog.at_level(logging.INFO, "offramp"):
        assert native._built("portable") == library
    assert library.read_text() == "made\n"
    assert runs.read_text() == "run\nrun\n"
    assert [f"{library} is damaged" in record.getMessage() for record in caplog.records] == [True]


def test_another_compiler_level_or_source_is_another_library(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    for version in ("1", "2"):
        monkeypatch.setenv("CXX", compiler(tmp_path, "echo made > $out", version)[0])
        made += [native._built("portable"), native._built("avx2")]
    sources = tmp_path / "csrc"
    sources.mkdir()
    for source in native._SOURCES.glob("*.[ch]*"):
        (sources / source.name).write_bytes(source.read_bytes())
    with (sources / "vec.h").open("a") as file:
        file.write("// changed\n")
    monkeypatch.setattr(native, "_SOURCES", sources)
    made.append(native._built("portable"))
    assert len(set(made)) == 5


def test_a_library_that_came_with_the_distribution_is_taken(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_SOURCES", tmp_path)
    assert native._prebuilt("avx2") is None
    major_minor = ".".join(torch.__version__.split(".")[:2])
    path = tmp_path / "prebuilt" / f"offramp_avx2_torch{major_minor}_{native.platform.machine()}.so"
    path.parent.mkdir()
    path.touch()
    assert native._prebuilt("avx2") == path


def test_a_library_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    library = loaded("portable")
    assert agrees_with_torch(library.ops)
    monkeypatch.setattr(native, "agrees_with_torch", lambda ops: False)
    with pytest.raises(NativeUnavailableError, match="does not compute what torch does"):
        native.load_library.__wrapped__("portable")


class Wrong:
    """A library with one operation that is wrong."""

    def __init__(self, ops: Any, name: str, fault: Callable[..., object]) -> None:
        self._ops, self._name, self._fault = ops, name, fault

    def __getattr__(self, name: str) -> object:
        right = getattr(self._ops, name)
        return partial(self._fault, right) if name == self._name else right


def scaled(right: Callable[..., torch.Tensor], *arguments: Any, **options: Any) -> torch.Tensor:
    return right(*arguments, **options) * 1.2


def other_best_tokens(right: Callable[..., tuple[torch.Tensor, ...]], *arguments: Any) -> tuple[torch.Tensor, ...]:
    token_ids, *rest = right(*arguments)
    return (token_ids + 1) % 70, *rest


def scaled_where_plain(right: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """Wrong only where the inner map of an exit head is not gated."""
    return right(*arguments) * (1 if arguments[6] else 1.2)


def scaled_part(part: int, right: Callable[..., tuple[torch.Tensor, ...]], *arguments: Any) -> tuple[torch.Tensor, ...]:
    return tuple(one * (1.2 if index == part else 1) for index, one in enumerate(right(*arguments)))


def other_tokens_of_the_exit(right: Callable[..., tuple[torch.Tensor, ...]], *arguments: Any) -> list[torch.Tensor]:
    state, token_ids, *rest = right(*arguments)
    return [state, (token_ids + 1) % 70, *rest]


def no_window(right: Callable[..., object], *arguments: Any) -> object:
    return right(*arguments[:-2], 0, arguments[-1])


def tables_of_the_other_sequence(right: Callable[..., object], *arguments: Any) -> object:
    return right(*arguments[:4], 1 - arguments[4], *arguments[5:])


def a_key_too_few(right: Callable[..., object], *arguments: Any) -> object:
    return right(*arguments[:2], (arguments[2] - 1).clamp(min=0), *arguments[3:])


def one_layer(right: Callable[..., object], *arguments: Any) -> object:
    return right(*arguments[:-6], 1, *arguments[-5:])


def nothing(right: Callable[..., object], *arguments: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("linear", scaled),
        ("gated_linear", scaled),
        ("rms_norm", scaled),
        ("head", other_best_tokens),
        ("exit_state", scaled),
        ("exit_state", scaled_where_plain),
        ("exit_test", partial(scaled_part, 0)),  # the state
        ("exit_test", other_tokens_of_the_exit),
        ("exit_test", partial(scaled_part, 2)),  # the best logit
        ("exit_test", partial(scaled_part, 5)),  # the confidence
        ("cosine", scaled),
        ("run_layers", no_window),
        ("run_layers", tables_of_the_other_sequence),
        ("run_layers", a_key_too_few),
        ("run_layers", one_layer),
        ("write_kv", nothing),
        ("fill", nothing),
    ],
)
def test_every_operation_that_is_wrong_is_found(name: str, fault: Callable[..., object]) -> None:
    assert not agrees_with_torch(Wrong(loaded("portable").ops, name, fault))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_map_of_native_kernels(dtype: torch.dtype) -> None:
    loaded(supported_isa_levels()[0])
    weight, bias, x = torch.randn(300, 37).to(dtype), torch.randn(300).to(dtype), torch.randn(6, 37).to(dtype)
    layer, plain = PackedLinear(weight, bias, kernels="native"), PackedLinear(weight, bias, kernels="plain")
    assert (layer.kernels, plain.kernels) == ("native", "plain")
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(layer(x), plain(x), rtol=tolerance, atol=tolerance)
    for one in (layer, PackedLinear(weight, kernels="native")):
        logits, head = one.logits(x), one.head(x)
        assert logits.dtype == torch.float32
        assert torch.equal(head.token_ids, logits.argmax(dim=-1))
        assert torch.equal(head.best, logits.max(dim=-1).values)


def test_other_types_are_left_to_torch() -> None:
    assert choose_kernels("auto", torch.float64) != "native"
    with pytest.raises(OfframpError, match="fp32 or bf16"):
        choose_kernels("native", torch.float64)


def test_the_sources_are_part_of_the_package() -> None:
    package = Path(native.__file__).parents[1]
    assert native._SOURCES.is_relative_to(package)
    assert (native._SOURCES / "module.cpp").is_file()
