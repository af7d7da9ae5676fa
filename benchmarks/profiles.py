"""Where the time of an update goes, operator by operator: python -m benchmarks.profiles [float32|bfloat16]

Set GLIBC_TUNABLES to see it with other memory settings than the launcher's, which are taken otherwise.
"""

import os
import sys
import time

from rlpost.cluster.node import MALLOC

SHOWN = 25


def main(precision: str = "float32") -> None:
    if "GLIBC_TUNABLES" not in os.environ:  # read when a process starts
        command = [sys.executable, "-m", "benchmarks.profiles", precision]
        os.execve(sys.executable, command, {**os.environ, "GLIBC_TUNABLES": MALLOC})
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.common import default_model, make_policy, synthetic

    policy = make_policy(default_model(), precision)
    rollouts = synthetic(8, 8, prompt=40, completion=26, vocabulary=49152)
    groups = list(range(8))
    for step in range(1, 6):
        started = time.perf_counter()
        policy.update(rollouts, groups, step)
        print(f"update {step}: {time.perf_counter() - started:.2f} s", flush=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        policy.update(rollouts, groups, 6)
    events = sorted(profiled.key_averages(), key=lambda event: -event.self_cpu_time_total)
    print(f"{'self, ms':>9} {'calls':>6}")
    for event in events[:SHOWN]:
        print(f"{event.self_cpu_time_total / 1e3:>9.1f} {event.count:>6}  {event.key}")
    print(f"{sum(event.self_cpu_time_total for event in events) / 1e3:>9.1f}         all of them")


if __name__ == "__main__":
    main(*sys.argv[1:])
