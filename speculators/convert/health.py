"""What the numbers of a converted draft betray, and which of the verifier's tokens it can propose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators.convert.options import ConversionVerifier
from speculators.convert.plan import CheckpointPlan
from speculators.formats.checkpoint import STORED_AS, TensorHeader, read_config, read_headers, read_json_object
from speculators.formats.faults import Fault, fault
from speculators.formats.tensor_health import constant_faults, number_faults, read_integers
from speculators.formats.vocab_map import map_fault
from speculators.models import family_config

# Experts are stored side by side: expert, row, column.
_EXPERTS_DIM, _GATE_UP = 3, "gate_up_proj"
_GENERATION, _TOKENIZER = "generation_config.json", "tokenizer.json"


@dataclass(frozen=True)
class Vocabulary:
    """How many of the verifier's tokens a draft proposes, and which that matter are not among them.

    `missing_ends` are ids that end an answer, `missing_special` texts of special tokens; both None where the verifier's
    files are not here.
    """

    draft: int
    verifier: int
    missing_ends: tuple[int, ...] | None
    missing_special: tuple[str, ...] | None

    def to_json(self) -> dict[str, Any]:
        """The numbers, and their share."""
        return {
            "draft": self.draft,
            "verifier": self.verifier,
            "coverage": self.draft / self.verifier,
            "missing_ends": self.missing_ends,
            "missing_special": self.missing_special,
        }


def written_health(
    folder: Path, plan: CheckpointPlan, verifier: ConversionVerifier
) -> tuple[list[Fault], Vocabulary | None]:
    """The faults of what a plan has written into a folder, and its vocabulary where it is a speculator."""
    if not plan.tensors:
        return [], None
    headers = read_headers(folder)
    parts = dict(_parts(headers))
    faults = [*number_faults(parts), *constant_faults(parts)]
    family = family_config(plan.family)
    if family is None:
        return faults, None
    config = family.from_json(plan.config, folder)
    kept = _kept_ids(headers, config.verifier_vocab_size, faults)
    vocabulary = _vocabulary(kept, config.verifier_vocab_size, config.num_draft_ids, verifier)
    return faults + list(_missing(vocabulary)), vocabulary


def _parts(headers: Mapping[str, TensorHeader]) -> Iterator[tuple[str, TensorHeader]]:
    """The tensors, those of experts one by one, gates and projections up apart: each was a matrix of its own."""
    for name, header in headers.items():
        if len(header.shape) != _EXPERTS_DIM or header.start == header.end:
            yield name, header
            continue
        halves = 2 if _GATE_UP in name and header.shape[1] % 2 == 0 else 1
        size = (header.end - header.start) // (header.shape[0] * halves)
        shape = (header.shape[1] // halves, header.shape[2])
        for part in range(header.shape[0] * halves):
            start = header.start + part * size
            half = f", half {part % halves + 1}" if halves > 1 else ""
            yield f"{name} [{part // halves}{half}]", header._replace(shape=shape, start=start, end=start + size)


def _kept_ids(headers: Mapping[str, TensorHeader], vocab_size: int, faults: list[Fault]) -> frozenset[int] | None:
    """The verifier's ids that a map keeps, None where there is no map; a map's fault goes into `faults`."""
    header = headers.get("d2t")
    if header is None or header.dtype not in STORED_AS["int"]:
        return None
    offsets = read_integers(header)
    problem = map_fault(offsets, vocab_size)
    if problem is not None:
        faults.append(problem)
    return frozenset(draft_id + offset for draft_id, offset in enumerate(offsets))


def _vocabulary(kept: frozenset[int] | None, size: int, num_draft_ids: int, verifier: ConversionVerifier) -> Vocabulary:
    if kept is None:
        return Vocabulary(num_draft_ids, size, (), ())
    if not verifier.is_here:
        return Vocabulary(num_draft_ids, size, None, None)
    directory = Path(verifier.name_or_path).expanduser()
    ends = tuple(sorted(end for end in _end_ids(directory) if end not in kept))
    special = tuple(text for token_id, text in _special_tokens(directory) if token_id not in kept)
    return Vocabulary(num_draft_ids, size, ends, special)


def _end_ids(directory: Path) -> set[int]:
    """Ids that end an answer, as the verifier's generation configuration says, else its configuration."""
    for name in (_GENERATION, "config.json"):
        if not (directory / name).is_file():
            continue
        content = _json(directory / name) if name == _GENERATION else read_config(directory)
        ids = content.get("eos_token_id")
        if ids is not None:
            return {item for item in (ids if isinstance(ids, list) else [ids]) if type(item) is int}
    return set()


def _special_tokens(directory: Path) -> Iterator[tuple[int, str]]:
    added = _json(directory / _TOKENIZER).get("added_tokens") if (directory / _TOKENIZER).is_file() else None
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and token.get("special") and type(token.get("id")) is int:
            yield token["id"], str(token.get("content"))


def _json(file: Path) -> dict[str, Any]:
    """A file of the verifier's; empty where it cannot be read, which is for the engine to say."""
    try:
        return read_json_object(file)
    except (ValueError, OSError):
        return {}


def _missing(vocabulary: Vocabulary) -> Iterator[Fault]:
    if vocabulary.missing_ends:
        ids = ", ".join(str(item) for item in vocabulary.missing_ends)
        text = f"the draft never proposes the verifier's end of an answer (token {ids}): each costs a rejected draft"
        yield fault("end-not-drafted", text)
