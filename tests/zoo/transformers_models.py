"""Families of transformers, tiny and with random weights, made of their configurations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

from .cases import Case, Entry, ids, rand

VOCABULARY = 128
# Small values of whatever settings of these names a configuration has.
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim", "word_embed_proj_dim"), 32
    ),
    **dict.fromkeys(("d_embed", "encoder_hidden_size", "decoder_hidden_size", "projection_dim", "embed_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "n_head_layers", "decoder_num_hidden_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "decoder_num_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "d_inner", "n_inner", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("decoder_ffn_dim", "hidden_dim", "moe_intermediate_size", "decoder_intermediate_size"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_source_positions"), 64),
    **dict.fromkeys(("max_target_positions", "sliding_window", "seq_length", "context_length", "block_size"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "d_head"), 8),
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "rotary_dim": 4,
    "image_size": 32,
    "patch_size": 8,
    "use_cache": False,
}
ALWAYS = {"num_labels": 5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def configuration(family: str, **settings: Any) -> Any:
    """Return the tiny configuration of a family, with other settings."""
    return _tiny(type(transformers.AutoConfig.for_model(family)), settings)


def _tiny(config_class: Any, settings: dict[str, Any]) -> Any:
    defaults = {name: value.default for name, value in inspect.signature(config_class.__init__).parameters.items()}
    defaults |= {name: defaults.get(real) for name, real in config_class.attribute_map.items()}
    # A list has a number for each stage, in sizes that belong together.
    values = {k: v for k, v in TINY.items() if k in defaults and not isinstance(defaults[k], list | tuple)}
    for name, sub_class in getattr(config_class, "sub_configs", {}).items():
        if name not in settings and sub_class is not transformers.AutoConfig:
            values[name] = _tiny(sub_class, {})
    config = config_class(**{**values, **ALWAYS, **settings})
    _without_dropout(config)
    return config


def _without_dropout(config: Any) -> None:
    """Set all rates of dropout to zero; masks of other dtypes would differ."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            _without_dropout(value)
        elif isinstance(value, float) and ("drop" in name or name in ("mask_time_prob", "mask_feature_prob")):
            setattr(config, name, 0.0)


def tokens(*shape: int) -> Tensor:
    """Return tokens of the vocabulary that are not special."""
    return 5 + ids(VOCABULARY - 5, *shape)


def text(config: Any) -> dict[str, Any]:
    input_ids = tokens(2, 16)
    return {"input_ids": input_ids, "labels": input_ids.clone()}


def pair(config: Any) -> dict[str, Any]:
    return {"input_ids": tokens(2, 16), "labels": tokens(2, 8)}


def _side(config: Any) -> int:
    size = getattr(config, "image_size", 32)
    return size if isinstance(size, int) else 32


def image(config: Any) -> dict[str, Any]:
    side = _side(config)
    return {
        "pixel_values": rand(4, getattr(config, "num_channels", 3), side, side),
        "labels": ids(config.num_labels, 4),
    }


def masks(config: Any) -> dict[str, Any]:
    side = max(_side(config), 64)
    return {"pixel_values": rand(2, 3, side, side), "labels": ids(config.num_labels, 2, side, side)}


def wave(config: Any) -> dict[str, Any]:
    return {"input_values": rand(2, 4000), "labels": ids(config.num_labels, 2)}


def speech(config: Any) -> dict[str, Any]:
    return {"input_values": rand(2, 8000), "labels": 5 + ids(VOCABULARY - 5, 2, 4)}


def mel(config: Any) -> dict[str, Any]:
    if hasattr(config, "input_feat_per_channel"):  # Speech2Text: channels come last
        return {"input_features": rand(2, 128, config.input_feat_per_channel), "labels": tokens(2, 8)}
    return {"input_features": rand(2, config.num_mel_bins, 128), "labels": tokens(2, 8)}


def picture(config: Any) -> dict[str, Any]:
    return {"pixel_values": rand(2, 3, _side(config), _side(config))}


def video(config: Any) -> dict[str, Any]:
    frames = getattr(config, "num_frames", 4)
    return {"pixel_values": rand(2, frames, 3, _side(config), _side(config)), "labels": ids(config.num_labels, 2)}


def objects(config: Any) -> dict[str, Any]:
    side = 64
    labels = [{"class_labels": ids(config.num_labels, 2), "boxes": 0.3 + 0.3 * torch.rand(2, 4)} for _ in range(2)]
    return {"pixel_values": rand(2, 3, side, side), "labels": labels}


def question(config: Any) -> dict[str, Any]:
    return {"input_ids": tokens(2, 16), "start_positions": ids(16, 2), "end_positions": ids(16, 2)}


def sequence(config: Any) -> dict[str, Any]:
    return {"input_ids": tokens(4, 16), "labels": ids(config.num_labels, 4)}


def contrast(config: Any) -> dict[str, Any]:
    side = _side(getattr(config, "vision_config", config))
    return {"input_ids": tokens(4, 16), "pixel_values": rand(4, 3, side, side), "return_loss": True}


def illustrated(config: Any) -> dict[str, Any]:
    """Return a picture and text with as many image tokens as the picture has patches."""
    token = getattr(config, "image_token_id", None) or config.image_token_index
    side = _side(config.vision_config)
    patches = (side // config.vision_config.patch_size) ** 2
    input_ids = torch.cat([torch.full((2, patches), token), tokens(2, 12)], dim=1)
    labels = input_ids.masked_fill(input_ids == token, -100)
    return {"input_ids": input_ids, "pixel_values": rand(2, 3, side, side), "labels": labels}


def plain(config: Any) -> dict[str, Any]:
    return {"input_ids": tokens(2, 16)}


def spectrogram(config: Any) -> dict[str, Any]:
    return {"input_values": rand(2, config.max_length, config.num_mel_bins), "labels": ids(config.num_labels, 2)}


def speech_features(config: Any) -> dict[str, Any]:
    encoder = getattr(config, "encoder_config", config)
    width = getattr(encoder, "num_mel_bins", getattr(encoder, "feature_projection_input_dim", 160))
    return {"input_features": rand(2, 64, width), "attention_mask": torch.ones(2, 64).long(), "labels": tokens(2, 4)}


def spoken(config: Any) -> dict[str, Any]:
    return {"input_values": rand(2, 16000), "labels": tokens(2, 8)}


def series(config: Any) -> dict[str, Any]:
    past = rand(4, config.context_length, config.num_input_channels)
    return {"past_values": past, "target_values": rand(4, config.num_targets)}


def own_loss(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the loss that the model computes, or the mean square of what it returns first."""
    outputs = model(**inputs)
    loss = getattr(outputs, "loss", None)
    if loss is None:
        first = next(value for value in outputs.values() if isinstance(value, Tensor) and value.is_floating_point())
        return first.float().square().mean()
    return loss


# By task: the attribute of `modeling_auto` that names the classes of families, and the inputs.
TASKS: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", text),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", pair),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", text),
    "sequence": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", sequence),
    "question": ("MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES", question),
    "text": ("MODEL_MAPPING_NAMES", plain),
    "contrast": ("MODEL_MAPPING_NAMES", contrast),
    "image and text": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", illustrated),
    "image": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", image),
    "picture": ("MODEL_MAPPING_NAMES", picture),
    "semantic": ("MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES", masks),
    "depth": ("MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES", picture),
    "objects": ("MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES", objects),
    "video": ("MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES", video),
    "audio": ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", wave),
    "spectrogram": ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", spectrogram),
    "ctc": ("MODEL_FOR_CTC_MAPPING_NAMES", speech),
    "ctc of features": ("MODEL_FOR_CTC_MAPPING_NAMES", speech_features),
    "speech": ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", mel),
    "speech of waves": ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", spoken),
    "series": ("MODEL_FOR_TIME_SERIES_REGRESSION_MAPPING_NAMES", series),
}

# A family stands in one task, a few in several.
FAMILIES: dict[str, str] = {
    "causal": """
        afmoe apertus arcee aria_text bamba beam bert-generation biogpt bitnet bloom codegen cohere cohere2 cpmant ctrl
        cwm deepseek_v2 deepseek_v3 deepseek_v4 diffllama doge ernie4_5 ernie4_5_moe exaone4 falcon
        falcon_mamba flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neo
        gpt_neox gpt_neox_japanese gpt_oss gptj granite granitemoe granitemoehybrid granitemoeshared helium
        hunyuan_v1_dense hunyuan_v1_moe internlm3 jais2 jamba jetmoe lfm2 llama llama4_text longcat_flash
        mamba mamba2 megatron-bert minicpm3 minimax minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder
        mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt persimmon phi phi3 phimoe
        qwen2 qwen2_moe qwen3 qwen3_5_text qwen3_5_moe_text qwen3_moe qwen3_next recurrent_gemma reformer rwkv seed_oss
        smollm3 solar_open stablelm starcoder2 trocr vaultgemma xglm xlnet xlstm youtu zamba
    """,
    "seq2seq": """
        bart bigbird_pegasus blenderbot blenderbot-small led longt5 m2m_100 marian mbart mt5 mvp nllb-moe pegasus
        pegasus_x plbart prophetnet switch_transformers t5 t5gemma umt5
    """,
    "masked": """
        albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie esm eurobert
        flaubert fnet funnel ibert layoutlm longformer luke mobilebert modernbert mpnet mra nomic_bert nystromformer
        rembert roberta roberta-prelayernorm roc_bert roformer squeezebert tapas xlm xlm-roberta xlm-roberta-xl xmod
        yoso
    """,
    "sequence": "bert gpt2 llama mistral modernbert",
    "question": "bart bert deberta-v2 roberta",
    "text": "canine dpr markuplm splinter clip_text_model",
    "contrast": "altclip blip chinese_clip clip clipseg metaclip_2 siglip",
    "image and text": "llava paligemma",
    "image": """
        beit convnext convnextv2 data2vec-vision deit dinov2 dinov2_with_registers donut-swin efficientnet focalnet
        hiera ijepa levit mobilenet_v1 mobilenet_v2 mobilevit poolformer pvt pvt_v2 regnet resnet segformer swiftformer
        swin swinv2 vit vit_msn
    """,
    "picture": "dinov3_vit pixtral vit_mae vitdet",
    "semantic": "mobilenet_v2 segformer upernet",
    "depth": "glpn",
    "objects": "conditional_detr dab-detr deformable_detr detr table-transformer yolos",
    "video": "timesformer videomae vivit",
    "audio": "data2vec-audio sew sew-d unispeech-sat wavlm",
    "spectrogram": "audio-spectrogram-transformer",
    "ctc": "hubert unispeech wav2vec2 wav2vec2-conformer",
    "ctc of features": "wav2vec2-bert parakeet_ctc",
    "speech": "whisper speech_to_text",
    "speech of waves": "moonshine",
    "series": "patchtst patchtsmixer",
}

_STAGES = {"hidden_sizes": [16, 32, 40, 64], "depths": [1, 1, 1, 1]}
_WINDOWS = {"embed_dim": 16, "num_heads": [2, 2, 4, 4], "depths": [1, 1, 1, 1], "image_size": 64, "patch_size": 4}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16}
_ALL_HEADS = {"num_key_value_heads": 4}
_WAVES = {"conv_dim": (32,) * 7}


def _backbone(*stages: int) -> Any:
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]}
    return transformers.ResNetConfig(**sizes, out_features=[f"stage{stage}" for stage in stages])


def _detector(*stages: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"backbone_config": _backbone(*stages), "backbone": None, "use_timm_backbone": False}


def _upernet() -> dict[str, Any]:
    stages = [f"stage{stage}" for stage in (1, 2, 3, 4)]
    backbone = transformers.ConvNextConfig(hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 1, 1], out_features=stages)
    return {"backbone_config": backbone, "auxiliary_in_channels": 32}


# Settings beside those of `TINY`, by family; a function returns them where they have configurations inside.
SETTINGS: dict[str, dict[str, Any] | Callable[[], dict[str, Any]]] = {
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 32},
    "bamba": _MAMBA,
    "conditional_detr": _detector(4),
    "convnext": {**_STAGES, "image_size": 64, "patch_size": 4, "num_hidden_layers": 4},
    "convnextv2": {**_STAGES, "image_size": 64, "patch_size": 4, "num_hidden_layers": 4},
    "dab-detr": _detector(4),
    "data2vec-audio": _WAVES,
    "deepseek_v2": _ALL_HEADS,
    "deepseek_v3": _ALL_HEADS,
    "deformable_detr": _detector(2, 3, 4),
    "detr": _detector(4),
    "donut-swin": {**_WINDOWS, "window_size": 2},
    "efficientnet": {"hidden_dim": 1280, "width_coefficient": 1.0, "depth_coefficient": 0.2},
    "glm4_moe_lite": _ALL_HEADS,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": _MAMBA,
    "hiera": {"image_size": [32, 32], "embed_dim": 16, "patch_stride": [4, 4]},
    "hubert": _WAVES,
    "levit": {
        "image_size": 64,
        "patch_size": 16,
        "hidden_sizes": [32, 64, 64],
        "num_attention_heads": [2, 4, 4],
        "key_dim": [8, 8, 8],
        "depths": [1, 1, 1],
    },
    "llava": lambda: {
        "text_config": configuration("llama"),
        "vision_config": configuration("clip_vision_model"),
        "image_token_index": 3,
    },
    "longcat_flash": _ALL_HEADS,
    "luke": {"entity_vocab_size": 20},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1},
    "minicpm3": _ALL_HEADS,
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilevit": {"image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 32]},
    "paligemma": lambda: {"text_config": configuration("gemma"), "vision_config": configuration("siglip_vision_model")},
    "poolformer": _STAGES,
    "pvt": {**_STAGES, "sequence_reduction_ratios": [4, 2, 1, 1]},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, 4)},
    "regnet": {**_STAGES, "hidden_sizes": [16, 32, 32, 64], "embedding_size": 16, "groups_width": 16},
    "resnet": {**_STAGES, "embedding_size": 16},
    "roc_bert": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    "speech_to_text": {"conv_channels": 32},
    "swin": {**_WINDOWS, "window_size": 2},
    "swinv2": {**_WINDOWS, "window_size": 4},
    "table-transformer": _detector(4),
    "unispeech": _WAVES,
    "unispeech-sat": _WAVES,
    "upernet": _upernet,
    "wav2vec2": _WAVES,
    "wav2vec2-conformer": _WAVES,
    "wavlm": _WAVES,
    "whisper": {"num_mel_bins": 16},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "youtu": _ALL_HEADS,
    "zamba": {"num_hidden_layers": 8},
}


def make(family: str, task: str) -> Case:
    """Return a model of a family with the head and the inputs of a task."""
    mapping, inputs = TASKS[task]
    name = getattr(modeling_auto, mapping)[family]
    name = name[0] if isinstance(name, tuple | list) else name
    more = SETTINGS.get(family, {})
    settings = {**(more() if callable(more) else more), **({"num_labels": 2} if task == "question" else {})}
    model = getattr(transformers, name)(configuration(family, **settings))
    return Case(model, (inputs(model.config),), own_loss)


def entry(family: str, task: str) -> Entry:
    return Entry(f"{family}, {task}", "transformers", lambda: make(family, task))


transformers.logging.set_verbosity_error()
ENTRIES = [entry(family, task) for task, families in FAMILIES.items() for family in families.split()]
