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
        layers: the cell's layers; their weights are never replaced by others.
        alike: True if all micro-batches use weights alike; casts found once are then reused.
    """

    def __init__(self, layers: Sequence[nn.Module], alike: bool = False) -> None:
        self._layers, self._alike = layers, alike
        self._seen: Mapping[int, torch.dtype] | None = None  # id of a parameter -> type; the next two follow from it
        self._to_cast: list[tuple[nn.Parameter, torch.dtype]] = []
        # Where weights stand: a module's dict of parameters, the name in it, the weight, its index in `_to_cast`.
        self._places: list[tuple[dict[str, Any], str, nn.Parameter, int]] = []
        self._casts: list[Tensor] | None = None  # in the order of `_to_cast`; None: not made yet in this step

    def forget(self) -> None:
        """Frees the casts, before a step and after it."""
        self._casts = None

    @property
    def held(self) -> list[Tensor]:
        """Returns the casts of the step."""
        return self._casts or []

    def used(self) -> AbstractContextManager[None]:
        """Returns the context in which layers run under autocast; the first time in a step it notes their casts."""
        if self._casts is None and self._alike and self._seen is not None:
            self._make_casts()
        return self._noting() if self._casts is None else self.in_place()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Notes which weights autocast casts inside the context, and then makes the casts for the rest of the step."""
        with _CastsSeen() as noted, _TypesRead(noted):
            yield
        if (seen := noted.casts) != self._seen:
            self._seen = seen
            self._choose(seen)
        self._make_casts()

    def _make_casts(self) -> None:
        """Casts each chosen weight, with a graph, so that gradients flow back to the weight."""
        with torch.enable_grad():
            self._casts = [parameter.to(dtype) for parameter, dtype in self._to_cast]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Makes the modules use the casts of the step inside the context."""
        for parameters, name, _, number in self._places:
            parameters[name] = self.held[number]
        try:
            yield
        finally:
            for parameters, name, weight, _ in self._places:
                parameters[name] = weight

    def _choose(self, seen: Mapping[int, torch.dtype]) -> None:
        """Notes the weights to cast that only one layer has, and all places in modules where each stands.

        Args:
            seen: id of a parameter -> the type to which the first micro-batch cast it.
        """
        users = Counter(id(parameter) for layer in self._layers for parameter in layer.parameters())
        self._to_cast, self._places, number_of = [], [], {}
        for module in dict.fromkeys(module for layer in self._layers for module in layer.modules()):
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) not in seen or users[id(parameter)] > 1:
                    continue
                if id(parameter) not in number_of:
                    number_of[id(parameter)] = len(self._to_cast)
                    self._to_cast.append((parameter, seen[id(parameter)]))
                self._places.append((module._parameters, name, parameter, number_of[id(parameter)]))


class _CastsSeen(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Counts the uses of each parameter, by its id, and notes its casts to half precision."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.uses: Counter[int] = Counter()
        self._types: dict[int, torch.dtype] = {}

    @property
    def casts(self) -> dict[int, torch.dtype]:
        """Returns id of the parameter -> type of the cast, for parameters whose only use is one cast."""
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
    """Counts each reading of ``weight.dtype`` as a use beside the cast, so that such a weight is left to autocast."""

    def __init__(self, casts: _CastsSeen) -> None:
        super().__init__()
        self._casts, self._get_dtype = casts, Tensor.dtype.__get__  # type: ignore[attr-defined]  # a C descriptor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == self._get_dtype:
            self._casts.uses[id(args[0])] += 1
        return func(*args, **kwargs or {})
