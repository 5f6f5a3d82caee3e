"""The program with a CPU engine that keeps its weights as they are: ``plain.py`` and then the options of spmd_rl.train.

vLLM would repack them otherwise, and nothing could be compared bit by bit, or shared. ENGINE=repacked leaves it to
that; with ENGINE=apart its parameters turn out not to be views of the policy's memory while it starts on it.
"""

import os

import vllm._custom_ops

from spmd_rl import adoption, load_plan
from spmd_rl.train import main
from spmd_rl.watchdog import leave


def no_views(plan, weights):
    """In place of LoadPlan.shared_views."""
    raise load_plan.Unplannable("they lie apart")


if __name__ == "__main__":
    if os.environ.get("ENGINE") != "repacked":
        vllm._custom_ops._supports_onednn = False
    if os.environ.get("ENGINE") == "apart":
        adoption.LARGE_BYTES = 2**10  # a tiny model's parameters are placed too
        load_plan.LoadPlan.shared_views = no_views
    main()
    leave(0)
