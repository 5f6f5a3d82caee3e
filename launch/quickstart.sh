#!/usr/bin/env bash
# From a fresh checkout to a trained model: quickstart.sh [--seed N]
# Sets up .venv, makes a tiny model and prompts in data/quickstart where absent, and trains with GRPO on two CPU ranks, or
# one GPU, into runs/quickstart (runs/quickstart-N for another seed than 0); an earlier run's files there go into
# earlier-N. The seed is that of prompts and training; the starting model is made once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seed=0
while (($#)); do
    case $1 in
        --seed) seed=${2:?--seed needs a number}; shift 2 ;;
        *) echo "usage: quickstart.sh [--seed N]" >&2; exit 2 ;;
    esac
done
[[ $seed =~ ^[0-9]+$ ]] || { echo "quickstart.sh: --seed $seed is not a whole number of 0 or more" >&2; exit 2; }

data=data/quickstart
model=$data/model train=$data/train-$seed.jsonl heldout=$data/heldout-$seed.jsonl
run=runs/quickstart
if ((seed != 0)); then run=$run-$seed; fi

# Files are renamed to their last name when whole, so that what an interrupted run left is never reused.
make_prompts() {  # seed, training file, held-out file, further options
    [[ -e $2 && -e $3 ]] && return
    python tools/make_prompts.py --task chain_sum --option max_terms=2 --option min_digits=2 --option max_digits=2 \
        --seed "$1" --train "$2.part" --heldout "$3.part" "${@:4}"
    mv "$2.part" "$2"
    mv "$3.part" "$3"
}

make_model() {
    [[ -e $model ]] && return
    make_prompts 1000000 $data/sft-train.jsonl $data/sft-heldout.jsonl --num_heldout 512
    rm -rf $model.part
    python tools/make_model.py $model.part --preset tiny --sft $data/sft-train.jsonl --sft_accuracy 0.35 \
        --heldout $data/sft-heldout.jsonl
    mv $model.part $model
}

bash launch/setup_env.sh gym
source .venv/bin/activate
# One thread a rank on two cores; libraries' notes about their own future would drown the lines of metrics.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONWARNINGS=ignore::FutureWarning
make_prompts "$seed" "$train" "$heldout"
OMP_NUM_THREADS=$(nproc) make_model
# Two ranks on a CPU; one on a GPU, whose sampler does not run on CPUs.
ranks=2 device=(--mesh.device cpu)
if nvidia-smi >/dev/null 2>&1; then
    ranks=1 device=(--mesh.device cuda --model.dtype bfloat16 --rollout.gpu_memory_utilization 0.3)
    CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
    export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*}
fi
torchrun --standalone --nproc_per_node $ranks -m spmd_rl.train --config launch/configs/quickstart.yaml \
    --model.path $model --data.train "$train" --data.eval "$heldout" --run.seed "$seed" --run.output_dir $run \
    --checkpoint.resume never "${device[@]}"
spmd-rl report $run
echo "starting model  $model"
echo "prompts         $train, $heldout"
echo "run             $run:"
ls $run
