"""Measure what moving the bytes of a copy costs in a job: the copying thread moves as many bytes in few calls.

The thread reads the bytes for a digest, and reads and writes them. For a far copy it sends them through a socket, and
a receiving thread reads them again. For a parity, one of its members also folds them into a buffer that is cleared
first and read at the end. Nothing is computed from the bytes: no digest, no manifest, no agreement.
"""

import socket
import threading
from collections.abc import Callable

import torch


class Bare:
    """What one rank moves."""

    def __init__(self, size: int, mode: str, *, sharers: int) -> None:
        self._source = torch.randn(size // 4)
        self._target = torch.empty_like(self._source)
        self._mode, self._sharers = mode, sharers
        self._arrived = threading.Semaphore(0)
        if mode != "near":
            with socket.create_server(("127.0.0.1", 0)) as server:
                self._out = socket.create_connection(server.getsockname())
                self._in, _ = server.accept()
            threading.Thread(target=self._receive, name="ntp-copies", daemon=True).start()

    def move(self, taken: Callable[[], None]) -> int:
        """Move so many bytes; training may continue once they are `taken`."""
        self._source.sum()
        self._target.copy_(self._source)
        taken()
        if self._mode != "near":
            self._out.sendall(memoryview(self._target.numpy()).cast("B"))
            self._arrived.acquire()
        return self._source.nbytes

    def _receive(self) -> None:
        arriving, parity = torch.empty_like(self._source), torch.zeros_like(self._source)
        memory = memoryview(arriving.numpy()).cast("B")
        while True:
            at = 0
            while at < len(memory):
                at += self._in.recv_into(memory[at:])
            arriving.sum()
            if self._mode != "copy":
                part = parity[: len(parity) // self._sharers]  # of each parity, what is this member's to do
                part.zero_()
                parity.view(torch.int32).bitwise_xor_(arriving.view(torch.int32))
                part.sum()
            self._arrived.release()
