"""`offramp bench`: how fast, how deep."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from tqdm import tqdm

from offramp.serve.config import Dtype

if TYPE_CHECKING:
    from offramp.serve.bench import Result


def main(argv: list[str]) -> int:
    """Runs the command with its arguments."""
    options = _parser().parse_args(argv)

    import torch

    from offramp.serve.bench import BenchPlan, run_bench

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    plan = BenchPlan(
        batches=tuple(options.batch),
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        repetitions=options.repeat,
        exit_at=options.exit_at,
        against_transformers=options.against == "transformers",
    )
    if not options.json:
        print(
            f"{options.directory}: decode tokens/s, prompts of {plan.prompt_tokens} tokens, {plan.new_tokens} new, "
            f"median (lowest..highest) of {plan.repetitions} runs taken in turn; torch {torch.__version__}, "
            f"{torch.get_num_threads()} threads",
            flush=True,
        )
    with tqdm(total=len(options.dtype) * len(plan.batches), unit="batch size", delay=1, file=sys.stderr) as bar:
        for dtype in options.dtype:
            baselines: dict[int, float] = {}
            for result in run_bench(options.directory, dtype, plan):
                if result.batch not in baselines:
                    baselines[result.batch] = result.median
                    bar.update()
                bar.clear()
                line = json.dumps(result.to_json()) if options.json else _line(result, baselines[result.batch])
                print(line, flush=True)
    return 0


def _line(result: Result, baseline: float) -> str:
    """One line of the table; `baseline` is the rate of the batch size's first line."""
    layers = "" if result.mean_layers is None else f", {result.mean_layers:.1f} layers per token"
    return (
        f"{result.dtype:9} batch {result.batch:3}  {result.contestant:34} {result.median:8.1f} "
        f"({min(result.rates):.1f}..{max(result.rates):.1f})  x{result.median / baseline:.2f}{layers}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="offramp bench", description="Measure the engine.")
    what = parser.add_subparsers(required=True, metavar="WHAT")
    engine = what.add_parser(
        "engine",
        help="decode speed, at full depth and with early exits",
        description="Measure decode tokens per second at full depth and with early exits, with each sync policy.",
    )
    engine.add_argument("directory", type=Path, help="a checkpoint directory, or a plain Hugging Face one")
    engine.add_argument("--batch", type=_counts, default=[1, 8, 32], metavar="N,...", help="(default: 1,8,32)")
    engine.add_argument("--prompt-tokens", type=_count, default=128, metavar="N", help="(default: %(default)s)")
    engine.add_argument(
        "--new-tokens", type=_several, default=64, metavar="N", help="at least 2 (default: %(default)s)"
    )
    engine.add_argument("--dtype", type=_dtypes, default=["fp32"], metavar="fp32,bf16", help="(default: fp32)")
    engine.add_argument("--repeat", type=_count, default=3, metavar="R", help="(default: %(default)s)")
    engine.add_argument("--threads", type=_count, metavar="N", help="CPU threads (default: torch's choice)")
    engine.add_argument(
        "--exit-at",
        type=_count,
        metavar="LAYER",
        help="let every token leave at this exit, for the most that exits can give; a plain model is given one there "
        "(default: the checkpoint's policy)",
    )
    engine.add_argument("--against", choices=("transformers",), help="also measure generate() of transformers")
    engine.add_argument("--json", action="store_true", help="one line for each contestant and batch size")
    return parser


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _several(text: str) -> int:
    # The time of decoding begins with the first token.
    value = _count(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{text!r} leaves nothing to time; give at least 2")
    return value


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _dtypes(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in get_args(Dtype)]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(get_args(Dtype))}")
    return names
