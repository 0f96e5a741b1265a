//! The page: one file that needs no network.

use super::charts::{self, Chart, DarkTint, Outcome};
use super::view::{Fact, Table, View};
use crate::error::Kind;
use crate::metrics::record::Warning;
use crate::{Error, Result};
use minijinja::Environment;
use minijinja::value::Serde;
use serde::Serialize;

/// What the template sees.
#[derive(Serialize)]
struct Page<'a> {
    title: &'a str,
    headline: &'a str,
    sentences: &'a [String],
    speed: &'a Table,
    balance: &'a Table,
    cards: &'a Table,
    ab: &'a Table,
    monitoring: &'a [String],
    refusals: &'a Table,
    facts: &'a [Fact],
    warnings: &'a [Warning],
    notes: &'a [String],
    charts: Vec<Figure<'a>>,
    tints: Vec<DarkTint>,
}

/// A chart, or why there is none.
#[derive(Serialize)]
struct Figure<'a> {
    name: &'a str,
    title: &'a str,
    how_to_read: &'a str,
    notes: &'a [String],
    svg: Option<&'a str>,
    why_not: Option<&'a str>,
}

/// The page's text. Everything that came from outside is escaped; the charts are our own SVG.
pub(super) fn html(view: &View, charts: &[Chart]) -> Result<String> {
    let page = Page {
        title: &view.title,
        headline: &view.verdict.headline,
        sentences: &view.verdict.sentences,
        speed: &view.speed,
        balance: &view.balance,
        cards: &view.cards,
        ab: &view.ab,
        monitoring: &view.monitoring,
        refusals: &view.refusals,
        facts: &view.facts,
        warnings: &view.warnings,
        notes: &view.notes,
        charts: charts.iter().map(figure).collect(),
        tints: charts::tints_for_dark_pages(),
    };
    let mut environment = Environment::new();
    // The name ends in .html: that is what turns escaping on.
    environment
        .add_template("report.html", include_str!("templates/report.html"))
        .and_then(|()| environment.get_template("report.html"))
        .and_then(|template| template.render(Serde(page)))
        .map_err(|e| Error::new(Kind::Corrupt, format!("cannot fill in the page: {e:#}")))
}

fn figure(chart: &Chart) -> Figure<'_> {
    let (svg, why_not) = match &chart.outcome {
        Outcome::Drawn { svg, .. } => (Some(svg.as_str()), None),
        Outcome::Empty => (None, Some("nothing was recorded that it could show.")),
        Outcome::Failed(why) => (None, Some(why.as_str())),
    };
    Figure {
        name: chart.name,
        title: chart.title,
        how_to_read: chart.how_to_read,
        notes: &chart.notes,
        svg,
        why_not,
    }
}
