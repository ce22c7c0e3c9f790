"""Keys of a DeepSpeed configuration that have no equivalent in a job's YAML, each with the reason as a sentence."""

from collections.abc import Mapping

_BUCKETS = (
    "a sharded model sends gradients unit by unit, as sharding.units sets them, and others in buckets of a fixed size"
)
_UNITS = "a unit is freed after its pass and gathered again for the next one; sharding.units sets how much that is"
_SMALL = "small parameters are sharded and gathered like all others of their unit"
_OVERLAPS = "when units are gathered and gradients are sent is fixed, without a setting"
_QUANTIZED = "a sharded model sends parameters and gradients unquantized; sharding.gather: compute halves the bytes of parameters"
_OFFLOADED = (
    "set sharding.offload: all, which keeps each worker's shards of parameters and optimizer states in host memory"
)
_FROM_DISK = "shards in host memory are neither read from disks nor buffered"
_LEDGER = "the ledger always has the duration of each step by part; `undula show RUN` prints them"
_TENSORBOARD = "TensorBoard's files are always written, into the run directory"
_SCALE_RULE = "the scale follows torch.amp.GradScaler"
_RECOMPUTE = "activations.keep says what is recomputed, without calls in the script"
_SPLIT = "a model is split over workers by sharding alone, not by tensor, sequence, pipeline or expert parallelism"
_ELASTIC = "a run keeps its batch at any number of workers; set plan.global_batch, plan.virtual_workers, workers.min and workers.max"
_SCRIPT = "this belongs in the script"
_BIAS = "make_optimizer always corrects the bias; make another optimizer in the script"

REASONS: Mapping[str, str] = {
    "optimizer.legacy_fusion": "torch chooses between fused and other kernels",
    "optimizer.params.torch_adam": "make_optimizer makes torch's optimizers in any case",
    "optimizer.params.bias_correction": _BIAS,
    "optimizer.params.amsgrad": "make_optimizer has no AMSGrad; make the optimizer in the script",
    "optimizer.params.max_grad_norm": "DeepSpeed refuses it too; set gradient.max_norm",
    "optimizer.params.max_coeff": "Undula's LAMB does not limit the trust ratio",
    "optimizer.params.min_coeff": "Undula's LAMB does not limit the trust ratio",
    "scheduler.params.last_batch_iteration": "a run that is submitted again continues at its own step",
    "fp16.initial_scale_power": "the first loss scale is 2^16, as with 16",
    "fp16.loss_scale_window": f"{_SCALE_RULE}, which doubles it after 2000 steps without an overflow",
    "fp16.hysteresis": f"{_SCALE_RULE}, which halves it at each overflow, as with 1",
    "fp16.consecutive_hysteresis": f"{_SCALE_RULE}, which halves it at each overflow",
    "fp16.min_loss_scale": f"{_SCALE_RULE}, which has no minimum",
    "fp16.auto_cast": "the model runs under torch.autocast, which casts its inputs where operations need it",
    "fp16.fp16_master_weights_and_grads": "parameters and gradients are fp32 in any case",
    "bf16.immediate_grad_update": "gradients are fp32 and added up after each micro-batch",
    "bf16.check_grad_overflow": "only fp16 has a loss scale; the ledger records the norm of each gradient",
    "torch_autocast": "set precision.compute: bf16 or fp16, which runs the model under torch.autocast",
    "amp": "NVIDIA's Apex is not used; set precision.compute: bf16 or fp16",
    "data_types": "gradients are added up in the format of the parameters, which is fp32",
    "seq_parallel_communication_data_type": _SPLIT,
    "prescale_gradients": "gradients are added up in fp32, in which sums do not overflow, unless gradient.compression is set",
    "gradient_predivide_factor": "gradients are added up in fp32, in which sums do not overflow, unless gradient.compression is set",
    "sparse_gradients": "layers with sparse=True send sparse gradients by themselves; a sharded model cannot have them",
    "gradient_accumulation_dtype": "gradients are added up in the format of the parameters, which is fp32",
    "zero_optimization.offload_optimizer.ratio": "all of the optimizer's state is in host memory",
    "zero_optimization.offload_optimizer.fast_init": "it is for optimizer states on disks",
    **dict.fromkeys(
        (
            *("zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_optimizer.buffer_count"),
            *(
                "zero_optimization.offload_optimizer.pipeline_read",
                "zero_optimization.offload_optimizer.pipeline_write",
            ),
            *("zero_optimization.offload_param.nvme_path", "zero_optimization.offload_param.buffer_count"),
            *("zero_optimization.offload_param.buffer_size", "zero_optimization.offload_param.max_in_cpu"),
        ),
        _FROM_DISK,
    ),
    **dict.fromkeys(
        (
            *("zero_optimization.cpu_offload", "zero_optimization.cpu_offload_params"),
            *(
                "zero_optimization.cpu_offload_use_pin_memory",
                "zero_optimization.zenflow",
                "zero_optimization.super_offload",
            ),
        ),
        _OFFLOADED,
    ),
    "zero_optimization.round_robin_gradients": "a worker copies its slice of the gradient to the CPU once a step, in any order",
    "zero_optimization.sub_group_size": "a worker updates its whole shard in one step of the optimizer",
    "zero_optimization.reduce_bucket_size": _BUCKETS,
    "zero_optimization.allgather_bucket_size": "parameters are gathered unit by unit, as sharding.units sets them",
    "zero_optimization.allgather_partitions": "units are always gathered with all-gather",
    "zero_optimization.reduce_scatter": "gradients are added up along the tree of the plan, for the same result on any number of workers",
    "zero_optimization.overlap_comm": _OVERLAPS,
    "zero_optimization.contiguous_gradients": "the layout of gradients in memory has no setting",
    "zero_optimization.stage3_prefetch_bucket_size": "FSDP2 decides when it gathers the next unit; sharding.units sets how large it is",
    "zero_optimization.stage3_max_live_parameters": _UNITS,
    "zero_optimization.stage3_max_reuse_distance": _UNITS,
    "zero_optimization.stage3_param_persistence_threshold": _SMALL,
    "zero_optimization.stage3_model_persistence_threshold": _SMALL,
    "zero_optimization.stage3_module_granularity_threshold": "sharding.units names the modules that are gathered as a whole",
    "zero_optimization.leaf_module": "sharding.units names the modules that are gathered as a whole",
    "zero_optimization.stage3_allgather_sequential": _OVERLAPS,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": "units are always gathered with all-gather",
    **dict.fromkeys(
        (
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        ),
        "checkpoints are written in shards; `undula export RUN --out DIR` writes the whole weights",
    ),
    **dict.fromkeys(
        ("zero_optimization.load_from_fp32_weights", "zero_optimization.elastic_checkpoint"),
        "checkpoints hold the fp32 parameters and fit any number of workers",
    ),
    "zero_optimization.pipeline_loading_checkpoint": "workers read their shards of a checkpoint at once",
    "zero_optimization.ignore_unused_parameters": "a parameter that no sample uses has no gradient and does not move",
    "zero_optimization.legacy_stage1": "there is one implementation of each stage",
    "zero_optimization.memory_efficient_linear": "torch's own linear layers are used; activations.keep saves memory",
    "zero_optimization.override_module_apply": "weights are drawn whole and then sharded, so nothing is overridden",
    "zero_optimization.log_trace_cache_warnings": "units are gathered by their own passes, without a trace",
    **dict.fromkeys(
        (
            *("zero_optimization.zero_quantized_weights", "zero_optimization.zero_quantized_gradients"),
            *("zero_optimization.zero_quantized_nontrainable_weights", "zero_optimization.zeropp_loco_param"),
        ),
        _QUANTIZED,
    ),
    **dict.fromkeys(
        (
            *("zero_optimization.zero_hpz_partition_size", "zero_optimization.mics_shard_size"),
            "zero_optimization.mics_hierarchical_params_gather",
        ),
        "a model is always sharded over all workers",
    ),
    "zero_allow_untested_optimizer": "docs/sharding.md lists the optimizers that a sharded model accepts",
    "zero_force_ds_cpu_optimizer": "with sharding.offload: all, torch's optimizer steps on the CPU",
    "activation_checkpointing": _RECOMPUTE,
    "activation_checkpointing.partition_activations": f"it needs tensor parallelism, and {_SPLIT}",
    "activation_checkpointing.cpu_checkpointing": "set activations.keep: none and activations.offload: true for it",
    "activation_checkpointing.number_checkpoints": "activations.keep: every_N or sqrt says how many activations are kept",
    "activation_checkpointing.contiguous_memory_optimization": "torch's allocator places activations; `undula plan` counts its fragments",
    "activation_checkpointing.synchronize_checkpoint_boundary": f"{_RECOMPUTE}, and nothing waits at the units",
    "activation_checkpointing.profile": _LEDGER,
    "steps_per_print": "the progress line shows the newest step, and the ledger has the loss of every step",
    "wall_clock_breakdown": _LEDGER,
    "timers": _LEDGER,
    "dump_state": "`undula run JOB.yaml --print` prints every value with its origin",
    "memory_breakdown": "`undula plan JOB.yaml` counts the memory of a model that is not sharded, by part",
    "flops_profiler": "`undula plan JOB.yaml` counts the operations of a step, without sharding",
    "comms_logger": _LEDGER,
    "tensorboard": _TENSORBOARD,
    "csv_monitor": f"{_LEDGER}, and `undula show RUN --json` writes it for programs",
    "comet": "trackers.mlflow and trackers.wandb show a run elsewhere; docs/trackers.md explains how to add one",
    "monitor_config": "set trackers",
    "wandb.group": "trackers.wandb has no groups",
    "disable_allgather": "units are always gathered with all-gather",
    "elasticity": _ELASTIC,
    "autotuning": "`undula plan JOB.yaml` compares settings without a GPU, except those of sharding",
    "compile": "set compile: true, which compiles the units of a sharded model with torch.compile",
    "compression_training": f"pruning and quantization change the model; {_SCRIPT}",
    "quantize_training": f"quantization changes the model; {_SCRIPT}",
    "sparse_attention": f"attention is part of the model; {_SCRIPT}",
    "progressive_layer_drop": f"dropping layers changes the model; {_SCRIPT}",
    "eigenvalue": f"it serves quantization; {_SCRIPT}",
    "curriculum_learning": "the plan decides the order of the samples; plan.shuffle: none keeps that of the data",
    "data_efficiency": "the plan decides the order of the samples; plan.shuffle: none keeps that of the data",
    "dataloader_drop_last": "plan.last_step: drop leaves out the last step of an epoch that is not full, not the last micro-batch",
    "checkpoint": "checkpoints go to the run directory, in shards, and a resumed run may have other sharding and workers",
    "load_universal_checkpoint": "checkpoints fit any stage and any number of workers",
    "nebula": "checkpoints go to the run directory, which can be on S3",
    "aio": "nothing is offloaded to disks",
    "pipeline": _SPLIT,
    "tensor_parallel": _SPLIT,
    "sequence_parallel_size": _SPLIT,
    "use_data_before_expert_parallelism": _SPLIT,
    "hybrid_engine": f"generation between steps is not the run's; {_SCRIPT}",
    "graph_harvesting": "compile: true captures graphs where torch.compile can",
}
"""Reasons by dotted key. The reason of a section holds for all of its keys that have none of their own."""

UNKNOWN = "Undula knows no such key of DeepSpeed"

AUTO: Mapping[str, str] = {
    "train_batch_size": "per_device_train_batch_size x gradient_accumulation_steps x GPUs of TrainingArguments; set plan.global_batch",
    "train_micro_batch_size_per_gpu": "TrainingArguments.per_device_train_batch_size; set plan.micro_batch",
    "gradient_accumulation_steps": "TrainingArguments.gradient_accumulation_steps; it follows from plan.global_batch and plan.micro_batch",
    "gradient_clipping": "TrainingArguments.max_grad_norm; set gradient.max_norm",
    "fp16.enabled": "TrainingArguments.fp16; if it is true, set precision.compute: fp16",
    "bf16.enabled": "TrainingArguments.bf16; if it is true, set precision.compute: bf16",
    "fp16.loss_scale": "a dynamic scale, which is the default of Undula, too",
    "zero_optimization.stage": "no argument; set sharding.stage",
    "optimizer.params.lr": "TrainingArguments.learning_rate; set schedule.base_lr",
    "optimizer.params.weight_decay": "TrainingArguments.weight_decay; set config.optimizer.weight_decay",
    "optimizer.params.betas": "TrainingArguments.adam_beta1 and adam_beta2; set config.optimizer.betas",
    "optimizer.params.eps": "TrainingArguments.adam_epsilon; set config.optimizer.eps",
    "optimizer.params.momentum": "no argument; set config.optimizer.momentum",
    "scheduler.params.warmup_max_lr": "TrainingArguments.learning_rate; set schedule.base_lr",
    "scheduler.params.warmup_min_lr": "0, from which Undula warms up by default, too",
    "scheduler.params.warmup_num_steps": "TrainingArguments.warmup_steps; set schedule.warmup_steps",
    "scheduler.params.total_num_steps": "the steps of the run, over which Undula decays by default, too",
}
"""What Hugging Face's Trainer sets in place of "auto", and the fix, as a sentence without its beginning."""
