"""Per-request files: what is in them, who may read them when, and what becomes of requests that go wrong."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from speculators.errors import EngineError, RequestError, StoreError
from speculators.formats.hidden_states import (
    HiddenStatesWriter,
    load_hidden_states,
    parse_transfer_config,
    read_layer_ids,
)
from speculators.formats.hidden_states_options import HiddenStatesOptions
from tests.formats.request_files import LAYERS, A, H, T, content, write


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[HiddenStatesWriter]:
    with HiddenStatesWriter(tmp_path / "shared", num_writer_threads=2) as made:
        yield made


# What is in a file


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_official_reader_finds_what_was_written(writer, dtype) -> None:
    states, ids = content(1, dtype)
    path = writer.reserve("r-1")
    assert writer.submit(path, states, ids, LAYERS).result(10) == path
    found = load_file(path)
    assert found.keys() == {"hidden_states", "token_ids"}
    assert found["hidden_states"].dtype == dtype
    assert torch.equal(found["hidden_states"], states)
    assert torch.equal(found["token_ids"], ids)
    with safe_open(path, framework="pt") as stream:
        notes = stream.metadata()
    assert notes == {
        "format": "speculators.hidden_states",
        "version": "1",
        "layer_ids": "[0, 2, 4]",
        "dtype": str(dtype).removeprefix("torch."),
        "prenorm": "true",
    }
    assert read_layer_ids(path) == LAYERS


def test_views_and_no_tokens_at_all_are_written_as_they_are(writer) -> None:
    wide, ids = torch.arange(2 * T * A * H, dtype=torch.float32).view(T, A, 2 * H), torch.arange(2 * T)[::2]
    path = writer.reserve("view")
    writer.submit(path, wide[:, :, ::2], ids, LAYERS).result(10)
    assert torch.equal(load_file(path)["hidden_states"], wide[:, :, ::2])
    assert torch.equal(load_file(path)["token_ids"], ids)
    empty = writer.reserve("empty")
    writer.submit(empty, *content(tokens=0), LAYERS).result(10)
    assert load_file(empty)["hidden_states"].shape == (0, A, H)


@pytest.mark.parametrize(
    ("states", "ids", "layers", "message"),
    [
        (torch.zeros(T, A, H), torch.zeros(T - 1, dtype=torch.int64), LAYERS, r"expected int64 \[5\]"),
        (torch.zeros(T, A, H), torch.zeros(T, dtype=torch.int32), LAYERS, r"expected int64 \[5\]"),
        (torch.zeros(T, A * H), torch.zeros(T, dtype=torch.int64), LAYERS, r"\[tokens, layers, hidden size\]"),
        (torch.zeros(T, A, H, dtype=torch.float64), torch.zeros(T, dtype=torch.int64), LAYERS, "float64"),
        (torch.zeros(T, A, H), torch.zeros(T, dtype=torch.int64), (0, 2), r"layers \[0, 2\] for 3 states"),
        (torch.zeros(T, A, H), torch.zeros(T, dtype=torch.int64), (0, 4, 2), "expected ascending ids"),
        (torch.zeros(T, A, H), torch.zeros(T, dtype=torch.int64), (0, 2, 2), "expected ascending ids"),
    ],
)
def test_content_that_contradicts_itself_is_refused(writer, states, ids, layers, message) -> None:
    path = writer.reserve("r")
    with pytest.raises(StoreError, match=message):
        writer.submit(path, states, ids, layers)


def test_files_of_vllm_itself_are_read_and_say_nothing_about_layers(tmp_path) -> None:
    states, ids = content()
    path = tmp_path / "0-a2cffa1e.safetensors"
    save_file({"hidden_states": states, "token_ids": ids}, path)
    Path(f"{path}.lock").touch()
    assert torch.equal(load_hidden_states(path)["hidden_states"], states)
    assert read_layer_ids(path) is None


# Names and paths


@pytest.mark.parametrize("name", ["0-a2cffa1e", "cmpl-12_3.x", "A" * 160])
def test_harmless_ids_are_file_names(tmp_path, name) -> None:
    assert HiddenStatesOptions(str(tmp_path)).path_for(name) == tmp_path / f"{name}.safetensors"


def test_other_ids_become_names_that_stay_in_the_folder_and_apart(tmp_path) -> None:
    names = ["../../etc/passwd", "a/b", "a_b", "a\0b", "", ".", "..", ".hidden", "é", "x" * 5000, "x" * 5001, "a b"]
    paths = [HiddenStatesOptions(str(tmp_path)).path_for(name) for name in names]
    assert {path.parent for path in paths} == {tmp_path}
    assert len(set(paths)) == len(names)
    for path in paths:
        assert len(path.name) < 220
        assert not path.name.startswith(".")
        path.touch()


def test_a_path_of_a_client_is_ignored_with_a_warning_unless_allowed(tmp_path, caplog) -> None:
    options = HiddenStatesOptions(str(tmp_path))
    assert options.path_for("r", str(tmp_path / "mine.safetensors")) == tmp_path / "r.safetensors"
    assert "allow_custom_save_path is off" in caplog.text


def test_an_allowed_path_stays_below_its_roots(tmp_path) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    for folder in (shared, other):
        folder.mkdir()
    default = HiddenStatesOptions(str(shared), allow_custom_save_path=True)
    assert default.path_for("r", str(shared / "a/b.safetensors")) == shared / "a/b.safetensors"
    assert default.path_for("r", "a/../b.bin") == shared / "b.bin"
    roots = HiddenStatesOptions(str(shared), allow_custom_save_path=True, allowed_save_roots=(str(other),))
    assert roots.path_for("r", str(other / "b.safetensors")) == other / "b.safetensors"
    with pytest.raises(RequestError, match="expected a file below"):
        roots.path_for("r", str(shared / "b.safetensors"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("../outside.safetensors", "expected a file below"),
        ("a/../../outside.safetensors", "expected a file below"),
        ("/etc/passwd", "expected a file below"),
        ("link/file.safetensors", "expected a file below"),
        ("file-link.safetensors", "expected a file below"),
        ("a\0b", "expected the path of a file"),
        ("a\ud800b", "expected the path of a file"),
        ("", "expected the path of a file"),
        (".", "expected a file below"),
        ("folder", "is a folder"),
        ("folder/", "is a folder"),
        ("new/", "is a folder"),
        ("x" * 300, "at most 220 bytes"),
        ("other.safetensors.lock", "does not end in .lock"),
        (17, "expected the path of a file"),
    ],
)
def test_a_path_that_leads_out_or_is_no_file_is_refused(tmp_path, given, message) -> None:
    shared = tmp_path / "shared"
    (shared / "folder").mkdir(parents=True)
    (shared / "link").symlink_to(tmp_path)
    (shared / "file-link.safetensors").symlink_to("/etc/passwd")
    with HiddenStatesWriter(shared, allow_custom_save_path=True) as writer, pytest.raises(RequestError, match=message):
        writer.reserve("r", given)
    assert not list(tmp_path.rglob("*.lock"))


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me", encoding="utf-8")
    (tmp_path / "r.safetensors.lock").symlink_to(precious)
    with HiddenStatesWriter(tmp_path) as writer, pytest.raises(StoreError, match="cannot be written"):
        writer.reserve("r")
    assert precious.read_text(encoding="utf-8") == "keep me"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"shared_storage_pth": "/x"}, "unknown shared_storage_pth"),
        ({"num_writer_threads": 0}, "num_writer_threads is 0"),
        ({"num_writer_threads": True}, "num_writer_threads is True"),
        ({"use_synchronization_lock": "no"}, "use_synchronization_lock is 'no'"),
        ({"allow_custom_save_path": 1}, "allow_custom_save_path is 1"),
        ({"allowed_save_roots": "/x"}, "allowed_save_roots is '/x'"),
        ({"shared_storage_path": ""}, "shared_storage_path is ''"),
        (["x"], "expected a mapping"),
    ],
)
def test_wrong_options_are_refused_by_name(extra, message) -> None:
    with pytest.raises(EngineError, match=message):
        parse_transfer_config({"kv_role": "kv_producer", "kv_connector_extra_config": extra})


def test_options_of_a_transfer_config() -> None:
    class AsVllmHasIt:
        kv_role = "kv_producer"
        kv_connector_extra_config = {"num_writer_threads": 2}  # noqa: RUF012 - as vLLM's own has it

    assert parse_transfer_config(AsVllmHasIt()) == HiddenStatesOptions(num_writer_threads=2)
    found = parse_transfer_config({"kv_role": "kv_producer", "kv_connector": "ExampleHiddenStatesConnector"})
    assert (found.shared_storage_path, found.num_writer_threads) == ("/tmp", 8)
    assert (found.allow_custom_save_path, found.use_synchronization_lock) == (False, True)
    with pytest.raises(EngineError, match="kv_role is 'kv_consumer', expected 'kv_producer'"):
        parse_transfer_config({"kv_role": "kv_consumer"})


# Damaged files


def test_every_truncation_of_a_file_is_refused(writer) -> None:
    path = write(writer, "r")
    whole = path.read_bytes()
    for size in [0, 1, 7, 8, 50, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(StoreError, match="cannot be read"):
            load_hidden_states(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(StoreError, match="1 bytes too many"):
        load_hidden_states(path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"hidden_states": torch.zeros(2, 3, 4)}, "expected hidden_states, token_ids"),
        ({"hidden_states": torch.zeros(2, 3, 4), "token_ids": torch.zeros(3, dtype=torch.int64)}, "states of 2 tokens"),
        ({"hidden_states": torch.zeros(2, 12), "token_ids": torch.zeros(2, dtype=torch.int64)}, r"F32 \[2, 12\]"),
        ({"hidden_states": torch.zeros(2, 3, 4), "token_ids": torch.zeros(2)}, r"token_ids F32 \[2\]"),
    ],
)
def test_other_content_is_refused(tmp_path, tensors, message) -> None:
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(StoreError, match=message):
        load_hidden_states(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "notes",
    [{"version": "2"}, {"prenorm": "false"}, {"layer_ids": "17"}, {"layer_ids": "[a]"}],
)
def test_other_metadata_is_refused(tmp_path, notes) -> None:
    good = {"format": "speculators.hidden_states", "version": "1", "prenorm": "true", "layer_ids": "[1]"}
    save_file({"hidden_states": torch.zeros(2, 1, 4)}, tmp_path / "x.safetensors", {**good, **notes})
    with pytest.raises(StoreError, match="does not say which layers"):
        read_layer_ids(tmp_path / "x.safetensors")


def test_these_modules_need_neither_datasets_nor_accelerate_nor_a_command_line(tmp_path) -> None:
    script = (
        "import sys, json\nimport speculators.formats.hidden_states\n"
        "print(json.dumps([name for name in ('datasets', 'accelerate', 'typer', 'torch') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
