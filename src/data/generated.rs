//! Data sets that are drawn, not read: noise for speed alone, and token sequences that can be learnt.
//!
//! Drawn from the generator that `torch.manual_seed` seeds, in an order that a few lines of PyTorch can
//! follow (`peers/data.py` does): the same seed gives the same samples here and there.

use super::Dataset;
use super::dataset::numel;
use crate::Result;
use crate::error::Error;
use crate::torch::random::Generator;
use tch::{Device, Kind, Tensor};

/// Most memory a generated data set may take.
const MOST_BYTES: usize = 4 << 30;

/// Gaussian noise with random labels, and a tenth as many samples for testing.
pub(super) fn synthetic(
    shape: &[i64],
    classes: i64,
    samples: usize,
    images: bool,
    seed: u64,
) -> Result<(Dataset, Dataset)> {
    if images && shape.len() != 3 {
        return Err(Error::usage(format!(
            "`data.shape` = {shape:?}: convolutions need [channels, height, width]"
        ))
        .hint("give three sizes, as in data.shape = [3, 32, 32]"));
    }
    check_size(shape, samples, size_of::<f32>())?;
    let flat = [shape.iter().product()];
    let shape = if images { shape } else { flat.as_slice() };
    let mut draw = Draw(Generator::new(seed)?);
    let mut part = |samples: usize| {
        let input = draw.normal(samples * numel(shape))?;
        Dataset::from_floats(input, shape, draw.below(samples, classes)?)
    };
    Ok((part(samples)?, part(test_samples(samples))?))
}

/// Sequences from a fixed random Markov chain, and a tenth as many for testing. The target of a token is
/// the token after it. The chain is the same whatever the seed; the seed draws the walks.
pub(super) fn tokens(context: i64, vocabulary: i64, samples: usize, seed: u64) -> Result<(Dataset, Dataset)> {
    check_size(&[context], samples, 2 * size_of::<i64>())?;
    let chain = Chain::new(vocabulary)?;
    let mut draw = Draw(Generator::new(seed)?);
    let mut part = |samples: usize| {
        let length = numel(&[context]);
        let (mut input, mut target) = (Vec::new(), Vec::new());
        // A walk takes one number to begin and one a step.
        for dice in draw.uniform(samples * (1 + length))?.chunks_exact(1 + length) {
            let mut token = below(dice[0], vocabulary);
            for dice in &dice[1..] {
                input.push(token);
                token = chain.next(token, *dice);
                target.push(token);
            }
        }
        Dataset::from_tokens(input, target, context)
    };
    Ok((part(samples)?, part(test_samples(samples))?))
}

/// Refuses what would not reasonably fit into memory.
fn check_size(shape: &[i64], samples: usize, bytes: usize) -> Result<()> {
    let values = shape
        .iter()
        .map(|size| usize::try_from(*size).ok().filter(|size| *size > 0))
        .try_fold(samples, |product, size| product.checked_mul(size?))
        .filter(|values| *values > 0);
    match values {
        Some(values) if values <= MOST_BYTES / bytes => Ok(()),
        Some(_) => Err(Error::usage(format!(
            "{samples} generated samples of {shape:?} take more than {}",
            crate::units::bytes(MOST_BYTES as u64)
        ))
        .hint("lower data.samples or the size of a sample")),
        None => {
            Err(Error::usage(format!("{samples} generated samples of {shape:?}: sizes must be 1 or more")))
        }
    }
}

fn test_samples(samples: usize) -> usize {
    samples.div_ceil(10)
}

/// The whole number below `end` that a number from 0..1 stands for.
fn below(uniform: f64, end: i64) -> i64 {
    (uniform * end as f64) as i64
}

/// Draws whole tensors, as PyTorch does: its numbers depend on how many are drawn at once.
struct Draw(Generator);

impl Draw {
    fn uniform(&mut self, count: usize) -> Result<Vec<f64>> {
        let tensor = Tensor::f_empty([count as i64], (Kind::Double, Device::Cpu))?;
        self.0.fill_uniform(&tensor, 0.0, 1.0)?;
        Ok(Vec::try_from(tensor)?)
    }

    fn below(&mut self, count: usize, end: i64) -> Result<Vec<i64>> {
        Ok(self.uniform(count)?.into_iter().map(|uniform| below(uniform, end)).collect())
    }

    fn normal(&mut self, count: usize) -> Result<Vec<f32>> {
        let tensor = Tensor::f_empty([count as i64], (Kind::Float, Device::Cpu))?;
        self.0.fill_normal(&tensor, 0.0, 1.0)?;
        Ok(Vec::try_from(tensor)?)
    }
}

/// Four possible successors for every token, the first by far the likeliest.
struct Chain(Vec<i64>);

impl Chain {
    const ODDS: [f64; 4] = [0.7, 0.9, 0.97, 1.0];
    const SEED: u64 = 0x0dd5;

    fn new(vocabulary: i64) -> Result<Self> {
        let count = numel(&[vocabulary]) * Self::ODDS.len();
        Ok(Self(Draw(Generator::new(Self::SEED)?).below(count, vocabulary)?))
    }

    fn successors(&self, token: i64) -> &[i64] {
        &self.0[token as usize * Self::ODDS.len()..][..Self::ODDS.len()]
    }

    fn next(&self, token: i64, dice: f64) -> i64 {
        self.successors(token)[Self::ODDS.iter().take_while(|odds| dice >= **odds).count()]
    }
}

#[cfg(test)]
mod tests {
    use super::super::open;
    use super::*;
    use crate::config::DataSource;

    fn values(tensor: &Tensor) -> Vec<f64> {
        Vec::try_from(tensor.reshape([-1]).to_kind(Kind::Double)).unwrap()
    }

    fn message<T>(result: Result<T>) -> String {
        result.err().expect("an error").to_string()
    }

    #[test]
    fn synthetic_is_noise_drawn_from_the_seed_alone() {
        let source = DataSource::Synthetic { shape: vec![3, 8, 8], classes: 7, samples: 500 };
        let all = |seed| open(&source, true, seed).unwrap().0.batch(&(0..500).collect::<Vec<_>>()).unwrap();
        let batch = all(1);
        assert_eq!(batch.input.size(), [500, 3, 8, 8]);
        assert!(batch.input.mean(Kind::Double).double_value(&[]).abs() < 0.01);
        assert!((batch.input.std(false).double_value(&[]) - 1.0).abs() < 0.01);
        let labels: std::collections::BTreeSet<i64> =
            values(&batch.target).into_iter().map(|v| v as i64).collect();
        assert_eq!(labels.into_iter().collect::<Vec<_>>(), (0..7).collect::<Vec<_>>());
        assert_eq!(values(&all(1).input), values(&batch.input));
        assert_ne!(values(&all(2).input), values(&batch.input));
        assert_eq!(open(&source, false, 1).unwrap().1.batch(&[49]).unwrap().input.size(), [1, 192]);
    }

    #[test]
    fn the_first_draws_are_those_of_pytorch() {
        // Values of `peers/data.py` under PyTorch 2.11; `tests/peers` compares whole sets.
        let source = DataSource::Synthetic { shape: vec![1, 2, 3], classes: 7, samples: 20 };
        let batch = open(&source, true, 1).unwrap().0.batch(&[0, 1, 2, 3]).unwrap();
        let expected = [-1.525_595_9f32, -0.750_231_8, -0.653_980_9, -1.609_484_8];
        assert_eq!(values(&batch.input)[..4], expected.map(f64::from));
        assert_eq!(values(&batch.target), [3.0, 1.0, 1.0, 3.0]);

        let source = DataSource::Tokens { context: 8, vocabulary: 32, samples: 50 };
        let batch = open(&source, false, 3).unwrap().0.batch(&[1]).unwrap();
        assert_eq!(values(&batch.input), [24, 11, 25, 27, 0, 0, 22, 1].map(f64::from));
        assert_eq!(values(&batch.target), [11, 25, 27, 0, 0, 22, 1, 16].map(f64::from));
    }

    #[test]
    fn generated_sets_that_cannot_be_are_refused() {
        let open = |shape: &[i64], samples, images| {
            message(open(&DataSource::Synthetic { shape: shape.to_vec(), classes: 2, samples }, images, 0))
        };
        assert!(open(&[5], 4, true).contains("convolutions need"));
        assert!(open(&[0], 4, false).contains("sizes must be 1 or more"));
        assert!(open(&[-3], 4, false).contains("sizes must be 1 or more"));
        assert!(open(&[1 << 20], 1 << 20, false).contains("take more than 4.0 GiB"));
        assert!(open(&[i64::MAX, 8], 4, false).contains("sizes must be 1 or more"));
    }

    #[test]
    fn the_target_of_a_token_is_the_next_one_and_the_chain_is_predictable() {
        let source = DataSource::Tokens { context: 16, vocabulary: 32, samples: 200 };
        let (train, test) = open(&source, false, 3).unwrap();
        assert_eq!((train.len(), test.len()), (200, 20));
        let batch = train.batch(&(0..200).collect::<Vec<_>>()).unwrap();
        assert_eq!((batch.input.size(), batch.target.size()), (vec![200, 16], vec![200, 16]));
        let (input, target) = (values(&batch.input), values(&batch.target));
        assert_eq!(input[1..16], target[..15]);
        let chain = Chain::new(32).unwrap();
        let pairs: Vec<_> =
            input.iter().zip(&target).map(|(from, to)| (*from as usize, *to as i64)).collect();
        assert!(pairs.iter().all(|(from, to)| chain.successors(*from as i64).contains(to)));
        let likeliest =
            pairs.iter().filter(|(from, to)| chain.successors(*from as i64)[0] == *to).count() as f64;
        assert!((0.65..0.85).contains(&(likeliest / pairs.len() as f64)));
    }
}
