"""Chat templates in the styles of the field, written for these tests: markup, rules and habits, not anybody's text."""

from dataclasses import dataclass

from transformers import AddedToken, PreTrainedTokenizerFast

from tests.tiny_models import make_tokenizer


@dataclass(frozen=True)
class Style:
    """A template, its special tokens (the last one ends a sequence), and added tokens that are not special."""

    template: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    bos: str | None = None

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A byte-level tokenizer that knows the markup."""
        tokenizer = make_tokenizer()
        tokenizer.add_special_tokens({"extra_special_tokens": list(self.special), "eos_token": self.special[-1]})
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in self.added])
        if self.bos is not None:
            tokenizer.bos_token = self.bos
        tokenizer.chat_template = self.template
        return tokenizer


TOOL_MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
IM = ("<|im_start|>", "<|im_end|>")

CHATML = Style(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    IM,
)

LLAMA3 = Style(
    """{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}""",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    bos="<|begin_of_text|>",
)

# Calls as JSON in the text, results under a role of their own, tools in the system turn.
LLAMA3_TOOLS = Style(
    """{{- bos_token }}
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\n\nFunctions you may call:\n' + tools | tojson + '<|eot_id|>' }}
{%- endif %}
{%- for m in messages %}
    {%- set role = 'ipython' if m.role == 'tool' else m.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
    {%- if m.tool_calls %}
        {%- set call = m.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- else %}
        {{- m.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}""",
    LLAMA3.special,
    bos="<|begin_of_text|>",
)

# No generation prompt; the system text and the tools stand before the last question, so history is rewritten.
MISTRAL = Style(
    """{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set talk = messages[1:] if system else messages %}
{%- set last = talk | selectattr('role', 'equalto', 'user') | list | length %}
{%- set ns = namespace(users=0) %}
{{- bos_token }}
{%- for m in talk %}
    {%- if m.role == 'user' %}
        {%- set ns.users = ns.users + 1 %}
        {%- if tools and ns.users == last %}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + (system + '\n\n' if system and ns.users == last else '') + m.content + '[/INST]' }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
    {%- elif m.tool_calls %}
        {%- for call in m.tool_calls %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- else %}
        {{- m.content + eos_token }}
    {%- endif %}
{%- endfor %}""",
    (
        "<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
        "[TOOL_CALLS]", "[ARGS]", "</s>",
    ),
    bos="<s>",
)  # fmt: skip

# The assistant is called model, and nobody may be the system.
GEMMA = Style(
    """{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages -%}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    <start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor -%}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif -%}""",
    ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    bos="<bos>",
)

# The prompt opens the thinking; what is finished is shown without it, wherever it stands.
DEEPSEEK_R1 = Style(
    """{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- m.content }}
    {%- elif m.role == 'user' %}{{- '<\uff5cUser\uff5c>' + m.content }}
    {%- else %}{{- '<\uff5cAssistant\uff5c>' + m.content.split('</think>')[-1] + '<\uff5cend▁of▁sentence\uff5c>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<\uff5cAssistant\uff5c><think>\n' }}{%- endif %}""",
    (
        "<\uff5cbegin▁of▁sentence\uff5c>",
        "<\uff5cUser\uff5c>",
        "<\uff5cAssistant\uff5c>",
        "<\uff5cend▁of▁sentence\uff5c>",
    ),
    ("<think>", "</think>"),
    bos="<\uff5cbegin▁of▁sentence\uff5c>",
)

# One token tells whether there is thinking: an opening tag in the prompt, or a closing one.
DEEPSEEK_V3 = Style(
    """{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- m.content }}
    {%- elif m.role == 'user' %}{{- '<\uff5cUser\uff5c>' + m.content }}
    {%- else %}{{- '<\uff5cAssistant\uff5c></think>' + m.content + '<\uff5cend▁of▁sentence\uff5c>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<\uff5cAssistant\uff5c>' + ('<think>' if thinking else '</think>') }}
{%- endif %}""",
    DEEPSEEK_R1.special,
    ("<think>", "</think>"),
    bos="<\uff5cbegin▁of▁sentence\uff5c>",
)

# Channels; thinking of earlier questions is dropped, and the last answer ends with another token than the others.
HARMONY = Style(
    """{{- '<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\n' + tools | tojson + '<|end|>' }}
{%- endif %}
{%- set ns = namespace(last=-1, name='') %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if m.thinking and loop.index0 > ns.last %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {%- if m.tool_calls %}
            {%- set call = m.tool_calls[0].function %}
            {%- set ns.name = call.name %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
            {{- call.arguments | tojson + '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
            {{- '<|return|>' if loop.last else '<|end|>' }}
        {%- endif %}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}""",
    ("<|start|>", "<|message|>", "<|channel|>", "<|call|>", "<|end|>", "<|return|>"),
)

# Thinking is shown after the last question only; an answer without any gets an empty one, and so does the prompt where
# thinking is switched off. Calls are XML around JSON, results are part of a user turn.
QWEN3 = Style(
    """{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}
    {{- '</tools><|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role in ('user', 'system') %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- set thought = m.reasoning_content or '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {{- ('\n' if content or not loop.first else '') + '<tool_call>\n{"name": "' + call.function.name }}
            {{- '", "arguments": ' + call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' + ('<think>\n\n</think>\n\n' if enable_thinking is false else '') }}
{%- endif %}""",
    IM,
    TOOL_MARKUP,
)

# Marks in three spellings: reasoning, text and calls are marked apart from each other.
MARKED_TOOLS = Style(
    """{%- if tools %}{{- 'Tools: ' + tools | tojson + '\n' }}{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' %}
        {%- if m.reasoning_content %}
            {%- generation -%}
                {{- '<think>' + m.reasoning_content + '</think>' }}
            {%- endgeneration -%}
            {{- '\n' }}
        {%- endif %}
        {%- generation %}
            {{- m.content }}
            {%- for call in m.tool_calls or [] %}
                {{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- m.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
    IM,
    TOOL_MARKUP,
)

# Marks within a macro: what renders them takes them for marks at the start of the text.
MARKED_IN_A_MACRO = Style(
    """{%- macro turn(m) %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endmacro -%}
{% for m in messages %}{{ turn(m) }}{% endfor %}""",
    IM,
)

# Words instead of markup: nothing but the end of a turn is a special token, and there is no generation prompt.
VICUNA = Style(
    """{% for m in messages %}
{% if m.role == 'system' %}{{ m.content + '\n\n' }}{% elif m.role == 'user' %}{{ 'USER: ' + m.content + '\n' }}
{% else %}{{ 'ASSISTANT: ' + m.content + eos_token + '\n' }}{% endif %}
{% endfor %}""",
    ("</s>",),
)

PHI3 = Style(
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
)

COMMAND = Style(
    """{{- bos_token }}
{%- for m in messages %}
    {%- set name = {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'}[m.role] %}
    {{- '<|START_OF_TURN_TOKEN|><|' + name + '_TOKEN|>' + m.content | trim + '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}""",
    (
        "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
    ),
    bos="<BOS_TOKEN>",
)  # fmt: skip

# A turn has no end of its own: the next header ends it.
GLM = Style(
    "[gMASK]<sop>{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<|user|>"),
)
