"""The same statistics, computed slowly and obviously: one example at a time, no padding."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Sum = dict[str, Tensor]


def per_example_gradients(
    model: nn.Module, losses: Sequence[Callable[[], Tensor]]
) -> list[dict[str, Tensor]]:
    """Gradients of scalar losses, each by a backward pass of its own."""
    found = []
    for loss in losses:
        model.zero_grad()
        loss().backward()
        found.append(
            {
                name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for name, p in model.named_parameters()
                if p.requires_grad
            }
        )
    return found


def dense_fisher(gradients: Sequence[dict[str, Tensor]], num_examples: int) -> Sum:
    return {
        name: sum(g[name] ** 2 for g in gradients) / num_examples  # type: ignore[misc]
        for name in gradients[0]
    }


def dense_block(gradients: Sequence[dict[str, Tensor]], name: str, num_examples: int) -> Tensor:
    rows = torch.stack([g[name].flatten() for g in gradients])
    return rows.T @ rows / num_examples


def module_rows(
    model: nn.Module, name: str, runs: Sequence[Callable[[], Tensor]]
) -> tuple[Tensor, Tensor]:
    """All input rows of a module, and the gradients at its output rows, example by example."""
    module = model.get_submodule(name)
    return flat_rows(module, *inputs_and_gradients([module], runs)[0])


def flat_rows(
    module: nn.Module, inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The same of what was seen of a module."""
    if isinstance(module, nn.Embedding):
        rows = torch.cat([x.flatten() for x in inputs])
    else:
        rows = torch.cat([x.reshape(-1, x.shape[-1]) for x in inputs])
    return rows, torch.cat([g.reshape(-1, g.shape[-1]) for g in grads])


def conv_rows(
    module: nn.Conv2d, runs: Sequence[Callable[[], Tensor]]
) -> tuple[Tensor, Tensor]:  # (rows, groups, in), (rows, groups, out)
    """All patches that a convolution slides over, and the gradients at what it makes of them."""
    return patch_rows(module, *inputs_and_gradients([module], runs)[0])


def patch_rows(
    module: nn.Conv2d, inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The same of what was seen of it."""
    groups, (kh, kw), (dh, dw), (sh, sw) = (
        module.groups, module.kernel_size, module.dilation, module.stride
    )  # fmt: skip
    patches, rows = [], []
    for x, g in zip(inputs, grads, strict=True):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        padded = nn.functional.pad(x, module._reversed_padding_repeated_twice, mode=mode)[0]
        for i in range(g.shape[2]):
            for j in range(g.shape[3]):
                patch = padded[:, i * sh :: dh, j * sw :: dw][:, :kh, :kw]
                patches.append(patch.reshape(groups, -1))
                rows.append(g[0, :, i, j].reshape(groups, -1))
    return torch.stack(patches), torch.stack(rows)


def dense_conv_factors(
    module: nn.Conv2d, inputs: Sequence[Tensor], grads: Sequence[Tensor], num_examples: int
) -> tuple[Tensor, Tensor]:
    """Second moments of patches and of output gradients, group by group."""
    z, o = patch_rows(module, inputs, grads)
    gram = torch.einsum("ngi,ngj->gij", z, z) / len(z)
    factor = torch.einsum("ngi,ngj->gij", o, o) / num_examples
    return (gram, factor) if module.groups > 1 else (gram[0], factor[0])


def inputs_and_gradients(
    modules: Sequence[nn.Module], runs: Sequence[Callable[[], Tensor]]
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """What each module receives, and the gradients at its outputs; each example runs once."""
    seen = [_Seen() for _ in modules]
    handles = [
        module.register_forward_hook(own.keep, with_kwargs=True)
        for module, own in zip(modules, seen, strict=True)
    ]
    for run in runs:
        run().backward()
        for own in seen:
            own.end_run()
    for handle in handles:
        handle.remove()
    return [(own.inputs, own.grads) for own in seen]


class _Seen:
    """What was seen of a module."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.grads: list[Tensor] = []
        self._outputs: list[Tensor] = []  # of this run

    def keep(self, _: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        self.inputs.append((args or tuple(kwargs.values()))[0].detach().clone())
        if not output.requires_grad:  # the first adapter's layers have nothing before them
            output = output.detach().requires_grad_()
        output.retain_grad()
        self._outputs.append(output)
        return output.clone()  # what follows may work in place

    def end_run(self) -> None:
        self.grads += [
            torch.zeros_like(o) if o.grad is None else o.grad.detach() for o in self._outputs
        ]
        self._outputs = []
