"""rlpost-report: a sweep's answer as one page, with its table and figures beside it, at any time."""

import argparse
import gc
import logging
from pathlib import Path

from rlpost.errors import run_command
from rlpost.sweep.report import write_report


def main() -> None:
    """The command line. Exit code: 0, or 2 where there is no sweep."""
    run_command("rlpost-report", _main)


def _main() -> int:
    parser = argparse.ArgumentParser(prog="rlpost-report", description="Write a sweep's report, finished or not.")
    parser.add_argument("sweep_dir", type=Path, metavar="DIR", help="outputs/sweeps/<name>/<id>")
    arguments = parser.parse_args()
    logging.basicConfig(format="rlpost: %(message)s")
    gc.freeze()  # a correction of p-values collects garbage each time
    page, report = write_report(arguments.sweep_dir.absolute())
    print(*report.missing, *report.sentences, f"report: {page}", sep="\n")
    return 0


if __name__ == "__main__":
    main()
