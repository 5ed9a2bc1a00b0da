"""Probes and metrics; none needs a key, so expose /metrics to the monitoring network only."""

from litestar import Controller, Response, route
from litestar.enums import HttpMethod

from gateway.dispatch import Dispatcher
from gateway.domain.system.schemas import Health, Readiness
from gateway.domain.system.services import CONTENT_TYPE, Metrics
from gateway.openapi.operations import operation
from workers.protocol import WorkerState, WorkerStatus

_READS = [HttpMethod.GET, HttpMethod.HEAD]


class SystemController(Controller):
    tags = ["system"]

    @route(
        "/health",
        http_method=_READS,
        summary="Does the process live?",
        operation_class=operation(None, Health),
    )
    async def health(self) -> Health:
        return Health()

    @route(
        "/ready",
        http_method=_READS,
        summary="Is there a worker that answers?",
        operation_class=operation(None, {200: Readiness, 503: Readiness}),
    )
    async def ready(self, dispatcher: Dispatcher) -> Response[Readiness]:
        directory = dispatcher.directory
        states: dict[str, list[str]] = {model: [] for model in directory.known_models()}
        for status in directory.statuses.values():
            states[status.model].append(_state(status))
        ready = dispatcher.connected and directory.is_ready()
        body = Readiness(ready=ready, redis=dispatcher.connected, models=states)
        return Response(body, status_code=200 if ready else 503)

    @route(
        "/metrics",
        http_method=_READS,
        summary="Prometheus metrics",
        media_type=CONTENT_TYPE,
        operation_class=operation(),
    )
    async def metrics(self, metrics: Metrics) -> bytes:
        return metrics.render()


def _state(status: WorkerStatus) -> str:
    if status.state in (WorkerState.STARTING, WorkerState.WARMING):
        return f"{status.state} {status.progress:.2f}"
    return str(status.state)
