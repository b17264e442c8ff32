"""The writer's tensors beside those of the tools that make the published checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tiny_k3 import Geometry, encode, target
from tiny_k3.geometry import OUTER

PROJECTIONS = ("0.self_attn.b_proj", "0.self_attn.f_a_proj", "3.self_attn.kv_a_proj_with_mqa", "3.self_attn.q_b_proj")
EXPERTS = tuple(f"{layer}.block_sparse_moe.experts.{layer}.{matrix}" for layer in (1, 4) for matrix in ("w1", "w2"))


@pytest.fixture(scope="module")
def original() -> target.Tensors:
    return target.original(Geometry(), 0)


def name(module: str) -> str:
    return f"{OUTER}model.layers.{module}.weight"


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


class TestModelOpt:
    """NVIDIA's Model Optimizer."""

    @pytest.mark.parametrize("module", PROJECTIONS)
    def test_block_scaled_matrices_are_modelopts(self, original: target.Tensors, module: str) -> None:
        from modelopt.torch.quantization.qtensor import FP8QTensor

        matrix = original[name(module)]
        codes, scale = encode.fp8_pb_wo(matrix)
        theirs, their_scale = FP8QTensor.quantize(matrix.float(), block_sizes={-2: 128, -1: 128})
        assert torch.equal(their_scale, scale[:, 0, :, 0])
        assert same(theirs._quantized_data, codes)
        # Of a BF16 matrix it computes the scales in BF16 as well.
        _, coarse = FP8QTensor.quantize(matrix, block_sizes={-2: 128, -1: 128})
        assert torch.allclose(coarse.float(), scale[:, 0, :, 0], rtol=2.0**-8)

    @pytest.mark.parametrize("module", EXPERTS)
    def test_four_bit_matrices_are_modelopts(self, original: target.Tensors, module: str) -> None:
        from modelopt.torch.quantization.qtensor import NVFP4QTensor

        matrix, second = original[name(module)], target.second_scale(original, name(module))
        packed, scale = encode.nvfp4(matrix, second)
        theirs, their_scale, _ = NVFP4QTensor.quantize(matrix, 16, None, torch.tensor(second), try_tensorrt=False)
        assert same(their_scale, scale)
        assert same(theirs._quantized_data, packed)

    def test_config_is_modelopts_form_of_the_older_file(self, original: target.Tensors) -> None:
        from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

        config, legacy = target.mixed_metadata(target.mixed(original))
        converted = convert_hf_quant_config_format(json.loads(json.dumps(legacy)))
        # Its public converter for K3 then names the mixed method, which not every engine infers.
        assert {**converted, "quant_method": "modelopt_mixed"} == json.loads(json.dumps(config))


class TestCompressedTensors:
    """The compressed-tensors package, one of vLLM's own requirements."""

    def compressed(self, original: target.Tensors, module: str) -> target.Tensors:
        expert = name(module)[: -len("w1.weight")]
        return target.compressed({other: tensor for other, tensor in original.items() if other.startswith(expert)})

    @pytest.mark.parametrize("module", EXPERTS)
    def test_packed_codes_are_the_packages(self, original: target.Tensors, module: str) -> None:
        from compressed_tensors.compressors import nvfp4 as package

        made = self.compressed(original, module)
        full = name(module)
        matrix = target.matrix_of(made, full)
        groups = made[f"{full}_scale"].double().repeat_interleave(16, 1) / made[f"{full}_global_scale"].double()
        packed = package.pack_fp4_to_uint8((matrix / groups).bfloat16())
        assert same(packed, made[f"{full}_packed"])

    @pytest.mark.parametrize("module", EXPERTS)
    def test_the_package_reads_the_same_matrix(self, original: target.Tensors, module: str) -> None:
        from compressed_tensors.compressors import nvfp4 as package
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        made = self.compressed(original, module)
        full = name(module)
        rows, half = made[f"{full}_packed"].shape
        codes = package.unpack_fp4_from_uint8(made[f"{full}_packed"], rows, 2 * half)
        read = dequantize(
            x_q=codes,
            scale=made[f"{full}_scale"].float(),
            global_scale=made[f"{full}_global_scale"],
            dtype=torch.float32,
        )
        assert torch.equal(read.double(), target.matrix_of(made, full))
