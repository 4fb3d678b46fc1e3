"""Medusa heads, MLP speculators and MTP blocks in others' layouts: what was read from them is what is written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators.convert.export import export
from speculators.errors import FormatError
from speculators.formats.checkpoint import INDEX, read_headers
from tests.convert import layouts_native as layouts
from tests.convert.foreign import ForeignCheckpoint
from tests.convert.test_from_native import Make, converted

BACK = {
    "medusa": (layouts.medusa, layouts.medusa_two_layers),
    "vllm-medusa": (
        layouts.medusa,
        layouts.medusa_two_layers,
        layouts.medusa_one_copy,
        layouts.modelopt_medusa,
        layouts.vllm_medusa,
    ),
    "ibm-mlp-speculator": tuple(layouts.MLP_CASES),
}


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a directory."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether names, dtypes and bits are the same."""
    return first.keys() == second.keys() and all(
        tensor.dtype is second[name].dtype and torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


@pytest.mark.parametrize(
    ("layout", "make"),
    [(layout, make) for layout, made in BACK.items() for make in made],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_out_and_in_again_is_the_same_speculator(layout: str, make: Make, tiny_verifier: Path, tmp_path: Path) -> None:
    ours = converted(make(), tmp_path, tiny_verifier).directory
    export(ours, layout, tmp_path / "exported")
    config = json.loads((tmp_path / "exported" / "config.json").read_text(encoding="utf-8"))
    again = ForeignCheckpoint(layout, config, stored(tmp_path / "exported"))
    back = converted(again, tmp_path / "again", tiny_verifier).directory
    assert same(stored(back), stored(ours))
    assert (back / "config.json").read_bytes() == (ours / "config.json").read_bytes()


def test_medusas_own_layout_is_written_as_it_was_read(tiny_verifier: Path, tmp_path: Path) -> None:
    case = layouts.medusa_two_layers()
    case.config["base_model_name_or_path"] = str(tiny_verifier)
    export(converted(case, tmp_path, tiny_verifier).directory, "medusa", tmp_path / "exported")
    assert same(stored(tmp_path / "exported"), case.tensors)
    assert json.loads((tmp_path / "exported" / "config.json").read_text(encoding="utf-8")) == case.config


@pytest.mark.parametrize("make", layouts.MLP_CASES, ids=lambda make: make.__name__)
def test_ibms_layout_is_written_as_it_was_read(make: Make, tiny_verifier: Path, tmp_path: Path) -> None:
    """Every step has its tensors, also where steps share them."""
    case = make()
    export(converted(case, tmp_path, tiny_verifier).directory, "ibm-mlp-speculator", tmp_path / "exported")
    written = stored(tmp_path / "exported")
    assert all(name.startswith("speculator.") for name in written)
    if make is layouts.accelerator_tied_once:
        case = layouts.accelerator_tied()
    expected = {f"speculator.{name.removeprefix('speculator.')}": tensor for name, tensor in case.tensors.items()}
    assert same(written, expected)
    config = json.loads((tmp_path / "exported" / "config.json").read_text(encoding="utf-8"))
    assert {key: config[key] for key in case.config} == case.config


REFUSED: list[tuple[Callable[[], ForeignCheckpoint], str, str]] = [
    (layouts.modelopt_medusa, "medusa", "its heads have output matrices of their own, these share one"),
    (layouts.vllm_medusa, "medusa", "its layers have biases, these have none; it knows the whole vocabulary"),
    (layouts.medusa, "ibm-mlp-speculator", "is a speculator of type medusa; ibm-mlp-speculator holds MLP speculators"),
    (layouts.accelerator, "vllm-medusa", "is a speculator of type mlp_speculator; vllm-medusa holds Medusa heads"),
    (layouts.medusa, "native-mtp", "verifiers have no medusa draft of their own that this one could replace"),
]


@pytest.mark.parametrize(("make", "layout", "message"), REFUSED)
def test_what_a_layout_cannot_say_is_refused(
    make: Make, layout: str, message: str, tiny_verifier: Path, tmp_path: Path
) -> None:
    ours = converted(make(), tmp_path, tiny_verifier).directory
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FormatError, match=message):
        export(ours, layout, tmp_path / "exported")
    assert sorted(tmp_path.iterdir()) == before


def test_vllms_configuration_says_what_its_class_reads(tiny_verifier: Path, tmp_path: Path) -> None:
    """Keys of vLLM's MedusaConfig; one that is not said takes a default there that is another draft's."""
    ours = converted(layouts.vllm_medusa(), tmp_path, tiny_verifier).directory
    export(ours, "vllm-medusa", tmp_path / "exported", verifier="org/model")
    config = json.loads((tmp_path / "exported" / "config.json").read_text(encoding="utf-8"))
    assert config == {
        **layouts.vllm_medusa().config,
        "base_model_name_or_path": "org/model",
        "torch_dtype": "float32",
        "max_paths": 64,
        "topk": 10,
    }


def changed(ours: Path, seed: int = 5) -> None:
    """Other numbers for every tensor of a speculator, as training would leave them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in stored(ours).items()}
    save_file(tensors, ours / "model.safetensors")


@pytest.mark.parametrize("style", [style for style in layouts.MTP_CASES if style != "deepseek-float8"])
def test_a_block_goes_back_where_it_came_from(style: str, tmp_path: Path) -> None:
    """Nothing but the block changes, and what is read from the copy is the draft (pitfall 37)."""
    case = layouts.MTP_CASES[style]()
    ours = converted(case, tmp_path, tmp_path / "foreign").directory
    export(ours, "native-mtp", tmp_path / "same")
    assert same(stored(tmp_path / "same"), case.tensors)
    changed(ours)
    export(ours, "native-mtp", tmp_path / "stitched")
    after = stored(tmp_path / "stitched")
    assert after.keys() == case.tensors.keys()
    prefix = next(prefix for prefix in layouts.AROUND if any(name.startswith(prefix) for name in after))
    repeated = (f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight")
    for name, tensor in case.tensors.items():
        in_block = name.startswith(prefix) and name not in repeated
        assert torch.equal(tensor, after[name]) is not in_block, name
    again = ForeignCheckpoint("stitched", case.config, after)
    back = converted(again, tmp_path / "again", tmp_path / "foreign").directory
    assert same(stored(back), stored(ours))
    assert (back / "config.json").read_bytes() == (ours / "config.json").read_bytes()


def stitched(tmp_path: Path, prepare: Callable[[Path], Any]) -> Path:
    """MiMo's block, back in its verifier after `prepare` has been there."""
    ours = converted(layouts.MTP_CASES["mimo"](), tmp_path, tmp_path / "foreign").directory
    prepare(tmp_path / "foreign")
    return export(ours, "native-mtp", tmp_path / "stitched")


def recast(folder: Path, dtype: torch.dtype) -> None:
    """Store the block's matrices in another dtype."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        narrow = [name for name, value in tensors.items() if ".mtp_layers." in name and value.dim() == 2]
        save_file(tensors | {name: tensors[name].to(dtype) for name in narrow}, file)


def test_a_block_takes_the_dtype_that_it_has_in_the_verifier(tmp_path: Path) -> None:
    out = stitched(tmp_path, lambda folder: recast(folder, torch.bfloat16))
    name = "model.mtp_layers.0.mlp.up_proj.weight"
    assert torch.equal(stored(out)[name], layouts.MTP_CASES["mimo"]().tensors[name].bfloat16())
    assert stored(out)["model.mtp_layers.0.token_layernorm.weight"].dtype is torch.float32


def test_a_block_in_float8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="is stored as F8_E4M3, quantised, and the draft's numbers are not"):
        stitched(tmp_path, lambda folder: recast(folder, torch.float8_e4m3fn))
    assert not (tmp_path / "stitched").exists()


def test_weights_in_another_container_are_not_taken_over(tmp_path: Path) -> None:
    """A second copy of the verifier would still have the old block."""

    def prepare(folder: Path) -> None:
        (folder / "pytorch_model.bin").write_bytes(b"weights")
        (folder / "tokenizer.json").write_text("{}", encoding="utf-8")

    out = stitched(tmp_path, prepare)
    assert (out / "tokenizer.json").samefile(tmp_path / "foreign" / "tokenizer.json")
    names = {path.name for path in out.iterdir()}
    assert names == {path.name for path in (tmp_path / "foreign").iterdir()} - {"pytorch_model.bin"}
    index = json.loads((out / INDEX).read_text(encoding="utf-8"))["weight_map"]
    assert index == {name: header.file.name for name, header in read_headers(out).items()}


def test_another_verifiers_block_is_refused(tmp_path: Path) -> None:
    ours = converted(layouts.MTP_CASES["mimo"](), tmp_path, tmp_path / "foreign").directory
    layouts.native_mtp("mimo", "model.mtp_layers.0.", intermediate_size=40).write(tmp_path / "other")
    with pytest.raises(FormatError, match=r"down_proj.weight is \[32, 40\] in .*; the draft has \[32, 48\]"):
        export(ours, "native-mtp", tmp_path / "stitched", verifier=str(tmp_path / "other"))
    layouts.MTP_CASES["glm"]().write(tmp_path / "glm")
    with pytest.raises(FormatError, match="and the draft disagree about"):
        export(ours, "native-mtp", tmp_path / "stitched", verifier=str(tmp_path / "glm"))
    assert not (tmp_path / "stitched").exists()
