"""`robo_rl lora RUN`: the adapter that a run has learnt, saved alone or merged."""

from robo_rl.errors import quoted
from robo_rl.experiment.adapter import AdapterOptions as AdapterOptions
from robo_rl.experiment.adapter import save


def run(options: AdapterOptions) -> int:
    """Write it and say what to do with it."""
    folder, size, whole = save(options)
    if options.merge:
        print(
            f"merged checkpoint: {folder}; use it as --checkpoint merged, or with robo_rl train --init "
            f"{quoted(folder)}"
        )
    else:
        print(
            f"adapter: {folder}, {size / 1e6:.3g} MB, {size / whole:.1%} of the policy's {whole / 1e6:.3g} MB"
        )
    return 0
