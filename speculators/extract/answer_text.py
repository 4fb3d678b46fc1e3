"""What of a rendered text the verifier wrote, told by comparing texts: pure functions over strings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from speculators.extract.conversations import Message, reasoning

# How a generation prompt may open, or open and close, the thinking that a template leaves out of a finished answer.
_THOUGHT_OPENER = re.compile(r"\s*(?:[<\[][\w:]+[>\]]\s*(?:[<\[]/[\w:]+[>\]]\s*)?)?")
# What a template writes in the place of thinking that an answer does not have.
_EMPTY_THOUGHT = re.compile(r"\s*(?:[<\[][\w:]+[>\]]\s*)?[<\[]/[\w:]+[>\]]\s*")
_INLINE_THOUGHT = re.compile(r"(?s)(?P<thought>.*</think(?:ing)?>)(?P<answer>.*)")
# Markup that ends a turn without being a special token is shorter than this.
_LONGEST_END = 32


def common_length(a: str, b: str) -> int:
    """Number of leading characters in which two texts agree."""
    if b.startswith(a):
        return len(a)
    if a.startswith(b):
        return len(b)
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low


def monotone(offsets: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Starts and ends of tokens; one whose white space was trimmed to nothing begins where the token before it ends."""
    starts, ends, last = [], [], 0
    for start, end in offsets:
        starts.append(min(start, last) if start == end else start)
        ends.append(end)
        last = end
    return starts, ends


def squeezed(text: str, without: Iterable[str] = ()) -> str:
    """A text without white space and without some markup."""
    for markup in without:
        text = text.replace(markup, "")
    return "".join(text.split())


def after_thought_opener(prompt: str, text: str) -> int | None:
    """Where an answer begins in a text that lacks the `<think>` which ends its prompt; None where more is missing."""
    shared = common_length(prompt, text)
    while shared and prompt[shared - 1] in "<[/":
        shared -= 1
    return shared if _THOUGHT_OPENER.fullmatch(prompt[shared:]) else None


def without_empty_thought(span: str, message: Message) -> int:
    """Number of leading characters of an answer that are empty thinking, which nobody wrote."""
    answer = str(message["content"]).strip()
    found = _EMPTY_THOUGHT.match(span)
    if found is None or reasoning(message) or _INLINE_THOUGHT.match(answer):
        return 0
    return 0 if answer and span.lstrip().startswith(answer) else found.end()


def thought_and_answer(message: Message) -> tuple[str, str]:
    """What an assistant message says before and after its thinking ended, as written in its fields or in its text."""
    content = str(message["content"])
    inline = _INLINE_THOUGHT.fullmatch(content)
    if inline is not None:
        return inline["thought"], inline["answer"]
    return reasoning(message), content


def calls_of(message: Message) -> list[str]:
    """Names of the functions that a message calls."""
    return [str(call["function"]["name"]) for call in message.get("tool_calls", [])]


def is_missing(part: str, text: str) -> bool:
    """Whether a text lacks a part, white space aside."""
    return squeezed(part) not in squeezed(text)


def mismatch(message: Message, decoded: str, markup: Sequence[str], straddled: int = 0) -> str | None:
    """Why a decoded span is not the answer that it stands for; None where it is.

    The answer's text, and the names of the functions that it calls, must be in the span, and after the text nothing but
    the end of the turn; `markup` are special tokens, and white space is no difference. The answer's first `straddled`
    characters may be missing, since their token begins in the header.
    """
    text = squeezed(decoded, markup)
    answer = squeezed(thought_and_answer(message)[1], markup)
    found, size = text.rfind(answer), len(answer)
    if found < 0:
        cut = next((k for k in range(1, straddled + 1) if answer[k:] and text.startswith(answer[k:])), None)
        if cut is None:
            return f"decodes to {_short(decoded)}, which is not the answer {_short(str(message['content']))}"
        found, size = 0, len(answer) - cut
    calls = calls_of(message)
    absent = [name for name in calls if name not in decoded]
    if absent:
        return f"decodes to {_short(decoded)}, without the call of {absent[0]}"
    if not calls and len(text) - found - size > _LONGEST_END:
        return f"decodes to {_short(decoded)}, which goes on after the answer {_short(str(message['content']))}"
    return None


def _short(text: str) -> str:
    return repr(text if len(text) <= 120 else f"{text[:60]}...{text[-57:]}")
