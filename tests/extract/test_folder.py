"""A folder of per-request files becomes a store: rows are found by their tokens, whoever wrote the files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from speculators.errors import StoreError, UsageError
from speculators.extract.folder import FolderSource
from speculators.extract.online import OnlineSamples
from speculators.extract.prepared import PreparedData
from speculators.extract.run import extract, extract_share
from speculators.extract.store import HiddenStatesStore
from speculators.formats.hidden_states import HiddenStatesWriter
from speculators.train.dataset import PackedRows
from tests.extract.rows import AUX, EXACT, Reference, check_store, prepare_rows

LAYERS = (*AUX, 8)


@pytest.fixture(scope="module")
def prepared(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return prepare_rows(tiny_verifier, tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def reference(tiny_verifier: Path) -> Reference:
    return Reference(tiny_verifier)


def of_folder(folder: Path, **more: Any) -> Any:
    return replace(EXACT, source="files", files=folder, **more)


def write_stock(folder: Path, prepared: PreparedData, reference: Reference, *, last: int | None = None) -> None:
    """Files as vLLM's own connector writes them: two tensors, no metadata, any order, a lock beside each."""
    folder.mkdir()
    for row in range(len(prepared) if last is None else last):
        ids, _ = prepared[row]
        path = folder / f"{97 * (row + 1) % 31}-a2cf.safetensors"
        save_file({"hidden_states": reference.states(ids).contiguous(), "token_ids": ids}, path)
        Path(f"{path}.lock").touch()


def test_files_of_this_project(
    tiny_verifier: Path, prepared: PreparedData, reference: Reference, tmp_path: Path
) -> None:
    with HiddenStatesWriter(tmp_path / "files") as writer:
        for row in reversed(range(len(prepared))):
            ids, _ = prepared[row]
            states = torch.cat([torch.zeros(len(ids), 1, 64), reference.states(ids)], 1)
            # Layer 1 is more than the store keeps.
            writer.submit(writer.reserve(f"row{row}"), states, ids, (1, *LAYERS))
    store = extract(
        tiny_verifier, prepared.directory, tmp_path / "s", AUX, of_folder(tmp_path / "files"), progress=False
    )
    check_store(store, prepared, reference)


def test_files_of_vllm(tiny_verifier: Path, prepared: PreparedData, reference: Reference, tmp_path: Path) -> None:
    write_stock(tmp_path / "files", prepared, reference)
    options = of_folder(tmp_path / "files", file_layer_ids=(8, 5, 4, 2))
    store = extract(tiny_verifier, prepared.directory, tmp_path / "s", (2, 5), options, progress=False)
    assert store.identity.layer_ids == (2, 5, 8)
    for row in range(len(prepared)):
        expected = reference.states(prepared[row][0])
        assert torch.equal(store[row].aux_hidden_states, expected[:, [0, 2]])
        assert torch.equal(store[row].last_hidden_states, expected[:, 3])


def test_rows_without_a_file_are_counted(
    tiny_verifier: Path, prepared: PreparedData, reference: Reference, tmp_path: Path
) -> None:
    write_stock(tmp_path / "files", prepared, reference, last=7)
    torn = tmp_path / "files" / "torn.safetensors"
    torn.write_bytes(next((tmp_path / "files").glob("*-a2cf.safetensors")).read_bytes()[:-10])
    options = of_folder(tmp_path / "files")
    with pytest.raises(StoreError, match=r"2 failed; row 7: no file .* has its \d+ token ids \(1 files cannot be read"):
        extract(tiny_verifier, prepared.directory, tmp_path / "s", AUX, options, progress=False)
    options = replace(options, skip_failed=True)
    result = extract_share(tiny_verifier, prepared.directory, tmp_path / "s", AUX, options, progress=False)
    assert result.skipped == 2
    assert len(HiddenStatesStore.open(tmp_path / "s")) == 7


def test_samples_of_a_folder_are_those_of_a_store(
    tiny_verifier: Path, prepared: PreparedData, reference: Reference, tmp_path: Path
) -> None:
    write_stock(tmp_path / "files", prepared, reference)
    store = extract(
        tiny_verifier, prepared.directory, tmp_path / "s", AUX, of_folder(tmp_path / "files"), progress=False
    )

    def source() -> FolderSource:
        return FolderSource(tmp_path / "files", store.identity.layer_ids, progress=False)

    samples = OnlineSamples(source(), prepared, store.identity, AUX)
    ours, theirs = PackedRows(samples, 128, seed=3), PackedRows(store, 128, seed=3)
    assert len(ours.plan(0).rows) > 1
    for row in range(len(ours.plan(0).rows)):
        mine, other = ours.batch(0, [row]), theirs.batch(0, [row])
        for name in ("input_ids", "loss_mask", "aux_hidden_states", "last_hidden_states", "document_ids"):
            assert torch.equal(getattr(mine, name), getattr(other, name))
    one = OnlineSamples(source(), prepared, store.identity, (4,), rows=[3])
    assert (len(one), list(one.lengths)) == (1, [prepared.lengths[3]])
    assert torch.equal(one[0].input_ids, prepared[3][0])
    assert torch.equal(one[0].aux_hidden_states[:, 0], reference.states(one[0].input_ids)[:, 1])
    for path in (tmp_path / "files").glob("*.safetensors"):
        path.unlink()
    with pytest.raises(StoreError, match=r"row 0: .*No such file"):
        samples[0]
    other = tmp_path / "files/x.safetensors"
    save_file({"hidden_states": torch.zeros(1, 4, 64), "token_ids": torch.tensor([1])}, other)
    with pytest.raises(StoreError, match=r"row 3: no file in .* has its \d+ token ids"):
        OnlineSamples(source(), prepared, store.identity, AUX)[3]
    ids = prepared[3][0]
    save_file({"hidden_states": torch.zeros(len(ids), 4, 32), "token_ids": ids}, other)
    with pytest.raises(StoreError, match=r"row 3: got states \[\d+, 4, 32\], expected \[\d+, 4, 64\]; of which"):
        OnlineSamples(source(), prepared, store.identity, AUX)[3]


def test_what_a_folder_cannot_be(tiny_verifier: Path, prepared: PreparedData, reference: Reference, tmp_path: Path):
    with pytest.raises(StoreError, match="holds no per-request files"):
        FolderSource(tmp_path / "nowhere", LAYERS)
    with pytest.raises(UsageError, match="needs the folder"):
        replace(EXACT, source="files")
    write_stock(tmp_path / "files", prepared, reference)
    options = of_folder(tmp_path / "files")
    with pytest.raises(StoreError, match=r"expected \[tokens, 3, hidden size\] for layers \[2, 4, 8\]"):
        extract(tiny_verifier, prepared.directory, tmp_path / "fewer", (2, 4), options, progress=False)
