"""Named tensors as raw bytes, and the safetensors format.

Owns bytes, dtypes and shapes; no arithmetic, no torch.
"""

from paceline.tensors.safetensors import (
    decode_metadata,
    decode_safetensors,
    encode_safetensors,
    safetensors_header,
)
from paceline.tensors.tensor import (
    ITEM_BYTES,
    NUMPY_CODES,
    NamedTensor,
    TensorLayout,
    as_numpy,
    crc32,
    from_numpy,
    head_hash,
)

__all__ = [
    "ITEM_BYTES",
    "NUMPY_CODES",
    "NamedTensor",
    "TensorLayout",
    "as_numpy",
    "crc32",
    "decode_metadata",
    "decode_safetensors",
    "encode_safetensors",
    "from_numpy",
    "head_hash",
    "safetensors_header",
]
