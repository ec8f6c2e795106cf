"""`robo_rl collect`: demonstrations of the scripted expert, a policy or a person, or whatever acts, as a
LeRobot v3 data set."""

from robo_rl.errors import plural
from robo_rl.experiment.collect import CollectOptions, collect


def run(options: CollectOptions) -> int:
    """Record, repair or accept."""
    if options.repair:
        from robo_rl.data.repair import repair

        result = repair(options.repair)
        print(
            f"{options.repair}: kept {plural(result.kept, 'episode')}, dropped {result.dropped}"
            + (f" ({result.reason})" if result.reason else "; it was sound")
        )
        return 0
    if options.accept:
        from robo_rl.data.repair import accept

        data = accept(options.accept, options.tolerance)
        print(f"{options.accept}: {plural(len(data), 'episode')} accepted, checksums written")
        return 0
    got = collect(options)
    if options.by_person:
        print(
            f"{got.folder}: {got.episodes} of {got.tried} episodes added ({got.successes} of them "
            f"successful), {got.total} in all"
        )
        return 0
    who = "the policy" if options.by_policy else "expert"
    how = (
        f"{got.successes} of them successful"
        if got.tried is None
        else f"{who} succeeded in {got.episodes} of {got.tried}"
    )
    print(f"{got.folder}: {plural(got.episodes, 'episode')} added ({how}), {got.total} in all")
    return 0
