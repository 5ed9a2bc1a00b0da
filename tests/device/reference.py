"""transformers' own `generate` on the CPU, which the engine must repeat token for token.

Prompts go through it in left-padded batches, which take as many steps as one prompt, and on one thread:
PyTorch's threads wait for each other in a busy loop, and on a machine that has other work they crawl.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

BATCH_LEN = 8
TIE = 1e-3
"""Two logits that are closer than this may come in either order on another device."""


@contextmanager
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@dataclass(frozen=True)
class Generated:
    tokens: list[int]
    logits: list[torch.Tensor]
    """Per token [vocab]: what it was chosen from."""

    def margin(self, index: int) -> float:
        best, second = self.logits[index].topk(2).values.tolist()
        return best - second


class Reference:
    """Compares with `generate`; a tie goes to `report` as one line of text."""

    def __init__(self, model: PreTrainedModel, report: Callable[[str], None]) -> None:
        self._model, self._report = model, report

    def generate(self, prompts: Sequence[list[int]], max_tokens: Sequence[int]) -> list[Generated]:
        """Greedy, each up to its `max_tokens` or the end-of-sequence token."""
        answers: dict[int, Generated] = {}
        by_len = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for start in range(0, len(prompts), BATCH_LEN):
            batch = by_len[start : start + BATCH_LEN]
            most = max(max_tokens[i] for i in batch)
            rows = self._batch([prompts[i] for i in batch], most)
            for index, (tokens, logits) in zip(batch, rows, strict=True):
                limit = max_tokens[index]
                answers[index] = Generated(self._cut(tokens[:limit]), logits[:limit])
        return [answers[index] for index in range(len(prompts))]

    def _batch(
        self, prompts: list[list[int]], max_tokens: int
    ) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
        width = max(len(prompt) for prompt in prompts)
        padding = [width - len(prompt) for prompt in prompts]
        ids = torch.tensor([[0] * n + p for n, p in zip(padding, prompts, strict=True)])
        with one_thread():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=(torch.arange(width) >= torch.tensor(padding)[:, None]).long(),
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        for row, tokens in enumerate(output.sequences[:, width:].tolist()):
            yield tokens, [logits[row] for logits in output.logits]

    def _cut(self, tokens: list[int]) -> list[int]:
        """Without the padding that follows the end of a shorter answer of a batch."""
        ends = self._model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        end = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
        return tokens[: end + 1]

    def check(self, name: str, tokens: Sequence[int], expected: Generated) -> None:
        """Equal up to the first difference, which must be a tie of the reference."""
        if list(tokens) == expected.tokens:
            return
        pairs = enumerate(zip(tokens, expected.tokens, strict=False))
        index = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
        assert index is not None, f"{name}: {len(tokens)} tokens, not {len(expected.tokens)}"
        margin = expected.margin(index)
        message = (
            f"{name}: token {index} is {tokens[index]}, not {expected.tokens[index]}; "
            f"the reference's two best logits are {margin:.2e} apart"
        )
        assert margin <= TIE, message
        self._report(message)
