"""`robo_rl sim-arm`: the 1 kHz governed arm over MuJoCo on the ROS 2 wire."""

import sys
import time
from collections import deque
from datetime import datetime

from robo_rl.experiment.sim_arm import SimArmOptions, make_sim_arm, run_sim_arm, status_line

MOST_CHANGES = 20  # lines a second
CLEAR = "\r\x1b[2K"  # the line of a terminal


def run(options: SimArmOptions) -> int:
    """Until --seconds or Ctrl-C."""
    from controllers.model import inertia_fault, range_fault
    from controllers.pair import is_pair, load_pair
    from robo_rl.experiment.sim_pair import make_sim_pair, pair_status_line

    two = is_pair(options.robot)
    live = sys.stderr.isatty() and not options.quiet

    def on_start() -> None:
        if not options.quiet:
            arms = load_pair(options.robot).arms if two else [""]
            topics = " and ".join(
                "/".join(filter(None, [options.namespace, arm, "safety_command"])) for arm in arms
            )
            print(
                f"{options.robot} is on the wire; commands wait for 'claim NAME SECONDS' and 'arm NAME' on "
                f"{topics}",
                flush=True,
            )

    def on_refusal(line: str) -> None:
        print(f"{CLEAR if live else ''}refused: {line}", file=sys.stderr, flush=True)

    told: deque[float] = deque(maxlen=MOST_CHANGES)

    def on_change(line: str) -> None:
        now = time.monotonic()
        flood = len(told) == MOST_CHANGES and now - told[0] < 1
        if not options.quiet and not flood:  # else whoever claims and releases would slow the loop
            told.append(now)
            at = datetime.now().isoformat(" ", "milliseconds")
            print(f"{CLEAR if live else ''}{at} {line}", file=sys.stderr, flush=True)

    def status(arm, node, timing: str = "") -> str:
        return pair_status_line(node, timing) if two else status_line(arm, node, timing)

    def on_tick(arm, node) -> None:
        if live:
            sys.stderr.write(f"{CLEAR}{status(arm, node)}")

    def make(given: SimArmOptions):
        if two:
            return make_sim_pair(given)
        arm, node = make_sim_arm(given)
        shakes = "" if arm.servo else inertia_fault(arm.model, arm.law.options.stiffness)
        for fault in filter(None, (range_fault(arm.model, arm.robot), shakes)):
            print(f"robo_rl: {fault}", file=sys.stderr, flush=True)
        return arm, node

    arm, node, timing = run_sim_arm(options, on_start, on_tick, on_refusal, make, on_change)
    if live:
        sys.stderr.write(CLEAR)
    print(status(arm, node, f" · {timing}"))
    for reason, count in node.refused.most_common(5):
        print(f"refused {count} times: {reason}", file=sys.stderr)
    for complaint in node.transport.complaints():
        print(complaint, file=sys.stderr)
    return 0
