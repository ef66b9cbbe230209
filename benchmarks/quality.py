"""Trains the default jobs, and beside each a plain torch loop with a model of the same size on the same mini-batches.

The plain loop is what a practitioner would write in 2026, in one process: a GPT of today's parts, `nn.Transformer`,
torchvision's ResNet-18, with a warm-up and half a cosine. AdamW for all parameters, or Muon for the matrices of layers
(convolutions too, flattened): whichever has the lower evaluation loss after an eighth of the processor seconds that the
job took, start included, then gets all of them.
`at the end` is the training loss, a mean over a twentieth of the steps; `ln V` is that of a model that knows nothing.
`evaluation` is the loss on the job's evaluation set, `accuracy` there.
"""

import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import resnet18  # type: ignore[import-untyped]
from torchvision.transforms import v2  # type: ignore[import-untyped]

from benchmarks.common import Row, children_seconds, parser, report
from gpipe_cli.benchmarks.tables.workers import run_command
from gpipe_cli.commands.plan import make_request
from gpipe_cli.config import Settings
from gpipe_cli.data.source import no_report
from gpipe_cli.factory.build import build_source, build_task
from gpipe_cli.json_files import read_rows
from gpipe_cli.optim.muon import Muon
from gpipe_cli.svg import Curve, plot, running_means

JOBS = {
    "transformer": ("model=transformer", "pipeline.K=16", "pipeline.remat=never", "pipeline.schedule=zero_bubble"),
    "transformer_lm_small": ("model=transformer_lm_small", "pipeline.workers=1"),
    "amoebanet": ("model=amoebanet",),
}
ADAMW = {"transformer": 3e-3, "transformer_lm_small": 1e-3, "amoebanet": 3e-3}  # rates of it alone: found
MUON, MATRICES, TABLES = 4e-3, 5, 3  # beside Muon: AdamW's rate; times it Muon's, and that of tables
TRIAL = 1 / 8  # share of the seconds
BOUND = 15.0  # of logits
WARM_UP = 0.05  # share of the plain loop's time
WINDOW = 20  # steps are averaged over this part of a run
POINTS = 60  # of a curve
COLUMNS = {"job": "", "side": "", "parameters": ",d", "steps": "d", "processor seconds": ".0f", "ln V": ".2f"}
COLUMNS |= {"at the end": ".3f", "evaluation": ".3f", "accuracy": ".2%"}


def norm(x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, x.shape[-1:])


class Block(nn.Module):
    """Holds an attention and a feed-forward layer, each x + f(norm(x)), that begin as the identity."""

    def __init__(self, heads: int, d_model: int, H: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value, self.mixed = (nn.Linear(d_model, n * d_model, bias=False) for n in (3, 1))
        self.up, self.down = nn.Linear(d_model, H, bias=False), nn.Linear(H, d_model, bias=False)
        nn.init.zeros_(self.mixed.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        query, key, value = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.query_key_value(norm(x)).chunk(3, -1)
        )
        query, key = (_turned(norm(one), turn) for one in (query, key))
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.up(norm(x)).relu().square())  # type: ignore[no-any-return]


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """Returns [b, A, t, w] turned by the angles of the positions (rotary), given as cosines and sines [2, t, w/2]."""
    left, right = x.chunk(2, -1)
    return torch.cat((left * turn[0] + right * turn[1], right * turn[0] - left * turn[1]), -1)


class Gpt(nn.Module):
    """Predicts the next tokens [b, t, V] of ids [b, t], as the plain loops of 2026 do (nanochat).

    RMS norms without weights, rotary positions, norms of queries and keys, squared ReLU, bounded logits.
    """

    turn: Tensor

    def __init__(self, L: int, H: int, heads: int, d_model: int, vocabulary: int, longest: int) -> None:
        super().__init__()
        self.tokens, self.softmax = nn.Embedding(vocabulary, d_model), nn.Linear(d_model, vocabulary, bias=False)
        self.layers = nn.ModuleList(Block(heads, d_model, H) for _ in range(L))
        nn.init.zeros_(self.softmax.weight)
        waves = 10_000 ** -torch.linspace(0, 1, d_model // heads // 2)
        angles = torch.outer(torch.arange(longest), waves)
        self.register_buffer("turn", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = norm(self.tokens(ids))
        for layer in self.layers:
            x = layer(x, self.turn[:, : ids.shape[1]])
        return BOUND * torch.tanh(self.softmax(norm(x)) / BOUND)


class TorchTranslator(nn.Module):
    """Predicts the next target tokens [b, t, V] of source ids [b, s] and target ids [b, t] by `nn.Transformer`."""

    def __init__(self, L: int, H: int, heads: int, d_model: int, vocabulary: int, longest: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, d_model), nn.Embedding(vocabulary, d_model)
        self.places = nn.Embedding(longest, d_model)
        self.both = nn.Transformer(d_model, heads, L, L, H, 0.0, batch_first=True, norm_first=True)
        self.softmax = nn.Linear(d_model, vocabulary)
        for table in (self.source, self.target, self.places, self.softmax):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        padding = torch.zeros(source.shape).masked_fill(source == 0, -math.inf)
        x, y = (
            table(ids) + self.places.weight[: ids.shape[1]]
            for table, ids in ((self.source, source), (self.target, target))
        )
        masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding, "tgt_mask": mask}
        return self.softmax(self.both(x, y, **masks, tgt_is_causal=True))  # type: ignore[no-any-return]


def plain_model(settings: Settings) -> nn.Module:
    """Returns torch's own model of the job's size; attention is as wide as the job's."""
    model, data = settings.model, settings.data
    if "D" in model:
        numbers = v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)  # of bytes, from -1 to 1
        return nn.Sequential(*numbers, resnet18(num_classes=model["classes"]))
    sizes = model["L"], model["H"], model["A"], model["d_model"]
    if "source_vocabulary" in model:
        return TorchTranslator(*sizes, model["target_vocabulary"], 2 * data["max_length"])
    return Gpt(*sizes, model["vocabulary"], data["sequence_length"])


def optimizer_of(model: nn.Module, muon: bool, rate: float) -> torch.optim.Optimizer:
    """Returns AdamW, or Muon for the matrices of layers with AdamW for tables and the others."""
    matrices, tables, others = list[nn.Parameter](), list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in model.named_parameters():
        inside = parameter.dim() > 2 or ".layers." in f".{name}"
        (others if parameter.dim() < 2 else matrices if inside else tables).append(parameter)
    groups: list[dict[str, Any]] = [{"params": matrices, "muon": muon}, {"params": others}]
    groups.append({"params": tables, "lr": (TABLES if muon else 1) * rate})
    return Muon(groups, partial(torch.optim.AdamW, betas=(0.9, 0.98), weight_decay=0.01), rate, MATRICES)


def job(name: str, words: Sequence[str], folder: Path) -> Row:
    """Runs gpipe-train in a folder and returns its row."""
    before = children_seconds()
    run_command("gpipe-train", [*words, f"hydra.run.dir={folder}"])
    seconds = children_seconds() - before
    losses = [row["loss"] for row in read_rows(folder / "metrics.jsonl")[0]]
    parameters = json.loads((folder / "summary.json").read_text())["parameters"]
    return _row(name, "gpipe-train", parameters, losses, seconds, read_rows(folder / "evaluations.jsonl")[0][-1])


def plain(name: str, settings: Settings, budget: float, side: str, muon: bool) -> Row:
    """Trains torch's own model for so many processor seconds and returns its row."""
    torch.set_num_threads(1)  # two would spend processor seconds on waiting for each other
    torch.manual_seed(settings.seed)
    source, task, model = build_source(settings.data, settings.seed), build_task(settings.task), plain_model(settings)
    source.prepare(no_report)
    rate = MUON if muon else ADAMW[name]
    optimizer = optimizer_of(model, muon, rate)
    rates = [(group, group["lr"]) for group in optimizer.param_groups]
    losses, began = list[float](), time.process_time()
    for batch in source.train(None, settings.pipeline.M, 0, 1):
        share = (time.process_time() - began) / budget
        if share >= 1:
            break
        factor = min(share / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * share))
        for group, highest in rates:
            group["lr"] = highest * factor
        weight = sum(task.weight(targets) for _, targets in batch.micro_batches)
        losses.append(0.0)
        for inputs, targets in batch.micro_batches:
            loss = task.loss((model(*inputs),), targets)[0] / weight
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            losses[-1] += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.process_time() - began
    model.eval()
    sums, weight = torch.zeros(len(task.metrics), dtype=torch.float64), 0.0
    with torch.no_grad():
        for inputs, targets in (pair for batch in source.evaluation(1) for pair in batch.micro_batches):
            sums += task.evaluate((model(*inputs),), targets)
            weight += task.weight(targets)
    found = task.summarize(dict(zip(task.metrics, sums.tolist(), strict=True)), weight)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return _row(name, f"{side}, {'Muon' if muon else 'AdamW'} {rate:g}", parameters, losses, seconds, found)


def _row(
    name: str, side: str, parameters: int, losses: Sequence[float], seconds: float, found: Mapping[str, Any]
) -> Row:
    row: Row = {"job": name, "side": side, "parameters": parameters, "steps": len(losses), "processor seconds": seconds}
    row |= {"losses": losses, "at the end": fmean(losses[-max(1, len(losses) // WINDOW) :])}
    return row | {"evaluation": found.get("nll", found.get("loss")), "accuracy": found.get("accuracy")}


def _curve(row: Row) -> Curve:
    """Returns the running mean of a side's losses over its processor seconds, without its start."""
    means = running_means(row["losses"], 1 / WINDOW)
    places = range(len(means) // POINTS, len(means), max(1, len(means) // POINTS))
    points = [(row["processor seconds"] * (place + 1) / len(means), means[place]) for place in places]
    ours = row["side"] == "gpipe-train"
    return Curve(row["job"], row["side"].partition(",")[0], "smooth" if ours else "paper", points)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    made.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw losses over seconds")
    arguments = made.parse_args()

    def rows() -> Iterator[Row]:
        for name in arguments.jobs:
            words = [*JOBS[name], *(("debug=tiny",) if arguments.quick else ())]
            settings = make_request(words).settings
            classes = settings.model.get("target_vocabulary", settings.model.get("vocabulary", 10))
            with tempfile.TemporaryDirectory() as folder:
                yield (row := job(name, words, Path(folder) / "run") | {"ln V": math.log(classes)})
            seconds = row["processor seconds"]
            tried = [plain(name, settings, TRIAL * seconds, "trial", muon) for muon in (False, True)]
            yield from tried
            yield plain(name, settings, seconds, "plain loop", tried[1]["evaluation"] < tried[0]["evaluation"])

    def draw(rows: Sequence[Row]) -> Sequence[str]:
        if arguments.picture is not None:
            curves = [_curve(row) for row in rows if "trial" not in row["side"]]
            axes, title = ("seconds of the processor", "training loss"), "What a default job learns"
            plot(curves, axes, title, from_zero=False).save(arguments.picture)
        return ()

    report(COLUMNS, rows(), arguments.output, draw)


if __name__ == "__main__":
    main()
