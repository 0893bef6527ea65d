"""Which scheme a checkpoint is quantized by, from the ``quantization_config`` of its config.json.

A quantized matrix stands under several names, such as ``x.qweight`` and ``x.scales``. A scheme
makes the matrix ``x.weight`` of them; what it did not quantize is there as ever.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jkvq.models.families.family import Read
from jkvq.models.fields import Fields
from jkvq.models.formats.quantized.compressed import compressed
from jkvq.models.formats.quantized.float4 import mxfp4
from jkvq.models.formats.quantized.float8 import float8
from jkvq.models.formats.quantized.packed_int4 import awq, gptq
from jkvq.support.errors import UserError

# By ``quant_method``: takes the config and how tensors are read, gives how matrices are.
_SCHEMES: Mapping[str, Callable[[Fields, Read], Read]] = {
    "fp8": float8,
    "mxfp4": mxfp4,
    "compressed-tensors": compressed,
    "awq": awq,
    "gptq": gptq,
}


def dequantizing(config: Mapping[str, Any], read: Read) -> Read:
    """How the tensors of a checkpoint with this config.json are read; refuses unknown schemes."""
    scheme = config.get("quantization_config") or config.get("compression_config")
    if not scheme:
        return read
    method = str(scheme.get("quant_method") if isinstance(scheme, Mapping) else scheme)
    if method not in _SCHEMES:
        raise UserError(
            f"quantization '{method}' is not supported; supported: {', '.join(_SCHEMES)}, "
            "and checkpoints that are not quantized"
        )
    return _SCHEMES[method](scheme, read)
