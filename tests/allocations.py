"""How many bytes of tensors exist, from every operation that torch dispatches, backward passes included."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts what is allocated inside: `live` bytes that exist now, and the `peak` of that after any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = operation(*args, **(kwargs or {}))
        # What was given is not made here, though an operation may return it, or a view of it.
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _is_real(leaf)}
        fresh = False
        for leaf in tree_leaves(out):
            if _is_real(leaf):
                storage = leaf.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._storages:
                    self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                    fresh = True
        if fresh:
            self.peak = max(self.peak, self.live)
        return out

    @property
    def live(self) -> int:
        """Bytes of what was made inside and still exists."""
        self._storages = {key: kept for key, kept in self._storages.items() if not kept[0].expired()}
        return sum(size for _, size in self._storages.values())


def _is_real(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and not leaf.is_meta and leaf.layout is torch.strided
