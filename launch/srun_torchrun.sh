#!/usr/bin/env bash
# Inside of a SLURM job, one torchrun a node: srun_torchrun.sh [--config FILE] [--section.option value ...]
# A rank for each GPU of a node, or RANKS_PER_NODE of them. Exit codes are those of spmd_rl.train.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

[[ -n ${SLURM_JOB_ID:-} ]] || { echo "srun_torchrun.sh: not inside of a SLURM job (sbatch or salloc)" >&2; exit 2; }
gpus=${SLURM_GPUS_ON_NODE:-0}
ranks=${RANKS_PER_NODE:-$gpus}
[[ $ranks =~ ^[1-9][0-9]*$ ]] ||
    { echo "srun_torchrun.sh: the job has no GPUs and RANKS_PER_NODE is not set" >&2; exit 2; }
if ((gpus > 0 && ranks > gpus)); then
    echo "srun_torchrun.sh: $ranks ranks a node, but the job has $gpus GPUs a node" >&2
    exit 2
fi
# srun does not take it over from the job by itself.
options=()
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then options=(--cpus-per-task="$SLURM_CPUS_PER_TASK"); fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
    "${options[@]}" python "$root/launch/torchrun.py" --slurm --nproc-per-node="$ranks" -m spmd_rl.train "$@"
