"""Probes and metrics; none needs a key, so expose /metrics to the monitoring network only."""

from litestar import Controller, Response, get

from gateway.dispatch import Dispatcher
from gateway.domain.system.schemas import Health, Readiness
from gateway.domain.system.services import CONTENT_TYPE, Metrics
from workers.protocol import WorkerState, WorkerStatus


class SystemController(Controller):
    tags = ["system"]

    @get("/health", summary="Does the process live?")
    async def health(self) -> Health:
        return Health()

    @get("/ready", summary="Is there a worker that answers?")
    async def ready(self, dispatcher: Dispatcher) -> Response[Readiness]:
        directory = dispatcher.directory
        states: dict[str, list[str]] = {model: [] for model in directory.known_models()}
        for status in directory.statuses.values():
            states[status.model].append(_state(status))
        ready = dispatcher.connected and directory.is_ready()
        body = Readiness(ready=ready, redis=dispatcher.connected, models=states)
        return Response(body, status_code=200 if ready else 503)

    @get("/metrics", summary="Prometheus metrics", media_type=CONTENT_TYPE)
    async def metrics(self, metrics: Metrics) -> bytes:
        return metrics.render()


def _state(status: WorkerStatus) -> str:
    if status.state in (WorkerState.STARTING, WorkerState.WARMING):
        return f"{status.state} {status.progress:.2f}"
    return str(status.state)
