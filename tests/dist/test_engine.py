"""Policy and engine in one process: what is sampled is what is trained, and after a sync both are the same model.

Two ranks with the real vLLM and DeepSpeed, fp32. One launch a model and tensor_parallel_size runs all cells; each
cell is read by the tests below. The weights are tied or not, since vLLM on CPU keeps its own copy of a tied head.
"""

import collections
import json

import pytest
from launching import ROOT, Once, needs_cpu_engine, torchrun, write_config

from spmd_rl.config import DataConfig, ModelConfig
from spmd_rl.prompts import PromptSampler, load_prompts, load_tokenizer

pytestmark = needs_cpu_engine
WORKER = str(ROOT / "tests" / "dist" / "worker_engine.py")
NUM_RANKS = 2
EOS = 257
MAX_COMPLETION_LENGTH = 4
CELLS = ["process_state", "uneven_engines", "trained_tokens", "first_step", "tokens_over_steps", "sync",
         "engine_states", "save_phases", "old_cache", "late_consumer"]
OF_ONE_RANK = ("uneven_engines", "late_consumer")  # engines of one rank
CORE = [("tied", 1), ("untied", 2)]
WHOLE = [pytest.param(("tied", 2), marks=pytest.mark.long), pytest.param(("untied", 1), marks=pytest.mark.long)]
LAYOUTS = dict(argvalues=CORE + WHOLE, ids=lambda layout: f"{layout[0]}-tp{layout[1]}")


class Launches:
    """Results of all cells by (model, tensor_parallel_size), made when first asked for."""

    def __init__(self, models, prompts_file, folder):
        self._models, self._prompts_file, self._folder = models, prompts_file, folder
        self.results = Once(self._launch)

    def _launch(self, layout):
        model, tensor_parallel_size = layout
        folder = self._folder / f"{model}-{tensor_parallel_size}"
        folder.mkdir()
        config = write_config(
            folder / "config.yaml", self._models[model], self._prompts_file, folder / "run",
            data={"max_prompt_length": 400},
            rollout={"tensor_parallel_size": tensor_parallel_size, "max_completion_length": MAX_COMPLETION_LENGTH,
                     "num_generations": 8})
        cells = [cell for cell in CELLS if cell not in OF_ONE_RANK or tensor_parallel_size == 1]
        torchrun(NUM_RANKS, [WORKER, str(config), str(folder / "results.json"), *cells]).succeeded()
        return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def launches(models, prompts_file, tmp_path_factory):
    return Launches(models, prompts_file, tmp_path_factory.mktemp("engine"))


@pytest.fixture(params=LAYOUTS["argvalues"], ids=LAYOUTS["ids"], scope="module")
def results(request, launches):
    """{cell: [what each rank found]} of one launch."""
    return launches.results(request.param)


def largest_gap(found):
    return max(abs(a - b) for a, b in zip(found["engine"], found["policy"], strict=True))


# Weight sync. -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_engine_equals_policy_after_each_sync(results, stage):
    """The engine's log-probs of fixed tokens are the policy's to 1e-5: after the first sync, and after a step, which
    moves them by more than 1e-2. Versions count from 0."""
    for rank in results["sync"]:
        found = rank[stage]
        assert len(found["first"]["engine"]) > 20
        assert largest_gap(found["first"]) <= 1e-5
        assert largest_gap(found["then"]) <= 1e-5
        assert largest_gap({"engine": found["first"]["engine"], "policy": found["then"]["engine"]}) > 1e-2
        assert found["version"] == 1


def test_first_sync_brings_the_same_model_at_each_stage(results):
    """Each stage loads the same folder, so the engine's first log-probs are the same; so are those after a step with
    plain SGD."""
    for rank in results["sync"]:
        for stage in rank[1:]:
            assert stage["first"]["engine"] == pytest.approx(rank[0]["first"]["engine"], abs=1e-5)
            assert stage["then"]["engine"] == pytest.approx(rank[0]["then"]["engine"], abs=1e-4)
            assert stage["sync_gib"] == rank[0]["sync_gib"]


def test_tokens_change_with_the_weights_alone(results):
    """Requests with the same seeds give the same tokens after steps at learning rate 0, others after real steps."""
    for rank in results["tokens_over_steps"]:
        for name in ("frozen", "frozen sharded"):
            before, after_one, after_two = rank[name]
            assert before == after_one == after_two
        before, after_one, after_two = rank["real"]
        assert before == rank["frozen"][0] == rank["frozen sharded"][0]
        assert before != after_one and after_one != after_two


def test_engine_refuses_to_sample_without_whole_weights(results):
    """Asleep, awake without weights, and after a load that failed in its middle: generating and waking the KV cache
    are errors that say why. The failed load shows its own error. A whole sync then heals the engine."""
    for found in results["engine_states"]:
        assert found["state when built"] == "asleep"
        for call in ("generate asleep", "generate asleep again"):
            assert found[call] == "RuntimeError: cannot generate: the engine is asleep, weights version None"
        assert found["load asleep"].startswith("RuntimeError: cannot load weights: the engine is asleep")
        assert found["wake cache asleep"].startswith("RuntimeError: cannot wake the KV cache: the engine is asleep")
        assert found["generate without weights"].startswith("RuntimeError: cannot generate: the engine is weights awa")
        assert found["wake cache without weights"].startswith("RuntimeError: cannot wake the KV cache")
        assert found["broken sync"] == found["second broken sync"] == "OSError: the weights end here"
        assert found["state after broken sync"].startswith("half-loaded")
        assert found["generate half-loaded"].startswith("RuntimeError: cannot generate: the engine is half-loaded")
        assert found["wake cache half-loaded"].startswith("RuntimeError: cannot wake the KV cache")
        assert found["enter rollout half-loaded"].startswith("RuntimeError: cannot enter rollout: the engine is half")
        assert found["state after whole sync"] == "ready"
        assert largest_gap(found) <= 1e-5
        assert found["engine again"] == pytest.approx(found["policy"], abs=1e-5)


def test_no_cached_token_is_of_older_weights(results):
    """Case 31: a long prompt is cached when it comes again. After a step the first call has no cached token, and the
    policy's own log-prob; then the new weights' blocks serve, for a prompt with the same beginning too."""
    for found in results["old_cache"]:
        assert found["first"]["cached"] == 0 and found["again"]["cached"] >= 128
        assert found["again"]["logprob"] == pytest.approx(found["first"]["logprob"], abs=1e-5)
        assert found["after a step"]["cached"] == 0
        assert [found["after a step"]["logprob"]] == pytest.approx(found["policy"], abs=1e-5)
        assert abs(found["after a step"]["logprob"] - found["first"]["logprob"]) > 1e-4
        assert found["again after a step"]["cached"] >= 128


@pytest.mark.parametrize("transport", ["ipc", "gather"])
@pytest.mark.parametrize("layout", [("tied", 1), pytest.param(("untied", 1), marks=pytest.mark.long)],
                         ids=["tied", "untied"])
def test_a_late_consumer_is_waited_for(launches, layout, transport):
    """Case 51: 2 ranks at stage 3, one of them 2 or 10 s late inside the load: both end, with the policy's weights."""
    for rank in launches.results(layout)["late_consumer"]:
        found = rank[transport]
        assert found["used"] == transport and found["late"]
        assert largest_gap(found) <= 1e-5


def test_saved_tensors_are_the_same_in_each_phase(results):
    """With the states away, just back, or beside the engine, the files have the same bytes; between rollouts a save
    leaves the engine ready."""
    for found in results["save_phases"]:
        first, *others = found["files"]
        assert sorted(first) == ["policy/rank-0-0.safetensors", "policy/rank-1-0.safetensors"]
        assert all(other == first for other in others) and len(others) == 3
        assert found["state"] == "READY" and found["away"][0] and not found["away"][1]


# First step. --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("old", ["detached", "recomputed"])
def test_first_step_identities(results, temperature, old):
    """On unchanged weights each token's ratio is 1 (exactly where the old log-probs are the current ones), its KL to
    the reference at most 1e-6, and the sampler's log-prob the policy's to 1e-5 in the mean, at both temperatures."""
    for rank in results["first_step"]:
        found = rank[f"{temperature} {old}"]
        assert found["largest_first"]["ratio"] <= (0.0 if old == "detached" else 1e-6)
        assert found["largest_first"]["kl"] <= 1e-6
        assert found["first"]["kl"] <= 1e-6
        assert found["first"]["sampling/sampling_logp_difference/mean"] <= 1e-5
        assert found["first"]["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-5)
        assert found["first"]["clip_ratio/region_mean"] == 0


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("old", ["detached", "recomputed"])
def test_reference_stays_and_policy_leaves_it(results, temperature, old):
    """Case 57: after one update the KL is above 0, the reference has the bytes it started with, and both models have
    whole weights; the second step's sampler is again the policy to 1e-5."""
    for rank in results["first_step"]:
        found = rank[f"{temperature} {old}"]
        assert found["largest_second"]["kl"] > 1e-6 and found["second"]["kl"] > 1e-7
        assert found["reference_same"] and not found["policy_same"]
        assert found["reference_shapes"] == found["policy_shapes"]
        assert all(0 not in shape for shape in found["reference_shapes"])
        assert found["second"]["sampling/sampling_logp_difference/mean"] <= 1e-5
        assert found["largest_second"]["ratio"] <= (0.0 if old == "detached" else 1e-6)


def test_reference_is_sharded_with_the_policy(results):
    """A reference has stage 3 beside a stage-3 policy, else 0: DeepSpeed takes no other stage without optimizer."""
    for rank in results["first_step"]:
        stages = {name: found["reference_stage"] for name, found in rank.items()}
        assert stages == {"1.0 detached": 3, "1.0 recomputed": 0, "0.5 detached": 0, "0.5 recomputed": 3}


# Tokens. ------------------------------------------------------------------------------------------------------------


def engine_outputs(results):
    """All engines' outputs, each once: with tensor parallelism both ranks report the same."""
    ranks = results["trained_tokens"]
    same = ranks[0]["engine"] == ranks[1]["engine"]
    return ranks[0]["engine"] if same else [output for rank in ranks for output in rank["engine"]]


def test_sampler_tokens_are_the_trained_tokens(results):
    """The ids that the engine reports, of prompt and completion, are the ids in the rows and the loss's targets, each
    completion once over all ranks; a target is the token after the hidden state that predicts it."""
    outputs = engine_outputs(results)
    trained = [row for rank in results["trained_tokens"] for row in rank["trained"]]
    assert len(outputs) == 4 * 8
    assert all(completion == targets for _, completion, targets, _ in trained)
    count = collections.Counter((tuple(prompt), tuple(completion)) for prompt, completion, _ in outputs)
    assert collections.Counter((tuple(prompt), tuple(targets)) for prompt, _, targets, _ in trained) == count
    assert all(rank["targets_match"] for rank in results["trained_tokens"])
    assert all(len(logprobs) == len(targets) and max(logprobs) <= 0 for _, _, targets, logprobs in trained)
    prompts = results["trained_tokens"][0]["prompts"]
    assert {tuple(prompt) for prompt, _, _ in outputs} == {tuple(prompt) for prompt in prompts}


def test_end_of_sequence_is_trained_and_truncation_is_the_engines_word(results):
    """A completion with finish reason `stop` ends in EOS and has it as its last target; one with `length` has all its
    tokens and no EOS; clipped_ratio is the share of the latter."""
    outputs = engine_outputs(results)
    by_reason = collections.defaultdict(list)
    for _, completion, reason in outputs:
        by_reason[reason].append(completion)
    assert by_reason.keys() == {"stop", "length"}, "the model should end some answers and not all"
    assert all(completion[-1] == EOS and EOS not in completion[:-1] for completion in by_reason["stop"])
    assert all(len(c) == MAX_COMPLETION_LENGTH and EOS not in c for c in by_reason["length"])
    trained = [targets for rank in results["trained_tokens"] for _, _, targets, _ in rank["trained"]]
    assert sum(targets[-1] == EOS for targets in trained) == len(by_reason["stop"])
    for rank in results["trained_tokens"]:
        assert rank["metrics"]["completions/clipped_ratio"] == len(by_reason["length"]) / len(outputs)


def test_ranks_of_an_engine_sample_the_same(results, request):
    """With tensor_parallel_size 2 both ranks get the same completions, with 1 each has other prompts."""
    first, second = (rank["engine"] for rank in results["trained_tokens"])
    assert (first == second) == ("tp2" in request.node.callspec.id)


# The process around the engine. -------------------------------------------------------------------------------------


def test_generators_and_environment_survive_the_engine(results):
    """Case 23: Python's, NumPy's and torch's generators, the environment but for what prepare_environment sets, thread
    count and default type are after building an engine, and after sampling, what they were before."""
    for rank in results["process_state"]:
        states = rank["states"]
        for state in states.values():
            state["environment"] = {name: value for name, value in state["environment"].items()
                                    if not name.startswith("VLLM_")}
        assert states["engine built"] == states["before"]
        assert states["generated"] == states["before generate"]
        assert rank["threads_after_set"] == 3, "torch.set_num_threads no longer does anything"


def test_ranks_draw_different_numbers(results):
    """Each rank's generators have a seed of their own."""
    first, second = (rank["states"]["before"] for rank in results["process_state"])
    assert all(first[name] != second[name] for name in ("python", "numpy", "torch"))


def test_data_order_is_the_same_with_and_without_engine(results, models, prompts_file):
    """Case 23: the rows of 20 steps depend on the run's seed only; here they are drawn without any engine."""
    tokenizer = load_tokenizer(ModelConfig(path=str(models["tied"])))
    prompts = load_prompts([str(prompts_file)], tokenizer, DataConfig(max_prompt_length=24))
    wanted = {str(seed): [[p.row for p in PromptSampler(prompts, 4, seed, True).draw(step)] for step in range(20)]
              for seed in (1, 2)}
    assert wanted["1"] != wanted["2"]
    for rank in results["process_state"]:
        assert rank["order"] == wanted


@pytest.mark.parametrize("layout", [("tied", 1), pytest.param(("untied", 1), marks=pytest.mark.long)],
                         ids=["tied", "untied"])
def test_engines_of_ranks_are_independent(launches, layout):
    """Case 73: an engine a rank after a trainer group of 2, with 0 and 5 prompts: each samples its own without waiting;
    afterwards the default group has 2 ranks and the sum of ones is 2."""
    first, second = launches.results(layout)["uneven_engines"]
    assert first["prompts"] == first["wanted"] == []
    assert second["prompts"] == second["wanted"] and len(second["wanted"]) == 5
    assert second["groups"] == [2, 3, 4, 5, 6]
    assert all(1 <= length <= 4 for length in second["lengths"])
    for rank in (first, second):
        assert rank["world_size"] == 2 and rank["sum"] == [2.0, 2.0, 2.0]
