//! Python bindings for the order of samples.

use std::ops::Range;
use std::sync::Arc;

use hocket_stream::order::{
    Batching, MixSchedule, Order, OrderSettings, Sampling, StreamMix, TailPolicy,
};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;

use crate::shard_index::{ShardIndex, raise};

/// Streams, and the samples that an epoch takes from each. Immutable and without locks; safe in forked
/// children.
#[pyclass(name = "StreamMix", frozen, module = "hocket.native._native")]
pub struct PyStreamMix {
    mix: StreamMix,
}

#[pymethods]
impl PyStreamMix {
    #[new]
    fn new(
        py: Python<'_>,
        indexes: Vec<PyRef<'_, ShardIndex>>,
        counts: Vec<u64>,
    ) -> PyResult<Self> {
        let storages: Vec<_> = indexes
            .iter()
            .map(|index| index.index.starts().clone())
            .collect();
        let mix = py.detach(|| StreamMix::new(&storages, &counts));
        Ok(Self {
            mix: raise(py, mix)?,
        })
    }

    #[getter]
    fn num_samples(&self) -> u64 {
        self.mix.num_samples()
    }

    #[pyo3(signature = (settings, *, epoch))]
    fn order(
        &self,
        py: Python<'_>,
        settings: &Bound<'_, PyAny>,
        epoch: u64,
    ) -> PyResult<EpochOrder> {
        let settings = read_settings(settings)?;
        let order = py.detach(|| Order::new(settings, &self.mix, epoch));
        wrap(py, order)
    }

    #[pyo3(signature = (settings, phases, *, epoch_size, epoch))]
    fn scheduled_order(
        &self,
        py: Python<'_>,
        settings: &Bound<'_, PyAny>,
        phases: Vec<(u64, Vec<u64>)>,
        epoch_size: u64,
        epoch: u64,
    ) -> PyResult<EpochOrder> {
        let settings = read_settings(settings)?;
        let order = py.detach(|| {
            let schedule = MixSchedule::new(&phases)?;
            Order::scheduled(settings, &self.mix, &schedule, epoch_size, epoch)
        });
        wrap(py, order)
    }

    fn listed_order(
        &self,
        py: Python<'_>,
        ids: PyBuffer<u64>,
        edges: PyBuffer<u64>,
    ) -> PyResult<EpochOrder> {
        let (ids, edges) = (ids.to_vec(py)?, edges.to_vec(py)?);
        let order = py.detach(|| Order::listed(&self.mix, ids, edges));
        wrap(py, order)
    }
}

/// Reads the attributes that `OrderSettings` of `hocket.stream` has under the same names.
fn read_settings(settings: &Bound<'_, PyAny>) -> PyResult<OrderSettings> {
    let py = settings.py();
    let number = |name: &str| settings.getattr(name)?.extract::<u64>();
    let text = |name: &str| settings.getattr(name)?.extract::<String>();
    Ok(OrderSettings {
        global_batch_size: number("global_batch_size")?,
        num_canonical_nodes: number("num_canonical_nodes")?,
        shuffle: settings.getattr("shuffle")?.extract()?,
        shuffle_seed: number("shuffle_seed")?,
        shuffle_block_size: number("shuffle_block_size")?,
        tail: raise(py, TailPolicy::parse(&text("tail")?))?,
        batching_method: raise(py, Batching::parse(&text("batching_method")?))?,
        sampling_method: raise(py, Sampling::parse(&text("sampling_method")?))?,
        sampling_granularity: number("sampling_granularity")?,
    })
}

fn wrap(py: Python<'_>, order: hocket_stream::Result<Order>) -> PyResult<EpochOrder> {
    Ok(EpochOrder {
        order: Arc::new(raise(py, order)?),
    })
}

/// The order of one epoch.
#[pyclass(frozen, module = "hocket.native._native")]
pub struct EpochOrder {
    pub(crate) order: Arc<Order>,
}

impl EpochOrder {
    fn ids(&self, batch: u64, range: Range<u64>) -> Vec<u64> {
        let mut places = Vec::new();
        self.order.locate(batch, range, &mut places);
        let ids = places.into_iter().map(|place| self.order.storage_id(place));
        ids.collect()
    }

    fn check(&self, batch: u64) -> PyResult<()> {
        let count = self.order.num_batches();
        if batch < count {
            return Ok(());
        }
        Err(PyIndexError::new_err(format!(
            "batch {batch}: expected a number below {count}"
        )))
    }
}

#[pymethods]
impl EpochOrder {
    #[getter]
    fn num_batches(&self) -> u64 {
        self.order.num_batches()
    }

    #[getter]
    fn num_dropped(&self) -> u64 {
        self.order.num_dropped()
    }

    #[getter]
    fn num_repeated(&self) -> u64 {
        self.order.num_repeated()
    }

    fn share(&self, batch: u64, rank: u64, world_size: u64) -> PyResult<(u64, u64)> {
        self.check(batch)?;
        let share = self.order.share(batch, rank, world_size);
        Ok((share.local, share.global))
    }

    fn num_local_samples(&self, py: Python<'_>, rank: u64, world_size: u64) -> u64 {
        py.detach(|| self.order.num_local_samples(rank, world_size))
    }

    fn sample_ids(&self, py: Python<'_>, batch: u64) -> PyResult<Vec<u64>> {
        self.check(batch)?;
        Ok(py.detach(|| self.ids(batch, 0..self.order.batch_len(batch))))
    }

    fn rank_ids(
        &self,
        py: Python<'_>,
        batch: u64,
        rank: u64,
        world_size: u64,
    ) -> PyResult<Vec<u64>> {
        self.check(batch)?;
        let share = self.order.share(batch, rank, world_size);
        Ok(py.detach(|| self.ids(share.from, share.range)))
    }
}

#[pyfunction]
fn mix_counts(py: Python<'_>, phases: Vec<(u64, Vec<u64>)>, position: u64) -> PyResult<Vec<u64>> {
    let schedule = raise(py, MixSchedule::new(&phases))?;
    Ok(schedule.given(position))
}

/// Adds this module's classes to the extension.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyStreamMix>()?;
    module.add_class::<EpochOrder>()?;
    module.add_function(wrap_pyfunction!(mix_counts, module)?)
}
