"""What is tried with a checkpoint of any layout: one thing wrong with its tensors, maps, configuration or files."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from speculators.convert.sources import SOURCES
from tests.convert.foreign import ForeignCheckpoint

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


def is_native(case: ForeignCheckpoint) -> bool:
    """Whether a checkpoint is its own verifier."""
    return case.layout.startswith("native-mtp")


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


# Values that keys of configurations do not have in any of the checkpoints, whatever they stand in.
_OTHER_VALUES: dict[str, list[Any]] = {
    "hidden_size": [48, "64"],
    "intermediate_size": [81],
    "num_hidden_layers": [6],
    "num_attention_heads": [5, 0],
    "num_key_value_heads": [3],
    "head_dim": [20],
    "vocab_size": [300, 385],
    "draft_vocab_size": [95],
    "target_hidden_size": [96],
    "hidden_act": ["gelu"],
    "rms_norm_eps": [-1.0, "small"],
    "rope_scaling": [{"type": "dynamic", "factor": 2.0}],
    "rope_theta": [0, "10000"],
    "max_position_embeddings": [0],
    "mlp_bias": [True],
    "attention_bias": [True],
    "qkv_bias": [True],
    "bias": ["yes"],
    "norm_before_residual": ["no"],
    "norm_before_fc": [True],
    "fc_norm": [True],
    "norm_output": [False],
    "logit_scale": [0.5],
    "num_aux_hidden_states": [2],
    "quantization_config": [{"quant_method": "gptq", "bits": 4}],
    "block_size": [1, 500],
    "markov_rank": [7],
    "markov_head_type": ["other"],
    "mask_token_id": [10_000, -1],
    "ptd_token_id": [10_000],
    "num_target_layers": [9],
    "medusa_num_layers": [5],
    "n_predict": [4],
    "inner_dim": [41],
    "emb_dim": [65],
    "tie_weights": [True],
    "layer_types": [["linear_attention"] * 2],
}
_IDS = (
    "eagle_aux_hidden_state_layer_ids",
    "aux_hidden_states_layer_ids",
    "target_layer_ids",
    "dspark_target_layer_ids",
)
_OTHER_IDS: list[Any] = [[99, 100, 101], [1], [-7, 1, 2], "1,2,3", [1.5, 2, 3], []]


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
        others = _OTHER_IDS if path[-1] in _IDS else _OTHER_VALUES.get(path[-1], [])
        for other in others:
            if other != value:
                name = f"{'.'.join(path)} said to be {other!r}"
                yield Mutation(name, said(path, other), words=(path[-1], "layer ids") if path[-1] in _IDS else ())
    present = {path[-1] for path, _ in _entries(case.config)}
    for key in ("quantization_config", "mlp_bias", "attention_bias", "fc_norm", "norm_before_fc", "logit_scale"):
        if key not in present and not is_native(case):
            yield Mutation(f"{key} said to be {_OTHER_VALUES[key][0]!r}", said((key,), _OTHER_VALUES[key][0]))
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
        if isinstance(value, dict) and key in (
            "eagle_config",
            "dflash_config",
            "text_config",
            "transformer_layer_config",
        ):
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
