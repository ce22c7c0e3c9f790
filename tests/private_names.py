"""Private names of other libraries: the one list of those that the library uses or overrides, and how they are found in its source."""

import ast
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

ALLOWED: Mapping[str, Mapping[str, str]] = {
    "accelerate 1.15": {
        "_models": "adapters.transformers.trainer",
        "_set_sync_gradients": "adapters.transformers.trainer",
        "accelerate.state": "adapters.process_state",
    },
    "datasets 5.2": {
        "_fingerprint": "data.script.dataset",
        "_indices_data_files": "data.prepare.sources",
        "_indices_files": "data.prepare.sources",
    },
    "numpy 2.4": {
        "numpy.random.mtrand._rand": "data.script.items",
    },
    "python 3.11": {
        "_inheriting": "train.script_call",
        "atexit._run_exitfuncs": "cluster.forking.programs",
        "sys._current_frames": "elastic.waits",
        "threading._shutdown": "cluster.forking.programs",
    },
    "pytorch-lightning 2.6": {
        "_current_fx_name": "adapters.lightning.hooks",
        "core.optimizer:_configure_optimizers": "adapters.lightning.library",
        "core.optimizer:_configure_schedulers_automatic_opt": "adapters.lightning.library",
        "utilities.data:extract_batch_size": "adapters.lightning.library",
        "utilities.model_helpers:is_overridden": "adapters.lightning.library",
        "utilities.signature_utils:is_param_in_hook_signature": "adapters.lightning.library",
    },
    "ray 2.60": {
        "_do_request": "driver.submit",
        "_raise_error": "driver.submit",
        "_upload_package_if_needed": "driver.submit",
        "_upload_py_modules_if_needed": "driver.submit",
        "ray._private": "cluster.forking.server driver.submit",
    },
    "torch 2.13": {
        "_amp_foreach_non_finite_check_and_unscale_": "train.open_gradients",
        "_buffers": "parallel.recompute state.model_state testing.records train.script_variables",
        "_cdata": "parallel.activations parallel.materialize parallel.reduce.sharded parallel.sharded_tensors parallel.sharding "
        "train.dry_run.storages",
        "_check_input_dim": "parallel.batch_norm",
        "_checkpoint_wrapped_module": "state.model_state",
        "_backward_hooks": "parallel.sharding parallel.engines.sharded",
        "_allow_implicit_replication": "parallel.sharded_tensors",
        "_base": "parallel.sharded_tensors",
        "_custom_op_handlers": "parallel.sharded_tensors",
        "_is_view": "parallel.sharded_tensors",
        "torch.distributed.tensor.DTensor._op_dispatcher": "parallel.sharded_tensors",
        "torch.optim.optimizer._global_optimizer_post_hooks": "parallel.sharding",
        "torch.optim.optimizer._global_optimizer_pre_hooks": "parallel.sharding",
        "_random_ops": "parallel.sharded_tensors",
        "_device_types": "parallel.collectives",
        "_fsdp_param_groups": "parallel.reduce.unit",
        "_get_backend": "parallel.collectives parallel.layout",
        "_get_fsdp_state": "parallel.reduce.unit",
        "_get_sequence_number_for_group": "parallel.collectives",
        "_grouped_mm": "parallel.activations",
        "_local_tensor": "parallel.sharded_tensors recovery.fingerprint train.script_variables",
        "_modules": "parallel.reduce.accumulator",
        "_mp_policy": "parallel.reduce.unit",
        "_nnz": "parallel.reduce.sparse",
        "_non_persistent_buffers_set": "state.model_state testing.records train.script_variables train.buffers",
        "_optimizer_step_post_hooks": "parallel.sharding",
        "_optimizer_step_pre_hooks": "parallel.sharding",
        "_orig_mod": "state.model_state",
        "_parameters": "parallel.reduce.accumulator parallel.reduce.sharded parallel.reduce.unit",
        "_post_accumulate_grad_hooks": "train.open_gradients parallel.sharding",
        "_scaled_dot_product_cudnn_attention": "parallel.activations",
        "_scaled_dot_product_efficient_attention": "parallel.activations",
        "_scaled_dot_product_flash_attention": "parallel.activations",
        "_scaled_dot_product_flash_attention_for_cpu": "parallel.activations",
        "_scaled_mm": "parallel.activations",
        "_schema": "parallel.materialize parallel.activations parallel.sharded_tensors",
        "_step_count": "adapters.accelerate.prepared",
        "_timeout": "parallel.layout",
        "_values": "parallel.precision",
        "_wrapped_by_lr_sched": "parallel.sharding",
        "_version": "parallel.activations parallel.recompute parallel.reduce.sharded train.script_variables train.open_gradients "
        "train.script_guard train.whole_weights",
        "torch._C": "cluster.worker_check elastic.ray.backend parallel.activations train.open_gradients train.single_process",
        "torch._amp_foreach_non_finite_check_and_unscale_": "parallel.precision",
        "torch._dynamo": "cluster.forking.server parallel.compile testing.conformance train.model",
        "torch._inductor": "parallel.compile",
        "torch.distributed.distributed_c10d._abort_process_group": "elastic.ray.backend",
        "torch.distributed.distributed_c10d._world": "elastic.ray.actor parallel.collectives",
        "torch._subclasses": "train.dry_run.counting train.dry_run.fakes train.dry_run.storages",
        "torch.nn.modules.batchnorm._BatchNorm": "parallel.batch_norm",
        "torch.ops.aten._safe_softmax": "train.dry_run.storages",
        "torch.ops.aten._cudnn_rnn": "train.dry_run.storages",
        "torch.ops.aten._scaled_dot_product_flash_attention": "train.dry_run.storages",
        "torch.ops.aten._scaled_dot_product_flash_attention_backward": "train.dry_run.storages",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "train.dry_run.storages",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": "train.dry_run.storages",
        "torch.ops.aten._foreach_norm": "parallel.sharded_tensors",
        "torch.ops.aten._local_scalar_dense": "parallel.sharded_tensors train.dry_run.storages",
        "torch.utils._python_dispatch": "parallel.materialize parallel.activations train.dry_run.count train.dry_run.fakes "
        "train.dry_run.storages",
        "torch.utils._pytree": "adapters.gathered adapters.lightning.fit adapters.transformers.library parallel.materialize "
        "parallel.precision parallel.recompute parallel.activations parallel.sharded_tensors train.dry_run.storages train.dry_run.units "
        "train.open_gradients",
    },
    "transformers 5.24": {
        "_clip_grad_norm": "adapters.refusals",
        "_created_lr_scheduler": "adapters.transformers.trainer",
        "_evaluate": "adapters.transformers.trainer",
        "_finalize_training": "adapters.transformers.trainer",
        "_finish_current_push": "adapters.transformers.older",
        "_get_collator_with_removed_columns": "adapters.transformers.trainer",
        "_get_dataloader": "adapters.refusals adapters.transformers.trainer",
        "_get_eval_sampler": "adapters.refusals",
        "_get_grad_norm": "adapters.refusals",
        "_get_learning_rate": "adapters.transformers.trainer",
        "_get_num_items_in_batch": "adapters.transformers.trainer",
        "_get_output_dir": "adapters.transformers.older",
        "_get_train_sampler": "adapters.refusals",
        "_globalstep_last_logged": "adapters.transformers.trainer",
        "_init_training_state": "adapters.transformers.trainer",
        "_initial_global_step": "adapters.transformers.trainer",
        "_initial_num_input_tokens_seen": "adapters.transformers.trainer",
        "_inner_training_loop": "adapters.refusals adapters.transformers.trainer",
        "_maybe_log_save_evaluate": "adapters.transformers.trainer",
        "_move_model_to_device": "adapters.transformers.trainer",
        "_load_best_model": "adapters.transformers.older adapters.transformers.trainer",
        "_memory_tracker": "adapters.transformers.older",
        "_n_gpu": "adapters.transformers.library",
        "_prepare_for_training": "adapters.refusals",
        "_remove_unused_columns": "adapters.transformers.trainer",
        "_run_epoch": "adapters.refusals",
        "_setup_devices": "adapters.transformers.library",
        "_total_loss_scalar": "adapters.transformers.trainer",
        "_tr_loss": "adapters.transformers.older adapters.transformers.trainer",
        "_train_batch_size": "adapters.transformers.older",
        "transformers.trainer_": "adapters.transformers.library adapters.transformers.older",
    },
}
"""Modules that use or override a private name, without `undula.`, by library with its version and by name.

A name is cut after its first private part, and an attribute of an object is listed without the object. Ray's names in `undula.elastic.ray`
are not listed, because that package has no other task."""
DOCUMENTED = re.compile(r"os\._exit|sys\._getframe|_typeshed|_fields|_extra_state|(torch\.)?_foreach_\w+")
"""Names with an underscore that their libraries document."""
NO_NAMES = {"_s", "_manifest.json", "_runtime", "_per_second", "_model_preparation_time", "_delta_log", "_timestamp"}
"""Texts in the source that are no names."""
INTERNAL = re.compile(r"accelerate\.state\b|transformers\.trainer_(?!utils)|(utilities|core)\.[\w.]+:")
"""Modules of other libraries that are internal although their names have no underscore."""
BASES: Mapping[str, str] = {
    "transformers.Trainer": "transformers/trainer.py",
    "torch.optim.Optimizer": "torch/optim/optimizer.py",
    "torch.optim.lr_scheduler.LRScheduler": "torch/optim/lr_scheduler.py",
    "torch.nn.modules.batchnorm._BatchNorm": "torch/nn/modules/batchnorm.py",
    "torch.utils._python_dispatch.TorchDispatchMode": "torch/utils/_python_dispatch.py",
    "ray.job_submission.JobSubmissionClient": "ray/dashboard/modules/job/sdk.py",
}
"""Source of the classes of other libraries whose objects ours share attributes with, because they derive from them."""
_PART = re.compile(r"_[A-Za-z]\w*")


def private_part(name: str) -> str | None:
    """Return a name or a path up to its first private part; None if it has none."""
    if match := INTERNAL.match(name):
        return name if ":" in name else match[0]
    parts = name.split(".")
    private = [number for number, part in enumerate(parts) if any(map(_PART.fullmatch, part.split(":")))]
    return ".".join(parts[: private[0] + 1]) if private and not DOCUMENTED.match(name) else None


def own_names(tree: ast.AST) -> set[str]:
    """Return the names that a module defines."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def used_names(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Yield the names in a module that are not those of a module of ours: imports, attributes, and texts that could be names."""
    imported = _imported(tree)
    yield from imported.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            root = path.split(".")[0]
            if root in imported and re.fullmatch(r"[\w.]+", path):
                yield imported[root] + path.removeprefix(root)
            elif node.attr not in own or ast.unparse(node.value) == "super()":
                yield node.attr
        elif isinstance(node, ast.Constant) and re.fullmatch(r"[\w.:]+", text := str(node.value)):
            yield from {text} - own - NO_NAMES


def inherited_names(tree: ast.AST) -> set[str]:
    """Return the names that a module gives to attributes of its objects, if the source of a class of BASES has them too."""
    imported, nodes = _imported(tree), list(ast.walk(tree))
    theirs: set[str] = set()
    for base in (ast.unparse(base) for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases):
        root = base.split(".")[0]
        if file := BASES.get(imported.get(root, root) + base.removeprefix(root)):
            (library,) = find_spec(file.split("/")[0]).submodule_search_locations  # type: ignore[union-attr, misc]
            theirs |= set(re.findall(r"(?:self\.|def )(\w+)", (Path(library).parent / file).read_text()))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute) and _is_self(node.value)}
    return theirs & (names | {node.name for node in nodes if isinstance(node, ast.FunctionDef)})


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _imported(tree: ast.AST) -> dict[str, str]:
    """Return the modules and objects of other libraries in a module, by the names that it has for them."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
            names |= {root: root for alias in node.names if not alias.asname for root in [alias.name.split(".")[0]]}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("undula"):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names
