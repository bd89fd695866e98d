"""One tenant's short chats beside the hostile work of another tenant, kind by kind.

`python -m benchmarks.hostile [--seconds S] [--agents N] [--connections N] [--kind NAME ...]
[--output DIR]`. A server has two tenants' keys. A process at nice 19 keeps connections of one
tenant busy with one kind of work, while the other tenant sends the same short chat again and again
and, once, a chat with a picture of more than a MiB. A first row is without hostile work. A wait
that outlasts the hostile work ends soon after it: its figure is a lower bound.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.server_process import ServerEndedError, ServerProcess, semantic_server
from experiments.harness.document import Json, Scalar
from experiments.harness.environment import ROOT
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from experiments.harness.stats import percentile

QUESTION = "Does one hostile tenant shut out another one?"
CRITERION = (
    "beside each kind of hostile work every chat of the other tenant is answered, p99 of its short "
    "ones is at most 1 s, and one with a picture of more than a MiB takes at most 2 s"
)
MOST_SECONDS, MOST_LARGE_SECONDS = 1.0, 2.0
SECONDS, AGENTS, CONNECTIONS = 20.0, 2000, 50
HOSTILE, OTHER, OPERATOR = "sk-hostile", "sk-other", "sk-operator"
CHAT = "/v1/chat/completions"
_NICE, _FILLING = 19, 16
_SETTLE, _LEAD, _GIVE_UP = 0.5, 2.5, 300.0
"""Seconds: of hostile work before the first chat, of it beyond theirs, of the longest wait."""
_SENTENCE = "The river ran past the old mill, and the miller slept through the noise of it. "
PROSE = _SENTENCE * (2_000_000 // len(_SENTENCE))
Row = dict[str, Scalar]


class Request(NamedTuple):
    """A request: a GET without a body. `declared` is a Content-Length that the body falls short of.

    The client never reads the reply unless it `reads`, and without a path it sends nothing at all.
    """

    path: str
    body: bytes | None = None
    declared: int | None = None
    agent: str = ""
    reads: bool = True

    def head(self, key: str) -> bytes:
        """The bytes before the body."""
        method, length = "GET" if self.body is None else "POST", len(self.body or b"")
        fields = [f"{method} {self.path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
        fields += [f"Authorization: Bearer {key}", f"Content-Length: {self.declared or length}"]
        fields += [f"X-Agent-ID: {self.agent}"] if self.agent else []
        return "".join(f"{field}\r\n" for field in [*fields, ""]).encode()


Make = Callable[[int], Request]
"""Makes the request of a number, which no other request of its kind has."""


def post(path: str, **fields: object) -> Request:
    """A request with a body of these fields."""
    return Request(path, json.dumps({"model": "default"} | fields).encode())


def said(*texts: object) -> list[dict[str, object]]:
    """A conversation that begins with a user's text."""
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def chat(messages: object, max_tokens: int = 1, agent: str = "", **fields: object) -> Request:
    """A request for a greedy answer."""
    asked = {"messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return post(CHAT, **asked, **fields)._replace(agent=agent)


def _same(make: Callable[[], Request]) -> Make:
    """Makes one request, once, for all numbers."""
    made = cache(make)
    return lambda _: made()


def _stalled(mib: int) -> Request:
    begun = post(CHAT, messages=said(PROSE)).body or b""
    return Request(CHAT, begun[:1_500_000], declared=mib << 20)


def _grammar(number: int, depth: int) -> Request:
    schema: dict[str, object] = {"type": "string", "maxLength": 10 + number}
    for level in range(depth):
        name, *others = names = [f"n{number}_{level}", *(f"p{i}" for i in range(6))]
        properties = {name: schema} | {other: {"type": "integer"} for other in others}
        schema = {"type": "object", "properties": properties, "required": names}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return chat(said("hi"), response_format=form)


def _embeddings(number: int) -> Request:
    texts = [f"text {i} of request {number}: {_SENTENCE}" for i in range(2048)]
    return post("/v1/embeddings", input=texts)


def _story(number: int, n_tokens: int, **fields: object) -> Request:
    return chat(said(f"Tell me story {number}."), n_tokens, "", ignore_eos=True, **fields)


_UNREAD = {"stream": True, "logprobs": True, "top_logprobs": 20}
KINDS: dict[str, Make] = {
    "lists": lambda _: Request("/v1/agents?limit=1000"),
    "lists of no match": lambda _: Request("/v1/agents?limit=1000&prefix=nothing"),
    "prose beyond the context": _same(lambda: chat(said(PROSE))),
    "spaces beyond the context": _same(lambda: chat(said(" " * 2_000_000))),
    "stalled bodies": _same(lambda: _stalled(15)),
    "stalled bodies, too large": _same(lambda: _stalled(30)),
    "grammars": lambda number: _grammar(number, 1),
    "deep grammars": lambda number: _grammar(number, 24),
    "templates": _same(lambda: chat(said(*"a" * 8001))),
    "exports": lambda number: Request(f"/v1/agents/hostile-{number % AGENTS}/export?tenant=none"),
    "embeddings": _embeddings,
    "metrics": lambda _: Request("/metrics"),
    "overviews": lambda _: Request("/v1/overview"),
    "pulls": lambda number: post("/api/pull", model=f"nowhere/model-{number}"),
    "loads": lambda number: Request(f"/v1/models/nowhere/model-{number}/load", b""),
    "tokenize": _same(lambda: post("/tokenize", prompt=PROSE)),
    "detokenize": _same(lambda: post("/detokenize", tokens=[*range(20, 220)] * 2500)),
    "count_tokens": _same(lambda: post("/v1/messages/count_tokens", messages=said(PROSE))),
    "many answers": lambda number: _story(number, 200),
    "silent connections": lambda _: Request("", reads=False),
    "unread streams": lambda number: _story(number, 1000, **_UNREAD)._replace(reads=False),
}


async def exchange(port: int, key: str, request: Request) -> str:
    """The status of the reply, which is read to its end; waits for ever if it is never read.

    Raises OSError when the connection breaks.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if request.path:
            writer.write(request.head(key) + (request.body or b""))
        if not request.reads:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            writer.transport.pause_reading()  # type: ignore[attr-defined]  # of a socket it has
            await asyncio.Event().wait()
        line = await reader.readline()
        while await reader.read(1 << 16):
            pass
        return line.split()[1].decode() if line else "closed"
    finally:
        writer.transport.abort()


async def generate(port: int, kind: str, connections: int, seconds: float) -> None:
    """The hostile process: print a line at the begin, and at the end how many got each status."""
    make, found, numbers = KINDS[kind], Counter[str](), itertools.count()
    make(next(numbers))
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds

    async def keep_busy() -> None:
        while loop.time() < until:
            try:
                async with asyncio.timeout_at(until):
                    status = await exchange(port, HOSTILE, make(next(numbers)))
            except OSError as error:
                status = "unanswered" if isinstance(error, TimeoutError) else "closed"
            found[status] += 1

    print("begun", flush=True)
    await asyncio.gather(*(keep_busy() for _ in range(connections)))
    print(json.dumps(found), flush=True)


HELLO = chat(said("hello"), 8, "other-hello")


@cache
def picture() -> Request:
    """A chat with a picture of more than a MiB in its history."""
    url = f"data:image/png;base64,{base64.b64encode(bytes(1 << 20)).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Look."}]
    return chat(said(parts, "I see.", "hello"), 8, "other-picture")


async def _timed(port: int, request: Request, later: float = 0.0) -> tuple[str, float]:
    """Status and seconds of a request of the other tenant."""
    await asyncio.sleep(later)
    began = time.perf_counter()
    try:
        async with asyncio.timeout(_GIVE_UP):
            status = await exchange(port, OTHER, request)
    except OSError as error:  # a TimeoutError too
        status = type(error).__name__
    return status, time.perf_counter() - began


async def measure(port: int, seconds: float) -> Row:
    """Short chats one after another, and a large one beside them."""
    large = asyncio.create_task(_timed(port, picture(), seconds / 5))
    until, waits, failed = time.perf_counter() + seconds, list[float](), 0
    while time.perf_counter() < until:
        status, taken = await _timed(port, HELLO)
        waits.append(1e3 * taken)
        failed += status != "200"
    status, taken = await large
    row: Row = {f"p{percent}_ms": round(percentile(waits, percent), 1) for percent in (50, 95, 99)}
    row |= {"max_ms": round(max(waits), 1), "failed": failed}
    return {"n": len(waits), **row, "large_s": round(taken, 2), "large": status}


async def beside(kind: str, port: int, connections: int, seconds: float) -> Row:
    """`measure` beside one kind of hostile work, and the seconds until a chat is quick again."""
    given = ("--generate", kind, "--port", str(port), "--seconds", str(seconds + _LEAD))
    generator = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.hostile", *given, "--connections", str(connections)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    if generator.stdout is None or not await generator.stdout.readline():
        raise ChildProcessError(f"the process of {kind} did not begin")
    await asyncio.sleep(_SETTLE)
    row = await measure(port, seconds)
    output, _ = await generator.communicate()
    got = ", ".join(f"{status}: {n}" for status, n in sorted(json.loads(output).items()))
    ended, taken = time.perf_counter(), _GIVE_UP
    while taken > MOST_SECONDS and time.perf_counter() < ended + _GIVE_UP:
        _, taken = await _timed(port, HELLO)
    after = round(time.perf_counter() - ended, 2)
    return row | {"after_s": after, "hostile": got}


async def fill(port: int, agents: int) -> None:
    """Save so many agents of the hostile tenant."""
    numbers = iter(range(agents))

    async def some() -> None:
        for number in numbers:
            status = await exchange(port, HOSTILE, chat(said("hi"), agent=f"hostile-{number}"))
            if status != "200":
                raise ServerEndedError(f"agent {number} was not saved: status {status}")

    await asyncio.gather(*(some() for _ in range(_FILLING)))


def all_kinds(server: ServerProcess, given: argparse.Namespace) -> Iterator[Row]:
    """A row for each kind, each after a start of the server, between two without hostile work."""
    server.start()
    asyncio.run(fill(server.port, given.agents))
    for kind in ("alone", *given.kind, "alone again"):
        server.stop()
        server.start()
        asyncio.run(_timed(server.port, HELLO))
        if kind in KINDS:
            found = beside(kind, server.port, given.connections, given.seconds)
        else:
            found = measure(server.port, given.seconds)
        row: Row = {"kind": kind} | asyncio.run(found)
        if server.ended:
            raise ServerEndedError(f"beside {kind}: {server.last_words()}")
        print(line(row), flush=True)
        yield row


def line(row: Row) -> str:
    """A row of the printed table."""
    names = ("n", "p50_ms", "p95_ms", "p99_ms", "max_ms", "failed", "large_s", "large", "after_s")
    figures = "".join(f"{row.get(name, '')!s:>9}" for name in names)
    return f"{row['kind']!s:<26}{figures}  {row.get('hostile', '')}"


def breaks(row: Row) -> bool:
    """Whether a row misses the criterion."""
    short, large = (float(str(row[name])) for name in ("p99_ms", "large_s"))
    is_late = short > 1e3 * MOST_SECONDS or large > MOST_LARGE_SECONDS
    return is_late or bool(row["failed"]) or row["large"] != "200"


def run(arguments: Sequence[str] = ()) -> Result:
    """The server, its hostile tenant's agents, and every kind."""
    given = _parser().parse_args(arguments)
    given.kind = given.kind or [*KINDS]
    shape = {name: vars(given)[name] for name in ("seconds", "agents", "connections")}
    started = Run.start("hostile", QUESTION, model="semantic-tiny", parameters=shape, seed=0)
    with TemporaryDirectory(prefix="semantic-benchmark-") as folder:
        server = semantic_server("semantic-tiny", Path(folder), *_flags(Path(folder)))
        try:
            rows = [*all_kinds(server, given)]
        finally:
            server.stop()
    missed: list[Json] = [row["kind"] for row in rows if breaks(row)]
    verdict = Verdict(CRITERION, 0, len(missed), passed=not missed)
    return started.finish(rows, {"kinds": len(rows) - 2, "missed": missed}, verdict)


def _flags(folder: Path) -> list[str]:
    import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
    from tests.support.embedding_model import write_embedding_model

    embedding = write_embedding_model(folder / "embedding")
    keys = ("--api-key", HOSTILE, "--api-key", OTHER, "--operator-key", OPERATOR)
    return [*keys, "--image-input", "note", "--embedding-model", str(embedding)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.hostile", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each kind")
    parser.add_argument("--agents", type=int, default=AGENTS)
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    parser.add_argument("--kind", action="append", choices=[*KINDS])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--generate", choices=[*KINDS], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Measure and write, or be the hostile process; 1 when the criterion is missed."""
    given = _parser().parse_args()
    if given.generate is not None:
        os.nice(_NICE)
        asyncio.run(generate(given.port, given.generate, given.connections, given.seconds))
        return 0
    result = run(sys.argv[1:])
    given.output.mkdir(parents=True, exist_ok=True)
    result.write(given.output / "hostile.json")
    print(json.dumps(result.summary))
    return int(not result.verdict.passed)


if __name__ == "__main__":
    raise SystemExit(main())
