"""Defines the configuration: one dataclass per section, with the types and limits of its keys.

The values are in YAML (``conf/``) alone: the dataclasses have no defaults. Sections with a ``_target_`` (model, data,
task, optimizer, lr_schedule) keep their keys as they are; the named function checks them. No torch is imported here, so
that the command refuses a wrong value within half a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from math import frexp, log2
from typing import Annotated, Any, Literal

from gpipe_cli.errors import Problems
from gpipe_cli.targets import Seed, contradictions, read_target
from gpipe_cli.typed_section import (
    Count,
    CountOrZero,
    Length,
    Positive,
    Seconds,
    Share,
    read_values,
    read_what_fits,
    shown,
    unknown_key,
)

MESSAGE_TAGS = 1 << 30  # messages between cells have tags below; those of the exchange begin here
TAGS_PER_CELL = 3  # of a micro-batch in a cell: its activation, its gradient, and a description of the boundary


@dataclass(frozen=True)
class PipelineConfig:
    """Describes how the model is cut and run (paper, section 2).

    Attributes:
        K: number of cells.
        M: micro-batches in a mini-batch, per replica.
        remat: which forwards are recomputed before their backward.
        schedule: the order of a worker's instructions.
        partition: the objective of the cut, or the number of layers of each cell.
        cost: how the cost of a layer is determined.
        workers: processes of one replica; the command replaces "auto" by a number before workers start.
        replicas: copies of the pipeline.
        threads: of each worker; another number may change the last bits of results.
        backend: how workers exchange tensors.
        device: where workers compute.
        sync_batchnorm: whether replicas share BatchNorm's training statistics (paper, section 2.2).
        compile: whether torch.compile compiles each layer.
        shard_optimizer: whether each replica keeps and updates only its share of the optimizer's state.
    """

    K: Count
    M: Count
    remat: Literal["always", "except_last", "never"]
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
    partition: Literal["min_max", "min_variance"] | Annotated[list[Count], Length()]
    cost: Literal["flops", "parameters", "declared", "profile"]
    workers: Literal["auto"] | Count
    replicas: Count
    threads: Count
    backend: Literal["auto", "gloo", "nccl"]
    device: Literal["auto", "cpu", "cuda"]
    sync_batchnorm: bool
    compile: bool
    shard_optimizer: bool

    @property
    def planned_workers(self) -> int:
        """Returns `workers`; "auto" stands for one worker per cell."""
        return self.workers_in(self.K)

    def workers_in(self, room: int) -> int:
        """Returns `workers`; "auto" stands for one worker per cell, at most ``room``.

        interleaved_1f1b gets a number of workers that divides K, so that all have the same number of cells.

        Args:
            room: the largest number of workers of one replica, at least 1.
        """
        if self.workers != "auto":
            return self.workers
        most = min(self.K, room)
        if self.schedule != "interleaved_1f1b":
            return most
        return max(number for number in range(1, most + 1) if self.K % number == 0)

    @property
    def worker_count(self) -> int:
        """Returns `workers` as a number.

        Raises:
            ValueError: it is still "auto".
        """
        if self.workers == "auto":
            raise ValueError("pipeline.workers=auto: the command must replace it before workers start")
        return self.workers


@dataclass(frozen=True)
class TrainerConfig:
    """Describes the training loop.

    Attributes:
        steps, epochs, seconds: the run ends at the first of these limits; null: no limit.
        evaluate_every: steps between evaluations; null: only at the end.
        evaluate_first: evaluates before the first step, too.
        gradient_clip: largest global gradient norm; null: no clipping.
        nonfinite_limit: the run fails after this number of skipped (not finite) updates in a row.
        patience: the run ends after this number of evaluations in a row without a better loss; null: never.
        samples: number of outputs printed after an evaluation.
        average: decay of the moving average of weights and BatchNorm statistics that evaluation uses; null: none.
        trace_steps: one or several steps that are recorded for a trace viewer; null: none.
    """

    steps: Count | None
    epochs: Positive | None
    seconds: Seconds | None
    evaluate_every: Count | None
    evaluate_first: bool
    gradient_clip: Positive | None
    nonfinite_limit: Count
    patience: Count | None
    samples: CountOrZero
    average: Share | None
    trace_steps: Count | list[Count] | None

    @property
    def traced_steps(self) -> list[int]:
        """Returns `trace_steps` as a list."""
        steps = self.trace_steps
        return steps if isinstance(steps, list) else [] if steps is None else [steps]


@dataclass(frozen=True)
class PrecisionConfig:
    """Describes the number types.

    Attributes:
        autocast: the type of matrix products; null: that of the weights, float32.
        boundaries: the type of the tensors between two layers; null: that in which a layer returns them.
        loss_scale: factor of the loss in backward, for a start: it is halved when gradients overflow, and doubled after
            2000 steps without; null: none.
        tf32: whether a GPU may round the factors of float32 products to TF32, which has 10 bits for 23.
    """

    autocast: Literal["bfloat16", "float16"] | None
    boundaries: Literal["bfloat16", "float16"] | None
    loss_scale: Positive | None
    tf32: bool


@dataclass(frozen=True)
class CheckpointConfig:
    """Describes what is saved and how a run begins.

    Attributes:
        every: steps between checkpoints; null: only at the end.
        keep: number of newest checkpoints that are kept, beside the best one.
        resume: null, "auto", or the path of a run or a checkpoint. "auto" is the newest checkpoint of this run
            directory; without hydra.run.dir, of the run beside it that saved last; a new run if there is none.
        allow_changes: keys that may differ from the checkpoint's configuration.
        init_from: null, or a run or checkpoint whose weights and buffers a new run begins with (transfer), or weights
            made elsewhere: a .safetensors or weights-only .pt file, or a folder as the transformers library saves it.
        init_except: patterns of layers ("head") and of tensors in them ("*.auxiliary_head.*") that begin anew.
        init_average: uses the averaged weights if that run kept them.
    """

    every: Count | None
    keep: Count
    resume: str | None
    allow_changes: list[str]
    init_from: str | None
    init_except: list[str]
    init_average: bool


@dataclass(frozen=True)
class LoggingConfig:
    """Describes what a run prints and writes.

    Attributes:
        every: steps between console lines (without a progress bar) and between TensorBoard scalars.
        tensorboard: writes TensorBoard files.
        console: "auto": a progress bar in a terminal, lines elsewhere; "plain": always lines.
    """

    every: Count
    tensorboard: bool
    console: Literal["auto", "plain"]


@dataclass(frozen=True)
class LaunchConfig:
    """Describes the worker processes.

    Attributes:
        grace_seconds: time from the request to stop until workers are killed. Not under torchrun and srun.
        stall_seconds: the run fails after this time without progress; null: never. Not under torchrun.
        restarts: after a worker's death the run starts again from its newest checkpoint, at most so often. Under
            torchrun its `--max-restarts` does this.
        inline: runs everything inside the command's own process, for a debugger.
    """

    grace_seconds: Seconds
    stall_seconds: Seconds | None
    restarts: CountOrZero
    inline: bool


@dataclass(frozen=True)
class VerifyConfig:
    """Describes what gpipe-verify compares.

    Attributes:
        steps: number of mini-batches that are compared from the first on.
        later: number of one more, after a step that is skipped, a checkpoint and a resume.
        dtype: of weights and activations: as configured, or float64.
        format: of the report on the console.
    """

    steps: Count
    later: Count
    dtype: Literal["configured", "float64"]
    format: Literal["text", "json"]


@dataclass(frozen=True)
class Settings:
    """Holds the whole configuration; the sections of `FREE_FORM` are plain dictionaries."""

    name: str | None
    seed: CountOrZero
    model: dict[str, Any]
    data: dict[str, Any]
    task: dict[str, Any]
    optimizer: dict[str, Any]
    lr_schedule: dict[str, Any]
    pipeline: PipelineConfig
    trainer: TrainerConfig
    precision: PrecisionConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    launch: LaunchConfig
    verification: VerifyConfig | None  # None unless gpipe-verify runs it

    @property
    def verify(self) -> VerifyConfig:
        """Returns the section `verify`.

        Raises:
            ValueError: the configuration is not one of gpipe-verify.
        """
        if self.verification is None:
            raise ValueError("the section verify is part of gpipe-verify's configuration alone")
        return self.verification

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Settings:
        """Checks a resolved configuration and converts its values.

        Raises:
            ConfigurationError: it has one line for each wrong key or value: name, limit, what to type instead.
        """
        problems = Problems()
        settings = cls.read(config, problems)
        problems.refuse()
        return settings

    @classmethod
    def read(cls, config: Mapping[str, Any], problems: Problems, checks: Checks = ()) -> Settings:
        """Checks a resolved configuration as `from_config`, and adds each defect to ``problems``.

        Args:
            checks: further ones.

        Returns:
            Without defects the settings; else an object that has the right values alone.
        """
        problems += [unknown_key(key, SECTIONS) for key in config if key not in (*SECTIONS, "verify")]
        problems += [
            f"{key} is missing from the configuration"
            for key in SECTIONS
            if key not in config and not problems.about(key)
        ]
        values: dict[str, Any] = {"verification": None, **read_values(TOP_LEVEL, config, "", problems)}
        for section in filter(config.__contains__, FREE_FORM):
            values[section] = read_target(section, config[section], problems)
        for section, kind in filter(lambda item: item[0] in config, TYPED.items()):
            values[section] = read_what_fits(kind, config[section], section, problems)
        if "verify" in config:
            values["verification"] = read_what_fits(VerifyConfig, config["verify"], "verify", problems)
        settings = object.__new__(cls)
        for key, value in values.items():
            object.__setattr__(settings, key, value)  # the dataclass is frozen
        with_values = suppress(AttributeError) if problems else nullcontext()
        for check in (*CHECKS, *checks):
            with with_values:  # a check of what is wrong is left out
                if problem := check(settings):
                    problems.append(problem)
        problems += contradictions(*(values.get(section, {}) for section in FREE_FORM))
        return settings


Checks = tuple[Callable[[Settings], str | None], ...]
TOP_LEVEL: dict[str, Any] = {"name": str | None, "seed": Seed}
FREE_FORM = ("model", "data", "task", "optimizer", "lr_schedule")
TYPED: dict[str, type] = {
    "pipeline": PipelineConfig,
    "trainer": TrainerConfig,
    "precision": PrecisionConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "launch": LaunchConfig,
}
SECTIONS = (*TOP_LEVEL, *FREE_FORM, *TYPED)


def known_keys() -> list[str]:
    """Returns every key of the typed sections and of the top level, dotted."""
    return [*SECTIONS, *(key for section, kind in TYPED.items() for key in keys_of(section, kind))]


def keys_of(section: str, kind: type) -> list[str]:
    """Returns the keys of one section, dotted."""
    return [f"{section}.{field.name}" for field in fields(kind)]


# -- relations between keys --------------------------------------------------------------------------------------------


def _enough_examples(settings: Settings) -> str | None:
    size, parts = settings.data.get("batch_size"), settings.pipeline.M * settings.pipeline.replicas
    if size is None or settings.data.get("batch_tokens") is not None:
        return None  # counted in tokens: the data source checks it
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        return f"data.batch_size={shown(size)}: use a whole number, at least 1"
    if size >= parts:
        return None
    replicas = settings.pipeline.replicas
    needs = f"pipeline.M={settings.pipeline.M}" + (f" × pipeline.replicas={replicas}" if replicas > 1 else "")
    lower = f"pipeline.M<={size // replicas}" if size >= replicas else f"pipeline.replicas<={size}"
    return (
        f"{needs} needs {parts} examples in a mini-batch but data.batch_size={size}: "
        f"use data.batch_size>={parts} or {lower}"
    )


def _workers_have_cells(settings: Settings) -> str | None:
    K, workers = settings.pipeline.K, settings.pipeline.workers
    if workers == "auto" or workers <= K:
        return None
    return (
        f"pipeline.workers={workers} but pipeline.K={K}: a worker needs at least one cell, "
        f"use pipeline.workers<={K} or pipeline.K>={workers}"
    )


def _tags_suffice(settings: Settings) -> str | None:
    M, cells, most = settings.pipeline.M, settings.pipeline.K, MESSAGE_TAGS // TAGS_PER_CELL
    if M * cells <= most:
        return None
    lower = f"pipeline.M<={most // cells}" if cells <= most else f"pipeline.K<={most}"
    return (
        f"pipeline.M={M} × pipeline.K={cells} are more messages between cells than the {most} that can be told apart: "
        f"use {lower}"
    )


def _cells_go_round(settings: Settings) -> str | None:
    pipeline = settings.pipeline
    K, workers = pipeline.K, pipeline.workers
    if pipeline.schedule != "interleaved_1f1b" or workers == "auto" or workers > K or K % workers == 0:
        return None
    return (
        f"pipeline.schedule=interleaved_1f1b gives each worker the same number of cells, but pipeline.K={K} is no "
        f"multiple of pipeline.workers={workers}: use pipeline.K={K - K % workers} or {K - K % workers + workers}, or "
        f"pipeline.workers={' or '.join(str(number) for number in range(1, K + 1) if K % number == 0)}"
    )


def _sizes_match_cells(settings: Settings) -> str | None:
    sizes, K = settings.pipeline.partition, settings.pipeline.K
    if isinstance(sizes, str) or len(sizes) == K:
        return None
    return (
        f"pipeline.partition={shown(sizes)} has {len(sizes)} sizes but pipeline.K={K}: "
        f"give one size per cell, or use pipeline.K={len(sizes)}"
    )


def _has_an_end(settings: Settings) -> str | None:
    trainer = settings.trainer
    if trainer.steps or trainer.epochs or trainer.seconds:
        return None
    return "trainer.steps, trainer.epochs and trainer.seconds are all null: set one, as trainer.steps=1000"


def _traced_steps_are_run(settings: Settings) -> str | None:
    trainer = settings.trainer
    late = [step for step in trainer.traced_steps if trainer.steps is not None and step > trainer.steps]
    if not late:
        return None
    return (
        f"trainer.trace_steps={shown(trainer.trace_steps)} but trainer.steps={trainer.steps}: step {late[0]} never "
        f"comes, use numbers from 1 to {trainer.steps}"
    )


def _patience_is_tested(settings: Settings) -> str | None:
    if settings.trainer.patience is None or settings.trainer.evaluate_every is not None:
        return None
    return "trainer.patience counts evaluations: set trainer.evaluate_every too, as trainer.evaluate_every=100"


def _backend_fits_device(settings: Settings) -> str | None:
    if settings.pipeline.backend != "nccl" or settings.pipeline.device != "cpu":
        return None
    return "pipeline.backend=nccl moves data between GPUs but pipeline.device=cpu: use pipeline.backend=auto"


def _inline_is_one_worker(settings: Settings) -> str | None:
    pipeline = settings.pipeline
    if not settings.launch.inline or (pipeline.workers in ("auto", 1) and pipeline.replicas == 1):
        return None
    return (
        "launch.inline=true runs one worker inside the command: "
        "use pipeline.workers=1 pipeline.replicas=1 (pipeline.K can stay)"
    )


def _restarts_need_workers(settings: Settings) -> str | None:
    if not settings.launch.inline or not settings.launch.restarts:
        return None
    return (
        f"launch.restarts={settings.launch.restarts} starts workers again, but launch.inline=true has none: leave out "
        "one of them"
    )


def _loss_scale_is_exact(settings: Settings) -> str | None:
    scale = settings.precision.loss_scale
    if scale is None or frexp(scale)[0] == 0.5:
        return None
    return f"precision.loss_scale={scale:g} is no power of two, and would round: use {2.0 ** round(log2(scale)):g}"


def _begins_in_one_way(settings: Settings) -> str | None:
    checkpoint = settings.checkpoint
    if checkpoint.init_from is None or checkpoint.resume in (None, "auto"):
        return None
    return (
        f"checkpoint.init_from={checkpoint.init_from} begins a new run, checkpoint.resume={checkpoint.resume} resumes "
        "one, which has its own weights: leave out one of them"
    )


def _init_except_has_a_source(settings: Settings) -> str | None:
    checkpoint = settings.checkpoint
    if not checkpoint.init_except or checkpoint.init_from is not None:
        return None
    return (
        f"checkpoint.init_except={shown(checkpoint.init_except)} says what checkpoint.init_from does not bring, which "
        "is null: type checkpoint.init_from=RUN too, or leave it out"
    )


def _changes_are_of_keys(settings: Settings) -> str | None:
    known = known_keys()
    for pattern in settings.checkpoint.allow_changes:
        section = pattern.partition(".")[0]
        if not any(fnmatchcase(key, pattern if section in TYPED else section) for key in known):
            return f"checkpoint.allow_changes: {unknown_key(pattern, known)}"
    return None


CHECKS: Checks = (
    _enough_examples,
    _workers_have_cells,
    _tags_suffice,
    _cells_go_round,
    _sizes_match_cells,
    _has_an_end,
    _traced_steps_are_run,
    _patience_is_tested,
    _backend_fits_device,
    _inline_is_one_worker,
    _restarts_need_workers,
    _begins_in_one_way,
    _init_except_has_a_source,
    _changes_are_of_keys,
    _loss_scale_is_exact,
)
