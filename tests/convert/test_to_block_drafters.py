"""Block drafters in others' layouts: what goes out comes in again as it was, and what cannot be said is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators.convert.export import export
from speculators.convert.options import ConversionVerifier
from speculators.convert.run import convert
from speculators.errors import FormatError, UsageError
from speculators.formats.verifier_weights import load_verifier_weights
from tests.convert import layouts_block as layouts
from tests.convert.foreign import ForeignCheckpoint

Make = Callable[[], ForeignCheckpoint]
# Each layout, drafts that it can say, and whether their files are this layout's already, key for key.
THERE_AND_BACK: list[tuple[str, Make, bool]] = [
    ("z-lab-dflash", layouts.zlab_later, False),
    ("z-lab-dflash", layouts.zlab_causal, False),
    ("z-lab-dflash", layouts.zlab_windows, False),
    ("z-lab-dflash", layouts.zlab_mixed_windows, False),
    ("z-lab-dflash", layouts.zlab_unordered, False),
    ("z-lab-dflash", layouts.zlab_yarn, False),
    ("z-lab-dflash", layouts.specforge_dflash, False),
    ("z-lab-dflash", layouts.fused_projections, False),
    ("z-lab-dflash", layouts.zlab, True),
    ("modelopt-dflash", layouts.modelopt_dflash, True),
    ("modelopt-dflash", layouts.modelopt_windows, True),
    ("deepspec-dspark", layouts.deepspec_vanilla, True),
    ("deepspec-dspark", layouts.deepspec_gated, True),
    ("deepspec-dspark", layouts.deepspec_rnn, True),
    ("deepspec-dspark", layouts.specforge_dspark, False),
    ("modelopt-dspark", layouts.modelopt_vanilla, True),
    ("modelopt-dspark", layouts.modelopt_gated, True),
    ("modelopt-dspark", layouts.modelopt_rnn, True),
    ("modelopt-dspark", layouts.specforge_dspark, False),
]
# What exporters write whether it was there or not, and what says nothing about the draft.
WRITTEN_ANYWAY = {
    *("layer_types", "sliding_window", "use_sliding_window", "mlp_bias", "rope_scaling", "transformers_version"),
    *("num_anchors", "use_cache"),
}


def read(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return config, load_file(directory / "model.safetensors")


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def ours(make: Make, folder: Path, verifier: Path) -> Path:
    """A foreign draft, converted."""
    return convert(make().write(folder / "in"), folder / "ours", verifier=ConversionVerifier(str(verifier))).directory


@pytest.mark.parametrize(("layout", "make", "own"), THERE_AND_BACK, ids=lambda item: getattr(item, "__name__", item))
def test_there_and_back_is_the_identity(
    layout: str, make: Make, own: bool, tiny_verifier: Path, tmp_path: Path
) -> None:
    first = ours(make, tmp_path, tiny_verifier)
    out = export(first, layout, tmp_path / "out")
    given = ConversionVerifier(str(tiny_verifier))
    again = convert(out, tmp_path / "again", verifier=given).directory
    config, tensors = read(first)
    config_again, tensors_again = read(again)
    assert config_again == config
    assert_equal(tensors_again, tensors)
    if own:
        case = make()
        foreign, exported = read(out)
        prefix = "dflash_module." if case.layout == "modelopt-dflash" else ""
        assert_equal(exported, {name.removeprefix(prefix): tensor for name, tensor in case.tensors.items()})
        assert foreign.keys() - case.config.keys() <= WRITTEN_ANYWAY
        assert case.config.keys() - foreign.keys() <= WRITTEN_ANYWAY
        for key in case.config.keys() & foreign.keys() - {"dflash_config"}:
            assert foreign[key] == case.config[key], key
        # Exporters always say whether slots see each other.
        settings = case.config.get("dflash_config", {})
        assert foreign.get("dflash_config", {}) == settings | ({"causal": False} if "-dflash" in layout else {})


def test_embeddings_and_head_of_the_verifier_are_put_where_a_layout_has_them(
    tiny_verifier: Path, tmp_path: Path
) -> None:
    first = ours(layouts.specforge_dspark, tmp_path, tiny_verifier)
    _, tensors = read(export(first, "deepspec-dspark", tmp_path / "out"))
    weights = load_verifier_weights(tiny_verifier)
    assert torch.equal(tensors["embed_tokens.weight"], weights.embed_tokens)
    assert torch.equal(tensors["lm_head.weight"], weights.lm_head)


def changed(directory: Path, tensors: dict[str, Tensor] | None = None, **keys: Any) -> None:
    """Write other values into a speculator's files."""
    config, stored = read(directory)
    layer = keys.pop("layer", {})
    config["transformer_layer_config"] |= layer
    (directory / "config.json").write_text(json.dumps(config | keys), encoding="utf-8")
    save_file(stored | (tensors or {}), directory / "model.safetensors")


SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "use_sliding_window": True}
MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
UNSAID: list[tuple[str, Make, dict[str, Any], str]] = [
    ("z-lab-dflash", layouts.deepspec_dflash, {}, r"\(sample_from_anchor\); it stores no embeddings|it stores no head"),
    ("z-lab-dflash", layouts.zlab, {"sample_from_anchor": True}, "sample_from_anchor"),
    ("z-lab-dflash", layouts.reduced_vocabulary, {}, "its vocabulary is the verifier's"),
    ("z-lab-dflash", layouts.other_width, {}, "its width is the verifier's"),
    ("z-lab-dflash", layouts.zlab, {"aux_hidden_state_layer_ids": [0, 2, 4]}, "depth 0"),
    ("z-lab-dflash", layouts.deepspec_vanilla, {}, "layout of DFlash; this is a dspark"),
    ("z-lab-dflash", layouts.zlab_dflash2, {}, "layout of DFlash; this is a dflash2"),
    ("modelopt-dflash", layouts.zlab_mixed_windows, {}, "its windows are of all layers or none"),
    ("modelopt-dflash", layouts.zlab_causal, {}, "its blocks are never causal"),
    ("deepspec-dspark", layouts.zlab, {}, "layout of DSpark; this is a dflash"),
    ("deepspec-dspark", layouts.deepspec_vanilla, {"layer": MIXED}, "its layers have no windows"),
    ("deepspec-dspark", layouts.deepspec_vanilla, {"layer": {"is_causal": True}}, "its slots see each other"),
    ("deepspec-dspark", layouts.deepspec_vanilla, {"confidence_temperatures": [1.5] * 5}, "no temperatures"),
    ("modelopt-dspark", layouts.deepspec_vanilla, {}, "it stores no embeddings; it stores no head"),
    ("modelopt-dspark", layouts.deepspec_gated, {}, "confidence_head_with_markov false"),
    (
        "modelopt-dspark",
        layouts.modelopt_rnn,
        {"sample_from_anchor": False, "shorter": True},
        "sample_from_anchor false",
    ),
]


@pytest.mark.parametrize(("layout", "make", "keys", "text"), UNSAID)
def test_what_a_layout_cannot_say_is_refused(
    layout: str, make: Make, keys: dict[str, Any], text: str, tiny_verifier: Path, tmp_path: Path
) -> None:
    first, keys = ours(make, tmp_path, tiny_verifier), dict(keys)
    if keys.pop("shorter", False):
        config, _ = read(first)
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 4
        keys["speculators_config"] = config["speculators_config"]
    changed(first, **keys)
    with pytest.raises(FormatError, match=text):
        export(first, layout, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "ours"]


def test_an_unknown_layout_is_refused(tiny_speculator: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="z-lab-dflash"):
        export(tiny_speculator, "zlab", tmp_path / "out")
