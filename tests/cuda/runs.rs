//! Whole runs on scripted cards: the engines, NCCL or copies between cards, and the files they leave.

use crate::scripted::{Library, Machine, cards, uuid};
use serde_json::Value;
use std::process::Output;
use std::time::{Duration, Instant};

const LOG: &str = "[cuda]\nlog = \"{dir}/cuda.log\"\n[nccl]\nlog = \"{dir}/nccl.log\"\n";

fn machine(count: usize, more: &str) -> Machine {
    Machine::new(&[Library::Cuda, Library::Nccl], &format!("{}{LOG}{more}", cards(count)))
}

fn compare(machine: &Machine, more: &[&str]) -> (Output, Value) {
    let mut command =
        machine.command(&["compare", "digits", "--device", "cuda", "--warmup", "1", "--steps", "3"]);
    if !more.contains(&"--rounds") {
        command.args(["--rounds", "1"]);
    }
    let output = command.args(["--out", "runs", "--run-id", "run"]).args(more).output().unwrap();
    (output, results(machine))
}

fn results(machine: &Machine) -> Value {
    let text = std::fs::read_to_string(machine.path().join("runs/run/results.json")).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or(Value::Null)
}

fn exit(output: &Output) -> i32 {
    output.status.code().unwrap_or(-1)
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The cards that each process opened, by process, in the order in which processes appear.
fn opened(machine: &Machine) -> Vec<Vec<String>> {
    let mut by_process: Vec<(u32, Vec<String>)> = Vec::new();
    for (pid, line) in machine.log("cuda.log") {
        let Some(uuid) = line.strip_prefix("open ") else { continue };
        match by_process.iter_mut().find(|(known, _)| *known == pid) {
            Some((_, cards)) => cards.push(uuid.to_owned()),
            None => by_process.push((pid, vec![uuid.to_owned()])),
        }
    }
    by_process.into_iter().map(|(_, cards)| cards).collect()
}

#[test]
fn engines_agree_on_played_cards_and_the_run_is_labelled_as_played() {
    let machine = machine(2, "");
    let (output, results) = compare(&machine, &[]);
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    assert_eq!(results["comparison"]["losses"]["agree"], true);
    assert_eq!(results["comparison"]["losses"]["checked"], "single, dp, ddp: first 4 steps");
    assert!(
        results["warnings"].as_array().unwrap().iter().any(|w| w["code"] == "scripted_driver"),
        "{results}"
    );
    let cards = results["environment"]["cards"].as_array().unwrap();
    assert_eq!(cards.len(), 2);
    assert_eq!((&cards[1]["kind"], &cards[1]["uuid"]), (&Value::from("cuda"), &Value::from(uuid(1))));
    assert_eq!(results["environment"]["software"]["nccl"], "2.28.9");
    let link = |engine: &str| results["engines"][engine]["rounds"][0]["link"].clone();
    assert_eq!((link("single"), link("dp"), link("ddp")), (Value::Null, "nccl".into(), "nccl".into()));
    assert_eq!(results["engines"]["ddp"]["rounds"][0]["weights_digests"].as_array().unwrap().len(), 2);
    // No NVML on this machine: nothing is made up.
    for card in results["engines"]["ddp"]["summary"]["cards"].as_array().unwrap() {
        assert_eq!((&card["utilisation_percent_mean"], &card["energy_joules"]), (&Value::Null, &Value::Null));
    }
    assert!(results["monitoring"]["unavailable"].as_str().unwrap().contains("NVML"), "{results}");
    assert!(results["warnings"].as_array().unwrap().iter().any(|w| w["code"] == "monitoring_unavailable"));
}

// A worker opens its own card and no other one, the parent none.
#[test]
fn every_worker_opens_just_its_own_cards() {
    let machine = machine(2, "");
    let (output, _) = compare(&machine, &["--engines", "dp,ddp"]);
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    let (zero, one) = (uuid(0), uuid(1));
    let mut opened = opened(&machine);
    opened[1..].sort();
    assert_eq!(opened, [vec![zero.clone(), one.clone()], vec![zero], vec![one]]);
}

// Field cases 082, 085: order and identity through all levels of processes.
#[test]
fn the_order_of_visible_devices_reaches_the_workers() {
    let machine = machine(4, "");
    let arguments =
        ["compare", "digits", "--device", "cuda", "--engines", "ddp", "--rounds", "1", "--warmup", "0"];
    let mut command = machine.command(&arguments);
    command.args(["--steps", "2", "--out", "runs", "--run-id", "run", "--cards", "2"]);
    // The bad entry ends the list: 1 is not visible.
    let output = command.env("CUDA_VISIBLE_DEVICES", "3,2,9,1").output().unwrap();
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    let results = results(&machine);
    let of = |card: usize| results["environment"]["cards"][card]["uuid"].as_str().unwrap().to_owned();
    assert_eq!((of(0), of(1)), (uuid(3), uuid(2)));
    assert_eq!(results["environment"]["visible_devices"], "3,2,9,1");
    let mut opened = opened(&machine);
    opened.sort();
    assert_eq!(opened, [vec![uuid(2)], vec![uuid(3)]]);
    // The rank of each card, as it was computed on.
    let joins: Vec<String> = machine.log("nccl.log").into_iter().map(|(_, line)| line).collect();
    assert_eq!(joins.iter().filter(|line| line.contains("join")).count(), 2, "{joins:?}");
}

// Field case 083.
#[test]
fn devices_are_chosen_by_number_or_name_and_slips_are_refused() {
    let machine = machine(3, "");
    let (output, results) = compare(&machine, &["--engines", "single,ddp", "--devices", "2,0"]);
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    assert_eq!(results["environment"]["cards"][0]["uuid"], uuid(2));
    for (devices, complaint) in [
        ("-1", "`run.devices` is -1"),
        ("0,-1", "`run.devices` is \"0,-1\""),
        ("0,0", "`run.devices` is \"0,0\""),
        ("", "`run.devices` is \"\""),
        ("99", "`run.devices`: \"99\" is no card"),
        ("GPU-0000", "is the beginning of 3 UUIDs"),
        ("GPU-9", "is no card"),
    ] {
        let output =
            machine.command(&["compare", "digits", "--device", "cuda", "--devices", devices]).output();
        let output = output.unwrap();
        assert_eq!(exit(&output), 2, "{devices}: {}", stderr(&output));
        assert!(stderr(&output).contains(complaint), "{devices}: {}", stderr(&output));
        assert!(stderr(&output).contains("hint: "), "{devices}: {}", stderr(&output));
    }
}

// One card twice: what a machine with a single GPU can try. NCCL does not allow it, copies do.
#[test]
fn dp_runs_with_a_card_that_is_named_twice() {
    let machine = machine(1, "");
    let twice = format!("{0},{0}", uuid(0));
    let (output, results) = compare(&machine, &["--engines", "single,dp", "--devices", &twice]);
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    assert_eq!(results["comparison"]["losses"]["agree"], true);
    assert!(machine.log("nccl.log").is_empty());
    assert_eq!(results["engines"]["dp"]["rounds"][0]["link"], "peer");
}

fn copies(machine: &Machine) -> Vec<String> {
    let lines = machine.log("cuda.log").into_iter().map(|(_, line)| line);
    lines.filter(|line| line.starts_with("copy ")).collect()
}

#[test]
fn dp_goes_by_copies_between_cards_where_there_is_no_nccl() {
    let machine = Machine::new(&[Library::Cuda], &format!("{}{LOG}", cards(3)));
    let (output, results) = compare(&machine, &["--engines", "single,dp", "--batch", "48"]);
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    assert_eq!(results["comparison"]["losses"]["agree"], true);
    let copies = copies(&machine);
    // Four steps: weights out to two cards, gradients back from them.
    let between = |from: usize, to: usize| format!("copy {} {} ", uuid(from), uuid(to));
    for (from, to) in [(0, 1), (0, 2), (1, 0), (2, 0)] {
        let there = copies.iter().filter(|line| line.starts_with(&between(from, to))).count();
        assert_eq!(there, 4, "{from} to {to}: {copies:?}");
    }
    assert_eq!(copies.len(), 16);
    // Within a step the weights go out before any gradient comes back.
    for step in copies.chunks(4) {
        assert!(step[..2].iter().all(|line| line.starts_with(&format!("copy {}", uuid(0)))), "{step:?}");
    }
}

#[test]
fn dp_goes_through_nccl_where_it_is_there() {
    let machine = machine(2, "");
    let (output, _) = compare(&machine, &["--engines", "dp"]);
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    assert_eq!(copies(&machine), Vec::<String>::new());
    let lines: Vec<String> = machine.log("nccl.log").into_iter().map(|(_, line)| line).collect();
    let count = |what: &str| lines.iter().filter(|line| line.contains(what)).count();
    assert_eq!((count("ncclBroadcast 0"), count("ncclReduce 1")), (4, 4), "{lines:?}");
}

// The order of DDP's communicator, and which thread does what.
#[test]
fn ddp_makes_uses_and_destroys_its_communicator_in_one_thread() {
    let machine = machine(2, "");
    let (output, _) = compare(&machine, &["--engines", "ddp"]);
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    for rank in 0..2 {
        let mine: Vec<(String, String)> = machine
            .log("nccl.log")
            .into_iter()
            .filter_map(|(_, line)| {
                let (thread, call) = line.split_once(' ')?;
                let words: Vec<&str> = call.split(' ').collect();
                (words[1].split('/').next() == Some(&rank.to_string()))
                    .then(|| (thread.to_owned(), words[0].to_owned()))
            })
            .collect();
        assert!(mine.iter().all(|(thread, _)| *thread == format!("comm{rank}")), "{mine:?}");
        let calls: Vec<&str> = mine.iter().map(|(_, call)| call.as_str()).collect();
        assert_eq!(calls.first(), Some(&"join"));
        assert_eq!(calls[calls.len() - 2..], ["finalize", "destroy"]);
        // The weights of the start, then a bucket for each of the four steps.
        assert_eq!(
            calls[1..calls.len() - 2],
            ["ncclBroadcast", "ncclAllReduce", "ncclAllReduce", "ncclAllReduce", "ncclAllReduce"]
        );
    }
    // A stream of its own, that does not wait for the default one, as urgent as there is.
    let streams: Vec<String> = machine
        .log("cuda.log")
        .into_iter()
        .map(|(_, line)| line)
        .filter(|line| line.starts_with("stream"))
        .collect();
    assert_eq!(streams, ["stream card 0 flags 1 priority -5"; 2]);
}

#[test]
fn device_times_and_issue_times_stand_apart() {
    let machine = machine(2, "");
    let (output, _) = compare(&machine, &["--engines", "dp,ddp"]);
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    let mut steps = csv::Reader::from_path(machine.path().join("runs/run/steps.csv")).unwrap();
    let rows: Vec<csv::StringRecord> = steps.records().collect::<Result<_, _>>().unwrap();
    let phases = rows.iter().filter(|row| &row[5] != "step");
    for row in phases.clone() {
        assert!(row[9].parse::<u64>().is_ok(), "{row:?}");
    }
    let results = results(&machine);
    let round = &results["engines"]["ddp"]["rounds"][0];
    assert!(round["issue_ms"]["forward"].as_f64().unwrap() > 0.0, "{round}");
    let of = |engine: &str, card: &str, phase: &str| {
        phases.clone().filter(|row| &row[0] == engine && &row[3] == card && &row[5] == phase).count()
    };
    assert_eq!((of("ddp", "0", "all_reduce"), of("ddp", "1", "all_reduce")), (4, 4));
    for phase in ["forward", "backward"] {
        assert_eq!((of("dp", "0", phase), of("dp", "1", phase), of("ddp", "1", phase)), (4, 4, 4), "{phase}");
    }
    // The last step of a card's own thread is there, too.
    assert!(
        rows.iter().any(|row| &row[0] == "dp" && &row[3] == "1" && &row[4] == "3" && &row[5] == "backward")
    );
}

#[test]
fn a_card_that_runs_out_of_memory_is_a_finding_and_the_others_go_on() {
    let full =
        format!("[[cuda.fail]]\ncall = \"cuStreamCreateWithPriority\"\ncode = 2\ncard = \"{}\"\n", uuid(1));
    let machine = Machine::new(&[Library::Cuda, Library::Nccl], &format!("{}{full}", cards(2)));
    let (output, results) = compare(&machine, &["--engines", "single,dp,ddp", "--rounds", "2"]);
    // Two engines have not one round to show: nothing was compared with them.
    assert_eq!(exit(&output), 2, "{}", stderr(&output));
    for engine in ["dp", "ddp"] {
        let rounds = results["engines"][engine]["rounds"].as_array().unwrap();
        assert_eq!(rounds.len(), 2);
        let error = rounds[0]["error"].as_str().unwrap();
        assert!(error.starts_with("out of memory on card 1 at batch 64 (32 a card): "), "{engine}: {error}");
        assert_eq!(rounds[1]["error"], rounds[0]["error"]);
    }
    let rounds = results["engines"]["single"]["rounds"].as_array().unwrap();
    assert!(rounds.iter().all(|round| round["status"] == "ok"), "{rounds:?}");
    assert!(results["warnings"].as_array().unwrap().iter().any(|warning| warning["code"] == "cell_failed"));
}

// The first rank that fails is the one reported, in NCCL's words; the other does not hang.
#[test]
fn an_error_of_nccl_ends_the_run_and_names_the_rank() {
    let wrong = "[[nccl.wrong]]\nrank = 1\ncollective = 3\ncode = 6\n";
    let machine = machine(2, wrong);
    let start = Instant::now();
    let (output, results) = compare(&machine, &["--engines", "single,ddp"]);
    assert_eq!(exit(&output), 2, "{}", stderr(&output));
    assert!(start.elapsed() < Duration::from_secs(60));
    let text = stderr(&output);
    assert!(
        text.contains("rank 1: remote process") || text.contains("rank 1: a collective failed"),
        "{text}"
    );
    assert!(text.contains("NCCL error 6"), "{text}");
    // What was measured before is there.
    assert_eq!(
        (&results["status"], &results["engines"]["single"]["rounds"][0]["status"]),
        (&"failed".into(), &"ok".into())
    );
    let log: Vec<String> = machine.log("nccl.log").into_iter().map(|(_, line)| line).collect();
    assert!(
        log.iter().any(|line| line.contains("abort 1")) && !log.iter().any(|line| line.contains("destroy")),
        "{log:?}"
    );
}

#[test]
fn a_kernel_that_hangs_ends_at_the_deadline_and_names_the_collective() {
    let machine = machine(2, "[[nccl.wrong]]\nrank = 1\ncollective = 3\n");
    let start = Instant::now();
    let (output, _) = compare(&machine, &["--engines", "ddp", "--set", "run.deadline_s=2"]);
    assert_eq!(exit(&output), 2, "{}", stderr(&output));
    assert!(start.elapsed() < Duration::from_secs(60));
    let text = stderr(&output);
    assert!(text.contains("collective 3: all_reduce of") && text.contains("has not ended after"), "{text}");
}

#[test]
fn the_first_epochs_of_a_training_run_on_cards_and_can_be_gone_on_with() {
    let machine = machine(2, "");
    let train = |more: &[&str]| {
        let arguments = ["train", "digits", "--device", "cuda", "--engine", "ddp", "--epochs", "1"];
        let output = machine.command(&arguments).args(more).output().unwrap();
        assert_eq!(exit(&output), 0, "{}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    train(&["--save", "weights.safetensors"]);
    let text = train(&["--load", "weights.safetensors"]);
    assert!(text.contains('%'), "{text}");
}

// Ranks that something else started, as torchrun does.
#[test]
fn ranks_started_by_hand_compute_on_the_card_of_their_number() {
    let machine = machine(2, "");
    let store = format!("file:{}", machine.path().join("store").display());
    let rank = |rank: &str| {
        let mut command = machine.command(&["worker", "digits", "--device", "cuda", "--set", "run.steps=3"]);
        command.env("RANK", rank).env("WORLD_SIZE", "2").env("DPVSDDP_STORE", &store);
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        command.spawn().unwrap()
    };
    let children = [rank("0"), rank("1")];
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert_eq!(exit(&output), 0, "{}", stderr(&output));
        assert!(String::from_utf8_lossy(&output.stdout).contains("\"message\":\"done\""));
    }
    let mut opened = opened(&machine);
    opened.sort();
    assert_eq!(opened, [vec![uuid(0)], vec![uuid(1)]]);
}

// Field case 017: a pair whose copies never end.
#[test]
fn a_copy_that_hangs_ends_at_the_deadline_and_names_the_pair() {
    for (hang, pair) in [("[0, 1]", "cuda:0 to cuda:1"), ("[1, 0]", "cuda:1 to cuda:0")] {
        let scenario = format!("{}[cuda]\nhang = [{hang}]\n", cards(2));
        let machine = Machine::new(&[Library::Cuda], &scenario);
        let start = Instant::now();
        let (output, _) = compare(&machine, &["--engines", "dp", "--set", "run.deadline_s=2"]);
        assert_eq!(exit(&output), 2, "{}", stderr(&output));
        assert!(start.elapsed() < Duration::from_secs(60));
        let text = stderr(&output);
        assert!(text.contains(&format!("the copy from {pair} does not end")), "{text}");
        assert!(text.contains("peer access"), "{text}");
    }
}

// Field cases 013, 085: the first card of the list is card 0, whatever its number.
#[test]
fn dp_works_on_any_list_of_cards() {
    let machine = machine(3, "");
    for devices in ["1,0", "2,0", "1"] {
        let id = devices.replace(',', "-");
        let arguments =
            ["compare", "digits", "--device", "cuda", "--rounds", "1", "--warmup", "0", "--steps", "2"];
        let mut command = machine.command(&arguments);
        command.args(["--engines", "single,dp", "--out", "runs", "--run-id", &id, "--devices", devices]);
        let output = command.output().unwrap();
        assert_eq!(exit(&output), 0, "{devices}: {}", stderr(&output));
        let text =
            std::fs::read_to_string(machine.path().join("runs").join(&id).join("results.json")).unwrap();
        let results: Value = serde_json::from_str(&text).unwrap();
        let uuids: Vec<_> =
            results["environment"]["cards"].as_array().unwrap().iter().map(|c| c["uuid"].clone()).collect();
        let wanted: Vec<Value> = devices.split(',').map(|n| uuid(n.parse().unwrap()).into()).collect();
        assert_eq!(uuids, wanted);
        assert_ne!(results["comparison"]["losses"]["agree"], false);
    }
}

// Field cases 046, 167: each task sees one card of its own, or by mistake the same one.
#[test]
fn ranks_that_see_one_card_each_use_it_and_the_same_card_twice_is_refused() {
    let machine = machine(6, "");
    let store = |name: &str| format!("file:{}", machine.path().join(name).display());
    let group = |visible: [&str; 2], store: &str| {
        let children: Vec<_> = (0..2)
            .map(|rank: usize| {
                let mut command =
                    machine.command(&["worker", "digits", "--device", "cuda", "--set", "run.steps=2"]);
                command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2").env("DPVSDDP_STORE", store);
                command.env("CUDA_VISIBLE_DEVICES", visible[rank]);
                command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
                command.spawn().unwrap()
            })
            .collect();
        children.into_iter().map(|child| child.wait_with_output().unwrap()).collect::<Vec<_>>()
    };
    for output in group(["5", "3"], &store("apart")) {
        assert_eq!(exit(&output), 0, "{} {}", stderr(&output), String::from_utf8_lossy(&output.stdout));
    }
    let mut opened = opened(&machine);
    opened.sort();
    assert_eq!(opened, [vec![uuid(3)], vec![uuid(5)]]);
    for output in group(["5", "5"], &store("together")) {
        assert_eq!(exit(&output), 2);
        let told = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(told.contains("ranks 0 and 1 are on one card, which NCCL cannot do"), "{told}");
        assert!(told.contains(&format!("rank 1: {}", uuid(5))) && told.contains("LOCAL_RANK"), "{told}");
    }
}

// Field case 043: building the communicator fails on one rank.
#[test]
fn a_failure_while_ranks_connect_names_the_stage_the_rank_and_the_free_memory() {
    let fail = "[[nccl.fail]]\ncall = \"ncclCommInitRankConfig\"\ncode = 1\n";
    let machine = machine(2, fail);
    let (output, _) = compare(&machine, &["--engines", "ddp"]);
    assert_eq!(exit(&output), 2);
    let text = stderr(&output);
    assert!(text.contains("NCCL cannot connect the ranks (40.0 GiB free): ncclCommInitRankConfig failed: unhandled CUDA error"), "{text}");
    assert!(text.contains("rank 0") || text.contains("rank 1"), "{text}");
}

#[test]
fn a_driver_that_cannot_start_is_refused_or_gone_without() {
    let machine = machine(2, "");
    machine.play(&format!("{}[cuda]\nfail = [{{ call = \"cuInit\", code = 803 }}]\n", cards(2)));
    let output = machine.command(&["compare", "digits", "--device", "cuda"]).output().unwrap();
    assert_eq!(exit(&output), 2);
    let text = stderr(&output);
    assert!(
        text.contains("no CUDA card can be used here: cuInit failed: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        "{text}"
    );
    assert!(text.contains("reboot") && text.contains("--device cpu"), "{text}");
    // What was not asked for by name is gone without, aloud.
    let arguments =
        ["compare", "digits", "--engines", "single", "--rounds", "1", "--steps", "2", "--out", "runs"];
    let output = machine.command(&arguments).args(["--run-id", "run"]).output().unwrap();
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    let results = results(&machine);
    assert_eq!(results["environment"]["cards"][0]["kind"], "virtual");
    assert_eq!(results["warnings"][0]["code"], "no_cuda_card");
}

#[test]
fn no_card_and_no_libraries_are_no_panic() {
    let machine = Machine::new(&[], "");
    let output = machine.command(&["compare", "digits", "--device", "cuda"]).output().unwrap();
    assert_eq!(exit(&output), 2);
    assert!(stderr(&output).contains("there is no CUDA driver (libcuda.so.1) here"), "{}", stderr(&output));
    let machine = Machine::new(&[Library::Cuda], "[cuda]\n");
    let output = machine.command(&["compare", "digits", "--device", "cuda"]).output().unwrap();
    assert_eq!(exit(&output), 2);
    assert!(stderr(&output).contains("CUDA_ERROR_NO_DEVICE"), "{}", stderr(&output));
    // DDP without NCCL says what is missing.
    let machine = Machine::new(&[Library::Cuda], &cards(2));
    let (output, _) = compare(&machine, &["--engines", "ddp"]);
    assert_eq!(exit(&output), 2);
    let text = stderr(&output);
    assert!(text.contains("there is no NCCL (libnccl.so) here") && text.contains("./setup --full"), "{text}");
    assert!(!text.contains("panicked"), "{text}");
}

#[test]
fn options_and_precisions_agree_on_played_cards() {
    let machine = machine(2, "");
    let tried = [
        "--ab",
        "ddp.comm_hook=bf16",
        "--ab",
        "ddp.comm_hook=powersgd",
        "--ab",
        "ddp.find_unused_parameters=true",
        "--ab",
        "ddp.overlap=false",
        "--ab",
        "ddp.accumulate=2",
        "--ab",
        "ddp.static_graph=true",
    ];
    let (output, results) = compare(&machine, &[&["--engines", "ddp"][..], &tried].concat());
    assert_eq!(exit(&output), 0, "{}", stderr(&output));
    let ab = results["comparison"]["ab"].as_object().unwrap();
    assert_eq!(ab.len(), 6);
    for (row, result) in ab {
        let difference = result["loss_difference"].as_f64().unwrap();
        assert!(
            result["tolerance"].is_null() || difference <= result["tolerance"].as_f64().unwrap(),
            "{row}: {result}"
        );
    }
}
