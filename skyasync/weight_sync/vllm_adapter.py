"""What a vLLM worker really holds of an adapter, in the buffers that its kernels read.

Invariant: vLLM multiplies B by alpha / rank when it loads it, in the dtype that it computes in; so does this.
"""

from __future__ import annotations

from typing import Any

NUMBER = 1  # of the one adapter that an engine has, by which vLLM knows it


def differences(manager: Any, path: str) -> list[str]:  # noqa: ANN401  (vLLM's LoRAModelManager)
    """Layers of a file whose halves are not, bit for bit, in the buffers that the kernels read; in a worker.

    Only where one worker has the whole layer.
    """
    from skyasync.weight_sync.adapter_file import read_adapter  # with torch, which the engine's settings do without

    adapter = read_adapter(path)
    slot = manager.lora_index_to_id.index(NUMBER)
    places = {name: (module, 0) for name, module in manager.modules.items()}
    for fused, parts in manager.packed_modules.items():
        places |= {
            part: (manager.modules[fused], index) for index, part in enumerate(parts) if fused in manager.modules
        }
    wrong = []
    for layer, (first, second) in adapter.layers().items():
        module, index = places.get(layer, (None, 0))
        if module is None:
            wrong.append(layer)
        elif getattr(module, "tp_size", 1) == 1:
            a, b = module.lora_a_stacked[index][slot, 0], module.lora_b_stacked[index][slot, 0]
            sent_a, sent_b = first.to(a.dtype), second.to(b.dtype)
            sent_b = sent_b if adapter.scale == 1 else sent_b * adapter.scale
            same = a[: len(sent_a), : sent_a.shape[1]].cpu().equal(sent_a)
            if not same or not b[: len(sent_b), : sent_b.shape[1]].cpu().equal(sent_b):
                wrong.append(layer)
    return wrong
