"""Makes what the site says about options from the code: the page of all commands, and each method's presets.

mkdocs calls `on_files`, `on_page_markdown` and `on_page_content` (mkdocs.yml, `hooks`). Neither torch nor a
simulator is loaded.
"""

import importlib
import inspect
import re
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path

GENERATED = ("reference/cli.md",)  # pages that exist in the site alone
MARK = re.compile(r"<!-- presets of (\w+) -->")  # in a method's page: the table comes here
OPTION = re.compile(r"(?<![\w<!-])--[a-z][\w.-]*(?![^<]*>)")  # in HTML, outside of tags


def on_files(files, config):
    """Add the generated pages to the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, GENERATED[0], content=cli_page()))
    return files


def on_page_markdown(markdown: str, page=None, **_) -> str:
    """Put the table of presets where a page has the mark; pages of results are made anew, so that their marks
    of age are of today."""
    if page is not None and re.fullmatch(r"results(/.+)?\.md", page.file.src_uri):
        from robo_rl.report.results_page import index_text, topic_text
        from robo_rl.results import read, read_all, repository_of

        topic = Path(page.file.src_uri).stem
        if topic == "results":
            return index_text(read_all("results"), repository_of("."), topic)
        drawn = Path(page.file.abs_src_path).with_suffix(".svg").exists()
        return topic_text(read(f"results/{topic}.json"), repository_of("."), drawn)
    return MARK.sub(lambda m: preset_table(m[1]), markdown)


def on_page_content(html: str, **_) -> str:
    """Keep each option in one line: a browser would break it after its dashes."""
    return OPTION.sub(r'<span class="option">\g<0></span>', html)


# ---- commands


def commands() -> list[tuple[str, str, type]]:
    """(command as typed, what it does, the dataclass of its options) of all commands."""
    from robo_rl.cli import COMMANDS
    from robo_rl.cli.wm import OPTIONS

    rows = []
    for name, (options, text) in COMMANDS.items():
        module = importlib.import_module(f"robo_rl.cli.{name.replace('-', '_')}")
        subcommands = getattr(module, "SUBCOMMANDS", {})
        rows += [(f"{name} {sub}", said, config) for sub, (config, said) in subcommands.items()] or [
            (name, text, getattr(module, options))
        ]
        if name == "wm":
            rows += [
                (f"wm train --kind {kind}", f"learn a model of kind {kind}", config)
                for kind, config in OPTIONS.items()
                if kind != "latent"  # what `wm train` learns without --kind
            ]
    return rows


def cli_page() -> str:
    """The page of all commands with their options."""
    from robo_rl.options import (
        OFF_POLICY,
        OFFLINE,
        RL_OPTIONS,
        MethodOptions,
        OffPolicyOptions,
        OnPolicyOptions,
    )

    parts = [
        "# Commands",
        "",
        "This page is made from the code when the site is built. `robo_rl COMMAND --help` prints the same.",
        "Defaults are those of the code. `robo_rl train --print-config` prints the values that a task and a "
        "method get.",
        "",
    ]
    for name, text, options in commands():
        parts += [f"## robo_rl {name}", "", f"{text[0].upper()}{text[1:]}.", "", *paragraph(options)]
        parts += table(rows_of(options, skip=("rl",)))
        if name == "train":
            for title, base, users in (
                (
                    "Methods that learn on-policy",
                    OnPolicyOptions,
                    [a for a in RL_OPTIONS if a not in OFF_POLICY | OFFLINE],
                ),
                ("Methods that learn from replay", OffPolicyOptions, list(OFF_POLICY)),
                ("Methods that learn from data sets of whole episodes", MethodOptions, list(OFFLINE)),
            ):
                parts += [f"### {title}", ""]
                if shared := rows_of(base, "rl."):
                    parts += [f"`--algo` {', '.join(users)} share these.", "", *table(shared)]
                for algo in users:
                    own = rows_of(RL_OPTIONS[algo], "rl.", skip=[f.name for f in fields(base)])
                    if own:
                        parts += [f"### Options of {algo}", "", *paragraph(RL_OPTIONS[algo]), *table(own)]
    return "\n".join(parts) + "\n"


def paragraph(options: type) -> list[str]:
    return [clean(options.__doc__ or ""), ""]


def table(rows: list[tuple[str, str, str, str]]) -> list[str]:
    head = ["| option | type | default | meaning |", "|---|---|---|---|"]
    return [
        '<div class="options" markdown>',  # docs/site.css: how it looks on a phone
        "",
        *head,
        *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows),
        "",
        "</div>",
        "",
    ]


def rows_of(options: type, prefix: str = "", skip=()) -> list[tuple[str, str, str, str]]:
    """(option, type, default, meaning) of every field of a dataclass, those of nested ones included."""
    from robo_rl.cli.help import checked, docs

    rows, said, ranges = [], docs(options), checked(options)[1]
    for f in fields(options):
        if f.name in skip:
            continue
        inner = (
            f.default_factory
            if f.default_factory is not MISSING and is_dataclass(f.default_factory)
            else type(default(f))
        )
        if is_dataclass(inner):
            rows += rows_of(inner, f"{prefix}{f.name}.")
            continue
        text = f.type if isinstance(f.type, str) else inspect.formatannotation(f.type)
        positional = "Positional" in text
        meaning = said.get(f.name, "") or helped(f)
        name = f.name.upper() if positional else f"--{(prefix + f.name).replace('_', '-')}"
        meaning = clean(meaning) + (f" *({ranges[f.name]})*" if f.name in ranges else "")
        rows.append((f"`{name}`", type_text(text), shown(f), meaning.strip()))
    return rows


def helped(f: Field) -> str:
    """The help text that tyro.conf.arg(help=...) carries."""
    for extra in getattr(f.type, "__metadata__", ()):
        if getattr(extra, "help", None):
            return extra.help
    return ""


def default(f: Field):
    if f.default is not MISSING:
        return f.default
    return f.default_factory() if f.default_factory is not MISSING else MISSING


def shown(f: Field) -> str:
    value = default(f)
    if value is MISSING:
        return "required"
    return '`""`' if value == "" else f"`{value}`"


def type_text(text: str) -> str:
    """A short name of an annotation."""
    text = re.sub(r"(tyro\.conf\.)?Positional\[(.*)\]", r"\2", text)
    text = re.sub(r"(typing\.)?Annotated\[(\w+|\w+\[.*?\]),.*", r"\2", text)
    text = re.sub(r"tuple\[(\w+), \.\.\.\]", r"\1, several", text)
    choices = re.search(r"Literal\[([^\]]*)\]", text)
    return (
        ", ".join(f"`{c.strip(' ' + chr(39) + chr(34))}`" for c in choices[1].split(",")) if choices else text
    )


def clean(text: str) -> str:
    """One line of Markdown: angle brackets are no HTML, but in code they stay."""
    line = " ".join(inspect.cleandoc(text).split())
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(line.split("`")))


def option_names() -> set[str]:
    """Every option of every command, with its negative form where it is a flag."""
    from robo_rl.options import RL_OPTIONS

    rows = [row for _, _, options in commands() for row in rows_of(options, skip=("rl",))]
    rows += [row for options in RL_OPTIONS.values() for row in rows_of(options, "rl.")]
    names = {row[0].strip("`") for row in rows}
    return (
        names
        | {re.sub(r"^--(.*\.)?", lambda m: f"--{m[1] or ''}no-", n) for n in names}
        | {"--help", "--version"}
    )


# ---- presets


def flat(config, prefix: str = "") -> dict[str, object]:
    """{option: value} of a configuration."""
    found: dict[str, object] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        found |= flat(value, f"{prefix}{f.name}.") if is_dataclass(value) else {f"{prefix}{f.name}": value}
    return found


def preset_table(algo: str) -> str:
    """What the presets of a method set on the task pick_cube with state observations, where it is not the
    option's default, and why."""
    from robo_rl.experiment.recipes import PAPERS, RecipeChoice, rows, steps

    names = ["full", "quick", *(["paper"] if algo in PAPERS else [])]
    chosen = [RecipeChoice("mujoco", "pick_cube", algo, "state", name) for name in names]
    made = [flat(steps(one)[-1][1]) for one in chosen]
    plain = flat(steps(chosen[0])[0][1])
    reasons = {row.name: row.why for one in chosen for row in rows(one)}
    skip = ("task", "algo", "preset")
    changed = [k for k in plain if k not in skip and any(m[k] != plain[k] for m in made)]
    lines = [f"| option | default | {' | '.join(f'`{n}`' for n in names)} |", "|---" * (len(names) + 2) + "|"]
    lines += [
        f"| `--{k.replace('_', '-')}` | {plain[k]} | {' | '.join(str(m[k]) for m in made)} |" for k in changed
    ]
    lines += [
        "",
        "The rows of the recipes, and their reasons:",
        "",
        *(f"* `{name}`: {why}" for name, why in reasons.items()),
    ]
    return "\n".join(lines)
