"""`robo_rl cameras`: what the simulated arm's cameras, real ones or files show, as CompressedImage."""

from robo_rl.experiment.cameras import CameraOptions, publish_cameras


def run(options: CameraOptions) -> int:
    """Until --seconds, Ctrl-C or the end of the arm."""

    def on_start() -> None:
        print(
            f"{', '.join(options.names)} at {options.size} x {options.size} pixels, {options.rate:g} times a "
            "second",
            flush=True,
        )

    count, timing = publish_cameras(options, on_start)
    print(f"{count} pictures of each view · {timing}")
    return 0
