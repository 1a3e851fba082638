"""A process of its own that demangles C++ names: from stdin to stdout, one at a time, each with its length before it.

Run as a file, without the package. Names come from anybody's kernels: some would become gigabytes, and a demangler
may crash. The limits here end such a name, and only that: the exporter cannot tell it from a slow machine.
"""

from __future__ import annotations

import ctypes
import resource
import signal
import struct
import sys

MAX_OUTPUT = 16_384
_LENGTH = struct.Struct("<I")
_MEMORY = 512 << 20
_CPU_SECONDS = 0.05
"""For one name; honest ones take microseconds."""
_SECONDS = 20
"""The same for one that waits rather than works, as for memory."""


def main() -> None:
    """Answer until stdin ends. A name that cannot be demangled has an empty answer."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    demangle, free = _functions()
    reader, writer = sys.stdin.buffer, sys.stdout.buffer
    while len(length := reader.read(_LENGTH.size)) == _LENGTH.size:
        name = reader.read(_LENGTH.unpack(length)[0])
        signal.setitimer(signal.ITIMER_PROF, _CPU_SECONDS)  # its signal ends the process, wherever it is
        signal.setitimer(signal.ITIMER_REAL, _SECONDS)
        text = b""
        address = demangle(name, None, None, ctypes.byref(ctypes.c_int()))
        if address:
            text = ctypes.string_at(address, min(_length(address), MAX_OUTPUT))
            free(address)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        writer.write(_LENGTH.pack(len(text)) + text)
        writer.flush()


def _functions() -> tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer]:
    """The C++ runtime's own demangler, and what frees its answers."""
    demangle = getattr(ctypes.CDLL("libstdc++.so.6"), "__cxa_demangle")
    demangle.restype = ctypes.c_void_p
    demangle.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    free = ctypes.CDLL(None).free
    free.restype = None
    free.argtypes = [ctypes.c_void_p]
    return demangle, free


def _length(address: int) -> int:
    strnlen = ctypes.CDLL(None).strnlen
    strnlen.restype = ctypes.c_size_t
    strnlen.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return int(strnlen(address, MAX_OUTPUT))


if __name__ == "__main__":
    main()
