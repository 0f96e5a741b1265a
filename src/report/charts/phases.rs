//! Where the time of an average step goes on every card.

use super::axis::Axis;
use super::layout::{Key, MARGIN, Panel, SMALL, WIDTH, horizontal_axis, legend};
use super::palette::{self, Ink};
use super::scene::{Align, Label, Scene};
use crate::metrics::phase::Phase;
use crate::report::text;
use crate::report::view::{CardPhases, PhaseBars};

const BAR: f64 = 24.0;
const BESIDE: f64 = 7.0;
const GROUP_GAP: f64 = 18.0;
const LEFT: f64 = 176.0;

/// `None` without a measured step.
pub(super) fn draw(view: &PhaseBars) -> Option<Scene> {
    let longest =
        view.engines.iter().map(|e| e.cards.iter().map(total).fold(e.step_ms, f64::max)).reduce(f64::max)?;
    let entries = entries(view);
    let mut scene = Scene::new(WIDTH, 0.0);
    let top = MARGIN + legend(&mut scene, MARGIN, MARGIN - 6.0, &entries) + 8.0;
    let height: f64 = view.engines.iter().flat_map(|e| &e.cards).map(row_height).sum::<f64>()
        + GROUP_GAP * (view.engines.len() as f64 - 1.0);
    let panel = Panel { left: LEFT, top, right: WIDTH - MARGIN - 8.0, bottom: top + height + 4.0 };
    scene.height = panel.bottom + 44.0;
    let x = Axis::from_zero(longest, panel.across());
    horizontal_axis(&mut scene, &panel, &x, "milliseconds of an average step");
    let mut y = top + 4.0;
    for engine in &view.engines {
        let name = engine.engine.name();
        scene.text(
            Label::new(MARGIN, y + BAR / 2.0, text::engine(name))
                .size(13.0)
                .bold()
                .ink(palette::engine(name)),
        );
        let first = y;
        for card in &engine.cards {
            let label = Label::new(LEFT - 8.0, y + BAR / 2.0, format!("card {}", card.card));
            scene.text(label.size(SMALL).ink(Ink::MUTED).align(Align::Right));
            let mut sum = 0.0;
            for (phase, ms) in &card.own {
                let (from, to) = (x.at(sum)?, x.at(sum + ms)?);
                bar(&mut scene, *phase, from, y, to - from, BAR);
                sum += ms;
            }
            if let Some(beside) = card.beside_ms.and_then(|ms| x.at(ms)) {
                bar(&mut scene, Phase::AllReduce, LEFT, y + BAR + 1.0, beside - LEFT, BESIDE);
            }
            y += row_height(card);
        }
        if let Some(end) = x.at(engine.step_ms) {
            scene.line((end, first - 3.0), (end, y - 3.0), Ink::TEXT, 1.5);
        }
        y += GROUP_GAP;
    }
    Some(scene)
}

/// A phase's piece. A hair of ground stays between pieces, so that neighbours of like colour are two.
pub(super) fn bar(scene: &mut Scene, phase: Phase, x: f64, y: f64, width: f64, height: f64) {
    let width = if width > 3.0 { width - 0.5 } else { width };
    if phase == Phase::Wait {
        scene.hatched(x, y, width, height);
    } else {
        scene.rect(x, y, width, height, palette::phase(phase));
    }
}

/// Legend of these phases in the order of a step.
pub(super) fn phase_keys(used: impl Fn(Phase) -> bool) -> Vec<(Key, String)> {
    let shown = Phase::ALL.into_iter().filter(|phase| used(*phase));
    shown
        .map(|phase| match phase {
            Phase::Wait => (Key::Hatched, "wait".to_owned()),
            Phase::AllReduce => {
                (Key::Filled(palette::phase(phase)), "all-reduce (its own thread)".to_owned())
            }
            _ => (Key::Filled(palette::phase(phase)), phase.name().to_owned()),
        })
        .collect()
}

fn entries(view: &PhaseBars) -> Vec<(Key, String)> {
    let cards = || view.engines.iter().flat_map(|engine| &engine.cards);
    let mut entries = phase_keys(|phase| match phase {
        Phase::AllReduce => cards().any(|card| card.beside_ms.is_some()),
        _ => cards().any(|card| card.own.iter().any(|(p, ms)| *p == phase && *ms > 0.0)),
    });
    entries.push((Key::Line(Ink::TEXT, 1.5), "whole step".to_owned()));
    entries
}

fn total(card: &CardPhases) -> f64 {
    card.own.iter().map(|(_, ms)| ms).sum()
}

fn row_height(card: &CardPhases) -> f64 {
    BAR + 6.0 + if card.beside_ms.is_some() { BESIDE + 1.0 } else { 0.0 }
}
