"""Completions as programs, run against tests in a process with limits.

Time, memory and the size and number of files are limited; the process reaches no network, starts no other process, sees
no environment variables and works in a directory that is gone afterwards. It can still read what its user can: run models
that you would not trust with a shell in a container.
"""

import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlpost.errors import UserError

_FENCE = re.compile(r"^```[ \t]*(\w*)[ \t]*$", re.MULTILINE)
LONGEST_PROGRAM = 100_000  # bytes; Linux takes no argument longer than 131,071
OUTPUT_BYTES = 2**20
OPEN_FILES = 32

# The word behind the test is read first and written last: a program that leaves early, with whatever exit code, is not
# taken for one that passes.
_ASSERTING = """
import sys
word, program, test = sys.stdin.read().split("\\0")
names = {"__name__": "program"}
exec(compile(program, "program", "exec"), names)
exec(compile(test, "test", "exec"), names)
sys.__stdout__.write(word)
sys.__stdout__.flush()
"""

_PYTHON = [sys.executable, "-I", "-S"]
_CONFINED = str(Path(__file__).with_name("confined.py"))
_NAMESPACES = ["--net", "--pid", "--ipc", "--fork", "--kill-child"]


class CodeReward:
    """1 where the program in a completion's last code block passes all of its tests, else 0; None without tests.

    Args:
        tests: the column with a list of tests: Python statements ("assert f(1) == 2"), or mappings of an input on stdin to
            the expected output ({"input": "1 2", "output": "3"}), compared without trailing blanks.
        partial: give the share of the tests that pass.
        seconds: the time for all tests of a completion together.
        memory_mb: the address space that a program may have, in MiB.
        isolate: cut the program off the network and from other processes, and let it start none (Linux, util-linux's
            unshare).

    Raises: UserError if it cannot be isolated here.
    """

    def __init__(
        self,
        tests: str = "tests",
        partial: bool = False,
        seconds: float = 8.0,
        memory_mb: int = 512,
        isolate: bool = True,
    ) -> None:
        self._tests, self._partial, self._seconds = tests, partial, seconds
        self._memory = memory_mb * 2**20
        self._command = _isolation() if isolate else [*_PYTHON, "-c"]

    def __call__(self, *, completions: list[str], **columns: Any) -> list[float | None]:
        tests = columns.get(self._tests) or [None] * len(completions)
        return [self._score(*row) for row in zip(completions, tests, strict=True)]

    def _score(self, completion: str, tests: Sequence[Any] | None) -> float | None:
        if not tests:
            return None
        program = last_block(completion)
        if program is None or "\0" in program or len(program.encode(errors="replace")) > LONGEST_PROGRAM:
            return 0.0
        deadline = time.monotonic() + self._seconds
        passed = 0
        for test in tests:
            if self._passes(program, test, deadline - time.monotonic()):
                passed += 1
            elif not self._partial:
                return 0.0
        return passed / len(tests)

    def _passes(self, program: str, test: Any, seconds: float) -> bool:
        if isinstance(test, Mapping):
            output = self._run(program, str(test["input"]), seconds)
            return output is not None and _lines(output) == _lines(str(test["output"]))
        word = secrets.token_hex(16)
        output = self._run(_ASSERTING, f"{word}\0{program}\0{test}", seconds)
        return output is not None and output.endswith(word)

    def _run(self, program: str, given: str, seconds: float) -> str | None:
        """The program's output; None if it fails, or takes too long."""
        if seconds <= 0:
            return None
        with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [*self._command, program.encode(errors="replace")],
                cwd=directory,
                env={"HOME": directory, "TMPDIR": directory},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=lambda: self._limit(seconds),
            )
            try:
                process.communicate(given.encode(errors="replace"), timeout=seconds)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _end_session(process)
            if process.returncode:
                return None
            output.seek(0)
            return output.read(OUTPUT_BYTES).decode(errors="replace")

    def _limit(self, seconds: float) -> None:
        limits = {
            resource.RLIMIT_CPU: int(seconds) + 1,
            resource.RLIMIT_AS: self._memory,
            resource.RLIMIT_FSIZE: OUTPUT_BYTES,
            resource.RLIMIT_NOFILE: OPEN_FILES,
            resource.RLIMIT_CORE: 0,
        }
        for what, limit in limits.items():
            resource.setrlimit(what, (limit, limit))


def last_block(completion: str) -> str | None:
    """The last fenced block, of Python or of no named language; None if there is none."""
    block, opening = None, None
    for fence in _FENCE.finditer(completion):
        if opening is None:
            opening = fence
        elif not fence.group(1):  # a fence with a language opens, it does not close
            if opening.group(1).lower() in ("", "python", "py", "python3"):
                block = completion[opening.end() + 1 : fence.start()]
            opening = None
    return block


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _isolation() -> list[str]:
    """The command that starts a program without network or other processes, in process namespaces of its own."""
    reason = "only Linux has namespaces"
    for user in (["--user"], []):  # without a user namespace where that is forbidden and root need not ask
        command = ["unshare", *user, *_NAMESPACES, *_PYTHON, _CONFINED]
        try:
            probed = subprocess.run([*command, "pass"], capture_output=True, text=True)
        except FileNotFoundError:
            reason = "there is no program unshare"
            continue
        if probed.returncode == 0:
            return command
        reason = probed.stderr.strip().rpartition("\n")[2]
    raise UserError(
        f"reward: programs cannot be cut off the network and other processes here ({reason}); allow user namespaces, or set "
        "isolate=false where the run is in a container of its own"
    )


def _end_session(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
