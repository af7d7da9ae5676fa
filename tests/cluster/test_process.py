"""Processes as forks of one that has the imports: each is what a new process would be, and ends as one would."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlpost.cluster import node
from rlpost.cluster.forkserver import CHANGED, SERVER
from rlpost.cluster.process import FAMILY, Process, _before_imports, family, start
from tests.runs import IMPORTS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")

PROBE = """
import json, os, random, signal, sys
import helper

print(json.dumps({
    "arguments": sys.argv[1:],
    "directory": os.getcwd(),
    "variables": {name: os.environ.get(name) for name in ("RANK", "MASTER_PORT", "FROM_IMPORT")},
    "path": sys.path[:2],
    "helper": helper.VALUE,
    "name": __name__,
    "session": os.getsid(0) == os.getpid(),
    "cores": sorted(os.sched_getaffinity(0)),
    "handlers": [signal.getsignal(s) == h for s, h in (
        (signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL), (signal.SIGCHLD, signal.SIG_DFL))],
    "random": random.random(),
    "given": sys.stdin.read(),
    "parent": os.getppid(),
}))
print("to the other stream", file=sys.stderr)
"""


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A family of this test's own."""
    monkeypatch.delenv(FAMILY)
    with family():
        yield


def run(tmp_path: Path, module: str, *arguments: str, given: str = "", **settings: Any) -> tuple[int, str, str]:
    """Run a module of the directory. Returns: its exit code and what it printed."""
    files = [tmp_path / name for name in ("in", "out", "err")]
    files[0].write_text(given)
    with files[0].open() as i, files[1].open("w") as o, files[2].open("w") as e:
        settings = {"environment": dict(os.environ), **settings}
        streams = (i.fileno(), o.fileno(), e.fileno())
        code = start(module, arguments, directory=tmp_path, streams=streams, **settings).wait(60)
    return code, files[1].read_text(), files[2].read_text()


def probe(tmp_path: Path, *arguments: str, **settings: Any) -> dict[str, Any]:
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "elsewhere").mkdir(exist_ok=True)
    (tmp_path / "elsewhere/helper.py").write_text("VALUE = 5\n")
    code, out, err = run(tmp_path, "probe", *arguments, **settings)
    assert (code, err) == (0, "to the other stream\n"), err
    return json.loads(out)


@pytest.mark.parametrize("forked", [True, False])
def test_a_fork_is_what_a_new_process_would_be(
    forked: bool, servers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not forked:
        monkeypatch.setenv(FAMILY, "")
    core = min(os.sched_getaffinity(0))
    everything = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [core])
    # A shell's background jobs ignore SIGINT, which new processes inherit and forks of a server do not.
    interrupts = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        variables = {**os.environ, "RANK": "3", "PYTHONPATH": str(tmp_path / "elsewhere")}
        variables.pop("MASTER_PORT", None)
        found = [probe(tmp_path, "a", "b c", given="text", environment=variables) for _ in range(2)]
    finally:
        os.sched_setaffinity(0, everything)
        signal.signal(signal.SIGINT, interrupts)
    numbers, parents = ([each.pop(name) for each in found] for name in ("random", "parent"))
    expected = {
        "arguments": ["a", "b c"],
        "directory": str(tmp_path),
        "variables": {"RANK": "3", "MASTER_PORT": None, "FROM_IMPORT": None},
        "path": [str(tmp_path), str(tmp_path / "elsewhere")],
        "helper": 5,
        "name": "__main__",
        "session": True,
        "cores": [core],
        "handlers": [True, True, True],
        "given": "text",
    }
    assert found == [expected, expected]
    assert numbers[0] != numbers[1]
    assert (parents[0] == os.getpid()) == (not forked)
    assert parents[0] == parents[1]


def with_helper(settings: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    environment = settings.get("environment", os.environ)
    return {**settings, "environment": {**environment, "PYTHONPATH": str(tmp_path / "elsewhere")}}


def test_processes_share_a_server_if_libraries_would_load_alike(servers: None, tmp_path: Path) -> None:
    def parent(imports: list[str] = [], **variables: str) -> int:  # noqa: B006 - never changed
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "elsewhere"), **variables}
        return probe(tmp_path, environment=environment, imports=imports)["parent"]

    plain = parent(["rlpost.errors"])
    assert parent(RANK="1", MASTER_PORT="5") == plain
    assert parent(["rlpost.errors"]) == plain
    assert parent(OMP_NUM_THREADS="7") != plain
    assert parent(["rlpost.errors", "rlpost.types"]) not in (plain, parent(OMP_NUM_THREADS="7"))


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('a reason')", 1, "a reason\n"),
        ("raise ValueError('a fault')", 1, "ValueError: a fault\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
        ("import atexit; atexit.register(print, 'ended')", 0, ""),
    ],
)
def test_an_end_is_reported_as_it_was(body: str, code: int, said: str, servers: None, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(body)
    ended, out, err = run(tmp_path, "ends")
    assert ended == code
    assert err.endswith(said)
    assert out == ("ended\n" if "atexit" in body else "")


def test_a_server_that_cannot_import_is_replaced_by_a_new_process(servers: None, tmp_path: Path) -> None:
    found = probe(tmp_path, **with_helper({"imports": ["no_such_module"]}, tmp_path))
    assert found["parent"] == os.getpid()


def wait_until(condition: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


WAITS = """
import signal, sys, time
from pathlib import Path

def note(number, frame):
    with open("signals", "a") as file:
        file.write(signal.Signals(number).name + "\\n")

signal.signal(signal.SIGTERM, note)
Path("ready").touch()
while not Path("go on").exists():
    time.sleep(0.02)
Path("over").touch()
"""
STARTS = """
import sys, time
from pathlib import Path
from rlpost.cluster.process import family, start
import os
with family():
    child = start("waits", environment=dict(os.environ))
    Path("server").write_text(os.environ["RLPOST_FORKSERVERS"])
    time.sleep(60)
"""


@pytest.mark.parametrize("own_family", [True, False], ids=["of its own family", "of another's family"])
def test_a_child_whose_starter_is_killed_is_told_once_and_ends_by_itself(
    own_family: bool, servers: None, tmp_path: Path
) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    environment = {name: value for name, value in os.environ.items() if not (own_family and name == FAMILY)}
    starter = subprocess.Popen([sys.executable, "-c", STARTS], cwd=tmp_path, env=environment)
    wait_until((tmp_path / "ready").exists)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    wait_until((tmp_path / "signals").exists)
    time.sleep(0.3)  # a second signal would have come by now
    assert (tmp_path / "signals").read_text() == "SIGTERM\n"
    directory = Path((tmp_path / "server").read_text())
    assert directory.is_dir()  # the server waits for its child
    (tmp_path / "go on").touch()
    wait_until((tmp_path / "over").exists)
    if own_family:
        wait_until(lambda: not directory.exists())
    else:
        assert directory.is_dir()


def test_servers_end_with_their_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAMILY)
    with family():
        directory = os.environ[FAMILY]
        server = psutil.Process(probe(tmp_path, **with_helper({}, tmp_path))["parent"])
        with family():  # a family within it is a part of it
            assert os.environ[FAMILY] == directory
    assert FAMILY not in os.environ
    wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
    assert not Path(directory).exists()


def test_where_no_socket_can_be_processes_are_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.delenv(FAMILY)
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with family():
        assert FAMILY not in os.environ
        assert probe(tmp_path, **with_helper({}, tmp_path))["parent"] == os.getpid()


NESTED = """
import os, sys
from rlpost.cluster.process import start

print(os.getppid(), os.environ.get("VLLM_NO_USAGE_STATS"), flush=True)
if sys.argv[1:]:
    start("nested", environment=dict(os.environ)).wait()
"""


def test_variables_that_imports_set_are_a_forks_own_and_do_not_part_it_from_its_children(tmp_path: Path) -> None:
    (tmp_path / "nested.py").write_text(NESTED)
    environment = node.environment(1, int(os.environ["OMP_NUM_THREADS"]))
    environment.pop("VLLM_NO_USAGE_STATS", None)
    code, out, err = run(tmp_path, "nested", "again", environment=environment, imports=IMPORTS)
    assert code == 0, err
    first, second = out.splitlines()
    assert first == second
    assert first.endswith(" 1")  # as rlpost.rollout.vllm sets it


def test_what_a_process_has_as_a_fork_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHANGED, json.dumps({"NEW": [None, "1"], "OTHER": ["x", "y"], "CHOSEN": ["x", "y"]}))
    own = {"NEW": "1", "OTHER": "y", "CHOSEN": "z", "KEPT": "k", SERVER: "a socket", CHANGED: "some"}
    assert _before_imports(own) == {"OTHER": "x", "CHOSEN": "z", "KEPT": "k"}


IDLE = """
import json, os, torch
tasks = os.listdir(f"/proc/{os.getppid()}/task")
print(json.dumps({"threads": len(tasks), "cuda": torch.cuda.is_initialized(), "files": [
    os.readlink(f"/proc/{os.getppid()}/fd/{fd}") for fd in os.listdir(f"/proc/{os.getppid()}/fd")]}))
"""


def test_a_server_has_one_thread_no_cuda_context_and_no_file_open_when_it_forks(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text(IDLE)
    environment = node.environment(1, int(os.environ["OMP_NUM_THREADS"]))
    code, out, err = run(tmp_path, "idle", environment=environment, imports=IMPORTS)
    assert code == 0, err
    found = json.loads(out)
    assert (found["threads"], found["cuda"]) == (1, False)
    kept = [name for name in found["files"] if name.startswith("/") and name != "/dev/null"]
    assert [Path(name).suffix for name in kept if not name.startswith(str(tmp_path))] == [
        ".log",
        ".log",
    ]  # its own streams


def test_a_request_that_breaks_off_harms_no_other(servers: None, tmp_path: Path) -> None:
    settings = with_helper({}, tmp_path)
    server = probe(tmp_path, **settings)["parent"]
    (path,) = [file.with_suffix("") for file in Path(os.environ[FAMILY]).glob("*.json")]
    for sent in (b"", b"\0\0", b"\0\0\1\0{"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(sent)
    assert probe(tmp_path, **settings)["parent"] == server


def test_a_fork_can_be_asked_and_signalled(servers: None, tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(60)")
    process: Process = start("sleeps", environment=dict(os.environ), directory=tmp_path)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM
    assert process.poll() == -signal.SIGTERM
    process.send_signal(signal.SIGTERM)  # too late, and no error
