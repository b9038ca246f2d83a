"""Configs: old and new spellings of five families, read by type; whatever would change the maths is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cake_infer.errors import ModelNotFound, OptionError, UnsupportedModel
from cake_infer.models.config import ModelConfig, read_config, with_rope_scaling

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
CLASS_NAMES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
}


def config(**keys: Any) -> ModelConfig:
    """A small llama config (or `model_type`) with keys replaced, or left out where the value is `...`."""
    values = {**LLAMA, **keys}
    values["architectures"] = [CLASS_NAMES.get(values["model_type"], "LlamaForCausalLM")]
    values |= {key: value for key, value in keys.items() if key == "architectures"}
    return ModelConfig.from_dict({key: value for key, value in values.items() if value is not ...})


def test_an_old_llama_config_without_kv_heads_and_theta() -> None:
    # As LLaMA 1 was saved: neither num_key_value_heads nor rope_theta nor max_position_embeddings.
    old = config(max_position_embeddings=..., max_sequence_length=2048, pad_token_id=-1, torch_dtype="float16")
    assert old.num_kv_heads == old.num_heads == 4
    assert old.head_dim == 8
    assert old.rope.theta == 10000.0
    assert old.rope.kind == "default"
    assert old.max_position_embeddings == 2048
    assert old.pad_token_id is None
    assert old.dtype == "float16"
    assert old.sliding_windows == (None,) * 4
    flags = (old.attention_bias, old.output_bias, old.mlp_bias, old.qk_norm, old.tie_word_embeddings)
    assert not any(flags)
    assert (old.norm_offset, old.embedding_scale, old.hidden_act) == (0.0, 1.0, "silu")
    assert (old.bos_token_id, old.eos_token_ids) == (1, (2,))


def test_a_new_config_keeps_theta_inside_rope_parameters() -> None:
    new = config(
        dtype="bfloat16", torch_dtype="float32", rope_parameters={"rope_theta": 100000, "rope_type": "default"}
    )
    assert new.rope.theta == 100000.0
    assert new.dtype == "bfloat16"


def test_theta_inside_wins_over_theta_outside() -> None:
    assert config(rope_theta=1e4, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}).rope.theta == 5e5
    both = config(
        rope_parameters={"rope_theta": 7.0, "rope_type": "default"}, rope_scaling={"type": "linear", "factor": 2}
    )
    assert (both.rope.theta, both.rope.kind) == (7.0, "linear")


def test_the_family_may_be_told_by_the_architecture_alone() -> None:
    assert config(model_type=..., architectures=["Qwen3ForCausalLM"]).model_type == "qwen3"
    with pytest.raises(UnsupportedModel, match="model_type is missing"):
        config(model_type=..., architectures=...)


def test_qwen2_has_biases_without_a_key() -> None:
    for keys in ({}, {"attention_bias": False}):
        qwen = config(model_type="qwen2", **keys)
        assert qwen.attention_bias
        assert not qwen.output_bias
    assert qwen.eos_token_ids == ()
    assert qwen.bos_token_id is None


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_attention_bias_is_read_for_all_four_projections(family: str) -> None:
    assert config(model_type=family, attention_bias=True).attention_bias
    assert config(model_type=family, attention_bias=True).output_bias
    assert not config(model_type=family).attention_bias


def test_qwen3_norms_queries_and_keys() -> None:
    qwen = config(model_type="qwen3", head_dim=16)
    assert qwen.qk_norm
    assert qwen.head_dim == 16
    assert config(model_type="qwen3").head_dim == 128  # as transformers fills it in


@pytest.mark.parametrize(
    "act",
    [
        {"hidden_act": "gelu"},  # what Gemma's files say and do not mean
        {"hidden_act": "gelu", "hidden_activation": None},
        {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"},
        {"hidden_act": "gelu_pytorch_tanh"},
        {},
    ],
)
def test_gemma_is_scaled_offset_tied_and_tanh_gelu(act: dict[str, Any]) -> None:
    gemma = config(model_type="gemma", hidden_size=64, **act)
    assert gemma.hidden_act == "gelu_tanh"
    assert gemma.norm_offset == 1.0
    assert gemma.embedding_scale == 8.0
    assert gemma.tie_word_embeddings
    assert gemma.head_dim == 256
    assert (gemma.bos_token_id, gemma.eos_token_ids, gemma.pad_token_id) == (2, (1,), 0)


def test_other_families_take_gelu_at_its_word() -> None:
    assert config(hidden_act="gelu").hidden_act == "gelu"
    assert config(hidden_act="gelu_pytorch_tanh").hidden_act == "gelu_tanh"


def test_head_dim_is_read_and_derived_where_missing_or_null() -> None:
    assert config(head_dim=16).head_dim == 16
    assert config(head_dim=...).head_dim == 8
    assert config(head_dim=None).head_dim == 8
    assert config(hidden_size=30, head_dim=16).head_dim == 16
    with pytest.raises(UnsupportedModel, match="hidden_size 30"):
        config(hidden_size=30)


class TestSlidingWindow:
    def test_mistral_slides_in_every_layer_unless_null(self) -> None:
        assert config(model_type="mistral", sliding_window=8).sliding_windows == (8,) * 4
        assert config(model_type="mistral", sliding_window=None).sliding_windows == (None,) * 4
        assert config(model_type="mistral").sliding_windows == (4096,) * 4  # as transformers fills it in

    def test_mistral_slides_where_layer_types_says(self) -> None:
        types = ["full_attention", "sliding_attention"] * 2
        layered = config(model_type="mistral", sliding_window=8, layer_types=types)
        assert layered.sliding_windows == (None, 8, None, 8)

    @pytest.mark.parametrize("family", ["qwen2", "qwen3"])
    def test_qwen_slides_from_max_window_layers_on(self, family: str) -> None:
        layered = config(model_type=family, use_sliding_window=True, sliding_window=8, max_window_layers=2)
        assert layered.sliding_windows == (None, None, 8, 8)
        types = ["full_attention"] * 2 + ["sliding_attention"] * 2
        same = config(
            model_type=family, use_sliding_window=True, sliding_window=8, max_window_layers=1, layer_types=types
        )
        assert same.sliding_windows == layered.sliding_windows

    @pytest.mark.parametrize("family", ["qwen2", "qwen3"])
    def test_qwen_does_not_slide_unless_told_to(self, family: str) -> None:
        for keys in ({}, {"use_sliding_window": False}):
            plain = config(model_type=family, sliding_window=8, max_window_layers=0, **keys)
            assert plain.sliding_windows == (None,) * 4
        default = config(model_type=family, use_sliding_window=True, sliding_window=8)  # max_window_layers is 28
        assert default.sliding_windows == (None,) * 4
        assert config(model_type=family, use_sliding_window=True, sliding_window=None).sliding_windows == (None,) * 4

    @pytest.mark.parametrize(
        ("keys", "named"),
        [
            ({"model_type": "qwen2", "layer_types": ["full_attention"] * 3}, "layer_types"),
            ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
            (
                {"model_type": "qwen2", "use_sliding_window": False, "layer_types": ["sliding_attention"] * 4},
                "use_sliding_window",
            ),
            (
                {"model_type": "mistral", "sliding_window": None, "layer_types": ["sliding_attention"] * 4},
                "sliding_window",
            ),
            ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
            ({"model_type": "llama", "sliding_window": 8}, "sliding_window"),
            ({"model_type": "llama", "layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ],
    )
    def test_contradictions_are_refused_by_name(self, keys: dict[str, Any], named: str) -> None:
        with pytest.raises(UnsupportedModel, match=named):
            config(**keys)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": 3}, "model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "relu"}, "relu"),
        ({"hidden_activation": "gelu"}, "hidden_activation"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"attention_multiplier": 0.5}, "attention_multiplier"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "ntk-magic", "factor": 2.0}}, "ntk-magic"),
        ({"rope_scaling": {"rope_type": "mrope", "mrope_section": [1, 2]}}, "mrope"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}}, "alpha"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}}, "original_max"),
        (
            {
                "original_max_position_embeddings": 32,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4},
            },
            "short_factor",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        config(**{"architectures": ["LlamaForCausalLM"], **keys})


def test_neutral_values_of_foreign_keys_are_fine() -> None:
    assert (
        config(
            quantization_config=None,
            attn_logit_softcapping=None,
            rope_interleaved=False,
            partial_rotary_factor=1.0,
            num_local_experts=0,
            no_rope_layers=[],
            rope_scaling=None,
        )
        == config()
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "32"),
        ("hidden_size", 32.0),
        ("hidden_size", True),
        ("hidden_size", None),
        ("hidden_size", 0),
        ("num_hidden_layers", -1),
        ("num_key_value_heads", False),
        ("vocab_size", [320]),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", "10000"),
        ("rope_theta", True),
        ("rope_theta", 0),
        ("tie_word_embeddings", "false"),
        ("tie_word_embeddings", 0),
        ("attention_bias", 1),
        ("mlp_bias", "no"),
        ("hidden_act", 3),
        ("eos_token_id", "2"),
        ("eos_token_id", [2, "3"]),
        ("eos_token_id", True),
        ("bos_token_id", 1.0),
        ("rope_scaling", "yarn"),
        ("architectures", "LlamaForCausalLM"),
        ("dtype", 16),
        ("max_position_embeddings", "4k"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_key_and_value(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel) as error:
        config(**{key: value})
    assert key in str(error.value)
    assert repr(value) in str(error.value) or value is None
    assert "\n" not in str(error.value)


def test_end_tokens_of_both_files_are_used(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": [5, 6, 5]}))
    assert read_config(tmp_path).eos_token_ids == (5, 6)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 9], "temperature": 0.6}))
    assert read_config(tmp_path).eos_token_ids == (5, 6, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert read_config(tmp_path).eos_token_ids == (5, 6, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(UnsupportedModel, match=r"generation_config\.json.*eos_token_id"):
        read_config(tmp_path)


def test_null_tokens_are_none_and_missing_ones_the_family_default() -> None:
    assert config(eos_token_id=None).eos_token_ids == ()
    assert config(bos_token_id=None).bos_token_id is None
    assert config(model_type="gemma", pad_token_id=None).pad_token_id is None
    assert config(bos_token_id=0).bos_token_id == 0


def test_a_folder_without_a_readable_config_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=str(tmp_path)):
        read_config(tmp_path)
    for content, reason in [
        (b"{", "JSON"),
        (b"[1]", "object"),
        (b"\xff\xfe{", "JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs"),
    ]:
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(UnsupportedModel, match=reason) as error:
            read_config(tmp_path)
        assert str(tmp_path / "config.json") in str(error.value)


class TestContext:
    """The context is what a scaled rope reaches, and plain ropes end where the config says."""

    @pytest.mark.parametrize(
        ("rope_scaling", "context"),
        [
            (None, 64),
            ({"type": "linear", "factor": 2.0}, 64),
            ({"type": "dynamic", "factor": 2.0}, 128),
            ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
            ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}, 64),
        ],
    )
    def test_context_of_a_config(self, rope_scaling: dict[str, Any] | None, context: int) -> None:
        assert config(rope_scaling=rope_scaling).max_position_embeddings == context

    @pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
    def test_a_factor_given_by_hand_multiplies_the_context(self, kind: str) -> None:
        scaled = with_rope_scaling(config(), f"{kind}:2.5")
        assert scaled.max_position_embeddings == 160
        assert (scaled.rope.kind, scaled.rope.factor) == (kind, 2.5)
        by_config = config(
            max_position_embeddings=160 if kind == "linear" else 64,
            rope_scaling={"type": kind, "factor": 2.5, "original_max_position_embeddings": 64},
        )
        assert scaled.rope == by_config.rope

    def test_the_factor_of_a_model_that_has_the_kind_may_be_changed(self) -> None:
        yarn = config(rope_scaling={"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32})
        scaled = with_rope_scaling(yarn, "yarn:8")
        assert scaled.max_position_embeddings == 256
        assert scaled.rope.original_max_position_embeddings == 32
        dynamic = config(rope_scaling={"type": "dynamic", "factor": 2.0})
        assert with_rope_scaling(dynamic, "dynamic:3").max_position_embeddings == 192

    @pytest.mark.parametrize(
        ("scaling", "named"),
        [
            ("llama3:8", "llama3"),
            ("longrope:4", "longrope"),
            ("default:1", "default"),
            ("ntk:2", "ntk"),
            ("yarn", "yarn"),
            ("yarn:", "KIND:FACTOR"),
            ("yarn:0.5", "a number between 1 and 1,000,000"),
            ("yarn:inf", "a number between 1 and 1,000,000"),
            ("yarn:nan", "a number between 1 and 1,000,000"),
            ("yarn:four", "KIND:FACTOR"),
            ("", "unknown"),
        ],
    )
    def test_what_a_factor_alone_cannot_say_is_refused_by_name(self, scaling: str, named: str) -> None:
        with pytest.raises(OptionError, match=named):
            with_rope_scaling(config(), scaling)

    def test_scaling_is_not_stacked_on_another_kind(self) -> None:
        for rope_scaling in (
            {"type": "linear", "factor": 4.0},
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        ):
            with pytest.raises(OptionError, match="cannot be put on top"):
                with_rope_scaling(config(rope_scaling=rope_scaling), "yarn:2")
        with pytest.raises(OptionError, match="cannot be put on top"):
            with_rope_scaling(config(rope_scaling={"type": "linear", "factor": 4.0}), "linear:2")


def test_reading_a_config_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import sys, cake_infer.models.config, cake_infer.models.headers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestAbsurdNumbers:
    """What no model has is refused by key and range, before anything is made for each layer, head or token."""

    WRONG = (10**9 * 10**9, 10**400, -(10**400), -1, 0, 1e30, 0.5, 64.0, float("nan"), float("inf"), True, False, "64")
    SIZES = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "sliding_window",
    )

    @pytest.mark.parametrize("key", SIZES)
    def test_a_size_is_a_whole_number_within_a_range(self, key: str) -> None:
        for value in (*self.WRONG, [64], {"a": 1}, 10**12):
            with pytest.raises(UnsupportedModel, match=rf"{key} is .*must be a whole number between 1 and ") as told:
                config(**{"model_type": "mistral", key: value})
            assert len(str(told.value)) < 200

    def test_a_thousand_million_layers_are_refused_at_once(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 10**9}))
        with pytest.raises(UnsupportedModel, match=r"num_hidden_layers is 1,000,000,000; .* between 1 and 4,096"):
            read_config(tmp_path)
        assert config(num_hidden_layers=4096).num_layers == 4096

    @pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
    def test_a_number_is_finite_and_positive(self, key: str) -> None:
        for value in (10**400, -1, 0, 1e300, float("nan"), float("inf"), True, "1", [1.0]):
            with pytest.raises(UnsupportedModel, match=rf"{key} is .*must be a number above 0 and at most 1e\+30"):
                config(**{key: value})

    @pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
    def test_a_token_id_is_an_int32(self, key: str) -> None:
        for value in (10**400, 2**31, -(10**400), 1.5, True, "1"):
            with pytest.raises(UnsupportedModel, match=rf"{key} is .*between -2,147,483,648 and 2,147,483,647"):
                config(**{key: value})

    @pytest.mark.parametrize("factor", [10**400, 0, 0.5, 1e7, float("inf"), True, "2"])
    def test_a_rope_factor_ends_where_no_memory_holds_the_context(self, factor: Any) -> None:
        for kind in ("linear", "dynamic", "yarn"):
            scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": 64}
            with pytest.raises(UnsupportedModel, match="factor is"):
                config(rope_scaling=scaling)

    def test_a_context_is_no_longer_than_positions_can_be(self) -> None:
        most = 2**31 - 1
        for kind in ("dynamic", "yarn"):
            scaling = {"rope_type": kind, "factor": 1e6, "original_max_position_embeddings": most}
            assert config(rope_scaling=scaling, max_position_embeddings=most).max_position_embeddings == most
        stretched = with_rope_scaling(config(max_position_embeddings=most), "linear:1000000")
        assert stretched.max_position_embeddings == most

    @pytest.mark.parametrize("text", ['{"num_hidden_layers": ' + "9" * 5000 + "}", '{"vocab_size": NaN}', "[1e400]"])
    def test_a_file_with_such_a_number_is_one_line(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UnsupportedModel) as told:
            read_config(tmp_path)
        assert "\n" not in str(told.value)
        assert len(str(told.value)) < 400
