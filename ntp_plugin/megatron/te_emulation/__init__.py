"""Runs TransformerEngine's own Python modules on a CPU, for the CPU emulation: its compiled extension in torch.

TransformerEngine's layers are Python over a C++ extension, `transformer_engine_torch`. Its Python package needs no
CUDA; with functions of the same names and results in the extension's place, Megatron's default layers train on a
laptop as they are. A function that is not here raises `Unsupported` with its name; nothing is computed approximately
in silence.

    kernels.py          the extension's functions, in torch
    quantized.py        those of FP8 tensors: a cast rounds as on a GPU, a product is one of the dequantized factors
    attention.py        fused attention, for context parallelism
    attention_calls.py  what is replaced in TransformerEngine's Python where it calls that
    extension.py        the extension as a module: these functions, and the enums
    importing.py        puts it in the extension's place when TransformerEngine is imported

Attention runs by TransformerEngine's own unfused backend. With context parallelism, where it refuses that, its ring,
its gather or its exchange of heads runs over fused attention, without dropout. Needs the package `transformer-engine`
without its compiled parts: `pip install --no-deps transformer-engine onnxscript onnx onnx-ir ml_dtypes`.
"""
