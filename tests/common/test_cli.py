from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offramp.common import cli
from offramp.common.command import Command
from offramp.common.errors import OfframpError

HEAVY = ("torch", "transformers", "lightning", "deepspeed", "mlflow", "datasets", "ts")


def entry_point(name: str, value: str) -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(name, value, cli.GROUP)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the installed commands by these names and functions."""

    def install(**functions: Callable[[list[str]], int]) -> None:
        entry_points = []
        for step, (name, function) in enumerate(functions.items()):
            module = f"offramp_test_command_{name}"
            fake = type(sys)(module)
            fake.main = function
            fake.command = Command(f"Do {name}", f"{module}:main", step)
            monkeypatch.setitem(sys.modules, module, fake)
            entry_points.append(entry_point(name, f"{module}:command"))
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entry_points)

    return install


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_help_lists_the_commands_in_the_order_of_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    listed = [line.split()[0] for line in lines][:20]
    assert listed == [
        "import", "plan", "fit", "validate", "test", "sync", "export", "register", "calibrate",
        "generate", "evaluate", "study", "report", "reproduce", "archive", "serve", "deploy", "gateway", "keys",
        "bench",
    ]  # fmt: skip
    assert all(len(line) <= 120 for line in lines)


def test_listing_commands_imports_nothing_heavy() -> None:
    result = run_python(
        "import sys\n"
        "from offramp.common.cli import main\n"
        "assert main(['--help']) == 0\n"
        f"loaded = [name for name in {HEAVY} if name in sys.modules]\n"
        "sys.exit(f'imported {loaded}' if loaded else 0)"
    )
    assert result.returncode == 0, result.stderr


def test_every_installed_command_says_where_its_function_is() -> None:
    for name, installed in cli.installed_commands().items():
        module, _, function = installed.command.main.partition(":")
        assert module.startswith("offramp."), name
        assert function.isidentifier(), name
        assert "\n" not in installed.command.summary


def test_a_command_gets_its_own_arguments_and_returns_the_exit_code(install: Callable[..., None]) -> None:
    seen: list[list[str]] = []

    def main(argv: list[str]) -> int:
        seen.append(argv)
        return 7

    install(work=main)
    assert cli.main(["work", "--depth", "3", "path"]) == 7
    assert seen == [["--depth", "3", "path"]]


def test_no_command_prints_the_help_as_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "commands:" in captured.err


def test_an_unknown_command_is_a_usage_error_with_a_suggestion(
    install: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    install(generate=lambda argv: 0, archive=lambda argv: 0)
    assert cli.main(["archiv"]) == 2  # codespell:ignore
    assert "did you mean 'archive'?" in capsys.readouterr().err
    assert cli.main(["zzz"]) == 2
    assert "installed here: generate, archive" in capsys.readouterr().err


def test_an_unknown_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--depht", "3"]) == 2
    assert "'--depht'" in capsys.readouterr().err


@pytest.mark.parametrize("place", [["--debug", "work", "x"], ["work", "x", "--debug"]])
def test_a_user_fault_is_one_sentence_and_its_traceback_only_on_request(
    place: list[str], install: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def main(argv: list[str]) -> int:
        assert argv == ["x"]
        raise OfframpError("exit layer 31 is above the model's 30 layers; choose 1 to 30")

    install(work=main)
    assert cli.main(["work", "x"]) == 1
    assert capsys.readouterr().err == "offramp: error: exit layer 31 is above the model's 30 layers; choose 1 to 30\n"
    assert cli.main(place) == 1
    assert "Traceback" in capsys.readouterr().err


def test_debug_after_a_lone_dash_dash_belongs_to_the_command(install: Callable[..., None]) -> None:
    seen: list[list[str]] = []

    def main(argv: list[str]) -> int:
        seen.append(argv)
        return 0

    install(work=main)
    assert cli.main(["work", "--", "--debug"]) == 0
    assert seen == [["--", "--debug"]]


def test_a_fault_of_offramp_keeps_its_traceback(install: Callable[..., None]) -> None:
    def main(argv: list[str]) -> int:
        raise ZeroDivisionError

    install(work=main)
    with pytest.raises(ZeroDivisionError):
        cli.main(["work"])


def test_an_interrupt_ends_with_130(install: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    def main(argv: list[str]) -> int:
        raise KeyboardInterrupt

    install(work=main)
    assert cli.main(["work"]) == 130
    assert capsys.readouterr().err == "offramp: interrupted\n"


def test_a_command_may_leave_by_system_exit(install: Callable[..., None]) -> None:
    def main(argv: list[str]) -> int:
        raise SystemExit(2)

    install(work=main)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["work"])


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("body", ["print('y' * 200_000)", "print('y' * 200_000); sys.exit(0)"])
def test_a_reader_that_leaves_is_no_fault(body: str, unbuffered: str) -> None:
    code = (
        "import sys\n"
        "from offramp.common import cli\n"
        "def dispatch(arguments):\n"
        f"    {body}\n"
        "    return 0\n"
        "cli._dispatch = dispatch\n"
        "sys.exit(cli.main([]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONUNBUFFERED": unbuffered},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert errors == b""


def test_a_pipe_that_breaks_elsewhere_is_a_fault(install: Callable[..., None]) -> None:
    def main(argv: list[str]) -> int:
        raise BrokenPipeError("a worker died")

    install(work=main)
    with pytest.raises(BrokenPipeError, match="a worker died"):
        cli.main(["work"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full exists on Linux only")
@pytest.mark.parametrize("length", [5, 200_000])
def test_a_full_disk_is_one_sentence(length: int) -> None:
    code = (
        "import sys\n"
        "from offramp.common import cli\n"
        f"cli._dispatch = lambda arguments: print('y' * {length}) or 0\n"
        "sys.exit(cli.main([]))"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "offramp: error: cannot write: No space left on device; make room and run it again.\n"


def test_closed_standard_streams_are_replaced_and_never_reused() -> None:
    code = (
        "import os, sys\n"
        "from offramp.common import cli\n"
        "def dispatch(arguments):\n"
        "    print('out', sys.stdin.read(), file=sys.stdout)\n"
        "    return 10 + os.open(os.devnull, os.O_RDONLY)\n"  # the next file gets no standard descriptor
        "cli._dispatch = dispatch\n"
        "sys.exit(cli.main([]))"
    )
    done = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" <&- >&-', sys.executable, code], stderr=-1, timeout=60)
    assert done.stderr == b""
    assert done.returncode >= 13


def test_commands_of_an_absent_or_broken_distribution_are_not_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry_points = [
        entry_point("import", "offramp.common.commands:import_checkpoint"),
        entry_point("fly", "offramp.wings.commands:fly"),
        entry_point("swim", "offramp.common.commands:no_such_attribute"),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entry_points)
    assert list(cli.installed_commands()) == ["import"]
    assert cli.main(["fly"]) == 2
    assert "unknown command 'fly'" in capsys.readouterr().err


def test_version_names_every_installed_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["offramp-common", "offramp-evaluate", "offramp-serve", "offramp-train"]


def test_the_console_script_is_installed_and_runs() -> None:
    script = Path(sys.executable).with_name("offramp")
    result = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: offramp")
