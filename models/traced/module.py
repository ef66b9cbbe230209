"""Calls a module with a micro-batch's tensors: which argument each becomes, which part of its answer is the output."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from inspect import signature
from operator import itemgetter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

Constructor = Callable[[], nn.Module]
ALL = "*"  # tensors of what a module returns
Example = Sequence[tuple[str, Sequence[int]]]  # (dtype, shape) of each input tensor of a micro-batch
IGNORED = -100  # the target that torch's losses leave out


@dataclass(frozen=True)
class Call:
    """Describes how a module is called.

    Attributes:
        inputs: the name of the argument that each tensor of a micro-batch becomes; None: they are given by position.
        output: attribute, key or index of what the module returns, as ``logits`` or ``heads.logits``; `ALL`: all its
            tensors; None: its first tensor.
        arguments: further arguments by name, the same in every call.
        masks: name of an argument -> name of the one with tokens. The first becomes True where a token is no padding.
        pad_id: the token that is padding.
        mean, std: mean and deviation of each channel, by which images that come as bytes are scaled. If the mean is
            None they stay bytes.
        labels: arguments that the targets become, for a module that computes its own loss; they are the last of the
            input tensors then. None: the targets are no input.
        ignored: the target that the module's loss leaves out; it becomes -100, torch's own such target.
        shared: names of inputs that all micro-batches share; each comes once for each example.
    """

    inputs: Sequence[str] | None = None
    output: str | int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    masks: Mapping[str, str] = field(default_factory=dict)
    pad_id: int = 0
    mean: Sequence[float] | None = (0.5, 0.5, 0.5)
    std: Sequence[float] = (0.5, 0.5, 0.5)
    labels: Sequence[str] | None = None
    ignored: int | None = None
    shared: Sequence[str] = ()


@dataclass(frozen=True)
class TracedFrom:
    """Names the constructor, call and seed from which layers were traced.

    Attributes:
        constructor: function that makes the module, without arguments.
        call: description of how the module is called.
        seed: seed of torch, numpy and Python when it is made.
        autocast: type of the autocast that it runs under, as "bfloat16"; None: it runs under none.
        trusted: True if it may train without having been compared with its layers.
    """

    constructor: Constructor
    call: Call
    seed: int
    autocast: str | None = None
    trusted: bool = False


def example_of(inputs: Sequence[Tensor]) -> Example:
    """Returns type and shape of each input tensor, as ("float32", [4, 3])."""
    return [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in inputs]


def autocast_of(dtype: str | None, device: str = "cpu") -> Callable[[], AbstractContextManager[Any]]:
    """Returns a function that makes the context in which forward runs: autocast without its cache, or none.

    The cache keeps the casts of leaves, and a cell's inputs are leaves where they would be inner tensors of a larger
    cell: the gradients of a tensor used twice would be added in 16 or 32 bits depending on the cut.

    Args:
        dtype: type to which autocast casts, as "bfloat16"; None: there is no autocast.
        device: kind of the device, as "cuda".
    """
    if dtype is None:
        return nullcontext
    return partial(torch.autocast, device, getattr(torch, dtype), cache_enabled=False)


class InDefaultType:
    """Makes a module whose weights learn in torch's default type, unless `dtype` is among its arguments.

    A file's weights are often bfloat16, of which an update of a millionth moves few. A module with weights of several
    types has code for them and stays as it is.

    Attributes:
        func: class or function that the user has named.
        was: the 16-bit type that the weights had, such as "bfloat16"; empty: they are as the module was made.
    """

    def __init__(self, make: Constructor) -> None:
        self._make, self.func, self.was = make, getattr(make, "func", make), ""
        self._is_typed = bool({"dtype", "torch_dtype"} & getattr(make, "keywords", {}).keys())

    def __call__(self) -> nn.Module:
        module = self._make()
        if not isinstance(module, nn.Module):  # which is refused elsewhere
            return module
        types = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
        wanted = torch.get_default_dtype()
        if self._is_typed or len(types) != 1 or (dtype := types.pop()).itemsize >= wanted.itemsize:
            return module
        self.was = str(dtype).removeprefix("torch.") if dtype.itemsize == 2 else ""
        return module.to(wanted)


class CallError(ValueError):
    """Raised where a module cannot be called as the keys of model=module say; names the key."""


class Untraceable(Exception):
    """Raised where a trace would not do what the module's code does; says what that is, and where if it is known."""

    def __init__(self, said: str, place: str | None = None) -> None:
        super().__init__(said)
        self.place = place


class Called(nn.Module):
    """Wraps a module so that tensors go in and one tensor comes out, or all.

    Attributes:
        answer: makes what the module returns of the tensors that come out, as it was in the last call.
    """

    answer: Callable[[Sequence[Tensor]], Any] = itemgetter(0)

    def __init__(self, module: nn.Module, call: Call) -> None:
        super().__init__()
        if "use_cache" in signature(module.forward).parameters:  # of generation; nobody reads it here
            call = replace(call, arguments={"use_cache": False, **call.arguments})
        for mask, tokens in call.masks.items():
            if tokens not in (call.inputs or ()):
                raise CallError(
                    f"model.masks={{{mask}: {tokens}}} needs an input of this name: model.inputs=[{tokens}, …]"
                )
        self.module, self.call = module, call

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        answer = self._called_with(tensors)
        if self.call.output != ALL:
            return output_of(answer, self.call.output)
        outputs, self.answer = taken_apart(answer)
        return outputs

    def _called_with(self, tensors: Sequence[Tensor]) -> Any:
        call = self.call
        values = list(tensors)
        if call.mean is not None:
            values = [self._scaled(tensor, call.mean) if tensor.dtype is torch.uint8 else tensor for tensor in tensors]
        more = dict(call.arguments)
        if call.labels is not None:
            target = values.pop()
            if call.ignored is not None:
                target = target.masked_fill(target.eq(call.ignored), IGNORED)
            more |= dict.fromkeys(call.labels, target)
        if call.inputs is None:
            return self.module(*values, **more)
        if len(call.inputs) != len(values):
            raise CallError(f"model.inputs={list(call.inputs)}: name as many as there are input tensors: {len(values)}")
        named = dict(zip(call.inputs, values, strict=True))
        named |= {name: named[name][0] for name in call.shared}
        masks = {mask: named[tokens] != call.pad_id for mask, tokens in call.masks.items()}
        return self.module(**named, **masks, **more)

    def _scaled(self, images: Tensor, mean: Sequence[float]) -> Tensor:
        """Returns (images / 255 − mean) / std by channel, for images of bytes, in the type of the module's weights."""
        shape = (1, -1, *([1] * (images.dim() - 2)))
        dtype = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)
        means, deviations = (torch.tensor(list(c), dtype=dtype).view(shape) for c in (mean, self.call.std))
        return (images.to(dtype) / 255 - means.to(images.device)) / deviations.to(images.device)


def output_of(answer: Any, wanted: str | int | None) -> Tensor:
    """Returns the tensor of a module's answer that ``wanted`` names; None: the first, of those least deep inside.

    Raises:
        CallError: there is no such tensor; the message lists what there is.
    """
    tensors = dict(_named_tensors(answer))
    if wanted is None and tensors:
        return tensors[min(tensors, key=lambda name: name.count("."))]
    # By attribute, too: the fields of a named tuple are listed by number, and properties are not listed.
    found = None if wanted is None else tensors.get(str(wanted), getattr(answer, str(wanted), None))
    if not isinstance(found, Tensor):
        named = f"the tensors {', '.join(tensors)}" if any(tensors) else f"a {type(answer).__name__}"
        raise CallError(f"model.output={'null' if wanted is None else wanted}: the module returns {named}: name one")
    return found


def taken_apart(answer: Any) -> tuple[tuple[Tensor, ...], Callable[[Sequence[Tensor]], Any]]:
    """Returns the tensors of a module's answer, and a function that makes such an answer of other tensors.

    In what it makes, plain values are those of this answer, and other objects, such as caches, become None.

    Raises:
        CallError: it has no tensors, or several in an object that torch does not know.
    """
    leaves, structure = pytree.tree_flatten(answer)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if not places and len([*_named_tensors(answer)]) > 1:
        raise CallError(f"the module returns a {type(answer).__name__} of several tensors: return a tuple or a dict")
    if isinstance(answer, Tensor) or not places:
        return (output_of(answer, None),), itemgetter(0)
    others = [leaf if isinstance(leaf, (bool, int, float, str)) else None for leaf in leaves]

    def put_together(tensors: Sequence[Tensor]) -> Any:
        given = dict(zip(places, tensors, strict=True))
        return pytree.tree_unflatten([given.get(place, other) for place, other in enumerate(others)], structure)

    return tuple(leaves[place] for place in places), put_together


def _named_tensors(answer: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of an answer by attribute, key or index; those inside another part as ``part.name``."""
    if isinstance(answer, Tensor):
        yield name, answer
        return
    if isinstance(answer, (tuple, list)):
        answer = dict(enumerate(answer))
    elif is_dataclass(answer) and not isinstance(answer, Mapping):
        answer = vars(answer)
    for key, part in answer.items() if isinstance(answer, Mapping) else ():
        yield from _named_tensors(part, f"{name}.{key}" if name else str(key))


def copied(module: nn.Module) -> nn.Module:
    """Copies a module, with the parameters' attributes and hooks. Tensors that shared memory share the copy's.

    Parts that are in evaluation mode stay in it, whatever the mode of the others becomes.
    """
    usual: Any = Tensor.__deepcopy__

    def of_tensor(tensor: Tensor, memo: dict[int, Any]) -> Any:  # results, such as weight_norm's, are made anew
        return usual(tensor, memo) if tensor.is_leaf else deepcopy(tensor.detach(), memo)

    def of_parameter(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        data = parameter.detach()
        data = data.clone() if isinstance(data, FakeTensor) else deepcopy(data, memo)
        made = type(parameter)(data, parameter.requires_grad)
        vars(made).update(vars(parameter))
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if (found := getattr(parameter, hooks)) is not None:
                setattr(made, hooks, found)
        return made

    with patch.object(Tensor, "__deepcopy__", of_tensor), patch.object(nn.Parameter, "__deepcopy__", of_parameter):
        made = deepcopy(module)
    for part in made.modules():
        if not part.training:
            part.train = partial(_train_others, part)  # type: ignore[method-assign]
    return made


def _train_others(part: nn.Module, mode: bool = True) -> nn.Module:
    """Sets the mode of a part's children, as `train` does, but leaves the part itself in evaluation mode."""
    for child in part.children():
        child.train(mode)
    return part
