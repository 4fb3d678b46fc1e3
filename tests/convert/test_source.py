"""Files of weights as others give them: what is read of a pickle or an index, and what is refused by its name."""

import io
import json
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from speculators.convert.source import SourceCheckpoint, read_pickle
from speculators.errors import FormatError

PICKLED, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
WHOLE = torch.arange(6.0).view(2, 3)


class Code:
    """An object whose pickle makes a folder when it is read carelessly."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._folder),)


def opened(folder: Path, **files: str) -> SourceCheckpoint:
    (folder / "config.json").write_text("{}", encoding="utf-8")
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return SourceCheckpoint.open(folder)


@pytest.mark.parametrize("is_archive", [True, False])
@pytest.mark.parametrize("make", [torch.Tensor.contiguous, torch.nn.Parameter, lambda one: one.T.contiguous().T])
def test_a_pickle_of_tensors_is_read(make: Callable[[Tensor], Tensor], is_archive: bool, tmp_path: Path) -> None:
    state = {"state_dict": {"fc.weight": make(WHOLE)}, "epoch": 3}
    torch.save(state, tmp_path / PICKLED, _use_new_zipfile_serialization=is_archive)
    tensors = opened(tmp_path).tensors
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} == {"fc.weight": ((2, 3), "F32")}
    assert torch.equal(tensors["fc.weight"].read(), WHOLE)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("is_archive", [True, False])
def test_code_in_a_pickle_is_not_run(protocol: int, is_archive: bool, tmp_path: Path) -> None:
    made = tmp_path / "made"
    content = {"fc.weight": WHOLE, "more": Code(made)}
    torch.save(content, tmp_path / PICKLED, pickle_protocol=protocol, _use_new_zipfile_serialization=is_archive)
    with pytest.raises(FormatError, match="cannot be read as plain tensors") as caught:
        opened(tmp_path)
    assert not made.exists()
    # torch's own text says how to run the code all the same.
    assert "weights_only" not in str(caught.value)
    if protocol == 2:
        assert "mkdir" in str(caught.value)
    (tmp_path / PICKLED).write_bytes(pickle.dumps(Code(made)))
    with pytest.raises(FormatError, match="cannot be read as plain tensors"):
        opened(tmp_path)
    assert not made.exists()


def test_a_pickle_that_is_damaged_anywhere_is_refused(tmp_path: Path) -> None:
    """Every length of an old file, and bytes changed at random in a new one: tensors, or a FormatError."""
    old, new = io.BytesIO(), io.BytesIO()
    torch.save({"fc.weight": WHOLE}, old, _use_new_zipfile_serialization=False)
    torch.save({"fc.weight": WHOLE}, new)
    file, drawn = tmp_path / PICKLED, random.Random(0)
    damaged = [old.getvalue()[:length] for length in range(0, len(old.getvalue()), 3)]
    damaged += [_changed(new.getvalue(), drawn) for _ in range(250)]
    said = []
    for content in damaged:
        file.write_bytes(content)
        said.append(_refusal(file))
    refused = [text for text in said if text is not None]
    assert all(str(file) in text for text in refused)
    assert len(refused) > len(damaged) // 2


def _refusal(file: Path) -> str | None:
    try:
        read_pickle(file)
    except FormatError as error:
        return str(error)
    return None


def _changed(archive: bytes, drawn: random.Random) -> bytes:
    """A zip archive with up to three bytes of its pickle changed."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as source, zipfile.ZipFile(written, "w") as target:
        for name in source.namelist():
            content = bytearray(source.read(name))
            if name.endswith("data.pkl"):
                for _ in range(drawn.randint(1, 3)):
                    content[drawn.randrange(len(content))] = drawn.randrange(256)
            target.writestr(name, bytes(content))
    return written.getvalue()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, "no tensor is in pytorch_model.bin"),
        ({"fc.weight": WHOLE.to_sparse()}, r"fc\.weight is no plain tensor \(sparse_coo, on cpu\)"),
        ({"fc.weight": WHOLE.to("meta")}, r"fc\.weight is no plain tensor \(strided, on meta\)"),
        ({"fc.weight": WHOLE.to(torch.complex64)}, r"fc\.weight is torch\.complex64; expected one of F32"),
        ({"": WHOLE}, "a tensor is called ''; expected a name that can be printed"),
        ({"fc\x1b[2K": WHOLE}, r"a tensor is called 'fc\\x1b\[2K'"),
        ([WHOLE], "expected tensors by name, found list"),
        ({1: WHOLE}, "expected tensors by name"),
    ],
)
def test_what_is_no_tensors_by_name_is_refused(state: Any, words: str, tmp_path: Path) -> None:
    torch.save(state, tmp_path / PICKLED)
    with pytest.raises(FormatError, match=words):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[]", "expected a JSON object"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "puts a into 1; expected a file name in this directory"),
        ('{"weight_map": {"a": "../elsewhere.bin"}}', r"puts a into '\.\./elsewhere\.bin'"),
        ('{"weight_map": {"a": "/elsewhere.bin"}}', "expected a file name in this directory"),
        ('{"weight_map": {"a": "part.bin"}}', r"part\.bin, named by pytorch_model\.bin\.index\.json, is missing"),
    ],
)
def test_an_index_of_pickles_names_files_beside_it(text: str, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    torch.save({"a": WHOLE}, tmp_path / "elsewhere.bin")
    with pytest.raises(FormatError, match=words):
        opened(folder, **{INDEX: text})


@pytest.mark.parametrize("is_pickled", [True, False])
def test_an_index_that_promises_what_its_file_lacks_is_refused(is_pickled: bool, tmp_path: Path) -> None:
    """A tensor that the draft can do without, such as a head, would be taken for one that was never there."""
    name, index = ("part.bin", INDEX) if is_pickled else ("part.safetensors", "model.safetensors.index.json")
    tensors = {"fc.weight": WHOLE, "norm.weight": WHOLE[0].clone()}
    torch.save(tensors, tmp_path / name) if is_pickled else save_file(tensors, tmp_path / name)
    whole = {"weight_map": dict.fromkeys(tensors, name)}
    assert opened(tmp_path, **{index: json.dumps(whole)}).tensors.keys() == tensors.keys()
    more = {"weight_map": dict.fromkeys([*tensors, "lm_head.weight"], name)}
    with pytest.raises(FormatError, match=r"puts lm_head\.weight into part\.\w+, which has none of the name"):
        opened(tmp_path, **{index: json.dumps(more)})
