"""Kinds of layers, attentions, masks and models."""

import enum

LayerType = enum.Enum("LayerType", ["encoder", "decoder"])
AttnType = enum.Enum("AttnType", ["self_attn", "cross_attn"])
AttnMaskType = enum.Enum("AttnMaskType", ["padding", "causal"])
ModelType = enum.Enum("ModelType", ["encoder_or_decoder", "encoder_and_decoder"])
