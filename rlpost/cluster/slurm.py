"""Workers on nodes that Slurm gives: one sbatch job through submitit, torchrun on each node.

A job that runs into its time limit or is pre-empted writes a checkpoint, is queued again and goes on. The run directory must be
on a file system that all nodes share.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from rlpost.cluster import node
from rlpost.config.ranges import AtLeast
from rlpost.errors import UserError, require
from rlpost.record.status import RunStatus

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

# A job that was queued again and ended like this need not have come to its workers, so the run's state may be an older one.
BROKEN = {"FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}
ENDED = {"COMPLETED", "CANCELLED", "TIMEOUT", "DEADLINE", "PREEMPTED", *BROKEN}
POLL_S = 2.0
NOTICE = signal.SIGUSR2  # submitit's


@dataclass(frozen=True)
class Slurm:
    """Submit the run as a job and wait for it; interrupting the wait cancels the job.

    Attributes:
        nodes: the job's nodes.
        processes_per_node: ranks on each; one a GPU where there are any.
        gpus_per_node: asked of Slurm.
        cpus_per_process: cores of each rank, which are its threads.
        minutes: the job's time limit; it goes on in the next one.
        requeues: how often it may run into the limit.
        notice_s: seconds before the limit at which it stops with a checkpoint: more than a step takes.
        partition, account, qos: sbatch's options of these names; None: the cluster's defaults.
        sbatch: further options of sbatch, by their long names: {mem: 64G}.
        max_restarts: how often all ranks are started again within the job after one has failed.
    """

    requires_packages: ClassVar[Mapping[str, str]] = {"submitit": "slurm"}

    nodes: Annotated[int, AtLeast(1)] = 1
    processes_per_node: Annotated[int, AtLeast(1)] = 1
    gpus_per_node: Annotated[int, AtLeast(0)] = 0
    cpus_per_process: Annotated[int, AtLeast(1)] = 1
    minutes: Annotated[int, AtLeast(1)] = 60
    requeues: Annotated[int, AtLeast(0)] = 100
    notice_s: Annotated[int, AtLeast(0)] = 120
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    sbatch: Mapping[str, Any] = field(default_factory=dict)
    max_restarts: Annotated[int, AtLeast(0)] = 0

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.processes_per_node

    def launch(self, run_dir: Path) -> int:
        """Run to the end. Returns: the run's exit code.

        Raises: UserError where Slurm is not there, or refuses the job.
        """
        require(self.requires_packages, "cluster=slurm")
        import submitit

        asked = {"partition": self.partition, "account": self.account, "qos": self.qos}
        try:
            executor = submitit.SlurmExecutor(run_dir / "slurm", max_num_timeout=self.requeues)
            executor.update_parameters(
                job_name=f"rlpost-{run_dir.name}",
                nodes=self.nodes,
                ntasks_per_node=1,
                cpus_per_task=self.cpus_per_process * self.processes_per_node,
                time=self.minutes,
                signal_delay_s=self.notice_s,
                stderr_to_stdout=True,
                additional_parameters={**self.sbatch, "requeue": True, "open-mode": "append"},
                **({"gpus_per_node": self.gpus_per_node} if self.gpus_per_node else {}),
                **{name: value for name, value in asked.items() if value is not None},
            )
            job = executor.submit(Node(run_dir, self.processes_per_node, self.cpus_per_process, self.max_restarts))
        except RuntimeError as error:
            raise UserError(f"cluster=slurm: {str(error).strip().splitlines()[-1]}") from error
        print(f"Slurm job {job.job_id}; what it prints is in {run_dir / 'slurm'}", file=sys.stderr)
        interrupts = (signal.SIGINT, signal.SIGTERM)
        previous = {number: signal.signal(number, signal.default_int_handler) for number in interrupts}
        try:
            state = _wait(job.job_id)
        except KeyboardInterrupt:
            subprocess.run(["scancel", job.job_id], check=False)
            state = _wait(job.job_id)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        return _exit_code(RunStatus(run_dir), job.job_id, state)


class Node:
    """The function that submitit runs on each node of the job."""

    def __init__(self, run_dir: Path, num_processes: int, threads: int, max_restarts: int) -> None:
        self._run_dir, self._num_processes, self._threads = run_dir, num_processes, threads
        self._max_restarts = max_restarts
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        import submitit

        job = submitit.JobEnvironment()
        port = 20_000 + int(job.raw_job_id) % 20_000
        group = [
            f"--nnodes={job.num_nodes}",
            f"--node-rank={job.node}",
            "--rdzv-backend=c10d",
            f"--rdzv-id={job.raw_job_id}",
            f"--rdzv-endpoint={job.hostnames[0]}:{port}",
            f"--max-restarts={self._max_restarts}",
            f"--nproc-per-node={self._num_processes}",
        ]
        # Slurm sends its notice to every process of the job, and this one alone acts on it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {NOTICE})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlpost.cluster.torchrun", *group, "-m", "rlpost.worker", str(self._run_dir)],
            env=node.environment(self._num_processes, self._threads),
            start_new_session=True,
            preexec_fn=lambda: node.end_with_parent(signal.SIGTERM),
        )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {NOTICE})
        return self._ended()

    def _ended(self) -> int:
        """The exit code, once there is one. Not wait(): the notice's handler would wait within it for good."""
        assert self._process is not None
        while (code := self._process.poll()) is None:
            time.sleep(0.2)
        return code

    def checkpoint(self) -> "DelayedSubmission":
        """Called by submitit before the job is queued again."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._ended()
        return DelayedSubmission(Node(self._run_dir, self._num_processes, self._threads, self._max_restarts))


def _wait(job_id: str) -> str:
    """The state in which the job ended; one that is queued again has not."""
    state = "unknown"
    while True:
        command = ["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T"]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        if asked.returncode and "Invalid job id" in asked.stderr:  # Slurm forgets what ended long ago
            return state
        state = asked.stdout.strip() or state  # a controller that does not answer may come back
        if state in ENDED:
            return state
        time.sleep(POLL_S)


def _exit_code(run: RunStatus, job_id: str, ended: str) -> int:
    """Of a run whose workers are elsewhere: what it says of itself, where that is of its last attempt."""
    status = run.status()
    state = status.get("state")
    if state == "finished":
        return 0
    if state == "interrupted" and ended not in BROKEN:
        return 130
    if state == "failed":
        print(f"rlpost: {status.get('error')}", file=sys.stderr)
        return 2 if status.get("kind") == "configuration" else 1
    print(f"rlpost: Slurm job {job_id} ended as {ended}", file=sys.stderr)
    return 1
