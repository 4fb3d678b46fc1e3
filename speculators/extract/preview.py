"""Prepared rows as people read them: what is learnt stands out."""

from __future__ import annotations

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from speculators.extract.prepared import PreparedData
from speculators.extract.tokenize import runs

LEARNT = "bold green"
GIVEN = "dim"


def coloured_row(data: PreparedData, row: int, tokenizer: PreTrainedTokenizerBase) -> Text:
    """A row decoded, the learnt spans in one style and the rest in another."""
    ids, mask = data[row]
    text = Text()
    place = 0
    for start, end in runs(mask.tolist()):
        text.append(str(tokenizer.decode(ids[place:start].tolist())), style=GIVEN)
        text.append(str(tokenizer.decode(ids[start:end].tolist())), style=LEARNT)
        place = end
    return text.append(str(tokenizer.decode(ids[place:].tolist())), style=GIVEN)
