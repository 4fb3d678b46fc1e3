"""Methods that torch.compile may compile while a draft is trained, and that run as they stand elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import torch

Given = ParamSpec("Given")
Made = TypeVar("Made")


class CompilablePart(Protocol):
    """A module with methods marked by `compilable`; `compiles` says whether they are compiled."""

    compiles: bool


Part = TypeVar("Part", bound=CompilablePart)


def compilable(
    method: Callable[Concatenate[Part, Given], Made],
) -> Callable[Concatenate[Part, Given], Made]:
    """Mark a method of tensors alone, without side effects: it is compiled while training, where its module says so.

    Without gradients it always runs as it stands: the shapes of serving change from call to call.
    """

    @wraps(method)
    def chosen(self: Part, *args: Given.args, **kwargs: Given.kwargs) -> Made:
        # Inside another compiled method, a part of that one.
        if self.compiles and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return cast(Made, _compiled(method)(self, *args, **kwargs))
        return method(self, *args, **kwargs)

    return cast("Callable[Concatenate[Part, Given], Made]", chosen)


@cache
def _compiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once for all shapes: packed batches never have the same twice."""
    return torch.compile(method, dynamic=True)
