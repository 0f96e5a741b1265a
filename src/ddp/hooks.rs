//! What a bucket is turned into for its journey: PyTorch's communication hooks.
//!
//! A hook runs on the communication thread, bucket after bucket in launch order, the same on every rank.
//! It gets gradients that are scaled already, so that their sum over ranks is the average, and leaves that
//! average in the bucket. Knows nothing of parameters but their shapes.

use crate::comm::{Buffer, Collective, Reduction};
use crate::config::CommHookPlan;
use crate::torch::no_grad;
use crate::torch::random::Generator;
use crate::{Error, Result};
use rand_mt::Mt;
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

/// Gradients that travel together.
#[derive(Debug, Clone, Copy)]
pub struct Bucket<'a> {
    /// Its place in launch order.
    pub index: usize,
    /// Whether it is the last of this backward.
    pub last: bool,
    /// The gradients, one after another, scaled so that their sum over ranks is the average.
    pub buffer: &'a Buffer,
    /// The shapes of the parameters in it, in order.
    pub shapes: &'a [Vec<i64>],
    /// What makes the average of the ranks' buckets: their sum, unless the hook is [`AllReduce`] and the
    /// collective divides by itself.
    pub reduction: Reduction,
}

/// How a bucket comes to hold the average over ranks. The same calls of the collective on every rank.
pub trait CommHook: Send {
    /// Averages the bucket in place; the bytes that this rank gave to the others.
    fn reduce(&mut self, collective: &mut dyn Collective, bucket: Bucket) -> Result<usize>;

    /// The buckets are others from now on: what is remembered by bucket is worth nothing.
    fn buckets_changed(&mut self) {}
}

/// PyTorch's hook of this name.
pub fn comm_hook(plan: CommHookPlan) -> Box<dyn CommHook> {
    match plan {
        CommHookPlan::None => Box::new(AllReduce),
        CommHookPlan::Bf16 => Box::new(Rounded::to(Kind::BFloat16)),
        CommHookPlan::Fp16 => Box::new(Rounded::to(Kind::Half)),
        CommHookPlan::Powersgd { rank, start_step } => Box::new(PowerSgd::new(rank, start_step)),
    }
}

/// The bucket as it is.
#[derive(Debug, Clone, Copy, Default)]
pub struct AllReduce;

impl CommHook for AllReduce {
    fn reduce(&mut self, collective: &mut dyn Collective, bucket: Bucket) -> Result<usize> {
        collective.start_all_reduce(bucket.buffer, bucket.reduction)?;
        Ok(bytes(bucket.buffer))
    }
}

/// Rounded to 16 bits on the way: PyTorch's `bf16_compress_hook` and `fp16_compress_hook`. They average
/// in 16 bits, after rounding; here gradients are averaged first, which is the same to the bit for world
/// sizes that are powers of two, but for float16's smallest numbers.
#[derive(Debug)]
pub struct Rounded {
    kind: Kind,
    /// By bucket.
    buffers: BTreeMap<usize, Buffer>,
}

impl Rounded {
    /// To this type.
    pub fn to(kind: Kind) -> Self {
        Self { kind, buffers: BTreeMap::new() }
    }
}

impl CommHook for Rounded {
    fn reduce(&mut self, collective: &mut dyn Collective, bucket: Bucket) -> Result<usize> {
        let small = memory(&mut self.buffers, bucket.index, collective, bucket.buffer.len, self.kind)?;
        no_grad(|| small.tensor.shallow_clone().f_copy_(&bucket.buffer.tensor))?;
        collective.all_reduce(small)?;
        no_grad(|| bucket.buffer.tensor.shallow_clone().f_copy_(&small.tensor))?;
        Ok(bytes(small))
    }

    fn buckets_changed(&mut self) {
        self.buffers.clear();
    }
}

/// The buffer of a bucket, made at its first use: on all ranks in the same call.
fn memory<'a>(
    buffers: &'a mut BTreeMap<usize, Buffer>,
    index: usize,
    collective: &mut dyn Collective,
    len: usize,
    kind: Kind,
) -> Result<&'a Buffer> {
    if let std::collections::btree_map::Entry::Vacant(vacant) = buffers.entry(index) {
        vacant.insert(collective.allocate(len, kind)?);
    }
    buffers.get(&index).ok_or_else(|| Error::usage("a bucket's buffer is gone"))
}

fn bytes(buffer: &Buffer) -> usize {
    buffer.len * buffer.kind.elt_size_in_bytes()
}

/// PowerSGD (Vogels, Karimireddy, Jaggi 2019) as PyTorch's `powerSGD_hook` runs it by default: matrices
/// travel as two low-rank factors, one power iteration a step that starts from the last step's factor,
/// and what the approximation leaves out is added to the next step's gradient. What would hardly become
/// smaller travels whole.
#[derive(Debug)]
pub struct PowerSgd {
    rank: i64,
    start_step: u64,
    step: u64,
    /// Where the first factors are drawn from: `numpy.random.RandomState(0)`, as PyTorch's.
    seeds: Mt,
    buckets: BTreeMap<usize, Compressed>,
}

/// What is remembered of a bucket.
#[derive(Debug)]
struct Compressed {
    /// Left out of the last step; the bucket's size.
    error: Tensor,
    p: Buffer,
    q: Buffer,
    /// What travels whole.
    whole: Option<Buffer>,
}

/// A matrix of a bucket: where it lies, and its rows, columns and rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Matrix {
    offset: i64,
    rows: i64,
    columns: i64,
    rank: i64,
}

impl Matrix {
    fn len(self) -> i64 {
        self.rows * self.columns
    }
}

/// How a bucket's tensors travel. Pure.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Split {
    matrices: Vec<Matrix>,
    /// Offset and length of what travels whole.
    whole: Vec<(i64, i64)>,
}

/// By how much a tensor must shrink to be worth it: PyTorch's `min_compression_rate`.
const LEAST_COMPRESSION: i64 = 2;

/// Each tensor as a matrix of its first extent and the rest.
fn split(shapes: &[Vec<i64>], rank: i64) -> Split {
    let mut split = Split::default();
    let mut offset = 0;
    for shape in shapes {
        let len: i64 = shape.iter().product();
        let rows = shape.first().copied().unwrap_or(1);
        let columns = if rows > 0 { len / rows } else { 0 };
        let rank = rank.min(rows).min(columns);
        if (rows + columns) * rank * LEAST_COMPRESSION < len {
            split.matrices.push(Matrix { offset, rows, columns, rank });
        } else {
            split.whole.push((offset, len));
        }
        offset += len;
    }
    // Matrices of one shape follow each other, as in PyTorch: which factors are drawn depends on it.
    let shapes: Vec<_> = split.matrices.iter().map(|m| (m.rows, m.columns)).collect();
    split.matrices.sort_by_key(|m| shapes.iter().position(|shape| *shape == (m.rows, m.columns)));
    split
}

impl PowerSgd {
    /// Factors of this rank, from this step on: 2 or more, as the first buckets are planned anew after one.
    pub fn new(rank: i64, start_step: u64) -> Self {
        Self { rank, start_step, step: 0, seeds: Mt::new(0), buckets: BTreeMap::new() }
    }

    /// `RandomState.randint(1_000_000_000)`: the generator's numbers cut to 30 bits, those that are too
    /// large passed over.
    fn seed(&mut self) -> u64 {
        const BELOW: u32 = 1_000_000_000;
        const MASK: u32 = BELOW.next_power_of_two() - 1;
        loop {
            let drawn = self.seeds.next_u32() & MASK;
            if drawn < BELOW {
                return u64::from(drawn);
            }
        }
    }

    /// Memory of a bucket, and its first factors.
    fn begin(
        &mut self,
        collective: &mut dyn Collective,
        bucket: Bucket,
        split: &Split,
    ) -> Result<Compressed> {
        let sizes = |side: fn(&Matrix) -> i64| split.matrices.iter().map(side).sum::<i64>() as usize;
        let whole: i64 = split.whole.iter().map(|(_, len)| len).sum();
        let kind = bucket.buffer.kind;
        let compressed = Compressed {
            error: bucket.buffer.tensor.f_zeros_like()?,
            p: collective.allocate(sizes(|m| m.rows * m.rank), kind)?,
            q: collective.allocate(sizes(|m| m.columns * m.rank), kind)?,
            whole: (whole > 0).then(|| collective.allocate(whole as usize, kind)).transpose()?,
        };
        // All ranks draw the same: they count the same buckets.
        let mut generator = Generator::new(self.seed())?;
        let mut offset = 0;
        for matrix in &split.matrices {
            let len = matrix.columns * matrix.rank;
            generator.fill_normal(&compressed.q.tensor.f_narrow(0, offset, len)?, 0.0, 1.0)?;
            offset += len;
        }
        Ok(compressed)
    }

    fn compress(&mut self, collective: &mut dyn Collective, bucket: Bucket) -> Result<usize> {
        let split = split(bucket.shapes, self.rank);
        let flat = &bucket.buffer.tensor;
        let mut memory = match self.buckets.remove(&bucket.index) {
            Some(memory) => memory,
            None => self.begin(collective, bucket, &split)?,
        };
        let mut sent = 0;
        let _ = flat.shallow_clone().f_add_(&memory.error)?;
        memory.error.f_copy_(flat)?;
        if let Some(whole) = &memory.whole {
            sent += travel_whole(collective, flat, whole, &split.whole)?;
        }
        if !split.matrices.is_empty() {
            let matrices = split
                .matrices
                .iter()
                .map(|m| Ok(flat.f_narrow(0, m.offset, m.len())?.f_view([m.rows, m.columns])?))
                .collect::<Result<Vec<Tensor>>>()?;
            let ps = factors(&memory.p.tensor, &split.matrices, |m| m.rows)?;
            let qs = factors(&memory.q.tensor, &split.matrices, |m| m.columns)?;
            qs.iter().try_for_each(orthogonalise)?;
            for ((matrix, p), q) in matrices.iter().zip(&ps).zip(&qs) {
                let _ = matrix.f_mm_out(p, q)?;
            }
            collective.all_reduce(&memory.p)?;
            ps.iter().try_for_each(orthogonalise)?;
            for ((matrix, p), q) in matrices.iter().zip(&ps).zip(&qs) {
                let _ = matrix.f_tr()?.f_mm_out(q, p)?;
            }
            collective.all_reduce(&memory.q)?;
            for ((matrix, p), q) in matrices.iter().zip(&ps).zip(&qs) {
                let _ = p.f_mm_out(matrix, &q.f_tr()?)?;
            }
            sent += bytes(&memory.p) + bytes(&memory.q);
        }
        // Every rank owes its own part of what was left out of the average.
        let part = flat.f_div_scalar(collective.world_size() as i64)?;
        let _ = memory.error.f_sub_(&part)?;
        self.buckets.insert(bucket.index, memory);
        Ok(sent)
    }
}

impl CommHook for PowerSgd {
    fn reduce(&mut self, collective: &mut dyn Collective, bucket: Bucket) -> Result<usize> {
        let sent = if self.step < self.start_step {
            AllReduce.reduce(collective, bucket)?
        } else {
            no_grad(|| self.compress(collective, bucket))?
        };
        if bucket.last {
            self.step += 1;
        }
        Ok(sent)
    }

    fn buckets_changed(&mut self) {
        self.buckets.clear();
    }
}

fn travel_whole(
    collective: &mut dyn Collective,
    flat: &Tensor,
    whole: &Buffer,
    pieces: &[(i64, i64)],
) -> Result<usize> {
    let cut = |at: i64, offset: i64, len: i64| -> Result<(Tensor, Tensor)> {
        Ok((whole.tensor.f_narrow(0, at, len)?, flat.f_narrow(0, offset, len)?))
    };
    let places = pieces.iter().scan(0, |at, &(offset, len)| {
        *at += len;
        Some((*at - len, offset, len))
    });
    for (at, offset, len) in places.clone() {
        let (mut packed, own) = cut(at, offset, len)?;
        packed.f_copy_(&own)?;
    }
    collective.all_reduce(whole)?;
    for (at, offset, len) in places {
        let (packed, mut own) = cut(at, offset, len)?;
        own.f_copy_(&packed)?;
    }
    Ok(bytes(whole))
}

/// The factors of one side, each `[side, rank]`, one after another in `flat`.
fn factors(flat: &Tensor, matrices: &[Matrix], side: fn(&Matrix) -> i64) -> Result<Vec<Tensor>> {
    let mut offset = 0;
    matrices
        .iter()
        .map(|matrix| {
            let len = side(matrix) * matrix.rank;
            let factor = flat.f_narrow(0, offset, len)?.f_view([side(matrix), matrix.rank])?;
            offset += len;
            Ok(factor)
        })
        .collect()
}

/// Makes the columns orthonormal, in place: Gram-Schmidt up to rank 2, QR beyond, as PyTorch does.
fn orthogonalise(matrix: &Tensor) -> Result<()> {
    let (_, rank) = matrix.size2()?;
    if rank > 2 {
        let (q, _) = Tensor::f_linalg_qr(matrix, "reduced")?;
        matrix.shallow_clone().f_copy_(&q)?;
        return Ok(());
    }
    for column in 0..rank {
        let mut own = matrix.f_narrow(1, column, 1)?;
        let norm = own.f_norm_scalaropt_dim(2.0, [0i64].as_slice(), true)?;
        let _ = own.f_div_(&norm)?;
        if column + 1 < rank {
            let mut rest = matrix.f_narrow(1, column + 1, rank - column - 1)?;
            let shadow = own.f_mul(&rest)?.f_sum_dim_intlist([0i64].as_slice(), true, None::<Kind>)?;
            let _ = rest.f_sub_(&own.f_mul(&shadow)?)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::Local;
    use tch::Device;

    #[test]
    fn seeds_are_those_of_numpy_s_random_state() {
        // numpy.random.RandomState(0).randint(1_000_000_000), four times.
        let mut hook = PowerSgd::new(1, 2);
        let drawn = [hook.seed(), hook.seed(), hook.seed(), hook.seed()];
        assert_eq!(drawn, [209_652_396, 398_764_591, 924_231_285, 404_868_288]);
    }

    #[test]
    fn only_what_shrinks_by_half_is_compressed() {
        // 100 x 50 in rank 4: 600 numbers for 5000. 8 x 8: 64 for 64. A bias has one column.
        let split = split(&[vec![100, 5, 10], vec![8, 8], vec![100]], 4);
        assert_eq!(split.matrices, [Matrix { offset: 0, rows: 100, columns: 50, rank: 4 }]);
        assert_eq!(split.whole, [(5000, 64), (5064, 100)]);
        let shapes = [vec![20, 30], vec![40, 20], vec![20, 30]];
        let offsets: Vec<i64> = super::split(&shapes, 1).matrices.iter().map(|m| m.offset).collect();
        assert_eq!(offsets, [0, 1400, 600], "those of one shape together");
    }

    #[test]
    fn columns_become_orthonormal() {
        for rank in [1, 2, 4] {
            let matrix = Tensor::arange(20 * rank, (Kind::Float, Device::Cpu)).sin().view([20, rank]);
            orthogonalise(&matrix).unwrap();
            let product = matrix.tr().mm(&matrix) - Tensor::eye(rank, (Kind::Float, Device::Cpu));
            assert!(product.abs().max().double_value(&[]) < 1e-5, "rank {rank}");
        }
    }

    fn bucket(values: &Tensor) -> Buffer {
        let buffer = Local::new().allocate(values.numel(), Kind::Float).unwrap();
        buffer.tensor.shallow_clone().copy_(&values.view([-1]));
        buffer
    }

    #[test]
    fn sixteen_bits_round_and_nothing_else() {
        let buffer = bucket(&Tensor::from_slice(&[1.0f32, 1.0 + 1e-3, -3.25]));
        let mut hook = Rounded::to(Kind::BFloat16);
        let sent = hook
            .reduce(
                &mut Local::new(),
                Bucket {
                    index: 0,
                    last: true,
                    buffer: &buffer,
                    shapes: &[vec![3]],
                    reduction: Reduction::Sum,
                },
            )
            .unwrap();
        assert_eq!((Vec::<f32>::try_from(&buffer.tensor).unwrap(), sent), (vec![1.0, 1.0, -3.25], 6));
    }

    #[test]
    fn what_one_step_leaves_out_comes_with_the_next() {
        // Rank 2 in a rank-1 hook: one step cannot hold it, the sum of many does.
        let (a, b) = (
            Tensor::arange(40, (Kind::Float, Device::Cpu)).sin(),
            Tensor::arange(40, (Kind::Float, Device::Cpu)).cos(),
        );
        let gradient = a.outer(&b) + b.outer(&(&a * 0.5));
        let mut hook = PowerSgd::new(1, 0);
        let mut total = Tensor::zeros([1600], (Kind::Float, Device::Cpu));
        for step in 1..=30 {
            let buffer = bucket(&gradient);
            let bucket = Bucket {
                index: 0,
                last: true,
                buffer: &buffer,
                shapes: &[vec![40, 40]],
                reduction: Reduction::Sum,
            };
            assert_eq!(hook.reduce(&mut Local::new(), bucket).unwrap(), 80 * 4);
            total += &buffer.tensor;
            let apart = (&total - gradient.view([-1]) * f64::from(step)).norm().double_value(&[]);
            // The error is carried, so it does not grow with the steps.
            assert!(apart < 2.0 * gradient.norm().double_value(&[]), "step {step}: {apart}");
        }
    }

    #[test]
    fn before_its_start_it_leaves_gradients_alone() {
        let values = Tensor::arange(100, (Kind::Float, Device::Cpu));
        let mut hook = PowerSgd::new(1, 2);
        for step in 0..3 {
            let buffer = bucket(&values);
            let bucket = Bucket {
                index: 0,
                last: true,
                buffer: &buffer,
                shapes: &[vec![10, 10]],
                reduction: Reduction::Sum,
            };
            let sent = hook.reduce(&mut Local::new(), bucket).unwrap();
            assert_eq!(sent, if step < 2 { 400 } else { 80 });
            assert_eq!(buffer.tensor.equal(&values), step < 2);
        }
    }
}
