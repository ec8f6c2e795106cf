"""`robo_rl up SPEC`: a graph of commands without ROS. Started in order, watched, and taken down together."""

from pathlib import Path

from robo_rl.experiment.process_graph import UpOptions, read_spec, run_processes


def run(options: UpOptions) -> int:
    """Exit status of the process that ends; 1 where another one ended or was not ready in time."""
    parts = read_spec(Path(options.spec), options.set)
    if options.show:
        for part in parts:
            print(f"{part.name}: {' '.join(part.command)}")
        return 0
    return run_processes(parts, options.wait)
