"""The one command, `robo_rl`. Subcommands import what they need when they run, so `--help` is instant."""

import importlib
import sys

from robo_rl.errors import UserError, choose

COMMANDS = {
    "train": ("Train", "demonstrations, SFT, online RL, evaluation, checkpoints, videos"),
    "eval": ("Eval", "evaluate a run's checkpoint on a fixed list of starts, or compare two runs"),
    "collect": ("Collect", "record demonstrations of the scripted expert as a LeRobot v3 data set"),
    "report": ("Report", "one self-contained HTML page of a run"),
    "doctor": ("Doctor", "what works on this machine and what to install for the rest"),
    "bench": ("Bench", "our speed, the physical limit and a peer side by side"),
}


def usage() -> str:
    lines = [f"  {name:<9}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: robo_rl COMMAND [options]   (robo_rl COMMAND --help lists them)", "", *lines])


def main(argv: list[str] | None = None) -> None:
    """Entry point: exit code 0 on success, 2 with one line on a user's mistake."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        raise SystemExit(0)
    if argv[0] in ("-V", "--version"):
        from robo_rl import __version__
        print(__version__)
        raise SystemExit(0)
    try:
        name = choose("command", argv[0], COMMANDS)
        module = importlib.import_module(f"robo_rl.cli.{name}")
        args = module.parse(argv[1:]) if hasattr(module, "parse") else _parse(module, name, argv[1:])
        raise SystemExit(module.run(args))
    except UserError as e:
        print(f"robo_rl: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:
        raise SystemExit(0) from None


def _parse(module, name: str, argv: list[str]):
    import tyro
    return tyro.cli(getattr(module, COMMANDS[name][0]), prog=f"robo_rl {name}", args=argv)


if __name__ == "__main__":
    main()
