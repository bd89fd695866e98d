"""`semantic doctor`: checks versions, device, store and model."""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from semantic import __version__
from semantic.bootstrap import build_engine, load, make_pool
from semantic.cli.conversation import message
from semantic.cli.driving import Driver
from semantic.cli.edge import EXIT_CHECK_FAILED
from semantic.cli.options import AsJson, ModelsOptions, option
from semantic.cli.report import Json, show_bytes, show_seconds, to_line
from semantic.composition.engine_settings import ADAPTERS, DEFAULT_MODEL, NamedAdapter, Settings
from semantic.composition.framework import (
    blas_kernel,
    blas_status,
    free_memory,
    kernel_folder,
    read_device,
)
from semantic.composition.memory_shares import default_process_bytes, promised
from semantic.composition.named_models import describe_model, find_model, model_name, own_names
from semantic.composition.process_stores import (
    fleet_secret,
    open_disk,
    require_shared,
    store_folder,
)
from semantic.domain.errors import InvalidRequestError, SemanticError, StoreError
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import Lane, ModelCacheSpec
from semantic.ports.generation import at_once

if TYPE_CHECKING:
    from semantic.adapters.mlx.backend import MLXBackend
    from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
    from semantic.serve import ServeSettings
    from semantic.serve_models import ModelsPlan

Verdict = Literal["ok", "warning", "failed"]

SUPPORTED = {"mlx": ((0, 32, 4), (0, 33)), "mlx-lm": ((0, 32, 2), (0, 33))}
"""The lowest supported version of each package, and the lowest unsupported one above it."""

_NAME = "Ada"
_QUESTION = (
    message("user", f"My name is {_NAME}."),
    message("assistant", f"Nice to meet you, {_NAME}."),
    message("user", "What is my name?"),
)
_ANSWER_TOKENS = 32
_LENGTHS = (1024, 8192, 32_768, 131_072)
"""Lengths of agents' histories in the report, in tokens."""
_TRIED_BYTES = 1 << 20
"""The number of bytes that the check writes to the store's disk."""
_MARKS: dict[Verdict, str] = {"ok": "ok  ", "warning": "warn", "failed": "FAIL"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `advice` is "" if all is well."""

    name: str
    verdict: Verdict
    detail: str
    advice: str = ""


def doctor(
    models: ModelsOptions,
    adapters: Annotated[list[str] | None, option(ADAPTERS)] = None,
    rows: Annotated[
        bool,
        typer.Option("--rows", help="Print which numbers of rows give a layer's rows equal bits."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check this machine and whether everything works; exits with 1 if something does not.

    For several models, or adapters, it also says how many a server can have loaded at once.
    """
    served = _served(models, adapters or ())
    findings = []
    for finding in examine(served, rows=rows):
        findings.append(finding)
        if not as_json:
            typer.echo("\n".join(_lines(finding)))
    if as_json:
        typer.echo(to_line(to_json(findings)))
    if any(finding.verdict == "failed" for finding in findings):
        raise typer.Exit(EXIT_CHECK_FAILED)


def examine(models: Sequence[ServeSettings], *, rows: bool = False) -> Iterator[Finding]:
    settings = models[0].engine
    yield Finding("semantic", "ok", __version__)
    yield Finding("python", "ok", platform.python_version())
    yield Finding("platform", "ok", f"{platform.system()} {platform.machine()}")
    yield from (check_version(package) for package in SUPPORTED)
    try:
        yield from (check() for check in (check_kernels, check_device, check_memory, check_blas))
    except SemanticError as error:
        yield Finding("device", "failed", str(error))
        return
    yield check_identity(settings)
    yield check_store(settings)
    if settings.remote is not None:
        yield check_remote(settings)
    yield check_embedded_model()
    yield from check_models(models, rows=rows)


def check_version(package: str) -> Finding:
    from importlib.metadata import PackageNotFoundError, version

    first, below = SUPPORTED[package]
    supported = f">={_dotted(first)},<{_dotted(below)}"
    try:
        installed = version(package)
    except PackageNotFoundError:
        return Finding(package, "failed", "not installed", f"install {package}{supported}")
    if first <= _numbers(installed) < below:
        return Finding(package, "ok", f"{installed} (supported: {supported})")
    return Finding(package, "warning", installed, f"not supported; install {package}{supported}")


def check_device() -> Finding:
    """Report the device. Raises OperatorError if MLX is not usable."""
    device = read_device()
    return Finding(
        "device", "ok", f"{device.kind}, {device.name}, {show_bytes(device.memory_bytes)} of memory"
    )


def check_memory() -> Finding:
    """Report the memory that a server's process may use. Raises OperatorError if MLX fails."""
    device = read_device()
    promise = show_bytes(default_process_bytes(device))
    free = show_bytes(device.free_bytes)
    return Finding("memory", "ok", f"{promise} for a server's process, of {free} that are free")


def check_blas() -> Finding:
    status = blas_status()
    if status == "missing":
        return Finding(
            "blas",
            "warning",
            "OpenBLAS is missing",
            "install it (Debian, Ubuntu: libopenblas0-pthread); without it matrix products in "
            "fp32 are up to 20 times slower on a CPU",
        )
    if status == "too late":
        return Finding(
            "blas",
            "warning",
            "MLX was imported before semantic, so OpenBLAS did not load",
            "import semantic.adapters.mlx before mlx",
        )
    return Finding("blas", "ok", status)


def check_kernels() -> Finding:
    """Report MLX's folder for kernels. Raises BackendError if other users can write to it."""
    return Finding("kernels", "ok", f"compiled in {kernel_folder()}, for this user alone")


def check_identity(settings: Settings) -> Finding:
    """Report the chip, the BLAS kernel and the secret. The identity of blocks depends on them."""
    try:
        owner = "the store's own" if fleet_secret(settings) is None else "the fleet's"
    except InvalidRequestError as error:
        return Finding("identity", "failed", str(error))
    chip = f"{read_device().chip}, {blas_kernel()}; secret: {owner}"
    if not settings.any_chip:
        return Finding("identity", "ok", chip)
    return Finding(
        "identity",
        "warning",
        f"any chip (here {chip})",
        "blocks of other kinds of chips differ in their last bits, and answers may",
    )


def check_store(settings: Settings) -> Finding:
    """Check that the store on disk works."""
    if not settings.use_disk:
        return Finding("store", "ok", "not on disk: caches end with the program")
    advice = "caches stay in memory only; --store names another folder"
    folder = store_folder(settings)
    try:
        with closing(open_disk(settings)) as disk:
            (tier,) = disk.stats()
        with tempfile.TemporaryFile(dir=folder) as tried:
            tried.write(bytes(_TRIED_BYTES))
            os.fsync(tried.fileno())
        free = shutil.disk_usage(folder).free
    except StoreError as error:
        return Finding("store", "warning", str(error), advice)
    except OSError as error:
        return Finding("store", "warning", f"cannot write in {folder}: {error.strerror}", advice)
    used = f"{show_bytes(tier.n_bytes)} of {show_bytes(tier.max_bytes)}"
    detail = f"{folder}, agents {tier.n_agents}, {used}, {show_bytes(free)} free on its disk"
    return Finding("store", "ok", detail)


def check_remote(settings: Settings) -> Finding:
    """Check that the fleet's object store works."""
    name = "remote store"
    try:
        seconds, has_versions = require_shared(settings).try_out()
    except SemanticError as error:
        return Finding(name, "failed", str(error), "URL, credentials and permissions decide it")
    found = f"written, read and deleted in {show_seconds(seconds)}"
    if has_versions:
        kept = "but the bucket keeps old versions: it frees nothing, and deletes no tenant's key"
        return Finding(name, "warning", f"{found}, {kept}", "use a bucket without versions")
    return Finding(name, "ok", found)


def check_embedded_model() -> Finding:
    """Check that the model inside the package loads and answers a question."""
    name = "embedded model"
    try:
        app = build_engine(Settings())
        driver = Driver(app.engine)
        uid = driver.submit("doctor", app.tokenizer.render_chat(_QUESTION), _ANSWER_TOKENS)
        done = driver.finish(uid)
        app.engine.close()
    except SemanticError as error:
        return Finding(name, "failed", str(error), "install the package again")
    answer = f"{DEFAULT_MODEL} says {done.text!r}"
    if _NAME not in done.text:
        return Finding(name, "failed", f"{answer}, expected {_NAME!r}", "install the package again")
    return Finding(name, "ok", f"{answer} after {show_seconds(driver.timings[uid].total)}")


def _served(given: ModelsOptions, adapters: Sequence[str]) -> list[ServeSettings]:
    from semantic.serve import ServeSettings, with_adapters

    engines = {name: given.settings_of(name) for name in given.model or (DEFAULT_MODEL,)}
    models = [
        ServeSettings(engine, own_names(engine.model, name)) for name, engine in engines.items()
    ]
    return [one for group in with_adapters(models, adapters) for one in group]


def check_models(models: Sequence[ServeSettings], *, rows: bool = False) -> Iterator[Finding]:
    """Check each model, then all models together."""
    from semantic.serve_models import ModelsSettings, plan_models

    if len(models) == 1:
        yield from check_model(models[0].engine, rows=rows)
        return
    engines = [one.engine for one in models]
    try:
        engine = promised(engines[0], tuple(one.model for one in engines[1:]))
        plan = plan_models(ModelsSettings([replace(models[0], engine=engine), *models[1:]]))
        engines, together = [one.settings.engine for one in plan.models], check_together(plan)
    except SemanticError as error:
        together = Finding("together", "failed", str(error))
    for own in engines:
        if own.adapter is None:
            yield from check_model(own, rows=rows)
            free_memory()
        else:
            yield check_adapter(own.model, own.adapter)
    yield together


def check_together(plan: ModelsPlan) -> Finding:
    """Check that each of several models fits by itself."""
    most, n_models = show_bytes(plan.capacity), len(plan.models)
    for one in plan.models:
        alone = one.weights.n_bytes + one.n_bytes
        if alone > plan.capacity:
            needed = f"{one.settings.names[0]} needs {show_bytes(alone)} with its pool"
            advice = "choose a smaller --pool-gb, or run fewer other programs"
            return Finding("together", "failed", f"{needed}, but models may use {most}", advice)
    needed = f"{show_bytes(plan.n_bytes)} with their pools, of {most} that models may use"
    if plan.n_bytes <= plan.capacity:
        return Finding("together", "ok", f"all {n_models} models at once: {needed}")
    waits = "a request for another one unloads the least recently used"
    return Finding("together", "ok", f"not all {n_models} models at once, {needed}: {waits}")


def check_model(settings: Settings, *, rows: bool = False) -> Iterator[Finding]:
    """Check that the model loads, and report its cache. `rows` reports its classes of rows, too."""
    try:
        model, tokenizer = load(
            settings.model, any_chip=settings.any_chip, exact_batch=settings.exact_batch,
            kv_bits=settings.kv_bits, kv_bits_force=True,
        )  # fmt: skip
        spec = model.cache_spec()
        pool: BlockPool = make_pool(settings, spec)
    except SemanticError as error:
        yield Finding("model", "failed", str(error))
        return
    yield Finding("model", "ok", f"{settings.model}, {spec.n_layers} layers")
    yield from check_weights(settings.model)
    yield check_calls(tokenizer)
    yield Finding("ragged caches", "ok", _ragged(model.ragged_layers))
    yield check_caches(model)
    yield from check_bits(model, tokenizer, pool, force=settings.kv_bits_force)
    yield check_lane(model.lane)
    yield check_drafts(model.drafts_problem, settings)
    if rows:
        yield from check_rows(model)
    if spec.reusable_tokens is not None:
        yield Finding(
            "reuse",
            "warning",
            f"only the first {spec.reusable_tokens} tokens: beyond them this model's keys depend "
            "on where a prompt divides",
            "the engine computes longer prompts again from there, so that answers are exact",
        )
    yield Finding("pool", "ok", _budget(pool, spec))
    yield check_fit(pool, model)


def check_weights(model: str) -> Iterator[Finding]:
    """Report unused weights in the model's folder."""
    from semantic.adapters.mlx.model.fingerprint import weight_files
    from semantic.adapters.mlx.model.provider import find_folder

    folder = find_folder(model)
    others = sorted({*folder.glob("*.safetensors")} - {*weight_files(folder)})
    if others:
        names = ", ".join(path.name for path in others)
        advice = "the index names the weights; delete other files if nothing else needs them"
        yield Finding("weights", "warning", f"ignored in {folder}: {names}", advice)


def check_calls(tokenizer: MLXTokenizer) -> Finding:
    """Report the formats of tool calls and reasoning that the program reads."""
    from semantic.adapters.mlx.text.chat_format import MLXChatFormat

    found = MLXChatFormat(tokenizer)
    return Finding("calls", "warning" if found.tools == "unknown" else "ok", found.calls)


def check_fit(pool: BlockPool, model: MLXBackend) -> Finding:
    """Report the longest possible context, and the number of agents that fit in the pool."""
    from semantic.adapters.mlx.kv_cache.model_spec import read_context
    from semantic.serve import context_limit

    longest = context_limit(pool, read_context(model.model), None)
    lengths = [n_tokens for n_tokens in _LENGTHS if n_tokens <= longest] or [longest]
    agents = ", ".join(
        f"{pool.most_holders(pool.spec.blocks_for(n_tokens))} agents of {n_tokens} tokens"
        for n_tokens in lengths
        if n_tokens
    )
    if not longest:
        advice = "choose a larger --pool-gb, or run fewer other programs"
        return Finding("fits", "warning", "the pool holds no block of 256 tokens", advice)
    detail = f"contexts of up to {longest} tokens; in the pool {agents}, others in the store"
    return Finding("fits", "ok", detail)


def check_adapter(model: str, adapter: NamedAdapter) -> Finding:
    """Check that an adapter fits the model, and report its memory."""
    try:
        found = describe_model(find_model(model), adapter=adapter.folder).adapter
    except SemanticError as error:
        return Finding("adapter", "failed", str(error))
    if found is None:
        return Finding("adapter", "failed", f"{adapter.folder} is not an adapter")
    name, size = adapter.named(model_name(model)), show_bytes(found.n_bytes)
    return Finding("adapter", "ok", f"{name}, {found.words}, {size} on top of the model's weights")


def check_caches(model: MLXBackend) -> Finding:
    """Report how this device stores the caches of a batch."""
    name = "caches"
    if model.in_pages:
        return Finding(name, "ok", "in pages")
    if not model.together:
        return Finding(
            name,
            "warning",
            "one sequence after another: this model's answers in a batch differ from those alone",
            "answers are exact; while n requests run, each has 1/n of the tokens per second",
        )
    if not all(model.ragged_layers):
        return Finding(name, "ok", "padded by mlx-lm")
    form = "one by one (ragged)" if model.pads is None else "padded once a batch is stable"
    return Finding(name, "ok", form)


def check_bits(
    model: MLXBackend, tokenizer: MLXTokenizer, pool: BlockPool, *, force: bool
) -> Iterator[Finding]:
    """Report what caches of 8 bits change and save. Notes the change for servers."""
    from semantic.adapters.mlx.kv_cache.model_spec import read_spec
    from semantic.adapters.mlx.model.cache_quality import finding_quality

    before = read_spec(model.model)
    if before is None or before == pool.spec:
        return
    found = at_once(finding_quality(model.model, model.model_id, tokenizer))
    bad: Verdict = "warning" if force else "failed"
    advice = "" if found.is_good else "use 16 bits, or --kv-bits-force"
    yield Finding("8 bits", "ok" if found.is_good else bad, str(found), advice)
    kinds = []
    for kind in dict.fromkeys(before.layer_types):
        layers = [one is kind for one in before.layer_types]
        new, old = pool.spec.bytes_of(layers), before.bytes_of(layers)
        kinds.append(f"{show_bytes(new)} of {show_bytes(old)} in {kind} layers")
    plain: BlockPool = BlockPool(before, pool.total_blocks, max_bytes=pool.max_bytes)
    new, old = (one.most_holders(before.blocks_for(_LENGTHS[1])) for one in (pool, plain))
    fit = f"{new} agents of {_LENGTHS[1]} tokens fit instead of {old}"
    yield Finding("bytes", "ok", f"256 tokens take {', '.join(kinds)}; {fit}")


def check_lane(lane: Lane) -> Finding:
    """Report whether an answer has the same bits in any batch."""
    name = "exact batch"
    if lane.problem:
        advice = "an answer may depend on the other requests of its steps; see --exact-batch"
        return Finding(name, "ok", f"no: {lane.problem}", advice)
    padded = "" if lane.fewest == 1 else f" of at least {lane.fewest} rows"
    most = "" if lane.splits or lane.most is None else f" of at most {lane.most} rows"
    return Finding(name, "ok", f"yes: an answer has the same bits in all steps{padded}{most}")


def check_drafts(problem: str, settings: Settings) -> Finding:
    """Report whether steps check drafts of an answer."""
    problem = problem or ("--drafts is off" if settings.drafts == "off" else "")
    if problem:
        return Finding("drafts", "ok", f"no: {problem}")
    return Finding("drafts", "ok", "yes: a step makes several tokens of what agents wrote before")


def check_rows(model: MLXBackend) -> Iterator[Finding]:
    """Report the classes of numbers of rows with which each kind of layer gives equal bits."""
    from semantic.adapters.mlx.model.lanes import row_classes

    for one in row_classes(model.model):
        classes = "; ".join(_ranges(numbers) for numbers in one.classes)
        yield Finding("rows", "ok", f"{one.layer}: {classes}")


def _ranges(numbers: Sequence[int]) -> str:
    starts = [n for n in numbers if n - 1 not in numbers]
    stops = [n for n in numbers if n + 1 not in numbers]
    pairs = zip(starts, stops, strict=True)
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def to_json(findings: Sequence[Finding]) -> Json:
    return {
        "passed": all(finding.verdict != "failed" for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }


def _lines(finding: Finding) -> list[str]:
    lines = [f"{_MARKS[finding.verdict]}  {finding.name:<15} {finding.detail}"]
    below = [finding.advice] if finding.advice else []
    return lines + [f"{'':<22}{line}" for line in below]


def _ragged(layers: Sequence[bool]) -> str:
    if all(layers):
        return f"all {len(layers)} layers"
    if not any(layers):
        return f"none of {len(layers)} layers; all use mlx-lm's own caches"
    others = ", ".join(str(layer) for layer, ragged in enumerate(layers) if not ragged)
    return f"{sum(layers)} of {len(layers)} layers; mlx-lm's own caches for layers {others}"


def _budget(pool: BlockPool, spec: ModelCacheSpec) -> str:
    limits = []
    if pool.max_bytes is not None:
        limits.append(show_bytes(pool.max_bytes))
    if pool.total_blocks is not None:
        limits.append(f"{pool.total_blocks} blocks")
    block = sum(spec.bytes_per_block(layer) for layer in range(spec.n_layers))
    return f"{' and '.join(limits)}; 256 tokens take {show_bytes(block)} over all layers"


def _numbers(installed: str) -> tuple[int, ...]:
    parts = itertools.takewhile(str.isdecimal, installed.split("."))
    return tuple(int(part) for part in parts)


def _dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))
