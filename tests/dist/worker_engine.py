"""One rank of test_engine.py: the real program's parts around one engine, with the policy changed from cell to cell.

    torchrun --nproc_per_node N worker_engine.py CONFIG.yaml RESULTS.json CELL [CELL ...]

RESULTS.json gets {cell: [what each rank found]}. The functions whose names begin with `cell_` are the cells.
"""

import copy
import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from phases import saved_in_phases

from spmd_rl import step as step_module
from spmd_rl.batch import Completion, pack
from spmd_rl.checkpoint import Saver
from spmd_rl.config import parse
from spmd_rl.job import load_inputs, memory_plan, storages
from spmd_rl.losses import clipped_surrogate
from spmd_rl.memory import MOVABLE, Memory
from spmd_rl.mesh import Mesh
from spmd_rl.metrics import Metrics
from spmd_rl.model import load_hf_config
from spmd_rl.offload import HostMemory
from spmd_rl.policy import Policy, Reference
from spmd_rl.prompts import PromptSampler
from spmd_rl.rollout import Rollout, Sampling
from spmd_rl.step import Parts
from spmd_rl.watchdog import leave
from spmd_rl.weight_sync import WeightSync

FIXED_SEED = 5
LONG_PROMPT = 300
LATE_S = {"gather": 10, "ipc": 2}


def process_state():
    """What building an engine and sampling must not change."""
    return {
        "python": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        "numpy": hashlib.sha256(repr(np.random.get_state()[1].tolist()).encode()).hexdigest(),
        "torch": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "environment": dict(os.environ),
        "num_threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()),
    }


class Bench:
    """One engine, and parts around it for as many policies as are asked for."""

    def __init__(self, config_path):
        self.config, _ = parse(["--config", config_path])
        world_size = int(os.environ["WORLD_SIZE"])
        self.inputs = load_inputs(self.config, world_size)
        self.mesh = Mesh(self.config.mesh, self.config.rollout.tensor_parallel_size, self.config.run.seed)
        for _ in range(3):  # generators somewhere in their course, not where a seed puts them
            random.random(), np.random.rand(), torch.rand(1)
        self.states = {"before": process_state()}
        self.rollout = Rollout(self.config, self.mesh, self.inputs.tokenizer, sleeps=True)
        self.states["engine built"] = process_state()
        self.engine_calls = []
        engine_generate = self.rollout._llm.generate

        def recorded(*args, **kwargs):
            outputs = engine_generate(*args, **kwargs)
            self.engine_calls.append(outputs)
            return outputs

        self.rollout._llm.generate = recorded

    def parts(self, zero_stage, *, temperature=1.0, beta=0.0, recompute=False, learning_rate=0.1, user_loss=None,
              transport="auto"):
        """Parts of a fresh policy on the engine, not yet synced."""
        config = self.config
        config.policy.zero_stage, config.policy.learning_rate = zero_stage, learning_rate
        config.loss.beta, config.loss.recompute_old_logprobs = beta, recompute
        config.rollout.temperature = temperature
        own = copy.deepcopy(config)
        own.weight_sync.transport = transport
        own.memory.swap = "always"  # on a CPU nothing is freed by it, but everything takes its turns
        metrics = Metrics(self.mesh, [])
        policy = Policy(own, self.mesh, load_hf_config(own.model))
        reference = Reference(own, self.mesh, load_hf_config(own.model)) if beta else None
        return Parts(
            config=own, mesh=self.mesh, metrics=metrics, tokenizer=self.inputs.tokenizer,
            sampler=PromptSampler(self.inputs.train_prompts, own.batch.prompts_per_step, own.run.seed, True),
            rewards=self.inputs.rewards, rollout=self.rollout, policy=policy, reference=reference,
            weight_sync=WeightSync(own.weight_sync, self.mesh, policy, self.rollout, weights_stay=False),
            memory=Memory(self.mesh, self.rollout, lambda: storages(policy, reference), HostMemory(pinned=False),
                          metrics, memory_plan(own, self.inputs, self.mesh.world_size, None)), user_loss=user_loss)

    @staticmethod
    def drop(parts):
        parts.memory.enter("train")
        parts.memory.wait_for_step()
        parts.policy.close()
        if parts.reference:
            parts.reference.close()

    def fixed_completions(self):
        """Six sequences of random tokens, the same on every rank."""
        draw = random.Random(FIXED_SEED)
        made = []
        for number in range(6):
            prompt = [draw.randrange(256) for _ in range(draw.randrange(1, 12))]
            ids = [draw.randrange(258) for _ in range(draw.randrange(2, 10))]
            made.append(Completion(number, 0, prompt, ids, [0.0] * len(ids), "length", 0))
        return made

    def engine_logprobs(self):
        """The engine's log-probs of the fixed completions' tokens, one list."""
        import vllm

        parameters = vllm.SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, seed=0, detokenize=False)
        completions = self.fixed_completions()
        outputs = self.rollout._llm.generate(
            [{"prompt_token_ids": c.prompt_ids + c.token_ids} for c in completions], parameters, use_tqdm=False)
        self.engine_calls.pop()
        found = []
        for completion, output in zip(completions, outputs, strict=True):
            scored = output.prompt_logprobs[len(completion.prompt_ids):]
            found += [entry[token].logprob for entry, token in zip(scored, completion.token_ids, strict=True)]
        return found

    def policy_logprobs(self, parts):
        """The policy's log-probs of the same tokens."""
        rows = [pack([completion], self.mesh.device) for completion in self.fixed_completions()]
        with parts.memory.holding(MOVABLE):
            return torch.cat([logprobs_N for logprobs_N, _ in parts.policy.score(rows)]).tolist()

    def tokens(self, parts, step=0):
        """What this rank's engine samples for the step's prompts."""
        prompts = parts.sampler.draw(step)
        mine = self.mesh.engine_share(range(len(prompts)))
        sampling = Sampling(parts.config.rollout.num_generations, parts.config.rollout.max_completion_length)
        sampled = self.rollout.generate([prompts[i] for i in mine], mine[0], step, sampling)
        return [c.token_ids for c in sampled]


def error_of(call, *arguments):
    """'Type: message' of what the call raises, or None."""
    try:
        call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# Cells. -----------------------------------------------------------------------------------------------------------


def cell_engine_states(bench):
    """Calls out of order, then a load that fails in its middle, then a whole sync."""
    rollout, parts = bench.rollout, bench.parts(3)
    found = {"state when built": rollout.state.value}
    prompts = parts.sampler.draw(0)
    call = (prompts, 0, 0, Sampling(1, 2))
    found["generate asleep"] = error_of(rollout.generate, *call)
    found["load asleep"] = error_of(rollout.load_weights, [], 0)
    found["wake cache asleep"] = error_of(rollout.wake_kv_cache)
    parts.memory.enter("sync")
    found["generate without weights"] = error_of(rollout.generate, *call)
    found["wake cache without weights"] = error_of(rollout.wake_kv_cache)

    transport = parts.weight_sync._transport
    whole_weights = transport.weights

    compared = []

    def broken_weights(offers):
        if not compared and parts.weight_sync.transport == "ipc":
            compared.append(True)  # the first sync looks at all of them before the engine gets any
            yield from whole_weights(offers)
            return
        for number, weight in enumerate(whole_weights(offers)):
            if number == 9:
                raise OSError("the weights end here")
            yield weight

    transport.weights = broken_weights
    found["broken sync"] = error_of(parts.weight_sync.sync)
    found["state after broken sync"] = rollout.state.value
    found["generate half-loaded"] = error_of(rollout.generate, *call)
    found["wake cache half-loaded"] = error_of(rollout.wake_kv_cache)
    found["enter rollout half-loaded"] = error_of(parts.memory.enter, "rollout")
    transport.weights = whole_weights
    step_module.sync(parts)
    found["state after whole sync"] = rollout.state.value
    found["engine"], found["policy"] = bench.engine_logprobs(), bench.policy_logprobs(parts)

    # The same from an engine that was ready.
    parts.memory.enter("train")
    found["generate asleep again"] = error_of(rollout.generate, *call)
    parts.memory.enter("sync")
    transport.weights = broken_weights
    found["second broken sync"] = error_of(parts.weight_sync.sync)
    transport.weights = whole_weights
    step_module.sync(parts)
    found["engine again"] = bench.engine_logprobs()
    bench.drop(parts)
    return found


def cell_sync(bench):
    """For each ZeRO stage: log-probs of fixed tokens after the first sync and after a step, by engine and policy."""
    found = []
    for stage in range(4):
        parts = bench.parts(stage)
        step_module.sync(parts)
        first = {"engine": bench.engine_logprobs(), "policy": bench.policy_logprobs(parts)}
        metrics = step_module.train_step(parts, 0)
        then = {"engine": bench.engine_logprobs(), "policy": bench.policy_logprobs(parts)}
        found.append({"first": first, "then": then, "version": bench.rollout.version,
                      "sync_gib": metrics["perf/sync_gib"]})
        bench.drop(parts)
    return found


def cell_tokens_over_steps(bench):
    """The same requests before, and after each of two steps, at learning rate 0 and at a real one."""
    found = {}
    for name, learning_rate, stage in (("frozen", 0.0, 2), ("real", 0.1, 2), ("frozen sharded", 0.0, 3)):
        parts = bench.parts(stage, learning_rate=learning_rate)
        step_module.sync(parts)
        found[name] = [bench.tokens(parts)]
        for step in range(2):
            step_module.train_step(parts, step)
            found[name].append(bench.tokens(parts))
        bench.drop(parts)
    return found


def cell_first_step(bench):
    """First steps on unchanged weights, and a second one, with and without recomputed old log-probs."""
    found = {}
    for temperature, recompute, stage in ((1.0, False, 3), (1.0, True, 0), (0.5, False, 1), (0.5, True, 3)):
        seen = {"ratio": 0.0, "kl": 0.0, "sampler": 0.0}

        def loss(inputs, config, seen=seen):
            ratio = (inputs.logprobs_N.detach() - inputs.old_logprobs_N).exp()
            difference = inputs.ref_logprobs_N - inputs.logprobs_N.detach()
            if ratio.numel():
                seen["ratio"] = max(seen["ratio"], float((ratio - 1).abs().max()))
                seen["kl"] = max(seen["kl"], float((torch.expm1(difference) - difference).abs().max()))
            return clipped_surrogate(inputs, config)

        parts = bench.parts(stage, temperature=temperature, beta=0.1, recompute=recompute, user_loss=loss)
        before = weights_digest(parts.reference)
        step_module.sync(parts)
        first = step_module.train_step(parts, 0)
        largest = dict(seen)
        seen.update(ratio=0.0, kl=0.0)
        second = step_module.train_step(parts, 1)
        with parts.memory.holding(MOVABLE):
            found[f"{temperature} {'recomputed' if recompute else 'detached'}"] = {
                "first": first, "second": second, "largest_first": largest, "largest_second": dict(seen),
                "reference_same": weights_digest(parts.reference) == before,
                "policy_same": weights_digest(parts.policy) == before, "reference_stage": parts.reference.zero_stage,
                "reference_shapes": [list(t.shape) for _, t in parts.reference.full_weights(2**20)],
                "policy_shapes": [list(t.shape) for _, t in parts.policy.full_weights(2**20)]}
        bench.drop(parts)
    return found


def weights_digest(engine):
    digest = hashlib.sha256()
    for name, tensor in engine.full_weights(2**20):
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def cell_trained_tokens(bench):
    """What the engine reported for a step's requests, and what reached the loss as targets."""
    parts = bench.parts(2)
    parts.config.batch.shared_prompt = False  # a sequence is one segment then, prompt and completion
    step_module.sync(parts)
    trained, targets_match = [], []
    forward_backward = parts.policy.forward_backward

    def recorded(micro_batches, loss):
        for mb in micro_batches:
            targets_match.append(torch.equal(mb.input_ids_S[mb.target_index_N + 1], mb.target_ids_N))
            for number in mb.sequence_N.unique().tolist():
                own_S = mb.segments_3S[0]
                row = mb.input_ids_S[own_S == own_S[mb.target_index_N[mb.sequence_N == number][0]]].tolist()
                targets = mb.target_ids_N[mb.sequence_N == number].tolist()
                logprobs = mb.sampler_logprobs_N[mb.sequence_N == number].tolist()
                trained.append([row[:len(row) - len(targets)], row[len(row) - len(targets):], targets, logprobs])
        forward_backward(micro_batches, loss)

    parts.policy.forward_backward = recorded
    bench.engine_calls.clear()
    completions = step_module.sample(parts, 0)
    outputs = [[list(o.prompt_token_ids), list(o.outputs[0].token_ids), o.outputs[0].finish_reason]
               for o in bench.engine_calls.pop()]
    step_module.learn(parts, completions)
    metrics = parts.metrics.reduce()
    bench.drop(parts)
    return {"engine": outputs, "trained": trained, "targets_match": all(targets_match), "metrics": metrics,
            "prompts": [prompt.token_ids for prompt in parts.sampler.draw(0)]}


def cell_process_state(bench):
    """Generators, environment and thread counts before the engine, after it, and after sampling; the data order."""
    parts = bench.parts(0)
    step_module.sync(parts)
    bench.states["before generate"] = process_state()
    bench.tokens(parts)
    bench.states["generated"] = process_state()
    torch.set_num_threads(3)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(bench.states["before"]["num_threads"])
    order = {seed: [[p.row for p in PromptSampler(bench.inputs.train_prompts, 4, seed, True).draw(s)]
                    for s in range(20)] for seed in (1, 2)}
    bench.drop(parts)
    return {"states": bench.states, "threads_after_set": num_threads, "order": order}


def cell_uneven_engines(bench):
    """An engine a rank, 0 prompts on the first and 5 on the second; then a collective on the default group."""
    parts = bench.parts(1)
    step_module.sync(parts)
    prompts = [*parts.sampler.draw(0), *parts.sampler.draw(1)]
    share = bench.mesh.mine([prompts[:0], prompts[2:7]])
    sampled = bench.rollout.generate(share, 2, 0, Sampling(1, 4))
    ones = torch.ones(3)
    torch.distributed.all_reduce(ones)
    bench.drop(parts)
    return {"prompts": [c.prompt_ids for c in sampled], "wanted": [p.token_ids for p in share],
            "groups": [c.group for c in sampled], "lengths": [len(c.token_ids) for c in sampled],
            "world_size": torch.distributed.get_world_size(), "sum": ones.tolist()}


def cell_save_phases(bench):
    """The same policy saved in each phase."""
    parts = bench.parts(2)
    step_module.sync(parts)
    step_module.train_step(parts, 0)
    for folder in bench.mesh.on_main(lambda: [Path(parts.config.run.output_dir)]):
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text("")
    bench.mesh.barrier()
    found = saved_in_phases(parts, Saver(parts.config, bench.mesh, parts.policy, None))
    bench.drop(parts)
    return found


def cell_old_cache(bench):
    """Cached tokens and log-probs of a long prompt and of one that begins like it: twice, then after a step."""
    parts = bench.parts(3)
    step_module.sync(parts)
    draw = random.Random(FIXED_SEED)
    prompt = [draw.randrange(256) for _ in range(LONG_PROMPT)]
    found = {"first": ask(bench, prompt), "again": ask(bench, prompt)}
    step_module.train_step(parts, 0)
    found["after a step"] = ask(bench, prompt)
    found["again after a step"] = ask(bench, [*prompt[:-3], 1, 2, 3])
    rows = [pack([Completion(0, 0, prompt, [found["after a step"]["token"]], [0.0], "length", 0)], bench.mesh.device)]
    with parts.memory.holding(MOVABLE):
        (logprobs_N, _), = parts.policy.score(rows)
    found["policy"] = logprobs_N.tolist()
    bench.drop(parts)
    return found


def ask(bench, prompt):
    """The greedy next token, its log-prob, and how many tokens of the prompt came from the prefix cache."""
    import vllm

    parameters = vllm.SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, seed=0, detokenize=False)
    output, = bench.rollout._llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
    bench.engine_calls.pop()
    token, = output.outputs[0].token_ids
    return {"token": token, "logprob": output.outputs[0].logprobs[0][token].logprob, "cached": output.num_cached_tokens}


def cell_late_consumer(bench):
    """Whether a sync took that long whose first engine takes its time in the middle of it, and log-probs afterwards."""
    found = {}
    for transport, late_s in LATE_S.items():
        parts = bench.parts(3, transport=transport)
        load_weights = bench.rollout.load_weights

        def late(weights, *rest, load_weights=load_weights, late_s=late_s):
            def slowly():
                for number, weight in enumerate(weights):
                    if number == 5 and bench.mesh.engine_index == 0 and bench.mesh.engine_rank == 0:
                        time.sleep(late_s)
                    yield weight

            load_weights(slowly(), *rest)

        bench.rollout.load_weights = late
        start = time.monotonic()
        try:
            step_module.sync(parts)
        finally:
            bench.rollout.load_weights = load_weights
        found[transport] = {"late": time.monotonic() - start >= late_s, "engine": bench.engine_logprobs(),
                            "policy": bench.policy_logprobs(parts), "used": parts.weight_sync.transport}
        bench.drop(parts)
    return found


def main():
    config_path, results_path, *cells = sys.argv[1:]
    bench = Bench(config_path)
    mesh, found = bench.mesh, {}
    try:
        for name in cells:
            mesh.phase = name
            found[name] = mesh.all_gather(globals()[f"cell_{name}"](bench))
    except BaseException as error:
        mesh.fail(error)
    for path in mesh.on_main(lambda: [Path(results_path)]):
        path.write_text(json.dumps(found))
    mesh.leave_together()
    bench.rollout.close()
    mesh.close()


if __name__ == "__main__":
    main()
    leave(0)  # results are written; the tear-down of the interpreter now and then aborts
