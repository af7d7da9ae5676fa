"""Programs that behave, and programs that do not."""

import socket
import threading
import time
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
        pytest.param("import os\nwhile True: os.fork()", marks=isolated),
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
def test_what_it_starts_ends_with_it(reward: CodeReward, tmp_path: Path) -> None:
    """A child in a session of its own, which the end of the program's session would miss."""
    mark = tmp_path / "alive"
    program = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    for fd in range(3): os.close(fd)\n"
        "    while True:\n"
        f"        open({str(mark)!r}, 'w').write(str(time.time()))\n"
        "        time.sleep(0.05)\n"
        "time.sleep(0.5)"
    )
    assert score(reward, program, ["pass"]) == 1.0
    assert mark.exists()
    time.sleep(0.3)
    before = mark.read_text()
    time.sleep(0.5)
    assert mark.read_text() == before


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
        UserError, match=r"cannot be cut off the network here \(there is no program unshare\).*isolate=false"
    ):
        code._isolation()
