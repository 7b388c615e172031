"""`offramp generate` for encoder-decoder models: one prompt after the other, without a cache.

The engine has no such models yet, so this is the reference that it will be compared with: slow, and the same text.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from offramp.common.checkpoint import DTYPES, AnyCheckpoint, load_any_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.generation import generate
from offramp.common.tokenizer import encode_text, load_tokenizer
from offramp.serve.offline import Completion
from offramp.serve.request.exit_options import ExitOptions
from offramp.serve.request.output import Usage

_TAKEN = {
    *("directory", "prompt", "prompts", "json", "max_tokens", "ignore_eos", "dtype"),
    *("measure", "threshold", "thresholds", "min_exit_layer", "kv_policy", "max_pending", "exit_layer"),
}


def check_options(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raise `OfframpError` for the first option that was given and would have no effect."""
    silent = vars(parser.parse_args([str(options.directory)]))
    for name, value in vars(options).items():
        if name not in _TAKEN and value != silent[name]:
            raise OfframpError(
                f"--{name.replace('_', '-')} is an option of the engine, which has no encoder-decoder models yet: text "
                "is generated greedily, without a cache; leave it out."
            )


def load(directory: Path, dtype: str | None) -> AnyCheckpoint:
    """The model, in fp32 where nothing is said."""
    return load_any_checkpoint(directory, dtype=DTYPES[dtype or "fp32"])


def completions(
    checkpoint: AnyCheckpoint,
    prompts: Sequence[tuple[str, str]],
    max_tokens: int,
    ignore_eos: bool,
    exits: ExitOptions,
) -> Iterator[Completion]:
    """Texts for sources, each as soon as it is there.

    Args:
        checkpoint: an encoder-decoder model.
        prompts: sources, each with the place it comes from, for messages.
        max_tokens: most tokens of a text.
        ignore_eos: whether a text goes on after the model's end-of-sequence tokens.
        exits: how deep tokens run; without a policy, by that of the checkpoint.
    """
    assert checkpoint.path is not None
    tokenizer = load_tokenizer(checkpoint.path)
    eos_ids = () if ignore_eos else checkpoint.eos_token_ids
    policy = None if exits.kv_policy in ("full", "static") else exits.policy or checkpoint.policy
    for source, place in prompts:
        source_ids = encode_text(tokenizer, source)
        if not source_ids:
            raise OfframpError(f"{place}: the prompt has no token; give some text.")
        made = generate(
            checkpoint.model,
            source_ids,
            max_tokens,
            kv_policy=exits.kv_policy,
            policy=policy,
            max_pending=exits.max_pending,
            static_layer=exits.static_layer,
            eos_ids=eos_ids,
        )
        yield Completion(
            text=str(tokenizer.decode(made.token_ids, skip_special_tokens=True)),
            token_ids=made.token_ids,
            exit_layers=made.exit_layers,
            finish_reason="stop" if made.token_ids[-1] in eos_ids else "length",
            usage=Usage(len(source_ids), len(made)),
        )
