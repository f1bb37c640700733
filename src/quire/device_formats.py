"""`device_formats`: how the weights of a model are held on one device, over the ranks that share them. Torch-free.

A CPU multiplies quantized matrices with rounded rows, so that there the matrices that Quire rounds are rotated. A GPU
multiplies integers with plain rows, and nothing is rotated for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.args import EngineArgs
from quire.config import DeviceInfo
from quire.device import FP8_CAPABILITY
from quire.errors import ConfigError
from quire.modelspec import ModelSpec
from quire.parallel.rotations import rotated
from quire.parallel.topology import Topology
from quire.weight_format import GROUPS, WeightFormat
from quire.weight_plan import WeightPlan, plan_weights

Formats = Mapping[str, WeightFormat]


def device_formats(
    args: EngineArgs, spec: ModelSpec, stored: Formats, dtype: str, device: DeviceInfo, topology: Topology
) -> WeightPlan:
    """Return the formats of weights. What a device has no fp8 products for is expanded, with a remark.

    Raises:
        ConfigError: names the setting, the value and what is allowed.
    """
    needs = f"fp8 weights need a GPU of compute capability {'.'.join(map(str, FP8_CAPABILITY))} or more"
    too_old = device.capability < FP8_CAPABILITY
    for name in ("quantize", "quantize_head") if too_old else ():
        if getattr(args, name) == "fp8":
            raise ConfigError(
                f"{name} = 'fp8': {needs}, and {device.name} has none: 'int8' takes the same bytes"
            )
    kernels = (None, *GROUPS["fp8"])
    usable = {
        name: form
        for name, form in stored.items()
        if form.kind != "fp8" or (form.group in kernels and not too_old)
    }
    num_expanded = len(stored) - len(usable)
    if device.kind != "cpu" or topology.tp > 1:  # cuts fall within the inputs that share an outer scale
        usable = {name: form.wide for name, form in usable.items()}
    quantize, head = args.quantize, args.quantize_head
    if device.kind != "cpu":  # int4 with integer scales in groups of 16 is for CPUs
        quantize, head = ("int4-g32" if kind in ("int4", "int4-g16") else kind for kind in (quantize, head))
    plan = plan_weights(spec, usable, quantize, head)
    if device.kind == "cpu":
        plan = replace(plan, formats=rotated(spec, plan.formats, usable, topology.tp))
    if not num_expanded:
        return plan
    why = needs if too_old else f"its kernels take whole blocks of {GROUPS['fp8'][0]} inputs"
    remark = f"{num_expanded} fp8 weights read as {dtype}: {why}; --quantize int8 takes the bytes of fp8"
    return replace(plan, remarks=(remark, *plan.remarks))
