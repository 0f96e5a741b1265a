//! BatchNorm over the samples of all ranks: PyTorch's SyncBatchNorm.
//!
//! Knows ranks only as something that sums numbers over them. One sum in forward, one in backward; every
//! rank must come to both, one without samples too.

use crate::Result;
use crate::error::{Error, Kind};
use crate::torch::{grad, no_grad};
use std::sync::Arc;
use tch::{Kind as Type, Tensor};

/// Sums numbers over ranks, in order. Every rank calls it equally often, with as many numbers.
pub trait SumOverRanks: Send + Sync {
    /// Element by element, the same bits on all ranks.
    fn sum(&self, values: Vec<f64>) -> Result<Vec<f64>>;
}

/// What belongs to one BatchNorm of `channels` channels: tensors of shape `[channels]`.
#[derive(Debug, Clone, Copy)]
pub struct Norm<'a> {
    /// Scale.
    pub weight: &'a Tensor,
    /// Shift.
    pub bias: &'a Tensor,
    /// Moved in place.
    pub running_mean: &'a Tensor,
    /// Moved in place, by the variance without bias.
    pub running_var: &'a Tensor,
    /// How much of the new statistics goes into the running ones.
    pub momentum: f64,
    /// Added to the variance.
    pub epsilon: f64,
}

/// Normalises `x` (`[batch, channels, ...]`) in training by mean and variance over all ranks' samples.
///
/// Its gradient takes the losses of all ranks as one sum: ranks that weigh their losses must have done so
/// before backward.
pub fn sync_batch_norm(x: &Tensor, norm: Norm, group: &Arc<dyn SumOverRanks>) -> Result<Tensor> {
    let (output, statistics) = no_grad(|| forward(x, norm, group.as_ref()))?;
    let (input, weight) = (x.detach(), norm.weight.detach());
    let group = Arc::clone(group);
    grad::function(&[x, norm.weight, norm.bias], &output, move |gradient| {
        no_grad(|| backward(gradient, &input, &weight, &statistics, group.as_ref()))
    })?;
    Ok(output)
}

/// Over all ranks.
struct Statistics {
    /// `[channels]`.
    mean: Tensor,
    /// `1 / sqrt(variance + epsilon)`, `[channels]`.
    inverse: Tensor,
    /// Values a channel.
    count: f64,
}

/// All dimensions but the channels'.
fn others(x: &Tensor) -> Vec<i64> {
    (0..x.dim() as i64).filter(|dimension| *dimension != 1).collect()
}

/// A value a channel, in a shape that goes with `x`.
fn along(values: &Tensor, x: &Tensor) -> Result<Tensor> {
    let mut shape = vec![1; x.dim()];
    shape[1] = -1;
    Ok(values.f_view(shape.as_slice())?)
}

fn doubles(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(Vec::try_from(tensor.f_to_kind(Type::Double)?.f_contiguous()?)?)
}

fn floats(values: &[f64]) -> Result<Tensor> {
    Ok(Tensor::f_from_slice(values)?.f_to_kind(Type::Float)?)
}

fn forward(x: &Tensor, norm: Norm, group: &dyn SumOverRanks) -> Result<(Tensor, Statistics)> {
    let channels = norm.weight.size1()? as usize;
    let own = x.numel() as f64 / channels.max(1) as f64;
    // Sum, sum of squares, count. In doubles the difference of squares below loses nothing of a float.
    let mut sums = vec![0.0; 2 * channels];
    if own > 0.0 {
        let (var, mean) = x.f_to_kind(Type::Float)?.f_var_mean_dim(others(x).as_slice(), false, false)?;
        for (channel, (mean, var)) in doubles(&mean)?.into_iter().zip(doubles(&var)?).enumerate() {
            sums[channel] = mean * own;
            sums[channels + channel] = (var + mean * mean) * own;
        }
    }
    sums.push(own);
    let sums = group.sum(sums)?;
    let count = sums[2 * channels];
    if count < 2.0 {
        return Err(Error::new(
            Kind::Torch,
            format!("batch norm saw {count} values a channel on all ranks together, which have no variance"),
        )
        .hint("use a larger batch"));
    }
    let mean: Vec<f64> = sums[..channels].iter().map(|sum| sum / count).collect();
    let square = sums[channels..2 * channels].iter();
    let var: Vec<f64> = square.zip(&mean).map(|(sum, mean)| (sum / count - mean * mean).max(0.0)).collect();
    let unbiased: Vec<f64> = var.iter().map(|var| var * count / (count - 1.0)).collect();
    let move_to = |running: &Tensor, new: &[f64]| -> Result<()> {
        let new = floats(new)?.f_to_kind(running.kind())?;
        let _ = running.shallow_clone().f_lerp_(&new, norm.momentum)?;
        Ok(())
    };
    move_to(norm.running_mean, &mean)?;
    move_to(norm.running_var, &unbiased)?;
    let inverse: Vec<f64> = var.iter().map(|var| 1.0 / (var + norm.epsilon).sqrt()).collect();
    let (mean, var) = (floats(&mean)?, floats(&var)?);
    let output = if own > 0.0 {
        let (weight, bias) = (Some(norm.weight), Some(norm.bias));
        // As in evaluation: by given statistics, which are all that differs here.
        x.f_batch_norm(weight, bias, Some(&mean), Some(&var), false, 0.0, norm.epsilon, true)?
    } else {
        x.f_empty_like()?
    };
    Ok((output, Statistics { mean, inverse: floats(&inverse)?, count }))
}

/// Gradients of input, weight and bias. With `n` values a channel, `h` the normalised input, `g` the
/// gradient of the output and sums over all ranks:
/// `dx = weight * inverse * (g - sum(g) / n - h * sum(g h) / n)`. Those of weight and bias are this
/// rank's `sum(g h)` and `sum(g)`, which are averaged with all other gradients.
fn backward(
    gradient: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    statistics: &Statistics,
    group: &dyn SumOverRanks,
) -> Result<Vec<Tensor>> {
    let Statistics { mean, inverse, count } = statistics;
    let channels = weight.size1()? as usize;
    let g = gradient.f_to_kind(Type::Float)?;
    let h = x.f_to_kind(Type::Float)?.f_sub(&along(mean, x)?)?.f_mul(&along(inverse, x)?)?;
    let sum = |tensor: &Tensor| -> Result<Tensor> {
        Ok(tensor.f_sum_dim_intlist(others(x).as_slice(), false, Type::Float)?)
    };
    let (own, own_h) = (sum(&g)?, sum(&g.f_mul(&h)?)?);
    let mut sums = doubles(&own)?;
    sums.extend(doubles(&own_h)?);
    let sums: Vec<f64> = group.sum(sums)?.into_iter().map(|sum| sum / count).collect();
    let (shared, shared_h) = (floats(&sums[..channels])?, floats(&sums[channels..])?);
    let dx = g
        .f_sub(&along(&shared, x)?)?
        .f_sub(&h.f_mul(&along(&shared_h, x)?)?)?
        .f_mul(&along(&weight.f_to_kind(Type::Float)?.f_mul(inverse)?, x)?)?;
    Ok(vec![dx.f_to_kind(x.kind())?, own_h.f_to_kind(weight.kind())?, own.f_to_kind(weight.kind())?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    /// A world of one.
    struct Alone;
    impl SumOverRanks for Alone {
        fn sum(&self, values: Vec<f64>) -> Result<Vec<f64>> {
            Ok(values)
        }
    }

    fn wave(shape: &[i64], step: f64) -> Tensor {
        let len: i64 = shape.iter().product();
        (Tensor::arange(len, (Type::Float, Device::Cpu)) * step).sin().view(shape)
    }

    fn assert_close(left: &Tensor, right: &Tensor) {
        let apart = (left - right).abs().max().double_value(&[]);
        assert!(apart < 1e-5, "{apart}");
    }

    /// Output, gradients of input, weight and bias, and running statistics.
    fn pass(shape: &[i64], run: impl Fn(&Tensor, Norm) -> Tensor) -> Vec<Tensor> {
        // A mean far from zero, where a difference of squares in floats would lose digits.
        let x = (wave(shape, 0.7) + 10.0).set_requires_grad(true);
        let weight = (wave(&[3], 1.3) + 1.5).set_requires_grad(true);
        let bias = wave(&[3], 2.1).set_requires_grad(true);
        let (mean, var) = (wave(&[3], 0.2), wave(&[3], 0.4) + 2.0);
        let norm = Norm {
            weight: &weight,
            bias: &bias,
            running_mean: &mean,
            running_var: &var,
            momentum: 0.1,
            epsilon: 1e-5,
        };
        let output = run(&x, norm);
        let loss = (&output * wave(shape, 0.9)).sum(Type::Float) + output.square().sum(Type::Float) * 0.1;
        loss.backward();
        vec![output.detach(), x.grad(), weight.grad(), bias.grad(), mean, var]
    }

    #[test]
    fn a_world_of_one_normalises_as_batch_norm_does() {
        for shape in [vec![4, 3, 5, 2], vec![8, 3]] {
            let plain = pass(&shape, |x, n| {
                let running = (Some(n.running_mean), Some(n.running_var));
                x.batch_norm(Some(n.weight), Some(n.bias), running.0, running.1, true, 0.1, 1e-5, true)
            });
            let group: Arc<dyn SumOverRanks> = Arc::new(Alone);
            let synced = pass(&shape, |x, n| sync_batch_norm(x, n, &group).unwrap());
            plain.iter().zip(&synced).for_each(|(plain, synced)| assert_close(plain, synced));
        }
    }

    #[test]
    fn one_value_a_channel_has_no_variance() {
        let ones = Tensor::ones([3], (Type::Float, Device::Cpu));
        let norm = Norm {
            weight: &ones,
            bias: &ones,
            running_mean: &ones.copy(),
            running_var: &ones.copy(),
            momentum: 0.1,
            epsilon: 1e-5,
        };
        let group: Arc<dyn SumOverRanks> = Arc::new(Alone);
        let error = sync_batch_norm(&wave(&[1, 3], 1.0), norm, &group).unwrap_err();
        assert!(error.to_string().contains("1 values a channel on all ranks"), "{error}");
    }
}
