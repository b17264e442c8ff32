"""The tiny Kimi-K3: its forms are one model, its folders are whole, and its numbers mean something."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent))
import tiny_k3
from tiny_k3 import damage, drafter, encode, target, vocabulary
from tiny_k3.contracts import BLOCK, NVFP4_GROUP, dequantize, formats
from tiny_k3.folder import INDEX, load_tensors, whole
from tiny_k3.forward import Tiny
from tiny_k3.geometry import OUTER

GEOMETRY = tiny_k3.Geometry()
Write = Callable[..., Path]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(kept)


@pytest.fixture(scope="module")
def original() -> target.Tensors:
    return target.original(GEOMETRY, 0)


@pytest.fixture(scope="module")
def mixed(original: target.Tensors) -> target.Tensors:
    return target.mixed(original)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Write a form once."""
    root, done = tmp_path_factory.mktemp("tiny"), {}

    def write(form: str) -> Path:
        if form not in done:
            writer = tiny_k3.write_drafter if form.startswith("drafter-") else tiny_k3.write_target
            done[form] = writer(root / form, form.removeprefix("drafter-"))
        return done[form]

    return write


def digest(folder: Path) -> str:
    files = sorted(file for file in folder.iterdir())
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape and bytes."""
    return one.shape == other.shape and torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


# -- forms


def test_reference_is_what_the_mixed_form_means(written: Write) -> None:
    quantized, reference = load_tensors(written("mixed")), load_tensors(written("reference"))
    assert {name for name in quantized if not name.endswith(target.SCALES)} == reference.keys()
    for name, tensor in reference.items():
        stored = quantized[name]
        if stored.dtype == torch.float8_e4m3fn:
            matrix = dequantize(stored, quantized[f"{name}_scale"])
        elif stored.dtype == torch.uint8:
            assert tensor.dtype == torch.bfloat16
            if hashlib.sha256(name.encode()).digest()[0] % 8:
                continue  # a few of the experts of every layer will do
            plain = name.removesuffix("weight")
            parts = {s: quantized[f"{plain}{s}"] for s in ("weight", "weight_scale", "weight_scale_2")}
            matrix = formats.NVFP4.read(parts)
            assert torch.equal(tensor.double(), matrix), f"{name}: BF16 holds NVFP4 under a power of two exactly"
        else:
            assert same(tensor, stored), name
            continue
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, matrix.bfloat16()), name


def test_compressed_tensors_holds_the_same_experts(original: target.Tensors, mixed: target.Tensors) -> None:
    compressed = target.compressed(original)
    experts = [name for name, tensor in mixed.items() if tensor.dtype == torch.uint8]
    assert len(experts) == 5 * 16 * 3
    for name in experts:
        assert torch.equal(compressed[f"{name}_packed"], mixed[name])
        assert same(compressed[f"{name}_scale"], mixed[f"{name}_scale"])
        assert float(compressed[f"{name}_global_scale"]) * float(mixed[f"{name}_scale_2"]) == 1
    for name in experts[::30]:
        assert torch.equal(target.matrix_of(compressed, name), target.matrix_of(mixed, name))


def test_every_attention_projection_is_block_scaled(written: Write) -> None:
    mixed = load_tensors(written("mixed"))
    for layer in GEOMETRY.all_layers:
        for projection, (rows, cols) in GEOMETRY.projections(layer).items():
            name = f"{OUTER}model.layers.{layer}.self_attn.{projection}.weight"
            assert mixed[name].dtype == torch.float8_e4m3fn
            assert tuple(mixed[name].shape) == (rows, cols)
            scale = mixed[f"{name}_scale"]
            assert scale.dtype == torch.float32
            assert tuple(scale.shape) == (-(-rows // BLOCK), 1, -(-cols // BLOCK), 1)
            if scale.shape[0] > 1:
                assert scale.max() / scale.min() > 4, "blocks that a misplaced scale could be told by"


def test_experts_have_one_second_scale_where_kernels_merge(written: Write) -> None:
    mixed = load_tensors(written("mixed"))
    seen = set()
    for name in mixed:
        if name.endswith(".w1.weight_scale_2"):
            assert mixed[name].shape == ()
            assert torch.equal(mixed[name], mixed[name.replace(".w1.", ".w3.")])
            assert float(mixed[name.replace("weight_scale_2", "input_scale")]) == 1.0
            seen.add(float(mixed[name]))
    assert len(seen) > 1, "an expert under another's scale has to show"


def test_metadata_names_what_is_quantized(written: Write, mixed: target.Tensors) -> None:
    config = json.loads((written("mixed") / "config.json").read_text())["quantization_config"]
    legacy = json.loads((written("mixed") / "hf_quant_config.json").read_text())
    assert config["quantized_layers"] == legacy["quantization"]["quantized_layers"]
    assert config["ignore"] == legacy["quantization"]["exclude_modules"]
    listed = {name: recipe["quant_algo"] for name, recipe in config["quantized_layers"].items()}
    assert listed.items() >= target.quantized_layers(mixed).items()
    assert listed["language_model.model.layers.1.block_sparse_moe.experts"] == "NVFP4"
    assert listed["language_model.model.layers.3.self_attn.q_a_proj"] == "FP8_PB_WO"
    assert "quantization_config" not in json.loads((written("reference") / "config.json").read_text())


@pytest.mark.parametrize("form", ["fp8_pb_wo", "nvfp4"])
def test_drafters_reference_is_what_its_quantized_form_means(written: Write, form: str) -> None:
    quantized, reference = load_tensors(written(f"drafter-{form}")), load_tensors(written(f"drafter-{form}-reference"))
    read = drafter.ANNOUNCEMENTS[form].read
    for name, tensor in reference.items():
        if drafter.is_quantized(name):
            module = name.removesuffix("weight")
            parts = {other.removeprefix(module): t for other, t in quantized.items() if other.startswith(module)}
            assert torch.equal(tensor, read(parts).bfloat16()), name
        else:
            assert torch.equal(tensor, quantized[name]), name
    assert sum(map(drafter.is_quantized, reference)) == 5 * 8 + 1


# -- encoding


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 300), cols=st.integers(1, 300), seed=st.integers(0, 1 << 30))
def test_block_encoding_is_the_nearest(rows: int, cols: int, seed: int) -> None:
    matrix = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).bfloat16()
    codes, scale = encode.fp8_pb_wo(matrix)
    padded = torch.nn.functional.pad(matrix.double(), (0, -cols % BLOCK, 0, -rows % BLOCK))
    largest = padded.view(scale.shape[0], BLOCK, scale.shape[2], BLOCK).abs().amax((1, 3))
    assert torch.allclose(scale[:, 0, :, 0].double(), largest / 448, rtol=1e-7)
    error = (dequantize(codes, scale) - matrix.double()).abs()
    spread = scale[:, 0, :, 0].double().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    assert bool((error <= matrix.double().abs() * 2.0**-4 * (1 + 1e-6) + spread * 2.0**-10).all())


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), groups=st.integers(1, 20), seed=st.integers(0, 1 << 30))
def test_four_bit_encoding_is_the_nearest(rows: int, groups: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, groups * NVFP4_GROUP, generator=generator).bfloat16()
    second = encode.global_scale(matrix)
    assert matrix.abs().max() <= 448 * 6 * second < 2 * matrix.abs().max()
    packed, scale = encode.nvfp4(matrix, second)
    read = formats.e2m1(packed)
    wanted = matrix.double() / (scale.double() * second).repeat_interleave(NVFP4_GROUP, 1)
    best = (wanted[..., None] - formats.E2M1).abs().amin(-1)
    assert torch.allclose((wanted - read).abs(), best, atol=1e-6)
    assert bool((wanted.abs() <= 6 * (1 + 2.0**-4)).all())


def test_ties_of_four_bits_go_to_even_codes() -> None:
    middles = torch.tensor(encode.E2M1_BETWEEN)
    assert encode.e2m1_codes(middles).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert encode.e2m1_codes(-middles[1:]).tolist() == [10, 10, 12, 12, 14, 14]


@settings(max_examples=4, deadline=None)
@given(
    layers=st.integers(2, 4),
    experts=st.sampled_from((4, 8)),
    hidden=st.sampled_from((256, 384)),
    mtp=st.integers(0, 1),
    seed=st.integers(0, 5),
)
def test_any_geometry_round_trips(layers: int, experts: int, hidden: int, mtp: int, seed: int) -> None:
    attention = replace(GEOMETRY.attention, hidden=hidden, heads=2, q_lora=192)
    geometry = replace(
        GEOMETRY,
        layers=layers,
        mla_layers=(layers - 1,),
        mtp_layers=mtp,
        experts=experts,
        experts_per_token=2,
        latent=128,
        expert_intermediate=128,
        intermediate=256,
        attention=attention,
    )
    original = target.original(geometry, seed)
    quantized = target.mixed(original)
    meant = target.dequantized(quantized)
    assert meant.keys() == original.keys()
    for name, tensor in original.items():
        assert meant[name].shape == tensor.shape
        # Half a step of E2M1 is a quarter of an element between 0.5 and 1, and a sixth of what its scale was cut by.
        assert float((meant[name].float() - tensor.float()).norm()) <= 0.15 * float(tensor.float().norm()), name
    tiny = Tiny.of(geometry.text_config(), quantized, torch.float32)
    assert bool(tiny.logits(torch.arange(20, 28)).isfinite().all())


# -- folders


def test_the_same_seed_gives_the_same_bytes(written: Write, tmp_path: Path) -> None:
    assert digest(tiny_k3.write_target(tmp_path / "again", "mixed")) == digest(written("mixed"))
    assert digest(tiny_k3.write_drafter(tmp_path / "draft", "nvfp4")) == digest(written("drafter-nvfp4"))
    other = tiny_k3.write_drafter(tmp_path / "other", "nvfp4", seed=1)
    assert digest(other) != digest(written("drafter-nvfp4"))


@pytest.mark.parametrize("form", ["bf16", "mixed", "drafter-fp8_pb_wo"])
def test_index_tells_where_every_tensor_is(written: Write, form: str) -> None:
    index = json.loads((written(form) / INDEX).read_text())
    files = {file.name for file in written(form).glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files
    assert len(files) >= 2
    tensors = load_tensors(written(form))
    assert tensors.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_nothing_half_written_is_left(written: Write, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(written("mixed"), folder)
    before = digest(folder)

    def fill_partly() -> None:
        with whole(folder) as made:
            (made / "config.json").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fill_partly()
    assert [child.name for child in tmp_path.iterdir()] == ["model"]
    assert digest(folder) == before
    tiny_k3.write_drafter(folder, "bf16")
    assert [child.name for child in tmp_path.iterdir()] == ["model"]
    assert not (folder / "hf_quant_config.json").exists()


def test_an_unknown_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no form 'fp8': choose from bf16, mixed"):
        tiny_k3.write_target(tmp_path / "model", "fp8")
    assert not list(tmp_path.iterdir())


def test_tokenizer_works_without_a_network(written: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(written("mixed"))
    assert len(tokenizer) == vocabulary.VOCABULARY
    assert tokenizer.eos_token_id == vocabulary.EOS
    words = list(range(vocabulary.FIRST_WORD, vocabulary.VOCABULARY))
    text = tokenizer.decode(words)
    assert text == vocabulary.text(words)
    assert tokenizer(text)["input_ids"] == words
    chat = [{"role": "user", "content": "w3 w4"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|user|>", "w3", "w4", "<|assistant|>"]


# -- numbers


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocabulary.FIRST_WORD, vocabulary.VOCABULARY, (160,), generator=generator)


@pytest.fixture(scope="module")
def model(mixed: target.Tensors) -> Tiny:
    return Tiny.of(GEOMETRY.text_config(), mixed, torch.float32)


@pytest.fixture(scope="module")
def truth(model: Tiny, tokens: torch.Tensor) -> torch.Tensor:
    return model.log_probabilities(tokens)


def moved(tiny: Tiny, tokens: torch.Tensor, truth: torch.Tensor) -> float:
    """Mean distance of the log-probabilities to the true ones, in nats."""
    return float((tiny.log_probabilities(tokens) - truth).abs().mean())


def changed(model: Tiny, changes: target.Tensors) -> Tiny:
    return replace(model, weights={**model.weights, **changes})


def test_activations_neither_vanish_nor_explode(model: Tiny, truth: torch.Tensor) -> None:
    sizes = {name: float(output.square().mean().sqrt()) for name, output in model.seen.items()}
    assert len(sizes) == 2 * GEOMETRY.layers
    assert all(0.2 < size < 0.9 for size in sizes.values()), sizes
    assert 1.5 < float(truth.std(-1).mean()) < 3.5, "spread of the logits, in nats"


def test_causality(model: Tiny, tokens: torch.Tensor, truth: torch.Tensor) -> None:
    assert torch.allclose(model.log_probabilities(tokens[:50]), truth[:50], atol=1e-3)


def test_every_attention_projection_influences_the_logits(
    model: Tiny, tokens: torch.Tensor, truth: torch.Tensor
) -> None:
    part = tokens[:64]
    for layer in range(GEOMETRY.layers):
        for projection in GEOMETRY.projections(layer):
            name = f"model.layers.{layer}.self_attn.{projection}.weight"
            # Rows turned around rather than scaled: a norm behind a projection would undo a scale.
            tiny = changed(model, {name: model.weights[name].flip(0)})
            assert moved(tiny, part, truth[:64]) > 0.1, name


def test_every_expert_of_a_token_influences_its_logits(model: Tiny, tokens: torch.Tensor, truth: torch.Tensor) -> None:
    for layer in range(1, GEOMETRY.layers):
        for projection in ("w1", "w2", "w3"):
            names = [f"model.layers.{layer}.block_sparse_moe.experts.{e}.{projection}.weight" for e in range(16)]
            tiny = changed(model, {name: model.weights[name].flip(0) for name in names})
            assert moved(tiny, tokens[:64], truth[:64]) > 0.1, (layer, projection)


def misplaced_gate(mixed: target.Tensors, layer: int) -> target.Tensors:
    """The gate as a merged layer reads it that puts each shard's scales at the next block's beginning."""
    at = f"{OUTER}model.layers.{layer}.self_attn"
    names = [f"{at}.{shard}.weight" for shard in ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")]
    codes = torch.cat([mixed[name] for name in names])
    scales = torch.zeros(-(-codes.shape[0] // BLOCK), 1, mixed[f"{names[0]}_scale"].shape[2], 1)
    row = 0
    for name in names:
        scale, begin = mixed[f"{name}_scale"], -(-row // BLOCK)
        scales[begin : begin + scale.shape[0]] = scale[: scales.shape[0] - begin]
        row += mixed[name].shape[0]
    gate = dequantize(codes, scales)[-mixed[names[2]].shape[0] :]
    return {names[2].removeprefix(OUTER): gate.float()}


def test_misplaced_gate_scales_move_more_than_rounding(
    model: Tiny, mixed: target.Tensors, tokens: torch.Tensor, truth: torch.Tensor
) -> None:
    rounding = moved(model.with_fp8_inputs(), tokens, truth)
    changes = {name: gate for layer in GEOMETRY.mla_layers for name, gate in misplaced_gate(mixed, layer).items()}
    wrong = moved(changed(model, changes), tokens, truth)
    assert 0.02 < rounding < 0.15
    assert wrong > 4 * rounding


def test_bf16_of_the_quantized_weights_is_the_same_model(
    mixed: target.Tensors, tokens: torch.Tensor, truth: torch.Tensor
) -> None:
    reference = Tiny.of(GEOMETRY.text_config(), target.dequantized(mixed), torch.float32)
    assert moved(reference, tokens, truth) < 0.01


def test_rounding_seldom_turns_a_choice_of_experts(model: Tiny, tokens: torch.Tensor, truth: torch.Tensor) -> None:
    def choices(tiny: Tiny) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        plain = tiny.routing

        def routing(at: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weights, chosen = plain(at, x)
            seen.append(chosen.sort(-1).values)
            return weights, chosen

        tiny.routing = routing  # type: ignore[method-assign]
        tiny.logits(tokens)
        return torch.stack(seen)

    exact, rounded = choices(replace(model)), choices(model.with_fp8_inputs())
    assert float((exact != rounded).any(-1).float().mean()) < 0.01
    assert len(exact.unique()) == GEOMETRY.experts


def test_drafts_are_accepted(original: target.Tensors, tokens: torch.Tensor, truth: torch.Tensor) -> None:
    """The target follows the cycle mostly, the Markov head always, against logits of the target's own spread."""
    successor = target.successor(0)
    follows = float((truth.argmax(-1) == successor[tokens]).float().mean())
    assert 0.75 < follows < 0.97, "some drafts are to be refused"
    assert tiny_k3.acceptance_length(follows) > 2.5
    made = drafter.original(GEOMETRY, 0)
    bias = made["markov_head.markov_w1.weight"].float() @ made["markov_head.markov_w2.weight"].float().T
    words = torch.arange(vocabulary.FIRST_WORD, vocabulary.VOCABULARY)
    base = target.SPREAD * torch.randn(len(words), vocabulary.VOCABULARY, generator=torch.Generator().manual_seed(2))
    drafted = (bias[words] + base).argmax(-1)
    assert float((drafted == successor[words]).float().mean()) > 0.97


# -- damage


@pytest.mark.parametrize("fault", damage.FAULTS)
def test_faults_change_what_they_say(written: Write, tmp_path: Path, fault: str) -> None:
    good = written("drafter-fp8_pb_wo" if fault in damage.OF_DRAFTER else "mixed")
    folder = tmp_path / "broken"
    shutil.copytree(good, folder)
    damage.FAULTS[fault](folder)
    assert digest(folder) != digest(good)
    if fault in ("missing shard", "half-written file"):
        with pytest.raises(Exception, match=r"No such file|not fully covered"):
            load_tensors(folder)
        return
    before, after = load_tensors(good), load_tensors(folder)
    lost = before.keys() - after.keys()
    assert after.keys() <= before.keys()
    assert bool(lost) == (fault.startswith("missing") or fault.startswith("drafter"))
    differing = [name for name, tensor in after.items() if not same(tensor, before[name])]
    assert len(differing) == {"swapped scales": 2}.get(fault, 0 if lost else 1)
