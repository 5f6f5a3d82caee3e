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
    """transport -> folder of a run on two ranks at ZeRO 2. With `shared`, all that can move takes its turns, too."""
    base = tmp_path_factory.mktemp("sync")
    train = write_jsonl(base / "train.jsonl", make_rows(16, seed=1))

    def run(transport):
        swap = {"memory": {"swap": "always"}} if transport == "shared" else {}
        config = write_config(
            base / f"{transport}.yaml", model, train, base / transport, run={"max_steps": STEPS}, loss={"beta": 0.1},
            policy={"zero_stage": 2, "optimizer": "adamw", "learning_rate": 1e-3}, checkpoint={"save_steps": 2},
            weight_sync={"transport": transport}, **swap)
        finished = start(config).succeeded()
        return base / transport, config, finished.output

    return Once(run)


def start(config):
    return torchrun(2, [str(ROOT / "tests" / "e2e" / "plain.py"), "--config", str(config)],
                    env={"PYTHONPATH": str(ROOT)})


def metrics_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(LEFT_OUT)} for row in rows]


@pytest.mark.parametrize("transport", ["shared", pytest.param("gather", marks=pytest.mark.long)])
def test_the_transport_changes_no_metric_and_no_weight(runs, transport):
    """`ipc` with its handles, `gather`, and an engine that has no weights of its own: bit for bit."""
    folder, _, output = runs(transport)
    wanted, _, ipc_output = runs("ipc")
    assert len(metrics_of(wanted)) >= STEPS and metrics_of(folder) == metrics_of(wanted)
    one, other = (load_file(path / "export" / "model.safetensors") for path in (folder, wanted))
    assert all(one[name].equal(other[name]) for name in other) and one.keys() == other.keys()
    assert "weight sync: ipc, 24 copies" in ipc_output
    assert f"weight sync: {transport}, " + ("nothing to copy" if transport == "shared" else "24 copies") in output


@pytest.mark.long
def test_a_shared_run_resumes(runs):
    """The checkpoint is in the policy before the engine takes its memory: the last step is the one that was."""
    folder, config, _ = runs("shared")
    before = metrics_of(folder)
    shutil.rmtree(folder / "export")
    shutil.rmtree(folder / "checkpoints" / f"step-{STEPS}")
    start(config).succeeded()
    assert metrics_of(folder)[-1] == before[-1]


@pytest.mark.long
def test_a_repacked_engine_is_not_shared(runs, model):
    """vLLM on a CPU keeps repacked copies, which would sample from the first weights for ever."""
    folder, config, _ = runs("ipc")
    text = config.read_text().replace("transport: ipc", "transport: shared").replace(str(folder), f"{folder}-refused")
    refused = config.with_name("refused.yaml")
    refused.write_text(text)
    finished = torchrun(2, ["-m", "spmd_rl.train", "--config", str(refused)])
    assert finished.returncode == 1 and "vLLM repacked them, or they moved; set ipc" in finished.output
