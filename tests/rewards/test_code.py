"""Programs that behave, and programs that do not."""

import socket
import threading
from pathlib import Path

import pytest

from rlpost.errors import UserError
from rlpost.rewards import code
from rlpost.rewards.code import CodeReward, last_block

DOUBLE = "def double(x):\n    return 2 * x\n"
ASSERTS = ["assert double(2) == 4", "assert double('a') == 'aa'"]


def can_isolate() -> bool:
    try:
        CodeReward()
    except UserError:
        return False
    return True


ISOLATES = can_isolate()
isolated = pytest.mark.skipif(not ISOLATES, reason="this machine allows no namespaces (containers may forbid them)")


@pytest.fixture(scope="module")
def reward() -> CodeReward:
    return CodeReward(seconds=20.0, isolate=ISOLATES)


def score(reward: CodeReward, program: str, tests: list[object]) -> float | None:
    (value,) = reward(completions=[f"Here:\n```python\n{program}\n```\nDone."], tests=[tests])
    return value


def test_assertions(reward: CodeReward) -> None:
    assert score(reward, DOUBLE, ASSERTS) == 1.0
    assert score(reward, DOUBLE, [*ASSERTS, "assert double(1) == 3"]) == 0.0
    assert score(reward, "def double(x", ASSERTS) == 0.0


def test_input_and_output(reward: CodeReward) -> None:
    program = "a, b = map(int, input().split())\nprint(a + b, ' ')"
    assert score(reward, program, [{"input": "1 2", "output": "3"}, {"input": "5 5\n", "output": "10\n\n"}]) == 1.0
    assert score(reward, program, [{"input": "1 2", "output": "4"}]) == 0.0


def test_the_share_of_tests() -> None:
    reward = CodeReward(partial=True, seconds=20.0, isolate=ISOLATES)
    assert score(reward, DOUBLE, [*ASSERTS, "assert double(1) == 3", "assert double(3) == 6"]) == 0.75


def test_without_tests_or_program(reward: CodeReward) -> None:
    assert reward(completions=["no program", "```python\n1\n```"], tests=[ASSERTS, None]) == [0.0, None]
    assert reward(completions=["```python\n1\n```"]) == [None]


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```\ntext\n```py\nb\n```", "b\n"),
        ("```python\na\n```\n```bash\nls\n```", "a\n"),
        ("```python\na", None),
        ("a", None),
        ("```python\n" * 30_000, None),
    ],
)
def test_the_last_block(text: str, block: str | None) -> None:
    assert last_block(text) == block


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "print('passed')",
        "import sys\nclass double:\n    def __eq__(self, o): sys.exit(0)",
    ],
)
def test_leaving_early_passes_nothing(program: str, reward: CodeReward) -> None:
    assert score(reward, program, ["assert double(2) == 4"]) == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time\ntime.sleep(60)",
        "10 ** 10 ** 10",
        "while True: print('x' * 1000)",
    ],
)
def test_time_ends_it(program: str) -> None:
    assert score(CodeReward(seconds=1.0, isolate=ISOLATES), program, ["pass"]) == 0.0


def test_memory_and_file_sizes_are_limited(reward: CodeReward) -> None:
    assert score(reward, "x = bytearray(300 * 2**20)", ["assert len(x)"]) == 1.0
    assert score(reward, "x = bytearray(600 * 2**20)", ["assert len(x)"]) == 0.0
    assert score(reward, "open('f', 'wb').write(bytes(2**19))", ["pass"]) == 1.0
    assert score(reward, "open('f', 'wb').write(bytes(2**22))", ["pass"]) == 0.0
    assert score(reward, "files = [open('f', 'w') for _ in range(100)]", ["pass"]) == 0.0


@isolated
def test_there_is_no_network_and_no_environment(reward: CodeReward, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)"
        assert score(CodeReward(isolate=False), connect, ["pass"]) == 1.0
        assert score(reward, connect, ["pass"]) == 0.0
    monkeypatch.setenv("SECRET", "x")
    assert score(reward, "import os", ["assert 'SECRET' not in os.environ"]) == 1.0
    assert score(reward, "import os", ["assert os.listdir() == []"]) == 1.0


@isolated
@pytest.mark.parametrize(
    "start",
    [
        "os.fork()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "subprocess.run(['true'])",
        "ctypes.CDLL(None).fork() >= 0 or 1 / 0",
        "ctypes.CDLL(None).syscall(CLONE3, b'\\0' * 64, 64) >= 0 or 1 / 0",
    ],
)
def test_it_starts_no_other_process(start: str, reward: CodeReward) -> None:
    """Each would end well but for the filter; what has been forked may only look on."""
    program = f"import ctypes, os, subprocess\nCLONE3 = 435\n{start}"
    assert score(reward, program, ["pass"]) == 0.0
    assert score(reward, program, [{"input": "", "output": ""}]) == 0.0


@isolated
def test_it_starts_threads(reward: CodeReward) -> None:
    program = (
        "import threading\nthread = threading.Thread(target=print, args=('hello',))\nthread.start(); thread.join()"
    )
    assert score(reward, program, [{"input": "", "output": "hello"}]) == 1.0


@isolated
def test_it_ends_no_other_process(reward: CodeReward) -> None:
    """All that it can reach is itself."""
    assert score(reward, "import os\nassert os.getpid() == 1", ["pass"]) == 1.0


@pytest.mark.parametrize(
    ("length", "character", "value"),
    [
        (99_000, "x", 1.0),
        (100_000, "x", 0.0),
        (10, "\u00e9", 1.0),
        (99_000, "\u00e9", 0.0),
        (9, "\ud800", 1.0),
        (1, "\0", 0.0),
    ],
)
def test_any_text_may_be_a_program(length: int, character: str, value: float, reward: CodeReward) -> None:
    """A longer one is no argument that the system takes, nor is a zero; half a surrogate pair is no text."""
    assert score(reward, f"print(1)  # {character * length}", [{"input": "", "output": "1"}]) == value


def test_threads_may_score_at_once(reward: CodeReward) -> None:
    values: list[float | None] = []
    threads = [threading.Thread(target=lambda: values.append(score(reward, DOUBLE, ASSERTS))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == [1.0] * 4


def test_where_it_cannot_be_isolated_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserError,
        match=r"cannot be cut off the network and other processes here \(there is no program unshare\).*isolate",
    ):
        code._isolation()
