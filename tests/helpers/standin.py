"""Puts a device without hardware in the place of a GPU, and gloo in that of NCCL, in every process of a command.

standin.cpp registers the device with torch, which calls `register` in each process (`torch.backends`, an entry point):
in gpipe_cli the kind of device is then this one instead of "cuda". It has no streams and no kernels of its own: for
those see other_device.py.
"""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HELPERS = Path(__file__).parent
NAME = "standin"  # of the kind of device
EXTENSION = "standin_device"


def build(folder: Path) -> dict[str, str]:
    """Builds the device in a folder and returns the environment of commands that have it instead of GPUs."""
    load = "from torch.utils.cpp_extension import load"
    words = f"load('{EXTENSION}', ['{HELPERS}/standin.cpp'], build_directory='{folder}', is_python_module=False)"
    flags = {**os.environ, "CXXFLAGS": "-O0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # ninja's
    subprocess.run([sys.executable, "-c", f"{load}; {words}"], env={**flags, "PATH": path}, check=True)
    information = folder / f"{NAME}-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (information / "entry_points.txt").write_text(f"[torch.backends]\n{NAME} = standin:register\n")
    lists = folder / "nvidia-smi"
    lists.write_text('#!/bin/sh\nfor i in $(seq "${STANDIN_GPUS:-1}"); do echo "GPU $i: (UUID: $i)"; done\n')
    lists.chmod(0o755)
    places = os.pathsep.join([str(folder), str(HELPERS), os.environ.get("PYTHONPATH", "")])
    return {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": places, "STANDIN": str(folder / f"{EXTENSION}.so")}


class Event:
    """Implements the methods of torch.cuda.Event for a device that is never behind."""

    at = 0.0
    query = synchronize = wait = lambda self, *_: True

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end.at - self.at)


class Stream:
    """Implements the methods of torch.cuda.Stream."""

    wait_stream = wait_event = synchronize = lambda self, *_: None
    record_event = lambda self, event=None: event or Event()  # noqa: E731

    def __init__(self, device: Any = None) -> None:
        pass


def register() -> None:
    """Registers the device in this process; torch calls it at the end of its import."""
    if "STANDIN" not in os.environ:
        return
    import torch

    import gpipe_cli.gpus

    spec: Any = spec_from_file_location(EXTENSION, os.environ["STANDIN"])
    spec.loader.exec_module(device := module_from_spec(spec))
    torch.utils.rename_privateuse1_backend(NAME)
    torch.utils.generate_methods_for_privateuse1_backend()
    gpipe_cli.gpus.GPU = NAME
    shared = "STANDIN_GPUS" not in os.environ  # else a worker takes the only device of its process for its own
    generator = torch.Generator()
    module: Any = SimpleNamespace()

    def gives(value: Any) -> Any:  # a function of its own for each name: torch looks names up by functions
        return lambda *_, **__: value

    made = {
        **{name: gives(True) for name in ("is_available", "is_initialized", "is_bf16_supported")},
        **{name: gives(False) for name in ("_is_in_bad_fork", "is_current_stream_capturing")},
        **{name: gives(None) for name in ("init", "_lazy_init", "empty_cache", "set_device", "synchronize")},
        **{name: gives(0) for name in ("current_device", "_get_device_index")},
        "manual_seed": lambda seed: generator.manual_seed(seed),
        "manual_seed_all": lambda seed: generator.manual_seed(seed),
        "Event": Event,
        "Stream": Stream,
        "counts": device,
        "current_stream": Stream,
        "default_generators": [generator],
        "device_count": lambda: 1,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16, torch.float32],
        "get_device_name": lambda *_: NAME,
        "get_device_properties": lambda *_: SimpleNamespace(
            total_memory=24 << 30, pci_domain_id=0, pci_bus_id=0 if shared else os.getpid(), pci_device_id=0
        ),
        "get_rng_state": lambda *_: generator.get_state(),
        **{f"max_memory_{what}": lambda *_: device.peak() for what in ("allocated", "reserved")},
        "mem_get_info": lambda *_: (20 << 30, 24 << 30),
        "memory_allocated": lambda *_: device.used(),
        "reset_peak_memory_stats": lambda *_: device.reset_peak(),
        "set_rng_state": lambda state, *_: generator.set_state(state),
        "stream": contextmanager(lambda _: iter([None])),
    }
    vars(module).update(made)
    torch._register_device_module(NAME, module)
    for name in made.keys() & vars(torch.cuda).keys() - {"Event", "Stream"}:
        setattr(torch.cuda, name, made[name])
    fork_rng = torch.random.fork_rng
    torch.random.fork_rng = lambda devices=None: fork_rng(devices, device_type=NAME)  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda self, device=None: self.clone()  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    replace_nccl()


def methods_by_gloo() -> dict[str, Any]:
    """Returns methods of a group that copy their tensors to the CPU, call gloo's and copy the results back."""
    import torch.distributed as dist

    class Work(dist.Work):
        """Writes what has arrived to the device when it is waited for."""

        def __init__(self, work: Any, places: Any, hosts: Any) -> None:
            super().__init__()
            self.work, self.places, self.hosts = work, places, hosts

        def wait(self, timeout: Any = None) -> bool:
            self.work.wait()
            for place, host in zip(self.places, self.hosts, strict=False):
                for to, content in zip(place, host, strict=True):
                    to.copy_(content)
            return True

        def is_completed(self) -> bool:
            return bool(self.work.is_completed())

    def late(name: str, written: int, given: int) -> Any:
        """Returns a method: its first ``given`` arguments are tensors, the first ``written`` of them results."""

        def call(self: Any, *arguments: Any, **more: Any) -> Any:
            lists = [argument if isinstance(argument, list) else [argument] for argument in arguments[:given]]
            for tensor in (tensor for each in lists for tensor in each):
                assert tensor.device.type == NAME and tensor.is_contiguous(), f"NCCL cannot send {tensor}"
            hosts = [[tensor.cpu() for tensor in each] for each in lists]
            passed = [h if isinstance(a, list) else h[0] for h, a in zip(hosts, arguments, strict=False)]
            rest = [*arguments[given:-1], 0] if name in ("send", "recv") else arguments[given:]
            work = getattr(self.gloo, name)(*passed, *rest, **more)
            return Work(work, lists[:written], hosts)

        return call

    methods = (
        *(("send", 0, 1), ("recv", 1, 1), ("broadcast", 1, 1), ("allreduce", 1, 1)),
        *(("_allgather_base", 1, 2), ("all_gather_single", 1, 2), ("alltoall_base", 1, 2), ("all_to_all_single", 1, 2)),
    )
    return {name: late(name, written, given) for name, written, given in methods}


def replace_nccl() -> None:
    """Lets torch's own registration of "nccl", and its rules for groups, make groups of gloo for this device."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as own

    class Group(dist.ProcessGroup):
        """Sends contiguous tensors of the device only, and knows no tags, as NCCL."""

        supports_splitting = False  # torch splits groups of C++ only
        getBackendName = lambda self: "nccl"  # noqa: E731

        def __init__(self, options: Any, kind: str) -> None:
            super().__init__(options.group_rank, options.group_size)
            place = options.store, options.group_rank, options.group_size
            self.gloo = dist.ProcessGroupGloo(*place, timeout=options.timeout)
            bound = getattr(options.process_group, "bound_device_id", None)
            if bound is not None:
                assert kind == "ProcessGroupNCCL2", "a bound group of the older class has one queue"
                self.bound_device_id = bound
            print(f"{kind} of {options.group_size} waits {options.timeout.total_seconds():.0f} s", flush=True)

        def _get_backend(self, device: Any) -> Any:
            assert device.type == NAME, f"No backend type associated with device type {device.type}"
            return self

    for name, method in methods_by_gloo().items():
        setattr(Group, name, method)

    def _create_nccl_process_group(options: Any, _: Any) -> Any:
        return Group(options, "ProcessGroupNCCL")

    def _create_nccl2_process_group(options: Any, _: Any) -> Any:
        return Group(options, "ProcessGroupNCCL2")

    own._create_nccl_process_group = _create_nccl_process_group
    own._create_nccl2_process_group = _create_nccl2_process_group
    dist.Backend.backend_capability |= {"nccl": [NAME], "gloo": ["cpu", NAME]}
