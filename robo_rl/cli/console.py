"""`robo_rl console RUN`: a web page on which people watch N robots, take over, and teach."""

import os

from robo_rl.errors import MissingDependency
from robo_rl.human.console.options import ConsoleOptions

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def run(options: ConsoleOptions) -> int:
    """Serve until Ctrl-C."""
    try:
        import websockets  # noqa: F401
    except ImportError:
        raise MissingDependency("the console needs websockets: pip install 'robo_rl[console]'") from None
    from robo_rl.experiment.console import open_session
    from robo_rl.human.console.server import ConsoleServer
    from robo_rl.human.console.terminal import TerminalRequests

    with TerminalRequests() as requests:
        session, source = open_session(options)
        try:
            server = ConsoleServer(session, options.host, options.port, options.operators, options.url)
            server.start()
            if options.host not in LOOPBACK:
                print(f"robo_rl: listening on {options.host}: everybody who can reach this machine and has an address "
                      "can move the robots, and nothing is encrypted (docs/howto/console.md: ssh -L, or a proxy with TLS)")
            print_addresses(server)

            def renew() -> None:
                server.renew()
                print_addresses(server)
            session.run(requests, options.seconds, renew)
            server.stop()
        finally:
            session.close()
    print(f"stopped; corrections: {session.recorder.folder} ({session.recorder.kept} episodes with help). Learn from them: "
          f"robo_rl correct {source} --operator console")
    return 0


def print_addresses(server) -> None:
    """Print an address per operator."""
    for name, address in server.addresses().items():
        print(f"{name}: {address}", flush=True)
    print("Each address works once. New ones, old sessions end: press Enter here, or "
          f"kill -USR1 {os.getpid()}", flush=True)
