//! The files a report consists of.

use crate::fixture::{Fixture, Size};
use dp_vs_ddp::metrics::record::Status;
use dp_vs_ddp::report;
use dp_vs_ddp::units::Nanos;
use std::fs;
use std::path::{Path, PathBuf};

const CHARTS: [&str; 7] =
    ["utilisation", "timeline", "phases", "throughput", "memory", "memory_over_time", "losses"];

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn write(fixture: &Fixture, folder: &Path) -> report::Written {
    fixture.write(folder);
    report::write(folder).unwrap()
}

fn page(folder: &Path) -> String {
    fs::read_to_string(folder.join("report.html")).unwrap()
}

/// Every SVG that was written, parsed: an error here is an SVG that no viewer opens.
fn parse_all_svgs(folder: &Path) -> Vec<String> {
    let texts: Vec<String> = fs::read_dir(folder.join("charts"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|end| end == "svg"))
        .map(|path| fs::read_to_string(path).unwrap())
        .collect();
    for text in &texts {
        let document = roxmltree::Document::parse(text).unwrap();
        assert_eq!(document.root_element().tag_name().name(), "svg");
        assert!(!text.contains("NaN") && !text.contains("inf"), "a number that is none");
    }
    texts
}

/// How many different colours a PNG has.
fn colours(path: &Path) -> usize {
    let decoder = png::Decoder::new(fs::File::open(path).unwrap());
    let mut reader = decoder.read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size()];
    reader.next_frame(&mut pixels).unwrap();
    pixels.chunks(3).collect::<std::collections::BTreeSet<_>>().len()
}

#[test]
fn a_whole_run_becomes_a_whole_report() {
    // `DPVSDDP_KEEP_REPORT=DIR` leaves it there, to be looked at.
    let temporary = folder();
    let kept = std::env::var_os("DPVSDDP_KEEP_REPORT").map(PathBuf::from);
    let run = kept.as_deref().unwrap_or(temporary.path());
    let written = write(&Fixture::new(Size::default()), run);
    assert_eq!(written.notes, Vec::<String>::new());
    assert_eq!(written.page, run.join("report.html"));
    assert_eq!(written.files.len(), CHARTS.len() * 2 + 3);
    for file in &written.files {
        assert!(fs::metadata(file).unwrap().len() > 0, "{}", file.display());
    }
    for name in CHARTS {
        // Ground, text and at least one colour of data, with edges in between.
        assert!(colours(&run.join(format!("charts/{name}.png"))) > 10, "{name}.png is blank");
    }
    assert_eq!(parse_all_svgs(run).len(), CHARTS.len());
    let left_over: Vec<_> = fs::read_dir(run)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with('.'))
        .collect();
    assert_eq!(left_over, Vec::<String>::new());
}

#[test]
fn a_page_loads_nothing() {
    let run = folder();
    write(&Fixture::new(Size::default()), run.path());
    let page = page(run.path());
    for loading in ["src=", "href=", "@import", "url(", "<script", "<link", "<iframe"] {
        assert!(!page.contains(loading), "{loading}");
    }
    assert_eq!(page.matches("<svg").count(), CHARTS.len());
}

#[test]
fn hostile_names_stay_text() {
    let mut fixture = Fixture::new(Size::default());
    let nasty = "<UNKNOWN> & Co \"q\" 'r' </svg><script>alert(1)</script> Zoë 💥 ../\u{7}\n";
    fixture.results.environment.cpu = Some(nasty.into());
    fixture.results.environment.cards[0].name = nasty.into();
    fixture.results.argv.push(nasty.into());
    fixture.results.warnings[0].message = nasty.into();
    // An engine name reaches charts as well.
    let dp = fixture.results.engines["dp"].clone();
    let long = format!("{nasty}{}", "x".repeat(300));
    fixture.results.engines.insert(long, dp);
    let run = folder();
    write(&fixture, run.path());
    let page = page(run.path());
    assert!(!page.contains("<script"));
    assert!(page.contains("&lt;UNKNOWN&gt; &amp; Co"));
    parse_all_svgs(run.path());
    let summary = fs::read_to_string(run.path().join("summary.md")).unwrap();
    assert!(!summary.contains("<script") && summary.contains("&lt;UNKNOWN&gt;"));
    // No name has become a path: the folder holds what it always holds.
    assert_eq!(fs::read_dir(run.path().join("charts")).unwrap().count(), CHARTS.len() * 2);
}

#[test]
fn missing_values_are_dashes_and_gaps() {
    let mut fixture = Fixture::new(Size::default());
    for row in &mut fixture.samples {
        row.memory_used_bytes = None;
        if row.card == 1 {
            row.utilisation_percent = None;
        }
    }
    for record in fixture.results.engines.values_mut() {
        for card in record.rounds.iter_mut().flat_map(|round| &mut round.cards) {
            card.memory_peak_bytes = None;
            card.utilisation_percent_mean = None;
        }
    }
    dp_vs_ddp::metrics::stats::conclude(&mut fixture.results).unwrap();
    let run = folder();
    let written = write(&fixture, run.path());
    assert_eq!(written.notes, Vec::<String>::new());
    let page = page(run.path());
    assert!(page.contains("<td>–</td>"));
    assert_eq!(page.matches("No chart: nothing was recorded").count(), 2, "memory, twice");
    assert!(!run.path().join("charts/memory.svg").exists());
    assert!(run.path().join("charts/utilisation.svg").exists(), "card 0 was read");
    parse_all_svgs(run.path());
}

#[test]
fn a_chart_of_an_earlier_report_does_not_outlive_its_data() {
    let run = folder();
    let mut fixture = Fixture::new(Size::default());
    write(&fixture, run.path());
    assert!(run.path().join("charts/utilisation.png").exists());
    fixture.samples.clear();
    write(&fixture, run.path());
    assert!(!run.path().join("charts/utilisation.png").exists());
}

#[test]
fn one_card_many_cards_and_single_rounds_are_drawn() {
    for (cards, rounds, steps) in [(1, 1, 1), (2, 1, 3), (8, 2, 20), (64, 1, 4)] {
        let size = Size { cards, rounds, steps, warmup: 1, ..Size::default() };
        let run = folder();
        let written = write(&Fixture::new(size), run.path());
        assert_eq!(written.notes, Vec::<String>::new(), "{cards} cards");
        parse_all_svgs(run.path());
    }
}

#[test]
fn engines_that_were_not_run_are_not_missed() {
    for keep in [&["single"][..], &["dp"], &["ddp", "single"], &[]] {
        let mut fixture = Fixture::new(Size { rounds: 1, steps: 5, ..Size::default() });
        fixture.results.engines.retain(|name, _| keep.contains(&name.as_str()));
        fixture.steps.retain(|row| keep.contains(&row.engine.as_str()));
        fixture.samples.retain(|row| keep.contains(&row.engine.as_str()));
        dp_vs_ddp::metrics::stats::conclude(&mut fixture.results).unwrap();
        let run = folder();
        let written = write(&fixture, run.path());
        assert_eq!(written.notes, Vec::<String>::new(), "{keep:?}");
        parse_all_svgs(run.path());
    }
}

#[test]
fn the_trace_has_named_tracks_for_every_card_and_nested_times() {
    let run = folder();
    let fixture = Fixture::new(Size::default());
    write(&fixture, run.path());
    let text = fs::read_to_string(run.path().join("trace.json")).unwrap();
    let trace: serde_json::Value = serde_json::from_str(&text).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let named = |what: &str| -> Vec<&str> {
        events.iter().filter(|e| e["name"] == what).map(|e| e["args"]["name"].as_str().unwrap()).collect()
    };
    assert!(named("process_name").contains(&"DDP, round 5"));
    assert!(named("thread_name").contains(&"card 1 communication"));
    let complete: Vec<_> = events.iter().filter(|e| e["ph"] == "X").collect();
    let last_rounds =
        fixture.steps.iter().filter(|row| row.round == 4).filter(|r| r.phase != "step" || r.card == 0);
    assert_eq!(complete.len(), last_rounds.count());
    // On a track nothing begins before the one before it has ended: viewers drop what overlaps.
    let mut ends = std::collections::BTreeMap::new();
    for event in complete {
        let (ts, dur) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
        let end = ends.entry((event["pid"].as_u64(), event["tid"].as_u64())).or_insert(0.0);
        assert!(ts >= *end - 1e-3, "{event}");
        *end = ts + dur;
    }
    let counters = events.iter().filter(|e| e["ph"] == "C").count();
    assert!(counters > 0);
}

#[test]
fn two_hundred_thousand_readings_take_under_three_seconds_and_a_small_page() {
    let size = Size { cards: 8, rounds: 5, steps: 300, period_ms: 1, ..Size::default() };
    let fixture = Fixture::new(size);
    assert!(fixture.samples.len() > 200_000, "{}", fixture.samples.len());
    let run = folder();
    fixture.write(run.path());
    // CPU time of this thread, which does all of it: a busy machine must not fail the test.
    let start = Nanos::thread_cpu();
    report::write(run.path()).unwrap();
    let took = Nanos::thread_cpu().since(start);
    let page = fs::metadata(run.path().join("report.html")).unwrap().len();
    assert!(page < 3_000_000, "{page} bytes");
    assert!(took.as_seconds() < 3.0, "{took:?}");
}

#[test]
fn missing_foreign_and_cut_files_are_refused_by_name() {
    let run = folder();
    let results = run.path().join("results.json");
    let refused = |why: &str| {
        let error = report::write(run.path()).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
        assert!(error.to_string().contains(run.path().to_str().unwrap()), "{error}");
        assert!(error.advice().is_some(), "{error}");
        assert!(!run.path().join("report.html").exists());
    };
    refused("cannot read");
    let fixture = Fixture::new(Size { rounds: 1, steps: 3, ..Size::default() });
    fixture.write(run.path());
    let whole = fs::read_to_string(&results).unwrap();
    fs::write(&results, &whole[..whole.len() / 2]).unwrap();
    refused("EOF while parsing");
    fs::write(&results, whole.replace("dp-vs-ddp/results/1", "dp-vs-ddp/results/9")).unwrap();
    refused("its schema is `dp-vs-ddp/results/9`, this program reads `dp-vs-ddp/results/1`");
    fs::write(&results, "{}").unwrap();
    refused("no `schema`");
    fs::write(&results, whole.replacen("\"cards\": 1", "\"cards\": \"one\"", 1)).unwrap();
    refused("invalid type");
    fs::write(&results, &whole).unwrap();
    fs::remove_file(run.path().join("samples.csv")).unwrap();
    refused("samples.csv");
}

#[test]
fn a_cut_last_line_is_forgiven_to_a_run_that_was_stopped_only() {
    let run = folder();
    let mut fixture = Fixture::new(Size { rounds: 1, steps: 3, ..Size::default() });
    fixture.write(run.path());
    let path = run.path().join("samples.csv");
    let cut = fs::read_to_string(&path).unwrap().trim_end().rsplit_once(',').unwrap().0.to_owned();
    fs::write(&path, &cut).unwrap();
    let error = report::write(run.path()).unwrap_err().to_string();
    assert!(error.contains("samples.csv"), "{error}");
    fixture.results.status = Status::Interrupted;
    fixture.write(run.path());
    fs::write(&path, &cut).unwrap();
    let written = report::write(run.path()).unwrap();
    assert_eq!(written.notes, ["the last line of samples.csv is cut off and was left out"]);
    assert!(page(run.path()).contains("The run was interrupted"));
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error_that_names_it() {
    let run = folder();
    let fixture = Fixture::new(Size { rounds: 1, steps: 3, ..Size::default() });
    fixture.write(run.path());
    // A file where the folder must go stops root as well, which permissions would not.
    fs::write(run.path().join("charts"), "in the way").unwrap();
    let error = report::write(run.path()).unwrap_err().to_string();
    assert!(error.contains("charts"), "{error}");
}

#[test]
fn rows_of_failed_rounds_and_unknown_phases_do_no_harm() {
    let mut fixture = Fixture::new(Size { rounds: 2, steps: 5, ..Size::default() });
    let record = fixture.results.engines.get_mut("ddp").unwrap();
    record.rounds[1].status = dp_vs_ddp::metrics::record::RoundStatus::Failed;
    record.rounds[1].error = Some("rank 1 was killed by signal 9 (SIGKILL)".into());
    dp_vs_ddp::metrics::stats::conclude(&mut fixture.results).unwrap();
    for row in fixture.steps.iter_mut().filter(|row| row.engine == "dp" && row.phase == "gather") {
        row.phase = "of_the_future".into();
    }
    let run = folder();
    write(&fixture, run.path());
    assert!(
        page(run.path()).contains("1 of 2 rounds of DDP failed: rank 1 was killed by signal 9 (SIGKILL).")
    );
    parse_all_svgs(run.path());
}

#[test]
fn records_that_contradict_themselves_are_refused_by_key() {
    let refused = |change: &dyn Fn(&mut Fixture), words: &str| {
        let mut fixture = Fixture::new(Size::default());
        change(&mut fixture);
        let run = tempfile::tempdir().unwrap();
        fixture.write(run.path());
        let error = report::write(run.path()).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    };
    refused(&|run| run.steps.clear(), "steps.csv has no row of");
    refused(&|run| run.steps.retain(|row| row.engine != "dp"), "no row of dp");
    refused(
        &|run| run.results.engines.get_mut("ddp").unwrap().rounds[1].samples_per_second = Some(-3.0),
        "engines.ddp.rounds.1.samples_per_second is -3",
    );
    refused(
        &|run| {
            let summary = run.results.engines.get_mut("dp").unwrap().summary.as_mut().unwrap();
            summary.samples_per_second.ci95 = Some([9.0, 8.0]);
        },
        "ci95 runs from 9 to 8",
    );
}
