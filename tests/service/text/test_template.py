"""Chat templates render as transformers renders them."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2.filters
import pytest

from service.text import template as template_module
from service.text.template import ChatTemplate, ChatTemplateError
from service.text.tokenizer import Tokenizer
from tests.service.fixtures import families
from tests.service.harness import FIXTURES

MADE = json.loads((FIXTURES / "templates.json").read_text())
CASES: list[dict[str, Any]] = MADE["cases"]


def render(case: dict[str, Any]) -> str:
    template = ChatTemplate(case["template"], MADE["special_tokens"])
    return template.render(
        case["messages"],
        add_generation_prompt=case["add_generation_prompt"],
        variables=case["variables"],
    )


@pytest.mark.parametrize("name", sorted({case["name"] for case in CASES}))
def test_as_transformers(name: str) -> None:
    for case in (case for case in CASES if case["name"] == name):
        if "error" in case:
            with pytest.raises(ChatTemplateError) as caught:
                render(case)
            assert str(caught.value) == case["error"]
        else:
            assert render(case) == case["expected"]


FAMILIES: list[dict[str, Any]] = json.loads((FIXTURES / "families.json").read_text())["cases"]


def outcome(template: ChatTemplate, case: dict[str, Any]) -> dict[str, str]:
    try:
        text = template.render(
            families.CONVERSATIONS[case["conversation"]],
            tools=[families.WEATHER, families.CLOCK] if case["tools"] else [],
            add_generation_prompt=case["add_generation_prompt"],
            variables=case["variables"],
        )
    except ChatTemplateError as error:
        return {"error": str(error)}
    return {"expected": text}


def check_family(name: str) -> int:
    """Every conversation, with tools and without, as transformers renders it. Returns how many
    became a text. Raises AssertionError."""
    template = ChatTemplate(families.FAMILIES[name], MADE["special_tokens"])
    found = {"expected": 0, "error": 0}
    for case in (case for case in FAMILIES if case["name"] == name):
        ((kind, text),) = outcome(template, case).items()
        assert kind in case, (case, text)
        assert text == case[kind] or name == "underscore", case
        found[kind] += 1
    return found["expected"]


@pytest.mark.parametrize("name", families.FAMILIES)
def test_families_of_templates_as_transformers(name: str) -> None:
    texts = check_family(name)
    assert texts > 10 if name != "underscore" else texts == 0


def test_the_fixtures_are_of_these_templates_and_conversations() -> None:
    keys = ("name", "conversation", "add_generation_prompt", "variables")
    made, now = (
        [[case[key] for key in keys] + [bool(case["tools"])] for case in cases]
        for cases in (FAMILIES, families.cases())
    )
    assert made == now


def _no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    render = ChatTemplate.render

    def without(self: ChatTemplate, messages: Any, *, tools: Any = (), **more: Any) -> str:
        return render(self, messages, **more)

    monkeypatch.setattr(ChatTemplate, "render", without)


def _generation_is_no_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(self: Any, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    monkeypatch.setattr(template_module._GenerationTag, "parse", parse)


def _json_as_jinja_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = template_module._environment

    def other() -> Any:
        made = environment()
        made.filters["tojson"] = jinja2.filters.do_tojson
        return made

    monkeypatch.setattr(template_module, "_environment", other)


@pytest.mark.parametrize(
    ("plant", "name"),
    [(_no_tools, "mistral"), (_generation_is_no_scope, "scopes"), (_json_as_jinja_has_it, "qwen")],
)
def test_a_planted_fault_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_family(name)


def test_strftime_now_is_now() -> None:
    text = ChatTemplate("{{ strftime_now('%Y') }}", {}).render([])
    assert text == str(datetime.now().year)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.foo.bar }}",
        "{{ '{0.__class__.__mro__}'.format(messages).foo.bar }}",
        "{{ (messages|attr('__class__')|attr('__mro__'))[1] }}",
        "{{ self.__init__.__globals__.os }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{% include 'config.json' %}",
        "{% import '/etc/passwd' as x %}",
        "{% extends 'tokenizer.json' %}",
        "{{ messages[0].update(role='x') }}",
    ],
)
def test_what_a_template_must_not_do_is_an_error_of_ours(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "raises a number|counts further"),
        ("{% for i in range(2000000) %}x{% endfor %}", "counts further than"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "counts further than",
        ),
        ("{{ 'x' * 10000000000 }}", "repeats something"),
        ("{{ 10000000000 * [1] }}", "repeats something"),
        ("{{ 9 ** 9 ** 9 }}", "raises a number"),
        ("{% for i in range(100) %}{{ 'x' * 1000 }}{% endfor %}", "makes more than 50000 char"),
        ("{% for m in messages %}{% for n in messages %}{{ n }}{% endfor %}{% endfor %}", "makes"),
    ],
)
def test_a_template_takes_a_bounded_amount(source: str, said: str) -> None:
    """Bombs are refused at once, at load or when they are set off."""
    messages = [{"role": "user", "content": "x" * 40}] * 300
    started = time.monotonic()
    with pytest.raises(ChatTemplateError, match=said):
        ChatTemplate(source, {}).render(messages, max_chars=50_000)
    assert time.monotonic() - started < 5


def test_what_templates_do_with_numbers_still_works() -> None:
    source = "{{ '=' * 3 }}{{ 2 * 3 }}{{ 2 ** 3 }}{% for i in range(1, 6, 2) %}{{ i }}{% endfor %}"
    assert ChatTemplate(source, {}).render([]) == "===68135"


def test_a_clients_text_is_never_a_template() -> None:
    text = "{{ 7 * 7 }}{% include 'config.json' %}"
    template = ChatTemplate("{{ messages[0].content }}{{ name }}", {})
    found = template.render([{"role": "user", "content": text}], variables={"name": text})
    assert found == text * 2


def test_a_broken_template_is_refused_at_load() -> None:
    with pytest.raises(ChatTemplateError, match="not valid"):
        ChatTemplate("{% if %}", {})


def test_where_templates_and_end_tokens_come_from(tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "byte_level" / "tokenizer.json", tmp_path)

    def load(settings: dict[str, Any], **files: Any) -> Tokenizer:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return Tokenizer.load(tmp_path)

    def says(tokenizer: Tokenizer) -> str:
        assert tokenizer.chat_template is not None
        return tokenizer.chat_template.render([])

    assert load({}).chat_template is None
    assert load({}).eos_ids == ()
    assert says(load({"chat_template": "key {{ eos_token }}", "eos_token": "<|end|>"})) == (
        "key <|end|>"
    )
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}]
    assert says(load({"chat_template": named})) == "named"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert says(load({"chat_template": "key"})) == "file"

    assert load({"eos_token": {"content": "<|end|>"}}).eos_ids == (1,)
    assert load({}, config={"eos_token_id": 3}).eos_ids == (3,)
    assert load({}, config={"text_config": {"eos_token_id": [4, 5]}}).eos_ids == (4, 5)
    both = load({"eos_token": "<|end|>"}, generation_config={"eos_token_id": [2, 1]})
    assert both.eos_ids == (2, 1)


def test_truncation_and_padding_of_a_tokenizer_file_are_ignored(tmp_path: Path) -> None:
    content = json.loads((FIXTURES / "byte_level" / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    content["padding"] = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|bos|>",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    text = "The quick brown fox jumps over the lazy dog."
    own = Tokenizer.load(tmp_path)
    assert own.decode(own.encode(text)) == text
    assert own.encode(text) == Tokenizer.load(FIXTURES / "byte_level").encode(text)


def check_parts(template_of: Callable[[str], ChatTemplate]) -> int:
    """Thoughts, content in parts and documents, as transformers renders them; how many."""
    cases = json.loads((FIXTURES / "parts.json").read_text())["cases"]
    for case in cases:
        text = template_of(case["name"]).render(
            case["messages"],
            documents=case["documents"],
            add_generation_prompt=case["add_generation_prompt"],
        )
        assert text == case["expected"], case
    return len(cases)


def family(name: str) -> ChatTemplate:
    return ChatTemplate(families.FAMILIES[name], MADE["special_tokens"])


def test_thoughts_parts_and_documents() -> None:
    assert check_parts(family) == 20


def test_parts_for_a_template_that_takes_only_texts() -> None:
    parts = [{"type": "text", "text": "a'b"}, {"type": "text", "text": "c"}]
    for source in (
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | trim + '' }}{% endfor %}",
        "{% for m in messages %}{{ m.content.strip() }}{% endfor %}",
        "{% for m in messages %}{{ m.content | tojson | replace('\"', '') }}{% endfor %}"
        "{% if messages[0].content is not string %}{{ raise_exception('no') }}{% endif %}",
    ):
        assert ChatTemplate(source, {}).render([{"role": "user", "content": parts}]) == (
            "a'b\\nc" if "tojson" in source else "a'b\nc"
        )


def test_parts_that_are_joined_for_every_template_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutation: nobody asks the template."""
    monkeypatch.setattr(ChatTemplate, "_shows_parts", lambda self: False)
    with pytest.raises(AssertionError):
        check_parts(family)
