"""How workers are started. Launchers only start processes: a worker reads everything else from the run directory."""
