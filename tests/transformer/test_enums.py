"""The enums have upstream's names and values, which checkpoints of arguments may hold."""

from apex import transformer
from apex.transformer import enums


def test_names_and_values() -> None:
    values = {
        enums.LayerType: {"encoder": 1, "decoder": 2},
        enums.AttnType: {"self_attn": 1, "cross_attn": 2},
        enums.AttnMaskType: {"padding": 1, "causal": 2},
        enums.ModelType: {"encoder_or_decoder": 1, "encoder_and_decoder": 2},
    }
    for kind, expected in values.items():
        assert {member.name: member.value for member in kind} == expected
        assert getattr(transformer, kind.__name__) is kind
