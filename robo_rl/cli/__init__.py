"""The one command, `robo_rl`. Subcommands import what they need when they run, so `--help` is instant."""

import contextlib
import importlib
import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import get_type_hints

from robo_rl.child import set_openmp
from robo_rl.errors import UserError, choose, is_swapped, plain_warning, utf8

COMMANDS = {
    "train": ("Train", "demonstrations, SFT, online RL, evaluation, checkpoints, videos"),
    "eval": ("Eval", "evaluate a run's checkpoint on a fixed list of starts, or compare two runs"),
    "collect": (
        "CollectOptions",
        "record demonstrations of the scripted expert, a policy or a person as a LeRobot v3 data set",
    ),
    "data": ("CheckDataOptions", "look at a data set of any robot, mend, merge, split and label it"),
    "wm": (
        "WorldModelConfig",
        "world models: learn one from recorded episodes (train), and how far to trust it (eval)",
    ),
    "vla": (
        "CheckVlaOptions",
        "checkpoints of pi0, SmolVLA, X-VLA, GR00T, …: what one is (check), its keys (convert), differences",
    ),
    "sim-arm": ("SimArmOptions", "a simulated torque-controlled arm on the ROS 2 wire, like a CRISP robot"),
    "cameras": (
        "CameraOptions",
        "pictures of the simulated arm's cameras, of real ones or of files, as CompressedImage",
    ),
    "deploy": ("DeployOptions", "run a run's policy on an arm, governed; --dry-run commands nothing"),
    "robot": (
        "RobotOptions",
        "an arm's file and first day (check), home, teleop, calibrate cameras, drive servos, keys of its "
        "network",
    ),
    "serve": ("ServeOptions", "answer a run's policy over TCP, for a bridge on another machine"),
    "up": ("UpOptions", "bring up a graph of commands without ROS: arm and bridge"),
    "correct": (
        "CorrectOptions",
        "rounds of practice with a person beside the robots, learning from what they did",
    ),
    "workers": ("WorkersOptions", "let workers join or leave a run that goes on"),
    "console": ("ConsoleOptions", "a web page to watch robots, take over and teach; several operators"),
    "lora": ("AdapterOptions", "what a run with adapters (LoRA) has learnt, saved alone or merged"),
    "report": ("ReportOptions", "one self-contained HTML page of a run"),
    "compare": ("CompareRunsOptions", "runs side by side, with intervals over their seeds"),
    "check": (
        "CheckOptions",
        "put a simulator, a task, a policy or a method, also of your own, through its contract suite",
    ),
    "doctor": ("DoctorOptions", "what works on this machine and what to install for the rest"),
    "bench": ("BenchOptions", "our speed, the physical limit and a peer side by side"),
    "results": ("AddOptions", "measured results: add those of a run, write their page"),
    "completion": ("CompletionOptions", "a script that completes commands and options in bash or zsh"),
}


def usage() -> str:
    lines = [f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: robo_rl COMMAND [options]   (robo_rl COMMAND --help lists them)", "", *lines])


def main(argv: list[str] | None = None) -> None:
    """Entry point: exit code 0 on success, 2 with one line on a user's mistake."""
    command, argv = argv is None, sys.argv[1:] if argv is None else argv
    if command:
        set_openmp()
        warnings.formatwarning = plain_warning()
    os.umask(0o077)  # runs, journals, sockets and shared memory are their user's alone
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without · and ± is no reason to fail
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        raise SystemExit(0)
    if argv[0] in ("-V", "--version"):
        from robo_rl import __version__

        print(__version__)
        raise SystemExit(0)
    try:
        for text in argv:
            utf8("an option of the command line", text)
        with own_errors():
            module, args = parse_arguments(argv)
            job = getattr(module, "run_guarded", module.run) if command else module.run
            raise SystemExit(job(args))
    except UserError as e:
        print(f"robo_rl: {' '.join(str(e).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except (MemoryError, RuntimeError) as e:
        if not isinstance(e, MemoryError) and "can't allocate memory" not in str(e):  # torch's word for it
            raise
        print(
            f"robo_rl: out of memory ({' '.join(str(e).split())[:200] or 'no more is known'}); use fewer "
            "--envs or --workers, shorter batches, or smaller images",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    except KeyboardInterrupt as e:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the same press, passed on by the guard
        print(f"robo_rl: interrupted{e}", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        raise SystemExit(0) from None
    except OSError as e:
        from robo_rl.files import full_disk

        if words := full_disk(e):
            print(f"robo_rl: {words}", file=sys.stderr)
            raise SystemExit(2) from None
        if e.filename is None:
            raise
        print(f"robo_rl: {e.filename}: {e.strerror}", file=sys.stderr)
        raise SystemExit(2) from None


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Say what a user's own vector env raises as one UserError, and of other code whose it is."""
    try:
        yield
    except Exception as e:
        if "sims.own" in sys.modules and (words := sys.modules["sims.own"].own_error(e)):
            raise UserError(words) from e
        from robo_rl.plugins import note_own_code

        note_own_code(e)
        raise


def parse_arguments(argv: list[str]):
    """(module, options) of the command argv[0]."""
    if argv[0] not in COMMANDS:
        from robo_rl.cli.elsewhere import our_command

        if told := our_command(argv[0]):
            raise UserError(f"there is no command {argv[0]!r}; here it is robo_rl {told}")
    name = choose("command", argv[0], COMMANDS)
    module = importlib.import_module(f"robo_rl.cli.{name.replace('-', '_')}")
    if hasattr(module, "parse"):
        return module, module.parse(argv[1:])
    if hasattr(module, "SUBCOMMANDS"):
        sub = choose_subcommand(name, module.SUBCOMMANDS, argv[1:])
        return module, parse_options(module.SUBCOMMANDS[sub][0], f"{name} {sub}", argv[2:])
    return module, parse_options(getattr(module, COMMANDS[name][0]), name, argv[1:])


def given(argv: list[str], option: str) -> str | None:
    """What stands behind the last `option`, as `--kind video` or `--kind=video`, which is the one that counts
    where there are several; None without it."""
    for i in reversed(range(len(argv))):
        if argv[i] == option and i + 1 < len(argv):
            return argv[i + 1]
        if argv[i].startswith(f"{option}="):
            return argv[i].split("=", 1)[1]
    return None


def resumes_alone(argv: list[str], remedy: str, *known: str) -> None:
    """UserError with the `remedy` if options other than the `known` ones stand beside --resume: a run goes on
    with its own, and nobody would heed them."""
    flags = [arg.partition("=")[0] for arg in argv if arg.startswith("--")]
    others = ", ".join(flag for flag in flags if flag not in ("--resume", "--help", *known))
    if "--resume" in flags and others:
        raise UserError(
            f"--resume goes on with the options of the run, so {others} cannot be given beside it; {remedy}"
        )


def choose_subcommand(command: str, subcommands: dict[str, tuple], argv: list[str]) -> str:
    """Which of `subcommands` {name: (options, what it does)} argv begins with; without one, or asked for
    help, they are listed."""
    if not argv or argv[0] in ("-h", "--help"):
        width = max(9, *(len(name) + 2 for name in subcommands))
        print(f"usage: robo_rl {command} COMMAND [options]   (robo_rl {command} COMMAND --help lists them)\n")
        print("\n".join(f"  {name:<{width}}{text}" for name, (_, text) in subcommands.items()))
        raise SystemExit(0)
    return choose(f"{command} command", argv[0], subcommands)


def parse_options(cls, command: str, argv: list[str], **default):
    """An instance of the dataclass `cls` from the command line; whatever tyro refuses is one UserError."""
    if not {"-h", "--help"}.isdisjoint(argv):
        from robo_rl.cli.help import help_text

        print(help_text(cls, command, default.get("default")))
        raise SystemExit(0)
    import tyro

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(cls, prog=f"robo_rl {command}", args=with_values(cls, argv), **default)
    except SystemExit as e:
        if not e.code:  # --tyro-print-completion
            raise
        from robo_rl.cli.elsewhere import of_other_methods, ours
        from robo_rl.cli.help import option_names

        told = _sentence(said.getvalue())
        if told.startswith("Unrecognized options"):
            options = option_names(cls, default.get("default"))
            typed = next((a for a in argv if a.startswith("--") and a.partition("=")[0] not in options), "")
            if near := [o for o in options if is_swapped(typed.partition("=")[0], o)]:
                told = f"{told.partition('; did you mean')[0]}; did you mean {near[0]}?"
            more = "" if "did you mean" in told or command != "train" else of_other_methods(argv, options)
            extra = told.partition(": ")[2]
            if not any(a.startswith("-") for a in extra.split(", ")):
                told = f"Too many arguments: {extra}"
                told += "; robo_rl compare takes several runs" * (command in ("report", "eval"))
            told = ours(command, argv, options) or more or told
        raise UserError(f"{told} (robo_rl {command} --help lists the options)") from None


def with_values(cls, argv: list[str]) -> list[str]:
    """argv with the flags of a field `cut: bool | None` as tyro takes them: `--cut True` for `--cut`, `--cut
    False` for `--no-cut`."""
    flags = {n.replace("_", "-") for n, kind in get_type_hints(cls).items() if kind == (bool | None)}
    out: list[str] = []
    for arg, following in zip(argv, [*argv, ""][1:], strict=True):
        if arg[:2] == "--" and arg[2:] in flags and following not in ("True", "False", "None"):
            out += [arg, "True"]
        elif arg[:5] == "--no-" and arg[5:] in flags:
            out += [f"--{arg[5:]}", "False"]
        else:
            out.append(arg)
    return out


PLAIN = (  # what Python and tyro say of a value, and what people understand
    (r"^Error parsing (--\S+): invalid literal for int\(\) with base 10: ", r"\1 is a whole number, got "),
    (r"^Error parsing (--\S+): could not convert string to float: ", r"\1 is a number, got "),
    (r"^Error parsing (--\S+): no type matching (.*) could be .* from \[(.*)\]\..*", r"\1 is \2, got \3"),
    (r"\{None\}\|INT", "a whole number or None"),
    (r"\{None\}\|FLOAT", "a number or None"),
)


def _sentence(box: str) -> str:
    """tyro draws a box: a title, what is wrong, a line, and maybe the nearest options."""
    rows = [row.strip().strip("│╭╮╰╯ ") for row in box.strip().splitlines()[1:]]
    parts = " ".join(row if row.strip("─-") else "\0" for row in rows).strip("\0 ").split("\0")
    text = re.sub(r"^Error parsing [a-zA-Z]\w*: ", "", " ".join(parts[0].split()))
    for words, plain in PLAIN:
        text = re.sub(words, plain, text)
    near = re.search(r"--[\w.-]+", parts[1]) if len(parts) > 1 and "meant" in parts[1] else None
    return text + (f"; did you mean {near[0]}?" if near else "")


if __name__ == "__main__":
    main()
