"""Chooses the device of a rank, and the backend by which all ranks send messages."""

import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ConfigurationError
from ..gpus import GPU, count_gpus
from ..launch.context import Context

NCCL2 = "ProcessGroupNCCL2"
CPU = "cpu"  # the identity of a device that is not a GPU
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def nccl_kind() -> str:
    """Returns the class of torch that backend="nccl" makes: before 2.15 TORCH_DIST_USE_NCCL2=1 chooses the newer one.

    A group of `NCCL2` has a GPU from the start, and guesses which one if the caller does not pass it. In a group of the
    older class that gets a GPU so, all messages go into one queue.
    """
    if register := getattr(dist.Backend, "_ensure_backend_registered", None):  # torch 2.14
        register("nccl")
    made_by = dist.Backend._plugins.get("NCCL")
    return NCCL2 if made_by and "nccl2" in made_by.creator_fn.__name__ else "ProcessGroupNCCL"


def choose_device(context: Context, device: str) -> torch.device:
    """Returns the device of this rank.

    ``auto`` means the CPU only where there is no GPU: an old driver must not move a long run to the CPU silently.

    Raises:
        ConfigurationError: cuda is requested, or a GPU is present, but torch cannot compute on it.
    """
    if device == "cpu":
        return torch.device("cpu")
    made_for = f"made for CUDA {torch.version.cuda}" if torch.version.cuda else "made for CPUs only"
    if torch.cuda.is_available():
        chosen = torch.device(GPU, context.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(chosen)
        try:
            compute_on(chosen)
        except RuntimeError as error:
            raise ConfigurationError(
                f"pipeline.device={device}: torch {torch.__version__} ({made_for}) cannot compute on the "
                f"{torch.cuda.get_device_name(chosen)} of {socket.gethostname()}: {str(error).splitlines()[0]}; "
                "install a torch that has kernels for it, end what else uses it, or use pipeline.device=cpu"
            ) from error
        return chosen
    if device == "cuda" or count_gpus():
        raise ConfigurationError(
            f"pipeline.device={device}: torch {torch.__version__} ({made_for}) can use none of the {count_gpus()} GPUs "
            f"that are present on {socket.gethostname()}: check nvidia-smi and CUDA_VISIBLE_DEVICES, update the NVIDIA "
            "driver or install a torch that fits it; to compute on CPUs use pipeline.device=cpu"
        )
    return torch.device("cpu")


def compute_on(device: torch.device) -> None:
    """Runs a kernel, so that a device that cannot compute raises RuntimeError here and not in the first layer."""
    torch.ones(1, device=device).add_(1).item()


def choose_backend(context: Context, identity: str, backend: str) -> str:
    """Returns gloo or nccl: the same on every rank, because rank 0 counts the devices of all ranks.

    Args:
        identity: identity of this rank's device, see `device_identity`.

    Raises:
        ConfigurationError: `pipeline.backend=nccl` without a GPU for each worker.
    """
    if context.world_size == 1:  # no messages
        return "nccl" if identity != CPU and backend != "gloo" else "gloo"
    if backend == "gloo":
        return backend
    gpus = int(context.decide("devices", identity, lambda devices: str(len({*devices} - {CPU}))))
    if gpus == context.world_size:
        return "nccl"
    found = f"{context.world_size} workers have {gpus} GPUs"
    if backend == "nccl":
        raise ConfigurationError(
            f"pipeline.backend=nccl needs a GPU of its own for every worker, but {found}: use pipeline.backend=auto, "
            "or as many workers on each machine as it has GPUs"
        )
    if context.rank == 0 and gpus:
        text = f"messages go through the CPU, slower than from GPU to GPU: {found}"
        context.emit({"kind": "warning", "text": text})
    return "gloo"


def device_identity(device: torch.device) -> str:
    """Returns a text that no other device of the job has.

    For a GPU: its machine and PCI address, by which NCCL distinguishes GPUs. Slices of one GPU (MIG) have different
    uuids, but NCCL refuses them as one GPU.
    """
    if device.type == "cpu":
        return CPU
    properties: Any = torch.cuda.get_device_properties(device)
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return f"{machine_id()} {properties.uuid if None in place else ':'.join(map(str, place))}"


def machine_id() -> str:
    """Returns the machine's boot id, equal in all its containers; the host name where the system has no boot id.

    Processes of equal id share the monotonic clock.
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
