"""Pages have what they include; a page that differs, or names what is not there, is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from semantic.cli.main import app
from semantic_server.http.app import create_app
from tools import references
from tools.pages import ROOT, URL, PageError, filled, main


def region(mark: str, content: str = "") -> str:
    return f"before\n<!-- include:{mark} -->\n{content}<!-- /include -->\nafter\n"


def test_a_file_is_included_whole() -> None:
    found = filled(region("file examples/debate.py", "what was here\n"))
    assert found.startswith("before\n<!-- include:file examples/debate.py -->\n```python\n")
    assert found.endswith("    main(*sys.argv[1:])\n```\n<!-- /include -->\nafter\n")
    assert "what was here" not in found
    assert filled(found) == found


def test_what_a_test_returns_becomes_what_a_reader_types() -> None:
    found = filled(region("call tests/clients/check_llamaindex.py::make"))
    assert "from llama_index.llms.openai_like import OpenAILike\n\nmodel = OpenAILike(" in found
    assert f'    api_base="{URL}/v1",\n' in found
    assert '    model="default",\n' in found
    assert "more" not in found
    assert "talk" not in found


def test_a_part_of_a_file_is_without_its_marks() -> None:
    found = filled(region("part tests/clients/ai_sdk.cjs::models"))
    assert f"```js\nconst settings = {{ baseURL: `{URL}/v1`" in found
    assert "[models]" not in found


def test_an_agent_is_set_up_as_the_tests_do() -> None:
    found = filled(region("setup continue"))
    assert f"apiBase: {URL}/v1" in found
    assert "cn --config ~/config.yaml" in found
    assert "one-sentence" not in found


def test_settings_are_those_that_are_written() -> None:
    found = filled(region("settings codex"))
    assert "`~/.codex/config.toml`" in found
    assert f'base_url = "{URL}/v1"' in found


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("nothing", "expected one of file,"),
        ("file docs/no_such.py", "cannot read docs/no_such.py"),
        ("part tests/clients/ai_sdk.cjs::no_such", "has no part 'no_such'"),
        ("call tests/clients/check_langchain.py::test_chat", "no function 'test_chat'"),
        ("setup nobody", "no agent 'nobody'"),
        ("settings nobody", "no coding agent 'nobody'"),
    ],
)
def test_a_mark_that_names_nothing_is_refused(mark: str, message: str) -> None:
    with pytest.raises(PageError, match=message):
        filled(region(mark))


def test_a_page_that_differs_is_found_and_then_filled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(region("settings claude"))
    assert main(["--check", str(page)]) == 1
    assert "differs" in capsys.readouterr().out
    assert main([str(page)]) == 0
    assert main(["--check", str(page)]) == 0
    page.write_text(region("settings nobody"))
    assert main(["--check", str(page)]) == 1


def test_the_reference_has_every_command_and_option() -> None:
    program = get_command(app)
    assert isinstance(program, TyperGroup)
    index = references.command_line("")
    for name, command in program.commands.items():
        assert f"[semantic {name}](cli/{name}.md)" in index
        text = references.command_line(name)
        page = (ROOT / "docs" / "cli" / f"{name}.md").read_text(encoding="utf-8")
        assert text in page
        groups = command.commands if isinstance(command, TyperGroup) else {}
        for below in groups:
            assert f"## semantic {name} {below}\n" in text
        for one in groups.values() or [command]:
            options = [option for option in one.params if option.param_type_name == "option"]
            for option in options:
                is_said = f"`{option.opts[0]}`" in text or "semantic serve`](serve.md): all" in text
                assert is_said or getattr(option, "hidden", False), (name, option.opts)


def test_options_that_other_pages_have_are_named_there() -> None:
    assert "    semantic models ls [OPTIONS] [FOLDER]...\n" in references.command_line("models")
    assert "    semantic run [OPTIONS] [PROMPT]\n" in references.command_line("run")
    serve = references.command_line("serve")
    assert "| `--max-batch`, `--max-num-seqs` | number | Maximum requests in one batch. |" in serve
    assert "`--pool-gb` | number" not in serve
    assert "[Common options](../cli.md): `--model`, `--pool-gb`" in references.command_line("chat")
    assert "`semantic serve`](serve.md): all." in references.command_line("service")


def test_the_reference_has_every_route_and_its_fields() -> None:
    schema = create_app().openapi()
    text = references.http(schema)
    for path in schema["paths"]:
        assert f" {path}\n" in text
    assert "| `checkpoint` | string, required |" in text
    assert "| 421 | " in references.statuses(schema)
