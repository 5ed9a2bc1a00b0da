"""Position encodings whose frequencies depend on how long a sequence is, fixed for one context length.

transformers chooses such frequencies anew in every forward pass, by the largest position in it. In a
batch of many requests one would change the others', and keys that are cached already would not follow.

    dynamic    changes nothing up to the length that the configuration names, and no context is longer
    longrope   has short factors up to the length of the first training and long ones beyond it: one
               set for all requests, by the context length of the engine, as vLLM does
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FIXED = "default"
"""What transformers never updates in a forward pass."""


def fix_frequencies(model: "PreTrainedModel", context_len: int) -> None:
    """Make all of `model`'s frequencies those of sequences of up to `context_len` tokens, in place."""
    module: Any
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str):
            _fix(module, rope_type, None, context_len)
            module.rope_type = _FIXED
        elif isinstance(rope_type, dict):
            for layer_type, name in rope_type.items():
                _fix(module, name, layer_type, context_len)
            module.rope_type = dict.fromkeys(rope_type, _FIXED)


def _fix(module: Any, rope_type: str, layer_type: str | None, context_len: int) -> None:  # noqa: ANN401
    """Put the long factors in, if they are due: transformers has filled in the short ones."""
    if rope_type != "longrope":
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = module.config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    trained_len = parameters["original_max_position_embeddings"]
    if context_len > trained_len:
        buffer = getattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
        long, _ = ROPE_INIT_FUNCTIONS[rope_type](
            module.config, buffer.device, seq_len=trained_len + 1, layer_type=layer_type
        )
        buffer.copy_(long)
