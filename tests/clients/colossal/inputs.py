"""Makes tiny pretrained models with tokenizers, and tokenized data sets, in the working directory."""

import random

import datasets
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "his",
    "but",
    "at",
    "are",
    "this",
    "have",
]
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
        "opt": transformers.OPTForCausalLM(
            transformers.OPTConfig(**size, dropout=0.0, word_embed_proj_dim=32, max_position_embeddings=64)
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


main()
