"""The launchers of a run's workers. They only start processes: a worker reads everything else from the run directory."""
