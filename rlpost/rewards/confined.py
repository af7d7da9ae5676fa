"""A script, run by rewards/code.py: a program in a process that can start threads, but no other process.

A limit on the number of processes would not do: the kernel does not apply it to root, and a program that forks without end
takes the machine's memory within the time it is given.
"""

import ctypes
import errno
import platform
import struct
import sys

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_CLONE_THREAD = 0x10000
_CLONE3 = 435
_X32 = 0x40000000  # from here on: x86_64's other table of system calls
# What the kernel calls the machine, its clone, and its other calls that start a process.
_MACHINES = {"x86_64": (0xC000003E, 56, [57, 58]), "aarch64": (0xC00000B7, 220, [])}

# linux/filter.h: load a word, jump if equal, if at least, if a bit is set, return.
_LOAD, _EQUAL, _AT_LEAST, _BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# Places in linux/seccomp.h's struct seccomp_data, and what a filter returns.
_CALL, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


def forbid_processes() -> None:
    """Let this process start no other one from now on.

    Raises: OSError where the kernel refuses a filter of system calls, or none is known for the machine.
    """
    if platform.machine() not in _MACHINES:
        raise OSError(f"no filter of system calls for {platform.machine()}")
    instructions = _filter(*_MACHINES[platform.machine()])
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in instructions))
    header = struct.pack("@HP", len(instructions), ctypes.addressof(program))
    libc, zero = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(0)
    # Programs without privileges may only be filtered once they can gain none.
    for option, first, second in (
        (_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero),
        (_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), header),
    ):
        if libc.prctl(option, first, second, zero, zero):
            raise OSError(ctypes.get_errno(), "the kernel refuses a filter of system calls")


def _filter(machine: int, clone: int, others: list[int]) -> list[tuple[int, int, int, int]]:
    """(operation, jump if so, jump if not, operand); jumps count the instructions between."""
    lines: list[tuple[int, str, str, int]] = [
        (_LOAD, "", "", _MACHINE),
        (_EQUAL, "", "deny", machine),
        (_LOAD, "", "", _CALL),
        (_AT_LEAST, "deny", "", _X32),
        (_EQUAL, "absent", "", _CLONE3),  # its flags are out of a filter's sight; without it libraries take clone
        *((_EQUAL, "deny", "", call) for call in others),
        (_EQUAL, "", "allow", clone),
        (_LOAD, "", "", _FIRST_ARGUMENT),
        (_BIT, "allow", "deny", _CLONE_THREAD),
    ]
    ends = {"allow": _ALLOW, "deny": _ERROR | errno.EPERM, "absent": _ERROR | errno.ENOSYS}
    places = {name: len(lines) + place for place, name in enumerate(ends)}

    def jump(name: str, place: int) -> int:
        return places[name] - place - 1 if name else 0

    return [
        *(
            (what, jump(so, place), jump(not_so, place), operand)
            for place, (what, so, not_so, operand) in enumerate(lines)
        ),
        *((_RETURN, 0, 0, action) for action in ends.values()),
    ]


if __name__ == "__main__":
    source = sys.argv.pop()
    forbid_processes()
    exec(compile(source, "program", "exec"), {"__name__": "__main__"})
