"""`tpugate serve`: queue, gateway and one worker per model on this machine, under one roof."""

import asyncio
import fcntl
import logging
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import IO, Any

import click
import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from cli.embedded_redis import EmbeddedRedis, check_port, embedded_redis
from cli.errors import CommandError
from cli.settings import (
    ServeSettings,
    child_environment,
    load_serve_settings,
    worker_environment,
)
from cli.supervisor import Child, Supervisor
from cli.worker import worker_options
from workers.config import WorkerConfig
from workers.protocol import WorkerState, WorkerStatus, decode, worker_key

LOG_FORMAT = "serve      | %(asctime)s %(name)s %(levelname)s %(message)s"
READY_POLL_S = 0.2
SAY_WAITING_S = 5.0
GATEWAY_STOP_S = 40.0
"""A little more than a gateway lets running answers go on."""
REDIS_STOP_S = 5.0
REDIS_NOISE = ("Memory overcommit must be enabled", "signal-handler", "bye bye")
"""Nothing is saved to disk, so the first does not matter; the others come with every stop."""

log = logging.getLogger("serve")


@click.command(epilog="Every option can also be given as TPUGATE_ and its name in capitals.")
@click.option(
    "--model", "models", multiple=True, metavar="REF",
    help="Catalogue id (default: smollm2-135m-instruct), hub id, folder or .gguf file; repeat it for "
    "more workers.",
)  # fmt: skip
@click.option("--host", help="Address to listen on (default: 127.0.0.1).")
@click.option("--port", metavar="PORT", help="Port to listen on (default: 8000).")
@click.option("--redis-url", metavar="URL", help="Use this server instead of an embedded Valkey.")
@click.option(
    "--data-dir",
    metavar="DIR",
    help="Where keys, accounts and the socket are kept (default: ~/.local/share/tpugate).",
)
@worker_options
def serve(models: tuple[str, ...], **flags: str | None) -> None:
    """Start everything on this machine: a queue, a gateway and one worker per --model."""
    logging.basicConfig(
        format=LOG_FORMAT, datefmt="%H:%M:%S", level=logging.INFO, stream=sys.stderr
    )
    settings = load_serve_settings(models, flags)
    with _claim_data_dir(settings.data_dir):
        check_port(settings.host, settings.port)
        try:
            failure = asyncio.run(_run(settings))
        except OSError as error:
            raise CommandError(f"A process could not be started: {error.strerror}.") from error
    if failure is not None:
        raise failure


async def _run(settings: ServeSettings) -> CommandError | None:
    return await Server(settings).run()


class Server:
    """The processes of one `serve`, from start to stop."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._supervisor = Supervisor()
        self._interrupted = asyncio.Event()
        self._redis_url = settings.redis_url or ""
        self._embedded: EmbeddedRedis | None = None
        self._queue: list[Child] = []
        self._gateway = self._gateway_child()
        self._worker_ids: dict[str, str] = {}
        self._workers = [
            self._worker_child(config, place) for place, config in enumerate(settings.workers)
        ]

    async def run(self) -> CommandError | None:
        """Until a signal (None) or until a child will not get better (its failure)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            await self._start()
            return await self._watch()
        except CommandError as error:
            return error
        finally:
            await self._stop()

    async def _start(self) -> None:
        if self._settings.redis_url is None:
            self._embedded = embedded_redis(self._settings.data_dir)
            self._redis_url = self._embedded.url
            valkey = Child(
                "valkey", self._embedded.command, child_environment, REDIS_STOP_S, REDIS_NOISE
            )
            self._queue.append(valkey)
            self._supervisor.start(valkey)
            await self._embedded.wait_until_ready()
            valkey.was_ready = True
        else:
            await _check_redis(self._redis_url)
        for child in (self._gateway, *self._workers):
            self._supervisor.start(child)

    async def _watch(self) -> CommandError | None:
        interrupted = asyncio.create_task(self._interrupted.wait())
        ready = asyncio.create_task(self._announce())
        ends: set[asyncio.Future[Any]] = {interrupted, self._supervisor.failure}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            interrupted.cancel()
            ready.cancel()
        return self._supervisor.failure.result() if self._supervisor.failure.done() else None

    async def _announce(self) -> None:
        """Note which children are up, and say so when all of them are."""
        children = (self._gateway, *self._workers)
        async with Redis.from_url(self._redis_url, protocol=2) as redis:
            while not (
                all(child.was_ready for child in children)
                and await _answers(self._settings, "/ready")
            ):
                self._gateway.was_ready |= await _answers(self._settings, "/health")
                for child in self._workers:
                    child.was_ready |= await self._is_worker_ready(redis, child)
                await asyncio.sleep(READY_POLL_S)
        self._say_ready()

    async def _is_worker_ready(self, redis: Redis, child: Child) -> bool:
        status = await self._status(redis, child)
        return child.is_running and status is not None and status.state is WorkerState.READY

    async def _status(self, redis: Redis, child: Child) -> WorkerStatus | None:
        try:
            payload: Any = await redis.get(worker_key(self._worker_ids[child.name]))
            return decode(WorkerStatus, payload) if payload else None
        except (KeyError, RedisError, OSError, msgspec.MsgspecError):
            return None

    def _say_ready(self) -> None:
        settings = self._settings
        key_file = settings.data_dir / "admin.key"
        key = "the value of TPUGATE_ADMIN_KEY" if settings.is_admin_key_given else f"in {key_file}"
        click.echo(
            f"\ntpugate is ready: {settings.url}/v1\n"
            f"  models     {', '.join(settings.model_names)}\n"
            f"  admin key  {key}\n"
            f"  stop       Ctrl-C\n"
        )

    async def _stop(self) -> None:
        """The gateway first, so that answers under way are finished; then workers; the queue last."""
        self._supervisor.begin_stop()
        log.info("Stopping; once more Ctrl-C stops at once.")
        saying = asyncio.create_task(self._say_waiting())
        await self._supervisor.stop([self._gateway])
        saying.cancel()  # from here on the workers say themselves what they wait for
        for children in (self._workers, self._queue):
            await self._supervisor.stop(children)
        if self._embedded is not None:
            self._embedded.remove()

    async def _say_waiting(self) -> None:
        """Every few seconds, how many requests still run."""
        async with Redis.from_url(self._redis_url, protocol=2) as redis:
            while True:
                await asyncio.sleep(SAY_WAITING_S)
                statuses = [await self._status(redis, child) for child in self._workers]
                number = sum(s.num_running + s.num_waiting for s in statuses if s is not None)
                log.info("Waiting for %d request%s.", number, "" if number == 1 else "s")

    def _on_signal(self) -> None:
        if self._interrupted.is_set():
            self._supervisor.kill()
        self._interrupted.set()

    def _gateway_child(self) -> Child:
        settings = self._settings

        def environment() -> dict[str, str]:
            return child_environment(
                host=settings.host,
                port=str(settings.port),
                data_dir=str(settings.data_dir),
                redis_url=self._redis_url,
            )

        return Child("gateway", _command("gateway"), environment, GATEWAY_STOP_S)

    def _worker_child(self, config: WorkerConfig, place: int) -> Child:
        name = "worker" if len(self._settings.workers) == 1 else f"worker {place + 1}"

        def environment() -> dict[str, str]:
            # Another id for each start: what the last process held counts as a gone worker's.
            worker_id = self._worker_ids[name] = f"{config.worker_id}-{secrets.token_hex(2)}"
            own = {
                "model": config.model,
                "served_name": config.served_name,
                "worker_id": worker_id,
                "redis_url": self._redis_url,
            }
            return worker_environment(config.engine, **{**self._settings.flags, **own})

        return Child(name, _command("worker"), environment, config.drain_timeout_s + 15.0)


def _command(name: str) -> tuple[str, ...]:
    # -P: a folder of the user's that is called `cli` or `models` must not be taken for ours.
    return (sys.executable, "-P", "-m", "cli.main", name)


def _claim_data_dir(data_dir: Path) -> IO[str]:
    """Make the folder, and lock it against a second `serve`; raises `CommandError`."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (data_dir / "serve.lock").open("w", encoding="utf-8")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
    except BlockingIOError as error:
        raise CommandError(
            f"Another tpugate serve uses {data_dir}: stop it or give --data-dir."
        ) from error
    except OSError as error:
        raise CommandError(
            f"The data folder {data_dir} cannot be written: {error.strerror}."
        ) from error
    return lock


async def _check_redis(url: str) -> None:
    redis = Redis.from_url(url, protocol=2, socket_connect_timeout=5.0)
    try:
        await redis.ping()
    except (RedisError, OSError, ValueError) as error:
        raise CommandError(
            f"Redis does not answer at the given URL: {str(error).rstrip('.')}."
        ) from error
    finally:
        await redis.aclose()


async def _answers(settings: ServeSettings, path: str) -> bool:
    """Whether the gateway says 200 to a GET."""
    host = settings.url.removeprefix("http://").rsplit(":", 1)[0].strip("[]")
    try:
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection(host, settings.port)
            writer.write(
                f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
            )
            status = await reader.readline()
            writer.close()
    except (OSError, TimeoutError):
        return False
    return b" 200 " in status
