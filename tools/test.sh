#!/usr/bin/env bash
# Set up .venv with the test extra, then flake8, mypy and pytest: test.sh [--all] [pytest arguments]
# --all runs the long tier too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tier=(-m "not long")
if [[ ${1:-} == --all ]]; then
    tier=()
    shift
fi

bash launch/setup_env.sh test
source .venv/bin/activate

flake8
mypy

# Two workers share the cores: more threads in each of them only wait for one another.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec python -m pytest -n 2 --dist loadfile "${tier[@]}" "$@"
