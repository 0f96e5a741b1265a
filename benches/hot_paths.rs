//! The paths that run once a step or more: bucket plan, reducer, and the shared-memory all-reduce beside
//! a plain copy of the same bytes. `cargo bench --bench hot_paths`

#![allow(clippy::expect_used, reason = "a bench that cannot run has nothing to say")]
#![allow(missing_docs, reason = "criterion's macros make public items without docs")]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use dp_vs_ddp::comm::{Collective, Shm};
use dp_vs_ddp::ddp::bucket::{self, Item};
use dp_vs_ddp::ddp::reducer::Reducer;
use dp_vs_ddp::metrics::stats::median_interval;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};
use tch::{Device, Kind, Tensor};

const RANKS: usize = 2;
const DEADLINE: Duration = Duration::from_secs(60);

/// As many parameters as a ResNet-50 has.
const PARAMETERS: usize = 161;

fn items() -> Vec<Item> {
    (0..PARAMETERS).map(|i| Item { bytes: 4 << (i % 20), kind: Kind::Float, device: Device::Cpu }).collect()
}

fn deciding(c: &mut Criterion) {
    let items = items();
    let order: Vec<usize> = (0..PARAMETERS).rev().collect();
    let limits = [1 << 20, 25 << 20];
    c.bench_function("bucket plan of 161 parameters", |b| {
        b.iter(|| bucket::assign(black_box(&items), black_box(&order), &limits));
    });
    let mut reducer = Reducer::new(&bucket::assign(&items, &order, &limits), PARAMETERS);
    c.bench_function("reducer, a step of 161 parameters", |b| {
        b.iter(|| {
            reducer.prepare();
            for &parameter in &order {
                black_box(reducer.mark_ready(parameter).expect("each is marked once"));
            }
        });
    });
    let values: Vec<f64> = (0..5).map(|i| 1.4 + 0.01 * f64::from(i)).collect();
    c.bench_function("95 % interval over 5 rounds", |b| {
        b.iter(|| median_interval("ratio", black_box(&values), 0))
    });
}

fn moving(c: &mut Criterion) {
    let mut group = c.benchmark_group("a bucket of");
    for kib in [64_usize, 1024, 25 * 1024] {
        let len = kib * 1024 / 4;
        group.throughput(Throughput::Bytes((len * 4) as u64));
        group.bench_with_input(BenchmarkId::new("copy", format!("{kib} KiB")), &len, |b, &len| {
            let (from, mut to) = (floats(len), floats(len));
            b.iter(|| to.copy_(&from));
        });
        group.bench_with_input(
            BenchmarkId::new("all-reduce, 2 ranks", format!("{kib} KiB")),
            &len,
            |b, &len| {
                b.iter_custom(|iterations| all_reduce(len, iterations));
            },
        );
    }
    group.finish();
}

fn floats(len: usize) -> Tensor {
    Tensor::zeros([len as i64], (Kind::Float, Device::Cpu))
}

/// The slowest rank's time: that is what a step waits for.
fn all_reduce(len: usize, iterations: u64) -> Duration {
    let start = Barrier::new(RANKS);
    let ranks = Shm::threads(RANKS, DEADLINE).expect("shared memory");
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|mut rank| {
                let start = &start;
                scope.spawn(move || {
                    let buffer = rank.allocate(len, Kind::Float).expect("memory");
                    rank.all_reduce(&buffer).expect("warm-up");
                    start.wait();
                    let began = Instant::now();
                    for _ in 0..iterations {
                        rank.all_reduce(&buffer).expect("all-reduce");
                    }
                    began.elapsed()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("rank")).max().unwrap_or_default()
    })
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2)).sample_size(20);
    targets = deciding, moving
}
criterion_main!(benches);
