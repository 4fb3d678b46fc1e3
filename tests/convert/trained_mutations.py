"""Mutations that only acceptance can show: drafts that know a verifier's answers, with one thing about them changed.

The numbers stay sound and the shapes right, so that a conversion can say nothing. `--check` can: another reading
accepts more, or the draft accepts less than it did, beyond noise.
"""

import copy
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from speculators.convert.check import Check, check
from speculators.convert.export import export
from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.run import convert
from speculators.errors import SpeculatorsError
from speculators.formats.checkpoint import read_config
from tests.convert.foreign import ForeignCheckpoint
from tests.convert.trained_drafts import Trained, save_verifier, trained

Change = Callable[[ForeignCheckpoint], None]
PROMPTS = 12
# As a layout's name, the family, how it is trained, and the options that its file needs.
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sglang": (
        "eagle3",
        {"draft_vocab_size": 32, "norm_before_residual": False, "norm_before_fc": False, "norm_output": False},
        {},
    ),
    "safeailab-eagle": ("eagle", {"steps": 250}, {}),
    "z-lab-dflash": ("dflash", {}, {}),
    "deepspec-dspark": ("dspark", {}, {}),
    "medusa": ("medusa", {}, {}),
    "ibm-mlp-speculator": ("mlp_speculator", {}, {}),
}


@dataclass(frozen=True)
class Judged:
    """What became of a mutation of a trained draft."""

    layout: str
    mutation: str
    outcome: str
    said: str

    def to_json(self) -> dict[str, str]:
        return vars(self).copy()


@dataclass(frozen=True)
class Foreign:
    """A trained draft in somebody's layout, with its verifier's directory."""

    checkpoint: ForeignCheckpoint
    draft: Trained
    verifier: Path


def foreign(layout: str, folder: Path) -> Foreign:
    """Train a draft and bring it into a layout; `folder` is new."""
    family, options, given = LAYOUTS[layout]
    draft = trained(family, **options)
    verifier = save_verifier(draft.verifier, folder / "verifier")
    ours = folder / "ours"
    config = draft.speculator.config.to_json()
    config["speculators_config"]["verifier"]["name_or_path"] = str(verifier)
    if "base_model_name_or_path" in config:
        config["base_model_name_or_path"] = str(verifier)
    config["dtype"] = "float32"
    named = draft.speculator.read_as(type(draft.speculator.config).from_json(config))
    named.save_pretrained(ours, torch.float32)
    export(ours, layout, folder / "foreign")
    tensors = load_file(folder / "foreign" / "model.safetensors")
    written = read_config(folder / "foreign")
    return Foreign(ForeignCheckpoint(layout, dict(written), tensors, given), draft, verifier)


def measured(found: Foreign, change: Change, folder: Path) -> Check:
    """Convert a changed copy, and measure it on the prompts that the draft knows the answers of."""
    changed = copy.deepcopy(found.checkpoint)
    change(changed)
    source = changed.write(folder / "changed")
    options = ConvertOptions(**changed.options)
    convert(source, folder / "out", verifier=ConversionVerifier(str(found.verifier)), options=options)
    draft = found.draft
    return check(folder / "out", draft.prompts[:PROMPTS], verifier=draft.verifier, max_new_tokens=draft.length)


def judge(found: Foreign, whole: Check, name: str, change: Change) -> Judged:
    """Whether a change of a checkpoint is refused, or seen in what is accepted."""
    layout = found.checkpoint.layout
    with tempfile.TemporaryDirectory() as folder:
        try:
            seen = measured(found, change, Path(folder))
        except SpeculatorsError as error:
            return Judged(layout, name, "refused", str(error).replace(folder, ""))
    numbers = f"{seen.written.acceptance_length:.2f} tokens a step, {whole.written.acceptance_length:.2f} before"
    if seen.warning is not None:
        return Judged(layout, name, "flagged", f"--check: {seen.warning}")
    return Judged(
        layout, name, "flagged" if whole.written.surely_beats(seen.written) else "silent", f"--check: {numbers}"
    )


def changes(case: ForeignCheckpoint) -> Iterator[tuple[str, Change]]:
    """What is tried with a draft in a layout."""
    yield from _of_tensors(case)
    yield from _of_ids(case)
    if case.config.get("rope_theta") is not None:
        yield "rope_theta 3", lambda one: one.config.update(rope_theta=3.0)
    if "norm_before_residual" in case.config:
        flag = not case.config["norm_before_residual"]
        yield f"norm_before_residual {flag}", lambda one: one.config.update(norm_before_residual=flag)
    if "d2t" in case.tensors:

        def moved(one: ForeignCheckpoint) -> None:
            one.tensors["d2t"] = one.tensors["d2t"] + (one.tensors["d2t"] < case.config["vocab_size"] - 33)
            one.tensors["d2t"][-1] = case.config["vocab_size"] - len(one.tensors["d2t"])
            one.tensors.pop("t2d", None)

        yield "d2t of other tokens, alone", moved
        yield "t2d moved by one token, alone", _flags_moved
    if case.layout == "deepspec-dspark":
        yield "block of DFlash's slots", lambda one: one.options.update(sample_from_anchor=False, speculative_tokens=2)


def _flags_moved(one: ForeignCheckpoint) -> None:
    one.tensors["t2d"] = one.tensors["t2d"].roll(1)
    del one.tensors["d2t"]


def _of_tensors(case: ForeignCheckpoint) -> Iterator[tuple[str, Change]]:
    def replaced(name: str, made: Callable[[Tensor], Tensor]) -> Change:
        return lambda one: one.tensors.update({name: made(one.tensors[name]).contiguous()})

    def swapped(first: str, second: str) -> Change:
        return lambda one: one.tensors.update({first: one.tensors[second], second: one.tensors[first]})

    names = sorted(case.tensors)
    # Gates and projections up are no pair: where numbers are small, SwiGLU hardly tells them apart.
    pairs = (("k_proj", "v_proj"),)
    for first, second in pairs:
        there = next((name for name in names if first in name and name.replace(first, second) in case.tensors), None)
        if there is not None:
            yield f"{first} and {second} swapped", swapped(there, there.replace(first, second))
    for name in ("fc.weight", "0.0.linear.weight", "speculator.proj.0.weight", "proj.0.weight"):
        if name in case.tensors:
            half = case.tensors[name].shape[1] // 2
            yield f"halves of {name} swapped", replaced(name, lambda tensor, half=half: tensor.roll(half, 1))
            yield f"{name} with its sign turned", replaced(name, torch.neg)
    endings = (
        "lm_head.weight",
        "embed_tokens.weight",
        "0.1.weight",
        "head.0.weight",
        "q_proj.weight",
        "o_proj.weight",
        "gate_proj.weight",
    )
    for ending in endings:
        name = next((name for name in names if name.endswith(ending)), None)
        if name is not None:
            yield f"{name} one row further", replaced(name, lambda tensor: tensor.roll(1, 0))
    drawn = torch.Generator().manual_seed(0)
    for name in [name for name in names if name.endswith(("down_proj.weight", "0.0.linear.weight", "emb.0.weight"))][
        :1
    ]:
        noise = torch.randn(case.tensors[name].shape, generator=drawn)
        yield f"{name} never loaded", replaced(name, lambda tensor, noise=noise: noise * tensor.std())


def _of_ids(case: ForeignCheckpoint) -> Iterator[tuple[str, Change]]:
    places = (("eagle_config", "eagle_aux_hidden_state_layer_ids"), ("dflash_config", "target_layer_ids"))
    place = next(((block, key) for block, key in places if key in case.config.get(block, {})), None)
    if place is None and "target_layer_ids" in case.config:
        place = ("", "target_layer_ids")
    if place is None:
        return
    block, key = place

    def holder(one: ForeignCheckpoint) -> dict[str, Any]:
        return one.config[block] if block else one.config

    def shifted(step: int) -> Change:
        return lambda one: holder(one).update({key: [item + step for item in holder(one)[key]]})

    yield "layer ids one more", shifted(1)
    yield "layer ids one less", shifted(-1)
    yield "layer ids said to be depths", lambda one: one.options.update(layer_ids_mean="depth")
    yield "other layers", lambda one: holder(one).update({key: [0, 1, 2][: len(holder(one)[key])]})


def table(layouts: Iterable[str] = tuple(LAYOUTS)) -> Iterator[Judged]:
    """Every change of a draft in each layout, judged."""
    for layout in layouts:
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent)
            found = foreign(layout, folder)
            (folder / "whole").mkdir()
            whole = measured(found, lambda _: None, folder / "whole")
            assert whole.better is None, f"{layout}: the whole draft is read wrongly: {whole.warning}"
            for name, change in changes(found.checkpoint):
                yield judge(found, whole, name, change)
