"""`offramp bench engine`: how fast, how deep, and where the time goes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

from tqdm import tqdm

from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import ExitPolicy
from offramp.serve.config import Dtype, EngineConfig, Kernels, SyncPolicy

_T = TypeVar("_T")
# Fields that have an option of their own, that the benchmark sets to fit its workloads, or that no short text can give.
_NOT_BY_NAME = frozenset(
    {"dtype", "kernels", "device", "sync_policy", "block_size", "num_blocks", "kv_cache_bytes", "max_num_seqs"}
    | {"max_waiting", "num_threads", "thresholds", "shortlist"}
)
_EARLY: tuple[KVPolicy, ...] = ("fill", "recompute", "verify")


def main(argv: list[str]) -> int:
    """Runs the command with its arguments."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.plots and options.out is None:
        parser.error("--plots needs --out, where the pictures go")
    if options.requests is not None and options.requests < 3 * max(options.batch):
        parser.error(
            f"--requests {options.requests} leaves no steady window with {max(options.batch)} in flight; give at least "
            f"{3 * max(options.batch)}"
        )

    import torch

    from offramp.serve.bench import plots, report
    from offramp.serve.bench.measure import Measured, Note
    from offramp.serve.bench.plan import Choices
    from offramp.serve.bench.run import Bench, Settings

    if options.plots:
        plots.check_installed()
    if options.threads is not None:
        EngineConfig(num_threads=options.threads)  # refuses a number that would end the process
        torch.set_num_threads(options.threads)
    choices = Choices(
        batches=options.batch,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        hard_shares=options.hard_share,
        closed_loop=options.closed_loop,
        requests=options.requests,
        engine={
            **dict(options.engine),
            "dtype": options.dtype,
            "kernels": options.kernels,
            "sync_policy": options.sync_policy,
            **({} if options.device is None else {"device": options.device}),
        },
        kv_policies=options.kv_policy,
        thresholds=options.threshold,
        policy=dict(options.policy),
        exit_at=options.exit_at,
        static_layers=options.static_layer,
    )
    settings = Settings(
        repetitions=options.repeat,
        prompts=options.prompts,
        references=options.references,
        until_eos=options.until_eos,
        transformers="transformers" in options.against,
        assistant_layers=options.assistant_layers,
        peers=dict(options.peer),
    )
    bench = Bench(options.directory, options.plan, choices, settings)
    facts = report.machine()
    window = "with all seats taken" if options.closed_loop else "while all sequences decode"
    hardware = ", ".join(filter(None, (facts["cpu"], facts["gpu"])))
    if not options.json:
        print(
            f"{options.directory}: tokens/s {window}, median (lowest..highest) of "
            f"{settings.repetitions} runs taken in turn; {hardware}, {facts['threads']} threads, "
            f"torch {facts['torch']}",
            flush=True,
        )
    results: list[Measured] = []
    notes: list[Note] = []
    count = sum(len(experiment.workloads) for experiment in bench.experiments)
    with tqdm(total=count, unit="workload", delay=1, file=sys.stderr) as bar:
        for experiment in bench.experiments:
            of_experiment: list[Measured] = []
            for found in bench.run(experiment):
                bar.update()
                bar.clear()
                measured = [one for one in found if isinstance(one, Measured)]
                missing = [one for one in found if isinstance(one, Note)]
                of_experiment += measured
                notes += missing
                if options.json:
                    texts = [json.dumps(one.to_json()) for one in measured]
                    for note in missing:
                        print(report.note_line(note), file=sys.stderr)
                else:
                    texts = [report.header(measured[0])] if measured else []
                    texts += [line for one in measured for line in report.lines(one, measured[0])]
                    texts += [report.note_line(note) for note in missing]
                for text in texts:
                    print(text, flush=True)
            results += of_experiment
            if options.out is not None:
                # After every experiment: what is measured is not lost with what comes after.
                report.write(options.out, results, notes, facts)
                if options.plots:
                    plots.draw(options.out, experiment, of_experiment)
    if options.out is not None:
        print(f"Results are in {options.out}", file=sys.stderr)
    return 0 if results else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="offramp bench", description="Measure the engine.")
    what = parser.add_subparsers(required=True, metavar="WHAT")
    engine = what.add_parser(
        "engine",
        help="speed at full depth and with early exits, and where the time goes",
        description="Measure the whole engine (scheduler, layers, sampler, detokeniser): decode and prefill speed, "
        "latency, depth, time by part, and the speed-up of early exits beside what it could be. Options that take "
        "several values take them with commas; every combination is measured.",
    )
    engine.add_argument("directory", type=Path, help="a checkpoint directory, or a plain Hugging Face one")
    engine.add_argument(
        "--plan",
        choices=("quick", "full"),
        default="quick",
        help="quick: all combinations of the options; full: one thing varied after the other, the options being the "
        "place to vary from (default: %(default)s)",
    )
    work = engine.add_argument_group("what is asked")
    work.add_argument("--batch", type=_list(_count), default=(1, 8, 32), metavar="N,...", help="(default: 1,8,32)")
    work.add_argument("--prompt-tokens", type=_list(_count), default=(128,), metavar="N,...", help="(default: 128)")
    work.add_argument(
        "--new-tokens", type=_list(_several), default=(64,), metavar="N,...", help="at least 2 (default: 64)"
    )
    work.add_argument(
        "--hard-share",
        type=_list(_share),
        default=(0.0,),
        metavar="X,...",
        help="share of the sequences that run at full depth whatever the rest does (default: 0)",
    )
    work.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='lines of JSON with a "prompt" each (.jsonl), taken as they are; any other file is one text to cut '
        "prompts from (default: random tokens, which say nothing about early exits)",
    )
    work.add_argument("--until-eos", action="store_true", help="let sequences end where the model ends them")
    work.add_argument(
        "--closed-loop",
        action="store_true",
        help="keep --batch sequences in flight: another one starts when one ends, and what counts is the time in which "
        "all seats are taken (default: all sequences of a batch start together)",
    )
    work.add_argument(
        "--requests",
        type=_count,
        metavar="N",
        help="sequences of a closed loop in all, at least three for each in flight (default: six, and at least 24)",
    )
    work.add_argument(
        "--references",
        type=Path,
        metavar="FILE",
        help='also measure the quality of the engine\'s texts: lines of JSON with a "prompt" and "references" each; '
        "prompts are taken from it too, if there is no --prompts",
    )
    engine_group = engine.add_argument_group(
        "the engine's variants; full depth is always one of them, and with a shortlist head if the checkpoint's policy "
        "has a shortlist"
    )
    engine_group.add_argument(
        "--dtype",
        type=_list(_one_of(get_args(Dtype))),
        default=(EngineConfig.dtype,),
        metavar="fp32,bf16",
        help=f"(default: {EngineConfig.dtype}, as everywhere)",
    )
    engine_group.add_argument(
        "--kernels",
        type=_list(_one_of(get_args(Kernels))),
        default=(EngineConfig.kernels,),
        metavar="NAME,...",
        help=f"(default: {EngineConfig.kernels})",
    )
    engine_group.add_argument(
        "--device",
        type=_list(str),
        metavar="NAME,...",
        help="cpu, cuda, cuda:N or auto; on CUDA `--engine cuda_graphs=false,true` compares both (default: cpu)",
    )
    engine_group.add_argument(
        "--kv-policy",
        type=_list(_one_of(_EARLY)),
        default=("fill",),
        metavar="NAME,...",
        help=f"some of {', '.join(_EARLY)} (default: fill)",
    )
    engine_group.add_argument(
        "--sync-policy",
        type=_list(_one_of(get_args(SyncPolicy))),
        default=("regroup", "all"),
        metavar="NAME,...",
        help="(default: regroup,all)",
    )
    engine_group.add_argument(
        "--threshold",
        type=_list(_threshold),
        default=(None,),
        metavar="X,...",
        help="one threshold for all exits; `own` is the checkpoint's (default: own)",
    )
    engine_group.add_argument(
        "--engine",
        type=_field(EngineConfig),
        action="append",
        default=[],
        metavar="FIELD=X,...",
        help="values of any other setting of the engine, by its name in EngineConfig; may be repeated",
    )
    engine_group.add_argument(
        "--policy",
        type=_field(ExitPolicy),
        action="append",
        default=[],
        metavar="FIELD=X,...",
        help="values of a field of the checkpoint's exit policy, by its name in ExitPolicy; may be repeated",
    )
    engine_group.add_argument(
        "--exit-at",
        type=_count,
        metavar="LAYER",
        help="let every token leave at this exit, for the most that exits can give; a plain model is given one there "
        "(default: the checkpoint's policy)",
    )
    engine_group.add_argument(
        "--static-layer",
        type=_list(_count),
        default=(),
        metavar="LAYER,...",
        help="also measure a fixed depth: every generated token runs so many layers and nothing is ever filled",
    )
    beside = engine.add_argument_group("beside it")
    beside.add_argument(
        "--against", type=_list(_one_of(("transformers",))), default=(), metavar="transformers", help="generate() of it"
    )
    beside.add_argument(
        "--assistant-layers",
        type=_count,
        metavar="LAYER",
        help="generate() of transformers with assistant_early_exit at this layer; one sequence only",
    )
    beside.add_argument(
        "--peer",
        type=_peer,
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another engine, by the command of its worker; see benchmarks/peers",
    )
    how = engine.add_argument_group("how")
    how.add_argument("--repeat", type=_count, default=3, metavar="R", help="(default: %(default)s)")
    how.add_argument("--threads", type=_count, metavar="N", help="CPU threads of everybody (default: torch's choice)")
    how.add_argument("--json", action="store_true", help="print one line of JSON for each contestant and workload")
    how.add_argument("--out", type=Path, metavar="DIR", help="write results.csv and results.jsonl there")
    how.add_argument("--plots", action="store_true", help="draw pictures into --out; needs matplotlib")
    return parser


def _list(item: Callable[[str], _T]) -> Callable[[str], tuple[_T, ...]]:
    return lambda text: tuple(item(part) for part in text.split(","))


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


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _share(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; give a number from 0 to 1")
    return value


def _threshold(text: str) -> float | None:
    return None if text == "own" else _number(text)


def _field(settings: type[EngineConfig | ExitPolicy]) -> Callable[[str], tuple[str, tuple[Any, ...]]]:
    known = [one.name for one in dataclasses.fields(settings) if one.name not in _NOT_BY_NAME]

    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    def parse(text: str) -> tuple[str, tuple[Any, ...]]:
        name, equals, values = text.partition("=")
        if not equals or name not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=X,... with a FIELD of {', '.join(known)}")
        return name, tuple(value(part) for part in values.split(","))

    return parse


def _one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    def name(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return name


def _peer(text: str) -> tuple[str, str]:
    name, equals, command = text.partition("=")
    if not name or not equals or not command.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COMMAND")
    return name, command
