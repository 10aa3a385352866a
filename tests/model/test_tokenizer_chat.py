"""Chat templates: what they are given, what they may do, and how their failures are told."""

import json
from pathlib import Path
from typing import Any

import pytest

from model.tokenizer import Tokenizer, TokenizerError
from tests.model.tokenizer_files import byte_level_metadata, save_folder

USER = [{"role": "user", "content": "hi"}]


def render(template: str, messages: Any = USER, **options: Any) -> str:
    metadata = byte_level_metadata() | {"tokenizer.chat_template": template}
    return Tokenizer.from_gguf(metadata).render_chat(messages, **options)


def test_messages_and_special_tokens() -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    assert render(template) == "<bos>[user]hi<eos>"


def test_generation_prompt() -> None:
    template = "x{% if add_generation_prompt %}A:{% endif %}"
    assert render(template) == "xA:"
    assert render(template, add_generation_prompt=False) == "x"


def test_blocks_are_trimmed() -> None:
    assert render("{% if true %}\n  {% set x = 1 %}\nline\n{% endif %}\n") == "line\n"


def test_tools_and_other_variables() -> None:
    template = "{{ tools is none }} {{ documents is none }} {{ date_string is defined }} {{ pad_token is defined }}"
    assert render(template) == "True True False False"
    assert render("{{ date_string }}", variables={"date_string": "1 Jan"}) == "1 Jan"


def test_tojson_keeps_text_as_it_is() -> None:
    assert render("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
    assert render("{{ {'b': 2, 'a': 1} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 1,\n "b": 2\n}'


def test_helpers() -> None:
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ strftime_now('%Y') | length }}") == "4"
    assert render("{% generation %}a{{ messages[0].content }}{% endgeneration %}b") == "ahib"
    assert render("{% set ns = namespace(n=0) %}{% set ns.n = 5 %}{{ ns.n }}") == "5"


def test_null_message_fields_are_left_out() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": None}]
    assert render("{{ messages[0] | tojson }}", messages) == '{"role": "assistant"}'


def test_template_refusal_is_passed_on() -> None:
    with pytest.raises(TokenizerError, match="refused the chat: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


DOUBLED = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "chat template is invalid at line 1"),
        ("a\n{% endfor %}", "invalid at line 2"),
        ("{{ messages[0].content + 1 }}", "chat template failed: TypeError"),
        ("{{ missing.field }}", "refused the chat: 'missing' is undefined"),
        ("{{ messages.append(1) }}", "refused the chat: access to attribute 'append' .* is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "refused the chat: .*unsafe"),
        ("{{ 'a' * 100000000 }}", "repeated a value to over 16777216"),
        ("{{ 100000000 * [1] }}", "repeated a value"),
        ("{{ 2 ** 100000 }}", "power above 1000"),
        ("{{ (10 ** 1000) ** 1000 }}", "a number of more than 65536 bits"),
        (DOUBLED % "'a'" + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "made a value of more than 16777216"),
        (DOUBLED % "'a'" + "{% set ns.x = ns.x + ns.x %}{% endfor %}", "made a value of more than 16777216"),
        (DOUBLED % "[1]" + "{% set ns.x = ns.x + ns.x %}{% endfor %}", "made a value of more than 16777216"),
        (DOUBLED % "[1]" + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}", "wrote out a value of more"),
        (DOUBLED % "[1]" + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}", "wrote out a value of more"),
        (
            "{% set ns = namespace(x=[]) %}{% for i in range(99) %}{% set ns.x = ns.x + ['a' * 9999999] %}{% endfor %}",
            "made more than 268435456 characters in all",
        ),
        ("{{ 'a' | center(9000000000) }}", "gave center the number"),
        ("{{ 'a'.ljust(9000000000) }}", "gave ljust the number"),
        ("{{ ['a'] | map('center', 9000000000) | list }}", "gave map the number"),
        ("{{ 'a\nb' | indent(9000000000) }}", "gave indent the number"),
        ("{{ '%9000000000d' % 3 }}", "a field of a width"),
        ("{{ '%*d' % (9000000000, 3) }}", "a field of a width"),
        ("{{ '%9000000000d' | format(3) }}", "a field of a width"),
        ("{{ '{:>9000000000}'.format('a') }}", "a field of a width"),
        ("{{ '{:>{}}'.format('a', 9000000000) }}", "a field of a width"),
        ("{% set a = 'a' * 9999 %}{{ a.replace('a', a) }}", "made a value of more than 16777216"),
        ("{% set a = 'a' * 9999 %}{{ a | replace('a', a) }}", "made a value of more than 16777216"),
        ("{% set a = 'a' * 9999 %}{{ a.join(a) }}", "made a value of more than 16777216"),
        ("{% set a = 'a' * 9999 %}{{ a | list | join(a) }}", "made a value of more than 16777216"),
        ("{% set a = 'a' * 9999 %}{{ ([a] * 9999) | join }}", "made a value of more than 16777216"),
        ("{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}", "wrote more than 16777216 characters"),
        ("{% for i in range(10000000) %}{% endfor %}", "Range too big"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 250000 turns"),
        (
            "{% set r = range(999) %}{% for i in r %}{% for j in r if i < 0 %}{% endfor %}{% endfor %}",
            "more than 250000",
        ),
        ("{% for i in range(999) recursive %}{{ loop(range(999)) if loop.depth < 3 }}{% endfor %}", "more than 250000"),
        ("{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}", "more than 250000 turns"),
    ],
)
def test_failing_templates(template: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        render(template)


def test_loops_still_work() -> None:
    assert render("{% for x in [1, 2, 3] %}{{ loop.index ~ '/' ~ loop.length ~ ' ' }}{% endfor %}") == "1/3 2/3 3/3 "
    assert render("{% for x in [1, 2, 3] if x > 1 %}{{ x }}{% endfor %}") == "23"
    assert render("{% for x in [] %}{% else %}none{% endfor %}") == "none"
    assert render("{% for x in [1, 2, 3, 4] %}{% if x == 3 %}{% break %}{% endif %}{{ x }}{% endfor %}") == "12"


def test_arithmetic_still_works() -> None:
    assert render("{{ 3 * 4 }} {{ '-' * 3 }} {{ 2 ** 10 }} {{ [1] * 2 }}") == "12 --- 1024 [1, 1]"


def test_making_texts_still_works() -> None:
    assert (
        render("{{ 'a' ~ 1 ~ [2] ~ missing }}|{{ 'ab' | center(6) }}|{{ 'a\nb' | indent(2) }}") == "a1[2]|  ab  |a\n  b"
    )
    assert render("{{ '**%s** %5.1f' % ('x', 2) }}|{{ '{:>3}{a}'.format('x', a=1700000000) }}") == (
        "**x**   2.0|  x1700000000"
    )
    assert render("{{ ['a', 'b'] | join(', ') }}|{{ '-'.join(['a', 'b']) }}|{{ 'aba' | replace('a', 'cc') }}") == (
        "a, b|a-b|ccbcc"
    )
    assert (
        render("{{ {'a': [1, {'b': none}]} | tojson(indent=2) }}")
        == '{\n  "a": [\n    1,\n    {\n      "b": null\n    }\n  ]\n}'
    )
    assert render(
        "{{ messages | map(attribute='role') | list }} {{ 1700000000 | string }} {{ x | default(9999999) }}"
    ) == ("['user'] 1700000000 9999999")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list of messages"),
        ("hi", "non-empty list of messages"),
        ({"role": "user"}, "non-empty list of messages"),
        (["hi"], "chat message 0 is 'hi'"),
        ([*USER, {"content": "x"}], 'chat message 1 is .*must be an object with a "role"'),
    ],
)
def test_refused_messages(messages: Any, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        render("x", messages)


def test_without_a_template() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata())
    assert not tokenizer.has_chat_template
    with pytest.raises(TokenizerError, match=r"no chat template.*--prompt"):
        tokenizer.encode_chat(USER)


def test_bos_from_the_template_is_the_only_one() -> None:
    metadata = byte_level_metadata(add_bos_token=True) | {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}<|eot_id|>"
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode_chat(USER) == [261, 256, 263]
    assert tokenizer.encode(tokenizer.render_chat(USER)) == [261, 256, 263]


def test_encoding_a_chat_adds_nothing_to_the_template() -> None:
    metadata = byte_level_metadata(add_bos_token=True) | {"tokenizer.chat_template": "{{ messages[0].content }}"}
    assert Tokenizer.from_gguf(metadata).encode_chat(USER) == [256]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template": "jinja"}, "jinja"),
        ({"tokenizer_config": {"chat_template": "config"}}, "config"),
        ({"chat_template": "jinja", "tokenizer_config": {"chat_template": "config"}}, "jinja"),
        (
            {
                "tokenizer_config": {
                    "chat_template": [
                        {"name": "tool_use", "template": "tools"},
                        {"name": "default", "template": "plain"},
                    ]
                }
            },
            "plain",
        ),
    ],
)
def test_places_of_a_template(tmp_path: Path, files: dict[str, Any], expected: str) -> None:
    assert Tokenizer.from_folder(save_folder(tmp_path, **files)).render_chat(USER) == expected


def test_template_in_its_own_json_file(tmp_path: Path) -> None:
    save_folder(tmp_path, tokenizer_config={"chat_template": "config"})
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert Tokenizer.from_folder(tmp_path).render_chat(USER) == "json"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ([{"name": "rag", "template": "x"}], "chat templates rag but none is called 'default'"),
        (5, "chat_template is a int"),
        ({"default": "x"}, "chat_template is a dict"),
    ],
)
def test_refused_templates(tmp_path: Path, template: Any, message: str) -> None:
    folder = save_folder(tmp_path, tokenizer_config={"chat_template": template})
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(folder)


def test_template_is_saved(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}é\n"
    Tokenizer.from_folder(save_folder(tmp_path / "a", chat_template=template)).save(tmp_path / "b")
    assert Tokenizer.from_folder(tmp_path / "b").render_chat(USER) == render(template)
