"""An accelerator made of host memory: ``import torch`` finds it where this folder is on the path, as any backend.

Its kernels are those of the CPU, on memory that is the device's; its backend of c10d is gloo; its streams and events
are real objects of torch. Work is done when a call returns; where HOSTMEM_SEED is set it waits in queues, which run in
an order that the seed draws (queues.cpp). The C++ beside this file is built once, into a cache.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from shutil import which
from typing import Any

import torch

BUILD_LIMIT_S = 360.0  # it takes 20 s of a processor, which other tests may need
_HERE = Path(__file__).parent
_SOURCES = ("backend", "cells", "device", "kernels", "memory", "queues")
_NAME = "hostmem"


class CannotBuildError(RuntimeError):
    """This machine has no compiler for C++, or it failed."""


def build() -> Path:
    """Return the library, which the first call for this torch builds; raises CannotBuildError."""
    texts = b"".join(file.read_bytes() for file in sorted(_HERE.glob("*.[ch]*")))
    key = hashlib.sha256(f"{torch.__version__} {sys.version} {torch.__file__}".encode() + texts).hexdigest()[
        :16
    ]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    library = caches / "shardproof" / f"{_NAME}-{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            os.replace(_built_in(Path(folder)), library)
    return library


def _built_in(folder: Path) -> Path:
    name = os.environ.get("CXX", "g++")
    compiler = which(name)
    if compiler is None:
        raise CannotBuildError(
            f"hostmem, an accelerator made of host memory: expected a compiler for C++, found no {name}; "
            "install g++, or set CXX to the name of another one"
        )
    of_torch = Path(torch.__file__).parent
    includes = (
        of_torch / "include",
        of_torch / "include/torch/csrc/api/include",
        sysconfig.get_paths()["include"],
    )
    options = ["-std=c++20", "-fPIC", "-DTORCH_EXTENSION_NAME=_C", *(f"-I{path}" for path in includes)]
    libraries = (f"-L{of_torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")
    objects = [str(folder / f"{source}.o") for source in _SOURCES]
    _run(
        *(
            [compiler, *options, "-c", str(_HERE / f"{source}.cpp"), "-o", made]
            for source, made in zip(_SOURCES, objects, strict=True)
        )
    )
    library = folder / "_C.so"
    _run([compiler, "-shared", *objects, *libraries, "-o", str(library)])
    return library


def _run(*commands: list[str]) -> None:
    """Run commands at the same time; raises CannotBuildError."""
    started = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        for command in commands
    ]
    try:
        for command, process in zip(commands, started, strict=True):
            _, errors = process.communicate(timeout=BUILD_LIMIT_S)
            if process.returncode:
                raise CannotBuildError(f"hostmem: expected {command[0]} to compile, got {errors[:2000]}")
    except subprocess.TimeoutExpired as error:
        raise CannotBuildError(f"hostmem: expected a build within {BUILD_LIMIT_S:.0f} s") from error
    finally:
        for process in started:
            if process.poll() is None:  # with its children: the compiler proper is one, and would continue
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def load() -> None:
    """Register the device; torch calls this at the end of its own import."""
    import torch.distributed as dist  # here, because `build` alone needs none of it
    from torch.utils import backend_registration

    library = str(build())
    loader = ExtensionFileLoader("_C", library)
    spec = spec_from_file_location("_C", library, loader=loader)
    assert spec is not None
    native: Any = module_from_spec(spec)
    loader.exec_module(native)

    # Any: a store and a backend, whose types torch exports only with its distributed package.
    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return native.DeviceBackend(dist.ProcessGroupGloo(store, rank, size, timeout))

    backend_registration.rename_privateuse1_backend(_NAME)
    torch._register_device_module(_NAME, _Device())
    backend_registration.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend("hostccl", create, devices=[_NAME])
    # Two threads that first do this at once, in a FakeTensorMode, end the process: torch 2.11 built for CUDA.
    torch._C._ensureCUDADeviceGuardSet()


class _Stream(torch.Stream):
    """A stream that takes attributes, as those of CUDA's module do."""


class _Device:
    """The module ``torch.hostmem`` that torch and its engines use."""

    Stream = _Stream
    Event = torch.Event

    # Any, here and below: devices are numbers, strings or torch's own, and streams may be of a watch.
    def __init__(self) -> None:
        self.current_device = torch.accelerator.current_device_index
        self.current_stream = torch.accelerator.current_stream
        self.synchronize = torch.accelerator.synchronize
        self.get_rng_state = lambda device=None: torch.get_rng_state()
        self.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
        self.manual_seed = self.manual_seed_all = torch.default_generator.manual_seed

    def is_available(self) -> bool:
        return self.device_count() > 0

    is_initialized = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        shown = os.environ.get("HOSTMEM_VISIBLE_DEVICES", "0,1")
        return len(shown.split(",")) if shown else 0

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(torch.device(_NAME, device) if isinstance(device, int) else device)

    def default_stream(self, device: Any = None) -> torch.Stream:
        return torch.Stream(stream_id=0, device_index=self.current_device(), device_type=20)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else stream

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before = self.current_device()
        self.set_device(index)
        try:
            yield
        finally:
            self.set_device(before)

    def empty_cache(self) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]
