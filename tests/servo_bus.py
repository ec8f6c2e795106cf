"""Feetech servos as far as their wire goes: memory, packets and what can go wrong, behind a port in memory or
a pty."""

import os
import random
import threading
import time
import tty

from controllers.feetech import BROADCAST, PING, READ, SYNC_READ, SYNC_WRITE, WRITE, packet

SPEED = 3000  # steps/s towards the goal


class Servo:
    """One servo's memory of 128 bytes."""

    def __init__(self, id, position=2048, model=777):
        self.memory, self.error, self.moved = bytearray(128), 0, time.monotonic()
        self.memory[3:5], self.memory[5] = model.to_bytes(2, "little"), id
        self.memory[42:44] = self.memory[56:58] = position.to_bytes(2, "little")
        self.memory[62], self.memory[63] = 74, 31

    def number(self, address, size=2):
        return int.from_bytes(self.memory[address : address + size], "little")

    def turn(self, seconds):
        """Towards the goal, where torque is on."""
        at, goal = self.number(56), self.number(42)
        if self.memory[40]:
            step = max(min(goal - at, SPEED * seconds), -SPEED * seconds)
            self.memory[56:58] = round(at + step).to_bytes(2, "little")


class ServoLine:
    """The servos of one line. answer(bytes) -> bytes. broken(packet) -> what comes of an answer instead;
    silent: ids that say nothing;
    delay [s]: of every answer on a pty."""

    def __init__(self, servos, seed=0):
        self.servos = {s.memory[5]: s for s in servos}
        self.broken, self.silent, self.delay = lambda data: data, set(), 0.0
        self.random, self.written, self.rest = random.Random(seed), [], b""

    def answer(self, data):
        data, out = self.rest + data, b""
        while len(data) >= 6 and len(data) >= data[3] + 4:
            assert data[:2] == b"\xff\xff"
            end = data[3] + 4
            body, data = data[2:end], data[end:]
            assert ~sum(body[:-1]) & 0xFF == body[-1]
            out += self.obey(body[0], body[2], body[3:-1])
        self.rest = data
        return out

    def obey(self, id, instruction, rows):
        if instruction == SYNC_WRITE:
            address, size = rows[:2]
            for k in range(2, len(rows), size + 1):
                if rows[k] in self.servos:
                    self.put(rows[k], address, rows[k + 1 : k + 1 + size])
            return b""
        if instruction == SYNC_READ:
            assert id == BROADCAST
            return b"".join(
                self.said(k, bytes(self.servos[k].memory[rows[0] : rows[0] + rows[1]]))
                for k in rows[2:]
                if k in self.servos
            )
        if id not in self.servos:
            return b""
        if instruction == WRITE:
            self.put(id, rows[0], rows[1:])
        assert instruction in (PING, READ, WRITE)
        return self.said(
            id, bytes(self.servos[id].memory[rows[0] : rows[0] + rows[1]]) if instruction == READ else b""
        )

    def put(self, id, address, data):
        self.servos[id].memory[address : address + len(data)] = data
        self.written.append((id, address, bytes(data)))

    def said(self, id, data):
        return b"" if id in self.silent else self.broken(packet(id, self.servos[id].error, data))

    def turn(self, seconds):
        for servo in self.servos.values():
            servo.turn(seconds)


class MemoryPort:
    """A port whose line answers at once, in pieces of random sizes; `now` [s] passes where it is waited for
    nothing."""

    def __init__(self, line):
        self.line, self.coming, self.now = line, b"", 0.0

    def write(self, data):
        self.coming += self.line.answer(data)

    def read(self, timeout):
        count = self.line.random.randint(1, 20)
        out, self.coming = self.coming[:count], self.coming[count:]
        if not out:
            self.now += timeout
        return out

    def flush(self):
        self.coming = b""

    def close(self):
        pass


class Pty:
    """The line behind a real terminal device, answered by a thread, until `unplug`."""

    def __init__(self, line):
        self.line = line
        self.fd, self.slave = os.openpty()
        tty.setraw(self.fd)
        self.path, self.over = os.ttyname(self.slave), threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self):
        os.set_blocking(self.fd, False)
        last = time.monotonic()
        while not self.over.is_set():
            now = time.monotonic()
            self.line.turn(now - last)
            last = now
            try:
                data = os.read(self.fd, 4096)
            except BlockingIOError:
                time.sleep(5e-4)
                continue
            except OSError:
                return
            if out := self.line.answer(data):
                time.sleep(self.line.delay)
                os.write(self.fd, out)

    def unplug(self):
        self.over.set()
        self.thread.join()
        os.close(self.slave)
        os.close(self.fd)
