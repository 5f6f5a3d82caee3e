"""The program with a CPU engine that keeps its weights as they are: ``plain.py`` and then the options of spmd_rl.train.

vLLM would repack them otherwise, and nothing could be compared bit by bit, or shared. ENGINE=repacked leaves it to
that; AUTO=gpu makes transport auto choose as on a GPU.
"""

import os

import vllm._custom_ops

from spmd_rl.config import Config
from spmd_rl.mesh import leave
from spmd_rl.train import main

if __name__ == "__main__":
    if os.environ.get("ENGINE") != "repacked":
        vllm._custom_ops._supports_onednn = False
    if os.environ.get("AUTO") == "gpu":
        shares_weights = Config.shares_weights
        setattr(Config, "shares_weights", lambda config, on_gpu: shares_weights(config, True))
    main()
    leave(0)
