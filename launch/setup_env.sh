#!/usr/bin/env bash
# Set up .venv in the project's root with this project, editable, and the extras named: setup_env.sh [EXTRA...]
# The sampler's extra is added: gpu where an NVIDIA GPU answers, else cpu. Does nothing where that set is there already.
# PYTHON=... chooses the interpreter of a new .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CPU_INDEX=https://download.pytorch.org/whl/cpu

fail() {
    echo "setup_env.sh: $*" >&2
    exit 1
}

make_venv() {
    local python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$python is not Python 3.11 or newer: set PYTHON to one that is"
    "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
        fail "the headers of $python are missing (Python.h): install them (Debian: python3-dev)"
    command -v g++ >/dev/null || fail "g++ is missing: install a C++ compiler (Debian: g++)"
    "$python" -m venv .venv || fail "$python could not make .venv (Debian: python3-venv)"
}

install() {
    local wanted=".[$1]" constraints=$2
    .venv/bin/pip install -qq --editable "$wanted" --constraint "$constraints" && return
    # Only as a second try: an index that cannot be reached costs pip over a minute.
    [[ $constraints == *cpu* ]] || fail "pip could not install $wanted with $constraints"
    echo "setup_env.sh: once more, with PyTorch's index of CPU builds" >&2
    .venv/bin/pip install -qq --editable "$wanted" --constraint "$constraints" --extra-index-url "$CPU_INDEX"
}

drop_broken_vision() {
    # A torchvision built for another torch breaks the import of Transformers' model classes; text needs none of them.
    .venv/bin/python -c 'import torchvision' 2>/dev/null ||
        .venv/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
}

main() {
    local sampler=cpu
    if nvidia-smi >/dev/null 2>&1; then sampler=gpu; fi
    local constraints=launch/constraints-$sampler.txt
    local extras
    extras=$(printf '%s\n' "$sampler" "$@" | sort -u | paste -sd,)
    # One stamp a set of extras; those of an older setup.cfg or other constraints no longer count.
    local stamps
    stamps=.venv/installed/$(cat setup.cfg pyproject.toml "$constraints" launch/setup_env.sh | sha256sum | cut -c1-16)
    [[ -e $stamps/$extras ]] && return

    [[ -e .venv/bin/activate ]] || make_venv
    [[ -d $stamps ]] || rm -rf .venv/installed
    echo "setup_env.sh: installing .[$extras] into .venv (some minutes)"
    install "$extras" "$constraints"
    drop_broken_vision
    mkdir -p "$stamps"
    touch "$stamps/$extras"
}

main "$@"
