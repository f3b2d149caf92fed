"""Denoisers and autoencoders of diffusers, tiny and with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from torch import Tensor

from .cases import Case, Entry, ids, rand, uniform


def distance(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the mean squared distance of what a model returns first from a wave."""
    output = model(**inputs)
    while not isinstance(output, Tensor):
        output = output[0]
    wave = torch.arange(output.numel(), device=output.device).sin().view(output.shape)
    return F.mse_loss(output.float(), wave)


def autoencoded(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the loss of an autoencoder whose posterior is sampled."""
    image = inputs["sample"]
    posterior = model.encode(image).latent_dist
    decoded = model.decode(posterior.sample()).sample
    return F.mse_loss(decoded, image) + 1e-3 * posterior.kl().mean()


def times(count: int = 2) -> Tensor:
    return ids(1000, count)


def flow_times(count: int = 2) -> Tensor:
    """Return times from 0 to 1000 as floats, as of a flow."""
    return uniform(count) * 1000


def places(height: int, width: int, axes: int = 3) -> Tensor:
    """Return the positions of a picture's patches."""
    rows, columns = torch.meshgrid(torch.arange(float(height)), torch.arange(float(width)), indexing="ij")
    zeros = torch.zeros_like(rows)
    return torch.stack([zeros, rows, columns, *[zeros] * (axes - 3)], dim=-1).flatten(0, 1)


_TWO = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
_CROSS = {
    **_TWO,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
}
_HEADS = {"num_attention_heads": 4, "attention_head_dim": 8}
_ENCODER = {
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
    "block_out_channels": (16, 32),
    "norm_num_groups": 8,
}


def latents() -> dict[str, Any]:
    return {"sample": rand(2, 4, 16, 16), "timestep": times(), "encoder_hidden_states": rand(2, 6, 32)}


def pictures() -> dict[str, Any]:
    return {"sample": rand(2, 3, 32, 32)}


def hidden(channels: int = 4, side: int = 8, **more: Any) -> dict[str, Any]:
    return {"hidden_states": rand(2, channels, side, side), **more}


def clip(channels: int = 4, frames: int = 4, side: int = 8, **more: Any) -> dict[str, Any]:
    return {"hidden_states": rand(2, channels, frames, side, side), **more}


# By class: settings and inputs.
DENOISERS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "UNet1DModel": (
        {"sample_size": 64, "in_channels": 14, "out_channels": 14, "time_embedding_type": "positional",
         "use_timestep_embedding": True, "out_block_type": "OutConv1DBlock", "flip_sin_to_cos": False, "freq_shift": 1,
         "down_block_types": ("DownResnetBlock1D", "DownResnetBlock1D"), "up_block_types": ("UpResnetBlock1D",),
         "mid_block_type": "MidResTemporalBlock1D", "act_fn": "swish", "block_out_channels": (32, 64)},
        lambda: {"sample": rand(2, 14, 16), "timestep": times()},
    ),
    "UNet2DModel": (
        {**_TWO, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
         "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "sample_size": 16},
        lambda: {"sample": rand(2, 3, 16, 16), "timestep": times()},
    ),
    "UNet2DConditionModel": ({**_CROSS, "sample_size": 16}, latents),
    "UNet3DConditionModel": (
        {**_CROSS, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
         "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"), "sample_size": 16},
        lambda: {**latents(), "sample": rand(2, 4, 3, 16, 16)},
    ),
    "UNetSpatioTemporalConditionModel": (
        {"down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"), "num_attention_heads": 4,
         "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), "block_out_channels": (32, 64),
         "layers_per_block": 1, "cross_attention_dim": 32, "addition_time_embed_dim": 32, "sample_size": 16,
         "projection_class_embeddings_input_dim": 96},
        lambda: {"sample": rand(2, 2, 8, 16, 16), "timestep": times(), "encoder_hidden_states": rand(2, 1, 32),
                 "added_time_ids": torch.tensor([[6.0, 127.0, 0.02]] * 2)},
    ),
    "Kandinsky3UNet": (
        {"time_embedding_dim": 32, "groups": 4, "attention_head_dim": 8, "layers_per_block": 2,
         "block_out_channels": (16, 32), "cross_attention_dim": 32, "encoder_hid_dim": 32},
        lambda: {**latents(), "encoder_attention_mask": torch.ones(2, 6)},
    ),
    "StableCascadeUNet": (
        {"in_channels": 4, "out_channels": 4, "timestep_ratio_embedding_dim": 16, "conditioning_dim": 64,
         "block_out_channels": (32, 64), "num_attention_heads": (2, 4), "down_num_layers_per_block": (1, 1),
         "up_num_layers_per_block": (1, 1), "clip_text_pooled_in_channels": 32, "dropout": (0.0, 0.0)},
        lambda: {"sample": rand(2, 4, 8, 8), "timestep_ratio": uniform(2), "clip_text_pooled": rand(2, 1, 32)},
    ),
    "UVit2DModel": (
        {"hidden_size": 32, "cond_embed_dim": 32, "micro_cond_encode_dim": 32, "micro_cond_embed_dim": 5 * 32,
         "encoder_hidden_size": 32, "vocab_size": 128, "codebook_size": 128, "in_channels": 32,
         "block_out_channels": 32, "num_res_blocks": 1, "block_num_heads": 2, "num_hidden_layers": 2,
         "num_attention_heads": 4, "intermediate_size": 64, "sample_size": 8},
        lambda: {"input_ids": ids(128, 2, 8, 8), "encoder_hidden_states": rand(2, 6, 32),
                 "pooled_text_emb": rand(2, 32), "micro_conds": uniform(2, 5) * 512},
    ),
    "PriorTransformer": (
        {**_HEADS, "num_layers": 2, "embedding_dim": 32, "num_embeddings": 6},
        lambda: {"hidden_states": rand(2, 32), "timestep": times(), "proj_embedding": rand(2, 32),
                 "encoder_hidden_states": rand(2, 6, 32)},
    ),
    "DiTTransformer2DModel": (
        {**_HEADS, "num_layers": 2, "sample_size": 8},
        lambda: hidden(timestep=times(), class_labels=ids(1000, 2)),
    ),
    "PixArtTransformer2DModel": (
        {**_HEADS, "num_layers": 2, "sample_size": 8, "cross_attention_dim": 32, "caption_channels": 32,
         "use_additional_conditions": False},
        lambda: hidden(timestep=times(), encoder_hidden_states=rand(2, 6, 32)),
    ),
    "Transformer2DModel": (
        {**_HEADS, "in_channels": 32, "norm_num_groups": 8, "cross_attention_dim": 32},
        lambda: hidden(32, encoder_hidden_states=rand(2, 6, 32)),
    ),
    "SD3Transformer2DModel": (
        {**_HEADS, "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 32,
         "caption_projection_dim": 32, "pooled_projection_dim": 64, "pos_embed_max_size": 16, "qk_norm": "rms_norm"},
        lambda: hidden(timestep=flow_times(), encoder_hidden_states=rand(2, 6, 32), pooled_projections=rand(2, 64)),
    ),
    "FluxTransformer2DModel": (
        {"in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
         "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32,
         "axes_dims_rope": (4, 4, 8)},
        lambda: {"hidden_states": rand(2, 16, 16), "encoder_hidden_states": rand(2, 6, 32),
                 "pooled_projections": rand(2, 32), "timestep": uniform(2), "img_ids": places(4, 4),
                 "txt_ids": torch.zeros(6, 3)},
    ),
    "Flux2Transformer2DModel": (
        {"in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
         "num_attention_heads": 2, "joint_attention_dim": 32, "timestep_guidance_channels": 32,
         "axes_dims_rope": (4, 4, 4, 4)},
        lambda: {"hidden_states": rand(2, 16, 16), "encoder_hidden_states": rand(2, 6, 32), "timestep": uniform(2),
                 "img_ids": places(4, 4, 4)[None].repeat(2, 1, 1), "txt_ids": torch.zeros(2, 6, 4),
                 "guidance": uniform(2)},
    ),
    "ChromaTransformer2DModel": (
        {"in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
         "num_attention_heads": 2, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8),
         "approximator_hidden_dim": 32, "approximator_layers": 1, "approximator_num_channels": 16},
        lambda: {"hidden_states": rand(2, 16, 16), "encoder_hidden_states": rand(2, 6, 32), "timestep": uniform(2),
                 "img_ids": places(4, 4), "txt_ids": torch.zeros(6, 3)},
    ),
    "AuraFlowTransformer2DModel": (
        {**_HEADS, "sample_size": 8, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "joint_attention_dim": 32,
         "caption_projection_dim": 32, "pos_embed_max_size": 64},
        lambda: hidden(timestep=uniform(2), encoder_hidden_states=rand(2, 6, 32)),
    ),
    "SanaTransformer2DModel": (
        {**_HEADS, "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 1,
         "num_cross_attention_heads": 4, "cross_attention_head_dim": 8, "cross_attention_dim": 32,
         "caption_channels": 32},
        lambda: hidden(timestep=flow_times(), encoder_hidden_states=rand(2, 6, 32)),
    ),
    "CogView3PlusTransformer2DModel": (
        {**_HEADS, "in_channels": 4, "num_layers": 2, "text_embed_dim": 32, "time_embed_dim": 32, "condition_dim": 16,
         "pos_embed_max_size": 16, "sample_size": 8},
        lambda: hidden(timestep=times(), encoder_hidden_states=rand(2, 6, 32),
                       original_size=torch.tensor([[64.0, 64.0]] * 2), target_size=torch.tensor([[64.0, 64.0]] * 2),
                       crop_coords=torch.tensor([[0.0, 0.0]] * 2)),
    ),
    "Lumina2Transformer2DModel": (
        {"sample_size": 8, "in_channels": 4, "hidden_size": 32, "num_layers": 2, "num_refiner_layers": 1,
         "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 8, "axes_dim_rope": (4, 2, 2),
         "axes_lens": (64, 64, 64), "cap_feat_dim": 32},
        lambda: hidden(timestep=uniform(2), encoder_hidden_states=rand(2, 6, 32),
                       encoder_attention_mask=torch.ones(2, 6, dtype=torch.bool)),
    ),
    "QwenImageTransformer2DModel": (
        {"in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
         "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)},
        lambda: {"hidden_states": rand(2, 16, 16), "encoder_hidden_states": rand(2, 6, 32), "timestep": uniform(2),
                 "encoder_hidden_states_mask": torch.ones(2, 6).long(), "img_shapes": [(1, 4, 4)] * 2},
    ),
    "CogVideoXTransformer3DModel": (
        {**_HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 16, "text_embed_dim": 32, "num_layers": 2,
         "sample_width": 8, "sample_height": 8, "sample_frames": 9, "max_text_seq_length": 6},
        lambda: {"hidden_states": rand(2, 3, 4, 8, 8), "encoder_hidden_states": rand(2, 6, 32), "timestep": times()},
    ),
    "LTXVideoTransformer3DModel": (
        {**_HEADS, "in_channels": 8, "out_channels": 8, "cross_attention_dim": 32, "num_layers": 2,
         "caption_channels": 32},
        lambda: {"hidden_states": rand(2, 32, 8), "encoder_hidden_states": rand(2, 6, 32), "timestep": flow_times(),
                 "encoder_attention_mask": torch.ones(2, 6).long(), "num_frames": 2, "height": 4, "width": 4},
    ),
    "WanTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "text_dim": 32,
         "freq_dim": 32, "ffn_dim": 64, "num_layers": 2, "rope_max_seq_len": 32},
        lambda: clip(timestep=flow_times(), encoder_hidden_states=rand(2, 6, 32)),
    ),
    "MochiTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "pooled_projection_dim": 32,
         "in_channels": 4, "text_embed_dim": 32, "time_embed_dim": 8, "max_sequence_length": 16},
        lambda: clip(frames=2, timestep=flow_times(), encoder_hidden_states=rand(2, 6, 32),
                     encoder_attention_mask=torch.ones(2, 6, dtype=torch.bool)),
    ),
    "AllegroTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "cross_attention_dim": 24,
         "sample_width": 8, "sample_height": 8, "sample_frames": 8, "caption_channels": 24},
        lambda: clip(frames=2, timestep=times(), encoder_hidden_states=rand(2, 6, 24),
                     encoder_attention_mask=torch.ones(2, 6), attention_mask=torch.ones(2, 2, 8, 8)),
    ),
    "LatteTransformer3DModel": (
        {**_HEADS, "in_channels": 4, "num_layers": 1, "cross_attention_dim": 32, "sample_size": 8, "patch_size": 2,
         "video_length": 4, "num_embeds_ada_norm": 1000, "norm_type": "ada_norm_single", "caption_channels": 32,
         "norm_elementwise_affine": False},
        lambda: clip(timestep=times(), encoder_hidden_states=rand(2, 6, 32)),
    ),
    "HunyuanVideoTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1,
         "num_single_layers": 1, "num_refiner_layers": 1, "text_embed_dim": 32, "pooled_projection_dim": 32,
         "rope_axes_dim": (4, 4, 8)},
        lambda: clip(frames=1, timestep=flow_times(), encoder_hidden_states=rand(2, 6, 32),
                     encoder_attention_mask=torch.ones(2, 6), pooled_projections=rand(2, 32),
                     guidance=uniform(2) * 6000),
    ),
    "StableAudioDiTModel": (
        {"sample_size": 16, "in_channels": 8, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4,
         "num_key_value_attention_heads": 2, "out_channels": 8, "cross_attention_dim": 32, "time_proj_dim": 16,
         "global_states_input_dim": 32, "cross_attention_input_dim": 32},
        lambda: {"hidden_states": rand(2, 8, 16), "timestep": uniform(2), "encoder_hidden_states": rand(2, 6, 32),
                 "global_hidden_states": rand(2, 1, 32)},
    ),
    "ControlNetModel": (
        {**{name: value for name, value in _CROSS.items() if name != "up_block_types"},
         "conditioning_embedding_out_channels": (16, 32)},
        lambda: {**latents(), "controlnet_cond": rand(2, 3, 32, 32)},
    ),
    "AutoencoderTiny": (
        {"encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16),
         "num_encoder_blocks": (1, 2), "num_decoder_blocks": (2, 1)},
        pictures,
    ),
    "VQModel": ({**_ENCODER, "num_vq_embeddings": 32}, pictures),
    "AutoencoderDC": (
        {"latent_channels": 4, "attention_head_dim": 4, "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
         "decoder_block_types": ("ResBlock", "EfficientViTBlock"), "encoder_block_out_channels": (16, 16),
         "decoder_block_out_channels": (16, 16), "encoder_qkv_multiscales": ((), (5,)),
         "decoder_qkv_multiscales": ((), (5,)), "encoder_layers_per_block": (1, 1),
         "decoder_layers_per_block": (1, 1), "decoder_act_fns": "silu"},
        pictures,
    ),
}  # fmt: skip

AUTOENCODERS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "AutoencoderKL": (_ENCODER, pictures),
    "AutoencoderOobleck": (
        {"encoder_hidden_size": 8, "decoder_channels": 8, "decoder_input_channels": 4, "downsampling_ratios": [2, 4],
         "channel_multiples": [1, 2]},
        lambda: {"sample": rand(2, 2, 64)},
    ),
    "AutoencoderKLWan": (
        {"base_dim": 8, "z_dim": 16, "dim_mult": [1, 1], "num_res_blocks": 1, "temperal_downsample": [True]},
        lambda: {"sample": rand(1, 3, 5, 16, 16)},
    ),
    "AutoencoderKLCogVideoX": (
        {"down_block_types": ("CogVideoXDownBlock3D",) * 2, "up_block_types": ("CogVideoXUpBlock3D",) * 2,
         "block_out_channels": (8, 8), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2},
        lambda: {"sample": rand(1, 3, 5, 16, 16)},
    ),
}  # fmt: skip


def entry(name: str, settings: dict[str, Any], inputs: Callable[[], dict[str, Any]], loss: Any) -> Entry:
    return Entry(name, "diffusers", lambda: Case(getattr(diffusers, name)(**settings), (inputs(),), loss))


ENTRIES = [
    *(entry(name, *each, distance) for name, each in DENOISERS.items()),
    *(entry(name, *each, autoencoded) for name, each in AUTOENCODERS.items()),
]
