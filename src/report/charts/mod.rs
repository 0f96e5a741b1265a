//! The charts: each turns a view into a scene, and scenes become SVG and PNG.
//!
//! The one place that knows plotters. A chart that cannot be drawn says why and stops nothing.

mod axis;
mod layout;
mod losses;
mod memory;
mod palette;
mod phases;
mod render;
mod scene;
mod throughput;
mod timeline;
mod utilisation;

use super::view::View;
use crate::Result;
use scene::Scene;
use serde::Serialize;

/// One chart, drawn or not.
#[derive(Debug)]
pub(super) struct Chart {
    /// Stem of its file names: ours, so safe everywhere.
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    /// How to read it, in one line.
    pub(super) how_to_read: &'static str,
    /// What was left out.
    pub(super) notes: Vec<String>,
    pub(super) outcome: Outcome,
}

/// What came of a chart.
#[derive(Debug)]
pub(super) enum Outcome {
    /// Both forms of the picture.
    Drawn { svg: String, png: Vec<u8> },
    /// There is nothing to draw.
    Empty,
    /// Drawing failed.
    Failed(String),
}

/// A pale colour of the charts and the one that takes its place on a dark page, as CSS writes them.
#[derive(Debug, Serialize)]
pub(super) struct DarkTint {
    light: String,
    dark: String,
}

/// The tints that a dark page must replace: they are mixed with white.
pub(super) fn tints_for_dark_pages() -> Vec<DarkTint> {
    palette::areas_on_dark()
        .into_iter()
        .map(|(light, dark)| DarkTint { light: light.hex(), dark: dark.hex() })
        .collect()
}

/// All charts of a view, the most telling first.
pub(super) fn all(view: &View) -> Vec<Chart> {
    let (losses, losses_notes) = losses::draw(&view.losses).unzip();
    vec![
        chart(
            "utilisation",
            "How busy each card was",
            "Full height is a card that works all the time; waiting is not work. The dashed line is the exact mean over \
             all measured steps. Same axes for both engines; pale seams separate rounds.",
            utilisation::draw(&view.utilisation),
        ),
        chart(
            "timeline",
            "One step as it happened",
            "The step of median length in the last round. Blue and green compute, yellow to red move data, hatched grey \
             waits.",
            timeline::draw(&view.timelines),
        ),
        chart(
            "phases",
            "Where the time of a step goes",
            "Mean over all measured steps, card by card; the black line is the whole step. DDP's all-reduce runs beside \
             backward on a thread of its own, so it is drawn beside.",
            phases::draw(&view.phases),
        ),
        chart(
            "throughput",
            "Speed",
            "The bar ends at the median over rounds; dots are rounds; the black bracket is the 95 % interval of the \
             median, from five rounds on.",
            throughput::draw(&view.throughput),
        ),
        chart(
            "memory",
            "Peak memory of each card",
            "Most bytes alive at once during measured steps: weights, gradients, optimizer state, activations.",
            memory::draw(&view.memory_peaks),
        ),
        chart(
            "memory_over_time",
            "Memory over time",
            "Bytes alive at each reading; peaks between two readings are in the chart above only.",
            utilisation::draw_memory(&view.memory),
        ),
        Chart {
            notes: losses_notes.unwrap_or_default(),
            ..chart(
                "losses",
                "Do they compute the same thing?",
                "The curves lie on top of each other when the engines do the same work; the tinted steps were judged.",
                losses,
            )
        },
    ]
}

fn chart(name: &'static str, title: &'static str, how_to_read: &'static str, scene: Option<Scene>) -> Chart {
    let outcome = match scene {
        None => Outcome::Empty,
        Some(scene) => match pictures(&scene, title) {
            Ok((svg, png)) => Outcome::Drawn { svg, png },
            Err(error) => Outcome::Failed(error.to_string()),
        },
    };
    Chart { name, title, how_to_read, notes: Vec::new(), outcome }
}

fn pictures(scene: &Scene, alt: &str) -> Result<(String, Vec<u8>)> {
    Ok((render::svg(scene, alt)?, render::png(scene)?))
}
