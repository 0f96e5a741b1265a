//! One measured step as it happened, thread by thread, engines under each other on the same axis.

use super::axis::Axis;
use super::layout::{MARGIN, Panel, SMALL, WIDTH, horizontal_axis, legend};
use super::palette::{self, Ink};
use super::phases::{bar, phase_keys};
use super::scene::{Align, Label, Scene};
use crate::report::text;
use crate::report::view::{Thread, Timeline};

const LANE: f64 = 26.0;
const HEADING: f64 = 26.0;
const GROUP_GAP: f64 = 14.0;
const LEFT: f64 = 130.0;

/// `None` without a measured step.
pub(super) fn draw(view: &[Timeline]) -> Option<Scene> {
    let longest = view.iter().map(|timeline| timeline.length_ms).reduce(f64::max)?;
    let used =
        |phase| view.iter().flat_map(|t| &t.lanes).flat_map(|l| &l.spans).any(|piece| piece.phase == phase);
    let mut scene = Scene::new(WIDTH, 0.0);
    let top = MARGIN + legend(&mut scene, MARGIN, MARGIN - 6.0, &phase_keys(used)) + 6.0;
    let height: f64 = view.iter().map(|t| HEADING + t.lanes.len() as f64 * LANE).sum::<f64>()
        + GROUP_GAP * (view.len() as f64 - 1.0);
    let panel = Panel { left: LEFT, top, right: WIDTH - MARGIN - 8.0, bottom: top + height };
    scene.height = panel.bottom + 44.0;
    let x = Axis::exactly_from_zero(longest, panel.across());
    horizontal_axis(&mut scene, &panel, &x, "milliseconds since the step began");
    let mut y = top;
    for timeline in view {
        let name = timeline.engine.name();
        let heading = Label::new(MARGIN, y + HEADING / 2.0, text::engine(name));
        scene.text(heading.size(13.0).bold().ink(palette::engine(name)));
        let which = format!(
            "step {} of round {}: {} ms",
            timeline.step,
            timeline.round + 1,
            text::number(timeline.length_ms)
        );
        scene.text(Label::new(LEFT, y + HEADING / 2.0, which).size(SMALL).ink(Ink::MUTED));
        y += HEADING;
        for lane in &timeline.lanes {
            let label = match lane.thread {
                Thread::Own => format!("card {}", lane.card),
                Thread::Communication => "communication".to_owned(),
            };
            let label = Label::new(LEFT - 8.0, y + LANE / 2.0 - 2.0, label);
            scene.text(label.size(SMALL).ink(Ink::MUTED).align(Align::Right));
            scene.rect(LEFT, y, panel.width(), LANE - 4.0, Ink::LANE);
            for piece in &lane.spans {
                if let (Some(from), Some(to)) = (x.at(piece.start), x.at(piece.start + piece.length)) {
                    bar(&mut scene, piece.phase, from, y, to - from, LANE - 4.0);
                }
            }
            y += LANE;
        }
        y += GROUP_GAP;
    }
    Some(scene)
}
