"""From the policy's weights to the engine's.

Each sync has a version and a manifest (names, shapes, dtypes), which the ranks exchange by one all_gather_object on the
default process group, with the handles of their storages where those serve, before any byte moves: ranks that differ
are refused. Shards that come by handles are compared, once, with what DeepSpeed's own gathers give. The first sync
goes through vLLM's own layer-wise loading; where that turns out to be copies alone, later ones make the same copies
directly.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from spmd_rl.between_hosts import BetweenHosts
from spmd_rl.config import ConfigError, WeightSyncConfig
from spmd_rl.load_plan import LoadPlan, Unplannable, Weight
from spmd_rl.mesh import Mesh, say_once
from spmd_rl.policy import Policy
from spmd_rl.rollout import Rollout
from spmd_rl.transports import Gather, Ipc, Shared, Transport, why_not_ipc


@dataclass(frozen=True)
class Manifest:
    """What a rank is about to send."""

    tensors: tuple[tuple[str, tuple[int, ...], str], ...]
    """(Hugging Face name, shape, dtype) in order."""

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all tensors, each once."""
        width = {"torch.bfloat16": 2, "torch.float32": 4}
        return sum(math.prod(shape) * width[dtype] for _, shape, dtype in self.tensors)

    def digest(self) -> str:
        """Equal for equal manifests."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


class WeightSync:
    """Brings an engine to the policy's weights."""

    def __init__(self, config: WeightSyncConfig, mesh: Mesh, policy: Policy, rollout: Rollout,
                 weights_stay: bool) -> None:
        """Chooses the transport; collective. weights_stay: whether the policy's weights never leave the device.

        Raises ConfigError where the transport that weight_sync.transport names cannot serve.
        """
        self._mesh, self._policy, self._rollout = mesh, policy, rollout
        self._manifest = Manifest(tuple((name, shape, str(p.dtype)) for (name, p), shape in zip(
            policy.named_parameters(), policy.shapes().values(), strict=True)))
        self._digest = self._manifest.digest()
        self.version = -1
        self._synced_updates = -1
        self._is_first = True
        self.how = "not yet"
        self._gather = Gather(lambda: policy.full_weights(config.bucket_mib * 2**20))
        self._transport: Transport = self._gather
        self._is_sharded = policy.zero_stage == 3 and mesh.world_size > 1
        self._reason = ""
        if mesh.all_true(not rollout.why_not_shared):
            self._transport = Shared([parameter for _, parameter in policy.named_parameters()])
        elif config.transport == "shared":
            raise ConfigError("weight_sync.transport is 'shared': "
                              f"{rollout.why_not_shared or 'another rank cannot'}; set auto or ipc")
        elif config.transport in ("auto", "ipc"):
            is_forced = config.transport == "ipc"
            why_not = why_not_ipc(mesh, policy.held_weights(), is_forced)
            if why_not and is_forced:
                raise ConfigError(f"weight_sync.transport is 'ipc': {why_not}; set auto or gather")
            if not why_not:
                self._transport = self._ipc(config, is_forced, weights_stay)
            if why_not:
                self._reason = f" (not ipc: {why_not})"

    def _ipc(self, config: WeightSyncConfig, is_forced: bool, weights_stay: bool) -> Ipc:
        mesh, held = self._mesh, self._policy.held_weights
        if self._is_sharded and len(set(mesh.all_gather(mesh.host))) > 1:
            self._reason = " (between hosts by gathers)"
            return BetweenHosts(mesh, held, weights_stay, config.bucket_mib * 2**20)
        return Ipc(mesh, held, is_forced or self._is_sharded, weights_stay)

    @property
    def transport(self) -> str:
        """Its name."""
        return self._transport.name

    def sync(self) -> int:
        """Load the policy's weights as the next version; returns the bytes of the model. Collective.

        The engine's weights must be awake. Raises RuntimeError where ranks differ in names, order, shapes, dtypes or
        version.
        """
        version, tensors = self.version + 1, self._manifest.tensors
        messages = self._mesh.all_gather((version, self._digest, tensors[:1], self._transport.offer()))
        check_manifests([message[:3] for message in messages], (version, self._digest), self._manifest)
        offers = [message[3] for message in messages]
        if self._is_first:
            check_names(self._rollout.expected_weights(), {name for name, *_ in tensors})
            if self._is_sharded and self._transport is not self._gather:
                check_bits(self._mesh, self._transport.weights(offers), self._gather.weights(offers))
        self._rollout.load_weights(self._transport.weights(offers), version, self._policy.tied_head_name)
        if self._is_first:
            if self.transport != Shared.name:
                self._plan_ahead(lambda: self._transport.weights(offers))
            else:
                self.how = "nothing to copy"
            say_once(f"weight sync: {self.transport}{self._reason}, {self.how}")
            self._is_first = False
        self._transport.release()
        self.version, self._synced_updates = version, self._policy.num_updates
        return self._manifest.num_bytes

    def check_current(self) -> None:
        """Raises RuntimeError where the policy was updated since the last sync: sampling would be off-policy unseen."""
        if self._synced_updates != self._policy.num_updates:
            raise RuntimeError(f"the engine has the weights of update {self._synced_updates}, the policy is at "
                               f"{self._policy.num_updates}: sync before sampling")

    def _plan_ahead(self, weights: Callable[[], Iterator[Weight]]) -> None:
        """Note what loading copies where, and use it if it gives, bit for bit, what the engine has now. Collective."""
        plan, reason = self._plan()
        # All or none: a gather is collective.
        if self._mesh.all_true(plan is not None):
            assert plan is not None, "this rank has one too"
            if other := plan.differences(weights()):
                reason = f"{other[0]} would have other bits"
            plan = plan if self._mesh.all_true(not other) else None
        else:
            plan = None
        self._rollout.use_plan(plan)
        self.how = f"{plan.num_copies} copies" if plan else f"layer by layer ({reason or 'as on another rank'})"

    def _plan(self) -> tuple[LoadPlan | None, str]:
        shapes = {name: (shape, getattr(torch, dtype.removeprefix("torch.")))
                  for name, shape, dtype in self._manifest.tensors}
        try:
            return self._rollout.plan_load(shapes), ""
        except Unplannable as error:
            return None, str(error).split("\n", maxsplit=1)[0]


def check_names(expected: set[str], given: set[str]) -> None:
    """Raises RuntimeError, before anything is sampled, unless the policy has exactly the tensors the engine needs."""
    missing, unexpected = sorted(expected - given), sorted(given - expected)
    if missing or unexpected:
        raise RuntimeError(f"weight sync refused: the engine needs {len(missing)} tensors that the policy has not "
                           f"({missing[:8]}) and has no place for {len(unexpected)} that it has ({unexpected[:8]})")


def check_bits(mesh: Mesh, came: Iterable[Weight], gathered: Iterable[Weight]) -> None:
    """Raises RuntimeError on all ranks where weights that came by handles differ, on any of them, from those that
    DeepSpeed gathered. Collective."""
    # One after the other: both are collective, and a weight is good until the next is asked for.
    seen, right = ([(weight.name, (weight.shape, weight.dtype, weight.fingerprint(mesh.device))) for weight in weights]
                   for weights in (came, gathered))
    wrong = sorted({name for name, _ in set(seen) ^ set(right)}) or ["their order"] * (seen != right)
    if found := [(rank, names[:4]) for rank, names in enumerate(mesh.all_gather(wrong)) if names]:
        raise RuntimeError(f"weight sync refused: by handles came other bits than DeepSpeed gathers, (rank, weights) "
                           f"{found[:4]}: set weight_sync.transport gather, and report it")


def check_manifests(seen: list, own: tuple[int, str], mine: Manifest) -> None:
    """Raises RuntimeError that names the ranks whose (version, digest) is not this rank's `own`."""
    other = [rank for rank, (theirs, digest, _) in enumerate(seen) if (theirs, digest) != own]
    if other:
        raise RuntimeError(f"weight sync refused: ranks {other} would send other names, shapes, dtypes or another "
                           f"version than this rank's {len(mine.tensors)} tensors of version {own[0]}: "
                           f"{[(rank, *seen[rank][::2]) for rank in other[:4]]}")
