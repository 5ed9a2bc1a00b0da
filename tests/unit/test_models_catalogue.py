"""The catalogue's entries are complete and pinned, and its own chat template reads as a transcript."""

import pytest

from models import catalogue
from models.catalogue import GEMMA_BASE_TEMPLATE, PackageSource
from models.chat_templates import ChatTemplate

PREAMBLE = "The following is a conversation between a user and a helpful assistant."


@pytest.mark.parametrize("entry", catalogue.ENTRIES, ids=lambda entry: entry.id)
def test_an_entry_is_complete_and_pinned(entry):
    assert entry.licence and entry.description and entry.context_len > 0
    assert isinstance(entry.source, PackageSource)
    assert len(bytes.fromhex(entry.source.sha256)) == 32
    assert all("==" in chunk.requirement for chunk in entry.source.chunks)


def test_no_two_entries_share_a_name():
    names = [name for entry in catalogue.ENTRIES for name in (entry.id, *entry.aliases)]
    assert len(names) == len(set(names))
    assert all(catalogue.find(name.upper()) for name in names)


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([("user", " Hi ")], f"<bos>{PREAMBLE}\n\nUser: Hi\n\nAssistant:"),
        ([("system", "Be brief."), ("user", "Hi")], "<bos>Be brief.\n\nUser: Hi\n\nAssistant:"),
        (
            [("user", "Hi"), ("assistant", "Hello."), ("user", "Bye")],
            f"<bos>{PREAMBLE}\n\nUser: Hi\n\nAssistant: Hello.\n\nUser: Bye\n\nAssistant:",
        ),
        (
            [("user", "a"), ("assistant", None)],
            f"<bos>{PREAMBLE}\n\nUser: a\n\nAssistant: \n\nAssistant:",
        ),
    ],
)
def test_the_template_of_the_base_model_is_a_plain_transcript(messages, prompt):
    template = ChatTemplate(GEMMA_BASE_TEMPLATE, {"bos_token": "<bos>"})
    rendered = template.render([{"role": role, "content": text} for role, text in messages])
    assert rendered == prompt
