"""Chat templates for tests, one for each tool-call format that mlx-lm parses.

Each is a tokenizer folder: the embedded model's vocabulary with the format's own tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from mlx_lm.tokenizer_utils import load
from tokenizers import AddedToken, Tokenizer

from semantic.adapters.mlx.model.provider import find_folder
from semantic.adapters.mlx.text.chat_format import MLXChatFormat
from semantic.adapters.mlx.text.tokenizer import HuggingFaceTokenizer, MLXTokenizer
from semantic.domain.chat import Tool

WEATHER = Tool(
    "get_weather",
    "Tells the weather.",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
TOOLS = (WEATHER, Tool("stop", "Stops.", {"type": "object", "properties": {}}))

_TURNS = """
{%- set turns = namespace(user=true) -%}
{%- if tools -%}
<|system|>{{ tools | tojson }}<|end|>
{%- endif -%}
{%- for message in messages -%}
RULES
{%- if message.role == 'tool' -%}
<|user|>RESULT<|end|>
{%- elif message.role == 'assistant' -%}
<|assistant|>THOUGHT{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{%- set tool_call = call.function -%}
CALL
{%- endfor -%}<|end|>
{%- else -%}
{{ '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>GENERATION_PROMPT{%- endif -%}"""

_FIRST_ONLY = """
{%- if message.role == 'system' and not loop.first -%}
{{ raise_exception('System message must be at the beginning.') }}
{%- endif -%}"""

_ALTERNATE = """
{%- if message.role == 'system' -%}
{{ raise_exception('System role not supported') }}
{%- endif -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant') }}
{%- endif -%}"""

_ALTERNATE_WITH_TOOLS = """
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) -%}
{%- if (message.role == 'user') != turns.user -%}
{{ raise_exception('Conversation roles must alternate') }}
{%- endif -%}
{%- set turns.user = not turns.user -%}
{%- endif -%}
{%- if message.role == 'system' and not loop.first -%}
{{ raise_exception('Only the first message may be a system message') }}
{%- endif -%}"""

_THINK = (
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
)
_OPEN_THINK = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)


def _template(
    call: str,
    *,
    result: str = "<tool_response>{{ message.content }}</tool_response>",
    rules: str = "",
    thought: str = "",
    opening: str = "",
) -> str:
    text = _TURNS.replace("RULES", rules).replace("RESULT", result).replace("CALL", call)
    return text.replace("THOUGHT", thought).replace("GENERATION_PROMPT", opening)


@dataclass(frozen=True)
class Format:
    """A template, its own tokens, and `written`: how its model calls for the weather.

    `begin` is the token that a template may write at the beginning of a text.
    """

    name: str
    template: str | None
    written: str = ""
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    parser: str | None = None
    begin: str | None = None


_JSON_CALL = '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}'
_HERMES = (
    '\n<tool_call>\n{"name": "{{ tool_call.name }}", '
    '"arguments": {{ tool_call.arguments | tojson }}}\n</tool_call>'
)
_XML_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_THINK_TOKENS = ("<think>", "</think>")
_ITEMS = "{% for key, value in tool_call.arguments.items() %}"

FORMATS = {
    each.name: each
    for each in (
        Format("no_template", None),
        Format("no_system", _template("", rules=_ALTERNATE).replace("'tool'", "'never'")),
        Format(
            "json_tools",
            _template(_HERMES, thought=_THINK),
            f"<tool_call>\n{_JSON_CALL}\n</tool_call>",
            plain=(*_XML_TOKENS, *_THINK_TOKENS),
        ),
        Format(
            "qwen3_coder",
            _template(
                "\n<tool_call>\n<function={{ tool_call.name }}>\n"
                + _ITEMS
                + "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}"
                "</function>\n</tool_call>",
                rules=_FIRST_ONLY,
                thought=_THINK,
                opening=_OPEN_THINK,
            ),
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
            "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
            plain=(*_XML_TOKENS, *_THINK_TOKENS),
        ),
        Format(
            "glm47",
            _template(
                "<tool_call>{{ tool_call.name }}"
                + _ITEMS
                + "<arg_key>{{ key }}</arg_key><arg_value>{{ value }}</arg_value>{% endfor %}"
                "</tool_call>",
                thought=_THINK,
            ),
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
            "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
            plain=(*_XML_TOKENS, *_THINK_TOKENS, "<arg_key>", "</arg_key>"),
        ),
        Format(
            "laguna",
            _template(
                "<tool_call>{{ tool_call.name }}{{ tool_call.arguments | tojson }}</tool_call>"
            ),
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
            "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
            parser="laguna",
        ),
        Format(
            "gemma4",
            _template(
                "<|tool_call>call:{{ tool_call.name ~ '{' }}"
                + _ITEMS
                + "{{ key }}:{{ value | tojson }}{% if not loop.last %},{% endif %}{% endfor %}"
                "}<tool_call|>"
            ),
            '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>',
            special=("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>'),
        ),
        Format(
            "function_gemma",
            _template(
                "<start_function_call>call:{{ tool_call.name ~ '{' }}"
                + _ITEMS
                + "{{ key }}:<escape>{{ value }}<escape>{% endfor %}}<end_function_call>",
                rules="{# developer #}",
            ),
            "<start_function_call>call:get_weather{city:<escape>Oslo<escape>,days:2}"
            "<end_function_call>",
            plain=("<start_function_call>", "<end_function_call>", "<escape>"),
        ),
        Format(
            "longcat",
            _template(
                "<longcat_tool_call>{{ tool_call.name }}"
                + _ITEMS
                + "<longcat_arg_key>{{ key }}</longcat_arg_key><longcat_arg_value>{{ value }}"
                "</longcat_arg_value>{% endfor %}</longcat_tool_call>"
            ),
            "<longcat_tool_call>get_weather<longcat_arg_key>city</longcat_arg_key>"
            "<longcat_arg_value>Oslo</longcat_arg_value><longcat_arg_key>days</longcat_arg_key>"
            "<longcat_arg_value>2</longcat_arg_value></longcat_tool_call>",
            plain=(
                "<longcat_tool_call>",
                "</longcat_tool_call>",
                "<longcat_think>",
                "</longcat_think>",
            ),
        ),
        Format(
            "pythonic",
            _template(
                "<|tool_call_start|>[{{ tool_call.name }}("
                + _ITEMS
                + "{{ key }}={{ value | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}"
                ")]<|tool_call_end|>"
            ),
            '<|tool_call_start|>[get_weather(city="Oslo", days=2)]<|tool_call_end|>',
            special=("<|tool_call_start|>", "<|tool_call_end|>"),
        ),
        Format(
            "kimi_k2",
            _template(
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ tool_call.name }}:0"
                "<|tool_call_argument_begin|>{{ tool_call.arguments | tojson }}<|tool_call_end|>"
                "<|tool_calls_section_end|>"
            ),
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
            '<|tool_call_argument_begin|>{"city": "Oslo", "days": 2}<|tool_call_end|>'
            "<|tool_calls_section_end|>",
            special=(
                "<|tool_calls_section_begin|>",
                "<|tool_calls_section_end|>",
                "<|tool_call_begin|>",
                "<|tool_call_end|>",
            ),
        ),
        Format(
            "kimi_k3",
            _template("{{ tool_call.name }}{{ tool_call.arguments | tojson }}"),
            '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
            '<|open|>json type="object"<|sep|>{"city": "Oslo", "days": 2}<|close|>json<|sep|>'
            "<|close|>call<|sep|><|close|>tools<|sep|>",
            special=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        ),
        Format(
            "minimax_m2",
            _template(
                '<minimax:tool_call>\n<invoke name="{{ tool_call.name }}">\n'
                + _ITEMS
                + '<parameter name="{{ key }}">{{ value }}</parameter>\n{% endfor %}'
                "</invoke>\n</minimax:tool_call>",
                opening="<think>\n",
            ),
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo'
            '</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
            plain=("<minimax:tool_call>", "</minimax:tool_call>", *_THINK_TOKENS),
        ),
        Format(
            "minicpm5",
            _template(
                '<function name="{{ tool_call.name }}">'
                + _ITEMS
                + '<param name="{{ key }}">{{ value }}</param>{% endfor %}</function>'
            ),
            '<function name="get_weather"><param name="city">Oslo</param>'
            '<param name="days">2</param></function>',
        ),
        Format(
            "muse_spark",
            _template(
                '<atem:function_calls><atem:invoke name="{{ tool_call.name }}">'
                + _ITEMS
                + '<atem:parameter name="{{ key }}">{{ value }}</atem:parameter>{% endfor %}'
                "</atem:invoke></atem:function_calls>"
            ),
            '<atem:function_calls><atem:invoke name="get_weather"><atem:parameter name="city">Oslo'
            '</atem:parameter><atem:parameter name="days">2</atem:parameter></atem:invoke>'
            "</atem:function_calls>",
        ),
        Format(
            "drops_thoughts",
            _template(
                _HERMES,
                thought="{% if loop.index0 > turns.asked and message.reasoning_content %}<think>\n"
                "{{ message.reasoning_content }}\n</think>\n\n{% endif %}",
                opening=_OPEN_THINK,
            )
            .replace("user=true", "asked=-1")
            .replace(
                "{%- for message in messages -%}",
                "{%- for message in messages -%}{%- if message.role == 'user' -%}"
                "{%- set turns.asked = loop.index0 -%}{%- endif -%}{%- endfor -%}"
                "{%- for message in messages -%}",
                1,
            ),
            f"<tool_call>\n{_JSON_CALL}\n</tool_call>",
            plain=(*_XML_TOKENS, *_THINK_TOKENS),
        ),
        Format(
            "hoists",
            _template(_HERMES, rules="{%- if message.role != 'system' -%}")
            .replace(
                "{%- for message in messages -%}",
                "{%- for message in messages if message.role == 'system' -%}<|system|>"
                "{{ message.content }}<|end|>{%- endfor -%}{%- for message in messages -%}",
                1,
            )
            .replace("{%- endfor -%}\n{%- if add", "{%- endif -%}{%- endfor -%}\n{%- if add"),
            f"<tool_call>\n{_JSON_CALL}\n</tool_call>",
            plain=_XML_TOKENS,
        ),
        Format(
            "mistral",
            _template(
                "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}"
                "{% endif %}[TOOL_CALLS]{{ tool_call.name }}[ARGS]"
                "{{ tool_call.arguments | tojson }}",
                rules=_ALTERNATE_WITH_TOOLS,
            ),
            '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo", "days": 2}',
            special=("[TOOL_CALLS]", "[ARGS]"),
        ),
    )
}


_HARMONY = """
{%- if tools -%}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<|start|>functions.{{ message.name }} to=assistant<|channel|>commentary<|message|>
{{- message.content }}<|end|>
{%- elif message.role == 'assistant' -%}
{%- if message.thinking -%}
<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>
{%- endif -%}
{%- if message.tool_calls -%}
{%- if message.content -%}
<|start|>assistant<|channel|>commentary<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- set call = message.tool_calls[0].function -%}
<|start|>assistant<|channel|>commentary to=functions.{{ call.name }} <|constrain|>json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- else -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- else -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""
HEADED = {
    "harmony": Format(
        "harmony",
        _HARMONY,
        special=(
            *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
            *("<|return|>", "<|call|>"),
        ),
    )
}
"""Formats of answers in messages."""


def load_format(each: Format, folder: Path) -> MLXTokenizer:
    """The tokenizer of a format, written to `folder` and loaded as a model's is."""
    source = find_folder("semantic-tiny")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in each.special])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in each.plain])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    if each.template is not None:
        config["chat_template"] = each.template
    if "<|return|>" in each.special:
        config["eos_token"] = "<|return|>"  # what ends a message ends no answer
    if each.begin is not None:
        config["bos_token"] = each.begin
    if each.parser is not None:
        config["tool_parser_type"] = each.parser
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return MLXTokenizer(cast(HuggingFaceTokenizer, load(folder)))


def chat_format(each: Format, folder: Path) -> MLXChatFormat:
    """The chat format of a format's tokenizer."""
    return MLXChatFormat(load_format(each, folder))
