"""The matrix of chat templates: for each style, what is learnt of conversations, as text, row by row."""

import json
from pathlib import Path
from typing import Any

import pytest

from speculators.errors import DataError, UsageError
from speculators.extract.conversations import Conversation, parse_row
from speculators.extract.tokenize import ChatTokenizer, runs
from tests.extract import templates
from tests.extract.templates import Style

SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str | None, **more: object) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


PLAIN = [user("What is it?"), says("The quick fox. 🦊"), user("And then?"), says("It jumps\n\nover.")]
THINKS = [
    user("What is it?"),
    says("A fox.", reasoning_content="I look."),
    user("And then?"),
    says("It jumps.", thinking="I wait."),
]
USES_TOOLS = [
    user("2+3?"),
    says(None, tool_calls=[CALL], reasoning_content="I add."),
    {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "5 apples"},
    says("Five."),
    user("Sure?"),
    says("Yes."),
]


def conversation(messages: list[dict[str, Any]], **more: object) -> Conversation:
    found = parse_row(json.dumps({"messages": messages, **more}), Path("data.jsonl"), 5)
    assert isinstance(found, Conversation)
    return found


def learnt(style: Style, row: Conversation, **options: Any) -> list[list[str]]:
    """The decoded spans of every row, after checks that hold for any template."""
    chat = ChatTokenizer(style.tokenizer(), **options)
    rows = chat.encode_rows(row)
    for ids, mask, _ in rows:
        assert len(ids) == len(mask)
        rest = chat.tokenizer.decode([token for token, learn in zip(ids, mask, strict=True) if not learn])
        assert not any(message["content"] and message["content"] in rest for message in row.messages[-1:])
        # BOS once, where the template writes one, and the text of the whole row as a server renders it.
        assert style.bos is None or ids.count(chat.tokenizer.bos_token_id) == 1
    return [[chat.tokenizer.decode(ids[start:end]) for start, end in runs(mask)] for ids, mask, _ in rows]


def together(end: str, last: str | None = None) -> list[list[str]]:
    return [["The quick fox. 🦊" + end, "It jumps\n\nover." + (end if last is None else last)]]


PLAIN_SPANS: dict[str, list[list[str]]] = {
    "CHATML": together("<|im_end|>"),
    "LLAMA3": together("<|eot_id|>"),
    "LLAMA3_TOOLS": together("<|eot_id|>"),
    "MISTRAL": together("</s>"),
    "GEMMA": together("<end_of_turn>"),
    "DEEPSEEK_R1": together("<\uff5cend▁of▁sentence\uff5c>"),
    "DEEPSEEK_V3": together("<\uff5cend▁of▁sentence\uff5c>"),
    # The verifier ends its answer with <|return|>, which history shows as <|end|>: nobody wrote that.
    "HARMONY": [
        ["<|channel|>final<|message|>The quick fox. 🦊", "<|channel|>final<|message|>It jumps\n\nover.<|return|>"]
    ],
    # An answer of history lacks the empty thinking that it had when it was given, so each answer has a row.
    "QWEN3": [["The quick fox. 🦊<|im_end|>"], ["It jumps\n\nover.<|im_end|>"]],
    "MARKED_TOOLS": together("<|im_end|>"),
    "VICUNA": together("</s>"),
    "PHI3": together("<|end|>"),
    "COMMAND": together("<|END_OF_TURN_TOKEN|>"),
    "GLM": together("<|user|>", ""),
}


@pytest.mark.parametrize("name", PLAIN_SPANS)
def test_row_24_every_answer_is_learnt_with_its_end_and_without_its_header(name: str) -> None:
    """Both answers of a conversation, or the last one where that is asked for (pitfall 24)."""
    style = getattr(templates, name)
    assert learnt(style, conversation(PLAIN)) == PLAIN_SPANS[name]
    last = learnt(style, conversation(PLAIN), turns="last")
    assert last == [PLAIN_SPANS[name][-1][-1:]]


@pytest.mark.parametrize("name", PLAIN_SPANS)
def test_a_system_message_is_never_learnt(name: str) -> None:
    style = getattr(templates, name)
    row = conversation([SYSTEM, *PLAIN])
    if name == "GEMMA":
        with pytest.raises(DataError, match=r"data\.jsonl:5: .* refuses the row: System role not supported"):
            learnt(style, row)
        return
    spans = learnt(style, row)
    assert [text for row in spans for text in row] == [text for row in PLAIN_SPANS[name] for text in row]
    # This style moves the system text to the last question, so what an answer followed is another text each time.
    assert len(spans) == (2 if name == "MISTRAL" else len(PLAIN_SPANS[name]))


def analysis(thought: str) -> str:
    return f"<|channel|>analysis<|message|>{thought}<|end|>"


THINKING_SPANS: dict[str, list[list[str]]] = {
    "QWEN3": [
        ["<think>\nI look.\n</think>\n\nA fox.<|im_end|>"],
        ["<think>\nI wait.\n</think>\n\nIt jumps.<|im_end|>"],
    ],
    "HARMONY": [
        [
            f"{analysis('I look.')}<|start|>assistant<|channel|>final<|message|>A fox.<|return|>",
        ],
        [
            f"{analysis('I wait.')}<|start|>assistant<|channel|>final<|message|>It jumps.<|return|>",
        ],
    ],
    "MARKED_TOOLS": [
        ["<think>I look.</think>", "A fox.<|im_end|>", "<think>I wait.</think>", "It jumps.<|im_end|>"],
    ],
}


@pytest.mark.parametrize("name", THINKING_SPANS)
def test_row_24_reasoning_is_learnt_where_the_template_shows_it(name: str) -> None:
    """What was thought before an earlier answer is learnt with that answer, and not with the last (pitfall 24)."""
    style = getattr(templates, name)
    assert learnt(style, conversation(THINKS)) == THINKING_SPANS[name]
    last = [text for text in THINKING_SPANS[name][-1] if "I look" not in text and "A fox" not in text]
    assert learnt(style, conversation(THINKS), turns="last") == [last]
    assert [row.lost_reasoning for row in ChatTokenizer(style.tokenizer()).encode_rows(conversation(THINKS))] == [
        0 for _ in THINKING_SPANS[name]
    ]


def test_row_24_reasoning_in_the_last_turn_alone() -> None:
    """The first answer was given without thought, and is not learnt with the last one's (pitfall 24)."""
    row = conversation([*PLAIN[:2], THINKS[2], THINKS[3]])
    given, thought = "The quick fox. 🦊<|im_end|>", "<think>\nI wait.\n</think>\n\nIt jumps.<|im_end|>"
    assert learnt(templates.QWEN3, row) == [[given], [thought]]
    assert learnt(templates.QWEN3, row, turns="last") == [[thought]]


@pytest.mark.parametrize("name", ["CHATML", "LLAMA3", "GEMMA", "DEEPSEEK_R1", "PHI3"])
def test_reasoning_that_the_template_leaves_out_is_counted(name: str) -> None:
    style = getattr(templates, name)
    rows = ChatTokenizer(style.tokenizer()).encode_rows(conversation(THINKS))
    assert [row.lost_reasoning for row in rows] == [2]
    end = PLAIN_SPANS[name][0][0].removeprefix("The quick fox. 🦊")
    assert learnt(style, conversation(THINKS)) == [["A fox." + end, "It jumps." + end]]


def test_thinking_within_the_text_is_told_from_the_answer() -> None:
    row = conversation([user("What is it?"), says("<think>\nI look.\n</think>\n\nA fox.")])
    assert learnt(templates.QWEN3, row) == [["<think>\nI look.\n</think>\n\nA fox.<|im_end|>"]]
    assert learnt(templates.CHATML, row) == [["<think>\nI look.\n</think>\n\nA fox.<|im_end|>"]]
    assert learnt(templates.DEEPSEEK_R1, row) == [["\n\nA fox.<\uff5cend▁of▁sentence\uff5c>"]]
    assert ChatTokenizer(templates.DEEPSEEK_R1.tokenizer()).encode_rows(row)[0].lost_reasoning == 1


def test_row_26_thinking_switched_off_is_part_of_the_prompt() -> None:
    """The option changes the prompt, and one that the template does not read is refused (pitfall 26)."""
    row = conversation(PLAIN)
    off = ChatTokenizer(templates.QWEN3.tokenizer(), template_options={"enable_thinking": False})
    rows = off.encode_rows(row)
    for (ids, mask, _), number in zip(rows, (1, 3), strict=True):
        prompt = off.encode_prompt(row.messages[:number], row.where)
        assert ids[: len(prompt)] == prompt
        assert off.tokenizer.decode(prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert mask.index(True) == len(prompt)
    with pytest.raises(UsageError, match=r"does not read 'enable_thinking'"):
        ChatTokenizer(templates.CHATML.tokenizer(), template_options={"enable_thinking": False})
    on = ChatTokenizer(templates.DEEPSEEK_V3.tokenizer(), template_options={"thinking": True})
    assert on.encode_rows(row)[0].loss_mask == ChatTokenizer(templates.DEEPSEEK_V3.tokenizer()).encode(row)[1]


ARGUMENTS = '{"a": 2, "b": 3}'
CALL_TEXT = f'{{"name": "add", "arguments": {ARGUMENTS}}}'
TOOL_SPANS: dict[str, list[list[str]]] = {
    "QWEN3": [
        [
            f"<think>\nI add.\n</think>\n\n<tool_call>\n{CALL_TEXT}\n</tool_call><|im_end|>",
            "Five.<|im_end|>",
        ],
        ["Yes.<|im_end|>"],
    ],
    "HARMONY": [
        [
            f"{analysis('I add.')}<|start|>assistant to=functions.add<|channel|>commentary json<|message|>"
            + ARGUMENTS
            + "<|call|>",
            "<|channel|>final<|message|>Five.<|return|>",
        ],
        ["<|channel|>final<|message|>Yes.<|return|>"],
    ],
    "LLAMA3_TOOLS": [
        ['{"name": "add", "parameters": {"a": 2, "b": 3}}<|eot_id|>', "Five.<|eot_id|>", "Yes.<|eot_id|>"],
    ],
    "MISTRAL": [['[TOOL_CALLS]add[ARGS]{"a": 2, "b": 3}</s>', "Five.</s>"], ["Yes.</s>"]],
    "MARKED_TOOLS": [
        [
            "<think>I add.</think>",
            '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call><|im_end|>',
            "Five.<|im_end|>",
            "Yes.<|im_end|>",
        ],
    ],
}


@pytest.mark.parametrize("name", TOOL_SPANS)
def test_row_26_calls_are_learnt_and_schemas_and_results_are_not(name: str) -> None:
    """The tools' schemas are given, the calls learnt, the results given (pitfall 26)."""
    style = getattr(templates, name)
    row = conversation(USES_TOOLS, tools=TOOLS)
    assert learnt(style, row) == TOOL_SPANS[name]
    chat = ChatTokenizer(style.tokenizer())
    for ids, mask, _ in chat.encode_rows(row):
        given = chat.tokenizer.decode([token for token, learn in zip(ids, mask, strict=True) if not learn])
        assert json.dumps(TOOLS[0]["function"]) in given
        assert "5 apples" in given


@pytest.mark.parametrize("name", ["CHATML", "LLAMA3", "DEEPSEEK_V3", "VICUNA", "PHI3", "GLM"])
def test_row_26_a_template_that_leaves_tools_out_is_refused(name: str) -> None:
    """Neither the tools nor a call can be lost without a word (pitfall 26)."""
    style = getattr(templates, name)
    with pytest.raises(DataError, match=r"data\.jsonl:5: the row has tools, but .* leaves them out"):
        learnt(style, conversation(USES_TOOLS, tools=TOOLS))
    without_tools = conversation([user("2+3?"), says(None, tool_calls=[CALL])])
    with pytest.raises(DataError, match=r"data\.jsonl:5: .*(calls the tool add, but|refuses the row)"):
        learnt(style, without_tools)


@pytest.mark.parametrize(
    "mark",
    [
        "{% generation %}",
        "{%- generation -%}",
        "{%+ generation +%}",
        "{%generation%}",
        "{%-generation%}",
        "{%  generation-%}",
    ],
)
@pytest.mark.parametrize("end", ["{% endgeneration %}", "{%- endgeneration -%}", "{%+ endgeneration %}"])
def test_row_24_marks_are_known_in_any_spelling(mark: str, end: str) -> None:
    """Whatever white space and trimming stand in the tags (pitfall 24)."""
    text = "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + mark + "{{ m.content }}<|im_end|>" + end
    text = "{% for m in messages %}" + text + "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    assert learnt(Style(text, templates.IM), conversation(PLAIN)) == together("<|im_end|>")


def test_empty_thinking_is_not_learnt_before_a_call_nor_before_nothing() -> None:
    calls = conversation([user("2+3?"), says(None, tool_calls=[CALL])], tools=TOOLS)
    assert learnt(templates.QWEN3, calls) == [[f"<tool_call>\n{CALL_TEXT}\n</tool_call><|im_end|>"]]
    assert learnt(templates.QWEN3, conversation([user("Say nothing."), says("")])) == [["<|im_end|>"]]


def test_a_blank_that_belongs_to_the_first_word_is_learnt_with_it() -> None:
    tokenizer = templates.VICUNA.tokenizer()
    assert "\u0120the" in tokenizer.convert_ids_to_tokens(tokenizer("ASSISTANT: the garden")["input_ids"])
    row = conversation([user("Where?"), says("the garden"), user("When?"), says("Now.")])
    assert learnt(templates.VICUNA, row) == [[" the garden</s>", "Now.</s>"]]


def test_rows_of_one_conversation_are_in_the_order_of_its_answers() -> None:
    row = conversation(
        [user("a"), says("One."), user("b"), says("x</think>Two.", reasoning_content="y"), user("c"), says("3")]
    )
    assert learnt(templates.QWEN3, row) == [
        ["One.<|im_end|>"],
        ["<think>\ny\n</think>\n\nx</think>Two.<|im_end|>"],
        ["3<|im_end|>"],
    ]


def test_marks_that_are_misplaced_are_found_by_decoding() -> None:
    with pytest.raises(
        DataError, match=r"data\.jsonl:5: .* message 3 \(assistant\) are not what it says: the span dec"
    ):
        learnt(templates.MARKED_IN_A_MACRO, conversation(PLAIN))


def test_marks_that_reach_too_far_are_found_by_decoding() -> None:
    wide = Style(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>And this is "
        "no part of the answer, nobody wrote it.{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
        templates.IM,
    )
    with pytest.raises(DataError, match=r"which goes on after the answer 'It jumps"):
        learnt(wide, conversation(PLAIN))


def test_an_answer_that_was_cut_has_no_end_in_any_style() -> None:
    row = conversation(PLAIN[:2], finish_reasons=["length"])
    for name in PLAIN_SPANS:
        assert learnt(getattr(templates, name), row)[0][0].endswith("The quick fox. 🦊")


def test_one_row_for_a_template_that_rewrites_history_is_refused() -> None:
    with pytest.raises(DataError, match=r"data\.jsonl:5: .*message 1 \(assistant\).*expected one row, not 2"):
        ChatTokenizer(templates.QWEN3.tokenizer()).encode(conversation(PLAIN))


def test_the_matrix_covers_what_the_field_does() -> None:
    styles = [value for value in vars(templates).values() if isinstance(value, Style)]
    assert len(styles) >= 12
    assert sum("{%- generation" in style.template for style in styles) == 1
    assert sum("add_generation_prompt" not in style.template for style in styles) == 3
