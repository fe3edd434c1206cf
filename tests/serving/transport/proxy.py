"""A TCP relay that breaks what passes: flips bytes, cuts connections, or freezes; seeded."""

import random
import socket
import threading
from contextlib import suppress


class FaultyProxy:
    """`cut_after_bytes`: each connection dies after about that many bytes towards the consumer, `cuts` times in all.
    `flips`: that many connections get one byte changed after 100,000 bytes. `freeze()` stops all relaying."""

    def __init__(self, *, seed: int, cut_after_bytes: int = 0, cuts: int = 0, flips: int = 0) -> None:
        self._rng = random.Random(seed)
        self._cut_after_bytes = cut_after_bytes
        self._lock = threading.Lock()
        self.cuts_left = cuts
        self.flips_left = flips
        self._target = 0
        self._flowing = threading.Event()
        self._flowing.set()
        self._closing = False
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))

    def start(self, target_port: int) -> int:
        self._target = target_port
        self._spawn(self._accept)
        return int(self._listener.getsockname()[1])

    def freeze(self) -> None:
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    def close(self) -> None:
        self._closing = True
        self._flowing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        # Only when nothing more is accepted are these all the sockets there are.
        for thread in self._threads[:1]:
            thread.join()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in [self._listener, *self._sockets]:
            sock.close()

    def _spawn(self, job: object, *args: object) -> None:
        thread = threading.Thread(target=job, args=args, name="test-proxy", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing:
            try:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                continue
            self._sockets.append(server)
            with self._lock:
                cut_at = (
                    int(self._cut_after_bytes * self._rng.uniform(0.2, 1.8)) if self._cut_after_bytes else 0
                )
            self._spawn(self._relay, client, server, cut_at, True)
            self._spawn(self._relay, server, client, 0, False)

    def _relay(self, source: socket.socket, target: socket.socket, cut_at: int, damage: bool) -> None:
        passed = 0
        flipped = False
        with suppress(OSError):
            while data := source.recv(65536):
                self._flowing.wait()
                passed += len(data)
                if damage and not flipped and passed > 100_000:
                    with self._lock:
                        flipped = self.flips_left > 0
                        self.flips_left -= flipped
                    if flipped:
                        changed = bytearray(data)
                        changed[self._rng.randrange(len(data))] ^= 0x40
                        data = bytes(changed)
                if cut_at and passed >= cut_at:
                    with self._lock:
                        cut = self.cuts_left > 0
                        self.cuts_left -= cut
                    if cut:
                        target.sendall(data[: len(data) // 2])
                        break
                target.sendall(data)
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
