"""Whatever a client's roles and their order, each family's template gets them in a way that it takes, and nothing is lost.

The templates in `tests/data/chat_templates` are short ones with the habits of known families.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.chat_format import TOOL_FORMATS
from models.chat_roles import Conversation, render_conversation
from models.chat_templates import ChatTemplate
from models.errors import ChatTemplateError
from models.template_traits import TemplateTraits

FOLDER = Path(__file__).resolve().parents[1] / "data" / "chat_templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
FAMILIES = {
    path.stem: ChatTemplate(path.read_text(), TOKENS) for path in sorted(FOLDER.glob("*.jinja"))
}
TRAITS: dict[str, dict[str, Any]] = {
    # What differs from a template that takes everything; `developer` does for all but one.
    "chatml": {"tools": False},
    "deepseek": {"system": "first", "arguments": "text"},
    "gemma2": {"system": "none", "alternates": True, "tools": False},
    "gemma3": {"system": "first", "alternates": True, "needs_user": True, "tools": False},
    "harmony": {"developer": True, "system": "first", "single_calls": True},
    "hermes": {},
    "llama2": {"system": "first", "alternates": True, "needs_user": True, "tools": False},
    "llama3": {"single_calls": True},
    "mistral": {
        "system": "first",
        "system_needs_last_user": True,
        "alternates": True,
        "needs_user": True,
        "short_ids": True,
    },
    "phi3": {"tools": False},
    "qwen2_5": {},
    "qwen3": {},
    "smolvlm": {"parts": True, "tools": False},
}
TOOL = {
    "type": "function",
    "function": {"name": "tide", "description": "", "parameters": {"type": "object"}},
}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def developer(text: str) -> dict[str, Any]:
    return {"role": "developer", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, *calls: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return {**message, "tool_calls": list(calls)} if calls else message


def call(call_id: str, name: str, arguments: object) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def rendered(family: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return render_conversation(FAMILIES[family], Conversation(messages, **options))


def test_each_family_has_its_traits():
    assert set(TRAITS) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_template_takes_is_found_out(family: str):
    assert FAMILIES[family].traits == TemplateTraits(**{"developer": False, **TRAITS[family]})


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "system": [system("S1"), user("U1")],
    "developer": [developer("S1"), user("U1")],
    "several": [system("S1"), developer("S2"), user("U1")],
    "late": [user("U1"), assistant("A1"), system("S1"), user("U2")],
    "last": [user("U1"), system("S1")],
    "alone": [system("S1")],
    "users": [user("U1"), user("U2"), user("U3")],
    "assistant first": [assistant("A1"), user("U1")],
    "assistant alone": [assistant("A1")],
    "assistants": [user("U1"), assistant("A1"), assistant("A2"), user("U2")],
    "call": [
        system("S1"),
        user("U1"),
        assistant("", call("call_0123456789", "tide", {"harbour": "Port Ness"})),
        result("call_0123456789", "R1"),
    ],
    "calls": [
        user("U1"),
        assistant("A1", call("a", "tide", {"at": "x1"}), call("b", "moon", {"at": "x2"})),
        result("a", "R1"),
        result("b", "R2"),
        assistant("A2"),
        user("U2"),
    ],
    "wrong arguments": [user("U1"), assistant("", call("a", "tide", '{"at": x1'))],
    "user after result": [user("U1"), assistant("", call("a", "tide", {})), result("a", "R1"), user("U2")],
    "result of nothing": [user("U1"), result("a", "R1")],
}  # fmt: skip


def words(message: dict[str, Any]) -> list[str]:
    calls = [c["function"] for c in message.get("tool_calls", ())]
    called = [c["name"] for c in calls]
    called += [text for c in calls if isinstance(c["arguments"], dict) for text in c["arguments"]]
    return [message["content"], *called]


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_lost(family: str, name: str):
    messages = CONVERSATIONS[name]
    for tools in ((), (TOOL,)):
        prompt = rendered(family, messages, tools=tools)
        for message in messages:
            # Hermes and Llama show calls without the text beside them, Harmony one call of a turn.
            lost = message["content"] if message.get("tool_calls") else ""
            for word in words(message):
                assert word in prompt or word == lost, (word, prompt)
    assert "tide" in prompt


SAID = [system("S1"), user("U1"), assistant("A1"), developer("S2"), user("U2"), user("U3")]
PROMPTS = {
    "chatml": "<|im_start|>system\nS1<|im_end|>\n<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\nA1"
    "<|im_end|>\n<|im_start|>system\nS2<|im_end|>\n<|im_start|>user\nU2<|im_end|>\n<|im_start|>user\nU3"
    "<|im_end|>\n<|im_start|>assistant\n",
    "llama2": "<s>[INST] <<SYS>>\nS1\n\nS2\n<</SYS>>\n\nU1 [/INST] A1 </s><s>[INST] U2\n\nU3 [/INST]",
    "mistral": "<s>[INST] U1[/INST] A1</s>[INST] S1\n\nS2\n\nU2\n\nU3[/INST]",
    "gemma2": "<s><start_of_turn>user\nS1\n\nS2\n\nU1<end_of_turn>\n<start_of_turn>model\nA1<end_of_turn>\n"
    "<start_of_turn>user\nU2\n\nU3<end_of_turn>\n<start_of_turn>model\n",
    "smolvlm": "<|im_start|>System: S1<end_of_utterance>\nUser: U1<end_of_utterance>\nAssistant: A1"
    "<end_of_utterance>\nSystem: S2<end_of_utterance>\nUser: U2<end_of_utterance>\nUser: U3"
    "<end_of_utterance>\nAssistant:",
}


@pytest.mark.parametrize("family", PROMPTS)
def test_prompts_to_the_letter(family: str):
    assert rendered(family, SAID) == PROMPTS[family]


def test_calls_and_results_of_a_template_without_tools_are_text():
    prompt = rendered("gemma2", CONVERSATIONS["calls"])
    assert prompt == (
        "<s><start_of_turn>user\nU1<end_of_turn>\n<start_of_turn>model\nA1\n"
        '<tool_call>\n{"name": "tide", "arguments": {"at": "x1"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "moon", "arguments": {"at": "x2"}}\n</tool_call><end_of_turn>\n'
        "<start_of_turn>user\n<tool_response>\nR1\n</tool_response>\n<tool_response>\nR2\n</tool_response>"
        "<end_of_turn>\n<start_of_turn>model\nA2<end_of_turn>\n"
        "<start_of_turn>user\nU2<end_of_turn>\n<start_of_turn>model\n"
    )


def test_a_template_of_single_calls_gets_them_one_by_one():
    prompt = rendered("llama3", CONVERSATIONS["calls"])
    order = ['{"name": "tide"', "R1", '{"name": "moon"', "R2", "A2"]
    assert sorted(order, key=prompt.index) == order


def test_arguments_and_ids_are_what_the_template_wants():
    messages = CONVERSATIONS["call"]
    assert '<tool_call>\n{"name": "tide", "arguments": {"harbour": "Port Ness"}}' in rendered(
        "qwen2_5", messages
    )
    assert '```json\n{"harbour": "Port Ness"}\n```' in rendered("deepseek", messages)
    prompt = rendered("mistral", messages)
    made = json.loads(prompt.split("[TOOL_CALLS] ")[1].split("</s>")[0])[0]
    assert len(made["id"]) == 9
    assert f'"call_id": "{made["id"]}"' in prompt


def test_tools_are_told_in_words_where_the_template_knows_none():
    prompt = rendered("gemma2", [system("S1"), user("U1")], tools=[TOOL])
    assert "<start_of_turn>user\nS1\n\n# Tools\n" in prompt
    assert json.dumps(TOOL) in prompt
    assert prompt.endswith("U1<end_of_turn>\n<start_of_turn>model\n")
    assert "<tool_call>" not in rendered("qwen2_5", [user("U1")], tools=[TOOL])


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_each_format_of_calls_is_told(name: str):
    conversation = Conversation([user("U1")], [TOOL])
    prompt = render_conversation(FAMILIES["chatml"], conversation, tool_format=name)
    assert '"tide"' in prompt
    assert '{"name": <function-name>' in prompt


@pytest.mark.parametrize("text", ["The answer", "The answer is ", "", "a\n\n", "<think>\nso"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_open_turn_ends_with_its_text(family: str, text: str):
    messages = [system("S1"), user("U1"), assistant(text)]
    prompt = rendered(family, messages, continues=True)
    assert prompt.endswith(text)
    whole = rendered(family, [*messages[:-1], assistant(text + "END")], add_generation_prompt=False)
    assert whole.startswith(prompt + "END")


def test_an_open_turn_that_a_template_leaves_out_is_an_error():
    template = ChatTemplate(
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ChatTemplateError, match="last message"):
        render_conversation(template, Conversation([user("U1"), assistant("x")], continues=True))


def test_a_refusal_is_in_the_templates_own_words():
    template = ChatTemplate("{{ raise_exception('no, ' + messages[0].content) }}")
    with pytest.raises(ChatTemplateError, match="no, thanks"):
        render_conversation(template, Conversation([user("thanks")]))


def test_an_endless_template_is_not_tried_for_long():
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    assert ChatTemplate(endless).traits == TemplateTraits()


TEXTS = st.text(max_size=6)
CALLS = st.builds(call, TEXTS, TEXTS, st.dictionaries(TEXTS, TEXTS, max_size=2) | TEXTS)
MESSAGES = st.lists(
    st.builds(system, TEXTS)
    | st.builds(developer, TEXTS)
    | st.builds(user, TEXTS)
    | st.builds(result, TEXTS, TEXTS)
    | st.builds(lambda text, calls: assistant(text, *calls), TEXTS, st.lists(CALLS, max_size=3)),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(MESSAGES, st.booleans())
def test_any_conversation_is_rendered(messages: list[dict[str, Any]], has_tools: bool):
    for family in FAMILIES:
        prompt = rendered(family, messages, tools=[TOOL] if has_tools else ())
        assert isinstance(prompt, str)
