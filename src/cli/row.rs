//! The rows of a comparison: every engine of the plan, then the same engine with the options tried on it.

use super::request::Request;
use crate::config::{EngineKind, Plan};
use crate::error::Result;
use crate::metrics::record::{EngineRecord, Tried};

/// What is measured in one row.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    /// Its name in files and tables.
    pub(crate) name: String,
    pub(crate) engine: EngineKind,
    /// The run's plan, with the options tried.
    pub(crate) plan: Plan,
    pub(crate) tried: Option<Tried>,
}

impl Row {
    /// An engine as the plan has it.
    pub(crate) fn of(engine: EngineKind, plan: &Plan) -> Self {
        Self { name: engine.name().to_owned(), engine, plan: plan.clone(), tried: None }
    }

    /// Its record before anything is measured.
    pub(crate) fn empty_record(&self) -> EngineRecord {
        let cards = self.engine.layout().cards(self.plan.run.cards);
        let global_batch = match self.engine {
            EngineKind::SinglePerCard => self.plan.batch.per_card,
            _ => self.plan.batch.global,
        };
        EngineRecord {
            tried: self.tried.clone(),
            cards,
            global_batch,
            batch_per_card: global_batch / cards.max(1),
            rounds: Vec::new(),
            summary: None,
        }
    }
}

/// All rows of a run, in the order of a round: a row that tries something comes right after its base,
/// where the machine has drifted least.
pub(crate) fn rows(request: &Request) -> Result<Vec<Row>> {
    let run = &request.plan.run;
    let mut rows = Vec::new();
    for &engine in &run.engines {
        rows.push(Row::of(engine, &request.plan));
        for ab in run.ab.iter().filter(|ab| ab.engines.contains(&engine)) {
            let options: Vec<String> = ab.set.split_whitespace().map(str::to_owned).collect();
            rows.push(Row {
                name: ab.row(engine),
                engine,
                plan: request.plan_with(&options)?,
                tried: Some(Tried { base: engine.name().to_owned(), options }),
            });
        }
    }
    Ok(rows)
}
