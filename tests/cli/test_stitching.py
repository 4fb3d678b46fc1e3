"""stitch-mtp: what it writes, and what it refuses with which exit code."""

import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators.formats.checkpoint import INDEX
from speculators.formats.mtp_names import mimo_layout
from speculators.models.mtp.native import to_native
from tests.cli.test_directories import run
from tests.models.drafts import random_speculator
from tests.models.mtp.test_block import speculator_of

LAYERS, BLOCK = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A directory with an MTP draft for MiMo, and its block's tensors under the verifier's names."""
    speculator, folder = speculator_of("mimo"), tmp_path_factory.mktemp("trained") / "mtp"
    speculator.save_pretrained(folder)
    ours = {
        name: tensor.detach().bfloat16()
        for name, tensor in speculator.draft.state_dict().items()
        if name.startswith("mtp_layers.")
    }
    return folder, to_native(mimo_layout().native_origins(ours, 0), ours)


@pytest.fixture
def verifier(trained: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> Path:
    """Its verifier in bfloat16 and two files, whose block is of zeros beside one tensor of its last layer."""
    folder = tmp_path / "verifier"
    folder.mkdir()
    parts = {
        LAYERS: {"model.layers.0.mlp.up_proj.weight": torch.ones(4, 4).bfloat16()},
        BLOCK: {name: torch.zeros_like(tensor) for name, tensor in trained[1].items()}
        | {"model.layers.3.mlp.up_proj.weight": torch.full((4, 4), 3.0).bfloat16()},
    }
    for file, tensors in parts.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in parts.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "mimo"}', encoding="utf-8")
    return folder


def test_the_block_is_put_into_a_copy_of_the_verifier(
    trained: tuple[Path, dict[str, Tensor]], verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, out = (verifier / BLOCK).read_bytes(), tmp_path / "deep" / "stitched"
    assert run("stitch-mtp", trained[0], verifier, "--out", out) == 0
    assert f"warning: written anew: {BLOCK}; as they were: 3 files\n" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in verifier.iterdir())
    written = load_file(out / BLOCK)
    kept = written.pop("model.layers.3.mlp.up_proj.weight")
    assert torch.equal(kept, torch.full((4, 4), 3.0).bfloat16())
    assert written.keys() == trained[1].keys()
    for name, tensor in trained[1].items():
        assert written[name].dtype is torch.bfloat16
        assert torch.equal(written[name], tensor), name
    assert (out / LAYERS).samefile(verifier / LAYERS)
    assert (verifier / BLOCK).read_bytes() == before


def test_export_and_the_older_form_do_the_same(
    trained: tuple[Path, dict[str, Tensor]], verifier: Path, tmp_path: Path
) -> None:
    assert run("stitch-mtp", trained[0], verifier, "--out", tmp_path / "first", "--json", tmp_path / "report.json") == 0
    assert run("stitch", trained[0], verifier, tmp_path / "second") == 0
    command = ("export", trained[0], "--to", "native-mtp", "--verifier", verifier, "--out", tmp_path / "third")
    assert run(*command) == 0
    for name in ("second", "third"):
        assert (tmp_path / name / BLOCK).read_bytes() == (tmp_path / "first" / BLOCK).read_bytes()
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["layout"] == "native-mtp"
    assert len(report["used"]) == len(trained[1])


def test_what_cannot_be_stitched_is_1_and_leaves_nothing(
    trained: tuple[Path, dict[str, Tensor]], verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, out = tmp_path / "eagle3", tmp_path / "out"
    random_speculator("eagle3").save_pretrained(other)
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ((other, verifier, out), "verifiers have no eagle3 draft of their own that this one could replace; expected"),
        ((trained[0], other, out), f"{other} has no MTP block to replace; expected the verifier"),
        ((trained[0], tmp_path / "empty", out), "neither model.safetensors nor"),
        ((tmp_path / "empty", verifier, out), "config.json is missing"),
        ((trained[0], verifier, other), f"{other} is there already; give a new directory"),
    ):
        assert run("stitch-mtp", *arguments[:2], "--out", arguments[2]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert message in error
        assert not out.exists()
    assert run("stitch-mtp", trained[0], verifier) == 2


def test_a_disk_without_room_is_1_and_leaves_nothing(
    trained: tuple[Path, dict[str, Tensor]], verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The block's file cannot be copied as a whole; the same command works once there is room."""
    before = sorted(tmp_path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((verifier / BLOCK).stat().st_size // 2, limits[1]))
    try:
        assert run("stitch-mtp", trained[0], verifier, "--out", tmp_path / "out") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
    assert run("stitch", trained[0], verifier, tmp_path / "out") == 0
