"""The page ``/docs``: the requests and replies of the service, as HTML without scripts, so that it needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["api_page"]

_STYLE = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; vertical-align: top; padding: .3rem .6rem;
border-bottom: 1px solid #ccc } code { font-size: 90% }"""


def api_page(schema: Mapping[str, Any]) -> str:
    """Return the page for an OpenAPI schema."""
    parts = [f"<h1>{escape(schema['info']['title'])}</h1>", _text(schema["info"].get("description", ""))]
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts.append(_text(operation.get("description") or operation.get("summary", "")))
            if body := operation.get("requestBody"):
                parts.append(f"<p>Body: {_content(body)}</p>")
            replies = operation.get("responses", {}).items()
            rows = [(f"{status}: {escape(reply.get('description', ''))}", _content(reply)) for status, reply in replies]
            parts.append("<p>Replies:</p>" + _table(("Status", "Body"), rows))
    for name, model in schema.get("components", {}).get("schemas", {}).items():
        parts.append(f'<h2 id="{escape(name)}">{escape(name)}</h2>{_text(model.get("description", ""))}')
        required = model.get("required", ())
        fields = [
            (f"<code>{escape(field)}</code>{'' if field in required else ' (optional)'}", _type(of), _text(_about(of)))
            for field, of in model.get("properties", {}).items()
        ]
        parts.append(_table(("Field", "Type", "Meaning"), fields) if fields else f"<p>{_type(model)}</p>")
    return (
        f"<!DOCTYPE html><html lang=en><meta charset=utf-8><title>{escape(schema['info']['title'])}</title>"
        f"<style>{_STYLE}</style>{''.join(parts)}<p>For programs: <a href=openapi.json>openapi.json</a></p></html>"
    )


def _text(text: str) -> str:
    return "".join(f"<p>{escape(paragraph)}</p>" for paragraph in text.split("\n\n") if paragraph)


def _about(field: Mapping[str, Any]) -> str:
    default = f"Default: {field['default']!r}." if field.get("default") is not None else ""
    return f"{field.get('description', '')} {default}".strip()


def _content(part: Mapping[str, Any]) -> str:
    types = [_type(content["schema"]) for content in part.get("content", {}).values() if content.get("schema")]
    return " or ".join(types) or "-"


def _type(schema: Mapping[str, Any]) -> str:
    if reference := schema.get("$ref"):
        name = escape(reference.rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(map(_type, alternatives))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if "const" in schema or "enum" in schema:
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in schema.get("enum", [schema.get("const")]))
    return escape(schema.get("type", "anything"))


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = ["".join(f"<th>{head}</th>" for head in heads)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
