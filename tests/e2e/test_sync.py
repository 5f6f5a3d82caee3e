"""A run is the same whichever way the weights go to the engine."""

import json
import shutil

import pytest
from launching import ROOT, Once, make_rows, needs_cpu_engine, torchrun, write_config, write_jsonl
from safetensors.torch import load_file

pytestmark = needs_cpu_engine
STEPS = 3
LEFT_OUT = ("timing/", "perf/", "memory/")


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory):
    """(transport, ranks) -> folder of a run at ZeRO 2. With `shared`, all that can move takes its turns, too."""
    base = tmp_path_factory.mktemp("sync")
    train = write_jsonl(base / "train.jsonl", make_rows(16, seed=1))

    def run(transport, ranks):
        name = f"{transport}-{ranks}"
        swap = {"memory": {"swap": "always"}} if transport == "shared" else {}
        config = write_config(
            base / f"{name}.yaml", model, train, base / name, run={"max_steps": STEPS}, loss={"beta": 0.1},
            policy={"zero_stage": 2, "optimizer": "adamw", "learning_rate": 1e-3}, checkpoint={"save_steps": 2},
            weight_sync={"transport": transport}, **swap)
        finished = start(config, ranks).succeeded()
        return base / name, config, finished.output

    return Once(run)


@pytest.fixture
def started_as_on_a_gpu(model, tmp_path):
    """Whether the engine is plain, repacked or apart -> folder and output of a run with transport auto whose plan is
    for a GPU, and in which all that moves takes turns."""
    def run(engine):
        config = write_config(
            tmp_path / "config.yaml", model, write_jsonl(tmp_path / "train.jsonl", make_rows(16, seed=1)),
            tmp_path / "run", run={"max_steps": STEPS}, loss={"beta": 0.1},
            policy={"zero_stage": 2, "optimizer": "adamw", "learning_rate": 1e-3}, checkpoint={"save_steps": 2},
            memory={"swap": "always", "device_gib": 64.0})
        return tmp_path / "run", start(config, 1, ENGINE=engine).succeeded().output

    return run


def start(config, ranks, **env):
    return torchrun(ranks, [str(ROOT / "tests" / "e2e" / "plain.py"), "--config", str(config)],
                    env={"PYTHONPATH": str(ROOT)} | env)


def metrics_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(LEFT_OUT)} for row in rows]


def test_a_shared_engine_samples_what_was_learnt(runs):
    """After every step the sampler's log-probs are the policy's, of which no byte was copied."""
    folder, _, output = runs("shared", 1)
    rows = metrics_of(folder)
    assert "weight sync: shared, nothing to copy" in output and len(rows) >= STEPS
    assert all(row["sampling/sampling_logp_difference/mean"] <= 1e-5 for row in rows)
    assert len({row["grad_norm"] for row in rows}) == len(rows)


@pytest.mark.long
@pytest.mark.parametrize("transport, ranks", [("shared", 1), ("shared", 2), ("gather", 2)])
def test_the_transport_changes_no_metric_and_no_weight(runs, transport, ranks):
    """`ipc` with its handles, `gather`, and an engine that has no weights of its own: bit for bit."""
    folder, _, output = runs(transport, ranks)
    wanted, _, ipc_output = runs("ipc", ranks)
    assert len(metrics_of(wanted)) >= STEPS and metrics_of(folder) == metrics_of(wanted)
    one, other = (load_file(path / "export" / "model.safetensors") for path in (folder, wanted))
    assert all(one[name].equal(other[name]) for name in other) and one.keys() == other.keys()
    assert "weight sync: ipc, 24 copies" in ipc_output
    assert f"weight sync: {transport}, " + ("nothing to copy" if transport == "shared" else "24 copies") in output


@pytest.mark.long
def test_a_shared_run_resumes(runs):
    """The checkpoint is in the policy before the engine takes its memory: the last step is the one that was."""
    folder, config, _ = runs("shared", 1)
    before = metrics_of(folder)
    shutil.rmtree(folder / "export")
    shutil.rmtree(folder / "checkpoints" / f"step-{STEPS}")
    start(config, 1).succeeded()
    assert metrics_of(folder)[-1] == before[-1]


@pytest.mark.long
def test_a_repacked_engine_is_not_shared(runs, model):
    """vLLM on a CPU keeps repacked copies, which would sample from the first weights for ever: `shared` is refused."""
    folder, config, _ = runs("ipc", 2)
    text = config.read_text().replace("transport: ipc", "transport: shared").replace(str(folder), f"{folder}-refused")
    refused = config.with_name("refused.yaml")
    refused.write_text(text)
    finished = torchrun(2, ["-m", "spmd_rl.train", "--config", str(refused)])
    assert finished.returncode == 1 and "vLLM repacked them, or they moved; set auto or ipc" in finished.output


@pytest.mark.long
def test_auto_shares_where_it_can_as_on_a_gpu(started_as_on_a_gpu, runs):
    """The run is the one that asks for it."""
    folder, output = started_as_on_a_gpu("plain")
    assert "weight sync: shared, nothing to copy" in output
    wanted, *_ = runs("ipc", 1)
    assert metrics_of(folder) == metrics_of(wanted)


@pytest.mark.long
def test_auto_goes_on_where_it_cannot_share(started_as_on_a_gpu):
    """vLLM repacked the weights: the first line says so, and the engine gets all that is learnt."""
    folder, output = started_as_on_a_gpu("repacked")
    assert "weight sync: ipc, " in output
    assert "warning: the engine has weights of its own" in output and "vLLM repacked them" in output
    rows = metrics_of(folder)
    assert len(rows) >= STEPS and all(row["sampling/sampling_logp_difference/mean"] <= 1e-4 for row in rows)
    assert len({row["grad_norm"] for row in rows}) == len(rows)


@pytest.mark.long
def test_auto_goes_on_where_loading_finds_no_views(started_as_on_a_gpu, runs):
    """The engine's model was made without memory of its own and has some again: the run is the one with copies."""
    folder, output = started_as_on_a_gpu("apart")
    assert "weight sync: ipc, 24 copies" in output
    assert "warning: the engine has weights of its own" in output and "they lie apart" in output
    wanted, *_ = runs("ipc", 1)
    assert metrics_of(folder) == metrics_of(wanted)
