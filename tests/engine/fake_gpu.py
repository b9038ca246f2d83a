"""A GPU that is not there: tensors without numbers say that they are on one, and what is done with them is watched.

torch's FakeTensorMode works shapes, dtypes and devices, and raises where a tensor of the host meets one of the device.
Here it is also told what makes the host wait for the device and what the capture of a CUDA graph forbids, and how much
memory of the device is alive. Kernels are not run: who launches one is asked whether its tensors are on the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = "cuda:0"
BLOCK = 512  # bytes: what is allocated is a multiple of it
GRID = (2**31 - 1, 65535, 65535)
NUMPY = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.bool: np.bool_,
}


class Refused(AssertionError):
    """A GPU would refuse it, or the host would wait where nothing may be waited for."""


class Watch(TorchDispatchMode):
    """What is asked of the device. `waiting`: whether the host may wait for it. `capturing`: for a CUDA graph.

    waits: by what the host would have waited. calls: of every operation that gives something on the device, and of
    kernels. alive, peak: bytes on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waiting, self.capturing = True, False
        self.waits: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def wait(self, what: str) -> None:
        self.waits[what] += 1
        if not self.waiting or self.capturing:
            raise Refused(f"the host waits for the device: {what}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        parts = torch._C._dispatch_has_kernel_for_dispatch_key
        if func.namespace == "aten" and parts(func.name(), "CompositeImplicitAutograd"):
            with self:  # under inference_mode what an operation is made of would not come by here
                done = func.decompose(*args, **kwargs)
            if done is not NotImplemented:
                return done
        if name == "_local_scalar_dense":
            if args[0].is_cuda:
                self.wait("a number is read")
            return 1.0 if args[0].is_floating_point() else False if args[0].dtype is torch.bool else 3
        if name == "equal":
            self.wait("tensors are compared")
            return True
        if name in ("_to_copy", "copy_"):
            self._copied(name, args, kwargs)
        guess = self._guess(name, args)
        out = func(*args, **kwargs) if guess is None else guess
        for tensor in _tensors(out):
            self._made(name, tensor)
        return out

    def _guess(self, name: str, args: Any) -> Any:
        """An answer whose shape could be, where it depends on numbers."""
        if name == "nonzero":
            self.wait(name)
            return torch.zeros(args[0].numel() // 2, args[0].dim(), dtype=torch.int64, device=args[0].device)
        if name == "_unique2":
            self.wait(name)
            every = torch.zeros(args[0].numel(), dtype=torch.int64, device=args[0].device)
            return torch.empty_like(args[0]).flatten(), every, every
        if name in ("index", "index_put_") and any(at is not None and at.dtype is torch.bool for at in args[1]):
            self.wait("an index of truth values")
            if name == "index":
                at = args[1][0]
                return args[0].new_empty(at.numel() // 2, *args[0].shape[at.dim() :])
        return None

    def _copied(self, name: str, args: Any, kwargs: Any) -> None:
        """A copy between host and device goes with the stream where it is asked to and the host's side is pinned."""
        source = args[0] if name == "_to_copy" else args[1]
        device = torch.device(kwargs.get("device") or source.device) if name == "_to_copy" else args[0].device
        if source.device.type == device.type:
            return
        if self.capturing:
            raise Refused("a copy between host and device in a capture")
        free = kwargs.get("non_blocking", args[2] if name == "copy_" and len(args) > 2 else False)
        host = source if device.type == "cuda" else args[0]
        if not (free and getattr(host, "pinned", False)):
            self.wait("a copy that is not pinned, or not free to go on")

    def _made(self, name: str, tensor: Tensor) -> None:
        if not tensor.is_cuda:
            return
        self.calls[name] += 1
        storage = tensor.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // BLOCK) * BLOCK
        if key not in self._known:
            self._known.add(key)
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


class Event:
    """In place of a CUDA event: nothing is ever under way."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Graphs:
    """In place of `CudaGraphs`: the body twice, then under the rules of a capture; a replay is only counted."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        watch = self._watch
        body()
        body()
        watch.capturing = True
        try:
            body()
        except RuntimeError as error:  # which would be taken for a capture that cannot be, and told in a warning
            raise Refused(f"in a capture: {error}") from error
        finally:
            watch.capturing = False
        return lambda: watch.calls.update(graph=1)

    def forget(self) -> None: ...


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, dict):
        yield from _tensors(list(found.values()))
    elif isinstance(found, (list, tuple)):
        for one in found:
            yield from _tensors(one)


def _set_guard() -> None:
    """Let torch's C++ index tensors of a device that a build for CPUs knows nothing of: as if they were on a CPU."""
    if torch.version.cuda is not None:
        return
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    except (OSError, ValueError):
        pytest.skip("this build of torch has no place for the guard of another device")
    guards[1] = guards[1] or guards[0]


def _pinned(tensor: Tensor, *_: Any) -> Tensor:
    copy = tensor.clone()
    copy.pinned = True  # type: ignore[attr-defined]
    return copy


def _numpy(tensor: Tensor, **_: Any) -> np.ndarray:
    assert not tensor.is_cuda, "torch refuses that"
    return np.ones(tuple(tensor.shape), dtype=NUMPY[tensor.dtype])


def _listed(watch: Watch, tensor: Tensor) -> Any:
    """All numbers of a tensor, which come in one copy."""
    if tensor.is_cuda:
        watch.wait("a number is read")
    return np.full(tuple(tensor.shape), 1.0 if tensor.is_floating_point() else 3).tolist()


@contextlib.contextmanager
def fake_gpu(patch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Everything inside is done on a device that is not there; tensors are made there by the device `GPU`."""
    triton = pytest.importorskip("triton")
    from cake_infer.engine import graph

    _set_guard()
    watch = Watch()

    def launch(self: Any, *args: Any, grid: Any, **kwargs: Any) -> None:
        kwargs.pop("warmup", None)
        if not all(tensor.is_cuda for tensor in _tensors([args, kwargs])):
            raise Refused(f"{self.fn.__name__} gets a tensor of the host")
        if not all(0 < n <= most for n, most in zip(grid, GRID, strict=False)):
            raise Refused(f"{self.fn.__name__} has a grid of {grid}")
        watch.calls[self.fn.__name__] += 1

    for kind in (triton.runtime.jit.JITFunction, triton.runtime.interpreter.InterpretedFunction):
        patch.setattr(kind, "run", launch)
        patch.setattr(kind, "__getitem__", lambda self, grid: lambda *a, **k: self.run(*a, grid=grid, **k))
    patch.setattr(Tensor, "pin_memory", _pinned)
    patch.setattr(Tensor, "numpy", _numpy)
    patch.setattr(FakeTensor, "tolist", lambda self: _listed(watch, self))
    patch.setattr(torch.cuda, "empty_cache", lambda: None)
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    patch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 40, 1 << 40))
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(graph, "CudaGraphs", lambda: Graphs(watch))
    with FakeTensorMode(allow_non_fake_inputs=True), watch:
        yield watch
