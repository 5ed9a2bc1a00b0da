"""A template that loops, recurses or allocates without end is stopped with one sentence, and harms nobody else."""

import threading

import pytest

from models.chat_templates import MOST_SOURCE, ChatTemplate
from models.errors import ChatTemplateError, TemplateLimitError
from models.template_sandbox import Budget

USER = {"role": "user", "content": "hi"}
DOUBLED = (
    "{% set ns = namespace(x=START) %}{% for i in range(99) %}{% set ns.x = STEP %}{% endfor %}"
)


def doubled(start: str, step: str, end: str = "") -> str:
    return DOUBLED.replace("START", start).replace("STEP", step) + end


def render(source: str, messages: list[dict[str, str]] | None = None) -> str:
    return ChatTemplate(source).render(messages or [USER], budget=Budget(seconds=0.2))


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else '' }}{% endmacro %}{{ f(99) }}",
        "{% macro f() %}{{ caller() }}{% endmacro %}{% for a in range(99999) %}"
        "{% for b in range(99999) %}{% call f() %}{% endcall %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ 10 ** 10 * 'x' }}",
        "{{ [0] * 10 ** 10 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ ('%' ~ 10 ** 9 ~ 'd') % 1 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10 ** 9) }}",
        "{{ 'x'.ljust(10 ** 9) }}",
        "{{ ('x' | escape).rjust(10 ** 9) }}",
        "{{ '\t'.expandtabs(10 ** 9) }}",
        "{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
        "{{ 'x' * 99999 | replace('x', 'y' * 99999) }}",
        "{{ ('x' * 99999) | replace('x', 'y' * 99999) }}",
        "{{ ('y' * 99999).join(range(9999) | map('string')) }}",
        "{{ range(9999) | join('y' * 99999) }}",
        "{{ ('\n' * 99999) | indent(99999) }}",
        "{{ [1] | tojson(indent=10 ** 9) }}",
        "{{ [1, 2] | tojson(separators=('y' * 99999, '')) }}",
        "{{ [1] | batch(10 ** 9, 'x') | list }}",
        "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{% for i in range(9999) %}" + "x" * 9999 + "{% endfor %}",
        "{% macro m() %}{{ 'x' * 999999 }}{% endmacro %}{% for i in range(999) %}{{ m() }}{% endfor %}",
        doubled("'x'", "ns.x + ns.x"),
        doubled("'x'", "ns.x ~ ns.x"),
        doubled("[1]", "ns.x + ns.x"),
        doubled("3", "ns.x * ns.x"),
        doubled("[]", "[ns.x, ns.x]", "{{ ns.x }}"),
        doubled("[]", "[ns.x, ns.x]", "{{ ns.x | tojson }}"),
        doubled("[]", "[ns.x, ns.x]", "{{ ns.x ~ 'x' }}"),
        doubled("[]", "[ns.x, ns.x]", "{{ ns.x | string }}"),
        doubled("[]", "[ns.x, ns.x]", "{{ '%s' % ns.x }}"),
        doubled("{}", "{1: ns.x, 2: ns.x}", "{{ ns.x.values() }}"),
        doubled("[]", "[ns.x, ns.x]", "{{ [ns.x] | join }}"),
        "{% set l = [0] * 99999 %}{{ ([l] * 99999) | map('list') | list | length }}",
        "{% set l = [0] * 99999 %}{{ ([l] * 99999) | sum(start=[]) | length }}",
    ],
)
def test_what_never_ends_is_ended(source: str):
    with pytest.raises(ChatTemplateError) as caught:
        render(source)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ '\\ud800' | tojson | first * 2 ** 40 }}",
        "{% import 'x' as y %}",
        "{% include 'x' %}",
        "{{ lipsum(n=10 ** 9) }}",
        "{% set self.x = 1 %}",
    ],
)
def test_what_a_sandbox_has_not_is_an_error(source: str):
    with pytest.raises(ChatTemplateError):
        render(source)


@pytest.mark.parametrize("source", ["{" * 99_999, "{{ " + "(" * 5_000, "x" * (MOST_SOURCE + 1)])
def test_what_no_compiler_takes_is_no_template(source: str):
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render([USER])


def test_constants_are_not_computed_while_a_template_is_compiled():
    ChatTemplate("{% if false %}{{ 'x' * 10 ** 12 ~ ('y' * 99999 | upper) }}{% endif %}")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for a in [1, 2] %}{{ loop.index }}{{ loop.last }}{% endfor %}", "1False2True"),
        ("{% for a in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% for a in [1, 2, 3] if a > 1 %}{{ loop.length }}{% endfor %}", "22"),
        ("{{ 1 ~ 'x' ~ none ~ missing }}", "1xNone"),
        ("{{ '-' * 3 + 'x' * 2 }}", "---xx"),
        ("{{ 7 % 4 }}{{ '%s-%02d' % ('a', 5) }}{{ '{:>3}|{}'.format(1, 'b') }}", "3a-05  1|b"),
        ("{{ 2 ** 10 }}{{ 3 * 4 }}{{ 1.5 * 2 }}{{ 2 ** -1 }}", "1024123.00.5"),
        ("{{ [1] + [2] }}{{ (messages + messages) | length }}", "[1, 2]2"),
        ("{{ ['a', 'b'] | map('upper') | join(', ') }}", "A, B"),
        ("{{ 'a\nb' | indent(2, true) }}{{ 'aXb' | replace('X', '-') }}", "  a\n  ba-b"),
        ("{{ messages | map(attribute='role') | list }}", "['user']"),
        ("{{ ' a '.strip() }}{{ 'a,b'.split(',')[1] }}{{ 'abc'.replace('b', '') }}", "abac"),
        ("{{ {'a': [1]} | tojson(indent=1) }}", '{\n "a": [\n  1\n ]\n}'),
        (
            "{{ [3, 1] | sort | first }}{{ [1, 2] | sum }}{{ [1, 2] | batch(1) | list }}",
            "13[[1], [2]]",
        ),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{% endfilter %}", "a1B"),
        (
            "{% macro m(a) %}[{{ a }}{{ caller() }}]{% endmacro %}{% call m(1) %}x{% endcall %}",
            "[1x]",
        ),
    ],
)
def test_what_templates_do_is_what_jinja_does(source: str, expected: str):
    assert render(source) == expected


def test_few_passes_are_enough_for_few_messages():
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert template.render([USER] * 5, budget=Budget(passes=5)) == "hi" * 5
    with pytest.raises(TemplateLimitError, match="too long"):
        template.render([USER] * 6, budget=Budget(passes=5))


def test_long_chats_are_rendered():
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "x" * 1000}] * 4096
    assert len(template.render(messages)) == 4096 * 1007


def test_threads_have_budgets_of_their_own():
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    endless, short = ChatTemplate(source), ChatTemplate("{{ messages[0].content * 3 }}")
    failures: list[Exception] = []

    def run() -> None:
        try:
            endless.render([USER], budget=Budget(seconds=0.2))
        except TemplateLimitError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        assert short.render([USER]) == "hihihi"
    assert len(failures) == 1
