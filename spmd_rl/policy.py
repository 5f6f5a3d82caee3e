"""The DeepSpeed engines: the policy that is trained, and the frozen reference.

Both take packed micro-batches and give log-probs. DeepSpeed averages gradients over the ranks; the loss
is a part of one sum over all ranks, so it is multiplied by their number, and DeepSpeed's own division by
accumulation steps is off.
"""

import contextlib
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import get_scheduler

from spmd_rl import attention, model
from spmd_rl.batch import MicroBatch
from spmd_rl.config import Config, ConfigError
from spmd_rl.flops import peak_tflops
from spmd_rl.layers import compile_layers
from spmd_rl.load_plan import Span, Weight
from spmd_rl.mesh import Mesh, say_once
from spmd_rl.offload import Storages, Tenant, reachable_storages
from spmd_rl.shards import Piece, Shards, cut

MASTER, WEIGHT = "master", "weight"
ENGINE_COUNTS = ("global_steps", "global_samples", "skipped_steps")
# Where DeepSpeed's optimizers keep fp32 masters; stage 3 empties the groups of the optimizer below outside its step.
MASTERS = ("fp32_groups", "fp32_groups_flat_partition", "single_partition_of_fp32_groups",
           "fp32_partitioned_groups_flat")


@dataclass
class StepResult:
    """What an optimizer step reports."""

    learning_rate: float
    grad_norm: float
    """Global norm before clipping."""
    is_applied: bool
    """False where the gradient was not finite: weights, moments and schedule stay as they were."""


@dataclass(frozen=True)
class Fragment:
    """A rank's part of a parameter: elements [start, start + count) of it, laid out flat, are [offset, offset + count)
    of `master`, the tensor that the base optimizer steps, and of its states."""

    name: str
    start: int
    count: int
    master: Tensor
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """The part's elements of the master, or of a state that is laid out like it."""
        return tensor.detach().view(-1)[self.offset:self.offset + self.count]


class Engine:
    """A DeepSpeed engine over a LogprobModel."""

    engine: Any

    def __init__(self, config: Config, mesh: Mesh, hf_config: Any, ds_config: dict[str, Any]) -> None:
        os.environ.setdefault("DS_ACCELERATOR", mesh.device.type)  # read when deepspeed is imported
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # Its CPU collectives are compiled at the first start, under a lock that a killed process leaves for ever.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_init_required=False)  # it takes over the default group; zero.Init needs it
        self._deepspeed, self._config, self._mesh = deepspeed, config, mesh
        self.zero_stage = ds_config["zero_optimization"]["stage"]
        self._temperature = config.rollout.temperature
        self._shard_index = mesh.mine(range(mesh.world_size))
        self._held: list[Weight] = []
        self._held_where: list[tuple[int, int]] = []
        if self.zero_stage == 3:
            # Without dtype, which it misreads where the accelerator has no fp16: it follows from ds_config.
            shard_init = deepspeed.zero.Init(config_dict_or_path=ds_config,
                                             zero_param_parallel_group=second_shards_group(ds_config))
            self.model = model.build_sharded(config.model, hf_config, config.policy.logprob_memory_gib, shard_init,
                                             self._shard_index)
        else:
            self.model = model.build(config.model, hf_config, config.policy.logprob_memory_gib)
        self.hf_config: Any = self.model.lm.config
        self.model.row_lengths = row_lengths(config.batch.max_tokens_per_microbatch, config.max_model_len)
        self.shape = model.shape(self.model.lm)
        compiled = config.policy.compile_layers
        if compiled is None:
            # Kernels of a compiler are not known to be the same ones in the next run.
            compiled = mesh.device.type == "cuda" and not config.mesh.full_determinism
        if compiled:
            compile_layers(self.model.lm)

    @property
    def row_block(self) -> int:
        """Packed rows are filled up to a multiple of this many tokens."""
        return 1 if self._mesh.device.type == "cpu" else attention.BLOCK

    @property
    def peak_tflops(self) -> float:
        """Of this rank's device; 0 where it is not known."""
        if self._config.metrics.peak_tflops or self._mesh.device.type == "cpu":
            return self._config.metrics.peak_tflops
        is_bf16 = self._config.model.dtype == "bfloat16"
        return peak_tflops(torch.cuda.get_device_name(self._mesh.device)) if is_bf16 else 0.0

    def _forward(self, mb: MicroBatch) -> tuple[Tensor, Tensor]:
        return self.engine(mb.input_ids_S, mb.positions_S, mb.segments_3S, mb.target_index_N, mb.target_ids_N,
                           self._temperature, mb.boundaries_B, mb.longest)

    @torch.no_grad()
    def score(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[Tensor, Tensor]]:
        """(logprobs_N, entropy_N) of each row, without gradient. Collective at stage 3."""
        self.engine.eval()
        return [self._forward(mb) for mb in micro_batches]

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """(Hugging Face name, parameter) in the model's order, a tied one once."""
        return self._named

    @cached_property
    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(self.model.lm.named_parameters())  # a walk over all modules: 2 ms of a weight sync

    @cached_property
    def tied_head_name(self) -> str | None:
        """Name of the embedding that is the output projection too; None where the two are apart."""
        head = self.model.lm.get_output_embeddings().weight
        names = [name for name, p in self.named_parameters() if p is head]
        embedding = self.model.lm.get_input_embeddings().weight
        return names[0] if embedding is head else None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape of the whole parameter."""
        return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self.named_parameters()}

    def _check_shapes(self, shards: Shards) -> None:
        """Raises ConfigError for shards of another model."""
        mine = self.shapes()
        other = sorted(name for name in mine.keys() | shards.shapes.keys() if mine.get(name) != shards.shapes.get(name))
        if other:
            first = other[0]
            raise ConfigError(f"model.path is {self._config.model.path!r}: the checkpoint is of another model; "
                              f"{len(other)} parameters differ, {first} among them ({shards.shapes.get(first)} there, "
                              f"{mine.get(first)} here)")

    def full_weights(self, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) in order, streamed; at stage 3 gathered by bucket. Collective there.

        A tensor is good until the next is asked for, or as long as the caller holds it.
        """
        for bucket in _buckets(self.named_parameters(), bucket_bytes):
            with self._gathered([p for _, p in bucket]):
                for name, parameter in bucket:
                    yield name, parameter.detach()

    def held_weights(self) -> list[Weight]:
        """This rank's parts of all weights where they lie now, in order: whole below stage 3, a shard there. The same
        list as before where they are views of the same storages, which may have been away in between."""
        kept = [getattr(p, "ds_tensor", p) for _, p in self.named_parameters()]
        where = [(t.untyped_storage()._cdata, int(t.storage_offset())) for t in kept]
        if where != self._held_where:
            self._held, self._held_where = self._views(), where
        return self._held

    def _views(self) -> list[Weight]:
        if self.zero_stage < 3:
            return [Weight.of(name, p.data) for name, p in self.named_parameters()]
        held = []
        for name, p in self.named_parameters():
            shard: Tensor = p.ds_tensor.data.view(-1)  # type: ignore[attr-defined]
            start = shard.numel() * self._shard_index
            mine = shard[:max(0, p.ds_numel - start)]  # type: ignore[attr-defined]  # the rest is padding
            spans = [Span(start, mine)] if mine.numel() else []
            held.append(Weight(name, tuple(p.ds_shape), p.dtype, spans))  # type: ignore[attr-defined]
        return held

    def storages(self) -> Storages:
        """All that the engine keeps on a device or on the host, by tenant, as it is now."""
        return {Tenant.REFERENCE: self._all_storages()}

    def _all_storages(self) -> list[torch.UntypedStorage]:
        return reachable_storages([self.engine.optimizer, list(self.model.parameters())], ("deepspeed", "torch"))

    @contextlib.contextmanager
    def _gathered(self, parameters: list[torch.nn.Parameter]) -> Iterator[None]:
        try:
            with self._deepspeed.zero.GatheredParameters(parameters, enabled=self.zero_stage == 3):
                yield
        finally:  # what it puts back, DeepSpeed shards twice
            model.drop_second_shards(parameters)

    def drop_second_shards(self) -> None:
        """Those of ZeRO++'s hpZ, which are planned for beside forward and backward alone."""
        model.drop_second_shards(p for _, p in self.named_parameters())

    def close(self) -> None:
        """Drop DeepSpeed's hooks and buffers; process groups end with the default one."""
        self.engine.destroy()


class Policy(Engine):
    """The trained model with its optimizer and schedule."""

    def __init__(self, config: Config, mesh: Mesh, hf_config: Any, shares_weights: bool = False) -> None:
        """Build the engine; collective. shares_weights: whether a sampler's parameters are to be views of its own."""
        self._nonfinite_in_a_row = 0
        ds_config = deepspeed_config(config, config.policy.zero_stage)
        super().__init__(config, mesh, hf_config, ds_config)
        self.recomputed = 0.0
        if config.policy.gradient_checkpointing:
            self.recomputed = model.checkpoint_blocks(self.model.lm, config.policy.gradient_checkpointing_every)
        if self.zero_stage == 0 and shares_weights:
            flatten(self.model, mesh.device)
        optimizer: Any = _make_optimizer(self.model, config, mesh.device)
        p = config.policy
        num_updates = config.run.max_steps * config.updates_per_step
        self._scheduler = get_scheduler(p.lr_scheduler_type, optimizer, p.warmup_steps, num_updates)
        is_unsharded_bf16 = self.zero_stage == 0 and config.model.dtype == "bfloat16"
        take_step = optimizer.step
        if is_unsharded_bf16:
            # DeepSpeed takes one on zero gradients there, which Adam would count, and which decays the weights.
            optimizer.step = lambda: None
        self.engine, *_ = self._deepspeed.initialize(model=self.model, optimizer=optimizer, config=ds_config,
                                                     lr_scheduler=self._scheduler)
        self.drop_second_shards()
        optimizer.step = take_step
        self.num_updates = 0
        self._is_last_row = True
        self._fp32_grads: dict[torch.nn.Parameter, Tensor] = {}
        if is_unsharded_bf16:
            for parameter in self.model.parameters():
                parameter.register_post_accumulate_grad_hook(self._accumulate_in_fp32)

    def forward_backward(self, micro_batches: Sequence[MicroBatch],
                         loss: Callable[[MicroBatch, Tensor, Tensor], Tensor]) -> None:
        """Add up the gradients of a whole optimizer step; every rank has the same number of rows.

        loss: from (row, logprobs_N, entropy_N) to the row's part of the loss over all ranks.
        """
        self.engine.train()
        for number, mb in enumerate(micro_batches, 1):
            # Without it ZeRO 1 and 2 keep the last row's gradient only.
            self._is_last_row = number == len(micro_batches)
            self.engine.set_gradient_accumulation_boundary(self._is_last_row)
            logprobs_N, entropy_N = self._forward(mb)
            part = loss(mb, logprobs_N, entropy_N)
            self.engine.backward(part * self._mesh.world_size, scale_wrt_gas=False)

    def _accumulate_in_fp32(self, parameter: torch.nn.Parameter) -> None:
        """Keep stage 0's bf16 gradients of all but the last row in fp32, which DeepSpeed does itself at stages 1-3."""
        grad = parameter.grad
        assert grad is not None, "a hook without its gradient"
        total = self._fp32_grads.pop(parameter, None)
        total = grad.float() if total is None else total.add_(grad)
        if self._is_last_row:
            grad.copy_(total)
        else:
            self._fp32_grads[parameter] = total
            parameter.grad = None

    def step(self) -> StepResult:
        """Clip and apply the gradient, or skip a gradient that is not finite (on all ranks alike) and say so.

        Raises FloatingPointError after policy.max_nonfinite_steps of the latter in a row.
        """
        learning_rate = self.engine.get_lr()[0]
        norm = self._unsharded_grad_norm() if self.zero_stage == 0 else None
        is_applied = norm is None or math.isfinite(norm)
        if is_applied:
            self.engine.step()
            is_applied = self.engine.was_step_applied()
        else:
            self.engine.zero_grad()  # at stage 0 in fp32 DeepSpeed would apply it
        self.num_updates += 1
        norm = float(self.engine.get_global_grad_norm()) if norm is None else norm
        self._nonfinite_in_a_row = 0 if is_applied else self._nonfinite_in_a_row + 1
        if not is_applied:
            self._report_skipped(norm)
        return StepResult(learning_rate, norm, is_applied)

    def _report_skipped(self, norm: float) -> None:
        count, limit = self._nonfinite_in_a_row, self._config.policy.max_nonfinite_steps
        text = (f"step {self._mesh.step}, phase {self._mesh.phase}: the gradient is not finite (norm {norm:g}); its "
                f"optimizer step was skipped on all ranks, {count} in a row (policy.max_nonfinite_steps {limit})")
        if count >= limit:
            raise FloatingPointError(text)
        say_once(f"warning: {text}", sys.stderr)

    def storages(self) -> Storages:
        """Weights, fp32 masters, moments, communication buffers, and all the rest as gradients; each storage once."""
        optimizer = self.engine.optimizer
        base = getattr(optimizer, "optimizer", optimizer)
        weights = [[p.data, getattr(p, "ds_tensor", p).data] for p in self.model.parameters()]
        masters: list[Any] = [[p.data for p in group["params"]] for group in base.param_groups]
        masters += [getattr(optimizer, name, None) for name in MASTERS]
        moments = list(base.state.values())
        found: dict[Tenant, list[torch.UntypedStorage]] = {}
        taken: set[int] = set()
        for tenant, roots in ((Tenant.WEIGHTS, weights), (Tenant.MASTERS, masters),
                              (Tenant.MOMENTS, moments), (Tenant.SCRATCH, getattr(optimizer, "ipg_buckets", None)),
                              (Tenant.GRADIENTS, None)):
            storages = (self._all_storages() if tenant is Tenant.GRADIENTS
                        else reachable_storages([roots], ("deepspeed",)))
            found[tenant] = [s for s in storages if s._cdata not in taken]
            taken |= {s._cdata for s in storages}
        return found

    def pieces(self) -> Iterator[Piece]:
        """This rank's part of the fp32 masters and of the optimizer's states, where they are now.

        Over all ranks each element is there once; at stage 0, where every rank has all, each takes a share.
        """
        parts = self._parts()
        for part in parts if self.zero_stage else self._mesh.share(parts):
            for kind, tensor in ((MASTER, part.master), *self._base_optimizer.state.get(part.master, {}).items()):
                if isinstance(tensor, Tensor):
                    has_range = tensor.shape == part.master.shape  # a count of steps has none
                    yield from cut(kind, part.name, part.start, part.of(tensor) if has_range else tensor)

    def progress(self) -> dict[str, int]:
        """What the engine counts."""
        return {"num_updates": self.num_updates, "nonfinite_in_a_row": self._nonfinite_in_a_row,
                "schedule_steps": self._scheduler.last_epoch} | {
                    name: getattr(self.engine, name) for name in ENGINE_COUNTS}

    @torch.no_grad()
    def load(self, folder: str, progress: dict[str, int]) -> None:
        """Take what `pieces` and `progress` gave, on any number of ranks and at any stage. Collective.

        The learning rate is the schedule's of this run at the step where that one was.
        """
        with Shards(folder) as shards:
            self._check_shapes(shards)
            if self.zero_stage == 3:
                self.engine.optimizer.checkpoint_event_prologue()  # small parameters are whole between forwards
            for part in self._parts():
                self._load_part(part, shards)
        self._weights_from_masters()
        self.num_updates, self._nonfinite_in_a_row = progress["num_updates"], progress["nonfinite_in_a_row"]
        for name in ENGINE_COUNTS:
            setattr(self.engine, name, progress[name])
        scheduler = self._scheduler
        scheduler.last_epoch = progress["schedule_steps"]
        rates = [base * rate(scheduler.last_epoch)
                 for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
        for group, learning_rate in zip(self._base_optimizer.param_groups, rates, strict=True):
            group["lr"] = learning_rate

    def _load_part(self, part: Fragment, shards: Shards) -> None:
        shards.read_into(part.of(part.master), MASTER, part.name, part.start)
        state = self._base_optimizer.state[part.master]
        for kind in shards.kinds(part.name):
            if kind == MASTER:
                continue
            if shards.is_scalar(kind, part.name):
                state[kind] = shards.scalar(kind, part.name).to(part.master.device)
                continue
            if kind not in state:
                state[kind] = torch.zeros_like(part.master)  # made in the first step otherwise
            shards.read_into(part.of(state[kind]), kind, part.name, part.start)

    def _parts(self) -> list[Fragment]:
        """Where this rank's parts are, in the order of the parameters."""
        optimizer = self.engine.optimizer
        masters = {}
        if hasattr(optimizer, "fp32_groups"):  # stage 0 in bf16
            masters = {weight: master for weights, group in zip(optimizer.fp16_groups, optimizer.fp32_groups)
                       for weight, master in zip(weights, group)}
        parts = []
        for name, p in self.named_parameters():
            if self.zero_stage == 3:
                group, offset, size = optimizer.grad_position[optimizer.get_param_id(p)]
                start = size * self._shard_index
                count = max(0, min(size, p.ds_numel - start))  # type: ignore[attr-defined]  # the rest is padding
                parts.append(Fragment(name, start, count, optimizer.fp32_partitioned_groups_flat[group], offset))
            elif self.zero_stage == 0:
                parts.append(Fragment(name, 0, p.numel(), masters.get(p, p), 0))
            elif (mapping := p._hp_mapping) is not None:  # type: ignore[attr-defined]
                mine, flat = mapping.lp_fragment_address, mapping.hp_fragment_address
                master = self._base_optimizer.param_groups[mapping.param_group_index]["params"][0]
                parts.append(Fragment(name, mine.start, mine.numel, master, flat.start))
        return [part for part in parts if part.count]

    def _weights_from_masters(self) -> None:
        """What DeepSpeed does at the end of a step. Collective."""
        optimizer = self.engine.optimizer
        if self.zero_stage == 3:
            for group in range(len(optimizer.fp32_partitioned_groups_flat)):
                optimizer._reassign_or_swap_out_partitioned_parameters(group)
            optimizer.checkpoint_event_epilogue()
        elif self.zero_stage:
            optimizer.update_lp_params()
        else:
            weights = dict(self.named_parameters())
            for part in self._parts():
                if part.master is not weights[part.name]:
                    weights[part.name].copy_(part.master)

    @property
    def _base_optimizer(self) -> torch.optim.Optimizer:
        """torch's, inside of DeepSpeed's."""
        return getattr(self.engine.optimizer, "optimizer", self.engine.optimizer)

    def _unsharded_grad_norm(self) -> float:
        """DeepSpeed reports none at stage 0; every rank holds the whole, reduced gradient."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        squares = [torch.linalg.vector_norm(g, dtype=torch.float64) ** 2 for g in grads]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


class Reference(Engine):
    """The model as it was at the start: forward only, no optimizer."""

    def __init__(self, config: Config, mesh: Mesh, hf_config: Any) -> None:
        """Sharded where the policy's weights are, whole on each rank elsewhere (DeepSpeed takes no other stage)."""
        stage = 3 if config.policy.zero_stage == 3 else 0
        ds_config = deepspeed_config(config, stage)
        super().__init__(config, mesh, hf_config, ds_config)
        self.model.requires_grad_(False)
        self.engine, *_ = self._deepspeed.initialize(model=self.model, config=ds_config)

    def score(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[Tensor, Tensor]]:
        """As for any engine."""
        scores = super().score(micro_batches)
        self.drop_second_shards()
        return scores

    @torch.no_grad()
    def move_towards(self, policy: Policy, share: float) -> None:
        """reference = share * policy + (1 - share) * reference, each rank its own part (TR-DPO, Gorbatovski 2024)."""
        self._release_whole_copies()
        for (_, mine), (_, new) in zip(self.named_parameters(), policy.named_parameters(), strict=True):
            target, source = (getattr(p, "ds_tensor", p).data for p in (mine, new))
            target.copy_(torch.lerp(target.float(), source.float(), share))

    def pieces(self) -> Iterator[Piece]:
        """This rank's part of the weights, where they are now; over all ranks each element is there once."""
        parts = self._parts()
        for name, start, flat in parts if self.zero_stage == 3 else self._mesh.share(parts):
            yield from cut(WEIGHT, name, start, flat)

    @torch.no_grad()
    def load(self, folder: str) -> None:
        """Take what `pieces` gave, on any number of ranks and at any stage."""
        self._release_whole_copies()
        with Shards(folder) as shards:
            self._check_shapes(shards)
            for name, start, flat in self._parts():
                shards.read_into(flat, WEIGHT, name, start)

    def _parts(self) -> list[tuple[str, int, Tensor]]:
        """(name, first element, this rank's elements laid out flat)."""
        parts = []
        for name, p in self.named_parameters():
            if self.zero_stage == 3:
                flat = p.ds_tensor.data.view(-1)  # type: ignore[attr-defined]
                start = flat.numel() * self._shard_index
                parts.append((name, start, flat[:max(0, p.ds_numel - start)]))  # type: ignore[attr-defined]
            else:
                parts.append((name, 0, p.data.view(-1)))
        return [part for part in parts if part[2].numel()]

    def _release_whole_copies(self) -> None:
        """ZeRO-3 keeps small parameters whole between forwards, and would use those whatever the shards become."""
        for _, parameter in self.named_parameters() if self.zero_stage == 3 else ():
            if parameter.ds_status.name == "AVAILABLE":  # type: ignore[attr-defined]
                parameter.partition()  # type: ignore[attr-defined]
        self.drop_second_shards()


def row_lengths(max_tokens: int, max_model_len: int) -> list[int]:
    """The lengths that attention is compiled for: half the token budget, the budget, and its doubles until the longest
    sequence fits. Few, so that all are met in a run's first steps; filler costs next to nothing there."""
    lengths = [attention.round_up(max_tokens // 2), attention.round_up(max_tokens)]
    while lengths[-1] < max_model_len:
        lengths.append(2 * lengths[-1])
    return lengths


def deepspeed_config(config: Config, stage: int) -> dict[str, Any]:
    """DeepSpeed's config from ours, with the raw `deepspeed` section merged in."""
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # rows differ from step to step: Policy says where a step ends
        "gradient_clipping": config.policy.max_grad_norm,  # 1.0 where the key is missing
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "zero_optimization": {
            "stage": stage,
            "memory_efficient_linear": False,  # it patches torch.nn.functional.linear in the whole process, vLLM's too
        },
        "zero_allow_untested_optimizer": True,  # torch's optimizers
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own compiles for a minute
        "steps_per_print": 10**9,
    }
    if config.model.dtype == "bfloat16" and stage > 0:
        # In bf16 a sum stops growing once an addend is below 2^-9 of it: the gradient of many rows would be too small.
        ours["data_types"] = {"grad_accum_dtype": "fp32"}
    return _merge(ours, config.deepspeed)


def second_shards_group(ds_config: dict[str, Any]) -> Any:
    """The ranks among which ZeRO++'s hpZ shards weights again, where an earlier engine made the group: DeepSpeed makes
    it once, and refuses to for a second one."""
    from deepspeed.utils import groups

    has_group = ds_config["zero_optimization"].get("zero_hpz_partition_size", 1) > 1
    return groups._get_zero_param_intra_parallel_group() if has_group else None  # all engines of a job have one size


def _merge(ours: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    merged = dict(ours)
    for key, value in raw.items():
        merged[key] = _merge(ours[key], value) if isinstance(value, dict) and isinstance(ours.get(key), dict) else value
    return merged


def is_vector(parameter: torch.nn.Parameter) -> bool:
    """Whether it is no matrix; a sharded parameter has its true shape in ds_shape."""
    return len(getattr(parameter, "ds_shape", parameter.shape)) < 2


def flatten(net: torch.nn.Module, device: torch.device) -> None:
    """Lay all parameters of a type out in one buffer of the device, as DeepSpeed does itself at stages 1 and 2."""
    for dtype in {p.dtype for p in net.parameters()}:
        parameters = sorted((p for p in net.parameters() if p.dtype == dtype), key=is_vector)
        flat = torch.cat([p.data.to(device).view(-1) for p in parameters])
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.data = part.view(parameter.shape)


def _make_optimizer(net: torch.nn.Module, config: Config, device: torch.device) -> torch.optim.Optimizer:
    p = config.policy
    named = [(name, param) for name, param in net.named_parameters() if param.requires_grad]
    # Matrices first: with biases between them, what vLLM fuses would be no neighbours in DeepSpeed's flat buffers.
    named.sort(key=lambda item: is_vector(item[1]))
    if p.optimizer == "sgd":
        return torch.optim.SGD([param for _, param in named], lr=p.learning_rate)
    groups = [{"params": [param for _, param in named], "weight_decay": p.weight_decay}]
    if p.weight_decay > 0:
        # Norm weights and biases do not decay.
        groups = [{"params": [param for _, param in named if not is_vector(param)], "weight_decay": p.weight_decay},
                  {"params": [param for _, param in named if is_vector(param)], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=p.learning_rate, betas=(p.adam_beta1, p.adam_beta2), eps=p.adam_epsilon,
                             fused=True)


def _buckets(named: Sequence[tuple[str, torch.nn.Parameter]], bucket_bytes: int,
             ) -> Iterator[list[tuple[str, torch.nn.Parameter]]]:
    """Neighbouring parameters of at most `bucket_bytes` together; a larger one alone."""
    bucket: list[tuple[str, torch.nn.Parameter]] = []
    size = 0
    for name, parameter in named:
        bytes_ = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        if bucket and size + bytes_ > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += bytes_
    if bucket:
        yield bucket
