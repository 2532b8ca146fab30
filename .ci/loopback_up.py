#!/usr/bin/env python3
"""Enable the loopback device of a new network namespace. The program `ip` may be missing."""

import fcntl
import socket
import struct

SIOCSIFFLAGS = 0x8914
IFF_UP_AND_RUNNING = 0x1 | 0x40

with socket.socket() as any_socket:
    fcntl.ioctl(
        any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP_AND_RUNNING) + bytes(22)
    )
