"""Episodes in ManiSkill's own format as a LeRobot v3 data set: `sims.maniskill.trajectories` plays them."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from robo_rl.data.assemble import appearing, need_new, parse_episodes
from robo_rl.data.episode import Episode
from robo_rl.data.writer import Writer
from robo_rl.errors import UserError
from robo_rl.types import Each, silently

SOURCES = {"human": "human", "teleoperation": "human", "rl": "policy"}  # others: expert


@dataclass(frozen=True, slots=True)
class Imported:
    """Episodes that were kept and played; how many succeeded of those that the file says succeed; how many
    were repeated by their actions alone; task and control mode; the longest kept, and the task's own limit
    [control steps]."""

    kept: int
    played: int
    again: int
    recorded: int
    repeated: int
    task: str
    control: str
    longest: int
    limit: int


def import_maniskill(
    files: Sequence[Path],
    out: Path,
    *,
    task: str = "",
    obs: str = "state",
    reward: str = "",
    image_size: int = 64,
    episodes: str = "",
    keep: Literal["success", "all"] = "success",
    each: Each = silently,
) -> Imported:
    """Play the episodes of ManiSkill's `trajectory.h5` again and write them to the new data set `out`.
    UserError: files of several tasks or control modes, none that succeeds."""
    from sims.maniskill.tasks import instruction
    from sims.maniskill.trajectories import lengths, open_env, open_file, play, read_recording

    need_new(out)
    recordings = [read_recording(path, task) for path in files]
    kinds = sorted({f"{r.task} by {r.control}" for r in recordings})
    if len(kinds) > 1:
        raise UserError(f"the files are of several tasks or control modes: {'; '.join(kinds)}")
    jobs, most = [], 1
    kept = again = recorded = repeated = longest = 0
    with ExitStack() as opened:
        for recording in recordings:
            file = opened.enter_context(open_file(recording.path))
            count = len(recording.listed)
            chosen = parse_episodes(episodes, count) if episodes else np.arange(count)
            most = max(most, *lengths(recording, file, chosen))
            jobs += [(recording, file, int(k)) for k in chosen]
        env = open_env(recordings[0], obs, reward, image_size, most)
        opened.callback(env.close)
        spec = replace(env.spec, max_steps=env.limit)
        with appearing(out, each) as folder, Writer(folder, spec=spec) as writer:
            for recording, file, k in each("import", jobs, "episodes"):
                got = play(env, recording, file, k)
                again += got.success and bool(got.recorded)
                recorded += bool(got.recorded)
                repeated += got.start >= 0
                if keep == "success" and not got.success:
                    continue
                kept, longest = kept + 1, max(longest, len(got.action))
                writer.add(
                    Episode(
                        state=got.state[:-1],
                        action=got.action,
                        images={view: x[:-1] for view, x in got.images.items()},
                        task=instruction(recording.task),
                        success=got.success,
                        reward=got.reward,
                        source=SOURCES.get(recording.source, "expert"),
                        start=got.start,
                        terminated=got.terminated,
                        final=got.state[-1],
                        final_images={view: x[-1] for view, x in got.images.items()},
                    )
                )
            if not kept:
                raise UserError(
                    f"none of {len(jobs)} episodes succeeds when it is played again in {recordings[0].task}; "
                    "--keep all keeps those that fail"
                )
    first = recordings[0]
    return Imported(kept, len(jobs), again, recorded, repeated, first.task, first.control, longest, env.limit)
