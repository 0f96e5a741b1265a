//! The counting allocator, in a process of its own: it is installed once and counts everything.

#![cfg(feature = "engines")]
#![allow(clippy::unwrap_used, reason = "a test may panic, in its helpers too")]

use dp_vs_ddp::card::Meter;
use dp_vs_ddp::config::{ModelPlan, OptimizerPlan};
use dp_vs_ddp::torch::{grad, memory, optim::Optimizer, threads};
use dp_vs_ddp::{Result, model};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use tch::{Device, Kind, Tensor};

/// Card 0 belongs to the process, the others to the tests, one each.
const CARDS: usize = 5;
const MIB: u64 = 1 << 20;

fn meter() -> (&'static Arc<Meter>, MutexGuard<'static, ()>) {
    static METER: OnceLock<Arc<Meter>> = OnceLock::new();
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let meter = METER.get_or_init(|| {
        let meter = Arc::new(Meter::create(CARDS).unwrap());
        memory::install(Arc::clone(&meter)).unwrap();
        meter
    });
    (meter, guard)
}

fn live(meter: &Meter, card: usize) -> u64 {
    meter.card(card).live_bytes.load(Ordering::Relaxed)
}

fn peak(meter: &Meter, card: usize) -> u64 {
    meter.card(card).peak_bytes.load(Ordering::Relaxed)
}

fn mebibytes(count: i64) -> Tensor {
    Tensor::zeros([count << 18], (Kind::Float, Device::Cpu))
}

#[test]
fn bytes_are_counted_for_the_card_of_the_thread_and_the_peak_stays() {
    let (meter, _guard) = meter();
    memory::set_thread_card(1);
    assert_eq!(live(meter, 1), 0);
    let a = mebibytes(3);
    assert_eq!(live(meter, 1), 3 * MIB);
    let b = mebibytes(2);
    drop(a);
    assert_eq!((live(meter, 1), peak(meter, 1)), (2 * MIB, 5 * MIB));
    memory::reset_peak(meter, 1);
    assert_eq!(peak(meter, 1), 2 * MIB);
    drop(b);
    assert_eq!((live(meter, 1), peak(meter, 1)), (0, 2 * MIB));
    assert_eq!(a_vector_load_address(&mebibytes(1)) % 64, 0, "libtorch's alignment is kept");
}

fn a_vector_load_address(tensor: &Tensor) -> usize {
    tensor.data_ptr() as usize
}

#[test]
fn a_block_is_counted_down_on_its_card_whoever_frees_it() {
    let (meter, _guard) = meter();
    memory::set_thread_card(2);
    let tensor = mebibytes(4);
    let freed_elsewhere = std::thread::spawn(move || {
        memory::set_thread_card(3);
        let own = mebibytes(1);
        drop(tensor);
        own
    });
    let own = freed_elsewhere.join().unwrap();
    assert_eq!((live(meter, 2), peak(meter, 2)), (0, 4 * MIB));
    assert_eq!((live(meter, 3), peak(meter, 3)), (MIB, MIB));
    drop(own);
    assert_eq!(live(meter, 3), 0);
}

#[test]
fn a_thread_that_says_nothing_counts_for_the_process_and_unknown_cards_for_nobody() {
    let (meter, _guard) = meter();
    let everywhere = || (0..CARDS).map(|card| live(meter, card)).sum::<u64>();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            memory::set_process_card(0);
            let before = live(meter, 0);
            let tensor = mebibytes(2);
            assert_eq!(live(meter, 0) - before, 2 * MIB);
            drop(tensor);
            assert_eq!(live(meter, 0), before);
            memory::set_thread_card(CARDS);
            let all = everywhere();
            let _tensor = mebibytes(2);
            assert_eq!(everywhere(), all);
        });
    });
}

#[test]
fn a_second_allocator_is_refused() {
    let (meter, _guard) = meter();
    let error = memory::install(Arc::clone(meter)).unwrap_err();
    assert!(error.to_string().contains("already installed"), "{error}");
}

/// Losses are plain numbers and no step keeps its graph: memory is flat, exactly.
#[test]
fn training_keeps_its_memory_flat_over_many_steps() -> Result<()> {
    let (meter, _guard) = meter();
    memory::set_thread_card(4);
    threads::set_intra_op(1);
    let plan = ModelPlan::Convnet { channels: 1, classes: 10, batch_norm: true };
    let model = model::build(&plan, Device::Cpu, 1)?;
    let parameters = model.state().parameters().map(|entry| entry.tensor.shallow_clone()).collect();
    let mut optimizer = Optimizer::new(OptimizerPlan::Adam { lr: 1e-3, weight_decay: 0.0 }, parameters);
    let input = Tensor::zeros([4, 1, 8, 8], (Kind::Float, Device::Cpu));
    let target = Tensor::zeros([4], (Kind::Int64, Device::Cpu));
    let mut losses = Vec::new();
    let mut after_warmup = None;
    for step in 0..100 {
        optimizer.zero_grad()?;
        let loss = model::loss(&model.forward(&input, true)?, &target)?;
        grad::backward(&[&loss], &[None])?;
        optimizer.step()?;
        losses.push(loss.double_value(&[]));
        drop(loss);
        if step == 5 {
            memory::reset_peak(meter, 4);
        }
        // From the reset on, one whole step shows the peak of every step.
        if step == 6 {
            after_warmup = Some((live(meter, 4), peak(meter, 4)));
        }
    }
    assert_eq!(Some((live(meter, 4), peak(meter, 4))), after_warmup);
    assert!(losses[99] < losses[0], "{} {}", losses[0], losses[99]);
    let (weights, moments): (u64, u64) = (94_410 * 4, 2 * 94_410 * 4);
    assert!(live(meter, 4) > weights + moments, "weights and Adam's moments are in it: {}", live(meter, 4));
    Ok(())
}
