"""Configurations as text: read from TOML or JSON (`--config`), merged over a recipe, printed with the origin
of each value."""

import json
import reprlib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar, get_args, get_origin, get_type_hints

from robo_rl import old_names
from robo_rl.errors import UserError, choose, nearest
from robo_rl.experiment.config import TrainConfig
from robo_rl.other_names import NAMES

T = TypeVar("T")
COMMAND_ONLY = ("resume", "out")  # of one run, not of its configuration


def read_config(path: Path) -> dict:
    """The document of a .toml or .json file: what --print-config prints, or a run's run.json."""
    from robo_rl import files

    try:
        if path.suffix == ".json":
            document = files.read_json(path)
            document = document.get("config", document)
            if not isinstance(document, dict):
                raise UserError(
                    f'--config: "config" in {path} is no table of options, got {reprlib.repr(document)}'
                )
        else:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(
            f"--config: {path} cannot be read ({getattr(e, 'strerror', None) or e}); give a .toml or .json "
            "file"
        ) from None
    except tomllib.TOMLDecodeError as e:
        raise UserError(
            f"--config: {path} is no TOML ({e}); robo_rl train --print-config > FILE.toml writes one"
        ) from None
    return old_names.options({k: v for k, v in document.items() if k not in COMMAND_ONLY})


def merged(base: T, document: Mapping, where: str = "--config") -> T:
    """`base`, options of a command, with the values of `document` (nested as they are); UserError names what
    it does not know."""
    return _merged(base, document, where, "")


def _merged(base, document: Mapping, where: str, above: str):
    known, changes = {f.name for f in fields(base)}, {}
    for key, value in document.items():
        name = f"{above}{key}"
        if key not in known:
            near, ours = nearest(key, known), NAMES.get(key.lower())
            raise UserError(
                f"{where}: there is no option {name}"
                + (
                    f"; on the command line it is {ours}"
                    if ours
                    else f"; did you mean {above}{near[0]}?"
                    if near
                    else f" of {type(base).__name__}; robo_rl train --print-config lists them"
                )
            )
        now = getattr(base, key)
        if is_dataclass(now):
            if not isinstance(value, Mapping):
                raise UserError(f"{where}: {name} is a table of options, got {value!r}")
            changes[key] = _merged(now, value, where, f"{name}.")
        else:
            hint = get_type_hints(type(base))[key]
            changes[key] = _as(now, value, hint, f"{where}: {name}")
            if get_origin(hint) is Literal:
                choose(f"{where}: {name}", changes[key], get_args(hint))
    return replace(base, **changes)


def _as(now, value, hint, where: str):
    """`value` as the type that an option has, whose annotation is `hint`; UserError for another."""
    if now is None and value is not None and (kind := next(iter(get_args(hint)), None)) in (int, float, str):
        now = kind()  # such as `int | None`
    if isinstance(now, tuple):  # of text, all that options have
        if not isinstance(value, list | tuple) or not all(isinstance(x, str) for x in value):
            raise UserError(f"{where} must be a list of str, got {reprlib.repr(value)}")
        return tuple(value)
    if isinstance(now, float) and type(value) is int:
        return float(value)
    if isinstance(now, str) and now.isdecimal() and type(value) is int:
        return str(value)  # a number or a folder, as --demos
    if value is None and now is not None and type(None) not in get_args(hint):
        raise UserError(f"{where} must be {type(now).__name__}, got nothing")
    if now is not None and value is not None and type(value) is not type(now):
        raise UserError(f"{where} must be {type(now).__name__}, got {reprlib.repr(value)}")
    return value


def flat(tree: Mapping, above: str = "") -> dict[str, object]:
    """{dotted name: value} of nested tables."""
    out: dict[str, object] = {}
    for key, value in tree.items():
        out |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return out


def origins(steps: Iterable[tuple[str | Mapping[str, str], TrainConfig]]) -> dict[str, str]:
    """{dotted name: who set it last}, of configurations in the order in which they were made, each with its
    maker's name, or with the maker's name of each option that changed."""
    out: dict[str, str] = {}
    before: dict[str, object] = {}
    for who, config in steps:
        now = flat(asdict(config))
        for name, value in now.items():
            if name not in before or before[name] != value:
                out[name] = who if isinstance(who, str) else who.get(name, "default")
        before = now
    return out


def as_toml(config: TrainConfig, origin: Mapping[str, str], reasons: Mapping[str, str] | None = None) -> str:
    """The configuration as TOML, each value with its origin as a comment; what is chosen for the machine
    (None) as a comment.

    `reasons` {origin: why}: those of the origins that occur stand at the top.
    """
    plain = [f"# {who}: {why}" for who, why in (reasons or {}).items() if who in origin.values()]
    plain += [""] if plain else []
    tables: dict[str, list[str]] = {}
    for name, value in flat(asdict(config)).items():
        table, _, key = name.rpartition(".")
        if name in COMMAND_ONLY:
            continue
        text = (
            f"# {key} is chosen for the machine"
            if value is None
            else f"{key} = "
            f"{json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)}"
        )
        (tables.setdefault(table, []) if table else plain).append(f"{text}  # {origin[name]}")
    return (
        "\n".join(plain + [line for table, lines in tables.items() for line in ("", f"[{table}]", *lines)])
        + "\n"
    )
