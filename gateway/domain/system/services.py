"""Metrics of a gateway. Names and meanings are vLLM's where vLLM has them (docs/decisions/0003-metric-names.md).

Label values are ids of models that have a card, never a client's words.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.directory import Directory
from gateway.dispatch import Dispatcher
from workers.protocol import Usage, WorkerState, WorkerStatus

CONTENT_TYPE = "text/plain; version=0.0.4"
"""The framework adds the character set."""
_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN_TOKENS_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5)
_PHASE_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.3, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_WHOLE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_MODEL = ["model_name"]
_WORKER = [*_MODEL, "worker"]


class ModelMetrics:
    """The children of one model, looked up once a request instead of once a token."""

    def __init__(self, metrics: "Metrics", model: str) -> None:
        self._success = metrics.success
        self._failures = metrics.failures
        self._model = model
        self._prompt_tokens = metrics.prompt_tokens.labels(model)
        self._generation_tokens = metrics.generation_tokens.labels(model)
        self._whole = metrics.whole.labels(model)
        self._queue = metrics.queue.labels(model)
        self._prefill = metrics.prefill.labels(model)
        self._decode = metrics.decode.labels(model)
        self.first_token = metrics.first_token.labels(model)
        self.between_tokens = metrics.between_tokens.labels(model)

    def succeeded(self, reason: str, usage: Usage, elapsed_s: float) -> None:
        self._success.labels(self._model, reason).inc()
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._generation_tokens.inc(usage.completion_tokens)
        self._whole.observe(elapsed_s)
        self._prefill.observe(usage.prefill_s)
        self._decode.observe(usage.decode_s)
        # What a worker did not spend on it: no two clocks are compared.
        self._queue.observe(max(0.0, elapsed_s - usage.prefill_s - usage.decode_s))

    def failed(self, code: str) -> None:
        """`code` is one of ours, so the label stays bounded."""
        self._failures.labels(self._model, code).inc()


class Metrics:
    """All metrics of one application, in a registry of its own."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self.prompt_tokens = Counter(
            "vllm:prompt_tokens", "Prompt tokens of finished requests", _MODEL, registry=registry
        )
        self.generation_tokens = Counter(
            "vllm:generation_tokens", "Tokens of finished answers", _MODEL, registry=registry
        )
        self.success = Counter(
            "vllm:request_success",
            "Finished requests",
            [*_MODEL, "finished_reason"],
            registry=registry,
        )
        self.failures = Counter(
            "tpugate_request_failures",
            "Requests that ended with an error, whatever their HTTP status",
            [*_MODEL, "code"],
            registry=registry,
        )
        self.first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "From the request's arrival to its first token",
            _MODEL,
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.between_tokens = Histogram(
            "vllm:inter_token_latency_seconds",
            "Between two deltas of a choice",
            _MODEL,
            buckets=_BETWEEN_TOKENS_BUCKETS,
            registry=registry,
        )
        self.whole = Histogram(
            "vllm:e2e_request_latency_seconds",
            "From the request's arrival to its end",
            _MODEL,
            buckets=_WHOLE_BUCKETS,
            registry=registry,
        )
        self.queue = _phase(
            registry, "queue", "From the request's arrival to its first step, and delivery"
        )
        self.prefill = _phase(registry, "prefill", "From the first step to the first token")
        self.decode = _phase(registry, "decode", "From the first token to the last")
        self._models: dict[str, ModelMetrics] = {}
        registry.register(_WorkerGauges(dispatcher))

    def add(self, collector: Collector) -> None:
        """Tell what it collects, too."""
        self._registry.register(collector)

    def of(self, model: str) -> ModelMetrics:
        """`model` must be a known one."""
        metrics = self._models.get(model)
        if metrics is None:
            metrics = self._models[model] = ModelMetrics(self, model)
        return metrics

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)


class _WorkerGauges(Collector):
    """What heartbeats and queues say, read from the directory at scrape time."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        directory = self._dispatcher.directory
        active = GaugeMetricFamily(
            "tpugate_gateway_requests_active", "Requests this gateway waits for"
        )
        active.add_metric([], self._dispatcher.num_active)
        yield active
        yield _per_model(
            "vllm:num_requests_waiting",
            "Queued requests that no worker runs yet",
            {model: _num_waiting(directory, model) for model in directory.known_models()},
        )
        yield _per_model(
            "tpugate_workers_ready",
            "Workers that answer requests of the model",
            {
                model: sum(status.state is WorkerState.READY for status in _of(directory, model))
                for model in directory.known_models()
            },
        )
        statuses = directory.statuses.values()
        for kind, rows in ((GaugeMetricFamily, _WORKER_GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, read in rows:
                family = kind(name, text, labels=_WORKER)
                for status in statuses:
                    family.add_metric([status.model, status.worker_id], read(status))
                yield family
        yield _cache_config(statuses)


_Rows = tuple[tuple[str, str, Callable[[WorkerStatus], float]], ...]
_WORKER_GAUGES: _Rows = (
    ("vllm:num_requests_running", "Choices in the running batch", lambda s: s.num_running),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", lambda s: s.kv_usage),
    (
        "tpugate_compiles_after_warmup",
        "Programs compiled while serving; should stay 0",
        lambda s: s.num_compiles_after_warmup,
    ),
    ("tpugate_ready_buckets", "Compiled shapes", lambda s: s.num_ready_buckets),
    ("tpugate_padding_ratio", "Padded rows over computed rows, 0 to 1", lambda s: s.padding_ratio),
)
_COUNTERS: _Rows = (
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache",
        lambda s: s.num_prefix_queries,
    ),
    (
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache",
        lambda s: s.num_prefix_hits,
    ),
    (
        "vllm:num_preemptions",
        "Choices that gave their KV blocks back and started again",
        lambda s: s.num_preemptions,
    ),
    ("tpugate_steps", "Engine steps", lambda s: s.steps),
    (
        "tpugate_step_host_seconds",
        "Host work of steps, waiting for the device aside",
        lambda s: s.host_seconds,
    ),
    ("tpugate_step_device_seconds", "Time that steps had the device", lambda s: s.device_seconds),
    ("tpugate_step_tokens", "Tokens that steps computed for requests", lambda s: s.num_computed),
    ("tpugate_step_padding", "Tokens that steps computed for nobody", lambda s: s.num_padded),
)


def _phase(registry: CollectorRegistry, name: str, text: str) -> Histogram:
    return Histogram(
        f"vllm:request_{name}_time_seconds",
        text,
        _MODEL,
        buckets=_PHASE_BUCKETS,
        registry=registry,
    )


def _cache_config(statuses: Iterable[WorkerStatus]) -> GaugeMetricFamily:
    """Block size and number as labels, which is how autoscalers and routers read them."""
    labels = [*_WORKER, "block_size", "num_gpu_blocks"]
    family = GaugeMetricFamily("vllm:cache_config_info", "Shape of the KV cache", labels=labels)
    for status in statuses:
        if status.num_blocks:
            sizes = [str(status.block_len), str(status.num_blocks)]
            family.add_metric([status.model, status.worker_id, *sizes], 1)
    return family


def _of(directory: Directory, model: str) -> list[WorkerStatus]:
    return [status for status in directory.statuses.values() if status.model == model]


def _num_waiting(directory: Directory, model: str) -> int:
    depth = directory.depths.get(model)
    unclaimed = max(0, depth.num_requests - depth.num_claimed) if depth else 0
    return unclaimed + sum(status.num_waiting for status in _of(directory, model))


def _per_model(name: str, text: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=_MODEL)
    for model, value in values.items():
        family.add_metric([model], value)
    return family
