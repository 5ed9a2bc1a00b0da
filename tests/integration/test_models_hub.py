"""A model of the Hugging Face hub arrives whole, also after a cut, and each refusal is one sentence.

The hub is a small HTTP server here that speaks the few calls huggingface_hub makes; commands run as processes.
"""

import hashlib
import json
import re
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from models.settings import child_environment

COMMIT = "9f2b" * 10
OTHER = b"not wanted"


class Hub(ThreadingHTTPServer):
    """Serves `files` as org/tiny, with one branch."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.cut_after = 0
        """Breaks the connection after so many bytes of weights, once."""
        self.is_down = False
        self.refuses_weights = False
        self.sent: Counter[str] = Counter()
        """Bytes of each file that went out."""


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.server.is_down:
            return self.refuse(503, "")
        if path.startswith(("/api/models/org/gated/", "/org/gated/")):
            return self.refuse(403, "GatedRepo")
        if path.startswith("/api/models/org/tiny/revision/"):
            if path.rsplit("/", 1)[1] not in ("main", COMMIT):
                return self.refuse(404, "RevisionNotFound")
            siblings = [{"rfilename": name} for name in self.server.files]
            info = {"id": "org/tiny", "sha": COMMIT, "siblings": siblings, "private": False}
            return self.answer(json.dumps(info).encode(), "application/json")
        if path.startswith("/api/models/org/tiny/tree/"):
            return self.answer(json.dumps(self.tree()).encode(), "application/json")
        match = re.fullmatch(r"/org/tiny/resolve/[^/]+/(.+)", path)
        if match and match[1] in self.server.files:
            if match[1].endswith(".safetensors") and self.server.refuses_weights:
                return self.refuse(403, "")
            return self.send_content(match[1])
        return self.refuse(404, "RepoNotFound")

    def tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in self.server.files.items()
        ]

    def refuse(self, code: int, reason: str) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", reason)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def send_content(self, name: str) -> None:
        data = self.server.files[name]
        begin = 0
        match = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if match:
            begin = int(match[1])
        self.send_response(206 if match else 200)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        if match:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - begin))
        self.end_headers()
        if self.command != "GET":
            return
        end = len(data)
        if name.endswith(".safetensors") and self.server.cut_after:
            end, self.server.cut_after = begin + self.server.cut_after, 0
            self.close_connection = True
        self.wfile.write(data[begin:end])
        self.server.sent[name] += end - begin


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    wanted = {p.name: p.read_bytes() for p in folder.iterdir()}
    return {**wanted, "pytorch_model.bin": OTHER, "onnx/model.onnx": OTHER, "README.md": OTHER}


@pytest.fixture
def hub(files):
    server = Hub(files)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def pull(hub: Hub, cache: Path, ref: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", "models", "pull", ref],
        env=child_environment(
            TPUGATE_MODELS_DIR=str(cache / "models"),
            HF_HOME=str(cache / "hf"),
            HF_ENDPOINT=f"http://127.0.0.1:{hub.server_port}",
            HF_HUB_OFFLINE="0",
            HF_HUB_DISABLE_XET="1",
            NO_PROXY="127.0.0.1",
        ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr
    return done


def stored(cache: Path) -> list[Path]:
    return [p for p in (cache / "models").iterdir() if p.name[0] != "."]


def test_what_a_server_needs_is_fetched_and_nothing_else(hub, tmp_path):
    done = pull(hub, tmp_path, "org/tiny")
    assert done.returncode == 0, done.stderr
    (folder,) = stored(tmp_path)
    names = {p.name for p in folder.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "manifest.json"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["id"] == "org/tiny"
    assert manifest["source"] == {
        "kind": "hub",
        "repo": "org/tiny",
        "revision": "main",
        "commit": COMMIT,
    }
    hub.is_down = True
    assert pull(hub, tmp_path, "org/tiny").returncode == 0  # it is here: no network needed


def test_a_broken_connection_resumes_where_it_broke(hub, files, tmp_path):
    size = len(files["model.safetensors"])
    hub.cut_after = size - 1  # the library keeps whole chunks, of 10 MiB
    done = pull(hub, tmp_path, "org/tiny")
    assert done.returncode == 0, done.stderr
    assert (stored(tmp_path)[0] / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert hub.sent["model.safetensors"] < 1.1 * size


def test_an_interrupted_pull_keeps_the_files_it_had(hub, files, tmp_path):
    hub.refuses_weights = True
    done = pull(hub, tmp_path, "org/tiny")
    assert done.returncode == 1
    assert stored(tmp_path) == []
    hub.refuses_weights = False
    done = pull(hub, tmp_path, "org/tiny")
    assert done.returncode == 0, done.stderr
    assert {name: hub.sent[name] for name in ("config.json", "model.safetensors")} == {
        name: len(files[name]) for name in ("config.json", "model.safetensors")
    }


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        ("org/missing", "The hub has no model org/missing"),
        ("org/tiny@v9", "org/tiny has no revision 'v9'"),
        ("org/gated", "org/gated is gated: accept its terms"),
    ],
)
def test_each_refusal_is_one_sentence(hub, tmp_path, ref, words):
    done = pull(hub, tmp_path, ref)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"Error: {words}")
    assert stored(tmp_path) == []


def test_a_repository_without_safetensors_says_so(tmp_path, hub):
    hub.files = {"config.json": b"{}", "pytorch_model.bin": OTHER}
    done = pull(hub, tmp_path, "org/tiny")
    assert done.returncode == 1
    assert "org/tiny has no *.safetensors weights" in done.stderr.splitlines()[-1]
