//! Stand-ins for workers: shell scripts that speak the protocol.

use super::{Job, Mode, Program};
use crate::config::*;

/// A shell script in place of the worker.
pub(super) fn shell(script: &str) -> Program {
    Program { path: "/bin/sh".into(), args: vec!["-c".into(), script.into()], set: vec![], unset: vec![] }
}

/// A job of no particular kind.
pub(super) fn job(rank: usize, world_size: usize) -> Job {
    let plan = Plan {
        run: RunPlan {
            devices: None,
            device: DeviceChoice::Cpu,
            cards: world_size,
            engines: vec![EngineKind::Ddp],
            rounds: 1,
            warmup: 1,
            steps: 2,
            seed: 7,
            threads_per_card: 1,
            precision: Precision::Fp32,
            tf32: false,
            deadline_s: 10.0,
            ab: vec![],
        },
        model: ModelPlan::Mlp { input: 64, hidden: 8, classes: 10 },
        data: DataPlan { source: DataSource::Digits, shuffle: true, drop_last: false, workers: 0 },
        batch: BatchPlan { global: 2, per_card: 1 },
        optimizer: OptimizerPlan::Sgd { lr: 0.1, momentum: 0.0, weight_decay: 0.0 },
        clip_norm: None,
        dp: DpPlan { output_card: 0, chunk_weights: None },
        ddp: DdpPlan {
            bucket_cap_mb: 25.0,
            first_bucket_mb: 1.0,
            overlap: true,
            gradient_as_bucket_view: false,
            find_unused_parameters: false,
            static_graph: false,
            broadcast_buffers: true,
            init_sync: true,
            comm_hook: CommHookPlan::None,
            accumulate: 1,
            join: false,
            sync_batch_norm: false,
        },
        sample: SamplePlan { period_ms: 100, require_nvml: false },
        inject: None,
    };
    Job {
        plan,
        engine: EngineKind::Ddp,
        round: 0,
        rank,
        world_size,
        cards: vec![],
        store: None,
        meter: None,
        init: None,
        save_initial: None,
        save_gradients: None,
        save_final: None,
        mode: Mode::Compare,
    }
}
