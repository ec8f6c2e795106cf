"""`robo_rl completion bash|zsh`: a script that completes commands, options and their values in a shell.

The options are read from tyro's own completion of each command (`--tyro-print-completion`), so they are those
of `--help`.
"""

import ast
import contextlib
import importlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

import tyro

from robo_rl.errors import UserError

BASH = "complete -F _robo_rl robo_rl\n"
# zsh calls the same function on the words that bash would make of the line (--option=value is three), and
# adds files itself
ZSH = """_robo_rl_zsh() {
  local -a COMP_WORDS COMPREPLY
  local COMP_CWORD
  if compset -P '--*='; then
    COMP_WORDS=("${(@)words[1,CURRENT-1]}" "${words[CURRENT]%%=*}" = "$PREFIX")
  else
    COMP_WORDS=("${(@)words[1,CURRENT-1]}" "$PREFIX")
  fi
  COMP_CWORD=$(($#COMP_WORDS - 1))
  () { emulate -L sh; setopt kshglob noshglob braceexpand ksharrays; _robo_rl }
  if (($#COMPREPLY)); then compadd -- "${COMPREPLY[@]}"; else _files; fi
}
autoload -U +X compinit bashcompinit && compinit -u && bashcompinit
compdef _robo_rl_zsh robo_rl
"""
ENDS = {"bash": BASH, "zsh": ZSH}


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """Print a completion script: `source <(robo_rl completion bash)`, or put that line into ~/.bashrc."""

    shell: tyro.conf.Positional[Literal["bash", "zsh"]]
    """Which shell reads the script."""


def run(args: CompletionOptions) -> int:
    """Print the script."""
    print(script(dict(command_options())) + ENDS[args.shell], end="")
    return 0


def command_options() -> Iterator[tuple[str, dict[str, list[str]]]]:
    """(command, {option: its values, [] where any text goes}) of every command; "" stands for an argument
    without a name."""
    from robo_rl.cli import COMMANDS, parse_arguments

    for command in COMMANDS:
        module = importlib.import_module(f"robo_rl.cli.{command.replace('-', '_')}")
        for words in [[command, sub] for sub in getattr(module, "SUBCOMMANDS", ())] or [[command]]:
            options = options_of(lambda extra, words=words: parse_arguments([*words, *extra]))
            yield (
                " ".join(words),
                options | ({"": found} if (found := positional_values(command, options)) else {}),
            )


def positional_values(command: str, options: dict[str, list[str]]) -> list[str]:
    """What an argument without a name may be, where it is one of a few words (tyro's completion leaves such
    arguments out)."""
    from robo_rl.cli import COMMANDS

    module = importlib.import_module(f"robo_rl.cli.{command.replace('-', '_')}")
    for name, kind in get_type_hints(getattr(module, COMMANDS[command][0])).items():
        if get_origin(kind) is Literal and f"--{name.replace('_', '-')}" not in options:
            return [*get_args(kind)]
    return []


def options_of(parse: Callable[[list[str]], object]) -> dict[str, list[str]]:
    """{option: its values} of a command line that `parse` reads with tyro."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        parse(["--tyro-print-completion", "bash"])
    found = re.search(r"(?m)^COMPLETION_SPEC = (.*)$", printed.getvalue())
    if not found:
        raise UserError(
            "this version of tyro says its options in another way; install one that is known: pip install "
            "'tyro==1.0.17'"
        )
    from robo_rl.options import ALGOS
    from robo_rl.options.policy import POLICIES
    from sims.mujoco.names import TASKS

    named = {
        "--task": [*TASKS],
        "--algo": [*ALGOS],
        "--policy.kind": [*POLICIES],
        "--preset": ["quick", "full", "paper"],
        "--obs": ["state", "rgb"],
    }
    out: dict[str, list[str]] = {}
    for option in ast.literal_eval(found[1])["options"]:
        for flag in option["flags"]:
            out[flag] = [str(v) for v in option.get("choices") or named.get(flag, [])]
    return out


def script(commands: dict[str, dict[str, list[str]]]) -> str:
    """The function `_robo_rl` that completes `commands` (as `command_options` gives them); files where it
    knows nothing better."""
    names = list(dict.fromkeys(name.split()[0] for name in commands))
    lines = [
        "_robo_rl() {",
        '  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" '
        'command="${COMP_WORDS[1]}" flags="" values=""',
        "  COMPREPLY=()",
        # --option=value is three words
        '  if [ "$cur" = = ]; then cur=""; elif [ "$prev" = = ]; then prev="${COMP_WORDS[COMP_CWORD-2]}"; fi',
        '  if [ "$COMP_CWORD" -eq 1 ]; then',
        f'    COMPREPLY=($(compgen -W "{" ".join(names)} --help --version" -- "$cur")); return',
        "  fi",
    ]
    for group in dict.fromkeys(name.split()[0] for name in commands if " " in name):
        subs = " ".join(name.split()[1] for name in commands if name.startswith(f"{group} "))
        lines += [
            f'  if [ "$command" = {group} ]; then',
            f'    if [ "$COMP_CWORD" -eq 2 ]; then COMPREPLY=($(compgen -W "{subs}" -- "$cur")); return; fi',
            '    command="$command ${COMP_WORDS[2]}"',
            "  fi",
        ]
    lines.append('  case "$command" in')
    for name, options in commands.items():
        lines.append(f'    "{name}") flags="{" ".join(flag for flag in options if flag)}"')
        known = {flag: values for flag, values in options.items() if values}
        if "" in known:
            lines.append(f'      values="{" ".join(known.pop(""))}"')
        if known:
            lines += [
                '      case "$prev" in',
                *(
                    f'        {flag}) COMPREPLY=($(compgen -W "{" ".join(values)}" -- "$cur")); return ;;'
                    for flag, values in known.items()
                ),
                "      esac",
            ]
        lines.append("      ;;")
    return "\n".join(
        [
            *lines,
            "  esac",
            '  if [[ "$cur" == -* ]]; then COMPREPLY=($(compgen -W "$flags" -- "$cur"))',
            '  elif [ -n "$values" ] && [[ "$prev" != -* ]]; then COMPREPLY=($(compgen -W "$values" -- '
            '"$cur"))',
            '  elif [ -z "$ZSH_VERSION" ]; then compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- '
            '"$cur")); fi',
            "}",
            "",
        ]
    )
