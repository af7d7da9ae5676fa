"""The protocol of clusters: where a run's workers are started."""

from pathlib import Path
from typing import Protocol


class Cluster(Protocol):
    """Starts a run's workers and waits for them.

    Two more methods are asked for where a cluster has them: the property `num_ranks`, the ranks of a run as far as they are
    known, over which prompts are divided; and `prepare(config)`, which is told of a run before it starts.
    """

    def launch(self, run_dir: Path) -> int:
        """Run to the end. Returns: the run's exit code (0, 1, 2 or 130). SIGINT and SIGTERM are passed on.

        Raises: UserError where the workers cannot be started.
        """
        ...
