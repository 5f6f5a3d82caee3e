"""A run whose states take turns is the run in which nothing moves, checkpoints and all."""

import json

import pytest
from launching import load_tool, make_rows, needs_cpu_engine, run, torchrun, write_config, write_jsonl
from safetensors.torch import load_file

pytestmark = needs_cpu_engine
STEPS = 3
LEFT_OUT = ("timing/", "perf/", "memory/")


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)])
def runs(request, model, tmp_path_factory):
    """The same config with each memory.swap: ZeRO 3, one rank or two, a reference that moves, a checkpoint and an
    export each step."""
    base = tmp_path_factory.mktemp("swap")
    train = write_jsonl(base / "train.jsonl", make_rows(16, seed=1))
    for swap in ("never", "always"):
        config = write_config(
            base / f"{swap}.yaml", model, train, base / swap, run={"max_steps": STEPS}, memory={"swap": swap},
            loss={"beta": 0.1, "ref_model_sync_steps": 2}, checkpoint={"save_steps": 1, "export_steps": 1},
            policy={"zero_stage": 3, "optimizer": "adamw", "learning_rate": 1e-3, "weight_decay": 0.01})
        command = ["-m", "spmd_rl.train", "--config", str(config)]
        (run(command) if request.param == 1 else torchrun(request.param, command)).succeeded()
    return base


def rows_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_moving_changes_no_metric_and_no_weight(runs):
    """All but times, bandwidths and memory; the weights of each export bit for bit."""
    found, wanted = ([{k: v for k, v in row.items() if not k.startswith(LEFT_OUT)} for row in rows_of(runs / name)]
                     for name in ("always", "never"))
    assert len(wanted) >= STEPS and found == wanted
    for name in ("export-1", "export-2", "export"):
        moved, stayed = (load_file(runs / swap / name / "model.safetensors") for swap in ("always", "never"))
        assert all(moved[key].equal(stayed[key]) for key in stayed)


def test_a_checkpoint_of_states_that_are_away_has_the_same_tensors(runs):
    """Saved between two steps, where masters and moments have left: every piece, the reference's among them, has the
    bytes and the place of the run in which they never leave."""
    def pieces(swap, step):
        paths = [*(runs / swap / "checkpoints" / f"step-{step}").glob("*/*.safetensors")]
        assert {path.parent.name for path in paths} == {"policy", "reference"}
        return {(path.parent.name, path.name, name): tensor for path in paths for name, tensor in
                load_file(path).items()}

    for step in (2, 3):
        moved, stayed = pieces("always", step), pieces("never", step)
        assert moved.keys() == stayed.keys() and len({kind.split("/")[0] for *_, kind in stayed}) >= 4
        assert all(moved[key].equal(stayed[key]) for key in stayed)


def test_moves_are_reported(runs):
    """Bytes both ways in each step after the first, which had no moments yet; nothing where nothing moves."""
    steps = [row for row in rows_of(runs / "always") if "timing/step" in row]
    assert all(row["perf/swap_in_gib"] > 0 and row["timing/swap_copies_in"] > 0 for row in steps[1:])
    assert all(row["perf/swap_out_gib"] > 0 for row in steps[1:])
    assert not any("perf/swap_out_gib" in row for row in rows_of(runs / "never"))


def test_the_timeline_shows_who_was_there(runs, capsys, monkeypatch):
    """Each phase with its tenants, moves with bandwidths, and a picture of them."""
    lines = [json.loads(line) for line in (runs / "always" / "memory.jsonl").read_text().splitlines()]
    assert {line["phase"] for line in lines} == {"reference", "train", "sync", "rollout"}
    sampling = [line["tenants_gib"] for line in lines if line["phase"] == "rollout"]
    training = [line["tenants_gib"] for line in lines if line["phase"] == "train"]
    assert min(there["moments"] for there in sampling[2:]) < 1e-5 < max(there["moments"] for there in training)
    moves = [move for line in lines for move in line["moves"]]
    assert {move["direction"] for move in moves} == {"in", "out"} and all(move["gb_per_s"] > 0 for move in moves)
    tool = load_tool("memory_timeline")
    monkeypatch.setattr("sys.argv", ["memory_timeline.py", str(runs / "always")])
    tool.main()
    picture = (runs / "always" / "memory.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and str(runs / "always") in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["memory_timeline.py", str(runs)])
    with pytest.raises(SystemExit, match="no memory.jsonl"):
        tool.main()
