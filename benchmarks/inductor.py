"""What torch.compile makes of a model for a GPU that is not here: launches, and bytes moved by Inductor's own count.

    python benchmarks/inductor.py deit_small_patch16_224 --depth 4 --batch 256 --remove 13

The model is traced with fake CUDA tensors, and Inductor generates its code while the properties of an A100 and Triton's
driver stand in for those of a GPU; nothing is compiled for it, and nothing runs. It reaches into torch's internals, and
so is no test: it is known to work with torch 2.15.

Bytes are those that kernels read and write once, as Inductor counts them; reads from a cache are not among them.
"""

# ruff: noqa: PT008
from __future__ import annotations

import argparse
import contextlib
import re
import sys
from types import SimpleNamespace
from unittest import mock

import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from gtp_vit import GTP, GTPPlus, Identity, ToMe, patch
from gtp_vit.core.loop import run
from gtp_vit.kernels import triton_set
from gtp_vit.patching import tower_of

CALL = r"^\s+(?:\w+ = )?(?:extern_kernels\.\w+|torch\.ops\.aten\.[\w.]+)\("  # a library's kernel
# Kernels of each operator that Inductor calls as a whole, for up to 256 patches of float16
KERNELS = {"merge_by_cost": 3, "importance_by_probe": 2, "attention_statistics": 2, "propagate": 2, "match_pairs": 3}
KERNELS |= {"merge_pairs": 1}
LAUNCH = rf"{CALL}|^\s+\w+\.run\("
A100 = SimpleNamespace(
    name="NVIDIA A100-SXM4-40GB", major=8, minor=0, total_memory=40 * 2**30, multi_processor_count=108, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49152, shared_memory_per_block_optin=166912, shared_memory_per_multiprocessor=167936,
    L2_cache_size=40 * 2**20, gcnArchName="", is_integrated=0, clock_rate=1410000, memory_clock_rate=1215000,
    memory_bus_width=5120, uuid="none", pci_bus_id=0, pci_device_id=0, pci_domain_id=0,
)  # fmt: skip


class Driver:
    """Triton's driver, without one."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 80, 32)

    def get_current_device(self):
        return 0

    def get_active_torch_device(self):
        return torch.device("cuda", 0)

    def get_device_interface(self):
        return torch.cuda

    def get_benchmarker(self):
        return lambda *arguments, **options: 1.0


@contextlib.contextmanager
def pretended_gpu():
    """While this lasts, torch and Triton believe in an A100."""
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config

    active = mock.patch.object(
        type(triton.runtime.driver), "active", new_callable=mock.PropertyMock, return_value=Driver()
    )
    patches = [
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "device_count", lambda: 1),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (8, 0)),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device=None: A100),
        mock.patch.object(torch.cuda, "_get_device_properties", lambda device: A100, create=True),
        mock.patch.object(torch.cuda, "get_device_name", lambda device=None: A100.name),
        mock.patch.object(torch.cuda, "synchronize", lambda device=None: None),
        mock.patch.object(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
        mock.patch.object(torch._C, "_cuda_getDevice", lambda: 0),
        mock.patch.object(torch._C, "_cuda_init", lambda: None),
        mock.patch.object(torch.cuda, "_lazy_init", lambda: None),
        mock.patch.object(CudaInterface, "is_available", staticmethod(lambda: True)),
        mock.patch.object(CudaInterface, "get_compute_capability", staticmethod(lambda device=None: 80)),
        mock.patch.object(CudaInterface, "is_triton_capable", staticmethod(lambda device=None: True)),
        mock.patch.object(CudaInterface, "raise_if_triton_unavailable", staticmethod(lambda device=None: None)),
        mock.patch.object(CudaInterface.Worker, "get_device_properties", staticmethod(lambda device=None: A100)),
        mock.patch.object(CudaInterface.Worker, "current_device", staticmethod(lambda: 0)),
        active,
        # patterns that are looked for, which are made by running them on the GPU
        mock.patch("torch._inductor.fx_passes.joint_graph.lazy_init", lambda *arguments: None),
        mock.patch("torch._inductor.fx_passes.post_grad.lazy_init", lambda *arguments: None),
        config.patch(compile_threads=1, max_autotune=False, fx_graph_cache=False, autotune_in_subproc=False,
                     layout_optimization=False, joint_graph_constant_folding=False),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for patched in patches:
            stack.enter_context(patched)
        yield


class FusedAttention(TorchFunctionMode):
    """Torch's attention as the one kernel that takes a mask: without a GPU torch would take the path that has a map."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k, v = args[:3]
        bias = kwargs.get("attn_mask")
        if bias is not None:
            bias = bias.expand(*q.shape[:3], k.shape[2])
        fused = torch.ops.aten._scaled_dot_product_efficient_attention
        return fused(q, k, v, bias, False, scale=kwargs.get("scale"))[0]


def lower(model: nn.Module, images: torch.Tensor) -> tuple[int, int, str]:
    """Launches, bytes moved, and the generated code of a pass of a patched model with fake CUDA parameters."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    tower = tower_of(model)
    table = select_decomp_table()
    with FusedAttention():
        graph = make_fx(lambda x: run(tower, x).x, decomposition_table=table, tracing_mode="real")(images)
    mode = images.fake_mode
    with pretended_gpu(), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        joint_graph_passes(graph)
        post_grad_passes(graph, is_inference=True)
        lowering = GraphLowering(graph, shape_env=None, is_inference=True)
        with V.set_graph_handler(lowering), torch.no_grad():
            lowering.run(images)
            code = lowering.codegen()[0]
            moved = lowering.count_bytes()[0]
    text = code.value if hasattr(code, "value") else str(code)
    ours = sum(KERNELS[name] for name in re.findall(r"= torch\.ops\.gtp_vit_gpu\.(\w+)", text))
    return len(re.findall(LAUNCH, text, re.M)) + ours, moved, text


def fake_on_gpu(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace all parameters and buffers by fake CUDA ones."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, value in tensors.items():
                if value is not None:
                    kind = dtype if value.is_floating_point() and name not in ("probe", "registers") else value.dtype
                    fake = torch.empty(value.shape, dtype=kind, device="cuda")
                    tensors[name] = nn.Parameter(fake, requires_grad=False) if tensors is module._parameters else fake


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="deit_small_patch16_224")
    parser.add_argument("--depth", type=int, default=4, help="layers of the model")
    parser.add_argument("--batch", type=int, default=256, help="images")
    parser.add_argument("--remove", type=int, default=13, help="tokens removed in each layer but the last")
    parser.add_argument("--code", help="write the generated code of each to files that begin with this")
    flags = parser.parse_args()
    plan = [*[flags.remove] * (flags.depth - 1), 0]
    methods = {
        "unreduced": Identity(),
        "tome": ToMe(r=plan),
        "gtp": GTP(propagate=plan),
        "gtp_plus": GTPPlus(remove=plan),
    }
    print("| compiled for an A100 | operators | launches | of these products and attention | GB moved |")
    print("|---|---|---|---|---|")
    for name, method in methods.items():
        for kernels in ("torch",) if name == "unreduced" else ("torch", "triton"):
            plain = timm.create_model(flags.model, depth=flags.depth).eval().requires_grad_(False)
            fast = patch(plain, method, kernels="auto" if kernels == "triton" else "torch", quiet=True)
            here = mock.patch.object(triton_set, "why_not_here", lambda *arguments, **options: None)
            with here, FakeTensorMode(), torch.no_grad():
                fake_on_gpu(fast, torch.float16)
                images = torch.empty(flags.batch, 3, 224, 224, dtype=torch.float16, device="cuda")
                launches, moved, code = lower(fast, images)
            products = len(re.findall(CALL, code, re.M))
            print(f"| {name} | {kernels} | {launches} | {products} | {moved / 1e9:.1f} |", flush=True)
            if flags.code:
                with open(f"{flags.code}-{name}-{kernels}.py", "w", encoding="utf-8") as file:
                    file.write(code)


if __name__ == "__main__":
    sys.exit(main())
