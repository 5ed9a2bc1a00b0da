"""The servers that are compared, each with the settings that are fair to it."""

import json
import sys
from pathlib import Path

from benchmarks.servers import Recipe, free_port

ADMIN_KEY = "sk-benchmark-only"
VLLM_MAX_MODEL_LEN = 2048


def tpugate(
    model: str, folder: Path, options: tuple[str, ...] = (), models_dir: Path | None = None
) -> Recipe:
    """`tpugate serve` with its data in `folder`.

    With `models_dir`, compiled programs are kept in `folder` too, so that its first start finds none,
    and only the weights come from there: fetching them is not what start-up measures.
    """
    port = free_port()
    command = [str(Path(sys.executable).with_name("tpugate")), "serve", *options]
    command += ["--model", model] if model else []
    command += ["--host", "127.0.0.1", "--port", str(port), "--data-dir", str(folder / "data")]
    environment = {"TPUGATE_ADMIN_KEY": ADMIN_KEY}
    if models_dir:
        environment["TPUGATE_CACHE_DIR"] = str(folder / "cache")
        environment["TPUGATE_MODELS_DIR"] = str(models_dir)
    return Recipe(
        name="tpugate",
        command=command,
        url=f"http://127.0.0.1:{port}",
        ready_path="/ready",
        environment=environment,
        api_key=ADMIN_KEY,
    )


def vllm(model: str, model_dir: Path, venv: Path, num_cores: int) -> Recipe:
    """vLLM's CPU build on all cores (its default leaves one of them idle), in bfloat16."""
    port = free_port()
    command = [str(venv / "bin" / "vllm"), "serve", str(model_dir), "--served-model-name", model]
    command += ["--dtype", "bfloat16", "--max-model-len", str(VLLM_MAX_MODEL_LEN)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    return Recipe(
        name="vllm",
        command=command,
        url=f"http://127.0.0.1:{port}",
        ready_path="/health",
        environment={
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_cores - 1}",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "HF_HUB_OFFLINE": "1",
        },
    )


def instant_upstream() -> Recipe:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "benchmarks.instant_upstream:app"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    url = f"http://127.0.0.1:{port}"
    return Recipe(name="upstream", command=command, url=url, ready_path="/", environment={})


def litellm(upstream_url: str, venv: Path, folder: Path) -> Recipe:
    """LiteLLM's proxy, one process, with a master key and without a database; its configuration in `folder`."""
    port = free_port()
    config = folder / "litellm.json"  # YAML is a superset of JSON
    parameters = {"model": "openai/instant", "api_base": f"{upstream_url}/v1", "api_key": "none"}
    models = [{"model_name": "instant", "litellm_params": parameters}]
    config.write_text(json.dumps({"model_list": models}), encoding="utf-8")
    command = [str(venv / "bin" / "litellm"), "--config", str(config)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    return Recipe(
        name="litellm",
        command=command,
        url=f"http://127.0.0.1:{port}",
        ready_path="/health/liveliness",
        environment={"LITELLM_MASTER_KEY": ADMIN_KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        api_key=ADMIN_KEY,
    )
