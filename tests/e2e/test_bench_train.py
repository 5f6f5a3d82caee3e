"""tools/bench_train.py with tiny sizes on a CPU: every case runs, and its file and table hold what was asked for."""

import argparse
import json

import pytest
from launching import ROOT, load_tool, run


@pytest.fixture(scope="module")
def tool():
    return load_tool("bench_train")


@pytest.fixture(scope="module")
def benched(tmp_path_factory):
    """(results, output) of one run over all kinds of cases."""
    out = tmp_path_factory.mktemp("bench") / "bench.json"
    done = run([str(ROOT / "tools" / "bench_train.py"), "--models", "tiny", "--shapes", "96/8x4", "--length", "64",
                "--positions", "100", "--repeats", "1", "--out", str(out), "--device", "cpu"]).succeeded()
    return json.loads(out.read_text()), done.output


def test_every_case_ran(benched):
    """No case has an error; log-probs of all ways agree, and so do the gradients' norms."""
    results, _ = benched
    assert results["device"] == "cpu"
    assert [r["kind"] for r in results["results"]] == ["shapes", "sequences", "head"]
    assert not [r["error"] for r in results["results"] if "error" in r]
    shape, sequences, head = results["results"]
    for way in ("packed", "batch"):
        assert shape[f"logprob_gap_{way}"]["max"] < 1e-5
        assert shape[f"grad_norm_ratio_{way}"] == pytest.approx(1, abs=1e-5)
    assert shape["speedup_step"] == pytest.approx(
        min(shape["ways"][way]["step_s"] for way in ("packed", "batch")) / shape["ways"]["shared"]["step_s"])
    assert sequences["ways"].keys() == {"packed", "batch", "packed, compiled layers", "batch, compiled layers"}
    assert head["words"] == 320 and 0 < head["share_of_products"]


def test_ceilings_and_rates_are_arithmetic(benched):
    """The tiny model: 2 blocks of 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384 entries, a head of 320 * 128.

    Prompt 96, 4 completions of 8. Tokens 128 shared, 416 copied; pairs 96 * 97 / 2 + 4 * (8 * 96 + 36) = 7872 and
    4 * 104 * 105 / 2 = 21840, at 4 * 2 * 128 operations.
    """
    shape = benched[0]["results"][0]
    linear, head = 2 * 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384), 2 * 320 * 128 * 32
    copies = linear * 416 + head + 21840 * 1024
    shared = linear * 128 + head + 7872 * 1024
    assert shape["ceiling_forward"] == pytest.approx(copies / shared)
    last = 2 * 2 * 128 * 384  # of both blocks' down projections: recomputation ends before them
    executed = (4 * linear - last) * 128 + 4 * head + 4.5 * 7872 * 1024
    of_copies = (4 * linear - last) * 416 + 4 * head + 4.5 * 21840 * 1024
    assert shape["ceiling_step"] == pytest.approx(of_copies / executed)
    way = shape["ways"]["shared"]
    assert way["step_tflops"] == pytest.approx(executed / way["step_s"] / 1e12)


def test_the_table_names_each_case(benched):
    """Printed last, in markdown, from the numbers of the file."""
    results, output = benched
    shape = results["results"][0]
    assert f"| tiny | 96/8 × 4 | {shape['speedup_forward']:.2f}" in output
    assert "sequences of 64 tokens" in output and "head, 100 x 320" in output


@pytest.mark.parametrize("text, shape", [("8192/1024x8", (8192, 1024, 8)), ("1/1x1", (1, 1, 1))])
def test_shapes_are_read(tool, text, shape):
    assert tool.parse_shape(text) == shape


@pytest.mark.parametrize("text", ["", "8192", "8192/1024", "8192x8", "a/1x2", "0/1x1", "1/1x-1", "1/2/3x4"])
def test_what_is_no_shape_is_refused(tool, text):
    with pytest.raises(argparse.ArgumentTypeError, match="write PROMPT/COMPLETIONxG"):
        tool.parse_shape(text)


def test_the_time_is_bounded(tool, monkeypatch, capsys, tmp_path):
    """A case gets what is left of the time, and none is started after it; the file has those that were left out."""
    given = []

    def run_case(case, timeout_s):
        given.append(timeout_s)
        clock[0] += 30
        return case | {"error": "not done"}

    clock = [0.0]
    monkeypatch.setattr(tool.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(tool, "run_case", run_case)
    out = tmp_path / "bench.json"
    tool.main(["--models", "tiny", "--seconds", "50", "--case_seconds", "40", "--out", str(out), "--device", "cpu"])
    assert given == [40, 20]
    assert [r["error"] for r in json.loads(out.read_text())["results"]] == ["not done"] * 2 + ["left out: no time"] * 5


def test_a_case_that_fails_is_told(tool):
    """The end of its output, beside the case."""
    case = {"kind": "shapes", "model": "none", "shape": [1, 1, 1], "device": "cpu", "flex_options": {}}
    found = tool.run_case(case, 60)
    assert "KeyError" in found["error"] and found["shape"] == [1, 1, 1]
