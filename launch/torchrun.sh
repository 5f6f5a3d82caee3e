#!/usr/bin/env bash
# One node: torchrun.sh [--config FILE] [--section.option value ...]
# A rank for each GPU, or RANKS of them (RANKS=2 launch/torchrun.sh ... on CPUs). The port is a free one, so that any
# number of runs share a node. Exit codes are those of spmd_rl.train.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) || gpus=0
# Set to nothing, or to -1, it hides them all.
if [[ -v CUDA_VISIBLE_DEVICES ]]; then
    gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep --count --invert-match --regexp='^-1$' --regexp='^$') || gpus=0
fi
ranks=${RANKS:-$gpus}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || { echo "torchrun.sh: no GPU found and RANKS is '${RANKS:-}': set RANKS" >&2; exit 2; }
if ((gpus > 0 && ranks > gpus)); then
    echo "torchrun.sh: RANKS is $ranks, but this node shows $gpus GPUs" >&2
    exit 2
fi
if ((gpus > 0 && ranks < gpus)); then  # the others' GPUs stay out of sight
    shown=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus - 1)))}
    CUDA_VISIBLE_DEVICES=$(cut -d, -f1-"$ranks" <<<"$shown")
    export CUDA_VISIBLE_DEVICES
fi
if ((${SLURM_STEP_NUM_TASKS:-1} > 1)); then
    echo "torchrun.sh: srun started $SLURM_STEP_NUM_TASKS tasks of it, $SLURM_STEP_NUM_TASKS x $ranks ranks:" \
        "use srun_torchrun.sh or srun_direct.sh" >&2
    exit 2
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec python "$root/launch/torchrun.py" --standalone --nproc-per-node="$ranks" -m spmd_rl.train "$@"
