"""Metrics of answers, engines and stores for Prometheus. A metric that vLLM has too has vLLM's
name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from semantic.domain.stored import Wear
from semantic.ports.serving import EngineFigures, Figures, MemoryFigures
from semantic_server.http.answer_records import AnswerRecord, Observer

_MODEL: Final = "model_name"
_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)
_TOKENS: Final = (1, 10, 100, 1_000, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000)

_RESTORED: Final = ("memory", "disk", "remote")
"""Tiers of the store outside the pool."""


class Metrics(Observer):
    """Prometheus metrics, labelled with the model's id."""

    def __init__(self, model: str, figures: Callable[[], Figures | None]) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._waiting: set[str] = set()
        self._running: set[str] = set()
        self._prefill = PrefillCost()
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens, including cached ones.")
        self._generated = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.")
        self._success = Counter(
            "vllm:request_success",
            "Complete answers by finish reason.",
            (_MODEL, "finished_reason"),
            registry=self.registry,
        )
        self._failed = Counter(
            "semantic_requests_failed",
            "Failed answers: error, cancelled, refused.",
            (_MODEL, "finished_reason"),
            registry=self.registry,
        )
        self._restores = self._counter_from(
            "semantic_restores", "Answers that started from restored blocks."
        )
        self._restored = self._counter_from("semantic_restored_tokens", "Prompt tokens restored.")
        self._saved = self._counter(
            "semantic_prefill_seconds_saved",
            "Seconds that computing the cached prompt tokens would have taken.",
        )
        self._times = {
            name: self._histogram(f"vllm:{name}_seconds", documentation, _SECONDS)
            for name, documentation in _TIMES.items()
        }
        self._sizes = {
            name: self._histogram(f"vllm:{name}", documentation, _TOKENS)
            for name, documentation in _SIZES.items()
        }
        self.registry.register(_EngineCollector(model, self._waiting, self._running, figures))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def accepted(self, uid: str, agent: str, prompt_tokens: int) -> None:
        del agent, prompt_tokens
        self._waiting.add(uid)

    def prefilled(self, uid: str, done: int, total: int) -> None:
        del done, total
        self._runs(uid)

    def first_token(self, uid: str) -> None:
        self._runs(uid)

    def finished(self, uid: str | None, record: AnswerRecord) -> None:
        self._waiting.discard(uid or "")
        self._running.discard(uid or "")
        good = record.finish in ("stop", "length", "tool_calls")
        (self._success if good else self._failed).labels(self._of(record), record.finish).inc()
        if uid is not None:
            self._count_tokens(record)
            self._count_times(record)

    def _runs(self, uid: str) -> None:
        self._waiting.discard(uid)
        self._running.add(uid)

    def _of(self, record: AnswerRecord) -> str:
        return record.model or self._model

    def _count_tokens(self, record: AnswerRecord) -> None:
        usage, model = record.usage, self._of(record)
        self._prompt.labels(model).inc(usage.prompt)
        if record.finish != "cancelled":  # otherwise the cached tokens are unknown
            self._queries.labels(model).inc(usage.prompt)
            self._hits.labels(model).inc(usage.cached)
        self._generated.labels(model).inc(usage.completion)
        self._sizes["request_prompt_tokens"].labels(model).observe(usage.prompt)
        self._sizes["request_generation_tokens"].labels(model).observe(usage.completion)
        if record.match is not None:
            self._prefill.add(record.match.computed_tokens, record.match.seconds)
            if record.match.source in _RESTORED:
                self._restores.labels(model, record.match.source).inc()
                self._restored.labels(model, record.match.source).inc(usage.cached)
        self._saved.labels(model).inc(self._prefill.seconds(usage.cached))

    def _count_times(self, record: AnswerRecord) -> None:
        def observe(name: str, seconds: float) -> None:
            self._times[name].labels(self._of(record)).observe(seconds)

        observe("e2e_request_latency", record.total)
        if record.ttft is None:
            return
        observe("time_to_first_token", record.ttft)
        observe("request_prefill_time", record.prefill)
        observe("request_queue_time", record.queue_time)
        observe("request_decode_time", record.decode)
        for gap in record.gaps:
            observe("inter_token_latency", gap)

    def _counter(self, name: str, documentation: str) -> Counter:
        return Counter(name, documentation, (_MODEL,), registry=self.registry)

    def _counter_from(self, name: str, documentation: str) -> Counter:
        return Counter(name, documentation, (_MODEL, "source"), registry=self.registry)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, documentation, (_MODEL,), buckets=buckets, registry=self.registry)


_TIMES: Final = {
    "time_to_first_token": "Seconds from the request to its first piece.",
    "inter_token_latency": "Seconds between two pieces of an answer.",
    "e2e_request_latency": "Seconds from the request to its end.",
    "request_queue_time": "Seconds before the first piece in the queue or in restoring.",
    "request_prefill_time": "Seconds of prefill.",
    "request_decode_time": "Seconds from the first piece to the end.",
}
_SIZES: Final = {
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Tokens generated for a request.",
}


class PrefillCost:
    """Measured prefills, by their lengths to a power of two: a short one costs more per token."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, float]] = {}

    def add(self, tokens: int, seconds: float) -> None:
        known_tokens, known_seconds = self._sums.get(tokens.bit_length(), (0, 0.0))
        if tokens:
            self._sums[tokens.bit_length()] = known_tokens + tokens, known_seconds + seconds

    def seconds(self, tokens: int) -> float:
        """Estimate the seconds of a prefill of `tokens`, at the speed of those of about its
        length."""
        if not self._sums:
            return 0.0
        known_tokens, seconds = min(
            self._sums.items(), key=lambda one: abs(one[0] - tokens.bit_length())
        )[1]
        return tokens * seconds / known_tokens


class _EngineCollector(Collector):
    def __init__(
        self,
        model: str,
        waiting: set[str],
        running: set[str],
        figures: Callable[[], Figures | None],
    ) -> None:
        self._model = model
        self._waiting = waiting
        self._running = running
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        figures = self._figures()
        engines = self._by_model(figures)
        running = {name: float(one.running) for name, one in engines.items()}
        waiting = {name: float(one.inbox + one.waiting) for name, one in engines.items()}
        if figures is None:
            running = {self._model: float(len(self._running))}
            waiting = {self._model: float(len(self._waiting))}
        yield self._gauge("vllm:num_requests_running", "Running requests.", running)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", waiting)
        if figures is not None:
            yield from self._of_engines(engines)
            yield from self._of_stores(figures)
            yield from _of_memory(figures.memory)

    def describe(self) -> Iterator[Metric]:
        """Yield nothing, because registering the metrics must not query the engine."""
        yield from ()

    def _by_model(self, figures: Figures | None) -> Mapping[str, EngineFigures]:
        if figures is None:
            return {}
        return figures.models or {self._model: figures.engine}

    def _of_engines(self, engines: Mapping[str, EngineFigures]) -> Iterator[Metric]:
        def of(value: Callable[[EngineFigures], float]) -> dict[str, float]:
            return {name: value(one) for name, one in engines.items()}

        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "Share of the pool in use; 1 is all of it.",
            of(lambda one: one.pool_used_bytes / (one.pool_bytes or 1)),
        )
        yield self._gauge(
            "semantic_pool_used_bytes",
            "Bytes of the pool in use.",
            of(lambda one: one.pool_used_bytes),
        )
        yield self._gauge(
            "semantic_pool_max_bytes",
            "Bytes that the pool may use.",
            of(lambda one: one.pool_bytes),
        )
        yield self._count(
            "vllm:num_preemptions", "Preempted requests.", of(lambda one: one.preemptions)
        )
        yield self._count(
            "semantic_engine_rebuilds",
            "Engines rebuilt after a failure.",
            of(lambda one: one.rebuilds),
        )
        restored = CounterMetricFamily(
            "semantic_restored_bytes",
            "Bytes of keys and values read from a tier of the store.",
            labels=(_MODEL, "tier"),
        )
        for name, engine in engines.items():
            for tier, n_bytes in engine.restored_bytes.items():
                restored.add_metric((name, tier), n_bytes)
        yield restored

    def _of_stores(self, figures: Figures) -> Iterator[Metric]:
        blocks = _tiers("semantic_store_blocks", "Blocks in a tier of the store.")
        used = _tiers("semantic_store_bytes", "Bytes in a tier of the store.")
        most = _tiers("semantic_store_max_bytes", "Bytes that a tier of the store may use.")
        agents = _tiers("semantic_store_agents", "Agents with a manifest in a tier of the store.")
        events = CounterMetricFamily(
            "semantic_store_events",
            "Events of blocks in a tier of the store.",
            labels=("tier", "event"),
        )
        for stats in figures.stores:
            blocks.add_metric((stats.tier,), stats.n_blocks)
            used.add_metric((stats.tier,), stats.n_bytes)
            most.add_metric((stats.tier,), stats.max_bytes)
            agents.add_metric((stats.tier,), stats.n_agents)
            for event, count in stats.counts.items():
                events.add_metric((stats.tier, event), count)
        yield from (blocks, used, most, agents, events)
        for stats in figures.stores:
            if stats.wear is not None:
                yield from _of_wear(stats.wear)

    @staticmethod
    def _gauge(name: str, documentation: str, values: Mapping[str, float]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, documentation, labels=(_MODEL,))
        for model, value in values.items():
            family.add_metric((model,), value)
        return family

    @staticmethod
    def _count(name: str, documentation: str, values: Mapping[str, float]) -> CounterMetricFamily:
        family = CounterMetricFamily(name, documentation, labels=(_MODEL,))
        for model, value in values.items():
            family.add_metric((model,), value)
        return family


def _of_wear(wear: Wear) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "semantic_disk_written_bytes",
        "Bytes that all processes of the store have ever written.",
        value=wear.total,
    )
    yield GaugeMetricFamily(
        "semantic_disk_written_today_bytes", "Bytes written since midnight.", value=wear.today
    )
    yield GaugeMetricFamily(
        "semantic_disk_writes_held_back",
        "1 once the daily limit is reached, while the store writes only ends of turns.",
        value=wear.holds_back,
    )
    if wear.max_a_day is not None:
        yield GaugeMetricFamily(
            "semantic_disk_written_max_bytes", "Daily limit.", value=wear.max_a_day
        )
    if wear.share is not None:
        yield GaugeMetricFamily(
            "semantic_disk_rated_share",
            "Part of the drive's rated writes that the store has used.",
            value=wear.share,
        )


def _of_memory(memory: MemoryFigures | None) -> Iterator[Metric]:
    if memory is None:
        return
    used, most = "semantic_memory_bytes", "semantic_memory_max_bytes"
    yield GaugeMetricFamily(
        used, "Bytes of the process, as the system counts them.", memory.used_bytes
    )
    yield GaugeMetricFamily(most, "Bytes that the process may use now.", memory.limit_bytes)
    steps = CounterMetricFamily(
        "semantic_memory_steps", "Steps taken against a shortage of memory.", labels=("step",)
    )
    for step, count in memory.counts.items():
        steps.add_metric((step,), count)
    yield steps


def _tiers(name: str, documentation: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, labels=("tier",))
