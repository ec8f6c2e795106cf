"""`robo_rl serve RUN`: a run's policy answers over TCP those who know its token; no pickle on the wire."""

import os
import sys

from robo_rl.errors import quoted
from robo_rl.experiment.policy_server import ServedPolicy, ServeOptions, serve_policy


def run(options: ServeOptions) -> int:
    """Serve until interrupted."""

    def on_ready(at: ServedPolicy) -> None:
        print(f"serving {options.run} ({learnt_on(at.config)}) on {at.address}", flush=True)
        told = bool(os.environ.get("ROBO_RL_TOKEN"))
        token = (
            "the same ROBO_RL_TOKEN"
            if told
            else f"--token {quoted(at.token_file)}, or its text as ROBO_RL_TOKEN"
        )
        if options.wire == "openpi":
            key = "ROBO_RL_TOKEN of this server" if told else f"the token in {at.token_file}"
            print(f"clients of openpi's wire: ws://{at.address}, the API key is {key}", flush=True)
        else:
            print(
                f"clients prove the token: robo_rl deploy RUN --policy {at.address} with {token}", flush=True
            )
        if not at.loopback:
            port = at.address.rpartition(":")[2]
            print(
                f"warning: other machines reach {at.address} and nothing is encrypted; keep --host 127.0.0.1 "
                f"and go through ssh -L {port}:127.0.0.1:{port} MACHINE",
                file=sys.stderr,
                flush=True,
            )

    if options.wire == "openpi":
        from robo_rl.experiment.openpi import serve_openpi

        serve_openpi(options, on_ready)
    else:
        serve_policy(options, on_ready)
    return 0


def learnt_on(config) -> str:
    """The task of a run, or the data set of one without a simulator."""
    return config.demos if config.sim == "none" else config.task or config.sim
