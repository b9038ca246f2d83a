"""Compile every Triton kernel that a GPU would be given, for the GPU's architecture, on a machine without one.

    python tests/gpu/compiles.py [ARCHITECTURE] [--resources]        90 (Hopper) by default

The interpreter runs kernels that a compiler would refuse (a name of two types in two branches, say). Here launches are
caught, and what would be launched is compiled, down to machine code, and not run. Prints one line of JSON; with
--resources first what each form takes: registers, spilled bytes, shared memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from setting import register
from shapes import TINY

os.environ.pop("TRITON_INTERPRET", None)
SHARED = 227 << 10  # bytes of shared memory that a program may have on Hopper
TYPES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.int8": "i8",
    "torch.uint8": "u8",
    "torch.int32": "i32",
    "torch.int64": "i64",
    "torch.bool": "i1",
    "torch.float64": "fp64",
}


def catch(architecture: int, *, resources: bool = False) -> dict[str, int]:
    """Let every launch compile its kernel instead. Returns how many forms of each kernel there have been.

    resources: print what each takes, one line a form.
    """
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    target, seen, counts = GPUTarget("cuda", architecture, 32), set(), {}

    def run(self: Any, *values: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        named = dict(zip(self.arg_names, values, strict=False)) | {
            name: value for name, value in keywords.items() if name in self.arg_names
        }
        options = {name: value for name, value in keywords.items() if name not in self.arg_names}
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(self.params):
            value = named[parameter.name]
            # as a launch would: what is known to be a multiple of 16 is loaded in wide pieces, and ahead, which takes
            # more registers and shared memory
            if not parameter.is_constexpr and _is_multiple(value):
                attributes[(index,)] = [["tt.divisibility", 16]]
            if isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + TYPES[str(value.dtype)]
            elif parameter.is_constexpr or value is None or (value == 1 and isinstance(value, int)):
                signature[parameter.name], constants[(index,)] = "constexpr", value
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        form = (self.__name__, str(signature), str(constants), str(attributes), str(options))
        if form not in seen:
            seen.add(form)
            source = ASTSource(self, signature, constexprs=constants, attrs=attributes)
            done = triton.compile(source, target=target, options=options)
            assert "cubin" in done.asm, f"{self.__name__} has no machine code"
            assert done.metadata.shared <= SHARED, (
                f"{self.__name__} takes {done.metadata.shared} bytes of shared memory"
            )
            counts[self.__name__] = counts.get(self.__name__, 0) + 1
            if resources:
                sizes = {self.arg_names[index]: value for (index,), value in constants.items()}
                shared, told = done.metadata.shared, _told(done.asm["ptx"], architecture)
                print(f"{self.__name__} {sizes}: {shared} bytes shared, {told}")

    JITFunction.run = run
    return counts


def _told(ptx: str, architecture: int) -> str:
    """Registers and spilled bytes of a kernel, as the assembler tells them."""
    import triton

    suffix = "a" if architecture >= 90 else ""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name=sm_{architecture}{suffix}", file.name]
        done = subprocess.run([*command, "-o", os.devnull], capture_output=True, text=True, check=True)
    lines = (line.partition(":")[2] or line for line in done.stderr.splitlines())
    return ", ".join(line.strip() for line in lines if "spill" in line or "registers" in line)


def _is_multiple(value: Any) -> bool:
    """Whether Triton would take an address or a number for a multiple of 16."""
    if hasattr(value, "data_ptr"):
        return bool(value.data_ptr() % 16 == 0)
    return type(value) is int and value % 16 == 0


def launch() -> None:
    """One decode step of some models, with hold and without, packed rows, the window's statistics, int8 products."""
    import torch
    from cake_infer.cache.device_statistics import column_scores
    from cake_infer.cache.layout import ArenaLayout, ArenaSize
    from cake_infer.cache.packed_store import PackedStore
    from cake_infer.cache.store import Store
    from cake_infer.cache.view import LayerView
    from cake_infer.engine.attention.packed import PackedPart
    from cake_infer.engine.attention.ragged import RaggedTriton, store_newcomers
    from cake_infer.engine.attention.ragged_packed import attend_packed
    from cake_infer.engine.attention.rows import Rows
    from cake_infer.engine.device_sampling import DeviceSampler, Kind
    from cake_infer.engine.device_step import DeviceState, DeviceStep
    from cake_infer.models.config import ModelConfig
    from cake_infer.models.int8_products import int8_linear
    from cake_infer.models.quantisation import quantise
    from cake_infer.models.weights import random_decoder

    shapes = [
        ({"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2}, torch.bfloat16, torch.bfloat16, False),
        ({"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2}, torch.bfloat16, torch.bfloat16, True),
        ({"head_dim": 64, "model_type": "mistral", "sliding_window": 8}, torch.float16, torch.float16, True),
        ({"head_dim": 96, "model_type": "qwen3", "attention_bias": False}, torch.float32, torch.bfloat16, True),
        (
            {"head_dim": 256, "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"},
            torch.float32,
            torch.float32,
            True,
        ),
        ({"head_dim": 256, "num_key_value_heads": 4}, torch.bfloat16, torch.bfloat16, False),
    ]
    for keys, dtype, kv_dtype, hold in shapes:
        given = {key: value for key, value in {**TINY, **keys}.items() if value is not None}
        config = ModelConfig.from_dict(given, where="shape")
        decoder = random_decoder(config, dtype="float32")
        for (
            layer
        ) in decoder.layers:  # on a CPU a decoder computes in fp32: what is launched shall have the GPU's dtypes
            for name, tensor in layer.named_tensors():
                setattr(layer, name, tensor.to(dtype))
        decoder.norm, decoder.lm_head = decoder.norm.to(dtype), decoder.lm_head.to(dtype)
        decoder.embed_tokens, decoder.compute_dtype = decoder.embed_tokens.to(dtype), dtype
        layout = ArenaLayout(config.num_layers, config.num_kv_heads, config.head_dim, kv_dtype, dtype)
        size = ArenaSize(0, 0, 400)
        store = Store(layout, size.decode * config.head_dim * kv_dtype.itemsize, size.decode, torch.device("cpu"))
        step = DeviceStep(decoder, RaggedTriton(), window=4, hold=hold)
        with torch.inference_mode():
            for seats in (1, 2):
                sampler = DeviceSampler(seats, config.vocab_size, None, None, torch.device("cpu"))
                state = DeviceState(decoder, seats, 4, sampler)
                step(state, store, 400, Kind.GREEDY)
            newcomers = torch.zeros(2, config.num_kv_heads, config.head_dim, dtype=dtype)
            store_newcomers(state.layer(0, store, 400), newcomers, newcomers)
    packed = ((8, 64, torch.float16, None), (4, 128, torch.bfloat16, 7), (2, 96, torch.float32, None))
    for bits, dim, dtype, sliding in packed:
        table = torch.zeros(1, 2, dtype=torch.int32)
        numbers = torch.zeros(40, dim, dtype=dtype)
        rows = Rows(numbers, numbers, torch.zeros(40, dtype=torch.int32), table, table, table[:, 0].contiguous(), 20)
        store = PackedStore(ArenaLayout(1, 2, dim, dtype, dtype, kv_bits=bits, window=8), 64)
        part = PackedPart(store, table, table, 3000)
        attend_packed(torch.zeros(1, 8, dim, dtype=dtype), rows, part, scale=0.1, sliding=sliding)
    # of few columns, or of one query, numbers are 1, which a launch takes for constants
    statistics = [(300, 32, 4, None), (300, 32, 4, 7), (40, 32, 4, None), (40, 1, 1, None), (300, 1, 3, 7)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for columns, window, group, sliding in statistics if dtype == torch.bfloat16 else statistics[:2]:
            view = LayerView(
                layer=0,
                keys=torch.zeros(2, columns, 128, dtype=dtype),
                positions=torch.arange(columns, dtype=torch.int32).repeat(2, 1),
                queries=torch.zeros(2 * group, window, 128, dtype=dtype),
                query_positions=torch.arange(columns - window, columns),
                window=window,
                scale=0.1,
                sliding_window=sliding,
                total=columns,
            )
            column_scores(view, 200.0)
        matrix = quantise(torch.ones(64, 96), "int8")
        for tokens in (1, 4):
            int8_linear(torch.ones(tokens, 96, dtype=dtype), matrix)  # type: ignore[arg-type]


def main() -> None:
    register()
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    architecture = numbers[0] if numbers else 90
    counts = catch(architecture, resources="--resources" in sys.argv)
    launch()
    print(json.dumps({"architecture": architecture, "compiled": counts}))


if __name__ == "__main__":
    main()
