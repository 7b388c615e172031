"""Options that several commands have, and how their values are read."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from offramp.common.errors import OfframpError
from offramp.serve.config import Dtype, EngineConfig

if TYPE_CHECKING:
    from offramp.evaluate.tasks import TaskOptions

_T = TypeVar("_T")


def add_task_options(parser: argparse.ArgumentParser, *, required: bool = True) -> argparse._ArgumentGroup:
    """Adds what says which task is asked, as a group of their own; it is returned, for more.

    Args:
        parser: gets them.
        required: whether there must be a task.
    """
    group = parser.add_argument_group("what is asked")
    group.add_argument(
        "--task", required=required, metavar="NAME", help="a built-in task; `offramp evaluate --list` names them"
    )
    group.add_argument("--data", type=Path, metavar="FILE", help="the task's data")
    group.add_argument("--limit", type=int, metavar="N", help="most examples (default: all of them)")
    group.add_argument(
        "--seed", type=int, metavar="S", help="draw --limit examples (default: take them from the front)"
    )
    group.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer (default: the task's)")
    group.add_argument("--chat", action="store_true", help="put prompts into the tokenizer's chat template")
    group.add_argument(
        "--prompt",
        default="prompt",
        metavar="COLUMN",
        help='summarisation: what is summarised, a column or a format such as "{text}\\nTL;DR:" (default: %(default)s)',
    )
    group.add_argument(
        "--reference",
        default="references",
        metavar="COLUMN",
        help="summarisation: the good answer or answers (default: %(default)s)",
    )
    group.add_argument(
        "--shots",
        type=int,
        default=4,
        metavar="N",
        help="gsm8k: rows that are solved in the prompt (default: %(default)s)",
    )
    return group


def task_options(options: argparse.Namespace) -> TaskOptions:
    """What was given of `add_task_options`."""
    from offramp.evaluate.tasks import TaskOptions

    return TaskOptions(options.data, options.limit, options.seed, options.prompt, options.reference, options.shots)


def comma_separated(read: Callable[[str], _T]) -> Callable[[str], tuple[_T, ...]]:
    """Reads values with commas between them."""

    def values(text: str) -> tuple[_T, ...]:
        try:
            return tuple(read(part.strip()) for part in text.split(","))
        except ValueError as fault:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of values with commas: {fault}") from None

    return values


def one_of(names: Sequence[_T]) -> Callable[[str], _T]:
    """Reads one of some names."""

    def name(text: str) -> _T:
        for one in names:
            if one == text:
                return one
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(map(str, names))}")

    return name


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What computes."""
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--batch", type=int, default=8, metavar="N", help="most answers at a time (default: %(default)s)"
    )
    engine.add_argument("--dtype", choices=get_args(Dtype), help="of weights, states and KV cache (default: fp32)")
    engine.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:N or auto (default: cpu)")
    engine.add_argument("--threads", type=int, metavar="N", help="CPU threads of the engine")


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The settings of the engine that were given; without a prefix cache, which would make times depend on the past."""
    given: dict[str, Any] = {
        "max_num_seqs": options.batch,
        "dtype": options.dtype,
        "device": options.device,
        "num_threads": options.threads,
    }
    return EngineConfig(prefix_caching=False, **{name: value for name, value in given.items() if value is not None})


def add_output_options(parser: argparse.ArgumentParser, folder: str, files: str) -> argparse._ArgumentGroup:
    """Where results go."""
    out = parser.add_argument_group("results")
    out.add_argument(
        "--out", type=Path, default=Path(folder), metavar="DIR", help=f"folder for {files} (default: %(default)s)"
    )
    out.add_argument("--overwrite", action="store_true", help="replace results that are there")
    return out


def check_output(options: argparse.Namespace) -> None:
    """Raise `OfframpError` where results would take the place of others."""
    from offramp.evaluate.results import RESULTS

    if (options.out / RESULTS).exists() and not options.overwrite:
        raise OfframpError(f"{options.out / RESULTS} is there already; name another folder, or give --overwrite.")


def spelled(field: str) -> str:
    """A field of `ExitOverrides` as an option."""
    return "--point" if field == "operating_point" else f"--{field.replace('_', '-')}"


def threshold(text: str) -> float | None:
    """A threshold, or None for the checkpoint's own."""
    if text == "own":
        return None
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor `own`") from None
