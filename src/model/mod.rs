//! The single definition of each model, used by every engine.
//!
//! Names, shapes and initialisation are PyTorch's own, so that a PyTorch twin can load the weights.
//! Knows nothing of cards or engines: a replica is just a second value built on another device.

pub mod checkpoint;
mod convnet;
mod gpt;
mod init;
mod layers;
mod mlp;
mod resnet;
mod state;
mod sync_norm;

pub use state::{Entry, State};
pub use sync_norm::{Norm, SumOverRanks, sync_batch_norm};

use crate::Result;
use crate::config::ModelPlan;
use std::sync::Arc;
use tch::{Device, Kind, Reduction, Tensor};

/// A network with named state.
pub trait Model: Send {
    /// Outputs for a batch of inputs: logits `[batch, classes]`, for gpt `[batch, context, vocabulary]`.
    fn forward(&self, input: &Tensor, train: bool) -> Result<Tensor>;

    /// Parameters and buffers, in creation order.
    fn state(&self) -> &State;

    /// Makes every BatchNorm normalise by the samples of all ranks in training. A model without any has
    /// nothing to do.
    fn sync_batch_norm(&mut self, group: &Arc<dyn SumOverRanks>) {
        let _ = group;
    }
}

/// Builds a model with PyTorch's default initialisation (gpt: GPT-2's), drawn from `seed` alone: the
/// same seed gives the same weights in every process and on every device, whatever was drawn before.
///
/// A model lives on one device for good: layers, state and whoever holds its parameters cannot come
/// to disagree. A copy elsewhere is a second model and [`State::copy_from`].
pub fn build(plan: &ModelPlan, device: Device, seed: u64) -> Result<Box<dyn Model>> {
    let at = |error: crate::Error| error.context(format!("cannot build the model `{}`", plan.name()));
    Ok(match *plan {
        ModelPlan::Mlp { input, hidden, classes } => {
            Box::new(mlp::Mlp::new(input, hidden, classes, device, seed).map_err(at)?)
        }
        ModelPlan::Convnet { channels, classes, batch_norm } => {
            Box::new(convnet::Convnet::new(channels, classes, batch_norm, device, seed).map_err(at)?)
        }
        ModelPlan::Resnet18 { channels, classes } => {
            Box::new(resnet::Resnet18::new(channels, classes, device, seed).map_err(at)?)
        }
        ModelPlan::Gpt { width, heads, layers, context, vocabulary } => {
            let shape = gpt::Shape { width, heads, layers, context, vocabulary };
            Box::new(gpt::Gpt::new(shape, device, seed).map_err(at)?)
        }
    })
}

/// Mean cross-entropy of logits against targets (`[batch]` labels, or `[batch, context]` next tokens):
/// a scalar with its graph. `double_value` makes a plain number of it, which is what is kept and logged.
pub fn loss(output: &Tensor, target: &Tensor) -> Result<Tensor> {
    const NO_INDEX_IGNORED: i64 = -100;
    let (logits, labels) = rows(output, target)?;
    Ok(logits.f_cross_entropy_loss(&labels, None::<Tensor>, Reduction::Mean, NO_INDEX_IGNORED, 0.0)?)
}

/// How many predictions are right, out of how many.
pub fn correct(output: &Tensor, target: &Tensor) -> Result<(u64, u64)> {
    let (logits, labels) = rows(output, target)?;
    let right = logits.f_argmax(1, false)?.f_eq_tensor(&labels)?.f_sum(Kind::Int64)?;
    Ok((right.f_int64_value(&[])?.unsigned_abs(), labels.numel() as u64))
}

/// One row of logits a prediction: gpt's `[batch, tokens, vocabulary]` is flattened.
fn rows(output: &Tensor, target: &Tensor) -> Result<(Tensor, Tensor)> {
    let classes = output.size().last().copied().unwrap_or(1);
    Ok((output.f_reshape([-1, classes])?, target.f_reshape([-1])?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::OptimizerPlan;
    use crate::torch::grad;
    use crate::torch::optim::Optimizer;

    const MLP: ModelPlan = ModelPlan::Mlp { input: 784, hidden: 2048, classes: 10 };
    const CONVNET: ModelPlan = ModelPlan::Convnet { channels: 1, classes: 10, batch_norm: false };
    const CONVNET_NORM: ModelPlan = ModelPlan::Convnet { channels: 1, classes: 10, batch_norm: true };
    const RESNET18: ModelPlan = ModelPlan::Resnet18 { channels: 3, classes: 10 };
    const GPT: ModelPlan = ModelPlan::Gpt { width: 256, heads: 4, layers: 4, context: 64, vocabulary: 512 };

    fn built(plan: &ModelPlan) -> Box<dyn Model> {
        build(plan, Device::Cpu, 42).unwrap()
    }

    fn parameter_count(model: &dyn Model) -> usize {
        model.state().parameters().map(|entry| entry.tensor.numel()).sum()
    }

    /// `name shape`, one entry each, in order.
    fn listing(model: &dyn Model) -> Vec<String> {
        model.state().entries().iter().map(|e| format!("{} {:?}", e.name, e.tensor.size())).collect()
    }

    fn batch_norm(name: &str, channels: i64) -> Vec<String> {
        let vectors = ["weight", "bias", "running_mean", "running_var"];
        let counter = format!("{name}.num_batches_tracked []");
        vectors.iter().map(|v| format!("{name}.{v} [{channels}]")).chain([counter]).collect()
    }

    #[test]
    fn mlp_has_the_names_and_shapes_of_a_sequential() {
        let model = built(&MLP);
        let expected = [
            "0.weight [2048, 784]",
            "0.bias [2048]",
            "2.weight [2048, 2048]",
            "2.bias [2048]",
            "4.weight [10, 2048]",
            "4.bias [10]",
        ];
        assert_eq!(listing(&*model), expected);
        assert_eq!(parameter_count(&*model), 5_824_522);
    }

    #[test]
    fn convnet_has_the_agreed_names_and_shapes_with_and_without_batch_norm() {
        let convs = [
            ["conv1.weight [32, 1, 3, 3]", "conv1.bias [32]"],
            ["conv2.weight [64, 32, 3, 3]", "conv2.bias [64]"],
            ["conv3.weight [128, 64, 3, 3]", "conv3.bias [128]"],
        ];
        let fc = ["fc.weight [10, 128]", "fc.bias [10]"];
        assert_eq!(listing(&*built(&CONVNET)), [convs.concat(), fc.to_vec()].concat());
        let mut expected = Vec::new();
        for (conv, (norm, width)) in convs.iter().zip([("bn1", 32), ("bn2", 64), ("bn3", 128)]) {
            expected.extend(conv.map(str::to_owned));
            expected.extend(batch_norm(norm, width));
        }
        expected.extend(fc.map(str::to_owned));
        assert_eq!(listing(&*built(&CONVNET_NORM)), expected);
        assert_eq!(parameter_count(&*built(&CONVNET)), 93_962);
        assert_eq!(parameter_count(&*built(&CONVNET_NORM)), 94_410);
    }

    #[test]
    fn resnet18_has_torchvisions_names_in_its_order() {
        let model = built(&RESNET18);
        let mut expected = vec!["conv1.weight [64, 3, 3, 3]".to_owned()];
        expected.extend(batch_norm("bn1", 64));
        let blocks = [
            ("layer1.0", 64, 64),
            ("layer1.1", 64, 64),
            ("layer2.0", 64, 128),
            ("layer2.1", 128, 128),
            ("layer3.0", 128, 256),
            ("layer3.1", 256, 256),
            ("layer4.0", 256, 512),
            ("layer4.1", 512, 512),
        ];
        for (block, from, to) in blocks {
            expected.push(format!("{block}.conv1.weight [{to}, {from}, 3, 3]"));
            expected.extend(batch_norm(&format!("{block}.bn1"), to));
            expected.push(format!("{block}.conv2.weight [{to}, {to}, 3, 3]"));
            expected.extend(batch_norm(&format!("{block}.bn2"), to));
            if from != to {
                expected.push(format!("{block}.downsample.0.weight [{to}, {from}, 1, 1]"));
                expected.extend(batch_norm(&format!("{block}.downsample.1"), to));
            }
        }
        expected.extend(["fc.weight [10, 512]", "fc.bias [10]"].map(str::to_owned));
        assert_eq!(listing(&*model), expected);
        assert_eq!(parameter_count(&*model), 11_173_962);
    }

    #[test]
    fn gpt_has_gpt2s_names_linear_shapes_and_a_tied_head() {
        let model = built(&GPT);
        let mut expected = vec!["wte.weight [512, 256]".to_owned(), "wpe.weight [64, 256]".to_owned()];
        for layer in 0..4 {
            let parts = [
                "ln_1.weight [256]",
                "ln_1.bias [256]",
                "attn.c_attn.weight [768, 256]",
                "attn.c_attn.bias [768]",
                "attn.c_proj.weight [256, 256]",
                "attn.c_proj.bias [256]",
                "ln_2.weight [256]",
                "ln_2.bias [256]",
                "mlp.c_fc.weight [1024, 256]",
                "mlp.c_fc.bias [1024]",
                "mlp.c_proj.weight [256, 1024]",
                "mlp.c_proj.bias [256]",
            ];
            expected.extend(parts.map(|part| format!("h.{layer}.{part}")));
        }
        expected.extend(["ln_f.weight [256]", "ln_f.bias [256]"].map(str::to_owned));
        assert_eq!(listing(&*model), expected);
        assert_eq!(parameter_count(&*model), 3_307_008);
        let path = tempfile::tempdir().unwrap().keep().join("gpt.safetensors");
        model.state().save(&path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.tensor("lm_head.weight").unwrap().data(), file.tensor("wte.weight").unwrap().data());
    }

    #[test]
    fn batch_norm_statistics_start_at_their_neutral_values() {
        let model = built(&CONVNET_NORM);
        let sum = |name: &str| model.state().get(name).unwrap().sum(Kind::Double).double_value(&[]);
        let sums = ["bn2.weight", "bn2.bias", "bn2.running_mean", "bn2.running_var"].map(sum);
        assert_eq!(sums, [64.0, 0.0, 0.0, 64.0]);
        assert_eq!(model.state().get("bn2.num_batches_tracked").unwrap().kind(), Kind::Int64);
    }

    #[test]
    fn gpt_starts_as_gpt2() {
        let model = built(&GPT);
        let deviation = |name: &str| model.state().get(name).unwrap().std(true).double_value(&[]);
        let near = |value: f64, expected: f64| (value / expected - 1.0).abs() < 0.02;
        for name in ["wte.weight", "wpe.weight", "h.2.attn.c_attn.weight", "h.2.mlp.c_fc.weight"] {
            assert!(near(deviation(name), 0.02), "{name}: {}", deviation(name));
        }
        for name in ["h.0.attn.c_proj.weight", "h.3.mlp.c_proj.weight"] {
            assert!(near(deviation(name), 0.02 / 8f64.sqrt()), "{name}: {}", deviation(name));
        }
        let bias = model.state().get("h.1.mlp.c_fc.bias").unwrap();
        assert_eq!(bias.abs().max().double_value(&[]), 0.0);
    }

    #[test]
    fn a_seed_gives_the_same_weights_again_and_another_seed_others() {
        for plan in [&CONVNET_NORM, &GPT] {
            let digest = |seed| build(plan, Device::Cpu, seed).unwrap().state().digest().unwrap();
            assert_eq!(digest(1), digest(1));
            assert_ne!(digest(1), digest(2));
        }
    }

    #[test]
    fn batch_norm_moves_its_running_statistics_in_training_only() {
        let model = built(&CONVNET_NORM);
        let running = || {
            let get = |name| Vec::<f32>::try_from(model.state().get(name).unwrap().copy()).unwrap();
            let count = model.state().get("bn1.num_batches_tracked").unwrap().int64_value(&[]);
            (get("bn1.running_mean"), get("bn1.running_var"), count)
        };
        let x = Tensor::arange(2 * 64, (Kind::Float, Device::Cpu)).reshape([2, 1, 8, 8]) / 100.0;
        let before = running();
        let _ = model.forward(&x, false).unwrap();
        assert_eq!(running(), before);
        let _ = model.forward(&x, true).unwrap();
        let (means, variances, count) = running();
        assert_eq!(count, 1);
        // PyTorch's rule: 0.9 of the old value, 0.1 of the batch's, the variance unbiased.
        let get = |name| model.state().get(name).unwrap();
        let y = crate::torch::no_grad(|| x.conv2d(get("conv1.weight"), Some(get("conv1.bias")), 1, 1, 1, 1));
        let channels = y.transpose(0, 1).reshape([32, -1]);
        let expected: Vec<f32> = (channels.mean_dim(1, false, Kind::Float) * 0.1).try_into().unwrap();
        let expected_variance: Vec<f32> = (channels.var_dim(1, true, false) * 0.1 + 0.9).try_into().unwrap();
        assert!(means.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5), "{means:?} {expected:?}");
        let close = variances.iter().zip(&expected_variance).all(|(a, b)| (a - b).abs() < 1e-5);
        assert!(close, "{variances:?} {expected_variance:?}");
    }

    #[test]
    fn one_value_a_channel_cannot_be_normalised_in_training() {
        let model = built(&CONVNET_NORM);
        let pixel = Tensor::zeros([1, 1, 1, 1], (Kind::Float, Device::Cpu));
        assert!(model.forward(&pixel, true).unwrap_err().to_string().contains("one value a channel"));
        assert!(model.forward(&pixel, false).is_ok());
    }

    /// A fixed batch that the model can learn by heart.
    fn batch(plan: &ModelPlan) -> (Tensor, Tensor) {
        let noise = |shape: &[i64]| {
            let tensor = Tensor::zeros(shape, (Kind::Float, Device::Cpu));
            crate::torch::random::Generator::new(3).unwrap().fill_normal(&tensor, 0.0, 1.0).unwrap();
            tensor
        };
        let labels = Tensor::arange(8, (Kind::Int64, Device::Cpu));
        match *plan {
            ModelPlan::Mlp { .. } => (noise(&[8, 1, 28, 28]), labels),
            ModelPlan::Convnet { .. } => (noise(&[8, 1, 8, 8]), labels),
            ModelPlan::Resnet18 { .. } => (noise(&[8, 3, 16, 16]), labels),
            ModelPlan::Gpt { context, vocabulary, .. } => {
                let tokens =
                    (Tensor::arange(4 * (context + 1), (Kind::Int64, Device::Cpu)) * 7).remainder(vocabulary);
                let tokens = tokens.reshape([4, context + 1]);
                (tokens.narrow(1, 0, context), tokens.narrow(1, 1, context))
            }
        }
    }

    #[test]
    fn ten_steps_bring_every_models_loss_down_and_leave_no_graph_behind() {
        for (plan, lr) in [(MLP, 0.05), (CONVNET, 0.1), (CONVNET_NORM, 0.1), (RESNET18, 0.02), (GPT, 0.02)] {
            let model = built(&plan);
            let parameters = model.state().parameters().map(|entry| entry.tensor.shallow_clone()).collect();
            let rule = OptimizerPlan::Sgd { lr, momentum: 0.9, weight_decay: 0.0 };
            let mut optimizer = Optimizer::new(rule, parameters);
            let (input, target) = batch(&plan);
            let mut losses = Vec::new();
            for _ in 0..10 {
                optimizer.zero_grad().unwrap();
                let loss = loss(&model.forward(&input, true).unwrap(), &target).unwrap();
                losses.push(loss.double_value(&[]));
                grad::backward(&[&loss], &[None]).unwrap();
                for entry in model.state().parameters() {
                    assert!(
                        grad::grad(&entry.tensor).is_some(),
                        "{}: {} has no gradient",
                        plan.name(),
                        entry.name
                    );
                }
                optimizer.step().unwrap();
            }
            assert!(losses[9] < losses[0] * 0.9, "{}: {losses:?}", plan.name());
            for entry in model.state().entries() {
                assert!(entry.tensor.is_leaf(), "{}: {}", plan.name(), entry.name);
                assert_eq!(entry.tensor.requires_grad(), entry.trainable, "{}: {}", plan.name(), entry.name);
            }
        }
    }

    #[test]
    fn gpt_starts_at_the_loss_of_guessing_and_never_looks_ahead() {
        let model = built(&GPT);
        let (input, target) = batch(&GPT);
        let output = model.forward(&input, false).unwrap();
        assert_eq!(output.size(), [4, 64, 512]);
        let start = loss(&output, &target).unwrap().double_value(&[]);
        assert!((start - 512f64.ln()).abs() < 0.2, "{start}");
        // Another last token changes the last output and no earlier one.
        let changed = input.copy();
        let _ = changed.narrow(1, 63, 1).fill_(5);
        let other = model.forward(&changed, false).unwrap();
        let difference = (&output - &other).abs().amax([0i64, 2].as_slice(), false);
        assert_eq!(difference.narrow(0, 0, 63).max().double_value(&[]), 0.0);
        assert!(difference.double_value(&[63]) > 0.0);
    }

    #[test]
    fn loss_and_correct_by_hand() {
        let logits = Tensor::from_slice(&[2.0f32, 0.0, 0.0, 3.0]).reshape([2, 2]);
        let target = Tensor::from_slice(&[0i64, 0]);
        // ln(1 + e^-2) = 0.126928, ln(1 + e^3) = 3.048587
        let mean = loss(&logits, &target).unwrap().double_value(&[]);
        assert!((mean - (0.126_928 + 3.048_587) / 2.0).abs() < 1e-5, "{mean}");
        assert_eq!(correct(&logits, &target).unwrap(), (1, 2));
        // The same rows as two tokens of one sequence.
        let sequence = (logits.reshape([1, 2, 2]), target.reshape([1, 2]));
        assert_eq!(loss(&sequence.0, &sequence.1).unwrap().double_value(&[]), mean);
        assert_eq!(correct(&sequence.0, &sequence.1).unwrap(), (1, 2));
    }

    #[test]
    fn what_does_not_fit_is_an_error_not_a_panic() {
        let wrong = Tensor::zeros([4, 1, 9, 9], (Kind::Float, Device::Cpu));
        assert!(built(&MLP).forward(&wrong, true).is_err());
        let long = Tensor::zeros([1, 65], (Kind::Int64, Device::Cpu));
        let error = built(&GPT).forward(&long, true).unwrap_err();
        assert_eq!(error.to_string(), "gpt: 65 tokens do not fit a context of 64");
        let uneven = ModelPlan::Gpt { width: 10, heads: 4, layers: 1, context: 8, vocabulary: 8 };
        let error = build(&uneven, Device::Cpu, 0).err().unwrap();
        assert!(error.to_string().contains("width 10 cannot be split into 4 heads"), "{error}");
    }
}
