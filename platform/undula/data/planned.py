"""Samples that each step of a run consumes according to the plan. They equal the samples of the streams, without reading a row."""

import itertools

import numpy as np

from undula.data.script.indexed import IndexedData
from undula.data.stored.manifest import Manifest
from undula.data.stored.mixture import Mix, Mixture, StoredData
from undula.plan.keys import Ids
from undula.plan.order import EpochOrder, IndexOrder
from undula.plan.plan import Plan

Data = StoredData | IndexedData
"""Training data of a job."""
_CACHED_ORDERS = 16


class PlannedSamples:
    """Sample ids of any step. Requests in the order of the steps are fast because the orders of recent epochs are cached."""

    def __init__(self, data: Data, plan: Plan):
        self._plan = plan
        self._mix: Mix | None = None
        self._manifests: tuple[Manifest, ...] = ()
        self._plans = [plan]
        if isinstance(data, Mixture):
            self._mix, self._manifests = Mix(data.weights, plan.spec.seed), data.manifests
            self._plans = [data.part_plan(plan.spec, number) for number in range(len(data.manifests))]
        elif not isinstance(data, IndexedData):
            self._manifests = (data,)
        rows = [manifest.num_rows for manifest in self._manifests]
        self._first_ids = list(itertools.accumulate(rows, initial=0))
        self._orders: dict[tuple[int, int], EpochOrder] = {}

    def step_ids(self, step: int) -> Ids:
        """Return the ids of a step's samples, ordered by virtual worker; shape [samples of the step]."""
        shape = self._plan.step(step)
        if not self._manifests:
            return IndexOrder(self._plan, shape.epoch).step_ids(shape.step_in_epoch)
        if self._mix is None:
            return self._order(0, shape.epoch).step_ids(shape.step_in_epoch)
        virtual_workers = range(self._plan.spec.virtual_workers)
        return np.concatenate([self._mixed(self._mix, v, step, shape.step_in_epoch) for v in virtual_workers])

    def _mixed(self, mix: Mix, virtual_worker: int, step: int, step_in_epoch: int) -> Ids:
        position = self._plan.position(step, virtual_worker)
        sources = mix.sources(virtual_worker, position, self._plan.share(step_in_epoch, virtual_worker))
        before = mix.counts(virtual_worker, position)
        ids = np.empty(len(sources), dtype=np.int64)
        for number in np.unique(sources).tolist():
            places = np.flatnonzero(sources == number)
            taken = before[number] + np.arange(len(places))
            epochs, positions = np.divmod(taken, self._plans[number].consumed(virtual_worker))
            for epoch in np.unique(epochs).tolist():
                order = self._order(number, epoch)
                own = epochs == epoch
                ids[places[own]] = self._first_ids[number] + order.ids_at(virtual_worker, positions[own])
        return ids

    def _order(self, number: int, epoch: int) -> EpochOrder:
        key = (number, epoch)
        if key not in self._orders:
            while len(self._orders) >= _CACHED_ORDERS * len(self._plans):
                del self._orders[next(iter(self._orders))]
            self._orders[key] = EpochOrder(self._plans[number], self._manifests[number].row_counts, epoch)
        return self._orders[key]
