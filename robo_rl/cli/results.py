"""`robo_rl results add RUN|page`: measured results in results/*.json, and the pages that show them."""

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True, kw_only=True)
class AddOptions:
    """Add the final evaluation of a run, with the provenance of its run.json, to a file of results."""

    run: tyro.conf.Positional[str]
    """Run folder, or a folder of runs (robo_rl train --seeds)."""
    topic: str = "training"
    """Name of the file: results/<topic>.json."""
    folder: str = "results"
    """Folder of the files of results."""


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """Write the pages of results, and the README's table, from results/*.json."""

    folder: str = "results"
    """Folder of the files of results."""
    out: str = "docs/results.md"
    """The first page; those of the topics go into the folder beside it that has its name."""
    readme: str = "README.md"
    """File with the marks <!-- results --> and <!-- /results -->, or empty."""


SUBCOMMANDS = {
    "add": (AddOptions, "add the final evaluation of a run"),
    "page": (PageOptions, "write docs/results.md and docs/results/"),
}


def run(args: "AddOptions | PageOptions") -> int:
    """Add rows, or write the page."""
    if isinstance(args, AddOptions):
        from robo_rl.report.compare import names_apart, run_folders
        from robo_rl.report.results_page import value
        from robo_rl.results import add_rows, run_rows

        names = names_apart(run_folders([args.run]))
        rows = [row for folder, name in names.items() for row in run_rows(folder, name)]
        path = add_rows(Path(args.folder) / f"{args.topic}.json", args.topic, rows)
        print("\n".join([*(f"{row.what}: {value(row)}" for row in rows), f"written to {path}"]))
        return 0
    from robo_rl.report.results_page import write_pages

    written = write_pages(Path(args.folder), Path(args.out), Path(args.readme) if args.readme else None)
    print("\n".join(f"written to {path}" for path in written))
    return 0
