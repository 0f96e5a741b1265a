//! A small GPT-2: pre-norm blocks, causal attention, tanh GELU, dropout 0, the head tied to the token
//! embedding. GPT-2's names without its `transformer.` prefix, and `nn.Linear` weights `[out, in]`.
//!
//! Starts as GPT-2 does: weights N(0, 0.02), those that end in a residual sum divided by
//! sqrt(2 * layers), biases zero. PyTorch's default for embeddings, N(0, 1), would start a tied head
//! at a loss of hundreds. A twin gets the same values by drawing them, seeded afresh, in the order of
//! registration.

use super::layers::{Builder, LayerNorm, Linear};
use super::{Model, State};
use crate::Result;
use crate::error::Error;
use tch::{Device, Tensor};

const DEVIATION: f64 = 0.02;

/// The numbers that make a gpt.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) width: i64,
    pub(super) heads: i64,
    pub(super) layers: i64,
    pub(super) context: i64,
    pub(super) vocabulary: i64,
}

pub(super) struct Gpt {
    state: State,
    shape: Shape,
    wte: Tensor,
    wpe: Tensor,
    blocks: Vec<Block>,
    ln_f: LayerNorm,
}

impl Gpt {
    pub(super) fn new(shape: Shape, device: Device, seed: u64) -> Result<Self> {
        let Shape { width, heads, layers, context, vocabulary } = shape;
        if heads < 1 || width % heads != 0 {
            return Err(Error::usage(format!("gpt: width {width} cannot be split into {heads} heads"))
                .hint("choose a `model.width` that `model.heads` divides"));
        }
        let mut b = Builder::new(device, seed)?;
        let wte = b.embedding("wte", vocabulary, width, DEVIATION)?;
        let wpe = b.embedding("wpe", context, width, DEVIATION)?;
        let blocks = b.inside("h", |b| {
            (0..layers).map(|n| b.inside(n.to_string(), |b| Block::new(b, shape))).collect::<Result<_>>()
        })?;
        let ln_f = b.layer_norm("ln_f", width)?;
        b.tie("lm_head.weight", "wte.weight");
        Ok(Self { state: b.finish(), shape, wte, wpe, blocks, ln_f })
    }
}

impl Model for Gpt {
    /// Tokens `[batch, tokens]` (int64), no more of them than the context holds.
    fn forward(&self, input: &Tensor, _train: bool) -> Result<Tensor> {
        let (_, tokens) = input.size2()?;
        if tokens > self.shape.context {
            let context = self.shape.context;
            return Err(Error::usage(format!("gpt: {tokens} tokens do not fit a context of {context}"))
                .hint("give `model.context` and `data.context` the same value"));
        }
        let positions = self.wpe.f_narrow(0, 0, tokens)?;
        let mut x = Tensor::f_embedding(&self.wte, input, -1, false, false)?.f_add(&positions)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        Ok(self.ln_f.forward(&x)?.f_linear(&self.wte, None::<Tensor>)?)
    }

    fn state(&self) -> &State {
        &self.state
    }
}

struct Block {
    heads: i64,
    ln_1: LayerNorm,
    attention: Linear,
    attention_projection: Linear,
    ln_2: LayerNorm,
    expand: Linear,
    contract: Linear,
}

impl Block {
    fn new(b: &mut Builder, shape: Shape) -> Result<Self> {
        let Shape { width, heads, layers, .. } = shape;
        let residual = DEVIATION / (2.0 * layers as f64).sqrt();
        let ln_1 = b.layer_norm("ln_1", width)?;
        let (attention, attention_projection) = b.inside("attn", |b| {
            Ok((
                b.normal_linear("c_attn", width, 3 * width, DEVIATION)?,
                b.normal_linear("c_proj", width, width, residual)?,
            ))
        })?;
        let ln_2 = b.layer_norm("ln_2", width)?;
        let (expand, contract) = b.inside("mlp", |b| {
            Ok((
                b.normal_linear("c_fc", width, 4 * width, DEVIATION)?,
                b.normal_linear("c_proj", 4 * width, width, residual)?,
            ))
        })?;
        Ok(Self { heads, ln_1, attention, attention_projection, ln_2, expand, contract })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.f_add(&self.attend(&self.ln_1.forward(x)?)?)?;
        let hidden = self.expand.forward(&self.ln_2.forward(&x)?)?.f_gelu("tanh")?;
        Ok(x.f_add(&self.contract.forward(&hidden)?)?)
    }

    /// `[batch, tokens, width]` to the same; each token sees itself and those before it.
    fn attend(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, tokens, width) = x.size3()?;
        // [batch, tokens, 3 * width] -> three of [batch, heads, tokens, width / heads]
        let parts = self.attention.forward(x)?.f_chunk(3, 2)?;
        let head = |part: &Tensor| -> Result<Tensor> {
            Ok(part.f_reshape([batch, tokens, self.heads, width / self.heads])?.f_transpose(1, 2)?)
        };
        let [q, k, v] = [head(&parts[0])?, head(&parts[1])?, head(&parts[2])?];
        let mixed =
            Tensor::f_scaled_dot_product_attention(&q, &k, &v, None::<Tensor>, 0.0, true, None, false)?;
        self.attention_projection.forward(&mixed.f_transpose(1, 2)?.f_reshape([batch, tokens, width])?)
    }
}
