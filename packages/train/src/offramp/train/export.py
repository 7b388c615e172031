"""`offramp export`: training checkpoints -> checkpoint directory.

If all of the backbone is what it was, its files are copied as they are.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from offramp.common.checkpoint import DTYPES, CheckpointOf, save_checkpoint
from offramp.common.errors import OfframpError
from offramp.common.families import check_dtype, make_model
from offramp.train.trained_model import TrainedModel, join
from offramp.train.training_checkpoint import CHECKPOINTS, newest_whole


def export_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    others: Sequence[str | os.PathLike[str]] = (),
    overwrite: bool = False,
    dtype: str | None = None,
    assets: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a checkpoint directory from a training checkpoint.

    Args:
        source: Lightning file, or directory of `deepspeed_pipeline`.
        target: directory to create.
        others: training checkpoints of the same backbone, whose exits are joined to those of `source`.
        overwrite: replace an existing checkpoint directory.
        dtype: of the weights, a name in `DTYPES`; None is fp32, which is what was trained, unless the backbone is what
            it was: then it is the type that the backbone is stored in.
        assets: directory with tokenizer and generation files, and with the weights that training did not hold; the one
            that training started from if None.

    Raises:
        OfframpError: `source` is not such a checkpoint, or is incomplete, or the assets are gone; or `others` do not
            belong to it.
    """
    directory = None if assets is None else Path(assets)
    trained = TrainedModel.read(Path(source), directory)
    if others:
        trained = join([trained, *(TrainedModel.read(Path(other), directory) for other in others)])
    kept = trained.keeps_backbone
    stored = trained.backbone_dtype if kept else torch.float32
    wanted = stored if dtype is None else DTYPES[dtype]
    check_dtype(trained.config, wanted)
    with torch.device("meta"):
        model = make_model(trained.config, trained.exits)
    model.load_state_dict(trained.weights, assign=True)
    checkpoint = CheckpointOf(
        model=model.to(dtype=wanted),
        hf_config=trained.record["hf_config"],
        policy=trained.policy,
        provenance=trained.record["provenance"],
    )
    backbone = trained.source if kept and wanted == stored else None
    return save_checkpoint(target, checkpoint, assets=trained.source, backbone=backbone, overwrite=overwrite)


def main(argv: list[str]) -> int:
    """`offramp export`."""
    parser = argparse.ArgumentParser(
        prog="offramp export",
        description="Turn a training checkpoint (a .ckpt file, or the directory of deepspeed_pipeline) into a "
        "checkpoint directory: an ordinary Hugging Face model with exits beside it. Several checkpoints of one frozen "
        "backbone are joined: each gives the exits that it trained. The directory of a run stands for its newest "
        "checkpoint.",
    )
    parser.add_argument("checkpoints", metavar="CHECKPOINT", nargs="+", help="training checkpoint, or a run")
    parser.add_argument("out", metavar="OUT", help="directory to create")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a checkpoint directory")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help="of the weights; fp32, or that of a backbone that was not trained"
    )
    parser.add_argument("--assets", metavar="DIR", help="where the tokenizer is, if the starting directory has moved")
    arguments = parser.parse_args(argv)
    first, *others = (_newest_of_run(Path(path)) for path in arguments.checkpoints)
    written = export_checkpoint(
        first,
        arguments.out,
        others=others,
        overwrite=arguments.overwrite,
        dtype=arguments.dtype,
        assets=arguments.assets,
    )
    print(f"wrote {written}")
    return 0


def _newest_of_run(path: Path) -> Path:
    """A training checkpoint as it is, the directory of a run as its newest one."""
    checkpoints = path / CHECKPOINTS
    if not checkpoints.is_dir():
        return path
    newest = newest_whole(checkpoints, tell=lambda sentence: print(f"offramp export: {sentence}", file=sys.stderr))
    if newest is None:
        raise OfframpError(f"{checkpoints} holds no checkpoint; the run has not written one yet.")
    return newest
