"""The hidden-states store: what comes out is what went in, after every kind of interruption."""

import copy
import json
import pickle
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors import safe_open
from torch import Tensor

from speculators.errors import StoreError
from speculators.extract.store import MANIFEST, HiddenStatesStore, StoreIdentity, StoreWriter, shard_name

IDENTITY = StoreIdentity(
    verifier="tiny",
    verifier_fingerprint="a" * 64,
    aux_layer_ids=(1, 3),
    num_layers=5,
    hidden_size=8,
    dtype="bfloat16",
    template_hash="b" * 64,
    rows_hash="c" * 64,
)
LENGTHS = [3, 9, 1, 4, 4, 2, 12, 5]
SHARD_BYTES = 10 * IDENTITY.bytes_per_token
# Filled up to ten tokens each; the row of twelve is alone.
SHARDS = [(0, 1), (1, 3), (3, 6), (6, 7), (7, 8)]


def make_rows(identity: StoreIdentity = IDENTITY) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    layers = len(identity.layer_ids)
    return [
        (
            torch.randint(0, 100, (length,), generator=generator),
            torch.rand(length, generator=generator) < 0.5,
            torch.randn(length, layers, identity.hidden_size, generator=generator),
        )
        for length in LENGTHS
    ]


def fill(directory: Path, limit: int | None = None, identity: StoreIdentity = IDENTITY) -> list[int]:
    rows = make_rows(identity)
    written = []
    with StoreWriter(directory, identity, LENGTHS, shard_bytes=SHARD_BYTES) as writer:
        for shard in writer.missing[:limit]:
            ids, masks, states = zip(*rows[shard.first : shard.last], strict=True)
            writer.write(shard, ids, masks, states)
            written.append(shard.number)
    return written


def check(store: HiddenStatesStore) -> None:
    assert list(store.lengths) == LENGTHS
    assert len(store) == len(LENGTHS)
    assert store.num_tokens == sum(LENGTHS)
    for number in (5, 0, 7, 6, 1, 2, 3, 4, -1):
        ids, mask, states = make_rows()[number]
        sample = store[number]
        assert torch.equal(sample.input_ids, ids)
        assert torch.equal(sample.loss_mask, mask)
        assert sample.aux_hidden_states.dtype == torch.bfloat16
        assert torch.equal(sample.aux_hidden_states, states[:, :2].bfloat16())
        assert torch.equal(sample.last_hidden_states, states[:, 2].bfloat16())


def test_round_trip(tmp_path: Path) -> None:
    assert fill(tmp_path) == [0, 1, 2, 3, 4]
    store = HiddenStatesStore.open(tmp_path, verify=True)
    check(store)
    check(pickle.loads(pickle.dumps(store)))
    check(copy.deepcopy(store))
    with pytest.raises(IndexError, match="row 8 of a store of 8"):
        store[8]
    assert list(tmp_path.glob(".*.partial")) == []


def test_shards_describe_themselves(tmp_path: Path) -> None:
    fill(tmp_path)
    for number, (first, last) in enumerate(SHARDS):
        with safe_open(tmp_path / shard_name(number), framework="pt") as file:
            assert sorted(file.keys()) == ["hidden_states", "loss_mask", "row_offsets", "token_ids"]
            offsets = file.get_tensor("row_offsets")
            assert offsets.diff().tolist() == LENGTHS[first:last]
            assert file.get_slice("hidden_states").get_shape() == [int(offsets[-1]), 3, 8]
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert manifest["layer_ids"] == [1, 3, 5]
    assert manifest["prenorm"] is True


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes(tmp_path: Path, dtype: str) -> None:
    fill(tmp_path, identity=replace(IDENTITY, dtype=dtype))
    states = make_rows()[1][2].to(getattr(torch, dtype))
    assert torch.equal(HiddenStatesStore.open(tmp_path)[1].last_hidden_states, states[:, 2])


def test_an_aux_layer_may_be_the_last_one(tmp_path: Path) -> None:
    """An id is the number of layers that ran (pitfall 7)."""
    identity = replace(IDENTITY, aux_layer_ids=(1, 5))
    fill(tmp_path, identity=identity)
    states = make_rows(identity)[3][2].bfloat16()
    sample = HiddenStatesStore.open(tmp_path)[3]
    assert torch.equal(sample.aux_hidden_states, states)
    assert torch.equal(sample.last_hidden_states, states[:, 1])


def test_an_unfinished_store_is_not_opened_and_goes_on(tmp_path: Path) -> None:
    assert fill(tmp_path, limit=2) == [0, 1]
    with pytest.raises(StoreError, match=r"is unfinished: 3 of 8 rows; run the extraction again"):
        HiddenStatesStore.open(tmp_path)
    assert fill(tmp_path) == [2, 3, 4]
    check(HiddenStatesStore.open(tmp_path, verify=True))


def test_a_kill_between_shard_and_manifest_costs_that_shard(tmp_path: Path) -> None:
    fill(tmp_path, limit=2)
    before = (tmp_path / MANIFEST).read_bytes()
    fill(tmp_path, limit=1)
    (tmp_path / MANIFEST).write_bytes(before)
    (tmp_path / ".shard-00003.safetensors.x1y2.partial").write_bytes(b"half a shard")
    assert fill(tmp_path) == [2, 3, 4]
    check(HiddenStatesStore.open(tmp_path, verify=True))
    assert list(tmp_path.glob(".*.partial")) == []


def test_a_kill_before_the_manifest_starts_anew(tmp_path: Path) -> None:
    fill(tmp_path, limit=1)
    (tmp_path / MANIFEST).unlink()
    assert fill(tmp_path) == [0, 1, 2, 3, 4]
    check(HiddenStatesStore.open(tmp_path))


@pytest.mark.parametrize("damage", ["truncated", "absent", "header"])
def test_a_damaged_shard_is_named_and_written_again(tmp_path: Path, damage: str) -> None:
    fill(tmp_path)
    path = tmp_path / shard_name(2)
    content = path.read_bytes()
    if damage == "absent":
        path.unlink()
    else:
        path.write_bytes(content[:-7] if damage == "truncated" else b"\xff" * 8 + content[8:])
    with pytest.raises(StoreError, match=r"shard-00002\.safetensors is missing or damaged; run the extraction again"):
        HiddenStatesStore.open(tmp_path)
    assert fill(tmp_path) == [2]
    check(HiddenStatesStore.open(tmp_path, verify=True))


def test_a_changed_byte_is_found_when_checksums_are_compared(tmp_path: Path) -> None:
    fill(tmp_path)
    path = tmp_path / shard_name(1)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    HiddenStatesStore.open(tmp_path)
    with pytest.raises(StoreError, match=r"shard-00001\.safetensors is missing or damaged"):
        HiddenStatesStore.open(tmp_path, verify=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verifier_fingerprint": "d" * 64}, r"verifier fingerprint a{12}\.\.\. \(made with tiny\), now d{12}\.\.\."),
        ({"aux_layer_ids": (1, 2)}, r"aux layer ids \[1, 3\], now \[1, 2\] is asked for"),
        ({"template_hash": "d" * 64}, r"template hash b{12}\.\.\., now d{12}\.\.\."),
        ({"rows_hash": "d" * 64}, r"rows hash c{12}\.\.\., now d{12}\.\.\."),
        ({"dtype": "float32"}, r"dtype bfloat16, now float32"),
        ({"num_layers": 6}, r"num layers 5, now 6"),
    ],
)
def test_a_store_for_something_else_is_refused_naming_both(tmp_path: Path, change: dict, message: str) -> None:
    fill(tmp_path)
    with pytest.raises(StoreError, match=message):
        fill(tmp_path, identity=replace(IDENTITY, **change))
    key, value = next(iter(change.items()))
    if key in ("verifier_fingerprint", "aux_layer_ids", "template_hash"):
        with pytest.raises(StoreError, match=message):
            HiddenStatesStore.open(tmp_path, **{key: value})
        HiddenStatesStore.open(tmp_path, **{key: getattr(IDENTITY, key)})
    fill(tmp_path, identity=replace(IDENTITY, verifier="the same under another name"))


def test_identities_that_make_no_sense_are_refused() -> None:
    for change, message in (
        ({"dtype": "int8"}, "dtype 'int8' cannot be stored"),
        ({"aux_layer_ids": (3, 1)}, "expected ascending"),
        ({"aux_layer_ids": (1, 6)}, r"within 0\.\.5"),
    ):
        with pytest.raises(StoreError, match=message):
            replace(IDENTITY, **change)


def test_states_of_another_shape_are_refused(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, IDENTITY, LENGTHS, shard_bytes=SHARD_BYTES) as writer:
        ids, masks, states = zip(*make_rows()[:1], strict=True)
        with pytest.raises(StoreError, match=r"got states \[\(3, 2, 8\)\], expected \[T, 3, 8\] with T of \[3\]"):
            writer.write(writer.missing[0], ids, masks, [states[0][:, :2]])
        with pytest.raises(StoreError, match="shard 0"):
            writer.write(writer.missing[0], [ids[0][:2]], masks, states)
    assert not (tmp_path / shard_name(0)).exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prenorm": False}, "says prenorm False, expected true"),
        ({"prenorm": None}, "says prenorm None"),
        ({"format_version": 9}, "format_version 9, expected 3"),
        ({"num_tokens": 7}, "the manifest tells of 8 rows with 7 tokens, the row lengths of 8 with 40"),
    ],
)
def test_a_manifest_that_promises_something_else_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    """States are those before the final norm, and say so (pitfall 1)."""
    fill(tmp_path)
    data = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**data, **change}))
    with pytest.raises(StoreError, match=message):
        HiddenStatesStore.open(tmp_path)


def test_a_manifest_without_the_prenorm_flag_is_refused(tmp_path: Path) -> None:
    """States are those before the final norm, and say so (pitfall 1)."""
    fill(tmp_path)
    data = json.loads((tmp_path / MANIFEST).read_text())
    del data["prenorm"]
    (tmp_path / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(StoreError, match="lacks prenorm"):
        HiddenStatesStore.open(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(StoreError, match=r"manifest\.json is damaged"):
        HiddenStatesStore.open(tmp_path)
    with pytest.raises(StoreError, match="is no hidden-states store"):
        HiddenStatesStore.open(tmp_path / "elsewhere")


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    fill(tmp_path, limit=1)
    with FileLock(tmp_path / ".lock"), pytest.raises(StoreError, match="is being written by another process"):
        fill(tmp_path)
    assert fill(tmp_path) == [1, 2, 3, 4]


def test_more_than_the_disk_holds_is_refused_up_front(tmp_path: Path) -> None:
    with (
        pytest.raises(StoreError, match=r"the hidden-states store needs \d+\.\d\d GiB, but .* free"),
        StoreWriter(tmp_path, replace(IDENTITY, hidden_size=2**50), LENGTHS),
    ):
        pass
    assert not (tmp_path / MANIFEST).exists()


def test_a_disk_that_fills_up_leaves_no_half_shard(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the full disk: the third shard cannot be written whole."""
    fill(tmp_path, limit=2)
    size = (tmp_path / shard_name(1)).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, before[1]))
    try:
        with pytest.raises(StoreError, match="make room and run the stage again") as caught:
            fill(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value).startswith(f"no room for {tmp_path / shard_name(2)}")
    assert sorted(path.name for path in tmp_path.glob("*shard*")) == [shard_name(0), shard_name(1)]
    assert list(tmp_path.glob(".*.partial")) == []
    assert fill(tmp_path) == [2, 3, 4]
    check(HiddenStatesStore.open(tmp_path, verify=True))


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be written to"):
        fill(tmp_path / "file")
