//! What a step gives, whatever the number of cards: all in f64, so that agreement can be asked for tightly.

use super::*;
use crate::card::{Cores, VirtualCard};
use crate::config::OptimizerPlan;
use crate::error::Kind;
use crate::metrics::phase::settle;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

const SGD: OptimizerPlan = OptimizerPlan::Sgd { lr: 0.05, momentum: 0.9, weight_decay: 0.0 };

/// A model of a few lines: a state, and what to do with it.
struct Toy<F> {
    state: State,
    run: F,
}

impl<F: Fn(&State, &Tensor, bool) -> Result<Tensor> + Send> Model for Toy<F> {
    fn forward(&self, input: &Tensor, train: bool) -> Result<Tensor> {
        (self.run)(&self.state, input, train)
    }
    fn state(&self) -> &State {
        &self.state
    }
}

fn toy(
    fill: impl FnOnce(&mut State),
    run: impl Fn(&State, &Tensor, bool) -> Result<Tensor> + Send + 'static,
) -> Result<Box<dyn Model>> {
    let mut state = State::default();
    fill(&mut state);
    Ok(Box::new(Toy { state, run }))
}

/// The same numbers every time, without order or mean zero.
fn numbers(shape: &[i64], seed: f64) -> Tensor {
    let count = shape.iter().product::<i64>();
    (Tensor::arange(count, (tch::Kind::Double, Device::Cpu)) * 1.7 + seed).sin().reshape(shape)
}

fn entry(state: &State, index: usize) -> &Tensor {
    &state.entries()[index].tensor
}

fn two_layers(_: usize) -> Result<Box<dyn Model>> {
    toy(
        |state| {
            let _ = state.parameter("0.weight", numbers(&[3, 16], 0.0) * 0.5);
            let _ = state.parameter("0.bias", numbers(&[16], 5.0));
            let _ = state.parameter("2.weight", numbers(&[16, 2], 9.0) * 0.5);
        },
        |state, input, _| {
            Ok((input.matmul(entry(state, 0)) + entry(state, 1)).relu().matmul(entry(state, 2)))
        },
    )
}

/// Keeps a running mean of its input, as BatchNorm does, and adds it to the output in evaluation.
fn running_mean(_: usize) -> Result<Box<dyn Model>> {
    toy(
        |state| {
            let _ = state.parameter("weight", numbers(&[3], 0.0));
            let _ = state.buffer("mean", Tensor::zeros([3], (tch::Kind::Double, Device::Cpu)));
            let _ = state.buffer("count", Tensor::zeros([], (tch::Kind::Int64, Device::Cpu)));
        },
        |state, input, train| {
            let (mut mean, mut count) = (entry(state, 1).shallow_clone(), entry(state, 2).shallow_clone());
            if train {
                let batch = input.detach().mean_dim(0, false, tch::Kind::Double);
                mean.copy_(&(&mean * 0.9 + batch * 0.1));
                let _ = count.f_add_scalar_(1)?;
            }
            Ok((input + &mean) * entry(state, 0))
        },
    )
}

fn squared_error(output: &Tensor, target: &Tensor) -> Result<Tensor> {
    Ok((output - target).square().mean(tch::Kind::Double))
}

fn cards(numbers: &[usize]) -> Vec<VirtualCard> {
    numbers.iter().map(|index| VirtualCard { index: *index, cores: Cores(Vec::new()) }).collect()
}

fn parallel(
    count: usize,
    factory: impl Fn(usize) -> Result<Box<dyn Model>> + Send + Sync + 'static,
) -> DataParallel {
    DataParallel::new(&cards(&(0..count).collect::<Vec<_>>()), Options::default(), factory).unwrap()
}

fn batch(rows: i64, step: usize) -> (Tensor, Tensor) {
    (numbers(&[rows, 3], step as f64), numbers(&[rows, 2], 100.0 + step as f64))
}

/// Losses, and every value of the state after them.
fn train(parallel: &mut DataParallel, plan: OptimizerPlan, steps: usize, rows: i64) -> (Vec<f64>, Vec<f64>) {
    let mut optimizer = Optimizer::new(plan, parallel.parameters());
    let losses = (0..steps)
        .map(|step| {
            let (input, target) = batch(rows, step);
            parallel.step(&input, &target, squared_error, &mut optimizer).unwrap()
        })
        .collect();
    (losses, values(parallel.state()))
}

fn values(state: &State) -> Vec<f64> {
    state.entries().iter().flat_map(|entry| flat(&entry.tensor)).collect()
}

fn flat(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_kind(tch::Kind::Double).reshape([-1])).unwrap()
}

fn alone(plan: OptimizerPlan, steps: usize, rows: i64) -> (Vec<f64>, Vec<f64>) {
    let model = two_layers(0).unwrap();
    let parameters = model.state().parameters().map(|entry| entry.tensor.shallow_clone()).collect();
    let mut optimizer = Optimizer::new(plan, parameters);
    let losses = (0..steps)
        .map(|step| {
            let (input, target) = batch(rows, step);
            optimizer.zero_grad().unwrap();
            let loss = squared_error(&model.forward(&input, true).unwrap(), &target).unwrap();
            loss.backward();
            optimizer.step().unwrap();
            loss.double_value(&[])
        })
        .collect();
    (losses, values(model.state()))
}

fn assert_close(ours: &[f64], theirs: &[f64], what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (ours, theirs) in ours.iter().zip(theirs) {
        assert!((ours - theirs).abs() <= 1e-9 * theirs.abs().max(1.0), "{what}: {ours} is not {theirs}");
    }
}

#[test]
fn any_number_of_cards_trains_as_one_does() {
    // Even shares, uneven ones, idle cards, fewer rows than cards, one row.
    for rows in [12, 10, 9, 2, 1] {
        let (losses, weights) = alone(SGD, 20, rows);
        assert!(losses[19] < losses[0]);
        for count in [1, 2, 3, 4, 8] {
            let (ours, our_weights) = train(&mut parallel(count, two_layers), SGD, 20, rows);
            let what = format!("{rows} rows on {count} cards");
            assert_close(&ours, &losses, &what);
            assert_close(&our_weights, &weights, &what);
        }
    }
}

#[test]
fn adam_trains_as_on_one_card_too() {
    let plan = OptimizerPlan::Adam { lr: 0.01, weight_decay: 0.01 };
    let (losses, weights) = alone(plan, 20, 10);
    let (ours, our_weights) = train(&mut parallel(3, two_layers), plan, 20, 10);
    assert_close(&ours, &losses, "losses");
    assert_close(&our_weights, &weights, "weights");
}

fn weighted(
    weights: &[f64],
    factory: impl Fn(usize) -> Result<Box<dyn Model>> + Send + Sync + 'static,
) -> Result<DataParallel> {
    let list: Vec<usize> = (0..weights.len()).collect();
    let options = Options { chunk_weights: Some(weights.to_vec()), ..Options::default() };
    DataParallel::new(&cards(&list), options, factory)
}

#[test]
fn weights_change_who_computes_and_not_what() {
    for (weights, shares) in [
        (&[1.0, 2.0][..], &[3, 7][..]),
        (&[2.0, 1.0, 1.0], &[5, 3, 2]),
        // Cards without rows: the last, one between, the first, all but the last.
        (&[1.0, 1.0, 0.01], &[5, 5]),
        (&[1.0, 0.01, 1.0], &[5, 5]),
        (&[0.01, 1.0, 1.0], &[5, 5]),
        (&[0.01, 0.01, 1.0], &[10]),
    ] {
        let mut parallel = weighted(weights, two_layers).unwrap();
        assert_eq!(parallel.forward(&batch(10, 0).0).unwrap().rows, shares, "{weights:?}");
        let (losses, expected) = alone(SGD, 20, 10);
        let (ours, our_weights) = train(&mut parallel, SGD, 20, 10);
        assert_close(&ours, &losses, &format!("losses with {weights:?}"));
        assert_close(&our_weights, &expected, &format!("weights with {weights:?}"));
    }
}

#[test]
fn a_card_0_without_rows_does_not_run_and_leaves_its_buffers() {
    let mut parallel = weighted(&[0.01, 1.0, 1.0], running_mean).unwrap();
    let before = values(parallel.state());
    let mut recorder = Recorder::new(0);
    let input = numbers(&[4, 3], 0.0);
    let gathered = parallel.run_forward(&input, Mode::Train, &mut recorder).unwrap();
    assert_eq!(gathered.output.size(), [4, 3]);
    assert!(settle(recorder.drain()).unwrap().iter().all(|span| span.phase != Phase::Forward));
    let spans = settle(std::mem::take(&mut parallel.spans)).unwrap();
    let worked = |card| spans.iter().any(|span| span.card == card && span.phase == Phase::Forward);
    assert!(worked(1) && worked(2));
    assert_eq!(values(parallel.state()), before);
    let evaluated = parallel.evaluate(&input).unwrap();
    assert_close(&flat(&evaluated.output), &flat(&(input * numbers(&[3], 0.0))), "evaluation");
}

#[test]
fn weights_that_cannot_be_are_refused() {
    let error = |weights: &[f64]| weighted(weights, two_layers).err().unwrap().to_string();
    assert_eq!(error(&[1.0, 0.0]), "a chunk weight is 0");
    assert_eq!(error(&[1.0, f64::NAN]), "a chunk weight is NaN");
    let options = Options { chunk_weights: Some(vec![1.0]), ..Options::default() };
    let error = DataParallel::new(&cards(&[0, 1]), options, two_layers).err().unwrap();
    assert_eq!(error.to_string(), "1 chunk weights for 2 cards");
}

// Field case 001.
#[test]
fn cards_without_rows_are_not_called_and_rows_keep_their_order() {
    let calls: Arc<Vec<AtomicUsize>> = Arc::new((0..4).map(|_| AtomicUsize::new(0)).collect());
    let counted = Arc::clone(&calls);
    let mut parallel = parallel(4, move |card| {
        let calls = Arc::clone(&counted);
        toy(
            |state| drop(state.parameter("scale", numbers(&[1], 1.0))),
            move |state, input, _| {
                calls[card].fetch_add(1, SeqCst);
                Ok(input * entry(state, 0))
            },
        )
    });
    for (rows, shares) in [(9, vec![3, 3, 3]), (10, vec![3, 3, 3, 1]), (4, vec![1; 4]), (1, vec![1])] {
        let input = numbers(&[rows, 2], 0.0);
        let gathered = parallel.forward(&input).unwrap();
        assert_eq!(gathered.rows, shares);
        assert_eq!(gathered.cards_worked(), shares.len());
        assert_close(&flat(&gathered.output), &flat(&(input * numbers(&[1], 1.0))), "rows in order");
    }
    let calls: Vec<usize> = calls.iter().map(|calls| calls.load(SeqCst)).collect();
    assert_eq!(calls, [4, 3, 3, 2]);
}

// Field case 004.
#[test]
fn a_loss_computed_inside_the_model_is_weighted_by_rows() {
    let own_loss = |_| {
        toy(
            |state| drop(state.parameter("weight", numbers(&[3], 0.0))),
            |state, input, _| Ok((input * entry(state, 0)).square().mean(tch::Kind::Double)),
        )
    };
    let input = numbers(&[10, 3], 2.0);
    let result = |count| {
        let mut parallel = parallel(count, own_loss);
        let gathered = parallel.forward(&input).unwrap();
        let loss = gathered.weighted_mean().unwrap();
        parallel.backward(&loss).unwrap();
        (
            gathered.output.numel(),
            vec![loss.double_value(&[])],
            flat(&grad::grad(&parallel.parameters()[0]).unwrap()),
        )
    };
    let (one, three) = (result(1), result(3));
    assert_eq!((one.0, three.0), (1, 3));
    assert_close(&three.1, &one.1, "loss");
    assert_close(&three.2, &one.2, "gradient");
}

// Field case 005.
#[test]
fn another_axis_than_0_is_refused_at_set_up() {
    let options = Options { dim: 1, ..Options::default() };
    let error = DataParallel::new(&cards(&[0, 1]), options, two_layers).err().unwrap();
    assert_eq!(error.to_string(), "DataParallel along axis 1: only axis 0 is supported");
    assert!(error.advice().unwrap().contains("transpose"));
}

// Field case 010: replicas persist, so a count on the model is one for each card; what must be one for
// all goes into a buffer, which card 0 keeps.
#[test]
fn counts_on_the_model_are_kept_by_card_and_buffers_are_card_0s() {
    let counts: Arc<Mutex<Vec<usize>>> = Arc::new(Mutex::new(vec![0; 2]));
    let seen = Arc::clone(&counts);
    let mut parallel = parallel(2, move |card| {
        let seen = Arc::clone(&seen);
        let own = AtomicUsize::new(0);
        toy(
            |state| drop(state.buffer("calls", Tensor::zeros([], (tch::Kind::Int64, Device::Cpu)))),
            move |state, input, _| {
                seen.lock().unwrap()[card] = own.fetch_add(1, SeqCst) + 1;
                let _ = entry(state, 0).shallow_clone().f_add_scalar_(1)?;
                Ok(input + entry(state, 0))
            },
        )
    });
    let input = Tensor::zeros([4, 1], (tch::Kind::Double, Device::Cpu));
    for _ in 0..9 {
        parallel.forward(&input).unwrap();
    }
    // Every card saw the buffer as card 0 left it after nine forwards, and added one.
    assert_eq!(flat(&parallel.forward(&input).unwrap().output), [10.0; 4]);
    assert_eq!(*counts.lock().unwrap(), [10, 10]);
    assert_eq!(values(parallel.state()), [10.0]);
}

// Field case 011.
#[test]
fn a_model_without_parameters_runs() {
    let relu = |_| toy(|_| (), |_, input, _| Ok(input.relu()));
    for count in [1, 2] {
        let mut parallel = parallel(count, relu);
        let (losses, weights) = train_without_parameters(&mut parallel);
        assert_close(&losses, &[0.5, 0.5], "losses");
        assert!(weights.is_empty() && parallel.without_gradient().is_empty());
    }
}

fn train_without_parameters(parallel: &mut DataParallel) -> (Vec<f64>, Vec<f64>) {
    let mut optimizer = Optimizer::new(SGD, parallel.parameters());
    let input = Tensor::from_slice(&[1.0, -1.0]).reshape([2, 1]);
    let target = Tensor::zeros([2, 1], (tch::Kind::Double, Device::Cpu));
    let losses =
        (0..2).map(|_| parallel.step(&input, &target, squared_error, &mut optimizer).unwrap()).collect();
    (losses, values(parallel.state()))
}

// Field case 013: the first listed card is the one that gathers and trains, whatever its number.
#[test]
fn the_first_listed_card_is_card_0() {
    let built: Arc<Mutex<Vec<(usize, String)>>> = Arc::default();
    let seen = Arc::clone(&built);
    let here = std::thread::current().name().unwrap().to_owned();
    let mut parallel = DataParallel::new(&cards(&[3, 0]), Options::default(), move |card| {
        let thread = std::thread::current().name().unwrap_or_default().to_owned();
        seen.lock().unwrap().push((card, thread));
        two_layers(card)
    })
    .unwrap();
    assert_eq!(*built.lock().unwrap(), [(3, here), (0, "card0".to_owned())]);
    assert_eq!(parallel.cards(), [3, 0]);
    let (losses, _) = train(&mut parallel, SGD, 3, 4);
    assert_close(&losses, &alone(SGD, 3, 4).0, "losses");
    let mut recorder = Recorder::new(3);
    parallel.run_forward(&batch(4, 0).0, Mode::Train, &mut recorder).unwrap();
    assert!(
        settle(recorder.drain()).unwrap().iter().any(|span| span.phase == Phase::Gather && span.card == 3)
    );
    assert!(
        settle(std::mem::take(&mut parallel.spans))
            .unwrap()
            .iter()
            .all(|span| span.card == 0 && span.phase != Phase::Gather)
    );
}

// Field case 014.
#[test]
fn card_lists_that_cannot_be_are_refused() {
    let error =
        |list: &[usize]| DataParallel::new(&cards(list), Options::default(), two_layers).err().unwrap();
    assert_eq!(error(&[]).to_string(), "DataParallel needs at least one card");
    assert_eq!(error(&[0, 1, 0]).to_string(), "card 0 is listed twice");
    let meter = Some(Arc::new(Meter::create(2).unwrap()));
    let few = DataParallel::new(&cards(&[0, 2]), Options { meter, ..Options::default() }, two_layers)
        .err()
        .unwrap();
    assert_eq!(few.to_string(), "card 2 has no counters: the meter holds 2 cards");
}

#[test]
fn one_card_takes_the_plain_path() {
    let mut parallel = parallel(1, two_layers);
    let mut recorder = Recorder::new(0);
    let gathered = parallel.run_forward(&batch(4, 0).0, Mode::Train, &mut recorder).unwrap();
    assert_eq!(gathered.cards_worked(), 1);
    // Not a leaf: it is the model's own output, with its history.
    assert!(!gathered.output.is_leaf());
    let phases = settle(recorder.drain()).unwrap();
    assert!(phases.iter().all(|span| !matches!(span.phase, Phase::Replicate | Phase::Gather)), "{phases:?}");
}

// Field cases 020 and 148.
#[test]
fn a_thousand_steps_give_the_same_bits_twice() {
    let run = || {
        let mut parallel = parallel(4, running_mean);
        let mut optimizer = Optimizer::new(SGD, parallel.parameters());
        let losses: Vec<u64> = (0..1000)
            .map(|step| {
                let (input, target) = (numbers(&[11, 3], step as f64), numbers(&[11, 3], 7.0));
                parallel.step(&input, &target, squared_error, &mut optimizer).unwrap().to_bits()
            })
            .collect();
        (losses, values(parallel.state()).into_iter().map(f64::to_bits).collect::<Vec<_>>())
    };
    assert_eq!(run(), run());
}

thread_local! {
    static HOOK: std::cell::RefCell<Option<grad::Hook>> = const { std::cell::RefCell::new(None) };
}

// Field case 020: a hook set anew before every forward, on four threads at once.
#[test]
fn callbacks_of_replica_threads_are_counted_exactly() {
    let calls: Arc<Vec<AtomicUsize>> = Arc::new((0..4).map(|_| AtomicUsize::new(0)).collect());
    let counted = Arc::clone(&calls);
    let mut parallel = parallel(4, move |card| {
        let calls = Arc::clone(&counted);
        toy(
            |state| drop(state.parameter("weight", numbers(&[3], 0.0))),
            move |state, input, _| {
                let calls = Arc::clone(&calls);
                let count = move || {
                    calls[card].fetch_add(1, SeqCst);
                    Ok(())
                };
                let hook = grad::on_gradient(entry(state, 0), count)?;
                HOOK.with_borrow_mut(|slot| *slot = Some(hook));
                Ok(input * entry(state, 0))
            },
        )
    });
    let mut optimizer = Optimizer::new(SGD, parallel.parameters());
    for step in 0..1000 {
        let (input, target) = (numbers(&[8, 3], f64::from(step)), numbers(&[8, 3], 1.0));
        parallel.step(&input, &target, squared_error, &mut optimizer).unwrap();
    }
    assert_eq!(calls.iter().map(|calls| calls.load(SeqCst)).collect::<Vec<_>>(), [1000; 4]);
}

// Field case 022: weights in a list, one of them used on card 0 only.
#[test]
fn weights_that_one_card_does_not_use_are_summed_right() {
    let experts = |_| {
        toy(
            |state| {
                for expert in 0..4 {
                    let _ = state.parameter(format!("experts.{expert}"), numbers(&[3], f64::from(expert)));
                }
            },
            // The sign of the first value of the first row chooses: 1, or else 0 and 2.
            |state, input, _| {
                let positive = input.double_value(&[0, 0]) > 0.0;
                Ok(if positive { input * entry(state, 1) } else { input * entry(state, 0) * entry(state, 2) })
            },
        )
    };
    let input = Tensor::from_slice(&[1.0, 2.0, 3.0, -1.0, 2.0, 5.0]).reshape([2, 3]);
    let mut parallel = parallel(2, experts);
    let gathered = parallel.forward(&input).unwrap();
    parallel.backward(&gathered.output.sum(tch::Kind::Double)).unwrap();
    let gradients: Vec<_> = parallel.parameters().iter().map(|p| grad::grad(p).map(|g| flat(&g))).collect();
    let second = [-1.0, 2.0, 5.0];
    let times = |other: f64| -> Vec<f64> {
        flat(&numbers(&[3], other)).iter().zip(second).map(|(a, b)| a * b).collect()
    };
    assert_close(gradients[0].as_ref().unwrap(), &times(2.0), "expert 0");
    assert_close(gradients[1].as_ref().unwrap(), &[1.0, 2.0, 3.0], "expert 1");
    assert_close(gradients[2].as_ref().unwrap(), &times(0.0), "expert 2");
    assert_eq!(gradients[3], None);
    assert_eq!(parallel.without_gradient(), ["experts.3"]);
}

// Field case 023.
#[test]
fn frozen_and_unused_weights_are_left_alone_and_the_unused_listed() {
    let with_head = |card| {
        toy(
            |state| {
                let _ = state.parameter("used", numbers(&[3], 1.0));
                let _ = state.parameter("head", numbers(&[3], 2.0));
                // What a replica draws for itself does not matter: it gets card 0's.
                let _ = state.frozen("embedding", numbers(&[3], card as f64));
            },
            |state, input, _| Ok(input * entry(state, 0) + entry(state, 2)),
        )
    };
    for plan in [SGD, OptimizerPlan::Adam { lr: 0.1, weight_decay: 0.1 }] {
        let mut parallel = parallel(2, with_head);
        let mut optimizer = Optimizer::new(plan, parallel.parameters());
        for step in 0..3 {
            let (input, target) = (numbers(&[4, 3], f64::from(step)), numbers(&[4, 3], 3.0));
            parallel.step(&input, &target, squared_error, &mut optimizer).unwrap();
        }
        assert_eq!(parallel.without_gradient(), ["head"]);
        assert_eq!(values(parallel.state())[3..6], flat(&numbers(&[3], 2.0)));
        assert_eq!(values(parallel.state())[6..], flat(&numbers(&[3], 0.0)));
        let input = numbers(&[4, 3], 0.0);
        let output = parallel.evaluate(&input).unwrap().output;
        let alone = input * entry(parallel.state(), 0) + numbers(&[3], 0.0);
        assert_close(&flat(&output), &flat(&alone), "frozen weights reach every card");
        assert_ne!(values(parallel.state())[..3], flat(&numbers(&[3], 1.0)));
    }
}

#[test]
fn buffers_are_those_of_card_0s_rows() {
    let mut both = parallel(2, running_mean);
    let mut first = parallel(1, running_mean);
    for step in 0..5 {
        let input = numbers(&[6, 3], f64::from(step));
        both.forward(&input).unwrap();
        first.forward(&input.narrow(0, 0, 3)).unwrap();
    }
    assert_close(&values(both.state()), &values(first.state()), "buffers");
    assert_eq!(values(both.state()).last(), Some(&5.0));
}

#[test]
fn gradients_add_up_until_they_are_cleared() {
    let mut parallel = parallel(2, two_layers);
    let mut gradient = || {
        let (input, target) = batch(4, 1);
        let output = parallel.forward(&input).unwrap().output;
        parallel.backward(&squared_error(&output, &target).unwrap()).unwrap();
        flat(&grad::grad(&parallel.parameters()[0]).unwrap())
    };
    let once: Vec<f64> = gradient().iter().map(|value| 2.0 * value).collect();
    assert_close(&gradient(), &once, "two backwards");
}

#[test]
fn evaluation_leaves_no_history_and_no_trace_in_buffers() {
    let mut parallel = parallel(2, running_mean);
    let output = parallel.evaluate(&numbers(&[5, 3], 0.0)).unwrap().output;
    assert!(!output.requires_grad());
    assert_eq!(values(parallel.state())[3..], [0.0; 4]);
    let loss = numbers(&[], 0.0).set_requires_grad(true) * 1.0;
    assert!(parallel.backward(&loss).unwrap_err().to_string().contains("without a forward"));
}

#[test]
fn a_loss_of_something_else_is_refused() {
    let mut parallel = parallel(2, two_layers);
    let (input, target) = batch(4, 0);
    let old = parallel.forward(&input).unwrap().output;
    parallel.forward(&input).unwrap();
    let error = parallel.backward(&squared_error(&old, &target).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "the loss does not depend on the output of the last forward");
}

/// Works until `trip` says what to do instead, on card 1 alone.
fn tripping(
    trip: &Arc<Mutex<Option<Trip>>>,
) -> impl Fn(usize) -> Result<Box<dyn Model>> + Send + Sync + use<> {
    let trip = Arc::clone(trip);
    move |card| {
        let trip = Arc::clone(&trip);
        toy(
            |state| drop(state.parameter("weight", numbers(&[3], 0.0))),
            move |state, input, _| {
                let now = if card == 1 { trip.lock().unwrap().take() } else { None };
                match now {
                    Some(Trip::Fail) => Err(Error::usage("no such layer")),
                    Some(Trip::Panic) => panic!("a model's own panic"),
                    Some(Trip::Sleep(time)) => {
                        std::thread::sleep(time);
                        Ok(input.shallow_clone())
                    }
                    Some(Trip::Shape) => Ok(input.sum_dim_intlist(1, false, tch::Kind::Double)),
                    None => Ok(input * entry(state, 0)),
                }
            },
        )
    }
}

enum Trip {
    Fail,
    Panic,
    Sleep(Duration),
    Shape,
}

#[test]
fn a_failing_card_is_named_and_the_next_step_works() {
    let trip = Arc::new(Mutex::new(None));
    let mut parallel = parallel(3, tripping(&trip));
    let input = numbers(&[6, 3], 0.0);
    for (what, expected) in [
        (Trip::Fail, "card 1: no such layer"),
        (Trip::Panic, "card 1: panicked: a model's own panic"),
        (Trip::Shape, "cannot gather: card 1 returned Double [2], card 0 returned Double [2, 3]"),
    ] {
        *trip.lock().unwrap() = Some(what);
        assert_eq!(parallel.forward(&input).unwrap_err().to_string(), expected);
        let gathered = parallel.forward(&input).unwrap();
        parallel.backward(&gathered.output.sum(tch::Kind::Double)).unwrap();
    }
}

#[test]
fn a_card_that_fails_to_build_is_named() {
    let factory = |card| if card == 2 { Err(Error::usage("no weights")) } else { two_layers(card) };
    let error = DataParallel::new(&cards(&[0, 1, 2]), Options::default(), factory).err().unwrap();
    assert_eq!(error.to_string(), "card 2: no weights");
    let different = |card| if card == 1 { running_mean(card) } else { two_layers(card) };
    let error = DataParallel::new(&cards(&[0, 1]), Options::default(), different).err().unwrap();
    assert!(error.to_string().starts_with("card 1: its model differs from card 0's: "), "{error}");
}

// Field case 017, as far as it has a meaning without a link between cards.
#[test]
fn a_missed_deadline_names_the_card_and_ends_all_work() {
    let trip = Arc::new(Mutex::new(Some(Trip::Sleep(Duration::from_secs(3)))));
    let options = Options { deadline: Duration::from_millis(50), ..Options::default() };
    let mut parallel = DataParallel::new(&cards(&[0, 1, 2]), options, tripping(&trip)).unwrap();
    let input = numbers(&[6, 3], 0.0);
    let start = Instant::now();
    let error = parallel.forward(&input).unwrap_err();
    assert_eq!(
        (error.kind(), error.to_string().as_str()),
        (Kind::Timeout, "card 1 did not answer within 0.05 s")
    );
    assert!(error.advice().unwrap().contains("run.deadline_s"));
    assert_eq!(parallel.forward(&input).unwrap_err().to_string(), "card 1 was stopped by an earlier failure");
    drop(parallel);
    assert!(
        start.elapsed() < Duration::from_millis(1500),
        "dropping does not wait for a lost thread for ever"
    );
}

#[test]
fn long_pauses_between_steps_are_not_overdue() {
    let options = Options { deadline: Duration::from_millis(20), ..Options::default() };
    let mut parallel = DataParallel::new(&cards(&[0, 1]), options, two_layers).unwrap();
    std::thread::sleep(Duration::from_millis(80));
    parallel.forward(&batch(4, 0).0).unwrap();
}

#[test]
fn dropping_joins_the_threads() {
    let alive = Arc::new(());
    let held = Arc::clone(&alive);
    let mut parallel = parallel(4, move |card| {
        let held = Arc::clone(&held);
        toy(
            |state| drop(state.parameter("w", numbers(&[3], 0.0))),
            move |state, input, _| {
                let _ = &held;
                Ok(input * entry(state, 0) * (card as f64).signum().abs())
            },
        )
    });
    parallel.forward(&numbers(&[8, 3], 0.0)).unwrap();
    assert!(Arc::strong_count(&alive) > 4);
    drop(parallel);
    assert_eq!(Arc::strong_count(&alive), 1);
}

#[test]
fn phases_of_a_thread_do_not_overlap_and_each_card_tells_its_own() {
    let mut parallel = parallel(3, two_layers);
    let mut recorder = Recorder::new(0);
    let mut spans = Vec::new();
    for step in 0..3 {
        recorder.set_step(step);
        let (input, target) = batch(9, 0);
        let gathered = parallel.run_forward(&input, Mode::Train, &mut recorder).unwrap();
        let loss = squared_error(&gathered.output, &target).unwrap();
        let seed = recorder.time(Phase::Loss, || parallel.seed(&loss)).unwrap();
        parallel.run_backward(seed, &mut recorder).unwrap();
        spans.extend(settle(std::mem::take(&mut parallel.spans)).unwrap());
        spans.extend(settle(recorder.drain()).unwrap());
    }
    for card in 0..3 {
        let mut own: Vec<_> = spans.iter().filter(|span| span.card == card).collect();
        own.sort_by_key(|span| span.start);
        for pair in own.windows(2) {
            assert!(pair[0].start.0 + pair[0].duration.0 <= pair[1].start.0, "{pair:?}");
        }
        let phases: Vec<_> = own.iter().filter(|span| span.step == 1).map(|span| span.phase.name()).collect();
        let expected: &[&str] = if card == 0 {
            &[
                "scatter",
                "replicate",
                "forward",
                "wait",
                "gather",
                "loss",
                "backward",
                "wait",
                "reduce",
                "wait",
                "reduce",
            ]
        } else {
            &["wait", "scatter", "replicate", "forward", "wait", "scatter", "backward"]
        };
        assert_eq!(phases, expected, "card {card}");
    }
}

#[test]
fn waiting_is_charged_to_the_card_that_waits() {
    let trip = Arc::new(Mutex::new(None));
    let meter = Arc::new(Meter::create(2).unwrap());
    let options = Options { meter: Some(Arc::clone(&meter)), ..Options::default() };
    let mut parallel = DataParallel::new(&cards(&[0, 1]), options, tripping(&trip)).unwrap();
    let waited = |card: usize| meter.card(card).wait_wall_ns.load(SeqCst);
    let before = waited(0);
    *trip.lock().unwrap() = Some(Trip::Sleep(Duration::from_millis(60)));
    parallel.forward(&numbers(&[2, 3], 0.0)).unwrap();
    assert!(waited(0) - before >= 50_000_000);
}
