"""Chat templates render as `transformers` renders them, stay in their sandbox, and fail with one sentence."""

import pytest

from models.chat_templates import ChatTemplate
from models.errors import ChatTemplateError

USER = {"role": "user", "content": "hi"}
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_messages_become_the_prompt():
    template = ChatTemplate(CHATML)
    prompt = template.render([{"role": "system", "content": "short"}, USER])
    assert prompt == (
        "<|im_start|>system\nshort<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert template.render([USER], add_generation_prompt=False).endswith("hi<|im_end|>\n")


def test_special_tokens_and_extra_variables():
    template = ChatTemplate("{{ bos_token }}{{ enable_thinking }}", {"bos_token": "<s>"})
    assert template.render([USER], extra={"enable_thinking": False}) == "<s>False"


def test_whitespace_loops_json_and_generation_blocks():
    source = (
        "{% for message in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ message | tojson }}{% endgeneration %}\n{% endfor %}"
    )
    rendered = ChatTemplate(source).render([{"role": "user", "content": "<é>"}, USER])
    assert rendered.strip() == '{"role": "user", "content": "<é>"}'


def test_a_date_in_the_prompt():
    assert len(ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([USER])) == 10


def test_namespace_and_dict_work():
    source = "{% set ns = namespace(n=1) %}{% set ns.n = dict(a=2)['a'] %}{{ ns.n }}"
    assert ChatTemplate(source).render([USER]) == "2"


def test_the_templates_own_refusal_is_the_message():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        template.render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.__subclasses__() }}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ 'a' + none }}",
        "{{ messages[0].content.nothing.at_all }}",
        "{{ 1 // 0 }}",
    ],
)
def test_escapes_and_mistakes_are_errors(source: str):
    template = ChatTemplate(source)
    with pytest.raises(ChatTemplateError):
        template.render([USER])


def test_a_long_reason_is_cut():
    template = ChatTemplate("{{ raise_exception('x' * 100000) }}")
    with pytest.raises(ChatTemplateError) as caught:
        template.render([USER])
    assert len(str(caught.value)) < 500


def test_no_template():
    with pytest.raises(ChatTemplateError, match="cannot be compiled"):
        ChatTemplate("{% if %}")


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "raise_exception", "range", "bos_token"]
)
def test_reserved_variables_cannot_be_set(name: str):
    with pytest.raises(ChatTemplateError, match=name):
        ChatTemplate("x", {"bos_token": "<s>"}).render([USER], extra={name: []})
