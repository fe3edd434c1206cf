"""Stands in for an accelerator and for `torch.cuda`: its streams run as late as the order of the program allows.

On a real device a copy that nobody waits for is nearly always done in time, so a missing wait shows once in a million
times. Here what is queued on a stream runs only when someone waits for it: a missing wait shows always. Memory that
nothing has been written to holds `POISON`.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from prfaas.serving.engines.vllm import cut_pages, device_pages

CUDA = torch.device("cuda")
POISON = 0xA5


class Stream:
    """Work in order. What is queued has run only as far as someone waited."""

    def __init__(self, device: "LateDevice") -> None:
        self._device = device
        self.queued: list[Callable[[], object]] = []
        self.done = 0

    def wait_event(self, event: "Event") -> None:
        """What is queued from here on runs behind what the event has recorded by now."""
        self.queued.append(event.reached)
        self._device.may_run_ahead()

    def synchronize(self) -> None:
        """Run all."""
        self.run(len(self.queued))

    def run(self, count: int) -> None:
        """Run the first `count` things that were ever queued here."""
        with self._device.lock:
            while self.done < count:
                work = self.queued[self.done]
                self.done += 1
                work()


class Event:
    """A place in a stream."""

    def __init__(self, device: "LateDevice") -> None:
        self._device = device
        self.reached: Callable[[], object] = lambda: None

    def record(self, stream: Stream | None = None) -> None:
        """The place is behind all that the stream has been given so far."""
        stream = stream or self._device.current_stream()
        count = len(stream.queued)
        self.reached = lambda: stream.run(count)

    def synchronize(self) -> None:
        """Wait for it."""
        with self._device.lock:
            self.reached()


class LateDevice:
    """The device, and what `torch` is to code that uses it."""

    def __init__(self, ahead: Random | None = None) -> None:
        """`ahead`: streams run ahead by chance, within their order; None: nothing runs before it must."""
        self.lock = threading.RLock()
        self._ahead = ahead
        self._compute = Stream(self)
        self._streams = [self._compute]
        self._own = threading.local()
        self.cuda = SimpleNamespace(
            Stream=self._new_stream,
            Event=lambda blocking=False: Event(self),
            stream=self._running,
            current_stream=self.current_stream,
            synchronize=self.synchronize,
        )

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    # What torch has.

    def empty(
        self, *size: Any, device: torch.device | None = None, pin_memory: bool = False, **more: Any
    ) -> torch.Tensor:
        """Memory of the device, or of the host; nothing has been written to it."""
        memory = torch.empty(*size, **more)
        memory.view(-1).view(torch.uint8).fill_(POISON)
        return memory if device is None or device.type == "cpu" else OnDevice(memory, self)

    def tensor(self, data: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        """Memory of the host."""
        return InHost.of(torch.tensor(data, **more), self)

    def from_numpy(self, data: Any) -> torch.Tensor:
        """Memory of the host."""
        return InHost.of(torch.from_numpy(data), self)

    def synchronize(self) -> None:
        """Run everything."""
        for stream in self._streams:
            stream.synchronize()

    def current_stream(self, device: object = None) -> Stream:
        """Where this thread queues."""
        return getattr(self._own, "stream", self._compute)

    # What tests have besides.

    def memory(self, host: torch.Tensor) -> "OnDevice":
        """The device's memory that has these bytes, at once."""
        return OnDevice(host, self)

    def queue(self, work: Callable[[], object]) -> None:
        """Have this thread's stream do something, as an engine's step does."""
        with self.lock:
            self.current_stream().queued.append(work)
        self.may_run_ahead()

    def may_run_ahead(self) -> None:
        """Now and then a stream does a few things that nobody has waited for."""
        if self._ahead is None:
            return
        with self.lock:
            stream = self._ahead.choice(self._streams)
            stream.run(min(len(stream.queued), stream.done + self._ahead.randrange(4)))

    def _new_stream(self, device: object = None) -> Stream:
        with self.lock:
            self._streams.append(Stream(self))
            return self._streams[-1]

    @contextmanager
    def _running(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._own.stream = stream
        try:
            yield
        finally:
            self._own.stream = before


class InHost(torch.Tensor):
    """Host memory that can be copied to the device."""

    late_device: LateDevice
    # What comes of it is plain memory.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def of(cls, memory: torch.Tensor, device: LateDevice) -> "InHost":
        """The same memory."""
        found = memory.as_subclass(cls)
        found.late_device = device
        return found

    def to(self, *args: Any, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
        """A copy on the device where one is named."""
        if args[:1] != (CUDA,):
            return super().to(*args, non_blocking=non_blocking, **kwargs)
        plain = self.as_subclass(torch.Tensor)
        copy = self.late_device.empty(plain.shape, dtype=plain.dtype, device=CUDA)
        return copy.copy_(plain, non_blocking)


class OnDevice(torch.Tensor):
    """Memory of the device: whatever is done with it is queued; `host` is where its bytes will be."""

    host: torch.Tensor
    late_device: LateDevice

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: LateDevice) -> "OnDevice":
        found = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
        )
        found.host, found.late_device = host, device
        return found

    # To torch it is memory of the host: a build for CPUs has no guard for other devices.
    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    def __repr__(self, **kwargs: object) -> str:
        return f"OnDevice({self.host!r})"

    def untyped_storage(self) -> torch.UntypedStorage:
        """That of the bytes."""
        return self.host.untyped_storage()

    def set_(self, *args: Any) -> "OnDevice":
        """A tensor of the same type over other memory."""
        return OnDevice(torch.empty(0, dtype=self.dtype).set_(*args), self.late_device)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [*args, *(kwargs or {}).values()]
        device = next(one for one in _flat(given) if isinstance(one, OnDevice)).late_device
        named = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        host_args, host_kwargs = tree_map(_host, (tuple(args), named))

        def work() -> Any:
            return func(*host_args, **host_kwargs)

        if func.is_view:
            return tree_map(
                lambda one: OnDevice(one, device) if isinstance(one, torch.Tensor) else one, work()
            )
        if func._schema.is_mutable:
            device.queue(work)
            is_copy = func is torch.ops.aten.copy_.default
            if is_copy and not (named.get("non_blocking") or (len(args) > 2 and args[2])):
                device.current_stream().synchronize()
            return named.get("out", args[0])
        shapes = func(*tree_map(_shape, host_args), **tree_map(_shape, host_kwargs))
        if not isinstance(shapes, torch.Tensor):
            raise NotImplementedError(f"{func} gives no tensor, so the host would wait for the device")
        result = device.empty(shapes.shape, dtype=shapes.dtype, device=CUDA)
        assert isinstance(result, OnDevice)
        there = result.host
        device.queue(lambda: there.copy_(work()))
        return result


def _host(one: Any) -> Any:
    return one.host if isinstance(one, OnDevice) else one


def _shape(one: Any) -> Any:
    return one.to("meta") if isinstance(one, torch.Tensor) else one


def _flat(given: Any) -> Iterator[Any]:
    for one in given:
        if isinstance(one, list | tuple):
            yield from _flat(one)
        else:
            yield one


@contextmanager
def late_device(ahead: Random | None = None) -> Iterator[LateDevice]:
    """Have the connector's copies take place on such a device."""
    device = LateDevice(ahead)
    caches = device_pages._lane_of, device_pages._weights
    with pytest.MonkeyPatch.context() as patch:
        for module in (device_pages, cut_pages):
            patch.setattr(module, "torch", device)
        for cache in caches:
            cache.cache_clear()
        try:
            yield device
        finally:
            for cache in caches:
                cache.cache_clear()
