"""`offramp generate`: text from prompts, offline, and how deep each token went."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tqdm import tqdm

from offramp.common.errors import OfframpError
from offramp.common.exits.policy import ExitPolicy, Measure
from offramp.serve.config import Dtype, EngineConfig, SyncPolicy
from offramp.serve.request import ExitOptions, KVPolicy, RequestOutput, SamplingParams

if TYPE_CHECKING:  # importing these takes seconds, and `--help` needs none of them
    from offramp.serve.engine import Engine
    from offramp.serve.offline import Completion


def main(argv: list[str]) -> int:
    """Runs the command with its arguments."""
    options = _parser().parse_args(argv)
    sampling = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    seats = options.max_num_seqs
    config = EngineConfig(
        dtype=options.dtype,
        sync_policy=options.sync_policy,
        max_num_seqs=seats,
        # Every seat must be able to advance in every iteration.
        max_tokens_per_iteration=max(EngineConfig.max_tokens_per_iteration, seats),
    )
    asked = _prompts(options)

    from offramp.serve.engine import Engine
    from offramp.serve.offline import generate

    print(f"Loading {options.directory} ...", file=sys.stderr, flush=True)
    engine = Engine.from_checkpoint(options.directory, config)
    exits = exit_options(engine, options.measure, options.threshold, options.kv_policy)
    prompts = [_encode(engine, prompt) for prompt in asked]
    with tqdm(desc="Generating", unit="token", total=None, delay=1, file=sys.stderr) as bar:

        def advance(index: int, output: RequestOutput) -> None:
            bar.update(len(output.new_token_ids))

        completions = generate(engine, prompts, sampling, exits, on_output=advance)
    for completion in completions:
        print(json.dumps(_to_json(completion), ensure_ascii=False) if options.json else completion.text, flush=True)
    print(depth_summary(completions, engine.checkpoint.config.num_layers), file=sys.stderr)
    failed = [completion.error for completion in completions if completion.error is not None]
    if failed:
        raise OfframpError(f"{len(failed)} of {len(completions)} prompts failed, the first one because {failed[0]}")
    return 0


def exit_options(engine: Engine, measure: Measure | None, threshold: float | None, kv_policy: KVPolicy) -> ExitOptions:
    """Exits to take: the checkpoint's policy, changed by what was asked for.

    Raises:
        OfframpError: what was asked for contradicts itself or the model.
    """
    if kv_policy == "full":
        if measure is not None or threshold is not None:
            raise OfframpError("KV policy 'full' runs every layer; leave --measure and --threshold out.")
        return ExitOptions("full")
    if measure is None and threshold is None:
        return ExitOptions(kv_policy)
    layers, policy = engine.checkpoint.exits.layers, engine.checkpoint.policy
    if not layers:
        raise OfframpError("--measure and --threshold need early exits, and this model has none; add them on import.")
    if threshold is None and (policy is None or policy.measure != measure):
        raise OfframpError(f"this model has no thresholds for the measure {measure!r}; give --threshold as well.")
    policy = policy or ExitPolicy()
    if measure is not None:
        policy = dataclasses.replace(policy, measure=measure)
    return ExitOptions(kv_policy, policy if threshold is None else policy.with_threshold(threshold, layers))


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
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: %(default)s)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="sample among the K most probable tokens")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling (default: %(default)s)")
    parser.add_argument("--seed", type=int, metavar="S", help="makes draws reproducible, for each prompt anew")
    parser.add_argument("--measure", choices=get_args(Measure), help="confidence measure (default: the checkpoint's)")
    parser.add_argument(
        "--threshold", type=float, metavar="X", help="confidence to exceed at every exit (default: the checkpoint's)"
    )
    parser.add_argument(
        "--kv-policy", choices=get_args(KVPolicy), default="fill", help="full runs every layer (default: %(default)s)"
    )
    parser.add_argument(
        "--sync-policy",
        choices=get_args(SyncPolicy),
        default="regroup",
        help="all: tokens of a batch leave together; regroup: each on its own (default: %(default)s)",
    )
    parser.add_argument("--dtype", choices=get_args(Dtype), default="fp32", help="(default: %(default)s)")
    parser.add_argument("--max-num-seqs", type=int, default=32, metavar="N", help="batch size (default: %(default)s)")
    parser.add_argument(
        "--json",
        action="store_true",
        help="one line per prompt, in order: text, token_ids, exit_layers, finish_reason, usage",
    )
    return parser


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
            tokens = encode_chat(body, engine.tokenizer)
    except (ApiError, OfframpError) as fault:
        raise OfframpError(f"{prompt.place}: {fault}") from None
    if not tokens:
        raise OfframpError(f"{prompt.place}: the prompt has no token; give some text.")
    return tokens


def _to_json(completion: Completion) -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "exit_layers": completion.exit_layers,
        "finish_reason": completion.finish_reason,
        "usage": dataclasses.asdict(completion.usage),
    }
