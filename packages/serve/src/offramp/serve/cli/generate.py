"""`offramp generate`: text from prompts, offline, and how deep each token went."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tqdm import tqdm

from offramp.common.errors import OfframpError
from offramp.common.exits.kv_policy import KVPolicy
from offramp.common.exits.policy import Measure
from offramp.serve.cli.engine_options import add_engine_options, engine_settings
from offramp.serve.cli.probe_report import probe_json, probe_table
from offramp.serve.config import EngineConfig
from offramp.serve.exit_overrides import ExitOverrides, exit_options, point_options
from offramp.serve.request.constraint import Constraint
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.output import RequestOutput
from offramp.serve.request.sampling_params import SamplingParams

if TYPE_CHECKING:  # importing these takes seconds, and `--help` needs none of them
    from offramp.serve.engine import Engine
    from offramp.serve.offline import Completion
    from offramp.serve.probe import PositionReading


def main(argv: list[str]) -> int:
    """Runs the command with its arguments."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.n < 1:
        raise OfframpError(f"--n {options.n} must be at least 1 text for each prompt.")
    if options.probe_top < 1:
        raise OfframpError(f"--probe-top {options.probe_top} must be at least 1 token for each exit.")
    sampling = SamplingParams(
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=tuple(options.stop),
        ignore_eos=options.ignore_eos,
        logprobs=options.logprobs,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=tuple(options.logit_bias),
        constraint=_constraint(options),
    )
    config = EngineConfig(**engine_settings(options))
    asked = _prompts(options)

    from offramp.serve.engine import Engine
    from offramp.serve.offline import generate
    from offramp.serve.watch import unlike_calibration

    _announce(options.directory)
    engine = Engine.from_checkpoint(options.directory, config)
    if options.probe:
        engine.check_probe()
    checkpoint = engine.checkpoint
    exits = exit_options(
        _overrides(options),
        checkpoint.exits.layers,
        checkpoint.policy,
        checkpoint.points,
        _flag,
        config.default_kv_policy,
    )
    if exits in map(point_options, checkpoint.points.by_name.values()) and (
        why := unlike_calibration(checkpoint.calibration, config)
    ):
        print(why, file=sys.stderr)
    prompts = [_encode(engine, prompt) for prompt in asked]
    with tqdm(desc="Generating", unit="token", total=None, delay=1, file=sys.stderr) as bar:

        def advance(index: int, output: RequestOutput) -> None:
            bar.update(len(output.new_token_ids))

        completions = generate(engine, prompts, sampling, exits, n=options.n, on_output=advance)
    for index, completion in enumerate(completions):
        row = _to_json(completion, options.logprobs is not None)
        if options.probe:
            readings = engine.probe(
                [*prompts[index // options.n], *completion.token_ids], options.probe_top, exits.policy
            )
            if options.json:
                row["probe"] = probe_json(readings, _decoder(engine))
            else:
                print(_probe_table(engine, readings, completion, exits), file=sys.stderr)
        print(json.dumps(row, ensure_ascii=False) if options.json else completion.text, flush=True)
    print(depth_summary(completions, engine.checkpoint.model.config.num_layers), file=sys.stderr)
    failed = [completion.error for completion in completions if completion.error is not None]
    if failed:
        raise OfframpError(f"{len(failed)} of {len(completions)} texts failed, the first one because {failed[0]}")
    return 0


def _announce(directory: Path) -> None:
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    print(f"Loading {directory}, {weights / 1e6:,.0f} MB of weights ...", file=sys.stderr, flush=True)


def _decoder(engine: Engine) -> Callable[[int], str]:
    tokenizer = engine.tokenizer
    return lambda token: str(tokenizer.decode([token]))


def _probe_table(
    engine: Engine, readings: Sequence[PositionReading], completion: Completion, exits: ExitOptions
) -> str:
    policy = None if exits.kv_policy in ("full", "static") else exits.policy or engine.checkpoint.policy
    # The first token of the text was said after the last one of the prompt.
    first = len(readings) - len(completion.token_ids) - 1
    said_at = dict(enumerate(completion.exit_layers, start=first))
    return probe_table(readings, _decoder(engine), None if policy is None else policy.measure, said_at)


def _overrides(options: argparse.Namespace) -> ExitOverrides:
    return ExitOverrides(
        operating_point=options.operating_point,
        measure=options.measure,
        threshold=options.threshold,
        thresholds=options.thresholds,
        min_exit_layer=options.min_exit_layer,
        kv_policy=options.kv_policy,
        max_pending=options.max_pending,
        exit_layer=options.exit_layer,
    )


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _constraint(options: argparse.Namespace) -> Constraint | None:
    if options.regex is not None:
        return Constraint("regex", options.regex)
    if options.json_schema is None:
        return None
    try:
        text = options.json_schema.read_text(encoding="utf-8")
        json.loads(text)
    except (OSError, ValueError) as fault:
        raise OfframpError(f"{options.json_schema} holds no JSON schema: {fault}.") from None
    return Constraint("json_schema", text)


def depth_summary(completions: Sequence[Completion], num_layers: int) -> str:
    """How many tokens left at each exit, in one line: no early exits should be seen as such."""
    counts = Counter(layer for completion in completions for layer in completion.exit_layers)
    total = sum(counts.values())
    if not total:
        return "0 tokens"
    mean = sum(layer * count for layer, count in counts.items()) / total
    shares = ", ".join(f"layer {layer}: {counts[layer] / total:.0%}" for layer in sorted(counts))
    return f"{total} tokens, {mean:.1f} of {num_layers} layers on average ({shares})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="offramp generate", description="Generate text from a checkpoint directory and show how deep tokens went."
    )
    parser.add_argument("directory", type=Path, help="a checkpoint directory, or a plain Hugging Face one")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="one prompt (default: standard input)")
    source.add_argument(
        "--prompts", type=Path, metavar="FILE", help='JSON lines: "text", {"prompt": ...} or {"messages": [...]}'
    )
    parser.add_argument("--chat", action="store_true", help="put prompts into the chat template as the user's words")
    parser.add_argument(
        "--json",
        action="store_true",
        help="one line per text, in the order of the prompts: text, token_ids, exit_layers, finish_reason, usage",
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="also show what every exit says at every position of prompt and text, run at full depth: a table on "
        "standard error, or with --json the field probe",
    )
    parser.add_argument(
        "--probe-top", type=int, default=3, metavar="K", help="--probe: tokens for each exit (default: %(default)s)"
    )
    _add_sampling(parser.add_argument_group("sampling"))
    _add_depth(parser.add_argument_group("depth"))
    add_engine_options(parser, queue=False)
    return parser


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-tokens", type=int, default=128, metavar="N", help="(default: %(default)s)")
    group.add_argument("--min-tokens", type=int, default=0, metavar="N", help="no end before (default: %(default)s)")
    group.add_argument("--n", type=int, default=1, metavar="N", help="texts for each prompt (default: %(default)s)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: %(default)s)")
    group.add_argument("--top-k", type=int, metavar="K", help="sample among the K most probable tokens")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling (default: %(default)s)")
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="sample among tokens at least P times as probable as the best (default: %(default)s)",
    )
    group.add_argument("--seed", type=int, metavar="S", help="makes draws reproducible, for each prompt anew")
    group.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="X", help="of prompt and text (default: %(default)s)"
    )
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="(default: %(default)s)")
    group.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X", help="(default: %(default)s)")
    group.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        default=[],
        metavar="TOKEN=X",
        help="added to the logit of a token id; may be given several times",
    )
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be given several times"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end-of-sequence tokens")
    group.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: log-probabilities, and N alternatives for each token"
    )
    language = group.add_mutually_exclusive_group()
    language.add_argument("--json-schema", type=Path, metavar="FILE", help="the text is JSON that follows this schema")
    language.add_argument("--regex", metavar="PATTERN", help="the text matches this regular expression")


def _add_depth(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--operating-point", metavar="NAME", help="a calibrated way of answering; `exact` is full depth")
    group.add_argument("--measure", choices=get_args(Measure), help="confidence measure (default: the checkpoint's)")
    group.add_argument(
        "--threshold", type=float, metavar="X", help="confidence to exceed at every exit (default: the checkpoint's)"
    )
    group.add_argument(
        "--thresholds",
        type=_thresholds,
        metavar="LAYER=X,...",
        help="the same exit by exit; one that is not named stays closed",
    )
    group.add_argument("--min-exit-layer", type=int, metavar="LAYER", help="no token leaves below this layer")
    group.add_argument(
        "--kv-policy",
        choices=get_args(KVPolicy),
        help="keys and values of skipped layers: full skips none; fill guesses them; recompute makes them later; "
        "verify lets the full model judge every token; static leaves at --exit-layer and needs none; pipeline lets "
        "later stages make them meanwhile (default: fill, with --pipeline-stages pipeline)",
    )
    group.add_argument(
        "--max-pending", type=int, metavar="N", help="recompute and verify: tokens that wait at most (default: 8)"
    )
    group.add_argument("--exit-layer", type=int, metavar="LAYER", help="static: where every token leaves")


def _bias(text: str) -> tuple[int, float]:
    token, _, number = text.partition("=")
    try:
        return int(token), float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not TOKEN=NUMBER, such as 50256=-100") from None


def _thresholds(text: str) -> dict[int, float]:
    try:
        return {int(layer): float(value) for layer, _, value in (part.partition("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not LAYER=NUMBER,..., such as 10=0.9,20=0.8") from None


@dataclasses.dataclass(frozen=True)
class _Prompt:
    """A text, or the messages of a conversation; and where it stands, for messages about it."""

    content: str | list[Any]
    place: str


def _prompts(options: argparse.Namespace) -> list[_Prompt]:
    """What the command line, a file or standard input asks for."""

    def as_asked(content: str | list[Any], place: str) -> _Prompt:
        chat = options.chat and isinstance(content, str)
        return _Prompt([{"role": "user", "content": content}] if chat else content, place)

    if options.prompts is None:
        if options.prompt is not None:
            return [as_asked(options.prompt, "--prompt")]
        try:
            return [as_asked(sys.stdin.read(), "standard input")]
        except UnicodeError as fault:
            raise OfframpError(f"standard input cannot be read: {fault}; give UTF-8.") from None
    try:
        lines = options.prompts.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as fault:
        raise OfframpError(f"{options.prompts} cannot be read: {fault}.") from None
    found: list[_Prompt] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{options.prompts}, line {number}"
            found.append(as_asked(_prompt_of(line, place), place))
    if not found:
        raise OfframpError(f"{options.prompts} holds no prompt; write one JSON value on each line.")
    return found


def _prompt_of(line: str, where: str) -> str | list[Any]:
    try:
        value = json.loads(line)
    except ValueError as fault:
        raise OfframpError(f"{where} is not JSON: {fault}.") from None
    if isinstance(value, dict):
        value = value.get("messages", value.get("prompt"))
    if not isinstance(value, str | list):
        raise OfframpError(f'{where} is neither "text" nor {{"prompt": "text"}} nor {{"messages": [...]}}.')
    return value


def _encode(engine: Engine, prompt: _Prompt) -> list[int]:
    from offramp.serve.offline import encode
    from offramp.serve.protocol.errors import ApiError
    from offramp.serve.protocol.prompts import encode_chat
    from offramp.serve.protocol.requests import ChatBody, parse_body

    try:
        if isinstance(prompt.content, str):
            tokens = encode(engine, prompt.content)
        else:
            # Conversations are read as the server reads them.
            body = parse_body(ChatBody, {"model": "offline", "messages": prompt.content})
            tokens = encode_chat(body, engine.tokenizer, min(engine.max_model_len, engine.cache_tokens))
    except (ApiError, OfframpError) as fault:
        raise OfframpError(f"{prompt.place}: {fault}") from None
    if not tokens:
        raise OfframpError(f"{prompt.place}: the prompt has no token; give some text.")
    return tokens


def _to_json(completion: Completion, with_logprobs: bool) -> dict[str, Any]:
    logprobs = [dataclasses.asdict(entry) for entry in completion.logprobs]
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "exit_layers": completion.exit_layers,
        "finish_reason": completion.finish_reason,
        "usage": dataclasses.asdict(completion.usage),
        **({"logprobs": logprobs} if with_logprobs else {}),
    }
