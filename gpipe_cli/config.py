"""Defines the configuration: one dataclass per section, with the types and limits of its keys.

The values are in YAML (``conf/``) alone: the dataclasses have no defaults. Sections with a ``_target_`` (model, data,
task, optimizer, lr_schedule) keep their keys as they are: `factory.build` checks those of our own targets against their
signatures. No torch is imported here, so that the command refuses a wrong value within half a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from math import frexp, log2
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from gpipe_cli.errors import Problems
from gpipe_cli.typed_section import (
    Bytes,
    Count,
    CountOrZero,
    Depth,
    NotNegative,
    PartAboveZero,
    Positive,
    Seconds,
    Seed,
    Share,
    ShareOrZero,
    read_section,
    read_values,
    shown,
    unknown_key,
)

MOST_FORWARDS = 1 << 20  # of a step: lists of more would fill the memory

# Values of keys that are `auto`, until the planner has chosen others: a cell for every device there may be.
BEFORE_CHOICE = {"K": 1 << 20, "M": 1, "schedule": "1f1b", "remat": "always", "replicas": 1}


class WorkerDevice(TypedDict, total=False):
    """Describes a worker's device: its speed, relative to the others', and its memory, as 24GB."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    speed: Positive
    memory: Bytes


Kind = Literal["gpipe", "1f1b", "interleaved_1f1b", "breadth_first", "zero_bubble"]
Placement = Literal["pipeline_inside", "replicas_inside"]  # what lies inside a node
ROUND_ROBIN = ("interleaved_1f1b", "breadth_first")  # cell c lies on worker c mod W; else neighbours lie together


def _named_as_file(name: str) -> str:
    if not {".", "/"} & {*name}:
        raise PydanticCustomError("file", "Input should be a file of instruction lists, as ./lists.txt")
    return name


@dataclass(frozen=True)
class PipelineConfig:
    """Describes how the model is cut and run (paper, section 2).

    Attributes:
        K: number of cells.
        M: micro-batches in a mini-batch, per replica.
        remat: the forwards that are recomputed before their backward.
        keep: the most graphs that each cell keeps at once, in place of `remat`: one number for all, or one for each.
        schedule: the order of a worker's instructions: a kind, or a file of instruction lists.
        partition: the objective of the cut, or the layers of each cell; auto: the shortest simulated step.
        cost: source of the layers' costs.
        worker_devices: speed and memory of each worker of a replica; null: they are alike.
        memory: most bytes that a worker may hold, as 16GB; null: all of its device.
        workers: processes of one replica; the command replaces "auto" by a number before workers start.
        replicas: copies of the pipeline.
        placement: workers that lie in one node: those of a replica, or the replicas of a worker; auto: as planned.
        threads: number for each worker; another number may change the last bits of results.
        backend: library through which workers exchange tensors.
        device: the kind of device that workers compute on.
        sync_batchnorm: replicas share BatchNorm's training statistics (paper, section 2.2).
        compile: torch.compile compiles each layer.
        shard_optimizer: each replica keeps and updates only its share of the optimizer's state.
        offload: state of cells lies in a file, or on a GPU's host, while they do not run.
        offload_dir: folder of that file; null: where the command is typed.
        auto: keys that the planner chooses before the run begins; until then they have the values of `BEFORE_CHOICE`.
    """

    K: Count
    M: Count
    remat: Literal["always", "except_last", "never"]
    keep: CountOrZero | Annotated[list[CountOrZero], Field(min_length=1)] | None
    schedule: Kind | Annotated[str, AfterValidator(_named_as_file)]
    partition: Literal["auto", "min_variance"] | Annotated[list[Count], Field(min_length=1)]
    cost: Literal["flops", "parameters", "declared", "profile"]
    worker_devices: Annotated[list[WorkerDevice], Field(min_length=1)] | None
    memory: Bytes | None
    workers: Literal["auto"] | Depth
    replicas: Count
    placement: Literal["auto"] | Placement
    threads: Depth
    backend: Literal["auto", "gloo", "nccl"]
    device: Literal["auto", "cpu", "cuda"]
    sync_batchnorm: bool
    compile: bool
    shard_optimizer: bool
    offload: bool
    offload_dir: str | None
    auto: list[str]

    @property
    def policy(self) -> str | int | list[int]:
        """Returns `keep`, or `remat` where there is no `keep`: the argument of `schedule.kept_graphs`."""
        return self.remat if self.keep is None else self.keep

    @property
    def planned_workers(self) -> int:
        """Returns `workers`; "auto" stands for one worker per cell."""
        return self.workers_in(self.K)

    def why_not_on(self, workers: int) -> str:
        """Returns why the cells cannot lie on so many workers; empty if they can."""
        K = self.K
        if workers > K:
            return f"pipeline.workers={workers} but pipeline.K={K}: use pipeline.workers<={K} or pipeline.K>={workers}"
        if self.schedule in ROUND_ROBIN and (rest := K % workers):
            several = f"pipeline.schedule={self.schedule} needs a multiple of pipeline.workers={workers} cells"
            return f"{several}, not pipeline.K={K}: use pipeline.K={K - rest} or {K - rest + workers}"
        return ""

    def workers_in(self, room: int) -> int:
        """Returns `workers`; "auto" stands for one worker per cell, at most ``room``.

        A kind of `ROUND_ROBIN` gets a number of workers that divides K, so that all have the same number of cells.

        Args:
            room: the largest number of workers of one replica, at least 1.
        """
        if self.workers != "auto":
            return self.workers
        most = min(self.K, len(self.worker_devices or ()) or room)
        if "K" in self.auto or self.schedule not in ROUND_ROBIN:
            return most
        return max(number for number in range(1, most + 1) if self.K % number == 0)

    @property
    def speeds(self) -> list[float]:
        """Returns the relative speed of each worker's device; empty where they are alike."""
        return [device.get("speed", 1.0) for device in self.worker_devices or ()]

    @property
    def worker_count(self) -> int:
        """Returns `workers` as a number, which the command has put in place of "auto" before workers start."""
        assert self.workers != "auto"
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


@dataclass(frozen=True)
class PrecisionConfig:
    """Describes the number types.

    Attributes:
        autocast: the type of matrix products; null: that of the weights, float32.
        boundaries: the type of the tensors between two layers; null: that in which a layer returns them.
        loss_scale: factor of the loss in backward, for a start: it is halved when gradients overflow, and doubled after
            2000 steps without; null: none.
        tf32: a GPU may round the factors of float32 products to TF32, which has 10 bits for 23.
        deterministic: a GPU takes only kernels that give the same bits in every run.
    """

    autocast: Literal["bfloat16", "float16"] | None
    boundaries: Literal["bfloat16", "float16"] | None
    loss_scale: Positive | None
    tf32: bool
    deterministic: bool


@dataclass(frozen=True)
class CheckpointConfig:
    """Describes which checkpoints are saved, and from which checkpoint a run begins.

    Attributes:
        every: steps between checkpoints; null: only at the end.
        keep: number of newest checkpoints that are kept, beside the best one.
        resume: null, "auto", or the path of a run or a checkpoint. "auto" is the newest checkpoint of this run
            directory; without hydra.run.dir, of the run beside it that saved last; a new run if there is none.
        allow_changes: keys that may differ from the checkpoint's configuration.
        init_from: null, or a run or checkpoint whose weights and buffers a new run begins with (transfer), or weights
            made elsewhere: a .safetensors or weights-only .pt file, or a folder as the transformers library saves it.
        init_except: patterns of layers ("head") and of tensors in them ("*.auxiliary_head.*") that begin anew.
    """

    every: Count | None
    keep: Count
    resume: str | None
    allow_changes: list[str]
    init_from: str | None
    init_except: list[str]


class Tracker(TypedDict):
    """Describes a tracker of the user's own: the function to call; other keys are its arguments."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    _target_: str


@dataclass(frozen=True)
class LoggingConfig:
    """Describes the lines that a run prints and the logs that it writes.

    Attributes:
        every: steps between console lines (without a progress bar) and between TensorBoard scalars.
        tensorboard: writes TensorBoard files.
        console: "auto": a progress bar in a terminal, lines elsewhere; "plain": always lines.
        trackers: "wandb", or sections with a `_target_` (metrics/trackers.py).
    """

    every: Count
    tensorboard: bool
    console: Literal["auto", "plain"]
    trackers: list[Literal["wandb"] | Tracker]


@dataclass(frozen=True)
class LaunchConfig:
    """Describes the worker processes.

    Attributes:
        grace_seconds: time from the request to stop until workers are killed. Not under torchrun and srun.
        restarts: most starts again after a worker's death, each from the newest checkpoint. Under torchrun its
            `--max-restarts` does this.
        hang_minutes: time without any progress after which rank 0 prints once where every worker is; null: never.
        inline: runs everything inside the command's own process, for a debugger.
    """

    grace_seconds: Seconds
    restarts: CountOrZero
    inline: bool
    hang_minutes: Positive | None = 10.0


@dataclass(frozen=True)
class VerifyConfig:
    """Describes the steps and settings that gpipe-verify compares.

    Attributes:
        steps: number of mini-batches that are compared from the first on.
        dtype: type of weights and activations: as configured, or float64.
        format: form of the report on the console.
    """

    steps: Count
    dtype: Literal["configured", "float64"]
    format: Literal["text", "json"]


@dataclass(frozen=True)
class SamplingSettings:
    """Describes how gpipe-generate chooses tokens; its command line gives the values.

    Attributes:
        length: tokens after which a continuation ends anyway.
        temperature: divides the logits; 0: the most probable token, without a draw.
        top_k: number of most probable tokens to draw from; None: all.
        top_p: probability of the most probable tokens, together, to draw from; 1: all.
        seed: seed of the draws.
        samples: continuations of each prompt.
    """

    length: Annotated[int, Field(ge=1, le=65_536)] = 64
    temperature: NotNegative = 1.0
    top_k: Count | None = None
    top_p: PartAboveZero = 1.0
    seed: Seed = 0
    samples: Annotated[int, Field(ge=1, le=1024)] = 1


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
        """Returns the section `verify`, which the configuration of gpipe-verify alone has."""
        assert self.verification is not None
        return self.verification

    @classmethod
    def from_config(cls, config: Mapping[str, Any], found: Problems | None = None) -> Settings:
        """Checks a resolved configuration and converts its values.

        Args:
            found: problems found before, which go into the same error.

        Raises:
            ConfigurationError: it has one line for each wrong key or value.
        """
        problems = Problems(found or ())
        problems += [unknown_key(str(key), SECTIONS) for key in config if key not in (*SECTIONS, "verify")]
        problems += [f"{key} is missing from the configuration" for key in SECTIONS if key not in config]
        values: dict[str, Any] = read_values(TOP_LEVEL, config, "", problems)
        for section in filter(config.__contains__, FREE_FORM):
            values[section] = _read_target(section, config[section], problems)
        kinds = {**TYPED, "verify": VerifyConfig}
        for name in filter(config.__contains__, kinds):
            with problems.collected():
                values[name] = read_section(kinds[name], _before_choice(name, config[name]), name)
        problems.refuse()
        settings = cls(verification=values.pop("verify", None), **values)
        Problems([*_of_pipeline(settings), *_of_run(settings)]).refuse()
        return settings


def _before_choice(name: str, section: Any) -> Any:
    """Returns a section. In pipeline, keys that are auto get the values of `BEFORE_CHOICE`, and `auto` lists them."""
    if name != "pipeline" or not isinstance(section, Mapping):
        return section
    auto = [key for key in BEFORE_CHOICE if section.get(key) == "auto"]
    return {**section, **{key: BEFORE_CHOICE[key] for key in auto}, "auto": auto}


def _read_target(section: str, values: Any, problems: Problems) -> dict[str, Any]:
    """Returns a section with a `_target_`; adds lines to ``problems`` for a missing target and wrong values.

    Only values of optimizers are checked here. Others are checked by the signature of what is called.
    """
    target = values.get("_target_") if isinstance(values, Mapping) else values
    if not isinstance(target, str) or not target.strip(".") or target is values:
        given = f"{section}._target_={shown(target)}"
        problems.append(f"{given}: use the dotted name of what to call, as {section}._target_=my_module.my_{section}")
        return {}
    hints = OPTIMIZER if target.startswith(("torch.optim.", "gpipe_cli.optim.")) else {}
    if target == "torch.optim.Adafactor":
        hints = {**hints, "eps": Annotated[list[NotNegative | None], Field(min_length=2, max_length=2)]}
    if section == "optimizer":
        if isinstance(values.get("rest"), Mapping):
            read_values(hints, values["rest"], "optimizer.rest.", problems)
        hints, found = {**hints, "groups": list[dict[str, Any]] | None}, values.get("groups")
        for number, group in enumerate(found if isinstance(found, list) else ()):
            if isinstance(group, Mapping):
                read_values({**hints, **GROUP}, group, f"optimizer.groups[{number}].", problems)
                if not {"match", "only"} & group.keys():
                    problems.append(f"optimizer.groups[{number}]={shown(group)}: give match or only: which parameters")
    return {**values, **read_values(hints, values, f"{section}.", problems)}


TOP_LEVEL: dict[str, Any] = {"name": str | None, "seed": Seed}
OPTIMIZER: dict[str, Any] = {  # of torch's optimizers and ours, which are made after the model is built
    **dict.fromkeys(("lr", "weight_decay", "momentum", "alpha", "dampening", "eps"), NotNegative),
    **dict.fromkeys(("fused", "foreach", "amsgrad", "nesterov", "maximize", "capturable", "centered"), bool | None),
    "betas": Annotated[list[ShareOrZero], Field(min_length=2, max_length=2)],
}
GROUP: dict[str, Any] = {  # keys of an entry of optimizer.groups beside the optimizer's own
    "match": str | list[str],
    "only": Literal["vectors", "matrices", "hidden"],
    "lr_factor": NotNegative,
    "frozen": bool,
    "muon": bool,
}
FREE_FORM = ("model", "data", "task", "optimizer", "lr_schedule")
TYPED: dict[str, Any] = {name: kind for name, kind in get_type_hints(Settings).items() if is_dataclass(kind)}
SECTIONS = (*TOP_LEVEL, *FREE_FORM, *TYPED)


def known_keys() -> list[str]:
    """Returns every key of the typed sections and of the top level, dotted."""
    return [*SECTIONS, *(f"{section}.{field.name}" for section, kind in TYPED.items() for field in fields(kind))]


# -- what our own targets are for: a user's own may be for anything --------------------------------------------------

KINDS = {
    "gpipe_cli.models.transformer.transformer": "translation",
    "gpipe_cli.data.cldr.source.TranslationSource": "translation",
    "gpipe_cli.data.parallel.source.ParallelTextSource": "translation",
    "gpipe_cli.tasks.translation.TranslationTask": "translation",
    "gpipe_cli.models.transformer_lm.transformer_lm": "text",
    "gpipe_cli.data.cldr.source.TextSource": "text",
    "gpipe_cli.data.text.source.TextFilesSource": "text",
    "gpipe_cli.tasks.language_model.LanguageModelTask": "text",
    "gpipe_cli.models.amoebanet.amoebanet": "images",
    "gpipe_cli.data.images.digits.DigitsSource": "images",
    "gpipe_cli.data.images.source.ImageSource": "images",
    "gpipe_cli.tasks.classification.ClassificationTask": "images",
}

# -- relations between keys --------------------------------------------------------------------------------------------


def _of_pipeline(settings: Settings) -> Iterator[str]:
    """Yields a line for each contradiction between keys of pipeline, or with the mini-batch's size."""
    yield from _of_kinds({name: getattr(settings, name) for name in ("model", "data", "task")})
    pipeline, size = settings.pipeline, settings.data.get("batch_size")
    K, M, replicas, workers, sizes = pipeline.K, pipeline.M, pipeline.replicas, pipeline.workers, pipeline.partition
    if M * (1 if "K" in pipeline.auto else K) > MOST_FORWARDS:
        yield f"pipeline.K={K} × pipeline.M={M}: a step has at most {MOST_FORWARDS:,} forwards, lower one of them"
    elif isinstance(size, int) and 1 <= size < M * replicas and settings.data.get("batch_tokens") is None:
        needed = f"pipeline.M={M} × pipeline.replicas={replicas} needs {M * replicas} examples"
        way = f"use data.batch_size>={M * replicas} or pipeline.M<={size // replicas}"
        yield f"{needed} in a mini-batch but data.batch_size={size}: {way}"
    if workers != "auto" and (why := pipeline.why_not_on(workers)):
        yield why
    if pipeline.schedule not in get_args(Kind) and (pipeline.auto or pipeline.keep is not None):
        yield f"pipeline.schedule={pipeline.schedule} says what is kept, K and M: neither auto nor pipeline.keep"
    if pipeline.offload:
        no = [key for key in ("compile", "shard_optimizer") if getattr(pipeline, key)]
        no += [f"schedule={pipeline.schedule}"] * (pipeline.schedule not in get_args(Kind)) + pipeline.auto
        yield from (f"pipeline.offload=true does not go with pipeline.{key} yet" for key in no)
        if pipeline.schedule not in ("gpipe", "breadth_first") and workers != "auto" and workers < K:
            brings = f"pipeline.schedule={pipeline.schedule} would bring cells for each micro-batch"
            yield f"pipeline.offload=true: {brings}: use gpipe or breadth_first, or pipeline.K={workers}"
    for key, given in (("partition", sizes), ("keep", pipeline.keep)):
        if isinstance(given, list) and len(given) != K:
            counts = f"pipeline.{key}={shown(given)} has {len(given)} numbers but pipeline.K={K}"
            yield f"{counts}: give one for each cell, or use pipeline.K={len(given)}"


def _of_run(settings: Settings) -> Iterator[str]:
    """Yields a line for each contradiction between keys of trainer, and for a loss scale that would round."""
    trainer, scale = settings.trainer, settings.precision.loss_scale
    if not (trainer.steps or trainer.epochs or trainer.seconds):
        yield "trainer.steps, trainer.epochs and trainer.seconds are all null: set one, as trainer.steps=1000"
    if trainer.patience is not None and trainer.evaluate_every is None:
        yield "trainer.patience counts evaluations: set trainer.evaluate_every too, as trainer.evaluate_every=100"
    if scale is not None and frexp(scale)[0] != 0.5:
        yield f"precision.loss_scale={scale:g} is no power of two, and would round: use {2.0 ** round(log2(scale)):g}"


def _of_kinds(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields a line if the sections model, data and task are for different things."""
    kinds = {name: KINDS[values["_target_"]] for name, values in sections.items() if values.get("_target_") in KINDS}
    if kinds.get("task") == "text" and "translation" in kinds.values():
        del kinds["task"]  # the loss of a translation's target side
    if len(set(kinds.values())) > 1:
        said = ", ".join(f"{name} is for {kind}" for name, kind in kinds.items())
        yield f"{said}: all must be for the same; model=… brings the data and the task that fit it"
