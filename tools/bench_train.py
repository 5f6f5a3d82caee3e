"""Time the learning half of one device: shared prompts against copies, the log-prob head, sequences of 4k tokens.

    python tools/bench_train.py --out bench.json                                    # every case, both models
    python tools/bench_train.py --models qwen3-1.7b --shapes 8192/1024x8,512/1024x8 --out bench.json
    python tools/bench_train.py --cases head,sequences --out bench.json

Cases, each in a process of its own:
    shapes      a group of one prompt and G completions, three ways: `shared` (the prompt once), `packed` (a row of
                copies, the same kernels), `batch` (padded rows of copies, which need no padding here, on sdpa's flash
                kernels). The baseline is the faster of the last two. Forward alone, without gradient, and forward,
                backward with recomputation and an AdamW step.
    sequences   packed sequences of 4k tokens without sharing, with the layers as they are and compiled: the
                operations executed a second, recomputation counted.
    head        log-probs of 32k positions, forward and backward, against the four matrix products in it, and its memory
                beyond the weight's gradient.

All ways have the same weights, log-prob head and optimizer (torch's fused AdamW on bf16 weights; no DeepSpeed). Times
are medians after the runs that compile. The ceiling is the operations of copies over those of shared
prompts, by spmd_rl.flops. --out is written after each case, and cases that no longer fit into --seconds are left out.
"""
import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "tools")]

import torch  # noqa: E402
from make_model import PRESETS, build_model  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from spmd_rl import attention, layers, logprobs, model  # noqa: E402
from spmd_rl.batch import Completion, pack  # noqa: E402

SHAPES = ["512/1024x8", "2048/2048x8", "8192/1024x8", "8192/1024x16", "16384/1024x8"]
WAYS = ("shared", "packed", "batch")
CASE_KINDS = ("shapes", "sequences", "head")
ROW_TOKENS = 16384  # groups of a shape that are smaller fill a row up to so many tokens, on CUDA
LONG_S = 5  # a run that takes longer is not repeated to warm up
ENOUGH_S = 4  # and no further run is timed after so many seconds


# Within a case's process. -------------------------------------------------------------------------------------------


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()  # kernels run on after their call


def measure(run, repeats, device):
    """Median seconds of `run` and its peak memory in GiB (None on a CPU), after one or two runs untimed."""
    def timed_run():
        start = time.perf_counter()
        run()
        synchronize(device)
        return time.perf_counter() - start

    if timed_run() < LONG_S:
        timed_run()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = [timed_run()]
    while len(seconds) < repeats and sum(seconds) < ENOUGH_S:
        seconds.append(timed_run())
    return statistics.median(seconds), torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None


def make_groups(prompt, completion, size, count, vocabulary):
    """`count` groups of random tokens."""
    draw = torch.Generator().manual_seed(0)

    def tokens(length):
        return torch.randint(vocabulary, (length,), generator=draw).tolist()

    groups = []
    for number in range(count):
        ids = tokens(prompt)
        groups.append([Completion(number, i, ids, tokens(completion), [0.0] * completion, "length", 0)
                       for i in range(size)])
    return groups


class Bench:
    """A model with random weights and its optimizer, and one forward of a group's completions each way."""

    def __init__(self, case):
        self.device = torch.device(case["device"])
        attention.KERNEL_OPTIONS.update(case["flex_options"])
        lm = build_model("qwen3", **PRESETS[case["model"]]).to(self.device)
        ALL_ATTENTION_FUNCTIONS.register(attention.NAME, attention.packed_attention)
        self.recomputed = model.checkpoint_blocks(lm, case["checkpoint_every"])
        if case["compile_layers"]:
            layers.compile_layers(lm)
        self.model = model.LogprobModel(lm.train(), case["logprob_memory_gib"])
        self.shape = model.shape(lm)
        # Every way has the same weights, so a step does all of its work and moves none.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        self.block = attention.BLOCK if self.device.type == "cuda" else 1

    def forward_of(self, way, groups):
        """A function that gives the log-probs of all completions' tokens, in order."""
        self.model.lm.set_attn_implementation("sdpa" if way == "batch" else attention.NAME)
        copies = [c for group in groups for c in group]
        if way != "batch":
            mb = pack(groups if way == "shared" else copies, self.device, self.block)
            return lambda: self.model(mb.input_ids_S, mb.positions_S, mb.segments_3S, mb.target_index_N,
                                      mb.target_ids_N, 1.0)[0]
        ids_BS = torch.tensor([c.prompt_ids + c.token_ids for c in copies], device=self.device)
        start = len(copies[0].prompt_ids)
        flash = sdpa_kernel if self.device.type == "cuda" else contextlib.nullcontext

        def forward():
            with flash(SDPBackend.FLASH_ATTENTION):
                hidden_BSH = self.model.lm.base_model(input_ids=ids_BS, use_cache=False).last_hidden_state
            return self.model.lm.get_output_embeddings()(
                hidden_BSH[:, start - 1:-1].flatten(0, 1), ids_BS[:, start:].flatten(), 1.0)[0]

        return forward

    def timed(self, way, groups, repeats):
        """Seconds, peak memory and executed TFLOP/s of forward, and of forward, backward and step; also the log-probs
        and the gradient's norm."""
        lengths = [len(c.token_ids) for c in groups[0]]
        count = self.shape.of if way == "shared" else self.shape.of_copies
        flops = count(len(groups[0][0].prompt_ids), lengths)
        forward = self.forward_of(way, groups)
        found = {}

        def score():
            with torch.no_grad():
                found["logprobs"] = forward()

        def backward():
            with flash_backward(way, self.device):
                forward().mean().backward()

        def learn():
            backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

        self.model.eval()
        forward_s, forward_gib = measure(score, repeats, self.device)
        self.model.train()
        step_s, step_gib = measure(learn, repeats, self.device)
        backward()
        norm = torch.stack([torch.linalg.vector_norm(p.grad, dtype=torch.float32)
                            for p in self.model.parameters()]).norm()
        self.optimizer.zero_grad()
        return {
            "forward_s": forward_s, "forward_peak_gib": forward_gib,
            "forward_tflops": len(groups) * flops.forward / forward_s / 1e12,
            "step_s": step_s, "step_peak_gib": step_gib,
            "step_tflops": len(groups) * flops.training(self.recomputed) / step_s / 1e12,
        }, found["logprobs"], float(norm)


def flash_backward(way, device):
    """Recomputation in backward calls attention again: the same kernels there."""
    on = way == "batch" and device.type == "cuda"
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if on else contextlib.nullcontext()


def bench_shape(case):
    """One shape, all ways."""
    bench = Bench(case)
    prompt, completion, size = case["shape"]
    count = max(1, ROW_TOKENS // (prompt + size * completion)) if bench.device.type == "cuda" else 1
    groups = make_groups(prompt, completion, size, count, PRESETS[case["model"]]["vocab_size"])
    ways, logprobs_of, norms = {}, {}, {}
    for way in WAYS:
        try:
            ways[way], logprobs_of[way], norms[way] = bench.timed(way, groups, case["repeats"])
        except torch.OutOfMemoryError as error:
            ways[way] = {"error": str(error).splitlines()[0]}
        bench.optimizer.zero_grad()
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()  # the next way's peak is its own
    result = {"groups": count, "ways": ways}
    copies, shared = (f(prompt, [completion] * size) for f in (bench.shape.of_copies, bench.shape.of))
    result["ceiling_forward"] = copies.forward / shared.forward
    result["ceiling_step"] = copies.training(bench.recomputed) / shared.training(bench.recomputed)
    baselines = [way for way in ("packed", "batch") if "error" not in ways[way]]
    if baselines and "error" not in ways["shared"]:
        for kind in ("forward", "step"):
            best = min(baselines, key=lambda way: ways[way][f"{kind}_s"])
            result[f"baseline_{kind}"] = best
            result[f"speedup_{kind}"] = ways[best][f"{kind}_s"] / ways["shared"][f"{kind}_s"]
        for way in baselines:
            gap = (logprobs_of["shared"] - logprobs_of[way]).abs()
            result[f"logprob_gap_{way}"] = {"mean": float(gap.mean()), "max": float(gap.max())}
            result[f"grad_norm_ratio_{way}"] = norms["shared"] / norms[way]
    return result


def bench_sequences(case):
    """Packed sequences of `case["length"]` tokens, a quarter of each the prompt."""
    length = case["length"]
    prompt = length // 4
    result = {}
    for compiled in (False, True):
        bench = Bench(case | {"compile_layers": compiled})
        count = max(1, ROW_TOKENS // length) if bench.device.type == "cuda" else 1
        groups = make_groups(prompt, length - prompt, 1, count, PRESETS[case["model"]]["vocab_size"])
        for way in ("packed", "batch"):
            name = f"{way}, compiled layers" if compiled else way
            result[name], _, _ = bench.timed(way, groups, case["repeats"])
        del bench
        gc.collect()
        if case["device"] == "cuda":
            torch.cuda.empty_cache()  # the next one's peak is its own
    return {"ways": result, "tokens": count * length}


def bench_head(case):
    """The head's forward and backward, and its products alone in the same tiles and types."""
    device, n = torch.device(case["device"]), case["positions"]
    sizes = PRESETS[case["model"]]
    v, h = sizes["vocab_size"], sizes["hidden_size"]
    draw = torch.Generator(device).manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(v, h, generator=draw, device=device, dtype=sizes["dtype"]) / h**0.5)
    hidden = torch.randn(n, h, generator=draw, device=device, dtype=sizes["dtype"]).requires_grad_()
    targets = torch.randint(v, (n,), generator=draw, device=device)
    head = logprobs.LogprobHead(weight, case["logprob_memory_gib"])

    def run():
        weight.grad = hidden.grad = None
        head(hidden, targets, 1.0)[0].mean().backward()

    def products():
        with torch.no_grad():
            for part in logprobs._tiles(n, head._max_logits // v):
                logprobs._matmul_fp32(hidden[part], weight.T)
            for part in logprobs._tiles(v, head._max_logits // n):
                grad = logprobs._matmul_fp32(hidden, weight[part].T).to(weight.dtype)
                logprobs._matmul_fp32(grad, weight[part])
                logprobs._matmul_fp32(grad.T, hidden)

    gc.collect()
    before = torch.cuda.memory_allocated() / 2**30 if device.type == "cuda" else None
    seconds, peak = measure(run, case["repeats"], device)
    weight.grad = hidden.grad = None
    products_s, _ = measure(products, case["repeats"], device)
    flops = 4 * 2 * n * v * h
    grad_gib = weight.numel() * weight.element_size() / 2**30
    return {"positions": n, "words": v, "width": h, "seconds": seconds, "products_s": products_s,
            "share_of_products": products_s / seconds, "tflops": flops / seconds / 1e12,
            "products_tflops": flops / products_s / 1e12,
            "beyond_weight_gradient_gib": None if peak is None else peak - before - grad_gib}


RUN = {"shapes": bench_shape, "sequences": bench_sequences, "head": bench_head}


# The driver. --------------------------------------------------------------------------------------------------------


def make_cases(args):
    """The cases that the options ask for, in order."""
    common = {"device": args.device, "repeats": args.repeats, "checkpoint_every": args.checkpoint_every,
              "compile_layers": args.compile_layers, "logprob_memory_gib": args.logprob_memory_gib,
              "flex_options": args.flex_options}
    cases = []
    for name in args.models:
        for shape in args.shapes if "shapes" in args.cases else ():
            cases.append({"kind": "shapes", "model": name, "shape": shape} | common)
    if "sequences" in args.cases:
        cases.append({"kind": "sequences", "model": args.models[0], "length": args.length} | common)
    if "head" in args.cases:
        cases.append({"kind": "head", "model": args.models[0], "positions": args.positions} | common)
    return cases


def run_case(case, timeout_s):
    """The case with its result, from a process of its own; with `error` where it failed or took too long."""
    command = [sys.executable, os.path.abspath(__file__), "--case", json.dumps(case)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return case | {"error": f"not done within {timeout_s:.0f} s"}
    if done.returncode:
        return case | {"error": done.stderr.strip()[-2000:]}
    return case | json.loads(done.stdout.strip().splitlines()[-1])


def shape_name(case):
    prompt, completion, size = case["shape"]
    return f"{prompt}/{completion} × {size}"


def table(results):
    """Markdown of what was measured."""
    lines = []
    shapes = [r for r in results if r["kind"] == "shapes" and "speedup_step" in r]
    if shapes:
        lines += ["| model | prompt/completion × G | forward | its ceiling | training | its ceiling | TFLOP/s "
                  "| peak GiB, shared · baseline |", "|---|---|---|---|---|---|---|---|"]
    for r in shapes:
        shared, best = r["ways"]["shared"], r["ways"][r["baseline_step"]]
        peaks = " · ".join("-" if way["step_peak_gib"] is None else f"{way['step_peak_gib']:.1f}"
                           for way in (shared, best))
        lines.append(f"| {r['model']} | {shape_name(r)} | {r['speedup_forward']:.2f} ({r['baseline_forward']}) "
                     f"| {r['ceiling_forward']:.2f} | {r['speedup_step']:.2f} ({r['baseline_step']}) "
                     f"| {r['ceiling_step']:.2f} | {shared['step_tflops']:.3g} | {peaks} |")
    for r in results:
        if r["kind"] == "sequences" and "ways" in r:
            lines += ["", f"| {r['model']}, sequences of {r['length']} tokens | forward TFLOP/s | training TFLOP/s |",
                      "|---|---|---|"]
            lines += [f"| {name} | {way['forward_tflops']:.3g} | {way['step_tflops']:.3g} |"
                      for name, way in r["ways"].items()]
        if r["kind"] == "head" and "seconds" in r:
            memory = r["beyond_weight_gradient_gib"]
            lines += ["", f"head, {r['positions']} x {r['words']}: {r['seconds'] * 1e3:.1f} ms, {r['tflops']:.3g} "
                      f"TFLOP/s, {r['share_of_products']:.2f} of its products' speed"
                      + ("" if memory is None else f", {memory:.2f} GiB beyond the weight's gradient")]
        if "error" in r:
            lines += ["", f"{r['kind']} {r['model']} {shape_name(r) if 'shape' in r else ''}: {r['error']}"]
    return "\n".join(lines)


def parse_shape(text):
    """`8192/1024x8` -> (prompt, completion, G). Raises ArgumentTypeError for anything else."""
    try:
        lengths, size = text.split("x")
        prompt, completion = lengths.split("/")
        shape = int(prompt), int(completion), int(size)
    except ValueError:
        shape = 0, 0, 0
    if min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write PROMPT/COMPLETIONxG in tokens, as 8192/1024x8")
    return shape


def listed(parse, allowed=None):
    """A comma-separated option."""
    def read(text):
        values = [parse(part) for part in text.split(",")]
        wrong = [value for value in values if allowed and value not in allowed]
        if wrong:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r}: choose from {', '.join(allowed)}")
        return values
    return read


def parse_args(args):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--models", type=listed(str, PRESETS), default=["qwen3-1.7b", "qwen3-4b"])
    parser.add_argument("--cases", type=listed(str, CASE_KINDS), default=list(CASE_KINDS))
    parser.add_argument("--shapes", type=listed(parse_shape), default=[parse_shape(shape) for shape in SHAPES],
                        help="PROMPT/COMPLETIONxG, separated by commas")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence of the sequences case")
    parser.add_argument("--positions", type=int, default=32768, help="positions of the head case")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--checkpoint_every", type=int, default=1, help="policy.gradient_checkpointing_every")
    parser.add_argument("--compile_layers", action="store_true", help="policy.compile_layers, for all ways of a shape")
    parser.add_argument("--flex_options", type=json.loads, default={},
                        help="FlexAttention's kernel options as JSON, to try others, as {\"USE_TMA\": true}")
    parser.add_argument("--logprob_memory_gib", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=540, help="in all; later cases are left out")
    parser.add_argument("--case_seconds", type=float, default=240, help="longest case")
    parser.add_argument("--out", help="JSON file to write")
    return parser.parse_args(args)


def main(args=None):
    args = parse_args(args)
    if args.case:
        print(json.dumps(RUN[args.case["kind"]](args.case)))
        return
    start, results = time.perf_counter(), []
    for case in make_cases(args):
        left = args.seconds - (time.perf_counter() - start)
        results.append(run_case(case, min(left, args.case_seconds)) if left > 0 else
                       case | {"error": "left out: no time"})
        print(json.dumps(results[-1]), flush=True)
        if args.out:
            with open(args.out, "w", encoding="utf-8") as file:
                json.dump({"device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
                           "torch": torch.__version__, "results": results}, file, indent=1)
    print(table(results))


if __name__ == "__main__":
    main()
