"""Names of dtypes in safetensors files and in configurations."""

from collections.abc import Mapping

import torch

# Names of safetensors.
NAMED_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in NAMED_DTYPES.items()}
WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}  # bytes, of models' dtypes
