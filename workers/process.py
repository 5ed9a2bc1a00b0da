"""Start and end of a worker process: logging, the choice of the engine, the exit code."""

import logging
import os
import sys
from typing import NoReturn

import uvloop

from workers.config import SCRIPTED_ROWS, WorkerConfig
from workers.engine.interface import EngineFactory, LoadedEngine, Progress
from workers.engine.scripted import CONTEXT_LEN, ScriptedEngine, build_scripted
from workers.service import run_worker

LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"


def run_process(config: WorkerConfig) -> NoReturn:
    """Run a worker until it stops, then end the process with its exit code."""
    logging.basicConfig(
        format=LOG_FORMAT, datefmt="%H:%M:%S", level=config.log_level, stream=sys.stderr
    )
    code = uvloop.run(run_worker(config, engine_factory(config)))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a load or compile that is still under way in the engine's thread would hold it up.
    os._exit(code)


def engine_factory(config: WorkerConfig) -> EngineFactory:
    """The scripted engine or a model's; only the latter loads torch, and only when it is called."""
    return _scripted_factory(config) if config.engine == "fake" else _model_factory(config)


def _scripted_factory(config: WorkerConfig) -> EngineFactory:
    def build(progress: Progress) -> LoadedEngine:
        engine = ScriptedEngine(
            capacity=config.max_rows or SCRIPTED_ROWS,
            context_len=config.context_len or CONTEXT_LEN,
            step_delay_s=config.step_delay_s,
        )
        return build_scripted(config.served_name, engine, progress)

    return build


def _model_factory(config: WorkerConfig) -> EngineFactory:
    def build(progress: Progress) -> LoadedEngine:
        from workers.engine.build import EngineConfig, build_engine

        return build_engine(EngineConfig.from_worker(config), progress)

    return build
