"""Writes what a run with rounded weights deployed, in the form of compressed-tensors.

    python examples/deploy/compress.py ck/step_000020/hf int4_group128 OUT
    python examples/deploy/compress.py ck/step_000020/hf fp8_e4m3 OUT fp8_e4m3

`hf` holds the weights before they are rounded. The second argument is --rollout-weight-format, the
fourth --rollout-activation-format. Dense models alone: compressed-tensors knows linears, not experts.
"""

import sys

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from onpolicy.weights.rounding import FORMATS, quantise

source, weight_format, target, *inputs = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
if any(parameter.dim() > 2 for parameter in model.parameters()):
    sys.exit(f"{source}: has experts, which compressed-tensors would leave as they are.")
rows, columns = FORMATS[weight_format].block
is_fp8 = weight_format.startswith("fp8")
numbers = {"num_bits": 8 if is_fp8 else int(weight_format[3]), "type": "float" if is_fp8 else "int"}
blocks = {"strategy": "group", "group_size": columns} if columns else {"strategy": "channel"}
if rows > 1:
    blocks = {"strategy": "block", "block_structure": [rows, columns]}
group = {"targets": ["Linear"], "weights": numbers | blocks}
if inputs:
    group["input_activations"] = numbers | {"strategy": "token", "dynamic": True}
asked = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"])
apply_quantization_config(model, asked)
for linear in [module for module in model.modules() if hasattr(module, "weight_scale")]:
    linear.weight_scale.data = quantise(linear.weight, weight_format)[1].detach()
compressor = ModelCompressor.from_pretrained_model(model)
compressor.compress_model(model)
model.save_pretrained(target)
compressor.update_config(target)
AutoTokenizer.from_pretrained(source).save_pretrained(target)
