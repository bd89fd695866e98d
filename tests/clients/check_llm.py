"""The command `llm`: an answer, and the conversation continued by another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients import talk

Ask = Callable[..., str]


@pytest.fixture
def llm(url: str, tmp_path: Path) -> Ask:
    """Runs the command with a folder of its own, in which the server's model is named."""
    models = [
        {
            "model_id": "tiny",
            "model_name": talk.MODEL,
            "api_base": f"{url}/v1",
            "supports_schema": True,
        }
    ]
    text = json.dumps(models)  # which is YAML
    (tmp_path / "extra-openai-models.yaml").write_text(text, encoding="utf-8")
    program = Path(sys.executable).with_name("llm")
    environment = os.environ | {"LLM_USER_PATH": str(tmp_path)}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            (program, *arguments), env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    return run


@pytest.mark.parametrize("flags", [(), ("--no-stream",)])
def test_an_answer(llm: Ask, flags: tuple[str, ...]) -> None:
    assert llm("-m", "tiny", "--key", "none", *flags, talk.HELLO) == talk.HELLO_ANSWER


def test_a_conversation_goes_on_from_the_cache(llm: Ask) -> None:
    llm("-m", "tiny", "--key", "none", talk.HELLO)
    assert llm("-c", "--key", "none", talk.NAME) == talk.NAME_ANSWER
    first, second = json.loads(llm("logs", "-n", "2", "--json"))
    held = json.loads(second["token_details"])["prompt_tokens_details"]["cached_tokens"]
    assert held >= first["input_tokens"]


def test_a_schema(llm: Ask) -> None:
    schema = json.dumps(talk.CITY_SCHEMA)
    room = str(talk.ROOM_FOR_JSON)
    flags = ("-m", "tiny", "--key", "none", "-o", "max_tokens", room, "--schema", schema)
    found = json.loads(llm(*flags, talk.WEATHER))
    assert found["city"] in talk.CITIES
