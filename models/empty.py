"""A model without weights: its structure and shapes on `meta`, for programs that only get compiled."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.errors import UnsupportedModelError
from models.loader import LoadOptions, load_config
from models.rope import fix_frequencies

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def empty_model(path: Path, dtype: "torch.dtype", options: LoadOptions) -> "PreTrainedModel":
    """As `models.loader.load_model`, of the configuration in `path` alone.

    Raises `UnsupportedModelError`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    kwargs: dict[str, Any] = {"attn_implementation": options.attn_implementation}
    if options.experts_implementation is not None:
        kwargs["experts_implementation"] = options.experts_implementation
    try:
        with torch.device("meta"):
            factory: Any = AutoModelForCausalLM
            model: PreTrainedModel = factory.from_config(load_config(path), dtype=dtype, **kwargs)
    except (ValueError, ImportError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UnsupportedModelError(f"{path} cannot be planned: {reason[0][:300]}") from error
    if options.context_len is not None:
        fix_frequencies(model, options.context_len)
    model.requires_grad_(False)
    model.train(False)
    return model
