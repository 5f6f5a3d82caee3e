"""Gradient norms of the same sequences as many rows, for each stage and type: worker_accumulation.py MODEL OUT."""

import json
import sys

from spmd_rl.batch import Completion, pack
from spmd_rl.config import Config
from spmd_rl.mesh import Mesh
from spmd_rl.model import load_hf_config
from spmd_rl.policy import Policy
from spmd_rl.watchdog import leave

NUM_ROWS = 256


def main() -> None:
    model, out = sys.argv[1:]
    config = Config()
    config.model.path = model
    config.policy.optimizer, config.policy.max_grad_norm, config.policy.gradient_checkpointing = "sgd", 0.0, False
    config.mesh.device = "cpu"
    mesh = Mesh(config.mesh, 1, 0)
    rows = [pack([Completion(0, 0, [1, 2, 3], [4, 5], [0.0, 0.0], "stop", 0)], mesh.device) for _ in range(NUM_ROWS)]
    norms = {}
    for dtype, stage in [("float32", 2), *(("bfloat16", stage) for stage in range(4))]:
        config.model.dtype, config.policy.zero_stage = dtype, stage
        policy = Policy(config, mesh, load_hf_config(config.model))
        policy.forward_backward(rows, lambda mb, logprobs_N, entropy_N: logprobs_N.sum() / NUM_ROWS)
        norms[f"{dtype}-{stage}"] = policy.step().grad_norm
        policy.close()
    with open(out, "w") as file:
        json.dump(norms, file)
    mesh.close()


main()
leave(0)  # results are written; the tear-down of the interpreter now and then aborts
