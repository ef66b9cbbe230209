"""Casts weights to half precision once a step, where autocast would cast them in every micro-batch.

A cast keeps its place in the graph, between the weight and the one operation that uses it, so the gradient of each
micro-batch is computed, widened and added up as without this file: the same bits. (Autocast's own cache also keeps the
casts of a cell's inputs, and those made without a graph, so that bits would depend on the cut.)
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_HALF = (torch.bfloat16, torch.float16)


class WeightCasts:
    """Holds the casts of a cell's weights during a step.

    Which weights are cast is seen in the first micro-batch of every step, for which autocast casts: those of which the
    layers make one cast and nothing else. Others are left to autocast: a weight that two layers share, or that is used
    twice, has gradients that must be added up in the weight's own type; a layer that reads a weight's type, as in
    ``x.to(self.weight.dtype)``, must find its own. Nothing is kept from earlier steps, which a
    resumed run has not seen, unless all layers use their weights alike in every micro-batch.

    Args:
        layers: of the cell.
        alike: True if all micro-batches use weights alike; casts found once are then reused.
    """

    def __init__(self, layers: Sequence[nn.Module], alike: bool = False) -> None:
        self._layers, self._alike = layers, alike
        self._seen: Mapping[int, torch.dtype] | None = None  # what the two lists below were made of
        self._wanted: list[tuple[nn.Parameter, torch.dtype]] = []
        self._slots: list[tuple[dict[str, Any], str, nn.Parameter, int]] = []  # of a module, with the number of a cast
        self._casts: list[Tensor] | None = None  # None: the layers have not run in this step

    def forget(self) -> None:
        """Frees the casts, before a step and after it."""
        self._casts = None

    @property
    def held(self) -> list[Tensor]:
        """Returns the casts of the step."""
        return self._casts or []

    def used(self) -> AbstractContextManager[None]:
        """Returns the context in which layers run under autocast; the first time in a step it notes their casts."""
        if self._casts is None and self._alike and self._seen is not None and self._are_in_place():
            self._make_casts()
        return self._noting() if self._casts is None else self.in_place()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        with _CastsSeen() as noted, _TypesRead(noted):
            yield
        if (seen := noted.casts) != self._seen:
            self._seen = seen
            self._choose(seen)
        self._make_casts()

    def _are_in_place(self) -> bool:
        """Returns whether the modules have the weights of which casts were chosen."""
        return all(parameters.get(name) is weight for parameters, name, weight, _ in self._slots)

    def _make_casts(self) -> None:
        with torch.enable_grad():
            self._casts = [parameter.to(dtype) for parameter, dtype in self._wanted]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Makes the modules use the casts of the step inside the context."""
        for parameters, name, _, number in self._slots:
            parameters[name] = self.held[number]
        try:
            yield
        finally:
            for parameters, name, weight, _ in self._slots:
                parameters[name] = weight

    def _choose(self, seen: Mapping[int, torch.dtype]) -> None:
        users = Counter(id(parameter) for layer in self._layers for parameter in layer.parameters())
        self._wanted, self._slots, numbers = [], [], {}
        for module in dict.fromkeys(module for layer in self._layers for module in layer.modules()):
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) not in seen or users[id(parameter)] > 1:
                    continue
                if id(parameter) not in numbers:
                    numbers[id(parameter)] = len(self._wanted)
                    self._wanted.append((parameter, seen[id(parameter)]))
                self._slots.append((module._parameters, name, parameter, numbers[id(parameter)]))


class _CastsSeen(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Notes the tensors of which one cast to half precision is made, and nothing else, by their ids."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.uses: Counter[int] = Counter()
        self._types: dict[int, torch.dtype] = {}

    @property
    def casts(self) -> dict[int, torch.dtype]:
        """Returns the type of each such cast."""
        return {key: dtype for key, dtype in self._types.items() if self.uses[key] == 1}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if type(one) is not Tensor and isinstance(one, nn.Parameter):  # the second is slow
                    self.uses[id(one)] += 1
                    if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in _HALF:
                        self._types[id(one)] = kwargs["dtype"]
        return func(*args, **kwargs)


class _TypesRead(TorchFunctionMode):
    """Counts the reading of a parameter's type as a use."""

    def __init__(self, casts: _CastsSeen) -> None:
        super().__init__()
        self._casts, self._read = casts, Tensor.dtype.__get__  # type: ignore[attr-defined]  # a C descriptor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == self._read:
            self._casts.uses[id(args[0])] += 1
        return func(*args, **kwargs or {})
