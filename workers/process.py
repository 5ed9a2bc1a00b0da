"""Start and end of a worker process: logging, the choice of the engine, the exit code."""

import logging
import os
import sys
from typing import NoReturn

import uvloop

from workers.config import SCRIPTED_ROWS, WorkerConfig
from workers.engine.interface import EngineFactory, LoadedEngine, Progress
from workers.engine.scripted import CONTEXT_LEN, ScriptedEngine, build_scripted
from workers.engine.step_log import Sinks, StepSink
from workers.service import run_worker
from workers.trace_file import open_trace

LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"


def run_process(config: WorkerConfig) -> NoReturn:
    """Run a worker until it stops, then end the process with its exit code.

    Raises `ConfigError` if its profile cannot be written; nothing has been started then.
    """
    logging.basicConfig(
        format=LOG_FORMAT, datefmt="%H:%M:%S", level=config.log_level, stream=sys.stderr
    )
    code = uvloop.run(run_worker(config, engine_factory(config, _trace(config))))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a load or compile that is still under way in the engine's thread would hold it up.
    os._exit(code)


def engine_factory(config: WorkerConfig, trace: StepSink | None = None) -> EngineFactory:
    """The scripted engine or a model's; only the latter loads torch, and only when it is called."""
    build = _build_scripted if config.engine == "fake" else _build_model

    def factory(progress: Progress, sink: StepSink) -> LoadedEngine:
        return build(config, progress, sink if trace is None else Sinks((sink, trace)))

    return factory


def _trace(config: WorkerConfig) -> StepSink | None:
    if config.profile is None:
        return None
    return open_trace(config.profile, config.served_name, config.worker_id)


def _build_scripted(config: WorkerConfig, progress: Progress, sink: StepSink) -> LoadedEngine:
    engine = ScriptedEngine(
        capacity=config.max_rows or SCRIPTED_ROWS,
        context_len=config.context_len or CONTEXT_LEN,
        step_delay_s=config.step_delay_s,
        sink=sink,
    )
    return build_scripted(config.served_name, engine, progress)


def _build_model(config: WorkerConfig, progress: Progress, sink: StepSink) -> LoadedEngine:
    from workers.engine.build import EngineConfig, build_engine

    return build_engine(EngineConfig.from_worker(config), progress, sink)
