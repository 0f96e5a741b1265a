//! A whole training script with `DataParallel` and a model of one's own: a small network learns to read
//! MNIST digits on two virtual cards.
//!
//! ```text
//! cargo run --release --example dp
//! ```
#![expect(clippy::print_stdout, reason = "a script talks to whoever runs it")]

use dp_vs_ddp::Result;
use dp_vs_ddp::card::{available_cores, pin_current_thread, virtual_cards};
use dp_vs_ddp::config::{DataSource, OptimizerPlan};
use dp_vs_ddp::data::{self, Cut, Loader, LoaderOptions, Part};
use dp_vs_ddp::dp::{DataParallel, Options};
use dp_vs_ddp::model::{self, Model, State};
use dp_vs_ddp::torch::optim::Optimizer;
use std::sync::Arc;
use tch::{Device, Kind, Tensor};

const CARDS: usize = 2;
const BATCH: usize = 64;
const EPOCHS: usize = 3;

/// Two layers. What is registered in the state is what DataParallel copies to the cards and what is saved.
struct Net {
    state: State,
    hidden: Tensor,
    hidden_bias: Tensor,
    output: Tensor,
    output_bias: Tensor,
}

impl Net {
    fn new() -> Self {
        let mut state = State::default();
        let draw = |shape: &[i64], range: f64| {
            Tensor::empty(shape, (Kind::Float, Device::Cpu)).uniform_(-range, range)
        };
        let hidden = state.parameter("hidden.weight", draw(&[784, 256], 1.0 / 28.0));
        let hidden_bias = state.parameter("hidden.bias", draw(&[256], 1.0 / 28.0));
        let output = state.parameter("output.weight", draw(&[256, 10], 1.0 / 16.0));
        let output_bias = state.parameter("output.bias", draw(&[10], 1.0 / 16.0));
        Self { state, hidden, hidden_bias, output, output_bias }
    }
}

impl Model for Net {
    fn forward(&self, input: &Tensor, _train: bool) -> Result<Tensor> {
        let hidden = (input.f_matmul(&self.hidden)? + &self.hidden_bias).f_relu()?;
        Ok(hidden.f_matmul(&self.output)? + &self.output_bias)
    }

    fn state(&self) -> &State {
        &self.state
    }
}

fn main() -> Result<()> {
    let (train, test) = data::open(&DataSource::Mnist10k, false, 0)?;
    let mut loader = Loader::new(
        Arc::new(train),
        LoaderOptions {
            world_size: CARDS,
            cut: Cut::Global(BATCH),
            part: Part::Whole,
            shuffle: true,
            drop_last: false,
            seed: 0,
            workers: 1,
            first_epoch: 0,
        },
    )?;

    // One model a card; the first card's is the one that is trained, the others get its weights each step.
    // This thread works for the first card, so it goes where that card is; the others pin themselves.
    let cards = virtual_cards(&available_cores()?, CARDS, 1);
    pin_current_thread(&cards[0].cores)?;
    let mut parallel =
        DataParallel::new(&cards, Options::default(), |_card| Ok(Box::new(Net::new()) as Box<dyn Model>))?;
    let plan = OptimizerPlan::Sgd { lr: 0.05, momentum: 0.9, weight_decay: 0.0 };
    let mut optimizer = Optimizer::new(plan, parallel.parameters());

    let everything: Vec<usize> = (0..test.len()).collect();
    let test = test.batch(&everything)?;
    for epoch in 1..=EPOCHS {
        let mut sum = 0.0;
        for _ in 0..loader.steps_per_epoch() {
            let batch = loader.next()?;
            sum += parallel.step(&batch.input, &batch.target, model::loss, &mut optimizer)?;
        }
        let output = parallel.evaluate(&test.input)?.output;
        let (right, all) = model::correct(&output, &test.target)?;
        let loss = sum / loader.steps_per_epoch() as f64;
        println!("epoch {epoch}: loss {loss:.4}, {right} of {all} test images right");
    }
    parallel.state().save(std::path::Path::new("target/dp-example.safetensors"))
}
