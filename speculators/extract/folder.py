"""Hidden states from a folder of per-request files, of this runtime or of vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from speculators.errors import FormatError, StoreError
from speculators.extract.filling import Advance, RowFault
from speculators.extract.progress import RowProgress
from speculators.formats.hidden_states import load_hidden_states, read_layer_ids


class FolderSource:
    """Finds the file of each row by the token ids in it; the files stay where they are.

    `layer_ids` are those to store, ascending. A file that names its layers (this project's do) may hold others beside
    them; one that does not must hold these alone, as `file_layer_ids` say. StoreError where the folder has no files.
    """

    def __init__(
        self,
        folder: str | Path,
        layer_ids: Sequence[int],
        *,
        file_layer_ids: Sequence[int] | None = None,
        progress: bool = True,
    ) -> None:
        self.folder = Path(folder)
        self._layer_ids = tuple(layer_ids)
        self._unnamed = tuple(sorted(set(file_layer_ids or layer_ids)))
        self._files: dict[bytes, Path] = {}
        self.unreadable: dict[Path, str] = {}
        paths = sorted(self.folder.rglob("*.safetensors")) if self.folder.is_dir() else []
        if not paths:
            raise StoreError(f"{folder} holds no per-request files; expected *.safetensors in a folder")
        with RowProgress("read files", len(paths), enabled=progress) as bar:
            for path in paths:
                try:
                    with safe_open(path, framework="pt") as file:
                        self._files[_key(file.get_tensor("token_ids"))] = path
                except (SafetensorError, OSError, RuntimeError) as error:
                    self.unreadable[path] = str(error)
                bar.advance(1)

    def __len__(self) -> int:
        return len(self._files)

    def has(self, row: Tensor) -> bool:
        """Whether there is a file of these token ids [T]."""
        return _key(row) in self._files

    def states(self, rows: Sequence[Tensor], advance: Advance) -> list[Tensor | RowFault]:
        """States of each row, as its file has them."""
        found = []
        for row in rows:
            found.append(self._states_of(row))
            advance(1, len(row))
        return found

    def _states_of(self, row: Tensor) -> Tensor | RowFault:
        path = self._files.get(_key(row))
        if path is None:
            torn = f" ({len(self.unreadable)} files cannot be read)" if self.unreadable else ""
            return RowFault(f"no file in {self.folder} has its {len(row)} token ids{torn}")
        try:
            layers = read_layer_ids(path) or self._unnamed
            states = load_hidden_states(path, timeout=0)["hidden_states"]
        except (StoreError, FormatError) as error:
            return RowFault(str(error))
        return chosen_layers(states, layers, self._layer_ids, str(path))


def chosen_layers(states_TAH: Tensor, stored: Sequence[int], wanted: Sequence[int], where: str) -> Tensor:
    """The wanted layers of states whose layers are `stored`; StoreError where one is not among them."""
    if states_TAH.dim() != 3 or states_TAH.shape[1] != len(stored):
        raise StoreError(
            f"{where} has states {list(states_TAH.shape)}, expected [tokens, {len(stored)}, hidden size] for layers "
            f"{list(stored)}; say which layers it holds"
        )
    missing = [layer for layer in wanted if layer not in stored]
    if missing:
        raise StoreError(f"{where} holds layers {list(stored)}, but {missing} are wanted too; extract it again")
    if list(stored) == list(wanted):
        return states_TAH
    return states_TAH[:, [list(stored).index(layer) for layer in wanted]]


def _key(ids: Tensor) -> bytes:
    return hashlib.sha256(ids.long().contiguous().numpy().tobytes()).digest()
