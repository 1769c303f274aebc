"""Structural tags: text, values and tags in an order, as a grammar of llguidance.

The format is XGrammar's (docs/structural_tag in its repository, version 0.2 of 2026), in which
vLLM and the gateway ask for a tool call: {"format": {"type": …}}, and the older {"structures":
[{"begin", "schema", "end"}], "triggers": […]}. What is supported is exact: a text is let through if
and only if it has the form. What is not is an error with the path to it.

Two things are ours. A special token of the model that is spelt out in a string of the tag (begin,
end, trigger, const_string) is that token; nowhere else are special tokens let through. And "any
text" up to an end is any text up to the first one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from service.text import parts
from service.text.constraint import GrammarError
from service.text.fields import Fields, located, read_text
from service.text.parts import ANYTHING, BorderError, Part, Writer
from service.text.schema import read_json
from service.text.values import Parameters, json_value

_MAX_REPEAT: Final = 10_000


def structural_lark(
    text: str, *, ids: Mapping[str, int], end_names: frozenset[str], max_depth: int, tail: str
) -> str:
    """The grammar, as Lark or as llguidance's JSON, of a structural tag given as JSON text.

    `ids` are the special tokens a grammar can name, `end_names` those of them that end a text, and
    `tail` is written at the end of every grammar. Raises GrammarError."""
    whole = read_json(text, max_depth)
    builder = _Builder(ids, end_names, max_depth)
    try:
        part = builder.top(whole)
        main = builder.writer.lark(part) + tail
    except RecursionError:
        raise GrammarError("too deeply nested") from None
    if not builder.grammars:
        return main
    named = [{"name": name, "lark_grammar": lark + tail} for name, lark in builder.grammars.items()]
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *named]})


class _Builder:
    """Turns the formats of one structural tag into parts."""

    def __init__(self, ids: Mapping[str, int], end_names: frozenset[str], max_depth: int) -> None:
        self.writer = Writer(ids)
        self._parameters = Parameters(self.writer, self.literal)
        self.grammars: dict[str, str] = {}
        """Grammars that parts name, as Lark."""
        self._end_names = end_names
        self._max_depth = max_depth
        self._names = frozenset(ids)
        names = sorted(ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names))) if names else None
        self._formats: dict[str, Callable[[Fields, Sequence[str]], Part]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "qwen_xml_parameter": self._qwen_xml_parameter,
            "grammar": self._grammar,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._optional,
            "plus": self._plus,
            "star": self._star,
            "repeat": self._repeat,
            "tag": self._tag,
            "triggered_tags": lambda fields, ends: self._triggered_tags(fields, ends, ())[0],
            "tags_with_separator": self._tags_with_separator,
            "dispatch": lambda fields, ends: self._dispatch(fields, ends, ())[0],
        }

    def top(self, whole: Any) -> Part:
        """The whole of it."""
        fields = Fields(whole, "")
        if whole.get("type", "structural_tag") != "structural_tag":
            raise GrammarError('must be "structural_tag"', "type")
        if fields.has("structures"):
            part = self._structures(fields)
        else:
            part = self.part(fields.need("format"), "format", ())
        fields.done()
        return part

    def part(self, value: Any, path: str, ends: Sequence[str], kind: str | None = None) -> Part:
        """One format. `ends` are those of the tag around it, which free text in it must not
        hold; `kind` is its type where it need not say so."""
        fields = Fields(value, path)
        kind = value.get("type", kind)
        if kind is None:
            raise GrammarError("must be set", fields.at("type"))
        if not isinstance(kind, str) or kind not in self._formats:
            known = ", ".join(self._formats)
            raise GrammarError(f"{kind!r:.40} is not supported: {known}", fields.at("type"))
        with located(path):
            part = self._formats[kind](fields, ends)
        fields.done()
        return self.writer.spent(part)

    def literal(self, text: str, path: str) -> Part:
        """`text`, with the special tokens that it spells out."""
        return parts.literal(self._atoms(text, path))

    def _atoms(self, text: str, path: str) -> tuple[str, ...]:
        atoms: list[str] = []
        done = 0
        for found in self._special.finditer(text) if self._special else ():
            if (name := found.group()) in self._end_names:
                raise GrammarError(f"{name} ends a text and cannot be in it", path)
            atoms += [*text[done : found.start()], name]
            done = found.end()
        return (*atoms, *text[done:])

    # --- one fragment ----------------------------------------------------------------------------

    def _const_string(self, fields: Fields, ends: Sequence[str]) -> Part:
        return self.literal(fields.text("value", empty=True), fields.at("value"))

    def _json_schema(self, fields: Fields, ends: Sequence[str]) -> Part:
        schema = fields.need("json_schema")
        if fields.flag("any_order"):
            raise GrammarError(
                "is not supported: keys come in the schema's order", fields.at("any_order")
            )
        style = fields.text("style") if fields.has("style") else "json"
        if style == "qwen_xml":
            return self._parameters.part(schema, fields.at("json_schema"))
        if style != "json":
            raise GrammarError(
                f"{style!r:.40} is not supported: json, qwen_xml", fields.at("style")
            )
        return json_value(schema, fields.at("json_schema"))

    def _grammar(self, fields: Fields, ends: Sequence[str]) -> Part:
        source, path = fields.text("grammar"), fields.at("grammar")
        if "::=" in source:
            try:
                source = any_to_lark(source)
            except Exception as error:  # the converter raises plain Exception
                raise GrammarError(f"is no EBNF grammar: {error}", path) from None
        name = f"g{len(self.grammars)}"
        self.grammars[name] = source
        return parts.unknown(f"@{name}")

    def _regex(self, fields: Fields, ends: Sequence[str]) -> Part:
        pattern = fields.text("pattern", empty=True)
        if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
            raise GrammarError("ends in a lone backslash", fields.at("pattern"))
        return parts.regex(pattern, f"/{regex_to_lark(pattern, '')}/")

    def _any_text(self, fields: Fields, ends: Sequence[str]) -> Part:
        return parts.free([*fields.texts("excludes"), *ends])

    # --- several ---------------------------------------------------------------------------------

    def _sequence(self, fields: Fields, ends: Sequence[str]) -> Part:
        return self.writer.sequence(self.part(x, at, ends) for x, at in fields.some("elements"))

    def _or(self, fields: Fields, ends: Sequence[str]) -> Part:
        return self.writer.either([self.part(x, at, ends) for x, at in fields.some("elements")])

    def _inner(self, fields: Fields, ends: Sequence[str]) -> Part:
        return self.part(fields.need("content"), fields.at("content"), ends)

    def _optional(self, fields: Fields, ends: Sequence[str]) -> Part:
        return self.writer.repeat(self._inner(fields, ends), 0, 1)

    def _plus(self, fields: Fields, ends: Sequence[str]) -> Part:
        return self.writer.repeat(self._inner(fields, ends), 1, None)

    def _star(self, fields: Fields, ends: Sequence[str]) -> Part:
        return self.writer.repeat(self._inner(fields, ends), 0, None)

    def _repeat(self, fields: Fields, ends: Sequence[str]) -> Part:
        least = fields.count("min", 0, _MAX_REPEAT)
        most = fields.count("max", -1, _MAX_REPEAT)
        if -1 < most < least:
            raise GrammarError(f"must be at least min, {least}, or -1", fields.at("max"))
        return self.writer.repeat(self._inner(fields, ends), least, None if most == -1 else most)

    # --- tags ------------------------------------------------------------------------------------

    def _tag(self, fields: Fields, ends: Sequence[str], skip: int = 0) -> Part:
        """A tag; `skip` atoms of its beginning are there already."""
        begin = self._atoms(self._begin(fields), fields.at("begin"))[skip:]
        own = self._ends(fields)
        end = self.writer.either([self.literal(text, fields.at("end")) for text in own])
        body = self._body(fields, own, end)
        return self.writer.sequence([parts.literal(begin), body])

    def _begin(self, tag: Fields) -> str:
        value = tag.need("begin")
        if isinstance(value, dict):
            return self._token(value, tag.at("begin"))
        return read_text(value, tag.at("begin"), empty=True)

    def _ends(self, tag: Fields) -> list[str]:
        value, path = tag.need("end"), tag.at("end")
        if isinstance(value, dict):
            return [self._token(value, path)]
        if isinstance(value, list):
            return [read_text(text, at, empty=True) for text, at in tag.some("end")]
        return [read_text(value, path, empty=True)]

    def _token(self, value: Any, path: str) -> str:
        """The name of a special token, for literals know what that is. Any other name would be
        let through as a text."""
        fields = Fields(value, path)
        if value.get("type", "token") != "token":
            raise GrammarError('must be "token"', fields.at("type"))
        name = fields.text("token")
        if name not in self._names:
            raise GrammarError(f"{name!r:.40} is no special token", fields.at("token"))
        fields.done()
        return name

    def _body(self, fields: Fields, ends: Sequence[str], end: Part) -> Part:
        """What comes between its beginning and its end, with that."""
        content, path = fields.need("content"), fields.at("content")
        bars = [text for text in ends if text]
        plain = bars if len(bars) == len(ends) and end.terminal is not None else ()
        kind = content.get("type") if isinstance(content, dict) else None
        if kind == "any_text" and plain:
            free = Fields(content, path)
            with located(path):
                body = parts.until(plain, free.texts("excludes"))
            free.done()
            return body
        if kind in ("triggered_tags", "dispatch"):
            inner = Fields(content, path)
            read = self._triggered_tags if kind == "triggered_tags" else self._dispatch
            with located(path):
                body, ended = read(inner, bars, plain)
            inner.done()
            return body if ended else self.writer.sequence([body, end])
        return self.writer.sequence([self.part(content, path, bars), end])

    def _tags(self, fields: Fields) -> list[Fields]:
        found = [Fields(value, path) for value, path in fields.some("tags")]
        for (value, _), tag in zip(fields.some("tags"), found, strict=True):
            if value.get("type", "tag") != "tag":
                raise GrammarError('must be "tag"', tag.at("type"))
        return found

    def _built(self, tag: Fields, skip: int = 0) -> Part:
        with located(tag.path):
            part = self._tag(tag, (), skip)
        tag.done()
        return part

    def _tags_with_separator(self, fields: Fields, ends: Sequence[str]) -> Part:
        one = self.writer.either([self._built(tag) for tag in self._tags(fields)])
        separator = self.literal(fields.text("separator", empty=True), fields.at("separator"))
        least = 1 if fields.flag("at_least_one") else 0
        if not fields.flag("stop_after_first"):
            more = self.writer.repeat(self.writer.sequence([separator, one]), 0, None)
            one = self.writer.sequence([one, more])
        return self.writer.repeat(one, least, 1)

    def _triggered_tags(
        self, fields: Fields, bars: Sequence[str], ends: Sequence[str]
    ) -> tuple[Part, bool]:
        """The part, and whether it holds one of `ends`, with which the tag around it ends."""
        tags = self._tags(fields)
        triggers = [read_text(x, at) for x, at in fields.some("triggers")]
        return self._triggered(
            tags,
            triggers,
            [*fields.texts("excludes"), *bars],
            ends,
            first=fields.flag("at_least_one"),
            once=fields.flag("stop_after_first"),
        )

    def _dispatch(
        self, fields: Fields, bars: Sequence[str], ends: Sequence[str]
    ) -> tuple[Part, bool]:
        """The same with patterns for tags: what follows one is all that it demands."""
        tags = []
        for rule, path in fields.some("rules"):
            if not isinstance(rule, list) or len(rule) != 2:
                raise GrammarError("must be a pattern and a format", path)
            tags.append(
                Fields(
                    {"begin": read_text(rule[0], f"{path}[0]"), "content": rule[1], "end": ""}, path
                )
            )
        patterns = [tag.text("begin") for tag in tags]
        once = not fields.flag("loop", True)
        excludes = [*fields.texts("excludes"), *bars]
        return self._triggered(tags, patterns, excludes, ends, first=False, once=once)

    def _structures(self, fields: Fields) -> Part:
        """The older form."""
        tags = []
        for value, path in fields.some("structures"):
            old = Fields(value, path)
            schema = old.need("schema")
            if isinstance(schema, str):
                try:
                    schema = read_json(schema, self._max_depth)
                except GrammarError as error:
                    raise GrammarError(str(error), old.at("schema")) from None
            content = {"type": "json_schema", "json_schema": schema}
            tag = {"begin": old.need("begin"), "content": content, "end": old.need("end")}
            old.done()
            tags.append(Fields(tag, path))
        triggers = [read_text(x, at) for x, at in fields.some("triggers")]
        with located(fields.at("structures")):
            return self._triggered(tags, triggers, (), (), first=False, once=False)[0]

    def _qwen_xml_parameter(self, fields: Fields, ends: Sequence[str]) -> Part:
        return self._parameters.part(fields.need("json_schema"), fields.at("json_schema"))

    def _triggered(
        self,
        tags: Sequence[Fields],
        triggers: Sequence[str],
        excludes: Sequence[str],
        ends: Sequence[str],
        *,
        first: bool,
        once: bool,
    ) -> tuple[Part, bool]:
        """Any text in which a trigger begins one of its tags; see `_triggered_tags`."""
        _check_triggers(triggers, tags)
        writer = self.writer
        opening = writer.either([self._built(tag) for tag in tags]) if first else parts.literal(())
        if first and once:
            return opening, False
        stops = [*triggers, *excludes]
        one = self._after_text(tags, triggers, stops)
        tail = parts.until(ends, stops) if ends else parts.free(stops)
        if once:
            ended = [writer.either([self.literal(text, "") for text in ends])] if ends else []
            rule = f"({writer.rule(writer.sequence([one, *ended]))} | {writer.rule(tail)})"
        else:
            if parts.meet(one.goes_on | opening.goes_on, ANYTHING):
                raise BorderError("where a tag ends cannot be told from the text after it")
            rule = f"({writer.rule(opening)} {writer.rule(one)}* {writer.rule(tail)})"
        goes_on = tail.goes_on | (one.goes_on if once and not ends else frozenset())
        part = Part(
            rule=rule,
            terminal=None,
            starts=opening.starts if first else one.starts | ANYTHING,
            goes_on=goes_on,
            may_be_empty=not first and not ends,
        )
        return part, bool(ends)

    def _after_text(
        self, tags: Sequence[Fields], triggers: Sequence[str], stops: Sequence[str]
    ) -> Part:
        """Text and a tag. All alternatives come to an end where the first trigger does."""
        found: list[Part] = []
        special: list[Part] = []
        grouped: dict[str, list[Fields]] = {}
        for tag in tags:
            text = tag.text("begin")
            grouped.setdefault(next(t for t in triggers if text.startswith(t)), []).append(tag)
        for trigger, group in grouped.items():
            rest: list[Part] = []
            for tag in group:
                begin = self._atoms(tag.text("begin"), tag.at("begin"))
                if len(begin[0]) > 1:
                    special.append(self._built(tag))
                elif begin[: len(trigger)] == tuple(trigger):
                    rest.append(self._built(tag, len(trigger)))
                else:
                    at = tag.at("begin")
                    raise GrammarError("has a special token in the middle of its trigger", at)
            if rest:
                others = [stop for stop in stops if stop != trigger]
                before = self.writer.spent(parts.until([trigger], others))
                found.append(self.writer.sequence([before, self.writer.either(rest)]))
        if special:
            free = parts.free(stops)
            found.append(self.writer.sequence([free, self.writer.either(special)]))
        return Part(
            rule=f"({' | '.join(map(self.writer.rule, found))})",
            terminal=None,
            starts=frozenset(s for part in found for s in part.starts),
            goes_on=frozenset(s for part in found for s in part.goes_on),
        )


def _check_triggers(triggers: Sequence[str], tags: Sequence[Fields]) -> None:
    """Each tag begins with one trigger, and each trigger begins some tag."""
    for n, one in enumerate(triggers):
        for other in triggers[:n]:
            if one in other or other in one:
                raise BorderError(
                    f"trigger {one!r:.40} and {other!r:.40}: one is part of the other"
                )
    begins = {tag.path: tag.text("begin") for tag in tags}
    for path, begin in begins.items():
        if not any(begin.startswith(trigger) for trigger in triggers):
            raise GrammarError("begins with no trigger", f"{path}.begin")
    for trigger in triggers:
        if not any(begin.startswith(trigger) for begin in begins.values()):
            raise BorderError(f"no tag begins with trigger {trigger!r:.40}")
