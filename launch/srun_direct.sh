#!/usr/bin/env bash
# Inside of a SLURM job, one task a rank and no torchrun: srun_direct.sh [--config FILE] [--section.option value ...]
# RANKS_PER_NODE tasks a node, else the job's --ntasks-per-node, else one for each GPU. Exit codes are those of
# spmd_rl.train.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

[[ -n ${SLURM_JOB_ID:-} ]] || { echo "srun_direct.sh: not inside of a SLURM job (sbatch or salloc)" >&2; exit 2; }
gpus=${SLURM_GPUS_ON_NODE:-0}
ranks=${RANKS_PER_NODE:-${SLURM_NTASKS_PER_NODE:-$gpus}}
[[ $ranks =~ ^[1-9][0-9]*$ ]] ||
    { echo "srun_direct.sh: no GPUs, no --ntasks-per-node and no RANKS_PER_NODE say how many ranks" >&2; exit 2; }
if ((gpus > 0 && ranks > gpus)); then
    echo "srun_direct.sh: $ranks ranks a node, but the job has $gpus GPUs a node" >&2
    exit 2
fi
# Ranks open each other's GPU memory: every task sees all GPUs of its node.
options=()
if ((gpus > 0)); then options=(--gpu-bind=none); fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Left from an outer job or shell, they would win over SLURM's.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE
# srun does not take it over from the job by itself.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then options+=(--cpus-per-task="$SLURM_CPUS_PER_TASK"); fi
exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks=$((ranks * SLURM_JOB_NUM_NODES)) --ntasks-per-node="$ranks" \
    --kill-on-bad-exit=1 "${options[@]}" python -m spmd_rl.train "$@"
