//! Number formats: autocast, the loss scale that float16 needs, clipping, and TF32.
//!
//! Autocast belongs to a thread: every thread that runs a forward asks for it itself.

use super::{grad, no_grad, shim};
use crate::Result;
use crate::config::Precision;
use tch::{Device, Kind, Tensor};

/// Runs a forward (and a loss) as `torch.autocast` would on this device. Weights stay as they are; their
/// casts are kept for the length of this call.
pub fn autocast<T>(precision: Precision, device: Device, run: impl FnOnce() -> Result<T>) -> Result<T> {
    let _guard = match precision {
        Precision::Fp32 => None,
        Precision::Bf16 => Some(Autocast::enter(device, Kind::BFloat16)?),
        Precision::Fp16 => Some(Autocast::enter(device, Kind::Half)?),
    };
    run()
}

/// Autocast of the calling thread, as it was once this is dropped.
struct Autocast(shim::SavedAutocast);

impl Autocast {
    fn enter(device: Device, kind: Kind) -> Result<Self> {
        let mut saved = shim::SavedAutocast::default();
        // SAFETY: `saved` is filled by the call.
        unsafe { shim::check(shim::dvd_autocast_enter(device.is_cuda(), kind == Kind::Half, &mut saved)) }?;
        Ok(Self(saved))
    }
}

impl Drop for Autocast {
    fn drop(&mut self) {
        // SAFETY: what `enter` saved on this thread: the guard does not leave `autocast`.
        unsafe { shim::dvd_autocast_exit(self.0) };
    }
}

/// Whether fp32 products on CUDA cards may be rounded to TF32: in this process, for all threads.
pub fn allow_tf32(allow: bool) {
    // SAFETY: sets two flags of libtorch's.
    unsafe { shim::dvd_set_tf32(allow) };
}

/// What [`allow_tf32`] set: for matrix products and for convolutions.
pub fn tf32_allowed() -> [bool; 2] {
    let mut allowed = [false; 2];
    // SAFETY: writes two flags.
    unsafe { shim::dvd_tf32(allowed.as_mut_ptr()) };
    allowed
}

/// Scales all gradients down so that their norm together is at most `max_norm`, as
/// `torch.nn.utils.clip_grad_norm_`; the norm they had. Undefined gradients are passed over.
pub fn clip_norm(parameters: &[Tensor], max_norm: f64) -> Result<f64> {
    const EPSILON: f64 = 1e-6;
    no_grad(|| {
        let gradients: Vec<Tensor> = parameters.iter().filter_map(grad::grad).collect();
        let norms =
            gradients.iter().map(|gradient| Ok(gradient.f_norm()?)).collect::<Result<Vec<Tensor>>>()?;
        if norms.is_empty() {
            return Ok(0.0);
        }
        let norm = Tensor::f_stack(&norms, 0)?.f_norm()?;
        let factor = norm.f_add_scalar(EPSILON)?.f_reciprocal()?.f_mul_scalar(max_norm)?.f_clamp_max(1.0)?;
        for mut gradient in gradients {
            let _ = gradient.f_mul_(&factor)?;
        }
        Ok(norm.f_double_value(&[])?)
    })
}

/// The loss scale of float16, as `torch.amp.GradScaler` with its defaults keeps it: gradients too small
/// for float16 are lifted into its range; where one becomes infinite, that step is left out and the scale
/// halved; after 2000 steps without, it doubles.
///
/// Ranks that hold the same averaged gradients decide the same without asking each other.
#[derive(Debug, Clone, PartialEq)]
pub struct Scaler {
    scale: f64,
    good_steps: u32,
    /// Whether the gradients of this step are all finite; `None` before they were looked at.
    finite: Option<bool>,
}

impl Default for Scaler {
    fn default() -> Self {
        Self { scale: 65536.0, good_steps: 0, finite: None }
    }
}

impl Scaler {
    const GROWTH: f64 = 2.0;
    const BACKOFF: f64 = 0.5;
    const INTERVAL: u32 = 2000;

    /// What losses are multiplied with now.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// The scale, and good steps since it last moved.
    pub fn state(&self) -> (f64, u32) {
        (self.scale, self.good_steps)
    }

    /// A scaler that goes on from there.
    pub fn from_state((scale, good_steps): (f64, u32)) -> Self {
        Self { scale, good_steps, finite: None }
    }

    /// Divides all gradients by the scale, in place, and finds out whether they are finite.
    pub fn unscale(&mut self, parameters: &[Tensor]) -> Result<()> {
        let gradients: Vec<Tensor> = parameters.iter().filter_map(grad::grad).collect();
        let raws = shim::raws(&gradients);
        let mut finite = true;
        // SAFETY: `len` tensors that live through the call.
        unsafe { shim::check(shim::dvd_unscale(raws.as_ptr(), raws.len(), 1.0 / self.scale, &mut finite)) }?;
        self.finite = Some(finite);
        Ok(())
    }

    /// Ends a step: whether it is to be taken. The scale moves.
    pub fn end_step(&mut self) -> bool {
        let finite = self.finite.take().unwrap_or(true);
        if finite {
            self.good_steps += 1;
            if self.good_steps == Self::INTERVAL {
                self.good_steps = 0;
                self.scale *= Self::GROWTH;
            }
        } else {
            self.good_steps = 0;
            self.scale *= Self::BACKOFF;
        }
        finite
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn param(values: &[f32], gradient: &[f32]) -> Tensor {
        let param = Tensor::from_slice(values).set_requires_grad(true);
        grad::set_grad(&param, Some(&Tensor::from_slice(gradient))).unwrap();
        param
    }

    fn gradient(param: &Tensor) -> Vec<f32> {
        Vec::try_from(grad::grad(param).unwrap()).unwrap()
    }

    fn product_kind(precision: Precision) -> Kind {
        let a = Tensor::ones([4, 4], (Kind::Float, Device::Cpu));
        autocast(precision, Device::Cpu, || Ok(a.f_matmul(&a)?.kind())).unwrap()
    }

    #[test]
    fn a_forward_computes_in_what_was_asked_for_and_the_thread_is_as_before() {
        assert_eq!(product_kind(Precision::Fp32), Kind::Float);
        assert_eq!(product_kind(Precision::Bf16), Kind::BFloat16);
        assert_eq!(product_kind(Precision::Fp16), Kind::Half);
        assert_eq!(product_kind(Precision::Fp32), Kind::Float);
        let failed: Result<()> =
            autocast(Precision::Bf16, Device::Cpu, || Err(crate::Error::usage("in the middle")));
        assert!(failed.is_err());
        assert_eq!(product_kind(Precision::Fp32), Kind::Float, "also after an error");
    }

    #[test]
    fn autocast_is_the_threads_own() {
        let inside = autocast(Precision::Bf16, Device::Cpu, || {
            Ok(std::thread::spawn(|| product_kind(Precision::Fp32)).join().unwrap())
        });
        assert_eq!(inside.unwrap(), Kind::Float);
    }

    /// Case 035: a norm of 0.8 and a limit of 1.0.
    #[test]
    fn a_norm_below_the_limit_is_left_alone() {
        let params = [param(&[0.0, 0.0], &[0.48, 0.0]), param(&[0.0], &[0.64])];
        let norm = clip_norm(&params, 1.0).unwrap();
        assert!((norm - 0.8).abs() < 1e-6, "{norm}");
        assert_eq!((gradient(&params[0]), gradient(&params[1])), (vec![0.48, 0.0], vec![0.64]));
    }

    #[test]
    fn a_norm_above_the_limit_is_brought_down_to_it_over_all_parameters() {
        let unused = Tensor::from_slice(&[1.0f32]).set_requires_grad(true);
        let params = [param(&[0.0, 0.0], &[3.0, 0.0]), unused, param(&[0.0], &[4.0])];
        assert_eq!(clip_norm(&params, 0.5).unwrap(), 5.0);
        // 0.5 / (5 + 1e-6), as PyTorch has it.
        let factor = 0.5 / 5.000001f32;
        assert!((gradient(&params[0])[0] - 3.0 * factor).abs() < 1e-7);
        assert!((gradient(&params[2])[0] - 4.0 * factor).abs() < 1e-7);
        assert!(grad::grad(&params[1]).is_none());
        assert_eq!(clip_norm(&[], 1.0).unwrap(), 0.0);
    }

    #[test]
    fn the_scale_moves_as_grad_scaler_s_does() {
        let mut scaler = Scaler::default();
        let good = param(&[0.0], &[65536.0]);
        scaler.unscale(std::slice::from_ref(&good)).unwrap();
        assert_eq!(gradient(&good), [1.0]);
        assert!(scaler.end_step());
        for bad in [f32::INFINITY, f32::NAN] {
            scaler.unscale(&[param(&[0.0, 0.0], &[1.0, bad])]).unwrap();
            assert!(!scaler.end_step(), "{bad}");
        }
        assert_eq!(scaler.scale(), 65536.0 / 4.0);
        for _ in 0..2000 {
            scaler.unscale(&[]).unwrap();
            assert!(scaler.end_step());
        }
        assert_eq!(scaler.scale(), 65536.0 / 2.0);
    }

    #[test]
    fn tf32_can_be_switched() {
        let before = tf32_allowed();
        for allow in [true, false] {
            allow_tf32(allow);
            assert_eq!(tf32_allowed(), [allow; 2]);
        }
        allow_tf32(before[0]);
    }
}
