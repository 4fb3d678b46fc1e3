"""Checkpoints of every layout with one thing wrong: refused, flagged, or the converter's fault.

`python -m tests.convert.mutations --out out/mutations.json` writes `[{layout, mutation, outcome, said}]`. A mutation is
*refused* where the conversion fails, names what is wrong and leaves nothing behind; *flagged* where the report, its
health or `--check` says more than that of the whole checkpoint does; *silent* where neither happens and the result is
another draft. One that changes nothing of the result is no mutation, and left out.
"""

import argparse
import copy
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.plan import CheckpointPlan
from speculators.convert.run import Conversion, convert
from speculators.convert.sources import SOURCES
from speculators.errors import SpeculatorsError
from tests.convert import layouts_block, layouts_eagle, layouts_native, trained_mutations
from tests.convert.foreign import ForeignCheckpoint
from tests.convert.other_values import ID_KEYS, OTHER_IDS, OTHER_VALUES
from tests.tiny_models import make_verifier

Outcome = Literal["refused", "flagged", "silent", "same"]
Make = Callable[[], ForeignCheckpoint]
CASES: list[Make] = [*layouts_eagle.CASES, *layouts_block.CASES, *layouts_native.CASES]
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MAPS = ("d2t", "t2d")


@dataclass(frozen=True)
class Mutation:
    """One thing wrong with a checkpoint: in its tensors or configuration, its files, or what its user says.

    A refusal must say one of `words`, where there are any.
    """

    name: str
    change: Callable[[ForeignCheckpoint], None] = lambda _: None
    damage: Callable[[Path], None] = lambda _: None
    family: str = "auto"
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tried:
    """What became of a mutation, and what was said about it."""

    layout: str
    mutation: str
    outcome: Outcome
    said: str

    def to_json(self) -> dict[str, str]:
        return {
            "layout": self.layout,
            "mutation": self.mutation,
            "outcome": self.outcome,
            "said": self.said,
        }


@dataclass
class Converted:
    """A conversion with the numbers that it wrote, by their bytes."""

    conversion: Conversion
    tensors: dict[str, bytes] = field(default_factory=dict)

    def says(self) -> set[str]:
        """Everything that a user is told beyond what was used."""
        plan = self.conversion.plan
        dropped = {f"{name} dropped: {reason}" for name, reason in plan.dropped.items()}
        derived = {f"{name} derived: {origin}" for name, origin in plan.derived.items()}
        return {*plan.notes, *dropped, *derived, *(str(item) for item in self.conversion.health)}


def is_native(case: ForeignCheckpoint) -> bool:
    """Whether a checkpoint is its own verifier."""
    return case.layout.startswith("native-mtp")


def converted(
    case: ForeignCheckpoint, folder: Path, verifier: ConversionVerifier, mutation: Mutation | None = None
) -> Converted:
    """Write a checkpoint, change it, and convert it; `folder` is new."""
    case = copy.deepcopy(case)
    family = "auto"
    if mutation is not None:
        mutation.change(case)
        family = mutation.family
    source = case.write(folder / "foreign")
    if mutation is not None:
        mutation.damage(source)
    known = ConversionVerifier(str(source)) if is_native(case) else verifier
    conversion = convert(source, folder / "ours", verifier=known, family=family, options=ConvertOptions(**case.options))
    file = folder / "ours" / "model.safetensors"
    stored = load_file(file) if file.is_file() else {}
    return Converted(conversion, {name: _bytes(tensor) for name, tensor in stored.items()})


def _bytes(tensor: Tensor) -> bytes:
    return (
        f"{tensor.dtype}{list(tensor.shape)}".encode()
        + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    )


def attempt(case: ForeignCheckpoint, whole: Converted, mutation: Mutation, verifier: ConversionVerifier) -> Tried:
    """Convert a checkpoint with one thing wrong, and judge what happened."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        try:
            found = converted(case, folder, verifier, mutation)
        except SpeculatorsError as error:
            text = str(error)
            assert not (folder / "ours").exists(), f"{case.layout}: {mutation.name} left something behind"
            named = not mutation.words or any(word in text for word in mutation.words)
            assert named, f"{case.layout}: {mutation.name} is refused with the wrong name: {text}"
            return Tried(case.layout, mutation.name, "refused", text.replace(parent, ""))
        more = {text for text in found.says() - whole.says() if parent not in text}
        plan, before = found.conversion.plan, whole.conversion.plan
        same = found.tensors == whole.tensors and _meaning(plan) == _meaning(before)
        if more and (not same or mutation.words):
            return Tried(case.layout, mutation.name, "flagged", "; ".join(sorted(more)))
        return Tried(case.layout, mutation.name, "same" if same else "silent", "")


def _meaning(plan: CheckpointPlan) -> str:
    """What a plan's files say, but for the place of a verifier that was written for the test."""
    text = json.dumps([plan.config, plan.files], sort_keys=True)
    return re.sub(r"/[\w/.-]*foreign", "", text)


def spread(names: Iterable[str], count: int) -> list[str]:
    """At most `count` of the names, evenly from first to last."""
    ordered = sorted(names)
    if len(ordered) <= count:
        return ordered
    return [ordered[index * (len(ordered) - 1) // (count - 1)] for index in range(count)]


# By which key of a configuration the shape of a tensor may be contradicted.
_KEYS = {
    "k_proj": "num_key_value_heads",
    "q_proj": "num_attention_heads",
    "o_proj": "hidden_size",
    "gate_proj": "intermediate_size",
    "eh_proj": "input_proj",
}
# What Medusa's numbers are called in a speculator.
_HEADS = ("lm_heads", "blocks", "a layer is")
_MEDUSA = re.compile(r"(\w+\.)*\d+\.(\w+\.)?\d+(\.linear)?\.\w+")


def words_of(name: str) -> tuple[str, ...]:
    """By what a message may call a tensor: its name, what it belongs to, or the key that tells its shape."""
    parts = [part for part in name.split(".") if not part.isdigit() and part not in ("linear", "model", "weight")]
    heads = _HEADS if _MEDUSA.fullmatch(name) else ()
    return (
        name,
        *(part for part in parts if part != "layers"),
        *(_KEYS[part] for part in parts if part in _KEYS),
        *heads,
    )


def mutations_of(case: ForeignCheckpoint, used: Iterable[str]) -> Iterator[Mutation]:
    """Everything that is tried with one checkpoint, whose tensors `used` count."""
    names = [name for name in used if name in case.tensors and name.split(".")[-1] not in MAPS]
    yield from _of_tensors(case, names)
    yield from _of_numbers(case, names)
    yield from _of_maps(case)
    yield from _of_config(case)
    yield from _of_files(case)
    for family in SOURCES:
        yield Mutation(f"told to be {family}", family=family)


def _of_tensors(case: ForeignCheckpoint, names: list[str]) -> Iterator[Mutation]:
    def renamed(old: str, new: str) -> Callable[[ForeignCheckpoint], None]:
        return lambda copied: copied.tensors.update({new: copied.tensors.pop(old)})

    def reshaped(name: str, cut: Callable[[Tensor], Tensor]) -> Callable[[ForeignCheckpoint], None]:
        return lambda copied: copied.tensors.update({name: cut(copied.tensors[name]).contiguous()})

    for name in spread(names, 4):
        for new in (f"{name}s", name[:-1] if name[:-1] not in case.tensors else f"{name}_"):
            yield Mutation(f"{name} called {new}", renamed(name, new), words=(*words_of(name), new))
        missing = (*words_of(name), "belong to no draft")
        yield Mutation(f"{name} missing", lambda copied, name=name: copied.tensors.pop(name), words=missing)
        yield Mutation(f"{name} one row short", reshaped(name, lambda tensor: tensor[:-1]), words=words_of(name))
        if case.tensors[name].dim() == 2:
            yield Mutation(f"{name} one column short", reshaped(name, lambda one: one[:, :-1]), words=words_of(name))
            if case.tensors[name].shape[0] != case.tensors[name].shape[1]:
                yield Mutation(f"{name} turned round", reshaped(name, lambda tensor: tensor.T), words=words_of(name))
        yield Mutation(f"{name} in one row more", reshaped(name, lambda tensor: tensor[None]), words=words_of(name))
        yield Mutation(
            f"{name} of whole numbers", reshaped(name, lambda one: one.to(torch.int64)), words=words_of(name)
        )
    for extra in ("extra.weight", "layers.7.mlp.gate_proj.weight", "layers.0.self_attn.sinks", "adapter.lora_A.weight"):
        yield Mutation(
            f"{extra} besides",
            lambda one, extra=extra: one.tensors.update({extra: torch.ones(4, 4)}),
            words=(extra, "layers"),
        )
    twice = names[0]
    yield Mutation(
        f"{twice} a second time behind a prefix",
        lambda copied: copied.tensors.update({f"module.{twice}": copied.tensors[twice] + 1}),
        words=(twice,),
    )


def _of_numbers(case: ForeignCheckpoint, names: list[str]) -> Iterator[Mutation]:
    floats = [name for name in names if case.tensors[name].dtype in FLOATS]
    norms = [name for name in floats if "norm" in name and case.tensors[name].dim() == 1]

    def filled(chosen: list[str], value: float, *, only_first: bool = False) -> Callable[[ForeignCheckpoint], None]:
        def change(copied: ForeignCheckpoint) -> None:
            for name in chosen:
                tensor = copied.tensors[name].clone()
                tensor.flatten()[: 1 if only_first else None] = value
                copied.tensors[name] = tensor

        return change

    for name in spread([name for name in floats if not name.endswith("bias")], 3):
        yield Mutation(f"{name} with a NaN", filled([name], float("nan"), only_first=True), words=words_of(name))
        yield Mutation(f"{name} of zeros", filled([name], 0.0), words=words_of(name))
        yield Mutation(f"{name} constant", filled([name], 0.5), words=words_of(name))
    if norms:
        yield Mutation("norms of ones", filled(norms, 1.0), words=("norm",))


def _of_maps(case: ForeignCheckpoint) -> Iterator[Mutation]:
    found = {name.split(".")[-1]: name for name in case.tensors if name.split(".")[-1] in MAPS}
    if not found:
        return
    d2t, t2d = found.get("d2t"), found.get("t2d")

    def mapped(change: Callable[[Tensor], Tensor], *, alone: bool = False) -> Callable[[ForeignCheckpoint], None]:
        def applied(copied: ForeignCheckpoint) -> None:
            if d2t is not None:
                copied.tensors[d2t] = change(copied.tensors[d2t]).contiguous()
            if alone and t2d is not None:
                del copied.tensors[t2d]

        return applied

    def without_both(copied: ForeignCheckpoint) -> None:
        for name in found.values():
            del copied.tensors[name]

    yield Mutation("no map", without_both, words=MAPS)
    if t2d is not None and d2t is None:
        # With nothing to compare it with, other flags are another draft, which only acceptance tells.
        return
    if t2d is not None:
        complement = Mutation(
            "t2d of the other tokens",
            lambda copied: copied.tensors.update({t2d: (copied.tensors[t2d] == 0).to(copied.tensors[t2d].dtype)}),
            words=MAPS,
        )
        yield complement
        yield Mutation(
            "t2d moved by one token",
            lambda copied: copied.tensors.update({t2d: copied.tensors[t2d].roll(1)}),
            words=MAPS,
        )
    if d2t is None:
        return
    steps: dict[str, Callable[[Tensor], Tensor]] = {
        "backwards": lambda one: one.flip(0),
        "beyond the vocabulary": lambda one: one + 10_000,
        "below zero": lambda one: one - 10_000,
        "with two tokens swapped": lambda one: torch.cat([one[1:2] + 1, one[:1] - 1, one[2:]]),
        "of zeros": torch.zeros_like,
        "of fractions": lambda one: one.float(),
        "one entry short": lambda one: one[:-1],
    }
    for name, change in steps.items():
        yield Mutation(f"d2t {name}", mapped(change), words=MAPS)
        yield Mutation(f"d2t {name}, alone", mapped(change, alone=True), words=MAPS)
    if t2d is not None:
        yield Mutation("d2t moved by one token", mapped(lambda one: one + 1), words=MAPS)
    is_offset = int(case.tensors[d2t][-1]) + len(case.tensors[d2t]) <= 384
    if is_offset:
        absolute = mapped(lambda one: one + torch.arange(len(one), dtype=one.dtype), alone=True)
        yield Mutation("d2t of ids, alone", absolute, words=MAPS)


# Of a verifier's configuration what its MTP block reads; the rest is copied and changes nothing about the draft.
_OF_A_BLOCK = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")


def _of_config(case: ForeignCheckpoint) -> Iterator[Mutation]:
    def said(path: tuple[str, ...], value: Any) -> Callable[[ForeignCheckpoint], None]:
        def change(copied: ForeignCheckpoint) -> None:
            place = copied.config
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value

        return change

    for path, value in _entries(case.config):
        if is_native(case) and path[-1] not in _OF_A_BLOCK:
            continue
        others = OTHER_IDS if path[-1] in ID_KEYS else OTHER_VALUES.get(path[-1], [])
        for other in others:
            if other != value:
                name = f"{'.'.join(path)} said to be {other!r}"
                yield Mutation(name, said(path, other), words=(path[-1],) if path[-1] in ID_KEYS else ())
    present = {path[-1] for path, _ in _entries(case.config)}
    for key in ("quantization_config", "mlp_bias", "attention_bias", "fc_norm", "norm_before_fc", "logit_scale"):
        if key not in present and not is_native(case):
            yield Mutation(f"{key} said to be {OTHER_VALUES[key][0]!r}", said((key,), OTHER_VALUES[key][0]))
    if "eagle_config" in case.config:
        for key, value in (
            ("use_aux_hidden_state", False),
            ("use_last_layernorm", False),
            ("use_mtp_layernorm", True),
            ("parallel_draft_heads_num_layers", 2),
        ):
            yield Mutation(
                f"eagle_config.{key} said to be {value!r}", said(("eagle_config", key), value), words=(key, "parallel")
            )


def _entries(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and key in ("eagle_config", "dflash_config", "text_config"):
            yield from _entries(value, (*path, key))
        else:
            yield (*path, key), value


def _of_files(case: ForeignCheckpoint) -> Iterator[Mutation]:
    weights = "pytorch_model.bin" if case.container == "bin" else "model.safetensors"
    if case.container == "sharded":
        weights = "model-00002-of-00002.safetensors"
        yield Mutation("a shard missing", damage=lambda folder: (folder / weights).unlink(), words=(weights,))

    def cut(folder: Path) -> None:
        file = folder / weights
        file.write_bytes(file.read_bytes()[:-20])

    def other_container(folder: Path) -> None:
        torch.save({"something.weight": torch.ones(2)}, folder / "other.bin")

    yield Mutation("weights cut short", damage=cut, words=(weights,))
    yield Mutation(
        "no weights", damage=lambda folder: (folder / weights).unlink(), words=(weights, "none", "safetensors")
    )
    yield Mutation("another file of weights", damage=other_container, words=("other.bin",))
    yield Mutation(
        "an adapter of the verifier",
        damage=lambda folder: save_file({"a": torch.ones(2)}, folder / "adapter_model.safetensors"),
        words=("adapter",),
    )
    yield Mutation(
        "weights said to be quantised",
        damage=lambda folder: (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}'),
        words=("hf_quant_config.json", "NVFP4"),
    )
    yield Mutation(
        "a configuration cut short",
        damage=lambda folder: (folder / "config.json").write_text("{", encoding="utf-8"),
        words=("config.json",),
    )


def tried(case: ForeignCheckpoint, verifier: ConversionVerifier, every: int = 1) -> list[Tried]:
    """Every mutation of a checkpoint, or one in `every`; those that change nothing are left out."""
    with tempfile.TemporaryDirectory() as parent:
        whole = converted(case, Path(parent), verifier)
    chosen = list(mutations_of(case, whole.conversion.plan.used))[::every]
    found = [attempt(case, whole, mutation, verifier) for mutation in chosen]
    return [one for one in found if one.outcome != "same"]


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        verifier = ConversionVerifier(str(make_verifier(Path(parent) / "verifier")))
        rows = [row.to_json() for make in CASES for row in tried(make(), verifier)]
    rows += [row.to_json() for row in trained_mutations.table()]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    counts = {name: sum(row["outcome"] == name for row in rows) for name in ("refused", "flagged", "silent")}
    print(counts)


if __name__ == "__main__":
    main()
