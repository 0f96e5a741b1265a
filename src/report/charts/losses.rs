//! Loss curves on top of each other: the same work gives one curve.

use super::axis::Axis;
use super::layout::{Key, MARGIN, Panel, SMALL, WIDTH, horizontal_axis, legend, vertical_axis};
use super::palette::{self, Ink};
use super::scene::{Align, Label, Scene};
use crate::report::text;
use crate::report::view::{Losses, Point, downsample};

/// From this ratio of largest to smallest on, a linear axis hides the small ones.
const LOGARITHMIC_FROM: f64 = 100.0;

/// The chart and what was left out of it; `None` without a loss that can be drawn.
pub(super) fn draw(view: &Losses) -> Option<(Scene, Vec<String>)> {
    let values = || view.engines.iter().flat_map(|(_, losses)| losses.iter().copied());
    let finite = || values().filter(|v| v.is_finite());
    let steps = view.engines.iter().map(|(_, losses)| losses.len()).max()?;
    let (smallest, largest) = (finite().filter(|v| *v > 0.0).reduce(f64::min), finite().reduce(f64::max)?);
    let mut scene = Scene::new(WIDTH, 356.0);
    // Widest first, so that every curve can be seen under those that follow.
    let width = |place: usize| (7.0 - 2.5 * place as f64).max(1.5);
    let entries: Vec<(Key, String)> = view
        .engines
        .iter()
        .enumerate()
        .map(|(place, (name, _))| (Key::Line(palette::engine(name), width(place)), text::engine(name)))
        .collect();
    let top = MARGIN + legend(&mut scene, MARGIN, MARGIN - 6.0, &entries) + 30.0;
    let panel = Panel { left: 60.0, top, right: WIDTH - MARGIN - 8.0, bottom: 312.0 };
    let wide_range = smallest.is_some_and(|smallest| largest / smallest >= LOGARITHMIC_FROM);
    let y = if wide_range { Axis::logarithmic(finite(), panel.upwards()) } else { None }
        .unwrap_or_else(|| Axis::over(finite(), panel.upwards()));
    let last = (steps.max(2) - 1) as f64;
    let x = Axis::exactly_from_zero(last, panel.across());

    let judged = x.at((view.judged.min(steps).max(1) - 1) as f64)?;
    scene.rect(panel.left, panel.top, judged - panel.left, panel.height(), Ink::LANE);
    vertical_axis(&mut scene, &panel, &y, "");
    horizontal_axis(&mut scene, &panel, &x, "step of the first round, warm-up included");
    let judged_text = format!("judged: first {} steps", view.judged.min(steps));
    scene.text(Label::new(panel.left + 4.0, panel.top - 9.0, judged_text).size(SMALL).ink(Ink::MUTED));
    scene.line((judged, panel.top), (judged, panel.bottom), Ink::MUTED, 1.0);
    let name = Label::new(panel.left - 6.0, panel.top - 17.0, "loss");
    scene.text(name.size(SMALL).ink(Ink::MUTED).align(Align::Right));

    let mut left_out = 0;
    for (place, (name, losses)) in view.engines.iter().enumerate() {
        let points: Vec<Point> =
            losses.iter().enumerate().map(|(step, loss)| (step as f64, y.at(*loss).map(|_| *loss))).collect();
        left_out += points.iter().filter(|point| point.1.is_none()).count();
        for run in downsample(&points, last, panel.width() as usize).split(|point| point.1.is_none()) {
            let line = run.iter().filter_map(|(step, loss)| Some((x.at(*step)?, y.at((*loss)?)?)));
            scene.path(line.collect(), palette::engine(name), width(place));
        }
    }
    let note = (left_out > 0).then(|| {
        format!(
            "{} left out: not a number, or zero or below on a logarithmic axis",
            text::count(left_out, "loss value")
        )
    });
    Some((scene, note.into_iter().collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(losses: &[f64]) -> Losses {
        Losses { engines: vec![("dp".to_owned(), losses.to_vec())], judged: 20, warmup: 0 }
    }

    #[test]
    fn bad_points_on_a_logarithmic_axis_are_left_out_and_counted() {
        let (_, notes) = draw(&view(&[0.0, -1.0, 1e-12, 1e9, f64::NAN])).unwrap();
        assert_eq!(notes, ["3 loss values left out: not a number, or zero or below on a logarithmic axis"]);
    }

    #[test]
    fn all_zeros_are_drawn_on_a_linear_axis_and_nothing_is_no_chart() {
        assert_eq!(draw(&view(&[0.0, 0.0])).unwrap().1, Vec::<String>::new());
        assert!(draw(&view(&[f64::NAN])).is_none());
        assert!(draw(&view(&[])).is_none());
    }
}
