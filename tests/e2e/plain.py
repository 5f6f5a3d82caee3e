"""The program with a CPU engine that keeps its weights as they are: ``plain.py`` and then the options of spmd_rl.train.

vLLM would repack them otherwise, and nothing could be compared bit by bit, or shared. ENGINE=repacked leaves it to
that.
"""

import os

import vllm._custom_ops

from spmd_rl.train import main
from spmd_rl.watchdog import leave

if __name__ == "__main__":
    if os.environ.get("ENGINE") != "repacked":
        vllm._custom_ops._supports_onednn = False
    main()
    leave(0)
