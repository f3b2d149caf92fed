"""Families of transformers with small configurations, and the rules of `apex.fuse` that each one gets.

These are Liger-Kernel's families and some more. docs/fuse.md has the same table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

NORM, MLP, ROPE, HEAD, MASK, ADD = "norms", "MLPs", "rotation", "head", "no mask", "residual"
# The beginnings of rules' names, and their kinds.
KINDS = {
    "RMS norm": NORM,
    "layer norm": NORM,
    "gated MLP": MLP,
    "dense + activation": MLP,
    "experts of a mixture": MLP,
    "rotary": ROPE,
    "linear layer + cross-entropy": HEAD,
    "causal attention": MASK,
    "residual + norm": ADD,
}
ALL = frozenset({NORM, MLP, ROPE, HEAD, MASK, ADD})

_TEXT: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_EXPERTS: dict[str, Any] = dict(
    num_experts=4,
    num_local_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    n_routed_experts=4,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    decoder_sparse_step=1,
    moe_topk=2,
)
_LATENT = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, num_key_value_heads=4
)
_FULL: dict[str, Any] = dict(layer_types=["full_attention"] * 2, head_dim=16)  # no linear attention
_VISION: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    depth=1,
    num_heads=4,
    num_attention_heads=4,
    patch_size=4,
    image_size=16,
    embed_dim=32,
    out_hidden_size=32,
    in_channels=3,
    spatial_merge_size=2,
    projection_dim=32,
    attention_heads=4,
    vision_output_dim=64,
    num_global_layers=1,
    max_num_tiles=1,
    intermediate_layers_indices=[0],
    supported_aspect_ratios=[[1, 1]],
    deepstack_visual_indexes=[0],
    num_position_embeddings=16,
)
_SECTIONS: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
    "rope_scaling": {"type": "default", "mrope_section": [1, 1, 2]},
}


class Family(NamedTuple):
    """A model class, its configuration, and the kinds of rules that it gets; `why` others are not used."""

    model: str
    config: str
    options: dict[str, Any]
    rules: frozenset[str] = ALL
    why: str = ""


def _text(prefix: str, rules: frozenset[str] = ALL, why: str = "", config: str = "", **options: Any) -> Family:
    return Family(f"{prefix}ForCausalLM", config or f"{prefix}Config", {**_TEXT, **options}, rules, why)


def _images(
    prefix: str, rules: frozenset[str] = ALL, why: str = "", vision: dict[str, Any] | None = None, **options: Any
) -> Family:
    tokens = dict(image_token_id=90, image_token_index=90, video_token_id=91, vision_start_token_id=92)
    settings = {"text_config": {**_TEXT, **options}, "vision_config": {**_VISION, **(vision or {})}, **tokens}
    settings |= dict(vision_end_token_id=93, pad_token_id=0, vocab_size=97, projection_dim=32, hidden_size=32)
    return Family(f"{prefix}ForConditionalGeneration", f"{prefix}Config", settings, rules, why)


_NO_MLP, _EXPERTS_ALONE = ALL - {MLP}, "its experts are batched"

FAMILIES: dict[str, Family] = {
    "llama": _text("Llama"),
    "mistral": _text("Mistral"),
    "ministral": _text("Ministral"),
    "qwen2": _text("Qwen2"),
    "qwen3": _text("Qwen3"),
    "gemma": _text("Gemma"),
    "gemma2": _text("Gemma2", ALL - {MASK}, "its attention is written in Python"),
    "gemma3_text": _text("Gemma3", config="Gemma3TextConfig"),
    "phi3": _text("Phi3"),
    "olmo2": _text("Olmo2"),
    "olmo3": _text("Olmo3"),
    "smollm3": _text("SmolLM3"),
    "exaone4": _text("Exaone4"),
    "hunyuan_v1_dense": _text("HunYuanDenseV1"),
    "hunyuan_v1_moe": _text("HunYuanMoEV1", **_EXPERTS),
    "granite": _text("Granite", logits_scaling=8.0),
    "cohere": _text("Cohere", ALL - {ADD}, "both branches start from one norm"),
    "nemotron": _text("Nemotron", ALL - {ADD}, "its norms multiply by 1 + weight"),
    "glm4": _text("Glm4"),
    "stablelm": _text("StableLm"),
    "deepseek_v2": _text("DeepseekV2", **_EXPERTS, **_LATENT),
    "deepseek_v3": _text("DeepseekV3", **_EXPERTS, **_LATENT),
    "deepseek_v4": _text(
        "DeepseekV4", frozenset({NORM, HEAD}), "latent attention and clamped MLPs", **_EXPERTS, **_LATENT
    ),
    "mixtral": _text("Mixtral", **_EXPERTS),
    "qwen3_moe": _text("Qwen3Moe", **_EXPERTS),
    "gpt_oss": _text("GptOss", ALL - {MASK}, "its attention has sinks", **_EXPERTS),
    "qwen3_next": _text("Qwen3Next", **{**_EXPERTS, **_FULL}),
    "qwen3_5": _text("Qwen3_5", config="Qwen3_5TextConfig", **_FULL),
    "qwen3_5_moe": _images("Qwen3_5Moe", **{**_EXPERTS, **_FULL}),
    "falcon_h1": _text(
        "FalconH1",
        ALL - {MLP, ADD},
        "its MLP and its branches have factors",
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
    ),
    "llama4_text": _text(
        "Llama4",
        _NO_MLP,
        _EXPERTS_ALONE,
        "Llama4TextConfig",
        intermediate_size_mlp=48,
        **_EXPERTS,
    ),
    "llama4": _images("Llama4", intermediate_size_mlp=48, **_EXPERTS),
    "gemma4_text": _text("Gemma4", ALL - {ADD}, "layers share keys", "Gemma4TextConfig"),
    "llava": _images("Llava"),
    "pixtral": _images("Llava", vision={"model_type": "pixtral"}),
    "qwen2_vl": _images("Qwen2VL", **_SECTIONS),
    "qwen2_5_vl": _images("Qwen2_5_VL", **_SECTIONS),
    "qwen3_vl": _images("Qwen3VL", **_SECTIONS),
    "qwen3_vl_moe": _images("Qwen3VLMoe", **_SECTIONS, **_EXPERTS),
    "internvl": _images("InternVL"),
    "mllama": _images("Mllama", cross_attention_layers=[1]),
    "paligemma": _images("PaliGemma"),
    "smolvlm": _images("SmolVLM"),
    "glm4v": _images("Glm4v", **_SECTIONS),
    "glm4v_moe": _images("Glm4vMoe", **{**_SECTIONS, **_EXPERTS, "head_dim": 16}),
    "gemma3": _images("Gemma3"),
    "gemma4": _images("Gemma4", vision={"head_dim": 8}),
    "muse_glimmer": _images("MuseGlimmer"),
}


_PAIR = dict(encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, dropout=0.0)
_PAIR |= dict(encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, vocab_size=97, d_model=32)
_PAIR |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2)
_SPEECH = _PAIR | dict(num_mel_bins=8, max_source_positions=16, max_target_positions=16)
_NO_DROPOUT = _TEXT | dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, hidden_dropout=0.0)
_MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, attn_layer_indices=[1])

# Models whose head has another name, is wrapped, or is called with masks: class, configuration.
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "WhisperForConditionalGeneration": ("WhisperConfig", _SPEECH),
    "WhisperForCausalLM": ("WhisperConfig", _SPEECH),
    "MarianMTModel": ("MarianConfig", _PAIR),
    "TrOCRForCausalLM": ("TrOCRConfig", _PAIR),
    "NllbMoeForConditionalGeneration": ("NllbMoeConfig", {**_PAIR, "num_experts": 4}),
    "BioGptForCausalLM": ("BioGptConfig", _NO_DROPOUT),
    "ElectraForCausalLM": ("ElectraConfig", {**_NO_DROPOUT, "is_decoder": True, "embedding_size": 32}),
    "GPTNeoXJapaneseForCausalLM": ("GPTNeoXJapaneseConfig", _NO_DROPOUT),
    "BambaForCausalLM": ("BambaConfig", {**_TEXT, **_MAMBA}),
    "JetMoeForCausalLM": ("JetMoeConfig", {**_TEXT, "num_local_experts": 4, "kv_channels": 8}),
    "T5GemmaForConditionalGeneration": ("T5GemmaConfig", {"encoder": _NO_DROPOUT, "decoder": _NO_DROPOUT}),
    "Qwen2AudioForConditionalGeneration": (
        "Qwen2AudioConfig",
        {"audio_config": _SPEECH, "text_config": _TEXT, "audio_token_index": 90},
    ),
}
