"""A Slurm cluster of one node on this machine: munged, slurmctld and slurmd as processes of this test session."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock
CredType=cred/munge
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why no Slurm can be started here; None where it can."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm, munge)"
    return None if os.geteuid() == 0 else "slurmd needs root"


@contextmanager
def running(directory: Path) -> Iterator[dict[str, str]]:
    """Yields: the environment variables that commands find this Slurm by."""
    for name in ("state", "spool"):
        (directory / name).mkdir()
    text = CONFIGURATION.format(
        host=socket.gethostname().split(".")[0],
        directory=directory,
        controller_port=_free_port(),
        node_port=_free_port(),
        cpus=os.cpu_count(),
    )
    configuration = directory / "slurm.conf"
    configuration.write_text(text)
    key = directory / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = {"key-file": key, "socket": directory / "munge.sock", "pid-file": directory / "munged.pid"}
    files |= {"log-file": directory / "munged.log", "seed-file": directory / "munged.seed"}
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    try:
        subprocess.run(["munged", "--force", *(f"--{k}={v}" for k, v in files.items())], check=True)
        for daemon in ("slurmctld", "slurmd"):
            subprocess.run([daemon], env=environment, check=True)
        _wait_until_idle(environment)
        yield {"SLURM_CONF": str(configuration)}
    finally:
        for daemon in ("slurmd", "slurmctld", "munged"):
            file = directory / f"{daemon}.pid"
            if file.is_file():
                os.kill(int(file.read_text()), signal.SIGTERM)


def _wait_until_idle(environment: dict[str, str]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        state = subprocess.run(
            ["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True, check=False
        )
        if state.stdout.strip() == "idle":
            return
        time.sleep(0.2)
    raise TimeoutError(f"Slurm's node is not idle after a minute: {state.stdout}{state.stderr}")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
