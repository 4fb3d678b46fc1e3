"""The maps of a reduced vocabulary as others store them: one of two, in other dtypes, or ids instead of offsets.

Small enough to be read while a conversion is planned. Shape suffixes: V verifier vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from speculators.convert.plan import Ledger, PlannedTensor
from speculators.errors import FormatError, UsageError
from speculators.formats.faults import error_of, fault
from speculators.formats.vocab import DraftVocab
from speculators.formats.vocab_map import map_fault

Reading = Literal["offsets", "ids"]
_INTEGERS = ("I64", "I32", "I16", "U8", "I8")


@dataclass(frozen=True)
class _Maps:
    """What a checkpoint has: `d2t_D` int64, `t2d_V` bool; either may be absent."""

    d2t_D: Tensor | None
    t2d_V: Tensor | None


def plan_vocabulary(ledger: Ledger, draft_size: int, vocab_size: int, d2t_holds: Reading | None) -> None:
    """Take `d2t` and `t2d` of a draft of `draft_size` tokens and write both as this library stores them.

    A missing one is derived; maps of a whole vocabulary are dropped. Where `t2d` is there it decides whether `d2t`
    holds offsets or ids, else `d2t_holds`, else the map itself where it can only be one of them. FormatError where it
    cannot be told, where the maps disagree, or both are missing; UsageError for a `d2t_holds` that means nothing here.
    """
    maps = _Maps(_integers(ledger, "d2t"), _flags(ledger, "t2d", vocab_size))
    if d2t_holds is not None and maps.d2t_D is None:
        raise UsageError(f"d2t_holds is {d2t_holds!r}, and the checkpoint has no d2t")
    if maps.d2t_D is not None and len(maps.d2t_D) != draft_size:
        raise _invalid(ledger, f"d2t has {len(maps.d2t_D)} entries; the draft's head has {draft_size} tokens")
    kept = None if maps.t2d_V is None else int(maps.t2d_V.sum())
    if kept is not None and kept != draft_size:
        what = "keeps everything, as before it was filled" if kept == vocab_size else f"keeps {kept} tokens"
        raise _invalid(ledger, f"t2d {what}; the draft's head has {draft_size} tokens")
    if draft_size == vocab_size:
        _drop_whole(ledger, maps)
        return
    vocab = _vocabulary(ledger, maps, vocab_size, d2t_holds)
    for name, tensor in (("d2t", vocab.d2t), ("t2d", vocab.t2d)):
        _write(ledger, name, tensor)


def _integers(ledger: Ledger, name: str) -> Tensor | None:
    if not ledger.has(name):
        return None
    stored = ledger.stored(name)
    if stored.dtype not in _INTEGERS or len(stored.shape) != 1:
        raise _invalid(ledger, f"{name} is {stored.dtype} {list(stored.shape)}; expected one row of whole numbers")
    return stored.read().long()


def _flags(ledger: Ledger, name: str, vocab_size: int) -> Tensor | None:
    if not ledger.has(name):
        return None
    stored = ledger.stored(name)
    if stored.shape != (vocab_size,) or stored.dtype not in ("BOOL", *_INTEGERS):
        text = f"{name} is {stored.dtype} {list(stored.shape)}; expected a flag for each of the verifier's {vocab_size}"
        raise _invalid(ledger, text)
    values = stored.read()
    if stored.dtype != "BOOL" and not torch.isin(values, values.new_tensor([0, 1])).all():
        raise _invalid(ledger, f"{name} has values besides 0 and 1; expected flags")
    return values.bool()


def _drop_whole(ledger: Ledger, maps: _Maps) -> None:
    if maps.d2t_D is not None:
        if maps.d2t_D.any() and not torch.equal(maps.d2t_D, torch.arange(len(maps.d2t_D))):
            raise _invalid(ledger, "d2t moves tokens although the draft's head has all of the verifier's")
        ledger.drop("d2t", "the draft vocabulary is whole, and needs no map")
    if maps.t2d_V is not None:
        ledger.drop("t2d", "the draft vocabulary is whole, and needs no map")


def _vocabulary(ledger: Ledger, maps: _Maps, vocab_size: int, d2t_holds: Reading | None) -> DraftVocab:
    if maps.d2t_D is None:
        if maps.t2d_V is None:
            text = (
                "neither d2t nor t2d is there, and the draft's head has fewer tokens than the verifier: its map is lost"
            )
            raise error_of([fault("no-d2t", text)], ledger.source.directory)
        ledger.derived["d2t"] = "t2d"
        return DraftVocab.from_ids(torch.nonzero(maps.t2d_V).flatten().tolist(), vocab_size)
    offsets = _offsets(ledger, maps, vocab_size, d2t_holds)
    if maps.t2d_V is None:
        ledger.derived["t2d"] = "d2t"
        if not offsets.any():
            ledger.note(f"d2t is all zero: the draft proposes only ids 0..{len(offsets) - 1}; was the map ever filled?")
    return DraftVocab.from_d2t(offsets, vocab_size, maps.t2d_V)


def _offsets(ledger: Ledger, maps: _Maps, vocab_size: int, d2t_holds: Reading | None) -> Tensor:
    """`d2t` as offsets, whichever of the two it holds."""
    assert maps.d2t_D is not None
    stored, kept_D = maps.d2t_D, None if maps.t2d_V is None else torch.nonzero(maps.t2d_V).flatten()
    as_ids = stored - torch.arange(len(stored))
    if kept_D is not None:
        found: Reading | None = "ids" if torch.equal(stored, kept_D) and as_ids.any() else "offsets"
        if d2t_holds not in (None, found):
            raise FormatError(f"{ledger.source.directory}: d2t_holds is {d2t_holds!r}; by t2d, d2t holds {found}")
    else:
        found = d2t_holds
    problem = map_fault(stored.tolist(), vocab_size, None if kept_D is None else kept_D.tolist())
    if found is None and problem is not None and problem.slug == "d2t-absolute":
        text = (
            f"d2t starts {stored[:4].tolist()} and rises at every step: either offsets (draft id 0 is token "
            f"{int(stored[0])}, 1 is {int(stored[1]) + 1}) or the verifier's ids themselves (1 is {int(stored[1])}); "
            "say d2t_holds offsets or ids"
        )
        raise error_of([fault("d2t-absolute", text)], ledger.source.directory)
    if found == "ids":
        ledger.note("d2t holds the verifier's ids; offsets are written")
        return as_ids
    return stored


def _write(ledger: Ledger, name: str, tensor: Tensor) -> None:
    made_of = ledger.derived.get(name)
    if ledger.has(name):
        ledger.take(name)
    ledger.plan(name, PlannedTensor(tuple(tensor.shape), "BOOL" if name == "t2d" else "I64", lambda: tensor), made_of)


def _invalid(ledger: Ledger, text: str) -> FormatError:
    return error_of([fault("d2t-invalid", text)], ledger.source.directory)
