"""Steps that make a model by the public commands: take it, give it exits, train it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from demo.steps import Steps, offramp


def take_plain(steps: Steps, source: str, console: Console) -> Path:
    """The step that brings a model as it is."""
    return steps.run(
        "plain",
        f"Take the model {source} as it is",
        [source],
        lambda out: offramp("import", source, out / "model", "--dtype", "fp32", "--overwrite", console=console),
    )


def add_exits(
    steps: Steps,
    tuned: Path,
    layers: Sequence[int],
    console: Console,
    head: Literal["adapter", "norm"] = "adapter",
    name: str = "exits",
) -> Path:
    """The step `name` that gives a model exits with heads of one kind."""
    named = [str(layer) for layer in layers]
    return steps.run(
        name,
        f"Add exits after layers {', '.join(named)}: {'an adapter and a norm' if head == 'adapter' else 'a norm'} each",
        [str(layers), head],
        lambda out: offramp(
            *("import", tuned / "model", out / "model", "--exits", ",".join(named)),
            *("--head", head, "--norm-scale", "0.3", "--overwrite"),
            console=console,
        ),
    )


def fit(
    out: Path, recipes: Sequence[Path], source: Path, data: Path, console: Console, threads: int | None = None
) -> None:
    """Train, going on from the newest checkpoint if there is one, and export to `out/model`."""
    files = [word for recipe in recipes for word in ("-c", recipe)]
    offramp(
        *("fit", *files, f"--vars.checkpoint={source}", f"--vars.data={data}", f"--vars.out={out}", "--ckpt_path=last"),
        console=console,
        threads=threads,
    )
    offramp("export", out, out / "model", "--overwrite", console=console)
