"""From the policy's weights to the engine's.

Each sync has a version and a manifest (names, shapes, dtypes), which the ranks exchange by one
all_gather_object on the default process group before any tensor moves: ranks that differ are refused.
The plain transport feeds vLLM's reload with the policy's own tensors, or with gathered ones under ZeRO-3.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from spmd_rl.config import WeightSyncConfig
from spmd_rl.mesh import Mesh
from spmd_rl.policy import Policy
from spmd_rl.rollout import Rollout


@dataclass(frozen=True)
class Manifest:
    """What a rank is about to send."""

    version: int
    tensors: tuple[tuple[str, tuple[int, ...], str], ...]
    """(Hugging Face name, shape, dtype) in order."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, each once."""
        width = {"torch.bfloat16": 2, "torch.float32": 4}
        total = 0
        for _, shape, dtype in self.tensors:
            count = 1
            for size in shape:
                count *= size
            total += count * width[dtype]
        return total

    def digest(self) -> str:
        """Equal for equal manifests."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


class WeightSync:
    """Brings an engine to the policy's weights."""

    def __init__(self, config: WeightSyncConfig, mesh: Mesh, policy: Policy, rollout: Rollout) -> None:
        self._mesh, self._policy, self._rollout = mesh, policy, rollout
        self._bucket_bytes = config.bucket_mib * 2**20
        self.version = -1
        self._synced_updates = -1
        self._is_checked = False

    def sync(self) -> int:
        """Load the policy's weights as the next version; returns the bytes of the model. Collective.

        The engine's weights must be awake. Raises RuntimeError where ranks differ in names, order, shapes,
        dtypes or version.
        """
        manifest = self._manifest(self.version + 1)
        check_manifests(self._mesh.all_gather((manifest.version, manifest.digest(), manifest.tensors[:1])), manifest)
        if not self._is_checked:
            check_names(self._rollout.expected_weights(), {name for name, *_ in manifest.tensors})
            self._is_checked = True
        self._rollout.load_weights(self._weights(), manifest.version)
        self.version, self._synced_updates = manifest.version, self._policy.num_updates
        return manifest.num_bytes

    def check_current(self) -> None:
        """Raises RuntimeError where the policy was updated since the last sync: sampling would be off-policy unseen."""
        if self._synced_updates != self._policy.num_updates:
            raise RuntimeError(f"the engine has the weights of update {self._synced_updates}, the policy is at "
                               f"{self._policy.num_updates}: sync before sampling")

    def _manifest(self, version: int) -> Manifest:
        return Manifest(version, tuple((name, tuple(getattr(p, "ds_shape", p.shape)), str(p.dtype))
                                       for name, p in self._policy.named_parameters()))

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        tied_name = self._policy.tied_head_name
        for name, tensor in self._policy.full_weights(self._bucket_bytes):
            yield name, tensor
            if name == tied_name:
                # vLLM on CPU keeps a repacked copy of a tied head, which nothing else would update.
                yield "lm_head.weight", tensor


def check_names(expected: set[str], given: set[str]) -> None:
    """Raises RuntimeError, before anything is sampled, unless the policy has exactly the tensors the engine needs."""
    missing, unexpected = sorted(expected - given), sorted(given - expected)
    if missing or unexpected:
        raise RuntimeError(f"weight sync refused: the engine needs {len(missing)} tensors that the policy has not "
                           f"({missing[:8]}) and has no place for {len(unexpected)} that it has ({unexpected[:8]})")


def check_manifests(seen: list, mine: Manifest) -> None:
    """Raises RuntimeError that names the ranks whose manifest is not this rank's."""
    own = (mine.version, mine.digest())
    other = [rank for rank, (version, digest, _) in enumerate(seen) if (version, digest) != own]
    if other:
        raise RuntimeError(f"weight sync refused: ranks {other} would send other names, shapes, dtypes or another "
                           f"version than this rank's {len(mine.tensors)} tensors of version {mine.version}: "
                           f"{[(rank, *seen[rank][::2]) for rank in other[:4]]}")
