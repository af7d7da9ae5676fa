"""vLLM's worker on a CPU, as one of several ranks that share an engine."""

import os
import socket

from vllm.v1.worker.cpu_worker import CPUWorker


class SharingWorker(CPUWorker):
    """Ranks exchange activations in shared memory, or over the network where vLLM has other names for theirs.

    It takes the name from the address they met at, which in an engine whose ranks somebody else started is "env://" for every
    run and on every machine.
    """

    def init_device(self) -> None:
        self.distributed_init_method = f"env:{socket.gethostname()}-{os.environ['MASTER_PORT']}"
        super().init_device()
