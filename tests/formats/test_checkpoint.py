"""Checkpoint directories: damaged ones are named, loading accounts for everything, saving leaves old or new."""

import contextlib
import json
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from speculators.errors import FormatError, SpeculatorsError
from speculators.formats import checkpoint
from speculators.formats.checkpoint import (
    load_tensors,
    read_config,
    read_header,
    read_headers,
    save_checkpoint,
    stored_dtype,
)
from speculators.formats.config import TensorSpec
from speculators.formats.files import flush_folder
from speculators.models.eagle3.config import Eagle3Config
from tests.formats.eagle3_directory import GOLDEN, make_config, make_tensors, write_directory, write_safetensors

EXPECTED = Eagle3Config.from_json(make_config()).expected_tensors()


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def refused_header(path: Path) -> str:
    with pytest.raises(FormatError) as caught:
        read_header(path)
    assert caught.value.code == "F025"
    assert path.name in str(caught.value)
    return str(caught.value)


class TestConfigFile:
    def test_is_read(self, tmp_path: Path) -> None:
        assert read_config(write_directory(tmp_path)) == make_config()

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", "Expecting value"),
            (b"[1, 2]", "object"),
            (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' appears twice"),
            (b'{"a": NaN}', "NaN"),
            (b'{"a": -Infinity}', "Infinity"),
            (b'{"a": 1e999}', "number 1e999 is larger"),
            (b'{"a": [-1.5e400]}', "number -1.5e400 is larger"),
            (b'{"a": 1' + b"0" * 400 + b"}", "integer 10000000000000000000... is larger"),
            (b'{"a": "\xff"}', "UTF-8"),
            (b'{"a":' + b"[" * 100_000, "nested too deeply"),
            (b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "nested too deeply; expected at most 64 levels"),
            (b'{"a": ' + b"9" * 5000 + b"}", "integer"),
            (b'{"a": 1', "delimiter"),
        ],
    )
    def test_damage_is_described(self, tmp_path: Path, content: bytes, words: str) -> None:
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(FormatError, match=r"config\.json") as caught:
            read_config(tmp_path)
        assert caught.value.code == "F001"
        assert words in str(caught.value)

    def test_absence_is_described(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match="holds no speculator"):
            read_config(tmp_path)
        with pytest.raises(FormatError, match="expected a directory"):
            read_config(tmp_path / "nowhere")


class TestHeaders:
    def test_golden_headers_are_those_of_safetensors(self) -> None:
        headers = read_headers(GOLDEN / "eagle3")
        with safe_open(GOLDEN / "eagle3" / "model.safetensors", framework="pt") as file:
            assert set(headers) == set(file.keys())
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                part = file.get_slice(name)
                assert (headers[name].dtype, list(headers[name].shape)) == (part.get_dtype(), part.get_shape())

    def test_byte_ranges_hold_the_tensors(self, tmp_path: Path) -> None:
        headers = read_headers(write_directory(tmp_path))
        raw = (tmp_path / "model.safetensors").read_bytes()
        for name, tensor in make_tensors().items():
            assert raw[headers[name].start : headers[name].end] == tensor.contiguous().numpy().tobytes()

    def test_every_truncation_is_noticed(self, tmp_path: Path) -> None:
        """Pitfall 46: a reader checks the header's length and the ranges against the file's size."""
        path = tmp_path / "model.safetensors"
        save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, path)
        whole = path.read_bytes()
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            assert "truncated" in refused_header(path)
        path.write_bytes(whole + b"\0")
        assert "1 bytes too many" in refused_header(path)

    @pytest.mark.parametrize(
        ("header", "data", "words"),
        [
            ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 2, 6)}, b"\0" * 6, "overlaps"),
            ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, b"\0" * 4, "overlaps"),
            ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 5, 9)}, b"\0" * 9, "hole"),
            ({"a": entry("F32", [1], 4, 8)}, b"\0" * 8, "hole"),
            ({"a": entry("F32", [2], 0, 4)}, b"\0" * 4, "expected 8"),
            ({"a": entry("F32", [-1], 0, 4)}, b"\0" * 4, "whole numbers"),
            ({"a": entry("F32", [2**40, 2**40], 0, 4)}, b"\0" * 4, "expected"),
            ({"a": entry("F32", [True], 0, 4)}, b"\0" * 4, "whole numbers"),
            ({"a": entry("F32", [1], 4, 0)}, b"\0" * 4, "bytes for shape"),
            ({"a": entry("F7", [1], 0, 4)}, b"\0" * 4, "unknown dtype"),
            ({"a": {"dtype": "F32", "shape": [1]}}, b"", "exactly"),
            ({"a": entry("F32", [1], 0, 4) | {"extra": 1}}, b"\0" * 4, "exactly"),
            ({"a": 3}, b"", "exactly"),
            ([1], b"", "object"),
            (b'{"a": 1, "a": 2}', b"", "appears twice"),
            (b"{", b"", "Expecting"),
            (b"\xff\xfe", b"", "UTF-8"),
        ],
    )
    def test_hostile_headers_are_refused(self, tmp_path: Path, header: object, data: bytes, words: str) -> None:
        path = write_safetensors(tmp_path / "model.safetensors", header, data)
        assert words in refused_header(path)

    def test_a_header_length_is_not_believed(self, tmp_path: Path) -> None:
        path = write_safetensors(tmp_path / "model.safetensors", {}, length=2**63)
        assert "truncated" in refused_header(path)
        with path.open("wb") as stream:
            stream.write((100_000_001).to_bytes(8, "little"))
            stream.truncate(100_000_100)
        assert "at most 100000000" in refused_header(path)

    @settings(deadline=None, max_examples=200)
    @given(st.binary(max_size=60), st.integers(0, 80))
    def test_noise_never_crashes_the_reader(
        self, tmp_path_factory: pytest.TempPathFactory, noise: bytes, length: int
    ) -> None:
        path = tmp_path_factory.mktemp("noise") / "model.safetensors"
        path.write_bytes(length.to_bytes(8, "little") + noise)
        try:
            read_header(path)
        except FormatError as error:
            refusal: FormatError | None = error
        else:
            refusal = None
        assert refusal is None or refusal.code == "F025"

    @settings(deadline=None, max_examples=300)
    @given(
        st.dictionaries(
            st.sampled_from("abc"),
            st.builds(
                entry,
                st.sampled_from(["F32", "BF16", "I64", "BOOL", "F99"]),
                st.lists(st.integers(0, 3), max_size=3),
                st.integers(0, 24),
                st.integers(0, 24),
            ),
            max_size=3,
        ),
        st.integers(0, 40),
    )
    def test_whatever_passes_also_passes_safetensors(
        self, tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], size: int
    ) -> None:
        path = write_safetensors(tmp_path_factory.mktemp("fuzz") / "model.safetensors", header, bytes(size))
        try:
            ours = read_header(path)
        except FormatError:
            with pytest.raises(SafetensorError):
                load_file(path)
        else:
            assert set(load_file(path)) == set(ours)


class TestSharded:
    @staticmethod
    def write(directory: Path, weight_map: object = None) -> dict[str, torch.Tensor]:
        write_directory(directory)
        (directory / "model.safetensors").unlink()
        tensors = make_tensors()
        names = sorted(tensors)
        shards = {"model-00001-of-00002.safetensors": names[:7], "model-00002-of-00002.safetensors": names[7:]}
        for file, part in shards.items():
            save_file({name: tensors[name] for name in part}, directory / file)
        index = {name: file for file, part in shards.items() for name in part}
        text = json.dumps({"metadata": {}, "weight_map": index if weight_map is None else weight_map})
        (directory / "model.safetensors.index.json").write_text(text)
        return tensors

    def test_all_shards_are_read(self, tmp_path: Path) -> None:
        tensors = self.write(tmp_path)
        loaded = load_tensors(tmp_path, EXPECTED)
        assert loaded.keys() == tensors.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())

    def refused(self, directory: Path) -> str:
        with pytest.raises(FormatError) as caught:
            read_headers(directory)
        assert caught.value.code == "F026"
        return str(caught.value)

    def test_missing_shard_is_named(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        (tmp_path / "model-00002-of-00002.safetensors").unlink()
        assert "model-00002-of-00002.safetensors" in self.refused(tmp_path)

    @pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "", 3, "a/b.safetensors"])
    def test_an_index_cannot_point_elsewhere(self, tmp_path: Path, file: object) -> None:
        self.write(tmp_path, {"fc.weight": file})
        assert "file name in this directory" in self.refused(tmp_path)

    @pytest.mark.parametrize("weight_map", [[], "x", {}])
    def test_an_index_without_a_map_is_refused(self, tmp_path: Path, weight_map: object) -> None:
        self.write(tmp_path, weight_map)
        assert "weight_map" in self.refused(tmp_path)

    def test_index_and_shard_must_agree(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        save_file({"other": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors")
        assert "disagree" in self.refused(tmp_path)

    def test_single_file_beside_an_index_is_ambiguous(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        save_file(make_tensors(), tmp_path / "model.safetensors")
        assert "stale" in self.refused(tmp_path)

    def test_unreadable_index_is_described(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        (tmp_path / "model.safetensors.index.json").write_text("{")
        assert "index.json" in self.refused(tmp_path)

    def test_no_weights_at_all(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").write_bytes(b"x")
        with pytest.raises(FormatError, match=r"convert pytorch_model\.bin") as caught:
            read_headers(tmp_path)
        assert caught.value.code == "F024"


class TestLoading:
    """Pitfall 29: missing and unexpected tensors are errors; nothing is ever loaded in part."""

    def test_everything_is_returned_as_stored(self, tmp_path: Path) -> None:
        loaded = load_tensors(write_directory(tmp_path), EXPECTED)
        assert loaded.keys() == make_tensors().keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in make_tensors().items())

    def test_optional_tensors_may_be_absent(self, tmp_path: Path) -> None:
        tensors = {name: tensor for name, tensor in make_tensors().items() if name != "t2d"}
        assert load_tensors(write_directory(tmp_path, tensors=tensors), EXPECTED).keys() == tensors.keys()

    @pytest.mark.parametrize(
        ("name", "tensor", "code"),
        [
            ("fc.weight", None, "F018"),
            ("lm_head.weight", None, "F016"),
            ("d2t", None, "F039"),
            ("verifier_norm.weight", torch.ones(8), "F017"),
            ("fc.weight", torch.ones(8, 32), "F019"),
            ("fc.weight", torch.ones(4, 24), "F020"),
            ("norm.weight", torch.ones(9), "F020"),
            ("norm.weight", torch.ones(8, dtype=torch.int64), "F021"),
            ("norm.weight", torch.ones(8, dtype=torch.float64), "F021"),
            ("d2t", torch.zeros(16, dtype=torch.int16), "F021"),
            ("t2d", torch.zeros(64, dtype=torch.uint8), "F021"),
        ],
    )
    def test_what_does_not_fit_is_named(
        self, tmp_path: Path, name: str, tensor: torch.Tensor | None, code: str
    ) -> None:
        tensors = make_tensors()
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
        with pytest.raises(FormatError, match=name) as caught:
            load_tensors(write_directory(tmp_path, tensors=tensors), EXPECTED)
        assert caught.value.code == code

    def test_a_map_of_narrower_integers_is_widened_but_never_written(self, tmp_path: Path) -> None:
        """Some published drafts store d2t as int32; vLLM casts it too."""
        narrow = make_tensors() | {"d2t": make_tensors()["d2t"].int()}
        loaded = load_tensors(write_directory(tmp_path / "theirs", tensors=narrow), EXPECTED)
        assert loaded["d2t"].dtype == torch.int64
        assert torch.equal(loaded["d2t"], make_tensors()["d2t"])
        with pytest.raises(FormatError, match="d2t is stored as I32") as caught:
            save_checkpoint(tmp_path / "ours", make_config(), narrow, EXPECTED)
        assert caught.value.code == "F053"
        assert not (tmp_path / "ours").exists()

    def test_a_renamed_tensor_is_both_missing_and_unknown(self, tmp_path: Path) -> None:
        tensors = make_tensors()
        tensors["midlayer.mlp.up_proj.weight"] = tensors.pop("layers.0.mlp.up_proj.weight")
        with pytest.raises(FormatError) as caught:
            load_tensors(write_directory(tmp_path, tensors=tensors), EXPECTED)
        assert "layers.0.mlp.up_proj.weight is missing" in str(caught.value)
        assert "midlayer.mlp.up_proj.weight belongs to no part" in str(caught.value)

    def test_a_map_at_full_vocabulary_is_refused(self, tmp_path: Path) -> None:
        full = Eagle3Config.from_json(make_config(draft_vocab_size=64)).expected_tensors()
        tensors = make_tensors() | {"lm_head.weight": torch.ones(64, 8), "d2t": torch.zeros(64, dtype=torch.int64)}
        with pytest.raises(FormatError, match="d2t") as caught:
            load_tensors(write_directory(tmp_path, tensors=tensors), full)
        assert caught.value.code == "F013"


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


class TestSaving:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_what_is_saved_is_loaded_bit_for_bit(self, tmp_path: Path, dtype: torch.dtype) -> None:
        tensors = make_tensors(dtype)
        save_checkpoint(tmp_path / "new" / "draft", make_config(), tensors, EXPECTED)
        loaded = load_tensors(tmp_path / "new" / "draft", EXPECTED)
        assert loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert loaded[name].dtype == tensor.dtype
            assert torch.equal(loaded[name], tensor)
        written = read_config(tmp_path / "new" / "draft")
        assert written == make_config(dtype=str(dtype).removeprefix("torch."))

    def test_files_are_readable_by_others_and_alone(self, tmp_path: Path) -> None:
        target = tmp_path / "draft"
        save_checkpoint(target, make_config(), make_tensors())
        assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o644 for path in target.iterdir())
        assert stat.S_IMODE(target.stat().st_mode) == 0o755
        assert [path.name for path in tmp_path.iterdir()] == ["draft"]
        with safe_open(target / "model.safetensors", framework="pt") as file:
            assert file.metadata() == {"format": "pt"}

    def test_saving_twice_gives_the_same_bytes(self, tmp_path: Path) -> None:
        save_checkpoint(tmp_path / "a", make_config(), make_tensors())
        save_checkpoint(tmp_path / "b", make_config(), make_tensors())
        save_checkpoint(tmp_path / "b", make_config(), make_tensors())
        assert contents(tmp_path / "a") == contents(tmp_path / "b")

    def test_views_and_shared_tensors_are_written_apart(self, tmp_path: Path) -> None:
        square = torch.arange(16.0).reshape(4, 4)
        save_checkpoint(tmp_path / "d", make_config(), {"a": square.T, "b": square, "c": square[1]})
        loaded = load_file(tmp_path / "d" / "model.safetensors")
        assert torch.equal(loaded["a"], square.T)
        assert torch.equal(loaded["b"], square)
        assert torch.equal(loaded["c"], square[1])

    def test_other_files_stay_and_stale_shards_go(self, tmp_path: Path) -> None:
        TestSharded.write(tmp_path)
        (tmp_path / "README.md").write_text("card")
        save_checkpoint(tmp_path, make_config(norm_output=True), make_tensors())
        assert sorted(contents(tmp_path)) == ["README.md", "config.json", "model.safetensors"]
        assert read_config(tmp_path)["norm_output"] is True
        assert load_tensors(tmp_path, EXPECTED).keys() == make_tensors().keys()

    def test_mixed_precision_and_missing_floats_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match=r"bfloat16 \(b\), float32 \(a\)"):
            stored_dtype({"a": torch.ones(1), "b": torch.ones(1, dtype=torch.bfloat16)})
        with pytest.raises(FormatError, match="absent"):
            stored_dtype({"a": torch.ones(1, dtype=torch.int64)})
        with pytest.raises(FormatError, match="float64"):
            save_checkpoint(tmp_path / "d", make_config(), {"a": torch.ones(1, dtype=torch.float64)})
        assert not (tmp_path / "d").exists()

    def test_what_does_not_fit_is_never_written(self, tmp_path: Path) -> None:
        tensors = make_tensors()
        tensors["fc.weight"] = torch.ones(8, 32)
        with pytest.raises(FormatError, match=r"fc\.weight"):
            save_checkpoint(tmp_path / "d", make_config(), tensors, EXPECTED)
        with pytest.raises(FormatError, match="model_type"):
            save_checkpoint(tmp_path / "d", make_config(model_type="qwen3"), make_tensors())
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("same_config", [True, False])
    def test_a_crash_leaves_old_or_new_or_nothing_readable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_config: bool
    ) -> None:
        """Interrupt a second save at each operation that changes the directory; a mixture must never be readable."""
        old, new = {"w": torch.zeros(4)}, {"w": torch.ones(4)}
        new_config = make_config() if same_config else make_config(norm_output=True)
        spec = {"w": TensorSpec((4,))}
        outcomes: list[tuple[bool, float] | None] = []
        for crash_at in range(1, 8):
            target = tmp_path / f"{crash_at}"
            save_checkpoint(target, make_config(), old)
            calls = 0

            def interrupted(original: Any, crash_at: int = crash_at) -> Any:
                def call(*arguments: Any, **keywords: Any) -> Any:
                    nonlocal calls
                    calls += 1
                    if calls == crash_at:
                        raise KeyboardInterrupt
                    return original(*arguments, **keywords)

                return call

            with monkeypatch.context() as patch:
                patch.setattr(os, "replace", interrupted(os.replace))
                patch.setattr(Path, "unlink", interrupted(Path.unlink))
                patch.setattr(checkpoint, "flush_folder", interrupted(flush_folder))
                with contextlib.suppress(KeyboardInterrupt):
                    save_checkpoint(target, new_config, new)
            try:
                state = (read_config(target)["norm_output"], float(load_tensors(target, spec)["w"][0]))
            except FormatError:
                outcomes.append(None)
                continue
            assert state in ((False, 0.0), (new_config["norm_output"], 1.0))
            outcomes.append(state)
        assert (False, 0.0) in outcomes
        assert (new_config["norm_output"], 1.0) in outcomes
        assert (None in outcomes) is not same_config

    def test_a_full_disk_is_reported_and_leaves_nothing(self, tmp_path: Path) -> None:
        """The limit on file sizes stands in for the full disk: the system refuses the write in the same way."""
        code = (
            "import resource, sys, torch\n"
            "from speculators.formats.checkpoint import save_checkpoint\n"
            "from speculators.errors import SpeculatorsError\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
            "try:\n"
            "    save_checkpoint(sys.argv[1], {}, {'w': torch.zeros(100_000)})\n"
            "except SpeculatorsError as error:\n"
            "    print(error)\n"
        )
        target = tmp_path / "draft"
        run = subprocess.run([sys.executable, "-c", code, str(target)], capture_output=True, text=True, check=True)
        assert str(target) in run.stdout
        assert "could not be written" in run.stdout
        assert list(tmp_path.iterdir()) == []
        assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096

    def test_an_unwritable_place_is_reported(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        with pytest.raises(SpeculatorsError, match="could not be written"):
            save_checkpoint(tmp_path / "file" / "draft", make_config(), make_tensors())
