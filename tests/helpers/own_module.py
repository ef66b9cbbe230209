"""Defines small modules as their users write them, traced by model=module."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torchvision.models import MobileNetV2

from gpipe_cli.data.source import Batch, Source
from gpipe_cli.micro_batch import MicroBatch


def mobile_net(dropout: float = 0.0) -> MobileNetV2:
    """Returns torchvision's MobileNetV2, narrow and with four blocks: residual branches, BatchNorm, in-place ReLU6."""
    blocks = [[1, 8, 1, 1], [6, 8, 2, 2], [6, 16, 1, 2]]
    return MobileNetV2(num_classes=10, width_mult=0.25, inverted_residual_setting=blocks, dropout=dropout)


class TiedTexts(nn.Module):
    """Maps token ids to logits with the matrix that embeds them; the words of a text do not see each other."""

    def __init__(self, vocabulary: int = 256, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(ids)))


class Noisy(nn.Module):
    """Draws noise, shares one table between its first and its last call, and branches on `training`."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.inner = nn.Linear(3, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(16, 10)
        self.again = nn.Linear(3, 16)
        self.again.weight = self.table.weight

    def forward(self, images: Tensor) -> Tensor:
        means = images.mean((2, 3))
        x = self.dropout(self.table(means))
        x = x + self.inner(self.norm(x))
        if self.training:
            x = x + 0.1 * torch.rand_like(x)
        x = x + self.again(means)
        x.relu_()
        return self.head(x)


class AloneInImages(Noisy):
    """Takes the mean of all examples from each, but not from one alone."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images - images.mean(0) if images.shape[0] > 1 else images)


class Counting(Noisy):
    """Multiplies by the number of its calls."""

    calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(images) * self.calls


def other_when_real() -> nn.Module:
    """Returns one module while it is traced without memory, and another where it is built for a run."""
    return Noisy() if isinstance(torch.empty(0), FakeTensor) else Counting()


@dataclass
class Answer:
    """Holds what `WithLoss` returns."""

    loss: Tensor | None
    logits: Tensor


class WithLoss(TiedTexts):
    """Returns its own loss, a mean over the labels that are not -100, as models of the transformers library do."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Answer:  # type: ignore[override]
        logits = super().forward(ids)
        return Answer(None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class WithDividedLoss(TiedTexts):
    """Returns the sum of its losses, divided by the number of labels that are not -100."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Answer:  # type: ignore[override]
        logits = super().forward(ids)
        assert labels is not None
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return Answer(loss / (labels != -100).sum(), logits)


def smoothed_loss(outputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Returns the mean over the examples, as every place of a text counts."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), label_smoothing=smoothing)


class PaddedTexts(Source):
    """Makes random texts; those of a mini-batch differ in length, and their targets end with zeros."""

    def __init__(self, batch_size: int = 8, seed: int = 0) -> None:
        self.batch_size, self.seed = batch_size, seed

    def train(self, position: int | None, M: int, replica: int, replicas: int) -> Iterator[Batch]:
        for number in range(position or 0, 1000):
            yield Batch(self._made(number, M), number + 1)

    def evaluation(self, M: int) -> Iterator[Batch]:
        yield Batch(self._made(1000, M), 0)

    def _made(self, number: int, M: int) -> list[MicroBatch]:
        random = torch.Generator().manual_seed(1000 * self.seed + number)
        texts = torch.randint(1, 256, (self.batch_size, 9), generator=random)
        for row, text in enumerate(texts):
            text[9 - row :] = 0
        return [((text[:, :-1],), (text[:, 1:],)) for text in texts.tensor_split(M)]


class HalfEmpty(PaddedTexts):
    """Has no targets in the second half of a mini-batch."""

    def _made(self, number: int, M: int) -> list[MicroBatch]:
        ((ids,), (targets,)) = super()._made(number, 1)[0]
        targets = targets.clone()
        targets[len(targets) // 2 :] = 0
        return [((x,), (y,)) for x, y in zip(ids.tensor_split(M), targets.tensor_split(M), strict=True)]
