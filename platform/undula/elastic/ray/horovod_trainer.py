"""Horovod as a library of a run: its trainer, with the arguments of Ray's former one, and its exchange of gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ray.train import DataConfig, ValidationConfig
from ray.train.v2.api.config import RunConfig, ScalingConfig

from undula.elastic.ray import horovod
from undula.elastic.ray.horovod import HorovodConfig
from undula.elastic.ray.trainer import ElasticTrainer
from undula.parallel.layout import Layout
from undula.parallel.reduce.exchange import Exchange


class ElasticHorovodTrainer(ElasticTrainer):
    """Successor of Ray's former HorovodTrainer. The number of workers varies within `ScalingConfig(num_workers=(min, max))`; it can be 1.

    `hvd.init()` is called before the train function runs, and calling it again has no effect. The class takes the arguments of
    HorovodTrainer, except for those that Ray Train has removed, and those of ElasticTrainer.

    Raises:
        ClusterError: Horovod is not installed here, or was built without a feature that `horovod_config` needs.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        horovod_config: HorovodConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: dict[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        validation_config: ValidationConfig | None = None,
        prepare: Callable[[], None] | None = None,
        **elastic: Any,
    ):
        horovod_config = horovod_config or HorovodConfig()
        horovod.check(has_gpus=scaling_config is not None and bool(scaling_config.use_gpu))
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=horovod_config,
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            validation_config=validation_config,
            prepare=partial(_import_horovod_and, prepare),
            **elastic,
        )


def _import_horovod_and(prepare: Callable[[], None] | None) -> None:
    horovod.import_horovod()
    if prepare:
        prepare()


class _Library:
    """Horovod, as `engine: horovod` of a job names it."""

    def check(self, has_gpus: bool) -> None:
        horovod.check(has_gpus)

    def trainer(self, train_loop_per_worker: Callable[[], Any], settings: Any, timeout_s: int, **arguments: Any) -> Any:
        config = HorovodConfig(torch_timeout_s=timeout_s, **vars(settings))
        return ElasticHorovodTrainer(train_loop_per_worker, horovod_config=config, **arguments)

    def exchange(self, layout: Layout, virtual_workers: int) -> Exchange:
        from undula.parallel.reduce.horovod import HorovodExchange  # which imports Horovod

        return HorovodExchange(layout, virtual_workers)

    def all_rows(self, layout: Layout) -> Any:
        from undula.parallel.reduce.horovod import all_rows

        return all_rows


LIBRARY = _Library()
