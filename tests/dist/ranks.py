"""What every worker of tests/dist begins and ends with."""

import contextlib
from collections.abc import Iterator

from spmd_rl.config import MeshConfig
from spmd_rl.mesh import Mesh


@contextlib.contextmanager
def one_rank(device: str = "cpu") -> Iterator[Mesh]:
    """This process as a rank of the job, deterministic on a GPU; an error in the block ends all ranks, and they leave
    together. `leave(0)` comes after it: the tear-down of the interpreter now and then aborts."""
    mesh = Mesh(MeshConfig(device=device, timeout_s=60, full_determinism=device == "cuda"), 1, 0)
    try:
        yield mesh
    except BaseException as error:
        mesh.fail(error)
    mesh.leave_together()
    mesh.close()
