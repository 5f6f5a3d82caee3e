"""The program with a fault on one rank: ``failing.py PHASE RANK`` and then the options of spmd_rl.train.

The fault comes in the first step, in generation, in backward (after the first row, so that the peers stay inside a
collective), in the weight sync (in the middle of a gather) or in the second save (after its first files). It prints the
time, so that a test can measure how long the job outlives it. A fault in the reward needs none of this: `reward` below
is given as the user's own.
"""

import os
import sys
import time

PHASES = ("generation", "backward", "sync", "save")


class InjectedFault(Exception):
    pass


def fail(where):
    print(f"injected at {time.time()}", file=sys.stderr, flush=True)
    raise InjectedFault(f"a fault in {where}")


def reward(completions, **columns):
    """1 for all, but on the rank that the environment names a fault."""
    if os.environ["RANK"] == os.environ["FAILING_RANK"]:
        fail("reward")
    return [1.0] * len(completions)


def inject(phase):
    from spmd_rl.policy import Policy
    from spmd_rl.rollout import Rollout

    if phase == "generation":
        def generate(self, *args):
            fail(phase)

        Rollout.generate = generate
    elif phase == "backward":
        forward_backward = Policy.forward_backward

        def with_fault(self, micro_batches, loss):
            rows = []

            def failing_loss(*args):
                rows.append(args)
                return loss(*args) if len(rows) < 2 else fail(phase)

            assert len(micro_batches) > 1, "the fault needs a second row"
            forward_backward(self, micro_batches, failing_loss)

        Policy.forward_backward = with_fault
    elif phase == "sync":
        load_weights = Rollout.load_weights

        def with_broken_weights(self, weights, version, tied_head):
            def broken_weights():
                for number, weight in enumerate(weights):
                    if number == 5 and version == 1:  # the first sync is the start-up's
                        fail(phase)
                    yield weight

            load_weights(self, broken_weights(), version, tied_head)

        Rollout.load_weights = with_broken_weights
    elif phase == "save":
        from spmd_rl import shards

        write, saves = shards.write, []

        def broken_write(*args):
            saves.append(1)
            names = write(*args)
            if len(saves) == 2:
                fail(phase)
            return names

        shards.write = broken_write


if __name__ == "__main__":
    from spmd_rl import train

    chosen, rank, *options = sys.argv[1:]
    if chosen in PHASES and os.environ["RANK"] == rank:
        inject(chosen)
    train.main(options)
