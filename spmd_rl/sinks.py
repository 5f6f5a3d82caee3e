"""Where a run's metrics and sample completions go: files, TensorBoard, the console, W&B, MLflow. One rank has them."""

import glob
import importlib.util
import json
import math
import os
import re
import statistics
import time
from collections import deque
from typing import Any, Protocol

from spmd_rl.config import ConfigError, MetricsConfig
from spmd_rl.files import replacing

Sample = dict[str, Any]
"""A completion for a reader: prompt, completion, rewards and what else `metrics.as_samples` gives."""
SAMPLES = "completions.jsonl"
CELL_CHARACTERS = 2000
WANDB_START_S = 300.0  # for W&B's own process, which its default of 30 s does not wait for on a busy machine


class Sink(Protocol):
    """Where a step's metrics go."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """One step's, or one evaluation's."""

    def write_samples(self, step: int, samples: list[Sample]) -> None:
        """Some of a step's completions."""

    def close(self) -> None:
        """No more follows."""


class JsonLines:
    """metrics.jsonl and completions.jsonl: one object a line, with `step`; a line is whole on disk or absent.

    JSON has no infinity and no NaN: a metric that is one of them is its name as text, which `read_metrics` reads back.
    """

    def __init__(self, folder: str, steps_done: int = 0) -> None:
        """steps_done: samples of later steps belong to a branch that is left; the metrics are cut already."""
        self._file = open(os.path.join(folder, "metrics.jsonl"), "a", encoding="utf-8")
        self._samples = os.path.join(folder, SAMPLES)
        if os.path.exists(self._samples):
            kept = [sample for sample in read_lines(self._samples) if sample["step"] <= steps_done]
            with replacing(self._samples) as file:
                file.writelines(_line(sample) for sample in kept)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._file.write(_line({"step": step, **{name: _or_name(value) for name, value in metrics.items()}}))
        self._file.flush()

    def write_samples(self, step: int, samples: list[Sample]) -> None:
        with open(self._samples, "a", encoding="utf-8") as file:
            file.writelines(_line({"step": step, **sample}) for sample in samples)

    def close(self) -> None:
        self._file.close()


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"  # in ASCII: any text survives, lone surrogates too


def _or_name(value: float) -> float | str:
    """Itself, or "Infinity", "-Infinity", "NaN"."""
    return value if math.isfinite(value) else json.dumps(float(value))


def read_lines(path: str) -> list[dict[str, Any]]:
    """The rows of such a file; a last line that was cut off is left out."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def read_metrics(path: str) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl: numbers alone, infinity and NaN among them."""
    return [{name: float(value) if isinstance(value, str) else value for name, value in row.items()}
            for row in read_lines(path)]


class TensorBoard:
    """Scalars as TensorBoard events; those of steps after `steps_done` that are there already are superseded."""

    def __init__(self, folder: str, steps_done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if not steps_done:
            for old in glob.glob(os.path.join(folder, "events.out.tfevents.*")):
                os.remove(old)  # of a run that ended in its first steps
        self._writer = SummaryWriter(folder, purge_step=steps_done + 1 if steps_done else None)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def write_samples(self, step: int, samples: list[Sample]) -> None:
        self._writer.add_text("completions", markdown_table(samples), step)

    def close(self) -> None:
        self._writer.close()


def markdown_table(samples: list[Sample]) -> str:
    """Prompt, completion, reward and advantage, a row each; long texts are cut."""
    def cell(text: str) -> str:
        text = text if len(text) <= CELL_CHARACTERS else text[:CELL_CHARACTERS] + " …"
        text = text.encode("utf-8", "backslashreplace").decode()  # TensorBoard takes no lone surrogates
        return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>")

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.4g}"

    rows = [f"| {cell(s['prompt'])} | {cell(s['completion'])} | {number(s['reward'])} | {number(s['advantage'])} |"
            for s in samples]
    return "\n".join(["| prompt | completion | reward | advantage |", "|---|---|---|---|", *rows])


class Console:
    """A line a step: progress, time left, shares of the phases, and what tells a healthy run from a sick one."""

    SHOWN = {"reward": "reward", "completions/mean_length": "length", "entropy": "entropy", "kl": "kl",
             "grad_norm": "grad", "sampling/sampling_logp_difference/mean": "gap"}
    HELD_OUT = re.compile(r"eval/(.*/)?(reward|pass@\d+)")
    FAILED = re.compile(r"rewards/(.*)/failed")
    PHASES = ("rollout", "reward", "learn", "sync", "swap")
    BAR_WIDTH = 20

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._step_seconds: deque[float] = deque(maxlen=20)  # the last ones: the first few compile

    def write(self, step: int, metrics: dict[str, float]) -> None:
        if "timing/step" in metrics:
            self._step_seconds.append(metrics["timing/step"])
        filled = self.BAR_WIDTH * step // self._max_steps
        left = "starting"
        if self._step_seconds:
            left_s = round(statistics.median(self._step_seconds) * (self._max_steps - step))
            left = f"{left_s // 3600}:{left_s // 60 % 60:02d}:{left_s % 60:02d} left"
        shown = [f"{label} {metrics[name]:.4g}" for name, label in self.SHOWN.items() if name in metrics]
        shown += [f"held-out {name.removeprefix('eval/')} {value:.4g}" for name, value in metrics.items()
                  if self.HELD_OUT.fullmatch(name)]
        shown += [f"{match[1]} FAILED {value:g} times" for name, value in metrics.items()
                  if value and (match := self.FAILED.fullmatch(name))]
        print("  ".join([f"[{'#' * filled}{'.' * (self.BAR_WIDTH - filled)}] step {step}/{self._max_steps}, {left}",
                         *shown, *self._shares(metrics)]), flush=True)

    def _shares(self, metrics: dict[str, float]) -> list[str]:
        """Seconds of the step, and which part of them each phase took."""
        seconds = metrics.get("timing/step")
        if not seconds:
            return []
        shares = [f"{phase} {metrics[name] / seconds:.0%}" for phase in self.PHASES
                  if (name := f"timing/{phase}") in metrics]
        return [f"{seconds:.3g} s ({', '.join(shares)})"]

    def write_samples(self, step: int, samples: list[Sample]) -> None:
        """Too long for a console."""

    def close(self) -> None:
        """Nothing is open."""


class WeightsAndBiases:
    """A W&B run in the run's folder; offline it is synced later with ``wandb sync``. A run that goes on is a new one of
    the same group."""

    def __init__(self, config: MetricsConfig, folder: str, options: dict[str, Any]) -> None:
        import wandb

        name = os.path.basename(os.path.abspath(folder))
        self._wandb: Any = wandb  # its types ask for more than it takes
        settings = self._wandb.Settings(x_service_wait=WANDB_START_S)
        self._run = self._wandb.init(project=config.wandb_project, name=name, group=name, dir=folder, config=options,
                                     mode=config.wandb, settings=settings)
        self._run.define_metric("*", step_metric="step")  # its own counter only goes up; ours repeats in evaluations

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def write_samples(self, step: int, samples: list[Sample]) -> None:
        columns = ["prompt", "completion", "reward", "advantage"]
        table = self._wandb.Table(columns=columns, data=[[s[name] for name in columns] for s in samples])
        self._run.log({"step": step, "completions": table})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """An MLflow run at metrics.mlflow, a tracking server's address or a store such as sqlite:///FILE."""

    def __init__(self, config: MetricsConfig, folder: str, options: dict[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(config.mlflow), Metric
        experiment = self._client.get_experiment_by_name(config.mlflow_experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(config.mlflow_experiment)
        run = self._client.create_run(number, run_name=os.path.basename(os.path.abspath(folder)))
        self._id = run.info.run_id
        parameters = [Param(f"{section}.{key}", str(value)[:6000]) for section, values in options.items()
                      for key, value in values.items()]
        for start in range(0, len(parameters), 100):  # as many as a call may have
            self._client.log_batch(self._id, params=parameters[start:start + 100])

    def write(self, step: int, metrics: dict[str, float]) -> None:
        now_ms = int(1000 * time.time())
        # It takes letters, digits and _ - . / and space in a name.
        self._client.log_batch(self._id, metrics=[self._metric(name.replace("@", "_at_"), float(value), now_ms, step)
                                                  for name, value in metrics.items()])

    def write_samples(self, step: int, samples: list[Sample]) -> None:
        """They are in completions.jsonl."""

    def close(self) -> None:
        self._client.set_terminated(self._id)


def make_sinks(config: MetricsConfig, folder: str, max_steps: int, steps_done: int, options: dict[str, Any],
               ) -> list[Sink]:
    """The sinks of a run, in its folder; steps_done: where a run that goes on stands; options: its whole config."""
    sinks: list[Sink] = [JsonLines(folder, steps_done), Console(max_steps)]
    if config.tensorboard:
        sinks.append(TensorBoard(os.path.join(folder, "tensorboard"), steps_done))
    if config.wandb != "off":
        sinks.append(WeightsAndBiases(config, folder, options))
    if config.mlflow:
        sinks.append(MLflow(config, folder, options))
    return sinks


def check(config: MetricsConfig) -> None:
    """Raises ConfigError, before anything is loaded, where a sink's extra is not installed."""
    for is_asked, module, field in ((config.wandb != "off", "wandb", "metrics.wandb"),
                                    (bool(config.mlflow), "mlflow", "metrics.mlflow")):
        if is_asked and importlib.util.find_spec(module) is None:
            raise ConfigError(f"{field} is {getattr(config, module)!r}: pip install 'spmd-rl[{module}]' first")
