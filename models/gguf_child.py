"""The process that turns one GGUF file into safetensors; `models.gguf` starts it and reads its output.

Run by its path with one JSON argument. It imports nothing of ours: started so, no folder called `models`
in the user's working directory can get in the way. On stdout it writes one JSON object a line:
`{"phrase", "share"}` on its way, `{"error", "kind"}` at a failure it can name. It ends when its stdin does,
so that it does not outlive its parent.

`TORCH_DEVICE_BACKEND_AUTOLOAD=0` must be set, or importing torch would start TorchTPU here.
"""

import errno
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any


def main() -> int:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        convert(**json.loads(sys.argv[1]))
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        emit(error=str(error), kind="full" if full else "unreadable")
        return 1
    except Exception as error:  # noqa: BLE001 -- the top of the process; the parent words it
        # safetensors writes in Rust and hands an OS error over as text
        full = f"os error {errno.ENOSPC}" in str(error) or f"os error {errno.EFBIG}" in str(error)
        emit(error=str(error) or type(error).__name__, kind="full" if full else "unsupported")
        return 1
    return 0


def convert(gguf: str, out: str, chat_template: str | None) -> None:
    """Write `gguf`, dequantised to bfloat16, into folder `out` in the layout of the hub."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _report_tensors()
    folder, name = str(Path(gguf).parent), Path(gguf).name
    emit(phrase="dequantise", share=0.0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    emit(phrase="convert the tokenizer", share=0.0)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    # The weights are plain now, but the model still says it is quantised, and refuses to be saved.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # The conversion leaves the defaults of the architecture here, whatever the file says.
    for kind in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.generation_config, kind, getattr(tokenizer, kind))
        setattr(model.config, kind, getattr(tokenizer, kind))
    emit(phrase="write the weights", share=0.0)
    model.to(torch.bfloat16).save_pretrained(out)
    emit(phrase="write the tokenizer", share=0.8)
    tokenizer.save_pretrained(out)


def _report_tensors() -> None:
    """Have the library's loop over tensors, which shows a bar of its own, report to us instead."""
    from transformers import modeling_gguf_pytorch_utils as library

    class Bar(library.tqdm):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
            super().__init__(*args, **{**kwargs, "disable": True})

        def __iter__(self) -> Any:  # noqa: ANN401
            for done, item in enumerate(self.iterable):
                emit(phrase="dequantise", share=done / max(1, self.total or 1))
                yield item

    library.tqdm = Bar  # type: ignore[attr-defined, misc, unused-ignore]


def emit(**fields: str | float) -> None:
    os.write(1, json.dumps(fields).encode() + b"\n")


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(2)


if __name__ == "__main__":
    sys.exit(main())
