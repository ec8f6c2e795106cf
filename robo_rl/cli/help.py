"""`--help` of a command, from its options dataclass: groups, what each option means, its range and its
default.

A field's text is the string below it in the source. Its range is what its class asks of it in
`errors.in_range`, heard while the defaults are checked, so help and check cannot differ. A class may name
groups: `GROUPS = {title: (field, …)}`.
"""

import ast
import functools
import inspect
import re
import shutil
import textwrap
import types
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import pairwise
from typing import Literal, Union, get_args, get_origin, get_type_hints

from robo_rl import errors

INDENT = 26  # columns before the text


def help_text(cls, command: str, default=None, width: int = 0) -> str:
    """The help of `robo_rl COMMAND`; `default`: an instance whose values are shown as the defaults; width:
    columns, 0: the terminal's."""
    width = width or max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))
    default, ranges = checked(cls, default)
    hints = get_type_hints(cls, include_extras=True)
    mine = {f.name: f for f in fields(cls)}
    plain = [n for n in mine if not is_positional(hints[n]) and not is_dataclass(getattr(default, n, None))]
    places = [n for n in mine if is_positional(hints[n])]
    usage = " ".join(
        [f"usage: robo_rl {command}", *(n.upper() + "…" * is_many(hints[n]) for n in places), "[options]"]
    )
    out = [usage, "", *textwrap.wrap(" ".join((cls.__doc__ or "").split()), width)]
    if places:
        out += ["", "Arguments", *_rows(cls, places, hints, mine, default, ranges, "", width)]
    groups = {t: [n for n in names if n in plain] for t, names in getattr(cls, "GROUPS", {}).items()}
    rest = [n for n in plain if not any(n in names for names in groups.values())]
    for title, names in [*groups.items(), ("Other options" if groups else "Options", rest)]:
        if names:
            out += ["", title, *_rows(cls, names, hints, mine, default, ranges, "", width)]
    for name in mine:
        if is_dataclass(inner := getattr(default, name, None)):
            kind = type(inner)
            title = " ".join((kind.__doc__ or name).split())
            out += [
                "",
                *textwrap.wrap(f"--{_option(name)}.…  {title}", width),
                *_inner(kind, inner, f"{_option(name)}.", width),
            ]
    return "\n".join(out)


def option_names(cls, default=None) -> list[str]:
    """Every option of a command, as it is typed."""
    return re.findall(r"(?m)^  (--[\w.-]+)", help_text(cls, "", default))


def _inner(kind, value, prefix: str, width: int) -> list[str]:
    """Rows of a nested options class, and of those within it."""
    value, ranges = checked(kind, value)
    hints, mine = get_type_hints(kind, include_extras=True), {f.name: f for f in fields(kind)}
    flat = [n for n in mine if not is_dataclass(getattr(value, n))]
    out = _rows(kind, flat, hints, mine, value, ranges, prefix, width)
    for name in mine:
        if name not in flat:
            out += _inner(
                type(getattr(value, name)), getattr(value, name), f"{prefix}{_option(name)}.", width
            )
    return out


def _rows(
    cls, names, hints, mine: dict[str, Field], default, ranges: dict[str, str], prefix: str, width: int
) -> list[str]:
    texts, out = docs(cls), []
    for name in names:
        text = " ".join(texts.get(name, "").split())
        facts = [ranges[name]] if name in ranges else []
        if mine[name].default is not MISSING or mine[name].default_factory is not MISSING:
            facts.append(f"default {_shown(getattr(default, name))}")
        if is_positional(hints[name]):
            head = name.upper()
        else:
            head = f"--{prefix}{_option(name)}"
            head += (
                f", --{prefix}no-{_option(name)}" if _bare(hints[name]) is bool else f" {_kind(hints[name])}"
            )
        body = textwrap.wrap(
            " ".join(filter(None, [text, f"({'; '.join(facts)})" if facts else ""])), width - INDENT
        ) or [""]
        begin = f"  {head}"
        if len(begin) < INDENT - 1:
            out += [begin.ljust(INDENT) + body[0], *(" " * INDENT + line for line in body[1:])]
        else:
            out += [begin, *(" " * INDENT + line for line in body)]
    return out


# ---- what is known of a field ------------------------------------------------------------------------------


def docs(cls) -> dict[str, str]:
    """{field: the string below it in the source}, those of base classes too."""
    out: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if is_dataclass(base):
            out |= _own_docs(base)
    return out


@functools.cache
def _own_docs(cls) -> dict[str, str]:
    made = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(made, ast.ClassDef)
    return {
        a.target.id: b.value.value
        for a, b in pairwise(made.body)
        if isinstance(a, ast.AnnAssign)
        and isinstance(a.target, ast.Name)
        and isinstance(b, ast.Expr)
        and isinstance(b.value, ast.Constant)
        and isinstance(b.value.value, str)
    }


def checked(cls, default=None):
    """(an instance, {field: its range as text}) of an options class; `default`: the instance to show instead
    of the class's own."""
    values = (
        {f.name: getattr(default, f.name) for f in fields(cls)}
        if default is not None
        else {
            f.name: ("x",) if is_many(f.type) else "x"
            for f in fields(cls)
            if f.default is MISSING and f.default_factory is MISSING
        }
    )
    with errors.told_ranges() as told:
        made = cls(**values)
    ranges = {}
    for name, text in told:
        ranges[name.split()[0].rpartition(".")[2].removeprefix("--").replace("-", "_")] = text
    return made, ranges


def is_positional(hint) -> bool:
    return any("Positional" in repr(m) for m in getattr(hint, "__metadata__", ()))


def is_many(hint) -> bool:
    return get_origin(_bare(hint)) is tuple or "tuple[" in str(hint)


def _bare(hint):
    """The type without its annotations and without None."""
    hint = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
    if get_origin(hint) in (Union, types.UnionType):
        left = [a for a in get_args(hint) if a is not type(None)]
        return left[0] if len(left) == 1 else hint
    return hint


def _kind(hint) -> str:
    """What is typed after the option."""
    for m in getattr(hint, "__metadata__", ()):
        if getattr(m, "metavar", None):
            return m.metavar
    kind = _bare(hint)
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    if get_origin(kind) is tuple:
        return f"{_kind(get_args(kind)[0])} …"
    return {int: "N", float: "X", str: "TEXT"}.get(kind, getattr(kind, "__name__", "VALUE").upper())


def _option(name: str) -> str:
    return name.replace("_", "-")


def _shown(value) -> str:
    if value is None:
        return "None"  # its text says what that is
    if isinstance(value, (tuple, list)):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value) or "empty"
