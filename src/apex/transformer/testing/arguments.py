"""Megatron's command line: tables of its options, and the values that are derived from them."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ... import _env

# Options of each type, "name" or "name=default"; the default is None if omitted.
_INTEGERS = """
num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels max-position-embeddings num-experts
make-vocab-size-divisible-by=128 tensorboard-log-interval=1 tensorboard-queue-size=1000
micro-batch-size batch-size global-batch-size recompute-num-layers=1 train-iters train-samples log-interval=100
exit-interval exit-duration-in-mins seed=1234 lr-decay-iters lr-decay-samples lr-warmup-iters=0 lr-warmup-samples=0
warmup save-interval hysteresis=2 tensor-model-parallel-size=1 pipeline-model-parallel-size=1
pipeline-model-parallel-split-rank model-parallel-size num-layers-per-virtual-pipeline-stage local_rank
eval-iters=100 eval-interval=1000 vocab-extra-ids=0 seq-length encoder-seq-length decoder-seq-length
retriever-seq-length=256 num-workers=2 adlr-autoresume-interval=1000 ict-head-size biencoder-projection-dim=0
indexer-batch-size=128 indexer-log-interval=1000 num-classes=1000 img-h=224 img-w=224 num-channels=3 patch-dim=16
iter-per-epoch=1250 dino-local-img-size=96 dino-local-crops-number=10 dino-head-hidden-size=2048
dino-bottleneck-size=256 dino-warmup-teacher-temp-epochs=30 inference-batch-times-seqlen-threshold=512
"""
_NUMBERS = """
layernorm-epsilon=1e-5 attention-dropout=0.1 hidden-dropout=0.1 weight-decay=0.01 start-weight-decay end-weight-decay
clip-grad=1.0 adam-beta1=0.9 adam-beta2=0.999 adam-eps=1e-8 sgd-momentum=0.9 init-method-std=0.02 lr
lr-warmup-fraction min-lr=0.0 loss-scale initial-loss-scale=4294967296 min-loss-scale=1.0 loss-scale-window=1000
sample-rate=1.0 mask-prob=0.15 short-seq-prob=0.1 query-in-block-prob=0.1 classes-fraction=1.0
data-per-class-fraction=1.0 head-lr-mult=1.0 mask-factor=1.0 dino-freeze-last-layer=1 dino-warmup-teacher-temp=0.04
dino-teacher-temp=0.07
"""
_TEXTS = """
tensorboard-dir save load vocab-file merge-file ict-load bert-load titles-data-path evidence-data-path
block-data-path embedding-path distributed-backend=nccl
"""
# Options without a value: True if given, otherwise False.
_FLAGS = """
apply-residual-connection-post-layernorm openai-gelu log-params-norm log-num-zeros-in-grad log-timers-to-tensorboard
log-batch-size-to-tensorboard log-validation-ppl-to-tensorboard log-memory-to-tensorboard
log-world-size-to-tensorboard recompute-activations distribute-saved-activations checkpoint-activations
no-persist-layer-norm sequence-parallel init-method-xavier-uniform override-lr-scheduler
use-checkpoint-lr-scheduler finetune fp16 bf16 fp32-residual-connection attention-softmax-in-fp32
accumulate-allreduce-grads-in-fp32 fp16-lm-cross-entropy standalone-embedding-stage mmap-warmup reset-position-ids
reset-attention-mask eod-mask-loss adlr-autoresume biencoder-shared-query-context-model use-one-sent-docs
retriever-score-scaling vision-pretraining dino-norm-last-layer cpu-offload
"""
# Flags that `defaults` may set: True if given, otherwise None.
_UNSET_FLAGS = "no-save-optim no-save-rng no-load-optim no-load-rng use-cpu-initialization onnx-safe lazy-mpu-init"
# Options that turn off a setting of another name.
_OFF = {
    "bert-no-binary-head": "bert_binary_head",
    "no-log-learnig-rate-to-tensorboard": "log_learning_rate_to_tensorboard",
    "no-log-loss-scale-to-tensorboard": "log_loss_scale_to_tensorboard",
    "no-masked-softmax-fusion": "masked_softmax_fusion",
    "no-bias-gelu-fusion": "bias_gelu_fusion",
    "no-bias-dropout-fusion": "bias_dropout_fusion",
    "no-async-tensor-model-parallel-allreduce": "async_tensor_model_parallel_allreduce",
    "no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
    "no-query-key-layer-scaling": "apply_query_key_layer_scaling",
    "no-contiguous-buffers-in-local-ddp": "use_contiguous_buffers_in_local_ddp",
    "no-scatter-gather-tensors-in-pipeline": "scatter_gather_tensors_in_pipeline",
    "no-data-sharding": "data_sharding",
}
# The default, then all accepted values.
_CHOICES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "weight-decay-incr-style": ("constant", ("constant", "linear", "cosine")),
    "recompute-granularity": (None, ("full", "selective")),
    "recompute-method": (None, ("uniform", "block")),
    "optimizer": ("adam", ("adam", "sgd")),
    "dataloader-type": (None, ("single", "cyclic")),
    "lr-decay-style": ("linear", ("constant", "linear", "cosine")),
    "DDP-impl": ("local", ("local", "torch")),
    "empty-unused-memory-level": (0, (0, 1, 2)),
    "tokenizer-type": (None, ("BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer")),
    "data-impl": ("infer", ("lazy", "cached", "mmap", "infer")),
    "vision-pretraining-type": ("classify", ("classify", "inpaint", "dino")),
    "vision-backbone-type": ("vit", ("vit", "mit", "swin")),
    "swin-backbone-type": ("tiny", ("tiny", "base", "h3")),
    "mask-type": ("random", ("random", "row")),
}
# Options of earlier versions and their replacements.
_REPLACED = {
    "batch_size": "--micro-batch-size",
    "warmup": "--lr-warmup-fraction",
    "model_parallel_size": "--tensor-model-parallel-size",
}
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")


def parse_args(
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    defaults: Mapping[str, Any] | None = None,
    override_args: Mapping[str, Any] | None = None,
    ignore_unknown_args: bool = False,
) -> argparse.Namespace:
    """Return Megatron's options from the command line, with derived values: group sizes, batch sizes, dtypes.

    `extra_args_provider` adds options to the parser. `defaults` replace options that are None; `override_args` replace
    the command line's values. A ValueError says which options contradict each other.
    """
    parser = _parser()
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    args = parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()
    args.rank, args.world_size = _env.rank_and_world_size()
    for name, value in (override_args or {}).items():
        setattr(args, name, value)
    for name, instead in _REPLACED.items():
        _require(getattr(args, name) is None, f"--{name.replace('_', '-')} is no longer valid, use {instead} instead")
        delattr(args, name)
    for name, value in (defaults or {}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    _settle_groups(args)
    _settle_batches(args)
    _settle_precision(args)
    _settle_schedules(args)
    _settle_network(args)
    _settle_recomputation(args)
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Megatron's options", allow_abbrev=False)
    for kind, table in ((int, _INTEGERS), (float, _NUMBERS), (str, _TEXTS)):
        for entry in table.split():
            name, _, default = entry.partition("=")
            parser.add_argument(f"--{name}", type=kind, default=kind(default) if default else None)
    for value_if_absent, table in ((False, _FLAGS), (None, _UNSET_FLAGS)):
        for name in table.split():
            parser.add_argument(f"--{name}", action="store_true", default=value_if_absent)
    for name, turned_off in _OFF.items():
        parser.add_argument(f"--{name}", action="store_false", dest=turned_off)
    for name, (default, accepted) in _CHOICES.items():
        parser.add_argument(f"--{name}", type=type(accepted[0]), default=default, choices=accepted)
    parser.add_argument("--split", type=str, default="969, 30, 1")
    parser.add_argument("--rampup-batch-size", type=int, nargs="*", default=None)
    parser.add_argument("--data-path", nargs="*", default=None)
    parser.add_argument("--retriever-report-topk-accuracies", nargs="+", type=int, default=[])
    return parser


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _settle_groups(args: argparse.Namespace) -> None:
    """Set the group sizes, with a warning if one is larger than the number of processes."""
    requested = {name: getattr(args, name) for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size")}
    tensor = args.tensor_model_parallel_size = min(args.tensor_model_parallel_size, args.world_size)
    stages = args.pipeline_model_parallel_size = min(args.pipeline_model_parallel_size, args.world_size // tensor)
    for name, size in requested.items():
        if size > getattr(args, name):
            warnings.warn(
                f"--{name.replace('_', '-')} {size} is more than fits into {args.world_size} processes: "
                f"{getattr(args, name)} is used instead",
                stacklevel=3,
            )
    _require(
        args.world_size % (tensor * stages) == 0,
        f"world size ({args.world_size}) is not divisible by tensor model parallel size ({tensor}) times pipeline "
        f"model parallel size ({stages})",
    )
    args.data_parallel_size = args.world_size // (tensor * stages)
    args.transformer_pipeline_model_parallel_size = stages - (1 if args.standalone_embedding_stage else 0)
    split = args.pipeline_model_parallel_split_rank
    _require(
        stages == 1 or split is None or split < stages,
        f"--pipeline-model-parallel-split-rank ({split}) must be below pipeline model parallel size ({stages})",
    )
    args.virtual_pipeline_model_parallel_size = None
    chunk = args.num_layers_per_virtual_pipeline_stage
    if chunk is not None:
        _require(stages > 1, f"interleaving needs at least 2 pipeline stages, got {stages}")
        _require(
            args.num_layers is not None and args.num_layers % (stages * chunk) == 0,
            f"--num-layers ({args.num_layers}) is not divisible by {stages} stages times "
            f"--num-layers-per-virtual-pipeline-stage ({chunk})",
        )
        args.virtual_pipeline_model_parallel_size = args.num_layers // stages // chunk


def _settle_batches(args: argparse.Namespace) -> None:
    """Set the global batch size and the data loader from the microbatch size, which has no default, as upstream."""
    micro = args.micro_batch_size
    _require(micro is not None, "--micro-batch-size is required: the samples of a microbatch, such as 2")
    _require(micro > 0, f"--micro-batch-size must be positive, got {micro}")
    if args.global_batch_size is None:
        args.global_batch_size = micro * args.data_parallel_size
    _require(args.global_batch_size > 0, f"--global-batch-size must be positive, got {args.global_batch_size}")
    args.dataloader_type = args.dataloader_type or "single"
    args.consumed_train_samples = args.consumed_valid_samples = 0


def _settle_precision(args: argparse.Namespace) -> None:
    _require(not (args.fp16 and args.bf16), "--fp16 and --bf16 cannot be given together")
    args.params_dtype = torch.half if args.fp16 else torch.bfloat16 if args.bf16 else torch.float
    # Sums of gradients in bfloat16 would lose most of the added digits.
    args.accumulate_allreduce_grads_in_fp32 |= args.bf16
    if args.accumulate_allreduce_grads_in_fp32:
        message = "gradients in float32 need --DDP-impl local and its contiguous buffers"
        _require(args.DDP_impl == "local" and args.use_contiguous_buffers_in_local_ddp, message)
    else:
        args.gradient_accumulation_fusion = False
    args.use_contiguous_buffers_in_local_ddp &= args.DDP_impl != "torch"
    _require(args.fp16 or not args.fp16_lm_cross_entropy, "--fp16-lm-cross-entropy needs --fp16")
    halves = args.fp16 or args.bf16
    _require(halves or not args.fp32_residual_connection, "--fp32-residual-connection needs --fp16 or --bf16")


def _settle_schedules(args: argparse.Namespace) -> None:
    """Check the schedule options: lengths and rates are counted in iterations or in samples, not in both."""
    for counted, other in (("iters", "samples"), ("samples", "iters")):
        if not getattr(args, f"train_{counted}"):
            continue
        for name in (f"train_{other}", f"lr_decay_{other}", f"lr_warmup_{other}"):
            _require(not getattr(args, name), f"--{name.replace('_', '-')} cannot be used with --train-{counted}")
        warmups = args.lr_warmup_fraction is not None and getattr(args, f"lr_warmup_{counted}")
        _require(not warmups, f"only one of --lr-warmup-fraction and --lr-warmup-{counted} can be given")
    _require(not (args.train_iters and args.rampup_batch_size), "--rampup-batch-size needs --train-samples")
    _require(args.lr is None or args.min_lr <= args.lr, f"--min-lr ({args.min_lr}) is above --lr ({args.lr})")
    _require(args.save is None or args.save_interval is not None, "--save needs --save-interval")
    ends = (args.start_weight_decay, args.end_weight_decay)
    if args.weight_decay_incr_style == "constant":
        _require(ends == (None, None), "--start-weight-decay and --end-weight-decay need another increment style")
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
    else:
        message = f"--weight-decay-incr-style {args.weight_decay_incr_style} needs both ends of the weight decay"
        _require(None not in ends, message)


def _settle_network(args: argparse.Namespace) -> None:
    for name in _REQUIRED:
        _require(getattr(args, name) is not None, f"--{name.replace('_', '-')} is required")
    args.ffn_hidden_size = args.ffn_hidden_size or 4 * args.hidden_size
    if args.kv_channels is None:
        message = f"--hidden-size ({args.hidden_size}) is not divisible by {args.num_attention_heads} attention heads"
        _require(args.hidden_size % args.num_attention_heads == 0, message)
        args.kv_channels = args.hidden_size // args.num_attention_heads
    lengths = [args.seq_length, args.encoder_seq_length]
    _require(lengths.count(None) == 1, "exactly one of --seq-length and --encoder-seq-length is needed")
    args.seq_length = args.encoder_seq_length = lengths[0] or lengths[1]
    for length in (args.seq_length, args.decoder_seq_length):
        message = f"--max-position-embeddings ({args.max_position_embeddings}) is below a sequence's length ({length})"
        _require(length is None or args.max_position_embeddings >= length, message)
    # With sequence parallelism the all-reduces that could be asynchronous are reduce-scatters.
    args.async_tensor_model_parallel_allreduce &= not args.sequence_parallel


def _settle_recomputation(args: argparse.Namespace) -> None:
    if args.checkpoint_activations:
        args.recompute_granularity, args.recompute_method = "full", "uniform"
    elif args.recompute_activations:
        args.recompute_granularity = "selective"
    del args.checkpoint_activations, args.recompute_activations
    if args.distribute_saved_activations:
        recomputes_fully = args.recompute_granularity == "full" and args.recompute_method is not None
        message = "--distribute-saved-activations needs tensor parallelism, full recomputation and its method"
        _require(args.tensor_model_parallel_size > 1 and recomputes_fully, message)
    message = "--recompute-method cannot be used with selective recomputation"
    _require(args.recompute_granularity != "selective" or args.recompute_method is None, message)
