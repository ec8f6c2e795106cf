"""The one error a user sees, and the helpers that make it helpful."""

import difflib
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Wrong input: one line that says what is wrong, what is allowed and what to do. The CLI exits with 2."""


class MissingDependency(UserError):
    """An optional dependency is absent; the message carries the exact command that installs it."""


class UnreadOption(UserError):
    """An option is given that the method does not read."""


class LostDaemon(UserError):
    """A process that this one stands on (Ray's raylet, a worker of ManiSkill) is dead: a new process can go
    on from the last checkpoint."""


def as_script(main: Callable[[], None]) -> None:
    """Run the `main` of a plain script: a UserError is one line on stderr, and exit code 2; Ctrl-C one, and
    130."""
    try:
        main()
    except UserError as e:
        print(f"{sys.argv[0]}: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{sys.argv[0]}: interrupted", file=sys.stderr)
        sys.exit(130)


def plain_warning() -> Callable[..., str]:
    """How Python's warnings read on a terminal: one meant for users (UserWarning) is a line of its own, once,
    without our code."""
    shown, other = set(), warnings.formatwarning

    def text(message, category, filename, lineno, line=None) -> str:
        if category is not UserWarning:
            return other(message, category, filename, lineno, line)
        words = re.sub(r"\x1b\[[0-9;]*m", "", str(message)).split()  # Gymnasium writes in colour
        told = f"warning: {' '.join(words)}\n"
        return "" if told in shown else shown.add(told) or told

    return text


def plural(n: int, noun: str) -> str:
    """ "1 chunk", "2 chunks", "0 chunks"."""
    return f"{n} {noun}{'s' * (n != 1)}"


def quoted(path: object) -> str:
    """A path, or another word of the user's, as it stands inside a command that a message suggests: quoted
    where a shell would read it otherwise (spaces, quotes), as it is elsewhere."""
    return shlex.quote(str(path))


def choose(kind: str, name: str, allowed: Iterable[str]) -> str:
    """Return `name` if it is one of `allowed`; else raise UserError listing them, those that are
    close first, the others in their own order."""
    names = list(allowed)
    if name in names:
        return name
    if not names:
        raise UserError(f"unknown {kind} {name!r}: there is none to choose from")
    close = nearest(str(name), names)
    near = sorted(names, key=lambda n: close.index(n) if n in close else len(close))
    near.sort(key=lambda n: -len(n) if str(name).startswith(n) else 0)  # degrees: deg before deg/s
    hint = f"; did you mean {near[0]!r}?" if close else ""
    raise UserError(
        f"unknown {kind} {name!r}{hint} Allowed: {', '.join(near)}"
        if hint
        else f"unknown {kind} {name!r}. Allowed: {', '.join(near)}"
    )


def nearest(name: str, allowed: Iterable[str]) -> list[str]:
    """Those of `allowed` that are close to `name`, the closest first: two letters swapped, then by letters in
    common; capitals do not count."""
    name, small = name.lower(), {n: n.lower() for n in allowed}
    close = difflib.get_close_matches(name, small.values(), n=max(1, len(small)))
    near = [n for n in small if small[n] in close]
    return sorted(near, key=lambda n: (not is_swapped(name, small[n]), close.index(small[n])))


def is_swapped(a: str, b: str) -> bool:
    """Whether b is a but for two neighbours that are swapped, or equal to it."""
    return any(a[:i] + a[i : i + 2][::-1] + a[i + 2 :] == b for i in range(len(a)))


def no_expert(env: str, remedy: str = "") -> UserError:
    """That the env "SIM:TASK" has no scripted expert; remedy: how that env gets demonstrations."""
    return UserError(
        f"{env} has no scripted expert; {f'{remedy}, or ' if remedy else ''}record demonstrations (robo_rl "
        "collect --operator RUN has a trained policy show them) and pass their folder with --demos PATH, "
        "or train from scratch with --demos 0, and with --reward dense where the task has it"
    )


def utf8(name: str, text: str) -> str:
    """Return `text` if UTF-8 can say it; else (half of a surrogate pair: bytes of another encoding) raise
    UserError."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise UserError(
            f"{name} must be Unicode text, got {text[:80]!r}: at position {e.start} is half of a surrogate "
            "pair, as bytes of another encoding give it; write it in UTF-8"
        ) from None
    return text


def in_range(
    name: str, value: float, low: float, high: float, open_low: bool = False, open_high: bool = False
) -> None:
    """Raise UserError unless low <= value <= high (strict at an open end); NaN is never in range."""
    span = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
    for told in _listeners:
        told.append((name, span))
    try:
        above = value > low if open_low else value >= low
        below = value < high if open_high else value <= high
        inside = bool(above and below)
    except (TypeError, ValueError):  # no number
        inside = False
    if not inside:
        raise UserError(f"{name} must be in {span}, got {value!r}")


_listeners: list[list[tuple[str, str]]] = []


@contextmanager
def told_ranges() -> Iterator[list[tuple[str, str]]]:
    """Lists (name, range as text) of every `in_range` meanwhile: what options allow, from where it is
    checked."""
    told: list[tuple[str, str]] = []
    _listeners.append(told)
    try:
        yield told
    finally:
        _listeners.remove(told)
