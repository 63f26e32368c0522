"""The page of a report: HTML that asks no network for anything, and in which data stay data."""

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common.observe.figures import one_line

_VOID = {"img", "input", "link", "meta"}
_LONGEST = 1000  # characters of one value; a reason or a command may be long, a page of it would hide the rest


class Html(str):
    """Text that is HTML already; any other value is escaped where it enters the page."""

    __slots__ = ()


def element(tag: str, *children: object, **attributes: object) -> Html:
    """Return an HTML element; children that are not `Html`, and all attributes, are escaped.

    Args:
        tag: name of the element.
        children: `Html`, or values that are shown as one line of text; None shows nothing.
        attributes: True is written without a value, False and None are left out; in names an underscore stands for a
            hyphen, and one at the end (`class_`) is dropped.
    """
    listed = "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in _VOID:
        return Html(f"<{tag}{listed}>")
    return Html(f"<{tag}{listed}>{''.join(_as_html(child) for child in children)}</{tag}>")


def joined(parts: Iterable[Html]) -> Html:
    """Return pieces of HTML, one below the other."""
    return Html("\n".join(parts))


def table(columns: Sequence[object], rows: Iterable[Sequence[object]], **attributes: object) -> Html:
    """Return a table, wide ones scroll by themselves; the first cell of a row is its heading.

    Args:
        columns: headings, as `element` takes children.
        rows: cells, as `element` takes children; one that is a `td` or `th` already is taken as it is.
        attributes: of the table.
    """
    head = element("tr", *(_cell(column, "col") for column in columns))
    body = (element("tr", _cell(row[0], "row"), *(_cell(cell) for cell in row[1:])) for row in rows)
    whole = element("table", element("thead", head), element("tbody", joined(body)), **attributes)
    return element("div", whole, class_="scrolls", tabindex=0)


def sortable(column: str, kind: str, order: str | None = None) -> Html:
    """Return a heading that sorts its table when it is clicked (see `report.js`).

    Args:
        column: what it says.
        kind: "text", or "number": the `data-value` of the cells.
        order: "ascending" or "descending" where the rows come so.
    """
    return element("th", element("button", column, type="button", data_kind=kind), scope="col", aria_sort=order)


def collapsible(title: str, content: Html) -> Html:
    """Return what is shown only when its title is clicked, or on paper."""
    return element("details", element("summary", title), content)


def preformatted(text: str) -> Html:
    """Return lines as they are, without their control characters."""
    kept = "".join(character if character.isprintable() or character in "\n\t" else "�" for character in text)
    return element("pre", Html(html.escape(kept)), tabindex=0)


def page(title: str, body: Html, data: dict[str, Any]) -> str:
    """Return the whole page, its style, its script and the data that the script reads.

    The content security policy refuses every request, and every script and style but the page's own: should a value
    get into the page unescaped all the same, it would not run.

    Args:
        title: of the window.
        body: HTML.
        data: for the script; numbers must be finite.
    """
    style = _own("report.css")
    script = _own("report.js") + _own("report_viewer.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    head = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("link", rel="icon", href="data:,"),  # otherwise a server would be asked for one
        element("title", title),
        element("style", Html(style)),
    ]
    scripts = [
        element("script", Html(_json(data)), type="application/json", id="data"),
        element("script", Html(script)),
    ]
    whole = element("html", element("head", joined(head)), element("body", body, joined(scripts)), lang="en")
    return f"<!doctype html>\n{whole}\n"


def _cell(value: object, heads: str | None = None) -> Html:
    if isinstance(value, Html) and value.startswith(("<td", "<th")):
        return value
    return element("th", value, scope=heads) if heads else element("td", value)


def _as_html(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, Html) else html.escape(one_line(str(value), _LONGEST))


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:  # but 0 is a value
        return ""
    name = name.rstrip("_").replace("_", "-")
    text = "".join(character if character.isprintable() else " " for character in str(value))  # of any file's name
    return f" {name}" if value is True else f' {name}="{html.escape(text)}"'


def _json(data: dict[str, Any]) -> str:
    """Return ASCII JSON in which no character means anything to an HTML parser."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _own(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
