"""Whether `d2t` is the map that engines take it for (free of torch).

The stored form is an offset: `verifier_id = draft_id + d2t[draft_id]`. Other software has written the ids themselves,
or left the map empty; both are read without a word and never propose the right token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from speculators.formats.faults import Fault, fault

# Tokens kept at random would include about D²/V pairs of neighbours, where an offset map is flat. From this many
# expected pairs on, a map that rises at every step is taken for ids (a chance of e^-16 against it).
_EXPECTED_PAIRS = 16


def map_fault(d2t: Sequence[int], vocab_size: int, kept: Sequence[int] | None = None) -> Fault | None:
    """Return what is wrong with an offset map into a vocabulary of `vocab_size` tokens, None where nothing is.

    `kept` are the ids that `t2d` marks, ascending, where the checkpoint has it; they decide between the readings.
    """
    verifier_ids = [draft_id + offset for draft_id, offset in enumerate(d2t)]
    ascending = all(left < right for left, right in pairwise(verifier_ids))
    inside = not verifier_ids or (min(verifier_ids) >= 0 and max(verifier_ids) < vocab_size)
    if kept is not None and verifier_ids == list(kept):
        return None if inside else fault("d2t-invalid", _outside(verifier_ids, vocab_size))
    if _are_ids(d2t, vocab_size, kept, fits=ascending and inside):
        found = f"d2t starts {list(d2t[:4])} and holds the verifier's ids themselves"
        return fault("d2t-absolute", f"{found}; expected offsets, verifier_id - draft_id: subtract 0, 1, 2, ...")
    if not inside:
        return fault("d2t-invalid", _outside(verifier_ids, vocab_size))
    if not ascending:
        wrong = next(index for index, (left, right) in enumerate(pairwise(verifier_ids)) if left >= right)
        pair = f"draft ids {wrong} and {wrong + 1} map to {verifier_ids[wrong]} and {verifier_ids[wrong + 1]}"
        return fault("d2t-invalid", f"{pair}; expected ascending tokens of the verifier")
    if kept is not None:
        empty = "is all zero, as if it was never filled, and" if not any(d2t) else f"maps to {len(d2t)} tokens that"
        return fault("d2t-invalid", f"d2t {empty} does not match the {len(kept)} tokens that t2d marks; rebuild both")
    if len(d2t) < vocab_size and not any(d2t):
        text = f"d2t is all zero: the draft proposes only ids 0..{len(d2t) - 1}; was the map ever filled?"
        return fault("d2t-all-zero", text)
    return None


def _are_ids(d2t: Sequence[int], vocab_size: int, kept: Sequence[int] | None, *, fits: bool) -> bool:
    if kept is not None:
        return list(d2t) == list(kept)
    rising = len(d2t) > 1 and all(left < right for left, right in pairwise(d2t))
    if not rising or d2t[0] < 0 or d2t[-1] >= vocab_size:
        return False
    return not fits or len(d2t) ** 2 >= _EXPECTED_PAIRS * vocab_size


def _outside(verifier_ids: Sequence[int], vocab_size: int) -> str:
    wrong = next(index for index, value in enumerate(verifier_ids) if not 0 <= value < vocab_size)
    return f"draft id {wrong} maps to {verifier_ids[wrong]}; expected tokens within 0..{vocab_size - 1}"
