"""A folder on disk becomes a Hugging Face model on a device, and the facts a worker publishes of it."""

import json
import logging
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from models.errors import ModelCorruptError, NoTokenizerError, UnsupportedModelError
from models.progress import Progress, silent
from models.rope import fix_frequencies

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class LoadOptions:
    """How to build the model; the weights are the same whatever is chosen here."""

    attn_implementation: str = "sdpa"
    """A name in transformers' attention interface, ours included once it is registered."""
    experts_implementation: str | None = None
    """How mixture-of-experts layers compute; `batched_mm` has no data-dependent shapes."""
    context_len: int | None = None
    """Fixes position encodings that depend on a sequence's length (`models.rope`); None leaves them."""


@dataclass(frozen=True)
class ModelInfo:
    """What a worker must know of a model beside its weights."""

    context_len: int
    """Tokens of prompt and answer together."""
    vocab_size: int
    """Rows of the output layer; a tokenizer may know fewer."""
    eos_token_ids: frozenset[int]
    bos_token_id: int | None


@dataclass(frozen=True)
class TokenizerInfo:
    """What a gateway needs to turn messages into token ids, see `workers.protocol.ModelCard`."""

    tokenizer_json: bytes
    """`tokenizer.json` of the `tokenizers` library, not compressed."""
    chat_template: str | None
    special_tokens: dict[str, str]
    """bos_token, eos_token, … as far as the model has them."""
    add_bos: bool
    """Whether the tokenizer puts BOS in front of plain text."""

    def compressed_json(self) -> bytes:
        """`tokenizer_json` with zlib, as the card carries it."""
        return zlib.compress(self.tokenizer_json, level=6)


def load_config(path: Path) -> "PretrainedConfig":
    """Raises `UnsupportedModelError` for an architecture that transformers does not have."""
    from transformers import AutoConfig

    try:
        return cast("PretrainedConfig", AutoConfig.from_pretrained(path, local_files_only=True))
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise UnsupportedModelError(
            f"the configuration in {path} cannot be used: {_sentence(error)}"
        ) from error


def load_model(
    path: Path,
    dtype: "torch.dtype",
    device: "torch.device | str" = "cpu",
    options: LoadOptions = LoadOptions(),  # noqa: B008 -- frozen
    progress: Progress = silent,
) -> "PreTrainedModel":
    """The causal language model in `path`, in evaluation mode, each parameter made on `device`.

    The model is built without memory; transformers then reads one tensor after the other from the mapped
    files, casts it and puts it on the device, so the host never holds the whole model beside it. Tied
    weights, renamed and merged checkpoints (experts) and computed buffers are transformers' own affair.

    Raises `UnsupportedModelError`, or `ModelCorruptError` if weights are missing, broken or misshapen.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    config = load_config(path)
    kwargs: dict[str, Any] = {"attn_implementation": options.attn_implementation}
    if options.experts_implementation is not None:
        kwargs["experts_implementation"] = options.experts_implementation
    try:
        with _reporting(progress):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                device_map={"": torch.device(device)},
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that the report names them
                **kwargs,
            )
    except (SafetensorError, OSError, RuntimeError, EOFError) as error:
        raise ModelCorruptError(
            f"the weights in {path} cannot be loaded: {_sentence(error)}"
        ) from error
    except (ValueError, ImportError, KeyError) as error:
        raise UnsupportedModelError(f"{path} cannot be served: {_sentence(error)}") from error
    model: PreTrainedModel
    model, report = loaded
    _refuse_gaps(path, report)
    if options.context_len is not None:
        fix_frequencies(model, options.context_len)
    model.requires_grad_(False)
    return model


def _refuse_gaps(path: Path, report: dict[str, Any]) -> None:
    """transformers fills what it did not find, or found in another shape, with random numbers."""
    missing = sorted(report["missing_keys"])
    if missing:
        names = ", ".join(missing[:3])
        raise ModelCorruptError(
            f"the weights in {path} lack {len(missing)} tensors, such as {names}"
        )
    for name, found, wanted in report["mismatched_keys"]:
        raise ModelCorruptError(
            f"in {path}, {name} has shape {list(found)}, but the configuration asks for {list(wanted)}"
        )


@contextmanager
def _reporting(progress: Progress) -> Iterator[None]:
    """Take over the bar that transformers draws while it reads, and its tables of what it found."""
    from transformers.utils import logging as library

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        return _counted(args[0], progress) if args else factory(**{**kwargs, "disable": True})

    verbosity: int = library.get_verbosity()
    previous: Any = library.set_tqdm_hook(hook)
    library.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        library.set_tqdm_hook(previous)
        library.set_verbosity(verbosity)


def _counted(items: Collection[Any], progress: Progress) -> Iterator[Any]:
    for done, item in enumerate(items):
        progress("read the weights", done / len(items))
        yield item
    progress("read the weights", 1.0)


def read_info(path: Path) -> ModelInfo:
    """Raises `UnsupportedModelError` if the configuration does not say how long a context may be."""
    config = load_config(path).get_text_config()
    context_len = getattr(config, "max_position_embeddings", None)
    if not isinstance(context_len, int):
        raise UnsupportedModelError(f"the configuration in {path} names no context length")
    # Llama 4's layers see chunks of this length; a context within one chunk needs no second mask.
    context_len = min(context_len, getattr(config, "attention_chunk_size", None) or context_len)
    generation = _read_json(path / "generation_config.json")
    eos = {*_ids(config.eos_token_id), *_ids(generation.get("eos_token_id"))}
    bos = next(iter(_ids(config.bos_token_id)), None)
    return ModelInfo(context_len, config.vocab_size, frozenset(eos), bos)


def read_tokenizer(path: Path) -> TokenizerInfo:
    """Raises `NoTokenizerError` if there is none that the `tokenizers` library can run."""
    settings = _read_json(path / "tokenizer_config.json")
    payload = _tokenizer_json(path)
    special = {name: _token(settings[name]) for name in _SPECIAL if settings.get(name)}
    return TokenizerInfo(
        tokenizer_json=payload,
        chat_template=_chat_template(path, settings),
        special_tokens=special,
        add_bos=_adds_bos(path, payload, special.get("bos_token")),
    )


def _tokenizer_json(path: Path) -> bytes:
    file = path / "tokenizer.json"
    if file.is_file():
        return file.read_bytes()
    if not any((path / name).is_file() for name in ("tokenizer.model", "vocab.json", "vocab.txt")):
        raise NoTokenizerError(f"{path} has no tokenizer.json")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        return str(tokenizer.backend_tokenizer.to_str()).encode()
    except (ValueError, OSError, ImportError, AttributeError) as error:
        raise NoTokenizerError(
            f"the tokenizer in {path} has no tokenizer.json and cannot be converted to one"
        ) from error


def _adds_bos(path: Path, payload: bytes, bos_token: str | None) -> bool:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(payload.decode())
    except Exception as error:  # noqa: BLE001 -- the library raises no narrower class
        raise ModelCorruptError(f"{path / 'tokenizer.json'} is no valid tokenizer") from error
    bos_id = tokenizer.token_to_id(bos_token) if bos_token else None
    return bos_id is not None and tokenizer.encode("").ids[:1] == [bos_id]


def _chat_template(path: Path, settings: dict[str, Any]) -> str | None:
    """The template for plain chats, joined with the one for tools where a model has two."""
    file = path / "chat_template.jinja"
    if file.is_file():
        with_tools = path / "additional_chat_templates" / "tool_use.jinja"
        return _joined(file.read_text(), with_tools.read_text() if with_tools.is_file() else None)
    found = _read_json(path / "chat_template.json") or settings
    template = found.get("chat_template")
    if isinstance(template, list):  # named templates
        named = {item["name"]: item["template"] for item in template}
        return _joined(named.get("default"), named.get("tool_use"))
    return template


def _joined(plain: str | None, with_tools: str | None) -> str | None:
    if plain is None or with_tools is None:
        return plain
    tools, rest = with_tools.removesuffix("\n"), plain.removesuffix("\n")
    return f"{{% if tools %}}{tools}{{% else %}}{rest}{{% endif %}}"


def _token(value: str | dict[str, Any]) -> str:
    return value["content"] if isinstance(value, dict) else value


def _ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text()))
    except (ValueError, UnicodeDecodeError) as error:
        raise ModelCorruptError(f"{file} is no valid JSON") from error


def _sentence(error: BaseException) -> str:
    """The first line of a library's message: the rest is advice to programmers."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
