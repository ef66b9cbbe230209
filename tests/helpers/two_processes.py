"""Uses a pipeline of two processes in ways that differ between them, under torchrun; each says what was wrong."""

import os
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli import LayerBuilder, Pipeline
from gpipe_cli.errors import ConfigurationError

TOKENS = torch.arange(8)


def say(*words: object) -> None:
    """Prints a line at once, so that two processes do not mix theirs."""
    print(" ".join(map(str, words)) + "\n", end="", flush=True)


class Head(nn.Module):
    """Shares the table's weights, and has none of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(9, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.head(torch.tanh(self.middle(self.table(tokens))))
        return hidden


def made(**others: Any) -> Pipeline:
    layers = [
        LayerBuilder("table", partial(nn.Embedding, 9, 4)),
        LayerBuilder("middle", partial(nn.Linear, 4, 4)),
        LayerBuilder("head", Head, tied={"weight": "table.weight"}),
    ]
    keys = {"K": 2, "M": 4, "partition": [2, 1]} | others
    return Pipeline.of(layers, nn.functional.cross_entropy, (TOKENS[:2], TOKENS[:2]), **keys)


def list_of_layers() -> None:
    """Trains where one process has no weights; freezes, loads, sums and predicts."""
    pipeline = made()
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.1)
    weights = dict(pipeline.named_parameters())
    for trains in (True, False, True):
        if "table.weight" in weights:
            weights["table.weight"].requires_grad_(trains)
        optimizer.zero_grad()
        loss, found = pipeline.step(TOKENS, TOKENS, outputs=True)
        say(f"loss {loss} norm {pipeline.clip_grad_norm_(1.0)} outputs {sum(len(o) for (o,), _ in found)}")
        optimizer.step()
    whole = pipeline.state_dict(whole=True)
    del whole["head.weight"]
    pipeline.load_state_dict({name: torch.ones_like(value) for name, value in whole.items()})
    outputs = pipeline.predict(TOKENS)
    say("whole", *whole, "predicts", [*outputs.shape], outputs.sum().item())
    if pipeline.world.rank == pipeline.world.size - 1:  # others have all
        whole = {}
    try:
        pipeline.load_state_dict(whole)
    except KeyError:
        say("sum", pipeline.all_sum(torch.full((2,), 2.0 / pipeline.world.size)).tolist())
    say("unchanged", torch.equal(pipeline.predict(TOKENS), outputs))


def module() -> None:
    """Trains a module on two processes, and brings the weights of both home."""
    torch.manual_seed(0)
    model = Tied()
    loss = nn.functional.cross_entropy
    pipeline = Pipeline.of(model, loss, (TOKENS[:2], TOKENS[:2]), cells=2, micro_batches=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plain = Tied()
    plain.load_state_dict(model.state_dict())
    for _ in range(2):
        pipeline.step(TOKENS, TOKENS)
        optimizer.step()
        optimizer.zero_grad()
        loss(plain(TOKENS), TOKENS).backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= 0.5 * parameter.grad  # type: ignore[operator]  # it has one
                parameter.grad = None
    pipeline.write_back(model)
    same = [
        torch.allclose(ours, theirs, atol=1e-6)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True)
    ]
    say("home", same, model.head.weight is model.table.weight)


def joint_optimizer() -> None:
    """Steps with LBFGS, which differs where each process has its own parameters."""
    optimizer = torch.optim.LBFGS(made().parameters())
    try:
        optimizer.step(lambda: 0.0)
    except ConfigurationError as error:
        say("refused", error)


def unlike_arguments() -> None:
    """Asks for another number of micro-batches on each process."""
    try:
        made(M=2 + int(os.environ.get("RANK", "0")))
    except ConfigurationError as error:
        say("refused", error)


if __name__ == "__main__":
    list_of_layers()
    joint_optimizer()
    unlike_arguments()
    module()
