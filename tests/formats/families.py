"""Directories and configurations of every family in the table, as small as its contract test has them."""

import copy
import json
from pathlib import Path
from typing import Any

import torch

from speculators.formats.faults import Fault
from speculators.formats.vllm import validate_directory
from speculators.models import family_config
from speculators.models.speculator import Speculator
from tests.models.contract import contract_of
from tests.models.drafts import config_of, random_speculator, verifier_shape

# Types that vLLM reads in this format; a directory of another one is sound, but only this library serves it.
SERVED = ("eagle3", "peagle", "dflash", "dflash2", "dspark")


def config_json(family: str, **options: Any) -> dict[str, Any]:
    """What `config.json` of the smallest draft of a family holds, `options` of its `Draft` changed."""
    plain = contract_of(family).variants["plain"]
    written: dict[str, Any] = config_of(family, verifier_shape(), {**plain, **options}).to_json()
    return copy.deepcopy(written)


def speculator_of(family: str, **options: Any) -> Speculator:
    """A random draft of that shape."""
    return random_speculator(family, **{**contract_of(family).variants["plain"], **options})


def write_family(directory: Path, family: str, changes: dict[str, Any] | None = None, **options: Any) -> Path:
    """Save a random draft; `changes` then replace keys of its `config.json` ("layer." before one of the layers)."""
    speculator_of(family, **options).save_pretrained(directory, dtype=torch.float32)
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    for key, value in (changes or {}).items():
        owner = config["transformer_layer_config"] if key.startswith("layer.") else config
        name = key.removeprefix("layer.")
        if value is ...:
            del owner[name]
        else:
            owner[name] = value
    file.write_text(json.dumps(config), encoding="utf-8")
    return directory


def faults_of(directory: Path) -> list[Fault]:
    """What the validator finds."""
    return validate_directory(directory, family_config)


def slugs_of(directory: Path) -> list[str]:
    """The names of what it finds, in order."""
    return [fault.slug for fault in faults_of(directory)]
