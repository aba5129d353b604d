"""The ways by which weights travel; each file has both ends of one.

``TRANSFERS`` has them by the values of ``generator.weight_sync_backend``. An engine names its own
in ``weight_sync``. By ``shared_memory`` engines that cannot map memory get a file
(``skyasync.workers.dispatch.memory_transfer``).
"""

from skyasync.registry import Registry

TRANSFERS = Registry(
    "weight transfer",
    {
        f"{__name__}.shared_memory": "shared_memory",
        f"{__name__}.broadcast": "nccl",
        f"{__name__}.cuda_ipc": "cuda_ipc",
    },
)

__all__ = ["TRANSFERS"]
