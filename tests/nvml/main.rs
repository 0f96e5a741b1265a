//! What NVML answers, and what becomes of it: field cases of monitoring, each through the real sampler, the real
//! program and the files it leaves. Only the library that answers is scripted.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic, in its helpers too")]

#[path = "../scripted/mod.rs"]
mod scripted;

use scripted::{Library, Machine, uuid};
use serde_json::Value;
use std::process::Output;
use std::time::Instant;

/// One card, and what NVML says of it.
fn card(index: usize, table: &str, nvml: &str) -> String {
    format!(
        "[[card]]\nuuid = \"{}\"\npci_bus_id = \"0000:1{index}:00.0\"\n{table}\n[card.nvml]\n{nvml}\n",
        uuid(index)
    )
}

/// A data-centre card that answers everything.
const HEALTHY: &str = "utilisation = [80, 90, 95]\nmemory_utilisation = 40\nmemory_used = 4000000000\n\
    power_mw = 400000\nenergy_mj = \"rate 400000\"\ntemperature = 60\nsm_clock = 1900\nmemory_clock = 2600\n\
    throttle = 0\npcie_tx = 10\npcie_rx = 20\nnvlink_tx = \"rate 5000\"\nnvlink_rx = \"rate 6000\"\n\
    architecture = 9\nsm_activity = 70\nsm_occupancy = 35";

fn machine(scenario: &str) -> Machine {
    Machine::new(&[Library::Cuda, Library::Nvml, Library::Nccl], scenario)
}

/// Trains long enough for some readings.
fn run(machine: &Machine, more: &[&str]) -> Output {
    let arguments = [
        "compare",
        "digits",
        "--device",
        "cuda",
        "--engines",
        "single",
        "--rounds",
        "1",
        "--warmup",
        "10",
        "--set",
        "sample.period_ms=20",
        "--out",
        "runs",
        "--run-id",
        "run",
    ];
    let mut command = machine.command(&arguments);
    if !more.contains(&"--steps") {
        command.args(["--steps", "1500"]);
    }
    command.args(more).output().unwrap()
}

fn exit(output: &Output) -> i32 {
    output.status.code().unwrap_or(-1)
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs and reads what was left.
fn measured(scenario: &str) -> (Machine, Value) {
    let machine = machine(scenario);
    let output = run(&machine, &[]);
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    assert_no_marks(&machine);
    let results = results(&machine);
    (machine, results)
}

fn results(machine: &Machine) -> Value {
    serde_json::from_str(&file(machine, "results.json")).unwrap()
}

fn file(machine: &Machine, name: &str) -> String {
    std::fs::read_to_string(machine.path().join("runs/run").join(name)).unwrap()
}

/// One column of `samples.csv`.
fn column(machine: &Machine, name: &str) -> Vec<String> {
    let mut rows = csv::Reader::from_path(machine.path().join("runs/run/samples.csv")).unwrap();
    let place = rows.headers().unwrap().iter().position(|header| header == name).unwrap();
    rows.records().map(|row| row.unwrap()[place].to_owned()).collect()
}

/// Numbers that stand for "not available", and differences that wrapped, are in no file.
fn assert_no_marks(machine: &Machine) {
    for name in ["results.json", "samples.csv", "steps.csv", "trace.json", "report.html"] {
        let text = file(machine, name);
        for mark in ["1844674407", "4294967295", "NaN", "\"inf"] {
            // The page's own script and style have none either.
            assert!(!text.contains(mark), "{name} has {mark}");
        }
    }
}

fn field<'a>(results: &'a Value, name: &str) -> &'a Value {
    &results["monitoring"]["cards"][0]["fields"][name]
}

fn warning<'a>(results: &'a Value, code: &str) -> Option<&'a str> {
    let warnings = results["warnings"].as_array().unwrap();
    warnings
        .iter()
        .find(|warning| warning["code"] == code)
        .map(|warning| warning["message"].as_str().unwrap())
}

fn single(results: &Value) -> &Value {
    &results["engines"]["single"]["rounds"][0]["cards"][0]
}

#[test]
fn a_healthy_card_fills_every_column() {
    let (machine, results) =
        measured(&card(0, "processes = [{ pid = -1, memory = 3000000000, sm = 77 }]", HEALTHY));
    let header = file(&machine, "samples.csv");
    for name in header.lines().next().unwrap().split(',').skip(5) {
        let values = column(&machine, name);
        let told = values.iter().filter(|value| !value.is_empty()).count();
        // Asking for these takes 20 ms, so it is done every twentieth time.
        let enough =
            if name.starts_with("pcie") { told > 0 || values.len() < 40 } else { told * 2 > values.len() };
        assert!(enough, "{name}: {values:?}");
    }
    let card = single(&results);
    // 400 W: energy is that times the time of the measured steps.
    let round = &results["engines"]["single"]["rounds"][0];
    assert!(card["energy_joules"].as_f64().unwrap() > 0.0);
    assert_eq!(card["energy_source"], "counter");
    let each = round["joules_per_sample"].as_f64().unwrap();
    let power = each * round["samples_per_second"].as_f64().unwrap();
    assert!((power - 400.0).abs() < 40.0, "{power} W");
    assert!((80.0..=95.0).contains(&card["utilisation_percent_mean"].as_f64().unwrap()), "{card}");
    assert_eq!(card["memory_used_peak_bytes"], 4_000_000_000_u64);
    assert!(card["memory_peak_bytes"].as_u64().unwrap() < 1 << 30);
    assert_eq!(results["monitoring"]["cards"][0]["power"], "average");
    let page = file(&machine, "report.html");
    assert!(page.contains("counts as busy") && page.contains("J&#x2f;sample"));
    assert_eq!(warning(&results, "foreign_processes"), None);
}

// Field cases 071, 073, 104: each field for itself; a reason once, not once a reading.
#[test]
fn what_is_not_supported_is_missing_and_the_rest_goes_on() {
    let (machine, results) = measured(&card(0, "", "memory_used = 1000\ntemperature = 50"));
    assert!(column(&machine, "utilisation_percent").iter().all(String::is_empty));
    assert!(column(&machine, "temperature_c").iter().all(|value| value == "50"));
    for name in ["utilisation_percent", "power_mw", "energy_mj", "sm_clock_mhz", "throttle"] {
        let account = field(&results, name);
        assert_eq!(
            (&account["samples"], &account["first_error"]),
            (&Value::from(0), &Value::from("not supported")),
            "{name}"
        );
        assert!(account["errors"].as_u64().unwrap() > 3, "{name}");
    }
    let card = single(&results);
    assert_eq!((&card["utilisation_percent_mean"], &card["energy_joules"]), (&Value::Null, &Value::Null));
    assert_eq!(results["engines"]["single"]["summary"]["joules_per_sample"], Value::Null);
    // Said once, in the page.
    let page = file(&machine, "report.html");
    assert_eq!(page.matches("<td>power_mw</td>").count(), 1);
}

// Field case 068: a slice has no utilisation.
#[test]
fn a_slice_has_its_own_memory_and_no_utilisation() {
    let mig = "MIG-00000000-aaaa-bbbb-cccc-0123456789ab";
    let scenario = format!(
        "[[card]]\nuuid = \"{}\"\nname = \"NVIDIA A100 MIG 1g.5gb\"\npci_bus_id = \"0000:10:00.0\"\nmemory_bytes = 5000000000\n\
         [[card.mig]]\nuuid = \"{mig}\"\n[card.mig.nvml]\nmemory_total = 5000000000\nmemory_used = 1000000000\n",
        uuid(0)
    );
    let (machine, results) = measured(&scenario);
    assert_eq!(results["environment"]["cards"][0]["uuid"], mig);
    assert_eq!(single(&results)["utilisation_percent_mean"], Value::Null);
    assert!(column(&machine, "memory_used_bytes").iter().all(|value| value == "1000000000"));
    assert!(column(&machine, "memory_total_bytes").iter().all(|value| value == "5000000000"));
}

// Field case 070: the parent refuses, its slice answers.
#[test]
fn a_card_that_may_not_be_looked_at_is_looked_at_through_its_slice() {
    let scenario = format!(
        "{}[[card.mig]]\nuuid = \"MIG-1\"\n[card.mig.nvml]\nmemory_total = 5000\nmemory_used = 1000\n",
        card(0, "", "memory_used = \"error 4\"\nutilisation = \"error 4\"\npower_mw = \"error 4\"")
    );
    let (machine, results) = measured(&scenario);
    assert!(column(&machine, "memory_used_bytes").iter().all(|value| value == "1000"));
    assert_eq!(field(&results, "utilisation_percent")["first_error"], "no permission");
}

// Field case 074: no memory of its own, told in two ways.
#[test]
fn unified_memory_has_no_figure() {
    for nvml in ["memory_used = \"error 3\"", "memory_total = 0\nmemory_used = 0"] {
        let (machine, results) = measured(&card(0, "", &format!("{nvml}\nutilisation = 50")));
        assert!(column(&machine, "memory_used_bytes").iter().all(String::is_empty), "{nvml}");
        assert_eq!(results["monitoring"]["cards"][0]["unified_memory"], true, "{nvml}");
        assert!(file(&machine, "report.html").contains("has no memory of its own"), "{nvml}");
    }
}

// Field case 076: one status, two numbers, of which one is kept.
#[test]
fn a_memory_controller_that_is_always_idle_is_flagged() {
    let (_, results) = measured(&card(0, "integrated = true", "utilisation = 95\nmemory_used = 1"));
    assert!(warning(&results, "unbacked_field").unwrap().contains("not kept, not idle"));
}

// Field case 077: no library at all.
#[test]
fn without_nvml_the_run_goes_on_unless_it_must_not() {
    let machine = Machine::new(&[Library::Cuda, Library::Nccl], &scripted::cards(1));
    let output = run(&machine, &["--steps", "20"]);
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    let said = stderr(&output).matches("monitoring is unavailable").count();
    assert_eq!(said, 1, "{}", stderr(&output));
    assert!(file(&machine, "report.html").contains("Monitoring was unavailable"));
    for device in ["cuda", "cpu"] {
        let arguments =
            ["compare", "digits", "--device", device, "--set", "sample.require_nvml=true", "--out", "none"];
        let output = machine.command(&arguments).output().unwrap();
        assert_eq!(exit(&output), 2);
        assert!(stderr(&output).contains("NVML cannot be used: it is not here"), "{}", stderr(&output));
        // Before anything was written.
        assert!(!machine.path().join("none").exists());
    }
}

// Field case 079: used above the total makes the rest wrap.
#[test]
fn more_than_all_memory_in_use_is_no_figure() {
    let (machine, results) =
        measured(&card(0, "memory_bytes = 80000000000", "memory_used = 81000000000\nutilisation = 5"));
    assert!(column(&machine, "memory_used_bytes").iter().all(String::is_empty));
    assert!(field(&results, "memory_used_bytes")["rejected"].as_u64().unwrap() > 3);
}

// Field case 088: the driver was updated under the machine.
#[test]
fn a_version_mismatch_is_found_at_once_and_is_not_a_regression() {
    let machine = machine(&format!("{}[nvml]\ninit = \"error 18\"\n", card(0, "", HEALTHY)));
    let start = Instant::now();
    let output = run(&machine, &["--set", "sample.require_nvml=true"]);
    assert_eq!(exit(&output), 2);
    assert!(start.elapsed().as_secs() < 30);
    assert!(stderr(&output).contains("versions do not match"), "{}", stderr(&output));
    let output = machine.command(&["doctor"]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("reboot"));
}

// Field case 089: the plain name is tried only where the other cannot be loaded.
#[test]
fn the_librarys_other_name_is_found_and_a_refusal_is_told_as_one() {
    let machine = machine(&card(0, "", HEALTHY));
    let lib = machine.path().join("lib");
    std::fs::rename(lib.join("libnvidia-ml.so.1"), lib.join("libnvidia-ml.so")).unwrap();
    let output = run(&machine, &[]);
    assert_eq!(exit(&output), 0);
    assert!(column(&machine, "temperature_c").iter().any(|value| value == "60"));

    let machine = self::machine(&format!("{}[nvml]\ninit = \"error 4\"\n", card(0, "", HEALTHY)));
    let lib = machine.path().join("lib");
    std::fs::copy(lib.join("libnvidia-ml.so.1"), lib.join("libnvidia-ml.so")).unwrap();
    let output = run(&machine, &["--steps", "20"]);
    assert_eq!(exit(&output), 0);
    let results = results(&machine);
    assert_eq!(results["monitoring"]["unavailable"], "NVML cannot be used: no permission");
}

// Field case 091: values that the wrapper does not know.
#[test]
fn unknown_values_keep_their_number_and_cost_nothing() {
    let nvml = "utilisation = 50\nmemory_used = 1\narchitecture = 4711\nthrottle = \"4398046511108\"\npower_mw = 5\nbrand = 99";
    let (machine, results) = measured(&card(0, "", nvml));
    assert!(column(&machine, "throttle").iter().all(|value| value == "sw_power_cap|unknown(0x40000000000)"));
    assert_eq!(results["monitoring"]["cards"][0]["power"], Value::Null);
}

// Field case 092: the card goes away in mid-run.
#[test]
fn a_lost_card_ends_its_series_with_a_mark_and_no_flood() {
    let lost = "[nvml.lost]\ncard = 0\nfrom = 300\ncode = 999\n";
    let (machine, results) = measured(&format!("{}{lost}", card(0, "", HEALTHY)));
    let temperatures = column(&machine, "temperature_c");
    let last = temperatures.iter().rposition(|value| !value.is_empty()).unwrap();
    assert!(last > 3 && last + 3 < temperatures.len(), "{temperatures:?}");
    assert!(temperatures[..last].iter().all(|value| value == "60"));
    assert!(results["monitoring"]["cards"][0]["lost_since_ns"].as_u64().unwrap() > 0);
    assert!(warning(&results, "card_lost").unwrap().contains("its readings end there"));
    assert!(file(&machine, "report.html").contains("stopped answering in mid-run"));
    // Asked once more, not for ever.
    assert!(
        field(&results, "temperature_c")["errors"].as_u64().unwrap() <= 3,
        "{}",
        field(&results, "temperature_c")
    );
    // A container's card comes back when NVML is initialised again.
    let back = "[nvml.lost]\ncard = 0\nfrom = 300\ncode = 999\ncomes_back = true\n";
    let (machine, results) = measured(&format!("{}{back}", card(0, "", HEALTHY)));
    assert_eq!(results["monitoring"]["cards"][0]["lost_since_ns"], Value::Null);
    assert_eq!(column(&machine, "temperature_c").last().unwrap(), "60");
}

// Field case 095: what the driver averages, and rounds that are shorter.
#[test]
fn the_drivers_buffer_is_used_where_it_is_there_and_short_rounds_are_marked() {
    let nvml = "utilisation = 0\nsamples = [0, 100, 0, 100]\nmemory_used = 1";
    let (machine, results) = measured(&card(0, "", nvml));
    assert_eq!(results["monitoring"]["cards"][0]["utilisation"], "buffered");
    assert!(column(&machine, "utilisation_percent").iter().any(|value| value == "100.0"));
    assert!(file(&machine, "report.html").contains("what the driver sampled by itself"));
    let machine = self::machine(&card(0, "", HEALTHY));
    let output = run(&machine, &["--steps", "20"]);
    assert_eq!(exit(&output), 0);
    let results = self::results(&machine);
    assert_eq!(single(&results)["utilisation_percent_mean"], Value::Null);
    assert!(warning(&results, "too_short_for_utilisation").unwrap().contains("average over up to a second"));
}

// Field case 097: rubbish in the readings of processes.
#[test]
fn impossible_shares_are_rejected_and_counted() {
    for rubbish in ["4294967295", "1500"] {
        let table = format!("processes = [{{ pid = -1, memory = 1000, sm = \"{rubbish}\" }}]");
        let (machine, results) = measured(&card(0, &table, HEALTHY));
        let shares = column(&machine, "process_utilisation_percent");
        assert!(shares.iter().all(|value| value.is_empty() || value == "0.0"), "{shares:?}");
        assert!(
            field(&results, "process_utilisation_percent")["rejected"].as_u64().unwrap() > 3,
            "{rubbish}"
        );
    }
    let (machine, results) =
        measured(&card(0, "", "utilisation = [50, 4294967295, 150, 60]\nmemory_used = 1"));
    let values = column(&machine, "utilisation_percent");
    assert!(values.iter().all(|value| ["", "50.0", "60.0"].contains(&value.as_str())), "{values:?}");
    assert_eq!(field(&results, "utilisation_percent")["rejected"], 2);
}

// Field case 098: the same call is an average here and a moment there.
#[test]
fn what_a_power_reading_is_depends_on_the_chip() {
    for (architecture, capability, kind) in [
        (6, "[7, 5]", "instant"),
        (7, "[8, 0]", "instant"),
        (7, "[8, 6]", "average"),
        (9, "[9, 0]", "average"),
    ] {
        let nvml =
            format!("utilisation = 50\nmemory_used = 1\npower_mw = 100000\narchitecture = {architecture}");
        let (_, results) = measured(&card(0, &format!("compute_capability = {capability}"), &nvml));
        assert_eq!(results["monitoring"]["cards"][0]["power"], kind, "{architecture}");
        // Without a counter, energy comes from power, and says so.
        assert_eq!(single(&results)["energy_source"], "power");
        assert!(single(&results)["energy_joules"].as_f64().unwrap() > 0.0);
    }
}

// Field case 100: a list of another layout.
#[test]
fn a_process_list_of_another_layout_is_rejected() {
    let table = "processes = [{ pid = -1, memory = 1000 }, { pid = 0, memory = 7 }, { pid = 9, memory = 900000000000000 }]";
    let (machine, results) = measured(&card(0, table, HEALTHY));
    assert!(column(&machine, "process_memory_bytes").iter().all(String::is_empty));
    assert!(column(&machine, "foreign_memory_bytes").iter().all(String::is_empty));
    assert!(field(&results, "process_memory_bytes")["rejected"].as_u64().unwrap() > 3);
}

#[test]
fn other_processes_on_the_card_are_reported() {
    let table = "processes = [{ pid = -1, memory = 1000 }, { pid = 424242, memory = 7000000000 }]";
    let (machine, results) = measured(&card(0, table, HEALTHY));
    assert!(warning(&results, "foreign_processes").unwrap().contains("6.5 GiB of card 0"));
    assert!(column(&machine, "foreign_memory_bytes").iter().any(|value| value == "7000000000"));
}

// Field cases 101, 106: zeros and errors are told apart, by data and not by the chip's name.
#[test]
fn zeros_are_suspicious_while_the_card_works_and_errors_are_no_zeros() {
    let (_, results) = measured(&card(0, "", "utilisation = 0\nmemory_used = 1"));
    assert!(warning(&results, "suspicious_zero").unwrap().contains("0 % busy in every reading"));
    assert_eq!(single(&results)["utilisation_percent_mean"], 0.0);
    let account = field(&results, "utilisation_percent");
    assert_eq!(account["samples"], account["zeros"]);

    let (_, results) = measured(&card(0, "", "utilisation = \"error 999\"\nmemory_used = 1"));
    assert_eq!(warning(&results, "suspicious_zero"), None);
    assert_eq!(single(&results)["utilisation_percent_mean"], Value::Null);
    assert_eq!(field(&results, "utilisation_percent")["first_error"], "unknown error");

    let (_, results) = measured(&card(0, "", "utilisation = [0, 40, 60]\nmemory_used = 1"));
    assert_eq!(warning(&results, "suspicious_zero"), None);
}

// Field case 103: how busy memory was is not how full it is.
#[test]
fn the_memory_controller_is_not_occupancy() {
    let (machine, _) = measured(&card(
        0,
        "memory_bytes = 80000000000",
        "utilisation = 90\nmemory_utilisation = 3\nmemory_used = 70000000000",
    ));
    assert!(column(&machine, "memory_controller_percent").iter().all(|value| value == "3.0"));
    assert!(column(&machine, "memory_used_bytes").iter().all(|value| value == "70000000000"));
}

// Field case 094: cards that wait count as busy.
#[test]
fn busy_cards_that_wait_are_told_from_those_that_compute() {
    let scenario = format!(
        "{}{}",
        card(0, "", HEALTHY),
        card(1, "", "utilisation = 100\npower_mw = 60000\nmemory_used = 1")
    );
    let machine = machine(&scenario);
    let output = run(&machine, &["--engines", "ddp", "--steps", "800"]);
    // `--engines` was given twice.
    assert_eq!(exit(&output), 2);
    let arguments = [
        "compare",
        "digits",
        "--device",
        "cuda",
        "--engines",
        "ddp",
        "--rounds",
        "1",
        "--steps",
        "600",
        "--set",
        "sample.period_ms=20",
        "--out",
        "runs",
        "--run-id",
        "run",
        "--set",
        "inject.phase=forward",
        "--set",
        "inject.percent=1000",
        "--set",
        "inject.rank=0",
    ];
    let output = machine.command(&arguments).output().unwrap();
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    let results = results(&machine);
    let text = warning(&results, "busy_but_waiting").unwrap();
    assert!(text.contains("ddp, card 1: NVML said 100 % busy, but only"), "{text}");
}

#[test]
fn marks_for_not_available_are_in_no_file() {
    let nvml = "utilisation = \"max\"\nmemory_used = \"max\"\npower_mw = \"max\"\nenergy_mj = \"max\"\ntemperature = \"max\"\n\
        sm_clock = \"max\"\nmemory_clock = \"max\"\nthrottle = \"max\"\npcie_tx = \"max\"\npcie_rx = \"max\"\n\
        nvlink_tx = \"max\"\nnvlink_rx = \"max\"\nsm_activity = \"max\"\nsm_occupancy = \"max\"";
    let (machine, results) =
        measured(&card(0, "processes = [{ pid = -1, memory = \"max\", sm = \"max\" }]", nvml));
    for name in
        ["utilisation_percent", "memory_used_bytes", "power_mw", "energy_mj", "throttle", "nvlink_rx_kb_s"]
    {
        assert!(column(&machine, name).iter().all(String::is_empty), "{name}");
    }
    assert_eq!(single(&results)["energy_joules"], Value::Null);
}

#[test]
fn a_counter_that_is_reset_in_mid_run_gives_no_energy() {
    let nvml = "utilisation = 50\nmemory_used = 1\nenergy_mj = [5000, 6000, 7000, 100, 200, 300]";
    let (machine, results) = measured(&card(0, "", nvml));
    let energy: Vec<u64> =
        column(&machine, "energy_mj").iter().filter_map(|value| value.parse().ok()).collect();
    assert!(energy.windows(2).all(|pair| pair[0] <= pair[1]), "{energy:?}");
    assert!(
        single(&results)["energy_joules"].is_null()
            || single(&results)["energy_joules"].as_f64().unwrap() >= 0.0
    );
    assert!(field(&results, "energy_mj")["rejected"].as_u64().unwrap() > 0);
}
