"""Chat templates are part of downloaded models: one that never ends or fills memory is refused."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from semantic.adapters.mlx.text import bounded_template
from semantic.adapters.mlx.text.bounded_template import BoundedEnvironment
from semantic.adapters.mlx.text.chat_format import MLXChatFormat
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from semantic.composition.named_models import load_tokenizer
from semantic.domain.errors import InvalidRequestError
from tests.support.chat_templates import FORMATS, load_format

HELLO = [{"role": "user", "content": "hi"}]
ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
]
HUGE = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'x' * 10**9 }}",
    "{{ [0] * 10**9 }}",
    "{% set n = namespace(x=2) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{{ ''|center(10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**9) }}",
    "{{ 1|round(10**9, 'ceil') }}",
    "{{ lipsum(10**9) }}",
    "{{ ('x' * 10**6).replace('x', 'y' * 10**6) }}",
    "{{ ('x' * 10**6)|replace('x', 'y' * 10**6) }}",
    "{% set s = 'x' * 10**7 %}{% for i in range(9) %}{{ s }}{% endfor %}",
    "{{ [1]|tojson(indent=10**9) }}",
    "{{ (['x' * 10**6] * 10**6)|tojson }}",
    "{% set l = ['x' * 10**6] * 10**6 %}{{ l }}",
]
MULTIPLIED = [
    "([1] * 100)|tojson(indent=1000)",
    "([1] * 100)|tojson(indent='x' * 1000)",
    "([1] * 100)|tojson(separators=('x' * 1000, ':'))",
    "(['x' * 1000] * 100)|tojson",
    "({'a': [['x' * 1000] * 10] * 10})|tojson",
    "(['x' * 1000] * 100)|string",
    "({'a': ['x' * 1000] * 100})|upper",
    "'%s' % (['x' * 1000] * 100,)",
    "'{}'.format(['x' * 1000] * 100)",
    "([['x' * 1000] * 10] * 10)|join(',')",
    "(['x' * 1000] * 100)|map('trim')|join",
    "','.join((['x' * 1000] * 100)|map('trim'))",
]


def model_with(template: str, folder: Path) -> MLXTokenizer:
    folder.mkdir()
    load_format(FORMATS["qwen3_coder"], folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path.write_text(json.dumps({**config, "chat_template": template}))
    (folder / "config.json").write_text("{}")
    return load_tokenizer(str(folder))


@pytest.mark.parametrize("template", ENDLESS)
def test_an_endless_template_is_refused_at_the_start_and_in_a_request(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_template, "_SECONDS", 0.02)
    tokenizer = model_with(template, tmp_path / "model")
    with pytest.raises(InvalidRequestError, match="takes longer than"):
        MLXChatFormat(tokenizer)
    with pytest.raises(InvalidRequestError, match="takes longer than"):
        tokenizer.render_chat(HELLO)


@pytest.mark.parametrize("template", HUGE)
def test_a_template_that_fills_memory_is_refused(template: str, tmp_path: Path) -> None:
    tokenizer = model_with(template, tmp_path / "model")
    with pytest.raises(InvalidRequestError, match="the chat template"):
        MLXChatFormat(tokenizer)


@pytest.mark.parametrize("value", MULTIPLIED)
def test_a_part_that_a_list_has_many_times_is_refused_before_it_becomes_text(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_template, "_CHARACTERS", 1 << 14)
    template = "{% set text = " + value + " %}{{ text|length }}"
    with pytest.raises(InvalidRequestError, match="more than 16384 characters"):
        model_with(template, tmp_path / "model").render_chat(HELLO)


KEPT = [
    "n.l + [m * 1000]",
    "n.l + [m ~ '!']",
    "n.l + [m[1:]]",
    "n.l + [m|upper]",
    "n.l + [m.upper()]",
    "n.l + [m.split(',')]",
    "n.l + [m|list]",
    "[n.l, 1, 2, 3]",
    "[n.l]",
    "(n.l, {'a': n.l})",
]


@pytest.mark.parametrize("kept", KEPT)
def test_a_template_that_keeps_all_that_it_makes_is_refused(
    kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_template, "_MADE", 1 << 16)
    template = (
        "{% set n = namespace(l=[]) %}{% set m = 'x,' * 500 %}"
        "{% for i in range(9999) %}{% set n.l = " + kept + " %}{% endfor %}"
    )
    with pytest.raises(InvalidRequestError, match="more than 65536 characters in all"):
        model_with(template, tmp_path / "model").render_chat(HELLO)


def test_a_template_that_would_take_all_memory_takes_little(tmp_path: Path) -> None:
    template = (
        "{% set n = namespace(l=[]) %}{% for i in range(99999) %}"
        "{% set n.l = n.l + ['x' * 10**7] %}{% endfor %}"
    )
    tokenizer = model_with(template, tmp_path / "model")
    tracemalloc.start()
    with pytest.raises(InvalidRequestError, match="characters in all"):
        MLXChatFormat(tokenizer)
    assert tracemalloc.get_traced_memory()[1] < 1 << 29
    tracemalloc.stop()


@pytest.mark.parametrize("grown", ["n.x + n.x", "n.x ~ n.x"])
def test_a_text_that_doubles_is_refused(
    grown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_template, "_CHARACTERS", 1 << 12)
    template = (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = "
        + grown
        + " %}{% endfor %}"
    )
    with pytest.raises(InvalidRequestError, match="more than 4096 characters"):
        model_with(template, tmp_path / "model").render_chat(HELLO)


def test_what_templates_do_every_day_is_as_in_the_sandbox(tmp_path: Path) -> None:
    template = (
        "{{ '%d'|format(1) }} {{ '{:>3}'.format('x') }} {{ 'ab'.replace('a', 'b') }} "
        "{{ ['a', 'b']|join(',') }} {{ 3 * 4 }} {{ 'a' ~ 1 ~ none ~ missing }} {{ 2 ** 10 }} "
        "{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% endfor %}"
        "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('y') }} {{ '%s' % 'z' }} {{ '-' * 3 }}"
        " {{ '{{a: {}}}'.format(2) }} {{ {'a': [1, 'é']}|tojson }} {{ [1]|tojson(indent=2) }}"
        " {{ [1, {'b': 2}] }} {{ 'abcd'[1:3] }}{{ 'abcd'[::-1] }}{{ [1, 2, 3][:-1] }}"
    )
    tokenizer = model_with(template, tmp_path / "model")
    text = tokenizer.decode(tokenizer.render_chat(HELLO))
    assert text == (
        "1   x bb a,b 12 a1None 1024 1True1<y> z --- {a: 2}"
        ' {"a": [1, "é"]} [\n  1\n]'
        " [1, {'b': 2}] bcdcba[1, 2]"
    )


def test_a_number_of_the_chat_is_no_width(tmp_path: Path) -> None:
    """Such as a time in the arguments of a call."""
    template = (
        "{% macro f(x) %}<{{ x }}>{% endmacro %}{% set n = namespace(x=messages[0].content|int) %}"
        "{{ n.x|string }} {{ n.x|int }} {{ n.x|tojson }} {{ n.x|default(0) }} {{ f(n.x) }} "
        "{{ [n.x]|map('string')|join }} {{ '{}'.format(n.x) }} {{ '%d'|format(n.x) }}"
    )
    tokenizer = model_with(template, tmp_path / "model")
    text = tokenizer.decode(tokenizer.render_chat([{"role": "user", "content": "1763856000"}]))
    assert text.replace("<", "").replace(">", "").split() == ["1763856000"] * 8


def test_a_template_that_includes_another_is_refused_in_words(tmp_path: Path) -> None:
    tokenizer = model_with("{% include 'other' %}", tmp_path / "model")
    with pytest.raises(InvalidRequestError, match="the chat template refused the messages: no loa"):
        tokenizer.render_chat(HELLO)


def test_transformers_compiles_templates_in_the_bounded_environment() -> None:
    """What is replaced inside of transformers is still where it was."""
    from transformers.utils import chat_template_utils

    compiled = chat_template_utils._compile_jinja_template("{{ messages }}")
    assert isinstance(compiled.environment, BoundedEnvironment)
