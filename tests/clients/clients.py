"""The clients that are checked: what is installed for each, and which file checks it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Client:
    """A client's `name`, what an environment for it `needs`, and the `check` that it must pass.

    `npm` are packages of a client that runs in Node, each `name@version`. `wires` are those on
    which its SDK, named as the client up to a hyphen, holds sessions with models of families.
    """

    name: str
    needs: tuple[str, ...]
    check: str
    npm: tuple[str, ...] = ()
    wires: tuple[str, ...] = ()

    @property
    def pins(self) -> Path:
        """The file with every package of the environment at one version."""
        return HERE / "requirements" / f"{self.name}.txt"

    @property
    def path(self) -> Path:
        """The file with the checks."""
        return HERE / self.check


CLIENTS: Final = (
    Client("openai-2", ("openai==2.54.0",), "check_openai.py", wires=("chat", "responses")),
    Client("openai-3", ("openai==3.52.0",), "check_openai.py", wires=("chat", "responses")),
    Client("anthropic", ("anthropic==2.11.0",), "check_anthropic.py", wires=("messages",)),
    Client("langchain-openai", ("langchain-openai==1.7.3",), "check_langchain.py"),
    Client("ollama", ("ollama==0.6.3",), "check_ollama.py", wires=("ollama",)),
    Client("langchain-ollama", ("langchain-ollama==1.1.0",), "check_langchain_ollama.py"),
    Client("open-webui", ("open-webui==0.12.4",), "check_open_webui.py"),
    Client("encoders", ("mlx-embeddings==0.1.0", "-r requirements.txt"), "check_encoders.py"),
    Client("mem0", ("mem0ai==2.2.1", "ollama==0.6.3"), "check_mem0.py"),
    Client("openai-agents", ("openai-agents==0.24.0",), "check_openai_agents.py"),
    Client("pydantic-ai", ("pydantic-ai-slim[openai,anthropic]==2.68.0",), "check_pydantic_ai.py"),
    Client("litellm", ("litellm==1.106.2", "mcp"), "check_litellm.py"),
    Client("instructor", ("instructor==1.17.0",), "check_instructor.py"),
    Client("llamaindex", ("llama-index-llms-openai-like==0.8.1",), "check_llamaindex.py"),
    Client("smolagents", ("smolagents[openai]==1.26.0",), "check_smolagents.py"),
    Client("crewai", ("crewai==1.15.30",), "check_crewai.py"),
    Client("google-adk", ("google-adk==2.13.0", "litellm==1.106.2", "mcp"), "check_adk.py"),
    Client("dspy", ("dspy==3.4.1",), "check_dspy.py"),
    Client("llm", ("llm==0.36",), "check_llm.py"),
    Client("aider", ("aider-chat==0.86.2",), "check_aider.py"),
    Client(
        "ai-sdk",
        (),
        "check_ai_sdk.py",
        npm=(
            "ai@6.0.324",
            "@ai-sdk/openai-compatible@2.0.91",
            "@ai-sdk/openai@3.0.141",
            "@ai-sdk/anthropic@3.0.139",
            "zod@4.6.7",
        ),
    ),
    Client("lm-eval", ("lm-eval[api]==0.4.13", "transformers"), "check_lm_eval.py"),
)

RUNNER: Final = "pytest"
"""What runs the checks, in every environment."""
