"""`robo_rl sim-arm`: the 1 kHz governed arm over MuJoCo on the ROS 2 wire."""

import sys

from robo_rl.experiment.sim_arm import SimArmOptions, run_sim_arm, status_line


def run(options: SimArmOptions) -> int:
    """Until --seconds or Ctrl-C."""
    live = sys.stderr.isatty() and not options.quiet

    def on_start() -> None:
        if not options.quiet:
            topic = "/".join(filter(None, [options.namespace, "safety_command"]))
            print(f"{options.robot} is on the wire; commands wait for 'arm' on {topic}", flush=True)

    def on_tick(arm, node) -> None:
        if live:
            sys.stderr.write(f"\r\x1b[2K{status_line(arm, node)}")
    arm, node, timing = run_sim_arm(options, on_start, on_tick)
    if live:
        sys.stderr.write("\r\x1b[2K")
    print(status_line(arm, node, f" · {timing}"))
    for reason, count in node.refused.most_common(5):
        print(f"refused {count} times: {reason}", file=sys.stderr)
    for complaint in node.transport.complaints():
        print(complaint, file=sys.stderr)
    return 0
