"""The umbrella `offramp`: finds the installed subcommands, runs one, and turns its faults into exit codes.

Exit codes: 0 done, 1 a fault the user can mend (`OfframpError`, one sentence on stderr), 2 wrong usage,
130 interrupted, 141 the reader of our output went away. Anything else is a fault of Offramp and keeps its traceback.
"""

from __future__ import annotations

import difflib
import errno
import importlib.metadata
import os
import select
import sys
import traceback
from dataclasses import dataclass

from offramp.common.command import Command
from offramp.common.errors import OfframpError

GROUP = "offramp.commands"
USAGE = "usage: offramp [-h] [--version] [--debug] COMMAND [ARGUMENT ...]"

EXIT_FAULT = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + 2  # as a shell reports a program that SIGINT ended
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
EXIT_BROKEN_PIPE = 128 + 13  # the same for SIGPIPE, so that `offramp ... | head` looks like any other program


@dataclass(frozen=True)
class Installed:
    """A subcommand together with the distribution it comes from."""

    name: str
    command: Command
    distribution: str
    version: str


def installed_commands() -> dict[str, Installed]:
    """The subcommands of all installed distributions by name, in the order of `--help`.

    A distribution that is registered but cannot be imported (half removed, for example) contributes nothing: one broken
    package must not take the others' commands away.
    """
    found: dict[str, Installed] = {}
    for entry_point in importlib.metadata.entry_points(group=GROUP):
        try:
            command = entry_point.load()
        except (ImportError, AttributeError):
            continue
        if isinstance(command, Command) and entry_point.name not in found:
            dist = entry_point.dist
            name, version = (dist.name, dist.version) if dist is not None else ("unknown", "unknown")
            found[entry_point.name] = Installed(entry_point.name, command, name, version)
    return dict(sorted(found.items(), key=lambda item: (item[1].command.step, item[0])))


def main(argv: list[str] | None = None) -> int:
    """Runs `offramp` with these arguments (by default the program's own) and returns its exit code."""
    _open_closed_streams()
    arguments = sys.argv[1:] if argv is None else argv
    debug, arguments = _take_debug(arguments)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
    except SystemExit:
        # argparse and LightningCLI leave this way after --help and usage errors.
        if _reader_is_gone():
            return EXIT_BROKEN_PIPE
        raise
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        print("offramp: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # A pipe to a child process can break as well; only a lost reader of our own output is no fault.
        if _reader_is_gone():
            return EXIT_BROKEN_PIPE
        raise
    except OSError as error:
        if error.errno not in _DISK_IS_FULL:
            raise
        if debug:
            traceback.print_exc()
        where = f" {error.filename}" if error.filename else ""
        print(f"offramp: error: cannot write{where}: {error.strerror}; make room and run it again.", file=sys.stderr)
        _drop_unwritten()
        return EXIT_FAULT
    except OfframpError as error:
        if debug:
            traceback.print_exc()
        print(f"offramp: error: {error}", file=sys.stderr)
        return EXIT_FAULT
    return code


def _dispatch(arguments: list[str]) -> int:
    commands = installed_commands()
    if not arguments:
        print(_help(commands), file=sys.stderr)
        return EXIT_USAGE
    first, *rest = arguments
    if first in ("-h", "--help", "help"):
        print(_help(commands))
        return 0
    if first == "--version":
        versions = {installed.distribution: installed.version for installed in commands.values()}
        print("\n".join(f"{name} {version}" for name, version in sorted(versions.items())))
        return 0
    if first.startswith("-"):
        return _usage_error(f"unknown option {first!r}; options of a command come after its name")
    if first not in commands:
        return _usage_error(_unknown(first, list(commands)))
    return commands[first].command.load()(rest)


def _take_debug(arguments: list[str]) -> tuple[bool, list[str]]:
    """Takes `--debug` out wherever it stands before a lone `--`.

    The wish for a traceback comes after a failure, when it is natural to append the word to the line just typed.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument != "--debug"]
    return len(kept) < end, kept + arguments[end:]


def _help(commands: dict[str, Installed]) -> str:
    width = max((len(name) for name in commands), default=0)
    lines = [
        USAGE,
        "",
        "Train, calibrate and serve early-exit language models.",
        "",
        "commands:",
        *(f"  {name:<{width}}  {installed.command.summary}" for name, installed in commands.items()),
        "",
        "options:",
        "  -h, --help  show this and exit; `offramp COMMAND --help` explains a command",
        "  --version   show the versions of the installed distributions and exit",
        "  --debug     show the traceback behind an error",
    ]
    return "\n".join(lines)


def _unknown(name: str, commands: list[str]) -> str:
    close = difflib.get_close_matches(name, commands, n=1)
    if close:
        return f"unknown command {name!r}; did you mean {close[0]!r}?"
    return f"unknown command {name!r}; installed here: {', '.join(commands)}"


def _usage_error(message: str) -> int:
    print(f"{USAGE}\nofframp: error: {message}", file=sys.stderr)
    return EXIT_USAGE


def _open_closed_streams() -> None:
    """Give standard streams that the caller closed (`>&-`) a null device.

    Python leaves None in place of such a stream, and the next file that is opened would get its descriptor, so that
    what native libraries print would land in it.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            try:
                os.fstat(descriptor)
            except OSError:
                null = os.open(os.devnull, os.O_RDWR)
                if null != descriptor:
                    os.dup2(null, descriptor)
                    os.close(null)
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - lives as long


def _drop_unwritten() -> None:
    """Silence stdout if it holds what cannot be written: the interpreter would try once more, and fail loudly."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reader_is_gone() -> bool:
    """Whether stdout or stderr is a pipe that nobody reads any more; such a stream is silenced.

    The pipe is asked, not the exception: an unbuffered stream has forgotten by now what it could not write.
    """
    gone = False
    for stream in (sys.stdout, sys.stderr):
        try:
            descriptor = stream.fileno()
        except (OSError, ValueError):  # replaced by something without a descriptor, or closed
            continue
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            # Otherwise the interpreter's own flush at exit fails again, loudly and with exit code 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            gone = True
    return gone


if __name__ == "__main__":
    sys.exit(main())
