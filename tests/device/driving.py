"""Building and driving the real engine in tests."""

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tests.contract.test_worker_engine import Collected
from torchtpu.buckets import BucketLadder, PrefillShape
from torchtpu.environment import read_settings
from workers.engine.build import EngineConfig, build_engine
from workers.engine.engine import EngineParts, ModelEngine
from workers.engine.request import Sequence
from workers.engine.scheduler import Scheduler
from workers.protocol import FinishReason, GenerateRequest, SamplingParams, Usage

MODEL = "smollm2-135m-instruct"
CONTEXT_LEN = 256
# Few programs: two sizes of whatever the scheduler chooses between.
LADDER = BucketLadder(
    rows=(8, 32),
    mixed_rows=(32,),
    prefill=(PrefillShape(64, 8, 24), PrefillShape(128, 1, 128)),
    contexts=(CONTEXT_LEN,),
    mixed_contexts=(CONTEXT_LEN,),
)
MAX_STEPS = 5000
_ids = itertools.count()


def engine_config(model: str = MODEL, **fields: object) -> EngineConfig:
    """Programs are kept where a worker keeps them, so that only a first run compiles."""
    settings = {
        "model": model,
        "served_name": "model-under-test",
        "dtype": "float32",
        "max_rows": LADDER.max_rows,
        "context_len": CONTEXT_LEN,
        "compile_cache_dir": read_settings().cache_dir / "programs",
        "ladder": LADDER,
    }
    return EngineConfig(**{**settings, **fields})


def build_parts(model: str, ladder: BucketLadder, **fields: object) -> EngineParts:
    """Weights and compiled programs of an engine for the whole of `ladder`."""
    settings = {"ladder": ladder, "context_len": ladder.max_context, "max_rows": ladder.max_rows}
    config = engine_config(model, **settings, **fields)
    return build_engine(config, lambda what, share: None).engine._parts


def fresh_engine(parts: EngineParts, num_blocks: int | None = None) -> ModelEngine:
    """An engine with an empty cache over the same weights and programs.

    `num_blocks` makes it use that much of the cache only.
    """
    cache = parts.cache.emptied() if num_blocks is None else parts.cache.emptied(num_blocks)
    scheduler = Scheduler(parts.scheduler._config, cache)
    return ModelEngine(replace(parts, cache=cache, scheduler=scheduler))


def new_request(prompt: Iterable[int], n: int = 1, **sampling: object) -> GenerateRequest:
    """Greedy unless told otherwise."""
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    return GenerateRequest(
        request_id=f"request-{next(_ids)}",
        model="model-under-test",
        reply_to="replies",
        prompt_token_ids=list(prompt),
        sampling=params,
        n=n,
    )


@dataclass
class Answer:
    """All that an engine gave for one choice."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage


@dataclass
class Driver:
    """Steps an engine and keeps what comes out, the token ids included."""

    engine: ModelEngine
    collected: Collected = field(default_factory=Collected)
    sequences: dict[str, list[Sequence]] = field(default_factory=lambda: defaultdict(list))

    def add(self, request: GenerateRequest) -> str:
        self.engine.add(request)
        # The wire carries text only; exactness is judged by tokens.
        self.sequences[request.request_id] = self.engine._residents[request.request_id].sequences
        return request.request_id

    def step(self) -> None:
        self.collected.take(self.engine.step())

    def abort(self, request_id: str) -> None:
        self.collected.take(self.engine.abort(request_id))

    def run(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def answer(self, request_id: str, choice: int = 0) -> Answer:
        deltas = self.collected.deltas[request_id]
        assert self.collected.is_over(request_id)
        last = next(d for d in deltas if d.choice == choice and d.finish_reason is not None)
        sequence = self.sequences[request_id][choice]
        prompt_len = len(sequence.request.prompt_token_ids)
        return Answer(
            text=self.collected.text(request_id, choice),
            tokens=sequence.token_ids[prompt_len:],
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            usage=deltas[-1].usage,
        )


def ask(engine: ModelEngine, requests: list[GenerateRequest]) -> list[Answer]:
    """Send all together, run to the end, give the first choices."""
    driver = Driver(engine)
    ids = [driver.add(request) for request in requests]
    driver.run()
    return [driver.answer(request_id) for request_id in ids]


def ask_one(engine: ModelEngine, prompt: Iterable[int], **sampling: object) -> Answer:
    return ask(engine, [new_request(prompt, **sampling)])[0]
