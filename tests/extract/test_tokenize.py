"""Spans of what the verifier wrote, decoded: the answers and what ends them, and nothing else."""

import json
from pathlib import Path

import pytest
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from speculators.errors import DataError, VerifierError
from speculators.extract.conversations import Conversation, parse_row
from speculators.extract.tokenize import ChatTokenizer, tokenizer_hash
from tests.tiny_models import CHAT_TEMPLATE, END, START, make_tokenizer

TAGS = ["{% generation %}", "{%- generation -%}", "{%generation%}", "{%- generation %}", "{% generation -%}"]
LOOP = "{% for m in messages %}"
# Template, and what follows each of several answers within its span.
TEMPLATES = {
    "chatml": (CHAT_TEMPLATE, END, END),
    "no line break after the turn": (
        LOOP + START + "{{ m.role }}\n\n{{ m.content | trim }}" + END + "{% endfor %}"
        "{% if add_generation_prompt %}" + START + "assistant\n\n{% endif %}",
        END,
        END,
    ),
    "brackets around the user": (
        LOOP
        + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} "
        + END
        + "{% endif %}"
        "{% endfor %}",
        " " + END,
        " " + END,
    ),
    "no generation prompt": (LOOP + START + "{{ m.role }}:\n{{ m.content }}" + END + "\n{% endfor %}", END, END),
    "an end only where it is last": (
        LOOP + "{{ m.role }}:\n{{ m.content }}{% if loop.last and m.role == 'assistant' %}" + END + "{% endif %}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}",
        "",
        END,
    ),
}


def chat(template: str = CHAT_TEMPLATE, **options) -> ChatTokenizer:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return ChatTokenizer(tokenizer, **options)


def row(*texts: str, **keys: object) -> Conversation:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    found = parse_row(json.dumps({"messages": messages, **keys}), Path("data.jsonl"), 5)
    assert isinstance(found, Conversation)
    return found


def spans(tokenizer: PreTrainedTokenizerFast, ids: list[int], mask: list[bool]) -> list[str]:
    found: list[list[int]] = []
    for i, (token, learnt) in enumerate(zip(ids, mask, strict=True)):
        if learnt and (i == 0 or not mask[i - 1]):
            found.append([])
        if learnt:
            found[-1].append(token)
    return [tokenizer.decode(span) for span in found]


FOUR = ("What is it?", "The quick fox.", "And then? 🦊 ü", "It jumps\n\nover — 🦊\tthe dog. ")


@pytest.mark.parametrize("name", TEMPLATES)
def test_row_24_spans_are_the_answers_and_their_ends(name: str) -> None:
    """Spans of the verifier's words are found, or it is an error (pitfall 24)."""
    template, end, last_end = TEMPLATES[name]
    tokenizer = chat(template)
    ids, mask = tokenizer.encode(row(*FOUR))
    trim = str.strip if "trim" in template else str
    lead = " " if name == "brackets around the user" else ""
    expected = [lead + trim(FOUR[1]) + end, lead + trim(FOUR[3]) + last_end]
    assert spans(tokenizer.tokenizer, ids, mask) == expected
    messages = row(*FOUR).messages
    assert ids == tokenizer.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]


@pytest.mark.parametrize("tag", TAGS)
def test_row_24_generation_marks_are_used_in_every_spelling(tag: str) -> None:
    """Spans of the verifier's words are found, or it is an error (pitfall 24)."""
    template = CHAT_TEMPLATE.replace(
        "{{ message['content'] }}<|im_end|>\n",
        "{% if message.role == 'assistant' %}" + tag + "{{ message['content'] }}<|im_end|>"
        "{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n",
    )
    tokenizer = chat(template)
    ids, mask = tokenizer.encode(row(*FOUR))
    assert spans(tokenizer.tokenizer, ids, mask) == [FOUR[1] + END, FOUR[3] + END]
    ids, mask = tokenizer.encode(row(*FOUR, finish_reasons=["length", "stop"]))
    assert spans(tokenizer.tokenizer, ids, mask) == [FOUR[1], FOUR[3] + END]


@pytest.mark.parametrize("answer", ["a", "s", "assistant", "user", "i", " "])
@pytest.mark.parametrize("name", ["chatml", "no generation prompt"])
def test_an_answer_may_read_like_the_markup(name: str, answer: str) -> None:
    tokenizer = chat(TEMPLATES[name][0])
    ids, mask = tokenizer.encode(row(answer, answer, answer, answer))
    assert spans(tokenizer.tokenizer, ids, mask) == [answer + END] * 2


def test_row_24_generation_marks_that_mark_nothing_are_an_error() -> None:
    """Spans of the verifier's words are found, or it is an error (pitfall 24)."""
    tokenizer = chat(CHAT_TEMPLATE + "{% generation %}{% endgeneration %}")
    with pytest.raises(DataError, match=r"data\.jsonl:5: .*0 spans for 2 assistant messages"):
        tokenizer.encode(row(*FOUR))


def test_row_24_generation_marks_that_leave_out_an_answer_are_an_error() -> None:
    """The template marks the last message alone; the first answer would never be learnt (pitfall 24)."""
    marked = "{% if loop.last %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else %}"
    tokenizer = chat(
        CHAT_TEMPLATE.replace(
            "{{ message['content'] }}<|im_end|>\n", marked + "{{ message.content }}<|im_end|>\n{% endif %}"
        )
    )
    assert spans(tokenizer.tokenizer, *tokenizer.encode(row(*FOUR[:2]))) == [FOUR[1] + END]
    with pytest.raises(DataError, match=r"data\.jsonl:5: .*1 spans for 2 assistant messages"):
        tokenizer.encode(row(*FOUR))


def test_row_24_a_tokenizer_that_gives_no_offsets_is_refused() -> None:
    """One in Python, of bytes: nobody could tell which of its tokens an answer is (pitfall 24)."""
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    with pytest.raises(VerifierError, match=r"tokenizer of 'bytes' \(ByT5Tokenizer\) gives no offsets; expected one"):
        ChatTokenizer(tokenizer, name="bytes")


def test_an_answer_cut_at_its_limit_has_no_end_of_turn_to_learn() -> None:
    tokenizer = chat()
    ids, mask = tokenizer.encode(row(*FOUR, finish_reasons=["stop", "length"]))
    assert spans(tokenizer.tokenizer, ids, mask) == [FOUR[1] + END, FOUR[3]]
    assert END in tokenizer.tokenizer.decode(ids[-2:])


def test_an_empty_answer_is_its_end_of_turn() -> None:
    tokenizer = chat()
    ids, mask = tokenizer.encode(row("Say nothing.", ""))
    assert spans(tokenizer.tokenizer, ids, mask) == [END]


def test_row_24_the_last_turn_alone() -> None:
    """Spans of the verifier's words are found, or it is an error (pitfall 24)."""
    tokenizer = chat(turns="last")
    ids, mask = tokenizer.encode(row(*FOUR, finish_reasons=["stop", "length"]))
    assert spans(tokenizer.tokenizer, ids, mask) == [FOUR[3]]


def test_a_prompt_alone_teaches_nothing() -> None:
    ids, mask = chat().encode(row("Say nothing."))
    assert len(ids) == len(mask)
    assert not any(mask)


def test_row_24_a_template_that_rewrites_history_is_refused_but_for_the_last_turn() -> None:
    """Spans of the verifier's words are found, or it is an error (pitfall 24)."""
    template = CHAT_TEMPLATE.replace(
        "{{ message['content'] }}",
        "{{ message['content'] if loop.last or message.role == 'user' else message['content'].split('.')[0] }}",
    )
    with pytest.raises(DataError, match=r"data\.jsonl:5: .*message 1 \(assistant\)"):
        chat(template).encode(row(*FOUR))
    tokenizer = chat(template, turns="last")
    ids, mask = tokenizer.encode(row(*FOUR))
    assert spans(tokenizer.tokenizer, ids, mask) == [FOUR[3] + END]


def test_a_template_that_refuses_a_row_names_it() -> None:
    template = "{% if messages | length > 2 %}{{ raise_exception('one turn only') }}{% endif %}" + CHAT_TEMPLATE
    with pytest.raises(DataError, match=r"data\.jsonl:5: the verifier's chat template refuses the row: one turn only"):
        chat(template).encode(row(*FOUR))


def test_row_26_tools_are_rendered_and_calls_learnt() -> None:
    """Tools and options reach the template (pitfall 26)."""
    template = "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}" + CHAT_TEMPLATE.replace(
        "{{ message['content'] }}",
        "{{ message['content'] }}{% for c in message.tool_calls or [] %}call {{ c.function.name }}{% endfor %}",
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
    messages = [
        {"role": "user", "content": "2+3?"},
        call,
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "Five."},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    found = parse_row(json.dumps({"messages": messages, "tools": tools}), Path("data.jsonl"), 5)
    assert isinstance(found, Conversation)
    tokenizer = chat(template)
    ids, mask = tokenizer.encode(found)
    assert spans(tokenizer.tokenizer, ids, mask) == ["call add" + END, "Five." + END]
    assert tokenizer.tokenizer.decode(ids).startswith("tools: [")
    with pytest.raises(DataError, match="the row has tools, but the verifier's chat template leaves them out"):
        chat().encode(found)


def test_prompts_are_what_a_server_feeds() -> None:
    tokenizer = chat()
    conversation = row("What is it?")
    ids = tokenizer.encode_prompt(conversation.messages, conversation.where)
    assert tokenizer.tokenizer.decode(ids) == f"{START}user\nWhat is it?{END}\n{START}assistant\n"


def test_row_26_template_options_reach_the_template_and_the_hash() -> None:
    """Tools and options reach the template (pitfall 26)."""
    template = "{% if shout %}!{% endif %}" + CHAT_TEMPLATE
    plain, loud = chat(template), chat(template, template_options={"shout": True})
    conversation = row("What is it?", "A fox.")
    assert len(loud.encode(conversation)[0]) == len(plain.encode(conversation)[0]) + 1
    assert plain.template_hash != loud.template_hash
    assert plain.template_hash == chat(template).template_hash
    assert plain.template_hash != chat().template_hash


def test_the_tokenizer_hash_is_of_its_rules_not_of_its_settings() -> None:
    one, two, other = make_tokenizer(), make_tokenizer(), make_tokenizer(320)
    two(["a", "b c d e f"], padding=True, truncation=True, max_length=2)
    assert tokenizer_hash(one) == tokenizer_hash(two) != tokenizer_hash(other)


def test_no_chat_template_is_a_verifier_error() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(VerifierError, match="the tokenizer of 'plain' has no chat template"):
        ChatTokenizer(tokenizer, name="plain")
    with pytest.raises(VerifierError, match="no chat template"):
        ChatTokenizer(None)
