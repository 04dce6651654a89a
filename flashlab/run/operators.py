"""How torch comes to know an operator: by a schema, shapes, and an autograd of its own.

`torch.library.custom_op` does so, too, and its autograd takes longer than a warm call does. Here a call that nothing of torch's
watches passes by the dispatcher as well.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from flashlab.base.host import no_tangent
from simulator.errors import Unavailable

__all__ = ["operator", "torch"]

try:
    torch: Any = import_module("torch")
except ImportError as error:
    raise Unavailable(f"flashlab.integrations.torch needs PyTorch ({error}): pip install torch") from None

_LIBRARY = torch.library.Library("flashlab", "FRAGMENT")
_ITS_OWN = {torch.Tensor, torch.nn.Parameter}
"""Tensors of any other type may have a dispatch of their own."""


def _watched(q: Any, k: Any, v: Any) -> bool:
    """Does something of torch's want to see the operator that is called with these: its compiler, a transformation, a mode, or a
    tensor of its own kind?"""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or not (type(q) in _ITS_OWN and type(k) in _ITS_OWN and type(v) in _ITS_OWN)
        or q.is_meta
    )


def _never_forward(ctx: Any, *tangents: Any) -> None:
    del ctx, tangents  # those of `torch.func.jvp` around `torch.func.grad`, which the door sees no more
    raise no_tangent("q, k or v")


def operator(
    name: str,
    function: Callable[..., Any],
    schema: str,
    shapes: Any,
    keep: Any,
    differentiate: Any,
    first: int,
    leaves: int,
) -> Any:
    """A function that calls the operator, now registered, and can be differentiated by autograd and by `torch.func`. `first` is the
    place of q among its inputs, and all that may have gradients are among the first `leaves`: `differentiate` returns theirs.

    The operator has an autograd of its own, because `torch.library.custom_op`'s takes twice as long.
    """
    _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    known = getattr(torch.ops.flashlab, name).default
    inputs = len(known._schema.arguments)

    class Transformed(torch.autograd.Function):
        generate_vmap_rule = True
        setup_context = staticmethod(keep)
        jvp = staticmethod(_never_forward)

        @staticmethod
        def forward(*given: Any) -> Any:
            return known(*given)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
            return *differentiate(ctx, *gradients), *[None] * (inputs - leaves)

    def differentiable(run: Callable[..., Any]) -> Any:
        """The same for autograd alone. It is without `setup_context`, which costs as much as all else. What has no gradient goes
        through torch in one piece."""

        class Differentiable(torch.autograd.Function):
            jvp = staticmethod(_never_forward)

            @staticmethod
            def forward(ctx: Any, *given: Any) -> Any:
                *first, rest = given
                found = run(*first, *rest)
                keep(ctx, (*first, *rest), found)
                return found

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
                return *differentiate(ctx, *gradients), None

        def apply(*given: Any) -> Any:
            return Differentiable.apply(*given[:leaves], given[leaves:])

        return apply

    def below(*given: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return known(*given)

    seen, unseen, transformed = differentiable(below), differentiable(function), Transformed.apply

    def autograd(*given: Any) -> Any:
        given = (*given, *[None] * (inputs - len(given)))  # the dispatcher leaves out what has its default
        wanted = torch.is_grad_enabled() and torch._C._any_requires_grad(*given)
        return (seen if wanted else below)(*given)

    def run(*given: Any) -> Any:
        return function(*given, *[None] * (inputs - len(given)))

    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, autograd, "Autograd")
    torch.library.register_fake(f"flashlab::{name}", shapes, lib=_LIBRARY)

    def call(*given: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return transformed(*given)
        if _watched(*given[first : first + 3]):
            return known(*given)
        wanted = torch.is_grad_enabled() and torch._C._any_requires_grad(*given)
        return (unseen if wanted else function)(*given)

    return call
