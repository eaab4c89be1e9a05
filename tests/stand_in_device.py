"""A stand-in for a device with memory of its own, and a count of what goes there and back.

Under `StandIn()` the `meta` device has values: they are kept on the processor, which computes with
them, so that results are the processor's to the last bit. As with a real device, operands must all
be on it (but for single numbers), and nothing on it can be had as a NumPy array.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = "meta"
_ACROSS = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class Elsewhere(Tensor):
    """A tensor on the stand-in."""

    held: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "Elsewhere":
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device(DEVICE),
        )
        made.held = values
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{function} on the stand-in, outside of it")

    def new_tensor(self, data: Any, **options: Any) -> Tensor:  # type: ignore[override]
        return Elsewhere(self.held.new_tensor(data, **options))

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert a tensor on the stand-in to numpy")


class StandIn(TorchDispatchMode):
    """Gives the device its values, in this thread, and counts elements and operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_in = self.num_out = self.num_operations = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        there = [isinstance(x, Elsewhere) for x in tensors]
        goes_there = any(there)
        if kwargs.get("device") is not None:
            goes_there = torch.device(kwargs["device"]).type == DEVICE
            kwargs["device"] = torch.device("cpu")
        if function not in _ACROSS and any(there):
            apart = [
                tuple(x.shape) for x, is_there in zip(tensors, there, strict=True)
                if not is_there and x.ndim > 0
            ]  # fmt: skip
            assert not apart, f"{function}: operands on the device, and {apart} on the processor"
        if function is torch.ops.aten.copy_.default:
            goes_there = there[0]
        if function in _ACROSS and goes_there != there[-1]:
            num = tensors[-1].numel()
            self.num_in, self.num_out = (
                (self.num_in + num, self.num_out)
                if goes_there
                else (self.num_in, self.num_out + num)
            )
        self.num_operations += goes_there
        return self._run(function, args, kwargs, goes_there)

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any, goes_there: bool) -> Any:
        wrappers: dict[int, Elsewhere] = {}

        def unwrapped(x: Any) -> Any:
            if not isinstance(x, Elsewhere):
                return x
            wrappers[id(x.held)] = x
            return x.held

        def wrapped(x: Any) -> Any:
            if not isinstance(x, Tensor) or not goes_there:
                return x
            return wrappers[id(x)] if id(x) in wrappers else Elsewhere(x)

        found = function(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs))
        return tree_map(wrapped, found)
