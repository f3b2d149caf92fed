"""Makes tiny pretrained models with tokenizers, and tokenized data sets, in the working directory."""

import random
from pathlib import Path

import datasets
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from words import WORDS

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>"]


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    pairs = "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"
    fast.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pairs, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    named = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, **named, mask_token="[MASK]", bos_token="<s>", eos_token="</s>"
    )


def main() -> None:
    torch.manual_seed(0)
    size = {"vocab_size": len(SPECIAL) + len(WORDS)}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    made = {
        "bert": transformers.BertForSequenceClassification(transformers.BertConfig(**size, **quiet)),
        "gpt2": transformers.GPT2ForSequenceClassification(
            transformers.GPT2Config(**size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, pad_token_id=0)
        ),
        # The script makes numbers of tokens below 50257, in sequences of 1024.
        "opt": transformers.OPTForCausalLM(
            transformers.OPTConfig(vocab_size=50257, dropout=0.0, word_embed_proj_dim=32, max_position_embeddings=1024)
        ),
        "llama": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**size, max_position_embeddings=64, tie_word_embeddings=False)
        ),
        "vit": transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=8, **quiet)),
    }
    for name, model in made.items():
        model.save_pretrained(name)
        tokenizer().save_pretrained(name)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained("vit")

    make_diffusion()

    rng = random.Random(0)

    def tokens() -> list[int]:
        return [rng.randrange(len(SPECIAL), size["vocab_size"]) for _ in range(rng.randint(6, 16))]

    rows = [tokens() for _ in range(32)]
    sft = [{"input_ids": row, "labels": [-100, *row[1:]], "seq_length": len(row)} for row in rows]
    preference, kto = [], []
    for row in rows:
        chosen, rejected = [*row, *tokens()], [*row, *tokens()]
        pair = {"chosen_input_ids": chosen, "rejected_input_ids": rejected}
        pair |= {"chosen_loss_mask": [0] * len(row) + [1] * (len(chosen) - len(row))}
        pair |= {"rejected_loss_mask": [0] * len(row) + [1] * (len(rejected) - len(row))}
        preference.append(pair)
        kto.append({"prompt": row, "completion": tokens(), "label": len(kto) % 2 == 0})
    for name, made_rows in (("sft", sft), ("dpo", preference), ("kto", kto)):
        datasets.Dataset.from_list(made_rows).save_to_disk(name)


def make_diffusion() -> None:
    """Make a pipeline of Stable Diffusion in the folder diffusion, and a folder of photos."""
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel

    words = tokenizer()
    words.model_max_length = 16
    words.save_pretrained("diffusion/tokenizer")
    text = transformers.CLIPTextConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16,
    )  # fmt: skip
    transformers.CLIPTextModel(text).save_pretrained("diffusion/text_encoder")
    AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=16).save_pretrained("diffusion/vae")
    UNet2DConditionModel(
        sample_size=16, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, cross_attention_dim=32,
        attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).save_pretrained("diffusion/unet")  # fmt: skip
    DDPMScheduler().save_pretrained("diffusion/scheduler")
    Path("photos").mkdir()
    for number in range(8):
        pixels = torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(f"photos/{number}.png")


main()
