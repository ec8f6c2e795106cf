"""A user's own task, simulator, policy or method, named as `module:object`; nothing is registered.

`my_pkg.sims:make_pour` is the object `make_pour` of the module `my_pkg.sims`, looked for in the current
folder first, as `python -m` does, then where Python finds its packages. Names with a prefix of ours (`gym:`,
`wm:` ...) are never one.
"""

import ast
import dataclasses
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from robo_rl.errors import MissingDependency, UserError, nearest

OWN = "module:object"  # as lists of allowed names show it
PREFIXES = ("gym", "envpool", "wm", "dds", "arm")  # what stands before a colon and is no module
NAME = r"[^\W\d]\w*(\.[^\W\d]\w*)*"


def is_object(name: str) -> bool:
    """Whether `name` names an object of a module: `a.b:c`, its first part no prefix of ours; arguments may
    follow (`split_arguments`)."""
    return bool(re.fullmatch(f"{NAME}:{NAME}(,{NAME}=.*)?", name)) and name.split(":")[0] not in PREFIXES


def split_arguments(name: str) -> tuple[str, dict[str, Any]]:
    """("a:b", {"radius": 0.3, "tool": "hand"}) of "a:b,radius=0.3,tool=hand": a name and keyword arguments,
    numbers, lists, true, false and none as Python or JSON write them; anything else is text."""
    first, *rest = re.split(r",(?=[^\W\d]\w*=)", name)
    return first, {k: _value(v) for k, _, v in (part.partition("=") for part in rest)}


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def load_object(name: str, what: str) -> Any:
    """The object that `name` ("module:object") names; `what` is the option that it was given to.

    UserError: there is no such module (says where it was looked for), it cannot be imported (says what it
    raised, and where, or what it needs), or there is no such object in it (lists the nearest names).
    """
    module, _, path = name.partition(":")
    found = load_module(module, name, what)
    for part in path.split("."):
        if not hasattr(found, part):
            names = [n for n in vars(found) if not n.startswith("_")]
            near = nearest(part, names)[:3] or sorted(names)[:8]
            where = (
                f" __main__ is the script or notebook that runs now: import {part} there; a name that every "
                "command finds is FILE:NAME of a file that is imported"
                if module == "__main__"
                else ""
            )
            raise UserError(
                f"{what} {name}: {getattr(found, '__name__', module)} has no {part!r}. Nearest: "
                f"{', '.join(near) or 'none'}.{where}".removesuffix(".")
            )
        found = getattr(found, part)
    return found


def load_module(module: str, name: str, what: str, remedy: str = "") -> ModuleType:
    """The module `module` of `name`, looked for in the current folder first; errors as of `load_object`, of
    what is not installed with `remedy` at the end."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        with said(f"{what} {name}: {module} cannot be imported", passed=(ModuleNotFoundError,)):
            return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{module}.".startswith(f"{e.name}."):
            raise MissingDependency(
                f"{what} {name} needs the module {e.name!r}, which is not installed; install it with pip"
                f"{remedy}"
            ) from None
        if module.endswith(".py"):
            raise UserError(
                f"{what} {name}: a module is named without .py: {name.replace('.py:', ':')}"
            ) from None
        raise UserError(
            f"{what} {name}: there is no module {e.name!r} in {here} nor among the installed packages; run "
            "the command in the folder that holds it, put that folder on PYTHONPATH, or install the package"
            f"{remedy}"
        ) from None


def check_call(
    make: Callable, name: str, what: str, positional: tuple[str, ...], keywords: tuple[str, ...] = ()
) -> None:
    """UserError unless `make` can be called with so many positional arguments and these keywords."""
    wanted = f"{', '.join([*positional, *(f'{k}=…' for k in keywords)])}"
    if not callable(make):
        raise UserError(f"{what} {name} must be a function ({wanted}), got {type(make).__name__}")
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        return  # of compiled code
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as e:
        raise UserError(f"{what} {name}{signature} must take ({wanted}): {e}") from None


def options_class(make, name: str, what: str, bases: tuple[type, ...]) -> type:
    """The frozen dataclass, derived from one of `bases`, that `make.Options` or `Options` of its module is;
    UserError for anything else."""
    cls = getattr(make, "Options", None) or getattr(
        sys.modules.get(getattr(make, "__module__", ""), None), "Options", None
    )
    wanted = (
        f"a frozen dataclass that derives from {' or '.join(b.__name__ for b in bases)} of "
        f"{bases[0].__module__}"
    )
    where = (
        f"{what} {name}: its options, the attribute Options of {getattr(make, '__name__', name)} or of "
        "its module,"
    )
    if cls is None:
        raise UserError(f"{where} are missing: {wanted}")
    params = getattr(cls, "__dataclass_params__", None)
    if not isinstance(cls, type) or not issubclass(cls, bases) or params is None or not params.frozen:
        raise UserError(f"{where} must be {wanted}, got {cls!r}")
    for f in dataclasses.fields(cls):
        if f.default is f.default_factory is dataclasses.MISSING:
            raise UserError(f"{where} must have a default for every option; {f.name} has none")
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if not dataclasses.is_dataclass(default) and not _is_plain(default):
            raise UserError(
                f"{where} must have values that run.json can keep: numbers, text, true or false, None, and "
                f"tuples of them; {f.name} is {default!r}. Take the name of what it is, as text"
            )
    return cls


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(v) for v in value)
    return value is None or type(value) in (bool, int, float, str)


HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OURS = ("robo_rl", "sims", "world_models", "controllers")  # packages whose errors are not a user's
LIBRARIES = ("<", *(f"{HERE}/{p}/" for p in OURS), os.path.dirname(os.__file__))
"""Where files begin that are not a user's: frozen modules, ours, Python's own."""


@contextmanager
def said(what: str | Callable[[], str], passed: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Say what the code of a user raises as one UserError: `what` (or what it gives by then), the exception,
    and the line that raised it, of the user's code where some is on the way; UserErrors and what is `passed`
    go through."""
    try:
        yield
    except (UserError, *passed):
        raise
    except Exception as e:
        raise UserError(f"{what if isinstance(what, str) else what()}: {error_words(e)}") from e


def error_words(e: BaseException) -> str:
    """An exception in a line: its kind, its words, and where it was raised, in the user's code where some is
    on the way."""
    at = traceback.extract_tb(e.__traceback__)
    own = _own_frames(at)
    file, line = ((own or at)[-1].filename, (own or at)[-1].lineno) if at else ("", 0)
    if isinstance(e, SyntaxError) and e.filename:
        file, line = e.filename, e.lineno
    message = e.msg if isinstance(e, SyntaxError) else " ".join(str(e).split())[:300]
    message = message or (at[-1].line if at else "")  # of an assert without a message: what it asserts
    return f"{type(e).__name__}: {message} ({file}, line {line})"


def note_own_code(e: Exception, more: str = "") -> None:
    """Say below the traceback of an exception, once, that the user's own code raised it, and `more`."""
    own = _own_frames(traceback.extract_tb(e.__traceback__))
    if own and not hasattr(e, "__notes__"):
        e.add_note(f"robo_rl: raised by code of your own ({own[-1].filename}, line {own[-1].lineno}){more}")


def _own_frames(at: traceback.StackSummary) -> list[traceback.FrameSummary]:
    return [f for f in at if not f.filename.startswith(LIBRARIES) and "/site-packages/" not in f.filename]
