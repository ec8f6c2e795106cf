"""`robo_rl console RUN`: a web page on which people watch N robots, take over, and teach."""

import functools

from robo_rl.errors import plural, quoted
from robo_rl.human.console.options import ConsoleOptions


def run(options: ConsoleOptions) -> int:
    """Serve until Ctrl-C."""
    from robo_rl.experiment.console import need_websockets, open_session, serve_session

    need_websockets()
    session, source = open_session(options)
    try:
        serve_session(session, options, lambda: True, functools.partial(print, flush=True))
    finally:
        session.close()
    print(
        f"stopped; corrections: {session.recorder.folder} "
        f"({plural(session.recorder.kept, 'episode')} with help). "
        f"Learn from them: robo_rl correct {quoted(source)} --operator console"
    )
    return 0
