"""The vLLM engine in this rank's process: generate, sleep, wake, take weights.

An engine is `tensor_parallel_size` neighbouring ranks under vLLM's external launcher: each rank calls
the same methods with the same arguments, and there is no server and no worker process. The engine starts
with dummy weights, and those of the model come from the policy, unless there is none.
"""

import contextlib
import enum
import glob
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spmd_rl.adoption import Adoption
from spmd_rl.batch import Completion, Prompt
from spmd_rl.config import Config, ConfigError, RolloutConfig
from spmd_rl.load_plan import LoadPlan, Unplannable, Weight, record
from spmd_rl.mesh import Mesh, preserved_process_state, say_once, used_bytes

SHARED_MEMORY = "spmd_rl"  # first part of the names in /dev/shm
SHARED_FORMAT = "spmd_rl"  # among vLLM's load formats
KEEPS_PRODUCTS = "vLLM keeps products of this attention's weights"  # MLA: they are made once, when it has loaded
STEP_EVALUATION = -1  # the "step" of evaluation in request seeds


class EngineState(enum.Enum):
    """What of the engine is on the device, in the only order that is safe to wake in."""

    ASLEEP = "asleep"
    WEIGHTS_AWAKE = "weights awake, not loaded"
    WEIGHTS_LOADED = "weights loaded, no KV cache"
    READY = "ready"
    HALF_LOADED = "half-loaded by a weight sync that failed"


@dataclass(frozen=True)
class Sampling:
    """How one call of `generate` samples."""

    num_generations: int
    max_tokens: int
    temperature: float | None = None
    """For evaluation, without the rollout's truncation and penalties, 0 is greedy; None samples as the rollout does."""


class Rollout:
    """One rank's part of a rollout engine."""

    def __init__(self, config: Config, mesh: Mesh, tokenizer: Any, sleeps: bool, reads_weights: bool = False,
                 shared: Sequence[Weight] = ()) -> None:
        """Build the engine; collective over all ranks, after the default process group. It ends up asleep.

        sleeps: whether it gives its memory away between rollouts; else it keeps it, and is never asleep. reads_weights:
        take those of the model's folder, where no policy will give any; it is ready then. shared: whole weights in this
        process that the engine's parameters are to be views of; why_not_shared then says whether they are. Raises
        ConfigError where vLLM is not installed or does not know the model.
        """
        self._config, self._mesh, self._tokenizer = config, mesh, tokenizer
        self._sleeps = sleeps
        self._frees = sleeps and mesh.device.type == "cuda"  # elsewhere it has no sleep mode
        prepare_environment(config, mesh)
        used_before = used_bytes(mesh.device)
        self.version: int | None = None
        self._load_plan: LoadPlan | None = None
        with preserved_process_state():
            self._vllm = _import_vllm(mesh)
            if mesh.device.type == "cpu":
                _name_shared_memory(mesh.all_gather(os.getpid())[0])
            arguments = engine_arguments(config, mesh, self._frees, shared)
            self._adoption = register_loader(shared) if shared else None
            if reads_weights:
                arguments["load_format"] = "auto"
            before = [weight.fingerprint(mesh.device) for weight in shared]
            self._llm: Any = self._start(arguments)
            if [weight.fingerprint(mesh.device) for weight in shared] != before:
                raise RuntimeError("vLLM wrote to the policy's weights while it started on them: set "
                                   "weight_sync.transport ipc")
        if self._adoption and not self._adoption.why_not:
            self._adoption.why_not = self._lost_views()
        self.state = EngineState.WEIGHTS_AWAKE  # and the KV cache, over weights that mean nothing
        if reads_weights:
            self.state, self.version = EngineState.READY, 0
        else:
            self.sleep()
        self.always_bytes = max(0, used_bytes(mesh.device) - used_before) if mesh.device.type == "cuda" else 0
        """Device memory that it has in every phase: what sleep leaves (CUDA graphs, kernels, buffers), or all of it. By
        the driver: what other processes took of the device meanwhile counts."""

    def _start(self, arguments: dict[str, Any]) -> Any:
        try:
            return self._vllm.LLM(**arguments)
        except (RuntimeError, ValueError) as error:
            if self._adoption and self._adoption.why_not:
                raise ConfigError(f"the engine cannot have the policy's weights as its own ({self._adoption.why_not}), "
                                  f"and could not start with others ({error}): set weight_sync.transport ipc, and "
                                  "raise rollout.gpu_memory_utilization where that is why") from error
            raise

    @property
    def is_ready(self) -> bool:
        """Whether it can generate."""
        return self.state is EngineState.READY

    @property
    def why_not_shared(self) -> str | None:
        """Why the engine has weights of its own; None where its parameters are views of the policy's."""
        return self._adoption.why_not if self._adoption else "the engine was built with its own"

    def _lost_views(self) -> str | None:
        """Which parameters are no longer the views that they became; None where all are."""
        assert self._adoption, "an engine with weights of its own"
        lost = self._llm.apply_model(self._adoption.lost)[0]
        return (f"{len(lost)} of the engine's parameters are not the policy's memory, {lost[0]} first: vLLM repacked "
                "them, or they moved") if lost else None

    # Sampling. --------------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Prompt], first_group: int, step: int, sampling: Sampling,
                 on_finished: Callable[[int, Completion], None] = lambda place, completion: None) -> list[Completion]:
        """Completions of this engine's prompts, `num_generations` each, in order; no prompts is no work.

        first_group: index in the step of prompts[0]; a completion's group counts from it. on_finished: called with
        place and completion as each ends, while the engine samples the others. Raises RuntimeError unless the engine is
        awake with whole weights.
        """
        if self.state is not EngineState.READY or self.version is None:
            raise RuntimeError(f"cannot generate: the engine is {self.state.value}, weights version {self.version}")
        places = [(first_group + p, prompt, s) for p, prompt in enumerate(prompts)
                  for s in range(sampling.num_generations)]
        if not places:
            return []
        parameters = [self._parameters(sampling, request_seed(self._config.run.seed, step, group, sample))
                      for group, _, sample in places]
        completions: dict[int, Completion] = {}

        def take(place: int, output: Any) -> None:
            group, _, sample = places[place]
            completion = completions[place] = self._completion(output, group, sample)
            text = self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            completion.text = before_stop(text, self._config.rollout.stop)
            on_finished(place, completion)

        with preserved_process_state(), self._finished_outputs(take):
            self._llm.generate([{"prompt_token_ids": prompt.token_ids} for _, prompt, _ in places], parameters,
                               use_tqdm=False)
        assert len(completions) == len(places), f"{len(completions)} outputs for {len(places)} requests"
        return [completions[place] for place in range(len(places))]

    @contextlib.contextmanager
    def _finished_outputs(self, take: Callable[[int, Any], None]) -> Iterator[None]:
        """In the block, `take` gets each request's place and output from the engine step that ends it: vLLM's
        `generate` hands them out at the end only."""
        engine = self._llm.llm_engine
        first = next(self._llm.request_counter) + 1  # ids of requests count up from here
        engine_step = engine.step

        def step() -> Any:
            outputs = engine_step()
            for output in outputs:
                if output.finished:
                    take(int(output.request_id) - first, output)
            return outputs

        engine.step = step
        try:
            yield
        finally:
            engine.step = engine_step

    def _parameters(self, sampling: Sampling, seed: int) -> Any:
        r = self._config.rollout
        shaped: dict[str, Any] = dict(
            temperature=sampling.temperature, seed=seed) if sampling.temperature is not None else dict(
            temperature=r.temperature, top_p=r.top_p, top_k=r.top_k or -1, min_p=r.min_p,
            repetition_penalty=r.repetition_penalty, presence_penalty=r.presence_penalty,
            frequency_penalty=r.frequency_penalty, seed=seed)
        return self._vllm.SamplingParams(
            **shaped, max_tokens=sampling.max_tokens, min_tokens=r.min_tokens, ignore_eos=r.ignore_eos,
            stop=r.stop or None, stop_token_ids=r.stop_token_ids or None, logprobs=0, flat_logprobs=True,
            # Only stop texts need text while sampling; the completions' texts are decoded at once afterwards.
            detokenize=bool(r.stop))

    def _completion(self, output: Any, group: int, sample: int) -> Completion:
        best = output.outputs[0]
        logprobs = best.logprobs
        sampled = [logprobs.logprobs[i] for i in logprobs.start_indices]  # the sampled token comes first
        assert self.version is not None
        return Completion(group, sample, list(output.prompt_token_ids), list(best.token_ids), sampled,
                          best.finish_reason, self.version)

    # Memory. ----------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Level 2: weights and KV cache leave the device and are gone. Asleep already is no work."""
        if self._sleeps and self.state is not EngineState.ASLEEP:
            if self._frees:
                self._llm.sleep(level=2)
            self.state, self.version = EngineState.ASLEEP, None

    def wake_weights(self) -> None:
        """Make room for the weights, which hold nothing until they are loaded."""
        if self.state is EngineState.ASLEEP:
            if self._frees:
                self._llm.wake_up(tags=["weights"])
            self.state = EngineState.WEIGHTS_AWAKE

    def wake_kv_cache(self) -> None:
        """Make room for the KV cache; only after the weights (vLLM 0.26 writes to unmapped memory otherwise)."""
        if self.state is EngineState.READY:
            return
        if self.state is not EngineState.WEIGHTS_LOADED:
            raise RuntimeError(f"cannot wake the KV cache: the engine is {self.state.value}; load weights first")
        if self._frees:
            self._llm.wake_up(tags=["kv_cache"])
        if not self._llm.reset_prefix_cache():  # its blocks were computed by older weights
            raise RuntimeError("vLLM did not reset its prefix cache: requests of an earlier call still hold blocks")
        self.state = EngineState.READY

    def pool_bytes(self, tag: str) -> int:
        """Device memory of "weights" or "kv_cache" when awake; 0 for an engine that never sleeps."""
        if not self._frees:
            return 0
        from vllm.device_allocator.cumem import CuMemAllocator

        pool = CuMemAllocator.get_instance().pointer_to_data.values()
        return sum(data.handle[1] for data in pool if data.tag == tag)

    # Weights. ---------------------------------------------------------------------------------------------------

    def expected_weights(self) -> set[str]:
        """Hugging Face names of all tensors that the engine's model needs: its fused ones taken apart."""
        return self._llm.apply_model(hf_names)[0]

    def load_weights(self, weights: Iterable[Weight], version: int, tied_head: str | None = None) -> None:
        """Take whole weights, streamed; the engine is of `version` once all are in.

        tied_head: name of the embedding that is the head too. Raises RuntimeError for an engine whose weights are
        asleep.
        """
        if self.state is EngineState.ASLEEP:
            raise RuntimeError("cannot load weights: the engine is asleep; wake its weights first")
        self.state, self.version = EngineState.HALF_LOADED, None
        if not self.why_not_shared:
            if lost := self._lost_views():
                raise RuntimeError(f"weight sync refused: {lost}; set weight_sync.transport ipc")
            self.state, self.version = EngineState.WEIGHTS_LOADED, version
            return
        if self._load_plan and (moved := self._load_plan.moved):
            say_once(f"warning: {len(moved)} of the engine's parameters have moved, {moved[0]} first: weights go layer "
                     "by layer from now on", sys.stderr)
            self._load_plan = None
        if self._load_plan:
            self._load_plan.load(weights)
        else:
            # In-process this is a plain call: the iterator is not pickled, and a layer's tensors at a time exist.
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._named(weights, tied_head)})
        self.state, self.version = EngineState.WEIGHTS_LOADED, version

    def _named(self, weights: Iterable[Weight], tied_head: str | None) -> Iterator[tuple[str, Tensor]]:
        for weight in weights:
            tensor = weight.whole(self._mesh.device)
            yield weight.name, tensor
            if weight.name == tied_head:
                yield "lm_head.weight", tensor  # vLLM on CPU has a repacked copy, which nothing else would update

    def plan_load(self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> LoadPlan:
        """What loading weights of these shapes and dtypes copies where. Raises Unplannable where it does more."""
        if self._llm.llm_engine.model_config.use_mla:
            raise Unplannable(KEEPS_PRODUCTS)

        def of_model(model: Any) -> LoadPlan:
            parameters = dict(model.named_parameters())
            if not all(p.numel() for p in parameters.values()):
                raise Unplannable("vLLM has repacked its weights")
            return record(parameters, shapes, model.load_weights)

        return self._llm.apply_model(of_model)[0]

    def use_plan(self, plan: LoadPlan | None) -> LoadPlan | None:
        """Load by it from now on, or layer by layer; returns what was used before."""
        before, self._load_plan = self._load_plan, plan
        return before

    def engine_parameters(self) -> dict[str, Tensor]:
        """vLLM's own, by its names."""
        return self._llm.apply_model(lambda model: {name: p.data for name, p in model.named_parameters()})[0]

    def close(self) -> None:
        """Shut the engine down. vLLM takes every process group with it, the default one too: leave together first."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm


def _import_vllm(mesh: Mesh) -> Any:
    try:
        import vllm
    except ImportError as error:
        extra = "gpu" if mesh.device.type == "cuda" else "cpu"
        raise ConfigError(f"the sampler is not installed: pip install 'spmd-rl[{extra}]' ({error})") from None
    return vllm


def register_loader(weights: Sequence[Weight]) -> Adoption:
    """Make SHARED_FORMAT a load format of vLLM's that copies nothing: parameters become views of these whole weights.
    Where they cannot, the engine starts with dummy weights of its own."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    adoption = Adoption()

    class Loader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_model(self, *args: Any, **kwargs: Any) -> Any:
            with adoption.in_scratch():
                return super().load_model(*args, **kwargs)

        def load_weights(self, model: Any, model_config: Any) -> None:
            if not adoption.take(model, weights, KEEPS_PRODUCTS if model_config.use_mla else None):
                DummyModelLoader(self.load_config).load_weights(model, model_config)

    register_model_loader(SHARED_FORMAT)(Loader)
    return adoption


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of the stop texts in it; the tokens go on to the end of the token that completed it."""
    return text[:min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def _name_shared_memory(job_pid: int) -> None:
    """Name the CPU engine's shared memory after this job, and remove what ended jobs of this user left.

    Under the external launcher vLLM names it alike in every job: two at once, or one after a killed one, cannot start.
    """
    from vllm.distributed.device_communicators import cpu_communicator

    def group_name(communicator: Any) -> str:
        return f"{SHARED_MEMORY}-{job_pid}-{communicator.unique_name}-{'-'.join(map(str, communicator.ranks))}"

    setattr(cpu_communicator._CPUSHMDistributed, "make_group_name", staticmethod(group_name))
    for path in glob.glob(f"/dev/shm/{SHARED_MEMORY}-*"):
        pid = os.path.basename(path).removeprefix(f"{SHARED_MEMORY}-").split("-")[0]
        # Another rank may take the name away meanwhile; an engine that runs needs its name no more.
        with contextlib.suppress(FileNotFoundError):
            if not os.path.exists(f"/proc/{pid}") and os.stat(path).st_uid == os.getuid():
                os.unlink(path)


def hf_names(engine_model: Any) -> set[str]:
    """Names of the engine's parameters as the checkpoint has them; a tied head is the embedding's."""
    fused = getattr(engine_model, "packed_modules_mapping", {})
    tied = engine_model.config.tie_word_embeddings
    names = {part for name, _ in engine_model.named_parameters() for part in parts_of(name, fused)}
    return names - {"lm_head.weight"} if tied else names


def parts_of(name: str, fused: Mapping[str, Sequence[str]]) -> list[str]:
    """The checkpoint's names of what an engine's parameter consists of, in order; fused: module -> modules."""
    module, _, kind = name.rpartition(".")
    parent, _, leaf = module.rpartition(".")
    return [".".join(filter(None, (parent, part, kind))) for part in fused.get(leaf, [leaf])]


def prepare_environment(config: Config, mesh: Mesh) -> None:
    """What vLLM reads from the environment, set before it is imported; the user's own values stay."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core in this process, not in a child
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings repeat at every sync
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if mesh.device.type == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(config.rollout.cpu_kv_cache_gib))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # ranks of one host would bind to the same cores


def engine_arguments(config: Config, mesh: Mesh, sleeps: bool, shared: Sequence[Weight] = ()) -> dict[str, Any]:
    """Arguments of vllm.LLM; the raw `vllm` section comes last (what our fields own is refused in it)."""
    r: RolloutConfig = config.rollout
    share = r.gpu_memory_utilization  # vLLM does not find weights of ours among what its start takes
    fixed: dict[str, Any] = {}
    if r.kv_cache_gib and mesh.device.type == "cuda":
        # It still wants this share of the device to be free at the start, and takes the cache from its own field.
        share = min(r.gpu_memory_utilization, 0.05)
        fixed = {"kv_cache_memory_bytes": int(r.kv_cache_gib * 2**30)}
    if mesh.device.type == "cpu":
        # After a part of a prompt vLLM turns its request's generator back, and on a CPU they cannot be.
        fixed = {"enable_chunked_prefill": False}
    return dict(
        model=config.model.path, dtype=config.model.dtype, trust_remote_code=config.model.trust_remote_code,
        load_format=SHARED_FORMAT if shared else "dummy", distributed_executor_backend="external_launcher",
        tensor_parallel_size=r.tensor_parallel_size, gpu_memory_utilization=share,
        enforce_eager=r.enforce_eager, max_model_len=config.max_model_len, seed=config.run.seed,
        enable_sleep_mode=sleeps,
        # Log-probs of what was sampled from: after temperature (vLLM's default ignores it) and truncation.
        logprobs_mode="processed_logprobs",
        generation_config="vllm",  # the model folder's sampling defaults do not reach training
    ) | fixed | config.vllm


def request_seed(run_seed: int, step: int, group: int, sample: int) -> int:
    """A request's own seed: unseeded requests draw from one global generator, whose state depends on the layout."""
    digest = hashlib.blake2b(f"{run_seed}/{step}/{group}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
