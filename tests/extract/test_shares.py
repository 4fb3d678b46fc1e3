"""Several processes fill one store, and what a command line shows of a store."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from speculators.cli import main
from speculators.errors import StoreError
from speculators.extract.fingerprint import verifier_fingerprint
from speculators.extract.prepared import PreparedData
from speculators.extract.run import extract, extract_share
from speculators.extract.store import (
    MANIFEST,
    HiddenStatesStore,
    StoreIdentity,
    StoreWriter,
    WorkShare,
    shard_name,
)
from speculators.extract.verify import verify_store
from tests.extract.rows import AUX, EXACT, Reference, check_store, prepare_rows


@pytest.fixture(scope="module")
def prepared(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return prepare_rows(tiny_verifier, tmp_path_factory.mktemp("rows"))


def command(verifier: Path, prepared: PreparedData, out: Path) -> list[str]:
    words = [
        "extract", "--source", "local", "--verifier", str(verifier), "--data", str(prepared.directory), "--out",
        str(out), "--layers", "2,4,5,8", "--dtype", "float32", "--store-dtype", "float32",
    ]  # fmt: skip
    return [*words, "--batch-tokens", "100"]


def run(*arguments: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == code


def test_processes_of_a_launcher_share_the_work(tiny_verifier: Path, prepared: PreparedData, tmp_path: Path) -> None:
    out = tmp_path / "s"
    # Small shards, which the command line has no flag for: the store exists already when the processes come.
    identity = StoreIdentity(
        str(tiny_verifier), verifier_fingerprint(tiny_verifier), AUX, 8, 64, "float32",
        prepared.template_hash, prepared.rows_hash,
    )  # fmt: skip
    with StoreWriter(out, identity, prepared.lengths, shard_bytes=EXACT.shard_bytes) as writer:
        assert len(writer.missing) > 2
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    code = "from speculators.cli import main; main()"
    ended = subprocess.run(
        [*launcher, sys.executable, "-c", code, *command(tiny_verifier, prepared, out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("GiB free") == 1
    assert "0 rows done" not in ended.stdout
    check_store(HiddenStatesStore.open(out, verify=True), prepared, Reference(tiny_verifier))


def test_a_share_is_every_nth_shard(tiny_verifier: Path, prepared: PreparedData, tmp_path: Path) -> None:
    one = replace(EXACT, share=WorkShare(1, 2))
    result = extract_share(tiny_verifier, prepared.directory, tmp_path, AUX, one, progress=False)
    found = sorted(path.name for path in tmp_path.glob("shard-*"))
    assert found[0] == shard_name(1)
    assert all(int(name[6:11]) % 2 == 1 for name in found)
    with pytest.raises(StoreError, match=f"is unfinished: {result.done} of {len(prepared)} rows"):
        HiddenStatesStore.open(tmp_path)
    # The rest by one process alone.
    store = extract(tiny_verifier, prepared.directory, tmp_path, AUX, EXACT, progress=False)
    check_store(store, prepared, Reference(tiny_verifier))
    for rank, size in ((2, 2), (-1, 1)):
        with pytest.raises(StoreError, match="expected 0"):
            WorkShare(rank, size)


def test_shares_exclude_a_writer_of_everything_and_themselves(
    tiny_verifier: Path, prepared: PreparedData, tmp_path: Path
) -> None:
    identity = StoreIdentity("tiny", "a" * 64, AUX, 8, 64, "float32", "b" * 64, prepared.rows_hash)
    size = EXACT.shard_bytes

    def writer(rank: int, world_size: int) -> StoreWriter:
        return StoreWriter(tmp_path, identity, prepared.lengths, shard_bytes=size, share=WorkShare(rank, world_size))

    with writer(0, 2) as first, writer(1, 2) as second:
        numbers = [shard.number for shard in (*first.missing, *second.missing)]
        assert sorted(numbers) == list(range(len(numbers)))
        assert first.num_rows + second.num_rows == len(prepared)
        for rank, world_size in ((0, 1), (0, 2), (1, 3)):
            with pytest.raises(StoreError, match="being written by another process"), writer(rank, world_size):
                pass
    with writer(0, 1) as alone:
        assert len(alone.missing) == len(numbers)
        with pytest.raises(StoreError, match="being written by another process"), writer(1, 2):
            pass


def test_manifest_and_estimate(
    tiny_verifier: Path, prepared: PreparedData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*command(tiny_verifier, prepared, tmp_path))
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert manifest["fingerprint"] == verifier_fingerprint(tiny_verifier)
    assert manifest["layer_ids"] == [2, 4, 5, 8]
    assert manifest["dtype"] == "float32"
    assert manifest["template_hash"] == prepared.template_hash
    for shard in manifest["shards"]:
        assert shard["sha256"] == sha256((tmp_path / shard["file"]).read_bytes()).hexdigest()
    assert sum(shard["rows"] for shard in manifest["shards"]) == len(prepared)
    assert sum(shard["tokens"] for shard in manifest["shards"]) == prepared.num_tokens
    printed = capsys.readouterr().out
    # Four layers of 64 floats, an int64 id and a mask byte.
    assert f"{len(prepared)} rows, {prepared.num_tokens} tokens of {4 * 64 * 4 + 9} bytes: " in printed
    assert f"({len(prepared)} rows done, 0 there before, 0 skipped, 0 failed)" in printed
    run(*command(tiny_verifier, prepared, tmp_path))
    assert f"(0 rows done, {len(prepared)} there before, 0 skipped, 0 failed)" in capsys.readouterr().out


def test_verification_finds_a_changed_byte_and_the_next_run_mends_it(
    tiny_verifier: Path, prepared: PreparedData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extract(tiny_verifier, prepared.directory, tmp_path, AUX, EXACT, progress=False)
    run("extract", "--verify", "--out", str(tmp_path))
    assert f"{len(prepared)} rows, {prepared.num_tokens} tokens, 0 skipped; checksums right" in capsys.readouterr().out
    path = tmp_path / shard_name(1)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    run("extract", "--verify", "--out", str(tmp_path), code=1)
    assert f"damaged: {shard_name(1)};" in capsys.readouterr().err.replace("\n", " ")
    with pytest.raises(StoreError, match=r"damaged: none; not written yet: 1 of \d+ shards"):
        verify_store(tmp_path)
    extract(tiny_verifier, prepared.directory, tmp_path, AUX, EXACT, progress=False)
    verify_store(tmp_path)
    check_store(HiddenStatesStore.open(tmp_path), prepared, Reference(tiny_verifier))


def test_a_store_serves_any_of_its_layers(tiny_verifier: Path, prepared: PreparedData, tmp_path: Path) -> None:
    extract(tiny_verifier, prepared.directory, tmp_path, AUX, EXACT, progress=False)
    whole = HiddenStatesStore.open(tmp_path)[2]
    for asked in ((2, 5), (4,), (5, 8), (2, 4, 5, 8)):
        sample = HiddenStatesStore.open(tmp_path, aux_layer_ids=asked)[2]
        for place, layer in enumerate(asked):
            expected = whole.last_hidden_states if layer == 8 else whole.aux_hidden_states[:, AUX.index(layer)]
            assert sample.aux_hidden_states[:, place].equal(expected)
        assert sample.last_hidden_states.equal(whole.last_hidden_states)
    with pytest.raises(StoreError, match=r"aux layer ids \[2, 4, 5\], now \[2, 3\] is asked for"):
        HiddenStatesStore.open(tmp_path, aux_layer_ids=(2, 3))


def test_the_command_prepares_conversations(tiny_verifier: Path, tmp_path: Path) -> None:
    prepare_rows(tiny_verifier, tmp_path)
    words = ["extract", "--verifier", str(tiny_verifier), "--data", str(tmp_path / "data.jsonl")]
    run(*words, "--out", str(tmp_path / "s"), "--layers", "2,4", "--seq-length", "40")
    store = HiddenStatesStore.open(tmp_path / "s")
    assert store.identity.layer_ids == (2, 4, 8)
    assert max(store.lengths) <= 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--out is missing"),
        (["--out", "x"], "--verifier is missing"),
        (["--out", "x", "--verifier", "y"], "--data is missing"),
    ],
)
def test_what_is_missing_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["extract", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
